"""What a plan at work will read, in order: what it may ask for, and what the cache may remove for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from cachedfs.cache import BlockCache
from cachedfs.model import Bounds, ObjectKey
from cachedfs.plan.reading import Reading
from cachedfs.plan.schedule import Access, Schedule

__all__ = ["Block", "Order", "Use", "order_of"]

# What is read once takes at most this part of all that is read, or two blocks: so much less of it is hit in each epoch.
PASSING = 192

Block = tuple[ObjectKey, int]


Use = tuple[ObjectKey, int, int]  # one read of a block: its index, and the bytes that it has


class Order:
    """The order of one plan in one cache, for any thread: the loop moves it on while the writer asks what to remove.

    Who runs the plan calls `extend` when there is room within the horizon, `reached` when its reader may have got further, and
    `ask` before it asks for a block; then it looks whether that is here (`stored`), and else fetches it. Of what is fetched the
    engine reports the end by itself, for all orders in `engine.orders`, whoever asked for it. `lost` is for what did not come,
    and for what the runner finds missing of what is to be read next. `close` when the plan ends.

    Which uses were made is told by touches: see `Reading`.

    `window`: about the bytes that will be ahead of the reader.
    """

    def __init__(self, cache: BlockCache, bounds: Bounds, *, horizon: int, window: int) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._schedule: Schedule[Block] = Schedule(horizon=horizon)
        self._window, self._largest = window, 0
        self._reading = Reading(self._schedule, lambda block: cache.last_use(*block))
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
        accesses = [Access((key, index), size_of(key, size)) for key, index, size in islice(uses, room)]
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


def order_of(orders: Sequence[Order], key: ObjectKey, index: int) -> Order | None:
    """Return the first order that a block is in."""
    return next((order for order in orders if (key, index) in order), None)
