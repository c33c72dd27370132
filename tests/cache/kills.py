"""Child processes that use a cache, and die at one step of it.

The steps are what a use was seen to do: every system call of `CALLS` and every statement that it gives to SQLite, in
order. So a call that is new has its kill without being named here.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index import database
from cachedfs.cache.index.metadata_records import FeedSnapshot
from cachedfs.common.types import CacheBounds, Change, Changes, ObjectInfo
from cachedfs.errors import CacheError
from tests.cache.days import KEY, N_OTHER, OTHER, SMALL, day
from tests.cache.faults import CALLS, real_call, replace_call
from tests.cache.helpers import content, disk_usage, flip, key_of, put, put_after_noticing, whole
from tests.support import until

IDENTITY = KEY.identity


class Step(NamedTuple):
    """The `nth` call of one name, from 1 on; the process dies before or after it."""

    call: str
    nth: int
    when: str


def live(directory):
    """Have a day, damage the index and a block, and use what is left; then follow a change feed."""
    root = Path(day(directory).root)
    (root / "index.db").write_bytes(b"no database, " * 1000)
    flip(next(root.glob("blocks/*/*")), 100)
    cache = BlockStore(directory, explicit=True)
    for index in range(N_OTHER):
        whole(cache, OTHER, index)
    put_after_noticing(cache, KEY, 0, 1, bounds=SMALL)
    follow_changes(cache)
    cache.close()


def follow_changes(cache):
    metadata = cache.metadata
    metadata.begin_feed(IDENTITY, "f", "t1", time.time() - 500)
    feed = metadata.feed(IDENTITY, "f")
    infos = [ObjectInfo(f"f/{n}", size=n, fingerprint="v1", id=str(n)) for n in range(3)]
    metadata.keep_listings(
        IDENTITY,
        {"f": infos},
        checked_at=time.time() - 400,
        counters={info.path: metadata.counter(IDENTITY, info.path) for info in infos},
        folder_counters={"f": metadata.listing_counter(IDENTITY, "f")},
        watch=FeedSnapshot(feed.id, feed.number, (("f", "F"),)),
    )
    change = Change("1", (("F", "1"),), ObjectInfo("", size=1, fingerprint="v2", id="1"))
    metadata.follow_feed(IDENTITY, feed, Changes("t2", (change,)), checked_at=time.time())


def is_forgotten_or_asked_again(cache):
    """Return whether nothing counts that the feed reported as changed."""
    feed, record = cache.metadata.feed(IDENTITY, "f"), cache.metadata.lookup(IDENTITY, "f/1")
    is_known = record is not None and record.counter == cache.metadata.counter(IDENTITY, "f/1")
    return feed is None or feed.token == "t1" or not is_known


# In the child.
def record(directory):
    """Do it all, and return the names of its calls in order."""
    calls: list[str] = []
    end = watch(lambda call, when: calls.append(call) if when == "before" else None)
    live(directory)
    end()
    return calls


def die(directory, call, nth, when):
    """Do it up to one call, and die there by SIGKILL."""
    watch(killer(call, nth, when))
    live(directory)


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
        replace_call(pytest.MonkeyPatch(), name, _watched(name, real_call(name), told))
    connect = database.connect

    def connected(*args, **options):
        connection = connect(*args, **options)
        connection.set_trace_callback(lambda sql: told(f"SQL {sql.split()[0].upper()}", "before"))
        return connection

    database.connect = connected
    return lambda: told("", "")


def _watched(name, function, hit):
    def watched(*args, **options):
        hit(name, "before")
        try:
            return function(*args, **options)
        finally:
            hit(name, "after")

    return watched
