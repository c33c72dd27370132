"""How far ahead of its reader a plan is: what it has ready and nobody has read yet, and how much may be asked for next."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from cachedfs.cache.eviction.future_uses import Block, FutureUses, Use
from cachedfs.common.blocks import block_range, clip, covering
from cachedfs.common.types import ObjectKey
from cachedfs.fetch.runtime import Runtime
from cachedfs.fetch.source import Source
from cachedfs.prefetch.items import MOST, PrefetchItem, PrefetchItems

__all__ = ["Beyond", "FutureReads", "FutureBlock", "Place", "UnreadBlocks", "is_after", "take"]


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


class FutureBlock(NamedTuple, Generic[B]):
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


class UnreadBlocks(Generic[B]):
    """What is ready for the reader of a plan, in the plan's order, each piece until it, or one behind it, is read.

    Whoever reads touches the block, in whatever process: a clock that moved is a read. Of a block that the plan uses
    several times the first use counts as that read. However many pieces there are, some thousands are kept; whether a
    piece that became one with its neighbour was read is told by the last of them.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._pieces: list[FutureBlock[B]] = []  # Invariant: by place
        self._marks: dict[B, _Mark] = {}  # Invariant: of the blocks of the pieces, with the places of these
        self.passed: set[B] = set()  # the blocks of what was passed last
        self._next = 0  # where the look at all pieces, some at a time, goes on
        self.size = self.n = (
            0  # Invariant: bytes of all pieces, and how many they were before some became one
        )

    def __iter__(self) -> Iterator[FutureBlock[B]]:
        return iter(self._pieces)

    def __contains__(self, block: object) -> bool:
        return block in self._marks

    def add(self, piece: FutureBlock[B], clock: int | None) -> None:
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

    def _forget_place(self, piece: FutureBlock[B]) -> None:
        mark = self._marks[piece.block]
        mark.places.remove(piece.place)
        if not mark.places:
            del self._marks[piece.block]

    def _join_neighbours(self) -> None:
        """Make one piece of every two: at the place of the second, with the bytes of both."""
        joined: list[FutureBlock[B]] = []
        for first, second in zip(self._pieces[::2], self._pieces[1::2], strict=False):
            self._forget_place(first)
            joined.append(second._replace(size=first.size + second.size, n=first.n + second.n))
        self._pieces = joined + self._pieces[2 * len(joined) :]


_PLACE = attrgetter("place")


HORIZON = MOST  # uses that are known ahead: 16 to 32 MB
NEAR = 4096  # items that are known ahead while all of them may stay
AT_ONCE = 128  # items that are looked at before the loop serves others
PASSING = 64 << 20  # bytes that are under way, where there is no window

# What comes later, each with whether its reader may be there as far as the order tells, and with what goes on from there.
Beyond = Iterator[tuple[Block | None, Callable[[], bool | None], Callable[[], None]]]


class ItemSpan(NamedTuple):
    """The uses of one item: the position of the first in the order, how many there are, and the first block."""

    at: int
    n: int = 0
    first: int = 0
    key: ObjectKey | None = None  # of the version that it was when its uses were noted


class FutureReads:
    """The order of one plan, from what its items are known to be. On the runtime's loop.

    It goes as far as objects are known: an item of which nothing is known ends it, until the plan has asked what it is. A plan
    that runs is one of those that share the bound, from `begin` to `close`.
    """

    def __init__(
        self, source: Source, items: PrefetchItems, strip: Callable[[str], str], window: float
    ) -> None:
        self._source, self._items, self._strip = source, items, strip
        self._window = int(min(window, PASSING))
        self._foreseen: deque[ItemSpan] = deque()  # of the items that come next
        # By number, in order: those that the plan got to and its reader did not pass.
        self._begun: dict[int, ItemSpan] = {}
        self._reached = 0  # in the order: about where the reader is
        self._order: FutureUses | None = None
        self._runtime: Runtime | None = None

    def begin(self) -> None:
        self._runtime = runtime = self._source.runtime  # at its end it is no longer the source's
        self._order = FutureUses(
            runtime.cache, self._source.config.bounds, horizon=HORIZON, window=self._window
        )
        runtime.future_uses.append(self._order)
        if (seat := self._order.seat) is not None:
            runtime.cache_writer.after_facts(partial(runtime.cache.clear_seat, seat))

    def close(self) -> None:
        order, self._order = self._order, None
        if order is not None and self._runtime is not None:
            self._runtime.future_uses.remove(order)
            order.close()

    @property
    def share(self) -> int | None:
        """The bytes of the cache that are this plan's own; None before its begin."""
        return None if self._order is None else self._order.share

    @property
    def is_tight(self) -> bool:
        """Whether what is known to be read takes so much of the room that some of it goes before the plan is over."""
        return self._order is not None and self._order.is_tight

    def look(self) -> bool:
        """Look at the next items; return whether there may be more to look at now."""
        for _ in range(AT_ONCE):
            if len(self._foreseen) >= NEAR and not self.is_tight:
                return False
            if self._order is None or (item := self._items.peek(len(self._foreseen))) is None:
                return False
            uses = self._uses_of(item)
            if uses is None or len(uses) > self._order.room:
                return False
            key, first, _ = uses[0] if uses else (None, 0, 0)
            self._foreseen.append(ItemSpan(self._order.known, len(uses), first, key))
            self._order.extend(uses)
        return True

    def _uses_of(self, item: PrefetchItem) -> list[Use] | None:
        """Return the uses of one item, None when it is not known what it is."""
        path = self.path_of(item)
        known = None if path is None else self._source.fresh(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None:
            return None
        size = known.object.size or 0
        blocks = covering(clip(*(item.range or (None, None)), size), key.block_size)
        return [(key, index, block_range(index, key.block_size, size).size) for index in blocks]

    def path_of(self, item: PrefetchItem) -> str | None:
        """Return the path that an item names which is only looked at; None where it names none: the plan is told once there."""
        try:
            return self._strip(item.text)
        except (ValueError, ImportError):  # of a protocol that nobody knows, or whose package is missing
            return None

    # What the plan does.

    def took(self) -> ItemSpan:
        """The plan took its next item."""
        if self._foreseen:
            return self._foreseen.popleft()
        return ItemSpan(0 if self._order is None else self._order.known)

    def begins(self, number: int, span: ItemSpan) -> None:
        """The item of this span is the plan's object of this number."""
        if span.n:  # so that these are never more than the horizon
            self._begun[number] = span

    def is_made(self, place: Place, block: Block) -> bool | None:
        """Return whether the reader was at this place; None where its order does not have it."""
        span = self._span(place, block)
        if span is None or self._order is None:
            return None
        return self._order.is_made(block, _position(span, place[1]))

    def may_be_at(self, block: Block, place: Place) -> bool | None:
        """Return whether a block that was read may have been so for this place; None where the order does not have it."""
        span = self._span(place, block)
        return None if span is None else self._may_be_at(block, _position(span, place[1]))

    def _span(self, place: Place, block: Block) -> ItemSpan | None:
        """Return the uses of the object at a place; None where they are those of a version that it is no longer."""
        span = self._begun.get(place[0])
        return span if span is not None and span.key == block[0] else None

    def may_be_later(self, block: Block, i: int) -> bool | None:
        """Do the same for the first block of the item after the next `i`."""
        return self._may_be_at(block, self._foreseen[i].at) if i < len(self._foreseen) else None

    def _may_be_at(self, block: Block, position: int) -> bool | None:
        return None if self._order is None else self._order.may_be_at(block, position)

    def ask(self, block: Block, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be asked for now, or has to wait until the reader got further; one `is_awaited` may."""
        return self._order is None or self._order.ask(block, is_awaited=is_awaited)

    def stored(self, block: Block) -> None:
        """The plan found that a block is here."""
        if self._order is not None:
            self._order.stored([block])

    def lost(self, block: Block) -> None:
        """The plan found that a block is not here any more."""
        if self._order is not None:
            self._order.lost([block])

    def reached(self, place: Place) -> None:
        """The reader is about at this place, or beyond it."""
        while self._begun and (number := next(iter(self._begun))) <= place[0]:
            span = self._begun[number]
            self._reached = span.at + span.n if number < place[0] else _position(span, place[1])
            if number == place[0]:
                break
            del self._begun[number]
        if self._order is not None:
            self._order.reached(self._reached)


def _position(span: ItemSpan, index: int) -> int:
    """Return where in the order a block of an item is used, one behind its end at most."""
    return span.at + min(max(0, index - span.first), span.n)
