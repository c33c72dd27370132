"""Care of a shared folder: make it for a group, say what is in it, and remove what was not used for long."""

from __future__ import annotations

import contextlib
import os
import shutil
from operator import attrgetter
from typing import NamedTuple

from cachedfs.cache import disk
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import DAY_S, SharedFolder
from cachedfs.shared.shared_store import BASE


class Cleaned(NamedTuple):
    """Result of `clean`: how many files and bytes were removed, and how many are left."""

    removed: int
    bytes_removed: int
    files: int
    bytes: int


def make_for_group(path: str, group: str | None) -> None:
    """Make a folder in which a group, or else that of the parent folder or user, reads and writes.

    What is in a shared cache there is given to the group as well, except files of other users. Raises OSError, and
    LookupError for an unknown group.
    """
    os.makedirs(f"{path}/{BASE}", exist_ok=True)
    if group is not None:
        shutil.chown(path, group=group)
    os.chmod(path, 0o2770)
    gid = os.stat(path).st_gid
    for _, _, names, fd in os.fwalk(f"{path}/{BASE}"):
        _give(fd, gid, 0o2770)
        for name in names:
            with contextlib.suppress(OSError):  # of another user, or removed meanwhile
                file = os.open(name, disk.READ, dir_fd=fd)
                try:
                    _give(file, gid, 0o660)
                finally:
                    os.close(file)
    SharedFolder(path, trust="group", is_read_only=False).check()


def _give(fd: int, gid: int, mode: int) -> None:
    os.fchown(fd, -1, gid)
    os.fchmod(fd, mode)


def clean(place: SharedFolder | SharedBucket, most: int, *, now: float) -> Cleaned:
    """Remove the files that were not used for longest, until `most` bytes are left.

    Also remove temporary files and leases that are a day old. `now` is the time by the clock of the place. Who has a file
    open, or is about to open it, reads on or asks the origin.
    """
    for file in place.leftovers():
        if file.written_at < now - DAY_S:
            with contextlib.suppress(OSError):  # of another user
                place.remove(file.name)
    files = sorted(place.files(), key=attrgetter("used_at"))
    n, size = len(files), sum(file.size for file in files)
    removed, bytes_removed = 0, 0
    for file in files:
        if size - bytes_removed <= most:
            break
        with contextlib.suppress(OSError):  # of another user
            place.remove(file.name)
            removed, bytes_removed = removed + 1, bytes_removed + file.size
    return Cleaned(removed, bytes_removed, n - removed, size - bytes_removed)
