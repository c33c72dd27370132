"""The filesystem API: names, writes, metadata, instances, options, max_age, local copies, ranges."""

import asyncio
import contextlib
import errno
import functools
import gc
import json
import logging
import math
import os
import pathlib
import pickle
import re
import threading
import time
from functools import partial

import fsspec
import google.oauth2.credentials
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from cachedfs.common.atomic_files import filled
from cachedfs.common.clock import clock as metadata_clock
from cachedfs.errors import IsAFolder, ObjectNotFound, OriginUnavailable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault, GCSServer
from tests.support import KiB, MiB, forget, noise

FORMS = [
    ("cachedfs", ""), ("cachedfs", "cachedfs://"), ("cgs", "gcs://"), ("cgs", "cachedfs::gs://"),
]  # fmt: skip


# Names.
@pytest.mark.parametrize(("protocol", "form"), FORMS)
def test_every_method_accepts_every_form_of_a_path(cloud, protocol, form, tmp_path):
    fs = fsspec.filesystem(protocol, **({"target_protocol": "gs"} if protocol == "cachedfs" else {}))
    path, url = cloud.path("d/a.txt"), cloud.url("d/a.txt", form)
    folder, copy, moved = (cloud.url(name, form) for name in ("d", "d/copy.txt", "d/moved.txt"))
    fs.pipe_file(url, b"0123456789")
    assert fs.info(url)["name"] == path
    assert (fs.exists(url), fs.isfile(url), fs.isdir(folder), fs.size(url)) == (True, True, True, 10)
    assert fs.cat_file(url, 2, 4) == b"23"
    assert fs.cat(url) == fs.cat_file(pathlib.PurePosixPath(path)) == b"0123456789"
    assert fs.cat([url]) == {path: b"0123456789"}
    assert fs.cat_ranges([url], [1], [3]) == [b"12"]
    assert fs.ls(folder, detail=False) == [path]
    assert fs.find(folder) == [path]
    assert fs.glob(f"{folder}/*.txt") == [path]
    assert [files for _, _, files in fs.walk(folder)] == [["a.txt"]]
    assert fs.du(folder) == 10
    assert fs.expand_path(folder, recursive=True) == [path.rpartition("/")[0], path]
    with fs.open(url) as file:
        assert file.read() == b"0123456789"
        assert file.path == path
    assert fs.ukey(url) == fs.checksum(url) is not None
    assert fs.created(url) <= fs.modified(url)
    assert fs.cached_extent(url) == [(0, 10)]
    with fs.local_path(url) as local:
        assert pathlib.Path(local).read_bytes() == b"0123456789"
    fs.pin(url)
    fs.unpin(url)
    fs.invalidate_cache(url)
    fs.get_file(url, tmp_path / "got")
    fs.put_file(tmp_path / "got", copy)
    fs.mv(copy, moved)
    fs.cp_file(moved, copy)
    assert fs.cat_file(moved) == fs.cat_file(copy) == b"0123456789"
    fs.rm_file(moved)
    fs.rm(copy)
    assert not fs.exists(copy)
    fs.touch(url)
    assert fs.size(url) == 0
    assert fs.evict(url) >= 0
    fs.rm(folder, recursive=True)
    assert not fs.exists(url)


@pytest.mark.parametrize("prefix", ["cachedfs::gs://", "cachedfs::gcs://", "cgs://"])
def test_a_path_made_into_a_url_opens_the_same_object(cloud, prefix):
    cloud.put("a", b"abc")
    opened = fsspec.open(cloud.url("a", prefix))
    expected = cloud.url("a", "cgs://" if prefix == "cgs://" else prefix)
    assert opened.fs.unstrip_protocol(opened.path) == expected
    assert opened.full_name == expected
    with opened as file:
        assert file.full_name == expected
        for name in (file.full_name, opened.fs.unstrip_protocol(expected)):
            with fsspec.open(name) as again:
                assert again.read() == b"abc"


def test_local_paths_are_normalized(tmp_path):
    fs = fsspec.filesystem("cachedfs", target_protocol="file")
    path = str(tmp_path / ".d" / "k.")
    assert fsspec.url_to_fs(f"cachedfs::file://{path}")[1] == path
    assert fs.unstrip_protocol(path) == f"cachedfs::file://{path}"
    fs.makedirs(tmp_path / ".d")
    for spelt in ("/.d/k.", "//.d/k.", "/.d//./k.", "/./.d/././/k."):
        fs.pipe_file(f"{tmp_path}{spelt}", spelt.encode())
        assert fs.cat_file(path) == spelt.encode()
        assert fs.info(f"file://{tmp_path}{spelt}")["name"] == path
    assert fs.find(f"/.{tmp_path}/.d/.") == [path]
    assert fs.info("/./")["name"] == "/"


def test_roots_can_be_listed(cloud, fs):
    local = fsspec.filesystem("cachedfs", target_protocol="file")
    memory = fsspec.filesystem("cachedfs", target_protocol="memory")
    memory.pipe_file("/at-the-root", b"1")
    for each, root, name in (
        *((local, root, "/tmp") for root in ("/", "file:///", "cachedfs::file:///")),
        *((memory, root, "/at-the-root") for root in ("", "/", "memory://")),
        *((fs, root, cloud.bucket) for root in ("", "gs://", "cachedfs::gs://")),
    ):
        assert name in each.ls(root, detail=False)
        assert each.isdir(root)
    assert "/at-the-root" in memory.find("")
    memory.rm("/at-the-root")


# Metadata of the origin.
def test_changes_of_a_returned_info_do_not_change_the_cache(cloud, fs):
    fs.pipe_file(cloud.path("a"), b"1", metadata={"by": "me"})
    for ask in (
        lambda: fs.info(cloud.path("a")),
        lambda: fs.ls(cloud.bucket)[0],
        lambda: fs.open(cloud.path("a")).info(),
    ):
        given = ask()
        assert given["metadata"] == {"by": "me"}
        given["metadata"]["by"] = given["size"] = "you"
        assert fs.info(cloud.path("a"))["metadata"] == {"by": "me"}


WRITES = {
    "open": lambda fs, path, local: fs.open(path, "wb").__enter__().write(b"new"),
    "pipe": lambda fs, path, local: fs.pipe({path: b"new"}),
    "put": lambda fs, path, local: fs.put(str(local), path),
}


@pytest.mark.parametrize(
    ("write", "protocol"),
    [("open", "gs"), ("pipe", "gs"), ("open", "memory"), ("put", "memory"), ("pipe", "file")],
)
def test_a_transaction_is_invisible_until_it_ends(cloud, tmp_path, protocol, write):
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    top = cloud.bucket if protocol == "gs" else str(tmp_path)
    local = tmp_path / "local"
    local.write_bytes(b"new")
    fs.pipe_file(f"{top}/a", b"old")

    def in_transaction(fails):
        with fs.transaction:
            WRITES[write](fs, f"{top}/a", local)
            assert fs.cat_file(f"{top}/a") == b"old"
            if fails:
                raise KeyError

    with pytest.raises(KeyError):
        in_transaction(fails=True)
    assert fs.cat_file(f"{top}/a") == b"old"
    in_transaction(fails=False)
    assert fs.cat_file(f"{top}/a") == fs.origin_fs.cat_file(f"{top}/a") == b"new"


def test_a_missing_local_path_says_how_cloud_urls_begin(own_cache):
    with pytest.raises(
        FileNotFoundError, match=r"on the local disk\. For Google Cloud Storage write gs://BUCKET/KEY"
    ):
        fsspec.open("cachedfs::my-bucket/x").open()


# The error is found at close, and at a write.
@pytest.mark.parametrize(("size", "protocol"), [(10, "gs"), (1 << 20, "memory"), (10, "file")])
def test_a_transaction_without_temporary_space_keeps_the_old_object(
    cloud, tmp_path, monkeypatch, protocol, size
):
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    path = f"{cloud.bucket if protocol == 'gs' else tmp_path}/a"
    fs.pipe_file(path, b"old")
    full = partial(open, "/dev/full", "w+b")
    monkeypatch.setattr("cachedfs.filesystem.write_file.new_spool", full)
    with fs.transaction, pytest.raises(OSError, match="No space left"):
        fs.pipe_file(path, bytes(size))
    assert fs.origin_fs.cat_file(path) == fs.cat_file(path) == b"old"


# tests/origins/test_gcs_writes.py has the same of Google Cloud Storage.
@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_writer_that_fails_leaves_the_old_object_or_none(tmp_path, protocol):
    fs, top = fsspec.filesystem("cachedfs", target_protocol=protocol), str(tmp_path / "top")
    fs.makedirs(top, exist_ok=True)
    fs.pipe_file(f"{top}/old", b"old")

    def fail(name, mode):
        with fs.open(f"{top}/{name}", mode) as file:
            file.write(b"half")
            file.flush()
            raise KeyError

    for name, mode in (("old", "wb"), ("new", "wb"), ("new", "xb")):
        with pytest.raises(KeyError):
            fail(name, mode)
    assert fs.origin_fs.cat(fs.origin_fs.find(top)) == {fs._strip_protocol(f"{top}/old"): b"old"}
    assert fs.cat_file(f"{top}/old") == b"old"
    assert not fs.exists(f"{top}/new")


@pytest.fixture
def local(own_cache):
    return fsspec.filesystem("cachedfs", target_protocol="file")


def test_a_local_file_is_replaced_when_it_is_closed(local, tmp_path):
    real, link = tmp_path / "real" / "a", tmp_path / "a"
    real.parent.mkdir()
    real.write_bytes(b"old")
    real.chmod(0o600)
    link.symlink_to(real)
    with local.open(str(link), "wb") as file:
        assert {path.stat().st_mode & 0o777 for path in real.parent.iterdir()} == {0o600}
        file.write(b"longer than before")
        assert real.read_bytes() == b"old"
    assert (real.read_bytes(), real.stat().st_mode & 0o777) == (b"longer than before", 0o600)
    assert link.is_symlink()
    assert os.listdir(real.parent) == ["a"]


def test_what_cannot_be_replaced_is_written_directly(local, tmp_path):
    with local.open("/dev/null", "wb") as file:
        file.write(b"gone")
    with pytest.raises(OSError, match="No space left"), local.open("/dev/full", "wb") as file:
        file.write(b"too much")
    with pytest.raises(FileNotFoundError, match="none/a") as caught:
        local.open(str(tmp_path / "none" / "a"), "wb")
    assert ".part" not in str(caught.value)
    with pytest.raises(IsADirectoryError):
        local.open(str(tmp_path), "wb")


@pytest.mark.parametrize("has_links", [True, False])
def test_an_exclusive_write_keeps_a_file_that_somebody_else_made_meanwhile(
    local, tmp_path, monkeypatch, has_links
):
    if not has_links:
        monkeypatch.setattr("cachedfs.common.atomic_files.os.link", _refused)
    path = tmp_path / "top" / "a"
    path.parent.mkdir()
    with local.open(str(path), "xb") as file:
        file.write(b"mine")
    assert path.read_bytes() == b"mine"
    path.unlink()
    file = local.open(str(path), "xb")
    file.write(b"mine")
    path.write_bytes(b"theirs")
    with pytest.raises(FileExistsError, match="exists already"):
        file.close()
    assert path.read_bytes() == b"theirs"
    assert os.listdir(path.parent) == ["a"]


def _write_twice(fs, source, path):
    """Write as a program that ignores the first error."""
    file = fs.open(path, "wb")
    with contextlib.suppress(OSError):
        file.write(b"new")
    file.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda fs, source, path: fs.pipe_file(path, b"new"),
        lambda fs, source, path: fs.put_file(source, path),
        lambda fs, source, path: fs.cp_file(source, path),
        _write_twice,
    ],
    ids=["pipe_file", "put_file", "cp_file", "open"],
)
@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_failed_write_of_a_local_file_keeps_the_old_one_and_names_it(
    local, tmp_path, monkeypatch, write, step
):
    source, path = tmp_path / "source", tmp_path / "top" / "a"
    path.parent.mkdir()
    path.write_bytes(b"old")
    source.write_bytes(b"new")
    if step == "write":
        monkeypatch.setattr(LocalFileOpener, "write", _half_written)
    else:
        monkeypatch.setattr("cachedfs.common.atomic_files.os.replace", _refused)
    code = errno.ENOSPC if step == "write" else errno.EACCES
    with pytest.raises(OSError, match=f"{path}: ") as caught:
        write(local, str(source), str(path))
    assert caught.value.errno == code
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a"]


# The error of fsspec's `sync` refers to frames of gcsfs with a view of its buffer: Python 3.13 says so when it collects them.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.BytesIO:pytest.PytestUnraisableExceptionWarning"
)
def test_an_upload_of_which_a_write_failed_is_not_finished(cloud, fs):
    path = cloud.path("a")
    cloud.put("a", b"old")
    cloud.server.fail(Fault(kind="upload", nth=2, status=403, times=1))  # the first one begins a session
    file = fs.open(path, "wb", block_size=256 * KiB)
    for act in (lambda: file.write(bytes(300 * KiB)), lambda: file.write(b"more"), file.close):
        with pytest.raises(PermissionError, match=path):
            act()
    assert file.closed
    assert fs.cat_file(path) == b"old"
    file = act = None
    gc.collect()


def test_a_read_while_a_written_file_is_closed_hides_none_of_its_bytes_afterwards(cloud, fs):
    path = cloud.path("a")
    cloud.put("a", b"old")
    with fs.open(path, "wb") as file:
        file.write(b"new")
        close, seen = file._inner.close, []
        file._inner.close = lambda: (seen.append(fs.cat_file(path)), close())
    assert seen == [b"old"]
    assert fs.cat_file(path) == b"new"


def test_more_files_than_threads_are_written_first(local, tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    local.pipe({str(top / str(i)): b"1" for i in range(40)})  # an executor has 32 threads at most
    assert len(os.listdir(top)) == 40


def test_a_transaction_that_fails_does_not_lose_a_local_file_that_was_moved(local, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"data")

    def fail():
        with local.transaction:
            local.mv([str(old)], [str(new)])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert new.read_bytes() == b"data"


def _half_written(file, data):
    file.f.write(data[:1])
    raise OSError(errno.ENOSPC, "No space left on device")


def _refused(*_):
    raise PermissionError(errno.EPERM, "not here")


@pytest.mark.parametrize("protocol", ["gs", "memory", "file"])
def test_an_exclusive_write_refuses_existing_objects(cloud, tmp_path, protocol):
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    path = f"{cloud.bucket if protocol == 'gs' else tmp_path}/a"
    with fs.transaction:
        fs.pipe_file(path, b"1", mode="create")
        assert not fs.exists(path)
    with pytest.raises(FileExistsError), fs.transaction:
        fs.pipe_file(path, b"2", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(path, b"3", mode="create")
    with pytest.raises(FileExistsError, match=path):
        fs.open(path, "xb")
    assert fs.cat_file(path) == b"1"
    fs.origin_fs.rm_file(path)
    with fs.open(path, "xb") as file:  # cached metadata is not used
        file.write(b"2")
    assert fs.cat_file(path) == b"2"


def test_a_copied_tree_is_complete_if_objects_precede_their_folders(tmp_path, monkeypatch):
    fs = fsspec.filesystem("cachedfs", target_protocol="file")
    for name in ("a", "b/a"):
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text(name)
    copy, open_, too_early = LocalFileSystem.cp_file, LocalFileSystem._open, threading.Event()

    def copied_late(self, path1, path2, **kwargs):  # only folders are copied by it
        too_early.wait(120)
        copy(self, path1, path2, **kwargs)

    def opened(self, path, mode="rb", **kwargs):
        try:
            return open_(self, path, mode, **kwargs)
        except FileNotFoundError:
            too_early.set()
            raise

    monkeypatch.setattr(LocalFileSystem, "cp_file", copied_late)
    monkeypatch.setattr(LocalFileSystem, "_open", opened)
    fs.copy(f"{tmp_path}/d", f"{tmp_path}/e", recursive=True)
    assert too_early.is_set()
    assert {name: (tmp_path / "e" / name).read_text() for name in ("a", "b/a")} == {"a": "a", "b/a": "b/a"}
    with pytest.raises(FileNotFoundError):
        fs.cp_file(f"{tmp_path}/d/a", f"{tmp_path}/nothing/a")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("protocol", "named", "recursive"),
    [("gs", "{}/*", False), ("memory", ["{}/*"], False), ("file", ["{}/old"], False), ("gs", ["{}"], True)],
)
def test_a_move_removes_only_what_it_copied(cloud, tmp_path, monkeypatch, protocol, named, recursive):
    top = cloud.bucket if protocol == "gs" else str(tmp_path / "moves")
    options = {"auto_mkdir": True} if protocol == "file" else {}
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol, target_options=options)
    elsewhere = fs.origin_fs  # as another machine
    elsewhere.pipe_file(f"{top}/d/old", b"old")
    assert fs.find(f"{top}/d") == [f"{top}/d/old"]
    elsewhere.pipe_file(f"{top}/d/new", b"new")
    honest = CachedFileSystem._cp_file

    async def then_another_writes(self, *args, **kwargs):
        await honest(self, *args, **kwargs)
        await asyncio.to_thread(elsewhere.pipe_file, f"{top}/d/last", b"last")

    monkeypatch.setattr(CachedFileSystem, "_cp_file", then_another_writes)
    source = [named[0].format(f"{top}/d")] if isinstance(named, list) else named.format(f"{top}/d")
    fs.mv(source, f"{top}/e/", recursive=recursive)
    found = {path.rpartition("/")[2]: elsewhere.cat_file(path) for path in elsewhere.find(top)}
    assert found == {name: name.encode() for name in ("old", "new", "last")}
    assert elsewhere.exists(f"{top}/d/last")
    assert not elsewhere.exists(f"{top}/d/old")


def test_what_is_moved_or_copied_onto_itself_is_kept(local, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    local.mv(str(path), f"file://{path}")
    local.mv(f"{tmp_path}/*", f"{tmp_path}/")
    with pytest.raises(OSError, match="are the same file"):
        local.cp_file(str(path), str(path))
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("named", "options", "error"),
    [
        ("d", {}, IsAFolder),
        ("d/", {}, IsAFolder),
        ("*", {}, ObjectNotFound),
        ("d", {"recursive": True, "maxdepth": 1}, ObjectNotFound),
    ],
)
def test_a_move_without_a_source_is_an_error(tmp_path, named, options, error):
    top = str(tmp_path)
    fs = fsspec.filesystem("cachedfs", target_protocol="memory")
    fs.pipe_file(f"{top}/d/e/a", b"1")
    with pytest.raises(error, match=re.escape(f"{top}/{named.rstrip('/')}")):
        fs.mv(f"{top}/{named}", f"{top}/moved", **options)
    assert fs.find(top) == [f"{top}/d/e/a"]


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_file_changed_in_place_is_seen_at_once(tmp_path, protocol):
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    path = str(tmp_path / "x")
    for i in range(3):
        fs.pipe_file(path, b"one two")
        assert fs.cat_file(path) == b"one two"
        fs._objects.engine.drain(120)
        with fs.open(path, "r+b") as file:
            file.seek(4)
            file.write(b"%d" % i)
        with fs.open(path, "ab") as file:
            file.write(b"!")
        assert fs.cat_file(path) == b"one %dwo!" % i


def test_an_empty_object_is_an_object(cloud, fs):
    cloud.put("empty", b"")
    for _ in range(2):
        assert fs.cat_file(cloud.path("empty")) == b""
        assert fs.cat_file(cloud.path("empty"), -5) == b""
        with fs.open(cloud.path("empty")) as file:
            assert file.read() == b""
        assert fs.size(cloud.path("empty")) == 0
        assert fs.isfile(cloud.path("empty"))
    with fs.local_path(cloud.path("empty")) as local:
        assert os.path.getsize(local) == 0


# The same metadata from every method.
def metadata_of(fs, path):
    """Return the metadata of an object from every method."""
    (listed,) = fs.ls(path, detail=True)
    with fs.open(path) as file:
        details = file.info()
    found = fs.find(path, detail=True)[path]
    return fs.info(path), listed, found, details, fs.modified(path), fs.created(path)


def test_metadata_is_the_same_before_and_after_a_read(cloud):
    cloud.put("a", noise(KiB))
    before = metadata_of(fsspec.filesystem("cgs"), cloud.path("a"))
    assert before[0]["etag"]
    assert [*before[:4]] == [before[0]] * 4
    for span, asked in (((None, None), ["list", "metadata"]), ((0, 9), ["metadata"])):  # `find` lists once
        forget()
        fs = fsspec.filesystem("cgs", max_age=120)
        fs.evict()
        if asked[0] == "list":
            fs.invalidate_cache()
        fs.cat_file(cloud.path("a"), *span)
        cloud.asked()
        assert metadata_of(fs, cloud.path("a")) == before


@pytest.mark.parametrize("name", ["ls", "find", "modified", "created", "_info"])
def test_metadata_missing_in_read_headers_is_requested_once_per_machine(cloud, fs, name):
    path = cloud.path("a")
    cloud.put("a", b"data")
    fs.cat_file(path)
    forget()
    cloud.asked()
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    options = {"detail": True} if name in ("ls", "find") else {}
    for _ in range(2):
        asyncio.run(fs._info(path)) if name == "_info" else getattr(fs, name)(path, **options)
    assert [kind for kind in cloud.asked() if kind != "list"] == ["metadata"]
    etag = fs.info(path)["etag"]
    forget()  # like another process
    assert fsspec.filesystem("cgs").info(path)["etag"] == etag
    assert cloud.asked() == []


def test_size_and_type_are_cached_by_a_read(cloud, fs):
    path = cloud.path("a")
    cloud.put("a", b"data")
    fs.cat_file(path)
    cloud.asked()
    assert (fs.size(path), fs.sizes([path]), fs.ukey(path)) == (4, [4], fs.checksum(path))
    assert (fs.exists(path), fs.isfile(path), fs.isdir(path)) == (True, True, False)
    assert (fs.ls(path, detail=False), fs.find(path), fs.expand_path(path)) == ([path], [path], [path])
    assert cloud.asked() == ["list"]  # `find` lists


def test_metadata_of_a_replaced_or_changed_object_is_the_new_one(cloud, fs, clock):
    path = cloud.path("a")
    cloud.put("a", b"old")
    fs.cat_file(path)
    with fs.open(path) as file:
        cloud.put("a", b"newer")
        assert fs.info(path)["size"] == 5
        assert (file.info()["size"], file.read()) == (3, b"old")
    fs.origin_fs.setxattrs(path, content_type="text/x-new")
    clock(61)
    fs.evict(path)
    assert fs.cat_file(path) == b"newer"
    assert fs.info(path)["contentType"] == "text/x-new"
    assert fs.info(path) == fs.ls(cloud.bucket, detail=True)[0]


@pytest.mark.parametrize("protocol", ["cachedfs", "cgs"])
def test_options_of_the_cache_may_be_in_a_dictionary_named_like_the_filesystem(own_cache, protocol):
    fs = fsspec.filesystem(
        protocol,
        target_protocol="gs",
        gs={"token": "anon"},
        max_age=5,
        **{protocol: {"max_age": 7, "read_ahead": 0}},
    )
    assert (fs.config.lifetime_s, fs.config.read_ahead, fs.target_options) == (5, 0, {"token": "anon"})
    again = pickle.loads(pickle.dumps(fs))
    assert again.config == fs.config
    with pytest.raises(ValueError, match="no option 'max_agee'"):
        fsspec.filesystem(protocol, target_protocol="gs", **{protocol: {"max_agee": 7}})


def test_a_filesystem_survives_pickle_and_json(cloud, tmp_path):
    data = cloud.put("a", noise(1000))
    options = {
        "cache_dir": tmp_path / "other",
        "max_age": 5,
        "cache_size": None,
        "gs": {
            **cloud.options["gs"],
            "requests_timeout": None,
            "session_kwargs": {"trust_env": False, "headers": None},
        },
    }
    for protocol in ("cachedfs", "cgs"):
        target = {"target_protocol": "gs"} if protocol == "cachedfs" else {}
        fs = fsspec.filesystem(protocol, **target, **options)
        for again in (
            pickle.loads(pickle.dumps(fs)),
            fsspec.AbstractFileSystem.from_json(fs.to_json()),
            type(fs).from_dict(fs.to_dict()),
        ):
            assert type(again) is type(fs)
            assert again.config == fs.config
            assert again.target_options == fs.target_options
            assert again.cat_file(cloud.path("a")) == data
        json.loads(fs.to_json())


def test_json_without_passwords_contains_no_secret(tmp_path):
    """Also no nested secret. Other values stay, and so does a token that is a word or the name of a file."""
    file = tmp_path / "token.json"
    file.write_text("{}")
    secrets = {
        "token": "ya29.SECRET",
        "password": "SECRET",
        "client_secret": "SECRET",
        "session_kwargs": {"headers": {"Authorization": "Bearer SECRET"}, "trust_env": False},
        "client_kwargs": [{"refresh_token": "SECRET", "timeout": 3}],
        "project": "mine",
    }
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs=secrets, skip_instance_cache=True)
    assert fs.to_json().count("SECRET") == 5
    left = json.loads(fs.to_json(include_password=False))
    assert "SECRET" not in json.dumps(left)
    assert left["gs"] == {
        "session_kwargs": {"headers": {}, "trust_env": False},
        "client_kwargs": [{"timeout": 3}],
        "project": "mine",
    }
    for kept in ("anon", "google_default", str(file)):
        fs = fsspec.filesystem("cgs", gs={"token": kept}, skip_instance_cache=True)
        assert json.loads(fs.to_json(include_password=False))["gs"] == {"token": kept}
    for content in ({"private_key": "SECRET"}, {"refresh_token": "SECRET", "client_id": "x"}):
        fs = fsspec.filesystem("cgs", gs={"token": content}, skip_instance_cache=True)
        assert json.loads(fs.to_json(include_password=False))["gs"] == {}


def test_a_pickle_holds_live_credentials_and_for_json_the_error_says_what_can_be_written():
    made = google.oauth2.credentials.Credentials("SECRET")
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs={"token": made}, skip_instance_cache=True)
    assert pickle.loads(pickle.dumps(fs)).target_options["token"].token == "SECRET"
    said = r"\['token'\] is a Credentials object, which cannot be written as JSON.*'google_default'"
    for write in (fs.to_json, fs.to_dict):
        with pytest.raises(TypeError, match=said) as caught:
            write()
        assert "SECRET" not in str(caught.value)
        assert "object at" not in str(caught.value)


def test_a_hit_of_cgs_imports_no_gcsfs_and_starts_no_thread(cloud):
    cloud.put("a", noise(10 * KiB))
    with fsspec.open(cloud.url("a", "cgs://")) as file:
        file.read()
    forget()
    code = """
        import fsspec, os, sys, threading
        url = f"cgs://{os.environ['BUCKET']}/a"
        with fsspec.open(url) as file:
            assert len(file.read()) == 10240
        fs, path = fsspec.url_to_fs(url)
        assert fs.size(path) == 10240 and fs.isfile(path)
        assert len(fs.cat_file(path)) == 10240
        assert fs.exists(path) and len(fs.cat([path])) == 1
        print(threading.active_count(), "gcsfs" in sys.modules, "google" in sys.modules)
    """
    cloud.asked()
    assert cloud.python(code) == "1 False False\n"
    assert cloud.asked() == []


# Event loops and threads.
def test_two_event_loops_use_one_asynchronous_filesystem(cloud):
    data = cloud.put("a", noise(3 * MiB))

    async def read(fs):
        assert await fs._cat_file(cloud.path("a")) == data
        assert (await fs._info(cloud.path("a")))["size"] == len(data)
        await fs._pipe_file(cloud.path("b"), b"1")
        assert await fs._exists(cloud.path("b"))
        return await fs._cat_ranges([cloud.path("a")] * 2, [0, MiB], [5, MiB + 5])

    fs = fsspec.filesystem("cachedfs", target_protocol="gs", asynchronous=True)
    for _ in range(2):
        assert asyncio.run(read(fs)) == [data[:5], data[MiB : MiB + 5]]
        fs.invalidate_cache()


@pytest.mark.parametrize("name", ["d/", "d/deep", "d/deep/a", ""])
def test_invalidate_cache_drops_everything_at_and_below_a_path(cloud, name):
    cloud.put("d/deep/a", b"old")
    cloud.put("other/b", b"old")
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=3600)
    a, b = cloud.path("d/deep/a"), cloud.path("other/b")
    assert fs.find(cloud.path("d")) == [a]
    assert fs.cat_file(a) == fs.cat_file(b) == b"old"
    cloud.put("d/deep/a", b"new!")
    cloud.put("d/deep/more", b"new!")
    cloud.put("other/b", b"new!")
    assert fs.cat_file(a) == b"old", "within max_age"
    fs.invalidate_cache(cloud.path(name) if name else None)
    assert fs.cat_file(a) == b"new!"
    assert fs.cat_file(b) == (b"old" if name else b"new!")
    assert fs.find(cloud.path("d")) == [a, cloud.path("d/deep/more")]


# Content of the cache.


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.csv.gz", ".csv.gz"), ("v1.2.tar", ".2.tar"), ("a", ""), (".hidden", ""), ("a.b c", ""), ("a.é", "")],
)
def test_local_path_is_the_whole_object_as_a_read_only_file_with_its_suffix(cloud, fs, name, suffix):
    data = cloud.put(name, noise(2 * MiB + 7))
    for expected in (["media", "metadata"], []):
        with fs.local_path(cloud.path(name)) as path:
            assert pathlib.Path(path).read_bytes() == data
            assert "".join(pathlib.Path(path).suffixes) == suffix
            assert not os.stat(path).st_mode & 0o222
        assert not os.path.exists(path)
        assert cloud.asked() == expected


def test_a_path_with_a_slash_at_its_end_pins_the_object_that_it_names(cloud):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    path = cloud.path("a")
    cloud.put("a", b"data")
    cloud.put("both", b"1")
    cloud.put("both/", b"2")
    pins = fs._objects.engine.cache.pins
    fs.pin(f"{path}/")
    assert [name for _, name in pins()] == [path]
    fs.unpin(f"{path}/")
    for name in (cloud.path("both/"), cloud.path("nothing/")):  # the name of an object, and of none yet
        fs.pin(name)
        assert [pinned for _, pinned in pins()] == [name]
        fs.unpin(name)
    assert pins() == []
    fs.cat_file(path)
    assert fs.cached_extent(f"{path}/") == fs.cached_extent(path) == [(0, 4)]


def test_may_hold_is_what_the_size_limit_leaves(tmp_path):
    own = {"target_protocol": "memory", "cache_size": "8MiB"}
    fs = fsspec.filesystem("cachedfs", cache_dir=str(tmp_path / "own"), **own)
    assert 5 * MiB < fs.may_hold() <= 8 * MiB
    assert fs.link_stats().n_timed == 0
    assert fsspec.filesystem("cachedfs", cache_dir="/proc/none", **own).may_hold() is None


# Freshness.


def test_a_changed_object_is_seen_after_max_age(cloud, fs, clock):
    path = cloud.path("a")
    cloud.put("a", b"old")
    assert fs.cat_file(path) == b"old"
    cloud.put("a", b"newer")
    clock(30)
    assert fs.cat_file(path) == b"old"
    clock(31)
    assert fs.cat_file(path) == b"newer"
    assert fs.info(path)["size"] == 5


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_wall_clock_that_was_set_back_keeps_nothing_fresh(cloud, clock, monkeypatch, is_new_process):
    path, since_boot = cloud.path("a"), time.clock_gettime
    cloud.put("a", b"old")
    assert fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options).cat_file(path) == b"old"
    forget()
    assert fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options).cat_file(path) == b"old"
    cloud.put("a", b"newer")
    clock(30)  # an hour later
    monkeypatch.setattr(time, "clock_gettime", lambda which: since_boot(which) + 3600)
    if is_new_process:
        forget()
        monkeypatch.setattr(metadata_clock, "offset", -math.inf)
    assert fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options).cat_file(path) == b"newer"


def test_an_unchanged_object_is_not_fetched_again_after_max_age(cloud, fs, clock):
    path = cloud.path("a")
    cloud.put("a", noise(MiB))
    fs.cat_file(path)
    fs._objects.engine.drain(120)
    clock(61)
    cloud.asked()
    sent = cloud.server.bytes_sent()
    fs.cat_file(path)
    assert cloud.asked() == ["metadata"]
    assert cloud.server.bytes_sent() == sent


def test_an_absence_is_fresh_for_ten_seconds(cloud, fs, clock):
    path = cloud.path("a")
    assert not fs.exists(path)
    cloud.put("a", b"1")
    assert not fs.exists(path)
    clock(11)
    assert fs.exists(path)


def test_max_age_zero_checks_at_every_open(cloud):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0)
    path = cloud.path("a")
    for data in (b"one", b"two!", b"three"):
        cloud.put("a", data)
        assert fs.cat_file(path) == data
        with fs.open(path) as file:
            assert file.read() == data
        assert fs.info(path)["size"] == len(data)
        assert fs.ls(cloud.bucket)[0]["size"] == len(data)
    fs._objects.engine.drain(120)
    cloud.asked()
    for _ in range(3):
        assert fs.cat_file(path) == fs.open(path).read() == b"three"
    assert cloud.asked() == 6 * ["metadata"]
    cloud.delete("a")
    assert not fs.exists(path)


@pytest.mark.parametrize(("max_age", "asked"), [(60, 3 * ["metadata"]), ("immutable", [])])
def test_where_changes_of_other_processes_cannot_be_noticed_metadata_is_checked_at_each_use(
    cloud, own_memory_folder, own_cache, monkeypatch, caplog, max_age, asked
):
    """Neither the directory nor the folder in memory can hold the change counters."""
    monkeypatch.setattr("cachedfs.cache.change_counters.MEMORY_FOLDER", str(own_memory_folder / "none"))

    def full(fd, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cachedfs.cache.disk.allocate", full)
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=max_age)
    path = cloud.path("a")
    cloud.put("a", b"data")
    assert fs.cat_file(path) == b"data"
    fs._objects.engine.drain(120)
    cloud.asked()
    for _ in range(3):
        assert fs.cat_file(path) == b"data"
    assert cloud.asked() == asked
    warnings = [
        record.getMessage() for record in caplog.records if "as with max_age=0" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert str(own_cache) in warnings[0]


def test_immutable_never_checks(cloud, clock):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age="immutable")
    path = cloud.path("a")
    cloud.put("a", b"old")
    assert fs.cat_file(path) == b"old"
    assert not fs.exists(cloud.path("b"))
    cloud.put("a", b"new")
    cloud.put("b", b"new")
    cloud.asked()
    clock(1e6)
    assert fs.cat_file(path) == b"old"
    assert not fs.exists(cloud.path("b"))
    assert cloud.asked() == []


@pytest.fixture
def far():
    """A server with two objects, which a test closes."""
    with GCSServer(profile="off") as server:
        server.make_bucket("far")
        for name in "ab":
            server.put("far", name, noise(100 * KiB))
        yield server


def test_offline_reads_cached_data_and_sends_no_request(cloud, far):
    data, gs = noise(100 * KiB), {"token": "anon", "endpoint_url": far.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs=gs)
    assert fs.cat_file("far/a") == data
    assert not fs.exists("far/nothing")
    forget()
    far.close()  # its port is closed now
    code = """
        import fsspec, json, os, sys
        from cachedfs import OriginUnavailable
        fs = fsspec.filesystem("cgs", offline=True, gs=json.loads(sys.argv[1]))
        assert len(fs.cat_file("far/a")) == 102400
        with fs.open("far/a") as file:
            assert len(file.read()) == 102400
        for ask in (lambda: fs.cat_file("far/b"), lambda: fs.open("far/b"), lambda: fs.ls("far"), lambda: fs.info("far/b"),
                    lambda: fs.find("far"), lambda: fs.pipe_file("far/c", b""), lambda: fs.exists("far/nothing")):
            try:
                ask()
            except OriginUnavailable as error:
                assert "offline" in str(error) and "far" in str(error), error
            else:
                raise AssertionError("answered")
        print("gcsfs" in sys.modules, fs.stats().requests)
    """
    assert cloud.python(code, json.dumps(gs)) == "False 0\n"  # gcsfs was not imported, so no request was sent


def test_cached_versions_are_served_while_the_origin_is_unreachable(far, clock, caplog, monkeypatch):
    data, gs = noise(100 * KiB), {"token": "anon", "endpoint_url": far.endpoint_url}
    monkeypatch.setattr(
        "cachedfs.origins.fsspec_origin.RetryPolicy", functools.partial(RetryPolicy, connect_s=0.0)
    )
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs=gs)
    strict = fsspec.filesystem("cachedfs", target_protocol="gs", stale_if_error=False, gs=gs)
    assert fs.cat_file("far/a") == data
    fs._objects.engine.drain(120)
    far.close()
    clock(61)
    with caplog.at_level(logging.WARNING, "cachedfs"):
        for _ in range(3):
            assert fs.cat_file("far/a") == data
            with fs.open("far/a") as file:
                assert file.read() == data
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    with pytest.raises(OriginUnavailable):
        fs.cat_file("far/b")
    with pytest.raises(OriginUnavailable):
        strict.cat_file("far/a")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_error_response_does_not_make_the_origin_unreachable(cloud, fs, clock, status):
    cloud.put("a", b"1")
    fs.cat_file(cloud.path("a"))
    fs._objects.engine.drain(120)
    clock(61)
    cloud.server.fail(Fault(status=status, times=None))
    with pytest.raises(FileNotFoundError if status == 404 else PermissionError):
        fs.cat_file(cloud.path("a"))


async def test_a_copy_cancelled_while_its_file_is_created_leaves_no_file(tmp_path):
    async def fill(file):
        await asyncio.Event().wait()

    copying = asyncio.create_task(filled(tmp_path / "copy", fill))
    await asyncio.sleep(0)
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()  # all work of threads is done
    assert list(tmp_path.iterdir()) == []


async def test_a_copy_into_a_pipe_is_written_to_its_reader(tmp_path):
    pipe, data = tmp_path / "pipe", noise(300 * KiB)  # more than a pipe holds

    async def write(file):
        await asyncio.to_thread(file.write, data)

    os.mkfifo(pipe)
    os.link(pipe, tmp_path / "same")
    reading = asyncio.create_task(asyncio.to_thread(pipe.read_bytes))
    try:
        await asyncio.wait_for(filled(pipe, write), 120)
        assert pipe.is_fifo()
    finally:  # without a writer, the reader would wait forever
        os.close(os.open(tmp_path / "same", os.O_RDWR | os.O_NONBLOCK))
    assert await asyncio.wait_for(reading, 120) == data


def test_cat_ranges_reads_cached_ranges_at_once_and_fetches_the_others_together(cloud, fs):
    data = {name: cloud.put(name, noise(3 * MiB, i)) for i, name in enumerate("abc")}
    paths = {name: cloud.path(name) for name in data}
    fs.cat_ranges([paths["a"]] * 2, [0, 2 * MiB], [MiB, 3 * MiB])
    fs._objects.engine.drain(120)
    loop_runs = fs._objects.engine.run
    cloud.asked()
    wanted = [("a", 5, 9), ("a", -7, None), ("a", 2 * MiB, None), ("a", 7, 3), ("a", -9, -3)]
    fs._objects.engine.run = None  # cached ranges need no loop
    try:
        found = fs.cat_ranges(
            *map(list, zip(*((paths[name], *bounds) for name, *bounds in wanted), strict=True))
        )
    finally:
        fs._objects.engine.run = loop_runs
    assert found == [data[name][start:stop] for name, start, stop in wanted]
    assert cloud.asked() == []
    wanted = [("a", 5, 9), ("b", 5, 9), ("a", MiB, MiB + 5), ("a", 6, 8), ("b", 7, 9), ("c", None, 4)]
    found = fs.cat_ranges(*map(list, zip(*((paths[name], *bounds) for name, *bounds in wanted), strict=True)))
    assert found == [data[name][slice(*bounds)] for name, *bounds in wanted]
    assert cloud.asked() == ["media"] * 2


def test_cat_ranges_returns_an_error_for_each_missing_object(cloud, fs):
    data = cloud.put("a", noise(1000))
    a, absent = cloud.path("a"), cloud.path("absent")
    for _ in range(2):  # unknown, and then known to be absent
        found = fs.cat_ranges([absent, a, absent, a], [1, 2, 3, 4], [5] * 4)
        assert [found[1], found[3]] == [data[2:5], data[4:5]]
        assert all(isinstance(found[i], FileNotFoundError) for i in (0, 2))
        with pytest.raises(FileNotFoundError, match="absent"):
            fs.cat_ranges([a, absent], 0, 5, on_error="raise")
    assert fs.cat_ranges([], [], []) == []
    with pytest.raises(ValueError):
        fs.cat_ranges([a, a], [1], [2])
    for single in (a, pathlib.PurePosixPath(a), {a}):
        with pytest.raises(TypeError, match="cat_file"):
            fs.cat_ranges(single, 0, 4)


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_folders_are_created_and_removed_on_filesystems_with_folders(tmp_path, protocol):
    top = str(tmp_path / "made")
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    fs.mkdir(top)
    fs.makedirs(f"{top}/b/c", exist_ok=True)
    fs.makedirs(f"{top}/b/c", exist_ok=True)
    for make in (fs.mkdir, fs.makedirs):
        with pytest.raises(FileExistsError):
            make(f"{top}/b/c")
    assert (fs.isdir(top), fs.ls(top, detail=False), fs.ls(f"{top}/b/c")) == (True, [f"{top}/b"], [])
    fs.rmdir(f"{top}/b/c")
    assert not fs.exists(f"{top}/b/c")
