"""Prefetch plan: request missing blocks in the declared order, at a limited distance from the reader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins.request_slots import speculative
from cachedfs.prefetch.cursor import Glob, PlanCursor
from cachedfs.prefetch.future_reads import Beyond, FutureReads
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.outstanding import OutstandingObjects
from cachedfs.prefetch.progress import Progress, ProgressCounts
from cachedfs.prefetch.submission import RequestSubmitter, cannot_store
from cachedfs.prefetch.window import PrefetchWindow
from cachedfs.read.reader import Reader

__all__ = ["PrefetchPlan"]

TAKEN = 32  # objects taken before the event loop runs other tasks
POLL_S = 0.005, 0.05  # shortest and longest wait between two checks of what was read


class PrefetchPlan:
    """The work of one `prefetch` call: a task on the runtime's event loop, and the tasks it starts.

    The cursor (`_course`) yields what comes next. OutstandingObjects (`_pending`) has the begun objects.
    RequestSubmitter (`_sending`) has their active requests. PrefetchWindow (`_distance`) has the blocks that
    are unread. FutureReads (`_foresight`) determines which of its blocks are evicted. `strip` turns a user's
    path or URL into a path, `glob` expands patterns, and `told` receives the bytes cached so far and in
    total.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        items: Callable[[Callable[[], object]], PrefetchItems],
        window: int | None,
        strip: Callable[[str], str],
        glob: Glob,
        told: Callable[[int, int | None], object],
    ) -> None:
        self.tally = ProgressCounts()
        self.failure: BaseException | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # waiting callers cannot cancel it
        self._source, self._runtime, self._told = reader.source, reader.source.runtime, told
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = self._is_ending = False
        self._items = items(lambda: self._runtime.call_soon(self._changed.set))
        window_size = math.inf if window is None else window
        self._foresight = FutureReads(self._source, self._items, strip, window_size)
        self._distance = PrefetchWindow(self._source, self._foresight, window)
        self._course = PlanCursor(
            reader,
            self._items,
            self._foresight,
            self.tally,
            strip=strip,
            glob=glob,
            spawn=self._spawn,
            answered=lambda path, error: self._pending.answered(path, error),
        )
        self._pending = OutstandingObjects(
            self._source,
            self._course,
            self._distance,
            self._foresight,
            self.tally,
            spawn=self._spawn,
            wake=self._changed.set,
        )
        self._sending = RequestSubmitter(
            reader, self._pending, self._distance, self.tally, spawn=self._spawn, wake=self._changed.set
        )

    # Start and end.

    def start(self) -> None:
        try:
            self._task = self._runtime.spawn(self._run())
        except CachedFSError as error:
            self._end("failed", error)
        else:
            self._task.add_done_callback(self._never_ran)

    def _never_ran(self, task: asyncio.Task[None]) -> None:
        """End a plan whose task was cancelled before its first step, and therefore never ran."""
        if not self.ended.done():
            self._end("cancelled", None)

    def cancel(self) -> None:
        """Request nothing more, and end the requests that no reader waits for. Event loop thread only."""
        # Only once: a second cancellation would interrupt the cleanup.
        if self._task is not None and not (self._is_cancelled or self._is_ending):
            self._task.cancel()
        self._is_cancelled = True

    async def _run(self) -> None:
        state = "done"
        failure: BaseException | None = None
        try:
            with speculative():
                await self._begin()
                await self._work()
        except asyncio.CancelledError:
            state = "cancelled"
            if not self._runtime.pid:
                state = "failed"
                failure = OriginUnavailable("the process is exiting: the prefetch was canceled")
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # also the iterator's SystemExit, which would end the event loop
            state, failure = "failed", error
        await self._wind_up()
        self._end(state, failure)

    async def _wind_up(self) -> None:
        self._is_ending = True
        self._foresight.close()
        self._items.close()
        for task in self._tasks:
            task.cancel()
        self._sending.stop()  # after the cancellation, when no task waits for these requests
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, state: str, failure: BaseException | None) -> None:
        self.failure = failure
        self._items.close()
        self._sending.close()
        self.tally.end(state)
        self._pending.close()
        self._distance.close()
        self.ended.set_result(None)

    async def _begin(self) -> None:
        """Raise the errors that would make the whole plan useless."""
        if self._source.config.offline:
            return
        self._source.origin("")  # raises errors of the origin, such as a missing package
        cache = self._runtime.cache
        allowed = await asyncio.to_thread(cache.allowance, self._source.config.bounds)
        if allowed is None or allowed < self._source.config.block_size:
            raise cannot_store(cache)
        self._foresight.begin()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._runtime.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: otherwise asyncio logs it as lost when the plan ends first
        self._changed.set()

    # Main loop.

    async def _work(self) -> None:
        pause_s, look_at = POLL_S[0], 0.0
        while True:
            self._changed.clear()
            now, moved = time.monotonic(), False
            if now >= look_at:
                look_at = now + POLL_S[0]
                moved = self._look() | self._sending.look_elsewhere()
                self._sending.check()
            if not self._pending.patience.is_pausing(now):
                self._fill_up()
            self._tell()
            if self._pending.failure is not None:
                raise self._pending.failure
            if self._is_cancelled:  # a coroutine awaited above suppressed the cancellation
                raise asyncio.CancelledError
            if self._is_over():
                return
            # If no object is open, blocks only have to be stored: check soon, unless the origin is
            # unreachable.
            is_near = moved or not (self._pending.open or self._pending.patience.is_unreachable)
            pause_s = POLL_S[0] if is_near else min(2 * pause_s, POLL_S[1])
            await self._pause(pause_s)

    def _is_over(self) -> bool:
        is_left = self._pending.open or self._sending.is_flying or self._tasks
        return self._course.is_over and not is_left and self._pending.failure is None

    async def _pause(self, pause_s: float) -> None:
        """Wait for a change; poll if it may be a read, or a fetch by another process."""
        await asyncio.sleep(0)  # run other tasks
        is_polling = (
            self._pending.is_held or not self._sending.is_idle or self._pending.patience.is_unreachable
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_polling else None):
                # Not `wait_for`: an event at the moment of a cancellation would undo it.
                await self._changed.wait()

    def _fill_up(self) -> None:
        """Prepare the next requests and submit them."""
        n = 0
        may_see_more = self._foresight.look()
        self._pending.cut()
        while n < TAKEN and self._pending.wants_more and (taken := self._course.take()) is not None:
            for part in taken:
                self._pending.push(part)
            self._pending.cut()
            n += 1
        self._sending.submit()
        if n == TAKEN or may_see_more:
            self._changed.set()

    # Follow the reader.

    def _look(self) -> bool:
        """Check which blocks were read; return whether the reader moved."""
        is_held = self._pending.is_held
        moved = self._distance.look(is_held=is_held)
        places = [*self._pending.places(), *self._distance.first()]
        self._foresight.reached(min(places, default=(self._course.n_begun, 0)))
        self._distance.forget_lost(self._pending.open)
        if is_held and not moved:
            return self._distance.look_further(self._beyond, (self._course.n_begun, 0))
        return moved

    def _beyond(self) -> Beyond:
        """Yield a `Beyond` entry for each block left of begun objects, and for each object to come."""
        yield from self._pending.beyond()
        yield from self._course.beyond(self._skip)

    def _skip(self, n_children: int, n_items: int) -> None:
        self._pending.skip()
        self._course.skip(n_children, n_items)

    def _tell(self) -> None:
        progress = self.progress()
        self._told(progress.bytes_fetched + progress.bytes_here, progress.bytes_total)

    def progress(self) -> Progress:
        """Return the progress of the plan. From any thread."""
        is_asked = self._distance.is_reserved or self._pending.ready or not self._sending.is_idle
        is_held = self._pending.is_held and not is_asked
        return self.tally.progress(n_left=self._items.n_left, coming=self._sending.coming, is_held=is_held)
