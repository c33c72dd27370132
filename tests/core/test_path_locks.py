"""Locks on paths that are being changed: long changes are waited for, stopped processes are not. In virtual time."""

import asyncio
import os
import types

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import hash_of
from cachedfs.core import path_locks, polling
from cachedfs.core.path_locks import PathLocks
from cachedfs.errors import CachedFSError

LOCK = hash_of("changes at drive|x", "d/a")
PATH = ("drive|x", "d/a", "drive://d/a")


@pytest.fixture
def time(monkeypatch):
    """Let virtual time pass in the pauses of waiting callers only; `time.events` are called when they are due."""
    time = types.SimpleNamespace(now=0.0, events=[])

    async def sleep(pause_s):
        time.now += pause_s
        while time.events and time.events[0][0] <= time.now:
            time.events.pop(0)[1]()

    monkeypatch.setattr(polling, "asyncio", types.SimpleNamespace(sleep=sleep))
    for module in (polling, path_locks):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: time.now))
    return time


@pytest.fixture
def cache(folder):
    cache = BlockStore(str(folder), explicit=True)
    yield cache
    cache.close()


def beat(cache):
    cache.metadata.overtaken("heartbeats at drive|x", ["d/a"], ())


async def test_a_long_change_by_a_running_process_is_waited_for_with_one_warning(cache, time, caplog):
    assert cache.locks.take(LOCK)
    time.events += [(s, lambda: beat(cache)) for s in range(500, 4000, 500)]
    time.events.append((4000, lambda: cache.locks.release(LOCK)))
    async with PathLocks(cache).held(*PATH):
        assert 4000 <= time.now < 4000.1
    assert [record.getMessage() for record in caplog.records] == [
        f"drive://d/a: waiting for another task of this process ({os.getpid()}), which is changing it"
    ]


@pytest.mark.parametrize(
    ("pid", "named"),
    [(4711, "process 4711 .*kill -CONT 4711"), (None, "a process that cannot be seen from here")],
)
async def test_a_stopped_holder_is_an_error_and_later_callers_get_it_at_once(
    cache, time, monkeypatch, pid, named
):
    locks = PathLocks(cache)
    assert cache.locks.take(LOCK)
    monkeypatch.setattr(cache.locks, "holder", lambda lock: pid)
    for _ in range(3):
        with pytest.raises(CachedFSError, match=f"drive://d/a: {named}"):
            async with locks.held(*PATH):
                pass
        assert 600 <= time.now < 600.1
    beat(cache)  # it continued, and is waited for again
    time.events.append((1000, lambda: cache.locks.release(LOCK)))
    async with locks.held(*PATH):
        assert 1000 <= time.now < 1000.1


async def test_a_holder_has_heartbeats_as_long_as_it_holds_the_lock(cache, monkeypatch):
    monkeypatch.setattr(path_locks, "HEARTBEAT_S", 0)
    seen = set()
    async with PathLocks(cache).held(*PATH):
        while len(seen) < 3:
            seen.add(cache.metadata.counter("heartbeats at drive|x", "d/a"))
            await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() - {asyncio.current_task()} if not task.cancelling()]
    assert cache.locks.take(LOCK)


async def test_a_canceled_caller_leaves_nothing(cache, monkeypatch):
    locks = PathLocks(cache)
    assert cache.locks.take(LOCK)
    waiting = asyncio.create_task(locks.held(*PATH).__aenter__())
    await asyncio.sleep(0)
    assert locks._seen
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not locks._seen
