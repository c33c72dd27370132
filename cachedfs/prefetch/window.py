"""How far a plan is ahead of its reader, and how far it may be; and where its reader is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Sequence
from itertools import islice

from cachedfs.cache.eviction.future_uses import Block
from cachedfs.fetch.source import Source
from cachedfs.prefetch.future_reads import (
    Beyond,
    FutureBlock,
    FutureReads,
    Place,
    UnreadBlocks,
    is_after,
    take,
)

__all__ = ["PrefetchWindow"]

logger = logging.getLogger("cachedfs.prefetch")

LOOK = 128  # pieces that are looked at at a time
STALL_S = 1.0  # without a read of what is ahead: then its reader may be elsewhere
FILL = 0.9  # of what the cache may hold: what a plan brings at most before anything of it is read,
READ = 0.45  # and what may be ahead of a reader: what is ahead and what he had move in front of one another
BLOCK_EXTRA = 512  # bytes of a block beside its own: its trailer, its row


class PrefetchWindow:
    """What is ready for the reader of a plan or on its way, and unread. On the runtime's loop.

    It stays within the window and within what the cache may hold for this plan. What was read is told by touches, of whatever
    process.
    """

    def __init__(self, source: Source, foresight: FutureReads, window: int | None) -> None:
        self._cache, self._flights = source.runtime.cache, source.runtime.inflight_requests
        self._bounds = source.config.bounds
        self._foresight = foresight
        self._window = math.inf if window is None else window
        self._fill = FILL if window is None else READ
        self._is_draining = False  # more is ahead than may be of a reader: he has to read all of it first
        self._shrunk = math.inf  # what turned out to stay in the cache until it is read
        self._unread: UnreadBlocks[Block] = UnreadBlocks()
        self._reserved = 0  # bytes that were asked for of objects that are not known yet
        self._clock = self._cache.clock(self._bounds)  # of touches, when it was looked what is read
        # Since when nothing of what is ahead is read, by the clocks of time and of touches.
        self._stalled_at: tuple[float, int] | None = None
        self._beyond: Beyond | None = None  # what is still to be looked at, to find the reader there

    def close(self) -> None:
        self._unread = UnreadBlocks()

    # What is ahead.

    @property
    def ahead(self) -> int:
        """Bytes that are ready for the reader, or on their way."""
        return self._unread.size + self._reserved

    @property
    def limit(self) -> float:
        """How many bytes may be ahead of the reader: the window, and no more than stays until it is read."""
        allowed = self._cache.allowed
        if allowed is not None and self._foresight.share is not None:
            allowed = min(allowed, self._foresight.share)
        fits = math.inf if allowed is None else self._fill * allowed - BLOCK_EXTRA * self._unread.n
        return 0 if self._is_draining else max(0, min(self._window, self._shrunk, fits))

    @property
    def is_short(self) -> bool:
        """Whether nothing is ahead, or less than half of a window that was asked for: then what stays makes room for more."""
        least = 0 if self._window == math.inf else min(self._window, self.limit) / 2
        return not self.ahead or self.ahead < least

    @property
    def is_reserved(self) -> bool:
        return self._reserved > 0

    def take(self, sizes: Sequence[int], most: int) -> int:
        """Return how many of these adjacent blocks one request of up to `most` bytes may bring now."""
        return take(sizes, ahead=self.ahead, limit=self.limit, most=most)

    def fits(self, size: int) -> bool:
        """Return whether a block may be ahead that need not be asked for."""
        return not self.ahead or self.ahead + size <= self.limit

    def reserve(self, size: int) -> None:
        """So many bytes are asked for, nobody knows of which blocks."""
        self._reserved += size

    def release(self, size: int) -> None:
        self._reserved -= size

    def add(self, piece: FutureBlock[Block]) -> None:
        """A block is ready for the reader now, or on its way."""
        # At an earlier place, which a read that was just made is of.
        is_awaited = piece.block in self._unread
        self._unread.add(piece, self._clock_of(piece.block))
        if is_awaited or self._stalled_at is None or not self._was_read(piece.block, self._stalled_at[1]):
            return
        if self._foresight.may_be_at(piece.block, piece.place) is not False:
            self._unread.pass_to(piece.place, self._clock_of)  # the reader was there first

    def remove(self, number: int) -> None:
        """Nothing of this object of the plan comes."""
        self._unread.remove(number, self._clock_of)

    # Where the reader is.

    def first(self) -> list[Place]:
        """Return the first place that is ready and unread, if there is one."""
        return [piece.place for piece in islice(self._unread, 1)]

    def look(self, *, is_held: bool) -> bool:
        """Look what was read; return whether the reader moved. `is_held`: the plan waits until it does."""
        before, self._clock = self._clock, self._cache.clock(self._bounds)
        passed = self._unread.look(self._clock_of, LOOK, self._was_for)
        if passed:
            self._shrunk += passed / 4
            self._stalled_at = None
            if is_held and self._fill == FILL:
                self._fill, self._is_draining = READ, True
        if not self.ahead:
            self._is_draining = False
        if self._stalled_at is None:  # all that was read since the look before may be of what comes later
            self._stalled_at, self._beyond = (time.monotonic(), before), None
        return passed > 0

    def forget_lost(self, coming: Container[int]) -> None:
        """Forget what had come and is not here any more, and stay nearer to the reader from now on.

        `coming`: the objects of which not everything came yet.
        """
        lost = None
        for place, (key, index), *_ in self._unread:
            # In this order: what is stored meanwhile leaves the requests only when its file is there.
            if place[0] in coming or key.name(index) in self._flights or self._cache.has(key, index):
                break
            lost = place
            self._foresight.lost((key, index))
        if lost is not None:
            self._unread.pass_to(lost, self._clock_of)
            self._shrunk = min(self._shrunk, FILL * self._unread.size)
            logger.info("what is prefetched leaves the cache before it is read: %d bytes stay", self._shrunk)

    def look_further(self, all_beyond: Callable[[], Beyond], end: Place) -> bool:
        """Go on where the reader is, if that is beyond all that is ahead of it; return whether it is.

        Asked only when nothing of that was read for a while, though other blocks were. `end`: a place behind all of it.
        """
        assert self._stalled_at is not None
        since, began = self._stalled_at
        if time.monotonic() - since < STALL_S or self._clock == began:
            return False
        if self._beyond is None:
            self._beyond = all_beyond()
        looked_at = list(islice(self._beyond, LOOK))
        if not looked_at:
            self._beyond = None
        there = [
            go_on
            for block, may_be, go_on in looked_at
            if self._was_read(block, began) and may_be() is not False
        ]
        if there:
            self._unread.pass_to(end, self._clock_of)
            self._stalled_at = None
            there[-1]()
        return bool(there)

    def _was_for(self, block: Block, place: Place) -> bool:
        """Return whether a block that was read was so for this place, and for none that was passed before somebody got to it."""
        return self._foresight.is_made(place, block) is not False

    def _was_read(self, block: Block | None, since: int) -> bool:
        if block is None or block in self._unread.passed:  # it was read, but at an earlier place of the plan
            return False
        used = self._clock_of(block)
        return used is not None and is_after(used, since)

    def _clock_of(self, block: Block) -> int | None:
        return self._cache.last_use(*block)
