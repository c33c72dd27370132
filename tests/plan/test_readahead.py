"""What is read ahead of one open file."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.plan.readahead import History, ahead

limits = {"n_blocks": 1000, "blocks_per_request": 8, "most": 64}


def replay(indexes, **limits):
    """Read the blocks; return the history and all that was asked for, in order."""
    history, asked = History(), []
    for index in indexes:
        history = history.after(index)
        wanted = ahead(history, **limits)
        asked += wanted
        if wanted:
            history = history.having_requested(wanted.stop)
    return history, asked


def test_the_window_starts_at_one_request_and_doubles_to_its_limit():
    history, windows = History(), []
    for index in range(6):
        history = history.after(index)
        wanted = ahead(history, **limits)
        windows.append(len(wanted))
        history = history.having_requested(wanted.stop) if wanted else history
    assert windows == [0, 8, 8, 16, 32, 0]
    assert history.requested - (history.last + 1) <= 64


@given(st.integers(1, 400))
def test_a_sequential_read_asks_for_every_block_ahead_once_and_in_order(n):
    _, asked = replay(range(n), n_blocks=n, blocks_per_request=8, most=64)
    assert asked == sorted(set(asked))
    assert all(0 < index < n for index in asked)
    if n > 2:
        assert asked[-1] == n - 1
        assert asked == list(range(asked[0], n))


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=50).filter(
        lambda xs: all(b != a + 1 for a, b in itertools.pairwise(xs))
    )
)
def test_random_reads_ask_for_nothing_ahead(indexes):
    assert replay([i for i in indexes if i > 0], **limits)[1] == []


@given(st.lists(st.integers(0, 99), max_size=200), st.integers(1, 100), st.integers(1, 9), st.integers(0, 70))
def test_nothing_beyond_the_end_nor_behind_the_reader_nor_more_than_the_window(indexes, n, per_request, most):
    history = History()
    for index in (i for i in indexes if i < n):
        history = history.after(index)
        wanted = ahead(history, n_blocks=n, blocks_per_request=per_request, most=most)
        if wanted:
            assert index < wanted.start
            assert wanted.stop <= min(n, index + 1 + most)
            history = history.having_requested(wanted.stop)


def test_no_window_reads_nothing_ahead():
    assert replay(range(50), n_blocks=100, blocks_per_request=8, most=0)[1] == []


def test_a_jump_forgets_the_streak():
    history, _ = replay([*range(20), 500, 501], **limits)
    assert history.streak == 1
