"""How fast new items are made: as fast as Drive takes them, and from its first refusal on at the pace that it takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["Creates"]

logger = logging.getLogger("cachedfs.origins")

_PUBLISHED_PER_S = 2.0  # rclone's authors measured 2 to 3 a second for a user; Google tells no number
_FASTER_PER_S = 0.05  # after every one that was made: 1 a second more in some ten seconds
_SLOWEST = 8  # parts of the first pace: never slower than one in four seconds
_AT_ONCE = 8  # sent and not answered: so many are refused together; at a third of a second each 24 a second
_SAY_EVERY_S = 10.0


class Creates:
    """The turns of what makes new items: files, folders, copies. On one loop.

    Without a pace nobody waits. A refusal sets one, and halves it when there is one; what is made raises it again.
    """

    def __init__(self, *, clock: Callable[[], float], per_s: float = _PUBLISHED_PER_S) -> None:
        self.n_made = 0
        self._clock, self._first = clock, per_s
        self._per_s: float | None = None
        self._next_at = self._slowed_at = 0.0
        self._slots, self._queue, self._n_waiting = asyncio.Semaphore(_AT_ONCE), asyncio.Lock(), 0
        self._say_at = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Enter when the next item may be made, and leave when it was; first come, first served."""
        self._n_waiting += 1
        try:
            await self._slots.acquire()
            try:
                await self._paced()
            except BaseException:  # given up while it waited: the slot is for others
                self._slots.release()
                raise
        finally:
            self._n_waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _paced(self) -> None:
        async with self._queue:
            while (wait_s := self._next_at - self._clock()) > 0:  # noqa: ASYNC110 - it may move meanwhile
                await asyncio.sleep(wait_s)
            if self._per_s is not None:
                self._next_at = self._clock() + 1 / self._per_s

    def made(self) -> None:
        """Note that an item was made."""
        self.n_made += 1
        if self._per_s is None:
            return
        self._per_s += _FASTER_PER_S * self._first / _PUBLISHED_PER_S
        if self._n_waiting and (now := self._clock()) >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            logger.info(
                "Google Drive: %d new items made, %d wait, %.1f a second",
                self.n_made,
                self._n_waiting,
                self._per_s,
            )

    def refused(self) -> None:
        """Note that Drive makes no more items at this moment; those that were sent together are refused together."""
        now = self._clock()
        if self._per_s is None:
            self._per_s, self._say_at = self._first, now + _SAY_EVERY_S
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and refuses more: what is written now waits for "
                "its turn. One large file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )
        elif now >= self._slowed_at + 2 / self._per_s:
            self._per_s = max(self._per_s / 2, self._first / _SLOWEST)
        else:
            return
        self._slowed_at = now
        self._next_at = max(self._next_at, now + 1 / self._per_s)
