"""Belady's rule for one prefetch plan: where its readers are, what stays cached, and what to evict first."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile
from typing import NamedTuple, TypeVar

from cachedfs.cache.block_file import file_size
from cachedfs.common.types import BlockKey
from cachedfs.common.version import Version

HORIZON = 1 << 18  # most uses known at a time; they take about 100 MB of memory
NEVER = math.inf  # the position of the next use if none is known
MOST_OF_THE_WAY = 0.75  # between two uses of a block; with a half, slow threads counted for the next use
# Blocks that do not stay take at most 1/192 of the bytes of the plan, or two blocks. The hit ratio falls by that share.
PASSING = 192
PASSING_BYTES = 64 << 20
AHEAD = 0.9  # share of the plan's bytes that may be ahead of the readers
QUARTER = (
    4  # the part of what may be ahead whose space suffices for a request: it arrives while the rest is read
)
REGAIN = 32  # of the bytes that are read, 1 / REGAIN are added to a limit that was lowered
RECENT = 4096  # reads of blocks that the plan does not know yet

T = TypeVar("T")
# Not cached; evicted first; fetched and to be read; until its next use.
AWAY, SPARE, AWAITED, STAYS = range(4)


class Use(NamedTuple):
    """One use of a block: its position in the plan (a later one has a higher number) and its bytes of data."""

    position: float
    version: Version
    block: int
    size: int


@dataclass(eq=False, slots=True)
class _Block:
    """One block, with the positions of its uses that are not over, in order."""

    version: Version
    index: int
    size: int  # in the cache
    uses: list[float] = field(default_factory=list)
    n_asked: int = 0  # of these, the first, which the block was fetched for
    is_here: bool = False  # it has arrived, or was found in the cache
    place: int = AWAY
    stays_for: float = NEVER  # the use that it stays for
    last: tuple[float, float] | None = None  # the last use that was read, and where the readers were then

    @property
    def following(self) -> float:
        """The first use that the block was not fetched for."""
        return self.uses[self.n_asked] if self.n_asked < len(self.uses) else NEVER


class Belady:
    """The blocks of one plan in a cache that cannot hold all of them. Safe from any thread.

    The plan adds the uses that it knows, and asks before it fetches. The rule is applied there, as if the reader were
    there too: of all blocks, those stay whose following uses come first. Any other block *passes*: it is cached until
    it was read. What is neither needed by a reader nor stays is evicted first.

    What others store may evict blocks of the plan. Each block that is found missing lowers the limit of the plan's
    bytes, so that plans of several processes share a cache. `reads`: returns the blocks (by hash64) that were read
    since its last call. `has`: whether a block is cached. `is_in_memory`: whether it is in flight, or not stored yet.
    """

    def __init__(
        self,
        *,
        window: float = math.inf,
        reads: Callable[[], Iterable[int]],
        has: Callable[[Version, int], bool],
        is_in_memory: Callable[[Version, int], object],
    ) -> None:
        self._lock = threading.Lock()
        self._capacity = self._limit = math.inf
        self.window, self._reads, self._has, self._in_memory = window, reads, has, is_in_memory
        self._blocks: dict[int, _Block] = {}  # by hash64: with uses to come, or cached
        self._bytes = [0, 0, 0, 0]  # of the blocks, by place
        self._n_uses = 0
        # The uses that blocks were fetched for: beyond the readers in order, each with its bytes, and behind them.
        self._before: list[tuple[float, int, _Block | None]] = []
        self._passed: deque[tuple[float, _Block]] = deque()
        self._staying: list[tuple[float, _Block]] = []  # in the order of the uses that they stay for
        self._spare: dict[_Block, None] = {}  # in the order in which they became so
        self._early: set[int] = set()  # not known yet, and read since the readers came further
        self.reader = -1.0  # the position of the furthest use that was read
        self.ahead = 0  # bytes of data that are beyond the readers, or were requested for there
        self.fetched = 0  # bytes since the plan began, also of blocks that it does not know yet

    def fit(self, capacity: float) -> None:
        """Set how many bytes the cache holds at most."""
        self._capacity = self._limit = capacity

    # What the plan may do.

    @property
    def room(self) -> int:
        """The number of further uses that `add` would take."""
        return HORIZON - self._n_uses

    @property
    def is_tight(self) -> bool:
        """True if the known or fetched blocks need more than half of the plan's bytes, so that evictions come soon."""
        return 2 * max(sum(self._bytes), self.fetched) > self._limit

    @property
    def most_ahead(self) -> float:
        """The most bytes that may be ahead of the readers now."""
        # While somebody reads, fetching early takes the place of blocks that are used again sooner.
        is_read = self.window < math.inf or self.reader >= 0
        return min(self.window, AHEAD * self._limit / (2 if is_read else 1))

    def add(self, uses: Iterable[Use]) -> None:
        """Add known uses, up to the horizon."""
        with self._lock:
            for use in uses:
                if self._n_uses >= HORIZON:
                    return
                self._add(use)

    def ask(self, uses: Sequence[Use], *, is_cached: bool = False) -> int:
        """Return for how many of these adjacent uses blocks may be fetched now; they count as ahead of the readers.

        There is room for all of them, or for a part of what may be ahead, so that requests are large. If nothing is
        ahead, or less than half of a requested window, it is one in any case. 0: the readers have to read first.
        """
        with self._lock:
            n, most = 0, self.most_ahead
            room = most - self.ahead
            if is_cached or room >= min(sum(use.size for use in uses), most / QUARTER):
                while n < len(uses) and uses[n].size <= room:
                    if not self._ask(uses[n], is_cached=is_cached, is_sure=is_cached):
                        break
                    room -= uses[n].size
                    n += 1
            least = most / 2 if self.window < math.inf and not is_cached else 1
            if not n and (self.ahead < least or uses[0].position <= self.reader):
                n = self._ask(uses[0], is_cached=is_cached, is_sure=True)
            return n

    def holds(self, use: Use) -> bool:
        """Return whether the block came for an earlier use, which is still ahead of the readers."""
        block = self._blocks.get(use.version.hash64(use.block))
        return block is not None and block.is_here and block.n_asked > 0

    def _ask(self, use: Use, *, is_cached: bool, is_sure: bool) -> bool:
        """Return whether there is room for a block until it is read, or `is_sure`. If so, its use counts.

        `is_cached`: the plan has just found it in the cache, or knows that it came.
        """
        block = self._blocks.get(use.version.hash64(use.block))
        if (block is None or use.position not in block.uses) and use.position > self.reader:
            block = self._add(use) if self._n_uses < HORIZON else None
            if block is None:
                insort(self._before, (use.position, use.size, None))
                self.ahead += use.size
        if block is None or use.position not in block.uses[block.n_asked :]:
            return True
        where = block.version, block.index
        if block.is_here and not (is_cached or self._in_memory(*where) or self._has(*where)):
            self._evicted(block)
        block.n_asked += 1
        self._keep(block)
        if self._held > self._limit and not is_sure:
            block.n_asked -= 1
            self._keep(block)
            return False
        if use.position > self.reader:
            insort(self._before, (use.position, use.size, block))
            self.ahead += use.size
        else:
            self._passed.append((use.position, block))
        return True

    # What happened.

    def arrived(self, use: Use) -> None:
        """Record that a block is cached, or will be once it is stored."""
        with self._lock:
            if (block := self._blocks.get(use.version.hash64(use.block))) is not None:
                block.is_here = True
                self._keep(block)

    def remove(self, uses: Iterable[Use]) -> None:
        """Remove uses of an object that failed or was replaced."""
        with self._lock:
            for use in uses:
                block = self._blocks.get(use.version.hash64(use.block))
                if block is not None and use.position in block.uses:
                    self._end(block, use.position)

    def look(self) -> bool:
        """Follow the readers; return whether they came further."""
        with self._lock:
            return self._follow()

    def _follow(self) -> bool:
        before = self.reader
        for number in self._reads():
            if (block := self._blocks.get(number)) is None:
                self._early = self._early if len(self._early) < RECENT else set()
                self._early.add(number)
            elif block.uses and self._is_next_use(block):
                if block.uses[0] > self.reader:
                    self._early.clear()
                self._read(block, block.uses[0])
        return self.reader > before

    def _is_next_use(self, block: _Block) -> bool:
        """Return whether a read is the next use of a block, and not another read of its last one.

        Several threads read at a time. At the end of an epoch, a slow one reads what is used again just ahead of the
        fast ones. So the readers must have come most of the way since the last use.
        """
        if block.last is None:
            return True
        position, reader = block.last
        return self.reader + 1 - reader > MOST_OF_THE_WAY * (block.uses[0] - position)

    def _read(self, block: _Block, position: float) -> None:
        block.last = position, max(position, self.reader + 1)
        block.is_here = True
        if position > self.reader:
            self._pass(position)
        self._end(block, position)
        self._limit = min(self._capacity, self._limit + block.size / REGAIN)

    def _pass(self, position: float) -> None:
        """Move the readers to a position: nothing before it is ahead any more, but slow readers may need it."""
        n = bisect_left(self._before, (position, math.inf))
        for passed, size, block in self._before[:n]:
            self.ahead -= size
            if block is not None:
                self._passed.append((passed, block))
        del self._before[:n]
        self.reader = position
        n_fit = len(self._blocks) * self._limit // max(1, sum(self._bytes))
        while self._passed and self._passed[0][0] < position - n_fit:
            passed, slow = self._passed.popleft()
            if passed in slow.uses:
                slow.last = passed, position + 1  # a read that comes later is none of the next use
                self._end(slow, passed)

    # What to evict.

    def store(
        self, fetched: Iterable[tuple[BlockKey, T]]
    ) -> tuple[list[tuple[BlockKey, T]], Iterator[BlockKey]]:
        """Return which of these blocks to store, and an iterator over those to evict if the cache is full.

        What nobody needs any more is not stored if it would be evicted next.
        """
        with self._lock:
            self._follow()  # what was just read may be what to evict
            found = [(pair, self._blocks.get(pair[0].hash64)) for pair in fetched]
            for _, block in found:  # those that a reader fetched count from now on
                if block is not None:
                    block.is_here = True
                    self._keep(block)
            over = self._held + self._bytes[SPARE] - self._limit
            sizes = accumulate((block.size for block in self._spare), initial=0)
            oldest = {
                block for block, before in zip(self._spare, takewhile(over.__gt__, sizes), strict=False)
            }
            for block in oldest.intersection(block for _, block in found if block is not None):
                self._evicted(block, is_lower=False)
            stored = [pair for pair, block in found if block not in oldest]
            ours = [block for _, block in found if block is not None and block not in oldest]
            is_again = any(block.last is not None for block in ours)
        return stored, self._victims(is_again=is_again) if ours else iter(())

    def _victims(self, *, is_again: bool) -> Iterator[BlockKey]:
        """Yield blocks to evict; each counts as evicted.

        First what nobody needs, then what stays for the furthest use, as long as the plan has more than its limit. To
        store a block again, the plan evicts its own blocks in any case, and has no more than these from then on.
        """
        while (victim := self._next_victim(is_again=is_again)) is not None:
            yield victim.version.block(victim.index)

    def _next_victim(self, *, is_again: bool) -> _Block | None:
        with self._lock:
            while (is_over := self._held + self._bytes[SPARE] > self._limit) or is_again:
                by_order = chain(self._spare, (block for _, block in reversed(self._staying)))
                idle = (
                    each
                    for each in by_order
                    if not (each.n_asked or self._in_memory(each.version, each.index))
                )
                if (block := next(idle, None)) is None:
                    break
                was_held, is_cached = block.place == STAYS, self._has(block.version, block.index)
                self._evicted(block, is_lower=not is_over or (was_held and not is_cached))
                if is_cached:
                    return block
        return None

    def _evicted(self, block: _Block, *, is_lower: bool = True) -> None:
        """Record that a block is not cached; `is_lower`: for want of space, which lowers the limit."""
        block.is_here = False
        self._put(block, NEVER)
        if is_lower:
            self._limit = max(2 * block.size, self._limit - block.size)

    # Belady's rule.

    @property
    def _held(self) -> int:
        return self._bytes[AWAITED] + self._bytes[STAYS]

    def _keep(self, block: _Block) -> None:
        """Let a block stay for its following use, if others are used later. These stay no longer."""
        following = block.following if block.is_here or block.n_asked else NEVER
        if following == block.stays_for < NEVER:
            return
        self._put(block, NEVER)
        if following == NEVER:
            return
        passing = max(sum(self._bytes) // PASSING, 2 * block.size)
        most = self._limit - min(passing, self.window, PASSING_BYTES, self._limit // 4)
        while self._bytes[STAYS] + block.size > most:
            if not self._staying or self._staying[-1][0] <= following:
                return
            self._put(self._staying[-1][1], NEVER)
        self._put(block, following)

    # Bookkeeping.

    def _add(self, use: Use) -> _Block:
        number = use.version.hash64(use.block)
        if (block := self._blocks.get(number)) is None:
            block = self._blocks[number] = _Block(use.version, use.block, file_size(use.version, use.size))
            self._bytes[AWAY] += block.size
        insort(block.uses, use.position)
        self._n_uses += 1
        # Further on, it may be another read of a former use.
        if number in self._early and use.position <= self.reader + len(self._early):
            self._early.remove(number)
            self._read(block, use.position)
        elif block.place == SPARE:
            self._keep(block)
        return block

    def _end(self, block: _Block, position: float) -> None:
        """Remove a use of a block: it was read, or will not be."""
        at = block.uses.index(position)
        del block.uses[at]
        self._n_uses -= 1
        block.n_asked -= at < block.n_asked
        at = bisect_left(self._before, (position,))
        if at < len(self._before) and self._before[at][0] == position:
            self.ahead -= self._before.pop(at)[1]
        self._keep(block)

    def _put(self, block: _Block, stays_for: float) -> None:
        """Let a block stay for a use, or not at all, and count it where it belongs."""
        if block.stays_for < NEVER:
            del self._staying[bisect_left(self._staying, (block.stays_for,))]
        if stays_for < NEVER:
            insort(self._staying, (stays_for, block))
        block.stays_for = stays_for
        self._bytes[block.place] -= block.size
        was_spare = block.place == SPARE
        block.place = STAYS if stays_for < NEVER else AWAITED if block.n_asked else int(block.is_here)
        self._bytes[block.place] += block.size
        if was_spare and block.place != SPARE:
            del self._spare[block]
        elif block.place == SPARE and not was_spare:
            self._spare[block] = None
            if len(self._spare) > HORIZON:  # the cache evicts it like any other
                oldest = next(iter(self._spare))
                oldest.is_here = False
                self._put(oldest, NEVER)
        if block.place == AWAY and not block.uses:
            self._bytes[AWAY] -= block.size
            del self._blocks[block.version.hash64(block.index)]
