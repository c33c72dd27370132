"""How long a prefetch plan goes on while its requests fail."""

from cachedfs.prefetch import outstanding
from cachedfs.prefetch.outstanding import FailureLimit


def test_pauses_grow_while_the_origin_is_unreachable():
    limit, now, waits = FailureLimit(), 100.0, []
    for _ in range(6):
        limit.away(now)
        began = now
        while limit.is_pausing(now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1, 2, 4, 8, 15, 15]


def test_requests_that_fail_together_make_one_pause():
    limit = FailureLimit()
    for _ in range(10):
        assert not limit.away(0)
    assert limit.is_pausing(0.9)
    assert not limit.is_pausing(1)


def test_the_plan_ends_when_the_origin_is_unreachable_for_too_long():
    limit = FailureLimit()
    assert not limit.away(0)
    assert not limit.away(outstanding.AWAY_S)
    assert limit.away(outstanding.AWAY_S + 1)
    assert limit.is_pausing(outstanding.AWAY_S + 1)
    limit.came()
    assert not limit.is_unreachable
    assert not limit.is_pausing(outstanding.AWAY_S + 1)
    assert not limit.away(outstanding.AWAY_S + 2)


def test_the_plan_ends_after_too_many_failures_in_a_row():
    limit = FailureLimit()
    assert not any(limit.failed() for _ in range(outstanding.MOST_IN_A_ROW - 1))
    limit.came()
    assert not any(limit.failed() for _ in range(outstanding.MOST_IN_A_ROW - 1))
    assert limit.failed()
