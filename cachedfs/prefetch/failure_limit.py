"""Failures of a prefetch plan: pause while the origin is unreachable, and end the plan after too many."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["AWAY_S", "FailureLimit"]

AWAY_S = 60.0  # how long an origin may be unreachable before the plan ends
PAUSE_S = 1.0, 15.0  # shortest and longest wait before an unreachable origin is tried again
MOST_IN_A_ROW = 16  # consecutive failures, not specific to one object, that end the plan


class FailureLimit:
    """Count the failures since the last success, and pause while the origin is unreachable."""

    def __init__(self) -> None:
        self._n_in_a_row = 0
        self._away_since: float | None = None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]
        self._came = asyncio.Event()

    @property
    def is_unreachable(self) -> bool:
        """True when the origin was unreachable at the last request."""
        return self._away_since is not None

    def pause_s(self, now: float) -> float:
        """Return for how many seconds from the monotonic time `now` on no request may be sent."""
        return max(0.0, self._again_at - now)

    def came(self) -> None:
        """Record a success, which also ends a pause."""
        self._n_in_a_row, self._away_since = 0, None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]
        self._came.set()

    def failed(self) -> bool:
        """Record a failure that is not specific to one object; return whether it is one too many."""
        self._n_in_a_row += 1
        return self._n_in_a_row >= MOST_IN_A_ROW

    def away(self, now: float) -> bool:
        """Record that the origin is unreachable and pause; return whether that has lasted too long."""
        self._came.clear()
        if self._away_since is None:
            self._away_since = now
        if not self.pause_s(now):  # requests sent together fail together, and cause one pause
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        return now - self._away_since > AWAY_S

    async def pause(self, now: float) -> None:
        """Wait until a request may be sent again: the pause is over, or another one had an answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pause_s(now)):
                await self._came.wait()
