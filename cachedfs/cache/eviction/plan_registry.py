"""Registry of the active prefetch plans on this machine, used to divide the cache size among them.

Each plan holds a plan slot: a byte-range lock on one of 16 numbers. The kernel releases it when the process dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import ObjectKey

__all__ = ["FutureUseSource", "PlanRegistry"]

_FIRST = (
    0x3243F6A8885A3080  # lock number of plan slot 0; a block has one of these with a probability of 2^-58
)
_MOST = 16  # plan slots; further plans get none, and the others do not count them


class FutureUseSource(Protocol):
    """Interface of a plan that knows when its blocks are used next and can name blocks to evict."""

    share: int  # bytes of the cache that belong to this plan; the cache updates it on every put

    @property
    def plan_slot(self) -> int | None:
        """The slot in the `PlanRegistry`; None if it has none."""
        ...

    @property
    def taken(self) -> int:
        """Bytes of the plan's blocks that are cached, in flight, or being stored now."""
        ...

    def given_up(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield blocks to evict, the one with the furthest next use first. A yielded block counts as removed."""
        ...


class PlanRegistry:
    """The plan slots of one cache. If locks do not work across processes, only this process's plans are counted."""

    def __init__(self, locks: ByteRangeLocks) -> None:
        self._locks = locks
        self._ours: set[int] = set()  # Invariant: the plan slots that this process holds

    def take(self) -> int | None:
        """Take a free plan slot and return its number; None if all are taken."""
        for plan_slot in range(_MOST):
            if self._locks.take(_FIRST + plan_slot):
                self._ours.add(plan_slot)
                return plan_slot
        return None

    def leave(self, plan_slot: int) -> None:
        """Free a plan slot that `take` returned."""
        self._ours.discard(plan_slot)
        self._locks.release(_FIRST + plan_slot)

    def others(self, plan_slot: int | None) -> list[int]:
        """Return the plan slots that are taken, except `plan_slot`."""
        is_shared = self._locks.works_across_processes
        return [
            each
            for each in range(_MOST)
            if each != plan_slot and (self._locks.is_held(_FIRST + each) if is_shared else each in self._ours)
        ]
