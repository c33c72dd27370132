"""What Drive lets a user, all users of a project, and all readers of a file ask for; and who asked for how much.

The published limits are counts a minute and say nothing of shorter times. Here they are token buckets that hold
`burst_s` of their rate, one second unless told otherwise: stricter than the documentation. Laxer: what is refused
costs nothing, and the limits of a day other than a file's (1 TB, 400 million units, 750 GB of uploads) are not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["QUOTAS", "Budget", "Meter", "Quota", "units_of"]

# In quota units, by the kind of a request; the documentation does not say whether `alt=media` is a download.
_UNITS = {"token": 0, "batch": 0, "get": 5, "list": 100, "change": 100, "revisions": 100, "permissions": 100}
_UNITS |= {"drives": 100, "media": 200, "export": 200}
_UNITS |= dict.fromkeys(("create", "update", "delete", "copy", "upload"), 50)
_OTHER = 5
_DEAREST = max(_UNITS.values())
_DAY_S = 86400.0


def units_of(kind: str) -> int:
    """Return what a request of this kind costs."""
    return _UNITS.get(kind, _OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much may be asked for; infinite is not counted."""

    units_per_user: float = math.inf
    """Quota units a minute, of one user of one project."""
    units_per_project: float = math.inf
    """Quota units a minute, of all users of a project."""
    requests_per_user: float = math.inf
    """Requests a minute of one user: how older projects are metered."""
    requests_per_project: float = math.inf
    """Requests a minute of all users of a project."""
    creates_per_s: float = math.inf
    """New items of one user: undocumented, and known to all who write."""
    file_bytes: float = math.inf
    """Of one file in a day, by all users; what was asked for counts, not what was sent."""
    burst_s: float = 1.0
    """Seconds of its rate that may be used at once."""
    status: int = 403
    """Of a refusal: Drive answers with 403 or 429."""

    @classmethod
    def resolve(cls, quota: Quota | str) -> Quota:
        """Return a quota from itself or its name. Raises ValueError for an unknown name."""
        if isinstance(quota, str) and quota not in QUOTAS:
            raise ValueError(f"unknown quota {quota!r}; known: {', '.join(QUOTAS)}")
        return QUOTAS[quota] if isinstance(quota, str) else quota


# Of projects made since May 2026, and of those before; creations as rclone has measured them.
QUOTAS = {
    "none": Quota(),
    "units": Quota(units_per_user=325e3, units_per_project=1e6, creates_per_s=2.0),
    "requests": Quota(requests_per_user=12e3, requests_per_project=12e3, creates_per_s=3.0),
}
"""By name: "none"; "units", of projects made since May 2026; "requests", of those made before."""


class Budget:
    """A token bucket: so much a second, and at most `size` at once."""

    def __init__(self, rate: float, size: float) -> None:
        self._rate, self._size = rate, size
        self._left, self._at = size, 0.0

    def has(self, n: float, now: float) -> bool:
        """Return whether n more are allowed now."""
        if self._rate < math.inf:
            self._left = min(self._left + (now - self._at) * self._rate, self._size)
            self._at = now
        return n <= self._left

    def take(self, n: float) -> None:
        self._left -= n


@dataclass(slots=True)
class Meter:
    """Who has asked for how much of a quota; times in simulated seconds."""

    quota: Quota
    _budgets: dict[tuple[str, ...], Budget] = field(default_factory=dict)

    def charge(self, user: str, project: str, units: float, now: float) -> str | None:
        """Return whose limit a request meets, `user` or `project`; None when it is counted."""
        quota = self.quota
        wants = [
            (self._minute(quota.units_per_user, _DEAREST, "units", project, user), units),
            (self._minute(quota.requests_per_user, 1, "requests", project, user), 1),
            (self._minute(quota.units_per_project, _DEAREST, "units", project), units),
            (self._minute(quota.requests_per_project, 1, "requests", project), 1),
        ]
        for i, (budget, n) in enumerate(wants):
            if not budget.has(n, now):
                return "user" if i < 2 else "project"
        for budget, n in wants:
            budget.take(n)
        return None

    def create(self, user: str, now: float) -> bool:
        """Return whether a user may make one more item now, and count it if so."""
        rate = self.quota.creates_per_s
        return _taken(self._budget(rate, max(rate, 1.0), "creates", user), 1, now)

    def download(self, file_id: str, n_bytes: float, now: float) -> bool:
        """Return whether so many more bytes of a file may be asked for, and count them if so."""
        size = self.quota.file_bytes
        return _taken(self._budget(size / _DAY_S, size, "file", file_id), n_bytes, now)

    def _minute(self, limit: float, least: float, *name: str) -> Budget:
        return self._budget(limit / 60, max(limit / 60 * self.quota.burst_s, least), *name)

    def _budget(self, rate: float, size: float, *name: str) -> Budget:
        if name not in self._budgets:
            self._budgets[name] = Budget(rate, size)
        return self._budgets[name]


def _taken(budget: Budget, n: float, now: float) -> bool:
    allowed = budget.has(n, now)
    if allowed:
        budget.take(n)
    return allowed
