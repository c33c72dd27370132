"""A file being written through the mount: a local copy, sent to the origin as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from enum import Enum
from threading import Lock
from typing import Any

__all__ = ["LocalFile", "State"]

_PIECE = 8 << 20  # bytes copied at a time


class State(Enum):
    """What the object is to a local copy."""

    SENT = "it has these bytes"
    EMPTIED = "it was created or emptied here, and nothing was written since"
    WRITTEN = "it was written here"
    FAILED = "it was written here, and could not be sent: its writer knows"


class LocalFile:
    """The bytes of a file that is open for writing. Handles of one path share it; threads may call it at once.

    It has no name on the local disk, so nothing stays behind if the process dies.
    """

    def __init__(self, fs: Any, path: str) -> None:
        self.path = path
        self.n_open = 0
        self.is_removed = False  # deleted while open: never sent
        self.state = State.SENT
        self._is_loaded = False
        self._fs = fs
        self._lock = Lock()
        self._file = tempfile.TemporaryFile(prefix="cachedfs-")  # noqa: SIM115 - open as long as its handles

    def load(self, *, is_new: bool) -> None:
        """Begin with no bytes if `is_new`, else with those of the object. Only the first call copies them."""
        with self._lock:
            if is_new:
                self._file.truncate(0)
                self.state = State.EMPTIED
            elif not self._is_loaded:
                with self._fs.open(self.path, "rb") as source:
                    shutil.copyfileobj(source, self._file, _PIECE)
                self._file.flush()
            self._is_loaded = True

    def stat(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)

    def write(self, data: bytes, offset: int) -> int:
        with self._lock:
            self.state = State.WRITTEN
            written = 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], offset + written)
            return written

    def truncate(self, size: int) -> None:
        with self._lock:
            if size != self.stat().st_size:
                self.state = State.WRITTEN
                os.truncate(self._file.fileno(), size)

    def send(self) -> None:
        """Make these bytes the object, unless they are already. After an error, the object is as before."""
        with self._lock:
            if self.state is State.SENT or self.is_removed:
                return
            self.state = State.FAILED
            self._file.seek(0)
            if self.stat().st_size <= _PIECE:
                self._fs.pipe_file(self.path, self._file.read())  # one request, where a stream needs two
            else:
                with self._fs.open(self.path, "wb") as target:
                    shutil.copyfileobj(self._file, target, _PIECE)
            self.state = State.SENT

    def remove(self) -> None:
        """Never send it from now on. Waits while it is sent, so that the caller then finds the object."""
        with self._lock:
            self.is_removed = True

    def close(self) -> None:
        self._file.close()
