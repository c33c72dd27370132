"""How long what we know of an object or a listing counts."""

from __future__ import annotations

import math

__all__ = ["ABSENCE_S", "is_fresh"]

ABSENCE_S = 10.0
"""Longest life of an absence learnt from one 404: objects appear more often than they change (gcsfuse: 5 s)."""


def is_fresh(checked_at: float, now: float, *, lifetime_s: float, absence: bool = False) -> bool:
    """Return whether an answer from `checked_at` counts at `now`, both in seconds since the epoch.

    A lifetime of 0 counts for nobody, an infinite one for ever. An answer from the future (the clock was set
    back) does not count.
    """
    if math.isinf(lifetime_s):
        return True
    age = now - checked_at
    return 0 <= age < (min(lifetime_s, ABSENCE_S) if absence else lifetime_s)
