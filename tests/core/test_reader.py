"""The reader: shared requests, errors, replaced objects, readahead, and a disk that is slow or full."""

import asyncio
import threading
from functools import partial

import fsspec
import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.core.download import ALL, Download, DownloadStopped
from cachedfs.errors import CachedFSError, CacheError, ChecksumMismatch, ObjectChanged
from cachedfs.origins.base import Reply
from tests.fakes import gate
from tests.support import KiB, MiB, forget, noise, until


@pytest.fixture
def fs(origin):
    return fsspec.filesystem("cachedfs", target_protocol="gs")


def reads(origin):
    return [what for kind, _, what in origin.log if kind == "read"]


def in_threads(n, function):
    """Run `function` in n threads; return what they returned or raised."""
    results = [None] * n

    def run(i):
        try:
            results[i] = function(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    return threads, results


def test_all_readers_of_a_failed_request_get_its_error_and_the_next_read_works(fs, origin):
    data = origin.put("b/k", noise(3 * MiB))
    fs.info("b/k")
    origin.break_after[2] = 2 * MiB
    gate(fs, origin, is_open=False)
    threads, results = in_threads(8, lambda i: fs.cat_file("b/k", 5 * i, 3 * MiB - 5 * i))
    until(lambda: sum(len(download._waiters) for download in fs._objects.engine.active_requests.copy()) == 8)
    gate(fs, origin, is_open=True)
    for thread in threads:
        thread.join()
    assert [type(result) for result in results] == [CachedFSError] * 8
    assert fs._objects.engine.drain(120)
    assert not fs._objects.engine.by_block
    assert fs.cat_file("b/k") == data
    # The two received blocks were kept; only the third was requested again.
    assert [(want.start, want.stop) for want in reads(origin)] == [(0, 3 * MiB), (2 * MiB, 3 * MiB)]


def test_an_answer_with_other_bytes_than_requested_is_an_error(fs, origin):
    data = origin.put("b/k", noise(20 * MiB))
    with fs.open("b/k") as file:
        assert file.read(10) == data[:10]
        origin.objects["b/k"] = (1, data[: 15 * MiB + 5])  # shorter, under the same version
        file.seek(15 * MiB)
        with pytest.raises(ObjectChanged, match="bytes 15728640 to 15728645 were announced"):
            file.read(10)


def test_a_cancelled_read_does_not_stop_the_request_for_others(fs, origin):
    data = origin.put("b/k", noise(MiB))
    fs.info("b/k")
    gate(fs, origin, is_open=False)
    reader, engine = fs._reader, fs._objects.engine

    async def two_readers():
        first = asyncio.ensure_future(reader.read("b/k"))
        second = asyncio.ensure_future(reader.read("b/k"))

        def both_wait():
            return any(len(download._waiters) > 1 for download in engine.active_requests.copy())

        await asyncio.to_thread(until, both_wait)
        first.cancel()
        origin.gate.set()
        return await second

    assert engine.run(two_readers()) == data
    assert len(reads(origin)) == 1


def test_an_object_that_is_replaced_during_each_answer_is_an_error_after_three_tries(
    fs, origin, monkeypatch, tmp_path
):
    async def body(number, data):
        origin.put("b/k", data)
        raise ObjectChanged("b/k was replaced")
        yield

    origin.put("b/k", noise(100))
    monkeypatch.setattr(origin, "_body", body)
    with pytest.raises(ObjectChanged):
        fs.cat_file("b/k")
    assert len(reads(origin)) == 3
    callback, begun = fsspec.Callback(), []
    monkeypatch.setattr(callback, "set_size", begun.append)
    with pytest.raises(ObjectChanged):
        fs.get_file("b/k", str(tmp_path / "k"), callback=callback)
    assert begun == [100] * 3


@pytest.fixture
def let_go(monkeypatch):
    """An event: before it is set, the disk stores nothing."""
    event, put = threading.Event(), BlockStore.put

    def slow_put(self, *args, **kwargs):
        assert event.wait(120)
        return put(self, *args, **kwargs)

    monkeypatch.setattr(BlockStore, "put", slow_put)
    return event


def test_bodies_wait_while_the_disk_is_behind(fs, origin, monkeypatch, let_go):
    monkeypatch.setattr("cachedfs.core.engine.Engine.max_queued", 2 * MiB)
    data = origin.put("b/k", noise(12 * MiB))
    fs.info("b/k")
    threads, results = in_threads(1, lambda i: fs.cat_file("b/k"))
    engine = fs._objects.engine
    until(lambda: engine.store_queue.queued_bytes > 2 * MiB)
    for _ in range(500):  # more turns of the loop than all the bytes take
        engine.run(asyncio.sleep(0))
    assert engine.store_queue.queued_bytes <= 6 * MiB, (
        "two requests stop at the limit, each at its next block"
    )
    let_go.set()
    threads[0].join()
    assert results == [data]


@pytest.mark.parametrize("has_sizes", [True, False])
def test_an_object_without_a_fingerprint_is_read_without_the_cache(fs, origin, has_sizes):
    origin.has_fingerprints, origin.has_sizes = False, has_sizes
    data = origin.put("b/k", noise(5 * MiB))
    assert fs.cat_file("b/k", 10, 20) == data[10:20]
    assert fs.cat_file("b/k") == data
    origin.log.clear()
    with fs.open("b/k") as file:
        assert file.read(MiB) == data[:MiB]
        assert [file.read(4 * KiB) for _ in range(100)] == [
            data[MiB + i * 4 * KiB :][: 4 * KiB] for i in range(100)
        ]
    assert len(origin.log) <= 2
    assert fs.stats().blocks == 0


@pytest.mark.usefixtures("default_patience")
@pytest.mark.parametrize("then", ["all", "a part"])
def test_an_object_without_a_fingerprint_can_be_read_on_after_a_pause(fs, origin, then):
    origin.has_fingerprints = False
    data = origin.put("b/k", noise(5 * MiB))
    with fs.open("b/k") as file:
        assert file.read(10) == data[:10]
        until(lambda: not fs._objects.engine.active_requests)  # the request ended because the reader paused
        if then == "all":
            assert file.read() == data[10:]
        else:
            assert file.read(3 * MiB) == data[10 : 10 + 3 * MiB]


@pytest.fixture
def full_disk(monkeypatch):
    def full(self, *args, **kwargs):
        raise CacheError("the disk is full")

    monkeypatch.setattr("cachedfs.cache.block_writer.BlockWriter._reserve", full)


@pytest.mark.usefixtures("full_disk")
def test_a_read_succeeds_with_few_requests_when_nothing_can_be_stored(fs, origin):
    data = origin.put("b/k", noise(20 * MiB))
    with fs.open("b/k") as file:
        assert b"".join(iter(lambda: file.read(50 * KiB), b"")) == data
    # A block that could not be stored before its reader came may be fetched twice.
    assert len(data) <= fs.stats().bytes_fetched < 2 * len(data)
    assert fs.stats().requests <= 10
    fs._objects.engine.drain(120)
    assert fs.stats().cannot_store == "the disk is full"
    assert fs.cat_file("b/k") == data


@pytest.mark.usefixtures("full_disk")
def test_memory_for_a_reader_is_bounded_when_nothing_can_be_stored(fs, origin):
    data = origin.put("b/k", noise(80 * MiB))
    with fs.open("b/k") as file:
        for start in (0, 40, 0, 60, 20, 0):
            file.seek(start * MiB)
            for i in range(start, start + 10):
                assert file.read(MiB) == data[i * MiB : (i + 1) * MiB]
            fs._objects.engine.run(asyncio.sleep(0))
            assert fs._objects.engine.speculation.memory <= 80 * MiB


def test_the_window_is_a_quarter_of_the_cache_or_full_when_nothing_can_be_stored(fs, monkeypatch):
    engine, config = fs._objects.engine, fs._objects.config
    for allowed, window in ((100 * MiB, 25 * MiB), (1 << 40, 128 * MiB), (1000, MiB)):
        monkeypatch.setattr(engine.cache, "allowed", allowed)
        assert engine.window(config) == window
    monkeypatch.setattr(engine.cache._own, "cannot_store", "the disk is full")
    assert engine.window(config) == 64 * MiB


def short_of(fs, path, index):
    """Store a valid block that is shorter than the object, as from an origin that reuses a fingerprint."""
    objects = fs._objects
    key = objects.version(objects.known(path))
    objects.engine.run(
        asyncio.sleep(0)
    )  # after what the last read tells the read-ahead: it would request what is evicted
    objects.engine.drain(120)
    objects.engine.cache.evict(objects.identity, path)
    objects.engine.cache.put([(key.block(index), b"short")], objects.config.bounds)


READS = {
    "cat_file": lambda fs, path: fs.cat_file(path),
    "cat_ranges": lambda fs, path: fs.cat_file(path, MiB, MiB + 100),
    "file": lambda fs, path: fs.open(path).read(),
    "pieces": lambda fs, path: b"".join(iter(partial(fs.open(path).read, 1000), b"")),
}


@pytest.mark.parametrize("how", READS)
def test_a_block_that_is_shorter_than_its_object_is_fetched_again(origin, how):
    read = READS[how]
    data = origin.put("b/k", noise(2 * MiB + 500))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    expected = read(fs, "b/k")
    for index in range(3):
        short_of(fs, "b/k", index)
        assert read(fs, "b/k") == expected
        assert fs.cat_file("b/k") == data
        fs._objects.engine.drain(120)
        n_requests = len(origin.log)
        assert fs.cat_file("b/k") == data
        assert len(origin.log) == n_requests


def test_a_reader_does_not_wait_until_prefetched_blocks_are_stored(fs, origin, monkeypatch, let_go):
    """The disk is slower than the link: here it stores nothing."""
    monkeypatch.setattr("cachedfs.core.engine.Engine.max_queued", 16 * MiB)
    origin.put("b/big", noise(64 * MiB))
    data = origin.put("b/other", noise(4 * MiB, 1))
    engine, got = fs._objects.engine, []
    with fs.prefetch("b/big") as plan:
        until(lambda: engine.store_queue.queued_bytes > 8 * MiB and engine.bytes_fetched >= 8 * MiB)
        thread = threading.Thread(target=lambda: got.append(fs.cat_file("b/other")))
        thread.start()
        thread.join(600)
        assert got == [data]
        assert not plan.progress.is_over
        let_go.set()


async def test_a_reader_that_waits_gets_bytes_that_are_stored_before_it_goes_on():
    download = Download(demand=10)
    download.begin(ObjectInfo("b/k", size=10), None, Range(0, 10))
    waiting = asyncio.ensure_future(download.read(2, 9))
    await asyncio.sleep(0)
    download.feed(b"01234")
    download.feed(b"56789")
    download.n_received = 1
    download.finish()
    download.stored(True)
    assert download.released
    assert await waiting == b"2345678"
    with pytest.raises(DownloadStopped):
        await download.read(2, 9)


def test_cached_objects_behind_many_new_ones_cost_no_request(fs, origin):
    cached = {f"b/cached{number}": origin.put(f"b/cached{number}", b"%d" % number) for number in range(20)}
    new = {f"b/new{number}": origin.put(f"b/new{number}", b"%d" % number) for number in range(20)}
    assert fs.cat(list(cached)) == cached
    forget()
    n_before = len(origin.log)
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    assert fs.cat([*new, *cached]) == new | cached
    assert len(origin.log) - n_before == len(new)


def join_a_wrong_body(origin, monkeypatch):
    """Read an object of nine blocks whose first body fails its checksum; return its data, a thread that reads it, and
    a function that makes the checksum fail.

    When this returns, eight blocks are received.
    """
    data, n_bodies = origin.put("b/k", noise(9 * 64 * KiB)), []
    wrong, end = bytes(8 * 64 * KiB), threading.Event()

    async def body(number, piece):
        n_bodies.append(number)
        if len(n_bodies) > 1:
            yield piece
            return
        yield wrong
        await asyncio.to_thread(end.wait)
        raise ChecksumMismatch("gs://b/k: its checksum is wrong")

    monkeypatch.setattr(origin, "_body", body)
    monkeypatch.setattr("tests.fakes.Reply", partial(Reply, is_checked_at_end=True))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=64 * KiB)
    threads, results = in_threads(1, lambda _: fs.cat_file("b/k"))
    engine = fs._objects.engine
    until(lambda: any(download.filled == len(wrong) for download in list(engine.active_requests)))

    def fail():
        end.set()
        threads[0].join(60)
        assert results == [data]
        assert engine.drain(60)
        assert not engine.by_block

    return fs, data, fail


def test_a_read_that_shared_a_wrong_body_begins_again(origin, monkeypatch):
    fs, data, fail = join_a_wrong_body(origin, monkeypatch)
    to_thread = asyncio.to_thread

    async def late(copy):
        copied = copy()
        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        await to_thread(fail)
        return copied

    monkeypatch.setattr(asyncio, "to_thread", late)
    assert fs.cat_file("b/k") == data


def test_a_copy_of_received_bytes_is_a_miss_once_they_are_known_to_be_wrong(origin, monkeypatch):
    fs, data, fail = join_a_wrong_body(origin, monkeypatch)
    reader, take = fs._reader, Download.take

    def late(download, *args):
        monkeypatch.setattr(Download, "take", take)
        n = take(download, *args)
        fail()
        return n

    monkeypatch.setattr(Download, "take", late)
    assert reader.cached("b/k", 0, 2 * 64 * KiB) is None
    assert reader.cached("b/k", 0, None) == data


@pytest.mark.parametrize("size", [-1, 64 * KiB])
def test_a_file_with_wrong_bytes_raises_at_its_next_read(origin, monkeypatch, size):
    fs, data, fail = join_a_wrong_body(origin, monkeypatch)
    with fs.open("b/k", block_size=0) as file:
        assert file.read(64 * KiB) == bytes(64 * KiB)
        fail()
        with pytest.raises(ChecksumMismatch):
            file.read(size)
    assert fs.cat_file("b/k") == data


def test_a_block_of_which_a_request_brings_only_the_beginning_is_fetched_again(fs, origin):
    data = origin.put("b/k", noise(4 * MiB))
    engine, want = fs._objects.engine, Range(0, 3 * MiB // 2)

    async def registered():
        await fs._reader.lookups.resolve("b/k", want, demand=ALL)
        return [index for _, index in engine.by_block]

    assert engine.run(registered()) == [0]
    assert fs.cat_file("b/k") == data


@pytest.mark.parametrize("is_opened", [False, True])
def test_bytes_that_came_with_a_lookup_stay_for_its_readers_but_not_for_an_open_file(fs, origin, is_opened):
    origin.put("b/k", noise(MiB))

    async def look_up():
        reader = fs._reader
        if is_opened:
            return (await reader.open("b/k"))[1]
        return (await reader.lookups.resolve("b/k", Range(0, MiB), demand=ALL))[1]

    download = fs._objects.engine.run(look_up())
    fs._objects.engine.call_soon(download.want, MiB)
    until(lambda: download.done)
    assert fs._objects.engine.drain(60)
    assert download.released is is_opened


def test_ranges_of_one_object_in_a_call_are_of_one_look_for_changes(fs, origin, monkeypatch):
    origin.put("a", noise(100))
    fs.cat_file("a")
    counters, looks = fs._objects.store.counters, []
    at = counters.at
    monkeypatch.setattr(counters, "at", lambda slots: looks.append(slots) or at(slots))
    assert fs.cat_ranges(["a"] * 20, range(20), range(1, 21)) == [noise(100)[i : i + 1] for i in range(20)]
    assert len(looks) == 1
