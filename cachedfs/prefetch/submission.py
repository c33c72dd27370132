"""Submit the requests of a prefetch plan, and track them until their blocks are stored."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from cachedfs.cache.block_cache import BlockCache
from cachedfs.common.types import Range
from cachedfs.errors import CachedFSError, CacheError
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.polling import OVERDUE_S
from cachedfs.origins.base import Origin
from cachedfs.prefetch.cursor import Spawn
from cachedfs.prefetch.outstanding import OutstandingObjects
from cachedfs.prefetch.progress import PrefetchObject, ProgressCounts
from cachedfs.prefetch.window import PrefetchWindow
from cachedfs.read.reader import Reader

__all__ = ["RequestSubmitter", "cannot_store"]

LOOK = 128  # requests and objects checked at a time


class RequestSubmitter:
    """The active requests of a plan, and the blocks that other processes fetch for it.

    Event loop thread only. Which request is sent is decided when a slot is free. So missing blocks of earlier
    objects always go before later ones.
    """

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
        self._n_candidates = 0  # Invariant: speculative requests submitted and not sent
        # The plan's requests until their blocks are stored, oldest first, each with its object.
        self._flying: dict[InflightRequest, PrefetchObject] = {}
        # Blocks that another process fetches, each with the monotonic time when that was seen.
        self._elsewhere: dict[PrefetchObject, dict[int, float]] = {}

    @property
    def is_idle(self) -> bool:
        """True when nothing is being fetched for the plan."""
        return not (self._flying or self._elsewhere)

    @property
    def is_flying(self) -> bool:
        return bool(self._flying)

    @property
    def coming(self) -> int:
        """Bytes received by active requests. From any thread."""
        return sum(inflight.filled - inflight.start for inflight in list(self._flying))

    def stop(self) -> None:
        """Send no more, and end the requests that no reader waits for at their next block."""
        self._runtime.fetch_queue.withdraw(self)
        for inflight in self._flying:
            if not inflight.done and inflight.key is not None:
                inflight.give_up()

    def close(self) -> None:
        self._tally.fetched += self.coming
        self._flying, self._elsewhere = {}, {}

    # Send.

    def submit(self) -> None:
        """Submit a speculative request for each prepared request."""
        ready = self._pending.ready
        # `submit` may send or drop a request at once, which changes both counts.
        while self._n_candidates < len(ready) and self._may_send:
            request = ready[0]
            self._n_candidates += 1
            origin = partial(self._origin, request.part.path)
            self._runtime.fetch_queue.submit(
                SpeculativeRequest(self, request.size, self._send, origin, is_declared=True)
            )

    @property
    def _may_send(self) -> bool:
        return self._pending.failure is None and not self._pending.patience.is_pausing(time.monotonic())

    def _origin(self, path: str) -> Origin:
        """Return the origin of a path. An error ends the plan, whose requests would otherwise wait forever."""
        try:
            return self._source.origin(path)
        except Exception as error:  # of any kind: it is the same for all objects
            self._n_candidates -= 1
            self._pending.failure = error
            self._wake()
            raise

    def _send(self) -> Iterable[InflightRequest] | asyncio.Task[Iterable[InflightRequest]]:
        """Send the first prepared request; its object may be an earlier one than at the time of `submit`."""
        self._n_candidates -= 1
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
        entry, key = part.entry, part.begun_key
        assert entry is not None
        before = {self._runtime.inflight_requests.get(key.name(index)) for index in indexes}
        try:
            inflight_requests = self._reader.fetcher.launch(entry, key, indexes, overdue=part.overdue)
        except CachedFSError as error:  # the process is shutting down
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
        """Look up an object by reading its first bytes; return the request that brings them."""
        first = want.start + self._source.config.block_size  # limits what is read if this task is cancelled
        try:
            entry, inflight = await self._reader.resolver.resolve(part.path, want, demand=first)
        except CachedFSError as error:
            self._pending.fail(part, error)
            return []
        except Exception as error:  # such as a missing package: it is the same for all objects
            self._pending.failure = error
            return []
        finally:
            self._distance.release(want.size)
            self._wake()
        is_ours = inflight is not None and inflight.is_speculative and inflight not in self._flying
        self._pending.learned(part, entry, inflight, is_ours=is_ours)
        if inflight is not None and part.first is inflight:
            self._note_sent(inflight, part)
        self._pending.cut()  # the rest of this object goes before later objects
        return [] if inflight is None else [inflight]

    def _note_sent(self, inflight: InflightRequest, part: PrefetchObject) -> None:
        self._tally.n_requests += 1
        self._flying[inflight] = part

    # Track requests.

    def check(self) -> None:
        """Forget requests whose blocks are stored, or failed to be.

        Raises CacheError when nothing can be stored.
        """
        for inflight in list(islice(self._flying, LOOK)):
            if inflight.is_settled:
                part = self._flying.pop(inflight)
                self._tally.fetched += inflight.filled - inflight.start
                if inflight.is_storable:
                    continue
                if self._runtime.cache.cannot_store is not None:
                    raise cannot_store(self._runtime.cache)
                self._pending.not_kept(part)

    def look_elsewhere(self) -> bool:
        """Queue blocks again that another process has fetched or given up; return whether there are any."""
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
    """Return the error that ends a plan when nothing can be stored."""
    why = cache.cannot_store or "the cache may hold nothing now: raise cache_size, or free space"
    return CacheError(f"the prefetch stopped, because blocks cannot be stored: {why}")
