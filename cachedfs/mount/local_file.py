"""A file that is written through the mount: a local copy, sent to the origin as a whole."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from threading import RLock
from typing import IO, Any, BinaryIO

from cachedfs.common.types import ANY_VERSION, ObjectInfo
from cachedfs.mount.temporary_files import temporary_file
from cachedfs.mount.unsent_files import keep

logger = logging.getLogger("cachedfs.mount")
_PIECE = 8 << 20  # bytes copied at a time


def now_ns() -> int:
    """Return the time in nanoseconds, in whole milliseconds: Google Drive keeps no less."""
    return time.time_ns() // 1_000_000 * 1_000_000


class State(Enum):
    """The state of a local copy: each says how the object differs from it."""

    SENT = "it has these bytes"
    EMPTIED = "it was created or emptied here, and nothing was written since"
    WRITTEN = "it was written here"
    FAILED = "it was written here, and could not be sent: its writer knows"
    BROKEN = "a write to the local copy failed: it is never sent"


class LocalFile:
    """The bytes of a file that is open for writing. Handles of one path share it; threads may call it at once.

    It has no name on the local disk, so nothing stays behind if the process dies. `base` is what it replaces when it is
    sent: the version that was there when it was opened, None for a new file, or ANY_VERSION. The bytes of that version are
    fetched when they are first needed.
    """

    def __init__(self, fs: Any, path: str, folder: str | None, base: Any, mtime_ns: int) -> None:
        """Open it with the bytes of `base`, for a handle that may write; temporary files are in `folder`."""
        self.path = path
        # Handles, and those that may write; both change under the lock of the inodes.
        self.n_open = self.n_writing = 1
        self.is_removed = False  # deleted while open: never sent
        self.state = State.SENT if isinstance(base, ObjectInfo) else State.EMPTIED
        self.mtime_ns = mtime_ns
        self._fs, self._folder, self._base = fs, folder, base
        self.lock = RLock()  # while it is held, the file is neither changed nor sent
        self._file: BinaryIO | None = None  # made when it is first needed
        self.size = (base.size or 0) if isinstance(base, ObjectInfo) else 0

    @property
    def is_being_written(self) -> bool:
        return self.n_writing > 0 or self.state is not State.SENT

    def join(self, *, is_writing: bool) -> LocalFile:
        """Count one more handle."""
        self.n_open += 1
        self.n_writing += is_writing
        return self

    def _loaded(self, stop: int | None = None) -> int:
        """Return the descriptor of the local copy, which at first gets the bytes of the object, up to `stop` if given."""
        with self.lock:
            if self._file is None:
                file = temporary_file(self._folder)
                try:
                    if self.size and stop != 0:
                        with self._fs._open_version(self.path, self._base.fingerprint) as source:
                            _copy(source, file, self.size if stop is None else min(stop, self.size))
                    file.flush()
                except BaseException:  # an interrupt, too
                    file.close()
                    raise
                self._file = file
            return self._file.fileno()

    def load(self) -> None:
        """Fetch the bytes while the object is there: its open files outlive it, as on a local disk."""
        with suppress(OSError, ValueError):  # their reads and writes then fail; or it was closed meanwhile
            self._loaded()

    def empty(self) -> None:
        """Forget all bytes. What is sent then replaces any version."""
        with self.lock:
            os.ftruncate(self._loaded(0), 0)
            if self._base is not None:
                self._base = ANY_VERSION
            self.state, self.size, self.mtime_ns = State.EMPTIED, 0, now_ns()

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._loaded(), size, offset)

    def write(self, data: memoryview | bytes, offset: int) -> int:
        with self._changing():
            file, written = self._loaded(), 0
            while written < len(data):
                written += os.pwrite(file, data[written:], offset + written)
                self.size = max(self.size, offset + written)
            return written

    def truncate(self, size: int) -> None:
        if size != self.size:
            with self._changing():
                os.ftruncate(self._loaded(size), size)
                self.size = size

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the bytes. After an error they are those of no version, and never sent."""
        with self.lock:
            try:
                yield
            except BaseException:  # an interrupt, too
                self.state = State.BROKEN
                raise
            self.mtime_ns = now_ns()
            if self.state is not State.BROKEN:
                self.state = State.WRITTEN

    def send(self) -> ObjectInfo | None:
        """Make these bytes the object; return its new version, None if it has them already.

        After an error, the object is as before.
        """
        with self.lock:
            if self.state is State.SENT or self.is_removed:
                return None
            if self.state is State.BROKEN:
                raise OSError(
                    errno.EIO, "a write to it failed before: it is not sent, and the object is as before"
                )
            self.state = State.FAILED
            self._loaded()
            assert self._file is not None
            info: ObjectInfo = self._fs._send(
                self.path, self._file, replaces=self._base, mtime_ns=self.mtime_ns
            )
            self.state, self._base = State.SENT, info
            return info

    def rebase(self) -> None:
        """Take what is at its path now, after it was renamed, for what it replaces when it is sent."""
        with self.lock:
            if isinstance(self._base, ObjectInfo):
                self._base = self._fs._object(self.path)

    def close(self) -> None:
        """Close it; keep what could not be sent in a file that the log names."""
        with self.lock:
            if self.state is not State.SENT and not self.is_removed:
                self.report_unsent()
            if self._file is not None:
                self._file.close()

    def report_unsent(self) -> None:
        """Keep the bytes in a file, and log where."""
        with self.lock:
            if self._file is None or self.state is State.BROKEN:
                logger.error("%s was not sent: what was written to it is lost", self.path)
            else:
                logger.error("%s was not sent: %s", self.path, keep(self._file, self.path))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size > 0:
        piece = source.read(min(_PIECE, size))
        if not piece:
            raise OSError(errno.EIO, "the object is shorter than its metadata says")
        target.write(piece)
        size -= len(piece)
