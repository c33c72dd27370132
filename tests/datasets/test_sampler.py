"""Order of an epoch, its division by ranks, batches and interruptions, and saved states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.datasets.sampler import VERSION, EpochOrders, EpochPosition, RankDivision, place_in, state_at

# Order.

N, GROUP, BATCH = 131_072, 64, 64


@given(
    n=st.integers(0, 500),
    seed=st.integers(-5, 1 << 70),
    epoch=st.integers(0, 1 << 40),
    shuffle=st.sampled_from(["full", "window", None]),
    group_size=st.integers(1, 60),
    window=st.integers(1, 9),
)
def test_every_sample_occurs_once(n, epoch, **options):
    assert sorted(EpochOrders(n, **options).order(epoch)) == list(range(n))


@pytest.mark.parametrize(
    ("shuffle", "first"),
    [
        ("full", [65, 72, 2, 23, 62, 34, 18, 35]),
        ("window", [9, 10, 92, 73, 95, 72, 23, 21]),
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_order_is_the_same_in_every_version_and_another_for_each_seed_and_epoch(shuffle, first):
    orders = {
        (seed, epoch): tuple(EpochOrders(100, seed, shuffle, group_size=4, window=3).order(epoch).tolist())
        for seed in range(5, 9)
        for epoch in range(5)
    }
    assert [*orders[7, 3][:8]] == first
    assert len({*orders.values()}) == (20 if shuffle else 1)


# Measures of full permutations and of sliding windows, to compare a batch with: the number of distinct groups in it,
# and the entropy in bits of 100 labels by which the samples are sorted.
@pytest.mark.parametrize(
    ("shuffle", "window", "groups", "entropy"),
    [("full", 0, 63.0, 5.44), ("window", 16, 31.2, 4.45), ("window", 64, 51.0, 5.15)],
)
def test_a_batch_is_as_diverse_as_documented(shuffle, window, groups, entropy):
    order = EpochOrders(N, 1, shuffle, window, GROUP).order(0)
    batches = order.reshape(-1, BATCH)
    assert np.mean([len(np.unique(batch // GROUP)) for batch in batches]) >= groups - 0.2
    shares = np.stack([np.bincount(batch * 100 // N, minlength=100) for batch in batches]) / BATCH
    bits = -np.sum(shares * np.log2(shares, where=shares > 0, out=np.zeros_like(shares)), axis=1)
    assert bits.mean() >= entropy - 0.02


# Division.

divisions = st.builds(
    RankDivision,
    n=st.integers(0, 200),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 9),
    drop_last=st.booleans(),
    pad=st.booleans(),
)


def batches_of(division, order, rank, position=0):
    return [batch.tolist() for batch in division.batches(order, range(rank, rank + 1), position)]


@given(division=divisions)
def test_all_ranks_together_yield_the_order(division):
    order = np.random.default_rng(0).permutation(division.n)
    ranks = [batches_of(division, order, rank) for rank in range(division.world_size)]
    n_steps = max(map(len, ranks))
    given = [i for step in range(n_steps) for rank in ranks for i in (rank[step] if step < len(rank) else [])]
    if division.pad or division.drop_last:  # all ranks have equally many batches of the same sizes
        assert len({tuple(map(len, rank)) for rank in ranks}) == 1
    if division.drop_last:
        assert given == order[: division.n // division.step * division.step].tolist()
    else:
        assert given[: division.n] == order.tolist()
        # Repeated samples are from the beginning, at most one per rank.
        extra = given[division.n :]
        assert len(extra) < division.world_size
        assert extra == [] or (division.pad and extra == np.resize(order, len(extra)).tolist())


@given(division=divisions, rank=st.integers(0, 8), position=st.integers(0, 200))
def test_the_number_of_batches_is_known_in_advance(division, rank, position):
    rank, position = rank % division.world_size, min(position, division.n)
    order = np.arange(division.n)
    assert division.n_batches(rank, position) == len(batches_of(division, order, rank, position))
    assert division.is_over(position) == (
        not any(division.n_batches(r, position) for r in range(division.world_size))
    )
    after = division.after(position)
    assert after == division.n or (after == position + division.step and not division.is_over(after))


@given(division=divisions, first=st.integers(0, 8), n=st.integers(1, 9))
def test_a_machine_reads_what_its_ranks_read_step_by_step(division, first, n):
    first = first % division.world_size
    ranks = range(first, min(first + n, division.world_size))
    order = np.random.default_rng(0).permutation(division.n)
    together = [i for batch in division.batches(order, ranks) for i in batch.tolist()]
    each = [batches_of(division, order, rank) for rank in ranks]
    n_steps = max(map(len, each))
    assert together == [i for step in range(n_steps) for rank in each if step < len(rank) for i in rank[step]]


parts = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(0, 12))  # ranks, batch size, steps made


@given(n=st.integers(0, 300), parts=st.lists(parts, max_size=6), pad=st.booleans())
def test_any_interruptions_keep_each_sample_once_and_in_order(n, parts, pad):
    order = np.random.default_rng(0).permutation(n)
    position, given, extra = 0, [], []
    for world_size, batch_size, n_steps in [*parts, (1, 7, n)]:
        division = RankDivision(n, batch_size, world_size, pad=pad)
        ranks = [batches_of(division, order, rank, position) for rank in range(world_size)]
        for step in range(min(n_steps, max(map(len, ranks)))):
            now = [i for rank in ranks if step < len(rank) for i in rank[step]]
            n_left = n - position
            given += now[:n_left]
            extra += now[n_left:]
            position = division.after(position)
    assert given == order.tolist()
    assert position == n
    assert len(extra) < 9
    assert not extra or pad


# States.

EPOCHS = EpochOrders(n=100, seed=3, shuffle="window", window=8, group_size=4)


@pytest.mark.parametrize(
    ("name", "value"), [("n", 99), ("seed", 4), ("shuffle", "full"), ("window", 9), ("group_size", 5)]
)
def test_a_state_of_another_order_is_refused_with_the_difference(name, value):
    state = state_at(EpochPosition(1, 50), EPOCHS) | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value!r}, and here it is {getattr(EPOCHS, name)!r}"):
        place_in(state, EPOCHS)


def test_options_that_do_not_change_the_order_may_differ():
    plain, full = (EpochOrders(n=100, seed=3, shuffle=shuffle) for shuffle in (None, "full"))
    place = EpochPosition(1, 50)
    assert place_in(state_at(place, plain) | {"seed": 4, "window": 1}, plain) == place
    assert place_in(state_at(place, full) | {"group_size": 9, "window": 1}, full) == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION + 1}, "version 2"),
        ({"version": None}, "version None"),
        ({"position": 101}, "101 of 100"),
        ({"position": -1}, "no such place"),
        ({"epoch": -1}, "no such place"),
    ],
)
def test_an_invalid_state_is_refused(change, message):
    state = state_at(EpochPosition(1, 50), EPOCHS)
    with pytest.raises(ValueError, match=message):
        place_in(state | change, EPOCHS)
    del state["position"], state["seed"]
    with pytest.raises(ValueError, match="it has no position, seed"):
        place_in(state, EPOCHS)
