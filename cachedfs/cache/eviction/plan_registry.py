"""Which plans are at work on this machine, so that those who share one bound know what share of it is theirs.

A seat is a claim on one of a few numbers: it is free again as soon as its process is gone, however it went.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import ObjectKey

__all__ = ["FutureUseSource", "PlanRegistry"]

_FIRST = 0x3243F6A8885A3080  # of the numbers: no block's but by a chance of 2^-58
_MOST = 16  # seats; plans beyond them count as one


class FutureUseSource(Protocol):
    """Somebody who knows when blocks are used next: what the cache asks when room is needed for one of them."""

    share: int  # bytes of the cache that are its own; the cache keeps it up to date

    @property
    def seat(self) -> int | None: ...

    @property
    def taken(self) -> int:
        """Bytes of its blocks that are here, those included that are to be put now."""
        ...

    def given_up(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield blocks to remove, the one that is used furthest ahead first; each counts as gone once it is taken."""
        ...


class PlanRegistry:
    """The seats of one cache. Without claims that reach other processes, each process sees its own plans alone."""

    def __init__(self, locks: ByteRangeLocks) -> None:
        self._locks = locks
        self._ours: set[int] = set()  # Invariant: seats that were taken here and not left

    def take(self) -> int | None:
        """Take a free seat; None when there is none."""
        for seat in range(_MOST):
            if self._locks.take(_FIRST + seat):
                self._ours.add(seat)
                return seat
        return None

    def leave(self, seat: int) -> None:
        self._ours.discard(seat)
        self._locks.drop(_FIRST + seat)

    def others(self, seat: int | None) -> list[int]:
        """Return the seats that are taken, but for `seat`."""
        is_shared = self._locks.works_across_processes
        return [
            each
            for each in range(_MOST)
            if each != seat and (self._locks.is_held(_FIRST + each) if is_shared else each in self._ours)
        ]
