"""Future reads of a prefetch plan: the blocks it will use, and those ready and still unread."""

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

__all__ = ["Beyond", "FutureBlock", "FutureReads", "Place", "UnreadBlocks", "is_after", "take"]


B = TypeVar("B", bound=Hashable)
Place = tuple[int, int]  # position in a plan: number of the object, index of the block

_MOST = 8192  # pieces tracked separately; beyond this number, neighbors are merged
_SHARE = 4  # of a window: free part that suffices for a request, so that it arrives while the rest is read

_PLACE = attrgetter("place")
HORIZON = MOST  # most future uses known; they take 16 to 32 MB of memory
NEAR = 4096  # items looked up ahead; more only if `is_tight`
AT_ONCE = 128  # items looked up before the event loop runs other tasks
PASSING = 64 << 20  # most bytes assumed in flight, with or without a window
# Blocks to come. Each has a function that returns whether the reader may be there (None: unknown), and one
# that continues the plan there.
Beyond = Iterator[tuple[Block | None, Callable[[], bool | None], Callable[[], None]]]


def take(sizes: Sequence[int], *, ahead: int, limit: float, most: int) -> int:
    """Return how many of these adjacent pieces to request now; 0 while the reader has to read first.

    `sizes` has the bytes of each piece, `ahead` the bytes that are ahead of the reader, of at most `limit`. A
    request brings at most `most` bytes. It is sent when there is room for a full request, or for a quarter of
    the window if that is less. If nothing else is ahead, one piece is requested in any case.
    """
    whole = max(1, _fitting(sizes, min(most, limit / _SHARE)))
    now = _fitting(sizes, min(most, limit - ahead))
    return max(1, now) if now >= whole or not ahead else 0


def is_after(clock: int, other: int) -> bool:
    """Return whether the 32-bit clock value `clock` is later than `other`, by less than half its range."""
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
    """A block at the place where a plan uses it.

    `size` is in bytes. `size` and `n` include the pieces that were merged into this one.
    """

    place: Place
    block: B
    size: int
    n: int = 1


@dataclass(slots=True)
class _Mark:
    """The last-access clock of a block, and the places where the plan uses it, in order."""

    clock: int | None
    places: list[Place]


class UnreadBlocks(Generic[B]):
    """The unread blocks ready for a plan's reader, in plan order.

    A piece leaves when it, or a later one, is read. Every reader in every process records its accesses, so a
    changed access clock means a read. If the plan uses a block several times, a read counts for the first of
    these uses. Only some thousands of pieces are kept; beyond that neighbors are merged, and a merged piece
    counts as read when its last block is.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._pieces: list[FutureBlock[B]] = []  # Invariant: sorted by place
        self._marks: dict[B, _Mark] = {}  # Invariant: has the blocks and places of `_pieces`
        self.passed: set[B] = set()  # the blocks passed last
        self._next = 0  # where the round-robin check of all pieces continues
        self.size = self.n = 0  # Invariant: bytes of all pieces, and their number before merging

    def __iter__(self) -> Iterator[FutureBlock[B]]:
        return iter(self._pieces)

    def __contains__(self, block: object) -> bool:
        return block in self._marks

    def add(self, piece: FutureBlock[B], clock: int | None) -> None:
        """Add an unread piece. `clock` is the access clock of its block's last use so far."""
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
        """Check whether the next `n` pieces, and `n` others in turn, were read; return the bytes passed.

        `was_for(block, place)` returns whether a read of the block was for its use at `place`, and not for an
        earlier use that was passed already.
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
        """Drop all pieces up to `place`, which the reader has passed; return their bytes."""
        n = bisect_right(self._pieces, place, key=_PLACE)
        self.passed = {piece.block for piece in self._pieces[:n]}
        return self._drop(slice(0, n), clock_of)

    def remove(self, number: int, clock_of: Callable[[B], int | None]) -> int:
        """Drop the pieces of the plan's object `number`; return their bytes."""
        first = bisect_right(self._pieces, (number, -1), key=_PLACE)
        stop = bisect_right(self._pieces, (number + 1, -1), key=_PLACE)
        return self._drop(slice(first, stop), clock_of)

    def _drop(self, where: slice, clock_of: Callable[[B], int | None]) -> int:
        dropped = self._pieces[where]
        del self._pieces[where]
        for piece in dropped:
            self._forget_place(piece)
            if (mark := self._marks.get(piece.block)) is not None:
                # Reads so far were for the place that is passed.
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
        """Merge every two neighbors into one piece, at the place of the second."""
        joined: list[FutureBlock[B]] = []
        for first, second in zip(self._pieces[::2], self._pieces[1::2], strict=False):
            self._forget_place(first)
            joined.append(second._replace(size=first.size + second.size, n=first.n + second.n))
        self._pieces = joined + self._pieces[2 * len(joined) :]


class ItemSpan(NamedTuple):
    """The uses of one item in the plan's order.

    `at` is the position of the first use, `n` the number of uses, `first` the index of the first block.
    """

    at: int
    n: int = 0
    first: int = 0
    key: ObjectKey | None = None  # of the object version when its uses were recorded


class FutureReads:
    """The future uses of a plan's blocks, as far as metadata is known. Event loop thread only.

    An item without metadata ends the known part, until the plan has looked it up. From `begin` to `close`,
    the plan is one of those that share the size limit of the cache.
    """

    def __init__(
        self, source: Source, items: PrefetchItems, strip: Callable[[str], str], window: float
    ) -> None:
        self._source, self._items, self._strip = source, items, strip
        self._window = int(min(window, PASSING))
        self._foreseen: deque[ItemSpan] = deque()  # spans of the items that come next
        # Spans by object number, in order: objects that the plan began and the reader did not pass.
        self._begun: dict[int, ItemSpan] = {}
        self._reached = 0  # approximate position of the reader in the order
        self._order: FutureUses | None = None
        self._runtime: Runtime | None = None

    def begin(self) -> None:
        # kept: when this runtime ends, the source has another one
        self._runtime = runtime = self._source.runtime
        self._order = FutureUses(
            runtime.cache, self._source.config.bounds, horizon=HORIZON, window=self._window
        )
        runtime.future_uses.append(self._order)
        if (plan_slot := self._order.plan_slot) is not None:
            runtime.cache_writer.after_metadata(partial(runtime.cache.clear_plan_slot, plan_slot))

    def close(self) -> None:
        order, self._order = self._order, None
        if order is not None and self._runtime is not None:
            self._runtime.future_uses.remove(order)
            order.close()

    @property
    def share(self) -> int | None:
        """The bytes of the cache that belong to this plan; None before `begin`."""
        return None if self._order is None else self._order.share

    @property
    def is_tight(self) -> bool:
        """True when the known blocks need so much room that some are evicted before the plan ends."""
        return self._order is not None and self._order.is_tight

    def look(self) -> bool:
        """Look up the next items; return whether there may be more to look up now."""
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
        """Return the uses of one item; None when its metadata is unknown."""
        path = self.path_of(item)
        known = None if path is None else self._source.fresh(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None:
            return None
        size = known.object.size or 0
        blocks = covering(clip(*(item.range or (None, None)), size), key.block_size)
        return [(key, index, block_range(index, key.block_size, size).size) for index in blocks]

    def path_of(self, item: PrefetchItem) -> str | None:
        """Return the path of an item to come; None if it is invalid.

        The plan raises the error when it takes the item.
        """
        try:
            return self._strip(item.text)
        except (ValueError, ImportError):  # unknown protocol, or its package is missing
            return None

    # Called by the plan.

    def took(self) -> ItemSpan:
        """Return the span of the next item, which the plan takes now."""
        if self._foreseen:
            return self._foreseen.popleft()
        return ItemSpan(0 if self._order is None else self._order.known)

    def begins(self, number: int, span: ItemSpan) -> None:
        """Record that the item of this span is the plan's object with this number."""
        if span.n:  # keeps the number of spans within the horizon
            self._begun[number] = span

    def is_made(self, place: Place, block: Block) -> bool | None:
        """Return whether the reader was at this place; None when the order does not have it."""
        span = self._span(place, block)
        if span is None or self._order is None:
            return None
        return self._order.is_made(block, _position(span, place[1]))

    def may_be_at(self, block: Block, place: Place) -> bool | None:
        """Return whether a read of `block` may have been for this place; None if the order does not have it."""
        span = self._span(place, block)
        return None if span is None else self._may_be_at(block, _position(span, place[1]))

    def _span(self, place: Place, block: Block) -> ItemSpan | None:
        """Return the span of the object at a place; None if it is of another version of the object."""
        span = self._begun.get(place[0])
        return span if span is not None and span.key == block[0] else None

    def may_be_later(self, block: Block, i: int) -> bool | None:
        """Return `may_be_at` for the first block of the item after the next `i`."""
        return self._may_be_at(block, self._foreseen[i].at) if i < len(self._foreseen) else None

    def _may_be_at(self, block: Block, position: int) -> bool | None:
        return None if self._order is None else self._order.may_be_at(block, position)

    def ask(self, block: Block, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be requested now, or has to wait for the reader.

        A block that `is_awaited` may be requested in any case.
        """
        return self._order is None or self._order.ask(block, is_awaited=is_awaited)

    def stored(self, block: Block) -> None:
        """Record that a block is cached."""
        if self._order is not None:
            self._order.stored([block])

    def lost(self, block: Block) -> None:
        """Record that a block is no longer cached."""
        if self._order is not None:
            self._order.lost([block])

    def reached(self, place: Place) -> None:
        """Record that the reader is about at this place, or beyond it."""
        while self._begun and (number := next(iter(self._begun))) <= place[0]:
            span = self._begun[number]
            self._reached = span.at + span.n if number < place[0] else _position(span, place[1])
            if number == place[0]:
                break
            del self._begun[number]
        if self._order is not None:
            self._order.reached(self._reached)


def _position(span: ItemSpan, index: int) -> int:
    """Return where the order uses a block of an item; at most one past the item's end."""
    return span.at + min(max(0, index - span.first), span.n)
