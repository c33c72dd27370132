"""What samples read of several arrays, as `fs.prefetch` takes it: in the order in which it is read. No I/O of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

from cachedfs.datasets.base import Item

__all__ = ["LOOK", "Reads", "items_of"]

LOOK = 256  # samples that are looked at together: the shard indexes of so many come before the chunks of those before them


class Reads(Protocol):
    """How samples read one array, or arrays of one length."""

    def touched(self, samples: Sequence[int]) -> Sequence[Iterable[int]]:
        """Return for each of these samples a row of each chunk that it is in."""

    def indexes(self, rows: Iterable[int], told: set[str]) -> Iterator[Item]:
        """Yield the indexes of shards that rows are in: those that are not known, nor `told`, which has them then."""

    def chunks(self, row: int) -> Iterator[Item]:
        """Yield the chunks that a row is in; in shards their ranges, for which an index may be read here."""


def items_of(arrays: Sequence[Reads], samples: Iterable[int]) -> Iterator[Item]:
    """Yield what samples read, sample by sample, and of a sample array by array; no more of them are taken than is told of."""
    told: set[str] = set()
    coming = iter(samples)
    now: list[Sequence[Iterable[int]]] = []
    while group := list(islice(coming, LOOK)):
        following = [array.touched(group) for array in arrays]
        for array, rows in zip(arrays, following, strict=True):
            yield from array.indexes(chain.from_iterable(rows), told)
        yield from _chunks(arrays, now)
        now = following
    yield from _chunks(arrays, now)


def _chunks(arrays: Sequence[Reads], touched: Sequence[Sequence[Iterable[int]]]) -> Iterator[Item]:
    for sample in zip(*touched, strict=True):
        for array, rows in zip(arrays, sample, strict=True):
            for row in rows:
                yield from array.chunks(row)
