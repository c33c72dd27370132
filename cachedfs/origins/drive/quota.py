"""Google Drive's limits of requests and bytes: their rates a minute, and what an account used of a day.

All numbers of Google are here. Their source is developers.google.com/workspace/drive/api/guides/limits (2026); the
limits on new items are undocumented.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from cachedfs.common.text import per_cent, size
from cachedfs.errors import QuotaExceeded
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.retry import RetryableError

logger = logging.getLogger("cachedfs.origins")


class RateLimit(NamedTuple):
    """At most `units` in any `window_s` seconds; a request is one, or what `costs` says for its kind."""

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
_CREATE = "create"
_MANY_WAIT = 24  # some ten seconds at the rate that Drive has
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
_MOST_S = 1.0  # seconds until the next check: the share may change, and a new day begin

_Sum = tuple[int, int]  # units and bytes


class SentRequest(NamedTuple):
    """One request that was sent, and when, by the monotonic clock."""

    kind: str
    at: float


class SentRequests:
    """The requests sent under one limit, and how much of the limit this process uses.

    The service does not state its limit, so we try a ladder of known limits, the highest first. Many refusals in a short
    time mean that the minute is full: a lower limit applies, or others use a part of it. Then we keep to about what the
    service accepted from us in the last minute, and try more as it accepts more. So processes that share a limit find their
    shares of it. A single refusal means nothing: services refuse some requests of every client.
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
        sent = SentRequest(kind, now)
        self._sent.append(sent)
        self._used += self.limit.cost(kind)
        if self._is_full:
            self._open_at = now + _PAUSE_S
        return sent

    def answered(self, sent: SentRequest, now: float, *, refused: bool) -> None:
        """Adjust the share to an answer; `refused`: it said "too many requests"."""
        limit, cost = self.limit, self.limit.cost(sent.kind)
        if refused and sent in self._sent:
            self._sent.remove(sent)
            self._used -= cost
        if sent.at < self._cut_at:
            return
        self.refused += (refused - self.refused) * _WEIGHT
        if not refused:
            self._is_full, self._open_at = False, 0.0
            self.share = min(1.0, self.share + cost / limit.units * limit.window_s / _DOUBLES_S)
        elif self._is_full:
            self._open_at = now + _PAUSE_S
        elif self.refused >= _MAX_REFUSED:
            self._cut(now)
            per_s = self.per_s()
            logger.info(
                "the service refuses requests as too many; the rate is lowered to %.1f per second", per_s
            )

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


class DriveLimits:
    """Limits the requests of one account in this process.

    The limits are Google's rates and, unless `share` is None, a share of the daily quota.
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
        self._n_waiting, self._has_warned = 0, False  # items that wait for their turn

    async def wait(self, request: HTTPRequest) -> SentRequest:
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
        return await self.requests.spend(request.kind, self._clock)

    def answered(self, sent: SentRequest, *, refused: bool) -> None:
        """Adjust the rate to an answer; `refused` means it said "too many requests"."""
        # A refused create counts for new items only: their limit is far lower, and the error is the same.
        if not (refused and sent.kind == _CREATE):
            self.requests.answered(sent, self._clock(), refused=refused)

    def count(self, request: HTTPRequest, n_bytes: int) -> None:
        """Count a request that was answered with `n_bytes` against the quota."""
        self.meter.count(request.kind, n_bytes)

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request delays no caller; 0: now."""
        return _MOST_S if self._is_reached() else self.requests.spare_s(self._clock())

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
        """Wait until a new item (file, folder, copy) may be made, and adjust their rate to the answer."""
        self._n_waiting += 1
        if not self._has_warned and self._n_waiting >= _MANY_WAIT:
            self._has_warned = True
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn. One large "
                "file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )
        try:
            sent = await self.creates.spend(_CREATE, self._clock)
        finally:
            self._n_waiting -= 1
        try:
            yield
        except RetryableError as failed:
            if failed.is_rate:
                self.creates.answered(sent, self._clock(), refused=True)
            raise
        self.creates.answered(sent, self._clock(), refused=False)
        self.n_created += 1


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
