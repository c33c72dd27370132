"""Prefetch in a known order through a cache that is too small: how much the server sends."""

import random

import fsspec
import pytest

from tests.prefetch.test_belady import optimum
from tests.support import until

BLOCK = 64 << 10


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("cachedfs.prefetch.plan.POLL_S", (0.001, 0.005))


def filled(cloud, n, name="data"):
    """Put an object of n blocks, each of which has its number in it; return its path."""
    blocks = (bytes(100) + index.to_bytes(4, "big") + bytes(BLOCK - 104) for index in range(n))
    cloud.put(name, b"".join(blocks))
    return cloud.path(name)


def read_with_prefetch(cloud, fs, path, order, *, window):
    """Read in this order what is prefetched in it, never before it is here; return the blocks that the server sent."""
    cloud.server.reset()
    items = ((path, index * BLOCK + 100, index * BLOCK + 104) for index in order)
    plan = fs.prefetch(items, window=window * BLOCK)
    for at, index in enumerate(order):
        # Not more than the next item: a plan that lost a block keeps less than its window ahead.
        until(lambda at=at: plan.progress.items > at)
        fs._objects.engine.drain(120)  # so that what is counted does not depend on how long the disk takes
        start = index * BLOCK + 100
        assert fs.cat_file(path, start, start + 4) == index.to_bytes(4, "big")
    plan.cancel()
    return cloud.server.bytes_sent() / BLOCK


def with_room_for_half(cloud, **options):
    """Return a filesystem whose cache holds half of the blocks of an object, its path, and how many blocks it has."""
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=BLOCK, read_ahead=0, **options)
    fs.cat_file(filled(cloud, 300, "filler"))
    fs._objects.engine.drain(120)
    n_fit = fs._objects.engine.cache.usage()[0]
    fs._objects.engine.cache.evict(None)
    path = filled(cloud, 2 * n_fit)
    fs.info(path)
    return fs, path, 2 * n_fit


def is_best(order, room, sent, window):
    """Whether so little was sent as can be: at best with all the room, at worst with a window less, for what comes."""
    return optimum(order, room) <= sent <= optimum(order, room - window)


def test_prefetch_gives_up_what_it_reads_furthest_ahead(cloud):
    fs, path, n = with_room_for_half(cloud, cache_size=60 * BLOCK)
    chance, units = random.Random(0), [unit for unit in range(n) for _ in range(16)]
    order = chance.sample(units, 4 * n)
    assert is_best(order, n // 2, read_with_prefetch(cloud, fs, path, order, window=8), window=8)
    assert not fs._objects.engine.store_queue.plans


def test_an_epoch_of_more_items_than_are_known_at_first_is_removed_by_its_order_too(cloud, monkeypatch):
    monkeypatch.setattr("cachedfs.prefetch.plan.NEAR", 8)
    fs, path, n = with_room_for_half(cloud, cache_size=60 * BLOCK)
    chance = random.Random(0)
    order = [index for _ in range(3) for index in chance.sample(range(n), n)]
    assert is_best(order, n // 2, read_with_prefetch(cloud, fs, path, order, window=8), window=8)
