"""Window of a prefetch plan: how far it is and may be ahead of its reader, and where the reader is."""

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

LOOK = 128  # pieces checked at a time
STALL_S = 1.0  # without a read of the blocks ahead; then the reader may be elsewhere
FILL = 0.9  # share of the cache that a plan may fill before any of it is read
READ = 0.45  # share that may be ahead of a reader, since the blocks just read take as much again
BLOCK_EXTRA = 512  # bytes of a block beside its data: trailer and index row


class PrefetchWindow:
    """The blocks of a plan that are ready or in flight, and unread. Event loop thread only.

    Their bytes stay within the window, and within the plan's share of the cache. Access records, which the
    readers of all processes write, show what was read.
    """

    def __init__(self, source: Source, foresight: FutureReads, window: int | None) -> None:
        self._cache, self._flights = source.runtime.cache, source.runtime.inflight_requests
        self._bounds = source.config.bounds
        self._foresight = foresight
        self._window = math.inf if window is None else window
        self._fill = FILL if window is None else READ
        self._is_draining = False  # more is ahead than a reader may have; all of it has to be read first
        self._shrunk = math.inf  # bytes that turned out to stay cached until they are read
        self._unread: UnreadBlocks[Block] = UnreadBlocks()
        self._reserved = 0  # bytes requested of objects that are not looked up yet
        self._clock = self._cache.clock(self._bounds)  # access clock at the last check of what was read
        # Since when no block ahead was read: monotonic time and access clock.
        self._stalled_at: tuple[float, int] | None = None
        self._beyond: Beyond | None = None  # blocks still to be checked for the reader

    def close(self) -> None:
        self._unread = UnreadBlocks()

    # Limit what is ahead.

    @property
    def ahead(self) -> int:
        """Bytes that are ready for the reader or in flight."""
        return self._unread.size + self._reserved

    @property
    def limit(self) -> float:
        """Most bytes that may be ahead of the reader: the window, and no more than stays until it is read."""
        allowed = self._cache.allowed
        if allowed is not None and self._foresight.share is not None:
            allowed = min(allowed, self._foresight.share)
        fits = math.inf if allowed is None else self._fill * allowed - BLOCK_EXTRA * self._unread.n
        return 0 if self._is_draining else max(0, min(self._window, self._shrunk, fits))

    @property
    def is_short(self) -> bool:
        """True when nothing is ahead, or less than half of a requested window.

        Then blocks that are kept for later uses make room for more.
        """
        least = 0 if self._window == math.inf else min(self._window, self.limit) / 2
        return not self.ahead or self.ahead < least

    @property
    def is_reserved(self) -> bool:
        return self._reserved > 0

    def take(self, sizes: Sequence[int], most: int) -> int:
        """Return how many of these adjacent blocks one request of up to `most` bytes may bring now."""
        return take(sizes, ahead=self.ahead, limit=self.limit, most=most)

    def fits(self, size: int) -> bool:
        """Return whether a block that needs no request may be added."""
        return not self.ahead or self.ahead + size <= self.limit

    def reserve(self, size: int) -> None:
        """Count bytes that are requested before their blocks are known."""
        self._reserved += size

    def release(self, size: int) -> None:
        """Undo `reserve`."""
        self._reserved -= size

    def add(self, piece: FutureBlock[Block]) -> None:
        """Add a block that is ready for the reader or in flight."""
        # True if an earlier place has this block; a recent read of it was for that place.
        is_awaited = piece.block in self._unread
        self._unread.add(piece, self._clock_of(piece.block))
        if is_awaited or self._stalled_at is None or not self._was_read(piece.block, self._stalled_at[1]):
            return
        if self._foresight.may_be_at(piece.block, piece.place) is not False:
            self._unread.pass_to(piece.place, self._clock_of)  # the reader got there before the plan

    def remove(self, number: int) -> None:
        """Remove the blocks of the plan's object `number`, which failed."""
        self._unread.remove(number, self._clock_of)

    # Find the reader.

    def first(self) -> list[Place]:
        """Return the first unread place; an empty list if there is none."""
        return [piece.place for piece in islice(self._unread, 1)]

    def look(self, *, is_held: bool) -> bool:
        """Check what was read; return whether the reader moved. `is_held`: the plan waits for that."""
        before, self._clock = self._clock, self._cache.clock(self._bounds)
        passed = self._unread.look(self._clock_of, LOOK, self._was_for)
        if passed:
            self._shrunk += passed / 4
            self._stalled_at = None
            if is_held and self._fill == FILL:
                self._fill, self._is_draining = READ, True
        if not self.ahead:
            self._is_draining = False
        if self._stalled_at is None:  # reads since the last check may be of later blocks
            self._stalled_at, self._beyond = (time.monotonic(), before), None
        return passed > 0

    def forget_lost(self, coming: Container[int]) -> None:
        """Remove blocks that were evicted before they were read, and shrink the window.

        `coming` has the numbers of the objects with blocks still to arrive.
        """
        lost = None
        for place, (key, index), *_ in self._unread:
            # In this order: a block leaves the in-flight requests only when its file exists.
            if place[0] in coming or key.name(index) in self._flights or self._cache.has(key, index):
                break
            lost = place
            self._foresight.lost((key, index))
        if lost is not None:
            self._unread.pass_to(lost, self._clock_of)
            self._shrunk = min(self._shrunk, FILL * self._unread.size)
            logger.info("prefetched data is evicted before it is read: %d bytes stay", self._shrunk)

    def look_further(self, all_beyond: Callable[[], Beyond], end: Place) -> bool:
        """Continue where the reader is, if that is beyond all blocks ahead; return whether it is.

        Called only when these blocks were not read for a while, though others were. `end` is a place after
        all of them.
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
        """Return whether a read of `block` was for this place, and not for an earlier use that was passed."""
        return self._foresight.is_made(place, block) is not False

    def _was_read(self, block: Block | None, since: int) -> bool:
        if block is None or block in self._unread.passed:  # read, but for an earlier place of the plan
            return False
        used = self._clock_of(block)
        return used is not None and is_after(used, since)

    def _clock_of(self, block: Block) -> int | None:
        return self._cache.last_use(*block)
