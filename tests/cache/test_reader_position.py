"""Where the reader of a prefetch plan is: several readers out of order, one of them stuck; blocks that are used again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.cache.eviction import future_uses
from cachedfs.cache.eviction.future_uses import FutureUses, Use


@pytest.fixture(autouse=True)
def sizes_of_data(monkeypatch):
    monkeypatch.setattr(future_uses, "file_size", lambda key, size: size)


class Cache:
    """The part of a cache that FutureUses uses: access records, and which blocks are there."""

    def __init__(self, size=1 << 40, *, now=0):
        self.size, self.now, self.clocks, self.here = size, now, {}, set()

    def touch(self, *block):
        self.now = self.now + 1 & 0xFFFFFFFF
        self.clocks[block] = self.now

    def last_use(self, *block):
        return self.clocks.get(block)

    def clock(self, bounds):
        return self.now

    def has(self, *block):
        return block in self.here

    def take_plan_slot(self):
        return None

    def share(self, plan_slot, bounds):
        return self.size


def ahead_of(names, cache):
    """Return the uses of a plan that has asked for all these blocks, one byte each."""
    uses = FutureUses(cache, None)
    given = [Use(position, ("x", name), 1) for position, name in enumerate(names)]
    uses.add(given)
    cache.here.update(use.block for use in given)
    assert all(uses.ask(use) for use in given)
    uses.stored(use.block for use in given)
    return uses


def test_reading_in_order_moves_the_window():
    cache = Cache()
    uses = ahead_of("abcdef", cache)
    for n_left, name in zip((5, 4, 3), "abc", strict=True):
        cache.touch("x", name)
        assert uses.look(is_held=False)
        assert uses.ahead == n_left
    assert not uses.look(is_held=False)


def test_a_read_from_before_the_plan_does_not_count():
    cache = Cache()
    cache.touch("x", "a")
    assert not ahead_of("ab", cache).look(is_held=False)


def test_a_read_since_the_plan_began_counts_though_its_use_was_not_known():
    cache = Cache()
    uses = FutureUses(cache, None)
    cache.touch("x", "a")
    uses.add([Use(0, ("x", "a"), 1)])
    assert uses.is_over(0)


@pytest.mark.parametrize("n", [100, 1000])
def test_a_read_passes_all_blocks_before_it(n):
    cache = Cache()
    uses = ahead_of(range(n), cache)
    cache.touch("x", 7 * n // 10)
    assert any(uses.look(is_held=False) for _ in range(1 + n // future_uses.LOOK))
    assert (uses.reader, uses.ahead) == (7 * n // 10 + 1, n - 7 * n // 10 - 1)


def test_a_reader_beyond_what_is_ahead_is_found_when_nothing_ahead_is_read(monkeypatch):
    cache = Cache()
    uses = ahead_of([], cache)
    uses.add(Use(position, ("x", position), 1) for position in range(1000))
    assert all(uses.ask(Use(position, ("x", position), 1)) for position in range(10))
    cache.touch("x", 900)
    assert not any(uses.look(is_held=True) for _ in range(10))
    monkeypatch.setattr(future_uses, "STALL_S", 0.0)
    assert any(uses.look(is_held=True) for _ in range(10))
    assert (uses.reader, uses.ahead) == (901, 0)


def test_a_read_of_a_repeated_block_is_its_first_use():
    cache = Cache()
    uses = ahead_of("abacada", cache)
    for position, name in enumerate("abacada"):
        cache.touch("x", name)
        uses.look(is_held=False)
        assert uses.reader == position + 1


def test_another_read_of_the_block_just_read_is_not_its_next_use():
    cache = Cache()
    uses = ahead_of("abcdabcd", cache)
    cache.touch("x", "a")
    uses.look(is_held=False)
    cache.touch("x", "a")
    assert not uses.look(is_held=False)
    assert uses.reader == 1


def test_a_slow_read_is_not_the_next_use_of_the_block():
    cache = Cache()
    uses = ahead_of("abcdefab", cache)
    for name in "bcd":  # and another one is still at the first
        cache.touch("x", name)
        uses.look(is_held=False)
    cache.touch("x", "a")
    uses.look(is_held=False)
    assert uses.reader == 4
    for name in "efab":
        cache.touch("x", name)
        uses.look(is_held=False)
    assert uses.reader == 8


def test_accesses_of_blocks_that_no_use_is_left_of_are_forgotten(monkeypatch):
    monkeypatch.setattr(future_uses, "LOOK", 4)
    cache, n = Cache(size=4), 100
    uses = ahead_of([], cache)
    uses.add(Use(position, ("x", position), 1) for position in range(n))
    for position in range(n):
        cache.touch("x", position)
        while uses.look(is_held=False):
            pass
    assert uses.reader == n
    assert len(uses._accesses) < n // 2


def test_a_failed_object_leaves_the_window():
    uses = ahead_of("abcdef", Cache())
    uses.remove(1, 4)
    assert uses.ahead == 3
    assert uses.is_over(1) is False


def test_blocks_evicted_unread_are_passed_and_less_is_kept_ahead():
    cache = Cache()
    uses = ahead_of("abcdefgh", cache)
    cache.here -= {("x", "a"), ("x", "b")}
    uses.forget_lost()
    assert (uses.reader, uses.ahead) == (2, 6)
    assert uses.limit < 6
    for name in "cdef":
        cache.touch("x", name)
        uses.look(is_held=False)
    assert 6 < uses.limit < 8  # it grows again as blocks are read


def test_beyond_the_horizon_only_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(future_uses, "HORIZON", 4)
    uses = FutureUses(Cache(size=20), None)
    given = [Use(position, ("x", position), 1) for position in range(30)]
    uses.add(given)
    asked = [use for use in given if uses.ask(use)]
    assert len(asked) == math.floor(future_uses.KEPT * 20)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200))
def test_reading_everything_in_order_empties_the_window(names):
    """Blocks may occur several times."""
    cache = Cache()
    uses = ahead_of(names, cache)
    for name in names:
        cache.touch("x", name)
        uses.look(is_held=False)
    for _ in range(3):
        uses.look(is_held=False)
    assert uses.ahead == 0
