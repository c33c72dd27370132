"""Google Drive's limits a minute and a day, and what an account used of them.

All numbers of Google are here. Their source is developers.google.com/workspace/drive/api/guides/limits (2026); the
limits on new items are undocumented.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from cachedfs.common.text import per_cent, size
from cachedfs.errors import QuotaExceeded
from cachedfs.origins.drive.rates import RateLimit, SentRequest, SentRequests
from cachedfs.origins.http_request import HTTPRequest

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

_CREATE = "create"
# Sent, or waiting for their rate, and not answered: at a third of a second each 24 a second.
_CREATED_AT_ONCE = 8
_MANY_WAIT = 16  # a minute's quarter at the rate that Drive has
_CHECK_S = 1.0  # between checks whether a new day has begun

logger = logging.getLogger("cachedfs.origins")


class DriveLimits:
    """Limits of the requests of one account in this process: Google's rates, and a share of the daily quota.

    One rate counts all requests, and another one those that create items. The quota's `share` None is no limit; `stops`
    is "speculation" or "everything".
    """

    def __init__(
        self,
        meter: QuotaMeter,
        share: float | None = None,
        stops: str = "speculation",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter, self._share, self._stops = meter, share, stops
        self._warned = ""  # the day of the last warning
        self._clock, self.requests = clock, SentRequests(REQUESTS)
        self.creates = SentRequests(CREATES, mostly=_CREATE)
        self.n_created = 0
        self._creating, self._n_waiting = asyncio.Semaphore(_CREATED_AT_ONCE), 0
        self._has_warned = False  # that many items wait

    async def wait(self, request: HTTPRequest) -> tuple[SentRequest, ...]:
        """Wait until a request may be sent, and count it as sent; return what `answered` needs.

        Raises QuotaExceeded if the quota's share is used up.
        """
        if self._stops == "everything" and self._is_reached():
            used = self.meter.today()
            raise QuotaExceeded(
                f"{request.subject}: {request.purpose} is stopped by the drive option daily_limit={self._share:g}, as {used} "
                "are used today. Cached data can still be read, also expired data with offline=True. The day ends at "
                f"{end_of(used.day)}; raise daily_limit to go on"
            )
        created = (await self.creates.spend(_CREATE, self._clock),) if request.kind == _CREATE else ()
        return (await self.requests.spend(request.kind, self._clock), *created)

    def answered(self, sent: tuple[SentRequest, ...], *, refused: bool) -> None:
        """Adjust the rates to an answer; `refused` means it said "too many requests"."""
        request, *created = sent
        for each in created:
            self.creates.answered(each, self._clock(), refused=refused)
        # A refused create counts for new items only: their limit is far lower, and the error is the same.
        if not (created and refused):
            self.requests.answered(request, self._clock(), refused=refused)

    def count(self, request: HTTPRequest, n_bytes: int) -> None:
        """Count a request that was answered with `n_bytes` against the quota."""
        self.meter.count(request.kind, n_bytes)

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request delays no caller; 0: now."""
        return _CHECK_S if self._is_reached() else self.requests.spare_s(self._clock())

    def _is_reached(self) -> bool:
        if self._share is None:
            return False
        used = self.meter.today()
        if used.share < self._share:
            return False
        if self._warned != used.day:
            self._warned = used.day
            what = "all requests" if self._stops == "everything" else "read-ahead and prefetches"
            logger.warning(
                "Google Drive: daily_limit=%g is reached (%s): %s stop until %s",
                *(self._share, used, what, end_of(used.day)),
            )
        return True

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[None]:
        """Hold one of the slots for new items (files, folders, copies); first come, first served."""
        self._n_waiting += 1
        if not self._has_warned and self._n_waiting >= _MANY_WAIT:
            self._has_warned = True
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn. One large "
                "file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )
        try:
            await self._creating.acquire()
        finally:
            self._n_waiting -= 1
        try:
            yield
            self.n_created += 1
        finally:
            self._creating.release()


# Days
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


def end_of(day: str) -> str:
    """Return when one of Google's days ends: "2026-11-26 08:00 UTC"."""
    midnight = datetime.fromisoformat(day).replace(tzinfo=_zone()) + timedelta(days=1)
    return f"{midnight.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


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
