"""Readahead across the chunks of an array: orders of axes, strides, parts, random reads."""

import itertools
import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachedfs.readahead.grid_walk import GridHistory

MOST = 64


class Outcome(NamedTuple):
    """The misses of a reader, and the positions that were requested and never read."""

    missed: list
    asked: list
    unread: list
    most_unread: int  # at any time


def step(history, place, most=MOST):
    """Read one position; return those that are requested then."""
    if place in history.recent:
        return []
    history.observe(place)
    wanted = history.ahead(most)
    history.unread.update(wanted)
    return wanted


def replay(places, extents, most=MOST):
    history, read, missed, most_unread = GridHistory(extents), set(), [], 0
    asked = {}
    for place in places:
        if place not in asked and place not in read:
            missed.append(place)
        read.add(place)
        asked |= dict.fromkeys(step(history, place, most))
        most_unread = max(most_unread, len(asked.keys() - read))
    return Outcome(missed, list(asked), [place for place in asked if place not in read], most_unread)


def grid(*extents, order=None):
    """Return all positions of a grid; `order` has its axes, the slowest first."""
    order = order or range(len(extents))
    places = itertools.product(*(range(extents[axis]) for axis in order))
    at = [list(order).index(axis) for axis in range(len(extents))]
    return [tuple(place[i] for i in at) for place in places]


def out_of_order(places, by, rng):
    """Return the positions, each up to `by` places too early or too late."""
    return [places[i] for i in sorted(range(len(places)), key=lambda i: i + rng.random() * by)]


extents_of = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def passes(draw):
    """A grid, and the order of its axes in which it is read, some of them backwards."""
    extents = draw(extents_of)
    order = draw(st.permutations(range(len(extents))))
    places = grid(*extents, order=order)
    for axis in draw(st.sets(st.sampled_from(range(len(extents))))):
        places = [(*p[:axis], extents[axis] - 1 - p[axis], *p[axis + 1 :]) for p in places]
    return extents, places


def test_the_window_doubles_up_to_the_positions_read_and_its_limit():
    history, windows = GridHistory((100,)), []
    for place in grid(100):
        step(history, place, 8)
        windows.append(len(history.unread))
    assert windows[:9] == [0, 0, 0, 1, 2, 4, 7, 8, 8]
    assert max(windows) == 8


@settings(max_examples=60)
@given(passes(), st.integers(1, MOST))
def test_a_pass_in_any_order_of_axes_misses_the_first_positions_and_wastes_nothing(case, most):
    extents, places = case
    out = replay(places, extents, most)
    # Four to recognize an order, and the first of each axis that begins to move.
    assert len(out.missed) <= 4 + len(extents)
    assert out.unread == []
    assert out.most_unread <= most


@settings(max_examples=40)
@given(st.data())
def test_a_part_of_every_step_is_recognized_after_two_steps(data):
    """`for t in ...: a[t, y0:y1, x0:x1]`: nothing outside the part is requested."""
    low = [data.draw(st.integers(0, 3)) for _ in range(2)]
    high = [data.draw(st.integers(a + 1, 6)) for a in low]
    step = data.draw(st.sampled_from([1, 1, 2, 5]))
    places = [
        (t, y, x) for t in range(0, 60, step) for y in range(low[0], high[0]) for x in range(low[1], high[1])
    ]
    out = replay(places, (60, 7, 7))
    size = (high[0] - low[0]) * (high[1] - low[1])
    assert len(out.missed) <= max(8, size) + 2
    # A row or a step seems endless until it has ended once.
    assert len(out.unread) <= size + high[1] - low[1]


@pytest.mark.parametrize(
    ("extents", "order", "by"), [((360,), None, 2), ((36, 10), (1, 0), 8), ((12, 4, 4), None, 10)], ids=str
)
@pytest.mark.parametrize("is_backwards", [False, True])
def test_positions_slightly_out_of_order_count_as_in_order(extents, order, by, is_backwards):
    places = grid(*extents, order=order)[:: -1 if is_backwards else 1]
    for seed in range(2):
        out = replay(out_of_order(places, by, random.Random(seed)), extents)
        assert len(out.missed) <= 0.15 * math.prod(extents), seed
        assert out.unread == []


def test_several_readers_of_one_array_are_each_followed():
    streams = [[(row, i) for i in range(100)] for row in (0, 5)] + [[(9, 99 - i) for i in range(100)]]
    out = replay([place for places in zip(*streams, strict=True) for place in places], (10, 100))
    assert len(out.missed) <= 12
    assert out.unread == []


@pytest.mark.parametrize("extents", [(360,), (6, 6, 10)], ids=str)
def test_random_orders_request_almost_nothing(extents):
    n_asked = 0
    for seed in range(5):
        places = grid(*extents)
        random.Random(seed).shuffle(places)
        n_asked += len(replay(places, extents).asked)
    assert n_asked <= 0.004 * 5 * math.prod(extents)


def test_steps_in_random_order_are_read_ahead_to_their_ends_and_no_further():
    """`a[t]` for random t: the chunks of one step are in order, and the steps are not."""
    rng = random.Random(0)
    steps = rng.sample(range(500), 40)
    places = [(t, y, x) for t in steps for y in range(6) for x in range(6)]
    out = replay(places, (500, 6, 6))
    assert out.unread == []
    assert len(out.missed) <= 6 + len(steps)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=150), st.integers(0, 12), st.booleans()
)
def test_nothing_beyond_the_grid_or_the_window_is_requested(places, most, is_known):
    extents = (6, 10) if is_known else (None, None)
    history = GridHistory(extents)
    for place in places:
        wanted = step(history, place, most)
        assert len(wanted) <= most
        assert all(at >= 0 for found in wanted for at in found)
        if is_known:
            assert all(found[0] < 6 and found[1] < 10 for found in wanted)
        assert len(history.walks) <= 8
        for walk in history.walks:
            assert walk.number(walk.place(walk.last)) == walk.last
