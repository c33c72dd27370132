"""Which blocks make room for new ones, and which new ones are not worth it. Room as numbers of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cachedfs.common.types import CacheBounds

__all__ = [
    "EvictionCandidate",
    "AccessHistory",
    "admits",
    "aging_of",
    "allowance",
    "automatic_size",
    "oldest",
    "staging_size",
    "window_of",
]

# Chosen by simulation, with random epochs, loops, scans and Zipf's law: tests/cache/test_admission_simulated.py has them.
SLACK = 1.25  # gaps of random epochs vary: less would take a block for forgotten before its turn comes
MARGIN = 2  # uses; less would exchange blocks that are used equally often
STAGING = 64 << 20  # bytes: what one file reads ahead


class EvictionCandidate(NamedTuple):
    """A block that may go: its row in the index, how many touches ago it was touched, its bytes on disk."""

    row: int
    age: int
    size: int


def oldest(candidates: Iterable[EvictionCandidate], *, share: int = 8) -> list[EvictionCandidate]:
    """Return the longest untouched `1/share` of the candidates (at least one, if there is any), longest first.

    Of two untouched for equally long the one with the lower row goes first. All that is left out was touched
    more recently than all that is returned: whoever takes these in order evicts in exact LRU order.
    """
    ranked = sorted(candidates, key=lambda each: (-each.age, each.row))
    return ranked[: -(-len(ranked) // share)]


class AccessHistory(NamedTuple):
    """What decides between two blocks that cannot both stay: touches since the last use, uses lately, first time here.

    `passes`: it is new, and of an object that is larger than the cache.
    """

    idle: int
    uses: int
    is_new: bool
    passes: bool = False


def admits(new: AccessHistory, old: AccessHistory, *, longest_gap: int) -> bool:
    """Return whether a block that leaves staging replaces the longest untouched one.

    It does if it is new (a new data set must be warm on its second pass), if the old one is idle for much longer than
    anything that was used again lately (nobody comes back for it), or if it is used clearly more often. Else it is not
    kept: of data larger than the cache, read epoch after epoch, the part that is here then stays here, and the hit
    ratio is that part, which is the most that one use an epoch allows; LRU would give up every block before its turn.
    What passes through for the first time and cannot be here as a whole replaces nothing: it may never come again.
    """
    if new.passes:
        return False
    is_forgotten = longest_gap > 0 and old.idle > SLACK * longest_gap
    return new.is_new or is_forgotten or new.uses > old.uses + MARGIN


def staging_size(allowed: int) -> int:
    """Return how many of `allowed` bytes new blocks have for themselves, so that what is prefetched waits for its reader."""
    return min(allowed // 2, max(STAGING, allowed // 100))


def window_of(n_blocks: int) -> int:
    """Return k where "lately" is the last one to two times 2**k touches: next to a quarter of the blocks that fit."""
    return _power(n_blocks / 4, least=5)


def aging_of(n_blocks: int) -> int:
    """Return k where counts are halved every 2**k touches: next to ten times the blocks that fit."""
    return _power(10 * n_blocks, least=5)


def _power(number: float, *, least: int) -> int:
    return min(31, max(least, round(math.log2(max(1, number)))))


def allowance(
    bounds: CacheBounds, *, total: int, free: int, used: int, overhead: int, growth: int, automatic: int
) -> int:
    """Return how many bytes of blocks the cache may hold now; below `used`: blocks have to go first.

    `total` and `free` are the disk's bytes, `used` those of the blocks we hold, `overhead` those of our
    bookkeeping, which the bound holds as well, and `growth` those of them that are not on the disk yet;
    `automatic` is the bound when the user gave none.
    """
    size = automatic if bounds.size is None else _bytes(bounds.size, total)
    within_bound = size - overhead
    within_disk = used + free - growth - _bytes(bounds.keep_free, total)
    return max(0, min(within_bound, within_disk))


def automatic_size(*, free: int, used: int) -> int:
    """Return the bound of a cache whose user gave none: half of what is free, what we hold being free as well."""
    return (free + used) // 2


def _bytes(amount: int | float, total: int) -> int:
    """Return an amount in bytes; a float is a share of `total`."""
    return int(amount * total) if isinstance(amount, float) else amount
