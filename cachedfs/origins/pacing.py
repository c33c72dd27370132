"""Requests sent no faster than a service takes them: whose turn it is in this process, by a budget that all share.

The decisions are those of `plan.quota`. Their state is kept by a `Book`, which the reader hands in: that of all processes
of the machine. Without one an origin counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from cachedfs.plan import quota
from cachedfs.plan.quota import Limit, Pace

__all__ = ["Book", "OwnBook", "Pacer"]

logger = logging.getLogger("cachedfs.origins")

T = TypeVar("T")
Numbers = tuple[float, ...]

_CREATE = "create"
_BEHIND_S = 0.05  # when to look again whether somebody still waits for a turn


class Book(Protocol):
    """The numbers of one budget, at least as many as a `Pace` has; any numbers may be in it, or be added."""

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Put what `step` makes of the numbers in their place at once, and return what else it says."""
        ...


class OwnBook:
    """The numbers of one process; `account` only says whose."""

    def __init__(self, account: str = "") -> None:
        self._numbers: Numbers = Pace()

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Put what `step` makes of the numbers in their place, and return what else it says."""
        self._numbers, result = step(self._numbers)
        return result


class _Lane:
    """One limit: those who wait for it go in the order in which they came."""

    def __init__(
        self, ladder: Sequence[Limit], book: Book, clock: Callable[[], float], *, mostly: str
    ) -> None:
        self._ladder, self._book, self._clock, self._mostly = ladder, book, clock, mostly
        self._turn = asyncio.Lock()

    async def spend(self, kind: str) -> float:
        async with self._turn:
            while wait_s := self._book.change(partial(self._take, kind)):  # noqa: ASYNC110 - other processes send no word
                await asyncio.sleep(wait_s)
            return self._clock()

    def answered(self, sent_at: float, refused: bool) -> None:
        if (per_s := self._book.change(partial(self._learn, sent_at, refused))) is not None:
            logger.info("requests are refused as too many: %.1f a second are sent from now on", per_s)

    def spare_s(self) -> float:
        return _BEHIND_S if self._turn.locked() else self._book.change(self._look)

    def _take(self, kind: str, numbers: Numbers) -> tuple[Numbers, float]:
        return quota.taken(_pace(numbers), self._ladder, kind, self._clock())

    def _learn(self, sent_at: float, refused: bool, numbers: Numbers) -> tuple[Numbers, float | None]:
        """Return what is known after an answer, and, where that is to send less, how many a second."""
        before, now = _pace(numbers), self._clock()
        pace = quota.answered(before, self._ladder, sent_at=sent_at, refused=refused, now=now)
        if not refused or pace.cut_at in (before.cut_at, 0.0):
            return pace, None
        cost = self._ladder[int(pace.rung)].cost(self._mostly)
        return pace, quota.per_s(pace, self._ladder, now) / cost

    def _look(self, numbers: Numbers) -> tuple[Numbers, float]:
        return numbers, quota.spare_s(_pace(numbers), self._ladder, self._clock())


class Pacer:
    """The budget of one account: its requests, and of these the ones that create items."""

    def __init__(
        self, account: str, book: Callable[[str], Book] = OwnBook, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Use the records that `book` has of `account`. The clock is that of all who use them."""
        self._requests = _Lane(quota.REQUESTS, book(f"{account}|requests"), clock, mostly="download")
        self._creates = _Lane(quota.CREATES, book(f"{account}|creates"), clock, mostly=_CREATE)

    async def spend(self, kind: str) -> float:
        """Return, when a request of this kind may be sent, the time: for `answered`. It is counted as sent."""
        if kind == _CREATE:
            await self._creates.spend(kind)
        return await self._requests.spend(kind)

    def answered(self, kind: str, sent_at: float, *, refused: bool) -> None:
        """Learn from an answer; `refused`: it said that there were too many requests."""
        if kind == _CREATE:
            self._creates.answered(sent_at, refused)
        # New items have by far the lower limit, and the words are the same.
        if kind != _CREATE or not refused:
            self._requests.answered(sent_at, refused)

    def spare_s(self) -> float:
        """Return in how many seconds to look again whether a request that nobody waits for is in nobody's way; 0: now."""
        return self._requests.spare_s()


def _pace(numbers: Numbers) -> Pace:
    return Pace(*numbers[: len(Pace._fields)])
