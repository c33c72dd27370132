"""Single-flight lookups: concurrent callers of one lookup share one request to the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["SingleFlight"]


class _Lookup:
    def __init__(self, counter: int, task: asyncio.Task[Any]) -> None:
        self.counter = counter
        self.task = task
        self.n_waiting = 0


class SingleFlight:
    """The running lookups of one process. Event loop thread only.

    A lookup is canceled when no caller waits for it any more. A lookup is identified by its slot and a change counter,
    so that a lookup started before a write is not shared with callers that ask after the write.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        # Invariant: contains a lookup only while its task runs and a caller waits for it.
        self._running: dict[tuple[str, str], _Lookup] = {}

    def is_running(self, slot: tuple[str, str], counter: int) -> bool:
        """Return whether a lookup in `slot` with this change counter is running."""
        running = self._running.get(slot)
        return running is not None and running.counter == counter

    async def run(
        self, slot: tuple[str, str], counter: int, lookup: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the result of the running lookup in `slot`, or start one with `lookup`.

        A running lookup is used only if its change counter is the same.
        """
        running = self._running.get(slot)
        if running is None or running.counter != counter:
            running = self._running[slot] = _Lookup(counter, self._spawn(lookup()))
            running.task.add_done_callback(lambda _: self._remove(slot, running))
        running.n_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.n_waiting -= 1
            if not running.n_waiting:
                self._remove(slot, running)  # later callers start a new lookup
                running.task.cancel()

    def task_of(self, slot: tuple[str, str]) -> asyncio.Task[Any] | None:
        """Return the task of the lookup in `slot`, or None.

        Only check whether it is done; do not await it.
        """
        running = self._running.get(slot)
        return None if running is None else running.task

    def _remove(self, slot: tuple[str, str], running: _Lookup) -> None:
        if self._running.get(slot) is running:
            del self._running[slot]
