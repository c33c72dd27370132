"""Belady's eviction rule with bypass, for an order of accesses that is known in advance. No I/O.

The block with the furthest next use is evicted first, but never to make space for one that is needed later. A block
bypasses the cache ("passing") if its use after the next one is further ahead than the next use of every other block: it
is fetched, read once and evicted first. Passing blocks have their own byte limit and never displace other blocks, so
prefetching costs no hits.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

__all__ = ["NEVER", "EvictionSchedule"]

NEVER = sys.maxsize  # the position of the next use if none is known
_FEW = 64  # heap entries below which cleaning up the heap is not worth the time

B = TypeVar("B", bound=Hashable)


class _Place(Enum):
    AWAY = auto()  # not cached, as far as reported
    HELD = auto()  # cached or requested; stays until another block is needed sooner
    PASSING = auto()  # cached or requested for one use only
    GOING = auto()  # cached or requested; evicted first


class _Record(Generic[B]):
    """The state of one block: the positions of its known uses in order, its size, and its place."""

    __slots__ = ("block", "is_under_way", "place", "size", "uses")

    def __init__(self, block: B, size: int) -> None:
        self.block = block
        self.size = size
        self.uses: list[int] = []
        self.place = _Place.AWAY
        self.is_under_way = False  # requested, and neither `stored` nor `lost` was reported yet

    @property
    def next(self) -> int:
        return self.uses[0] if self.uses else NEVER


class EvictionSchedule(Generic[B]):
    """The eviction schedule for one order of uses. Deterministic: the same calls give the same results.

    `limit`: bytes that may stay for later uses. `passing`: further bytes for passing blocks, about as many as are in
    flight at a time. A use has a position, a number that is higher for later uses.

    Report known uses with `add`, and reads with `read`. Call `ask` before requesting a block. Report each requested
    block as `stored` (fetched, or already cached) or `lost`, blocks cached from the start as `stored`, and blocks
    removed by others as `lost`. To free space, evict the blocks that `given_up` yields. Wrong or missing reports cost
    extra fetches, nothing else.

    Memory: one number per known use, one record per block, and a heap of at most twice as many entries as records (plus
    a constant). Time: amortized O(log n) per use.
    """

    def __init__(self, *, limit: int = 0, passing: int = 0) -> None:
        self.limit = limit
        self.passing = passing
        self._asked = 0  # Invariant: every use that a block was requested for is before this position
        # Invariant: each block has a known future use, is cached, or is in flight.
        self._records: dict[B, _Record[B]] = {}
        # Heap of held blocks: negated next use, tie breaker, record. An entry is valid while its block is held and its
        # next use is unchanged; invalid entries are dropped later.
        self._furthest: list[tuple[int, int, _Record[B]]] = []
        self._ties = count()
        self._going: dict[B, None] = {}  # cached blocks to evict first, in order
        self._sizes = dict.fromkeys(_Place, 0)  # bytes per place

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

    def add(self, block: B, position: int, size: int = 1) -> None:
        """Add a known use of a block that takes `size` bytes in the cache."""
        record = self._records.get(block)
        if record is None:
            record = self._records[block] = _Record(block, size)
            self._sizes[_Place.AWAY] += size
        insort(record.uses, position)
        if record.next == position:
            self._file(record)

    def read(self, block: B, position: int) -> None:
        """Record that all uses of a block up to this position were made."""
        record = self._records.get(block)
        if record is None or record.next > position:
            return
        del record.uses[: bisect_right(record.uses, position)]
        if record.place is _Place.PASSING:
            self._move(record, _Place.GOING)
        self._file(record)

    def stored(self, block: B, *, is_read: bool = False) -> None:
        """Record that a block is cached: just fetched, or found. `is_read`: its next use was made already."""
        record = self._records.get(block)
        if record is None:
            return
        if is_read:
            record.is_under_way = True  # keeps the record even if no later use is known
            self.read(block, record.next)
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

    def next_use(self, block: B) -> int:
        """Return the position of the next use of a block; `NEVER` if none is known."""
        record = self._records.get(block)
        return NEVER if record is None else record.next

    def is_under_way(self, block: B) -> bool:
        """Return whether a block was asked for, and neither `stored` nor `lost` since then."""
        record = self._records.get(block)
        return record is not None and record.is_under_way

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
        after = record.uses[1] if len(record.uses) > 1 else NEVER
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
