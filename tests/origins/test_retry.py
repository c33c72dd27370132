"""Retry policy: waits, limits and jitter, with a given clock and random generator."""

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy, delay, retry_after_s
from tests.fakes import FakeClock

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def clock():
    return FakeClock()


def tries(clock, **policy):
    return RetryAttempts(RetryPolicy(clock=clock, rng=random.Random(1), **policy))  # type: ignore[arg-type]


@given(attempt=st.integers(1, 40), asked=st.floats(0, 60), seed=st.integers())
def test_the_delay_is_below_a_bound_that_doubles_or_what_the_service_asks_for(attempt, asked, seed):
    policy = RetryPolicy(base_s=1.0, cap_s=32.0, rng=random.Random(seed))
    assert 0.0 <= delay(attempt, policy) <= min(32.0, 2.0 ** (attempt - 1))
    assert delay(attempt, policy, at_least_s=asked) >= asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), ("7", 7.0), (" 0 ", 0.0), ("Sun, 01 Mar 2026 12:00:30 GMT", 30.0),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0.0), ("soon", None), ("-3", None),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(text, expected):
    assert retry_after_s(text, NOW) == expected


def test_a_connection_attempt_that_took_two_seconds_is_not_retried(clock):
    each = tries(clock)
    clock.now += 2.0
    assert each.next_wait_s(RetryableError("timeout", is_unreachable=True)) is None


def test_an_origin_is_reached_within_twenty_seconds_or_three_where_a_stale_answer_can_be_served():
    policy = RetryPolicy()
    assert (policy.reach_s, policy.reach_stale_s) == (20.0, 3.0)


def test_the_two_seconds_begin_when_the_service_becomes_unreachable(clock):
    each = tries(clock, base_s=0.01)
    clock.now += 60.0
    assert each.next_wait_s(RetryableError("broken body")) is not None
    assert each.next_wait_s(RetryableError("refused", is_unreachable=True)) is not None
    assert each.next_wait_s(RetryableError("503")) is not None
    clock.now += 60.0
    assert each.next_wait_s(RetryableError("refused", is_unreachable=True)) is not None


def test_timeouts_double_at_each_retry_which_follows_at_once(clock):
    late, attempts = RetryableError("no answer came", is_late=True), tries(clock, stall_s=30.0)
    timeouts = []
    while True:
        timeouts.append(attempts.first_byte_s(2.0))
        if (wait_s := attempts.next_wait_s(late)) is None:
            break
        assert wait_s == 0
    assert timeouts == [2, 4, 8, 16, 30, 30]
