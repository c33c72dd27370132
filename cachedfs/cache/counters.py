"""Statistics that all processes of a machine share: a few numbers in a file.

They are changed under a lock that the kernel releases when its holder dies. A stopped holder is not waited for. A killed
or overtaken process may leave any mixture of two states, so any numbers are accepted.
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
_LOOK_S = 1.0  # interval between checks that the file is still the one at the path
_AGAIN_S = 60.0  # delay before a file that could not be shared is tried again
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

    Without a directory, they are in memory shared with forked children only.
    """

    def __init__(
        self, directory: Callable[[], CacheDirectory | None], locks: Callable[[], ByteRangeLocks]
    ) -> None:
        self._directory, self._locks = directory, locks
        self._file: _File | None = None
        self._look_at = self._again_at = 0.0

    def add(self, more: Sequence[int]) -> None:
        """Add what one process counted since its last call, in the order of the fields of `Counted`."""
        if not any(more):
            return
        begun = time.time()
        with contextlib.suppress(OSError), self._alone():
            file = self._current()
            *sums, since = file.counted()
            added = [n + m for n, m in zip(sums, more, strict=True)]
            file.record(Counted._make([*added, since or begun]))

    def total(self) -> Counted:
        """Return the sums; zeros if nothing was counted yet, or if they cannot be read."""
        directory = self._directory()
        if self._file is None and not (directory is not None and os.path.exists(directory.statistics)):
            return Counted()  # do not create the file
        try:
            return self._current().counted()
        except OSError:
            return Counted()

    def close(self) -> None:
        """Close the file; the next use opens it again. Counts in private memory are kept."""
        if self._file is not None and not self._file.is_private:
            self._file = None

    def _current(self) -> _File:
        """Return the file that the processes of the machine use now."""
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
        return _File(directory.statistics, directory.temp()) if directory else _File(None, "")

    def _look(self, file: _File, now: float) -> None:
        """Replace a deleted file, so that all processes use the same one; retry a file that could not be shared."""
        if file.is_private and now >= self._again_at:
            found = self._opened(now)
            # The numbers of this process are better than none.
            self._file = file if found.is_private else found
        with contextlib.suppress(OSError):  # cannot check: keep the current file
            if not file.is_current():
                self._file = self._opened(now)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the numbers against changes by other processes; after about a millisecond, continue without the lock."""
        locks = self._locks()
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
