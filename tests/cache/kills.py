"""Operations on a cache, their steps, and child processes that die at one of them.

The steps of an operation are what it was seen to do: every system call of `CALLS` and every statement that it gives to
SQLite, in order. So a call that is new has its kill without being named here.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index import database
from cachedfs.cache.index.metadata_records import FeedSnapshot, MetadataRecord
from cachedfs.common.types import CacheBounds, Change, Changes, ObjectInfo
from cachedfs.core.download import Download, FetchedBlock
from cachedfs.core.store_queue import StoreQueue
from cachedfs.errors import CacheError
from tests.cache.faults import CALLS, real_call, replace_call
from tests.cache.helpers import BLOCK, content, disk_usage, file_of, flip, key_of, put, room_for, whole
from tests.support import until

IDENTITY = "gs://test"
OLD, NEW = key_of("b/old"), key_of("b/new")
N_OLD = 6


class Step(NamedTuple):
    """The `nth` call of one name in an operation, from 1 on; the process dies before or after it."""

    operation: str
    call: str
    nth: int
    when: str


# What is done: each with the state it starts from. `prepare` is run once, by the test, in a directory that is copied
# for every kill; `act` by the child, on a cache that is open and warm (unless it opens one itself).


def filled(cache):
    put(cache, OLD, *range(N_OLD))


def full(cache):
    bounds = room_for(cache, N_OLD)
    put(cache, OLD, *range(N_OLD), bounds=bounds)
    return bounds


def indexless(cache):
    filled(cache)
    Path(cache.root or "", "index.db").unlink()


def damaged_index(cache):
    filled(cache)
    cache.close()
    Path(cache.root or "", "index.db").write_bytes(b"no database, " * 1000)


def damaged_block(cache):
    filled(cache)
    flip(file_of(cache, OLD, 1), 100)


def put_new(cache, bounds):
    put(cache, NEW, 0, 1, bounds=bounds)


def put_after_noticing(cache, bounds):
    try:
        put_new(cache, bounds)
    except CacheError:
        put_new(cache, bounds)


def open_and_put(directory, bounds):
    put_new(BlockStore(directory, explicit=True), bounds)


def evict(cache, bounds):
    cache.evict(IDENTITY, OLD.path)


def meet_damage(cache, bounds):
    assert whole(cache, OLD, 1) is None
    assert whole(cache, OLD, 2) is not None


def keep_records(cache, bounds):
    cache.metadata.changed(IDENTITY, ["b/old"])
    cache.metadata.keep_records([_record(cache, path) for path in ("b/old", "b/new")])


def _record(cache, path):
    info = ObjectInfo(path, size=2 * BLOCK, fingerprint="v1")
    return MetadataRecord(IDENTITY, path, info, time.time(), cache.metadata.counter(IDENTITY, path))


def watched(cache):
    filled(cache)
    cache.metadata.begin_feed(IDENTITY, "b", "t1", time.time() - 500)
    feed = cache.metadata.feed(IDENTITY, "b")
    infos = [ObjectInfo(f"b/{n}", size=n, fingerprint="v1", id=str(n)) for n in range(3)]
    cache.metadata.keep_listings(
        IDENTITY,
        {"b": infos},
        checked_at=time.time() - 400,
        counters={info.path: cache.metadata.counter(IDENTITY, info.path) for info in infos},
        folder_counters={"b": cache.metadata.listing_counter(IDENTITY, "b")},
        watch=FeedSnapshot(feed.id, feed.number, (("b", "B"),)),
    )


def poll(cache, bounds):
    change = Change("1", (("B", "1"),), ObjectInfo("", size=1, fingerprint="v2", id="1"))
    feed = cache.metadata.feed(IDENTITY, "b")
    cache.metadata.follow_feed(IDENTITY, feed, Changes("t2", (change,)), checked_at=time.time())


def nothing_old_counts(cache):
    record, now = cache.metadata.lookup(IDENTITY, "b/1"), cache.metadata.counter(IDENTITY, "b/1")
    is_forgotten = record is None or record.counter != now
    assert is_forgotten or cache.metadata.feed(IDENTITY, "b").token == "t1"  # else it will be asked for again


def lend(cache, bounds):
    with cache.lease(2 * BLOCK, bounds) as lease:
        lease.write_at(0, bytes(2 * BLOCK))
        lease.seal()


def write_behind(cache, bounds):
    writer = StoreQueue(cache, lambda blocks, are_kept: None)
    blocks = []
    for index in range(2):
        data = memoryview(content(NEW, index))
        blocks.append(FetchedBlock(NEW.block(index), [data], len(data), Download(demand=BLOCK)))
    writer.put(blocks, bounds, [_record(cache, NEW.path)])
    assert writer.drain(120)


class Operation(NamedTuple):
    prepare: Callable[[BlockStore], CacheBounds | None] | None
    act: Callable[[Any, CacheBounds], None]  # gets a cache; the directory alone, when it opens one itself
    flaws: tuple[str, ...] = ()  # what an audit finds because of `prepare`, until it repairs
    look: Callable[[BlockStore], None] | None = None  # asserts what else must be true wherever it died


OPERATIONS = {
    "first put": Operation(None, open_and_put),
    "put": Operation(filled, put_new),
    "put that evicts": Operation(full, put_new),
    "put without index": Operation(indexless, put_after_noticing),
    "put with damaged index": Operation(damaged_index, put_after_noticing),
    "evict": Operation(filled, evict),
    "discard": Operation(damaged_block, meet_damage, ("corrupt",)),
    "facts": Operation(filled, keep_records),
    "poll": Operation(watched, poll, look=nothing_old_counts),
    "lease": Operation(full, lend),
    "write-behind": Operation(full, write_behind),
}
_OPENING = (open_and_put,)


# In the child.
def record(operation, directory, size):
    """Do it, and return the names of its calls in order."""
    calls: list[str] = []
    _do(operation, directory, size, lambda call, when: calls.append(call) if when == "before" else None)
    return calls


def die(operation, directory, size, call, nth, when):
    """Do it up to one call, and die there by SIGKILL."""
    _do(operation, directory, size, killer(call, nth, when))


def killer(call, nth, when):
    """Return a function for `watch` that kills the process before or after the nth call of this name."""
    seen = {"before": 0, "after": 0}

    def hit(name, at):
        if name == call:
            seen[at] += 1
            if at == when and seen[at] == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    return hit


def churn(directory, me, size, n_blocks, n, death=None):
    """Read `n` blocks, and put those that are not there; return the most bytes that the cache was seen to have."""
    if death is not None:
        watch(killer(*death))
    cache, bounds, most = BlockStore(directory, explicit=True), CacheBounds(size=size, keep_free=0), 0
    for step in range(n):
        key = key_of(f"b/{(step * 7 + me * 13) % n_blocks}", block_size=1 << 20)
        data = whole(cache, key, 0)
        assert data is None or data == content(key, 0)
        if data is None:
            put_if_it_is_our_turn(cache, key, bounds)
        if step % 8 == me % 8:
            most = max(most, disk_usage(cache))
    return most


def put_if_it_is_our_turn(cache, key, bounds):
    """Put a block; nothing is stored when a loaded machine gave us no turn to write for two seconds."""
    try:
        put(cache, key, 0, bounds=bounds)
    except CacheError as error:
        if "locked" not in str(error):
            raise


def hold_the_index(directory, n_evicted, ready, go_on):
    """Be in the middle of making room, holding what an eviction holds, until the file `go_on` is there."""
    cache = BlockStore(directory, explicit=True)
    with cache._writing("hold") as rows:
        for block in rows.blocks_after(0, n_evicted):
            cache.space.remove(rows, block)
        Path(ready).touch()
        until(lambda: os.path.exists(go_on))


def put_one(directory, path, size):
    put(BlockStore(directory, explicit=True), key_of(path), 0, bounds=CacheBounds(size=size, keep_free=0))


def _do(operation, directory, size, hit):
    act, bounds = OPERATIONS[operation].act, CacheBounds(size=size, keep_free=0)
    subject: Any = directory
    if act not in _OPENING:
        subject = BlockStore(directory, explicit=True)
        subject.metadata.counter(IDENTITY, "b")
        subject.usage()
    end = watch(hit)
    act(subject, bounds)
    end()


def watch(hit):
    """Call `hit` before and after every call that the room makes from now on in this process.

    Return a function to be called in the end.
    """
    statement = ""

    def told(call, when):
        """SQLite tells when it begins a statement: whatever comes next is after its end."""
        nonlocal statement
        ended, statement = statement, call if call.startswith("SQL") else ""
        if ended:
            hit(ended, "after")
        if call:
            hit(call, when)

    for name in CALLS:
        function = real_call(name)
        watched = _watched_walk if inspect.isgeneratorfunction(function) else _watched
        replace_call(pytest.MonkeyPatch(), name, watched(name, function, told))
    connect = database.connect

    def connected(*args, **options):
        connection = connect(*args, **options)
        connection.set_trace_callback(lambda statement: told("SQL " + _verb(statement), "before"))
        return connection

    database.connect = connected
    return lambda: told("", "")


def _verb(statement):
    return statement.strip(" -\n").partition(" ")[0].upper()


def _watched(name, function, hit):
    def watched(*args, **options):
        hit(name, "before")
        try:
            return function(*args, **options)
        finally:
            hit(name, "after")

    return watched


def _watched_walk(name, function, hit):
    def watched(*args):
        hit(name, "before")
        yield from function(*args)
        hit(name, "after")

    return watched
