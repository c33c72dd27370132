"""Hedging: when a late request is sent a second time."""

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.hedging import LatencyStats, late_s, may_hedge


def seen(waits):
    history = LatencyStats()
    for wait_s in waits:
        history = history.sent().answered(wait_s)
    return history


def test_a_request_is_late_when_it_takes_longer_than_99_of_100():
    assert late_s(seen(i / 100 for i in range(1, 201)), least_s=0.1, early_s=5) == 1.98
    assert late_s(seen([1.0] * 99 + [30.0]), least_s=0.1, early_s=5) == 1.0


def test_lateness_is_fixed_until_there_are_enough_answers():
    assert late_s(seen([0.1] * 99), least_s=2, early_s=5) == 5
    assert late_s(seen([0.1] * 100), least_s=2, early_s=5) == 2


def test_old_answers_are_forgotten():
    assert late_s(seen([9.0] * 1000 + [0.5] * 500), least_s=0.1, early_s=5) == 0.5


@given(st.lists(st.sampled_from("sla"), max_size=600))
def test_at_most_one_request_in_twenty_is_hedged(steps):
    history, n_hedged = LatencyStats(), 0
    for n_sent, step in enumerate(steps, 1):
        history = history.sent()
        if step == "l" and may_hedge(history):
            history, n_hedged = history.hedged(), n_hedged + 1
        elif step == "a":
            history = history.answered(0.1)
        assert n_hedged <= 1 + n_sent / 20
