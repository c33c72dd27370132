"""Prefetch in a known order: how much the server sends, and which blocks count as the plan's."""

import random
import threading
from itertools import takewhile

import fsspec
import pytest

from cachedfs.cache.block_file import file_size
from cachedfs.cache.eviction.future_uses import FutureUses, Use
from cachedfs.errors import CachedFSError, CacheError
from cachedfs.sim import Fault
from tests.support import noise, until

BLOCK = 64 << 10


class Plan:
    """An order over the blocks of one object; what it names is fetched unless it is in the cache."""

    def __init__(self, fs, path):
        self.fs, self.path, self.engine, self.downloads = fs, path, fs._objects.engine, fs._reader.downloads
        fs.info(path)
        self.known = fs._objects.known(path)
        self.key = fs._objects.version(self.known)
        self.order = FutureUses(self.engine.cache, fs._objects.config.bounds, window=8 * BLOCK)
        self.engine.run(self.begin())

    async def begin(self):
        self.engine.future_uses.append(self.order)

    def uses(self, indexes):
        return [Use(index, (self.key, index), BLOCK) for index in indexes]

    def asked(self, indexes):
        """Return what may be asked for of these blocks, in their order."""
        return [use.block for use in takewhile(self.order.ask, self.uses(indexes))]

    async def send(self, indexes):
        for key, index in self.asked(indexes):
            self.downloads.launch(key, [index])


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("cachedfs.prefetch.plan.POLL_S", (0.001, 0.005))


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem(
        "cachedfs", target_protocol="gs", cache_size=189 * BLOCK, block_size=BLOCK, read_ahead=0
    )


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


def fewest(order, room):
    """Return how many blocks a cache of `room` blocks that knows all of the order fetches: by Belady's rule, with bypass."""
    following, after = [0] * len(order), {}
    for at in reversed(range(len(order))):
        following[at] = after.get(order[at], len(order))
        after[order[at]] = at
    here, n_misses = {}, 0
    for block, use in zip(order, following, strict=True):
        n_misses += block not in here
        here[block] = use
        if len(here) > room:
            del here[max(here, key=here.get)]
    return n_misses


def is_best(order, room, sent, window):
    """Whether so little was sent as can be: at best with all the room, at worst with a window less, for what comes."""
    return fewest(order, room) <= sent <= fewest(order, room - window)


def test_an_epoch_of_more_items_than_are_known_at_first_is_removed_by_its_order_too(cloud, monkeypatch):
    monkeypatch.setattr("cachedfs.prefetch.plan.NEAR", 8)
    fs, path, n = with_room_for_half(cloud, cache_size=60 * BLOCK)
    chance = random.Random(0)
    order = [index for _ in range(3) for index in chance.sample(range(n), n)]
    assert is_best(order, n // 2, read_with_prefetch(cloud, fs, path, order, window=8), window=8)


def test_prefetch_gives_up_what_it_reads_furthest_ahead(cloud):
    fs, path, n = with_room_for_half(cloud, cache_size=60 * BLOCK)
    chance, units = random.Random(0), [unit for unit in range(n) for _ in range(16)]
    order = chance.sample(units, 4 * n)
    assert is_best(order, n // 2, read_with_prefetch(cloud, fs, path, order, window=8), window=8)
    assert not fs._objects.engine.future_uses


def test_what_comes_for_a_plan_is_told_to_it_and_what_cannot_be_stored_as_well(cloud, fs, monkeypatch):
    engine = fs._objects.engine
    plan = Plan(fs, filled(cloud, 8))
    plan.order.add(plan.uses(range(8)))
    engine.run(plan.send(range(8)))
    until(lambda: not engine.by_block)
    assert plan.order.taken == 8 * file_size(plan.key, BLOCK)
    engine.cache.evict(plan.key.identity)
    plan.order.lost([(plan.key, index) for index in range(8)])
    assert plan.order.taken == 0
    monkeypatch.setattr(engine.cache, "put", refuse)
    engine.run(plan.send(range(8)))
    until(lambda: plan.order.taken == 0)
    assert len(plan.asked(range(8))) == 8


def test_what_could_not_be_had_takes_no_room_of_the_plan(cloud, fs):
    folder, going_on = "d", threading.Event()
    for i in range(8):
        cloud.put(f"{folder}/{i}", noise(BLOCK, i))
    paths = fs.find(cloud.path(folder))  # so that the plan knows them from the start
    cloud.server.fail(Fault(kind="media", key=f"{folder}/3", status=403, times=None))
    plan = fs.prefetch(held(paths, going_on))
    until(lambda: plan.progress.items == 8)
    assert plan.progress.errors == 1
    (order,) = fs._objects.engine.future_uses
    key = fs._objects.version(fs._objects.known(paths[0]))
    until(lambda: order.taken == 7 * file_size(key, BLOCK))
    going_on.set()
    with pytest.raises(CachedFSError, match=f"{folder}/3"):
        plan.wait(120)


def held(items, going_on):
    """Yield the items, and end once the event is set."""
    yield from items
    assert going_on.wait(120)


def refuse(*args, **options):
    raise CacheError("the disk is full")


def test_what_a_reader_fetches_ahead_of_its_plan_counts_as_the_plans(cloud, fs):
    plan = Plan(fs, filled(cloud, 8))
    plan.order.add(plan.uses(range(4)))
    fs.cat_file(plan.path)
    fs._objects.engine.drain(120)
    assert plan.order.taken == 4 * file_size(plan.key, BLOCK)
