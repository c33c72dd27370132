"""Adaptive rate limits: when this process may send a request, and what the answers say about the limit.

The service does not state its limit, so we try a ladder of known limits, the highest first. Many refusals in a short
time mean that a lower limit applies. Below the last one, the rate is halved, and grows again with time (additive
increase, multiplicative decrease). So processes that share a limit find their shares of it. A single refusal means
nothing: services refuse some requests of every client.

Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "RETRY_HIGHER_S",
    "LimitState",
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

logger = logging.getLogger("cachedfs.origins")
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


class LimitState(NamedTuple):
    """The state of one limit."""

    rung: int = 0  # index of the limit in its ladder
    share: float = 1.0  # share of the limit in use at `cut_at`
    refused: float = 0.0  # moving average of answers that say "too many requests"
    free_at: float = 0.0  # when the next request may be sent
    cut_at: float = 0.0  # when the rate was last lowered; answers to earlier requests are ignored


def taken(state: LimitState, ladder: Sequence[RateLimit], kind: str, now: float) -> tuple[LimitState, float]:
    """Return the state after sending a request now, and 0.

    If it must wait first: the same state, and the seconds to wait.
    """
    if state.rung and now > state.cut_at + RETRY_HIGHER_S:
        state = LimitState(free_at=state.free_at)
    if state.free_at > now:
        return state, state.free_at - now
    cost_s = ladder[state.rung].cost(kind) / per_s(state, ladder, now)
    return state._replace(free_at=max(state.free_at, now - _BURST_S) + cost_s), 0.0


def answered(
    state: LimitState, ladder: Sequence[RateLimit], *, sent_at: float, refused: bool, now: float
) -> LimitState:
    """Return the state after an answer; `refused` means it said "too many requests"."""
    if sent_at < state.cut_at:
        return state
    part = state.refused + (refused - state.refused) * _WEIGHT
    if not refused or part < _MAX_REFUSED:
        return state._replace(refused=part)
    if state.rung < len(ladder) - 1:
        return LimitState(state.rung + 1, free_at=now, cut_at=now)
    return LimitState(state.rung, max(_share(state, now) / 2, _MIN_SHARE), free_at=now, cut_at=now)


def spare_s(state: LimitState, now: float) -> float:
    """Return in how many seconds half of the burst is free; the other half is for waiting callers."""
    return max(0.0, state.free_at - (now - _BURST_S / 2))


def per_s(state: LimitState, ladder: Sequence[RateLimit], now: float) -> float:
    """Return the present rate per second, in requests or units."""
    return ladder[state.rung].per_s * _MARGIN * _share(state, now)


def _share(state: LimitState, now: float) -> float:
    return min(1.0, state.share + _GROWTH * (now - state.cut_at))


class _Lane:
    """One rate limit; requests that wait for it are sent in the order of their calls."""

    def __init__(self, ladder: Sequence[RateLimit], clock: Callable[[], float], *, mostly: str) -> None:
        self.state = LimitState()
        self._ladder, self._clock, self._mostly = ladder, clock, mostly
        self._order = asyncio.Lock()

    async def spend(self, kind: str) -> float:
        async with self._order:
            while True:
                self.state, wait_s = taken(self.state, self._ladder, kind, now := self._clock())
                if not wait_s:
                    return now
                await asyncio.sleep(wait_s)

    def answered(self, sent_at: float, refused: bool) -> None:
        before, now = self.state, self._clock()
        self.state = answered(before, self._ladder, sent_at=sent_at, refused=refused, now=now)
        if self.state.cut_at != before.cut_at:
            logger.info(
                "the service refuses requests as too many; the rate is lowered to %.1f per second",
                self.per_s(now),
            )

    def per_s(self, now: float) -> float:
        """Return the present rate of the requests that are sent most."""
        return per_s(self.state, self._ladder, now) / self._ladder[self.state.rung].cost(self._mostly)

    def spare_s(self) -> float:
        return _RECHECK_S if self._order.locked() else spare_s(self.state, self._clock())


class RateLimiter:
    """The rate limits of one account in this process.

    One for all requests, and one more for requests that create items.
    """

    def __init__(
        self,
        requests: Sequence[RateLimit],
        creates: Sequence[RateLimit],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create them with the known limits of both, the highest first."""
        self._clock = clock
        self.requests = _Lane(requests, clock, mostly="download")
        self.creates = _Lane(creates, clock, mostly=_CREATE)

    async def spend(self, kind: str) -> float:
        """Wait until a request of this kind may be sent, and count it as sent.

        Return the time for `answered`.
        """
        if kind == _CREATE:
            await self.creates.spend(kind)
        return await self.requests.spend(kind)

    def answered(self, kind: str, sent_at: float, *, refused: bool) -> None:
        """Adjust the limits to an answer; `refused` means it said "too many requests"."""
        if kind == _CREATE:
            self.creates.answered(sent_at, refused)
        # A refused create counts for new items only: their limit is far lower, and the error is the same.
        if kind != _CREATE or not refused:
            self.requests.answered(sent_at, refused)

    @property
    def per_s(self) -> float:
        """The present rate of downloads, in requests per second."""
        return self.requests.per_s(self._clock())

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request delays no caller.

        0: now.
        """
        return self.requests.spare_s()
