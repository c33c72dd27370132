"""The files of records that all processes share: change counters and access records, opened when first needed."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence

from cachedfs.cache import disk
from cachedfs.cache.access_stats import AccessStats, access_slots
from cachedfs.cache.change_counters import ChangeCounters, ChangeTable
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.logging import WarnOnce

__all__ = ["SharedFiles"]

log = logging.getLogger("cachedfs.cache")

MEMORY_FOLDER = "/dev/shm"
"""Where the change counters are if the cache directory cannot hold them: a folder in memory (Linux)."""


class SharedFiles:
    """The change counters and the access records of one cache directory.

    The change counters are in the directory. As soon as a process cannot write them there, they are also in
    `MEMORY_FOLDER`, for all processes of the machine and until it restarts: containers that share the directory have
    memory of their own, so the directory comes first.

    `counters` (change counters) and `accesses` (access records) are None until first used, and after they were released.
    """

    def __init__(self, root: str, locks: ByteRangeLocks, warnings: WarnOnce) -> None:
        self.counters: ChangeCounters | None = None
        self.accesses: AccessStats | None = None
        self._directory: CacheDirectory | None = None
        self._locks = locks
        self._in_memory = _path_in_memory(root)
        self._warnings = warnings

    def move_to(self, directory: CacheDirectory) -> None:
        """Use the files in `directory` from now on."""
        self._directory = directory
        self.counters = self.accesses = None

    def open_counters(self) -> ChangeCounters:
        counters = self.counters
        if counters is None:
            counters = self.counters = self._open_tables()
            if counters.is_private:
                self._warnings.slower(
                    f"{counters.tables[0].trouble}: changes by other processes cannot be noticed, so metadata is checked "
                    'at each use, as with max_age=0, except with max_age="immutable"'
                )
        return counters

    def open_accesses(self, *, size: int | None = None, clock: int = 0) -> AccessStats:
        """Return the access records, enough for a cache of `size` bytes; new ones start at access clock `clock`."""
        found, slots = self.accesses, access_slots(size)
        if found is not None and (size is None or found.n_slots >= slots):
            return found
        clock = found.now if found is not None else clock
        path, temp = self._place("access_records")
        at_least = 1 if size is None else slots
        accesses = AccessStats(path, temp, slots, at_least=at_least, clock=clock, locks=self._locks)
        self.accesses = accesses
        if accesses.trouble:  # no warning: eviction only sees the accesses of this process then
            log.info("%s", accesses.trouble)
        return accesses

    def release_unreadable(self, counters: ChangeCounters) -> None:
        """Release change counters that cannot be read: the next use opens those that other processes use now."""
        if self.counters is counters:
            self.counters = None

    def release_unwritable(self, counters: ChangeCounters, failed: Sequence[ChangeTable]) -> None:
        """Release change counters of which some could not be written, and tell all processes.

        First make those in memory: a process that finds the others invalid then finds these.
        """
        if failed:
            if self._in_memory not in counters.paths:
                ChangeTable(self._in_memory, self._temp_in_memory())
            for table in failed:
                table.invalidate()
            self.release_unreadable(counters)

    def release_deleted(self) -> None:
        """Release files that were deleted or replaced, so that all processes use the same ones.

        Raises OSError if that cannot be checked.
        """
        accesses, counters = self.accesses, self.counters
        if accesses is not None and not accesses.is_current():
            self.accesses = None
        is_current = counters is None or all(table.is_current() for table in counters.tables)
        if not is_current or self._is_new_in_memory(counters):
            self.counters = None

    def try_again(self) -> None:
        """Release files that could not be shared, so that their next use tries again."""
        accesses, counters = self.accesses, self.counters
        if accesses is not None and accesses.trouble:
            self.accesses = None
        # Replace change counters only by ones that more processes see: new ones invalidate all metadata.
        wanted = self._in_memory if self._directory is None else self._directory.change_counters
        if counters is not None and wanted not in counters.paths and wanted in self._open_tables().paths:
            self.counters = None

    def _is_new_in_memory(self, counters: ChangeCounters | None) -> bool:
        """Return whether another process has made change counters in memory that are not in use here."""
        if counters is None or self._in_memory in counters.paths or disk.state(self._in_memory) is None:
            return False
        return self._in_memory in self._open_tables().paths  # False for a file of somebody else

    def _open_tables(self) -> ChangeCounters:
        path, temp = self._place("change_counters")
        table = ChangeTable(path, temp)
        if not table.is_private and disk.size_of(self._in_memory) == 0:
            return ChangeCounters(table)
        in_memory = ChangeTable(self._in_memory, self._temp_in_memory())
        shared = [each for each in (table, in_memory) if not each.is_private]
        return ChangeCounters(*(shared or [table if table.trouble else in_memory]))

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the path of a file in the directory, and a temporary path to create it at."""
        if self._directory is None:
            return None, ""
        return getattr(self._directory, name), self._directory.temp()

    def _temp_in_memory(self) -> str:
        return f"{self._in_memory}.{os.urandom(8).hex()}"


def _path_in_memory(root: str) -> str:
    name = hashlib.blake2b(root.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return f"{MEMORY_FOLDER}/cachedfs-{os.geteuid()}-{name}"
