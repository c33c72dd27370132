"""Publish this process's statistics to all processes of the machine.

About once a second while it reads, and at exit.
"""

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
    """Adds the counters of `source` to those of all processes.

    Any thread may call it. A busy lock is skipped.
    """

    def __init__(self, source: Source, counts: SharedCounters) -> None:
        self._source, self._counts = source, counts
        self._published: Mapping[str, Any] = {}
        self._next_at = 0.0
        self._lock = threading.Lock()

    def publish_now_and_then(self) -> None:
        """Publish if the last time was at least a second ago."""
        if time.monotonic() >= self._next_at:
            self.publish()

    def close(self) -> None:
        """Publish a last time; wait up to a second for another thread that is publishing."""
        self.publish(wait_s=EVERY_S)
        self._next_at = math.inf

    def publish(self, *, wait_s: float = 0.0) -> None:
        """Publish the increase since the last time.

        Skip it if the lock is not free within `wait_s` seconds.
        """
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            self._next_at = time.monotonic() + EVERY_S
            before, self._published = self._published, self._source.sums()
            # A counter may decrease if its owner was recreated.
            self._counts.add([max(0, self._published[name] - before.get(name, 0)) for name in NAMES])
        finally:
            self._lock.release()
