"""The memory-mapped files of one cache: change counters and access records, opened when first needed."""

from __future__ import annotations

import logging
from typing import Any

from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.eviction.access_stats import AccessStats, touch_slots
from cachedfs.cache.shared_memory import ChangeCounters
from cachedfs.common.logging import WarnOnce

__all__ = ["MappedFiles"]

log = logging.getLogger("cachedfs.cache")


class MappedFiles:
    """The change counters and the access records of one directory; without a directory, in private memory.

    `marks` (change counters) and `touches` (access records) are None until first used, and after they were released.
    """

    def __init__(self, complaints: WarnOnce) -> None:
        self.marks: ChangeCounters | None = None
        self.touches: AccessStats | None = None
        self._open: dict[str, Any] = {}  # the two above, by name: if two threads open one, the first wins
        self._directory: CacheDirectory | None = None
        self._complaints = complaints

    def move_to(self, directory: CacheDirectory) -> None:
        """Use the files in `directory` from now on."""
        self._directory = directory
        self._let_go("marks")
        self._let_go("touches")

    def open_marks(self) -> ChangeCounters:
        marks = self.marks
        if marks is None:
            # If two threads create them, the first wins; a third may release them again.
            marks = self.marks = self._open.setdefault("marks", ChangeCounters(*self._place("marks")))
            self._complaints.slower(marks.trouble)
        return marks

    def open_touches(self, *, size: int | None = None, clock: int = 0) -> AccessStats:
        """Return the access records, enough for a cache of `size` bytes; new ones start at access clock `clock`."""
        found, slots = self.touches, touch_slots(size)
        if found is not None and (size is None or found.n_slots >= slots):
            return found
        if found is not None:
            self._open.pop("touches", None)
            clock = found.now
        path, temp = self._place("touches")
        made = AccessStats(path, temp, slots, at_least=1 if size is None else slots, clock=clock)
        touches: AccessStats = self._open.setdefault("touches", made)  # the first of two threads wins
        self.touches = touches
        if touches.trouble:  # no warning: eviction only sees the accesses of this process then
            log.info("%s", touches.trouble)
        return touches

    def let_go_of_deleted(self) -> None:
        """Release mapped files that were deleted, so that all processes map the same ones.

        Raises OSError if that cannot be checked.
        """
        for name, mapped in list(self._open.items()):
            if not mapped.is_current():
                self._let_go(name)

    def try_again(self) -> None:
        """Release files that could not be shared, so that their next use tries again."""
        for name, mapped in list(self._open.items()):
            # Replace change counters only by shared ones: new private ones would invalidate all metadata.
            if mapped.trouble and not (name == "marks" and ChangeCounters(*self._place("marks")).trouble):
                self._let_go(name)

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the path of a mapped file and a temporary path to create it at."""
        if self._directory is None:
            return None, ""
        return getattr(self._directory, name), self._directory.temp()

    def _let_go(self, name: str) -> None:
        self._open.pop(name, None)
        if name == "marks":
            self.marks = None
        else:
            self.touches = None
