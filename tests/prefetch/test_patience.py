"""How long a prefetch plan goes on while its requests fail."""

from cachedfs.prefetch import outstanding
from cachedfs.prefetch.outstanding import FailureLimit


def test_an_origin_that_is_away_is_asked_again_ever_later():
    patient, now, waits = FailureLimit(), 100.0, []
    for _ in range(6):
        patient.away(now)
        began = now
        while patient.is_pausing(now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1, 2, 4, 8, 15, 15]


def test_requests_that_fail_together_make_one_pause():
    patient = FailureLimit()
    for _ in range(10):
        assert not patient.away(0)
    assert patient.is_pausing(0.9)
    assert not patient.is_pausing(1)


def test_it_ends_when_the_origin_is_away_for_too_long_and_what_came_begins_anew():
    patient = FailureLimit()
    assert not patient.away(0)
    assert not patient.away(outstanding.AWAY_S)
    assert patient.away(outstanding.AWAY_S + 1)
    assert patient.is_pausing(outstanding.AWAY_S + 1)
    patient.came()
    assert not patient.is_unreachable
    assert not patient.is_pausing(outstanding.AWAY_S + 1)
    assert not patient.away(outstanding.AWAY_S + 2)


def test_it_ends_after_failures_in_a_row():
    patient = FailureLimit()
    assert not any(patient.failed() for _ in range(outstanding.MOST_IN_A_ROW - 1))
    patient.came()
    assert not any(patient.failed() for _ in range(outstanding.MOST_IN_A_ROW - 1))
    assert patient.failed()
