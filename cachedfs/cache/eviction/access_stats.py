"""Access statistics per block, shared by all processes: last access, access count, and whether the block is new."""

from __future__ import annotations

import sys
from typing import NamedTuple

from cachedfs.cache.shared_memory import CLOCK_AT, MASK32, SharedSlots

__all__ = ["AccessStats", "BlockAccess", "touch_slots"]

_FEWEST_TOUCHES, _DEFAULT_TOUCHES, _MOST_TOUCHES = 1 << 12, 1 << 16, 1 << 22
# One record per 2 KiB of cache size: enough for small files. With 1 MiB blocks that is 512 records per block,
# and about 20 in a cache of 200 GB, where `_MOST_TOUCHES` applies.
_BYTES_A_TOUCH = 2048

# 32-bit words of the header: longest reuse gap in this window and in the previous one, window length minus one in
# accesses, and the shift of the clock that yields the number of the current aging period.
_GAP, _GAP_BEFORE, _WINDOW, _AGING = 5, 6, 7, 8

# Position of each part of a 64-bit record: the clock among its two 32-bit words, count and tag among four of 16 bits.
_CLOCK_IN, _COUNT_IN, _TAG_IN = (0, 2, 3) if sys.byteorder == "little" else (1, 1, 0)
# Bits of the 16-bit count field.
_COUNT = 0xFF  # the access count
_CAME_BACK = 0x100  # the block was fetched again after an earlier access
_PASSES = 0x200  # the block's object is larger than the cache


class BlockAccess(NamedTuple):
    """The recorded accesses of one block: clock of the last access, access count, and whether the block is new.

    `is_new`: the block was never fetched again after an access. `passes`: it is new and its object is larger than the
    cache.
    """

    clock: int
    uses: int
    is_new: bool
    passes: bool = False


class AccessStats(SharedSlots):
    """A shared hash table of access records: clock (32 bits), flags (8), count (8) and tag (16, never 0).

    The clock counts accesses, not seconds. A block's record can be in any of the four slots of its bucket and is found
    by its tag. In a full bucket a new record replaces the one with the oldest access. Blocks that are not cached keep
    their records, so a block that comes back can be distinguished from a new one.
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
        """The current value of the access clock."""
        return self.words[CLOCK_AT]

    @property
    def longest_gap(self) -> int:
        """The largest recent reuse gap: accesses between two uses of one block; 0 if no block was used twice."""
        return max(self.words[_GAP], self.words[_GAP_BEFORE])

    def fit(self, *, window: int, aging: int) -> None:
        """Set the window of `longest_gap` to `1 << window` accesses and halve counts every `1 << aging` accesses."""
        self.words[_WINDOW], self.words[_AGING] = (1 << window) - 1, aging

    def touch(self, hash64: int) -> None:
        """Record one access to a block. Concurrent updates may be lost, which is harmless."""
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
            return  # repeated reads of the block accessed last count as one access
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
        """Record a cache miss. The block counts as new unless an access to it is on record.

        `passes`: the block's object is larger than the cache.
        """
        tag = hash64 >> 48 or 1
        at, record = self._place(hash64 & self._mask, tag)
        if record >> 32 & _COUNT:
            self.slots[at] = record | _CAME_BACK << 32
        elif passes or record:
            # The clock is one behind so that `touch` counts the first access. The latest `passes` wins.
            self.slots[at] = tag << 48 | passes * _PASSES << 32 | self.now - 1 & MASK32

    def use_of(self, hash64: int) -> BlockAccess | None:
        """Return the recorded accesses of a block; None without a record."""
        _, record = self._place(hash64 & self._mask, hash64 >> 48 or 1)
        if not record:
            return None
        clock, is_new = record & MASK32, not record >> 32 & _CAME_BACK
        uses = self._aged(record >> 32 & _COUNT, clock, self.now)
        return BlockAccess(clock, uses, is_new, is_new and bool(record >> 32 & _PASSES))

    def is_new(self, hash64: int) -> bool:
        """Return whether a block that is not cached is new: no record says that it was fetched before this miss."""
        use = self.use_of(hash64)
        return use is None or use.is_new

    def last_use_of(self, hash64: int) -> int | None:
        """Return the clock of a block's last access; None if no access is on record."""
        _, record = self._place(hash64 & self._mask, hash64 >> 48 or 1)
        return record & MASK32 if record >> 32 & _COUNT else None

    def age(self, clock: int) -> int:
        """Return how many accesses ago `clock` was. The clock wraps around at 32 bits."""
        return self.now - clock & MASK32

    def _aged(self, count: int, old: int, now: int) -> int:
        shift = self.words[_AGING]
        return count >> min(8, (now >> shift) - (old >> shift) & MASK32 >> shift)

    def _place(self, at: int, tag: int) -> tuple[int, int]:
        """Return slot and record of `tag` in the bucket of `at`; without a record, a free or the oldest slot and 0."""
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
    """Return the number of access records for a cache of `size` bytes (None: unknown size).

    It is a power of two, so that a bit mask can replace the modulo operation.
    """
    if size is None:
        return _DEFAULT_TOUCHES
    wanted = size // _BYTES_A_TOUCH
    return min(max(1 << max(wanted - 1, 0).bit_length(), _FEWEST_TOUCHES), _MOST_TOUCHES)
