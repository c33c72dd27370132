"""The files that a dataset left out, also in worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
import weakref
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from cachedfs.errors import without_frames


class SkippedFiles:
    """Errors of left-out files by path.

    DataLoader workers append theirs to a temporary file, which the parent reads.
    """

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
            line = json.dumps([path, f"{type(error).__name__}: {error}"])
            with contextlib.suppress(OSError), open(_opened(self._log), "ab", buffering=0) as file:
                file.write(f"{line}\n".encode())

    def errors(self) -> dict[str, Exception]:
        """Return all errors so far; those of workers are RuntimeErrors with the text of the error."""
        with contextlib.suppress(FileNotFoundError), open(self._log, "rb") as file:
            file.seek(self._n_read)
            for line in file:
                path, text = json.loads(line)
                self._errors.setdefault(path, RuntimeError(text))
                self._n_read += len(line)
        return self._errors


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            os.unlink(path)
