"""What samples read of several arrays, as `fs.prefetch` takes it: in the order in which it is read. No I/O of its own."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, Protocol

from cachedfs.datasets.loading.sampler import EpochOrders, EpochPosition, RankDivision
from cachedfs.datasets.samples import Item, SampleReader

__all__ = ["DatasetPrefetch", "LOOK", "ArrayReads", "items_of", "ranks_here"]


LOOK = 256  # samples that are looked at together: the shard indexes of so many come before the chunks of those before them


class ArrayReads(Protocol):
    """How samples read one array, or arrays of one length."""

    def touched(self, samples: Sequence[int]) -> Sequence[Iterable[int]]:
        """Return for each of these samples a row of each chunk that it is in."""

    def indexes(self, rows: Iterable[int], told: set[str]) -> Iterator[Item]:
        """Yield the indexes of shards that rows are in: those that are not known, nor `told`, which has them then."""

    def chunks(self, row: int) -> Iterator[Item]:
        """Yield the chunks that a row is in; in shards their ranges, for which an index may be read here."""


def items_of(arrays: Sequence[ArrayReads], samples: Iterable[int]) -> Iterator[Item]:
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


def _chunks(arrays: Sequence[ArrayReads], touched: Sequence[Sequence[Iterable[int]]]) -> Iterator[Item]:
    for sample in zip(*touched, strict=True):
        for array, rows in zip(arrays, sample, strict=True):
            for row in rows:
                yield from array.chunks(row)


logger = logging.getLogger("cachedfs.datasets")

RENEW_S = 60.0  # between two looks whether the plan still runs
AHEAD = 2  # epochs that may be fetched from the one that is read on: it, and the next

Grants = SimpleQueue[bool]  # True for each epoch that may be fetched, False for the end


def ranks_here(rank: int, world_size: int, environment: Mapping[str, str]) -> range:
    """Return the ranks whose reads this process declares: of torchrun's processes of a machine the first, for all of them.

    A process that nobody started so, or that has other ranks than those of its environment, declares its own.
    """
    try:
        numbers = [
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ]
    except (KeyError, ValueError):
        return range(rank, rank + 1)
    if numbers[:2] != [rank, world_size]:
        return range(rank, rank + 1)
    _, _, local_rank, n_local = numbers
    return range(rank, min(rank + n_local, world_size)) if local_rank == 0 else range(rank, rank)


class DatasetPrefetch:
    """One plan of the machine, from a place on: for as long as this is held, until `close`.

    Of what happens to it nothing reaches a training: what really cannot be read, its read says.
    """

    def __init__(
        self,
        source: SampleReader,
        epochs: EpochOrders,
        division: RankDivision,
        ranks: range,
        place: EpochPosition,
    ) -> None:
        self._source, self._made_for = source, (epochs, division, ranks)
        self._look_at = time.monotonic() + RENEW_S
        self._next = EpochPosition(place.epoch + 1)
        self._pid = os.getpid()
        # Of this kind, as the garbage collector may come by anywhere and put into it.
        self._grants: Grants = SimpleQueue()
        for _ in range(AHEAD):
            self._grants.put(True)
        weakref.finalize(self, self._grants.put, False).atexit = False
        self._plan: Any = None
        prefetch = source.prefetch
        if prefetch is None or not ranks:
            return
        try:
            self._plan = prefetch(_items(source, epochs, division, ranks, place, self._grants))
        except Exception:  # whatever it is: reads fetch what was not fetched ahead
            logger.debug("cannot prefetch %r", source, exc_info=True)

    def goes_on(
        self, epochs: EpochOrders, division: RankDivision, ranks: range, place: EpochPosition
    ) -> bool:
        """Return whether it is the plan of what is read from there on; if so, the epoch after that may be fetched, too."""
        is_next = (epochs, division, ranks) == self._made_for and place == self._next
        if not is_next or self._pid != os.getpid() or self._has_failed():
            return False
        self._next = replace(place, epoch=place.epoch + 1)
        self._grants.put(True)
        return True

    def renewed(self, place: EpochPosition) -> DatasetPrefetch:
        """Return what goes on from there: this, or a new one where the plan has failed, as when the origin was away."""
        if time.monotonic() < self._look_at:
            return self
        self._look_at = time.monotonic() + RENEW_S
        if not self._has_failed():
            return self
        self.close()
        return DatasetPrefetch(self._source, *self._made_for, place)

    def _has_failed(self) -> bool:
        return getattr(getattr(self._plan, "progress", None), "state", None) == "failed"

    def close(self) -> None:
        """End the plan, and wait for its end."""
        self._grants.put(False)
        plan, self._plan = self._plan, None
        if plan is None or self._pid != os.getpid():
            return
        try:
            plan.cancel()
            for error in plan.errors:
                logger.debug("prefetching: %s", error)
            plan.wait(0)
        except Exception as error:  # of whatever kind: see above
            logger.debug("prefetching ended: %s", error)


def _items(
    source: SampleReader,
    epochs: EpochOrders,
    division: RankDivision,
    ranks: range,
    place: EpochPosition,
    grants: Grants,
) -> Iterator[Item]:
    """Yield what these ranks read, epoch after epoch, each when it is granted. In the thread of the plan."""
    while grants.get():
        order = epochs.order(place.epoch)
        shares = division.batches(order, ranks, place.position)
        yield from source.items(index for share in shares for index in share.tolist())
        del order, shares  # not to be held while it waits
        place = EpochPosition(place.epoch + 1)
