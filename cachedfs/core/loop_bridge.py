"""Run coroutines of another event loop on the engine's, many in one crossing between the two threads."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

__all__ = ["LoopBridge"]

T = TypeVar("T")


class LoopBridge:
    """Between the event loop of callers and that of the engine.

    Waking the other thread's loop takes as long as a small read. So what is called, or has ended, until that loop runs
    crosses together: `asyncio.run_coroutine_threadsafe` would wake it for each coroutine, twice.
    """

    def __init__(self, caller: asyncio.AbstractEventLoop, loop: asyncio.AbstractEventLoop) -> None:
        self._caller = weakref.ref(caller)
        self._loop = loop
        self._calls: deque[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any], Context]] = deque()
        self._ended: deque[tuple[asyncio.Future[Any], asyncio.Task[Any]]] = deque()
        self._is_calling = self._is_ending = False  # a call of `_start` or `_end` is scheduled
        self._tasks: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}  # on the engine's thread only

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's loop, in the caller's context, and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((coroutine, future, copy_context()))
        if not self._is_calling:
            self._is_calling = True
            try:
                self._loop.call_soon_threadsafe(self._start)
            except RuntimeError:  # the loop is closed
                self._is_calling = False
                while self._calls:
                    self._calls.pop()[0].close()
                raise
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel, future)
            raise

    # On the engine's thread.

    def _start(self) -> None:
        self._is_calling = False  # first: what is called from now on schedules another `_start`
        while self._calls:
            coroutine, future, context = self._calls.popleft()
            task = self._tasks[future] = self._loop.create_task(coroutine, context=context)
            task.add_done_callback(partial(self._task_ended, future))

    def _task_ended(self, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        del self._tasks[future]
        self._ended.append((future, task))
        if not self._is_ending and (caller := self._caller()) is not None:
            self._is_ending = True
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                caller.call_soon_threadsafe(self._end)

    def _cancel(self, future: asyncio.Future[Any]) -> None:
        if (task := self._tasks.get(future)) is not None:
            task.cancel()

    # On the caller's thread.

    def _end(self) -> None:
        self._is_ending = False  # first: what ends from now on schedules another `_end`
        while self._ended:
            future, task = self._ended.popleft()
            error = None if task.cancelled() else task.exception()  # retrieved also if nobody waits
            if future.done():
                continue
            if task.cancelled():
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())
