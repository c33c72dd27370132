"""Statistics that all processes of a machine share: a few numbers in a file.

They are changed under a lock that the kernel releases when its holder dies. A stopped holder is not waited for. After a killed
or overtaken process, the numbers may be any mixture of two states, so any numbers are accepted.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_slots import HEADER_SIZE, SharedSlots
from cachedfs.common.types import Counted

__all__ = ["STATISTICS_SIZE", "SharedCounters"]

_N_SLOTS = len(Counted._fields)
STATISTICS_SIZE = HEADER_SIZE + 8 * _N_SLOTS
_LOCK = 0x0DB5_57A7_C0DE_0003  # the lock number for changing the numbers
_NUMBERS = struct.Struct(f"<{_N_SLOTS}d")
_TRIES, _TRY_S = 20, 5e-5  # a change takes 10 us: after this many attempts its holder is stopped, not busy

_MOST = 2.0**53  # doubles represent integers exactly up to here


class _File(SharedSlots):
    magic = b"cfsstat1"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _N_SLOTS)

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _N_SLOTS

    def counted(self) -> Counted:
        """Return the numbers; zeros if they are no valid counts. Raises OSError."""
        numbers = _NUMBERS.unpack(self.read(_NUMBERS.size, HEADER_SIZE))
        if not all(math.isfinite(n) and 0 <= n < _MOST for n in numbers):
            return Counted()
        return Counted._make([*map(int, numbers[:-1]), numbers[-1]])

    def record(self, counted: Counted) -> None:
        """Replace the numbers. Raises OSError."""
        self.write([(HEADER_SIZE, _NUMBERS.pack(*counted))])


class SharedCounters:
    """Sums of the statistics of all processes that use one cache directory. Never raises on disk errors.

    The file is opened for each use, about once a second. Without one, the sums are in memory shared with forked
    children only.
    """

    def __init__(self, directory: Callable[[], CacheDirectory | None], locks: ByteRangeLocks) -> None:
        self._directory, self._locks = directory, locks
        self._memory: _File | None = None

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since its last call, in the order of the fields of `Counted`."""
        if not any(more):
            return
        begun = time.time()
        with contextlib.suppress(OSError), self._alone():
            file = self._open()
            *sums, since = file.counted()
            added = [n + m for n, m in zip(sums, more, strict=True)]
            file.record(Counted._make([*added, since or begun]))

    def total(self) -> Counted:
        """Return the sums; zeros if nothing was counted yet, or if they cannot be read."""
        directory = self._directory()
        has_file = directory is not None and os.path.exists(directory.statistics)
        with contextlib.suppress(OSError):
            if has_file or self._memory is not None:  # do not create the file
                return self._open().counted()
        return Counted()

    def _open(self) -> _File:
        directory = self._directory()
        file = _File(directory.statistics, directory.temp()) if directory else _File(None, "")
        if file.is_private:
            file = self._memory = self._memory or file
        return file

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the numbers against changes by other processes; after about a millisecond, continue without the lock."""
        locks = self._locks
        is_ours = locks.take(_LOCK)
        for _ in range(_TRIES):
            if is_ours:
                break
            time.sleep(_TRY_S)
            is_ours = locks.take(_LOCK)
        try:
            yield
        finally:
            if is_ours:
                locks.release(_LOCK)
