"""The files of records that all processes share: change counters and access records, opened when first needed."""

from __future__ import annotations

import logging

from cachedfs.cache.access_stats import AccessStats, access_slots
from cachedfs.cache.change_counters import ChangeCounters
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.logging import WarnOnce

__all__ = ["SharedFiles"]

log = logging.getLogger("cachedfs.cache")


class SharedFiles:
    """The change counters and the access records of one cache directory.

    `accesses` (the access records) is None until first used, and after it was released.
    """

    def __init__(self, root: str, locks: ByteRangeLocks, warnings: WarnOnce) -> None:
        self.counters = ChangeCounters(root, warnings)
        self.accesses: AccessStats | None = None
        self._directory: CacheDirectory | None = None
        self._locks = locks

    def move_to(self, directory: CacheDirectory) -> None:
        """Use the files in `directory` from now on."""
        self._directory, self.accesses = directory, None
        self.counters.move_to(directory)

    def open_accesses(self, *, size: int | None = None, clock: int = 0) -> AccessStats:
        """Return the access records, enough for a cache of `size` bytes; new ones start at access clock `clock`."""
        found, slots = self.accesses, access_slots(size)
        if found is not None and (size is None or found.n_slots >= slots):
            return found
        clock = found.now if found is not None else clock
        path, temp = None, ""
        if (directory := self._directory) is not None:
            path, temp = directory.access_records, directory.temp()
        at_least = 1 if size is None else slots
        self.accesses = AccessStats(path, temp, slots, at_least=at_least, clock=clock, locks=self._locks)
        if self.accesses.trouble:  # no warning: eviction only sees the accesses of this process then
            log.info("%s", self.accesses.trouble)
        return self.accesses

    def look(self, again: bool = False) -> None:
        """Release files that were deleted or replaced, so that all processes use the same ones.

        With `again`, release also those that could not be shared: their next use tries again. Raises OSError if that
        cannot be checked.
        """
        accesses = self.accesses
        if accesses is not None and ((again and accesses.trouble) or not accesses.is_current()):
            self.accesses = None
        self.counters.look(again)
