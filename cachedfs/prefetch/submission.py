"""What a plan sends: its requests one by one, as late as may be, until all that they brought is stored."""

from __future__ import annotations

import heapq
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice

from cachedfs.cache.block_cache import BlockCache
from cachedfs.common.types import Range
from cachedfs.errors import CachedFSError, CacheError
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.fetcher import OVERDUE_S
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.origins.base import Origin
from cachedfs.prefetch.cursor import Spawn
from cachedfs.prefetch.outstanding import OutstandingObjects
from cachedfs.prefetch.progress import PrefetchObject, ProgressCounts
from cachedfs.prefetch.window import PrefetchWindow
from cachedfs.read.reader import Reader

__all__ = ["RequestSubmitter", "cannot_store"]

LOOK = 128  # requests and objects that are looked at at a time


class RequestSubmitter:
    """Requests of a plan on their way, and blocks that other processes fetch for it. On the runtime's loop."""

    def __init__(
        self,
        reader: Reader,
        pending: OutstandingObjects,
        distance: PrefetchWindow,
        tally: ProgressCounts,
        *,
        spawn: Spawn,
        wake: Callable[[], object],
    ) -> None:
        self._reader, self._source, self._runtime = reader, reader.source, reader.source.runtime
        self._pending, self._distance, self._tally = pending, distance, tally
        self._spawn, self._wake = spawn, wake
        self._n_wishes = 0  # Invariant: as many as were submitted and not sent
        # Our requests until all they brought is stored, oldest first, each with what it was sent for.
        self._flying: dict[InflightRequest, PrefetchObject] = {}
        # Blocks that another process fetches, each with when that was seen.
        self._elsewhere: dict[PrefetchObject, dict[int, float]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way for the plan."""
        return not (self._flying or self._elsewhere)

    @property
    def is_flying(self) -> bool:
        return bool(self._flying)

    @property
    def coming(self) -> int:
        """Bytes that came of requests under way. From any thread."""
        return sum(inflight.filled - inflight.start for inflight in list(self._flying))

    def stop(self) -> None:
        """Send no more, and end what is on its way for nobody else at its next block."""
        self._runtime.fetch_queue.withdraw(self)
        for inflight in self._flying:
            if not inflight.done and inflight.key is not None:
                inflight.give_up()

    def close(self) -> None:
        self._tally.fetched += self.coming
        self._flying, self._elsewhere = {}, {}

    # What is sent.

    def submit(self) -> None:
        """Hand in a wish for each request that is made up."""
        ready = self._pending.ready
        # One that is handed in may be sent at once, or forgotten at once when there is nothing to be sent.
        while self._n_wishes < len(ready) and self._may_send:
            request = ready[0]
            self._n_wishes += 1
            origin = partial(self._origin, request.part.path)
            self._runtime.fetch_queue.submit(
                SpeculativeRequest(self, request.size, self._send, origin, is_declared=True)
            )

    @property
    def _may_send(self) -> bool:
        return self._pending.failure is None and not self._pending.patience.is_pausing(time.monotonic())

    def _origin(self, path: str) -> Origin:
        """Return where to send a wish; without that it is forgotten, and the plan ends: its requests would wait for ever."""
        try:
            return self._source.origin(path)
        except Exception as error:  # of any kind: the same for all objects
            self._n_wishes -= 1
            self._pending.failure = error
            self._wake()
            raise

    def _send(self) -> Iterable[InflightRequest] | Awaitable[Iterable[InflightRequest]]:
        """Send the first request that is ready: perhaps one for an earlier object than when this was handed in."""
        self._n_wishes -= 1
        self._wake()
        ready = self._pending.ready
        while ready and self._may_send:
            request = heapq.heappop(ready)
            if request.part.is_over:
                continue
            if request.want is not None:
                return self._spawn(self._ask(request.part, request.want))
            return self._launch(request.part, request.indexes)
        return ()

    def _launch(self, part: PrefetchObject, indexes: list[int]) -> list[InflightRequest]:
        known, key = part.known, part.begun_key
        assert known is not None
        before = {self._runtime.inflight_requests.get(key.name(index)) for index in indexes}
        try:
            inflight_requests = self._reader.fetcher.launch(known, key, indexes, overdue=part.overdue)
        except CachedFSError as error:  # the process is at its end
            self._pending.failure = error
            return []
        ours = [inflight for inflight in dict.fromkeys(inflight_requests.values()) if inflight not in before]
        for inflight in ours:
            self._note_sent(inflight, part)
        for inflight in dict.fromkeys(inflight_requests.values()):
            brought = [index for index in indexes if inflight_requests.get(index) is inflight]
            self._spawn(self._pending.follow(part, inflight, brought, is_ours=inflight in ours))
        if elsewhere := set(indexes) - set(inflight_requests):
            self._elsewhere.setdefault(part, {}).update(dict.fromkeys(elsewhere, time.monotonic()))
        return ours

    async def _ask(self, part: PrefetchObject, want: Range) -> list[InflightRequest]:
        """Ask what an object is by reading its first bytes; return the request that brings them."""
        first = want.start + self._source.config.block_size  # and no more, if this is cancelled meanwhile
        try:
            known, inflight = await self._reader.resolver.resolve(part.path, want, demand=first)
        except CachedFSError as error:
            self._pending.fail(part, error)
            return []
        except Exception as error:  # such as a package that is missing: the same for all objects
            self._pending.failure = error
            return []
        finally:
            self._distance.release(want.size)
            self._wake()
        is_ours = inflight is not None and inflight.is_speculative and inflight not in self._flying
        self._pending.learnt(part, known, inflight, is_ours=is_ours)
        if inflight is not None and part.first is inflight:
            self._note_sent(inflight, part)
        self._pending.cut()  # what comes next of this object goes before all that is behind it
        return [] if inflight is None else [inflight]

    def _note_sent(self, inflight: InflightRequest, part: PrefetchObject) -> None:
        self._tally.n_requests += 1
        self._flying[inflight] = part

    # What comes of it.

    def check(self) -> None:
        """Forget requests of which all is stored, or could not be. Raises CacheError when nothing can be."""
        for inflight in list(islice(self._flying, LOOK)):
            if inflight.is_settled:
                part = self._flying.pop(inflight)
                self._tally.fetched += inflight.filled - inflight.start
                if inflight.is_kept or inflight.refused:
                    continue
                if self._runtime.cache.cannot_store is not None:
                    raise cannot_store(self._runtime.cache)
                self._pending.not_kept(part)

    def look_elsewhere(self) -> bool:
        """Look for blocks that other processes fetch: they are here, or nobody fetches them any more."""
        cache, moved = self._runtime.cache, False
        for part, indexes in list(islice(self._elsewhere.items(), LOOK)):
            if part.is_over:
                del self._elsewhere[part]
                continue
            key = part.begun_key
            here = [i for i in indexes if cache.has(key, i) or key.name(i) in self._runtime.inflight_requests]
            away = [i for i in indexes if i not in here]
            overdue = {i for i in away if time.monotonic() - indexes[i] > OVERDUE_S}
            part.overdue |= overdue
            free = [i for i in away if i in overdue or self._is_free(key.hash64(i))]
            if not (here or free):
                continue
            moved = True
            for index in [*here, *free]:
                del indexes[index]
            if not indexes:
                del self._elsewhere[part]
            self._pending.ask_again(part, [*here, *free])
        return moved

    def _is_free(self, fetch_lock: int) -> bool:
        if not self._runtime.cache.take_lock(fetch_lock):
            return False
        self._runtime.cache.release_lock(fetch_lock)
        return True


def cannot_store(cache: BlockCache) -> CacheError:
    """Return what ends a plan that would fetch in vain."""
    why = cache.cannot_store or "the cache may hold nothing now: raise cache_size, or free space"
    return CacheError(f"prefetching was given up, as nothing that comes can be kept: {why}")
