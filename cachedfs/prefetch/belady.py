"""Belady's rule for the blocks of one prefetch plan: where its readers are, what stays cached, what to evict first."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

from cachedfs.cache.block_file import file_size
from cachedfs.common.types import BlockKey
from cachedfs.core.version import Version

__all__ = ["Belady", "Use"]

HORIZON = 1 << 18  # most uses known at a time; they take about 100 MB of memory
NEVER = math.inf  # the position of the next use if none is known
MOST_OF_THE_WAY = 0.75  # between two uses of a block; with a half, slow threads counted for the next use
# Blocks that do not stay take at most 1/192 of the bytes of the plan, or two blocks. The hit ratio drops by that share.
PASSING = 192
PASSING_BYTES = 64 << 20
AHEAD = 0.9  # share of the plan's bytes that may be ahead of the readers
REGAIN = 32  # of the bytes that are read, 1 / REGAIN are added to a limit that was lowered
RECENT = 4096  # reads of blocks that the plan does not know yet, and blocks without uses, that are remembered
_FEW = 64  # heap entries below which cleaning up the heap is not worth the time

T = TypeVar("T")


class Use(NamedTuple):
    """One use of a block: its position in the plan (a later one has a higher number) and its bytes of data."""

    position: float
    version: Version
    block: int
    size: int


@dataclass(eq=False, slots=True)
class _Block:
    """One block: the positions of its uses that are not over, in order, and why it is cached."""

    version: Version
    index: int
    size: int  # in the cache
    uses: list[float] = field(default_factory=list)
    n_waiting: int = 0  # of these, uses that the block was fetched for
    following: float = NEVER  # the use that it stays for after those; NEVER: it does not stay
    is_held: bool = False  # it waits, or stays: its bytes count
    is_here: bool = False  # it has arrived, or was found in the cache
    last: tuple[float, float] | None = None  # the last use that was read, and where the readers were then


class Belady:
    """The blocks of one plan in a cache that holds at most `capacity` bytes of them. Safe from any thread.

    The plan adds the uses that it knows and asks before it fetches. The rule is applied there, as if the reader were
    there too: of all blocks, those stay whose following uses come first. Any other block *passes*: it is cached until
    it was read. `victims` yields what is neither needed by a reader nor stays.

    What others store may evict blocks of the plan. Each block that is found missing lowers the limit of the plan's
    bytes, so that plans of several processes share a cache. `has`: whether a block is cached. `is_in_memory`: whether
    it is in flight, or not stored yet.
    """

    def __init__(
        self,
        capacity: float,
        *,
        window: float = math.inf,
        has: Callable[[Version, int], bool],
        is_in_memory: Callable[[Version, int], object],
    ) -> None:
        self._lock = threading.Lock()
        self._capacity = self._limit = capacity
        self._window, self._has, self._in_memory = window, has, is_in_memory
        self._blocks: dict[int, _Block] = {}  # by hash64: with uses to come, or cached
        # Bytes of all, and of those that are held, that stay, and that are spare.
        self._size = self._held = self._staying = self._spare_size = 0
        self._n_uses = self._untracked = 0
        # The uses that blocks were fetched for, with their bytes. The positions beyond the readers are sorted.
        self._waiting: dict[float, tuple[_Block, int]] = {}
        self._before: list[float] = []
        self._passed: deque[float] = deque()
        self._order: list[
            tuple[float, int, _Block]
        ] = []  # heap of those that stay, the last following use first
        self._ties = count()
        self._spare: dict[_Block, None] = {}  # cached and neither held, in the order in which they became so
        self._early: dict[int, None] = {}  # not known yet, and read since the readers came further
        self._former: dict[int, _Block] = {}  # without uses: another read of the last use is none of the next
        self.reader = -1.0  # the position of the furthest use that was read
        self.ahead = 0  # bytes of data that are beyond the readers, or were requested for there

    # What the plan may do.

    @property
    def room(self) -> int:
        """The number of further uses that `add` would take."""
        return HORIZON - self._n_uses

    @property
    def is_tight(self) -> bool:
        """True if the known blocks need more than half of the plan's bytes, so that evictions come soon."""
        return 2 * self._size > self._limit

    @property
    def has_window(self) -> bool:
        """True if the plan keeps no more than a requested window ahead of its readers."""
        return self._window < math.inf

    @property
    def most_ahead(self) -> float:
        """The most bytes that may be ahead of the readers now."""
        # While somebody reads, fetching early takes the place of blocks that are used again sooner.
        is_read = self.has_window or self.reader >= 0
        return min(self._window, AHEAD * self._limit / (2 if is_read else 1))

    @property
    def is_short(self) -> bool:
        """True when nothing is ahead, or less than half of a requested window."""
        return not self.ahead or (self.has_window and self.ahead < self.most_ahead / 2)

    def add(self, uses: Iterable[Use]) -> None:
        """Add known uses, up to the horizon."""
        with self._lock:
            for use in uses:
                if self._n_uses >= HORIZON:
                    return
                self._add(use)

    def ask(self, use: Use, *, is_awaited: bool = False) -> bool:
        """Return whether a block may be fetched for a use now, or has to wait for the readers. True: it counts as ahead.

        `is_awaited`: the answer is True in any case.
        """
        with self._lock:
            block = self._blocks.get(use.version.hash64(use.block))
            if block is None or use.position not in block.uses:
                if use.position <= self.reader:
                    return True
                if self._n_uses >= HORIZON:
                    return self._ask_untracked(use.size, is_awaited=is_awaited)
                block = self._add(use)
                if use.position <= self.reader:
                    return True
            if use.position in self._waiting:
                return True
            if block.is_here and self._is_missing(block):
                self._lower(block)
            if not (is_awaited or block.is_held or self._make_room(block, use.position)):
                return False
            self._waiting[use.position] = block, use.size
            block.n_waiting += 1
            if use.position > self.reader:
                insort(self._before, use.position)
                self.ahead += use.size
            else:
                self._passed.append(use.position)
            self._keep(block)
            return True

    def _ask_untracked(self, size: int, *, is_awaited: bool) -> bool:
        if not self.ahead:
            self._untracked = 0
        if not is_awaited and self._held + self._untracked + size > AHEAD * self._limit:
            return False
        self._untracked += size
        return True

    def reserve(self, size: int) -> None:
        """Count bytes as ahead that are requested before their blocks are known; a negative size undoes it."""
        self.ahead += size

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

    def read(self, numbers: Iterable[int]) -> bool:
        """Record reads of blocks (by `hash64`), in their order; return whether the readers came further."""
        with self._lock:
            before = self.reader
            for number in numbers:
                block = self._blocks.get(number)
                if block is None:
                    if number not in self._former:
                        _remember(self._early, number, None)
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
        n = bisect_right(self._before, position)
        self.ahead -= sum(self._waiting[passed][1] for passed in self._before[:n])
        self._passed.extend(self._before[:n])
        del self._before[:n]
        self.reader = position
        n_fit = len(self._blocks) * self._limit // max(1, self._size)
        while self._passed and self._passed[0] < position - n_fit:
            if (waiting := self._waiting.get(passed := self._passed.popleft())) is not None:
                waiting[0].last = passed, position + 1  # a read that comes later is none of the next use
                self._end(waiting[0], passed)

    def pass_missing(self) -> None:
        """Pass the next blocks that were evicted before they were read."""
        with self._lock:
            while self._before and (block := self._waiting[self._before[0]][0]).is_here:
                if not self._is_missing(block):
                    return
                self._lower(block)
                position = self._before[0]
                self._pass(position)
                self._end(block, position)

    # What to evict.

    def victims(self, stored: Iterable[BlockKey]) -> Iterator[BlockKey]:
        """Yield blocks to evict for blocks that are being stored; each counts as evicted.

        First what nobody needs, then what stays for the furthest use, as long as the plan has more than its limit. To
        store a block again, the plan evicts its own blocks in any case, and has no more than these from then on.
        """
        with self._lock:
            found = [self._blocks.get(key.hash64) for key in stored]
            blocks = [block for block in found if block is not None]
            is_again = any(block.last is not None for block in blocks)
            for block in blocks:  # those that a reader fetched count from now on
                block.is_here = True
                self._keep(block)
        while blocks:
            with self._lock:
                victim = self._next_victim(is_again=is_again)
            if victim is None:
                return
            yield victim.version.block(victim.index)

    def _next_victim(self, *, is_again: bool) -> _Block | None:
        """Return the next block to evict; it counts as evicted."""
        while is_again or self._held + self._spare_size > self._limit:
            block = next((each for each in self._spare if not self._is_in_memory(each)), None)
            if block is None and (block := self._furthest_idle()) is None:
                return None
            is_cached = self._has(block.version, block.index)
            if (block.is_held and not is_cached) or self._held + self._spare_size <= self._limit:
                self._lower(block)
            block.is_here = False
            self._stay(block, NEVER)
            if is_cached:
                return block
        return None

    def _lower(self, block: _Block) -> None:
        """Lower the limit by a block for which there is no room."""
        block.is_here = False
        self._limit = max(2 * block.size, self._limit - block.size)

    def _is_in_memory(self, block: _Block) -> bool:
        return bool(self._in_memory(block.version, block.index))

    def _is_missing(self, block: _Block) -> bool:
        return not (self._is_in_memory(block) or self._has(block.version, block.index))

    # Belady's rule.

    def _make_room(self, block: _Block, position: float) -> bool:
        """Return whether there is room for a block, after evicting what is used later than its use after `position`."""
        following = self._following(block, position)
        while self._held + block.size > self._limit:
            last = self._furthest()
            if last is None or last.following <= following or last.n_waiting:
                return False
            self._stay(last, NEVER)
        return True

    def _keep(self, block: _Block) -> None:
        """Let a block stay for the use after those that it was fetched for, if others are used later."""
        following = self._following(block) if block.is_here or block.n_waiting else NEVER
        if following == block.following < NEVER:
            return
        self._stay(block, NEVER)
        if following == NEVER:
            return
        passing = max(self._size // PASSING, 2 * block.size)
        most = self._limit - min(passing, self._window, PASSING_BYTES, self._limit // 4)
        while self._staying + block.size > most:
            last = self._furthest()
            if last is None or last.following <= following:
                return
            self._stay(last, NEVER)
        self._stay(block, following)

    def _following(self, block: _Block, position: float = -1.0) -> float:
        """Return the first use of a block after a position that it was not fetched for; NEVER if none is known."""
        return next((use for use in block.uses if use > position and use not in self._waiting), NEVER)

    def _stay(self, block: _Block, following: float) -> None:
        """Let a block stay until its use at `following`, or not at all."""
        self._staying += block.size * ((following < NEVER) - (block.following < NEVER))
        block.following = following
        if following < NEVER:
            heappush(self._order, (-following, next(self._ties), block))
            if len(self._order) > 2 * len(self._blocks) + _FEW:
                self._order = [entry for entry in self._order if entry[2].following == -entry[0]]
                heapify(self._order)
        self._update(block)

    def _furthest(self) -> _Block | None:
        """Return the block that stays for the last use."""
        while self._order and self._order[0][2].following != -self._order[0][0]:
            heappop(self._order)
        return self._order[0][2] if self._order else None

    def _furthest_idle(self) -> _Block | None:
        """Return the block that stays for the last use, of those that no reader waits for and that are stored."""
        busy, found = [], None
        while found is None and (block := self._furthest()) is not None:
            if block.n_waiting or self._is_in_memory(block):
                busy.append(heappop(self._order))
            else:
                found = block
        for entry in busy:
            heappush(self._order, entry)
        return found

    # Bookkeeping.

    def _add(self, use: Use) -> _Block:
        number = use.version.hash64(use.block)
        if (block := self._blocks.get(number)) is None:
            block = self._former.pop(number, None)
            block = block or _Block(use.version, use.block, file_size(use.version, use.size))
            self._blocks[number] = block
            self._size += block.size
        insort(block.uses, use.position)
        self._n_uses += 1
        if number in self._early:
            while next(iter(self._early)) != number:
                del self._early[next(iter(self._early))]
            del self._early[number]
            self._read(block, use.position)
        elif block in self._spare:
            self._keep(block)
        return block

    def _end(self, block: _Block, position: float) -> None:
        """Remove a use of a block: it was read, or will not be."""
        block.uses.remove(position)
        self._n_uses -= 1
        if (waiting := self._waiting.pop(position, None)) is not None:
            block.n_waiting -= 1
            if position > self.reader:
                del self._before[bisect_left(self._before, position)]
                self.ahead -= waiting[1]
        self._keep(block)

    def _update(self, block: _Block) -> None:
        """Count a block as held or spare, or remove it from both."""
        is_held = block.n_waiting > 0 or block.following < NEVER
        if is_held != block.is_held:
            block.is_held = is_held
            self._held += block.size if is_held else -block.size
        is_spare = block.is_here and not is_held
        if is_spare != (block in self._spare):
            self._spare_size += block.size if is_spare else -block.size
            if is_spare:
                self._spare[block] = None
            else:
                del self._spare[block]
        if len(self._spare) > HORIZON:  # the cache evicts it like any other
            oldest = next(iter(self._spare))
            oldest.is_here = False
            self._update(oldest)
        if not (block.uses or is_held or is_spare):
            number = block.version.hash64(block.index)
            _remember(self._former, number, self._blocks.pop(number))
            self._size -= block.size


def _remember(entries: dict[int, T], number: int, value: T) -> None:
    """Set the last of at most RECENT entries."""
    entries.pop(number, None)
    entries[number] = value
    if len(entries) > RECENT:
        del entries[next(iter(entries))]
