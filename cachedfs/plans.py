"""A plan at work: it looks what is here, asks for what is not in the order of the plan, and keeps its distance to its reader."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

from fsspec.core import has_magic

from cachedfs.ahead import Wish
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ObjectChanged,
    OriginAway,
    OriginUnavailable,
    QuotaExceeded,
    WrongBytes,
)
from cachedfs.facts import Known
from cachedfs.flights import Flight, FlightStopped
from cachedfs.foresight import Foresight
from cachedfs.items import Items
from cachedfs.model import ObjectInfo, ObjectKey, Range
from cachedfs.origins.slots import sent_ahead
from cachedfs.parts import Part, Progress, Request, Slice, Tally
from cachedfs.plan.blocks import clip
from cachedfs.plan.window import Piece, Place, Unread, is_after, take
from cachedfs.reader import TRIES, Reader

__all__ = ["Plan"]

logger = logging.getLogger("cachedfs.prefetch")

READY = 4  # requests that are made up before they may be sent: several may at once
TAKEN = 32  # objects that are here already, looked at before the loop serves others
LOOK = 128  # pieces that are looked at at a time
POLL_S = 0.005, 0.05  # shortest and longest wait between two looks at what was read
STALL_S = 1.0  # without a read of what is ahead: then its reader may be elsewhere
AWAY_S = 60.0  # how long an origin may be away before its plan ends
PAUSE_S = 1.0, 15.0  # shortest and longest wait before an origin that is away is asked again
MOST_IN_A_ROW = 16  # failures that are not one object's, and then the plan ends
FILL = 0.9  # of what the cache may hold: what a plan brings at most before anything of it is read,
READ = 0.45  # and what may be ahead of a reader: what is ahead and what he had move in front of one another
BLOCK_EXTRA = 512  # bytes of a block beside its own: its trailer, its row

Block = tuple[ObjectKey, int]


class Plan:
    """What one call of `prefetch` set going. It runs as one task on the engine's loop, and ends with it.

    `text_of` makes a path of what users write, `glob` answers patterns. What is ready for the reader and unread stays
    within the window and within what the cache may hold for this plan; what of its blocks goes to make room follows from its
    foresight.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        items: Callable[[Callable[[], object]], Items],
        window: int | None,
        strip: Callable[[str], str],
        glob: Callable[[str], Awaitable[Mapping[str, Any]]],
        told: Callable[[int, int | None], object],
    ) -> None:
        self.tally = Tally()
        self.failure: Exception | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._reader, self._source, self._engine = reader, reader.source, reader.source.engine
        self._strip, self._glob, self._told = strip, glob, told
        self._items = items(lambda: self._engine.call_soon(self.wake))
        self._window = math.inf if window is None else window
        self._foresight = Foresight(self._source, self._items, strip, self._window)
        self._fill = FILL if window is None else READ
        self._is_draining = False  # more is ahead than may be of a reader: he has to read all of it first
        self._shrunk = math.inf  # what turned out to stay in the cache until it is read
        self._unread: Unread[Block] = Unread()
        self._reserved = 0  # bytes that were asked for of objects that are not known yet
        self._children: deque[tuple[str, int | None]] = (
            deque()
        )  # of a folder: objects that come next, with their sizes
        self._n_parts = 0
        self._open: dict[int, Part] = {}  # by number: those that are neither here nor given up
        self._parts: list[Part] = []  # a heap: those of which something is to be asked for
        self._ready: list[Request] = []  # a heap: made up, and not sent
        self._n_wishes = 0  # Invariant: as many as were submitted and neither sent nor withdrawn
        self._elsewhere: dict[Part, set[int]] = {}  # blocks that another process fetches
        self._flying: dict[Flight, None] = {}  # our requests until all they brought is stored, oldest first
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entering: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_held = self._is_cancelled = False
        self._clock = self._engine.cache.clock(
            self._source.config.bounds
        )  # of touches, when it was looked what is read
        # Since when nothing of what is ahead is read, by the clocks of time and of touches.
        self._stalled_at: tuple[float, int] | None = None
        self._beyond: Iterator[tuple[Block | None, Callable[[], None]]] = iter(())
        self._n_in_a_row = 0
        self._away_since: float | None = None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]

    # Its life.

    def start(self) -> None:
        try:
            self._task = self._engine.spawn(self._run())
        except CachedFSError as error:
            self._end("failed", error)
        else:
            self._task.add_done_callback(self._never_ran)

    def _never_ran(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step does not even end."""
        if not self.ended.done():
            self._items.close()
            self._end("cancelled", None)

    def cancel(self) -> None:
        """Ask for nothing more, and end what is on its way for nobody else. On the loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def wake(self) -> None:
        self._changed.set()

    async def _run(self) -> None:
        state = "done"
        failure: Exception | None = None
        try:
            with sent_ahead():
                await self._begin()
                await self._work()
        except asyncio.CancelledError:
            state = "cancelled"
            if not self._engine.pid:
                state = "failed"
                failure = OriginUnavailable("cachedfs is shutting down with this process")
        except (
            Exception
        ) as error:  # of the caller's iterator or callback, or of the cache: whoever waits is told
            state, failure = "failed", error
        await self._wind_up()
        self._end(state, failure)

    async def _wind_up(self) -> None:
        self._engine.ahead.withdraw(self)
        self._foresight.close()
        self._items.close()
        for task in self._tasks:
            task.cancel()
        for flight in self._flying:
            if not flight.done and flight.key is not None:
                size = flight.key.block_size
                flight.stop_soon(-(-flight.filled // size) * size)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, state: str, failure: Exception | None) -> None:
        self.failure = failure
        self.tally.fetched += sum(flight.filled - flight.start for flight in self._flying)
        self.tally.end(state)
        self._unread, self._flying, self._open, self._parts = Unread(), {}, {}, []
        self.ended.set_result(None)

    async def _begin(self) -> None:
        """Raise what would make all of the plan vain."""
        if self._source.config.offline:
            return
        self._source.origin("")  # else its own error, such as a package that is missing
        cache = self._engine.cache
        allowed = await asyncio.to_thread(cache.allowance, self._source.config.bounds)
        if allowed is None or allowed < self._source.config.block_size:
            raise self._cannot_store()
        self._foresight.begin()

    def _cannot_store(self) -> CacheError:
        why = (
            self._engine.cache.cannot_store
            or "the cache may hold nothing now: raise cache_size, or free space"
        )
        return CacheError(f"prefetching was given up, as nothing that comes can be kept: {why}")

    # The work.

    async def _work(self) -> None:
        pause_s, look_at = POLL_S[0], 0.0
        while True:
            self._changed.clear()
            now, moved = time.monotonic(), False
            if now >= look_at:
                look_at = now + POLL_S[0]
                moved = self._look() | self._look_elsewhere()
                self._check()
            if now >= self._again_at:
                await self._fill_up()
            self._tell()
            if self.failure is not None:
                raise self.failure
            if self._is_cancelled:  # and whatever was awaited made nothing of it
                raise asyncio.CancelledError
            if self._is_over():
                return
            is_near = moved or not self._open  # then what came has only to be stored
            pause_s = POLL_S[0] if is_near else min(2 * pause_s, POLL_S[1])
            await self._pause(pause_s)

    def _is_over(self) -> bool:
        is_left = self._items.n_left != 0 or self._children or self._open or self._flying or self._tasks
        return not is_left and self.failure is None

    async def _pause(self, pause_s: float) -> None:
        """Wait until something happens here; or a little, as what is read and what others fetch happens elsewhere."""
        await asyncio.sleep(0)  # others want the loop as well
        is_polling = self._is_held or self._elsewhere or self._flying or self._away_since is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_polling else None):
                await (
                    self._changed.wait()
                )  # not by wait_for: what happens at that moment would undo a cancellation

    def _check(self) -> None:
        for flight in list(islice(self._flying, LOOK)):
            if flight.is_settled:
                del self._flying[flight]
                self.tally.fetched += flight.filled - flight.start
                if not (flight.is_kept or flight.refused) and self._engine.cache.cannot_store is not None:
                    raise self._cannot_store()

    async def _fill_up(self) -> None:
        """Make up the next requests, and hand them in."""
        n = 0
        may_see_more = self._foresight.look()
        self._cut()
        while n < TAKEN and len(self._ready) < READY and not self._parts and await self._take():
            self._cut()
            n += 1
        while self._n_wishes < len(self._ready):
            request = self._ready[0]
            self._n_wishes += 1
            origin = partial(self._source.origin, request.part.path)
            self._engine.ahead.submit(Wish(self, request.size, self._send, origin, is_declared=True))
        if n == TAKEN or may_see_more:
            self.wake()

    async def _take(self) -> bool:
        """Begin with the next object of the plan; False when there is none now."""
        if self._children:
            self._add(Part(self._n_parts, *self._children.popleft()))
            return True
        # What is below a folder goes before what comes after it.
        is_entering = self._entering is not None and not self._entering.done()
        if is_entering or (item := self._items.take()) is None:
            return False
        span = self._foresight.took()
        path = self._strip(item.text)
        self.tally.declared()
        if item.range is None and self._may_be_many(item.text, path):
            await self._expand(path)
        else:
            self._foresight.begins(self._n_parts, span)
            self._add(Part(self._n_parts, path, bounds=item.range))
        return True

    def _add(self, part: Part) -> None:
        self._n_parts += 1
        self._push(part)

    def _push(self, part: Part) -> None:
        self._open[part.number] = part
        if part not in self._parts:
            heapq.heappush(self._parts, part)
        self.wake()

    # Folders and patterns.

    def _may_be_many(self, text: str, path: str) -> bool:
        known = self._source.fresh(path)
        if known is not None and known.info is not None:
            return known.info.kind == "directory"
        return text.endswith("/") or has_magic(path)

    async def _expand(self, path: str) -> None:
        """Put what is below a folder, or what a pattern names, in its place."""
        try:
            found = await self._matches(path) if has_magic(path) else await self._below(path)
        except CachedFSError as error:
            self.tally.failed(error, None)
            return
        self.tally.expanded([info.size for info in found])
        self._children.extendleft((info.path, info.size) for info in reversed(found))

    async def _below(self, path: str) -> list[ObjectInfo]:
        found = [info for info in await self._reader.catalog.find(path) if info.kind == "file"]
        if not found and (info := await self._reader.catalog.know(path)).kind == "file":
            found = [info]
        return found

    async def _matches(self, pattern: str) -> list[ObjectInfo]:
        named = await self._glob(pattern)
        if not named:  # perhaps a name with one of these characters in it
            return await self._below(pattern)
        found: dict[str, ObjectInfo] = {}
        for name, info in named.items():
            is_file = info["type"] == "file"
            below = [ObjectInfo(name, size=info["size"])] if is_file else await self._below(name)
            found |= {each.path: each for each in below if each.path not in found}
        return list(found.values())

    # What is asked for, and in what order.

    def _cut(self) -> None:
        """Make up requests for the first objects of which something is missing, until the reader has to read first."""
        for _ in range(LOOK):
            if not self._parts or (len(self._ready) >= READY and not self._parts[0] < self._ready[0].part):
                self._is_held = False
                return
            part = self._parts[0]
            if part.is_over or (part.known is not None and not (part.again or part.left)):
                heapq.heappop(self._parts)
                self._finish_if_complete(part)
            elif not (self._cut_unknown(part) if part.known is None else self._cut_one(part)):
                self._is_held = True
                return
        self.wake()

    def _cut_unknown(self, part: Part) -> bool:
        """Begin with an object: by what is known of it, or with the question what it is; False when that has to wait."""
        known = self._source.fresh(part.path)
        if known is not None and (known.info is None or known.info.kind == "file"):
            heapq.heappop(self._parts)
            self._learnt(part, known, None)
            return True
        if self._source.config.offline:
            self._fail(part, self._source.offline(part.path))
            return True
        want = self._first_want(part)
        if not take([want.size], ahead=self._ahead, limit=self._limit, most=want.size):
            return False
        heapq.heappop(self._parts)
        self._reserved += want.size
        heapq.heappush(self._ready, Request(part, [], want, want.size))
        return True

    def _first_want(self, part: Part) -> Range:
        """Return what to ask of an object of unknown size: no more than its share of the window."""
        config, start, stop = self._source.config, *(part.bounds or (None, None))
        most = min(config.whole_request, self._limit // config.concurrency)
        first = max(start or 0, 0) // config.block_size
        n = max(1, int(most) // config.block_size)
        if stop is not None and stop > 0:
            n = min(n, max(1, -(-stop // config.block_size) - first))
        return Range(first * config.block_size, (first + n) * config.block_size)

    def _cut_one(self, part: Part) -> bool:
        """Deal with the next block of an object if it is here or on its way, else with its next request; False: not yet."""
        key, index = _key(part), part.next
        flight = self._engine.flights.get(key.name(index))
        if flight is not None and flight.covers(index * key.block_size):
            return self._take_one(part, index, partial(self._follow, part, flight, [index], is_ours=False))
        if flight is None and self._engine.cache.has(key, index):
            return self._take_one(part, index, None)
        if self._source.config.offline:
            self._fail(part, self._source.offline(part.path))
            return True
        if (question := self._engine.questions.under_way((self._source.identity, part.path))) is not None:
            heapq.heappop(self._parts)
            self._spawn(self._go_on_after(question, part))
            return True
        run, most = self._missing(part, key), self._source.config.whole_request
        sizes = [part.bytes_of(each).size for each in run]
        # What is asked for again has its room already.
        n = len(run) if part.again else take(sizes, ahead=self._ahead, limit=self._limit, most=most)
        if not n:
            return False
        self._note_unread(part, run[:n])
        part.took(n)
        heapq.heappush(self._ready, Request(part, run[:n], None, sum(sizes[:n])))
        return True

    async def _go_on_after(self, question: asyncio.Task[Any], part: Part) -> None:
        """Go on with an object once somebody who opened it before it was listed has an answer, and perhaps its bytes."""
        await asyncio.wait([question])
        self._push(part)

    def _missing(self, part: Part, key: ObjectKey) -> list[int]:
        """Return the next blocks that one request can bring."""
        run, flights, cache = [part.next], self._engine.flights, self._engine.cache
        for index in (part.again or part.left)[1 : self._source.config.whole_request // key.block_size]:
            if index != run[-1] + 1 or key.name(index) in flights or cache.has(key, index):
                break
            run.append(index)
        return run

    def _take_one(
        self, part: Part, index: int, follow: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> bool:
        """Note a block that need not be asked for; False when the reader has to read first."""
        size = part.bytes_of(index).size
        if not part.again and self._ahead and self._ahead + size > self._limit:
            return False
        self._note_unread(part, [index], is_here=follow is None)
        part.took(1)
        if follow is not None:
            self._spawn(follow())
        else:
            first, start = part.first, index * _key(part).block_size
            is_ours = first is not None and first.start <= start < first.stop
            self.tally.here += 0 if is_ours else size  # else it came with our question, and is stored by now
            part.n_awaited -= 1
        return True

    def _note_unread(self, part: Part, indexes: Iterable[int], *, is_here: bool = False) -> None:
        """These blocks are ready for the reader now, or on their way. The one place where a block becomes the plan's."""
        if part.again:
            return  # they were noted when they were asked for first
        key = _key(part)
        for index in indexes:
            piece = Piece((part.number, index), (key, index), part.bytes_of(index).size)
            self._foresight.asked(piece.place, piece.block, is_here=is_here)
            is_awaited = (
                piece.block in self._unread
            )  # at an earlier place, which a read that was just made is of
            self._unread.add(piece, self._clock_of(piece.block))
            is_early = self._stalled_at is not None and self._was_read(piece.block, self._stalled_at[1])
            if is_early and not is_awaited:
                self._unread.pass_to(piece.place, self._clock_of)  # the reader was there first

    # What is sent, and what comes of it.

    def _send(self) -> Iterable[Flight] | Awaitable[Iterable[Flight]]:
        """Send the first request that is ready: perhaps one for an earlier object than when this was handed in."""
        self._n_wishes -= 1
        self.wake()
        while self._ready:
            request = heapq.heappop(self._ready)
            if request.part.is_over:
                continue
            if request.want is not None:
                return self._spawn(self._ask(request.part, request.want))
            return self._launch(request.part, request.indexes)
        return ()

    def _launch(self, part: Part, indexes: list[int]) -> list[Flight]:
        known, key = part.known, _key(part)
        assert known is not None
        before = {self._engine.flights.get(key.name(index)) for index in indexes}
        try:
            flights = self._reader.fetcher.launch(known, key, indexes)
        except CachedFSError as error:  # the process is at its end
            self.failure = error
            return []
        ours = [flight for flight in dict.fromkeys(flights.values()) if flight not in before]
        for flight in ours:
            self._note_sent(flight)
        for flight in dict.fromkeys(flights.values()):
            brought = [index for index in indexes if flights.get(index) is flight]
            self._spawn(self._follow(part, flight, brought, is_ours=flight in ours))
        if elsewhere := set(indexes) - set(flights):
            self._elsewhere.setdefault(part, set()).update(elsewhere)
        return ours

    def _note_sent(self, flight: Flight) -> None:
        self.tally.n_requests += 1
        self._flying[flight] = None

    async def _ask(self, part: Part, want: Range) -> list[Flight]:
        """Ask what an object is by reading its first bytes; return the request that brings them."""
        first = want.start + self._source.config.block_size  # and no more, if this is cancelled meanwhile
        try:
            known, flight = await self._reader.catalog.resolve(part.path, want, demand=first)
        except CachedFSError as error:
            self._fail(part, error)
            return []
        except Exception as error:  # such as a package that is missing: the same for all objects
            self.failure = error
            return []
        finally:
            self._reserved -= want.size
            self.wake()
        self._learnt(part, known, flight)
        self._cut()  # what comes next of this object goes before all that is behind it
        return [] if flight is None else [flight]

    def _learnt(self, part: Part, known: Known, flight: Flight | None) -> None:
        """Begin with an object of which the version is known now; `flight` brings some of it."""
        info = known.info
        if info is None:
            self._absent(part, known)
        elif info.kind == "directory":
            self._enter(part)
        elif (key := self._source.key(known)) is None:
            if flight is not None and flight.is_ahead:
                flight.stop_soon(flight.start)
            self._fail(part, _uncached(self._source.url(part.path)))
        else:
            self.tally.sized(part, part.begin(known, key))
            if flight is not None:
                self._join(part, key, flight)
            self._push(part)

    def _join(self, part: Part, key: ObjectKey, flight: Flight) -> None:
        """Take what the request brings that told what the object is: the first of its blocks."""
        if flight.is_ahead and flight not in self._flying:
            part.first = flight
            self._note_sent(flight)
        brought: list[int] = []
        for index in part.left:
            bytes_ = part.bytes_of(index)
            is_there = flight.start <= bytes_.start and bytes_.stop <= flight.stop
            if not is_there or self._engine.flights.get(key.name(index)) is not flight:
                break
            brought.append(index)
        if brought:
            self._note_unread(part, brought)
            part.took(len(brought))
            self._spawn(self._follow(part, flight, brought, is_ours=part.first is flight))

    def _absent(self, part: Part, known: Known) -> None:
        """There is no such object: perhaps there is such a folder."""
        if part.bounds is not None or known.by_listing or self._source.config.offline:
            self._fail(part, self._source.not_found(part.path, known))
        else:
            self._enter(part)

    def _enter(self, part: Part) -> None:
        """Take what is below a folder in place of an object."""
        if part.bounds is not None:
            self._fail(part, self._source.is_a_folder(part.path))
            return
        self._close(part)
        self._entering = self._spawn(self._expand(part.path))

    async def _follow(self, part: Part, flight: Flight, indexes: list[int], *, is_ours: bool) -> None:
        """Wait until a request, ours or that of others, has brought these blocks."""
        error: Exception | None = None
        try:
            await flight.arrival(part.bytes_of(indexes[-1]).stop)
        except FlightStopped:
            pass
        except Exception as failure:  # of the request, whatever it is
            error = failure
        came = [i for i in indexes if part.bytes_of(i).stop <= flight.filled and not flight.refused]
        if not is_ours:
            self.tally.here += sum(part.bytes_of(index).size for index in came)
        self._landed(part, came)
        if len(came) < len(indexes):
            self._lost(part, indexes[len(came) :], error)
        self.wake()

    def _landed(self, part: Part, indexes: list[int]) -> None:
        part.n_awaited -= len(indexes)
        if indexes:
            self._n_in_a_row, self._away_since, self._pause_s = 0, None, PAUSE_S[0]
        self._finish_if_complete(part)

    def _lost(self, part: Part, indexes: list[int], error: Exception | None) -> None:
        """These blocks did not come; without an error they are asked for again."""
        if not part.is_over:
            self._ask_again(part, indexes)
            if error is not None:
                self._fail(part, error)

    def _ask_again(self, part: Part, indexes: Iterable[int]) -> None:
        part.ask_again(indexes)
        self._push(part)

    def _finish_if_complete(self, part: Part) -> None:
        if not part.is_over and part.known is not None and part.is_complete:
            self._close(part)
            self.tally.n_done += 1

    def _close(self, part: Part) -> None:
        part.is_over = True
        if self._open.get(part.number) is part:
            del self._open[part.number]
        self._elsewhere.pop(part, None)
        self.wake()

    # Failures.

    def _fail(self, part: Part, error: Exception) -> None:
        """Something of an object could not be had: try it again, go on without it, or end the plan."""
        if part.is_over:
            return
        if not isinstance(error, CachedFSError):
            self.failure = error
        elif isinstance(error, OriginAway):
            self._wait_for_origin(error)
            self._push(part)
        elif isinstance(error, ObjectChanged | WrongBytes) and part.tries + 1 < TRIES:
            self._source.facts.expire(part.path)
            self._give_up(part)
            self._push(
                Part(part.number, part.path, part.listed_size, bounds=part.bounds, tries=part.tries + 1)
            )
        else:
            self._give_up(part)
            self.tally.failed(error, part.listed_size)
            self._count_in_a_row(error)

    def _give_up(self, part: Part) -> None:
        self._unread.remove(part.number, self._clock_of)
        self._close(part)

    def _count_in_a_row(self, error: CachedFSError) -> None:
        """End the plan when it fails again and again for what is not one object's."""
        is_general = isinstance(error, OriginUnavailable | QuotaExceeded) and not isinstance(
            error, WrongBytes
        )
        if is_general and not self._source.config.offline:
            self._n_in_a_row += 1
            if self._n_in_a_row >= MOST_IN_A_ROW:
                self.failure = error

    def _wait_for_origin(self, error: OriginAway) -> None:
        """Ask no more for a while; end the plan when it was away for too long."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            logger.warning("%s; prefetching goes on when it answers, or ends after %d s", error, AWAY_S)
        if now - self._away_since > AWAY_S:
            self.failure = error
        if now >= self._again_at:
            self._engine.ahead.withdraw(self)
            self._n_wishes = 0
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])

    # The reader, and the others.

    @property
    def _ahead(self) -> int:
        """Bytes that are ready for the reader, or on their way."""
        return self._unread.size + self._reserved

    @property
    def _limit(self) -> float:
        """How many bytes may be ahead of the reader: the window, and no more than stays until it is read."""
        allowed = self._engine.cache.allowed
        if allowed is not None and self._foresight.share is not None:
            allowed = min(allowed, self._foresight.share)
        fits = math.inf if allowed is None else self._fill * allowed - BLOCK_EXTRA * self._unread.n
        return 0 if self._is_draining else max(0, min(self._window, self._shrunk, fits))

    def _clock_of(self, block: Block) -> int | None:
        return self._engine.cache.last_use(*block)

    def _look(self) -> bool:
        """Look what was read; return whether the reader moved."""
        before, self._clock = self._clock, self._engine.cache.clock(self._source.config.bounds)
        passed = self._unread.look(self._clock_of, LOOK)
        self._foresight.reached(self._first_unread())
        if passed:
            self._shrunk += passed / 4
            self._stalled_at = None
            if self._is_held and self._fill == FILL:
                self._fill, self._is_draining = READ, True
        if not self._ahead:
            self._is_draining = False
        if self._stalled_at is None:  # all that was read since the look before may be of what comes later
            self._stalled_at, self._beyond = (time.monotonic(), before), self._all_beyond()
        self._forget_lost()
        if self._is_held and not passed:
            return self._look_further()
        return passed > 0

    def _first_unread(self) -> Place:
        """Return the first place of the plan that may not have been read yet."""
        places = [(part.number, 0) for part in self._open.values() if part.known is None]
        places += [(part.number, part.next) for part in self._parts if part.again or part.left]
        places += [piece.place for piece in islice(self._unread, 1)]
        return min(places, default=(self._n_parts, 0))

    def _forget_lost(self) -> None:
        """Forget what had come and is not here any more, and stay nearer to the reader from now on."""
        cache, flights, lost = self._engine.cache, self._engine.flights, None
        for place, (key, index), *_ in self._unread:
            if place[0] in self._open or cache.has(key, index) or key.name(index) in flights:
                break
            lost = place
            self._foresight.lost((key, index))
        if lost is not None:
            self._unread.pass_to(lost, self._clock_of)
            self._shrunk = min(self._shrunk, FILL * self._unread.size)
            logger.info("what is prefetched leaves the cache before it is read: %d bytes stay", self._shrunk)

    def _look_further(self) -> bool:
        """Go on where the reader is, if that is beyond all that is ahead of it; return whether it is.

        Asked only when nothing of that was read for a while, though other blocks were.
        """
        assert self._stalled_at is not None
        since, began = self._stalled_at
        if time.monotonic() - since < STALL_S or self._clock == began:
            return False
        looked_at = list(islice(self._beyond, LOOK))
        if not looked_at:
            self._beyond = self._all_beyond()
        there = [go_on for block, go_on in looked_at if self._was_read(block, began)]
        if there:
            self._unread.pass_to((self._n_parts, 0), self._clock_of)
            self._stalled_at = None
            there[-1]()
        return bool(there)

    def _was_read(self, block: Block | None, since: int) -> bool:
        if block is None or block in self._unread.passed:  # it was read, but at an earlier place of the plan
            return False
        used = self._clock_of(block)
        return used is not None and is_after(used, since)

    def _all_beyond(self) -> Iterator[tuple[Block | None, Callable[[], None]]]:
        """Yield a block of each object that comes later, and of objects that are begun each, with what skips all to there."""
        for part in sorted(self._parts):
            for index in part.left if part.known is not None else ():
                yield (_key(part), index), partial(self._skip_to, part, index)
        children = list(self._children)
        for i, (path, _) in enumerate(children):
            yield self._first_block(path, None), partial(self._skip, i, 0)
        i = 0
        while (item := self._items.peek(i)) is not None:
            yield self._first_block(self._strip(item.text), item.range), partial(self._skip, len(children), i)
            i += 1

    def _first_block(self, path: str, bounds: Slice | None) -> Block | None:
        """Return the first block that is wanted of an object, as far as that is known."""
        known = self._source.known(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None:
            return None
        want = clip(*(bounds or (None, None)), known.object.size or 0)
        return (key, want.start // key.block_size) if want.size else None

    def _skip_to(self, part: Part, index: int) -> None:
        """Go on with a block of an object that is begun."""
        self._drop([each for each in self._parts if each < part])
        part.again, part.left = [], part.left[part.left.index(index) :]
        self._finish_if_complete(part)

    def _skip(self, n_children: int, n_items: int) -> None:
        """Go on behind so many of the objects and items that come next."""
        self._drop(self._parts)
        for _ in range(n_children):
            self.tally.passed(self._children.popleft()[1])
        for _ in range(n_items):
            self._items.take()
            self._foresight.took()
            self.tally.declared()
            self.tally.passed(None)

    def _drop(self, parts: Iterable[Part]) -> None:
        for part in list(parts):
            part.left, part.again = range(0), []
            if not part.n_awaited:
                self._close(part)
                self.tally.passed(part.listed_size)

    def _look_elsewhere(self) -> bool:
        """Look for blocks that other processes fetch: they are here, or nobody fetches them any more."""
        cache, moved = self._engine.cache, False
        for part, indexes in list(islice(self._elsewhere.items(), LOOK)):
            key = _key(part)
            here = [i for i in indexes if cache.has(key, i) or key.name(i) in self._engine.flights]
            free = [i for i in indexes if i not in here and self._is_free(key.hash64(i))]
            if not (here or free):
                continue
            moved = True
            indexes.difference_update(here, free)
            if not indexes:
                del self._elsewhere[part]
            self._ask_again(part, [*here, *free])
        return moved

    def _is_free(self, claim: int) -> bool:
        if not self._engine.cache.take_claim(claim):
            return False
        self._engine.cache.drop_claim(claim)
        return True

    def _tell(self) -> None:
        progress = self.progress()
        self._told(progress.bytes_fetched + progress.bytes_here, progress.bytes_total)

    def progress(self) -> Progress:
        """Return how far the plan is; from any thread."""
        coming = sum(flight.filled - flight.start for flight in list(self._flying))
        is_held = self._is_held and not (self._flying or self._reserved or self._ready or self._elsewhere)
        return self.tally.progress(n_left=self._items.n_left, coming=coming, is_held=is_held)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._engine.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.wake()


def _key(part: Part) -> ObjectKey:
    assert part.key is not None
    return part.key


def _uncached(url: str) -> CachedFSError:
    return CachedFSError(
        f"{url}: its origin does not tell its versions apart, so that nothing of it is kept; read it"
    )
