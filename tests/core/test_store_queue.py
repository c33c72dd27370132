"""The writer thread: what it stores in which order, and that nothing ends it."""

import sys
import threading
import weakref

import pytest

from cachedfs.common.types import CacheBounds, ObjectKey
from cachedfs.core.download import Download, FetchedBlock
from cachedfs.core.store_queue import LEAST_BYTES, StoreQueue
from cachedfs.errors import CacheError
from tests.support import until

SMALL, LARGE = CacheBounds(1 << 20), CacheBounds(1 << 30)


class Cache:
    """A cache that only records what is stored."""

    def __init__(self):
        self.metadata, self.calls = self, []
        self.is_waiting, self.may_store = threading.Event(), threading.Event()

    def wait(self):
        self.is_waiting.set()
        self.may_store.wait(60)

    def keep_records(self, records, *, waits):
        assert waits
        self.calls.append(("records", records))

    def put(self, pairs, bounds, records, victims=(), *, shared):
        self.calls.append(("blocks", [key.index for key, _ in pairs], bounds, list(records), list(victims)))


def block(index):
    key = ObjectKey("i", "p", "1", 1 << 16).block(index)
    return FetchedBlock(key, [memoryview(b"x")], 1, Download(demand=1))


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
def queue(cache):
    queue = StoreQueue(cache, lambda blocks, are_stored: cache.calls.append(("stored", are_stored)))
    yield queue
    cache.may_store.set()
    queue.close()


def test_queued_blocks_are_stored_together_and_calls_come_last(cache, queue):
    # The thread waits with it until all the others are there.
    queue.put(then=cache.wait)
    assert cache.is_waiting.wait(60)
    queue.put([block(0), block(1)], LARGE)
    queue.put([block(2)], SMALL, ["record"], lambda: cache.calls.append("then"))
    queue.put([block(3)], SMALL, ["another"])
    assert queue.queued_bytes == 4 * LEAST_BYTES
    cache.may_store.set()
    assert queue.drain(60)
    assert cache.calls == [
        ("blocks", [0, 1], LARGE, ["record", "another"], []), ("stored", True),
        ("blocks", [2, 3], SMALL, [], []), ("stored", True),
        "then",
    ]  # fmt: skip
    assert queue.queued_bytes == 0


def test_errors_do_not_end_the_thread(cache, queue, caplog):
    def fail(*args):
        raise ValueError("wrong")

    queue.plans.append(fail)
    queue.put([block(0)], LARGE, then=fail)
    assert queue.drain(60)
    queue.plans.clear()
    queue.put([block(1)], LARGE)
    assert queue.drain(60)
    assert cache.calls == [("stored", False), ("blocks", [1], LARGE, [], []), ("stored", True)]
    assert len(caplog.records) == 2


def test_records_are_stored_alone_without_blocks_and_after_blocks_that_could_not_be_stored(cache, queue):
    def fail(*args):
        raise CacheError("full")

    queue.put(records=["alone"])
    assert queue.drain(60)
    queue.plans.append(fail)
    queue.put([block(0)], LARGE, ["record"])
    assert queue.drain(60)
    assert cache.calls == [("records", ["alone"]), ("stored", False), ("records", ["record"])]


def test_what_was_stored_does_not_stay_in_memory(cache, queue):
    fetched = block(0)
    download = weakref.ref(fetched.download)
    queue.put([fetched], LARGE)
    del fetched
    until(lambda: download() is None)


def test_drain_ends_in_time_and_does_not_wait_for_a_thread_that_is_not_there(cache, queue):
    assert queue.drain(60)
    queue.put([block(0)], LARGE, then=cache.wait)
    assert not queue.drain(0.0)
    cache.may_store.set()
    queue.close()
    until(lambda: queue._thread is None)
    assert ("blocks", [0], LARGE, [], []) in cache.calls
    assert queue.drain(60)


def test_what_is_added_while_the_interpreter_exits_starts_no_thread(queue, monkeypatch):
    removed = []
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    queue.put([block(0)], LARGE, then=lambda: removed.append(1))
    assert (queue.queued_bytes, queue._thread, removed) == (0, None, [1])
