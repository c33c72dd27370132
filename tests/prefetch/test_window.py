"""The window of a prefetch plan: how far ahead of its reader it may be."""

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.prefetch.plan import n_to_request

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=20)


@given(sizes, st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 200))
def test_the_window_never_exceeds_its_limit_except_for_a_single_request(sizes, ahead, limit, most):
    n = n_to_request(sizes, ahead=ahead, limit=limit, most=most)
    assert 0 <= n <= len(sizes)
    if n > 1:
        assert sum(sizes[:n]) <= most
    if n and ahead:
        assert ahead + sum(sizes[:n]) <= limit


@given(sizes, st.integers(1, 1000), st.integers(1, 200))
def test_something_is_always_requested_when_the_window_is_empty(sizes, limit, most):
    assert n_to_request(sizes, ahead=0, limit=limit, most=most) >= 1


def test_a_window_is_refilled_by_whole_requests_or_quarters_of_it():
    assert n_to_request([1] * 20, ahead=60, limit=64, most=8) == 0
    assert n_to_request([1] * 20, ahead=56, limit=64, most=8) == 8
    assert n_to_request([1] * 20, ahead=7, limit=8, most=8) == 0
    assert n_to_request([1] * 20, ahead=6, limit=8, most=8) == 2
    assert n_to_request([1, 1], ahead=62, limit=64, most=8) == 2
    assert n_to_request([1] * 20, ahead=0, limit=float("inf"), most=8) == 8
