"""Where the readers of a known order are: which of its uses were made, told by the touches of blocks. Pure.

A touch says that a block was used, and not for which of its uses. It counts for the first one that no touch counted for,
wherever that is: several read at once, and what is before the furthest use that was made need not be over. So a slow
reader's use is never taken for the next one of its block, which may be just ahead of the fast ones, as at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from cachedfs.plan.schedule import Schedule

__all__ = ["LOOK", "Reading"]

LOOK = 64  # uses that are looked at at a time

B = TypeVar("B", bound=Hashable)


class Reading(Generic[B]):
    """The uses of one schedule, each made once its block was touched since the use before it.

    `clock_of` returns the clock of a block's last touch, None where none is known; one that moved is a touch. What nobody comes
    back for is passed when the plan's reader is further by as many uses as blocks fit.
    """

    def __init__(self, schedule: Schedule[B], clock_of: Callable[[B], int | None]) -> None:
        self._schedule, self._clock_of = schedule, clock_of
        # When each block was touched last, as far as that was counted as a use.
        self._clocks: dict[B, int | None] = {}
        self._before: set[B] = (
            set()
        )  # blocks whose last touch was before their uses were known: of which it was, nobody knows
        self._furthest = 0  # one behind the last use that was made
        self._reached = 0  # about where the plan's reader is
        self._next = 0  # where the look at all uses, some at a time, goes on

    def comes(self, block: B) -> None:
        """Uses of a block are about to be known; what was read of it before counts for none of them."""
        if block not in self._clocks:
            clock = self._clocks[block] = self._clock_of(block)
            if clock is not None:
                self._before.add(block)

    def counted(self, blocks: Iterable[B]) -> None:
        """All touches of these blocks until now are of uses that are over."""
        for block in blocks:
            self._count(block, self._clock_of(block))

    def _count(self, block: B, clock: int | None) -> None:
        self._clocks[block] = clock
        self._before.discard(block)

    def pass_to(self, position: int) -> None:
        """All uses before `position` are over."""
        schedule = self._schedule
        passed = [block for _, block in schedule.unmade(schedule.position, position - schedule.position)]
        schedule.read_up_to(position)
        self.counted(passed)

    def reached(self, position: int) -> None:
        """Look what was read: the plan got to `position`, and its reader to about there, or further."""
        schedule = self._schedule
        self._reached = position
        self._furthest = max(self._furthest, position)
        for first in (schedule.position, self._furthest - LOOK // 2, self._next):
            self._look(max(schedule.position, first))
        is_round = self._next >= self._furthest + LOOK
        self._next = schedule.position if is_round else max(self._next, schedule.position) + LOOK
        self.pass_to(position - schedule.n_fit)
        if len(self._clocks) > 2 * len(schedule) + LOOK:
            self._clocks = {block: clock for block, clock in self._clocks.items() if block in schedule}
            self._before.intersection_update(self._clocks)

    def _look(self, first: int) -> None:
        """Look which of some uses, from a position on, were made."""
        for at, block in list(self._schedule.unmade(first, LOOK)):
            if self.note(block):
                self._furthest = max(self._furthest, at + 1)

    def note(self, block: B) -> bool:
        """Count the next use of a block as made, if it was touched since that before; return whether it was."""
        if is_read := self.was_read(block):
            self._schedule.read(block)
        return is_read

    def was_read(self, block: B) -> bool:
        """Return whether a block was read since this was asked last: then its next use was made."""
        clock = self._clock_of(block)
        if clock is None or block not in self._clocks or clock == self._clocks[block]:
            return False
        if self._schedule.next_use(block) >= self._reached + self._schedule.n_fit + LOOK:
            return False  # its reader is far ahead, or it was an earlier use, which was passed: to be seen when the plan is near
        self._count(block, clock)
        return True

    def is_made(self, block: B, position: int) -> bool:
        """Return whether the use of a block at this position was made."""
        self.note(block)
        return self._schedule.is_made(block, position)

    def may_be_at(self, block: B, position: int) -> bool:
        """Return whether a block that was read may have been so for its use at this position: for none before, as far as is known."""
        if self._schedule.next_use(block) != position or block not in self._clocks:
            return self._schedule.is_made(block, position)
        return block in self._before or self._clock_of(block) != self._clocks[block]
