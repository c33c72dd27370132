"""The Loader: batches of a dataset in the order of its epochs, made by threads while the training computes."""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from cachedfs.datasets.loading.arguments import at_least, default_threads, ranks_of, shuffle_of, size
from cachedfs.datasets.loading.batch_queue import BatchQueue, PreparedBatch, QueueLimits
from cachedfs.datasets.loading.batches import BatchMover, size_of
from cachedfs.datasets.loading.dali import ExternalSource
from cachedfs.datasets.loading.epoch_report import EpochMeasurement, EpochReport, FetchMeter, report_of
from cachedfs.datasets.loading.metrics import BatchTiming, EpochTimings, reading_s
from cachedfs.datasets.loading.prefetch_plan import DatasetPrefetch, ranks_here
from cachedfs.datasets.loading.sampler import (
    EpochOrders,
    EpochPosition,
    Order,
    RankDivision,
    place_in,
    state_at,
)
from cachedfs.datasets.samples import Collate, SampleReader

__all__ = ["Loader"]


class Loader:
    """Batches of a map-style dataset, epoch after epoch, ready when the training asks for them.

        loader = Loader(train, batch_size=16, shuffle=True, seed=0)
        for epoch in range(loader.epoch, 10):
            for image, label in loader:
                ...
                torch.save(loader.state_dict(), "position.pt")

    A `for` is one epoch, and the next `for` the next one. After `break` the next `for` begins the same epoch again; after
    `load_state_dict`, or an error of the dataset, it goes on where that was. One `for` at a time: a new one ends the other.

    The order of an epoch follows from `seed` and its number alone: it is the same for any number of threads, ranks and
    restarts. Threads of this process make the batches; while the loop computes with one, the next are made. What the ranks
    of this machine will read is fetched ahead, in that order, where the dataset's filesystem is cachedfs.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        shuffle: bool | Literal["full", "window"] | None = False,
        seed: int = 0,
        window: int = 64,
        drop_last: bool = False,
        pad: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Collate | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool | None = None,
        n_threads: int | None = None,
        n_prefetch: int = 2,
        prefetch_bytes: int | str = "1GiB",
        echo: int = 1,
    ) -> None:
        """`dataset`: one of `cachedfs.datasets`, or any with `__len__` and `__getitem__` (or `__getitems__`).

        `batch_size`: samples of a batch of one rank. `shuffle`: True draws among all orders; "window" keeps the samples
        that come with one fetch near one another, mixed with those of `window` others; False: as they are.

        `rank`, `world_size`: those of torch.distributed where it is initialised when a `for` begins, else 0 of 1. With
        several ranks all get as many batches of the same sizes: in the end samples of the beginning are given once more,
        at most one a rank. `pad=False` gives each sample once, and the last batches differ. `drop_last`: what is less
        than a whole batch of each rank is not given.

        `collate_fn`: makes a batch of a list of samples; torch's own by default. `device`: where the tensors of a batch are
        brought, to CUDA while the training computes. `pin_memory`: None pins what goes to CUDA; without CUDA nothing is.

        `n_threads`: that make batches, a batch each; default: one for each core, 4 to 8. `n_prefetch`: batches ready beside
        those being made, `prefetch_bytes` (`"1GiB"`): what all of these take, by the largest of the last ones. One is always
        made. `echo`: how often each batch is given, one time after the other, where loading takes longer than computing.
        """
        self._source = SampleReader(dataset)
        self._batch_size, self._drop_last, self._pad = at_least(1, batch_size=batch_size), drop_last, pad
        self._given_ranks = ranks_of(rank, world_size)
        self._shuffle, self._seed = shuffle_of(shuffle), operator.index(seed)
        self._window = at_least(1, window=window)
        self._collate, self._device, self._pin_memory = collate_fn, device, pin_memory
        self._n_threads = default_threads() if n_threads is None else at_least(1, n_threads=n_threads)
        n_prefetch = at_least(0, n_prefetch=n_prefetch)
        self._bounds = QueueLimits(self._n_threads + n_prefetch, size(prefetch_bytes=prefetch_bytes))
        self._echo = at_least(1, echo=echo)
        self.timings = EpochTimings()
        self._measured: tuple[int, FetchMeter] | None = (
            None  # which epoch the timings are of, and what was fetched
        )
        self._place = EpochPosition(0)  # what was given
        self._start = 0  # where in the epoch the next `for` begins
        self._feed: BatchQueue | None = None
        self._declared: DatasetPrefetch | None = None

    @property
    def dataset(self) -> Any:
        """The dataset that was given."""
        return self._source.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The number of the epoch that is read, or of the next one after its end; the first is 0."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` be this epoch, from its beginning; nothing changes where it is this one already."""
        if (epoch := at_least(0, epoch=epoch)) != self._place.epoch:
            self._go_to(EpochPosition(epoch))

    def __len__(self) -> int:
        """Return how many batches a whole epoch gives this rank, whatever of it is left; with echo, each as often as it is given."""
        rank, world_size = self._ranks()
        return self._division(world_size).n_batches(rank) * self._echo

    # Its state.

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from, after the batch that was given last: some numbers, in no time.

        It counts the samples that all ranks were given: all that are in step have the same. With echo a batch counts when it
        is given first.
        """
        epochs, place = self._epochs(), self._place
        if place.position and self._division(self._ranks()[1]).is_over(place.position):
            place = EpochPosition(place.epoch + 1)
        return state_at(place, epochs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `for` go on where the state was taken, with any number of ranks, batch size and number of threads.

        Raises ValueError where the dataset, the seed or the shuffle are others, so that the order would be: it says which.
        """
        self._go_to(place_in(state, self._epochs()))

    def _go_to(self, place: EpochPosition) -> None:
        self.close()
        self._place, self._start = place, place.position

    # Iterating.

    _is_process_over = staticmethod(sys.is_finalizing)  # by then `sys` may be gone from here

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of one epoch, this rank's. Nothing is begun before the first is asked for."""
        self._end_loop()
        return self._run()

    def _run(self) -> Iterator[Any]:
        feed, division, mover = self._begin()
        is_complete = False
        try:
            while not division.is_over(self._place.position):
                began = time.perf_counter()
                made = self._take(feed)
                if made is None:  # the other ranks have one more
                    break
                batch = mover.received(*made.batch)
                self._start = 0  # not before: who interrupts the wait for the first has been given nothing
                self._place = EpochPosition(self.epoch, division.after(self._place.position))
                given = time.perf_counter()
                for _ in range(self._echo):
                    yield batch
                    self._must_be_current(feed)
                now = time.perf_counter()
                compute_s, n = now - given, made.n_samples
                self.timings.add(
                    BatchTiming(given - began, made.load_s, compute_s, made.size, n, made.read_s)
                )
                del made, batch  # the training may be done with it, and waits for the next
            is_complete = True
        finally:
            # A loop that is in use at the end of the process: all it had is over, and to count would begin it anew.
            if not self._is_process_over():
                self._leave(feed, is_complete=is_complete)

    def _begin(self) -> tuple[BatchQueue, RankDivision, BatchMover]:
        """Begin an epoch where it is to begin; from here on there are threads."""
        self._end_loop()
        mover = BatchMover(self._device, self._pin_memory)
        rank, world_size = self._ranks()
        division, epochs = self._division(world_size), self._epochs()
        place = EpochPosition(self.epoch, self._start)
        feed = BatchQueue(
            partial(_made, self._source, self._collate, mover),
            division.batches(epochs.order(place.epoch), range(rank, rank + 1), place.position),
            n_threads=self._n_threads,
            bounds=self._bounds,
            enter=partial(_enter, mover, torch.get_num_threads()),
        )
        self._feed, self._place, self.timings = feed, place, EpochTimings()
        self._measured = place.epoch, FetchMeter(self._source.fs)
        self._declare(epochs, division, ranks_here(rank, world_size, os.environ), place)
        return feed, division, mover

    def _take(self, feed: BatchQueue) -> PreparedBatch | None:
        if self._declared is not None:
            self._declared = self._declared.renewed(self._place)
        feed.must_be_ours()
        try:
            return feed.take()
        except Exception:  # of the dataset: the next `for` tries once more what could not be made
            self._start = self._place.position
            raise

    def _must_be_current(self, feed: BatchQueue) -> None:
        if self._feed is not feed:
            raise RuntimeError(
                "this loop is over: another began, a state was loaded, or the loader was closed"
            )

    def _leave(self, feed: BatchQueue, *, is_complete: bool) -> None:
        if self._feed is feed:
            self._feed = None
            self._stop_meter()
            if is_complete:
                self._place, self._start = EpochPosition(self.epoch + 1), 0
            else:
                self._end_plan()  # before the batches that are being made: they need the link
        feed.close()

    def close(self) -> None:
        """End what runs: the loop, and the fetching ahead that goes on from one epoch to the next. It can be used again."""
        self._end_plan()
        feed, self._feed = self._feed, None
        if feed is not None:
            self._stop_meter()
            feed.close()

    def _end_loop(self) -> None:
        """End a loop that was not left. The plan of one that is complete goes on."""
        if self._feed is not None:
            self.close()

    def external_source(self) -> ExternalSource:
        """Return what NVIDIA's DALI takes as the `source` of `fn.external_source`, with `batch=True`: see `ExternalSource`.

        Each tensor of a batch is an output, in their order, and so is a list of `bytes`, such as encoded images. DALI asks for
        batches some time before its pipeline gives them: `state_dict` counts what it asked for.
        """
        return ExternalSource(self)

    # What it took.

    def report(self) -> EpochReport:
        """Return what the `for` that runs, or the last one, took, and what limits it: print it, or show it in a notebook.

        The batch in use does not count yet. Requests and bytes are those of this process, whoever made it read meanwhile.
        Raises RuntimeError before the first `for`.
        """
        if self._measured is None:
            raise RuntimeError("there is nothing to report on yet: read some batches in a `for` first")
        epoch, meter = self._measured
        return report_of(
            EpochMeasurement(
                epoch=epoch,
                n=len(self._source),
                n_threads=self._n_threads,
                timings=self.timings,
                tells_reading=self._source.tells_reading,
                fetched=meter.fetched(self._source.fs),
            )
        )

    def _stop_meter(self) -> None:
        if self._measured is not None:
            self._measured[1].stop(self._source.fs)

    # What will be read.

    def _declare(
        self, epochs: EpochOrders, division: RankDivision, ranks: range, place: EpochPosition
    ) -> None:
        if self._declared is None or not self._declared.goes_on(epochs, division, ranks, place):
            self._end_plan()
            self._declared = DatasetPrefetch(self._source, epochs, division, ranks, place)

    def _end_plan(self) -> None:
        declared, self._declared = self._declared, None
        if declared is not None:
            declared.close()

    # What all of it follows from.

    def _epochs(self) -> EpochOrders:
        return EpochOrders(
            len(self._source), self._seed, self._shuffle, self._window, self._source.group_size
        )

    def _division(self, world_size: int) -> RankDivision:
        return RankDivision(len(self._source), self._batch_size, world_size, self._drop_last, self._pad)

    def _ranks(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_feed": None, "_declared": None}

    def __repr__(self) -> str:
        given = (
            f"{self._source!r}, batch_size={self._batch_size}, shuffle={self._shuffle!r}, seed={self._seed}"
        )
        return f"<Loader({given}): {self._place.position:,} samples of epoch {self.epoch} given>"


# In the threads.


def _made(source: SampleReader, collate: Collate | None, mover: BatchMover, indexes: Order) -> PreparedBatch:
    """Make one batch: with the event of its arrival at the device."""
    began, read_before = time.perf_counter(), reading_s()
    batch = source.batch(indexes.tolist(), collate)
    size = size_of(batch)
    sent = mover.sent(batch)
    return PreparedBatch(sent, len(indexes), size, time.perf_counter() - began, reading_s() - read_before)


def _enter(mover: BatchMover, n_torch_threads: int) -> None:
    """Begin in a thread that makes batches: torch computes in it alone, as in the workers of its DataLoader.

    Else each had as many threads of OpenMP as there are cores, beside those of the training.
    """
    torch.get_num_threads()  # sets what is set below, if it was never asked
    torch.set_num_threads(1)
    # That was for this thread, but for all threads to come, too: say there again what was said.
    others = threading.Thread(target=torch.set_num_threads, args=(n_torch_threads,))
    others.start()
    others.join()
    mover.enter()
