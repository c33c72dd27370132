"""Touch records: when, and how often, a block was used; shared by all processes."""

from __future__ import annotations

import sys

from cachedfs.cache.shared import CLOCK_AT, MASK32, MASK63, SharedSlots

__all__ = ["Touches", "touch_slots"]

_FEWEST_TOUCHES, _DEFAULT_TOUCHES, _MOST_TOUCHES = 1 << 12, 1 << 16, 1 << 21
_USUAL_BLOCK = 1 << 20
# Where the parts of a touch record are: its clock among two 32-bit words, count and tag among four of 16 bits.
_CLOCK_IN, _COUNT_IN, _TAG_IN = (0, 2, 3) if sys.byteorder == "little" else (1, 1, 0)


class Touches(SharedSlots):
    """When, and how often, a block was last used: records of clock (32 bits), count (16) and tag (16).

    The clock counts touches, not seconds. A record has four places, those of its bucket; the tag tells whose
    it is. When all four are other blocks' it takes the least recently touched one's place.
    """

    magic = b"cfstouch"

    def __init__(self, path: str | None, temp: str, n_slots: int, *, clock: int = 0) -> None:
        super().__init__(path, temp, n_slots, clock=clock)
        self._halves = self.slots.cast("B").cast("H")
        self._clocks = self.slots.cast("B").cast("I")

    @property
    def now(self) -> int:
        return self.words[CLOCK_AT]

    def touch(self, hash64: int) -> None:
        """Note one use of a block. Racy by design: a lost touch is no harm."""
        words, halves = self.words, self._halves
        words[CLOCK_AT] = clock = words[CLOCK_AT] + 1 & MASK32
        tag = hash64 >> 48
        at = hash64 & self.n_slots - 1
        if halves[4 * at + _TAG_IN] != tag:
            at, record = self._place(at, tag)
            self.slots[at] = tag << 48 | min((record >> 32 & 0xFFFF) + 1, 0xFFFF) << 32 | clock
            return
        # The commonest case in parts: arithmetic on 64-bit numbers is slow in Python.
        count = halves[4 * at + _COUNT_IN]
        if count < 0xFFFF:
            halves[4 * at + _COUNT_IN] = count + 1
        self._clocks[2 * at + _CLOCK_IN] = clock

    def clock_of(self, hash64: int) -> int | None:
        """Return the clock at the block's last touch; None when there is no record of it."""
        _, record = self._place(hash64 & self.n_slots - 1, hash64 >> 48)
        return record & MASK32 if record else None

    def age(self, clock: int) -> int:
        """Return how many touches ago `clock` was."""
        return self.now - clock & MASK32

    def _place(self, at: int, tag: int) -> tuple[int, int]:
        """Return slot and record of the tag in the bucket of `at`; a free or the oldest slot and 0 when it has none."""
        oldest, most = at, -1
        for place in (at, at ^ 1, at ^ 2, at ^ 3):
            record = self.slots[place]
            if record >> 48 == tag and record & MASK63 >> 15:
                return place, record
            age = self.age(record & MASK32) if record else MASK32 + 1
            if age > most:
                oldest, most = place, age
        return oldest, 0


def touch_slots(size: int | None) -> int:
    """Return how many touch records a cache of `size` bytes (None: not known) should have: twice the usual blocks.

    It is a power of two, as a mask has to do for a remainder.
    """
    if size is None:
        return _DEFAULT_TOUCHES
    wanted = 2 * (size // _USUAL_BLOCK)
    return min(max(1 << max(wanted - 1, 0).bit_length(), _FEWEST_TOUCHES), _MOST_TOUCHES)
