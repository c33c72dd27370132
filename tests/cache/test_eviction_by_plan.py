"""Prefetch plans and the cache: which blocks they give up, and what they leave to others."""

import pytest

from cachedfs.common.types import CacheBounds
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, content, key_of, put, room_for, start

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
    assert audit(cache).ok


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


def test_a_plan_counts_until_its_process_is_gone_however_it_went(open_cache, folder):
    ours, size = open_cache(folder), 1 << 30
    alone = ours.share(ours.take_plan_slot(), CacheBounds(size, 0))
    code = "cache = BlockStore([sys.argv[1]], explicit=True)\nprint(cache.take_plan_slot(), flush=True)\nsys.stdin.read()"
    other = start(code, folder)
    assert other.stdout.readline() == "1\n"
    assert ours.share(0, CacheBounds(size, 0)) == alone // 2
    other.kill()
    other.communicate()
    assert ours.share(0, CacheBounds(size, 0)) == alone
    ours.leave_plan_slot(0)
    assert ours.take_plan_slot() == 0
