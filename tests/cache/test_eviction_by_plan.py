"""Prefetch plans and the cache: what they hit, which blocks they give up, and how two plans share one bound."""

import itertools
import random

import pytest

from cachedfs.cache.block_file import file_size
from cachedfs.cache.eviction.future_uses import FutureUses, Use
from cachedfs.common.types import CacheBounds
from tests.cache.helpers import AMPLE, content, key_of, put, room_for, start

BLOCK = 16 << 10
AT_ONCE = 4  # accesses between two looks at what is to be fetched


class Plan:
    """A plan that reads the blocks of one object, each so often in each epoch, in random order, known one epoch ahead."""

    def __init__(self, cache, bounds, n, *, touches=16, seed=0, path="b/planned"):
        self.cache, self.bounds, self.n = cache, bounds, n
        self.key = key_of(path, block_size=BLOCK)
        self.chance, self.units = random.Random(seed), [unit for unit in range(n) for _ in range(touches)]
        self.per_epoch, self.at, self.fetched = len(self.units), 0, 0
        self.coming = []  # of the order: what is not read yet
        self.n_known = 0
        self.order = FutureUses(cache, bounds, window=AT_ONCE * BLOCK)

    def read(self, accesses):
        """Read so many accesses (a multiple of AT_ONCE); return how many blocks were fetched for them."""
        before = self.fetched
        for _ in range(accesses // AT_ONCE):
            self.step()
        return self.fetched - before

    def step(self):
        self.look_ahead()
        now, self.coming = self.coming[:AT_ONCE], self.coming[AT_ONCE:]
        asked = itertools.takewhile(self.order.ask, map(self.use, itertools.count(self.at), now))
        self.fetch(list(dict.fromkeys(use.block for use in asked)))
        for index in now:
            if self.cache.read(self.key, index, 0, 8) is None:  # somebody else removed it
                self.fetch([(self.key, index)])
                self.cache.touch(self.key, index)
        self.at += AT_ONCE
        self.order.look(is_held=False)

    def look_ahead(self):
        if self.n_known < self.at + self.per_epoch:
            epoch = self.chance.sample(self.units, self.per_epoch)
            self.coming += epoch
            self.order.add(map(self.use, itertools.count(self.n_known), epoch))
            self.n_known += self.per_epoch

    def use(self, position, index):
        return Use(position, (self.key, index), BLOCK)

    def fetch(self, blocks):
        missing = [block for block in blocks if not self.cache.has(*block)]
        self.fetched += len(missing)
        for block in missing:
            self.cache.missed(*block, self.bounds)
        data = bytes(BLOCK)
        self.cache.put([(key.block(index), data) for key, index in missing], self.bounds, plan=self.order)
        self.order.stored(blocks)

    def hit_ratio(self, epochs):
        accesses = int(epochs * self.per_epoch)
        return 1 - self.read(accesses) / accesses


def bounds_for(cache, n):
    """Return bounds within which about `n` small blocks fit, and how many do: all of them were there once."""
    key, small = key_of("probe", block_size=BLOCK), CacheBounds(1 << 22, 0)
    cache.put([(key.block(0), b"")], small)
    overhead = sum(cache._own.store.room._overhead(32 * 4096))
    bounds = CacheBounds(overhead + n * file_size(key, BLOCK), 0)
    for first in range(0, 2 * n, 100):
        cache.put([(key.block(index), bytes(BLOCK)) for index in range(first, first + 100)], bounds)
    n_fit = cache.usage()[0]
    cache.evict(None)
    return bounds, n_fit


# What a plan leaves to others.


class GivesUp:
    """A plan that gives up what the test says, and notes what it was asked for."""

    def __init__(self, *blocks, taken=1 << 40):
        self.left, self.asked, self.taken, self.share, self.plan_slot = list(blocks), [], taken, 0, None

    def given_up(self):
        while self.left:
            self.asked.append(self.left.pop(0))
            yield self.asked[-1]


@pytest.fixture
def full(cache):
    """A cache that is full of twelve blocks; and the bounds that make it so."""
    bounds = room_for(cache, 12)
    for index in range(12):
        put(cache, OLD, index, bounds=bounds)
    return cache, bounds


OLD, NEW = key_of("b/old"), key_of("b/new")


def here(cache, key, n=12):
    return [index for index in range(n) if cache.has(key, index)]


def test_what_a_plan_gives_up_goes_and_nothing_else_and_not_one_block_more_than_is_needed(full):
    cache, bounds = full
    plan = GivesUp(*((OLD, index) for index in (7, 3, 11, 0)))
    cache.put([(NEW.block(index), content(NEW, index)) for index in range(2)], bounds, plan=plan)
    assert here(cache, OLD) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert plan.asked == [(OLD, 7), (OLD, 3)]
    assert here(cache, NEW) == [0, 1]
    assert cache.check().ok


def test_a_plan_is_not_asked_while_there_is_room(cache):
    plan = GivesUp((OLD, 0))
    put(cache, OLD, 0)
    cache.put([(NEW.block(0), content(NEW, 0))], AMPLE, plan=plan)
    assert not plan.asked


def test_what_a_plan_gives_up_but_is_not_here_or_pinned_makes_no_room_and_others_do(full):
    cache, bounds = full
    pinned = key_of("b/pinned")
    cache.pin(pinned.identity, pinned.path)
    put(cache, pinned, 0, bounds=bounds)
    plan = GivesUp((pinned, 0), (key_of("b/never"), 3), (OLD, 9))
    cache.put([(NEW.block(0), content(NEW, 0))], bounds, plan=plan)
    assert cache.has(pinned, 0)
    assert here(cache, NEW) == [0]
    assert 9 not in here(cache, OLD)
    assert len(here(cache, OLD)) == 10


def test_a_plan_that_has_nothing_to_give_up_stores_as_everybody_does(full):
    cache, bounds = full
    cache.put([(NEW.block(0), content(NEW, 0))], bounds, plan=GivesUp())
    assert here(cache, NEW) == [0]
    assert len(here(cache, OLD)) == 11


def test_below_its_share_a_plan_takes_what_is_longest_unused_if_its_blocks_are_new(full):
    cache, bounds = full
    for step in range(2):
        plan = GivesUp((OLD, 11), taken=0)
        cache.missed(NEW, step, bounds)
        cache.put([(NEW.block(step), content(NEW, step))], bounds, plan=plan)
        assert not plan.asked
    assert plan.share == cache.allowance(bounds)


def test_below_its_share_a_plan_takes_nothing_of_others_for_blocks_that_were_here_before(full):
    cache, bounds = full
    cache.touch(NEW, 0)
    cache.missed(NEW, 0, bounds)
    plan = GivesUp((OLD, 11), taken=0)
    cache.put([(NEW.block(0), content(NEW, 0))], bounds, plan=plan)
    assert plan.asked == [(OLD, 11)]
    assert here(cache, OLD) == list(range(11))


def test_what_others_use_stays_while_a_plan_reads_more_than_fits(cache):
    bounds, n = bounds_for(cache, 100)
    plan = Plan(cache, bounds, n)
    plan.read(plan.per_epoch // 2)
    others = key_of("b/others", block_size=BLOCK)
    cache.put([(others.block(index), bytes(BLOCK)) for index in range(20)], bounds)
    missing = 0
    for _ in range(20):
        plan.read(plan.per_epoch // 160 * 8)
        missing += 20 - len(here(cache, others, 20))
        for index in range(20):
            cache.read(others, index, 0, 1)
    assert plan.fetched > 1.3 * n
    assert missing == 0


def test_a_plan_counts_until_its_process_is_gone_however_it_went(open_cache, folder):
    ours, size = open_cache(folder), 1 << 30
    alone = ours.share(ours.take_plan_slot(), CacheBounds(size, 0))
    code = "cache = BlockCache([sys.argv[1]], explicit=True)\nprint(cache.take_plan_slot(), flush=True)\nsys.stdin.read()"
    other = start(code, folder)
    assert other.stdout.readline() == "1\n"
    assert ours.share(0, CacheBounds(size, 0)) == alone // 2
    other.kill()
    other.communicate()
    assert ours.share(0, CacheBounds(size, 0)) == alone
    ours.leave_plan_slot(0)
    assert ours.take_plan_slot() == 0
