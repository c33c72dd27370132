"""Local copies: whole objects as private files, counted in the cache size while they are in use."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType

from cachedfs.cache import disk
from cachedfs.cache.disk import Buffer
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.errors import CacheError


class LocalCopy:
    """A file of fixed size at `path`: reserved, allocated, written, sealed (then read-only) and removed by `close`.

    Its name has the number of the lock that its process holds, and its size, so it is counted from its creation on.
    Only the process that created it removes it: in a forked child `close` does nothing to the file.
    """

    def __init__(self, folder: str, size: int, suffix: str, locks: ByteRangeLocks) -> None:
        self._pid = os.getpid()
        self._lock, self._locks = self._pid << 32 | int.from_bytes(os.urandom(4), "little"), locks
        self.path = f"{folder}/{self._lock:016x}-{size:x}{suffix}"
        self.size = size
        locks.take(self._lock)
        self._fd: int | None = None

    def reserve(self) -> None:
        """Create the file: from now on its size counts. Raises OSError."""
        self._fd = disk.create(self.path)

    def allocate(self) -> None:
        """Allocate the space. Raises OSError."""
        if self.size and self._fd is not None:
            disk.allocate(self._fd, self.size)

    def write_at(self, offset: int, buffer: Buffer) -> None:
        """Write `buffer` at `offset`. Raises CacheError beyond `size`, after `seal`, or if writing fails."""
        if self._fd is None:
            raise CacheError(f"{self.path} is sealed")
        if offset < 0 or offset + memoryview(buffer).nbytes > self.size:
            raise CacheError(f"{self.path} was reserved for {self.size} bytes")
        try:
            disk.write_all(self._fd, [buffer], offset)
        except OSError as error:
            raise CacheError(f"{self.path} cannot be written: {error}") from error

    def seal(self) -> None:
        """Finish writing and make the file read-only (0400). Raises CacheError if written data did not reach the disk."""
        if self._fd is None:
            return
        try:
            self._close_file()
            os.chmod(self.path, 0o400)
        except OSError as error:
            raise CacheError(f"{self.path} cannot be finished: {error}") from error

    def close(self) -> None:
        """Remove the file and release its space. Processes that have it open can still read it."""
        with contextlib.suppress(OSError):  # the file is removed anyway
            self._close_file()
        if self._pid != os.getpid():
            return
        self._pid = 0  # only once
        with contextlib.suppress(OSError):
            disk.unlink(self.path)
        self._locks.release(self._lock)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> LocalCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
