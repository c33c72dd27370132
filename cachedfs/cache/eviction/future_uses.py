"""Where the readers of a known order are: which of its uses were made, told by the touches of blocks. Pure.

A touch says that a block was used, and not for which of its uses. It counts for the first one that no touch counted for,
wherever that is: several read at once, and what is before the furthest use that was made need not be over. So a slow
reader's use is never taken for the next one of its block, which may be just ahead of the fast ones, as at the end of an epoch.

One use may touch a block often: one range of it after the other, and others are read between. The clock counts the touches
of all blocks, so that it tells about how far the readers got since the touch that counted last: a touch that comes before
half the way to the next use is one more of the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from cachedfs.cache.block_cache import BlockCache
from cachedfs.cache.eviction.schedule import NEVER, EvictionSchedule, FutureAccess
from cachedfs.common.types import CacheBounds, ObjectKey

__all__ = ["Block", "LOOK", "FutureUses", "UseTracker", "Use", "order_of"]


LOOK = 64  # uses that are looked at at a time
_PACE_OVER = 4 * LOOK  # uses over which the touches of each are counted

_MASK32 = 0xFFFFFFFF  # the clock has 32 bits

B = TypeVar("B", bound=Hashable)


class _Use(NamedTuple):
    """The last use of a block that counted, or was passed: its touch, and its position where that is known."""

    clock: int | None
    position: int | None = None


class _Pace:
    """How many touches there are for each use, those of everybody else in this cache included: one at least."""

    def __init__(self) -> None:
        self.touches_per_use = 1.0
        self._clock: int | None = None  # of the newest touch that was seen
        self._since = (0, 0)  # the clock and the furthest use when the count began

    def saw(self, clock: int, furthest: int) -> None:
        """Note a touch that was seen when the readers had got to `furthest`."""
        if self._clock is None:
            self._clock, self._since = clock, (clock, furthest)
        elif _gap(clock, self._clock) <= _MASK32 // 2:
            self._clock = clock
        n_uses = furthest - self._since[1]
        if n_uses >= _PACE_OVER:
            self.touches_per_use = max(1.0, _gap(self._clock, self._since[0]) / n_uses)
            self._since = (self._clock, furthest)


def _gap(clock: int, before: int) -> int:
    """Return the touches from one clock to another."""
    return clock - before & _MASK32


class UseTracker(Generic[B]):
    """The uses of one schedule, each made once its block was touched since the use before it.

    `clock_of` returns the clock of a block's last touch, None where none is known; one that moved is a touch. What nobody comes
    back for is passed when the plan's reader is further by as many uses as blocks fit.
    """

    def __init__(self, schedule: EvictionSchedule[B], clock_of: Callable[[B], int | None]) -> None:
        self._schedule, self._clock_of = schedule, clock_of
        self._uses: dict[B, _Use] = {}
        self._pace = _Pace()
        # Blocks whose last touch was before their uses were known: of which it was, nobody knows.
        self._before: set[B] = set()
        self._furthest = 0  # one behind the last use that was made
        self._reached = 0  # about where the plan's reader is
        self._next = 0  # where the look at all uses, some at a time, goes on

    def comes(self, block: B) -> None:
        """Uses of a block are about to be known; what was read of it before counts for none of them."""
        use = self._uses.get(block, _Use(None))
        if block not in self._uses or self._schedule.next_use(block) == NEVER:
            clock = self._clock_of(block)
            if clock is not None and clock != use.clock:
                self._before.add(block)
            self._uses[block] = use._replace(clock=clock)

    def _count(self, block: B, use: _Use) -> None:
        self._uses[block] = use
        self._before.discard(block)

    def pass_to(self, position: int) -> None:
        """All uses before `position` are over."""
        schedule = self._schedule
        passed = list(schedule.unmade(schedule.position, position - schedule.position))
        schedule.read_up_to(position)
        for at, block in passed:
            self._count(block, _Use(self._clock_of(block), at))

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
        if len(self._uses) > 2 * len(schedule) + LOOK:
            self._uses = {block: use for block, use in self._uses.items() if block in schedule}
            self._before.intersection_update(self._uses)

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
        clock, next_use = self._touched(block), self._schedule.next_use(block)
        if clock is None:
            return False
        self._pace.saw(clock, self._furthest)
        if self._is_again(block, clock):
            self._count(block, self._uses[block]._replace(clock=clock))
            return False
        if next_use >= self._reached + self._schedule.n_fit + LOOK:
            return False  # its reader is far ahead, or it was an earlier use, which was passed: to be seen when the plan is near
        self._count(block, _Use(clock, next_use))
        return True

    def _touched(self, block: B) -> int | None:
        """Return the clock of a block's last touch, if no use counted for it yet."""
        clock, use = self._clock_of(block), self._uses.get(block)
        return None if use is None or clock == use.clock else clock

    def _is_again(self, block: B, clock: int) -> bool:
        """Return whether this touch is too soon after the last use of its block to be of the next one."""
        use, next_use = self._uses[block], self._schedule.next_use(block)
        if use.clock is None or use.position is None:
            return False
        return 2 * _gap(clock, use.clock) < self._pace.touches_per_use * (next_use - use.position)

    def is_made(self, block: B, position: int) -> bool:
        """Return whether the use of a block at this position was made."""
        self.note(block)
        return self._schedule.is_made(block, position)

    def may_be_at(self, block: B, position: int) -> bool:
        """Return whether a block that was read may have been so for its use at this position: for none before, as far as is known."""
        if self._schedule.next_use(block) != position or block not in self._uses:
            return self._schedule.is_made(block, position)
        clock = self._touched(block)
        return block in self._before or (clock is not None and not self._is_again(block, clock))


# What is read once takes at most this part of all that is read, or two blocks: so much less of it is hit in each epoch.
PASSING = 192

Block = tuple[ObjectKey, int]


Use = tuple[ObjectKey, int, int]  # one read of a block: its index, and the bytes that it has


class FutureUses:
    """The order of one plan in one cache, for any thread: the loop moves it on while the writer asks what to remove.

    Who runs the plan calls `extend` when there is room within the horizon, `reached` when its reader may have got further, and
    `ask` before it asks for a block; then it looks whether that is here (`stored`), and else fetches it. Of what is fetched the
    runtime reports the end by itself, for all orders in `runtime.future_uses`, whoever asked for it. `lost` is for what did not come,
    and for what the runner finds missing of what is to be read next. `close` when the plan ends.

    Which uses were made is told by touches: see `Reading`.

    `window`: about the bytes that will be ahead of the reader.
    """

    def __init__(self, cache: BlockCache, bounds: CacheBounds, *, horizon: int, window: int) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._schedule: EvictionSchedule[Block] = EvictionSchedule(horizon=horizon)
        self._window, self._largest = window, 0
        self._reading = UseTracker(self._schedule, lambda block: cache.last_use(*block))
        self.seat = cache.take_seat()
        self.share = cache.share(self.seat, bounds)

    def close(self) -> None:
        """Give the seat back: the room of this plan is that of others now."""
        if self.seat is not None:
            self._cache.leave_seat(self.seat)
            self.seat = None

    @property
    def share(self) -> int:
        """The bytes of the cache that are this plan's own, as of the last put."""
        return self._share

    @share.setter
    def share(self, size: int) -> None:
        self._share = size
        with self._lock:
            passing = max(self._schedule.size // PASSING, 2 * self._largest)
            self._schedule.passing = passing = min(passing, self._window, size // 4)
            self._schedule.limit = size - passing

    @property
    def at_once(self) -> int:
        """The bytes that may be stored at once: more of what only passes would take the place of what stays."""
        return self._schedule.passing or self._share

    @property
    def taken(self) -> int:
        """The bytes that its blocks take in the cache, those under way included."""
        with self._lock:
            return self._schedule.taken

    @property
    def is_tight(self) -> bool:
        """Whether what is known to be read takes more than half of the room: soon something has to go."""
        return 2 * self._schedule.size > self._share

    @property
    def position(self) -> int:
        return self._schedule.position

    @property
    def known(self) -> int:
        return self._schedule.known

    @property
    def room(self) -> int:
        """How many further uses `extend` would take."""
        return self._schedule.room

    def __contains__(self, block: object) -> bool:
        return block in self._schedule

    def extend(self, uses: Iterable[Use]) -> int:
        """Take as many further uses as the horizon allows, not one more; return how many these were."""
        size_of, room = self._cache.size_on_disk, self._schedule.room
        # Before the lock is taken: where they come from may take its time.
        accesses = [FutureAccess((key, index), size_of(key, size)) for key, index, size in islice(uses, room)]
        with self._lock:
            for block, size in accesses:
                self._largest = max(self._largest, size)
                self._reading.comes(block)
            return self._schedule.extend(accesses)

    def reached(self, position: int) -> None:
        """Look what was read: the plan got to `position`, and its reader to about there, or further."""
        with self._lock:
            self._reading.reached(position)

    def is_made(self, block: Block, position: int) -> bool:
        """Return whether the use of a block at this position was made: its reader was there first."""
        with self._lock:
            return self._reading.is_made(block, position)

    def may_be_at(self, block: Block, position: int) -> bool:
        """Return whether a block that was read may have been so for its use at this position, however far that is from others."""
        with self._lock:
            return self._reading.may_be_at(block, position)

    def ask(self, block: Block, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be asked for now, as one `is_awaited` may; it counts as under way then."""
        with self._lock:
            return self._schedule.ask(block, is_awaited=is_awaited)

    def stored(self, blocks: Iterable[Block]) -> None:
        """Note that blocks are here; those that are not of this plan are passed over."""
        with self._lock:
            for block in blocks:
                # Perhaps by who asked for it.
                self._schedule.stored(block, is_read=self._reading.was_read(block))

    def lost(self, blocks: Iterable[Block]) -> None:
        """Note that blocks are not here."""
        with self._lock:
            for block in blocks:
                self._schedule.lost(block)

    def given_up(self) -> Iterator[Block]:
        """Yield what to remove, furthest use first: see `Planned`."""
        while True:
            with self._lock:
                block = next(self._schedule.given_up(), None)
            if block is None:
                return
            yield block


def order_of(orders: Sequence[FutureUses], key: ObjectKey, index: int) -> FutureUses | None:
    """Return the first order that a block is in."""
    return next((order for order in orders if (key, index) in order), None)
