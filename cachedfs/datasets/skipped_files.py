"""The files that a dataset left out, also in worker processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import uuid
import weakref
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from cachedfs.errors import without_frames

__all__ = ["SkippedFiles"]


class SkippedFiles:
    """Errors of left-out files by path. DataLoader workers append theirs to a temporary file, and the parent reads it."""

    def __init__(self, log: str | None = None) -> None:
        self._errors: dict[str, Exception] = {}
        self._log = log or os.path.join(tempfile.gettempdir(), f"cachedfs-skipped-{uuid.uuid4().hex}")
        self._n_read = 0  # bytes of the log
        if log is None:
            weakref.finalize(self, _remove, self._log, os.getpid())

    def __reduce__(self) -> Any:
        # A spawned worker appends to the same file. Any other copy starts empty.
        return type(self), (self._log,) if get_spawning_popen() is not None else ()

    def add(self, path: str, error: Exception) -> None:
        """Keep the error of a file, without the frames, which have the data of a batch."""
        self._errors[path] = without_frames(error)
        if get_worker_info() is not None:
            with contextlib.suppress(OSError), open(_opened(self._log), "ab", buffering=0) as file:
                file.write(_pickled(path, error))

    def errors(self) -> dict[str, Exception]:
        """Return all errors so far."""
        with contextlib.suppress(FileNotFoundError, EOFError), open(self._log, "rb") as file:
            file.seek(self._n_read)
            while True:
                path, error = pickle.load(file)
                self._errors.setdefault(path, error)
                self._n_read = file.tell()
        return self._errors


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _pickled(path: str, error: Exception) -> bytes:
    try:
        data = pickle.dumps((path, error))
        pickle.loads(data)
    except Exception:  # any type: errors of libraries may have arguments that cannot be pickled
        data = pickle.dumps((path, RuntimeError(f"{type(error).__name__}: {error}")))
    return data


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            os.unlink(path)
