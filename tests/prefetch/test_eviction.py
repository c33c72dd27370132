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


def test_prefetch_gives_up_what_it_reads_furthest_ahead(cloud):
    options = {"block_size": BLOCK, "read_ahead": 0, "cache_size": 60 * BLOCK}
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", **options)
    engine, chance, window = fs._objects.engine, random.Random(0), 8
    fs.cat_file(filled(cloud, 300, "filler"))
    engine.drain(120)
    room = engine.cache.usage()[0]
    engine.cache.evict(None)
    path = filled(cloud, 2 * room)
    fs.info(path)
    order = chance.sample([index for index in range(2 * room) for _ in range(16)], 8 * room)
    cloud.server.reset()
    items = ((path, index * BLOCK + 100, index * BLOCK + 104) for index in order)
    plan = fs.prefetch(items, window=window * BLOCK)
    for at, index in enumerate(order):
        # Not more than the next item: a plan that lost a block keeps less than its window ahead.
        until(lambda at=at: plan.progress.items > at)
        engine.drain(120)  # so that what is counted does not depend on how long the disk takes
        start = index * BLOCK + 100
        assert fs.cat_file(path, start, start + 4) == index.to_bytes(4, "big")
    plan.cancel()
    # At best as with all the room, at worst as with a window less, for what comes.
    sent = cloud.server.bytes_sent() / BLOCK
    assert optimum(order, room) <= sent <= optimum(order, room - window)
    assert not engine.store_queue.plans
