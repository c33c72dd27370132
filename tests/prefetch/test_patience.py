"""How long a prefetch plan goes on while its requests fail."""

from cachedfs.prefetch import failure_limit
from cachedfs.prefetch.failure_limit import FailureLimit


def test_pauses_grow_while_the_origin_is_unreachable():
    limit, now, waits = FailureLimit(), 100.0, []
    for _ in range(6):
        limit.away(now)
        began = now
        while limit.pause_s(now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1, 2, 4, 8, 15, 15]


def test_requests_that_fail_together_make_one_pause():
    limit = FailureLimit()
    for _ in range(10):
        assert not limit.away(0)
    assert limit.pause_s(0.9)
    assert not limit.pause_s(1)


def test_the_plan_ends_when_the_origin_is_unreachable_for_too_long():
    limit = FailureLimit()
    assert not limit.away(0)
    assert not limit.away(failure_limit.AWAY_S)
    assert limit.away(failure_limit.AWAY_S + 1)
    assert limit.pause_s(failure_limit.AWAY_S + 1)
    limit.came()
    assert not limit.is_unreachable
    assert not limit.pause_s(failure_limit.AWAY_S + 1)
    assert not limit.away(failure_limit.AWAY_S + 2)


def test_the_plan_ends_after_too_many_failures_in_a_row():
    limit = FailureLimit()
    assert not any(limit.failed() for _ in range(failure_limit.MOST_IN_A_ROW - 1))
    limit.came()
    assert not any(limit.failed() for _ in range(failure_limit.MOST_IN_A_ROW - 1))
    assert limit.failed()
