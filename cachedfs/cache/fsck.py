"""Consistency check and repair of a cache directory, and removal of leftover temporary files.

The temporary file of a block is named after the writer number of its process, which holds the lock on that number
while it lives. If the process is dead, the file can go at once. Other temporary files (a replaced index, a shared
file being made) name no process and go when they are an hour old.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import NamedTuple

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock, BlockTrailer
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.eviction.policy import EvictionPolicy
from cachedfs.cache.index.block_rows import BlockRow
from cachedfs.cache.index.database import CacheIndex, IndexRows
from cachedfs.cache.local_copies import dead_copies
from cachedfs.cache.locks import ByteRangeLocks

__all__ = [
    "CheckReport",
    "check",
    "count_all",
    "rebuild",
    "remove_leftovers",
    "remove_old_hosts",
]


_STALE_S = 3600  # a temporary file this old has no living writer
_HOST, _GONE = "host-", "gone-"
_UNUSED_S = 7 * 86400  # another host that wrote nothing for so long is taken for gone
_BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")

_BATCH = 4096


def remove_leftovers(directory: CacheDirectory, locks: ByteRangeLocks, now_s: float) -> int:
    """Remove temporary files and local copies of dead processes; return the bytes of the other ones without a row."""
    dead, uncounted = dead_copies(directory, locks)
    for path in dead:
        with contextlib.suppress(OSError):
            disk.unlink(path)
    for found in disk.scan(f"{directory.root}/tmp"):
        if _is_leftover(found, locks, now_s):
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


def _is_leftover(found: disk.FolderEntry, locks: ByteRangeLocks, now_s: float) -> bool:
    block = _BLOCK.fullmatch(found.name)
    return found.modified_s < now_s - _STALE_S or bool(block and not locks.is_held(int(block[1], 16)))


class CheckReport(NamedTuple):
    """The result of a check; every problem names the file. `repaired`: fixable problems were fixed."""

    blocks: int = 0
    bytes: int = 0
    orphans: tuple[str, ...] = ()  # files without a row
    missing: tuple[str, ...] = ()  # rows without a file
    wrong_size: tuple[str, ...] = ()  # files whose size differs from their row
    corrupt: tuple[str, ...] = ()  # files that are not the block that their name says
    leftovers: tuple[str, ...] = ()  # temporary files and local copies of dead processes
    wrong_sums: tuple[str, ...] = ()  # recorded sums that differ from the rows
    repaired: bool = False

    @property
    def ok(self) -> bool:
        return not any(
            (self.orphans, self.missing, self.wrong_size, self.corrupt, self.leftovers, self.wrong_sums)
        )


def check(
    index: CacheIndex, directory: CacheDirectory, room: EvictionPolicy, locks: ByteRangeLocks, *, repair: bool
) -> CheckReport:
    """Compare all files with all rows and read every byte.

    The order is files, then rows, then whether each file still exists, so that blocks stored or evicted by other
    processes meanwhile are no problem. Raises sqlite3.Error, OSError.
    """
    now_s = time.time()
    files = {found.name: found for found in directory.files()}
    corrupt = {found.name: found for found in files.values() if not _is_sound(found)}
    with index.writing() as rows:
        missing, wrong_size = [], []
        for block in _all_rows(rows):
            found = files.pop(block.name, None)
            if found is None:
                # Check for a writer first: the file may appear between the two checks.
                is_underway = room.is_being_written(block)
                if not is_underway and not os.path.exists(room.path(block.name)):
                    missing.append(block)
            elif found.size != block.size and found.name not in corrupt:
                wrong_size.append((block, found.size))
        orphans = [
            found
            for found in files.values()
            if found.name not in corrupt and disk.state(found.path) is not None
        ]
        temps = disk.scan(f"{directory.root}/tmp")
        leftovers = [found.path for found in temps if _is_leftover(found, locks, now_s)]
        leftovers += dead_copies(directory, locks)[0]
        sums = rows.sums()
        report = CheckReport(
            blocks=sums["blocks"],
            bytes=sums["bytes"],
            orphans=tuple(found.path for found in orphans),
            missing=tuple(block.name for block in missing),
            wrong_size=tuple(block.name for block, _ in wrong_size),
            corrupt=tuple(found.path for found in corrupt.values()),
            leftovers=tuple(leftovers),
            wrong_sums=tuple(name for name, value in sums.items() if getattr(rows.totals, name) != value),
            repaired=repair,
        )
        if repair:
            for found in corrupt.values():
                _remove_corrupt(rows, found)
            for found in orphans:
                _adopt(rows, found, now_s)
            for block, size in wrong_size:
                rows.resize_block(block, size)
            for block in missing:
                rows.remove_block(block)
            remove_leftovers(directory, locks, now_s)
            _correct(rows)
    return report


def rebuild(rows: IndexRows, directory: CacheDirectory, room: EvictionPolicy, now_s: float) -> None:
    """Delete all block rows but those of blocks that are being written, and count the files again."""
    for block in _all_rows(rows):
        if os.path.exists(room.path(block.name)) or not room.is_being_written(block):
            rows.remove_block(block)
    count_all(rows, directory, now_s)


def count_all(rows: IndexRows, directory: CacheDirectory, now_s: float) -> None:
    """Add a row for each file without one that is a valid block, and remove other files of blocks."""
    for found in directory.files():
        _adopt(rows, found, now_s)
    rows.totals.last_admitted = rows.totals.last_block  # they are not new, so they skip staging
    rows.totals.is_counted = 1
    _correct(rows)


def _correct(rows: IndexRows) -> None:
    """Set the totals to what the rows say."""
    for name, value in rows.sums().items():
        setattr(rows.totals, name, value)


def _adopt(rows: IndexRows, found: disk.FolderEntry, now_s: float) -> None:
    """Add a row for a file without one, as an old block; remove the file if it is not a valid block."""
    trailer = _trailer(found)
    if trailer is None:
        with contextlib.suppress(OSError):
            disk.unlink(found.path)
    elif rows.block(trailer.key, trailer.index) is None:
        block = trailer.key.block(trailer.index), found.size
        rows.add_blocks([block], 0, min(found.modified_s, now_s), 0)


def _remove_corrupt(rows: IndexRows, found: disk.FolderEntry) -> None:
    """Remove a damaged file, unless another one took its place, and its row."""
    status = disk.state(found.path)
    if status is not None and status.st_ino == found.inode and not found.is_folder:
        disk.unlink(found.path)
    digest, _, number = found.name.partition("-")
    with contextlib.suppress(ValueError):  # not the name of a block
        block = rows.block_named(digest, int(number, 16))
        if block is not None and not os.path.exists(found.path):
            rows.remove_block(block)


def _trailer(found: disk.FolderEntry, *, whole: bool = False) -> BlockTrailer | None:
    """Return the trailer of a file if it matches the file name; with `whole`, only if every page is valid too."""
    try:
        handle = block_file.open_block(os.open(found.path, disk.READ), found.path)
    except BadBlock:
        return None
    except OSError as error:
        if error.errno in disk.TOO_MANY_FILES:  # a problem of this process, not of the file
            raise
        return None
    try:
        if whole:
            handle.check_all()
    except (BadBlock, OSError):
        return None
    finally:
        handle.close()
    place = block_file.place(handle.trailer.key.digest, handle.trailer.index)
    return handle.trailer if found.path.endswith("/" + place) else None


def _is_sound(found: disk.FolderEntry) -> bool:
    return _trailer(found, whole=True) is not None or disk.state(found.path) is None


def _all_rows(rows: IndexRows) -> Iterator[BlockRow]:
    last = 0
    while batch := rows.blocks_after(last, _BATCH):
        yield from batch
        last = batch[-1].id
