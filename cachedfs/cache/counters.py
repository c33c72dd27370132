"""Request budgets: what the processes of the machine have sent of what a service lets one account send.

A record is a few numbers in a mapped file. It is changed under a claim, which dies with its holder; a holder that is
stopped is not waited for. What a killed or an overtaken process leaves may be any mixture of two states: who decides
takes any numbers, and the cost is a request too early or too late.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cachedfs.cache import disk
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_memory import SharedSlots
from cachedfs.common.types import Counted

__all__ = ["SharedRecords", "SharedCounters", "Numbers", "SharedRecord"]


T = TypeVar("T")
Numbers = tuple[float, ...]

N_NUMBERS = 7  # of a record; its first slot says whose it is
_RECORD = N_NUMBERS + 1
_N_SLOTS = 64 * _RECORD  # accounts are few
_LOOK_S = 1.0  # how often we look whether the file at our path is still the one that is mapped
_AGAIN_S = 60.0  # how long we do without a file before it is tried again
_TURNS, _TURN_S = 20, 5e-5  # a change takes 10 us: after so many turns its holder is stopped, not busy


class _File(SharedSlots):
    magic = b"cfsbudg1"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _N_SLOTS)
        self.numbers = self.slots.cast("B").cast("d")

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _N_SLOTS

    def place(self, hash64: int) -> int:
        """Return the first slot of an account's record: its own, a free one, or another's, which is then lost."""
        first = hash64 % (_N_SLOTS // _RECORD)
        places = [_RECORD * (first ^ i) for i in range(4)]
        for whose in (hash64, 0):
            for at in places:
                if self.slots[at] == whose:
                    return at
        return places[0]


class SharedRecords:
    """The budgets in one cache directory; without one, in memory of this process and of those forked from it."""

    def __init__(
        self, directory: Callable[[], CacheDirectory | None], locks: Callable[[], ByteRangeLocks]
    ) -> None:
        self._directory, self._locks = directory, locks
        self._file: _File | None = None
        self._look_at = self._again_at = 0.0

    def record(self, account: str) -> SharedRecord:
        """Return the record of one account at one service; made without I/O."""
        return SharedRecord(self, account)

    def close(self) -> None:
        """Let go of the mapped file; it is mapped again when it is needed. What only this process knows stays."""
        if self._file is not None and not self._file.is_private:
            self._file = None

    def is_made(self) -> bool:
        """Return whether anybody has noted anything yet."""
        directory = self._directory()
        return self._file is not None or (directory is not None and disk.exists(directory.budgets))

    def file(self) -> _File:
        """Return the file that the processes of the machine have mapped now."""
        now, file = time.monotonic(), self._file  # which another thread may close
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
        """Leave a file that somebody deleted, so that all processes map the same one; try again what could not be shared."""
        if file.is_private and now >= self._again_at:
            found = self._opened(now)
            self._file = file if found.is_private else found  # what we know ourselves is better than nothing
        with contextlib.suppress(OSError):  # nobody can tell: what we have goes on
            if not file.is_current():
                self._file = self._opened(now)

    @contextlib.contextmanager
    def alone(self, hash64: int) -> Iterator[None]:
        """Keep other processes from changing a record; those that do not get to it in a millisecond change it anyway."""
        locks = self._locks()
        is_ours = locks.take(hash64)
        for _ in range(_TURNS):
            if is_ours:
                break
            disk.pause(_TURN_S)
            is_ours = locks.take(hash64)
        try:
            yield
        finally:
            if is_ours:
                locks.drop(hash64)


class SharedRecord:
    """The numbers of one account: `N_NUMBERS` of them, all 0 at first."""

    def __init__(self, budgets: SharedRecords, account: str) -> None:
        digest = hashlib.blake2b(account.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._budgets, self._hash64 = budgets, int.from_bytes(digest, "little") or 1

    def look(self) -> Numbers:
        """Return the numbers as they are now; zeros where there is no record, and none is made."""
        if not self._budgets.is_made():
            return (0.0,) * N_NUMBERS
        file = self._budgets.file()
        at = file.place(self._hash64)
        if file.slots[at] != self._hash64:
            return (0.0,) * N_NUMBERS
        return tuple(file.numbers[at + 1 : at + _RECORD])

    def change(self, step: Callable[[Numbers], tuple[Numbers, T]]) -> T:
        """Put what `step` makes of the numbers in their place, and return what else it says. Any numbers may come."""
        with self._budgets.alone(self._hash64):
            file = self._budgets.file()
            at = file.place(self._hash64)
            is_known = file.slots[at] == self._hash64
            before = tuple(file.numbers[at + 1 : at + _RECORD]) if is_known else (0.0,) * N_NUMBERS
            after, result = step(before)
            for i, number in enumerate(after, at + 1):
                file.numbers[i] = number
            # dies here: a new record is of nobody, and its numbers are lost
            file.slots[at] = self._hash64
            return result


_MOST = 2.0**53  # doubles count exactly up to here


class SharedCounters:
    """The sums in one record, in the order of `Counted`. Never an error, whatever the disk does: they only inform."""

    def __init__(self, record: SharedRecord) -> None:
        self._record = record

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since it added last."""
        if not any(more):
            return
        begun = time.time()

        def added(numbers: Numbers) -> tuple[Numbers, None]:
            *sums, since = _sane(numbers)
            return (*(n + float(m) for n, m in zip(sums, more, strict=True)), since or begun), None

        with contextlib.suppress(OSError, ValueError):
            self._record.change(added)

    def total(self) -> Counted:
        """Return the sums; zeros when nobody can tell."""
        try:
            *sums, since = _sane(self._record.look())
        except (OSError, ValueError):
            return Counted()
        return Counted._make([*map(int, sums), since])


def _sane(numbers: Numbers) -> Numbers:
    """Return the numbers if they can be counts, else zeros: what a killed process leaves may be anything."""
    return numbers if all(math.isfinite(n) and 0 <= n < _MOST for n in numbers) else (0.0,) * len(numbers)
