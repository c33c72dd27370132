"""Care of a shared folder: make it for a group, say what is in it, and remove what was not used for long."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from cachedfs.shared.piece import is_gathered, range_in_name
from cachedfs.shared.shared_folder import DAY_S, SharedFolder

__all__ = ["Cleaned", "KeptFile", "clean", "files_of", "make_for_group"]


class KeptFile(NamedTuple):
    """A file of a shared folder, by its name below that, and when it was last used or written."""

    name: str
    size: int
    used_at: float
    written_at: float


class Cleaned(NamedTuple):
    """Result of `clean`: how many files and bytes were removed, and how many are left."""

    removed: int
    bytes_removed: int
    files: int
    bytes: int


def make_for_group(path: str, group: str | None) -> None:
    """Make a folder in which a group, or else that of the parent folder or user, reads and writes. Raises OSError."""
    os.makedirs(path, exist_ok=True)
    if group is not None:
        shutil.chown(path, group=group)
    os.chmod(path, 0o2770)
    SharedFolder(path, trust="group", is_read_only=False).check()


def files_of(folder: SharedFolder) -> Iterator[KeptFile]:
    """Yield the files with data in a folder. Raises OSError if the folder cannot be listed."""
    for subfolder in ("gathered", *(f"runs/{name}" for name in folder.names("runs"))):
        for name in folder.names(subfolder):
            if is_gathered(name) or range_in_name(name) is not None:
                yield from _described(folder, f"{subfolder}/{name}")


def _described(folder: SharedFolder, name: str) -> Iterator[KeptFile]:
    with contextlib.suppress(OSError):  # removed meanwhile
        status = os.lstat(f"{folder.path}/{name}")
        if stat.S_ISREG(status.st_mode):
            used_at = max(status.st_atime, status.st_mtime)
            yield KeptFile(name, status.st_size, used_at, status.st_mtime)


def clean(folder: SharedFolder, most: int, *, now: float) -> Cleaned:
    """Remove the files that were not used for longest until `most` bytes are left, and temporary files and leases that are a day old.

    `now` is the time by the clock of the folder. Who has a file open, or is about to open it, reads on or asks the origin.
    """
    for name in [f"{each}/{name}" for each in ("tmp", "leases") for name in folder.names(each)]:
        for file in _described(folder, name):
            if file.written_at < now - DAY_S:
                with contextlib.suppress(OSError):  # of another user
                    folder.remove(name)
    files = sorted(files_of(folder), key=attrgetter("used_at"))
    n, size = len(files), sum(file.size for file in files)
    removed, bytes_removed = 0, 0
    for file in files:
        if size - bytes_removed <= most:
            break
        with contextlib.suppress(OSError):  # of another user
            folder.remove(file.name)
            removed, bytes_removed = removed + 1, bytes_removed + file.size
    return Cleaned(removed, bytes_removed, n - removed, size - bytes_removed)
