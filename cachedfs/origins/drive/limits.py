"""`DriveLimits`: when this process may send a request, and what the answers say about the limit.

A limit is a count: so many units in any minute. A request is sent when it fits in, together with all that were sent in
the last minute. The service does not state its limit, so we try a ladder of known limits, the highest first. Many
refusals in a short time mean that the minute is full: a lower limit applies, or others use a part of it. Then we keep
to about what the service accepted from us in the last minute, and try more as it accepts more. So processes that share
a limit find their shares of it. A single refusal means nothing: services refuse some requests of every client.

Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from cachedfs.errors import QuotaExceeded
from cachedfs.origins.drive import quota
from cachedfs.origins.drive.quota import RateLimit
from cachedfs.origins.http_request import HTTPRequest

__all__ = ["RETRY_HIGHER_S", "DriveLimits", "SentRequest", "SentRequests"]

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
_CREATE = "create"
_CREATED_AT_ONCE = (
    8  # sent, or waiting for their rate, and not answered: at a third of a second each 24 a second
)
_MANY_WAIT = 16  # a minute's quarter at the rate that Drive has
_CHECK_S = 1.0  # between checks whether a new day has begun


class SentRequest(NamedTuple):
    """One request that was sent."""

    kind: str
    at: float
    number: int  # makes it differ from others of the same time


class SentRequests:
    """The requests sent under one limit, and how much of the limit this process uses. It reads no clock."""

    def __init__(self, ladder: Sequence[RateLimit]) -> None:
        self._ladder = ladder
        self.rung = 0  # index of the limit in its ladder
        self.share = 1.0  # share of the limit that we use
        self.refused = 0.0  # moving average of answers that say "too many requests"
        self._cut_at = 0.0  # when the share was last lowered; answers to earlier requests are ignored
        self._open_at = 0.0  # nothing is sent before
        self._is_full = False  # single requests are sent after pauses until one is accepted
        self._sent: deque[SentRequest] = (
            deque()
        )  # in the last window, without the refused ones, which cost nothing
        self._used = 0.0  # their units
        self._n = 0

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
        self._n += 1
        sent = SentRequest(kind, now, self._n)
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
        return self._cut_at == now

    def _cut(self, now: float) -> None:
        half = self.share / 2
        self._use(min(self.rung + 1, len(self._ladder) - 1), 1.0)
        self.share = min(1.0, max(half, _KEPT * self._used / self.limit.units, _MIN_SHARE))
        self._is_full, self._cut_at, self._open_at = True, now, now + _PAUSE_S

    def _use(self, rung: int, share: float) -> None:
        self.rung, self.share, self.refused = rung, share, 0.0
        self._used = sum(self.limit.cost(sent.kind) for sent in self._sent)

    def per_s(self, kind: str) -> float:
        """Return how many requests of a kind may be sent each second in the long run."""
        return self.limit.units * self.share / self.limit.window_s / self.limit.cost(kind)


class _Lane:
    """One rate limit; requests that wait for it are sent in the order of their calls."""

    def __init__(self, ladder: Sequence[RateLimit], clock: Callable[[], float], *, mostly: str) -> None:
        self.requests = SentRequests(ladder)
        self._clock, self._mostly = clock, mostly
        self._order = asyncio.Lock()

    async def spend(self, kind: str) -> SentRequest:
        async with self._order:
            now = self._clock()
            while wait_s := self.requests.wait_s(kind, now):
                await asyncio.sleep(min(wait_s, _MOST_S))
                now = self._clock()
            return self.requests.send(kind, now)

    def answered(self, sent: SentRequest, refused: bool) -> None:
        if self.requests.answered(sent, self._clock(), refused=refused):
            logger.info(
                "the service refuses requests as too many; the rate is lowered to %.1f per second", self.per_s
            )

    @property
    def per_s(self) -> float:
        """The present rate of the requests that are sent most."""
        return self.requests.per_s(self._mostly)

    def spare_s(self) -> float:
        if self._order.locked():
            return _RECHECK_S
        return min(self.requests.wait_s(self._mostly, self._clock(), part=_SPECULATIVE), _MOST_S)


class DriveLimits:
    """What limits the requests of one account in this process: Google's rates, and a share of the daily quota.

    One rate counts all requests, and another one those that create items. The quota's `share` None is no limit; `stops`
    is "speculation" or "everything".
    """

    def __init__(
        self,
        meter: quota.QuotaMeter,
        share: float | None = None,
        stops: str = "speculation",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter, self._share, self._stops = meter, share, stops
        self._warned = ""  # the day of the last warning
        self.requests = _Lane(quota.REQUESTS, clock, mostly="download")
        self.creates = _Lane(quota.CREATES, clock, mostly=_CREATE)
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
                f"{_end_of(used.day)}; raise daily_limit to go on"
            )
        created = (await self.creates.spend(_CREATE),) if request.kind == _CREATE else ()
        return (await self.requests.spend(request.kind), *created)

    def answered(self, sent: tuple[SentRequest, ...], *, refused: bool) -> None:
        """Adjust the rates to an answer; `refused` means it said "too many requests"."""
        request, *created = sent
        for each in created:
            self.creates.answered(each, refused)
        # A refused create counts for new items only: their limit is far lower, and the error is the same.
        if not (created and refused):
            self.requests.answered(request, refused)

    def count(self, request: HTTPRequest, n_bytes: int) -> None:
        """Count a request that was answered with `n_bytes` against the quota."""
        self.meter.count(request.kind, n_bytes)

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request delays no caller; 0: now."""
        return _CHECK_S if self._is_reached() else self.requests.spare_s()

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
                *(self._share, used, what, _end_of(used.day)),
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
        finally:
            self._creating.release()


def _end_of(day: str) -> str:
    return f"{quota.end_of(day):%Y-%m-%d %H:%M} UTC"
