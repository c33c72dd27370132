"""The path of a prefetch plan's reader: where it was at the time of an access."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

__all__ = ["ReaderPath"]

PATH = 512  # positions that are remembered


class ReaderPath:
    """The number of uses before the reader, by the access clock. `began` is the clock when the plan began."""

    def __init__(self, began: int) -> None:
        self._began = began
        # Invariant: sorted. Accesses since the plan began, and the uses before the reader then.
        self._path = deque([(0, 0)], maxlen=PATH)

    def move(self, clock: int | None, n_uses: int) -> None:
        """Record that the reader is behind `n_uses` uses since the access at `clock`."""
        # Threads are seen out of order.
        self._path.append((max(self._path[-1][0], self._age(clock)), n_uses))

    def at(self, clock: int | None) -> int:
        """Return the number of uses before the reader at the time of an access."""
        i = bisect_right(self._path, (self._age(clock), 0))
        return self._path[max(0, i - 1)][1]

    def is_later(self, clock: int) -> bool:
        """Return whether an access was after the last one that moved the reader."""
        return self._age(clock) > self._path[-1][0]

    def _age(self, clock: int | None) -> int:
        """Return how many accesses after the beginning of the plan `clock` was, which has 32 bits."""
        newest = self._path[-1][0]
        if clock is None:
            return newest
        return newest + ((clock - self._began - newest + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
