"""`CreationLimit`: how many new items are being created at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["CreationLimit"]

logger = logging.getLogger("cachedfs.origins")

_AT_ONCE = 8  # sent, or waiting for their pace, and not answered: at a third of a second each 24 a second
_MANY = 16  # wait: a minute's quarter at the pace that Drive has
_SAY_EVERY_S = 10.0


class CreationLimit:
    """Limits how many new items (files, folders, copies) are being created at once, on one event loop.

    It counts them, and logs when many are waiting. `RateLimiter` sets the rate.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.n_made = 0
        self._clock, self._slots, self._n_waiting = clock, asyncio.Semaphore(_AT_ONCE), 0
        self._logged: tuple[float, int] | None = None  # when, and how many had been made

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a slot while one item is created; first come, first served."""
        self._n_waiting += 1
        if self._logged is None and self._n_waiting >= _MANY:
            self._logged = self._clock(), self.n_made
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn. One large "
                "file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )
        try:
            await self._slots.acquire()
        finally:
            self._n_waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    def made(self) -> None:
        """Count a created item."""
        self.n_made += 1
        if self._logged is not None and self._n_waiting and self._clock() >= self._logged[0] + _SAY_EVERY_S:
            (before, n_before), now = self._logged, self._clock()
            per_s = (self.n_made - n_before) / (now - before)
            self._logged = now, self.n_made
            logger.info(
                "Google Drive: %d new items made, %d wait, %.1f a second", self.n_made, self._n_waiting, per_s
            )
