"""The future uses of one prefetch plan: where its reader is, what is ahead of it, and which blocks to evict.

The shared access statistics say when a block was accessed last, in any process, but not for which of its uses. Several
threads read at once: at the end of an epoch, the read of a slow thread must not count as the block's next use, which
may be just ahead of the fast threads. So an access counts for the next use of a block only if the readers have come most
of the way there since its last use.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from cachedfs.cache.block_file import file_size
from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.eviction.reader_path import ReaderPath
from cachedfs.cache.eviction.schedule import EvictionSchedule
from cachedfs.common.types import CacheBounds, ObjectKey

__all__ = ["Block", "FutureUses", "Use", "order_of", "position_of"]

HORIZON = 1 << 18  # most uses known at a time; they take 70 to 130 MB of memory
LOOK = 128  # uses that are checked at a time
MOST_OF_THE_WAY = 0.75  # between two uses of a block; with a half, slow threads counted for the next use
STALL_S = 1.0  # without a read of the blocks ahead; then the reader may be beyond them
# Passing blocks take at most 1/192 of the bytes of the known uses, or two blocks. The hit ratio drops by that share.
PASSING = 192
PASSING_BYTES = 64 << 20  # most bytes assumed in flight, with or without a window
KEPT = 0.9  # share of the plan's bytes that may be ahead of the reader; of those that stayed, when some were evicted

_POSITION = attrgetter("position")

Block = tuple[ObjectKey, int]


class Use(NamedTuple):
    """One use of a block: its position in the plan, see `position_of`, and its bytes of data."""

    position: int
    block: Block
    size: int


@dataclass(slots=True)
class _Use:
    position: int
    block: Block
    size: int
    is_asked: bool = False  # the plan requested the block for this use, or found it cached
    is_made: bool = False


@dataclass(slots=True)
class _Access:
    """The last access of a block that was counted for a use, with the number of that use, and the reader's then.

    Uses are numbered in their order. Without a use, the access is just the last one before the uses were known.
    """

    clock: int | None
    use_number: int | None = None
    reader_number: int = 0


def position_of(number: int, index: int) -> int:
    """Return the position of block `index` of a plan's object `number`."""
    return number << 32 | index


class FutureUses:
    """The known uses of one prefetch plan in one cache, with its eviction schedule. Safe to use from any thread.

    `since`: the access clock when the plan began. `window`: the most bytes that it keeps ahead of its reader.

    The plan reports the uses that it knows with `add`, calls `ask` before it requests a block, and `look` to find out
    what was read. It reports blocks that are cached already as `found`, and failed ones as `lost`. The runtime reports
    all fetched blocks, requested by the plan or not, to every object in `runtime.future_uses`. The cache writer evicts
    the blocks that `given_up` yields. Call `close` when the plan ends.
    """

    def __init__(
        self, cache: BlockStore, bounds: CacheBounds, *, since: int | None = None, window: float = math.inf
    ) -> None:
        self._cache, self._bounds, self._window = cache, bounds, window
        self._lock = threading.Lock()
        self._schedule: EvictionSchedule[Block] = EvictionSchedule()
        self._largest = 0
        self._uses: list[_Use] = []  # sorted by position; those that are over for certain are removed
        self._n_removed = 0
        self._accesses: dict[Block, _Access] = {}  # of all blocks with known uses, and perhaps others
        self.reader = 0  # the position after the furthest use that was made
        self._asked = 0  # the position after the furthest use that was asked for
        self.ahead = 0  # bytes that were asked for, for uses from `reader` on that are not made
        self._kept = math.inf  # bytes that turned out to stay cached until they are read
        self._untracked = 0  # bytes asked for beyond the horizon
        self._path = ReaderPath(cache.clock(bounds) if since is None else since)
        self._moved_at = time.monotonic()  # when the reader was seen to move
        self._turn = 0  # where the next partial check of all uses starts
        self.plan_slot = cache.take_plan_slot()
        self.share = cache.share(self.plan_slot, bounds)

    def close(self) -> None:
        """Free the plan slot, so that its share of the cache goes to the other plans."""
        if self.plan_slot is not None:
            self._cache.leave_plan_slot(self.plan_slot)
            self.plan_slot = None

    # The cache writer and the eviction policy

    @property
    def share(self) -> int:
        """The bytes of the cache that belong to this plan, as of the last put."""
        return self._share

    @share.setter
    def share(self, size: int) -> None:
        self._share = size
        with self._lock:
            passing = max(self._schedule.size // PASSING, 2 * self._largest)
            passing = int(min(passing, self._window, PASSING_BYTES, size // 4))
            self._schedule.passing, self._schedule.limit = passing, size - passing

    @property
    def at_once(self) -> int:
        """The most bytes to store in one batch: with more, passing blocks would displace blocks that should stay."""
        return self._schedule.passing or self._share

    @property
    def taken(self) -> int:
        """The bytes of the plan's blocks that are cached or in flight."""
        with self._lock:
            return self._schedule.taken

    def __contains__(self, block: object) -> bool:
        return block in self._schedule

    def stored(self, blocks: Iterable[Block]) -> None:
        """Record that blocks are cached. Blocks that are not part of this plan are ignored."""
        with self._lock:
            for block in blocks:
                # The reader that requested a block may have read it before it was stored.
                if block in self._schedule:
                    use = self._use_at(self._schedule.next_use(block))
                    is_read = use is not None and self._was_read(use)
                    self._schedule.stored(block, is_read=is_read)
                    if use is not None and is_read:
                        self._make(use)

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

    # The plan

    @property
    def is_tight(self) -> bool:
        """True if the known uses need more than half of the plan's share, so that evictions come soon."""
        return 2 * self._schedule.size > self._share

    @property
    def has_window(self) -> bool:
        """True if the plan keeps no more than a requested window ahead of its reader."""
        return self._window < math.inf

    @property
    def room(self) -> int:
        """The number of further uses that `add` would take."""
        return HORIZON - len(self._uses)

    @property
    def limit(self) -> float:
        """The most bytes that may be ahead of the reader now."""
        # While somebody reads, fetching early takes the place of blocks that are used again sooner.
        is_read = self.has_window or self.reader > 0
        most = KEPT * self._share / (2 if is_read else 1)
        return min(self._window, self._kept, most)

    @property
    def is_short(self) -> bool:
        """True when nothing is ahead, or less than half of a requested window."""
        return not self.ahead or (self.has_window and self.ahead < self.limit / 2)

    def add(self, uses: Iterable[Use]) -> None:
        """Add known uses, up to the horizon."""
        with self._lock:
            for position, block, data_size in uses:
                if len(self._uses) >= HORIZON:
                    return
                size = file_size(block[0], data_size)  # in the cache
                self._largest = max(self._largest, size)
                use = _Use(position, block, data_size)
                if self._uses and position < self._uses[-1].position:
                    insort(self._uses, use, key=_POSITION)
                else:
                    self._uses.append(use)
                self._schedule.add(block, position, size)
                if block not in self._accesses:
                    # Later accesses are of later uses, which the plan did not know yet.
                    clock = self._clock_of(block)
                    is_recent = clock is not None and self._path.is_later(clock)
                    self._accesses[block] = _Access(None if is_recent else clock)

    def remove(self, first: int, stop: int) -> None:
        """Remove the uses from position `first` to `stop`: the plan gave up their object."""
        with self._lock:
            start, end = self._index(first), self._index(stop)
            for use in self._uses[start:end]:
                self._count_made(use)
                self._schedule.read(use.block, use.position)
            del self._uses[start:end]

    def reserve(self, size: int) -> None:
        """Count bytes as ahead that are requested before their blocks are known; a negative size undoes it."""
        with self._lock:
            self.ahead += size

    def ask(self, use: Use, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be requested for a use now, or has to wait for the reader.

        Counts the block as ahead of the reader if so. `is_awaited`: the answer is True in any case.
        """
        position, block, size = use
        with self._lock:
            known = self._use_at(position)
            if known is None:
                if position < self.reader:
                    return True
                if not self.ahead:
                    self._untracked = 0
                if not is_awaited and self._schedule.taken + self._untracked + size > KEPT * self._share:
                    return False
                self._untracked += size
                return True
            if known.is_asked or known.is_made:
                return True
            if not self._schedule.ask(block, is_awaited=is_awaited):
                return False
            self._count_asked(known)
            return True

    def found(self, use: Use) -> None:
        """Count a block as ahead of the reader that is cached already."""
        with self._lock:
            known = self._use_at(use.position)
            if known is not None and not (known.is_asked or known.is_made):
                self._schedule.ask(use.block)  # it stays until then, if it should
                self._count_asked(known)
            self._schedule.stored(use.block)

    def _count_asked(self, use: _Use) -> None:
        use.is_asked, self._asked = True, max(self._asked, use.position + 1)
        if use.position >= self.reader:
            self.ahead += use.size

    def is_over(self, position: int) -> bool:
        """Return whether the reader has passed a position, or made the use there."""
        with self._lock:
            use = self._use_at(position)
            if use is not None and self._was_read(use):
                self._make(use)
            return position < self.reader

    def look(self, *, is_held: bool) -> bool:
        """Check which uses were made; return whether the reader moved. `is_held`: the plan waits for that."""
        with self._lock:
            now, before = time.monotonic(), self.reader
            at = self._index(self.reader)
            while self._look(at, at + LOOK):
                at = self._index(self.reader)
            is_stalled = is_held and now - self._moved_at >= STALL_S
            n = len(self._uses) if is_stalled else self._index(self._asked)
            self._turn = self._turn if self._turn < n else 0
            self._look(self._turn, min(n, self._turn + LOOK))
            self._turn += LOOK
            if self.reader > before:
                self._moved_at = now
            self._remove_passed()
            return self.reader > before

    def _look(self, first: int, stop: int) -> bool:
        """Check which of these uses were made; return whether any was."""
        made = [use for use in self._uses[first:stop] if self._was_read(use)]
        for use in made:
            self._make(use)
        return bool(made)

    def _was_read(self, use: _Use) -> bool:
        """Return whether there was an access to a block since the last call, and it belongs to this use."""
        if use.is_made or self._schedule.next_use(use.block) != use.position:
            return False
        access, clock = self._accesses[use.block], self._clock_of(use.block)
        if clock is None or clock == access.clock:
            return False
        access.clock = clock
        if access.use_number is None:
            return True
        # It belongs to this use, and not to the last one, if the readers have come most of the way between them.
        n_read = self._path.at(clock) - access.reader_number
        return n_read > MOST_OF_THE_WAY * (self._n_removed + self._index(use.position) - access.use_number)

    def _make(self, use: _Use) -> None:
        """Mark a use as made; the reader is beyond it."""
        at, ahead = self._index(use.position), self.ahead
        self._count_made(use)
        use.is_made = True
        access = self._accesses[use.block]
        access.use_number = self._n_removed + at
        access.reader_number = max(access.use_number, self._path.at(access.clock))
        self._schedule.read(use.block, use.position)
        if use.position >= self.reader:
            for passed in self._uses[self._index(self.reader) : at]:
                self._count_made(passed)
            self.reader = use.position + 1
            self._path.move(access.clock, self._n_removed + at + 1)
        self._kept += (ahead - self.ahead) / 4

    def _count_made(self, use: _Use) -> None:
        """Count the bytes of a use as no longer ahead of the reader."""
        if use.is_asked and not use.is_made and use.position >= self.reader:
            self.ahead -= use.size

    def _remove_passed(self) -> None:
        """Remove the uses that are made, and those so far behind the reader that they will not be."""
        n_behind = self._index(self.reader)
        n = max(0, n_behind - self._schedule.n_fit)
        while n < n_behind and self._uses[n].is_made:
            n += 1
        for i, use in enumerate(self._uses[:n]):
            if not use.is_made:
                clock = self._clock_of(use.block)
                self._accesses[use.block] = _Access(clock, self._n_removed + i, self._path.at(clock))
                self._schedule.read(use.block, use.position)
        del self._uses[:n]
        self._n_removed += n
        self._turn = max(0, self._turn - n)
        if len(self._accesses) > 2 * len(self._schedule) + LOOK:
            self._accesses = {
                block: self._accesses[block] for block in self._accesses if block in self._schedule
            }

    def forget_lost(self) -> None:
        """Pass the next blocks that were evicted before they were read, and keep less ahead from now on."""
        with self._lock:
            first = n = self._index(self.reader)
            while n < len(self._uses) and self._is_lost(self._uses[n]):
                n += 1
            if n > first:
                for use in self._uses[first:n]:
                    self._schedule.lost(use.block)
                    self._count_made(use)
                self.reader = self._uses[n - 1].position + 1
                self._kept = min(self._kept, KEPT * self.ahead)

    def _is_lost(self, use: _Use) -> bool:
        return use.is_asked and not (self._schedule.is_under_way(use.block) or self._cache.has(*use.block))

    def _clock_of(self, block: Block) -> int | None:
        return self._cache.last_use(*block)

    def _index(self, position: int) -> int:
        return bisect_left(self._uses, position, key=_POSITION)

    def _use_at(self, position: int) -> _Use | None:
        at = self._index(position)
        return self._uses[at] if at < len(self._uses) and self._uses[at].position == position else None


def order_of(orders: Sequence[FutureUses], key: ObjectKey, index: int) -> FutureUses | None:
    """Return the first of `orders` that contains a block; None if none does."""
    return next((order for order in orders if (key, index) in order), None)
