"""Concurrent callers of one lookup share one request to the origin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

_Slot = tuple[str, str]
_Act = Callable[["Lookup"], Coroutine[Any, Any, Any]]


@dataclasses.dataclass(eq=False, slots=True)
class Lookup:
    """A running lookup, and the callers that wait for its answer. Its task may go on after that."""

    counter: int
    waiting: list[asyncio.Future[Any]] = dataclasses.field(default_factory=list)
    is_answered: bool = False
    task: asyncio.Task[None] | None = None

    def answer(self, result: Any = None, error: BaseException | None = None) -> None:
        """Pass the result, or the error, to all who wait for it."""
        self.is_answered, waiting, self.waiting = True, self.waiting, []
        for future in waiting:
            if not future.done() and error is None:
                future.set_result(result)
            elif not future.done() and isinstance(error, Exception):
                future.set_exception(error)
            else:
                future.cancel()


class SingleFlight:
    """The running lookups of one process. Event loop thread only.

    A lookup is canceled when no caller waits for it any more. A lookup is identified by its slot and a change counter,
    so that a lookup started before a write is not shared with callers that ask after the write.
    """

    def __init__(self) -> None:
        self._running: dict[_Slot, Lookup] = {}

    async def run(self, slot: _Slot, counter: int, act: _Act, *, joins: bool = True) -> Any:
        """Return the answer of the running lookup in `slot`, or of a new one.

        A running lookup is used only if its change counter is the same, and the caller `joins` others. A new one is
        answered by `act`, which is called with it, or else by the result of `act`.
        """
        lookup = self._running.get(slot)
        if lookup is None or not joins or lookup.is_answered or lookup.counter != counter:
            lookup = self._running[slot] = Lookup(counter)
            lookup.task = asyncio.get_running_loop().create_task(self._run(slot, lookup, act))
        future = asyncio.get_running_loop().create_future()
        lookup.waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future in lookup.waiting:  # this caller was canceled
                lookup.waiting.remove(future)
                if not lookup.waiting and lookup.task is not None:
                    lookup.task.cancel()
                    if self._running.get(slot) is lookup:  # later callers start a new one
                        del self._running[slot]
            raise
        finally:
            del future  # its error refers to this frame

    async def wait(self, slot: _Slot) -> bool:
        """Wait for the answer of the lookup in `slot`, whatever it is; return False if there is none."""
        lookup = self._running.get(slot)
        if lookup is None or lookup.is_answered:
            return False
        with contextlib.suppress(Exception):
            await self.run(slot, lookup.counter, _nothing)
        return True

    async def _run(self, slot: _Slot, lookup: Lookup, act: _Act) -> None:
        try:
            lookup.answer(await act(lookup))
        except BaseException as error:  # a cancellation too: those who wait must not wait for ever
            is_passed_on = isinstance(error, Exception) and not lookup.is_answered
            lookup.answer(error=error)
            if not is_passed_on:
                raise
        finally:
            if self._running.get(slot) is lookup:
                del self._running[slot]


async def _nothing(_: Lookup) -> None:
    """Look nothing up: for who joins a running lookup."""
