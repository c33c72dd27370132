"""Calls from other threads into an event loop, which is woken once for all that have gathered."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context

__all__ = ["Inbox"]


class Inbox:
    """The calls that wait for one event loop. To wake it for each of many calls would take longer than the calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[tuple[Context, Callable[[], object]]] = deque()
        self._is_waking = False

    def add(self, call: Callable[[], object]) -> None:
        """Have the loop make a call, in the context of the caller and after those that were added before.

        Raises RuntimeError if the loop is closed.
        """
        if (loop := self._loop()) is None or loop.is_closed():  # also if it was woken before, and never ran
            raise RuntimeError("the event loop is closed")
        self._calls.append((copy_context(), call))
        try:
            if not self._is_waking:
                self._is_waking = True
                loop.call_soon_threadsafe(self._run)
        except BaseException:  # an interrupt too: the next call wakes the loop
            self._is_waking = False
            raise

    def _run(self) -> None:
        self._is_waking = False  # first: what is added from now on wakes the loop again
        try:
            for _ in range(len(self._calls)):
                context, call = self._calls.popleft()
                context.run(call)
        finally:  # a call that raises does not hold up the others
            if self._calls and (loop := self._loop()) is not None:
                loop.call_soon(self._run)
