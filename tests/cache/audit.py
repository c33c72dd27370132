"""An audit of a cache: it compares every file with its row, its checksums and its place, and every sum with the rows."""

import os
import time
from typing import NamedTuple

from cachedfs.cache import block_file, disk, recovery
from cachedfs.cache.block_file import BadBlock


class Report(NamedTuple):
    """What an audit found: every problem names the file."""

    blocks: int = 0
    bytes: int = 0
    orphans: tuple = ()  # files without a row
    missing: tuple = ()  # rows without a file
    wrong_size: tuple = ()  # files whose size differs from their row
    corrupt: tuple = ()  # files that are not the block that their name says
    leftovers: tuple = ()  # temporary files and local copies of dead processes
    wrong_sums: tuple = ()  # recorded sums that differ from the rows

    @property
    def ok(self):
        return not any(self[2:])


def audit(cache):
    """Return the report on a cache whose index counts all files.

    The order is files, then rows, then whether each file still exists, so that blocks stored or evicted by other
    processes meanwhile are no problem.
    """
    directory, locks, space = cache._own, cache.locks, cache.space
    with cache._writing("the cache cannot be checked"):
        pass  # a new index counts all files first
    files = {found.name: found for found in directory.files()}
    corrupt = {name: found for name, found in files.items() if not _is_sound(found)}
    with cache._own.index.writing() as rows:
        missing, wrong_size, last = [], [], 0
        while batch := rows.blocks_after(last, 4096):
            last = batch[-1].id
            for block in batch:
                found = files.pop(block.name, None)
                if found is None:
                    # Look for a writer first: the file may appear in between.
                    is_underway = space.is_being_written(block)
                    if not is_underway and not os.path.exists(space.path(block.name)):
                        missing.append(block.name)
                elif found.size != block.size and found.name not in corrupt:
                    wrong_size.append(block.name)
        sums, totals = rows.sums(), rows.totals
    orphans = [
        found.path for name, found in files.items() if name not in corrupt and os.path.exists(found.path)
    ]
    dead, _ = recovery.leftovers(directory.root, locks, time.time())
    return Report(
        sums["blocks"],
        sums["bytes"],
        tuple(orphans),
        tuple(missing),
        tuple(wrong_size),
        tuple(found.path for found in corrupt.values()),
        tuple(found.path for found in dead),
        tuple(name for name, value in sums.items() if getattr(totals, name) != value),
    )


def recount(cache):
    """Have all files counted again, as after the loss of the index."""
    cache.close()
    for name in ("index.db", "index.db-wal", "index.db-shm", "index.db-journal"):
        disk.unlink(f"{cache.root}/{name}")
    with cache._writing("the files cannot be counted"):
        pass


def _is_sound(found):
    """Return whether a file is the block that its name says; True also if it is gone by now."""
    try:
        block = block_file.open_block(os.open(found.path, disk.READ), found.path)
        try:
            block.read(0, block.length, verify=True)
        finally:
            block.close()
        key = block.trailer.key
        return found.path.endswith("/" + block_file.block_path(key.object.digest, key.index))
    except (BadBlock, OSError):
        return not os.path.lexists(found.path)
