"""Web servers through the cache: what an unreliable server changes for `fs`."""

import itertools

import fsspec
import pytest

from tests.support import MiB, forget, noise
from tests.web_world import WebWorld


@pytest.fixture
def world(own_cache):
    world = WebWorld()
    yield world
    forget()  # closes the connections
    world.close()


@pytest.fixture
def fs(world):
    return fsspec.filesystem("cachedfs", target_protocol="http", request_size=MiB)


_etags = itertools.count()


def edges(answer):
    answer.headers["ETag"] = f'"edge{next(_etags)}"'


def edges_without_time(answer):
    edges(answer)
    answer.headers.pop("Last-Modified", None)


def test_an_object_is_read_in_one_request_and_then_from_the_cache(fs, world):
    url = world.put("x", noise(MiB))
    assert fs.cat_file(url) == world.get("x")
    assert fs.info(url)["size"] == MiB
    with fs.open(url) as file:
        assert file.read(9) == world.get("x")[:9]
    forget()
    assert fsspec.filesystem("cachedfs", target_protocol="http").cat_file(url, 5, 9) == world.get("x")[5:9]
    assert len(world.log) == 1


@pytest.mark.filterwarnings("ignore:.*its ETag differs from answer to answer")
@pytest.mark.parametrize("change", [edges, edges_without_time])
def test_an_object_of_several_servers_is_read(fs, world, change):
    data = noise(5 * MiB)
    url, world.change = world.put("x", data), change
    for _ in range(2):
        assert fs.cat_file(url) == data
        assert fs.cat_file(url, 3 * MiB, 3 * MiB + 9) == data[3 * MiB : 3 * MiB + 9]
    if change is edges:
        with fs.open(url) as file:
            file.seek(4 * MiB)
            assert file.read(9) == data[4 * MiB : 4 * MiB + 9]
            file.seek(0)
            assert file.read() == data
    fs.invalidate_cache()
    assert fs.cat_file(url) == data
    assert fs.cached_extent(url) == []


def test_a_page_of_links_does_not_say_what_is_missing(fs, world):
    folder = world.put("folder/linked", b"1").rpartition("/")[0]
    unlinked = world.put("folder/unlinked", b"2")
    world.change = lambda answer: setattr(answer, "body", answer.body.replace(b'href="unlinked"', b""))
    del world.objects["/root/folder/unlinked"]
    assert fs.ls(folder, detail=False) == [f"{folder}/linked"]
    world.put("folder/unlinked", b"2")
    assert fs.cat_file(unlinked) == b"2"
    assert fs.exists(unlinked)
    assert fs.cat_file(f"{folder}/linked") == b"1"
    assert fs.cached_extent(f"{folder}/linked") == [(0, 1)]
