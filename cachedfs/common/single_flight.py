"""Single-flight lookups: concurrent callers of one lookup share one request to the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["SingleFlight"]


class _Question:
    def __init__(self, mark: int, task: asyncio.Task[Any]) -> None:
        self.mark = mark
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
        self._asked: dict[tuple[str, str], _Question] = {}

    def is_asked(self, slot: tuple[str, str], mark: int) -> bool:
        """Return whether a lookup in `slot` with this change counter is running."""
        asked = self._asked.get(slot)
        return asked is not None and asked.mark == mark

    async def ask(
        self, slot: tuple[str, str], mark: int, question: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the result of the running lookup in `slot`, or start one with `question`.

        A running lookup is used only if its change counter is the same.
        """
        asked = self._asked.get(slot)
        if asked is None or asked.mark != mark:
            asked = self._asked[slot] = _Question(mark, self._spawn(question()))
            asked.task.add_done_callback(lambda _: self._forget(slot, asked))
        asked.n_waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.n_waiting -= 1
            if not asked.n_waiting:
                self._forget(slot, asked)  # later callers start a new lookup
                asked.task.cancel()

    def under_way(self, slot: tuple[str, str]) -> asyncio.Task[Any] | None:
        """Return the task of the lookup in `slot`, or None.

        Only check whether it is done; do not await it.
        """
        asked = self._asked.get(slot)
        return None if asked is None else asked.task

    def _forget(self, slot: tuple[str, str], asked: _Question) -> None:
        if self._asked.get(slot) is asked:
            del self._asked[slot]
