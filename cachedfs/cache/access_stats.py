"""Access statistics per block, shared by all processes: last access, access count, and whether the block is new."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_slots import HEADER_SIZE, MASK32, SharedSlots
from cachedfs.common.types import GOLDEN, MASK64, ObjectKey

log = logging.getLogger("cachedfs.cache")

_FEWEST_TOUCHES, _DEFAULT_TOUCHES, _MOST_TOUCHES = 1 << 12, 1 << 16, 1 << 22
# One record per 2 KiB of cache size: enough for small files. With 1 MiB blocks that is 512 records per block,
# and about 20 in a cache of 200 GB, where `_MOST_TOUCHES` applies.
_BYTES_A_TOUCH = 2048

_FLUSH_LOCK = 0x0DB5_70C4_C0DE_0002  # the lock number for adding accesses to the file
FLUSH_S = 0.1  # accesses are written to the file after this time, or
LEFT_S = 1.0  # many times as long as a flush takes
_FLUSH_N = 256  # after so many, whichever comes first
_MOST_PENDING = 1024  # accesses that wait while another process holds the lock

# From offset `_CLOCK_AT` of the header on, 32 bits each: clock; longest reuse gap in this window and in the previous
# one; and k for a window of 2**k accesses.
_NUMBERS = struct.Struct("<4I")
_CLOCK_AT, _WINDOW_AT = 16, 28
_WIDEST = 26
_AGING = 5  # counts are halved every 2**5 windows
# Further on in the header: the hashes of the last accesses. The one that made the clock n is at place n % _N_LAST.
_LAST_AT, _N_LAST = 1024, 256
_RECORD, _BUCKET = struct.Struct("<Q"), struct.Struct("<4Q")
# Bytes that are read and written at once: the records of eight consecutive blocks. Those of small objects are far apart.
_PAGE = 256

# Positions in a 64-bit record: clock (32 bits), access count (8), flags (8), tag (16).
_USES = 0xFFFF  # the access count and the flags
_COUNT = 0xFF  # the access count
_CAME_BACK = 0x100  # the block was fetched again after an earlier access
_PASSES = 0x200  # the block's object is larger than the cache
_FUTURE = 1 << 31  # an age above this is one of a record that is newer than the clock


class BlockAccess(NamedTuple):
    """The recorded accesses of one block: clock of the last access, access count, and whether the block is new.

    `is_new`: the block was never fetched again after an access. `passes`: it is new and its object is larger than the
    cache.
    """

    clock: int
    uses: int = 0
    is_new: bool = True
    passes: bool = False


# An access to a block (hash64), or a miss and whether its object is too large.
_Access = int | tuple[int, bool]


class _Records(SharedSlots):
    """The file of access records."""

    magic = b"cfstouc4"


class AccessStats:
    """A shared hash table of access records: clock (32 bits), flags (8), count (8) and tag (16, never 0).

    The clock counts accesses, not seconds. A block's record can be in any of the four slots of its bucket and is found
    by its tag. In a full bucket a new record replaces the one with the oldest access. Blocks that are not cached keep
    their records, so a block that comes back can be distinguished from a new one.

    The header has the last accesses of all processes, for prefetch plans, which follow the readers.

    Accesses wait in the memory of the process for up to `FLUSH_S` and are then written together. A killed process
    loses them. No method raises OSError: a file that cannot be read has no records, one that cannot be written gets none.

    `look` is called now and then by who records accesses.
    """

    def __init__(self, locks: ByteRangeLocks | None = None, look: Callable[[], object] = bool) -> None:
        self._locks, self._look_around = locks or ByteRangeLocks(), look
        self._directory: CacheDirectory | None = None
        self._file: _Records | None = None  # opened when first needed, and again after it was released
        self._size: int | None = None  # of the cache, in bytes
        self._pending: list[_Access] = []
        self._flush_at = 0.0
        self._left_at = math.inf  # when a lock that this process holds counts as left

    def move_to(self, directory: CacheDirectory) -> None:
        """Use the file in `directory` from now on."""
        self._directory, self._file = directory, None

    def open(self, size: int | None = None, *, clock: int = 0) -> SharedSlots:
        """Return the file, with enough records for a cache of `size` bytes; a new one starts at access clock `clock`."""
        self._size = self._size if size is None else size
        found, n_slots = self._file, access_slots(self._size)
        if found is not None and (size is None or found.n_slots >= n_slots):
            return found
        if found is not None:
            clock = self._numbers()[0]
        path, temp = None, ""
        if (directory := self._directory) is not None:
            path, temp = directory.access_records, directory.temp()
        header, at_least = _NUMBERS.pack(clock, 0, 0, _WIDEST), 1 if self._size is None else n_slots
        self._file = found = _Records(path, temp, n_slots, at_least=at_least, header=header)
        if found.trouble:  # no warning: eviction only sees the accesses of this process then
            log.info("%s", found.trouble)
        return found

    def look(self, again: bool = False) -> None:
        """Release a file that was deleted or replaced, so that all processes use the same one.

        With `again`, also one that could not be shared: its next use tries again. Raises OSError if that cannot be checked.
        """
        if (file := self._file) and ((again and file.trouble) or not file.is_current()):
            self._file = None

    @property
    def disk_size(self) -> int:
        """Bytes of the file, if it is open."""
        return self._file.size if self._file else 0

    @property
    def now(self) -> int:
        """The access clock, with the accesses that wait in this process."""
        waiting = sum([isinstance(each, int) for each in self._pending])
        try:
            fd = (self._file or self.open()).fd
            return int.from_bytes(os.pread(fd, 4, _CLOCK_AT), "little") + waiting & MASK32
        except OSError:
            return 0

    @property
    def longest_gap(self) -> int:
        """The largest recent reuse gap: accesses between two uses of one block; 0 if no block was used twice."""
        self.flush()
        return max(self._numbers()[1:3])

    def fit(self, n_blocks: int) -> None:
        """Adapt the window of `longest_gap`, and how fast counts are halved, to a cache of `n_blocks`.

        The window is about a quarter of the blocks. The gap is the largest of this window and the one before.
        """
        window = min(_WIDEST, max(5, round(math.log2(max(1, n_blocks / 4)))))
        if self._numbers()[3] != window:
            with contextlib.suppress(OSError):
                self.open().write([(_WINDOW_AT, window.to_bytes(4, "little"))])

    def touch(self, key: ObjectKey, index: int, passes: bool | None = None) -> None:
        """Record one access to a block. Repeated accesses to the block accessed last count as one.

        With `passes`, record a miss instead, and whether the object is larger than the cache: then its first pass evicts no
        other block. After a miss, the block counts as new unless an access to it is on record.
        """
        pending, hash64 = self._pending, key.number + index * GOLDEN & MASK64
        access: _Access = hash64 if passes is None else (hash64, passes)
        if not pending or pending[-1] != access:
            pending.append(access)
        if len(pending) >= _FLUSH_N or time.monotonic() >= self._flush_at:
            self.flush()
            self._look_around()  # who only reads asks nothing else of the cache

    def flush(self) -> None:
        """Write the accesses of this process to the file, in order, unless another thread or process is doing that.

        One at a time, or the clock could go back. A process that was stopped in the middle is not waited for.
        """
        if not self._pending:
            return
        now = time.monotonic()
        self._flush_at = now + FLUSH_S
        is_alone = self._locks.take(_FLUSH_LOCK)
        if is_alone:
            self._left_at = math.inf
        elif now < self._left_at:
            self._left_at = min(self._left_at, now + LEFT_S)
        else:  # an interrupted flush of this process left the lock
            self._locks.release(_FLUSH_LOCK)
        try:
            if is_alone or len(self._pending) >= _MOST_PENDING:
                pending, self._pending = self._pending, []
                with contextlib.suppress(OSError):
                    self._add(pending)
        finally:
            if is_alone:
                self._locks.release(_FLUSH_LOCK)

    def of(self, hash64: int, stored_at: int = 0) -> BlockAccess:
        """Return the accesses of a block that was stored at a clock; without a record the block counts as new."""
        self.flush()
        clock, _, _, window = self._numbers()
        try:
            last, uses, *_ = _record(self.open(), hash64, {})
        except OSError:
            last, uses = -1, 0
        if last < 0:
            return BlockAccess(stored_at)
        is_new, count = not uses & _CAME_BACK, _aged(uses & _COUNT, last, clock, window)
        last = stored_at if age(stored_at, clock) < age(last, clock) else last
        return BlockAccess(last, count, is_new, is_new and bool(uses & _PASSES))

    def since(self, clock: int) -> tuple[int, Sequence[int]]:
        """Return the access clock, and the blocks (by hash64) accessed after `clock`: the last 256, in order."""
        self.flush()
        try:
            header = self.open().read(_LAST_AT + 8 * _N_LAST, 0)
        except OSError:
            return clock, ()
        now = int.from_bytes(header[_CLOCK_AT : _CLOCK_AT + 4], "little")
        last = struct.unpack_from(f"<{_N_LAST}Q", header, _LAST_AT)
        n = min(age(clock, now), _N_LAST)
        return now, [last[at % _N_LAST] for at in range(now + 1 - n, now + 1)]

    def _add(self, pending: Sequence[_Access]) -> None:
        """Add accesses and misses to the file. Raises OSError."""
        file = self.open()
        # The header first: if the process dies in between, no record is newer than the clock.
        header = bytearray(file.read(HEADER_SIZE, 0))
        pages = {0: header}  # the parts of the file that change, by their offsets
        clock, gap, gap_before, window = _NUMBERS.unpack_from(header, _CLOCK_AT)
        window = min(window, _WIDEST)
        records: dict[int, tuple[int, int, bytearray, int]] = {}  # see `_record`
        for item in pending:
            hash64, passes = (item, None) if isinstance(item, int) else item
            if (record := records.get(hash64)) is None:
                record = _record(file, hash64, pages)
            last, uses, page, at = record
            if passes is None:
                if last == clock:
                    continue  # repeated reads of the block accessed last count as one access
                clock = clock + 1 & MASK32
                _RECORD.pack_into(header, _LAST_AT + 8 * (clock % _N_LAST), hash64)
                if count := uses & _COUNT:
                    if (here := age(last, clock)) > gap:
                        gap = here
                    if clock >> window + _AGING != last >> window + _AGING:
                        uses += _aged(count, last, clock, window) - count
                if gap and last >= 0 and not clock & (1 << window) - 1:
                    gap, gap_before = 0, gap
                last, uses = clock, uses + (uses & _COUNT < _COUNT)
            elif uses & _COUNT:
                uses |= _CAME_BACK
            elif passes or last >= 0:  # one behind, so that the first access counts; the latest miss wins
                last, uses = clock - 1 & MASK32, passes * _PASSES
            records[hash64] = last, uses, page, at
        for hash64, (last, uses, page, at) in records.items():
            if last >= 0:
                tag = hash64 >> 48 or 1
                slot = _slot(_BUCKET.unpack_from(page, at), tag, clock)
                _RECORD.pack_into(page, at + 8 * slot, tag << 48 | uses << 32 | last)
        _NUMBERS.pack_into(header, _CLOCK_AT, clock, gap, gap_before, window)
        file.write(pages.items())

    def _numbers(self) -> tuple[int, int, int, int]:
        """Return the numbers in the header."""
        try:
            clock, gap, gap_before, window = _NUMBERS.unpack(self.open().read(_NUMBERS.size, _CLOCK_AT))
            return clock, gap, gap_before, min(window, _WIDEST)
        except OSError:
            return 0, 0, 0, _WIDEST


def _record(file: SharedSlots, hash64: int, pages: dict[int, bytearray]) -> tuple[int, int, bytearray, int]:
    """Return the record of a block: clock (-1 without one), flags and count; and where its bucket is in which page.

    The page is added to `pages`. Raises OSError.
    """
    tag, at = hash64 >> 48 or 1, HEADER_SIZE + 8 * (hash64 & file.n_slots - 1 & ~3)
    at -= (start := at - at % _PAGE)
    if (page := pages.get(start)) is None:
        page = pages[start] = bytearray(file.read(min(_PAGE, file.size - start), start))
    for record in _BUCKET.unpack_from(page, at):
        if record >> 48 == tag:
            return record & MASK32, record >> 32 & _USES, page, at
    return -1, 0, page, at


def age(clock: int, now: int) -> int:
    """Return how many accesses ago `clock` was; 0 if another process has written it since `now` was read.

    The clock wraps around at 32 bits.
    """
    n = now - clock & MASK32
    return n if n < _FUTURE else 0


def _aged(count: int, last: int, now: int, window: int) -> int:
    """Return an access count from clock `last`, halved for each aging period since."""
    aging = window + _AGING
    return count >> min(8, (now >> aging) - (last >> aging) & MASK32 >> aging)


def _slot(bucket: Sequence[int], tag: int, now: int) -> int:
    """Return the slot in a bucket that has the record with this tag; without one, a free slot or the oldest."""
    for slot, record in enumerate(bucket):
        if record >> 48 == tag:
            return slot
    ages = [age(record & MASK32, now) if record else MASK32 for record in bucket]
    return ages.index(max(ages))


def access_slots(size: int | None) -> int:
    """Return the number of access records for a cache of `size` bytes (None: unknown size).

    It is a power of two, so that a bit mask can replace the modulo operation.
    """
    if size is None:
        return _DEFAULT_TOUCHES
    wanted = size // _BYTES_A_TOUCH
    return min(max(1 << max(wanted - 1, 0).bit_length(), _FEWEST_TOUCHES), _MOST_TOUCHES)
