"""Several nodes share a folder: what the origin is asked, and that nothing is wrong or in the way."""

import asyncio
import collections
import errno
import os
import re
import threading
import time
import zlib
from functools import partial

import fsspec
import pytest

from cachedfs.core.downloads import Downloads
from cachedfs.errors import OriginUnavailable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.shared import gatherer, in_place, shared_cache, shared_folder, shared_index, shared_writer
from cachedfs.shared.piece import GATHERED, encoded_index
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_folder import OpenShared, SharedFolder
from cachedfs.shared.shared_index import SharedIndex
from cachedfs.shared.shared_store import BASE
from tests.shared.conftest import (
    BIG,
    asked,
    files_in,
    flush,
    leave,
    place_of,
    quiet,
    read_all,
    wait_for_whole_files,
)
from tests.support import KiB, MiB, forget, noise, until

ANSWERS_S = tuple(each.answers_s for each in (SharedFolder, SharedBucket, SharedDrive))  # by default
anywhere = pytest.mark.usefixtures("anywhere")


@anywhere
def test_what_one_node_has_read_the_next_one_reads_without_a_request(origin, node, put_there):
    data = put_there()
    fs = node("b")
    read_all(fs, data)
    assert fs.info("b/d/1/1")["size"] == 50_001
    assert len(fs.ls("b/d/0")) == 7
    assert asked(origin) == []
    stats, size = fs.stats(), sum(map(len, data.values()))
    assert (stats.bytes_fetched, stats.requests) == (0, 0)
    # Until eight wait for a file, each reads what it wants.
    assert size <= stats.bytes_shared < size + 7 * 51_000
    read_all(fs, data)  # from its own cache
    assert fs.stats().bytes_shared == stats.bytes_shared


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_small_file_costs_at_most_two_operations_to_put_there_and_none_to_read(
    origin, node, shared, monkeypatch, is_alone
):
    n, calls = 200, []  # a list: threads may append at the same time
    place = shared / BASE
    (place / "leases").mkdir(parents=True)

    def count(name, call, path, *args, **options):
        for kind in ("leases/", GATHERED) if isinstance(path, str) else ():
            is_own = not path.endswith(("/waiting", "/alone"))
            calls.extend([(kind, name)] * (path.startswith(f"{place}/{kind}") and is_own))
        return call(path, *args, **options)

    data = {f"b/d/{i:03}": origin.put(f"b/d/{i:03}", noise(5000 + i, i)) for i in range(n)}
    for name in ("open", "unlink", "rename", "stat", "lstat", "chmod", "utime"):
        monkeypatch.setattr(os, name, partial(count, name, getattr(os, name)))
    monkeypatch.setattr(shared_writer, "open_block", None)  # nor is the local cache read
    if not is_alone:
        place_of(shared).set_node_alone("another")
    fs = node("a")
    fs.find("b")  # there are leases only on what is known
    assert fs.cat(list(data)) == data
    leave()
    leases = collections.Counter(name for kind, name in calls if kind == "leases/")
    assert leases == ({} if is_alone else {"open": n, "unlink": n})
    calls.clear()
    assert node("b").cat(list(data)) == data
    n_files = len(list((place / GATHERED).iterdir()))
    assert calls == [(GATHERED, "open")] * n_files


@pytest.mark.usefixtures("on_a_network")
def test_a_file_of_which_many_objects_are_wanted_is_read_as_a_whole(origin, node, put_there, monkeypatch):
    data = put_there(n=40)
    fs = node("b")
    small = sorted(data.keys() - {"b/big"})
    assert [fs.cat_file(path) for path in small[:9]] == [data[path] for path in small[:9]]
    assert not fs.cached_extent(small[-1])  # one after the other, each by itself
    wait_for_whole_files(monkeypatch)
    wanted = small[9:29]
    assert fs.cat(wanted) == {path: data[path] for path in wanted}
    monkeypatch.setattr(SharedFolder, "open", None)
    assert [fs.cat_file(path) for path in small[29:]] == [data[path] for path in small[29:]]
    assert asked(origin) == []
    assert fs.stats().bytes_shared >= sum(len(data[path]) for path in small)


def test_on_a_local_disk_it_is_read_where_it_is(node, put_there, monkeypatch):
    data = put_there()
    fs = node("b")
    read_all(fs, data)
    with fs.open("b/big") as file:
        assert file.read() == BIG
    assert fs._objects.engine.cache.usage() == (0, 0)
    fs = node("c")
    with fs.prefetch(fs.find("b")) as prefetch:
        prefetch.wait()
    assert prefetch.errors == []
    monkeypatch.setattr(Downloads, "_receive", None)
    read_all(fs, data)
    assert fs.stats().bytes_shared == sum(map(len, data.values()))


@pytest.mark.parametrize("block_size", [192 * KiB, 3 * MiB, 8 * MiB])
def test_blocks_of_another_size_are_read_where_they_are_or_copied(origin, node, put_there, block_size):
    put_there(n=0)
    fs = node("b", block_size=block_size)
    assert fs.cat_file("b/big") == BIG
    assert [kind for kind, _ in asked(origin) if kind == "read"] == []


def test_what_was_removed_from_the_local_cache_is_read_there(origin, node):
    origin.put("b/big", BIG)
    fs = node("a")
    fs.cat_file("b/big")
    flush(fs)
    asked(origin)
    assert fs.evict("b/big") > len(BIG)
    assert fs.cat_file("b/big") == BIG
    assert asked(origin) == []


def test_a_read_that_may_not_wait_does_not_open_a_file_there(origin, node):
    data = origin.put("b/x", noise(1000))
    node("a").cat_file("b/x")
    fs = node("b")
    assert fs.info("b/x")["size"] == 1000
    with pytest.raises(BlockingIOError):
        fs._reader.cached("b/x", 0, 10, nowait=True)
    assert fs.cat_file("b/x", 0, 10) == data[:10]
    assert fs._reader.cached("b/x", 0, 10, nowait=True) == data[:10]


@anywhere
@pytest.mark.parametrize("is_local_too", [False, True])
def test_what_is_not_what_the_origin_has_is_used_no_more(cloud, node, shared, is_local_too):
    """Its checksums are right: somebody forged it."""
    path = cloud.path("x")
    cloud.put("x", b"right")
    assert node("a").cat_file(path) == b"right"
    leave()
    [file] = files_in(shared)
    index = place_of(shared).open(f"{GATHERED}/{file.name}").index()
    [(piece, _)] = index.pieces
    forged = piece._replace(checksums=(zlib.crc32(b"wrong"),))
    file.write_bytes(b"wrong" + encoded_index(index.identity, index.made_at, [forged], list(index.rows)))
    fs = node("b")
    assert fs.cat_file(path) == b"wrong"
    if is_local_too:
        block = fs._objects.version(fs._objects.known(path)).block(0)
        fs._objects.engine.cache.put([(block, b"wrong")], fs._objects.config.bounds)
    assert fs.verify(path)[0].whole is False
    assert fs.cat_file(path) == b"right"


@anywhere
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("fails", ["open", "preadv"])
def test_a_file_that_cannot_be_read_is_asked_of_the_origin(node, put_there, monkeypatch, number, fails):
    data = put_there(n=3)
    fs = node("b")
    for path in data:
        assert fs.cat_file(path, 0, 10) == data[path][:10]

    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    if fails == "open":
        monkeypatch.setattr(SharedFolder, "open", fail)
    else:
        for name in ("read", "read_into"):
            monkeypatch.setattr(in_place._BlockOfPiece, name, fail)
        monkeypatch.setattr(OpenShared, "part", fail)
    read_all(fs, data)
    with fs.open("b/big") as file:
        assert file.read() == BIG


@anywhere
@pytest.mark.parametrize("offline", [False, True])
def test_a_file_that_was_replaced_by_one_with_more_in_it_is_looked_for(
    origin, node, shared, tmp_path, offline
):
    data = {f"b/{i}": origin.put(f"b/{i}", noise(50_000 + i, i)) for i in range(4)}
    first = node("a")

    def read(*paths):
        assert [first.cat_file(path) for path in paths] == [data[path] for path in paths]
        flush(first)

    first.find("b")
    read("b/0", "b/1")
    given = {"cache_dir": str(tmp_path / "b"), "shared_cache": str(shared), "offline": offline}
    second = fsspec.filesystem("cachedfs", target_protocol="gs", **given)
    assert second.cat_file("b/0") == data["b/0"]
    read("b/2")  # in a file that replaces the one before
    assert len(files_in(shared)) == 1
    second._objects.engine.cache.close_open()
    second._objects.engine.shared._place._opened.clear()
    asked(origin)
    assert second.cat_file("b/1") == data["b/1"]
    assert asked(origin) == []


def test_files_that_were_removed_do_not_stay_open(node, put_there, shared):
    data = put_there(n=1)
    fs = node("b")
    read_all(fs, data)
    folder = fs._objects.engine.shared._place
    assert folder._opened
    for path in files_in(shared):
        path.unlink()
    fs._objects.engine.cache.close_deleted()
    assert not folder._opened
    assert not fs._objects.engine.cache.open_blocks


@pytest.mark.parametrize("is_own", [True, False])
def test_the_file_of_another_user_is_checked_at_each_read(node, put_there, shared, is_own):
    put_there(n=0)
    fs = node("b")
    assert fs.cat_file("b/big") == BIG
    for file in fs._objects.engine.shared._place._opened.values():
        file.is_own = is_own
    fs._objects.engine.cache.close_open()
    assert fs.cat_file("b/big", 0, 10) == BIG[:10]
    [first] = shared.rglob("runs/*/*-0-800000")
    with first.open("r+b") as file:
        file.write(b"x")
    assert (fs.cat_file("b/big", 0, 10) == BIG[:10]) is not is_own


@anywhere
def test_it_is_complete_enough_for_offline(origin, node, put_there):
    data = put_there()
    fs = node("b", offline=True)
    read_all(fs, data)
    for path in ("b/other", "b/d/0/other"):  # the listings lack them
        with pytest.raises(FileNotFoundError):
            fs.cat_file(path)
    assert asked(origin) == []


@anywhere
def test_what_is_missing_offline_is_an_error(origin, node):
    origin.put("b/big", BIG)
    node("a").cat_file("b/big", 0, 100)
    fs = node("b", offline=True)
    assert fs.cat_file("b/big", 0, 100) == BIG[:100]
    with pytest.raises(OriginUnavailable, match="offline"):
        fs.cat_file("b/big", 19 * MiB, 20 * MiB)


@anywhere
def test_only_what_is_missing_is_asked_of_the_origin(origin, node):
    origin.put("b/big", BIG)
    fs = node("a", read_ahead=0)
    fs.info("b/big")
    assert fs.cat_file("b/big", 0, 6 * MiB) == BIG[: 6 * MiB]
    fs = node("b", read_ahead=0)
    origin.log.clear()
    assert fs.cat_file("b/big", 0, 8 * MiB) == BIG[: 8 * MiB]
    assert [(kind, tuple(what)) for kind, _, what in origin.log] == [("read", (6 * MiB, 8 * MiB))]
    origin.log.clear()
    fs = node("c", read_ahead=0)  # has what both have put there
    assert fs.cat_file("b/big", 0, 8 * MiB) == BIG[: 8 * MiB]
    assert origin.log == []


def test_an_object_that_was_replaced_is_read_in_its_new_version(origin, node, put_there, shared):
    put_there(n=1)
    for path in files_in(shared):
        os.utime(path, (time.time() - 61, time.time() - 61))
    new = origin.put("b/d/0/0", noise(50_000, 2))
    assert node("b").cat_file("b/d/0/0") == new


@pytest.mark.parametrize("writer_s", [-600, 600])
@pytest.mark.parametrize("reader_s", [-600, 600])
def test_ages_are_counted_by_the_clock_of_the_folder(origin, node, clock, shared, writer_s, reader_s):
    origin.put("b/k", noise(50_000))
    clock(writer_s)
    node("a").cat_file("b/k")
    leave()
    asked(origin)
    clock(reader_s - writer_s)
    node("b", max_age=300).cat_file("b/k")
    assert asked(origin) == []
    leave()
    for path in files_in(shared):
        os.utime(path, (time.time() - reader_s - 300,) * 2)
    node("c", max_age=300).cat_file("b/k")
    assert asked(origin) == [("lookup", "b/k")]


def test_nothing_is_fresh_where_the_clock_of_the_folder_cannot_be_asked(origin, node, put_there, monkeypatch):
    data = put_there(n=1)
    monkeypatch.setattr(SharedFolder, "now", lambda self: None)
    assert node("b").cat_file("b/d/0/0") == data["b/d/0/0"]
    assert asked(origin) == [("lookup", "b/d/0/0")]
    assert node("c", offline=True).cat_file("b/d/0/0") == data["b/d/0/0"]


def test_what_was_asked_before_our_own_write_is_not_used(origin, node):
    origin.put("b/k", noise(50_000))
    fs = node("a")
    fs.find("b")
    fs.cat_file("b/k")
    fs = node("b")
    new = noise(40_000, 3)
    fs.pipe_file("b/k", new)
    fs.pipe_file("b/l", new)
    assert fs.cat_file("b/k") == new
    assert sorted(fs.find("b")) == ["b/k", "b/l"]


def test_metadata_from_before_our_own_write_is_not_used(origin, node):
    origin.put("b/k", b"old")
    node("a").cat_file("b/k")
    fs = node("b")
    fs.pipe_file("b/k", b"new")
    assert fs.cat_file("b/k") == b"new"


def test_blocks_that_were_evicted_before_are_not_shared(origin, node, filled, monkeypatch):
    monkeypatch.setattr(shared_writer, "LOOK_S", 600)
    monkeypatch.setattr(gatherer, "IN_MEMORY", 0)
    data = filled(n=3)
    fs = node("a")
    assert fs.cat(list(data)) == data
    fs._objects.engine.drain(120)
    fs.evict("b/big")
    fs.evict("b/d/1/1")
    leave()
    asked(origin)
    assert node("b").cat(list(data)) == data
    assert {path for _, path in asked(origin)} == {"b/big", "b/d/1/1"}


@anywhere
def test_what_is_put_there_later_is_found(origin, node, filled, monkeypatch, tmp_path, shared):
    monkeypatch.setattr(shared_index, "RENEW_S", 0)
    data = filled(n=4)
    one = node("a")
    options = {"cache_dir": str(tmp_path / "b"), "shared_cache": str(shared)}
    other = CachedFileSystem(target_protocol="gs", **options)
    assert other.cat_file("b/big", 0, 5) == BIG[:5]
    for path in ("b/d/0/0", "b/d/1/1"):
        assert one.cat_file(path) == data[path]
        flush(one)
        asked(origin)
        other.exists(f"c/{path}")  # in the background it looks at what is there
        until(other._objects.engine.shared._index._looks[GATHERED].future.done)
        asked(origin)
        assert other.cat_file(path) == data[path]
        assert asked(origin) == []


def test_a_forked_child_uses_it_too(origin, node, put_there):
    data = put_there()
    fs = node("b")
    assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]
    child = os.fork()
    if not child:
        is_right = (
            fs.cat_file("b/big") == BIG and fs._objects.engine.bytes_fetched - fs.stats().bytes_shared <= 0
        )
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert asked(origin) == []


# Trouble.


@pytest.mark.usefixtures("on_a_network")
@pytest.mark.parametrize(
    ("is_there", "n_threads"), [(False, 32), (True, 32), (True, 1)], ids=["before", "known", "no thread left"]
)
def test_a_folder_that_does_not_answer_is_left_alone(
    node, filled, put_there, monkeypatch, caplog, is_there, n_threads
):
    """It stops before it is looked at, or after its content is known."""
    monkeypatch.setattr(shared_cache, "THREADS", n_threads)
    data = (put_there if is_there else filled)(n=12)  # more than MANY wait for a file
    fs, answers, calls = node("b"), threading.Event(), []
    if is_there:
        assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]

    def hang(*args):
        calls.append(args)
        answers.wait(120)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(SharedFolder, "answers_s", 0.05)
    for name in ("listed", "open", "write", "now", "check"):
        monkeypatch.setattr(SharedFolder, name, hang)
    try:
        assert fs.cat(list(data)) == data
        n = len(calls)
        assert 1 <= n <= len(data)
        for path, content in data.items():
            fs.evict(path)
            assert fs.cat_file(path) == content
        assert len(calls) == n
        assert len(quiet(caplog)) == 1
        assert "did not answer" in quiet(caplog)[0]
        assert "did not answer" in fs.stats().shared_cache
    finally:
        answers.set()


def test_a_folder_and_a_bucket_may_take_two_seconds_for_an_answer_and_drive_ten():
    assert ANSWERS_S == (2.0, 2.0, 10.0)


def test_a_read_on_a_local_disk_has_no_limit(origin, node, put_there, monkeypatch, caplog):
    data = put_there(n=4)
    fs = node("b")
    fs.find("b")
    fs.cat_file("b/big", end=1)  # now it knows what is there
    monkeypatch.setattr(SharedFolder, "answers_s", 0.0)
    assert {path: fs.cat_file(path) for path in data} == data
    assert asked(origin) == []
    assert quiet(caplog) == []


def test_a_folder_that_has_much_to_tell_is_not_left_alone(origin, node, put_there, monkeypatch, caplog):
    """Storing what it says takes longer than an answer may."""
    data = put_there(n=4)
    fs, waits, wait, store = node("b"), [], asyncio.wait, SharedIndex._import

    def wait_again(*args, **options):
        waits.append(options)
        return wait(*args, **options)

    def store_slowly(*args):
        until(lambda: len(waits) > 2)
        store(*args)

    monkeypatch.setattr(SharedFolder, "answers_s", 0.05)
    monkeypatch.setattr(asyncio, "wait", wait_again)
    monkeypatch.setattr(SharedIndex, "_import", store_slowly)
    asked(origin)
    assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]
    assert asked(origin) == []
    assert quiet(caplog) == []


def test_a_folder_that_was_left_alone_is_used_again_after_half_a_minute(origin, node, put_there, monkeypatch):
    data = put_there(n=4)
    fs = node("b")
    fs._objects.engine.shared._place.leave_alone("a test")
    assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]
    assert asked(origin) == [("read", "b/d/0/0")]
    now = time.monotonic() + 31
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert fs.cat_file("b/d/1/1") == data["b/d/1/1"]
    assert asked(origin) == []


def test_a_process_that_ends_before_all_is_there_says_so(node, filled, monkeypatch, caplog):
    data, write, answers = filled(n=1), SharedFolder.write, threading.Event()

    def wait_and_write(*args, **options):
        answers.wait(120)
        write(*args, **options)

    monkeypatch.setattr(SharedFolder, "write", wait_and_write)
    fs = node("a")
    read_all(fs, data)
    assert fs._objects.engine.drain(120)
    monkeypatch.setattr(shared_writer, "STALLED_S", 0.01)
    assert not fs._objects.engine.shared.finish()
    monkeypatch.setattr(SharedFolder, "answers_s", 0.05)
    forget()
    answers.set()
    assert ["ends before all" in message for message in quiet(caplog)] == [True]


def replaced_by_a_link(path):
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


def changed(path):
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def cut_off(path):
    os.truncate(path, path.stat().st_size - 100)


@anywhere
@pytest.mark.parametrize(
    "damage",
    [replaced_by_a_link, replaced_by_a_pipe, replaced_by_a_folder, changed, emptied, cut_off, os.unlink],
)
def test_a_file_that_is_not_what_it_should_be_is_a_miss(node, put_there, shared, caplog, damage):
    data = put_there()
    for path in files_in(shared):
        damage(path)
    fs = node("b")
    read_all(fs, data)
    assert fs.stats().bytes_shared <= (sum(map(len, data.values())) - 2 * MiB if damage is changed else 0)
    assert (quiet(caplog) == []) is (damage is os.unlink)


@anywhere
def test_a_file_with_another_piece_than_its_name_says_is_a_miss(node, put_there, shared, caplog):
    data = put_there(n=1)
    [first], [other] = shared.rglob("runs/*/*-0-800000"), shared.rglob("runs/*/*-800000-1000000")
    first.unlink()
    os.link(other, first)
    fs = node("b")
    read_all(fs, data)
    assert "not what its name says" in quiet(caplog)[0]
    fs = node("c")  # the node that found it has put a right one there
    read_all(fs, data)
    assert len(quiet(caplog)) == 1
    assert fs.stats().bytes_fetched == 0


@anywhere
def test_a_file_that_vanishes_is_a_miss(node, put_there, shared):
    data = put_there()
    fs = node("b")
    assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]
    for path in files_in(shared):
        path.unlink()
    read_all(fs, data)


def test_a_full_disk_only_stops_the_filling(node, filled, shared, monkeypatch, caplog):
    data = filled()

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shared_folder.disk, "write_all", full)
        read_all(node("a"), data)
        leave()
    assert [message for message in quiet(caplog) if "is full" in message] == quiet(caplog)[:1]
    assert files_in(shared) == []
    read_all(node("b"), data)


def test_metadata_that_could_not_be_written_is_written_later(origin, node, shared, monkeypatch):
    """Of a large object its pieces come first, and once its metadata."""
    data, write = {"b/big": origin.put("b/big", BIG)}, SharedFolder.write

    def without_metadata(self, name, *args, **options):
        if name.startswith("gathered/"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, *args, **options)

    fs = node("a")
    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "write", without_metadata)
        read_all(fs, data)
        flush(fs)
    leave()
    fs = node("b")
    asked(origin)
    read_all(fs, data)
    assert asked(origin) == []


@pytest.fixture
def only_reads(origin, node, put_there, shared):
    """Return a function that reads what is there, and lets nothing new come there."""
    data = put_there()

    def read(fs):
        files = files_in(shared)
        read_all(fs, data)
        assert asked(origin) == []
        origin.put("c/new", noise(50_000, 9))
        fs.cat_file("c/new")
        leave()
        assert files_in(shared) == files

    return read


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])  # as after `mount -o remount,ro`
def test_a_folder_that_can_only_be_read_is_read(only_reads, node, monkeypatch, caplog, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SharedFolder, "_temp", refuse)
    only_reads(node("b"))
    assert quiet(caplog) == []


def test_a_second_cache_directory_is_a_shared_cache_that_is_only_read(only_reads, node, shared, tmp_path):
    only_reads(node("b", cache_dir=[str(tmp_path / "b"), str(shared)], shared_cache=None))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda shared: shared.mkdir() or shared.chmod(0o777), "all users can write"),
        (lambda shared: shared.mkdir() or shared.chmod(0o1777), "all users can write"),
        (lambda shared: shared.write_text(""), "not a folder|Not a directory"),
        (lambda shared: (shared.mkdir(), (shared / "cachedfs-shared-1").symlink_to(".")), "is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_once(node, filled, shared, caplog, make, reason):
    make(shared)
    read_all(node("a"), filled(n=4))
    leave()
    [message] = quiet(caplog)
    assert str(shared) in message
    assert re.search(reason, message)
    assert files_in(shared) == []


def test_who_trusts_anyone_uses_a_folder_that_all_may_write(origin, node, put_there, shared):
    shared.mkdir()
    shared.chmod(0o1777)
    read_all(node("b", shared_cache_trust="anyone"), put_there(n=4, shared_cache_trust="anyone"))
    assert asked(origin) == []


@pytest.mark.parametrize(("mode", "of_files"), [(0o700, 0o600), (0o755, 0o644), (0o2770, 0o660)])
def test_files_have_the_mode_of_the_folder(put_there, shared, mode, of_files):
    shared.mkdir()
    shared.chmod(mode)
    before = os.umask(0o077)
    try:
        put_there(n=4)
    finally:
        os.umask(before)
    for path in shared.rglob("*"):
        assert path.stat().st_mode & 0o7777 == (mode if path.is_dir() else of_files), path


def test_metadata_of_what_is_another_thing_on_each_machine_is_not_used(origin, node, shared, caplog):
    rows = [["object", "/etc/hostname", 1.5, '["file",1,"x",null,{}]']]
    folder = place_of(shared)
    folder.check()
    folder.write("gathered/" + "0a" * 16, [], lambda: encoded_index("file||-", 1.5, [], rows))
    fs = node("a")
    assert not fs.exists("b/k")
    assert fs._objects.store.lookup("file||-", "/etc/hostname") is None
    assert "not the same on every machine" in quiet(caplog)[0]


def test_reads_of_one_process_in_the_same_part_do_not_wait_for_each_other(origin, node, monkeypatch):
    waits, wait = [], SharedFolder.wait_for_others
    monkeypatch.setattr(SharedFolder, "wait_for_others", lambda folder: waits.append(1) or wait(folder))
    origin.put("b/big", BIG)
    fs = node("a")
    fs.find("b")
    for at in range(8):
        assert fs.cat_file("b/big", at * MiB, at * MiB + 9) == BIG[at * MiB : at * MiB + 9]
    assert not waits
