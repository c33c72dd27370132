"""The leases of the reads of one process: taken before a request, and held until what it brought is put there."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.types import ObjectInfo
from cachedfs.config import MOST_AT_ONCE
from cachedfs.shared.leases import EXPIRES_S, Leases, lease_of
from cachedfs.shared.piece import GATHERED, LARGE, folder_of_runs
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_index import SharedIndex

# Leases taken in one call, and reads that have one, about: others wait for what is not sent yet.
AT_ONCE = MOST_AT_ONCE
RENEW_S = EXPIRES_S / 3
LOOK_S = 0.1  # until a node that is alone looks for others again, while reads go on
ALONE_S = 1.0  # the same if reads wait for it
WRITTEN_S = 60.0  # from the end of a request until what it brought must be there


class ReadLease(NamedTuple):
    """The lease of a read. `task` returns whether this node has it; `answered` is done once it is known who has it.

    If it `asks_first`, the read asks the origin meanwhile: taking the lease costs a request, and no other node reads.
    """

    name: str
    task: asyncio.Task[bool]
    answered: asyncio.Future[None]
    asks_first: bool


class _Batch(NamedTuple):
    """Leases to be taken together, and a future of those that this process has then."""

    names: list[str]
    taken: asyncio.Future[set[str]]


class ReadLeases:
    """Takes, renews and releases `leases`. The coroutines run on the engine's event loop; `pool` runs what blocks.

    `accepts` returns whether what is fetched of an object is put into the shared cache.
    """

    def __init__(
        self,
        place: SharedFolder | SharedBucket,
        index: SharedIndex,
        leases: Leases,
        accepts: Callable[[ObjectInfo], bool],
        pool: DaemonThreadPool,
    ) -> None:
        self._place, self._index, self._leases, self._pool = place, index, leases, pool
        self._accepts = accepts
        self._elsewhere: set[str] = set()  # leases that another node had at the last try of a read
        self._met_at = -math.inf  # when another node last had a lease that this one wanted
        self._waiting: dict[str, _Batch] = {}  # the batch that may still grow, by subfolder
        self._taking, self._has_room, self._n_reads = asyncio.Lock(), asyncio.Event(), 0
        self._has_room.set()
        # Until when to renew each lease (monotonic). Those that are not here expire, as that of a canceled read.
        self._renewed: dict[str, float] = {}
        self._is_renewing, self._is_looking = False, False

    def begin(self, key: str, info: ObjectInfo, position: int) -> ReadLease:
        """Begin to take the lease for a read, which is to `end` it."""
        is_alone = time.monotonic() - self._met_at >= EXPIRES_S
        asks_first = is_alone and self._place.times_itself and self._may_take(info)
        answered = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._take_or_wait(key, info, position, answered))
        return ReadLease(lease_of(key, position), task, answered, asks_first)

    def is_elsewhere(self, lease: ReadLease) -> bool:
        """Return whether another node has it."""
        return lease.name in self._elsewhere

    def end(self, lease: ReadLease, *, is_complete: bool) -> None:
        """End a read. If all came, keep its lease until that is shared; else release it, also if it is taken later."""

        def end(task: asyncio.Task[bool]) -> None:
            if not task.cancelled() and task.exception() is None and task.result():
                self._end(lease.name, is_complete=is_complete)

        if is_complete:
            lease.answered.add_done_callback(lambda _: lease.task.cancel())  # unless it has the lease then
        else:
            lease.task.cancel()
        lease.task.add_done_callback(end)

    def _may_take(self, info: ObjectInfo) -> bool:
        return self._place.is_ready and self._accepts(info)

    async def _take_or_wait(
        self, key: str, info: ObjectInfo, position: int, answered: asyncio.Future[None]
    ) -> bool:
        """Return whether this node has the lease, and is to fetch what nobody else does.

        Wait while another node fetches it, until it is there or the lease expires.
        """
        name, (pause_s, longest_s) = lease_of(key, position), self._place.pauses_s
        until = time.monotonic() + EXPIRES_S
        subfolder = folder_of_runs(key) if (info.size or 0) >= LARGE else GATHERED
        if subfolder == GATHERED and self._is_alone():
            return False
        try:
            while self._may_take(info) and time.monotonic() < until:
                if is_ours := await self._take(name, subfolder):
                    self._begin(name)
                if not answered.done():
                    answered.set_result(None)
                if is_ours or self._index.known.find(key, position) is not None:
                    return is_ours
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            return False
        finally:
            self._elsewhere.discard(name)

    def _is_alone(self) -> bool:
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

    async def _take(self, name: str, subfolder: str) -> bool:
        """Take a lease, together with those that others want; return whether this node has it."""
        batch = self._waiting.get(subfolder)
        if batch is None or len(batch.names) >= AT_ONCE:
            names = list[str]()
            batch = _Batch(names, asyncio.ensure_future(self._take_batch(names, subfolder)))
            self._waiting[subfolder] = batch
        batch.names.append(name)
        try:
            return name in await asyncio.shield(batch.taken)
        except asyncio.CancelledError:
            batch.taken.add_done_callback(lambda _: self._release_unused(name))
            raise

    async def _take_batch(self, names: list[str], subfolder: str) -> set[str]:
        async with self._taking:
            await self._has_room.wait()
            if (batch := self._waiting.get(subfolder)) and batch.names is names:
                del self._waiting[subfolder]  # it grows until it is its turn
            return await self._index.in_time(partial(self._take_and_look, names, subfolder)) or set()

    def _take_and_look(self, names: Sequence[str], subfolder: str) -> set[str]:
        """Take leases, unless nobody would wait for them, and see what came there before they were free. In a thread."""
        with self._place.asking():
            if subfolder == GATHERED and self._leases.is_alone():
                return set(names)
            taken = self._leases.take(names)
        were_elsewhere = not self._elsewhere.isdisjoint(names)
        if self._index.is_recent(subfolder) and taken.issuperset(names) and not were_elsewhere:
            return taken
        if others := set(names) - taken:
            self._met_at = time.monotonic()
        self._elsewhere.difference_update(taken)
        self._elsewhere.update(others)
        self._index.look_again(subfolder)
        if were_elsewhere and subfolder != GATHERED and not self._place.lists_all:
            self._index.look(GATHERED)  # the other node may have put less than LARGE there
        return taken

    def _begin(self, lease: str) -> None:
        """Renew a lease from now on: a read begins with it."""
        self._count(lease, 1)
        loop, self._renewed[lease] = asyncio.get_running_loop(), math.inf
        if not self._is_renewing:
            self._is_renewing = True
            loop.call_later(RENEW_S, self._renew, loop)

    def _end(self, lease: str, *, is_complete: bool) -> None:
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
