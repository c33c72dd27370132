"""When a process tells all others what it counted: about once a second while it reads, and at its end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from cachedfs.cache.counters import SharedCounters
from cachedfs.common.event_log import CounterSource as Source
from cachedfs.common.types import Counted

__all__ = ["StatisticsPublisher"]

EVERY_S = 1.0
NAMES = Counted._fields[:-1]


class StatisticsPublisher:
    """Adds what `source` counts to the counts of all processes. In any thread; a thread that finds another at it goes on."""

    def __init__(self, source: Source, counts: SharedCounters) -> None:
        self._source, self._counts = source, counts
        self._told: Mapping[str, Any] = {}
        self._again_at = 0.0
        self._lock = threading.Lock()

    def publish_now_and_then(self) -> None:
        """Tell if that was a second ago."""
        if time.monotonic() >= self._again_at:
            self.tell()

    def close(self) -> None:
        """Tell a last time; what another thread is telling is told before, so that the end of the process breaks off nothing."""
        self.tell(wait_s=EVERY_S)
        self._again_at = math.inf

    def tell(self, *, wait_s: float = 0.0) -> None:
        """Tell what was counted since the last time."""
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            self._again_at = time.monotonic() + EVERY_S
            told, self._told = self._told, self._source.sums()
            # Less than before where a part of what counts was made anew.
            self._counts.add([max(0, self._told[name] - told.get(name, 0)) for name in NAMES])
        finally:
            self._lock.release()
