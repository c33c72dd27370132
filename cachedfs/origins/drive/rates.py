"""The rate of requests under limits that a service does not state, found by what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Seconds until a higher limit is tried again. A wrong low limit costs an hour; a try costs some 20 refusals.
RETRY_HIGHER_S = 3600.0
_WEIGHT = 1 / 32  # of the newest answer in the moving average of refusals
# Share of refusals that means a full minute: 6 in a row, or 1 in 7 for a while. Otherwise the worst days have 1 in 70.
_MAX_REFUSED = 0.15
_MIN_SHARE = 1 / 32  # share of a limit that we always use
_KEPT = 0.9  # of what was accepted in the last minute: the rest lets others in
_DOUBLES_S = 60.0  # the least time in which our share doubles
_PAUSE_S = 4.0  # between single requests in a full minute, until one is accepted
# Share of what we may use that speculative requests use up. With those that are just being started, it is less than 80 %.
_SPECULATIVE = 0.75
_RECHECK_S = 0.05  # seconds until the next check while requests wait for their turn
_MOST_S = 1.0  # seconds until the next check while the first one waits: the share may change

logger = logging.getLogger("cachedfs.origins")


class RateLimit(NamedTuple):
    """A service's limit: at most `units` in any `window_s` seconds.

    A request is one unit, or what `costs` says for its kind.
    """

    units: float
    window_s: float
    costs: Mapping[str, float] = {}

    def cost(self, kind: str) -> float:
        return self.costs.get(kind, self.costs.get("other", 1.0))


@dataclasses.dataclass(eq=False, slots=True)
class SentRequest:
    """One request that was sent, and when."""

    kind: str
    at: float


class SentRequests:
    """The requests sent under one limit, and how much of the limit this process uses.

    A limit is a count: so many units in any minute. A request is sent when it fits in, together with all that were sent in
    the last minute. The service does not state its limit, so we try a ladder of known limits, the highest first. Many
    refusals in a short time mean that the minute is full: a lower limit applies, or others use a part of it. Then we keep
    to about what the service accepted from us in the last minute, and try more as it accepts more. So processes that share
    a limit find their shares of it. A single refusal means nothing: services refuse some requests of every client.

    Times are seconds of a monotonic clock.
    """

    def __init__(self, ladder: Sequence[RateLimit], *, mostly: str = "download") -> None:
        """`mostly` is the kind of the requests that are sent most."""
        self._ladder, self._mostly, self._order = ladder, mostly, asyncio.Lock()
        self.rung = 0  # index of the limit in its ladder
        self.share = 1.0  # share of the limit that we use
        self.refused = 0.0  # moving average of answers that say "too many requests"
        self._cut_at = 0.0  # when the share was last lowered; answers to earlier requests are ignored
        self._open_at = 0.0  # nothing is sent before
        self._is_full = False  # single requests are sent after pauses until one is accepted
        # In the last window, without the refused ones, which cost nothing; and their units.
        self._sent, self._used = deque[SentRequest](), 0.0

    @property
    def limit(self) -> RateLimit:
        return self._ladder[self.rung]

    def wait_s(self, kind: str, now: float, *, part: float = 1.0) -> float:
        """Return in how many seconds to check again whether a request may be sent; 0: now.

        `part` is the part of our share that may be used up with it.
        """
        if self.rung and now > self._cut_at + RETRY_HIGHER_S:
            self._use(0, 1.0)
        cost, allowed = self.limit.cost(kind), self.limit.units * self.share * part
        # Where a window has no room for one request, it is sent in a longer time.
        window_s = self.limit.window_s * max(1.0, cost / allowed)
        while self._sent and self._sent[0].at + window_s <= now:
            self._used -= self.limit.cost(self._sent.popleft().kind)
        is_free = not self._sent or self._used + cost <= allowed
        return max(0.0, self._open_at - now, 0.0 if is_free else self._sent[0].at + window_s - now)

    def send(self, kind: str, now: float) -> SentRequest:
        """Count a request as sent."""
        sent = SentRequest(kind, now)
        self._sent.append(sent)
        self._used += self.limit.cost(kind)
        if self._is_full:
            self._open_at = now + _PAUSE_S
        return sent

    def answered(self, sent: SentRequest, now: float, *, refused: bool) -> bool:
        """Adjust the share to an answer; return whether it was lowered. `refused`: it said "too many requests"."""
        limit, cost = self.limit, self.limit.cost(sent.kind)
        if refused and sent in self._sent:
            self._sent.remove(sent)
            self._used -= cost
        if sent.at < self._cut_at:
            return False
        self.refused += (refused - self.refused) * _WEIGHT
        if not refused:
            self._is_full, self._open_at = False, 0.0
            self.share = min(1.0, self.share + cost / limit.units * limit.window_s / _DOUBLES_S)
        elif self._is_full:
            self._open_at = now + _PAUSE_S
        elif self.refused >= _MAX_REFUSED:
            self._cut(now)
            logger.info(
                "the service refuses requests as too many; the rate is lowered to %.1f per second",
                self.per_s(),
            )
        return self._cut_at == now

    def _cut(self, now: float) -> None:
        half = self.share / 2
        self._use(min(self.rung + 1, len(self._ladder) - 1), 1.0)
        self.share = min(1.0, max(half, _KEPT * self._used / self.limit.units, _MIN_SHARE))
        self._is_full, self._cut_at, self._open_at = True, now, now + _PAUSE_S

    def _use(self, rung: int, share: float) -> None:
        self.rung, self.share, self.refused = rung, share, 0.0
        self._used = sum(self.limit.cost(sent.kind) for sent in self._sent)

    def per_s(self) -> float:
        """Return how many of the requests that are sent most may be sent each second in the long run."""
        return self.limit.units * self.share / self.limit.window_s / self.limit.cost(self._mostly)

    async def spend(self, kind: str, clock: Callable[[], float]) -> SentRequest:
        """Count a request as sent when it may be, in the order of the calls."""
        async with self._order:
            now = clock()
            while wait_s := self.wait_s(kind, now):
                await asyncio.sleep(min(wait_s, _MOST_S))
                now = clock()
            return self.send(kind, now)

    def spare_s(self, now: float) -> float:
        """Return in how many seconds to check again whether a speculative request may be sent; 0: now."""
        if self._order.locked():
            return _RECHECK_S
        return min(self.wait_s(self._mostly, now, part=_SPECULATIVE), _MOST_S)
