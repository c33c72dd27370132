"""Prefetch plan: fetch objects in the declared order, at a limited distance from the reader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from cachedfs.cache.eviction.future_uses import FutureUses
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins.request_slots import speculative
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.object_fetcher import ObjectFetcher, cannot_store
from cachedfs.prefetch.object_stream import Glob, ObjectStream
from cachedfs.prefetch.progress import Progress, ProgressCounts

__all__ = ["PrefetchPlan"]

POLL_S = 0.005, 0.05  # shortest and longest wait between two checks of what was read
AT_ONCE = 32  # cached objects taken before the event loop runs other tasks
MOST_OPEN = 256  # objects that are being fetched at a time
READY = 4  # tasks that wait for their turn; more objects are begun when these are fewer
NEAR = 4096  # objects looked up ahead; more only if blocks will have to be evicted
AHEAD_AT_ONCE = 128  # objects looked up before the event loop runs other tasks


class PrefetchPlan:
    """The work of one `prefetch` call: a task on the engine's event loop, and the tasks it starts.

    ObjectStream yields the objects in order, and ObjectFetcher fetches each. FutureUses knows where the reader is, and
    which blocks to evict. `strip` turns a user's path or URL into a path, `glob` expands patterns, and `report`
    receives the bytes cached so far and in total.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        items: Callable[[Callable[[], object]], PrefetchItems],
        window: int | None,
        strip: Callable[[str], str],
        glob: Glob,
        report: Callable[[int, int | None], object],
    ) -> None:
        self.tally = ProgressCounts()
        self.failure: BaseException | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # waiting callers cannot cancel it
        self._objects, self._engine, self._report = reader.objects, reader.objects.engine, report
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = self._is_ending = False
        self._items = items(lambda: self._engine.call_soon(self._changed.set))
        self._fetcher = ObjectFetcher(
            reader,
            self.tally,
            spawn=self._spawn,
            enter=lambda path: self._stream.enter(path),
            changed=self._changed.set,
        )
        self._stream = ObjectStream(
            reader,
            self._items,
            self.tally,
            strip=strip,
            glob=glob,
            spawn=self._spawn,
            wait_for_origin=self._fetcher.wait_for_origin,
            failed=self._fetcher.count_failure,
        )
        self._window = math.inf if window is None else window
        self._since = self._engine.cache.clock(self._objects.config.bounds)
        self._uses: FutureUses | None = None  # None before `_begin`, and offline

    # Start and end.

    def start(self) -> None:
        try:
            self._task = self._engine.spawn(self._run())
        except CachedFSError as error:
            self._end("failed", error)
        else:
            self._task.add_done_callback(self._never_ran)

    def _never_ran(self, task: asyncio.Task[None]) -> None:
        """End a plan whose task was cancelled before its first step, and therefore never ran."""
        if not self.ended.done():
            self._end(*self._cancelled())

    def _cancelled(self) -> tuple[str, Exception | None]:
        """Return the state and the failure of a plan whose task was cancelled."""
        if self._engine.pid:
            return "cancelled", None
        return "failed", OriginUnavailable("the process is exiting: the prefetch was canceled")

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
            state, failure = self._cancelled()
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # also the iterator's SystemExit, which would end the event loop
            state, failure = "failed", error
        await self._wind_up()
        self._end(state, failure)

    async def _begin(self) -> None:
        """Raise the errors that would make the whole plan useless."""
        if self._objects.config.offline:
            return
        self._objects.origin("")  # raises errors of the origin, such as a missing package
        cache, bounds = self._engine.cache, self._objects.config.bounds
        allowed = await asyncio.to_thread(cache.allowance, bounds)
        if allowed is None or allowed < self._objects.config.block_size:
            raise cannot_store(cache)
        self._uses = FutureUses(cache, bounds, since=self._since, window=self._window)
        self._fetcher.begin(self._uses)
        self._engine.future_uses.append(self._uses)
        if (plan_slot := self._uses.plan_slot) is not None:
            self._engine.store_queue.put(then=partial(cache.clear_plan_slot, plan_slot))

    async def _wind_up(self) -> None:
        self._is_ending = True
        self._items.close()
        if self._uses is not None:
            self._engine.future_uses.remove(self._uses)
            self._uses.close()
        for task in self._tasks:
            task.cancel()
        self._fetcher.turns.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fetcher.stop()  # now that no task of the plan waits for its requests

    def _end(self, state: str, failure: BaseException | None) -> None:
        self.failure = failure
        self._items.close()
        self._fetcher.close()
        self.tally.end(state)
        self.ended.set_result(None)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._engine.spawn(coroutine)
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
        fetcher, pause_s, look_at = self._fetcher, POLL_S[0], 0.0
        while True:
            self._changed.clear()
            now, has_moved = time.monotonic(), False
            if now >= look_at:
                look_at = now + POLL_S[0]
                has_moved = self._uses is not None and self._uses.look(is_held=fetcher.turns.is_held)
                fetcher.forget_stored()
            fetcher.turns.admit_waiting()
            if not fetcher.failures.pause_s(now):
                self._begin_objects()
                fetcher.turns.submit()
            self._look_ahead()
            progress = self.progress()
            self._report(progress.bytes_fetched + progress.bytes_here, progress.bytes_total)
            if fetcher.error is not None:
                raise fetcher.error
            if self._is_cancelled:  # a coroutine awaited above suppressed the cancellation
                raise asyncio.CancelledError
            if self._stream.is_over and not (self._tasks or fetcher.active):
                return
            # If no object is open, blocks only have to be stored: check soon, unless the origin is unreachable.
            is_near = has_moved or not (fetcher.open or fetcher.failures.is_unreachable)
            pause_s = POLL_S[0] if is_near else min(2 * pause_s, POLL_S[1])
            await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        """Wait for a change; poll if it may be a read, or a block that was stored."""
        await asyncio.sleep(0)  # run other tasks
        fetcher = self._fetcher
        is_polling = fetcher.turns.is_held or fetcher.active or fetcher.failures.is_unreachable
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_polling else None):
                # Not `wait_for`: an event at the moment of a cancellation would undo it.
                await self._changed.wait()

    def _begin_objects(self) -> None:
        """Begin the next objects, if few of those before them wait for their turn."""
        n_begun = 0
        for _ in range(AT_ONCE):
            if n_begun + len(self._fetcher.turns) >= READY or len(self._fetcher.open) >= MOST_OPEN:
                return
            if (obj := self._stream.take()) is None:
                return
            n_begun += self._fetcher.fetch(obj)
        self._changed.set()

    def _look_ahead(self) -> None:
        """Look up the objects to come, so that the cache knows when their blocks are used."""
        uses = self._uses
        for _ in range(AHEAD_AT_ONCE):
            if uses is None or uses.room <= 0 or (self._stream.n_seen >= NEAR and not uses.is_tight):
                return
            if (obj := self._stream.look_ahead()) is None:
                return
            if obj.entry is None:
                return  # not more than one lookup in the cache in vain before other tasks run
            if (version := self._objects.version(obj.entry)) is not None:
                obj.begin(version)
                uses.add(obj.use(index) for index in obj.wanted)
        self._changed.set()

    def progress(self) -> Progress:
        """Return the progress of the plan. From any thread."""
        is_held, coming = self._fetcher.is_waiting, self._fetcher.n_coming
        return self.tally.progress(n_left=self._items.n_left, coming=coming, is_held=is_held)
