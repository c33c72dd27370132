"""When to try again, and when to give up: decisions only; the clock and chance are arguments."""

from __future__ import annotations

import dataclasses
import email.utils
import random
from collections.abc import Callable
from datetime import UTC, datetime

__all__ = [
    "RetryableError",
    "RetryPolicy",
    "RetryAttempts",
    "RetryReason",
    "delay",
    "foreign",
    "retry_after_s",
    "untrusted",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient an origin is with its service; leave alone outside tests."""

    tries: int = 6  # as many as gcsfs makes
    base_s: float = 1.0
    cap_s: float = 32.0
    patience_s: float = 64.0  # a service that asks for a longer wait is taken as unavailable
    connect_s: float = 2.0  # a service that cannot be reached for so long is away
    stall_s: float = 30.0  # a socket that is silent for so long is broken
    export_s: float = 300.0  # nothing comes of a document before it is converted: another silence limit
    hedge_least_s: float = 2.0  # where late requests are sent again, none is late before that,
    hedge_early_s: float = 5.0  # or before that while too little is known to tell


@dataclasses.dataclass(frozen=True, slots=True)
class RetryReason:
    """Why one try failed, where another may succeed."""

    reason: str
    retry_after_s: float | None = None
    is_unreachable: bool = False  # refused, unresolved or not connected: nothing was sent
    is_final: bool = False  # another try would end in the same
    is_rate: bool = False  # there were too many requests
    is_absence: bool = False  # a "not found" that may be somebody else's
    remedy: str = "Check the network and the endpoint, or try again later"  # when it does not pass


def untrusted(reason: str) -> RetryReason:
    """Return the trouble with whoever answers with a certificate that is not trusted here: the service is not reached."""
    remedy = (
        "Where a proxy or a server of your own answers, name the file of its authority in SSL_CERT_FILE; else see "
        "that the clock is right, and that the network lets you through"
    )
    return RetryReason(reason, is_unreachable=True, is_final=True, remedy=remedy)


def foreign(reason: str, *, is_absence: bool = False) -> RetryReason:
    """Return the trouble with an answer that does not look like the service's."""
    remedy = (
        "Something between, such as a proxy or the login page of a network, seems to answer: check the network and the "
        "endpoint, or try again later"
    )
    return RetryReason(reason, remedy=remedy, is_absence=is_absence)


class RetryableError(Exception):
    """One try failed and may be repeated; never leaves this room."""

    def __init__(self, trouble: RetryReason) -> None:
        super().__init__(trouble.reason)
        self.trouble = trouble


def delay(attempt: int, policy: RetryPolicy, rng: random.Random, *, at_least_s: float = 0.0) -> float:
    """Return the seconds to wait after failed try number `attempt` (the first is 1).

    Full jitter: uniform between nothing and a bound that doubles up to `cap_s`. What the service asked
    for is waited at least, and the jitter comes on top, so that its clients do not return all at once.
    """
    bound = min(policy.cap_s, policy.base_s * 2 ** (attempt - 1))
    return at_least_s + rng.uniform(0.0, bound)


def retry_after_s(text: str | None, now: datetime) -> float | None:
    """Return what a `Retry-After` header asks for in seconds: a number or a date; None for neither."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - now).total_seconds())


class RetryAttempts:
    """The tries of one operation: counts them, and says how long to wait for the next one."""

    def __init__(self, policy: RetryPolicy, *, clock: Callable[[], float], rng: random.Random) -> None:
        self.n_failed = 0
        self._policy, self._clock, self._rng = policy, clock, rng
        self._started = clock()
        self._unreachable_since: float | None = None  # Invariant: None unless the last try did not connect

    def next_wait_s(self, trouble: RetryReason) -> float | None:
        """Count a failed try and return the seconds to wait before the next one; None: give up."""
        self.n_failed += 1
        policy, now = self._policy, self._clock()
        wait_s = delay(self.n_failed, policy, self._rng, at_least_s=trouble.retry_after_s or 0.0)
        if not trouble.is_unreachable:
            self._unreachable_since = None
        elif self._unreachable_since is None:
            # The failed try itself took time: at worst all there is.
            self._unreachable_since = self._started if self.n_failed == 1 else now
        if (
            trouble.is_final
            or self.n_failed >= policy.tries
            or (trouble.retry_after_s or 0.0) > policy.patience_s
        ):
            return None
        if self._unreachable_since is not None and now + wait_s > self._unreachable_since + policy.connect_s:
            return None
        return wait_s

    def summary(self) -> str:
        """Return how many tries there were, and how long they took."""
        tries = "1 try" if self.n_failed == 1 else f"{self.n_failed} tries"
        return f"{tries} in {self._clock() - self._started:.1f} s"
