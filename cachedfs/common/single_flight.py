"""Single-flight lookups: concurrent callers of one lookup share one request to the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

__all__ = ["SingleFlight"]


class _Lookup:
    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.n_waiting = 0
        self.task: asyncio.Task[Any]


class SingleFlight:
    """The running lookups of one process. Event loop thread only.

    A lookup is canceled when no caller waits for it any more. A lookup is identified by its slot and a change counter,
    so that a lookup started before a write is not shared with callers that ask after the write.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        # Invariant: contains a lookup only while it has no answer and a caller waits for it.
        self._running: dict[tuple[str, str], _Lookup] = {}

    async def run(
        self,
        slot: tuple[str, str],
        counter: int,
        lookup: Callable[[asyncio.Future[Any]], Coroutine[Any, Any, Any]],
    ) -> Any:
        """Return the result of the running lookup in `slot`, or start one with `lookup`.

        A running lookup is used only if its change counter is the same. `lookup` is called with the future of its
        result: it may set it before it ends.
        """
        running = self._running.get(slot)
        if running is None or running.counter != counter:
            running = self._running[slot] = _Lookup(counter)
            running.answer.add_done_callback(partial(self._remove, slot, running))
            running.task = self._spawn(_answer(running.answer, lookup))
        running.n_waiting += 1
        try:
            return await asyncio.shield(running.answer)
        finally:
            running.n_waiting -= 1
            if not running.n_waiting and not running.answer.done():
                self._remove(slot, running)  # later callers start a new lookup
                running.task.cancel()

    def answer_of(self, slot: tuple[str, str]) -> asyncio.Future[Any] | None:
        """Return the future of the running lookup in `slot`, or None.

        Only check whether it is done; do not await it.
        """
        running = self._running.get(slot)
        return None if running is None else running.answer

    def _remove(self, slot: tuple[str, str], running: _Lookup, _: object = None) -> None:
        if self._running.get(slot) is running:
            del self._running[slot]


async def _answer(
    answer: asyncio.Future[Any], lookup: Callable[[asyncio.Future[Any]], Coroutine[Any, Any, Any]]
) -> None:
    try:
        result = await lookup(answer)
        if not answer.done():
            answer.set_result(result)
    except Exception as error:  # of any kind: the callers raise it
        if answer.done():
            raise
        answer.set_exception(error)
    finally:
        answer.cancel()  # of a task that was canceled
