"""What a crash or a lost index leaves: count the files again, and remove temporary files and folders of old hosts.

The temporary file of a block is named after the writer number of its process, which holds the lock on that number
while it lives. If the process is dead, the file can go at once. Other temporary files (a replaced index, a shared
file being made) name no process and go when they are an hour old.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.database import IndexRows
from cachedfs.cache.local_copies import dead_copies
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import BlockKey

__all__ = ["count_all", "is_leftover", "remove_leftovers", "remove_old_hosts"]


_STALE_S = 3600  # a temporary file this old has no living writer
_HOST, _GONE = "host-", "gone-"
_UNUSED_S = 7 * 86400  # another host that wrote nothing for so long is taken for gone
_BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")


def remove_leftovers(directory: CacheDirectory, locks: ByteRangeLocks, now_s: float) -> int:
    """Remove temporary files and local copies of dead processes; return the bytes of the other ones without a row."""
    dead, uncounted = dead_copies(f"{directory.root}/local-copies", locks)
    for path in dead:
        with contextlib.suppress(OSError):
            disk.unlink(path)
    for found in disk.scan(f"{directory.root}/tmp"):
        if is_leftover(found, locks, now_s):
            with contextlib.suppress(OSError):
                _remove(found)
        elif not (_BLOCK.fullmatch(found.name) and locks.works_across_processes):
            uncounted += found.size
    return uncounted


def remove_old_hosts(root: str, now_s: float) -> bool:
    """Remove a part of the caches of hosts on a network filesystem that have not used it for `_UNUSED_S` seconds.

    Containers get a new name at each start, and nobody else counts these bytes. Returns whether there may be more.
    """
    above = root.rpartition("/")[0]
    for found in disk.scan(above):
        is_other = found.is_folder and found.name.startswith(_HOST) and found.path != root
        if is_other and _last_use_s(found) < now_s - _UNUSED_S:
            # Renamed, so that a host that comes back never finds half a cache.
            with contextlib.suppress(OSError):
                os.rename(found.path, f"{above}/{_GONE}{os.urandom(8).hex()}")
    for found in disk.scan(above):
        if found.name.startswith(_GONE):
            part = next(disk.scan(f"{found.path}/blocks"), found)
            with contextlib.suppress(OSError):  # one that cannot be removed must not keep the others
                _remove(part)
                return True
    return False


def _remove(found: disk.FolderEntry) -> None:
    (shutil.rmtree if found.is_folder else disk.unlink)(found.path)


def _last_use_s(host: disk.FolderEntry) -> float:
    """Return when files or access records of a host's folder were written last, in seconds since the epoch."""
    names = (
        "index.db",
        "index.db-wal",
        "index.db-shm",
        "index.db-journal",
        "access-records",
        "change-counters",
        "tmp",
    )
    found = (disk.state(f"{host.path}/{name}") for name in names)
    return max(host.modified_s, *(status.st_mtime for status in found if status is not None), 0.0)


def is_leftover(found: disk.FolderEntry, locks: ByteRangeLocks, now_s: float) -> bool:
    block = _BLOCK.fullmatch(found.name)
    return found.modified_s < now_s - _STALE_S or bool(block and not locks.is_held(int(block[1], 16)))


def count_all(rows: IndexRows, directory: CacheDirectory, now_s: float) -> None:
    """Add a row for each file without one that is a valid block, and remove other files of blocks."""
    for found in directory.files():
        _adopt(rows, found, now_s)
    rows.totals.last_admitted = rows.totals.last_block  # they are not new, so they skip staging
    rows.totals.is_counted = 1
    for name, value in rows.sums().items():
        setattr(rows.totals, name, value)


def _adopt(rows: IndexRows, found: disk.FolderEntry, now_s: float) -> None:
    """Add a row for a file without one, as an old block; remove the file if it is not a valid block."""
    key = _key_of(found.path)
    if key is None:
        with contextlib.suppress(OSError):
            disk.unlink(found.path)
    elif rows.block(key.object, key.index) is None:
        rows.add_blocks([(key, found.size)], 0, min(found.modified_s, now_s), 0)


def _key_of(path: str) -> BlockKey | None:
    """Return the key of the block in a file; None if it is no valid block, or has the name of another one."""
    try:
        block = block_file.open_block(os.open(path, disk.READ), path)
        block.close()
        key = block.trailer.key
    except BadBlock:
        return None
    except OSError as error:
        if error.errno in disk.TOO_MANY_FILES:  # a problem of this process, not of the file
            raise
        return None
    return key if path.endswith("/" + block_file.place(key.object.digest, key.index)) else None
