"""Epoch order: each sample once, stable across versions, well mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.datasets.sampler import EpochOrders

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
def test_the_order_is_the_same_in_every_version(shuffle, first):
    order = EpochOrders(100, 7, shuffle, group_size=4, window=3).order(3)
    assert order[:8].tolist() == first


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_every_seed_and_epoch_has_another_order(shuffle):
    orders = {
        tuple(EpochOrders(1000, seed, shuffle, group_size=4, window=8).order(epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


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


def test_a_window_contains_few_groups_at_a_time():
    order = EpochOrders(N, 1, "window", 16, GROUP).order(0)
    position = np.empty(N, dtype=int)
    position[order] = np.arange(N)
    begun, over = position.reshape(-1, GROUP).min(axis=1), position.reshape(-1, GROUP).max(axis=1)
    at_once = [np.count_nonzero((begun <= at) & (at <= over)) for at in range(0, N, 997)]
    assert max(at_once) <= 6 * 16
