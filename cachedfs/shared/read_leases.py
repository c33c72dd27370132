"""The leases of the reads of one process: taken before a request, and held until what it brought is put there."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.config import MOST_AT_ONCE
from cachedfs.shared.leases import EXPIRES_S, Leases

AT_ONCE = (
    MOST_AT_ONCE  # leases taken in one call; reads that have one, about: others wait for what is not sent yet
)
RENEW_S = EXPIRES_S / 3
LOOK_S = 0.1  # until a node that is alone looks for others again, while reads go on
ALONE_S = 1.0  # the same if reads wait for it
WRITTEN_S = 60.0  # from the end of a request until what it brought must be there


class _Batch(NamedTuple):
    """Leases to be taken together, and a future of those that this process has then."""

    names: list[str]
    taken: asyncio.Future[set[str]]


class ReadLeases:
    """Takes, renews and releases `leases`. The coroutines run on the engine's event loop.

    `take_batch` takes leases of one subfolder and returns those that this process has. `pool` runs what blocks.
    """

    def __init__(
        self,
        leases: Leases,
        take_batch: Callable[[Sequence[str], str], Awaitable[set[str]]],
        pool: DaemonThreadPool,
    ) -> None:
        self._leases, self._take_batch, self._pool = leases, take_batch, pool
        self._waiting: dict[str, _Batch] = {}  # the batch that may still grow, by subfolder
        self._taking, self._has_room, self._n_reads = asyncio.Lock(), asyncio.Event(), 0
        self._has_room.set()
        # Leases to renew, until when (monotonic); others expire, as of a read that was canceled.
        self._renewed: dict[str, float] = {}
        self._is_renewing, self._is_looking = False, False

    def is_alone(self) -> bool:
        """Return whether no other node fetched small objects a moment ago. Look again soon."""
        age_s = time.monotonic() - self._leases.alone_at
        if LOOK_S <= age_s < ALONE_S and not self._is_looking:
            self._is_looking = True
            with contextlib.suppress(RuntimeError):  # the pool is closed
                self._pool.submit(self._look)
        return age_s < ALONE_S

    def _look(self) -> None:
        try:
            self._leases.is_alone()
        finally:
            self._is_looking = False

    async def take(self, name: str, subfolder: str) -> bool:
        """Take a lease, together with those that others want; return whether a read may `begin` with it."""
        batch = self._waiting.get(subfolder)
        if batch is None or len(batch.names) >= AT_ONCE:
            names = list[str]()
            batch = _Batch(names, asyncio.ensure_future(self._take(names, subfolder)))
            self._waiting[subfolder] = batch
        batch.names.append(name)
        try:
            return name in await asyncio.shield(batch.taken)
        except asyncio.CancelledError:
            batch.taken.add_done_callback(lambda _: self._release_unused(name))
            raise

    async def _take(self, names: list[str], subfolder: str) -> set[str]:
        async with self._taking:
            await self._has_room.wait()
            if (batch := self._waiting.get(subfolder)) and batch.names is names:
                del self._waiting[subfolder]  # it grows until it is its turn
            return await self._take_batch(names, subfolder)

    def begin(self, lease: str) -> None:
        """Note that a read begins, and renew its lease from now on."""
        self._count(lease, 1)
        loop, self._renewed[lease] = asyncio.get_running_loop(), math.inf
        if not self._is_renewing:
            self._is_renewing = True
            loop.call_later(RENEW_S, self._renew, loop)

    def end(self, lease: str, *, is_complete: bool) -> None:
        """Note the end of a read. If all came, keep its lease until that is there; else release it."""
        self._count(lease, -1)
        if self._leases.reads[lease]:
            return  # another read of this process needs it
        del self._leases.reads[lease]
        if is_complete:
            self._renewed[lease] = time.monotonic() + WRITTEN_S
        else:
            self._release(lease)

    def _release_unused(self, lease: str) -> None:
        if lease not in self._leases.reads:
            self._release(lease)

    def _count(self, lease: str, n: int) -> None:
        self._leases.reads[lease] += n
        self._n_reads += n
        (self._has_room.set if self._n_reads < AT_ONCE else self._has_room.clear)()

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew the leases on what is not there yet, and release those on what will not be."""
        now, held = time.monotonic(), self._leases.held
        for lease in [each for each, until in self._renewed.items() if until < now]:
            self._release(lease)
        self._renewed = {lease: until for lease, until in self._renewed.items() if lease in held}
        self._is_renewing = bool(self._renewed)
        if self._is_renewing:
            with contextlib.suppress(RuntimeError):  # the pool is closed
                self._pool.submit(self._leases.renew, list(self._renewed))
                loop.call_later(RENEW_S, self._renew, loop)

    def _release(self, lease: str) -> None:
        if lease in self._leases.held:
            self._renewed.pop(lease, None)
            with contextlib.suppress(RuntimeError):  # the pool is closed
                self._pool.submit(self._leases.release, lease)
