"""Freshness: how long metadata stays valid."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.core.objects import ABSENCE_S, is_fresh

times = st.floats(0, 2e9, allow_nan=False)


@given(times, times)
def test_immutable_metadata_is_always_fresh_even_if_the_clock_is_set_back(checked_at, now):
    assert is_fresh(checked_at, now, lifetime_s=math.inf)
    assert is_fresh(checked_at, now, lifetime_s=math.inf, absence=True)


@given(times, times)
def test_a_lifetime_of_zero_is_never_fresh(checked_at, now):
    assert not is_fresh(checked_at, now, lifetime_s=0)


def test_metadata_is_fresh_until_its_lifetime_is_over():
    assert is_fresh(1000, 1059.9, lifetime_s=60)
    assert not is_fresh(1000, 1060, lifetime_s=60)


def test_metadata_from_the_future_is_not_fresh():
    assert not is_fresh(1001, 1000, lifetime_s=60)


def test_an_absence_is_fresh_for_at_most_ten_seconds():
    assert is_fresh(1000, 1000 + ABSENCE_S - 0.1, lifetime_s=60, absence=True)
    assert not is_fresh(1000, 1000 + ABSENCE_S, lifetime_s=60, absence=True)
    assert not is_fresh(1000, 1001, lifetime_s=1, absence=True)
