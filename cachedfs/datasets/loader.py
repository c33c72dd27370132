"""`Loader`: batches of a map-style dataset, made by threads while the training computes."""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Generic, Literal

import torch

from cachedfs.common.executor import n_cores
from cachedfs.datasets.arguments import at_least, current_ranks, raise_if_ranks_differ, ranks_of, size
from cachedfs.datasets.batch_queue import BatchQueue, Made
from cachedfs.datasets.batches import BatchMover, size_of
from cachedfs.datasets.epoch_report import BatchTiming, EpochReport, EpochTimings, FetchMeter, report_of
from cachedfs.datasets.nodes import NodeOrders, Ranks, StoredObjects, nodes_of, ranks_on_nodes
from cachedfs.datasets.prefetch_plan import DatasetPrefetch, ranks_here
from cachedfs.datasets.sampler import (
    EpochOrders,
    EpochPosition,
    Order,
    RankDivision,
    Shuffle,
    place_in,
    state_at,
)
from cachedfs.datasets.samples import Collate, SampleReader, T, reading_s
from cachedfs.datasets.thread_choice import MadeBatch, ThreadChoice

SHUFFLES: dict[Any, Shuffle | None] = {
    False: None,
    None: None,
    True: "full",
    "full": "full",
    "window": "window",
    "node": "node",
}


class Loader(Generic[T]):
    """Iterate over the batches (of type `T`) of a map-style dataset, epoch by epoch; threads prepare them ahead.

        loader = Loader(train, batch_size=16, shuffle=True, seed=0)
        for epoch in range(loader.epoch, 10):
            for image, label in loader:
                ...
                torch.save(loader.state_dict(), "position.pt")

    Each `for` loop is a new epoch in a new order, also after a `break` or an error, as with torch's DataLoader. After
    `set_epoch(e)`, the next loop is epoch `e`. After `load_state_dict`, it continues an epoch in the middle, once. A new
    loop ends the previous one.

    The order of an epoch depends only on `seed` and the epoch number, not on threads, ranks or restarts. If the dataset
    reads through cachedfs, a prefetch plan fetches what the ranks of this machine will read, in that order.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        shuffle: bool | Literal["full", "window", "node"] | None = False,
        seed: int = 0,
        window: int = 64,
        drop_last: bool = False,
        pad: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        n_nodes: int | None = None,
        node_rank: int | None = None,
        collate_fn: Callable[[list[Any]], T] | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool | None = None,
        n_threads: int | None = None,
        n_prefetch: int = 2,
        prefetch_bytes: int | str = "1GiB",
        echo: int = 1,
    ) -> None:
        """Make a loader. It starts threads and requests only when the first batch is asked for.

        `dataset`: one of `cachedfs.datasets`, or any object with `__len__` and `__getitem__` (or `__getitems__`).

        `batch_size`: samples per batch of one rank. `shuffle`: True (or "full") draws from all permutations, with
        `seed`. "window" keeps samples that one fetch reads near one another, mixed with the samples of `window` such
        groups. "node" gives each node the same part of the data in every epoch, and shuffles within the nodes, so that
        their caches hold the data once in total: files, shards or runs of chunks in the order of a hash, cut into parts
        of equal bytes. False keeps the order of the dataset.

        `rank`, `world_size`: by default those of torch.distributed if it is initialized when a loop begins, else rank 0
        of 1. All ranks get the same number of batches of the same sizes: at the end of an epoch, samples from its
        beginning are repeated, at most one per rank. With `pad=False` each sample occurs once, and the last batches
        differ in size. `drop_last`: leave out the last samples if they do not fill a whole batch for every rank. Before
        its first batch, a loop of several ranks of torch.distributed compares their epochs: all of them must begin it,
        and RuntimeError is raised if they differ.

        `n_nodes`, `node_rank`: for `shuffle="node"`; by default those of torchrun or SLURM. The ranks of a node must be
        adjacent, and equally many on each. Without ranks, each node is one process. The parts of the nodes may differ in
        samples: nodes with fewer repeat some, those with more leave some out with `drop_last`, and with `pad=False`
        their loops end after different numbers of batches.

        `collate_fn`: makes a batch from a list of samples; default: torch's `default_collate`. `device`: where to
        move the tensors of a batch; copies to CUDA run while the training computes. `pin_memory`: None pins only
        batches that go to CUDA; without CUDA nothing is pinned.

        `n_threads`: threads that make batches, one batch each; default: one per core, 4 to 8, or only one while that is
        measured to be faster, as for small cached files. `n_prefetch`: batches kept ready, in addition to those being
        made. `prefetch_bytes` (`"1GiB"`): limit on the bytes of all these batches, estimated from the largest recent
        one; one batch is always made. `echo`: how many times in a row each batch is returned, useful if loading takes
        longer than computing.

        Raises TypeError for a dataset without access by index, and ValueError for an option out of range.
        """
        self._source = SampleReader(dataset)
        self._batch_size, self._drop_last, self._pad = at_least(1, batch_size=batch_size), drop_last, pad
        self._explicit_ranks = ranks_of(rank, world_size)
        if not isinstance(shuffle, str | bool | None) or shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r}: expected True, False, 'full', 'window' or 'node'")
        self._shuffle, self._seed = SHUFFLES[shuffle], operator.index(seed)
        self._explicit_nodes = nodes_of(n_nodes, node_rank)
        if self._explicit_nodes is not None and self._shuffle != "node":
            raise ValueError(f"n_nodes={n_nodes!r}: only shuffle='node' takes it, and shuffle={shuffle!r}")
        self._window = at_least(1, window=window)
        self._collate, self._device, self._pin_memory = collate_fn, device, pin_memory
        most = min(max(n_cores(), 4), 8) if n_threads is None else at_least(1, n_threads=n_threads)
        self._threads = ThreadChoice(most, is_fixed=n_threads is not None)
        self._most = most + at_least(0, n_prefetch=n_prefetch)
        self._most_bytes = size(prefetch_bytes=prefetch_bytes)
        self._echo = at_least(1, echo=echo)
        self.timings = EpochTimings()
        self._meter: FetchMeter | None = None  # of what the epoch of the timings fetches
        # After the last returned batch, and where the next loop begins.
        self._position = self._next = EpochPosition(0)
        self._division: RankDivision | None = None  # of the positions in the epoch of the last loop
        self._queue: BatchQueue | None = None
        self._plan: DatasetPrefetch | None = None

    @property
    def dataset(self) -> Any:
        """The dataset passed to the constructor."""
        return self._source.dataset

    @property
    def batch_size(self) -> int:
        """Samples per batch of one rank."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The number of the epoch of the last returned batch, or of the next one after its end; the first is 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop the one of `epoch`, from its beginning or the position of a loaded state in it."""
        if (epoch := at_least(0, epoch=epoch)) != self._next.epoch:
            self._move_to(EpochPosition(epoch))

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch for this rank. With echo, repetitions count."""
        orders = self._orders()
        return orders.division(orders.n).n_batches(orders.ranks.local_rank) * self._echo

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last returned batch, for `load_state_dict`; cheap and small.

        Ranks that are in step have the same state. With echo, a batch counts when it is returned first.
        """
        place, orders = self._position, self._orders()
        division = self._division or orders.division(orders.n_positions)
        if place.position and division.is_over(place.position):
            place = place.next_epoch()
        return state_at(place, self._epochs())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next loop at a saved position, once. The ranks, the batch size and the threads may differ.

        Raises ValueError, which says what differs, if the order does: another length of the dataset, seed or shuffle.
        """
        self._move_to(place_in(state, self._epochs()))

    def _move_to(self, place: EpochPosition) -> None:
        self.close()
        self._position, self._next, self._division = place, place, None

    _is_process_over = staticmethod(sys.is_finalizing)  # kept here: at exit, the name `sys` may be cleared

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over this rank's batches of one epoch. It starts when the first batch is asked for."""
        self._end_loop()
        return self._run()

    def _run(self) -> Iterator[T]:
        queue, division, mover = self._begin()
        is_complete = False
        try:
            while not division.is_over(self._position.position):
                wait_start = time.perf_counter()
                if self._plan is not None:
                    self._plan = self._plan.restarted_if_needed(self._position)
                prepared = queue.take()
                if prepared is None:  # only other ranks have a batch in the last step
                    break
                sent, made = prepared
                batch = mover.received(*sent)
                self._position = replace(self._position, position=division.after(self._position.position))
                self._next = self._position.next_epoch()  # only now: a loop without a batch is no epoch
                use_start = time.perf_counter()
                for _ in range(self._echo):
                    yield batch
                    if self._queue is not queue:
                        raise RuntimeError(
                            "this loop has ended: another loop began, a state was loaded, or the loader was closed"
                        )
                wait_s, compute_s = use_start - wait_start, time.perf_counter() - use_start
                load_s = made.ended - made.began
                self.timings.add(
                    BatchTiming(wait_s, load_s, compute_s, made.size, made.n_samples, made.read_s)
                )
                # The training may not need the batch any more: free it before the wait for the next one.
                del prepared, sent, batch
            is_complete = True
        finally:
            # At interpreter exit the loop's resources are closed already, and reading statistics would open them again.
            if not self._is_process_over():
                self._end_run(queue, is_complete=is_complete)

    def _begin(self) -> tuple[BatchQueue, RankDivision, BatchMover]:
        """Start the threads and the prefetch plan of an epoch, at the position where it begins."""
        self._end_loop()
        mover = BatchMover(self._device, self._pin_memory)
        orders = self._orders()
        ranks, place = orders.ranks, self._next.on_nodes(orders.ranks.n_nodes)
        if ranks.world_size > 1 and (ranks.rank, ranks.world_size) == current_ranks():
            raise_if_ranks_differ(state_at(place, self._epochs()))
        order, n_positions = orders.at(place)
        division, own = orders.division(n_positions), range(ranks.local_rank, ranks.local_rank + 1)
        queue = BatchQueue(
            partial(_make_batch, self._source, self._collate, mover),
            orders.division(len(order)).batches(order, own, place.position),
            threads=self._threads,
            most=self._most,
            most_bytes=self._most_bytes,
            enter=partial(_set_up_thread, mover, torch.get_num_threads()),
        )
        self._queue, self._position, self._division = queue, place, division
        self.timings, self._meter = EpochTimings(place.epoch), FetchMeter(self._source.fs)
        here = ranks.on_this_node(ranks_here(ranks.rank, ranks.world_size, os.environ))
        if self._plan is None or not self._plan.continues(orders, here, place):
            self._end_plan()
            self._plan = DatasetPrefetch(self._source, orders, here, place)
        return queue, division, mover

    def _end_run(self, queue: BatchQueue, *, is_complete: bool) -> None:
        if self._queue is not queue:
            queue.close()
        elif is_complete:
            self._end_queue()
            self._position = self._next = self._position.next_epoch()
        else:
            self.close()

    def close(self) -> None:
        """End the current loop, and the prefetch plan that continues across epochs. The loader can be used again."""
        self._end_plan()
        self._end_queue()

    def _end_queue(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            if self._meter is not None:
                self._meter.stop()
            queue.close()

    def _end_loop(self) -> None:
        """End a loop that is still active. The prefetch plan of a finished loop continues."""
        if self._queue is not None:
            self.close()

    def report(self) -> EpochReport:
        """Return a report on the current or last loop, to print or to display in a notebook.

        The batch in use does not count yet. Requests and bytes include all other reads of this process. Raises
        RuntimeError before the first loop.
        """
        if self._meter is None:
            raise RuntimeError("there is nothing to report yet: iterate over some batches first")
        n, n_threads = self._orders().n, self._threads.current
        return report_of(self.timings, self._meter.fetched(), n=n, n_threads=n_threads)

    def _end_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()

    @cached_property
    def _objects(self) -> StoredObjects:
        return self._source.objects()

    def _epochs(self) -> EpochOrders:
        source = self._source
        objects = self._objects.checksum if self._shuffle == "node" else 0
        return EpochOrders(len(source), self._seed, self._shuffle, self._window, source.group_size, objects)

    def _orders(self) -> NodeOrders:
        """Return the orders of this process's node, as its ranks are now."""
        pair, is_by_node = self._explicit_ranks or current_ranks(), self._shuffle == "node"
        ranks = (
            ranks_on_nodes(pair, self._explicit_nodes, os.environ) if is_by_node else Ranks(*(pair or (0, 1)))
        )
        objects = self._objects if is_by_node else None
        return NodeOrders(self._epochs(), objects, ranks, self._batch_size, self._drop_last, self._pad)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_queue": None, "_plan": None}

    def __repr__(self) -> str:
        options = f"batch_size={self._batch_size}, shuffle={self._shuffle!r}, seed={self._seed}"
        given = f"{self._position.position:,} samples of epoch {self.epoch} given"
        return f"<Loader({self._source!r}, {options}): {given}>"


# Functions that run in the batch threads.


def _make_batch(source: SampleReader, collate: Collate | None, mover: BatchMover, indexes: Order) -> Made:
    """Make one batch, and start its copy to the device."""
    start, read_before, core_before = time.perf_counter(), reading_s(), time.thread_time()
    batch = source.batch(indexes.tolist(), collate)
    size = size_of(batch)
    sent = mover.sent(batch)
    core_s, read_s = time.thread_time() - core_before, reading_s() - read_before
    return sent, MadeBatch(start, time.perf_counter(), core_s, read_s, size, len(indexes))


def _set_up_thread(mover: BatchMover, n_torch_threads: int) -> None:
    """Set up a batch thread: torch starts no further threads in it, as in the workers of torch's DataLoader.

    Otherwise each would start one OpenMP thread per core, in addition to the threads of the training.
    """
    torch.get_num_threads()  # torch's first call sets the default, which would undo the next line
    torch.set_num_threads(1)
    # It applies to this thread and to all future threads. A call in another thread restores the number for future ones.
    others = threading.Thread(target=torch.set_num_threads, args=(n_torch_threads,))
    others.start()
    others.join()
    mover.enter()
