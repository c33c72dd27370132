"""Admission rule and size limits: which blocks to evict for new ones, and how many bytes the cache may use.

Pure functions without I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from cachedfs.cache import disk
from cachedfs.cache.index.schema import Totals
from cachedfs.common.types import CacheBounds

__all__ = [
    "AccessHistory",
    "admits",
    "aging_of",
    "allowance",
    "oldest",
    "staging_size",
    "window_of",
]

# Chosen by simulating random epochs, loops, scans and Zipf's law: see tests/cache/test_admission_simulated.py.
SLACK = 1.25  # reuse gaps vary between random epochs: a lower value would evict blocks shortly before their next use
MARGIN = 2  # accesses: a lower value would swap blocks that are used equally often
STAGING = 64 << 20  # bytes: the readahead window of one file


def oldest(ages: Mapping[int, int], *, share: int = 8) -> list[int]:
    """Return the least recently used `1/share` of the rows, oldest first; at least one if there are any.

    `ages` has the accesses since the last one to each row. Ties go to the lower row. Every omitted row is more recent
    than every returned one, so evicting the result in order is exact LRU.
    """
    ranked = sorted(ages, key=lambda row: (-ages[row], row))
    return ranked[: -(-len(ranked) // share)]


class AccessHistory(NamedTuple):
    """The inputs of the admission rule for one block.

    `idle`: accesses to any block since the last one to this block. `uses`: its recent access count. `is_new`: it never
    was in the cache before. `passes`: it is new and its object is larger than the cache.
    """

    idle: int
    uses: int
    is_new: bool
    passes: bool = False


def admits(new: AccessHistory, old: AccessHistory, *, longest_gap: int) -> bool:
    """Return whether a block that moves out of staging replaces the least recently used one.

    It does in three cases: it is new (so that the second pass over a new dataset hits); the old block has been idle
    for much longer than `longest_gap`, so it is unlikely to be read again; or it is used clearly more often than the
    old one. Otherwise it is evicted. When data larger than the cache is read once per epoch, the cached part therefore
    stays cached, and the hit ratio equals that part, which is the optimum. LRU would evict every block just before its
    next use. A new block of an object larger than the cache replaces nothing: it may never be read again.
    """
    if new.passes:
        return False
    is_unlikely = longest_gap > 0 and old.idle > SLACK * longest_gap
    return new.is_new or is_unlikely or new.uses > old.uses + MARGIN


def staging_size(allowed: int) -> int:
    """Return how many of `allowed` bytes are reserved for new blocks, so that prefetched blocks survive until read."""
    return min(allowed // 2, max(STAGING, allowed // 100))


def window_of(n_blocks: int) -> int:
    """Return k for a window of 2**k accesses, nearest to a quarter of the blocks that fit.

    The largest reuse gap is taken over the current and the previous window, so over 2**k to 2 * 2**k accesses.
    """
    return _power(n_blocks / 4, least=5)


def aging_of(n_blocks: int) -> int:
    """Return k for halving access counts every 2**k accesses, nearest to ten times the blocks that fit."""
    return _power(10 * n_blocks, least=5)


def _power(number: float, *, least: int) -> int:
    return min(31, max(least, round(math.log2(max(1, number)))))


def allowance(bounds: CacheBounds, space: disk.DiskSpace, totals: Totals, overhead: int, growth: int) -> int:
    """Return how many bytes of blocks and local copies the cache may hold now.

    Sets the automatic size at its first use. If the result is less than it holds, blocks must be evicted. `overhead`:
    bytes of the index and other bookkeeping files, which count toward the cache size. `growth`: the part of `overhead`
    that is not on the disk yet.
    """
    size, kept = (int(n * space.total) if isinstance(n, float) else n for n in bounds)
    if size is None:
        size = totals.automatic_size = totals.automatic_size or (space.free + totals.bytes) // 2
    within_disk = totals.bytes + space.free - growth - (kept or 0)
    return max(0, min(size - overhead, within_disk))
