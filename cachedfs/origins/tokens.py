"""How long a token lasts, when another one is asked for, and who shares what came of it: the same at all services. No I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cachedfs.origins.retry import RetryableError, RetryReason

__all__ = ["TokenRenewals", "is_expired", "left_s"]

_EXPIRES_SOON_S = 300  # as gcsfs: a token that lasts less is renewed before it is used
_EXPIRED_S = 10  # a token that lasts less may be refused when it arrives
_SOON_AGAIN_S = 30  # a metadata server hands out the same token until it expires: not for every request


def left_s(token: str | None, expiry: datetime | None) -> float:
    """Return for how many seconds a token can be used: infinite where that is not known, -1 without one."""
    if token is None:
        return -1.0
    if expiry is None:
        return math.inf
    # The libraries keep UTC without saying so.
    return ((expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def is_expired(lasts_s: float) -> bool:
    """Return whether a token that lasts so long cannot be used any more."""
    return lasts_s <= _EXPIRED_S


class TokenRenewals:
    """What came of asking for the tokens of one account. Who asks is the caller's to arrange: one at a time."""

    def __init__(self) -> None:
        # The last one; at Cloud Storage also of those who had a token that still works. No exception: by its traceback that
        # would keep what was to be sent.
        self.failure: RetryReason | None = None
        self._early_at = -math.inf  # when another was last asked for before it had to be

    def is_fresh(self, lasts_s: float) -> bool:
        """Return whether a token that lasts so long is to be sent without a thought."""
        was_tried = time.monotonic() - self._early_at < _SOON_AGAIN_S
        return lasts_s > _EXPIRES_SOON_S or (not is_expired(lasts_s) and was_tried)

    @contextmanager
    def early(self) -> Iterator[None]:
        """Ask for another token while the present one still works: the others use that, and for a while nobody asks again."""
        self._early_at = time.monotonic()
        try:
            yield
        finally:
            # Once more: one that is given up after a long silence would be followed by the next.
            self._early_at = time.monotonic()

    def share(self, before: RetryReason | None) -> None:
        """Raise the failure that came while the caller waited for his turn, since `before` was the last.

        To ask again, one after the other, would take the more time the more wait.
        """
        if self.failure is not None and self.failure is not before:
            raise RetryableError(self.failure)

    @contextmanager
    def shared(self, before: RetryReason | None) -> Iterator[None]:
        """Ask for another token, unless that failed since `before` was the last failure; a new one is for all who wait."""
        self.share(before)
        try:
            yield
        except RetryableError as failed:
            self.failure = failed.trouble
            raise
