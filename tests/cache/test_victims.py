"""Blocks that a write evicts first, as prefetch plans name them."""

import pytest

from tests.cache.audit import audit
from tests.cache.helpers import content, key_of, put, room_for

OLD, NEW = key_of("b/old"), key_of("b/new")


class Victims:
    """Yields blocks, and notes which of them were taken."""

    def __init__(self, *blocks):
        self.left, self.taken = list(blocks), []

    def __iter__(self):
        while self.left:
            self.taken.append(self.left.pop(0))
            yield self.taken[-1]


@pytest.fixture
def full(cache):
    """A cache that is full of twelve blocks; and the bounds that make it so."""
    bounds = room_for(cache, 12)
    for index in range(12):
        put(cache, OLD, index, bounds=bounds)
    return cache, bounds


def here(cache, key, n=12):
    return [index for index in range(n) if cache.has(key, index)]


def test_victims_go_and_nothing_else_and_not_one_block_more_than_is_needed(full):
    cache, bounds = full
    victims = Victims(*map(OLD.block, (7, 3, 11, 0)))
    cache.put([(NEW.block(index), content(NEW, index)) for index in range(2)], bounds, victims=victims)
    assert here(cache, OLD) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert victims.taken == [OLD.block(7), OLD.block(3)]
    assert here(cache, NEW) == [0, 1]
    assert audit(cache).ok


def test_victims_that_are_not_here_or_pinned_make_no_room_and_others_do(full):
    cache, bounds = full
    pinned = key_of("b/pinned")
    cache.pin(pinned.identity, pinned.path)
    put(cache, pinned, 0, bounds=bounds)
    victims = Victims(pinned.block(0), key_of("b/never").block(3), OLD.block(9))
    cache.put([(NEW.block(0), content(NEW, 0))], bounds, victims=victims)
    assert cache.has(pinned, 0)
    assert here(cache, NEW) == [0]
    assert 9 not in here(cache, OLD)
    assert len(here(cache, OLD)) == 10
