"""Concurrent callers of one lookup share one request to the origin."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["SingleFlight"]


@dataclasses.dataclass(eq=False, slots=True)
class _Lookup:
    counter: object
    task: asyncio.Task[Any]
    n_waiting: int = 0


class SingleFlight:
    """The running lookups of one process. Event loop thread only.

    A lookup is canceled when no caller waits for it any more. A lookup is identified by its slot and a change counter,
    so that a lookup started before a write is not shared with callers that ask after the write.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        self._running: dict[tuple[str, str], _Lookup] = {}

    async def run(
        self, slot: tuple[str, str], counter: object, lookup: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the result of the running lookup in `slot`, or start one with `lookup`.

        A running lookup is used only if its change counter is the same.
        """
        running = self._running.get(slot)
        if running is None or running.counter != counter or running.task.done():
            running = self._running[slot] = _Lookup(counter, self._spawn(lookup()))
        running.n_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.n_waiting -= 1
            if not running.n_waiting:
                running.task.cancel()  # unless it is done
                if self._running.get(slot) is running:  # later callers start a new lookup
                    del self._running[slot]

    def task_of(self, slot: tuple[str, str]) -> asyncio.Task[Any] | None:
        """Return the task of the running lookup in `slot`, or None.

        Only wait for its end; another caller may cancel it.
        """
        running = self._running.get(slot)
        return None if running is None or running.task.done() else running.task
