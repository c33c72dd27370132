"""Google Drive's quota: units by kind of request, limits per minute and day, and the use by an account.

All numbers of Google are here. Their source is developers.google.com/workspace/drive/api/guides/limits (2026); the
limits on new items are undocumented.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from cachedfs.common.text import per_cent, size

__all__ = ["CREATES", "REQUESTS", "QuotaMeter", "QuotaStats", "RateLimit", "day_of", "end_of"]


class RateLimit(NamedTuple):
    """A service's limit: at most `units` in any `window_s` seconds.

    A request is one unit, or what `costs` says for its kind.
    """

    units: float
    window_s: float
    costs: Mapping[str, float] = {}

    def cost(self, kind: str) -> float:
        return self.costs.get(kind, self.costs.get("other", 1.0))


# Google does not say if `alt=media` is a download: we take the higher cost.
UNITS = {"other": 5, "list": 100, "download": 200, "edit": 50, "create": 50}
# Of one user of one project: 12,000 requests a minute, or units for projects made since May 2026 or long unused.
# Their minute is a second longer than Google's, because requests do not all take equally long to reach Google.
REQUESTS = (RateLimit(12_000, 61.0), RateLimit(325_000, 61.0, UNITS))
# New items: 3 or 2 a second, less 5 %. Undocumented, the same for all heavy writers.
CREATES = (RateLimit(1, 1 / 2.85), RateLimit(1, 1 / 1.9))
# Of one project. Above them, Google announces charges.
UNITS_A_DAY = 400_000_000
BYTES_A_DAY = 10**12  # sent by Google

_WARN = 0.8  # of a day's units or bytes
_Sum = tuple[int, int]  # units and bytes

logger = logging.getLogger("cachedfs.origins")


@functools.cache
def _zone() -> tzinfo:
    """Return the time zone of Google's days; that they are those of its other quotas is assumed."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo("America/Los_Angeles")
    except ZoneInfoNotFoundError:  # a system without time zones
        return timezone(timedelta(hours=-8))


def day_of(now: float) -> str:
    """Return Google's day at a Unix time: "2026-11-25"."""
    return datetime.fromtimestamp(now, _zone()).date().isoformat()


def end_of(day: str) -> datetime:
    """Return when one of Google's days ends, in UTC."""
    tomorrow = date.fromisoformat(day) + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day, tzinfo=_zone()).astimezone(UTC)


class QuotaStats(NamedTuple):
    """The use of Google's daily quota by one Drive account.

    day: Google's day, which begins at midnight Pacific time. units: quota units of all answered requests. bytes: received
    from Google. Google's limits are per project, and it also counts other programs and machines.
    """

    day: str
    units: int = 0
    bytes: int = 0

    @property
    def units_share(self) -> float:
        """Share of the 400,000,000 units a day."""
        return self.units / UNITS_A_DAY

    @property
    def bytes_share(self) -> float:
        """Share of the 1 TB a day."""
        return self.bytes / BYTES_A_DAY

    @property
    def share(self) -> float:
        """The larger of both shares."""
        return max(self.units_share, self.bytes_share)

    def plus(self, units: int, n_bytes: int) -> QuotaStats:
        """Return the use after more units and bytes on the same day."""
        return QuotaStats(self.day, self.units + units, self.bytes + n_bytes)

    def __str__(self) -> str:
        return (
            f"{self.units:,} of {UNITS_A_DAY:,} quota units ({per_cent(self.units_share)}) and {size(self.bytes)} of "
            f"{size(BYTES_A_DAY)} ({per_cent(self.bytes_share)})"
        )


class QuotaMeter:
    """Counts what one account uses each day, in this process or with all others that share a store. Any thread.

    `add` adds units and bytes to the store's sum of a day, and returns it; `load` returns it. `soon` calls a function a
    few seconds later.
    """

    def __init__(
        self,
        account: str = "this account",
        *,
        load: Callable[[str], _Sum] = lambda day: (0, 0),
        add: Callable[[str, int, int], _Sum] | None = None,
        soon: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._account, self._load, self._add, self._soon, self._clock = account, load, add, soon, clock
        self._lock = threading.RLock()  # reentrant, as a destructor may read the statistics
        self._storing = threading.Lock()
        self._stored = QuotaStats("")  # the newest sum in the store that we know
        self._pending: dict[str, QuotaStats] = {}  # counted here by day, and not stored yet
        self._is_scheduled = False
        self._warned = ""  # the day of the last warning
        self.refresh()

    def count(self, kind: str, n_bytes: int) -> None:
        """Count an answered request and the bytes of its answer."""
        day, units = day_of(self._clock()), UNITS.get(kind, UNITS["other"])
        with self._lock:
            self._pending[day] = self._pending.get(day, QuotaStats(day)).plus(units, n_bytes)
            is_first, self._is_scheduled = not self._is_scheduled, True
        if is_first and self._soon is not None:
            self._soon(self.store)
        used = self.today()
        if used.share >= _WARN and self._warned != day:
            self._warned = day
            logger.warning(
                "Google Drive: %s used %s today. Above them, Google announces charges; the drive option daily_limit can stop "
                "requests before",
                *(self._account, used),
            )

    def today(self) -> QuotaStats:
        """Return what is used today."""
        day = day_of(self._clock())
        with self._lock:
            stored = self._stored if self._stored.day == day else QuotaStats(day)
            _, units, n_bytes = self._pending.get(day, QuotaStats(day))
        return stored.plus(units, n_bytes)

    def refresh(self) -> None:
        """Read what all processes stored; skipped while another thread is storing, which reads it too."""
        if self._storing.acquire(blocking=False):
            try:
                day = day_of(self._clock())
                self._stored = QuotaStats(day, *self._load(day))
            finally:
                self._storing.release()

    def store(self) -> None:
        """Store what is counted. Raises the errors of the store; the counts are kept for the next time."""
        self._is_scheduled = False
        if self._add is None or not self._storing.acquire(blocking=False):
            return
        try:
            with self._lock:
                pending = sorted(self._pending.items())
            for day, (_, units, n_bytes) in pending:
                total = self._add(day, units, n_bytes)
                with self._lock:
                    self._stored = QuotaStats(day, *total)
                    left = self._pending.pop(day).plus(-units, -n_bytes)
                    if left.units:
                        self._pending[day] = left
        finally:
            self._storing.release()
