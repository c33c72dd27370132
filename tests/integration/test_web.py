"""Web servers through the cache: what an unreliable server changes for `fs`."""

import itertools
import logging
import pathlib
import traceback

import fsspec
import pytest
from fsspec.core import url_to_fs

from tests.support import MiB, WebServer, forget, make_old, noise
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


@pytest.mark.parametrize("query", ["", "?sig=1"])
def test_one_object_is_read_and_found_by_every_method(fs, world, tmp_path, query):
    data = noise(3000)
    url = world.put("rows.csv", data) + query
    for _ in range(2):
        assert fs.cat(url) == data
        assert fs.cat([url], recursive=True) == {url: data}
        assert fs.expand_path(url) == fs.expand_path(url, recursive=True) == fs.find(url) == [url]
        assert fs.glob(url) == [url]
        assert fs.du(url) == len(data)
        fs.get([url], [str(tmp_path / "got")])
        assert (tmp_path / "got").read_bytes() == data
    with pytest.raises(FileNotFoundError):
        fs.cat([url, f"{world.root}/nothing{query}"])
    forget()
    fs = fsspec.filesystem("cachedfs", target_protocol="http")
    assert fs.prefetch([url]).wait().errors == 0
    assert fs.cached_extent(url) == [(0, len(data))]


def no_size_and_no_version(answer):
    answer.whole()
    answer.chunked()
    answer.headers = {}


def test_an_object_without_a_size_is_read_by_every_method(fs, world, tmp_path):
    data = noise(3000)
    url, world.change = world.put("rows.csv", data), no_size_and_no_version
    with pytest.warns(UserWarning, match="does not say when an object has changed"):
        assert fs.cat_file(url) == data
    for _ in range(2):
        with fs.open(url) as file:
            assert (file.read(5), file.read()) == (data[:5], data[5:])
        fs.get_file(url, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == data
        assert (fs.head(url, 7), fs.tail(url, 7)) == (data[:7], data[-7:])
        with fs.local_path(url) as local:
            assert pathlib.Path(local).read_bytes() == data
        assert fs.info(url)["type"] == "file"
        fs.invalidate_cache()


_etags = itertools.count()


def edges(answer):
    answer.headers["ETag"] = f'"edge{next(_etags)}"'


def edges_without_time(answer):
    edges(answer)
    answer.headers.pop("Last-Modified", None)


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


SIGNED = noise(3000)
SECRETS = ["PASSWORD", "SIGNATURE", "CREDENTIAL"]


@pytest.fixture
def secret_url(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "k").write_bytes(SIGNED)
    make_old(tmp_path / "www" / "k")
    with WebServer(tmp_path / "www") as server:
        yield (
            f"{server.url.replace('//', '//user:PASSWORD@')}/k"
            "?X-Goog-Credential=CREDENTIAL&Expires=5&X-Goog-Signature=SIGNATURE"
        )


def test_a_signed_url_with_a_password_is_nowhere_but_in_memory(secret_url, own_cache, caplog):
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    for n_requests in (1, 0):  # the second process finds all of it in the cache
        fs, path = url_to_fs(f"cachedfs::{secret_url}")
        assert path == secret_url
        assert fs.cat_file(path) == SIGNED
        fs.pin(path)
        with fs.open(path) as file:
            said += [repr(file), repr(fs), str(fs.stats())]
        assert fs.stats().requests == n_requests
        said.append(fs.to_json(include_password=False))
        with pytest.raises(FileNotFoundError) as caught:
            fs.cat_file(path.replace("/k?", "/none?"))
        said += traceback.format_exception(caught.value)
        assert fs.verify(path)[0].ok
        forget()
    fs, path = url_to_fs(f"cachedfs::{secret_url}")
    fs.unpin(path)
    assert fs.evict(path) > 0
    said += [record.getMessage() for record in caplog.records if record.name.startswith("cachedfs")]
    files = [each for each in own_cache.rglob("*") if each.is_file()]
    said += [f"{each.name}: {each.read_bytes().decode('latin-1')}" for each in files]
    assert len(files) > 3
    assert [text[:300] for text in said if any(secret in text for secret in SECRETS)] == []
