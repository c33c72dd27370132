"""Decide whether and when to retry a failed request; clock and randomness are arguments."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from cachedfs.common.logging import has_secrets
from cachedfs.errors import OriginUnavailable, OriginUnreachable
from cachedfs.origins.base import http_date, int_of

# Least waits after refusals of one request for its rate, in multiples of `base_s`: more than a minute in all, because
# limits are counts per minute, and others may have used one up.
_AFTER_REFUSALS = (0.0, 2.0, 6.0, 16.0, 36.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Limits on retries and timeouts of an origin, with its clock and randomness; change them only in tests."""

    tries: int = 6  # as in gcsfs
    base_s: float = 1.0
    cap_s: float = 32.0
    patience_s: float = 64.0  # a service that asks for a longer wait is unavailable
    connect_s: float = 2.0  # a service not connected within this is unreachable
    # For the address of its host, the connection and TLS together. A resolver goes on to the next name server after 5 s.
    reach_s: float = 20.0
    reach_stale_s: float = 3.0  # where a stale answer can be served
    stall_s: float = 30.0  # a socket that is silent for longer is broken
    export_s: float = 300.0  # `stall_s` of an export: Drive converts the document before it sends
    # Drive lets some requests wait for half a minute, and answers the next one at once. These timeouts, of the first
    # attempt, double at each retry.
    media_s: float = 2.0  # until the first byte of media, or 4 times the mean wait for it
    metadata_s: float = 10.0  # until the answer to a lookup or a listing, a page of which takes some seconds

    clock: Callable[[], float] = time.monotonic
    rng: random.Random = dataclasses.field(default_factory=random.Random)


@dataclasses.dataclass(eq=False)
class RetryableError(Exception):
    """One attempt failed and another one may succeed; never raised outside `cachedfs.origins`."""

    reason: str
    _: dataclasses.KW_ONLY
    retry_after_s: float | None = None
    is_unreachable: bool = False  # refused, unresolved or not connected: nothing was sent
    is_final: bool = False  # another attempt would fail the same way
    is_rate: bool = False  # there were too many requests
    is_late: bool = False  # no answer came in time: waiting more before the next attempt helps nobody
    is_damaged: bool = False  # the bytes have another checksum
    is_absence: bool = False  # a 404 that may be from another server
    remedy: str = "Check the network and the endpoint, or try again later"  # advice for when retries fail

    def __str__(self) -> str:
        return self.reason


def untrusted(reason: str) -> RetryableError:
    """Return the error for an untrusted certificate: the service itself was not reached."""
    remedy = (
        "Where a proxy or a server of your own answers, name the file of its authority in SSL_CERT_FILE; else see "
        "that the clock is right, and that the network lets you through"
    )
    return RetryableError(reason, is_unreachable=True, is_final=True, remedy=remedy)


def foreign(reason: str, *, is_absence: bool = False) -> RetryableError:
    """Return the error for an answer that does not look like the service's own."""
    remedy = (
        "Something between, such as a proxy or the login page of a network, seems to answer: check the network and the "
        "endpoint, or try again later"
    )
    return RetryableError(reason, remedy=remedy, is_absence=is_absence)


@asynccontextmanager
async def time_limit(within_s: float | None, late: Exception) -> AsyncIterator[None]:
    """Raise `late` if the block takes longer; a timeout of the block's own is raised as it is."""
    try:
        async with asyncio.timeout(within_s) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise late from None


def delay(attempt: int, policy: RetryPolicy, *, at_least_s: float = 0.0) -> float:
    """Return the seconds to wait after failed attempt number `attempt` (the first is 1).

    Full jitter: uniform between 0 and a bound that doubles up to `cap_s`. It is added to the wait that the service
    asked for (`at_least_s`), so that its clients do not all return at once.
    """
    bound = min(policy.cap_s, policy.base_s * 2 ** (attempt - 1))
    return at_least_s + policy.rng.uniform(0.0, bound)


def retry_after_s(text: str | None, now: datetime) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, or None.

    The header has a number or a date.
    """
    if text is None:
        return None
    if (seconds := int_of(text.strip())) is not None:
        return float(seconds)
    at = http_date(text)
    return None if at is None else max(0.0, (at - now).total_seconds())


class RetryAttempts:
    """The attempts of one operation.

    Counts failures, and decides how long to wait before the next attempt.
    """

    def __init__(self, policy: RetryPolicy, started: float | None = None) -> None:
        """Begin an operation, which started at the time `started`, or now."""
        self.n_failed = 0
        self._policy = policy
        self._started = policy.clock() if started is None else started
        self._unreachable_since: float | None = None  # Invariant: None after an attempt that connected

    async def pause(self, failed: RetryableError, subject: str, doing: str) -> None:
        """Wait after a failed attempt; raise OriginUnavailable, which names `subject`, if it was the last one."""
        wait_s = self.next_wait_s(failed)
        if wait_s is None:
            kind = OriginUnreachable if failed.is_unreachable else OriginUnavailable
            cause = failed.__cause__ or failed
            raise kind(
                f"{subject}: {doing} failed after {self.summary()}; the last time: {failed}. {failed.remedy}"
            ) from (None if has_secrets(cause) else cause)  # a traceback prints it, too
        await asyncio.sleep(wait_s)

    def next_wait_s(self, failed: RetryableError) -> float | None:
        """Count a failed attempt; return the seconds to wait before the next one, or None after the last one."""
        self.n_failed += 1
        policy, now = self._policy, self._policy.clock()
        wait_s = 0.0
        if not failed.is_late:
            at_least_s = failed.retry_after_s or 0.0
            if failed.is_rate:
                factor = _AFTER_REFUSALS[min(self.n_failed, len(_AFTER_REFUSALS)) - 1]
                at_least_s = max(at_least_s, policy.base_s * factor)
            wait_s = delay(self.n_failed, policy, at_least_s=at_least_s)
        if not failed.is_unreachable:
            self._unreachable_since = None
        elif self._unreachable_since is None:
            # The first attempt itself may have used up the time allowed.
            self._unreachable_since = self._started if self.n_failed == 1 else now
        if (
            failed.is_final
            or self.n_failed >= policy.tries
            or (failed.retry_after_s or 0.0) > policy.patience_s
        ):
            return None
        if self._unreachable_since is not None and now + wait_s > self._unreachable_since + policy.connect_s:
            return None
        return wait_s

    def first_byte_s(self, first_s: float) -> float:
        """Return the timeout of the next attempt, if that of the first one was `first_s`."""
        return min(self._policy.stall_s, first_s * float(2**self.n_failed))

    def summary(self) -> str:
        """Return how many attempts there were and how long they took, as text."""
        tries = "1 try" if self.n_failed == 1 else f"{self.n_failed} tries"
        return f"{tries} in {self._policy.clock() - self._started:.1f} s"
