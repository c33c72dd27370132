"""What all processes of the machine counted of one cache directory: a record beside the request budgets, no SQLite."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from cachedfs.cache.budgets import Numbers, Record
from cachedfs.common.types import Counted

__all__ = ["Counts"]

_MOST = 2.0**53  # doubles count exactly up to here


class Counts:
    """The sums in one record, in the order of `Counted`. Never an error, whatever the disk does: they only inform."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since it added last."""
        if not any(more):
            return
        begun = time.time()

        def added(numbers: Numbers) -> tuple[Numbers, None]:
            *sums, since = _sane(numbers)
            return (*(n + float(m) for n, m in zip(sums, more, strict=True)), since or begun), None

        with contextlib.suppress(OSError, ValueError):
            self._record.change(added)

    def total(self) -> Counted:
        """Return the sums; zeros when nobody can tell."""
        try:
            *sums, since = _sane(self._record.look())
        except (OSError, ValueError):
            return Counted()
        return Counted._make([*map(int, sums), since])


def _sane(numbers: Numbers) -> Numbers:
    """Return the numbers if they can be counts, else zeros: what a killed process leaves may be anything."""
    return numbers if all(math.isfinite(n) and 0 <= n < _MOST for n in numbers) else (0.0,) * len(numbers)
