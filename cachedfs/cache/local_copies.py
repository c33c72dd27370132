"""Local copies: whole objects as private files, counted in the cache size while they are in use."""

from __future__ import annotations

import contextlib
import os
import re
import time
from types import TracebackType

from cachedfs.cache import disk
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.disk import Buffer
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.errors import CacheError

__all__ = ["LocalCopy", "dead_copies", "new_name"]

_NAME = re.compile(r"[0-9a-f]{16}-([0-9a-f]{1,15})(\.\w{1,16}){0,2}", re.ASCII)
_UNUSED_S = 86400.0  # without locks across processes, a local copy may be removed only after this age


class LocalCopy:
    """A file of fixed size at `path`: reserved, allocated, written, sealed (then read-only) and removed by `close`.

    Its name has its size, so it is counted from its creation on. Only the process that created it removes it: in a
    forked child `close` does nothing to the file.
    """

    def __init__(self, path: str, size: int, locks: ByteRangeLocks) -> None:
        self.path = path
        self.size = size
        self._lock, self._locks = lock_of(path.rpartition("/")[2]), locks
        self._pid = os.getpid()
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


def new_name(size: int, suffix: str) -> str:
    """Return a name for a local copy of `size` bytes: process id, random digits and size in hex, and the suffix."""
    return f"{os.getpid():08x}{os.urandom(4).hex()}-{size:x}{suffix}"


def lock_of(name: str) -> int:
    """Return the number of the lock that the process of a local copy holds."""
    return int(name[:16], 16)


def dead_copies(directory: CacheDirectory, locks: ByteRangeLocks) -> tuple[list[str], int]:
    """Return the paths of the local copies of dead processes, and how many bytes the others have reserved.

    A process is dead if its lock is free. Without locks across processes, there must be no process with its id, and the
    file must be a day old: processes in other containers have ids that cannot be checked here.
    """
    dead, reserved, latest = [], 0, time.time() - _UNUSED_S
    for found in disk.scan(directory.local_copy("")):
        name = _NAME.fullmatch(found.name)
        if name is None:
            continue
        pid = lock_of(found.name) >> 32
        if locks.works_across_processes:
            is_used = locks.is_held(lock_of(found.name))
        else:
            is_used = found.modified_s > latest or (0 < pid < 1 << 31 and disk.is_alive(pid))
        if is_used:
            reserved += int(name[1], 16)
        else:
            dead.append(found.path)
    return dead, reserved
