"""Loader with `shuffle="node"`: what each node reads, keeps and declares, and states."""

import contextlib
import json

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Subset  # noqa: E402

from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.arguments import raise_if_ranks_differ  # noqa: E402
from cachedfs.datasets.nodes import run_keys  # noqa: E402
from cachedfs.datasets.samples import SampleReader  # noqa: E402
from tests.datasets.test_loader import flat, order_of, steps_of  # noqa: E402
from tests.support import KiB, noise  # noqa: E402


def files(cloud, n, unit=KiB):
    """Put files of 16 to 63 units; return their sizes, and a function that makes a dataset with options of cachedfs."""
    sizes = [(16 + 37 * i % 48) * unit for i in range(n)]
    for i, size in enumerate(sizes):
        cloud.put(f"d/{i:03}", noise(size, i))

    def dataset(**cachedfs):
        return FileDataset(
            cloud.url("d"), decode=len, storage_options={"cachedfs": cachedfs, **cloud.options}
        )

    return sizes, dataset


# Caches.


@pytest.mark.parametrize("n_nodes", [1, 4])
def test_nodes_keep_the_data_once_in_total_and_the_second_epoch_is_all_hits(cloud, tmp_path, n_nodes):
    sizes, dataset = files(cloud, 120, unit=16 * KiB)
    total = sum(sizes)
    with contextlib.ExitStack() as stack:
        loaders = []
        for node in range(n_nodes):
            data = dataset(cache_dir=str(tmp_path / f"node-{node}"), cache_size=int(1.2 * total / n_nodes))
            loader = Loader(data, batch_size=8, shuffle="node", n_nodes=n_nodes, node_rank=node)
            loaders.append(stack.enter_context(loader))
        cloud.asked()
        for epoch in range(3):
            read = [[size for batch in loader for size in batch.tolist()] for loader in loaders]
            assert len({*map(len, read)}) == 1
            assert cloud.asked() == (["media"] * len(sizes) if epoch == 0 else [])
            if epoch:
                assert [loader.report().hit_ratio for loader in loaders] == [1.0] * n_nodes
            for loader in loaders:
                loader.dataset.fs._objects.engine.drain(120)
        fetched = [loader.dataset.fs.stats().bytes_fetched for loader in loaders]
    assert sum(fetched) == total
    assert all(abs(each - total / n_nodes) <= max(sizes) for each in fetched)


# Orders and states.


def loaders_of(data, n_nodes, n_local=1, **options):
    return [
        Loader(
            data, shuffle="node", seed=9, rank=rank, world_size=n_nodes * n_local, n_nodes=n_nodes, **options
        )
        for rank in range(n_nodes * n_local)
    ]


@pytest.mark.parametrize(("n_nodes", "n_local"), [(1, 1), (3, 2)])
def test_after_a_kill_any_number_of_nodes_continues_with_what_is_left(n_nodes, n_local):
    loaders = loaders_of(range(1000), 2, 2, batch_size=16)
    read = steps_of(loaders, 6)
    states = {json.dumps(loader.state_dict()) for loader in loaders}
    assert len(states) == 1
    loaders = loaders_of(range(1000), n_nodes, n_local, batch_size=5, pad=False)
    for loader in loaders:
        loader.load_state_dict(json.loads(*states))
    # Once more, in the middle of what was left.
    read += steps_of(loaders, 4)
    state = loaders[0].state_dict()
    [last] = loaders_of(range(1000), 1, batch_size=7)
    last.load_state_dict(state)
    assert sorted(read + flat(last)) == list(range(1000))
    assert flat(last) == order_of(1000, epoch=1, seed=9)


def test_the_state_at_the_end_of_an_epoch_is_the_next_one():
    for loader in loaders_of(range(99), 2, batch_size=8):
        states = [loader.state_dict() for _ in loader]
        assert [(state["epoch"], state["position"]) for state in states[-2:]] == [(0, 48), (1, 0)]


# Objects.


def test_the_parts_of_files_follow_their_listed_sizes(cloud):
    sizes, dataset = files(cloud, 40)
    data = dataset()
    found = SampleReader(data).objects()
    assert found.sizes.tolist() == sizes
    assert len({*found.keys.tolist()}) == 40
    part = SampleReader(Subset(Subset(data, range(10, 40)), [5, 3, 5])).objects()
    assert part.sizes.tolist() == [sizes[15], sizes[13], sizes[15]]
    assert part.keys.tolist() == found.keys[[15, 13, 15]].tolist()
    listed = FileDataset([cloud.url(f"d/{i:03}") for i in (1, 2)], storage_options=cloud.options)
    named = SampleReader(listed).objects()
    assert (named.sizes, named.keys.tolist()) == (None, found.keys[1:3].tolist())


def test_samples_of_one_shard_stay_together(cloud):
    zarr = pytest.importorskip("zarr")
    from cachedfs.datasets import ZarrDataset

    group = zarr.create_group(cloud.url("a.zarr"), storage_options=cloud.options)
    group.create_array("x", shape=(96, 8), chunks=(2, 8), shards=(12, 8), dtype="f4")
    group.create_array("y", shape=(96,), chunks=(96,), dtype="i8")
    data = ZarrDataset(cloud.url("a.zarr"), storage_options=cloud.options)
    assert SampleReader(data).objects().keys.tolist() == run_keys(96, 12).tolist()
    assert SampleReader(range(96)).objects().keys.tolist() == run_keys(96, 1).tolist()


def test_ranks_that_found_different_files_are_refused(monkeypatch):
    mine, other = (
        Loader(range(n), shuffle="node", n_nodes=1, rank=0, world_size=1).state_dict() for n in (8, 9)
    )

    def gather(states, state):
        states[:] = [state, other]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(RuntimeError, match="rank 0 and rank 1 found different files, or other sizes"):
        raise_if_ranks_differ(mine)
