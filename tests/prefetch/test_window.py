"""The window of a prefetch plan: how far ahead of its reader it may be."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.prefetch.future_reads import FutureBlock, UnreadBlocks, is_after, take


class Clocks(dict):
    """When each block was read last."""

    now = 0

    def read(self, block):
        Clocks.now += 1
        self[block] = Clocks.now


def unread_of(blocks, clocks, **limits):
    """Return a plan's blocks in order, one byte each."""
    unread = UnreadBlocks(**limits)
    for number, block in enumerate(blocks):
        unread.add(FutureBlock((number, 0), block, 1), clocks.get(block))
    return unread


def left(unread):
    return [piece.place[0] for piece in unread]


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=20)


@given(sizes, st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 200))
def test_what_is_ahead_never_exceeds_the_limit_but_for_one_piece_alone(sizes, ahead, limit, most):
    n = take(sizes, ahead=ahead, limit=limit, most=most)
    assert 0 <= n <= len(sizes)
    if n > 1:
        assert sum(sizes[:n]) <= most
    if n and ahead:
        assert ahead + sum(sizes[:n]) <= limit


@given(sizes, st.integers(1, 1000), st.integers(1, 200))
def test_something_is_always_asked_for_when_nothing_is_ahead(sizes, limit, most):
    assert take(sizes, ahead=0, limit=limit, most=most) >= 1


def test_a_window_is_refilled_by_whole_requests_or_by_quarters_of_it():
    assert take([1] * 20, ahead=60, limit=64, most=8) == 0
    assert take([1] * 20, ahead=56, limit=64, most=8) == 8
    assert take([1] * 20, ahead=7, limit=8, most=8) == 0
    assert take([1] * 20, ahead=6, limit=8, most=8) == 2
    assert take([1, 1], ahead=62, limit=64, most=8) == 2
    assert take([1] * 20, ahead=0, limit=float("inf"), most=8) == 8


def test_reading_in_order_moves_the_window_by_what_was_read():
    clocks = Clocks()
    unread = unread_of("abcdef", clocks)
    for n_left, block in zip((5, 4, 3), "abc", strict=True):
        clocks.read(block)
        assert unread.look(clocks.get, 2) == 1
        assert unread.size == n_left
    assert unread.look(clocks.get, 2) == 0


def test_what_was_read_before_it_came_into_the_window_is_not_read():
    clocks = Clocks()
    clocks.read("a")
    assert unread_of("ab", clocks).look(clocks.get, 9) == 0


def test_a_read_anywhere_passes_all_that_is_before_it():
    clocks = Clocks()
    unread = unread_of(range(1000), clocks)
    clocks.read(700)
    passed = [unread.look(clocks.get, 8) for _ in range(125)]
    assert sum(passed) == 701
    assert left(unread)[0] == 701


def test_of_a_block_that_comes_several_times_a_read_is_of_its_first_use():
    clocks = Clocks()
    unread = unread_of("abacada", clocks)
    for expected in ([1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [5, 6], []):
        clocks.read("a")
        unread.look(clocks.get, 9)
        assert left(unread) == expected


def test_a_read_that_was_passed_unseen_is_not_taken_for_the_next_one_of_its_block():
    clocks = Clocks()
    unread = unread_of("abacad", clocks)
    clocks.read("a")
    clocks.read("b")
    unread.pass_to((1, 0), clocks.get)
    assert unread.look(clocks.get, 9) == 0
    assert left(unread) == [2, 3, 4, 5]


def test_what_comes_late_is_put_in_its_place():
    clocks = Clocks()
    unread = unread_of("ab", clocks)
    unread.add(FutureBlock((0, 1), "c", 5), None)
    clocks.read("c")
    assert unread.look(clocks.get, 9) == 6
    assert left(unread) == [1]


def test_an_object_that_cannot_be_had_is_ahead_of_nobody():
    clocks = Clocks()
    unread = UnreadBlocks()
    for number in range(3):
        for index in range(4):
            unread.add(FutureBlock((number, index), (number, index), 10), None)
    assert unread.remove(1, clocks.get) == 40
    assert left(unread) == [0] * 4 + [2] * 4
    assert unread.size == 80


@given(st.integers(1, 2000), st.integers(2, 64), st.integers(0, 2**32))
def test_however_many_pieces_there_are_few_are_kept_and_all_bytes_are_counted(n, most, seed):
    clocks, rng = Clocks(), random.Random(seed)
    unread = unread_of((rng.randrange(n) for _ in range(n)), clocks, most=most)
    assert len(list(unread)) <= most
    assert (unread.size, unread.n) == (n, n)
    assert {piece.block for piece in unread} == set(unread._marks)
    assert sum(len(mark.places) for mark in unread._marks.values()) == len(list(unread))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 20))
def test_a_reader_of_all_passes_all(blocks, n):
    """Whatever comes several times: who reads everything in order has nothing ahead at the end."""
    clocks = Clocks()
    unread = unread_of(blocks, clocks)
    for number, block in enumerate(blocks):
        clocks.read(block)
        for _ in range(len(blocks) // n + 2):
            unread.look(clocks.get, n)
        assert all(place > number for place in left(unread))
    assert unread.size == 0


def test_a_clock_that_wraps_goes_on():
    assert is_after(1, 0xFFFFFFFF)
    assert is_after(6, 5)
    assert not is_after(5, 5)
    assert not is_after(0xFFFFFFFF, 1)
