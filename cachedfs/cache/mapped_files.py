"""The mapped files of one cache: its change marks and touch records, opened when they are first needed."""

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
    """The change marks and the touch records in one directory; without one, in memory of this process.

    `marks` and `touches`: those that are open now; None before their first use, and once they were let go of.
    """

    def __init__(self, complaints: WarnOnce) -> None:
        self.marks: ChangeCounters | None = None
        self.touches: AccessStats | None = None
        self._open: dict[str, Any] = {}  # the two above, by name: of two threads that open one, one wins here
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
            # Of two threads that make them one wins; a third may drop them again.
            marks = self.marks = self._open.setdefault("marks", ChangeCounters(*self._place("marks")))
            self._complaints.slower(marks.trouble)
        return marks

    def open_touches(self, *, size: int | None = None, clock: int = 0) -> AccessStats:
        """Return the touch records, enough for a cache of `size`; `clock` to go on from when they are made anew."""
        found, slots = self.touches, touch_slots(size)
        if found is not None and (size is None or found.n_slots >= slots):
            return found
        if found is not None:
            self._open.pop("touches", None)
            clock = found.now
        path, temp = self._place("touches")
        made = AccessStats(path, temp, slots, at_least=1 if size is None else slots, clock=clock)
        touches: AccessStats = self._open.setdefault("touches", made)  # of two threads one wins
        self.touches = touches
        if touches.trouble:  # no warning: evictions go by what this process alone touched
            log.info("%s", touches.trouble)
        return touches

    def let_go_of_deleted(self) -> None:
        """Let go of files that somebody deleted, so that all processes map the same ones. Raises OSError: nobody can tell."""
        for name, mapped in list(self._open.items()):
            if not mapped.is_current():
                self._let_go(name)

    def try_again(self) -> None:
        """Let go of what could not be shared, so that its next use tries it again: the disk may have got well since."""
        for name, mapped in list(self._open.items()):
            # Marks only for better ones: new ones that are private too would make us forget all that we know.
            if mapped.trouble and not (name == "marks" and ChangeCounters(*self._place("marks")).trouble):
                self._let_go(name)

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the path of a mapped file, and a temporary one to make it under."""
        if self._directory is None:
            return None, ""
        return getattr(self._directory, name), self._directory.temp()

    def _let_go(self, name: str) -> None:
        self._open.pop(name, None)
        if name == "marks":
            self.marks = None
        else:
            self.touches = None
