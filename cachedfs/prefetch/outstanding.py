"""Outstanding objects of a prefetch plan: prepare their requests, and handle results and failures."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from cachedfs.common.blocks import beginning
from cachedfs.common.types import ObjectKey, Range
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ChecksumMismatch,
    ObjectChanged,
    OriginUnavailable,
    OriginUnreachable,
    QuotaExceeded,
)
from cachedfs.fetch.inflight import InflightRequest, RequestStopped
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.prefetch.cursor import PlanCursor, Spawn
from cachedfs.prefetch.future_reads import Beyond, FutureBlock, FutureReads, Place
from cachedfs.prefetch.progress import BlockRequest, PrefetchObject, ProgressCounts
from cachedfs.prefetch.window import PrefetchWindow
from cachedfs.read.reader import TRIES

__all__ = ["AWAY_S", "FailureLimit", "OutstandingObjects"]


AWAY_S = 60.0  # how long an origin may be unreachable before the plan ends
PAUSE_S = 1.0, 15.0  # shortest and longest wait before an unreachable origin is tried again
MOST_IN_A_ROW = 16  # consecutive failures, not specific to one object, that end the plan

logger = logging.getLogger("cachedfs.prefetch")
READY = 4  # requests prepared in advance, since several may be sent at once
LOOK = 128  # blocks handled before the event loop runs other tasks


class FailureLimit:
    """Count the failures since the last success, and pause while the origin is unreachable."""

    def __init__(self) -> None:
        self._n_in_a_row = 0
        self._away_since: float | None = None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]

    @property
    def is_unreachable(self) -> bool:
        """True when the origin was unreachable at the last request."""
        return self._away_since is not None

    def is_pausing(self, now: float) -> bool:
        """Return whether no request may be sent at the monotonic time `now`."""
        return now < self._again_at

    def came(self) -> None:
        """Record a success, which also ends a pause."""
        self._n_in_a_row, self._away_since = 0, None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]

    def failed(self) -> bool:
        """Record a failure that is not specific to one object; return whether it is one too many."""
        self._n_in_a_row += 1
        return self._n_in_a_row >= MOST_IN_A_ROW

    def away(self, now: float) -> bool:
        """Record that the origin is unreachable and pause; return whether that has lasted too long."""
        if self._away_since is None:
            self._away_since = now
        if not self.is_pausing(now):  # requests sent together fail together, and cause one pause
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        return now - self._away_since > AWAY_S


class OutstandingObjects:
    """The objects of a plan that are neither complete nor given up, and their prepared requests.

    Event loop thread only. Prepared requests wait in `ready` for the RequestSubmitter, which reports results
    to `learnt`, `follow`, `ask_again` and `fail`. `failure` is the error that ends the plan.
    """

    def __init__(
        self,
        source: Source,
        course: PlanCursor,
        distance: PrefetchWindow,
        foresight: FutureReads,
        tally: ProgressCounts,
        *,
        spawn: Spawn,
        wake: Callable[[], object],
    ) -> None:
        self._source, self._course, self._distance = source, course, distance
        runtime = source.runtime
        self._cache, self._flights, self._questions = (
            runtime.cache,
            runtime.inflight_requests,
            runtime.lookups,
        )
        self._foresight, self._tally = foresight, tally
        self._spawn, self._wake = spawn, wake
        self.open: dict[int, PrefetchObject] = {}  # begun objects by number
        self._parts: list[PrefetchObject] = []  # a heap: objects with blocks to request
        self.ready: list[BlockRequest] = []  # a heap: prepared and not sent
        self.is_held = False  # the reader has to read before more is requested
        self.patience = FailureLimit()
        self.failure: Exception | None = None

    def close(self) -> None:
        self.open, self._parts = {}, []

    @property
    def wants_more(self) -> bool:
        """True when all its objects are handled and there is room for more prepared requests."""
        return len(self.ready) < READY and not self._parts

    def places(self) -> list[Place]:
        """Return the place of the first block to request of each object that has one."""
        unknown = [(part.number, 0) for part in self.open.values() if part.entry is None]
        return unknown + [(part.number, part.next) for part in self._parts if part.again or part.left]

    def push(self, part: PrefetchObject) -> None:
        """Queue an object that has blocks to request."""
        self.open[part.number] = part
        if part not in self._parts:
            heapq.heappush(self._parts, part)
        self._wake()

    # Prepare requests, in plan order.

    def cut(self) -> None:
        """Prepare requests for the first objects with missing blocks, until the reader has to read first."""
        for _ in range(LOOK):
            if not self._parts or (len(self.ready) >= READY and not self._parts[0] < self.ready[0].part):
                self.is_held = False
                return
            part = self._parts[0]
            if part.is_over or (part.entry is not None and not (part.again or part.left)):
                heapq.heappop(self._parts)
                self._finish_if_complete(part)
            elif not (self._cut_unknown(part) if part.entry is None else self._cut_one(part)):
                self.is_held = True
                return
        self._wake()

    def _cut_unknown(self, part: PrefetchObject) -> bool:
        """Begin an object; return False when that has to wait.

        Uses its metadata if that is known, else prepares a request that looks it up.
        """
        entry = self._source.fresh(part.path)
        if entry is not None and (entry.info is None or entry.info.kind == "file"):
            heapq.heappop(self._parts)
            self.learned(part, entry, None, is_ours=False)
            return True
        if self._source.config.offline:
            self.fail(part, self._source.offline(part.path))
            return True
        want = self._first_want(part)
        if not self._distance.take([want.size], want.size):
            return False
        heapq.heappop(self._parts)
        self._distance.reserve(want.size)
        heapq.heappush(self.ready, BlockRequest(part, [], want, want.size))
        return True

    def _first_want(self, part: PrefetchObject) -> Range:
        """Return the range to request of an object of unknown size: at most its share of the window."""
        config = self._source.config
        most = min(config.whole_request, self._distance.limit // config.first_concurrency)
        return beginning(*(part.bounds or (None, None)), block_size=config.block_size, most=int(most))

    def _cut_one(self, part: PrefetchObject) -> bool:
        """Handle the next block of an object; return False when that has to wait.

        A block that is cached or in flight needs no request. For another one, prepares a request.
        """
        key, index = part.begun_key, part.next
        inflight = self._flights.get(key.name(index))
        if not part.again and self._foresight.is_made((part.number, index), (key, index)):
            # If all blocks fit, a block that was read and evicted is fetched again, so that all are cached in
            # the end.
            is_coming = inflight is not None or self._cache.has(key, index)
            if is_coming or self._foresight.is_tight:
                self._pass(part, index)
                return True
        if inflight is not None and inflight.covers(index * key.block_size):
            return self._take_one(part, index, partial(self.follow, part, inflight, [index], is_ours=False))
        if inflight is None and self._cache.has(key, index):
            return self._take_one(part, index, None)
        if self._source.config.offline:
            self.fail(part, self._source.offline(part.path))
            return True
        if (question := self._questions.task_of((self._source.caller_key, part.path))) is not None:
            heapq.heappop(self._parts)
            self._spawn(self._go_on_after(question, part))
            return True
        run, most = self._missing(part, key), self._source.config.whole_request
        sizes = [part.bytes_of(each).size for each in run]
        # A retry has its room in the window already.
        n = len(run) if part.again else self._may_ask(key, run[: self._distance.take(sizes, most)])
        if not n:
            return False
        self._note_asked(part, run[:n])
        part.took(n)
        heapq.heappush(self.ready, BlockRequest(part, run[:n], None, sum(sizes[:n])))
        return True

    def _may_ask(self, key: ObjectKey, run: list[int]) -> int:
        """Return how many of these blocks may be requested now; at least one if too little is ahead."""
        n = next((n for n, index in enumerate(run) if not self._foresight.ask((key, index))), len(run))
        if run and not n and self._distance.is_short:
            self._foresight.ask((key, run[0]), is_awaited=True)
            return 1
        return n

    def _pass(self, part: PrefetchObject, index: int) -> None:
        """Skip a block that the reader fetched and read before the plan got to it."""
        key, size = part.begun_key, part.bytes_of(index).size
        if self._cache.has(key, index):
            self._foresight.stored((key, index))
        part.took(1)
        part.n_awaited -= 1
        self._tally.here += size

    async def _go_on_after(self, question: asyncio.Task[Any], part: PrefetchObject) -> None:
        """Continue with an object after another caller's lookup of it, which may also bring its first bytes."""
        await asyncio.wait([question])
        self.push(part)

    def _missing(self, part: PrefetchObject, key: ObjectKey) -> list[int]:
        """Return the next blocks that one request can bring."""
        run = [part.next]
        for index in (part.again or part.left)[1 : self._source.config.whole_request // key.block_size]:
            name = key.name(index)
            if index != run[-1] + 1 or name in self._flights or self._cache.has(key, index):
                break
            run.append(index)
        return run

    def _take_one(
        self, part: PrefetchObject, index: int, follow: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> bool:
        """Handle a block that needs no request; return False when the reader has to read first."""
        size = part.bytes_of(index).size
        if not part.again and not self._distance.fits(size):
            return False
        self._note_asked(part, [index], is_here=follow is None)
        part.took(1)
        if follow is not None:
            self._spawn(follow())
        else:
            first, start = part.first, index * part.begun_key.block_size
            is_ours = first is not None and first.start <= start < first.stop
            # else counted as fetched: the plan's first request brought it
            self._tally.here += 0 if is_ours else size
            part.n_awaited -= 1
        return True

    def _note_asked(self, part: PrefetchObject, indexes: Iterable[int], *, is_here: bool = False) -> None:
        """Record that these blocks are ready or in flight. Only this method adds blocks to the window."""
        if part.again:
            return  # recorded at the first request
        key = part.begun_key
        for index in indexes:
            piece = FutureBlock((part.number, index), (key, index), part.bytes_of(index).size)
            self._foresight.ask(piece.block)
            if is_here:
                self._foresight.stored(piece.block)
            self._distance.add(piece)

    # Handle results.

    def learned(
        self, part: PrefetchObject, entry: MetadataEntry, inflight: InflightRequest | None, *, is_ours: bool
    ) -> None:
        """Begin an object whose metadata is known now.

        `inflight` is the request that brings its first bytes, if any. `is_ours`: this plan started that
        request.
        """
        info = entry.info
        if info is None:
            self._absent(part, entry)
        elif info.kind == "directory":
            self._enter(part)
        elif (key := self._source.key(entry)) is None:
            if inflight is not None and inflight.is_speculative:
                inflight.stop_soon(inflight.start)
            self.fail(part, self._source.uncached(part.path))
        else:
            self._tally.sized(part, part.begin(entry, key))
            if inflight is not None:
                part.first = inflight if is_ours else None
                self._join(part, key, inflight)
            self.push(part)

    def _join(self, part: PrefetchObject, key: ObjectKey, inflight: InflightRequest) -> None:
        """Take the first blocks from the request that looked the object up."""
        brought: list[int] = []
        for index in part.left:
            bytes_ = part.bytes_of(index)
            is_there = inflight.start <= bytes_.start and bytes_.stop <= inflight.stop
            if not is_there or self._flights.get(key.name(index)) is not inflight:
                break
            brought.append(index)
        if brought:
            self._note_asked(part, brought)
            part.took(len(brought))
            self._spawn(self.follow(part, inflight, brought, is_ours=part.first is inflight))

    def _absent(self, part: PrefetchObject, entry: MetadataEntry) -> None:
        """Handle a missing object: there may be a folder with this name."""
        if part.bounds is not None or entry.by_listing or self._source.config.offline:
            self.fail(part, self._source.not_found(part.path, entry))
        else:
            self._enter(part)

    def _enter(self, part: PrefetchObject) -> None:
        """Replace an object that is a folder by the objects below it."""
        if part.bounds is not None:
            self.fail(part, self._source.is_a_folder(part.path))
            return
        self._close(part)
        self._course.enter(part.path)

    async def follow(
        self, part: PrefetchObject, inflight: InflightRequest, indexes: list[int], *, is_ours: bool
    ) -> None:
        """Wait until a request has brought these blocks. `is_ours`: this plan started the request."""
        error: Exception | None = None
        try:
            await inflight.wait_until(part.bytes_of(indexes[-1]).stop)
        except RequestStopped:
            pass
        except Exception as failure:  # of any kind: `fail` decides whether it ends the plan
            error = failure
        came = [i for i in indexes if part.bytes_of(i).stop <= inflight.filled]
        if not is_ours:
            self._tally.here += sum(part.bytes_of(index).size for index in came)
        self._landed(part, came)
        if len(came) < len(indexes):
            self._lost(part, indexes[len(came) :], error)
        self._wake()

    def _landed(self, part: PrefetchObject, indexes: list[int]) -> None:
        part.n_awaited -= len(indexes)
        if indexes:
            self.patience.came()
        self._finish_if_complete(part)

    def _lost(self, part: PrefetchObject, indexes: list[int], error: Exception | None) -> None:
        """Handle blocks that did not arrive; without an error they are requested again."""
        if not part.is_over:
            self.ask_again(part, indexes)
            if error is not None:
                self.fail(part, error)

    def ask_again(self, part: PrefetchObject, indexes: Iterable[int]) -> None:
        """Queue blocks that did not arrive for another request."""
        part.ask_again(indexes)
        self.push(part)

    def _finish_if_complete(self, part: PrefetchObject) -> None:
        if not part.is_over and part.entry is not None and part.is_complete:
            self._close(part)
            self._tally.n_done += 1

    def _close(self, part: PrefetchObject) -> None:
        part.is_over = True
        if self.open.get(part.number) is part:
            del self.open[part.number]
        self._wake()

    # Handle failures.

    def fail(self, part: PrefetchObject, error: Exception) -> None:
        """Handle an error of an object: try again, go on without the object, or end the plan."""
        if part.is_over:
            return
        if not isinstance(error, CachedFSError):
            self.failure = error
        elif isinstance(error, OriginUnreachable):
            self._wait_for_origin(error)
            self.push(part)
        elif isinstance(error, ObjectChanged | ChecksumMismatch) and part.tries + 1 < TRIES:
            self._source.metadata.expire(part.path)
            self._give_up(part)
            again = PrefetchObject(part.number, part.path, part.listed_size, part.bounds, part.tries + 1)
            self.push(again)
        else:
            self._give_up(part)
            self._tally.failed(part.path, error, part.listed_size)
            self._count_in_a_row(error)

    def answered(self, path: str, error: CachedFSError | None) -> None:
        """Handle the result of a listing; the cursor repeats it while the origin is unreachable."""
        if error is None:
            self.patience.came()
        elif isinstance(error, OriginUnreachable):
            self._wait_for_origin(error)
        else:
            self._tally.failed(path, error, None)
            self._count_in_a_row(error)

    def not_kept(self, part: PrefetchObject) -> None:
        """Fail an object: some of its blocks arrived but were not stored, although the cache works now."""
        if part.is_failed:
            return
        error = CacheError(
            f"{self._source.url(part.path)}: some of it came and could not be stored, as the cache could store nothing "
            "for a while; prefetch it again"
        )
        if part.is_over:
            part.is_failed = True
            self._tally.spoilt(part.path, error)
        else:
            self.fail(part, error)

    def _give_up(self, part: PrefetchObject) -> None:
        part.is_failed = True
        self._distance.remove(part.number)
        for index in part.asked:
            # blocks still in flight are reported when they arrive
            if not self._cache.has(part.begun_key, index):
                self._foresight.lost((part.begun_key, index))
        self._close(part)

    def _count_in_a_row(self, error: CachedFSError) -> None:
        """End the plan after too many consecutive failures that are not specific to one object."""
        is_general = isinstance(error, OriginUnavailable | QuotaExceeded) and not isinstance(
            error, ChecksumMismatch
        )
        if is_general and not self._source.config.offline and self.patience.failed():
            self.failure = error

    def _wait_for_origin(self, error: OriginUnreachable) -> None:
        """Pause; end the plan when the origin was unreachable for too long."""
        if not self.patience.is_unreachable:
            logger.warning("%s; the prefetch continues when it answers, or ends after %d s", error, AWAY_S)
        if self.patience.away(time.monotonic()):
            self.failure = error

    # Find the reader.

    def beyond(self) -> Beyond:
        """Yield a `Beyond` entry for each block of the begun objects that was not requested yet."""
        for part in sorted(self._parts):
            for index in part.left if part.entry is not None else ():
                block = part.begun_key, index
                may_be = partial(self._foresight.may_be_at, block, (part.number, index))
                yield block, may_be, partial(self._skip_to, part, index)

    def _skip_to(self, part: PrefetchObject, index: int) -> None:
        self._drop([each for each in self._parts if each < part])
        part.again, part.left = [], part.left[part.left.index(index) :]
        self._finish_if_complete(part)

    def skip(self) -> None:
        """Request nothing more of the begun objects."""
        self._drop(list(self._parts))

    def _drop(self, parts: list[PrefetchObject]) -> None:
        for part in parts:
            part.left, part.again = range(0), []
            if not part.n_awaited:
                self._close(part)
                self._tally.passed(part.listed_size)
