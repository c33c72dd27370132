"""Prefetch plan: fetch objects in the declared order, at a limited distance from the reader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from heapq import heappop, heappush
from typing import Any

from cachedfs.common.blocks import beginning
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError, CacheError, OriginUnavailable
from cachedfs.origins.request_slots import speculative
from cachedfs.prefetch.belady import Belady, Use
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.object_fetcher import ObjectFetcher, cannot_store
from cachedfs.prefetch.object_stream import Glob, ObjectStream
from cachedfs.prefetch.progress import PrefetchObject, Progress, ProgressCounts

__all__ = ["PrefetchPlan"]

POLL_S = 0.005, 0.05  # shortest and longest wait between two checks of what was read
AT_ONCE = 32  # objects taken before the event loop runs other tasks
MOST_OPEN = 256  # objects that are being fetched at a time
BLOCKS_AT_ONCE = 128  # cached blocks of an object
READY = 4  # requests in the speculative queue; more blocks are asked for when these are fewer
NEAR = 4096  # objects looked up ahead; more only if blocks will have to be evicted
AHEAD_AT_ONCE = 128  # objects looked up before the event loop runs other tasks


class PrefetchPlan:
    """The work of one `prefetch` call: a task on the engine's event loop, and the tasks it starts.

    ObjectStream yields the objects in order, the plan asks for their blocks, ObjectFetcher fetches them, and Belady
    knows where the readers are and which blocks to evict. `strip` turns a user's path or URL into a path, `glob` expands patterns, and `report`
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
        self.counts = ProgressCounts()
        self.failure: BaseException | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # waiting callers cannot cancel it
        self._objects, self._engine, self._report = reader.objects, reader.objects.engine, report
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = self._is_ending = False
        self._is_held = False  # the readers have to read before more is requested
        self._items = items(lambda: self._engine.call_soon(self._changed.set))
        self._fetcher = ObjectFetcher(reader, self.counts, self._spawn, self._changed.set)
        self._stream = ObjectStream(reader, self._items, self._fetcher, strip=strip, glob=glob)
        self._fetcher.ask, self._fetcher.enter = self._ask_for, self._stream.enter
        self._window = math.inf if window is None else window
        self._clock, _ = self._engine.cache.reads_since(0, self._objects.config.bounds)
        self._uses = self._fetcher.uses = self._belady(math.inf)
        # Objects of which not all was asked for, by position: the current one, and those looked up meanwhile.
        self._to_ask: list[tuple[float, PrefetchObject]] = []

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
        room = 0
        with contextlib.suppress(CacheError):
            room = await asyncio.to_thread(cache.room, bounds)
        if room < self._objects.config.block_size:
            raise cannot_store(cache)
        self._uses = self._fetcher.uses = self._belady(room)
        self._engine.store_queue.plans.append(self._uses.store)

    def _belady(self, capacity: float) -> Belady:
        return Belady(
            capacity,
            window=self._window,
            reads=self._reads,
            has=self._engine.cache.has,
            is_in_memory=self._fetcher.download,
        )

    def _reads(self) -> Sequence[int]:
        """Return the blocks that any process read since the last call."""
        self._clock, reads = self._engine.cache.reads_since(self._clock, self._objects.config.bounds)
        return reads

    async def _wind_up(self) -> None:
        self._is_ending = True
        self._items.close()
        with contextlib.suppress(ValueError):
            self._engine.store_queue.plans.remove(self._uses.store)
        self._engine.speculation.cancel(self._fetcher)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fetcher.cancel()  # now that no task of the plan waits for its requests

    def _end(self, state: str, failure: BaseException | None) -> None:
        self.failure = failure
        self._items.close()
        self._fetcher.close()
        self.counts.end(state)
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
                has_moved = self._uses.look()
                fetcher.check_stored()
            if not fetcher.failures.pause_s(now):
                self._ask_for_blocks()
            self._look_ahead()
            progress = self.progress()
            self._report(progress.bytes_fetched + progress.bytes_here, progress.bytes_total)
            if fetcher.error is not None:
                raise fetcher.error
            if self._is_cancelled:  # a coroutine awaited above suppressed the cancellation
                raise asyncio.CancelledError
            if self._stream.is_over and not (self._to_ask or self._tasks or fetcher.active):
                return
            # If no object is open, blocks only have to be stored: check soon, unless the origin is unreachable.
            is_near = has_moved or not (fetcher.open or fetcher.failures.is_unreachable)
            pause_s = POLL_S[0] if is_near else min(2 * pause_s, POLL_S[1])
            await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        """Wait for a change; poll if it may be a read, or a block that was stored."""
        await asyncio.sleep(0)  # run other tasks
        is_polling = self._is_held or self._fetcher.active or self._fetcher.failures.is_unreachable
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_polling else None):
                # Not `wait_for`: an event at the moment of a cancellation would undo it.
                await self._changed.wait()

    def _look_ahead(self) -> None:
        """Look up the objects to come, so that their uses are known."""
        uses = self._uses
        for _ in range(AHEAD_AT_ONCE):
            if uses.room <= 0 or (self._stream.n_seen >= NEAR and not uses.is_tight):
                return
            if (obj := self._stream.look_ahead()) is None:
                return
            self._fetcher.add(obj)
            if obj.version is None:
                return  # not more than one lookup in the cache in vain before other tasks run
        self._changed.set()

    # Ask for blocks.

    def _ask_for(self, obj: PrefetchObject) -> None:
        """Ask for the blocks of an object, before those of later ones."""
        if (obj.position, obj) not in self._to_ask:
            heappush(self._to_ask, (obj.position, obj))
        self._ask_for_blocks()

    def _ask_for_blocks(self) -> None:
        """Ask for the next blocks in order, until the readers have to read first, or enough requests wait."""
        fetcher, n_begun = self._fetcher, 0
        self._is_held = False
        for _ in range(AT_ONCE):
            if self._to_ask and self._to_ask[0][1].is_over:
                heappop(self._to_ask)
                continue
            position = self._to_ask[0][0] if self._to_ask else math.inf
            if n_begun + sum(each < position for each in fetcher.queued) >= READY:
                return
            if not self._to_ask and not self._take():
                return
            obj = self._to_ask[0][1]
            n_tasks = obj.n_tasks
            if not (self._ask_unknown(obj) if obj.version is None else self._ask(obj)):
                self._is_held = True
                return
            n_begun += obj.n_tasks > n_tasks
            if obj.n_tasks if obj.version is None else not obj.left:
                heappop(self._to_ask)
                fetcher.end(obj)
        self._changed.set()

    def _take(self) -> bool:
        """Take the next object; return False if there is none now, or too many are being fetched."""
        obj = self._stream.take() if len(self._fetcher.open) < MOST_OPEN else None
        if obj is not None:
            entry = self._objects.fresh(obj.path)
            self._fetcher.begin(obj, None if entry is None else self._objects.version(entry))
            heappush(self._to_ask, (obj.position, obj))
        return obj is not None

    def _ask_unknown(self, obj: PrefetchObject) -> bool:
        """Look an object up by reading its first blocks; return False if the readers have to read first."""
        config, uses = self._objects.config, self._uses
        most = int(min(config.whole_request, uses.most_ahead / config.first_concurrency))
        want = beginning(*(obj.bounds or (None, None)), block_size=config.block_size, most=most)
        if uses.ahead and uses.ahead + want.size > uses.most_ahead:
            return False
        self._fetcher.look_up(obj, want)
        return True

    def _ask(self, obj: PrefetchObject) -> bool:
        """Take the next blocks that are cached, or request some; return False if the readers have to read first."""
        uses, cache, version = self._uses, self._engine.cache, obj.begun
        for index in obj.left[:BLOCKS_AT_ONCE]:
            use = obj.use(index)
            is_cached = not self._fetcher.download(version, index) and cache.has(version, index)
            if not (is_cached or self._is_passed(use)):
                break
            if not uses.ask([use], is_cached=True):
                return False
            if is_cached:
                uses.arrived(use)
            self.counts.arrived += use.size
            obj.left = obj.left[1:]
        else:
            return True
        run = self._next_run(obj)
        n = uses.ask([obj.use(index) for index in run])
        obj.left = obj.left[n:]
        if n:
            self._fetcher.fetch(obj, run[:n])
        return n > 0

    def _is_passed(self, use: Use) -> bool:
        """Return whether the readers were faster than the plan, and need not have a block fetched for them.

        If all blocks fit, a block that was read and evicted is fetched again, so that all are cached in the end.
        """
        if use.position > self._uses.reader:
            return False
        is_coming = self._fetcher.is_coming(use.version, use.block)
        return is_coming or self._uses.is_tight or self._window < math.inf

    def _next_run(self, obj: PrefetchObject) -> range:
        """Return the next blocks that one request brings: an active one, or one to be sent."""
        most = max(1, self._objects.config.whole_request // obj.begun.block_size)
        run, download = obj.left[:most], self._fetcher.download(obj.begun, obj.left[0])
        for n, index in enumerate(run[1:], start=1):
            is_other = self._fetcher.download(obj.begun, index) is not download
            if is_other or self._engine.cache.has(obj.begun, index):
                return run[:n]
        return run

    def progress(self) -> Progress:
        """Return the progress of the plan. From any thread."""
        is_held, coming = self._is_held and self._fetcher.is_idle, self._fetcher.n_coming
        return self.counts.progress(n_left=self._items.n_left, coming=coming, is_held=is_held)
