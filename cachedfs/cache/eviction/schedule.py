"""Belady's eviction rule with bypass, for an order of accesses that is known in advance. No I/O.

The block with the furthest next use is evicted first, but never to make space for one that is needed later. A block
bypasses the cache ("passing") if its use after the next one is further ahead than the next use of every other block: it
is fetched, read once and evicted first. Passing blocks have their own byte limit and never displace other blocks, so
prefetching costs no hits.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

__all__ = ["NEVER", "EvictionSchedule", "FutureAccess"]

NEVER = sys.maxsize  # the position of the next use if none is known
_FEW = 64  # heap entries below which cleaning up the heap is not worth the time

B = TypeVar("B", bound=Hashable)


class FutureAccess(NamedTuple, Generic[B]):
    """One access to a block, and the bytes that the block takes in the cache."""

    block: B
    size: int = 1


class _Place(Enum):
    AWAY = auto()  # not cached, as far as reported
    HELD = auto()  # cached or requested; stays until another block is needed sooner
    PASSING = auto()  # cached or requested for one use only
    GOING = auto()  # cached or requested; evicted first


class _Record(Generic[B]):
    """The state of one block: positions of its next and its last known use, its size, and its place."""

    __slots__ = ("block", "is_under_way", "last", "next", "place", "size")

    def __init__(self, block: B, size: int) -> None:
        self.block = block
        self.size = size
        self.next = self.last = NEVER
        self.place = _Place.AWAY
        self.is_under_way = False  # requested, and neither `stored` nor `lost` was reported yet


class EvictionSchedule(Generic[B]):
    """The eviction schedule for one order of accesses. Deterministic: the same calls give the same results.

    `horizon`: the most accesses known ahead. `limit`: bytes that may stay for later uses. `passing`: further bytes for
    passing blocks, about as many as are in flight at a time. Positions count accesses from 0.

    Report the order with `extend`, and accesses with `read` (in any order) or `read_up_to`. Call `ask` before
    requesting a block. Report each requested block as `stored` (fetched, or already cached) or `lost`, blocks cached
    from the start as `stored`, and blocks removed by others as `lost`. To free space, evict the blocks that `given_up`
    yields. Wrong or missing reports cost extra fetches, nothing else.

    Memory: one number and one reference per known future access, one record per block, and a heap of at most twice as
    many entries as records (plus a constant). Time: amortized O(log n) per access.
    """

    def __init__(self, *, horizon: int, limit: int = 0, passing: int = 0) -> None:
        self.horizon = horizon
        self.limit = limit
        self.passing = passing
        self.position = 0  # all accesses before this one were made
        self._asked = 0  # Invariant: every use that a block was requested for is before this position
        # Invariant: each block has a known future use, is cached, or is in flight.
        self._records: dict[B, _Record[B]] = {}
        # The accesses from position `_base` on, and for each the position of the next access to the same block.
        self._order: list[_Record[B]] = []
        self._following: list[int] = []
        self._base = 0
        # Heap of held blocks: negated next use, tie breaker, record. An entry is valid while its block is held and its
        # next use is unchanged; invalid entries are dropped later.
        self._furthest: list[tuple[int, int, _Record[B]]] = []
        self._ties = count()
        self._going: dict[B, None] = {}  # cached blocks to evict first, in order
        self._sizes = dict.fromkeys(_Place, 0)  # bytes per place

    @property
    def known(self) -> int:
        """The position up to which the order is known."""
        return self._base + len(self._order)

    @property
    def room(self) -> int:
        """The number of further accesses that `extend` would take."""
        return self.horizon - (self.known - self.position)

    @property
    def taken(self) -> int:
        """The bytes of all blocks that are cached or in flight, as far as reported."""
        return sum(size for place, size in self._sizes.items() if place is not _Place.AWAY)

    @property
    def size(self) -> int:
        """The bytes of all blocks that have a known future use, are cached or are in flight."""
        return sum(self._sizes.values())

    @property
    def n_fit(self) -> int:
        """About how many blocks fit into `limit` and `passing` together."""
        return len(self._records) * (self.limit + self.passing) // max(1, self.size)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block: object) -> bool:
        return block in self._records

    # Reports

    def extend(self, accesses: Iterable[FutureAccess[B]]) -> int:
        """Append accesses to the known order, up to the horizon; return how many were taken from the iterable."""
        before = self.known
        for block, size in islice(accesses, self.room):
            record = self._records.get(block) or self._new(block, size)
            position = self.known
            if record.next == NEVER:
                self._use_next(record, position)
            else:
                self._following[record.last - self._base] = position
            record.last = position
            self._order.append(record)
            self._following.append(NEVER)
        return self.known - before

    def read_up_to(self, position: int) -> None:
        """Record that all accesses before `position` were made."""
        while self.position < min(position, self.known):
            self.position += 1
            self._made(self._order[self.position - 1 - self._base], before=self.position)
        self._tidy()

    def read(self, block: B) -> None:
        """Record that the next access to a block was made, even if accesses before it are still to come."""
        record = self._records.get(block)
        if record is None or record.next == NEVER:
            return
        self._made(record, before=record.next + 1)
        while self.position < self.known and self._order[self.position - self._base].next > self.position:
            self.position += 1
        self._tidy()

    def _made(self, record: _Record[B], *, before: int) -> None:
        """Advance a block to its following access; do nothing if its next access is not before `before`."""
        if record.next >= before:
            return
        following = self._following[record.next - self._base]
        if record.place is _Place.PASSING:
            self._move(record, _Place.GOING)
        self._use_next(record, following)

    def _tidy(self) -> None:
        n_made = self.position - self._base
        if 2 * n_made > len(self._order):
            del self._order[:n_made], self._following[:n_made]
            self._base = self.position

    def stored(self, block: B, *, is_read: bool = False) -> None:
        """Record that a block is cached: just fetched, or found. `is_read`: its next access was made already."""
        record = self._records.get(block)
        if record is None:
            return
        if is_read:
            record.is_under_way = True  # keeps the record even if no later use is known
            self.read(block)
        record.is_under_way = False
        if record.place is _Place.AWAY:
            self._move(record, _Place.HELD if self._finds_room(record) else _Place.GOING)
        elif record.place is _Place.GOING:
            self._going[block] = None

    def lost(self, block: B) -> None:
        """Record that a block is not cached: its request failed, or another process removed it."""
        record = self._records.get(block)
        if record is not None:
            record.is_under_way = False
            self._move(record, _Place.AWAY)

    # Future accesses

    def is_made(self, block: B, position: int) -> bool:
        """Return whether the access to a block at this position was made."""
        record = self._records.get(block)
        return position < self.known and (record is None or record.next > position)

    def next_use(self, block: B) -> int:
        """Return the position of the next access to a block; `NEVER` if none is known."""
        record = self._records.get(block)
        return NEVER if record is None else record.next

    def unmade(self, first: int, n: int) -> Iterator[tuple[int, B]]:
        """Yield (position, block) of the next access to each block, among `n` accesses from position `first` on."""
        first = max(first, self.position)
        for position in range(first, min(first + n, self.known)):
            record = self._order[position - self._base]
            if record.next == position:
                yield position, record.block

    # Decisions

    def ask(self, block: B, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be requested now, and if so count it as in flight. False: wait for the reader.

        Always True for a block without a known use, for one that is held or passing already, and with `is_awaited`
        (a reader waits for the block), in which case the block may exceed the limit for passing blocks.
        """
        record = self._records.get(block)
        if record is None or record.next == NEVER or record.place in (_Place.HELD, _Place.PASSING):
            return True
        place = self._place_for(record) or (_Place.PASSING if is_awaited else None)
        if place is None:
            return False
        self._asked = max(self._asked, record.next + 1)
        record.is_under_way = True
        self._move(record, place)
        return True

    def given_up(self) -> Iterator[B]:
        """Yield blocks to evict, furthest next use first. A yielded block counts as removed.

        Stop iterating when there is enough space. The iterator ends before it reaches a block that is used sooner than
        one that was requested.
        """
        while True:
            if self._going:
                record = self._records[next(iter(self._going))]
            else:
                top = self._furthest_held()
                if top is None or top.next < self._asked:
                    return
                record = top
            if record.is_under_way:
                self._move(record, _Place.GOING)  # evicted when it is stored
                continue
            self._move(record, _Place.AWAY)
            yield record.block

    # Places

    def _place_for(self, record: _Record[B]) -> _Place | None:
        """Return HELD or PASSING for a block to be requested now, after making space; None if it has to wait."""
        after = self._following[record.next - self._base]
        self._keep_limit()
        while self._sizes[_Place.HELD] + record.size > self.limit:
            top = self._furthest_held()
            if top is None or after > top.next:  # replacing `top` would cost fetching it again
                may_pass = self._sizes[_Place.PASSING] + record.size <= self.passing
                return _Place.PASSING if may_pass else None
            self._move(top, _Place.GOING)
        return _Place.HELD

    def _keep_limit(self) -> None:
        """Move held blocks to GOING after `limit` was lowered."""
        while self._sizes[_Place.HELD] > self.limit and (top := self._furthest_held()) is not None:
            self._move(top, _Place.GOING)

    def _finds_room(self, record: _Record[B]) -> bool:
        """Return whether a cached block may be held, after moving blocks that are used later to GOING."""
        while self._sizes[_Place.HELD] + record.size > self.limit:
            top = self._furthest_held()
            if top is None or top.next <= record.next:
                return False
            self._move(top, _Place.GOING)
        return True

    def _move(self, record: _Record[B], place: _Place) -> None:
        if record.place is _Place.GOING:
            self._going.pop(record.block, None)
        self._sizes[record.place] -= record.size
        self._sizes[place] += record.size
        record.place = place
        if place is _Place.GOING and not record.is_under_way:
            self._going[record.block] = None
        self._file(record)

    # Bookkeeping of next uses

    def _new(self, block: B, size: int) -> _Record[B]:
        record = self._records[block] = _Record(block, size)
        self._sizes[_Place.AWAY] += size
        return record

    def _use_next(self, record: _Record[B], position: int) -> None:
        record.next = position
        self._file(record)

    def _file(self, record: _Record[B]) -> None:
        """Index a held block by its next use; drop the record of a block without use, cache file or request."""
        if record.place is _Place.HELD:
            self._push(record)
        elif record.place is _Place.AWAY and record.next == NEVER and not record.is_under_way:
            self._sizes[_Place.AWAY] -= record.size
            del self._records[record.block]

    def _push(self, record: _Record[B]) -> None:
        heap = self._furthest
        heappush(heap, (-record.next, next(self._ties), record))
        if len(heap) > 2 * len(self._records) + _FEW:
            heap[:] = {entry[2]: entry for entry in heap if self._counts(entry)}.values()
            heapify(heap)

    @staticmethod
    def _counts(entry: tuple[int, int, _Record[B]]) -> bool:
        return entry[2].place is _Place.HELD and entry[2].next == -entry[0]

    def _furthest_held(self) -> _Record[B] | None:
        """Return the held block with the furthest next use. Without a known use: the one that lost its use first."""
        while self._furthest and not self._counts(self._furthest[0]):
            heappop(self._furthest)
        return self._furthest[0][2] if self._furthest else None
