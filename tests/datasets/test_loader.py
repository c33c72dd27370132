"""Loader: order, ranks, resuming, threads, errors, plans and processes."""

import contextlib
import gc
import itertools
import json
import logging
import math
import pickle
import signal
import threading
from queue import Queue

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, IterableDataset, Subset  # noqa: E402

from cachedfs.datasets import FileDataset, batch_queue  # noqa: E402
from cachedfs.datasets.batch_queue import BatchQueue  # noqa: E402
from cachedfs.datasets.loader import Loader  # noqa: E402
from cachedfs.datasets.prefetch_plan import ranks_here  # noqa: E402
from cachedfs.datasets.sampler import EpochOrders  # noqa: E402
from cachedfs.datasets.samples import SampleReader, Samples  # noqa: E402
from tests.support import KiB, MiB, item_threads, noise, tally, until  # noqa: E402


class Numbers(Dataset):
    """Each sample is its own number; `before` is called with it in the thread that makes it."""

    def __init__(self, n=100, before=None):
        self.n, self.before = n, before

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if self.before is not None:
            self.before(index)
        return torch.tensor(index)


class Objects(Samples):
    """Each sample is the length and the first byte of one small object."""

    def __init__(self, url, n, **options):
        super().__init__(url, **options)
        self.n = n

    def __len__(self):
        return self.n

    def __getitems__(self, indexes):
        paths = [self._path(self.number(index)) for index in indexes]
        data = self.fs.cat(paths)
        return [
            self.transformed(i, (len(data[path]), data[path][0]))
            for i, path in zip(indexes, paths, strict=True)
        ]

    def items(self, indexes):
        return map(self._path, indexes)

    def _path(self, index):
        return f"{self.path}/{index:03}"


class Stream(IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter([1])


def order_of(n=100, epoch=0, shuffle="full", seed=0, **options):
    return EpochOrders(n, seed, shuffle, **options).order(epoch).tolist()


def flat(batches):
    return [i for batch in batches for i in batch.tolist()]


def steps_of(loaders, n=None):
    """Return the samples of the first n steps of all ranks, step by step."""
    return flat(batch for step in itertools.islice(zip(*loaders, strict=n is None), n) for batch in step)


def our_threads():
    # CPython also lists a thread that never ran, as a Ctrl-C came within its `start`.
    began = [thread for thread in threading.enumerate() if thread.ident is not None]
    return [thread for thread in began if thread.name.startswith("cachedfs-loader")]


def plans(fs):
    """Return the tasks of prefetch plans, and whether threads take their items."""
    tasks = [coroutine.__qualname__ for coroutine in list(fs._objects.engine._tasks)]
    parts = ("PrefetchPlan.", "PlanRequests.", "Fetcher.", "ObjectStream.")
    at_work = [name for name in tasks if name.startswith(parts)]
    return [*at_work, "items"] if item_threads() else at_work


# Order.


@pytest.mark.parametrize("n_threads", [1, 8])
@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_the_order_is_that_of_the_epoch_for_any_number_of_threads(n_threads, shuffle):
    word = {False: None, True: "full"}.get(shuffle, shuffle)
    loader = Loader(Numbers(), batch_size=7, shuffle=shuffle, seed=5, window=4, n_threads=n_threads)
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert [len(batch) for batch in batches] == [7] * 14 + [2]
        assert flat(batches) == order_of(epoch=epoch, shuffle=word, seed=5, window=4)
    assert len(loader) == 15


def test_ranks_share_the_order_step_by_step_and_have_equal_last_batches():
    order = order_of()
    ranks = [list(Loader(Numbers(), batch_size=8, shuffle=True, rank=r, world_size=3)) for r in range(3)]
    assert [[len(batch) for batch in rank] for rank in ranks] == [[8, 8, 8, 8, 2]] * 3
    assert steps_of(ranks) == order + order[:2]
    options = {"batch_size": 8, "world_size": 3, "pad": False}
    sizes = [[len(batch) for batch in Loader(Numbers(97), rank=r, **options)] for r in range(3)]
    assert sizes == [[8, 8, 8, 8, 1], [8, 8, 8, 8], [8, 8, 8, 8]]
    loader = Loader(Numbers(), rank=1, drop_last=True, **options)
    assert [len(batch) for batch in loader] == [8] * len(loader) == [8] * 4
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)


# Sources of samples.


def test_a_batch_is_one_call_if_the_dataset_has_getitems():
    class Batched(Numbers):
        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indexes):
            assert all(type(index) is int for index in indexes)
            return [torch.tensor(index) for index in indexes]

    assert flat(Loader(Batched(), batch_size=9, shuffle=True)) == order_of()


@pytest.mark.parametrize("dataset", [iter([1]), 7, Stream()])
def test_iterable_datasets_are_refused(dataset):
    with pytest.raises(TypeError, match="has no access by index"):
        Loader(dataset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"n_prefetch": -1}, "n_prefetch=-1: expected a whole number, 0 or more"),
        ({"shuffle": "block"}, "shuffle='block': expected True, False, 'full', 'window' or 'node'"),
        ({"prefetch_bytes": "much"}, "prefetch_bytes='much': expected bytes"),
        ({"n_nodes": 2}, "n_nodes=2: only shuffle='node' takes it, and shuffle=False"),
        ({"rank": 1}, "give both"),
        ({"rank": 2, "world_size": 2}, "expected 0 to 1, because world_size=2"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Loader(Numbers(), **options)


# Epochs, positions, states.


def test_each_loop_is_a_new_epoch_also_after_a_break():
    loader = Loader(Numbers(), batch_size=10, shuffle=True)
    for epoch in range(3):
        for batch in loader:
            assert batch.tolist() == order_of(epoch=epoch)[:10]
            break
        assert (loader.epoch, loader.state_dict()["position"]) == (epoch, 10)
    assert flat(loader) == order_of(epoch=3)
    assert loader.epoch == 4
    next(iter(loader))
    assert flat(loader) == order_of(epoch=5)


def test_the_epoch_that_is_set_is_the_next_one():
    loader = Loader(Numbers(), batch_size=10, shuffle=True)
    for epoch in (7, 7, 8, 2):
        loader.set_epoch(epoch)
        left_by_break(loader)
        assert loader.epoch == epoch
    loader.set_epoch(2)
    assert flat(loader) == order_of(epoch=2)
    loader.set_epoch(3)
    assert flat(loader) == order_of(epoch=3)


def test_a_loaded_state_is_resumed_once():
    loader = Loader(Numbers(), batch_size=10, shuffle=True)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2, "position": 60})
    loader.set_epoch(2)
    assert next(iter(loader)).tolist() == order_of(epoch=2)[60:70]
    assert loader.state_dict()["position"] == 70
    assert flat(loader) == order_of(epoch=3)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2, "position": 60})
    loader.set_epoch(3)
    assert flat(loader) == order_of(epoch=3)


def test_a_state_resumes_after_the_last_batch_returned():
    loader = Loader(Numbers(), batch_size=10, shuffle=True)
    states = [loader.state_dict()]
    batches = [states.append(loader.state_dict()) or batch for batch in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [
        *((0, 10 * i) for i in range(10)),
        (1, 0),
    ]
    for i, state in enumerate(states):
        other = Loader(Numbers(), batch_size=10, shuffle=True, n_threads=2)
        other.load_state_dict(state)
        assert flat(other) == (flat(batches[i:]) or order_of(epoch=1))
        assert flat(other) == order_of(epoch=other.epoch - 1)
    assert flat(pickle.loads(pickle.dumps(loader))) == order_of(epoch=1)


def test_an_interrupted_wait_for_the_first_batch_keeps_the_position(monkeypatch):
    loader = Loader(Numbers(), batch_size=10)
    loader.load_state_dict(loader.state_dict() | {"position": 60})
    with monkeypatch.context() as interrupted:
        interrupted.setattr(BatchQueue, "take", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert loader.state_dict()["position"] == 60
    assert flat(loader) == list(range(60, 100))
    assert flat(loader) == list(range(100))


def test_an_iterator_ends_when_another_starts_or_a_state_is_loaded():
    loader = Loader(Numbers(), batch_size=10)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="this loop has ended"):
        next(first)
    assert next(second).tolist() == list(range(10, 20))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="this loop has ended"):
        next(second)
    assert our_threads() == []
    assert flat(loader) == list(range(20, 100))


@pytest.mark.parametrize("world_size", [1, 3])
def test_after_a_kill_any_number_of_ranks_continues_in_the_same_order(world_size):
    order = order_of(1000, seed=9)
    loaders = [
        Loader(range(1000), batch_size=16, shuffle=True, seed=9, rank=rank, world_size=2) for rank in range(2)
    ]
    given = steps_of(loaders, 12)
    state = json.dumps(loaders[0].state_dict())  # all that is left of a killed process
    assert given == order[: 12 * 32]
    ranks = []
    for rank in range(world_size):
        loader = Loader(range(1000), batch_size=5, shuffle=True, seed=9, rank=rank, world_size=world_size)
        loader.load_state_dict(json.loads(state))
        ranks.append(list(loader))
    rest = steps_of(ranks)
    assert rest[: 1000 - len(given)] == order[len(given) :]
    assert len(rest) - (1000 - len(given)) < world_size


# Threads.


def test_the_next_batch_is_made_while_the_loop_computes():
    made = [threading.Event() for _ in range(20)]
    loader = Loader(Numbers(20, before=lambda i: made[i].set()), n_threads=1, n_prefetch=0)
    for batch in loader:
        assert batch.item() == 19 or made[batch.item() + 1].wait(120)


@pytest.mark.parametrize(("n_threads", "n_prefetch"), [(1, 0), (3, 2)])
def test_the_number_of_prefetched_batches_is_bounded(n_threads, n_prefetch):
    n_ahead = n_threads + n_prefetch
    begun = Queue()
    loader = Loader(Numbers(30, before=begun.put), n_threads=n_threads, n_prefetch=n_prefetch)
    for step, _ in enumerate(loader, 1):
        expected = min(step + n_ahead, 30)
        until(lambda expected=expected: begun.qsize() == expected)
        until(lambda: loader._queue is None or all(future.done() for future in loader._queue._futures))
        assert begun.qsize() == expected


def test_prefetched_bytes_are_bounded_by_the_size_of_earlier_batches():
    class Large(Numbers):
        def __getitem__(self, index):
            begun.put(index)
            return {"x": (np.zeros(1000, np.uint8),)}

    begun = Queue()
    loader = Loader(
        Large(40), n_threads=8, n_prefetch=8, prefetch_bytes=3500, collate_fn=lambda batch: batch[0]
    )
    for step, _ in enumerate(loader, 1):
        until(lambda: loader._queue is None or all(future.done() for future in loader._queue._futures))
        assert begun.qsize() == min(40, step + 3)


def test_batches_are_in_order_even_if_one_is_late():
    gate = threading.Event()

    def before(index):
        if index == 0:
            assert gate.wait(120)  # others are made meanwhile
        if index == 3:
            gate.set()

    assert flat(Loader(Numbers(20, before), n_threads=4, prefetch_bytes="1MiB")) == list(range(20))


def test_torch_uses_one_thread_in_loader_threads_only():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert list(Loader(Numbers(8), collate_fn=lambda batch: torch.get_num_threads())) == [1] * 8
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_echo_repeats_each_batch_and_counts_it_once():
    loader = Loader(Numbers(10), batch_size=4, echo=3)
    positions, given = [], []
    for batch in loader:
        given.append(batch.tolist())
        positions.append(loader.state_dict()["position"])
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert given == [batch for batch in batches for _ in range(3)]
    assert positions == [4, 4, 4, 8, 8, 8, 0, 0, 0]
    assert len(loader) == 9


def test_nothing_runs_before_the_first_batch_or_if_a_loop_cannot_start(cloud):
    dataset = objects(cloud, 8)
    loader = Loader(dataset, batch_size=4, device="cuda:999")
    iterator = iter(loader)
    assert our_threads() == plans(dataset.fs) == []
    with pytest.raises((AssertionError, RuntimeError)):
        next(iterator)
    assert our_threads() == plans(dataset.fs) == []
    assert loader.state_dict()["position"] == 0


# Errors.


class OddOne(RuntimeError):
    pass


def of_a_sample(index):
    if index == 37:
        raise OddOne("it is odd")


def test_an_error_is_raised_at_its_position_and_ends_the_loop():
    loader = Loader(Numbers(before=of_a_sample), batch_size=5, n_threads=4)
    iterator, given = iter(loader), []
    with pytest.raises(OddOne) as caught:
        given.extend(iterator)
    assert flat(given) == list(range(35))
    assert caught.value.__notes__ == [
        "in sample 37 of Numbers",
        "in a batch of samples 35, 36, 37, 38, 39 of Numbers",
    ]
    assert caught.traceback[-1].name == "of_a_sample"
    assert list(iterator) == []
    assert our_threads() == []
    # A loaded state tries the failed batch again.
    loader.dataset.before = None
    loader.load_state_dict(loader.state_dict())
    assert flat(loader) == list(range(35, 100))
    assert loader.epoch == 1


@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_no_kind_of_error_ends_an_epoch_silently(error):
    def before(index):
        if index == 5:
            raise error("of the dataset")

    loader = Loader(Numbers(20, before))
    with pytest.raises((RuntimeError, SystemExit)):
        list(loader)
    assert loader.epoch == 0
    assert our_threads() == []


def left_by_break(loader):
    for _ in loader:
        break


def left_by_error(loader):
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            _ = 1 / 0


def left_by_collection(loader):
    holder = {"iterator": iter(loader)}
    next(holder["iterator"])
    holder["itself"] = holder
    del holder
    # More than once: while another thread collects, `gc.collect` does nothing.
    until(lambda: gc.collect() is not None and not our_threads())


def left_by_closing_the_loader(loader):
    iterator = iter(loader)
    next(iterator)
    loader.close()
    del iterator


def left_at_the_end(loader):
    with loader:
        list(loader)


@pytest.mark.parametrize(
    "leave", [left_by_break, left_by_error, left_by_collection, left_by_closing_the_loader, left_at_the_end]
)
def test_a_loop_that_is_left_leaves_no_thread_or_plan(cloud, leave):
    dataset = objects(cloud, 24)
    loader = Loader(dataset, batch_size=4, shuffle=True)
    leave(loader)
    assert our_threads() == []
    until(lambda: not plans(dataset.fs))
    assert len(list(loader)) == 6
    assert plans(dataset.fs)
    del loader  # without a reference, its plan for the next epoch ends, too
    until(lambda: not plans(dataset.fs))


def test_a_loop_that_is_collected_in_a_thread_of_ours_is_not_waited_for(monkeypatch):
    """Such as the one of the event loop, which the batches being made need."""
    monkeypatch.setattr(batch_queue, "END_S", 3600)
    may_go_on = threading.Event()
    holder = [iter(Loader(Numbers(3, lambda index: index and may_go_on.wait()), n_threads=1))]
    next(holder[0])
    thread = threading.Thread(target=holder.clear, name="cachedfs-io")
    thread.start()
    thread.join()
    may_go_on.set()
    until(lambda: not our_threads())


def test_a_batch_that_hangs_does_not_block_the_end_of_a_loop(monkeypatch):
    monkeypatch.setattr("cachedfs.datasets.batch_queue.END_S", 0.01)
    gate, begun = threading.Event(), Queue()

    def before(index):
        begun.put(index)
        assert index == 0 or gate.wait(120)

    for _ in Loader(Numbers(20, before), n_threads=2):
        until(lambda: begun.qsize() > 1)  # it hangs from here on
        break
    assert our_threads()
    gate.set()
    until(lambda: not our_threads())
    assert begun.qsize() <= 3  # queued batches are never made


IN_USE_AT_THE_END = """
    import sys, threading
    from cachedfs.datasets import FileDataset, Loader

    def begun():
        iterator = iter(Loader(FileDataset(sys.argv[1], decode=len)))
        next(iterator)
        return iterator

    def train():
        threading.main_thread().join()
        print(1 + sum(1 for _ in iterator), flush=True)

    unused, iterator = begun(), begun()
    threading.Thread(target=train).start()
"""


def test_a_process_exits_with_a_loop_in_use_after_its_threads_ended(cloud):
    objects(cloud, 40)
    assert cloud.python(IN_USE_AT_THE_END, cloud.url("d")) == "40\n"


@pytest.mark.parametrize("where", ["in the body", "while it waits"])
def test_ctrl_c_leaves_nothing_running(where):
    def before(index):
        if index == 20 and where == "while it waits":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    loader = Loader(Numbers(before=before), batch_size=2)

    def train():
        for batch in loader:
            if where == "in the body" and batch[0] == 10:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert our_threads() == []
    assert loader.epoch == 0


# Processes.


def check_child(iterator, loader, expected):
    with pytest.raises(RuntimeError, match="belongs to the parent process"):
        next(iterator)
    assert [batch[1].tolist() for batch in loader] == expected
    loader.close()


def test_a_forked_child_begins_its_own_loop_and_the_parent_continues(cloud, forking):
    loader = Loader(objects(cloud, 40), batch_size=4)
    expected = [batch[1].tolist() for batch in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    given = [next(iterator)[1].tolist()]
    child = forking.Process(target=check_child, args=(iterator, loader, expected))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert given + [batch[1].tolist() for batch in iterator] == expected


def train(rank, folder):
    from torch import distributed

    loader = Loader(Numbers(50), batch_size=8, shuffle=True, seed=4)  # before it knows its rank
    other = Loader(Numbers(50), batch_size=8)
    if rank == 0:
        next(iter(other))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="rank 0 and rank 1 would read different epochs: epoch=1 and 0"):
        next(iter(other))
    assert our_threads() == []
    if rank == 0:
        assert len(list(Loader(Numbers(50), rank=0, world_size=1))) == 50  # it waits for no other rank
    given = []
    for batch in loader:
        given.append(batch.tolist())
        if len(given) == 2:
            state = loader.state_dict()
    torch.save({"given": given, "state": state, "len": len(loader)}, f"{folder}/{rank}")
    distributed.destroy_process_group()


def test_the_ranks_of_distributed_training(tmp_path, forking):
    processes = [forking.Process(target=train, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    order = order_of(50, seed=4)
    given = [
        i for step in zip(*(rank["given"] for rank in ranks), strict=True) for batch in step for i in batch
    ]
    assert given == order
    assert [rank["len"] for rank in ranks] == [4, 4]
    assert ranks[0]["state"] == ranks[1]["state"]
    loader = Loader(Numbers(50), batch_size=3, shuffle=True, seed=4)
    loader.load_state_dict(ranks[0]["state"])
    assert flat(loader) == order[32:]


# Prefetch plans.


def objects(cloud, n, **options):
    for i in range(n):
        cloud.put(f"d/{i:03}", noise(100 + i, i))
    return Objects(cloud.url("d"), n, **options)


def cached_objects(cloud, n):
    dataset = objects(cloud, n)
    dataset.fs.cat(list(dataset.items(range(n))))
    dataset.fs._objects.engine.drain(120)
    cloud.asked()
    return dataset


def declared(dataset, monkeypatch, *, in_any_case=False):
    """Return the lists of items declared to the filesystem from now on, one for each plan.

    With `in_any_case`, the loaders take no epoch for cached.
    """
    real, calls = dataset.fs.prefetch, []
    if in_any_case:
        monkeypatch.setattr(SampleReader, "is_cached", lambda self, indexes: False)

    def prefetch(items):
        calls.append([])

        def recorded():
            for item in items:
                calls[-1].append(item)
                yield item

        return real(recorded())

    monkeypatch.setattr(dataset.fs, "prefetch", prefetch)
    return calls


def numbers_of(items):
    return [int(item.rpartition("/")[2]) for item in items]


def test_consecutive_epochs_are_one_plan(cloud, monkeypatch):
    dataset = objects(cloud, 30)
    calls = declared(dataset, monkeypatch, in_any_case=True)
    with Loader(dataset, batch_size=4, shuffle=True) as loader:
        for _ in range(3):
            assert len(list(loader)) == 8
        until(lambda: len(calls[0]) == 120)
    assert numbers_of(calls[0]) == [i for epoch in range(4) for i in order_of(30, epoch=epoch)]
    assert (len(calls), cloud.asked()) == (1, ["media"] * 30)


class Ranges(Samples):
    """Samples of 8 KiB of one object, `step` bytes from the start of one to the next."""

    size = 8 * KiB

    def __init__(self, url, n, step=size, **options):
        super().__init__(url, **options)
        self.n, self.step = n, step

    def __len__(self):
        return self.n

    def __getitems__(self, indexes):
        paths, starts, stops = zip(*self.items(indexes), strict=True)
        return [len(data) for data in self.fs.cat_ranges(list(paths), list(starts), list(stops))]

    def items(self, indexes):
        return ((self.path, self.step * index, self.step * index + self.size) for index in indexes)


def test_samples_in_the_same_block_are_declared_once_a_step(cloud, monkeypatch):
    cloud.put("d", noise(40 * Ranges.size))
    options = {"cachedfs": {"block_size": 8 * Ranges.size}, **cloud.options}
    dataset = Ranges(cloud.url("d"), 40, storage_options=options)
    calls = declared(dataset, monkeypatch, in_any_case=True)
    with Loader(dataset, batch_size=4, shuffle=True) as loader:
        assert [size for batch in loader for size in batch.tolist()] == [Ranges.size] * 40
        until(lambda: len(calls[0]) >= 40)  # some are of the next epoch
    expected, latest = [], {}
    for place, number in enumerate(order_of(40)):
        if place - latest.get(number // 8, -4) >= 4:
            latest[number // 8] = place
            expected.append(number)
    assert [start // Ranges.size for _, start, _ in calls[0]][: len(expected)] == expected
    assert len(expected) < 30


def test_an_epoch_that_is_cached_is_not_declared(cloud, monkeypatch):
    monkeypatch.setattr("cachedfs.datasets.prefetch_plan.CHECK_EVERY_S", math.inf)
    dataset = cached_objects(cloud, 30)
    calls = declared(dataset, monkeypatch)
    loader = Loader(dataset, batch_size=4, shuffle=True)
    for _ in range(3):
        assert len(list(loader)) == 8
    assert (calls, cloud.asked()) == ([[]], [])
    dataset.fs.evict(cloud.path("d/007"))
    for _ in range(2):
        assert len(list(loader)) == 8
    loader.close()
    assert cloud.asked() == ["media"]


def test_what_is_evicted_during_an_epoch_that_was_cached_is_declared(cloud, monkeypatch):
    monkeypatch.setattr("cachedfs.datasets.prefetch_plan.CHECK_EVERY_S", 0.0)
    dataset = cached_objects(cloud, 30)
    calls = declared(dataset, monkeypatch)
    found, is_cached = [], SampleReader.is_cached
    monkeypatch.setattr(SampleReader, "is_cached", lambda *args: found.append(is_cached(*args)) or found[-1])
    with Loader(dataset, batch_size=4, shuffle=True, n_threads=1, n_prefetch=0) as loader:
        for step, _ in enumerate(loader):
            if step == 2:
                until(lambda: found == [True, True])  # this epoch and the next
                dataset.fs.evict(cloud.path("d"))
        until(lambda: len(calls) == 2 and calls[1])
        n_left = 30 - order_of(30).index(numbers_of(calls[1])[0])
        until(lambda: numbers_of(calls[1])[:n_left] == order_of(30)[-n_left:])
    assert (calls[0], n_left) in [([], 18), ([], 14), ([], 10)]


@pytest.mark.parametrize("n_threads", [1, pytest.param(8, marks=pytest.mark.stress)])
def test_epochs_over_more_data_than_the_cache_holds_hit_what_it_holds(cloud, own_cache, n_threads):
    n, block = 160, 64 << 10
    for i in range(n):
        cloud.put(f"d/{i:03}", noise(block, i))
    options = {"cachedfs": {"cache_size": n * block // 2, "block_size": block}, **cloud.options}
    dataset = FileDataset(cloud.url("d"), decode=len, storage_options=options)
    engine, fetched = dataset.fs._objects.engine, []
    with Loader(dataset, batch_size=8, shuffle=True, n_threads=n_threads) as loader:
        for _ in range(3):
            for _batch in loader:
                engine.drain(120)  # else blocks that wait for the disk are a second cache
            fetched.append(dataset.fs.stats().bytes_fetched)
    n_fit = dataset.fs.stats().blocks
    hit_ratio = 1 - (fetched[-1] - fetched[0]) / block / n / 2
    tally(f"{n_fit} of {n} fit, {n_threads} threads: hit ratio {hit_ratio:.3f}")
    # Blocks on their way to the disk vary. LRU would hit 0.03 of them.
    assert hit_ratio >= n_fit / n - 0.05


def test_a_plan_starts_at_the_position_and_at_the_next_epoch_after_a_break(cloud, monkeypatch):
    dataset = objects(cloud, 30)
    calls = declared(dataset, monkeypatch, in_any_case=True)
    with Loader(dataset, batch_size=4, shuffle=True) as loader:
        loader.load_state_dict(loader.state_dict() | {"position": 20})
        left_by_break(loader)
        left_by_break(loader)
        loader.set_epoch(5)
        list(loader)
        until(lambda: len(calls[2]) == 60)
    assert len(calls) == 3
    assert order_of(30)[20:][: len(calls[0])] == numbers_of(calls[0])[:10]
    assert order_of(30, epoch=1)[: len(calls[1])] == numbers_of(calls[1])[:30]
    assert numbers_of(calls[2]) == order_of(30, epoch=5) + order_of(30, epoch=6)


def torchrun(rank, world_size, local_rank, n_local):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, world_size, local_rank, n_local)), strict=True))


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "expected"),
    [
        (3, 8, {}, [3]),
        (4, 8, torchrun(4, 8, 0, 4), [4, 5, 6, 7]),
        (5, 8, torchrun(5, 8, 1, 4), []),  # the first of its machine declares for it
        (1, 2, torchrun(5, 8, 1, 4), [1]),  # ranks other than those of torchrun, as in model parallelism
        (3, 8, {"RANK": "3", "WORLD_SIZE": "8"}, [3]),
        (3, 8, {"RANK": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, [3]),
    ],
)
def test_the_ranks_whose_reads_a_process_declares(rank, world_size, environment, expected):
    assert list(ranks_here(rank, world_size, environment)) == expected


def test_one_process_per_machine_declares_the_reads_of_its_ranks(cloud, monkeypatch):
    dataset = objects(cloud, 30)
    calls = declared(dataset, monkeypatch, in_any_case=True)
    for name, value in {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    order = order_of(30)
    with Loader(dataset, batch_size=2, shuffle=True, rank=0, world_size=3) as loader:
        list(loader)
        until(lambda: len(calls[0]) == 40)
    steps = [order[i : i + 6][:4] for i in range(0, 30, 6)]
    assert numbers_of(calls[0])[:20] == [i for step in steps for i in step]


def test_a_failing_plan_is_no_error(cloud, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="cachedfs.datasets")
    dataset = objects(cloud, 12)

    def refused(items):
        raise OSError("not today")

    monkeypatch.setattr(dataset.fs, "prefetch", refused)
    with Loader(dataset, batch_size=4) as loader:
        assert len(list(loader)) == 3
    assert "not today" in caplog.text


def test_a_plan_that_failed_is_started_again_at_the_position(cloud, monkeypatch):
    monkeypatch.setattr("cachedfs.datasets.prefetch_plan.CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(SampleReader, "is_cached", lambda self, indexes: False)
    dataset, real, calls, may_fail = objects(cloud, 30), Objects.items, [], threading.Event()

    def items(indexes):
        calls.append([])
        for index in indexes:
            if len(calls) == 1 and len(calls[0]) == 8:
                may_fail.wait(120)
                raise OddOne("of the plan")
            calls[-1].append(index)
            yield from real(dataset, [index])

    dataset.items = items
    with Loader(dataset, batch_size=4) as loader:
        for step, _ in enumerate(loader):
            if step == 3:
                may_fail.set()
                until(lambda: loader._plan._plan.progress.is_over)
        until(lambda: list(map(len, calls)) == [8, 14, 30])
    assert calls == [list(range(8)), list(range(16, 30)), list(range(30))]


def test_a_subset_of_a_dataset_is_declared(cloud, monkeypatch):
    dataset = objects(cloud, 30)
    calls = declared(dataset, monkeypatch, in_any_case=True)
    part = Subset(Subset(dataset, range(10, 30)), [5, 3, 8, 1])
    with Loader(part, batch_size=3) as loader:
        assert [size for batch in loader for size in batch[0].tolist()] == [115, 113, 118, 111]
        until(lambda: len(calls[0]) == 8)
    assert numbers_of(calls[0]) == [15, 13, 18, 11] * 2
    assert cloud.asked() == ["media"] * 4


def test_groups_are_those_of_the_dataset_and_of_contiguous_subsets(cloud):
    dataset = Objects(cloud.url("d"), 90)
    dataset.group_size = 10
    cases = [(dataset, 10), (Subset(dataset, range(10, 90)), 10), (Subset(dataset, [1, 3]), 1)]
    for part, group_size in cases:
        assert Loader(part, shuffle="window").state_dict()["group_size"] == group_size


def test_readahead_is_not_inferred_from_declared_reads(cloud, monkeypatch):
    """Otherwise the rest of the object is requested before the samples of the next batch."""
    cloud.put("large", noise(64 * MiB))
    dataset = Ranges(cloud.url("large"), 64, step=MiB)
    # As where another process of the machine has the plan.
    monkeypatch.setattr(dataset.fs, "prefetch", lambda items: None)
    dataset.fs.info(cloud.path("large"))
    with Loader(Subset(dataset, range(0, 64, 4)), batch_size=8, shuffle=True) as loader:
        list(loader)
    until(lambda: not dataset.fs._objects.engine.active_requests)
    assert dataset.fs.stats().bytes_fetched <= 16 * MiB  # the blocks that contain the samples
