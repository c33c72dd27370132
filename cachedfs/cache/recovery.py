"""Recover after a crash or a lost index: count the files again, and remove what dead processes left.

The temporary file of a block is named after the writer number of its process, which holds the lock on that number
while it lives; so is a local copy. If the process is dead, the file can go at once. Other temporary files (a replaced
index, a shared file being made) name no process and go when they are an hour old.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from cachedfs.cache import block_file, disk
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import BlockKey
from cachedfs.errors import BadBlock

_STALE_S = 3600  # a temporary file this old has no living writer
_UNUSED_COPY_S = 86400.0  # without locks across processes, a local copy may be removed only after this age
_UNUSED_HOST_S = 7 * 86400  # another host that wrote nothing for so long is taken for gone
_BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")
_COPY = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,15})(\.\w{1,16}){0,2}", re.ASCII)


def leftovers(root: str, locks: ByteRangeLocks, now_s: float) -> tuple[list[disk.FolderEntry], int]:
    """Return the temporary files and local copies of dead processes, and the bytes of the other ones without a row.

    A process is dead if its lock is free. Without locks across processes, there must be no process with its id, and the
    local copy must be a day old: processes in other containers have ids that cannot be checked here.
    """
    dead, uncounted = [], 0
    for found in disk.scan(f"{root}/local-copies"):
        if (name := _COPY.fullmatch(found.name)) is None:
            continue
        lock = int(name[1], 16)
        if locks.works_across_processes:
            is_used = locks.is_held(lock)
        else:
            is_young = found.modified_s > now_s - _UNUSED_COPY_S
            is_used = is_young or (0 < lock >> 32 < 1 << 31 and disk.is_alive(lock >> 32))
        if is_used:
            uncounted += int(name[2], 16)
        else:
            dead.append(found)
    for found in disk.scan(f"{root}/tmp"):
        block = _BLOCK.fullmatch(found.name)
        if found.modified_s < now_s - _STALE_S or (block and not locks.is_held(int(block[1], 16))):
            dead.append(found)
        elif not (block and locks.works_across_processes):
            uncounted += found.size
    return dead, uncounted


def remove_leftovers(root: str, locks: ByteRangeLocks, now_s: float) -> int:
    """Remove what dead processes left; return the bytes of the temporary files and local copies without a row."""
    dead, uncounted = leftovers(root, locks, now_s)
    for found in dead:
        with contextlib.suppress(OSError):
            _remove(found)
    return uncounted


def remove_old_hosts(root: str, now_s: float) -> bool:
    """Remove a part of the cache of a host on a network filesystem that has not used it for a week.

    Containers get a new name at each start, and nobody else counts these bytes. A host that comes back finds rows
    without files. Returns whether there may be more.
    """
    for host in disk.scan(root.rpartition("/")[0]):
        if not (host.is_folder and host.name.startswith("host-")) or host.path == root:
            continue
        with contextlib.suppress(OSError):  # one that cannot be read or removed must not keep the others
            inside = [each.modified_s for each in disk.scan(host.path) if each.name != "blocks"]
            if max([host.modified_s, *inside]) < now_s - _UNUSED_HOST_S:
                _remove(next(disk.scan(f"{host.path}/blocks"), host))
                return True
    return False


def _remove(found: disk.FolderEntry) -> None:
    (shutil.rmtree if found.is_folder else disk.unlink)(found.path)


def count_all(rows: IndexRows, directory: CacheDirectory, now_s: float) -> None:
    """Add a row for each file without one that is a valid block, as an old block, and remove other files of blocks."""
    for found in directory.files():
        key = _key_of(found.path)
        if key is None:
            with contextlib.suppress(OSError):
                disk.unlink(found.path)
        elif rows.block(key.object, key.index) is None:
            rows.add_blocks([(key, found.size)], 0, min(found.modified_s, now_s), 0)
    rows.totals.last_admitted = rows.totals.last_block  # they are not new, so they skip staging
    rows.totals.is_counted = 1
    for name, value in rows.sums().items():
        setattr(rows.totals, name, value)


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
    return key if path.endswith("/" + block_file.block_path(key.object.digest, key.index)) else None
