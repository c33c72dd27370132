"""Lifetime of access tokens.

Decides when to renew one, and how waiting requests share the result. No I/O.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cachedfs.origins.retry import RetryableError, RetryReason

__all__ = ["TokenRenewals", "is_expired", "left_s"]

_EXPIRES_SOON_S = 300  # as in gcsfs: a token that lasts less is renewed before it is used
_EXPIRED_S = 10  # a token that lasts less may be refused when it arrives
_SOON_AGAIN_S = 30  # a metadata server returns the same token until it expires: do not ask for every request


def left_s(token: str | None, expiry: datetime | None) -> float:
    """Return for how many seconds a token can be used: infinite if unknown, -1 without a token."""
    if token is None:
        return -1.0
    if expiry is None:
        return math.inf
    # The libraries store UTC without a time zone.
    return ((expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def is_expired(lasts_s: float) -> bool:
    """Return whether a token with so many seconds left can no longer be used."""
    return lasts_s <= _EXPIRED_S


class TokenRenewals:
    """The results of renewing the tokens of one account.

    The caller must see to it that one renewal runs at a time.
    """

    def __init__(self) -> None:
        # The last failure; at Cloud Storage also of an early renewal. Not the exception: its traceback would keep the
        # data of the request in memory.
        self.failure: RetryReason | None = None
        self._early_at = -math.inf  # when the last early renewal began or ended

    def is_fresh(self, lasts_s: float) -> bool:
        """Return whether to send a token with so many seconds left without renewing it."""
        was_tried = time.monotonic() - self._early_at < _SOON_AGAIN_S
        return lasts_s > _EXPIRES_SOON_S or (not is_expired(lasts_s) and was_tried)

    @contextmanager
    def early(self) -> Iterator[None]:
        """Renew a token that still works.

        Other requests use it meanwhile and do not renew it for a while.
        """
        self._early_at = time.monotonic()
        try:
            yield
        finally:
            # Again, so that a renewal that ends in a long timeout is not followed by the next.
            self._early_at = time.monotonic()

    def share(self, before: RetryReason | None) -> None:
        """Raise the failure of a renewal that ended while the caller waited, if it is not `before`.

        If each waiting caller tried again, one after the other, the last would wait for all of them.
        """
        if self.failure is not None and self.failure is not before:
            raise RetryableError(self.failure)

    @contextmanager
    def shared(self, before: RetryReason | None) -> Iterator[None]:
        """Renew the token, unless a renewal failed since `before`.

        A failure is shared with all waiting callers.
        """
        self.share(before)
        try:
            yield
        except RetryableError as failed:
            self.failure = failed.trouble
            raise
