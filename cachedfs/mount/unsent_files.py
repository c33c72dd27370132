"""Files that could not be sent to their origin, kept on the local disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

import platformdirs

from cachedfs.common.user_folders import existing_folders, writable_folder

_MOST = 10 << 30  # bytes in all, and no more than a tenth of the disk
_PIECE = 8 << 20
_NAME = "unsent"
_NAME_BYTES = 150  # of the path in the name of a file


def _state_folder() -> str:
    return platformdirs.user_state_dir("cachedfs")


def kept() -> list[Path]:
    """Return the kept files, the oldest first."""
    try:
        folders = [Path(folder, _NAME) for folder in existing_folders(_state_folder)]
        files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
        return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
    except OSError:
        return []


def keep(file: IO[bytes], path: str) -> str:
    """Copy what was written to the object `path`; return a phrase that says where the copy is, or why there is none.

    The oldest files make way. Only this user can read the copy.
    """
    try:
        folder = os.path.join(writable_folder(_state_folder), _NAME)
        os.makedirs(folder, 0o700, exist_ok=True)
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
        name = os.fsencode(path.replace("/", "_").replace("\0", "_"))[-_NAME_BYTES:].decode(errors="ignore")
        when = time.strftime("%Y%m%dT%H%M%S")
        number, where = tempfile.mkstemp(f"-{name}", f"{when}-", folder)  # private, and a new file
        with open(number, "wb") as copy:
            try:
                # First to the end, as that drops Python's buffer: the mount writes to the descriptor.
                file.seek(0, os.SEEK_END)
                file.seek(0)
                shutil.copyfileobj(file, copy, _PIECE)
                copy.flush()
            except BaseException:  # an interrupt, too
                os.unlink(where)
                raise
    except OSError as error:
        return f"what was written is lost, as it cannot be kept: {error}"
    return f"what was written is kept in {where}"
