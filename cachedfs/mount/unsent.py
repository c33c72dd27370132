"""Files that could not be sent to their origin, kept on the local disk."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import IO

import platformdirs

from cachedfs.common.user_folders import found_folder, writable_folder

__all__ = ["keep", "kept"]

_MOST = 10 << 30  # bytes in all, and no more than a tenth of the disk
_PIECE = 8 << 20


def _find() -> str:
    return os.path.join(platformdirs.user_state_dir("cachedfs"), "unsent")


def kept() -> list[Path]:
    """Return the kept files, the oldest first."""
    folder = found_folder(_find)
    try:
        files = [] if folder is None else [path for path in Path(folder).iterdir() if path.is_file()]
        return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
    except OSError:
        return []


def keep(file: IO[bytes], path: str) -> str:
    """Copy what was written to the object `path`; return where it is, for a message.

    The oldest files make way. Only this user can read the copy.
    """
    try:
        folder = writable_folder(_find)
        size, room = os.fstat(file.fileno()).st_size, min(_MOST, shutil.disk_usage(folder).total // 10)
        if size > room:
            return "what was written is lost, as it is too large to be kept"
        older = [(old, old.stat().st_size) for old in kept()]
        total = sum(each for _, each in older)
        for old, each in older:
            if total + size <= room:
                break
            old.unlink(missing_ok=True)
            total -= each
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{path.replace('/', '_')[-150:]}"
        where = os.path.join(folder, name)
        with open(where, "xb", opener=partial(os.open, mode=0o600)) as copy:
            file.seek(0)
            shutil.copyfileobj(file, copy, _PIECE)
    except OSError as error:
        return f"what was written is lost, as it cannot be kept: {error}"
    return f"what was written is kept in {where}"
