"""Statistics of a process: reads, requests, the contents of its cache, and its link to an origin."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from cachedfs.common.text import counted, per_cent, shown, size


class Stats(NamedTuple):
    """Counters of one process since its start, and the current contents of its cache.

    hits, misses: blocks read from the cache, and blocks fetched. requests, bytes_fetched: sent to and received from the
    origin. bytes_served: returned to callers. blocks, bytes_cached: currently in the cache, stored by any process.
    evictions: blocks that this process removed. cannot_store: why the last block could not be stored; None if it could.
    old_caches: directories that earlier releases made and this one does not use. bytes_shared: read from the shared cache,
    which `shared_cache` names, with the reason if it is not used.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_served: int = 0
    blocks: int = 0
    bytes_cached: int = 0
    evictions: int = 0
    cache_dir: str = ""
    cannot_store: str | None = None
    old_caches: tuple[str, ...] = ()
    bytes_shared: int = 0
    shared_cache: str = ""

    def _repr_html_(self) -> str:
        return shown("The cache, and this process", self.cannot_store or "", self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the statistics as rows of a table, each a label and a text."""
        n_blocks = self.hits + self.misses
        share = per_cent(self.hits / n_blocks) if n_blocks else ""
        return [
            ("cache", self.cache_dir or "none: nothing can be kept"),
            ("holds", f"{size(self.bytes_cached)} in {counted(self.blocks, 'block')}"),
            (
                "hits",
                f"{self.hits:,} of {counted(n_blocks, 'block')}, {share}" if share else "no block was read",
            ),
            ("read", size(self.bytes_served)),
            ("fetched", f"{size(self.bytes_fetched)} in {counted(self.requests, 'request')}"),
            (
                "from others",
                f"{size(self.bytes_shared)} from {self.shared_cache}" if self.shared_cache else "",
            ),
            ("evicted", counted(self.evictions, "block") if self.evictions else ""),
            ("unused", f"rm -r {shlex.join(self.old_caches)}" if self.old_caches else ""),
        ]


class LinkStats(NamedTuple):
    """Network statistics of one origin in one process, measured on its speculative requests.

    n_timed: requests that were answered. wait_s: their total time until the first byte, in seconds. bytes_per_s: bytes
    per second over all response bodies that shared the link; None until a body of at least 1 MiB was measured.
    n_at_once: how many speculative requests may be in flight. requests_per_s: reads per second that the limits of the
    service allow; None without such limits.
    """

    n_timed: int = 0
    wait_s: float = 0.0
    bytes_per_s: float | None = None
    n_at_once: int = 0
    requests_per_s: float | None = None
