"""Prefetch plans of datasets: the objects and byte ranges of samples, in reading order."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from queue import SimpleQueue
from typing import Any

from cachedfs.datasets.nodes import NodeOrders
from cachedfs.datasets.sampler import EpochPosition, Order, RankDivision
from cachedfs.datasets.samples import Item, SampleReader

logger = logging.getLogger("cachedfs.datasets")
CHECK_EVERY_S = 1.0  # seconds between two checks whether the plan must be started again
AHEAD = 2  # epochs that a plan may fetch: the current one, and the next
CHECKED = 256  # samples of the rest of an epoch that are looked for in the cache before it is declared
CHECK_AFTER = 1024  # samples declared between two of these looks
Grants = SimpleQueue[bool]  # True: one more epoch may be fetched; False: end


def ranks_here(rank: int, world_size: int, environment: Mapping[str, str]) -> range:
    """Return the ranks whose reads this process declares in its prefetch plan.

    Under torchrun, the first process of a machine declares the reads of all its processes, and the others none. A
    process without torchrun's variables, or with another rank than these say, declares its own reads.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [environment.get(name, "") for name in names]
    if not all(map(str.isdigit, values)) or [*map(int, values)][:2] != [rank, world_size]:
        return range(rank, rank + 1)
    local_rank, n_local = map(int, values[2:])
    return range(rank, min(rank + n_local, world_size)) if local_rank == 0 else range(rank, rank)


class DatasetPrefetch:
    """The prefetch plan for the given ranks, from a position on, until `close` or garbage collection.

    It leaves out an epoch, or the rest of it, that seems to be cached: declaring it costs more CPU than reading small
    objects. `declares`: the epoch of `place` is declared in any case. Errors of the plan never reach the training. If an
    object cannot be read, the read itself raises.
    """

    def __init__(
        self,
        source: SampleReader,
        orders: NodeOrders,
        ranks: range,
        place: EpochPosition,
        *,
        declares: bool = False,
    ) -> None:
        self._source, self._key = source, (orders, ranks)
        self._check_at = time.monotonic() + CHECK_EVERY_S
        self._next = place.next_epoch()
        self._pid = os.getpid()
        self._n_requests = _count_requests(source)
        self._left_out: dict[int, int] = {}  # by epoch, how many requests there were then
        # A SimpleQueue, because its `put` is reentrant: the garbage collector may call it at any point.
        self._grants: Grants = SimpleQueue()
        for _ in range(AHEAD):
            self._grants.put(True)
        weakref.finalize(self, self._grants.put, False).atexit = False
        self._plan: Any = None
        if source.fs is None or not ranks:
            return
        items = _items(source, orders, ranks, place, self._grants, self._left_out, declares=declares)
        try:
            self._plan = source.fs.prefetch(items)
        except Exception:  # any error: reads fetch what the plan did not
            logger.debug("cannot prefetch %r", source, exc_info=True)

    def continues(self, orders: NodeOrders, ranks: range, place: EpochPosition) -> bool:
        """Return whether this plan covers the reads from `place` on; if so, let it fetch the epoch after that, too."""
        is_next = (orders, ranks) == self._key and place == self._next
        if not is_next or self._pid != os.getpid() or self._must_restart(place):
            return False
        self._next, self._n_requests = place.next_epoch(), _count_requests(self._source)
        self._grants.put(True)
        return True

    def restarted_if_needed(self, place: EpochPosition) -> DatasetPrefetch:
        """Return this plan, or a new one from `place` on if it failed, or left out what was not cached."""
        if time.monotonic() < self._check_at:
            return self
        self._check_at = time.monotonic() + CHECK_EVERY_S
        if not self._must_restart(place):
            return self
        self.close()
        return DatasetPrefetch(self._source, *self._key, place, declares=True)

    def _must_restart(self, place: EpochPosition) -> bool:
        """Return whether the plan failed, or left out the epoch of `place` and there were requests since then."""
        if getattr(getattr(self._plan, "progress", None), "state", None) == "failed":
            return True
        if place.epoch not in self._left_out:
            return False
        return _count_requests(self._source) > max(self._n_requests, self._left_out[place.epoch])

    def close(self) -> None:
        """Cancel the plan and wait for its end."""
        self._grants.put(False)
        plan, self._plan = self._plan, None
        if plan is None or self._pid != os.getpid():
            return
        try:
            plan.cancel()
            for error in plan.errors:
                logger.debug("prefetching: %s", error)
            plan.wait(0)
        except Exception as error:  # any error: the training does not depend on the plan
            logger.debug("prefetching ended: %s", error)


def _items(
    source: SampleReader,
    orders: NodeOrders,
    ranks: range,
    place: EpochPosition,
    grants: Grants,
    left_out: dict[int, int],
    *,
    declares: bool,
) -> Iterator[Item]:
    """Yield what these ranks read, epoch after epoch, each when it is granted. Runs in the thread of the plan.

    An epoch, or the rest of it, is left out if the samples of it that are checked are all cached.
    """
    while grants.get():
        order, _ = orders.at(place)
        shares = _uncached(source, order, orders.division(len(order)), ranks, place, left_out, declares)
        found = source.items(index for share in shares for index in share.tolist())
        yield from _once_a_step(found, orders.division(len(order)).step, source.block_size)
        del order, shares  # free their memory before the wait for the next grant
        place, declares = place.next_epoch(), False


def _uncached(
    source: SampleReader,
    order: Order,
    division: RankDivision,
    ranks: range,
    place: EpochPosition,
    left_out: dict[int, int],
    declares: bool,
) -> Iterator[Order]:
    """Yield what these ranks read in each step of an epoch, until the rest of it seems to be cached.

    Note in `left_out` that it is not declared.
    """
    position, n_unchecked = place.position, 0 if declares else CHECK_AFTER
    for share in division.batches(order, ranks, position):
        if n_unchecked >= CHECK_AFTER:
            n_unchecked = 0
            if source.is_cached(_some(order, division, ranks, position)):
                left_out[place.epoch] = _count_requests(source)
                return
        yield share
        n_unchecked += len(share)
        position += division.step


def _once_a_step(items: Iterator[Item], step: int, block_size: int) -> Iterator[Item]:
    """Leave out the items in the same blocks as one of the `step` items before them: they are read at the same time."""
    latest: dict[tuple[str, int, int], int] = {}
    for number, item in enumerate(items):
        if isinstance(item, tuple) and (item[1] or 0) >= 0 < (item[2] or 0):
            path, start, stop = item
            blocks = path, (start or 0) // block_size, (stop - 1) // block_size
            if number - latest.get(blocks, -step) < step:
                continue
            if len(latest) > 2 * step:
                latest = {each: at for each, at in latest.items() if number - at < step}
            latest[blocks] = number
        yield item


def _count_requests(source: SampleReader) -> int:
    return 0 if source.fs is None else source.fs.stats().requests


def _some(order: Order, division: RankDivision, ranks: range, position: int) -> Iterator[int]:
    """Yield about CHECKED of the samples that these ranks read from `position` on, spread over the epoch."""
    n_shares = max(1, (division.n - position) // division.step)
    n_each, every = max(1, CHECKED // n_shares), max(1, n_shares // CHECKED)
    for share in islice(division.batches(order, ranks, position), 0, None, every):
        yield from share[:n_each].tolist()
