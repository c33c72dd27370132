"""When a request whose answer is late is worth a second one. Pure.

The rule: when its first byte is later than that of 99 in 100 requests before it. While fewer are known, when it is later
than `early_s`; never before `least_s`, as a second request has to be worth its price. And at most one request in
twenty is sent a second time, the first one that is late aside.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Seen", "late_s", "may_hedge"]

_LATEST = 500  # answers that are remembered
_ENOUGH = 100  # to tell what one in a hundred is
_ONE_IN = 20


class Seen(NamedTuple):
    """What is known of the requests of one kind: seconds to the first byte, latest last, and how many were sent."""

    waits_s: tuple[float, ...] = ()
    n_sent: int = 0
    n_hedged: int = 0

    def sent(self) -> Seen:
        return self._replace(n_sent=self.n_sent + 1)

    def hedged(self) -> Seen:
        return self._replace(n_hedged=self.n_hedged + 1)

    def answered(self, wait_s: float) -> Seen:
        """Return what is known after an answer; where a second request was faster, it came at least so late."""
        return self._replace(waits_s=(*self.waits_s[1 - _LATEST :], wait_s))


def late_s(seen: Seen, *, least_s: float, early_s: float) -> float:
    """Return after how many seconds without an answer a request is late."""
    n = len(seen.waits_s)
    if n < _ENOUGH:
        return max(least_s, early_s)
    return max(least_s, sorted(seen.waits_s)[-1 - n // 100])


def may_hedge(seen: Seen) -> bool:
    """Return whether one more second request is within the limit."""
    return seen.n_hedged < 1 + seen.n_sent // _ONE_IN
