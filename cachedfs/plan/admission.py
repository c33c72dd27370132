"""Which blocks make room for new ones: the least recently touched, for now. Room as numbers of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cachedfs.model import Bounds

__all__ = ["Candidate", "allowance", "automatic_size", "oldest", "victims"]


class Candidate(NamedTuple):
    """A block that may go: its row in the index, how many touches ago it was touched, its bytes on disk."""

    row: int
    age: int
    size: int


def oldest(candidates: Iterable[Candidate], *, share: int = 8) -> list[Candidate]:
    """Return the longest untouched `1/share` of the candidates (at least one, if there is any), longest first.

    Of two untouched for equally long the one with the lower row goes first. All that is left out was touched
    more recently than all that is returned: whoever takes these in order evicts in exact LRU order.
    """
    ranked = sorted(candidates, key=lambda each: (-each.age, each.row))
    return ranked[: -(-len(ranked) // share)]


def victims(queue: Iterable[Candidate], need: int) -> list[Candidate]:
    """Return the first of `queue` that free `need` bytes together, and none more; all when they do not suffice."""
    chosen = []
    for each in queue:
        if need <= 0:
            break
        chosen.append(each)
        need -= each.size
    return chosen


def allowance(bounds: Bounds, *, total: int, free: int, used: int, overhead: int, automatic: int) -> int:
    """Return how many bytes of blocks the cache may hold now; below `used`: blocks have to go first.

    `total` and `free` are the disk's bytes, `used` those of the blocks we hold, `overhead` those of our
    bookkeeping, which the bound holds as well; `automatic` is the bound when the user gave none.
    """
    size = automatic if bounds.size is None else _bytes(bounds.size, total)
    within_bound = size - overhead
    within_disk = used + free - _bytes(bounds.keep_free, total)
    return max(0, min(within_bound, within_disk))


def automatic_size(*, free: int, used: int) -> int:
    """Return the bound of a cache whose user gave none: half of what is free, what we hold being free as well."""
    return (free + used) // 2


def _bytes(amount: int | float, total: int) -> int:
    """Return an amount in bytes; a float is a share of `total`."""
    return int(amount * total) if isinstance(amount, float) else amount
