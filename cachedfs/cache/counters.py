"""Statistics that all processes of a machine share: a few numbers in the header of the change counters.

They are changed under a lock that the kernel releases when its holder dies. A stopped holder is not waited for. After a killed
or overtaken process, the numbers may be any mixture of two states, so any numbers are accepted.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from cachedfs.cache.change_counters import STATISTICS_AT, ChangeCounters
from cachedfs.cache.locks import ByteRangeLocks


class Counted(NamedTuple):
    """Counters of all processes that use one cache directory.

    They count since the Unix time `since`; 0 means that nothing was counted yet. The names are those of `Stats`. A
    process adds its counters about once a second while it uses the cache, and when it exits. A killed process loses the
    rest. Deleting the directory resets the counters.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_served: int = 0
    evictions: int = 0
    bytes_shared: int = 0
    since: float = 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Hits divided by hits plus misses; None if both are 0."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def bytes_saved(self) -> int:
        """Bytes served minus bytes fetched, prefetched ones included; at least 0."""
        return max(0, self.bytes_served - self.bytes_fetched)

    @property
    def requests_saved(self) -> int:
        """Estimate of the requests that hits avoided: as many as a missed block takes, at most 1."""
        return round(self.hits * min(1.0, self.requests / self.misses)) if self.misses else self.hits

    def since_then(self, before: Counted) -> Counted:
        """Return the difference to an earlier value; zeros if the counters were reset in between."""
        if before.since != self.since:
            return self._replace(since=self.since)
        added = [max(0, now - then) for now, then in zip(self[:-1], before[:-1], strict=True)]
        return Counted._make([*added, self.since])


_LOCK = 0x0DB5_57A7_C0DE_0003  # the lock number for changing the numbers
_NUMBERS = struct.Struct(f"<{len(Counted._fields)}d")
_TRIES, _TRY_S = 20, 5e-5  # a change takes 10 us: after this many attempts its holder is stopped, not busy

_MOST = 2.0**53  # doubles represent integers exactly up to here


class SharedCounters:
    """Sums of the statistics of all processes that use one cache directory. Never raises on disk errors."""

    def __init__(self, counters: ChangeCounters, locks: ByteRangeLocks) -> None:
        self._counters, self._locks = counters, locks

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since its last call, in the order of the fields of `Counted`."""
        if not any(more):
            return
        begun = time.time()
        for _ in range(_TRIES):
            if is_ours := self._locks.take(_LOCK):
                break
            time.sleep(_TRY_S)
        try:
            *sums, since = self.total()
            added = [n + m for n, m in zip(sums, more, strict=True)]
            with contextlib.suppress(OSError):
                table = self._counters.tables[0]
                table.write([(STATISTICS_AT, _NUMBERS.pack(*added, since or begun))])
        finally:
            if is_ours:
                self._locks.release(_LOCK)

    def total(self) -> Counted:
        """Return the sums; zeros if nothing was counted yet, or if they cannot be read or are no valid counts."""
        with contextlib.suppress(OSError):
            table = self._counters.tables[0]
            numbers = _NUMBERS.unpack(table.read(_NUMBERS.size, STATISTICS_AT))
            if all(math.isfinite(n) and 0 <= n < _MOST for n in numbers):
                return Counted._make([*map(int, numbers[:-1]), numbers[-1]])
        return Counted()
