"""How fast a service lets us ask: what may be sent when, and what its answers say of that. Pure.

A limit is not told, so it is learnt: from a ladder of limits that are known to exist, the highest first. A bulk of
refusals means that this rung is not ours; below the last one the share of it that is taken is halved, and grows again
with time. A refusal now and then says nothing: services refuse some requests of everybody.

Times are seconds of one clock that all processes of the machine share; it may jump.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

__all__ = [
    "BudgetRecord",
    "CREATES",
    "LEARNT_S",
    "RateLimit",
    "ProcessRecord",
    "LimitState",
    "RateLimiter",
    "REQUESTS",
    "answered",
    "per_s",
    "spare_s",
    "taken",
]


# So long a lower rung is believed: a wrong one costs an hour, and asking again some 20 refusals.
LEARNT_S = 3600.0
_MARGIN = 0.95  # of a limit: what is counted here and at the service differs by what is on its way
_BURST_S = 0.5  # of the rate; the service's own bucket is taken to hold at least twice as much
_WEIGHT = 1 / 32  # of the newest answer in the average; six refusals in a row are a bulk,
_BULK = 0.15  # and so is one in seven for a while. One in seventy, on the worst of days, never is
_LEAST = 1 / 32  # of a limit is always taken
_GROWTH = 0.005  # of the limit, a second: from a half to all of it in 100 s


class RateLimit(NamedTuple):
    """What a service takes in a second: requests, or units, where `costs` says what each kind of them costs."""

    per_s: float
    costs: Mapping[str, float] = {}

    def cost(self, kind: str) -> float:
        return self.costs.get(kind, self.costs.get("other", 1.0))

    def dearest(self) -> float:
        return max([self.cost("other"), *self.costs.values()])


# Google Drive, for one user of one project: 12,000 requests a minute, or for projects made since May 2026 (or long
# unused) 325,000 units. What counts as a download is not said of `alt=media`: the dearer reading is taken.
_UNITS = {"other": 5.0, "list": 100.0, "download": 200.0, "edit": 50.0, "create": 50.0}
REQUESTS = (RateLimit(12_000 / 60), RateLimit(325_000 / 60, _UNITS))
CREATES = (RateLimit(3.0), RateLimit(2.0))  # new items: not documented, and the same for all who write much


class LimitState(NamedTuple):
    """What is known of one limit, and how far it is used. Any numbers at all are a state: see `_sane`."""

    rung: float = 0.0
    share: float = 1.0  # of the rung's limit that was taken at `cut_at`
    refused: float = 0.0  # part of the latest answers that said "too many", as a moving average
    free_at: float = 0.0  # when all that was sent is paid for
    cut_at: float = 0.0  # the last time that less was taken; answers to what was sent before count no more


def taken(pace: LimitState, ladder: Sequence[RateLimit], kind: str, now: float) -> tuple[LimitState, float]:
    """Return the state after a request that is sent now, and 0; or, where it has to wait, for how many seconds."""
    pace = _sane(pace, ladder, now)
    if pace.free_at > now:
        return pace, pace.free_at - now
    cost_s = ladder[int(pace.rung)].cost(kind) / per_s(pace, ladder, now)
    return pace._replace(free_at=max(pace.free_at, now - _BURST_S) + cost_s), 0.0


def answered(
    pace: LimitState, ladder: Sequence[RateLimit], *, sent_at: float, refused: bool, now: float
) -> LimitState:
    """Return the state after an answer; `refused`: it said that there were too many requests."""
    pace = _sane(pace, ladder, now)
    if sent_at < pace.cut_at:
        return pace
    part = pace.refused + (refused - pace.refused) * _WEIGHT
    if not refused or part < _BULK:
        return pace._replace(refused=part)
    last = len(ladder) - 1
    if pace.rung < last:
        return LimitState(pace.rung + 1, free_at=now, cut_at=now)
    return LimitState(pace.rung, max(_share(pace, now) / 2, _LEAST), free_at=now, cut_at=now)


def spare_s(pace: LimitState, ladder: Sequence[RateLimit], now: float) -> float:
    """Return in how many seconds half of what may be sent at once is there: the other half is for who waits."""
    return max(0.0, _sane(pace, ladder, now).free_at - (now - _BURST_S / 2))


def per_s(pace: LimitState, ladder: Sequence[RateLimit], now: float) -> float:
    """Return what is taken in a second."""
    return ladder[int(pace.rung)].per_s * _MARGIN * _share(pace, now)


def _share(pace: LimitState, now: float) -> float:
    return min(1.0, pace.share + _GROWTH * max(0.0, now - pace.cut_at))


def _sane(pace: LimitState, ladder: Sequence[RateLimit], now: float) -> LimitState:
    """Return the state as far as it can be true now; one of no numbers is forgotten.

    Where the clock was set back, its times are ahead: what was learnt is kept, and nobody waits for the old time.
    """
    is_sound = (
        all(map(math.isfinite, pace))
        and 0 <= pace.rung < len(ladder)
        and _LEAST <= pace.share <= 1
        and 0 <= pace.refused <= 1
        and pace.cut_at >= 0
    )
    if not is_sound:
        return LimitState(free_at=now - _BURST_S, cut_at=0.0)
    if pace.rung and now > pace.cut_at + LEARNT_S:
        pace = LimitState(free_at=pace.free_at)
    limit = ladder[int(pace.rung)]
    # Nothing is sent before the last is paid for. The share is that of the cut: it was no less when this was sent.
    most_s = limit.dearest() / (limit.per_s * _MARGIN * pace.share)
    return pace._replace(free_at=min(pace.free_at, now + most_s), cut_at=min(pace.cut_at, now))


logger = logging.getLogger("cachedfs.origins")

T = TypeVar("T")
Numbers = tuple[float, ...]

_CREATE = "create"
_BEHIND_S = 0.05  # when to look again whether somebody still waits for a turn


class BudgetRecord(Protocol):
    """The numbers of one budget, at least as many as a `Pace` has; any numbers may be in it, or be added."""

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Put what `step` makes of the numbers in their place at once, and return what else it says."""
        ...


class ProcessRecord:
    """The numbers of one process; `account` only says whose."""

    def __init__(self, account: str = "") -> None:
        self._numbers: Numbers = LimitState()

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Put what `step` makes of the numbers in their place, and return what else it says."""
        self._numbers, result = step(self._numbers)
        return result


class _Lane:
    """One limit: those who wait for it go in the order in which they came."""

    def __init__(
        self, ladder: Sequence[RateLimit], book: BudgetRecord, clock: Callable[[], float], *, mostly: str
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
        return taken(_pace(numbers), self._ladder, kind, self._clock())

    def _learn(self, sent_at: float, refused: bool, numbers: Numbers) -> tuple[Numbers, float | None]:
        """Return what is known after an answer, and, where that is to send less, how many a second."""
        before, now = _pace(numbers), self._clock()
        pace = answered(before, self._ladder, sent_at=sent_at, refused=refused, now=now)
        if not refused or pace.cut_at in (before.cut_at, 0.0):
            return pace, None
        cost = self._ladder[int(pace.rung)].cost(self._mostly)
        return pace, per_s(pace, self._ladder, now) / cost

    def _look(self, numbers: Numbers) -> tuple[Numbers, float]:
        return numbers, spare_s(_pace(numbers), self._ladder, self._clock())


class RateLimiter:
    """The budget of one account: its requests, and of these the ones that create items."""

    def __init__(
        self,
        account: str,
        book: Callable[[str], BudgetRecord] = ProcessRecord,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the records that `book` has of `account`. The clock is that of all who use them."""
        self._requests = _Lane(REQUESTS, book(f"{account}|requests"), clock, mostly="download")
        self._creates = _Lane(CREATES, book(f"{account}|creates"), clock, mostly=_CREATE)

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


def _pace(numbers: Numbers) -> LimitState:
    return LimitState(*numbers[: len(LimitState._fields)])
