"""Consistency check and repair of a cache directory, and removal of abandoned temporary files.

The temporary file of a block is named after the writer number of its process, which holds the lock on that number
while it lives. If the process is dead, the file can go at once. Other temporary files (a replaced index, a shared
file being made) name no process and go when they are an hour old.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock, BlockTrailer
from cachedfs.cache.block_pool import TOO_MANY_FILES
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.eviction.policy import EvictionPolicy, dead_leases, remove_dead_leases
from cachedfs.cache.index.block_rows import BlockRow
from cachedfs.cache.index.transaction import CacheIndex, IndexRows
from cachedfs.cache.locks import ByteRangeLocks

__all__ = [
    "CheckReport",
    "abandoned",
    "check",
    "clear_away",
    "count_all",
    "count_if_fresh",
    "name_for_block",
    "remove_old_hosts",
]


_STALE_S = 3600  # a temporary file this old has no living writer
_HOST, _GONE = "host-", "gone-"
_UNUSED_S = 7 * 86400  # another host that wrote nothing for so long is taken for gone
_BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")

_BATCH = 4096


def name_for_block(directory: CacheDirectory, writer: int) -> str:
    """Return a new temporary file name for a block that the process with number `writer` writes."""
    return f"{directory.root}/tmp/{writer:016x}-{os.urandom(8).hex()}"


def clear_away(directory: CacheDirectory, locks: ByteRangeLocks, now_s: float) -> int:
    """Remove abandoned temporary files; return the bytes of the remaining ones that no row counts."""
    uncounted = 0
    for found in _found(directory):
        if _is_abandoned(found, locks, now_s):
            with contextlib.suppress(OSError):
                _remove(found)
        elif not (_BLOCK.fullmatch(found.name) and locks.works_across_processes):
            uncounted += found.size
    return uncounted


def remove_old_hosts(directory: CacheDirectory, now_s: float) -> bool:
    """Remove a part of what hosts left on a network filesystem that have not used it for `_UNUSED_S` seconds.

    Containers get a new name at each start, and nobody else counts these bytes. Returns whether more may be left.
    """
    above = directory.root.rpartition("/")[0]
    for found in disk.scan(above):
        is_other = found.is_folder and found.name.startswith(_HOST) and found.path != directory.root
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
    other = CacheDirectory(host.path, is_network=True)
    found = (disk.state(path) for path in (*other.bookkeeping, other.temp().rpartition("/")[0]))
    return max(host.modified_s, *(status.st_mtime for status in found if status is not None), 0.0)


def abandoned(directory: CacheDirectory, locks: ByteRangeLocks, now_s: float) -> list[str]:
    """Return the paths of temporary files that no living process writes."""
    return [found.path for found in _found(directory) if _is_abandoned(found, locks, now_s)]


def _found(directory: CacheDirectory) -> Iterator[disk.FolderEntry]:
    return disk.scan(f"{directory.root}/tmp")


def _is_abandoned(found: disk.FolderEntry, locks: ByteRangeLocks, now_s: float) -> bool:
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


class _Findings:
    """The mismatches between files and rows found so far."""

    def __init__(self, corrupt: list[disk.FolderEntry]) -> None:
        self.orphans: list[disk.FolderEntry] = []
        self.missing: list[BlockRow] = []
        self.wrong_size: list[tuple[BlockRow, int]] = []
        self.corrupt = corrupt
        self.corrupt_rows: list[BlockRow] = []


def check(
    index: CacheIndex,
    directory: CacheDirectory,
    room: EvictionPolicy,
    locks: ByteRangeLocks,
    *,
    repair: bool,
    now_s: float,
) -> CheckReport:
    """Compare all files with all rows and read every byte.

    The order is files, then rows, then whether each file still exists, so that blocks stored or evicted by other
    processes meanwhile are no problem. Raises sqlite3.Error, OSError.
    """
    with index.writing() as rows:
        count_if_fresh(rows, directory, now_s)
    files = {found.name: found for found in directory.files()}
    findings = _Findings(corrupt=[found for found in files.values() if not _is_sound(found)])
    with index.writing() as rows:
        _compare(rows, files, findings, room, now_s)
        left = abandoned(directory, locks, now_s)
        left += [directory.lease(lease.name) for lease in dead_leases(rows, directory, locks)]
        sums = rows.sums()
        wrong_sums = [name for name, value in sums.items() if rows.number(name) != value]
        report = _report(findings, sums, left, wrong_sums, repaired=repair)
        if repair:
            _repair(rows, findings, directory, now_s)
            remove_dead_leases(rows, directory, locks)
            clear_away(directory, locks, now_s)
            rows.recount_objects()
            for name, value in rows.sums().items():
                rows.record(name, value)
    return report


def count_if_fresh(rows: IndexRows, directory: CacheDirectory, now_s: float) -> None:
    """Count the files if the index is new, before any block is stored through it: never count too few."""
    if not rows.number("counted"):
        count_all(rows, directory, now_s)


def count_all(rows: IndexRows, directory: CacheDirectory, now_s: float) -> None:
    """Make the rows from the files: add a row for each block with a valid trailer, remove other files.

    Local copies get their rows too.
    """
    for found in directory.files():
        _adopt(rows, found, now_s)
    for lease in directory.leases():
        rows.add_lease(lease.name, lease.size)
    rows.settle(rows.last_block())  # they are not new, so they skip staging
    rows.record("counted", 1)


def _adopt(rows: IndexRows, found: disk.FolderEntry, now_s: float) -> None:
    """Add a row for a file without one, as an old block; remove the file if it is not a valid block."""
    trailer = _trailer(found)
    if trailer is None:
        with contextlib.suppress(OSError):
            disk.unlink(found.path)
        return
    rows.add_block(
        trailer.key, trailer.index, size=found.size, clock=0, since=min(found.modified_s, now_s), writer=0
    )


def _trailer(found: disk.FolderEntry, *, whole: bool = False) -> BlockTrailer | None:
    """Return the trailer of a file if it matches the file name; with `whole`, only if every page is valid too."""
    try:
        handle = block_file.open_block(found.path)
    except BadBlock:
        return None
    except OSError as error:
        if error.errno in TOO_MANY_FILES:  # a problem of this process, not of the file
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


def _compare(
    rows: IndexRows,
    files: dict[str, disk.FolderEntry],
    findings: _Findings,
    room: EvictionPolicy,
    now_s: float,
) -> None:
    corrupt = {found.name for found in findings.corrupt}
    uncounted = dict(files)
    for block in _all_rows(rows):
        place = block_file.place(block.digest, block.number)
        found = uncounted.pop(place.rpartition("/")[2], None)
        if found is None:
            # Check for a writer first: the file may appear between the two checks.
            underway = room.is_being_written(block, now_s)
            if not underway and not os.path.exists(room.path(place)):
                findings.missing.append(block)
        elif found.name in corrupt:
            findings.corrupt_rows.append(block)
        elif found.size != block.size:
            findings.wrong_size.append((block, found.size))
    findings.orphans = [
        found
        for found in uncounted.values()
        if found.name not in corrupt and disk.state(found.path) is not None
    ]


def _repair(rows: IndexRows, findings: _Findings, directory: CacheDirectory, now_s: float) -> None:
    for found in findings.corrupt:
        status = disk.state(found.path)
        if status is not None and status.st_ino == found.inode and not found.is_folder:
            disk.unlink(found.path)
    for found in findings.orphans:
        _adopt(rows, found, now_s)
    for block, size in findings.wrong_size:
        rows.resize_block(block.id, size)
    for block in findings.missing:
        rows.remove_block(block.id)
    for block in findings.corrupt_rows:
        if not os.path.exists(f"{directory.root}/{block_file.place(block.digest, block.number)}"):
            rows.remove_block(block.id)


def _report(
    findings: _Findings, sums: dict[str, int], left: list[str], wrong_sums: list[str], *, repaired: bool
) -> CheckReport:
    return CheckReport(
        blocks=sums["blocks"],
        bytes=sums["bytes"],
        orphans=tuple(found.path for found in findings.orphans),
        missing=tuple(block_file.place(block.digest, block.number) for block in findings.missing),
        wrong_size=tuple(block_file.place(block.digest, block.number) for block, _ in findings.wrong_size),
        corrupt=tuple(found.path for found in findings.corrupt),
        leftovers=tuple(left),
        wrong_sums=tuple(wrong_sums),
        repaired=repaired,
    )
