"""Touch records: when, how often, and whether ever before a block was used; shared by all processes."""

from __future__ import annotations

import sys
from typing import NamedTuple

from cachedfs.cache.shared_memory import CLOCK_AT, MASK32, SharedSlots

__all__ = ["AccessStats", "BlockAccess", "touch_slots"]

_FEWEST_TOUCHES, _DEFAULT_TOUCHES, _MOST_TOUCHES = 1 << 12, 1 << 16, 1 << 22
_BYTES_A_TOUCH = (
    2048  # a record for every 2 KiB of the bound: for small files, and for twenty times the usual blocks
)

# Further words of the header: the longest reuse gap now and in the window before, the touches of a window less one,
# and by how many bits the clock is shifted to tell when counts are halved.
_GAP, _GAP_BEFORE, _WINDOW, _AGING = 5, 6, 7, 8

# Where the parts of a touch record are: its clock among two 32-bit words, count and tag among four of 16 bits.
_CLOCK_IN, _COUNT_IN, _TAG_IN = (0, 2, 3) if sys.byteorder == "little" else (1, 1, 0)
_COUNT = 0xFF  # of the count's 16 bits: the count itself;
_CAME_BACK = 0x100  # whether the block was fetched again after it had been used,
_PASSES = 0x200  # and whether it is of an object that cannot be here as a whole


class BlockAccess(NamedTuple):
    """What is known of the use of a block: the clock of the last time, how often, and whether it is new here.

    `passes`: it is new, and of an object that is larger than the cache.
    """

    clock: int
    uses: int
    is_new: bool
    passes: bool = False


class AccessStats(SharedSlots):
    """When, and how often, a block was last used: records of clock (32 bits), flag (8), count (8) and tag (16, never 0).

    The clock counts touches, not seconds. A record has four places, those of its bucket; the tag tells whose
    it is. When all four are other blocks' it takes the least recently touched one's place. Blocks that are not in
    the cache have records too: what comes back is told from what is new.
    """

    magic = b"cfstouc2"

    def __init__(
        self, path: str | None, temp: str, n_slots: int, *, at_least: int = 1, clock: int = 0
    ) -> None:
        super().__init__(path, temp, n_slots, at_least=at_least, clock=clock)
        if not self.words[_WINDOW]:
            self.fit(window=5, aging=31)
        self._halves = self.slots.cast("B").cast("H")
        self._clocks = self.slots.cast("B").cast("I")
        self._mask = self.n_slots - 1

    @property
    def now(self) -> int:
        return self.words[CLOCK_AT]

    @property
    def longest_gap(self) -> int:
        """The most touches lately between two uses of one block; 0 when nothing was used twice."""
        return max(self.words[_GAP], self.words[_GAP_BEFORE])

    def fit(self, *, window: int, aging: int) -> None:
        """Set that "lately" are the last `1 << window` touches or more, and that counts are halved every `1 << aging`."""
        self.words[_WINDOW], self.words[_AGING] = (1 << window) - 1, aging

    def touch(self, hash64: int) -> None:
        """Note one use of a block. Racy by design: a lost touch is no harm."""
        words, halves = self.words, self._halves
        at, tag = hash64 & self._mask, hash64 >> 48 or 1
        if halves[4 * at + _TAG_IN] != tag:
            at, record = self._place(at, tag)
            if not record:
                words[CLOCK_AT] = clock = words[CLOCK_AT] + 1 & MASK32
                self.slots[at] = tag << 48 | 1 << 32 | clock
                return
        clock, clocks = words[CLOCK_AT], self._clocks
        old = clocks[2 * at + _CLOCK_IN]
        if clock == old:
            return  # the last one to be used: a long use is one use
        words[CLOCK_AT] = clocks[2 * at + _CLOCK_IN] = clock = clock + 1 & MASK32
        count = halves[4 * at + _COUNT_IN]
        if clock - old & MASK32 > words[_GAP] and count & _COUNT:
            words[_GAP] = clock - old & MASK32
        if (clock ^ old) >> words[_AGING]:
            count = count & ~_COUNT | self._aged(count & _COUNT, old, clock)
        if count & _COUNT != _COUNT:
            halves[4 * at + _COUNT_IN] = count + 1
        if not clock & words[_WINDOW] and words[_GAP]:
            words[_GAP_BEFORE], words[_GAP] = words[_GAP], 0

    def missed(self, hash64: int, *, passes: bool = False) -> None:
        """Note that a block has to be fetched: it is new unless there is a record of its use."""
        tag = hash64 >> 48 or 1
        at, record = self._place(hash64 & self._mask, tag)
        if record >> 32 & _COUNT:
            self.slots[at] = record | _CAME_BACK << 32
        elif passes or record:
            # One behind, as the first use is still to come. Whether it passes is what holds now.
            self.slots[at] = tag << 48 | passes * _PASSES << 32 | self.now - 1 & MASK32

    def use_of(self, hash64: int) -> BlockAccess | None:
        """Return what is known of the use of a block; None when there is no record of it."""
        _, record = self._place(hash64 & self._mask, hash64 >> 48 or 1)
        if not record:
            return None
        clock, is_new = record & MASK32, not record >> 32 & _CAME_BACK
        uses = self._aged(record >> 32 & _COUNT, clock, self.now)
        return BlockAccess(clock, uses, is_new, is_new and bool(record >> 32 & _PASSES))

    def is_new(self, hash64: int) -> bool:
        """Return whether a block that is not here was never used here, as far as is known."""
        use = self.use_of(hash64)
        return use is None or use.is_new

    def last_use_of(self, hash64: int) -> int | None:
        """Return the clock of a block's last use; None when no use of it is known."""
        _, record = self._place(hash64 & self._mask, hash64 >> 48 or 1)
        return record & MASK32 if record >> 32 & _COUNT else None

    def age(self, clock: int) -> int:
        """Return how many touches ago `clock` was."""
        return self.now - clock & MASK32

    def _aged(self, count: int, old: int, now: int) -> int:
        shift = self.words[_AGING]
        return count >> min(8, (now >> shift) - (old >> shift) & MASK32 >> shift)

    def _place(self, at: int, tag: int) -> tuple[int, int]:
        """Return slot and record of the tag in the bucket of `at`; a free or the oldest slot and 0 when it has none."""
        oldest, most = at, -1
        for place in (at, at ^ 1, at ^ 2, at ^ 3):
            record = self.slots[place]
            if record >> 48 == tag:
                return place, record
            age = self.age(record & MASK32) if record else MASK32 + 1
            if age > most:
                oldest, most = place, age
        return oldest, 0


def touch_slots(size: int | None) -> int:
    """Return how many touch records a cache of `size` bytes (None: not known) should have.

    It is a power of two, as a mask has to do for a remainder.
    """
    if size is None:
        return _DEFAULT_TOUCHES
    wanted = size // _BYTES_A_TOUCH
    return min(max(1 << max(wanted - 1, 0).bit_length(), _FEWEST_TOUCHES), _MOST_TOUCHES)
