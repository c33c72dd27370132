"""Admission to the cache: simulated, then through the whole stack."""

import collections
import random
from types import SimpleNamespace

import fsspec
import pytest

from cachedfs.cache.access_stats import AccessStats, age
from cachedfs.cache.space import admits
from tests.support import noise

BLOCKS = 300  # of the data set


class Ours:
    """The rule and the touch records of the cache, with an ordered dictionary for its blocks and its staging."""

    def __init__(self, size, staging=0):
        self.size, self.staging = size - staging, staging
        self.blocks, self.staged = collections.OrderedDict(), collections.OrderedDict()
        self.accesses = AccessStats()
        self.accesses.open(1 << 28)
        self.accesses.fit(size)

    def touch(self, block):
        if block in self.blocks or block in self.staged:
            self.accesses.touch(key_of(block), 0)
            if block in self.blocks:
                self.blocks.move_to_end(block)
            return True
        self.accesses.touch(key_of(block), 0, passes=False)
        self.accesses.touch(key_of(block), 0)
        self.staged[block] = True
        if len(self.staged) > self.staging:
            self.settle(self.staged.popitem(last=False)[0])
        return False

    def settle(self, block):
        if len(self.blocks) >= self.size:
            old, accesses = next(iter(self.blocks)), self.accesses
            access, last = accesses.of(key_of(block).number), accesses.of(key_of(old).number)
            idle = age(last.clock, accesses.now)
            if not admits(access, last, idle=idle, longest_gap=accesses.longest_gap):
                return
            del self.blocks[old]
        self.blocks[block] = True


def key_of(block, known={}):  # noqa: B006  # remembered on purpose: hashing is most of the simulation
    if block not in known:
        known[block] = SimpleNamespace(number=random.Random(block).getrandbits(64))
    return known[block]


def passes(cache, n, times, *, first=0, shuffled=True, seed=0):
    """Return the hit ratio of each pass over n blocks."""
    chance, ratios = random.Random(seed), []
    for _ in range(times):
        order = list(range(first, first + n))
        if shuffled:
            chance.shuffle(order)
        ratios.append(sum(cache.touch(block) for block in order) / n)
    return ratios


@pytest.mark.parametrize(("share", "shuffled"), [(0.1, False), (0.75, True)])
def test_forty_epochs_over_more_than_fits_hit_the_part_that_fits(share, shuffled):
    size, staging = round(BLOCKS * share), round(BLOCKS * share * 0.05)
    for ours, part in ((Ours(size), share), (Ours(size + staging, staging), share)):
        assert min(passes(ours, BLOCKS, 40, shuffled=shuffled)[1:]) >= part - 0.01


@pytest.mark.parametrize("n", [100, 400])
def test_a_new_data_set_is_warm_on_its_second_pass_as_far_as_it_fits(n):
    cache = Ours(200)
    passes(cache, 400, 10)
    _, second, third = passes(cache, n, 3, first=10_000)
    assert min(second, third) >= min(1.0, 200 / n) - 0.01


def test_one_scan_of_three_times_the_bound_costs_a_set_that_fits_one_pass():
    cache = Ours(200)
    passes(cache, 180, 5)
    passes(cache, 600, 1, first=10_000, shuffled=False)
    assert passes(cache, 180, 3)[1:] == [1.0, 1.0]


# The same through the whole stack.
def test_one_object_larger_than_the_cache_does_not_drive_the_others_out(tmp_path):
    """The first time, nor later where the others are read in between."""
    folder, bound = tmp_path / "data", 24 << 20
    folder.mkdir()
    for number in range(30):
        (folder / str(number)).write_bytes(noise(60_000, seed=number))
    (folder / "large").write_bytes(noise(2 * bound, seed=99))
    (folder / "filler").write_bytes(noise(bound, seed=98))
    fs = fsspec.filesystem(
        "cachedfs", target_protocol="file", cache_size=bound, block_size=65536, max_age="immutable"
    )
    names, engine = [f"{folder}/{number}" for number in range(30)], fs._objects.engine

    def missed(read):
        """Return how many blocks were fetched for a read; what waits for the disk is no hit of the next one."""
        before = fs.stats().misses
        read()
        assert engine.drain(120)
        return fs.stats().misses - before

    assert [missed(lambda: fs.cat(names)) for _ in range(3)] == [30, 0, 0]
    assert missed(lambda: fs.cat_file(f"{folder}/filler")) == bound // 65536  # what is in staging goes first
    assert missed(lambda: fs.cat(names)) == 0
    for _ in range(2):
        assert missed(lambda: fs.get_file(f"{folder}/large", str(tmp_path / "copy"))) > 1.5 * bound // 65536
        assert missed(lambda: fs.cat(names)) == 0
