"""Registry of the active prefetch plans on this machine, used to divide the cache size among them.

Each plan holds a seat: a byte-range lock on one of 16 numbers. The kernel releases it when the process dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import ObjectKey

__all__ = ["FutureUseSource", "PlanRegistry"]

_FIRST = 0x3243F6A8885A3080  # lock number of seat 0; a block has one of these with a probability of 2^-58
_MOST = 16  # seats; further plans get none, and the others do not count them


class FutureUseSource(Protocol):
    """Interface of a plan that knows when its blocks are used next and can name blocks to evict."""

    share: int  # bytes of the cache that belong to this plan; the cache updates it on every put

    @property
    def seat(self) -> int | None:
        """The plan's seat in the `PlanRegistry`; None if it has none."""
        ...

    @property
    def taken(self) -> int:
        """Bytes of the plan's blocks that are cached, in flight, or being stored now."""
        ...

    def given_up(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield blocks to evict, the one with the furthest next use first. A yielded block counts as removed."""
        ...


class PlanRegistry:
    """The seats of one cache. If locks do not work across processes, only this process's plans are counted."""

    def __init__(self, locks: ByteRangeLocks) -> None:
        self._locks = locks
        self._ours: set[int] = set()  # Invariant: the seats that this process holds

    def take(self) -> int | None:
        """Take a free seat and return its number; None if all are taken."""
        for seat in range(_MOST):
            if self._locks.take(_FIRST + seat):
                self._ours.add(seat)
                return seat
        return None

    def leave(self, seat: int) -> None:
        """Free a seat that `take` returned."""
        self._ours.discard(seat)
        self._locks.drop(_FIRST + seat)

    def others(self, seat: int | None) -> list[int]:
        """Return the seats that are taken, except `seat`."""
        is_shared = self._locks.works_across_processes
        return [
            each
            for each in range(_MOST)
            if each != seat and (self._locks.is_held(_FIRST + each) if is_shared else each in self._ours)
        ]
