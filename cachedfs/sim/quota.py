"""Quota of the simulated Drive: limits per user and project, and their current use.

The published limits are counts per minute; whether of any 60 s or of each minute of the clock is not published,
so a `Quota` says it. The limit on new items is a token bucket. In two ways the simulation is more lenient than
the documentation: refused requests cost nothing, and no daily limit is enforced (1 TB, 400 million units, 750 GB of
uploads, and one per file).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Request limits of the simulated Drive; infinite limits are not counted."""

    units_per_user: float = math.inf
    """Quota units per minute for one user of one project."""
    units_per_project: float = math.inf
    """Quota units per minute for all users of a project."""
    requests_per_user: float = math.inf
    """Requests per minute for one user of one project, as older projects are metered."""
    requests_per_project: float = math.inf
    """Requests per minute for all users of a project."""
    creates_per_s: float = math.inf
    """New items per second for one user. Undocumented, but generally observed."""
    minute: Literal["sliding", "fixed"] = "sliding"
    """A minute is any 60 s, or each minute of the clock."""

    @classmethod
    def resolve(cls, quota: Quota | str) -> Quota:
        """Return a quota given as a Quota or a name in `QUOTAS`. Raises ValueError for an unknown name."""
        if isinstance(quota, str) and quota not in QUOTAS:
            raise ValueError(f"unknown quota {quota!r}; known: {', '.join(QUOTAS)}")
        return QUOTAS[quota] if isinstance(quota, str) else quota


# Rates of new items as measured by rclone.
QUOTAS = {
    "none": Quota(),
    "units": Quota(units_per_user=325e3, units_per_project=1e6, creates_per_s=2.0),
    "requests": Quota(requests_per_user=12e3, requests_per_project=12e3, creates_per_s=3.0),
}
"""Quotas by name.

"none" is unlimited. "units" is the quota of projects created since May 2026, "requests" that of older
projects.
"""


class Budget:
    """A token bucket that refills at `rate` per second up to `size`."""

    def __init__(self, rate: float, size: float) -> None:
        self._rate, self._size = rate, size
        self._left, self._at = size, 0.0

    def take(self, n: float, now: float) -> bool:
        """Take `n` tokens at time `now`; return False, without taking any, if there are fewer."""
        if self._rate < math.inf:
            self._left = min(self._left + (now - self._at) * self._rate, self._size)
            self._at = now
        if n > self._left:
            return False
        self._left -= n
        return True


class Minute:
    """A count of units in a minute, of at most `limit`."""

    def __init__(self, limit: float, *, is_fixed: bool) -> None:
        self._limit, self._is_fixed = limit, is_fixed
        self._taken: deque[tuple[float, float]] = deque()  # time and units
        self._used = 0.0

    def has(self, n: float, now: float) -> bool:
        since = now // _MINUTE_S * _MINUTE_S if self._is_fixed else now - _MINUTE_S
        while self._taken and self._taken[0][0] < since:
            self._used -= self._taken.popleft()[1]
        return self._used + n <= self._limit

    def take(self, n: float, now: float) -> None:
        if self._limit < math.inf:
            self._taken.append((now, n))
            self._used += n


@dataclass(slots=True)
class Meter:
    """Use of a quota by users and projects. Times are in simulated seconds."""

    quota: Quota
    _minutes: dict[tuple[str, ...], Minute] = field(default_factory=dict)
    _budgets: dict[str, Budget] = field(default_factory=dict)

    def charge(self, user: str, project: str, units: float, now: float) -> str | None:
        """Charge a request and return None; if it exceeds a limit, return "user" or "project" instead."""
        quota = self.quota
        wants = [
            (self._minute(quota.units_per_user, "units", project, user), units),
            (self._minute(quota.requests_per_user, "requests", project, user), 1),
            (self._minute(quota.units_per_project, "units", project), units),
            (self._minute(quota.requests_per_project, "requests", project), 1),
        ]
        for i, (minute, n) in enumerate(wants):
            if not minute.has(n, now):
                return "user" if i < 2 else "project"
        for minute, n in wants:
            minute.take(n, now)
        return None

    def create(self, user: str, now: float) -> bool:
        """Count a new item of a user; return False, without counting it, if the limit is reached."""
        rate = self.quota.creates_per_s
        return self._budgets.setdefault(user, Budget(rate, max(rate, 1.0))).take(1, now)

    def _minute(self, limit: float, *name: str) -> Minute:
        return self._minutes.setdefault(name, Minute(limit, is_fixed=self.quota.minute == "fixed"))
