"""The metadata cache: listings and lookups, after writes and between concurrent requests."""

import asyncio
import contextlib
import threading
from functools import partial

import fsspec
import pytest
from google.auth.exceptions import RefreshError
from google.oauth2.credentials import Credentials

from cachedfs.cache.index.metadata_records import hash_of
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import AccessDenied, OriginUnavailable
from tests.support import until


def test_a_listing_does_not_make_older_generations_absent(cloud):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs={"version_aware": True})
    cloud.put("d/k", b"old")
    first = fs.info(cloud.path("d/k"))["generation"]
    cloud.put("d/k", b"new")
    assert fs.ls(cloud.path("d"), detail=False) == [cloud.path("d/k")]
    for form in ("#", "?generation="):
        with pytest.raises(FileNotFoundError):  # the bucket keeps no older generation
            fs.cat_file(cloud.path(f"d/k{form}{first}"))
        assert "media" in cloud.asked()
        assert fs.cat_file(cloud.path(f"d/k{form}{fs.info(cloud.path('d/k'))['generation']}")) == b"new"


def test_an_object_that_is_a_folder_too_is_read_also_while_another_process_looks_it_up(origin, monkeypatch):
    data = origin.put("b/a", b"data")
    origin.put("b/a/x", b"")
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    fs.ls("b/a")
    assert fs._objects.fresh("b/a").info.kind == "directory"
    locks, lock = fs._objects.engine.cache.locks, hash_of(f"lookups at {fs._objects.identity}", "b/a")
    assert locks.take(lock)

    async def poll(check, within_s):
        assert not check()
        locks.release(lock)
        return check()

    monkeypatch.setattr("cachedfs.core.lookups.poll", poll)
    assert fs.cat_file("b/a") == data


def test_a_name_like_a_generation_is_an_object_without_version_aware(cloud, fs):
    aware = fsspec.filesystem("cachedfs", target_protocol="gs", gs={"version_aware": True})
    cloud.put("d/k", b"a generation")
    named = f"d/k#{fs.info(cloud.path('d/k'))['generation']}"
    cloud.put(named, b"of this name")
    assert aware.cat_file(cloud.path(named)) == b"a generation"
    assert fs.cat_file(cloud.path(named)) == b"of this name"
    assert aware.cat_file(cloud.path(named)) == b"a generation"


@pytest.fixture
def held_lookup(origin, monkeypatch):
    """Delay the answer of the first lookup until this event is set."""
    lookup, may_answer = origin.lookup, threading.Event()

    async def late(path, parent=None):
        is_first = not origin.log
        try:
            return await lookup(path, parent)
        finally:
            if is_first:
                await asyncio.to_thread(may_answer.wait, 120)

    monkeypatch.setattr(origin, "lookup", late)
    yield may_answer
    may_answer.set()


def test_a_lookup_from_before_a_write_does_not_answer_one_after_it(origin, held_lookup):
    fs, first = fsspec.filesystem("cachedfs", target_protocol="gs"), []
    asking_thread = threading.Thread(target=lambda: first.append(fs.exists("b/late")))
    asking_thread.start()
    until(lambda: origin.log)
    fs.pipe_file("b/late", b"here")
    assert fs.exists("b/late")
    assert asking_thread.is_alive(), "the second answer did not wait for the first one"
    held_lookup.set()
    asking_thread.join()
    assert fs.exists("b/late")
    assert fs.cat_file("b/late") == b"here"


@pytest.mark.parametrize("is_done", [False, True])
def test_a_read_during_a_write_hides_none_of_its_bytes_afterwards(origin, monkeypatch, is_done):
    fs, call, seen = fsspec.filesystem("cachedfs", target_protocol="gs"), origin.call, []
    origin.put("b/k", b"old")
    assert fs.cat_file("b/k") == b"old"

    async def watched(*args, **options):
        if is_done:
            await call(*args, **options)
        seen.append(await fs._cat_file("b/k"))
        if not is_done:
            await call(*args, **options)

    monkeypatch.setattr(origin, "call", watched)
    fs.pipe_file("b/k", b"new")
    assert seen == [b"new" if is_done else b"old"]
    assert fs.cat_file("b/k") == b"new"


@pytest.mark.parametrize(
    "ask",
    [lambda fs: fs.info("b/k")["size"], lambda fs: len(fs.cat_file("b/k"))],
    ids=["info", "cat_file"],
)
def test_with_max_age_zero_a_call_waits_for_no_earlier_one(origin, held_lookup, monkeypatch, ask):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0)
    origin.put("b/k", b"old")
    assert fs.cat_file("b/k") == b"old"
    fs._objects.engine.drain(120)
    origin.log.clear()
    monkeypatch.setattr("cachedfs.core.lookups.poll", None)  # for another process neither
    asking_thread = threading.Thread(target=ask, args=(fs,))
    asking_thread.start()
    until(lambda: origin.log)
    origin.put("b/k", b"newer")
    assert ask(fs) == 5
    assert asking_thread.is_alive()
    held_lookup.set()
    asking_thread.join()


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_read_and_a_lookup_of_one_object_share_a_request(origin, reads_first):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    origin.put("b/x", b"data")

    async def at_once():
        calls = {"read": fs._cat_file, "info": fs._info}
        names = sorted(calls, reverse=reads_first)
        return dict(zip(names, await asyncio.gather(*(calls[name]("b/x") for name in names)), strict=True))

    found = asyncio.run(at_once())
    assert (found["read"], found["info"]["size"]) == (b"data", 4)
    assert [kind for kind, *_ in origin.log] == (["read"] if reads_first else ["lookup", "read"])


def test_an_explicit_folder_marker_is_a_folder_before_and_after_find(cloud, fs):
    cloud.put("d/", b"")
    cloud.put("e/", b"")
    cloud.put("e/x", b"1")
    for _ in range(2):
        assert fs.isdir(cloud.path("d"))
        assert fs.find(cloud.bucket) == [cloud.path("e/x")]
        assert fs.ls(cloud.path("d")) == []
        assert [(d, f) for _, d, f in fs.walk(cloud.bucket)] == [(["d", "e"], []), ([], []), ([], ["x"])]


@pytest.mark.parametrize("listed", ["ls", "find"])
def test_an_object_whose_name_ends_in_a_slash_is_read_by_the_name_that_listings_give(cloud, tmp_path, listed):
    objects = {cloud.path(name): cloud.put(name, name.encode()) for name in ("d/", "d/e/", "d/x")}
    fs, folder, name = fsspec.filesystem("cgs"), cloud.path("d"), cloud.path("d/")
    list(getattr(fs, listed)(folder))
    assert fs.find(folder) == fs.find(name) == sorted(objects)
    assert fs.ls(folder, detail=False) == [name, cloud.path("d/e"), cloud.path("d/x")]
    cloud.asked()
    assert (fs.info(name)["type"], fs.info(name)["size"], fs.info(folder)["type"]) == ("file", 2, "directory")
    assert fs.cat(fs.find(folder)) == objects
    assert fs.cat(name) == fs.cat_file(name, 0, 5) == fs.open(name).read() == b"d/"
    assert cloud.asked() == ["media"] * 3
    fs.get(folder, str(tmp_path / "tree"), recursive=True)  # a local folder has no bytes
    assert sorted(path.name for path in (tmp_path / "tree").rglob("*")) == ["e", "x"]
    fs.copy(folder, cloud.path("copy"), recursive=True)
    assert fs.find(cloud.path("copy")) == [cloud.path(f"copy{each}") for each in ("/", "/e/", "/x")]
    fs.rm([name])
    assert fs.find(folder) == [cloud.path("d/e/"), cloud.path("d/x")]
    assert fs.info(name)["type"] == "directory"
    fs.rm(folder, recursive=True)
    assert not fs.exists(folder)


LONE = {  # what is done with an object that nothing is known of -> its result, and its requests
    "cat_file": (lambda fs, name: fs.cat_file(name), b"lone", ["media"]),
    "cat of several": (lambda fs, name: [*fs.cat([name]).values()], [b"lone"], ["media"]),
    "open": (lambda fs, name: fs.open(name).read(), b"lone", ["media"]),
    "info": (lambda fs, name: fs.info(name)["name"] == name, True, ["list"]),
    "modified": (lambda fs, name: fs.modified(name).tzinfo is not None, True, ["list"]),
    "rm": (lambda fs, name: fs.rm(name), None, ["delete"]),
    "cp_file": (lambda fs, name: fs.cp_file(name, f"{name}copy"), None, ["copy"]),
    "mv": (lambda fs, name: fs.mv(name, f"{name}copy/"), None, ["copy", "delete", "list"]),
}


@pytest.mark.parametrize("done", LONE)
def test_an_object_whose_name_ends_in_a_slash_is_used_by_its_name_before_anything_is_listed(cloud, fs, done):
    act, expected, requests = LONE[done]
    cloud.put("run/lone/", b"lone")
    assert act(fs, cloud.path("run/lone/")) == expected
    assert cloud.asked() == requests
    remaining = fs.origin_fs.find(cloud.path("run"))
    is_copied, is_removed = done in ("cp_file", "mv"), done in ("rm", "mv")
    assert (cloud.path("run/lone/") in remaining) is not is_removed
    copy = cloud.path("run/lone/copy") + ("" if done == "cp_file" else "/")
    assert (copy in remaining) is is_copied


@pytest.mark.parametrize(
    "write",
    [
        lambda fs, name: fs.pipe_file(name, b""),
        lambda fs, name: fs.cp_file(name[:-2] + "empty", name),
        lambda fs, name: fs.open(name, "wb").close(),
    ],
    ids=["pipe_file", "cp_file", "open"],
)
def test_a_name_that_ends_in_a_slash_is_written_as_it_is_and_hides_no_folder(cloud, fs, write):
    cloud.put("empty", b"")
    write(fs, cloud.path("d/"))
    fs.touch(cloud.path("d/x"))
    assert fs.origin_fs.find(cloud.path("d")) == [cloud.path("d/"), cloud.path("d/x")]
    fs.invalidate_cache()
    for name in ("d", "d/"):
        assert (fs.info(cloud.path(name))["name"], fs.isdir(cloud.path(name))) == (cloud.path("d"), True)
    with pytest.raises(IsADirectoryError):
        fs.cat_file(cloud.path("d/"))


def test_a_slash_at_the_end_of_a_folder_or_of_another_object_changes_no_result(cloud, fs, tmp_path):
    for name in ("d/x", "d/y"):
        cloud.put(name, b"1")
    slashed, expected = cloud.path("d/"), [cloud.path("d/x"), cloud.path("d/y")]
    assert fs.info(slashed)["name"] == fs.info(cloud.path("d"))["name"] == cloud.path("d")
    assert cloud.asked() == ["list"]
    assert not fs.isfile(slashed)
    assert cloud.asked() == []
    assert fs.find(slashed) == fs.ls(slashed, detail=False) == expected
    assert [*fs.walk(slashed)] == [(cloud.path("d"), [], ["x", "y"])]
    assert fs.glob(slashed) == fs.glob(cloud.path("*/")) == [cloud.path("d")]
    assert fs.get_mapper(slashed)["x"] == fsspec.filesystem("dir", path=slashed, fs=fs).cat_file("y") == b"1"
    assert cloud.asked() == ["list", "list", "media", "media"]
    fs.get(slashed, str(tmp_path / "d"), recursive=True)
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["x", "y"]
    fs.put(str(tmp_path / "d/x"), cloud.path("e/"))
    fs.copy(cloud.path("d/x"), cloud.path("f/"))
    fs.copy(slashed, cloud.path("g/"), recursive=True)
    assert cloud.asked() == ["copy"] * 4 + ["upload"]  # also of the folder itself, which may be an object
    fs.copy(slashed, cloud.path("none/"))
    assert fs.find(cloud.bucket) == [*expected, *(cloud.path(name) for name in ("e/x", "f/x", "g/x", "g/y"))]
    fs.rm(slashed, recursive=True)
    assert not fs.exists(slashed)
    assert fs.info(cloud.path("e/x/"))["name"] == cloud.path("e/x")
    with pytest.raises(FileNotFoundError, match=cloud.path("e/x/")):
        fs.cat_file(cloud.path("e/x/"))


@pytest.mark.parametrize("listed", ["shallow", "deep"])
@pytest.mark.parametrize(
    "keys",
    [("t/dup", "t/dup/in", "t/e/x"), ("t/e//x", "t/e/y"), ("t//x", "t/y"), ("t/z", "t/z/in", "t/z/in/er")],
)
def test_find_and_glob_return_everything_below_a_folder(cloud, fs, keys, listed):
    for key in keys:
        cloud.put(key, key.encode())
    if listed == "shallow":
        for folder in ("", "t/", "t/e/", "t/dup/", "t/z/"):
            with contextlib.suppress(FileNotFoundError):
                fs.ls(cloud.path(folder).rstrip("/"))
    for _ in range(2):
        assert fs.find(cloud.path("t")) == sorted(map(cloud.path, keys))
        assert fs.du(cloud.path("t")) == sum(map(len, keys))
        assert set(map(cloud.path, keys)) <= set(fs.glob(cloud.path("t/**")))
        assert fs.find(cloud.bucket) == sorted(map(cloud.path, keys))
        list(fs.walk(cloud.bucket))  # must end


class Refused(Credentials):
    """A token that the service refuses and that cannot be renewed."""

    def refresh(self, request):
        raise RefreshError("no")


def test_callers_with_other_rights_do_not_share_a_lookup(cloud):
    """Two filesystems of one origin read at the same time: each gets the answer that it would get alone."""
    data = cloud.put("a", b"data")
    make = partial(fsspec.filesystem, "cachedfs", target_protocol="gs")

    async def at_once(*several):
        answers = (each._cat_file(cloud.path("a")) for each in several)
        return await asyncio.gather(*answers, return_exceptions=True)

    refused, got = asyncio.run(at_once(make(offline=True), make()))
    assert isinstance(refused, OriginUnavailable)
    assert got == data
    cloud.server.require_token("good")
    cloud.put("a", data)
    tokens = [Refused("bad"), Credentials("good")]
    options = {"endpoint_url": cloud.server.endpoint_url}
    both = [make(max_age=0.001, gs={**options, "token": token}) for token in tokens]
    try:
        refused, got = asyncio.run(at_once(*both))
    finally:
        cloud.server.require_no_token()
    assert isinstance(refused, AccessDenied)
    assert got == data


def test_a_lookup_that_fails_leaves_no_request_running(origin, monkeypatch):
    fs, ended = fsspec.filesystem("cachedfs", target_protocol="gs"), []
    objects, lookups, is_asked = fs._objects, fs._reader.lookups, asyncio.Event()
    objects.learn("b/d", ObjectInfo("b/d", "directory"), asked_at=0.0, counter=objects.counter("b/d"))

    async def lookup(path, parent):
        is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(path)

    async def fail(folder):
        await is_asked.wait()
        raise OriginUnavailable("away")

    monkeypatch.setattr(origin, "by_parent", True)
    monkeypatch.setattr(origin, "lookup", lookup)
    monkeypatch.setattr(lookups, "info", fail)
    with pytest.raises(OriginUnavailable, match="away"):
        objects.engine.run(lookups._folder("b/d/x"))
    assert ended == ["b/d/x"]
