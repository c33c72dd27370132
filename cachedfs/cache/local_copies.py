"""A local copy: a whole object as a private file, counted in the cache size while it is in use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType

from cachedfs.cache import disk
from cachedfs.cache.disk import Buffer
from cachedfs.errors import CacheError

__all__ = ["LocalCopy"]


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
        """Finish writing and make the file read-only (0400). Raises CacheError if the disk lost written data."""
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
        # A crash here leaves a row without a file, removed when its lock is found free.
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
