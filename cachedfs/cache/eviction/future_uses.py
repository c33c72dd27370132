"""The future uses of one prefetch plan: which are over, and which blocks to evict for the next ones.

The shared access statistics say that a block was accessed, not for which of its uses. `UseTracker` counts an access
for the block's first use that is not over: several threads read at once, and a slow one may be behind the others. At
the end of an epoch its read must not count as the block's next use, which may be just ahead of the fast threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from cachedfs.cache.block_cache import BlockCache
from cachedfs.cache.block_file import file_size
from cachedfs.cache.eviction.schedule import NEVER, EvictionSchedule, FutureAccess
from cachedfs.common.types import CacheBounds, ObjectKey

__all__ = ["LOOK", "Block", "FutureUses", "Use", "UseTracker", "order_of"]


LOOK = 64  # uses that are checked at a time
_PACE_OVER = 4 * LOOK  # uses over which the accesses per use are averaged

_MASK32 = 0xFFFFFFFF  # the access clock has 32 bits

B = TypeVar("B", bound=Hashable)

# Passing blocks take at most 1/192 of the bytes of the known uses, or two blocks. The hit ratio drops by that share.
PASSING = 192
Block = tuple[ObjectKey, int]
Use = tuple[ObjectKey, int, int]  # one read of a block: object version, block index, bytes of data


class _Use(NamedTuple):
    """The last use of a block that is over: the access clock then, and its position in the order if known."""

    clock: int | None
    position: int | None = None


class _Pace:
    """The mean number of accesses per use, including accesses by others to this cache; at least 1."""

    def __init__(self) -> None:
        self.touches_per_use = 1.0
        self._clock: int | None = None  # of the newest access seen
        self._since = (0, 0)  # the clock and the furthest use when the current average began

    def saw(self, clock: int, furthest: int) -> None:
        """Record an access at `clock`, seen when the fastest reader was at position `furthest`."""
        if self._clock is None:
            self._clock, self._since = clock, (clock, furthest)
        elif _gap(clock, self._clock) <= _MASK32 // 2:
            self._clock = clock
        n_uses = furthest - self._since[1]
        if n_uses >= _PACE_OVER:
            self.touches_per_use = max(1.0, _gap(self._clock, self._since[0]) / n_uses)
            self._since = (self._clock, furthest)


def _gap(clock: int, before: int) -> int:
    """Return the number of accesses between two clock values, which wrap around."""
    return clock - before & _MASK32


class UseTracker(Generic[B]):
    """Track which uses of a schedule are over, judging by the last access of each block.

    `clock_of` returns the access clock at a block's last access, None if there is none on record. A changed value means
    an access. One use may access a block several times, range by range. An access therefore belongs to the last use if
    it comes before half of the expected number of accesses up to the next use. Uses that are never made are skipped
    once the plan's reader is ahead of them by as many uses as blocks fit into the cache.
    """

    def __init__(self, schedule: EvictionSchedule[B], clock_of: Callable[[B], int | None]) -> None:
        self._schedule, self._clock_of = schedule, clock_of
        self._uses: dict[B, _Use] = {}
        self._pace = _Pace()
        # Blocks whose last access came before their uses were known, so it cannot be assigned to a use.
        self._before: set[B] = set()
        self._furthest = 0  # one more than the position of the furthest use made
        self._reached = 0  # about where the plan's reader is
        self._next = 0  # where the next partial check of all uses starts

    def comes(self, block: B) -> None:
        """Prepare for new uses of a block: accesses up to now count for none of them. Call before `extend`."""
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
        """Mark all uses before `position` as over."""
        schedule = self._schedule
        passed = list(schedule.unmade(schedule.position, position - schedule.position))
        schedule.read_up_to(position)
        for at, block in passed:
            self._count(block, _Use(self._clock_of(block), at))

    def reached(self, position: int) -> None:
        """Check which uses were made; the plan's reader is at about `position`, or further."""
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
        """Check which of the `LOOK` uses from position `first` on were made."""
        for at, block in list(self._schedule.unmade(first, LOOK)):
            if self.note(block):
                self._furthest = max(self._furthest, at + 1)

    def note(self, block: B) -> bool:
        """Mark the next use of a block as made if the block was accessed since the last use; return whether it was."""
        if is_read := self.was_read(block):
            self._schedule.read(block)
        return is_read

    def was_read(self, block: B) -> bool:
        """Return whether the next use of a block was made, judging by a new access since the last call.

        The caller must report a True result to the schedule: the access counts for that use from now on.
        """
        clock, next_use = self._touched(block), self._schedule.next_use(block)
        if clock is None:
            return False
        self._pace.saw(clock, self._furthest)
        if self._is_again(block, clock):
            self._count(block, self._uses[block]._replace(clock=clock))
            return False
        if next_use >= self._reached + self._schedule.n_fit + LOOK:
            return False  # a reader far ahead, or a use marked as over before: checked again when the plan is near
        self._count(block, _Use(clock, next_use))
        return True

    def _touched(self, block: B) -> int | None:
        """Return the clock of a block's last access if it was not counted for a use yet, else None."""
        clock, use = self._clock_of(block), self._uses.get(block)
        return None if use is None or clock == use.clock else clock

    def _is_again(self, block: B, clock: int) -> bool:
        """Return whether an access is so soon after the block's last use that it belongs to that use."""
        use, next_use = self._uses[block], self._schedule.next_use(block)
        if use.clock is None or use.position is None:
            return False
        return 2 * _gap(clock, use.clock) < self._pace.touches_per_use * (next_use - use.position)

    def is_made(self, block: B, position: int) -> bool:
        """Return whether the use of a block at this position is over."""
        self.note(block)
        return self._schedule.is_made(block, position)

    def may_be_at(self, block: B, position: int) -> bool:
        """Return whether a block's last access may belong to its use at this position and to no earlier one."""
        if self._schedule.next_use(block) != position or block not in self._uses:
            return self._schedule.is_made(block, position)
        clock = self._touched(block)
        return block in self._before or (clock is not None and not self._is_again(block, clock))


class FutureUses:
    """The known order of one prefetch plan in one cache, with its eviction schedule. Safe to use from any thread.

    `horizon`: the most uses known ahead. `window`: about how many bytes will be ahead of the reader. The plan runner
    calls `extend` while there is room within the horizon, `reached` when its reader may have moved on, and `ask` before
    it requests a block. It reports blocks that are cached already as `stored`, and failed or missing blocks as `lost`.
    The runtime reports all fetched blocks, requested by the plan or not, to every object in `runtime.future_uses`. The
    cache writer evicts the blocks that `given_up` yields. Call `close` when the plan ends.
    """

    def __init__(self, cache: BlockCache, bounds: CacheBounds, *, horizon: int, window: int) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._schedule: EvictionSchedule[Block] = EvictionSchedule(horizon=horizon)
        self._window, self._largest = window, 0
        self._reading = UseTracker(self._schedule, lambda block: cache.last_use(*block))
        self.plan_slot = cache.take_plan_slot()
        self.share = cache.share(self.plan_slot, bounds)

    def close(self) -> None:
        """Free the plan slot, so that its share of the cache goes to the other plans."""
        if self.plan_slot is not None:
            self._cache.leave_plan_slot(self.plan_slot)
            self.plan_slot = None

    @property
    def share(self) -> int:
        """The bytes of the cache that belong to this plan, as of the last put."""
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
        """The most bytes to store in one batch: with more, passing blocks would displace blocks that should stay."""
        return self._schedule.passing or self._share

    @property
    def taken(self) -> int:
        """The bytes of the plan's blocks that are cached or in flight."""
        with self._lock:
            return self._schedule.taken

    @property
    def is_tight(self) -> bool:
        """True if the known uses need more than half of the plan's share, so that evictions come soon."""
        return 2 * self._schedule.size > self._share

    @property
    def position(self) -> int:
        """The position before which all uses are over."""
        return self._schedule.position

    @property
    def known(self) -> int:
        """The position up to which the order is known."""
        return self._schedule.known

    @property
    def room(self) -> int:
        """The number of further uses that `extend` would take."""
        return self._schedule.room

    def __contains__(self, block: object) -> bool:
        return block in self._schedule

    def extend(self, uses: Iterable[Use]) -> int:
        """Append uses to the known order, up to the horizon; return how many were taken from the iterable."""
        taken = islice(uses, self._schedule.room)
        # Before taking the lock, because iterating may be slow.
        accesses = [FutureAccess((key, index), file_size(key, size)) for key, index, size in taken]
        with self._lock:
            for block, size in accesses:
                self._largest = max(self._largest, size)
                self._reading.comes(block)
            return self._schedule.extend(accesses)

    def reached(self, position: int) -> None:
        """Check which uses were made; the plan's reader is at about `position`, or further."""
        with self._lock:
            self._reading.reached(position)

    def is_made(self, block: Block, position: int) -> bool:
        """Return whether the use of a block at this position is over, as when the reader overtook the plan."""
        with self._lock:
            return self._reading.is_made(block, position)

    def may_be_at(self, block: Block, position: int) -> bool:
        """Return whether a block's last access may belong to its use at this position and to no earlier one."""
        with self._lock:
            return self._reading.may_be_at(block, position)

    def ask(self, block: Block, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be requested now, and if so count it as in flight.

        `is_awaited`: a reader waits for the block, so the answer is always True.
        """
        with self._lock:
            return self._schedule.ask(block, is_awaited=is_awaited)

    def stored(self, blocks: Iterable[Block]) -> None:
        """Record that blocks are cached. Blocks that are not part of this plan are ignored."""
        with self._lock:
            for block in blocks:
                # The reader that requested a block may have read it before it was stored.
                self._schedule.stored(block, is_read=self._reading.was_read(block))

    def lost(self, blocks: Iterable[Block]) -> None:
        """Record that blocks are not cached."""
        with self._lock:
            for block in blocks:
                self._schedule.lost(block)

    def given_up(self) -> Iterator[Block]:
        """Yield blocks to evict, furthest next use first. A yielded block counts as removed."""
        while True:
            with self._lock:
                block = next(self._schedule.given_up(), None)
            if block is None:
                return
            yield block


def order_of(orders: Sequence[FutureUses], key: ObjectKey, index: int) -> FutureUses | None:
    """Return the first of `orders` that contains a block; None if none does."""
    return next((order for order in orders if (key, index) in order), None)
