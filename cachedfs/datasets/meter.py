"""What cachedfs counted between the beginning of a `for` and its end, or now."""

from __future__ import annotations

import os
from typing import NamedTuple

from cachedfs.common.types import LinkStats, Stats
from cachedfs.datasets.report import Fetched
from cachedfs.filesystem import CachedFileSystem

__all__ = ["Meter"]


class _Counts(NamedTuple):
    stats: Stats
    link: LinkStats


class Meter:
    """Counts from when it is made, until `stop`. Of a filesystem that is none of ours it knows nothing."""

    def __init__(self, fs: CachedFileSystem | None) -> None:
        self._pid = os.getpid()
        self._before = None if fs is None else _Counts(fs.stats(), fs.link_stats())
        self._after: _Counts | None = None

    def stop(self, fs: CachedFileSystem | None) -> None:
        """Count no further: what is fetched from now on is for the next one."""
        self._after = self._now(fs)

    def fetched(self, fs: CachedFileSystem | None) -> Fetched | None:
        """Return what was counted; None where that cannot be known."""
        before, after = self._before, self._after or self._now(fs)
        if fs is None or before is None or after is None:
            return None
        n_timed = after.link.n_timed - before.link.n_timed
        waited_s = after.link.wait_s - before.link.wait_s
        return Fetched(
            requests=after.stats.requests - before.stats.requests,
            bytes_fetched=after.stats.bytes_fetched - before.stats.bytes_fetched,
            bytes_read=after.stats.bytes_served - before.stats.bytes_served,
            latency_s=waited_s / n_timed if n_timed else None,
            bytes_per_s=after.link.bytes_per_s,
            n_at_once=after.link.n_at_once,
            may_hold=fs.may_hold(),
        )

    def _now(self, fs: CachedFileSystem | None) -> _Counts | None:
        if fs is None or self._pid != os.getpid():  # a child of the process that began has counts of its own
            return None
        return _Counts(fs.stats(), fs.link_stats())
