"""Wait for the blocks of the objects of a prefetch plan, or request them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from cachedfs.common.version import Version
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.engine import Engine
from cachedfs.errors import CachedFSError, OriginUnreachable
from cachedfs.prefetch.belady import Belady
from cachedfs.prefetch.object_stream import PrefetchObject
from cachedfs.prefetch.requests import PlanRequests


class PlanTasks:
    """The tasks of a plan, which end with it. Event loop thread only.

    `changed` is set when one ends, and by others when the plan has to look again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.changed = asyncio.Event()
        self.running: set[asyncio.Future[Any]] = set()
        self.is_ending = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._engine.spawn(coroutine)
        self.add(task)
        return task

    def add(self, task: asyncio.Future[Any]) -> None:
        self.running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: otherwise asyncio logs it when the plan ends first
        self.changed.set()

    async def end(self) -> None:
        """Cancel the tasks, and wait until all have ended."""
        self.is_ending = True
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


class Fetcher:
    """Waits for the blocks of objects, and counts those that arrive. Event loop thread only.

    `failed` is called with an object and why it could not be fetched, `finish` after each work for one.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: PlanTasks,
        requests: PlanRequests,
        uses: Belady,
        *,
        failed: Callable[[PrefetchObject, CachedFSError], object],
        finish: Callable[[PrefetchObject], object],
    ) -> None:
        self._engine, self._tasks, self._requests, self._uses = engine, tasks, requests, uses
        self._failed, self._finish = failed, finish
        self.in_progress: set[PrefetchObject] = set()  # objects that are being worked for

    def start(
        self, obj: PrefetchObject, work: Callable[[], Awaitable[None]], position: float, reserved: int = 0
    ) -> None:
        """Start the work for an object, which sends a request of this position; `reserved` bytes count as ahead."""
        self._begin_work(obj)
        self._requests.queued.add(position)
        self._uses.ahead += reserved
        self._tasks.spawn(self._attempt(obj, obj.version, work, position, reserved))

    async def _attempt(
        self,
        obj: PrefetchObject,
        version: Version | None,
        work: Callable[[], Awaitable[None]],
        position: float,
        reserved: int,
    ) -> None:
        """Do the work for a version of an object, or count a failure."""
        error: Exception | None = None
        try:
            await self._requests.until_reachable(work)
        except Exception as failure:  # of any origin
            error = failure
        self._requests.queued.discard(position)
        self._uses.ahead -= reserved
        self._end_work(obj, version, error)

    def bring(self, obj: PrefetchObject, version: Version, run: range) -> None:
        """Have adjacent blocks of a version cached: wait for the request that brings them, or send one."""
        download = self._requests.download(version, run[0])
        if download is None:
            self.start(obj, partial(self._send, obj, version, run), obj.use(run[0]).position)
            return
        self._begin_work(obj)
        # Without a task, which would cost a tenth of the CPU time of small objects.
        waiting = download.arrival(min(obj.bytes_of(run[-1]).stop, download.stop))
        self._tasks.add(waiting)
        waiting.add_done_callback(partial(self._came, obj, version, run, download))

    async def _send(self, obj: PrefetchObject, version: Version, run: range) -> None:
        """Request blocks, unless they are cached by now; then wait for them without a task."""
        while run and obj.version == version:
            await self._requests.request(version, run, obj.use(run[0]).position)
            if self._requests.download(version, run[0]) is not None:
                self.bring(obj, version, run)
                return
            if self._engine.cache.has(version, run[0]):
                self._arrived(obj, run[:1])
                run = run[1:]

    def _came(
        self,
        obj: PrefetchObject,
        version: Version,
        run: range,
        download: Download,
        waiting: asyncio.Future[None],
    ) -> None:
        """Count the blocks that a request brought, and have the others fetched; or count its failure."""
        if waiting.cancelled() or self._tasks.is_ending:
            return
        error = waiting.exception()
        if isinstance(error, OriginUnreachable):
            self._requests.unreachable(error)
        if error is None or isinstance(error, DownloadStopped | OriginUnreachable):
            error = None
            if obj.version == version:
                n = sum(obj.bytes_of(index).stop <= download.filled for index in run)
                self._arrived(obj, run[:n])
                if n < len(run):
                    self.bring(obj, version, run[n:])
        self._end_work(obj, version, error)

    def _arrived(self, obj: PrefetchObject, run: range) -> None:
        for use in map(obj.use, run):
            self._requests.counts.arrived += use.size
            self._uses.arrived(use)
            self._requests.succeeded()

    def _begin_work(self, obj: PrefetchObject) -> None:
        obj.n_tasks += 1
        self.in_progress.add(obj)

    def _end_work(self, obj: PrefetchObject, version: Version | None, error: BaseException | None) -> None:
        """Note that work for a version of an object ended, or count a failure."""
        obj.n_tasks -= 1
        if isinstance(error, CachedFSError):
            if not obj.is_over and obj.version == version:
                self._failed(obj, error)
        elif isinstance(error, Exception):  # such as a missing package: it is the same for all objects
            self._requests.end_with(error)
        self._finish(obj)
        if not obj.n_tasks:
            self.in_progress.discard(obj)
