"""An event loop in a thread of its own, and calls into it from other threads and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.errors import OriginUnavailable

logger = logging.getLogger("cachedfs.core")

T = TypeVar("T")

LOOK_S = 1.0  # a waiting thread looks for an interrupt
DEADLOCK = "a blocking call on the event loop thread of cachedfs would deadlock: call the async method"
EXITING = "the process is exiting: the read was canceled"


class EventLoopThread:
    """Runs coroutines of other threads and event loops. Its loop and thread start with the first one.

    Blocking calls of its coroutines run in up to `n_workers` daemon threads, started on demand.
    """

    def __init__(self, name: str = "cachedfs", *, n_workers: int) -> None:
        self._name, self._n_workers = name, n_workers
        # The tasks that belong to this loop until they end, by their coroutines. Event loop thread only.
        self._tasks: dict[Coroutine[Any, Any, Any], asyncio.Task[Any]] = {}
        # Of each coroutine that another thread or loop waits for: what is called with its task, or with None if the loop
        # has closed before it ended.
        self._callers: dict[Coroutine[Any, Any, Any], Callable[[asyncio.Task[Any] | None], object]] = {}
        self._loop_lock = threading.Lock()  # guards the start of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None  # a blocking call would wait for itself there
        self._workers: DaemonThreadPool

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, running in its own thread."""
        if self._loop is None:
            with self._loop_lock:
                if self._loop is None:
                    self._loop = self._start_loop()
        return self._loop

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self._workers = DaemonThreadPool(self._n_workers, f"{self._name}-work")
        loop.set_default_executor(self._workers)
        self.thread = threading.Thread(target=self._run, args=(loop,), name=f"{self._name}-io", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # too many threads, or (Python 3.12) the main thread has ended
            loop.close()
            raise OriginUnavailable(f"nothing can be fetched: {error}") from error
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the event loop from another thread and return its result; an interrupt cancels it."""
        ended: SimpleQueue[asyncio.Task[T] | None] = SimpleQueue()
        try:
            if threading.current_thread() is self.thread:
                raise RuntimeError(DEADLOCK)
            self._begin(coroutine, ended.put)
            while True:  # CPython does not notice a Ctrl-C that comes just before a thread begins to wait
                with contextlib.suppress(Empty):
                    task = ended.get(timeout=LOOK_S)
                    break
            if task is None:
                raise OriginUnavailable(EXITING)
        except BaseException:  # usually KeyboardInterrupt
            self._cancel_soon(coroutine)
            raise
        finally:
            self._callers.pop(coroutine, None)
        try:
            return task.result()
        except asyncio.CancelledError:
            raise OriginUnavailable(EXITING) from None
        finally:
            del task  # its error refers to this frame

    async def await_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on this event loop, and await it from the caller's event loop.

        With `asyncio.run_coroutine_threadsafe` this would take twice as long.
        """
        caller = asyncio.get_running_loop()
        if caller is self._loop:
            return await coroutine
        ended: asyncio.Future[asyncio.Task[T] | None] = caller.create_future()

        def answer(task: asyncio.Task[T] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                caller.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(task))

        try:
            self._begin(coroutine, answer)
            task = await ended
            if task is None:
                raise OriginUnavailable(EXITING)
        except BaseException:  # usually CancelledError
            self._cancel_soon(coroutine)
            raise
        finally:
            self._callers.pop(coroutine, None)
        try:
            return task.result()
        except asyncio.CancelledError:
            raise OriginUnavailable(EXITING) from None

    def _begin(
        self, coroutine: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T] | None], object]
    ) -> None:
        """Start a task from another thread. At its end, call `ended` with it; with None if the loop ends first."""
        self._callers[coroutine] = ended
        try:
            (self._loop or self.loop).call_soon_threadsafe(self.spawn, coroutine, ended)
        except RuntimeError:  # the loop has just been closed
            ended(None)

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], object] | None = None
    ) -> asyncio.Task[T]:
        """Start a task that belongs to this loop until it ends, and call `ended` then. Event loop thread only."""
        task = self._tasks[coroutine] = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(partial(self._tasks.pop, coroutine))
        if ended is not None:
            task.add_done_callback(ended)
        return task

    def _cancel_soon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Cancel a coroutine that the loop may have or not: an interrupt leaves that unknown."""

        def cancel() -> None:
            if (task := self._tasks.get(coroutine)) is None:
                coroutine.close()
            else:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

        if not self.call_soon(cancel):  # runs after `spawn`, if that was scheduled
            with contextlib.suppress(RuntimeError):  # it began, and waits again as it is closed
                coroutine.close()

    def call_soon(self, function: Callable[..., object], *args: Any) -> bool:
        """Schedule `function` on the event loop from any thread; return False, and do nothing, without a loop."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
            return True
        except RuntimeError:  # the loop has just been closed
            return False

    def end_loop(self, close: Callable[[], Awaitable[object]], *, within_s: float) -> None:
        """Cancel all tasks, call `close` on the loop, and end it. Waiting threads get an error."""
        loop, thread = self._loop, self.thread
        if loop is None or thread is None or not thread.is_alive():
            return

        async def shut_down() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await close()

        # Canceled tasks have no reader left: keep asyncio from reporting them.
        loop.set_exception_handler(lambda loop, context: None)
        try:
            asyncio.run_coroutine_threadsafe(shut_down(), loop).result(within_s)
        except Exception as error:  # the remaining steps must run whatever fails here
            logger.debug("requests did not end in time: %s", error)
        # Before the loop stops: canceled futures notify it.
        self._workers.shutdown(wait=False, cancel_futures=True)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the event loop in its thread, then close it, and answer those who still wait.

        `end_loop` waits only one second for its end, so it cannot close it.
        """
        with self._loop_lock:  # after an interrupt of its start, it is not used
            is_used = self._loop is loop
        try:
            if is_used:
                loop.run_forever()
        finally:
            loop.close()
            for answer in list(self._callers.values()) if is_used else ():
                answer(None)


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # a cancellation too: no task goes on that nobody awaits
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
