"""What of a known order of accesses may be fetched now, and what to give up for it: Belady's rule, with bypass. Pure.

The rule: what is used furthest ahead goes first. What is needed
before the block that it would make room for never goes. A block whose use after the next one is still further ahead than
that of all others only passes: it is fetched, read, and goes first. It never takes the place of another, so that it waits
while as much passes as may: what is fetched ahead costs no hit.

How it is used. `extend` hands over what is known of the order, `read` says of which block the next use was made, in whatever
order readers come to them, `read_up_to` that all before a position is over; `ask` says whether a block may be asked for, and
whoever asks in the order of use fetches in it. Each of these blocks is then reported: `stored` when it is here (it came, or was
here already) or `lost` when it is not to come. What others remove is `lost`, too, and what was here from the start is `stored`. Whoever
needs room takes what `given_up` yields. Wrong or missing reports cost fetches, and nothing else.

State: one number and one reference for each access that is known and was not made, a record for each block of them or
here, and a heap of at most twice the records. Time: each access costs at most a few steps in the heap, O(log n),
amortised.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

__all__ = ["NEVER", "FutureAccess", "EvictionSchedule"]

NEVER = sys.maxsize  # the position of a use that is not known
_FEW = 64  # entries of a heap below which it is not worth tidying

B = TypeVar("B", bound=Hashable)


class FutureAccess(NamedTuple, Generic[B]):
    """One use of a block, and the bytes that it takes."""

    block: B
    size: int = 1


class _Place(Enum):
    AWAY = auto()  # not here, or nobody told us
    HELD = auto()  # here or asked for, and to stay until another is needed sooner
    PASSING = auto()  # here or asked for, for one use
    GOING = auto()  # here or asked for, and the first to go


class _Record(Generic[B]):
    """What is known of one block: its next use, the last one that is known, its size, and where it is."""

    __slots__ = ("block", "is_under_way", "last", "next", "place", "size")

    def __init__(self, block: B, size: int) -> None:
        self.block = block
        self.size = size
        self.next = self.last = NEVER
        self.place = _Place.AWAY
        self.is_under_way = False  # asked for, and not reported yet


class EvictionSchedule(Generic[B]):
    """One order of accesses and the blocks that it needs. The same calls get the same answers.

    `horizon` is how many accesses may be known ahead. `limit` is how many bytes may stay for later uses, `passing` how
    many more may be here for one use: about what is under way at a time. Positions count accesses from 0.
    """

    def __init__(self, *, horizon: int, limit: int = 0, passing: int = 0) -> None:
        self.horizon = horizon
        self.limit = limit
        self.passing = passing
        self.position = 0  # accesses that were made
        self._asked = 0  # Invariant: what was asked for is used before this position
        self._records: dict[B, _Record[B]] = {}  # Invariant: each is used again, is here, or is under way
        # The accesses from position `_base` on, and for each the position of the next one of the same block.
        self._order: list[_Record[B]] = []
        self._following: list[int] = []
        self._base = 0
        # Of what is held, by next use, negative, with what was true when they were pushed: an entry counts while it is. The
        # second number settles ties.
        self._furthest: list[tuple[int, int, _Record[B]]] = []
        self._ties = count()
        self._going: dict[B, None] = {}  # what is here and first to go, in that order
        self._sizes = dict.fromkeys(_Place, 0)  # bytes by place

    @property
    def known(self) -> int:
        """The position up to which the order is known."""
        return self._base + len(self._order)

    @property
    def room(self) -> int:
        """How many further accesses `extend` would take."""
        return self.horizon - (self.known - self.position)

    @property
    def taken(self) -> int:
        """The bytes of all that is here, or under way, as far as we were told."""
        return sum(size for place, size in self._sizes.items() if place is not _Place.AWAY)

    @property
    def size(self) -> int:
        """The bytes of all blocks that are used again, or here."""
        return sum(self._sizes.values())

    @property
    def n_fit(self) -> int:
        """About how many blocks can be here."""
        return len(self._records) * (self.limit + self.passing) // max(1, self.size)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block: object) -> bool:
        return block in self._records

    # What happens.

    def extend(self, accesses: Iterable[FutureAccess[B]]) -> int:
        """Take as many further accesses as the horizon allows, not one more; return how many these were."""
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
        """Note that all accesses before `position` were made."""
        while self.position < min(position, self.known):
            self.position += 1
            self._made(self._order[self.position - 1 - self._base], before=self.position)
        self._tidy()

    def read(self, block: B) -> None:
        """Note that the next access to a block was made, whatever is to be made before it."""
        record = self._records.get(block)
        if record is None or record.next == NEVER:
            return
        self._made(record, before=record.next + 1)
        while self.position < self.known and self._order[self.position - self._base].next > self.position:
            self.position += 1
        self._tidy()

    def _made(self, record: _Record[B], *, before: int) -> None:
        """The next access to a block was made, if it is one before that position; else it was made out of turn."""
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
        """Note that a block is here: it came, or it was here already. `is_read`: its next access was made meanwhile."""
        record = self._records.get(block)
        if record is None:
            return
        if is_read:
            record.is_under_way = True  # not to be forgotten, be there a use after it or not
            self.read(block)
        record.is_under_way = False
        if record.place is _Place.AWAY:
            self._move(record, _Place.HELD if self._finds_room(record) else _Place.GOING)
        elif record.place is _Place.GOING:
            self._going[block] = None

    def lost(self, block: B) -> None:
        """Note that a block is not here: it did not come, or somebody removed it."""
        record = self._records.get(block)
        if record is not None:
            record.is_under_way = False
            self._move(record, _Place.AWAY)

    # What is to come.

    def is_made(self, block: B, position: int) -> bool:
        """Return whether the access to a block at this position was made."""
        record = self._records.get(block)
        return position < self.known and (record is None or record.next > position)

    def next_use(self, block: B) -> int:
        """Return the position of the next access to a block; `NEVER` where none is known."""
        record = self._records.get(block)
        return NEVER if record is None else record.next

    def unmade(self, first: int, n: int) -> Iterator[tuple[int, B]]:
        """Yield of `n` accesses, from position `first` on, those that are the next one of their block: position and block."""
        first = max(first, self.position)
        for position in range(first, min(first + n, self.known)):
            record = self._order[position - self._base]
            if record.next == position:
                yield position, record.block

    # What to do.

    def ask(self, block: B, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be asked for now, be it its turn or not; it is under way then, or here already.

        What nobody knows a use of may be; and one that `is_awaited`, which passes if it has no other place.
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
        """Yield what to remove, furthest use first, for as long as room is needed.

        Each counts as gone once it was yielded. It ends before what is used sooner than anything under way.
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
                self._move(record, _Place.GOING)  # as soon as it is here
                continue
            self._move(record, _Place.AWAY)
            yield record.block

    # Where a block belongs.

    def _place_for(self, record: _Record[B]) -> _Place | None:
        """Return where a block belongs that is asked for now, other blocks having made room; None: it has to wait."""
        after = self._following[record.next - self._base]
        self._keep_limit()
        while self._sizes[_Place.HELD] + record.size > self.limit:
            top = self._furthest_held()
            if top is None or after > top.next:  # in the place of another it would cost a fetch of that
                may_pass = self._sizes[_Place.PASSING] + record.size <= self.passing
                return _Place.PASSING if may_pass else None
            self._move(top, _Place.GOING)
        return _Place.HELD

    def _keep_limit(self) -> None:
        """Let blocks go after the limit became smaller."""
        while self._sizes[_Place.HELD] > self.limit and (top := self._furthest_held()) is not None:
            self._move(top, _Place.GOING)

    def _finds_room(self, record: _Record[B]) -> bool:
        """Return whether a block that is here may stay, after others made room that are used later."""
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

    # When a block is used.

    def _new(self, block: B, size: int) -> _Record[B]:
        record = self._records[block] = _Record(block, size)
        self._sizes[_Place.AWAY] += size
        return record

    def _use_next(self, record: _Record[B], position: int) -> None:
        record.next = position
        self._file(record)

    def _file(self, record: _Record[B]) -> None:
        """Put a block where it is found by its next use; forget it when there is no use for it, and it is not here."""
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
        """Return the held block that is used furthest ahead; of those without a known use, the longest without."""
        while self._furthest and not self._counts(self._furthest[0]):
            heappop(self._furthest)
        return self._furthest[0][2] if self._furthest else None
