"""Files that are written through the mount: local copies, each sent to the origin as a whole."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from threading import Lock
from typing import Any

__all__ = ["LocalFile", "LocalFiles", "State", "moved"]

logger = logging.getLogger("cachedfs.mount")
_PIECE = 8 << 20  # bytes copied at a time


class State(Enum):
    """Whether the object has the bytes of a local copy."""

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
        """Never send it from now on. Waits while it is sent: the caller then finds the object."""
        with self._lock:
            self.is_removed = True

    def close(self) -> None:
        self._file.close()


class LocalFiles:
    """The local copies of the files that are open for writing, by object path. Threads may call it at once."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._lock = Lock()
        self._files: dict[str, LocalFile] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def paths(self) -> list[str]:
        with self._lock:
            return [path for path, local in self._files.items() if not local.is_removed]

    def stat(self, path: str) -> os.stat_result | None:
        with self._lock:  # else the file could be closed meanwhile
            local = self._files.get(path)
            return None if local is None else local.stat()

    def open(self, path: str, *, is_new: bool) -> LocalFile:
        """Return the local copy of a file, for one more handle."""
        with self._lock:
            if (local := self._files.get(path)) is None:
                local = self._files[path] = LocalFile(self._fs, path)
            local.n_open += 1
        try:
            local.load(is_new=is_new)
        except BaseException:  # an interrupt, too: no handle is given out
            self.leave(local)
            raise
        return local

    def leave(self, local: LocalFile) -> None:
        """End a handle. The last one sends what no `close` has sent; an error of that is only in the log."""
        with self._lock:
            local.n_open -= 1
            if local.n_open:
                return
        if local.state is not State.FAILED:
            try:
                local.send()
            except Exception as error:  # of any kind: no program waits for this
                logger.error("sending %s: %s", local.path, error)
        with self._lock:
            if local.n_open:  # opened again meanwhile
                return
            if self._files.get(local.path) is local:
                del self._files[local.path]
        _report_unsent(local)
        local.close()

    def report_unsent(self) -> None:
        """Log which files are still open, and not sent."""
        for local in [*self._files.values()]:
            _report_unsent(local)

    def remove(self, path: str) -> bool:
        """Never send the file at `path`; return whether there was one."""
        with self._lock:
            local = self._files.pop(path, None)
        if local is not None:
            local.remove()
        return local is not None

    @contextmanager
    def renamed(self, source: str, target: str) -> Iterator[None]:
        """Send the files at and below `source` before a rename, and let them follow it.

        A file open at `target` is never sent, unless the rename fails.
        """
        with self._lock:
            moving = [local for path, local in self._files.items() if moved(path, source, target) != path]
            replaced = self._files.get(target)
        for local in moving:
            local.send()
        if replaced is not None:
            replaced.remove()
        try:
            yield
        except BaseException:  # an interrupt, too: nothing was replaced
            if replaced is not None:
                replaced.is_removed = False
            raise
        with self._lock:
            if replaced is not None and self._files.get(target) is replaced:
                del self._files[target]
            for local in moving:
                if self._files.pop(local.path, None) is local:
                    local.path = moved(local.path, source, target)
                    self._files[local.path] = local


def moved(path: str, source: str, target: str) -> str:
    """Return where a path is after `source` was moved to `target`."""
    return target + path[len(source) :] if path == source or path.startswith(f"{source}/") else path


def _report_unsent(local: LocalFile) -> None:
    if local.state is not State.SENT and not local.is_removed:
        logger.error("%s was not sent: what was written to it is lost", local.path)
