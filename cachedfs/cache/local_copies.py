"""Local copies: whole objects as private files, counted in the cache size while they are in use."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType

from cachedfs.cache import disk
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.disk import Buffer
from cachedfs.cache.index.block_rows import BlockRows, LocalCopyRow
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.errors import CacheError

__all__ = ["LocalCopy", "dead_copies", "remove_dead_copies"]

_UNUSED_S = 86400.0  # without locks across processes, a local copy may be removed only after this age


class LocalCopy:
    """A file of fixed size at `path`: written, sealed (then read-only) and removed by `close`.

    Its space is reserved in the index before the file is created. Only the process that created it removes it: in a
    forked child `close` does nothing to the file.
    """

    def __init__(self, path: str, size: int, removed: Callable[[], None]) -> None:
        self.path = path
        self.size = size
        self._removed = removed
        self._pid = os.getpid()
        self._fd: int | None = disk.create(path)
        try:
            if size:
                disk.allocate(self._fd, size)
        except BaseException:  # an interrupt too: the caller has no object to close yet
            with contextlib.suppress(OSError):
                self._close_file()
            raise

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
        # After a crash here there is a row without a file, removed when its lock is found free.
        self._removed()

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


def remove_dead_copies(rows: BlockRows, directory: CacheDirectory, locks: ByteRangeLocks) -> int:
    """Remove the local copies of dead processes; return the freed bytes."""
    freed = 0
    for copy in dead_copies(rows, directory, locks):
        with contextlib.suppress(OSError):
            disk.unlink(directory.local_copy(copy.name))
        rows.remove_local_copy(copy)
        freed += copy.size
    return freed


def dead_copies(rows: BlockRows, directory: CacheDirectory, locks: ByteRangeLocks) -> list[LocalCopyRow]:
    """Return the local copies whose process is dead.

    A process is dead if its lock is free. Without locks across processes, there must be no process with its id, and the
    file must be a day old: processes in other containers have ids that cannot be checked here.
    """
    if locks.works_across_processes:
        return [copy for copy in rows.local_copies() if not locks.is_held(copy.owner_lock)]
    latest = time.time() - _UNUSED_S
    return [copy for copy in rows.local_copies() if not _may_be_in_use(copy, directory, latest)]


def _may_be_in_use(copy: LocalCopyRow, directory: CacheDirectory, latest: float) -> bool:
    try:
        status = disk.state(directory.local_copy(copy.name))
    except OSError:
        return True
    if status is not None and status.st_mtime > latest:
        return True
    return 0 < copy.pid < 1 << 31 and disk.is_alive(copy.pid)
