"""Questions to an origin that are under way, each asked once for all who want to know."""

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
    """The questions of one process. One that nobody waits for any more is given up. On the loop only."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        # Invariant: a question is here only while its task runs and somebody waits for it.
        self._asked: dict[tuple[str, str], _Question] = {}

    def is_asked(self, slot: tuple[str, str], mark: int) -> bool:
        """True while the question in `slot` is under way, asked at that change mark."""
        asked = self._asked.get(slot)
        return asked is not None and asked.mark == mark

    async def ask(
        self, slot: tuple[str, str], mark: int, question: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the answer of `question`, or of the one in `slot` if that was asked at the same change mark."""
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
                self._forget(slot, asked)  # who asks from now on gets an answer of their own
                asked.task.cancel()

    def under_way(self, slot: tuple[str, str]) -> asyncio.Task[Any] | None:
        """Return the question that is asked now, if any: to look whether it has ended, not to wait for its answer."""
        asked = self._asked.get(slot)
        return None if asked is None else asked.task

    def _forget(self, slot: tuple[str, str], asked: _Question) -> None:
        if self._asked.get(slot) is asked:
            del self._asked[slot]
