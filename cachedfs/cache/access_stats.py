"""Access statistics per block, shared by all processes: last access, access count, and whether the block is new."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_slots import HEADER_SIZE, MASK32, SharedSlots

__all__ = ["AccessStats", "BlockAccess", "access_slots"]

_FEWEST_TOUCHES, _DEFAULT_TOUCHES, _MOST_TOUCHES = 1 << 12, 1 << 16, 1 << 22
# One record per 2 KiB of cache size: enough for small files. With 1 MiB blocks that is 512 records per block,
# and about 20 in a cache of 200 GB, where `_MOST_TOUCHES` applies.
_BYTES_A_TOUCH = 2048

_FLUSH_LOCK = 0x0DB5_70C4_C0DE_0002  # the lock number for adding accesses to the file
FLUSH_S = 0.1  # accesses are written to the file after this time, or
_FLUSH_N = 64  # after so many, whichever comes first
_MOST_PENDING = 1024  # accesses that wait while another process holds the lock

# From offset `_CLOCK_AT` of the header on, 32 bits each: clock; longest reuse gap in this window and in the previous
# one; window length minus one in accesses; and the shift of the clock that yields the number of the aging period.
_NUMBERS = struct.Struct("<5I")
_CLOCK_AND_GAPS = struct.Struct("<3I")
_FIT = struct.Struct("<2I")
_CLOCK_AT, _FIT_AT = 16, 28
# Further on in the header: the hashes of the last accesses. The one that made the clock n is at place n % _N_LAST.
_LAST_AT, _N_LAST = 1024, 256
_BUCKET = struct.Struct("<4Q")
_RECORD = struct.Struct("<Q")

# Positions in a 64-bit record: clock (32 bits), access count (8), flags (8), tag (16).
_COUNT = 0xFF  # the access count
_CAME_BACK = 0x100  # the block was fetched again after an earlier access
_PASSES = 0x200  # the block's object is larger than the cache
_FLAGS = 0xFFFF_FF00_0000_0000  # everything but count and clock
_FUTURE = 1 << 31  # an age above this is one of a record that is newer than the clock


class BlockAccess(NamedTuple):
    """The recorded accesses of one block: clock of the last access, access count, and whether the block is new.

    `is_new`: the block was never fetched again after an access. `passes`: it is new and its object is larger than the
    cache.
    """

    clock: int
    uses: int
    is_new: bool
    passes: bool = False


class _Numbers(NamedTuple):
    """The numbers in the header."""

    clock: int = 0
    gap: int = 0
    gap_before: int = 0
    window: int = 31
    aging: int = 31


_Access = (
    int | tuple[int, bool]
)  # an access to a block (hash64), or a miss and whether its object is too large


class AccessStats(SharedSlots):
    """A shared hash table of access records: clock (32 bits), flags (8), count (8) and tag (16, never 0).

    The clock counts accesses, not seconds. A block's record can be in any of the four slots of its bucket and is found
    by its tag. In a full bucket a new record replaces the one with the oldest access. Blocks that are not cached keep
    their records, so a block that comes back can be distinguished from a new one.

    The header has the last accesses of all processes, for prefetch plans, which follow the readers.

    Accesses wait in the memory of the process for up to `FLUSH_S` and are then written together. A killed process
    loses them. No method raises OSError: a file that cannot be read has no records, one that cannot be written gets none.
    """

    magic = b"cfstouc3"

    def __init__(
        self,
        path: str | None,
        temp: str,
        n_slots: int,
        *,
        at_least: int = 1,
        clock: int = 0,
        locks: ByteRangeLocks | None = None,
    ) -> None:
        header = _NUMBERS.pack(*_Numbers(clock))
        super().__init__(path, temp, n_slots, at_least=at_least, header=header)
        self._locks = locks or ByteRangeLocks()
        self._pending: list[_Access] = []
        self._flush_at = 0.0
        self._mask = self.n_slots - 1

    @property
    def now(self) -> int:
        """The access clock, with the accesses that wait in this process."""
        waiting = sum(isinstance(each, int) for each in self._pending)
        try:
            return int.from_bytes(os.pread(self.fd, 4, _CLOCK_AT), "little") + waiting & MASK32
        except OSError:
            return 0

    @property
    def longest_gap(self) -> int:
        """The largest recent reuse gap: accesses between two uses of one block; 0 if no block was used twice."""
        self.flush()
        numbers = self._numbers()
        return max(numbers.gap, numbers.gap_before)

    def fit(self, *, window: int, aging: int) -> None:
        """Set the window of `longest_gap` to `1 << window` accesses and halve counts every `1 << aging` accesses."""
        self.flush()
        numbers, fitted = self._numbers(), ((1 << window) - 1, aging)
        if (numbers.window, numbers.aging) != fitted:
            with contextlib.suppress(OSError):
                self.write([(_FIT_AT, _FIT.pack(*fitted))])

    def touch(self, access: _Access) -> None:
        """Record one access to a block, or a miss. Repeated accesses to the block accessed last count as one.

        After a miss, the block counts as new unless an access to it is on record.
        """
        pending = self._pending
        if not pending or pending[-1] != access:
            pending.append(access)
        if len(pending) >= _FLUSH_N or time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write the accesses of this process to the file, in order, unless another thread or process is doing that.

        One at a time, or the clock could go back. A process that was stopped in the middle is not waited for.
        """
        if not self._pending:
            return
        self._flush_at = time.monotonic() + FLUSH_S
        is_alone = self._locks.take(_FLUSH_LOCK)
        try:
            if is_alone or len(self._pending) >= _MOST_PENDING:
                pending, self._pending = self._pending, []
                with contextlib.suppress(OSError):
                    self._add(pending)
        finally:
            if is_alone:
                self._locks.release(_FLUSH_LOCK)

    def use_of(self, hash64: int) -> BlockAccess | None:
        """Return the recorded accesses of a block; None without a record."""
        record = self._record(hash64)
        if not record:
            return None
        clock, is_new = record & MASK32, not record >> 32 & _CAME_BACK
        numbers = self._numbers()
        uses = _aged(record >> 32 & _COUNT, clock, numbers.clock, numbers.aging)
        return BlockAccess(clock, uses, is_new, is_new and bool(record >> 32 & _PASSES))

    def since(self, clock: int) -> tuple[int, Sequence[int]]:
        """Return the access clock, and the blocks (by hash64) accessed after `clock`: the last 256, in order."""
        self.flush()
        try:
            header = self.read(_LAST_AT + 8 * _N_LAST, 0)
        except OSError:
            return clock, ()
        now = int.from_bytes(header[_CLOCK_AT : _CLOCK_AT + 4], "little")
        last = struct.unpack_from(f"<{_N_LAST}Q", header, _LAST_AT)
        n = min(_age(clock, now), _N_LAST)
        return now, [last[at % _N_LAST] for at in range(now + 1 - n, now + 1)]

    def age(self, clock: int) -> int:
        """Return how many accesses ago `clock` was. The clock wraps around at 32 bits."""
        return _age(clock, self.now)

    def _record(self, hash64: int) -> int:
        """Return the record of a block; 0 without one."""
        self.flush()
        at, tag = hash64 & self._mask, hash64 >> 48 or 1
        return next((record for record in self._bucket(at) if record >> 48 == tag), 0)

    def _add(self, pending: Sequence[_Access]) -> None:
        """Add accesses and misses to the file. Raises OSError."""
        mask, read, unpack = self._mask, self.read, _BUCKET.unpack
        clock, gap, gap_before, window, aging = self._numbers()
        buckets: dict[int, list[int]] = {}
        changed: dict[int, int] = {}
        last: dict[int, int] = {}  # accesses by their places in the header
        for item in pending:
            hash64 = item if isinstance(item, int) else item[0]
            at, tag = hash64 & mask, hash64 >> 48 or 1
            bucket = buckets.get(at >> 2)
            if bucket is None:
                bucket = buckets[at >> 2] = [*unpack(read(32, HEADER_SIZE + 8 * (at & ~3)))]
            place, record = at, bucket[at & 3]
            if record >> 48 != tag:
                place, record = _place(clock, bucket, at, tag)
            old, count = record & MASK32, record >> 32 & _COUNT
            if not isinstance(item, int):
                if missed := _after_miss(record, item[1], tag, clock):
                    changed[place] = bucket[place & 3] = missed
                continue
            if record and old == clock:
                continue  # repeated reads of the block accessed last count as one access
            clock = clock + 1 & MASK32
            last[clock % _N_LAST] = hash64
            if count:
                age = clock - old & MASK32
                if gap < age < _FUTURE:
                    gap = age
                if (clock ^ old) >> aging:
                    count = _aged(count, old, clock, aging)
            if record and gap and not clock & window:
                gap_before, gap = gap, 0
            flags = record & _FLAGS if record else tag << 48
            changed[place] = bucket[place & 3] = flags | min(count + 1, _COUNT) << 32 | clock
        # The clock first: if the process dies here, no record is newer than the clock.
        head = _CLOCK_AND_GAPS.pack(clock, gap, gap_before)
        self.write([*_pieces(last, _LAST_AT), (_CLOCK_AT, head), *_pieces(changed, HEADER_SIZE)])

    def _numbers(self) -> _Numbers:
        try:
            return _Numbers._make(_NUMBERS.unpack(self.read(_NUMBERS.size, _CLOCK_AT)))
        except OSError:
            return _Numbers()

    def _bucket(self, at: int) -> list[int]:
        """Return the four records of the bucket with slot `at`."""
        try:
            return list(_BUCKET.unpack(self.read(_BUCKET.size, HEADER_SIZE + 8 * (at & ~3))))
        except OSError:
            return [0, 0, 0, 0]


def _after_miss(record: int, passes: bool, tag: int, clock: int) -> int:
    """Return the record of a block after a miss; 0 if it needs none."""
    if record >> 32 & _COUNT:
        return record | _CAME_BACK << 32
    # The clock is one behind so that `touch` counts the first access. The latest miss wins.
    return tag << 48 | passes * _PASSES << 32 | clock - 1 & MASK32 if record or passes else 0


def _pieces(records: Mapping[int, int], offset: int) -> list[tuple[int, bytes]]:
    return [(offset + 8 * place, _RECORD.pack(record)) for place, record in records.items()]


def _age(clock: int, now: int) -> int:
    """Return how many accesses ago `clock` was; 0 if another process has written it since `now` was read."""
    age = now - clock & MASK32
    return age if age < _FUTURE else 0


def _aged(count: int, old: int, now: int, aging: int) -> int:
    """Return an access count from clock `old`, halved for each aging period since."""
    return count >> min(8, (now >> aging) - (old >> aging) & MASK32 >> aging)


def _place(now: int, bucket: Sequence[int], at: int, tag: int) -> tuple[int, int]:
    """Return slot and record of `tag` in the bucket of `at`; without a record, a free or the oldest slot and 0."""
    oldest, most = at, -1
    for place in (at, at ^ 1, at ^ 2, at ^ 3):
        record = bucket[place & 3]
        if record >> 48 == tag:
            return place, record
        age = _age(record & MASK32, now) if record else MASK32 + 1
        if age > most:
            oldest, most = place, age
    return oldest, 0


def access_slots(size: int | None) -> int:
    """Return the number of access records for a cache of `size` bytes (None: unknown size).

    It is a power of two, so that a bit mask can replace the modulo operation.
    """
    if size is None:
        return _DEFAULT_TOUCHES
    wanted = size // _BYTES_A_TOUCH
    return min(max(1 << max(wanted - 1, 0).bit_length(), _FEWEST_TOUCHES), _MOST_TOUCHES)
