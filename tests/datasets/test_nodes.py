"""Node shuffle: parts of equal bytes, orders within them, changes of the number of nodes, and the place of a process."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachedfs.datasets.nodes import (
    NodeOrders,
    Ranks,
    StoredObjects,
    cuts,
    name_keys,
    nodes_of,
    ranks_on_nodes,
    run_keys,
    run_size,
)
from cachedfs.datasets.sampler import EpochOrders, EpochPosition, RankDivision, place_in, state_at

# Parts.


@example(sizes=[1 << 56] * 60, n_parts=8)  # whose sum, times the parts, is more than 64 bits hold
@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60), n_parts=st.integers(1, 12))
def test_parts_have_equal_bytes_to_one_object_and_none_is_empty(sizes, n_parts):
    if len(sizes) < n_parts:
        with pytest.raises(ValueError, match=f"{len(sizes)} objects cannot be divided among {n_parts} nodes"):
            cuts(np.array(sizes), n_parts)
        return
    found = cuts(np.array(sizes), n_parts).tolist()
    assert (found[0], found[-1], len(found)) == (0, len(sizes), n_parts + 1)
    assert found == sorted({*found})
    sizes = [max(1, size) for size in sizes]
    for start, stop in itertools.pairwise(found):
        assert abs(sum(sizes[start:stop]) - sum(sizes) / n_parts) <= max(sizes)


objects = st.builds(
    lambda keys, size: StoredObjects(
        np.array(keys, np.uint64), np.array([key * size for key in keys]) if size else None
    ),
    keys=st.lists(st.integers(0, 40), max_size=80),
    size=st.integers(0, 3),
)


@given(objects=objects, n_nodes=st.integers(1, 5))
def test_an_object_is_on_one_node_and_nodes_have_ranges_of_keys(objects, n_nodes):
    if 0 < len({*objects.keys.tolist()}) < n_nodes:
        return
    nodes = objects.nodes(n_nodes)
    by_key = {}
    for key, node in zip(objects.keys.tolist(), nodes.tolist(), strict=True):
        assert by_key.setdefault(key, node) == node
    in_order = [by_key[key] for key in sorted(by_key)]
    assert in_order == sorted(in_order)
    assert {*in_order} == ({*range(n_nodes)} if in_order else set())


def test_hashes_are_the_same_in_every_version_and_runs_are_whole_groups():
    assert name_keys(["bucket/a", "bucket/\udcff"], 2).tolist() == [7681352253139410758, 16269514451672268651]
    a, b, c = 213000021201967259, 4455796210202625458, 2055444239878205049
    assert run_keys(5, 2).tolist() == [a, a, b, b, c]
    assert [run_size(256), run_size(257), run_size(100_000, 7)] == [1, 2, 7 * 56]


def test_another_number_of_nodes_or_another_file_moves_little():
    keys = name_keys(map(str, range(10_000)), 10_000)
    of_4, of_8 = (StoredObjects(keys).nodes(n) for n in (4, 8))
    assert (of_8 // 2 == of_4).all()
    more = StoredObjects(np.concatenate([name_keys(["new"], 1), keys])).nodes(4)[1:]
    assert (more != of_4).sum() <= 3


# Orders.

N = 60
DATA = StoredObjects(run_keys(N, 2), np.random.default_rng(0).integers(1, 9, N) * 10)


def epochs_of(objects, seed=5):
    return EpochOrders(len(objects.keys), seed, "node", objects=objects.checksum)


def orders_of(n_nodes, n_local=1, *, objects=DATA, drop_last=False, pad=True):
    """Return the orders of each node."""
    world_size = n_nodes * n_local
    return [
        NodeOrders(epochs_of(objects), objects, Ranks(rank, world_size, n_nodes), 1, drop_last, pad)
        for rank in range(0, world_size, n_local)
    ]


@given(n_nodes=st.integers(1, 6), epoch=st.integers(0, 5))
def test_every_node_shuffles_the_same_samples_in_every_epoch(n_nodes, epoch):
    whole = EpochOrders(N, 5, "full").order(epoch).tolist()
    nodes = DATA.nodes(n_nodes)
    for node, orders in enumerate(orders_of(n_nodes, pad=False)):
        order, n_positions = orders.at(EpochPosition(epoch, n_nodes=n_nodes))
        assert order.tolist() == [i for i in whole if nodes[i] == node]
        assert (orders.n, orders.n_positions) == (len(order), n_positions)


@given(n_nodes=st.integers(1, 6), drop_last=st.booleans())
def test_all_nodes_get_equally_many(n_nodes, drop_last):
    place = EpochPosition(0, n_nodes=n_nodes)
    own = [orders.at(place)[0].tolist() for orders in orders_of(n_nodes, pad=False)]
    n = (min if drop_last else max)(map(len, own))
    for mine, orders in zip(own, orders_of(n_nodes, drop_last=drop_last), strict=True):
        order, n_positions = orders.at(place)
        assert order.tolist() == np.resize(mine, n).tolist()
        assert orders.n == orders.n_positions == n_positions == n


runs = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 8))


@given(runs=st.lists(runs, max_size=5), pad=st.booleans())
def test_any_changes_of_nodes_ranks_and_batches_keep_each_sample_once(runs, pad):
    epochs, place, read = epochs_of(DATA), EpochPosition(3), []
    for n_nodes, n_local, batch_size, n_steps in [*runs, (2, 2, 3, N)]:
        place = place_in(json.loads(json.dumps(state_at(place, epochs))), epochs).on_nodes(n_nodes)
        division = RankDivision(0, batch_size, n_local, pad=pad)
        after, sizes = place.position, set()
        for node in range(n_nodes):
            order, n_positions = orders_of(n_nodes, n_local, pad=pad)[node].at(place)
            own, _ = orders_of(n_nodes, n_local, pad=False)[node].at(place)
            positions = dataclasses.replace(division, n=n_positions)
            after, made = place.position, 0
            while made < n_steps and not positions.is_over(after):
                after, made = positions.after(after), made + 1
            division = dataclasses.replace(division, n=len(order))
            ranks = [
                [*division.batches(order, range(r, r + 1), place.position)][:made] for r in range(n_local)
            ]
            batches = [[batch.tolist() for batch in rank] for rank in ranks]
            steps = range(max(map(len, batches)))
            mine = [i for s in steps for rank in batches if s < len(rank) for i in rank[s]]
            expected = own[place.position : after].tolist()
            read += expected
            assert mine[: len(expected)] == expected
            assert {*mine[len(expected) :]} <= {*np.flatnonzero(DATA.nodes(n_nodes) == node).tolist()}
            sizes |= {tuple(map(len, rank)) for rank in batches}
            assert pad or len(mine) == len(expected)
        assert not pad or len(sizes) == 1  # all ranks have equally many batches of the same sizes
        place = dataclasses.replace(place, position=after)
    assert sorted(read) == list(range(N))


# States.


def test_only_the_state_of_a_node_shuffle_names_nodes():
    state = state_at(EpochPosition(1, 20, 2, ((4, 8),)), epochs_of(DATA))
    plain = state_at(EpochPosition(1, 20), EpochOrders(N, 5, "full"))
    added = {"n_nodes": 2, "earlier": [[4, 8]], "objects": DATA.checksum}
    assert state == plain | {"shuffle": "node"} | added
    with pytest.raises(ValueError, match="the state has shuffle='full', and here it is 'node'"):
        place_in(plain, epochs_of(DATA))


def test_a_state_within_an_epoch_of_other_files_is_refused():
    others = StoredObjects(DATA.keys, DATA.sizes + 1)
    assert others.checksum != DATA.checksum != StoredObjects(DATA.keys).checksum
    with pytest.raises(ValueError, match=r"not those of the state: .*Call set_epoch\(2\) to begin it again"):
        place_in(state_at(EpochPosition(2, 8, 2), epochs_of(DATA)), epochs_of(others))
    with pytest.raises(ValueError, match="not those of the state"):
        place_in(state_at(EpochPosition(2, 0, 2, ((1, 8),)), epochs_of(DATA)), epochs_of(others))
    begun = EpochPosition(2, n_nodes=2)
    assert place_in(state_at(begun, epochs_of(DATA)), epochs_of(others)) == begun


# The place of a process.

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("ranks", "nodes", "environment", "expected"),
    [
        (None, None, TORCHRUN, (1, 0, 0, 1)),  # torch.distributed is not initialized
        (None, (4, 3), {}, (4, 3, 0, 1)),
        ((0, 1), None, SLURM, (1, 0, 0, 1)),
        ((5, 8), (2, None), {}, (2, 1, 1, 4)),
        ((5, 8), (8, 5), TORCHRUN, (8, 5, 0, 1)),  # what is given counts
        ((5, 8), None, TORCHRUN | SLURM | {"SLURM_NNODES": "4"}, (2, 1, 1, 4)),
        ((5, 8), None, SLURM | {"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "2"}, (2, 1, 1, 4)),
        ((5, 8), None, SLURM | TORCHRUN | {"RANK": "7"}, (2, 1, 1, 4)),  # not the ranks of torchrun
    ],
)
def test_the_place_of_a_process(ranks, nodes, environment, expected):
    found = ranks_on_nodes(ranks, nodes, environment)
    assert (found.n_nodes, found.node, found.local_rank, found.n_local) == expected


@pytest.mark.parametrize(
    ("ranks", "nodes", "environment", "message"),
    [
        (None, (4, None), {}, "n_nodes=4: give node_rank, too, or rank and world_size"),
        ((5, 8), None, {}, "on how many nodes the 8 ranks are: give n_nodes"),
        ((5, 8), (3, None), {}, "world_size=8 ranks on n_nodes=3"),
        ((5, 8), (2, 0), {}, "rank 5 of 8 is on node 0 of 2, but must be on node 1"),
        ((1, 8), None, SLURM, "the ranks of a node must be adjacent"),
        (None, (None, 1), {}, "node_rank=1: give n_nodes, too"),
        (None, (2, 2), {}, "node_rank=2: expected 0 to 1, because n_nodes=2"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(ranks, nodes, environment, message):
    with pytest.raises(ValueError, match=message):
        ranks_on_nodes(ranks, nodes_of(*(nodes or (None, None))), environment)


def test_local_ranks_are_those_of_this_node():
    here = Ranks(5, 8, 2)
    ranks = [range(4, 8), range(5, 6), range(4)]
    assert [here.on_this_node(each) for each in ranks] == [range(4), range(1, 2), range(0)]
    assert Ranks(5, 8).on_this_node(range(4, 8)) == range(4, 8)
