"""Adaptive rate limits: when a request may be sent, and what the answers say about the limit.

The service does not state its limit, so we try a ladder of known limits, the highest first. Many refusals in a short
time mean a lower limit applies. Below the last one, we halve the share of it that we use, and let it grow again with
time. A single refusal means nothing: services refuse some requests of every client.

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
    "CREATES",
    "RETRY_HIGHER_S",
    "REQUESTS",
    "BudgetRecord",
    "LimitState",
    "ProcessRecord",
    "RateLimit",
    "RateLimiter",
    "answered",
    "per_s",
    "spare_s",
    "taken",
]


# Seconds until a higher limit is tried again. A wrong low limit costs an hour; a try costs some 20 refusals.
RETRY_HIGHER_S = 3600.0
_MARGIN = 0.95  # of a limit; requests under way make our count differ from the service's
_BURST_S = 0.5  # of the rate, sent at once; we assume that the service allows at least twice as much
_WEIGHT = 1 / 32  # of the newest answer in the moving average of refusals
# Share of refusals that means a lower limit: 6 in a row, or 1 in 7 for a while. Otherwise the worst days have 1 in 70.
_MAX_REFUSED = 0.15
_MIN_SHARE = 1 / 32  # share of a limit that we always use
_GROWTH = 0.005  # of the limit per second: from a half to all of it in 100 s

# Google Drive's limits for one user of one project, per minute: 12,000 requests, or 325,000 units for projects made
# since May 2026 or long unused. Google does not say if `alt=media` is a download: we take the higher cost.
_UNITS = {"other": 5.0, "list": 100.0, "download": 200.0, "edit": 50.0, "create": 50.0}
logger = logging.getLogger("cachedfs.origins")
T = TypeVar("T")
Numbers = tuple[float, ...]
_CREATE = "create"
_RECHECK_S = 0.05  # seconds until the next check while requests wait for their turn


class RateLimit(NamedTuple):
    """A service's limit per second, in requests or in units.

    It is in units if `costs` has the units of each kind of request.
    """

    per_s: float
    costs: Mapping[str, float] = {}

    def cost(self, kind: str) -> float:
        return self.costs.get(kind, self.costs.get("other", 1.0))

    def highest_cost(self) -> float:
        return max([self.cost("other"), *self.costs.values()])


REQUESTS = (RateLimit(12_000 / 60), RateLimit(325_000 / 60, _UNITS))
CREATES = (RateLimit(3.0), RateLimit(2.0))  # new items: undocumented, the same for all heavy writers


class LimitState(NamedTuple):
    """The state of one limit, as numbers that may come from other processes.

    `_sane` repairs any values.
    """

    rung: float = 0.0
    share: float = 1.0  # share of the limit in use at `cut_at`
    refused: float = 0.0  # moving average of answers that say "too many requests"
    free_at: float = 0.0  # when the next request may be sent
    cut_at: float = 0.0  # when the rate was last lowered; answers to earlier requests are ignored


def taken(state: LimitState, ladder: Sequence[RateLimit], kind: str, now: float) -> tuple[LimitState, float]:
    """Return the state after sending a request now, and 0.

    If it must wait first: the same state, and the seconds to wait.
    """
    state = _sane(state, ladder, now)
    if state.free_at > now:
        return state, state.free_at - now
    cost_s = ladder[int(state.rung)].cost(kind) / per_s(state, ladder, now)
    return state._replace(free_at=max(state.free_at, now - _BURST_S) + cost_s), 0.0


def answered(
    state: LimitState, ladder: Sequence[RateLimit], *, sent_at: float, refused: bool, now: float
) -> LimitState:
    """Return the state after an answer; `refused` means it said "too many requests"."""
    state = _sane(state, ladder, now)
    if sent_at < state.cut_at:
        return state
    part = state.refused + (refused - state.refused) * _WEIGHT
    if not refused or part < _MAX_REFUSED:
        return state._replace(refused=part)
    last = len(ladder) - 1
    if state.rung < last:
        return LimitState(state.rung + 1, free_at=now, cut_at=now)
    return LimitState(state.rung, max(_share(state, now) / 2, _MIN_SHARE), free_at=now, cut_at=now)


def spare_s(state: LimitState, ladder: Sequence[RateLimit], now: float) -> float:
    """Return in how many seconds half of the burst is free; the other half is for waiting callers."""
    return max(0.0, _sane(state, ladder, now).free_at - (now - _BURST_S / 2))


def per_s(state: LimitState, ladder: Sequence[RateLimit], now: float) -> float:
    """Return the present rate per second, in requests or units."""
    return ladder[int(state.rung)].per_s * _MARGIN * _share(state, now)


def _share(state: LimitState, now: float) -> float:
    return min(1.0, state.share + _GROWTH * max(0.0, now - state.cut_at))


def _sane(state: LimitState, ladder: Sequence[RateLimit], now: float) -> LimitState:
    """Return the state with only values that are possible now; an invalid state is reset.

    If the clock was set back, the stored times are in the future. Then the learned limit is kept, and the times are
    moved back so that no request waits for them.
    """
    is_sound = (
        all(map(math.isfinite, state))
        and 0 <= state.rung < len(ladder)
        and _MIN_SHARE <= state.share <= 1
        and 0 <= state.refused <= 1
        and state.cut_at >= 0
    )
    if not is_sound:
        return LimitState(free_at=now - _BURST_S, cut_at=0.0)
    if state.rung and now > state.cut_at + RETRY_HIGHER_S:
        state = LimitState(free_at=state.free_at)
    limit = ladder[int(state.rung)]
    # `free_at` can be ahead by the cost of one request, at the share of the last cut or a higher one.
    most_s = limit.highest_cost() / (limit.per_s * _MARGIN * state.share)
    return state._replace(free_at=min(state.free_at, now + most_s), cut_at=min(state.cut_at, now))


class BudgetRecord(Protocol):
    """The stored numbers of one rate limit: those of `LimitState`, and maybe more after them.

    The numbers may have any value.
    """

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Replace the numbers atomically by the first result of `step`, and return its second result."""
        ...


class ProcessRecord:
    """The numbers of one rate limit in this process only; `account` has no effect."""

    def __init__(self, account: str = "") -> None:
        self._numbers: Numbers = LimitState()

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Replace the numbers by the first result of `step`, and return its second result."""
        self._numbers, result = step(self._numbers)
        return result


class _Lane:
    """One rate limit; requests that wait for it are sent in the order of their calls."""

    def __init__(
        self, ladder: Sequence[RateLimit], book: BudgetRecord, clock: Callable[[], float], *, mostly: str
    ) -> None:
        self._ladder, self._book, self._clock, self._mostly = ladder, book, clock, mostly
        self._order = asyncio.Lock()

    async def spend(self, kind: str) -> float:
        async with self._order:
            while wait_s := self._book.change(partial(self._spend, kind)):  # noqa: ASYNC110 - other processes send no word
                await asyncio.sleep(wait_s)
            return self._clock()

    def answered(self, sent_at: float, refused: bool) -> None:
        if (per_s := self._book.change(partial(self._answered, sent_at, refused))) is not None:
            logger.info(
                "the service refuses requests as too many; the rate is lowered to %.1f per second", per_s
            )

    def spare_s(self) -> float:
        return _RECHECK_S if self._order.locked() else self._book.change(self._spare_s)

    def _spend(self, kind: str, numbers: Numbers) -> tuple[Numbers, float]:
        return taken(_pace(numbers), self._ladder, kind, self._clock())

    def _answered(self, sent_at: float, refused: bool, numbers: Numbers) -> tuple[Numbers, float | None]:
        """Return the state after an answer, and the new rate per second if it was lowered, else None."""
        before, now = _pace(numbers), self._clock()
        state = answered(before, self._ladder, sent_at=sent_at, refused=refused, now=now)
        if not refused or state.cut_at in (before.cut_at, 0.0):
            return state, None
        cost = self._ladder[int(state.rung)].cost(self._mostly)
        return state, per_s(state, self._ladder, now) / cost

    def _spare_s(self, numbers: Numbers) -> tuple[Numbers, float]:
        return numbers, spare_s(_pace(numbers), self._ladder, self._clock())


class RateLimiter:
    """The rate limits of one account.

    One for all requests, and one more for requests that create items.
    """

    def __init__(
        self,
        account: str,
        book: Callable[[str], BudgetRecord] = ProcessRecord,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the records that `book` returns for `account`; all users of them must share the clock."""
        self._requests = _Lane(REQUESTS, book(f"{account}|requests"), clock, mostly="download")
        self._creates = _Lane(CREATES, book(f"{account}|creates"), clock, mostly=_CREATE)

    async def spend(self, kind: str) -> float:
        """Wait until a request of this kind may be sent, and count it as sent.

        Return the time for `answered`.
        """
        if kind == _CREATE:
            await self._creates.spend(kind)
        return await self._requests.spend(kind)

    def answered(self, kind: str, sent_at: float, *, refused: bool) -> None:
        """Adjust the limits to an answer; `refused` means it said "too many requests"."""
        if kind == _CREATE:
            self._creates.answered(sent_at, refused)
        # A refused create counts for new items only: their limit is far lower, and the error is the same.
        if kind != _CREATE or not refused:
            self._requests.answered(sent_at, refused)

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request delays no caller.

        0: now.
        """
        return self._requests.spare_s()


def _pace(numbers: Numbers) -> LimitState:
    return LimitState(*numbers[: len(LimitState._fields)])
