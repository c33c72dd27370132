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
        self._clock = clock
        self._slots, self._n_waiting = asyncio.Semaphore(_AT_ONCE), 0
        self._said_at: float | None = None  # when it was last said how many wait,
        self._n_said = 0  # and how many had been made

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a slot while one item is created; first come, first served."""
        self._n_waiting += 1
        self._warn()
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
        now = self._clock()
        if not self._n_waiting or self._said_at is None or now < self._said_at + _SAY_EVERY_S:
            return
        per_s = (self.n_made - self._n_said) / (now - self._said_at)
        self._said_at, self._n_said = now, self.n_made
        logger.info(
            "Google Drive: %d new items made, %d wait, %.1f a second", self.n_made, self._n_waiting, per_s
        )

    def _warn(self) -> None:
        if self._said_at is None and self._n_waiting >= _MANY:
            self._said_at, self._n_said = self._clock(), self.n_made
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn. One large "
                "file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )
