"""How far ahead of its reader a plan is: what it has ready and nobody has read yet, and how much may be asked for next."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Piece", "Place", "Unread", "is_after", "take"]

B = TypeVar("B", bound=Hashable)
Place = tuple[int, int]  # in a plan: which of its objects, and which block of that

_MOST = 8192  # pieces that are kept apart: beyond it neighbours become one
_SHARE = 4  # of a window: most that is asked for at once, so that one part comes while the others are read


def take(sizes: Sequence[int], *, ahead: int, limit: float, most: int) -> int:
    """Return how many of these adjacent pieces to ask for in one request now; 0: once more was read.

    `sizes` are the bytes of each, `ahead` those that are ahead of the reader already, of at most `limit`; a request
    brings at most `most`. A window is refilled by whole requests, or by quarters of it if that is less. One piece is
    asked for in any case when nothing else is ahead.
    """
    whole = max(1, _fitting(sizes, min(most, limit / _SHARE)))
    now = _fitting(sizes, min(most, limit - ahead))
    return max(1, now) if now >= whole or not ahead else 0


def is_after(clock: int, other: int) -> bool:
    """Return whether a clock of 32 bits showed the first later than the second, less than half a turn ago."""
    return 0 < (clock - other) & 0xFFFFFFFF < 1 << 31


def _fitting(sizes: Sequence[int], room: float) -> int:
    n = 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        n += 1
    return n


def _any_place(block: object, place: Place) -> bool:
    return True


class Piece(NamedTuple, Generic[B]):
    """A block where the plan uses it; with `size` bytes, its own and those of the `n` pieces that became one with it."""

    place: Place
    block: B
    size: int
    n: int = 1


@dataclass(slots=True)
class _Mark:
    """When a block was used last, by the clock of touches, and where the plan uses it next, first place first."""

    clock: int | None
    places: list[Place]


class Unread(Generic[B]):
    """What is ready for the reader of a plan, in the plan's order, each piece until it, or one behind it, is read.

    Whoever reads touches the block, in whatever process: a clock that moved is a read. Of a block that the plan uses
    several times the first use counts as that read. However many pieces there are, some thousands are kept; whether a
    piece that became one with its neighbour was read is told by the last of them.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._pieces: list[Piece[B]] = []  # Invariant: by place
        self._marks: dict[B, _Mark] = {}  # Invariant: of the blocks of the pieces, with the places of these
        self.passed: set[B] = set()  # the blocks of what was passed last
        self._next = 0  # where the look at all pieces, some at a time, goes on
        self.size = self.n = (
            0  # Invariant: bytes of all pieces, and how many they were before some became one
        )

    def __iter__(self) -> Iterator[Piece[B]]:
        return iter(self._pieces)

    def __contains__(self, block: object) -> bool:
        return block in self._marks

    def add(self, piece: Piece[B], clock: int | None) -> None:
        """Note a piece that is not read yet; `clock` is that of its block's last use so far."""
        mark = self._marks.setdefault(piece.block, _Mark(clock, []))
        insort(mark.places, piece.place)
        if self._pieces and piece.place < self._pieces[-1].place:
            insort(self._pieces, piece, key=_PLACE)
        else:
            self._pieces.append(piece)
        self.size, self.n = self.size + piece.size, self.n + piece.n
        if len(self._pieces) > self._most:
            self._join_neighbours()

    def look(
        self, clock_of: Callable[[B], int | None], n: int, was_for: Callable[[B, Place], bool] = _any_place
    ) -> int:
        """Look whether any of the next `n` pieces, or of `n` others in turn, was read; return the bytes that were passed.

        `was_for`: returns whether a block that was read was so for its use at a place, and for none that was passed before.
        """
        self._next = self._next if n <= self._next < len(self._pieces) else n
        looked_at = self._pieces[:n] + self._pieces[self._next : self._next + n]
        self._next += n
        passed: Place | None = None
        for piece in looked_at:
            mark, clock = self._marks[piece.block], clock_of(piece.block)
            if clock is not None and clock != mark.clock and was_for(piece.block, mark.places[0]):
                mark.clock = clock
                passed = max(passed or mark.places[0], mark.places[0])
        return 0 if passed is None else self.pass_to(passed, clock_of)

    def pass_to(self, place: Place, clock_of: Callable[[B], int | None]) -> int:
        """The reader is past `place`: forget all up to it, and return how many bytes that were."""
        n = bisect_right(self._pieces, place, key=_PLACE)
        self.passed = {piece.block for piece in self._pieces[:n]}
        return self._drop(slice(0, n), clock_of)

    def remove(self, number: int, clock_of: Callable[[B], int | None]) -> int:
        """Forget the pieces of one object of the plan, and return how many bytes that were."""
        first = bisect_right(self._pieces, (number, -1), key=_PLACE)
        stop = bisect_right(self._pieces, (number + 1, -1), key=_PLACE)
        return self._drop(slice(first, stop), clock_of)

    def _drop(self, where: slice, clock_of: Callable[[B], int | None]) -> int:
        dropped = self._pieces[where]
        del self._pieces[where]
        for piece in dropped:
            self._forget_place(piece)
            if (mark := self._marks.get(piece.block)) is not None:
                # What was read until now was read for the place that is passed.
                mark.clock = clock_of(piece.block)
        size = sum(piece.size for piece in dropped)
        self.size, self.n = self.size - size, self.n - sum(piece.n for piece in dropped)
        return size

    def _forget_place(self, piece: Piece[B]) -> None:
        mark = self._marks[piece.block]
        mark.places.remove(piece.place)
        if not mark.places:
            del self._marks[piece.block]

    def _join_neighbours(self) -> None:
        """Make one piece of every two: at the place of the second, with the bytes of both."""
        joined: list[Piece[B]] = []
        for first, second in zip(self._pieces[::2], self._pieces[1::2], strict=False):
            self._forget_place(first)
            joined.append(second._replace(size=first.size + second.size, n=first.n + second.n))
        self._pieces = joined + self._pieces[2 * len(joined) :]


_PLACE = attrgetter("place")
