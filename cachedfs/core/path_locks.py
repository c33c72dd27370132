"""`PathLocks`: locks on paths that are being changed, for all processes of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import hash_of
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.errors import CachedFSError

logger = logging.getLogger("cachedfs.core")

STUCK_S = 600.0  # after this time without a heartbeat of the holder, waiting for it is an error
HEARTBEAT_S = 5.0


class PathLocks:
    """Machine-wide locks: one task of one process changes a path at a time. Event loop thread only.

    The kernel releases the locks of a process that ends. A stopped process keeps them, so a holder changes a change
    counter every few seconds. The requests of a holder that runs end by their own limits.
    """

    def __init__(self, cache: BlockStore) -> None:
        self._cache = cache
        # By lock: the process id of its holder with the heartbeat, and the monotonic time when both were first seen. An
        # entry whose holder is stuck stays: the callers that come later need not wait again.
        self._seen: dict[int, tuple[tuple[int | None, int], float]] = {}

    @contextlib.asynccontextmanager
    async def held(self, identity: str, path: str, url: str) -> AsyncIterator[None]:
        """Hold the lock on `path`, which messages call `url`.

        Raises CachedFSError if the holder has had no heartbeat for 10 minutes.
        """
        lock, heartbeats = hash_of(f"changes at {identity}", path), f"heartbeats at {identity}"
        await self._take(lock, url, lambda: self._cache.metadata.counter(heartbeats, path))
        try:
            beat = partial(self._cache.metadata.overtaken, heartbeats, [path], ())
            beat()
            beating = asyncio.create_task(_repeat(beat))
            try:
                yield
            finally:
                beating.cancel()
        finally:
            self._cache.locks.release(lock)

    async def _take(self, lock: int, url: str, last_beat: Callable[[], int]) -> None:
        """Wait for a lock; warn once after OVERDUE_S seconds."""
        locks = self._cache.locks

        def is_ours() -> bool:
            if locks.take(lock):
                return True
            # A new holder may not have sent a heartbeat yet, so its process id counts too.
            now, beat = time.monotonic(), (locks.holder(lock), last_beat())
            if self._seen.setdefault(lock, (beat, now))[0] != beat:
                self._seen[lock] = beat, now
            if now - self._seen[lock][1] >= STUCK_S:
                raise CachedFSError(_text_if_stuck(url, beat[0]))
            return False

        try:
            if not await poll(is_ours, within_s=OVERDUE_S):
                holder = _name(locks.holder(lock))
                logger.warning("%s: waiting for %s, which is changing it", url, holder)
                await poll(is_ours)
        except asyncio.CancelledError:
            self._seen.pop(lock, None)
            raise
        self._seen.pop(lock, None)


async def _repeat(beat: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        beat()


def _name(pid: int | None) -> str:
    if pid is None:
        return "a process that cannot be seen from here, as one of another container"
    return f"another task of this process ({pid})" if pid == os.getpid() else f"process {pid}"


def _text_if_stuck(url: str, pid: int | None) -> str:
    how = "" if pid is None else f" (kill -CONT {pid})"
    return (
        f"{url}: {_name(pid)} is changing it, and has not run for {STUCK_S / 60:.0f} minutes: it may be stopped. "
        f"Continue it{how} or end it, then try again"
    )
