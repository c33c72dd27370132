"""The window of a prefetch plan: how far ahead of its reader it may be."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.prefetch.future_reads import FutureBlock, UnreadBlocks, is_after, take


class Clocks(dict):
    """When each block was last read."""

    now = 0

    def read(self, block):
        Clocks.now += 1
        self[block] = Clocks.now


def unread_of(blocks, clocks, **limits):
    """Return the unread blocks of a plan, one byte each, in order."""
    unread = UnreadBlocks(**limits)
    for number, block in enumerate(blocks):
        unread.add(FutureBlock((number, 0), block, 1), clocks.get(block))
    return unread


def left(unread):
    return [piece.place[0] for piece in unread]


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=20)


@given(sizes, st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 200))
def test_the_window_never_exceeds_its_limit_except_for_a_single_request(sizes, ahead, limit, most):
    n = take(sizes, ahead=ahead, limit=limit, most=most)
    assert 0 <= n <= len(sizes)
    if n > 1:
        assert sum(sizes[:n]) <= most
    if n and ahead:
        assert ahead + sum(sizes[:n]) <= limit


@given(sizes, st.integers(1, 1000), st.integers(1, 200))
def test_something_is_always_requested_when_the_window_is_empty(sizes, limit, most):
    assert take(sizes, ahead=0, limit=limit, most=most) >= 1


def test_a_window_is_refilled_by_whole_requests_or_quarters_of_it():
    assert take([1] * 20, ahead=60, limit=64, most=8) == 0
    assert take([1] * 20, ahead=56, limit=64, most=8) == 8
    assert take([1] * 20, ahead=7, limit=8, most=8) == 0
    assert take([1] * 20, ahead=6, limit=8, most=8) == 2
    assert take([1, 1], ahead=62, limit=64, most=8) == 2
    assert take([1] * 20, ahead=0, limit=float("inf"), most=8) == 8


def test_reading_in_order_moves_the_window():
    clocks = Clocks()
    unread = unread_of("abcdef", clocks)
    for n_left, block in zip((5, 4, 3), "abc", strict=True):
        clocks.read(block)
        assert unread.look(clocks.get, 2) == 1
        assert unread.size == n_left
    assert unread.look(clocks.get, 2) == 0


def test_a_read_from_before_the_window_does_not_count():
    clocks = Clocks()
    clocks.read("a")
    assert unread_of("ab", clocks).look(clocks.get, 9) == 0


def test_a_read_passes_all_blocks_before_it():
    clocks = Clocks()
    unread = unread_of(range(1000), clocks)
    clocks.read(700)
    passed = [unread.look(clocks.get, 8) for _ in range(125)]
    assert sum(passed) == 701
    assert left(unread)[0] == 701


def test_a_read_of_a_repeated_block_is_its_first_use():
    clocks = Clocks()
    unread = unread_of("abacada", clocks)
    for expected in ([1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [5, 6], []):
        clocks.read("a")
        unread.look(clocks.get, 9)
        assert left(unread) == expected


def test_a_read_that_was_passed_unseen_does_not_count_for_the_next_use():
    clocks = Clocks()
    unread = unread_of("abacad", clocks)
    clocks.read("a")
    clocks.read("b")
    unread.pass_to((1, 0), clocks.get)
    assert unread.look(clocks.get, 9) == 0
    assert left(unread) == [2, 3, 4, 5]


def test_a_block_added_late_is_inserted_in_order():
    clocks = Clocks()
    unread = unread_of("ab", clocks)
    unread.add(FutureBlock((0, 1), "c", 5), None)
    clocks.read("c")
    assert unread.look(clocks.get, 9) == 6
    assert left(unread) == [1]


def test_a_failed_object_leaves_the_window():
    clocks = Clocks()
    unread = UnreadBlocks()
    for number in range(3):
        for index in range(4):
            unread.add(FutureBlock((number, index), (number, index), 10), None)
    assert unread.remove(1, clocks.get) == 40
    assert left(unread) == [0] * 4 + [2] * 4
    assert unread.size == 80


@given(st.integers(1, 2000), st.integers(2, 64), st.integers(0, 2**32))
def test_few_blocks_are_kept_and_all_bytes_are_counted(n, most, seed):
    clocks, rng = Clocks(), random.Random(seed)
    unread = unread_of((rng.randrange(n) for _ in range(n)), clocks, most=most)
    assert len(list(unread)) <= most
    assert (unread.size, unread.n) == (n, n)
    assert {piece.block for piece in unread} == set(unread._marks)
    assert sum(len(mark.places) for mark in unread._marks.values()) == len(list(unread))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 20))
def test_reading_everything_in_order_empties_the_window(blocks, n):
    """Blocks may occur several times."""
    clocks = Clocks()
    unread = unread_of(blocks, clocks)
    for number, block in enumerate(blocks):
        clocks.read(block)
        for _ in range(len(blocks) // n + 2):
            unread.look(clocks.get, n)
        assert all(place > number for place in left(unread))
    assert unread.size == 0


def test_the_access_clock_may_wrap():
    assert is_after(1, 0xFFFFFFFF)
    assert is_after(6, 5)
    assert not is_after(5, 5)
    assert not is_after(0xFFFFFFFF, 1)
