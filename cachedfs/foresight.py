"""What a plan will use beyond what it got to, as far as its items tell: from this follows what may go to make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from cachedfs.engine import Engine
from cachedfs.items import MOST, Item, Items
from cachedfs.model import ObjectKey
from cachedfs.orders import Block, Order, Use
from cachedfs.plan.blocks import block_range, clip, covering
from cachedfs.plan.window import Place
from cachedfs.source import Source

__all__ = ["Beyond", "Foresight"]

HORIZON = MOST  # uses that are known ahead: 16 to 32 MB
NEAR = 4096  # items that are known ahead while all of them may stay
AT_ONCE = 128  # items that are looked at before the loop serves others
PASSING = 64 << 20  # bytes that are under way, where there is no window

# What comes later, each with whether its reader may be there as far as the order tells, and with what goes on from there.
Beyond = Iterator[tuple[Block | None, Callable[[], bool | None], Callable[[], None]]]


class Span(NamedTuple):
    """The uses of one item: the position of the first in the order, how many there are, and the first block."""

    at: int
    n: int = 0
    first: int = 0
    key: ObjectKey | None = None  # of the version that it was when its uses were noted


class Foresight:
    """The order of one plan, from what its items are known to be. On the engine's loop.

    It goes as far as objects are known: an item of which nothing is known ends it, until the plan has asked what it is. A plan
    that runs is one of those that share the bound, from `begin` to `close`.
    """

    def __init__(self, source: Source, items: Items, strip: Callable[[str], str], window: float) -> None:
        self._source, self._items, self._strip = source, items, strip
        self._window = int(min(window, PASSING))
        self._foreseen: deque[Span] = deque()  # of the items that come next
        # By number, in order: those that the plan got to and its reader did not pass.
        self._begun: dict[int, Span] = {}
        self._reached = 0  # in the order: about where the reader is
        self._order: Order | None = None
        self._engine: Engine | None = None

    def begin(self) -> None:
        self._engine = engine = self._source.engine  # at its end it is no longer the source's
        self._order = Order(engine.cache, self._source.config.bounds, horizon=HORIZON, window=self._window)
        engine.orders.append(self._order)
        if (seat := self._order.seat) is not None:
            engine.writer.after_facts(partial(engine.cache.clear_seat, seat))

    def close(self) -> None:
        order, self._order = self._order, None
        if order is not None and self._engine is not None:
            self._engine.orders.remove(order)
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
            self._foreseen.append(Span(self._order.known, len(uses), first, key))
            self._order.extend(uses)
        return True

    def _uses_of(self, item: Item) -> list[Use] | None:
        """Return the uses of one item, None when it is not known what it is."""
        path = self.path_of(item)
        known = None if path is None else self._source.fresh(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None:
            return None
        size = known.object.size or 0
        blocks = covering(clip(*(item.range or (None, None)), size), key.block_size)
        return [(key, index, block_range(index, key.block_size, size).size) for index in blocks]

    def path_of(self, item: Item) -> str | None:
        """Return the path that an item names which is only looked at; None where it names none: the plan is told once there."""
        try:
            return self._strip(item.text)
        except (ValueError, ImportError):  # of a protocol that nobody knows, or whose package is missing
            return None

    # What the plan does.

    def took(self) -> Span:
        """The plan took its next item."""
        if self._foreseen:
            return self._foreseen.popleft()
        return Span(0 if self._order is None else self._order.known)

    def begins(self, number: int, span: Span) -> None:
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

    def _span(self, place: Place, block: Block) -> Span | None:
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


def _position(span: Span, index: int) -> int:
    """Return where in the order a block of an item is used, one behind its end at most."""
    return span.at + min(max(0, index - span.first), span.n)
