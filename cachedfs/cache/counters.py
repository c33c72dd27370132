"""Statistics that all processes of a machine share: records of a few numbers in a mapped file.

A record is changed under a lock that the kernel releases when its holder dies. A stopped holder is not waited for.
A killed or overtaken process may leave any mixture of two states, so readers must accept any numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_memory import SharedSlots
from cachedfs.common.types import Counted

__all__ = ["Numbers", "SharedCounters", "SharedRecord", "SharedRecords"]


T = TypeVar("T")
Numbers = tuple[float, ...]

N_NUMBERS = 7  # per record; the slot before them holds the hash of its name
_RECORD = N_NUMBERS + 1
_N_SLOTS = 64 * _RECORD
_LOOK_S = 1.0  # interval between checks that the mapped file is still the one at the path
_AGAIN_S = 60.0  # delay before a file that could not be mapped is tried again
_TURNS, _TURN_S = 20, 5e-5  # a change takes 10 us: after this many attempts its holder is stopped, not busy

_MOST = 2.0**53  # doubles represent integers exactly up to here


class _File(SharedSlots):
    magic = b"cfsbudg1"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _N_SLOTS)
        self.numbers = self.slots.cast("B").cast("d")

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _N_SLOTS

    def place(self, hash64: int) -> int:
        """Return the first slot of a record: its own, a free one, or one of another account, which is then lost."""
        first = hash64 % (_N_SLOTS // _RECORD)
        places = [_RECORD * (first ^ i) for i in range(4)]
        for whose in (hash64, 0):
            for at in places:
                if self.slots[at] == whose:
                    return at
        return places[0]


class SharedRecords:
    """The records of one cache directory; without a directory, in memory shared with forked children only."""

    def __init__(
        self, directory: Callable[[], CacheDirectory | None], locks: Callable[[], ByteRangeLocks]
    ) -> None:
        self._directory, self._locks = directory, locks
        self._file: _File | None = None
        self._look_at = self._again_at = 0.0

    def record(self, account: str) -> SharedRecord:
        """Return the record named `account`, without I/O."""
        return SharedRecord(self, account)

    def close(self) -> None:
        """Release the mapped file; the next use maps it again. Records in private memory are kept."""
        if self._file is not None and not self._file.is_private:
            self._file = None

    def is_made(self) -> bool:
        """Return whether any process has written a record yet."""
        directory = self._directory()
        return self._file is not None or (directory is not None and os.path.exists(directory.budgets))

    def file(self) -> _File:
        """Return the mapped file that the processes of the machine use now."""
        now, file = time.monotonic(), self._file  # a local copy: another thread may reset the attribute
        if file is None:
            file = self._file = self._opened(now)
        elif now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look(file, now)
            file = self._file or file
        return file

    def _opened(self, now: float) -> _File:
        directory = self._directory()
        self._again_at = now + _AGAIN_S
        return _File(directory.budgets, directory.temp()) if directory else _File(None, "")

    def _look(self, file: _File, now: float) -> None:
        """Remap a deleted file, so that all processes map the same one; retry a file that could not be shared."""
        if file.is_private and now >= self._again_at:
            found = self._opened(now)
            # The numbers of this process are better than none.
            self._file = file if found.is_private else found
        with contextlib.suppress(OSError):  # cannot check: keep the current mapping
            if not file.is_current():
                self._file = self._opened(now)

    @contextlib.contextmanager
    def alone(self, hash64: int) -> Iterator[None]:
        """Lock a record against changes by other processes; after about a millisecond, continue without the lock."""
        locks = self._locks()
        is_ours = locks.take(hash64)
        for _ in range(_TURNS):
            if is_ours:
                break
            time.sleep(_TURN_S)
            is_ours = locks.take(hash64)
        try:
            yield
        finally:
            if is_ours:
                locks.drop(hash64)


class SharedRecord:
    """One record of `N_NUMBERS` numbers, initially all 0."""

    def __init__(self, budgets: SharedRecords, account: str) -> None:
        digest = hashlib.blake2b(account.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._budgets, self._hash64 = budgets, int.from_bytes(digest, "little") or 1

    def look(self) -> Numbers:
        """Return the current numbers; zeros if the record does not exist. Does not create it."""
        if not self._budgets.is_made():
            return (0.0,) * N_NUMBERS
        file = self._budgets.file()
        at = file.place(self._hash64)
        if file.slots[at] != self._hash64:
            return (0.0,) * N_NUMBERS
        return tuple(file.numbers[at + 1 : at + _RECORD])

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Replace the numbers by those that `step(numbers)` returns, and return its second result.

        `step` must accept any numbers (see the module docstring).
        """
        with self._budgets.alone(self._hash64):
            file = self._budgets.file()
            at = file.place(self._hash64)
            is_known = file.slots[at] == self._hash64
            before = tuple(file.numbers[at + 1 : at + _RECORD]) if is_known else (0.0,) * N_NUMBERS
            after, result = step(before)
            for i, number in enumerate(after, at + 1):
                file.numbers[i] = number
            # A crash here leaves a new record without a name, and its numbers are lost.
            file.slots[at] = self._hash64
            return result


class SharedCounters:
    """Sums of the statistics of all processes, in the order of the fields of `Counted`. Never raises on disk errors."""

    def __init__(self, record: SharedRecord) -> None:
        self._record = record

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since its last call."""
        if not any(more):
            return
        begun = time.time()

        def added(numbers: Numbers) -> tuple[Numbers, None]:
            *sums, since = _sane(numbers)
            return (*(n + float(m) for n, m in zip(sums, more, strict=True)), since or begun), None

        with contextlib.suppress(OSError, ValueError):
            self._record.change(added)

    def total(self) -> Counted:
        """Return the sums; zeros if they cannot be read."""
        try:
            *sums, since = _sane(self._record.look())
        except (OSError, ValueError):
            return Counted()
        return Counted._make([*map(int, sums), since])


def _sane(numbers: Numbers) -> Numbers:
    """Return the numbers if they are valid counts, else zeros: a killed process may leave anything."""
    return numbers if all(math.isfinite(n) and 0 <= n < _MOST for n in numbers) else (0.0,) * len(numbers)
