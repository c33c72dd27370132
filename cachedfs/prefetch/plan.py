"""Prefetch plan: fetch objects in the declared order, at a limited distance from the reader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush
from typing import Any

from cachedfs.common.blocks import beginning
from cachedfs.core.objects import Entry
from cachedfs.core.path_errors import is_a_folder, not_cacheable
from cachedfs.core.reader import MANY_READERS, TRIES, Reader
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ChecksumMismatch,
    ObjectChanged,
    OriginUnavailable,
)
from cachedfs.origins.request_slots import speculative
from cachedfs.prefetch.belady import Belady, Use
from cachedfs.prefetch.fetcher import Fetcher, PlanTasks
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.object_stream import Glob, ObjectStream, PrefetchObject
from cachedfs.prefetch.progress import Progress, ProgressCounts
from cachedfs.prefetch.requests import PlanRequests, cannot_store

POLL_S = 0.005, 0.05  # shortest and longest wait between two checks of what was read
AT_ONCE = 32  # objects taken before the event loop runs other tasks
MOST_OPEN = 256  # objects that are being fetched at a time
BLOCKS_AT_ONCE = 128  # cached blocks of an object
READY = 4  # requests in the speculative queue; more blocks are asked for when these are fewer
NEAR = 4096  # objects looked up ahead; more only if blocks will have to be evicted
AHEAD_AT_ONCE = 128  # objects looked up before the event loop runs other tasks


class PrefetchPlan:
    """The work of one `prefetch` call: a task on the engine's event loop, and the tasks it starts.

    ObjectStream yields the objects in order. Fetcher waits for their blocks, which PlanRequests requests where nobody has.
    Belady knows where the readers are, what may be fetched, and which blocks to evict. `strip` turns a user's path or URL
    into a path, `glob` expands patterns, and `report` receives the bytes cached so far and in total.
    """

    def __init__(
        self,
        reader: Reader,
        items: Any,
        *,
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
        self._tasks = PlanTasks(self._engine)
        self._changed = self._tasks.changed
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._is_held = False  # the readers have to read before more is requested
        self._stands_back = False  # while the readers send as many requests as the link takes
        self._window = math.inf if window is None else window
        self._clock, _ = self._engine.cache.reads_since(0, self._objects.config.bounds)
        self._items = PrefetchItems(items, lambda: self._engine.call_soon(self._changed.set))
        self._requests = PlanRequests(reader, self.counts, self._tasks.spawn, self._changed.set)
        has, is_in_memory = self._engine.cache.has, self._requests.download
        self._uses = Belady(window=self._window, reads=self._reads, has=has, is_in_memory=is_in_memory)
        self._stream = ObjectStream(
            reader, self._items, self._requests, self._uses, spawn=self._tasks.spawn, strip=strip, glob=glob
        )
        self._fetcher = Fetcher(
            self._engine, self._tasks, self._requests, self._uses, failed=self._failed, finish=self._finish
        )
        # Objects of which not all was asked for, by position: the current one, and those looked up meanwhile.
        self._to_ask: list[tuple[float, PrefetchObject]] = []
        self._fresh: dict[str, Entry] = {}  # by path: checked since other tasks ran

    # Start and end.

    def start(self) -> None:
        try:
            self._task = self._engine.spawn(self._run())
        except CachedFSError as error:
            self._end(error)
        else:
            self._task.add_done_callback(self._never_ran)

    def _never_ran(self, task: asyncio.Task[None]) -> None:
        """End a plan whose task was cancelled before its first step, and therefore never ran."""
        if not self.ended.done():
            self._end(asyncio.CancelledError())

    def cancel(self) -> None:
        """Request nothing more, and end the requests that no reader waits for. Event loop thread only."""
        # Only once: a second cancellation would interrupt the cleanup.
        if self._task is not None and not (self._is_cancelled or self._tasks.is_ending):
            self._task.cancel()
        self._is_cancelled = True

    async def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with speculative():
                await self._begin()
                await self._work()
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as error:  # also the iterator's SystemExit, which would end the event loop
            failure = error
        with contextlib.suppress(ValueError):
            self._engine.store_queue.plans.remove(self._uses.store)
        await self._tasks.end()
        self._end(failure)

    async def _begin(self) -> None:
        """Raise the errors that would make the whole plan useless."""
        if self._objects.config.offline:
            return
        self._objects.origin("")  # raises errors of the origin, such as a missing package
        cache, room = self._engine.cache, 0
        with contextlib.suppress(CacheError):
            room = await asyncio.to_thread(cache.room, self._objects.config.bounds)
        if room < self._objects.config.block_size:
            raise cannot_store(cache)
        self._uses.fit(room)
        self._engine.store_queue.plans.append(self._uses.store)

    def _reads(self) -> Sequence[int]:
        """Return the blocks that any process read since the last call."""
        self._clock, reads = self._engine.cache.reads_since(self._clock, self._objects.config.bounds)
        return reads

    def _end(self, failure: BaseException | None) -> None:
        state = "done" if failure is None else "failed"
        if isinstance(failure, asyncio.CancelledError):
            state, failure = "cancelled", None
            if not self._engine.is_open:
                state = "failed"
                failure = OriginUnavailable("the process is exiting: the prefetch was canceled")
        self.failure = failure
        self._items.close()
        self._requests.cancel()  # now that no task of the plan waits for its requests
        self._fetcher.in_progress.clear()
        self.counts.end(state)
        self.ended.set_result(None)

    def progress(self) -> Progress:
        """Return the progress of the plan. From any thread."""
        requests = self._requests
        is_held = self._is_held and not (self._fetcher.in_progress or requests.active)
        return self.counts.progress(n_left=self._items.n_left, coming=requests.n_coming, is_held=is_held)

    # Main loop.

    async def _work(self) -> None:
        requests, pause_s, look_at = self._requests, POLL_S[0], 0.0
        fetched_before = self._engine.bytes_fetched
        while True:
            self._changed.clear()
            now, has_moved = time.monotonic(), False
            if now >= look_at:
                look_at = now + POLL_S[0]
                has_moved = self._uses.look()
                requests.check_stored()
            self._uses.fetched = self._engine.bytes_fetched - fetched_before
            # With as many readers, all that may be sent is wanted already; but what to evict, only the plan knows.
            self._stands_back = self._engine.n_reading >= MANY_READERS and not self._uses.is_tight
            if not self._stands_back:
                if not requests.pause_s():
                    self._ask_for_blocks()
                self._look_ahead()
            progress = self.progress()
            self._report(progress.bytes_fetched + progress.bytes_here, progress.bytes_total)
            if requests.error is not None:
                raise requests.error
            if self._is_cancelled:  # a coroutine awaited above suppressed the cancellation
                raise asyncio.CancelledError
            if self._stream.is_over and not (self._to_ask or self._tasks.running or requests.active):
                return
            # If no object is open, blocks only have to be stored: check soon, unless the origin is unreachable.
            is_near = has_moved or not (self._fetcher.in_progress or requests.is_unreachable)
            pause_s = POLL_S[0] if is_near else min(2 * pause_s, POLL_S[1])
            await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        """Wait for a change; poll if it may be a read, or a block that was stored."""
        await asyncio.sleep(0)  # run other tasks
        is_held = self._is_held or self._stands_back
        is_polling = is_held or self._requests.active or self._requests.is_unreachable
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s if is_polling else None):
                # Not `wait_for`: an event at the moment of a cancellation would undo it.
                await self._changed.wait()

    def _look_ahead(self) -> None:
        """Look up the objects to come, so that their uses are known."""
        uses, stream = self._uses, self._stream
        for _ in range(AHEAD_AT_ONCE):
            if uses.room <= 0 or (len(stream.ahead) >= NEAR and not uses.is_tight):
                return
            if (obj := stream.look_ahead()) is None or obj.version is None:
                return  # not more than one lookup in the cache in vain before other tasks run
        self._changed.set()

    # Ask for blocks.

    def _ask_for_blocks(self) -> None:
        """Ask for the next blocks in order, until the readers have to read first, or enough requests wait."""
        self._is_held = False
        self._fresh.clear()
        for _ in range(AT_ONCE):
            if not self._to_ask and not self._take():
                return
            position, obj = self._to_ask[0]
            if sum(each < position for each in self._requests.queued) >= READY:
                return
            if not (obj.is_over or (self._ask_unknown(obj) if obj.version is None else self._ask(obj))):
                self._is_held = True
                return
            if obj.is_over or obj.version is None or not obj.left:
                heappop(self._to_ask)
                self._finish(obj)
        self._changed.set()

    def _take(self) -> bool:
        """Take the next object; return False if there is none now, or too many are being fetched."""
        ahead = self._stream.ahead
        if len(self._fetcher.in_progress) >= MOST_OPEN or not (ahead or self._stream.look_ahead()):
            if self._stream.error is not None and not ahead:
                raise self._stream.error
            return False
        obj = ahead.popleft()
        if (entry := self._fresh.get(obj.path)) is None and (entry := self._objects.fresh(obj.path)):
            self._fresh[obj.path] = entry
        self._stream.set_version(obj, None if entry is None else self._objects.version(entry))
        heappush(self._to_ask, (obj.position, obj))
        return True

    def _ask_unknown(self, obj: PrefetchObject) -> bool:
        """Look an object up by reading its first blocks; return False if the readers have to read first."""
        config, uses = self._objects.config, self._uses
        most = int(min(config.whole_request, uses.most_ahead / config.first_concurrency))
        want = beginning(*(obj.bounds or (None, None)), block_size=config.block_size, most=most)
        if uses.ahead and uses.ahead + want.size > uses.most_ahead:
            return False
        position, found = obj.position, partial(self._found, obj)
        work = partial(self._requests.look_up, obj.path, want, position, found)
        self._fetcher.start(obj, work, position, want.size)
        return True

    def _ask(self, obj: PrefetchObject) -> bool:
        """Take the next blocks that are cached, or request some; return False if the readers have to read first."""
        uses, cache, version = self._uses, self._engine.cache, obj.begun
        for index in obj.left[:BLOCKS_AT_ONCE]:
            use = obj.use(index)
            is_coming = self._requests.download(version, index) is not None
            is_cached = not is_coming and (uses.holds(use) or cache.has(version, index))
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
        run = self._requests.next_run(version, obj.left)
        n = uses.ask([obj.use(index) for index in run])
        obj.left = obj.left[n:]
        if n:
            self._fetcher.bring(obj, version, run[:n])
        return n > 0

    def _is_passed(self, use: Use) -> bool:
        """Return whether the readers were faster than the plan, and need not have a block fetched for them.

        If all blocks fit, a block that was read and evicted is fetched again, so that all are cached in the end.
        """
        if use.position > self._uses.reader:
            return False
        is_coming = self._requests.is_coming(use.version, use.block)
        return is_coming or self._uses.is_tight or self._window < math.inf

    # One object.

    def _found(self, obj: PrefetchObject, entry: Entry) -> None:
        """Ask for the blocks of an object, or for the objects below it if it is a folder."""
        objects = self._objects
        if entry.info is None and (obj.bounds is not None or entry.by_listing or objects.config.offline):
            raise objects.not_found(entry)
        if entry.info is None or entry.info.kind == "directory":
            if obj.bounds is not None:
                raise is_a_folder(objects.url(obj.path))
            obj.is_over = True
            self._stream.enter(obj.path)
        elif (version := objects.version(entry)) is not None:
            self._stream.set_version(obj, version)
            self._ask_again(obj)
        else:
            raise not_cacheable(objects.url(obj.path), entry.info)

    def _ask_again(self, obj: PrefetchObject) -> None:
        """Ask for the blocks of an object, before those of later ones."""
        if (obj.position, obj) not in self._to_ask:
            heappush(self._to_ask, (obj.position, obj))
        self._ask_for_blocks()

    def _failed(self, obj: PrefetchObject, error: CachedFSError) -> None:
        """Look an object up again if it was replaced, or count it as failed."""
        self._stream.set_version(obj, None)
        obj.n_tries += 1
        if isinstance(error, ObjectChanged | ChecksumMismatch) and obj.n_tries < TRIES:
            self._objects.expire(obj.path)
            self._ask_again(obj)
            return
        obj.is_over = True
        self.counts.replace([obj.listed_size], [0])
        self.counts.n_done += 1
        self._requests.failed(obj.path, error)

    def _finish(self, obj: PrefetchObject) -> None:
        """Count an object as finished once nothing of it is left."""
        if not (obj.is_over or obj.left or obj.n_tasks) and obj.version is not None:
            obj.is_over = True
            self.counts.n_done += 1
