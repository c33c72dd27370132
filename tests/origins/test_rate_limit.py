"""Request rates under a quota, against a simulated service and clock."""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.rate_limit import (
    CREATES,
    REQUESTS,
    RETRY_HIGHER_S,
    LimitState,
    answered,
    per_s,
    spare_s,
    taken,
)

OLD, NEW = 200.0, 325_000 / 60  # requests per second; and units per second, of which a download takes 200
START = 1e9  # not zero


class Service:
    """A token bucket that holds a second of its rate; refuses at random with probability `noise`."""

    def __init__(self, per_s, cost=1.0, *, noise=0.0, seed=0):
        self.per_s, self.cost, self.noise = per_s, cost, noise
        self.left, self.at, self.rng = per_s, START, random.Random(seed)

    def refuses(self, now):
        self.left, self.at = min(self.left + (now - self.at) * self.per_s, self.per_s), now
        if self.left < self.cost or self.rng.random() < self.noise:
            return True
        self.left -= self.cost
        return False


def drive(service, *, seconds, in_flight=16, latency_s=0.2, ladder=REQUESTS, kind="download", pace=None):
    """Send as fast as allowed; return when each request was sent, whether it was refused, and the final state."""
    pace, sent = pace or LimitState(), []
    free = [START] * in_flight
    answers = []  # outstanding answers: when each arrives, when its request was sent, whether it was refused
    while (now := heapq.heappop(free)) < START + seconds:
        while answers and answers[0][0] <= now:
            at, sent_at, refused = heapq.heappop(answers)
            pace = answered(pace, ladder, sent_at=sent_at, refused=refused, now=at)
        pace, wait_s = taken(pace, ladder, kind, now)
        if wait_s:
            heapq.heappush(free, now + wait_s + 1e-6)
            continue
        refused = service.refuses(now)
        sent.append((now - START, refused))
        heapq.heappush(answers, (now + latency_s, now, refused))
        heapq.heappush(free, now + latency_s)
    return sent, pace


def refused_at(sent, *, after_s=0.0):
    return [at for at, refused in sent if refused and at >= after_s]


def good_per_s(sent, start_s, stop_s):
    return sum(not refused for at, refused in sent if start_s <= at < stop_s) / (stop_s - start_s)


def test_an_old_quota_is_limited_by_latency_and_refuses_nothing():
    sent, pace = drive(Service(OLD), seconds=20, latency_s=0.2)
    assert not refused_at(sent)
    assert good_per_s(sent, 0, 20) == pytest.approx(80, rel=0.02)  # 16 in flight, 0.2 s each
    assert pace.rung == 0


def test_processes_that_share_a_budget_never_exceed_an_old_quota():
    sent, _ = drive(Service(OLD), seconds=8, in_flight=100, latency_s=0.2)
    assert not refused_at(sent)
    assert good_per_s(sent, 1, 8) == pytest.approx(190, rel=0.02)


def test_a_new_quota_is_found_within_a_second_and_then_never_exceeded():
    in_flight = 64
    sent, pace = drive(Service(NEW, 200), seconds=60, in_flight=in_flight)
    assert pace.rung == 1
    assert 0 < len(refused_at(sent)) <= 6 + 2 * in_flight
    assert not refused_at(sent, after_s=2)
    assert good_per_s(sent, 10, 60) >= 0.9 * 27


def test_a_learned_budget_is_used_by_the_next_process_for_an_hour():
    _, pace = drive(Service(NEW, 200), seconds=5)
    later = pace._replace(cut_at=pace.cut_at - RETRY_HIGHER_S + 70, free_at=pace.free_at - 3500)
    sent, pace = drive(Service(NEW, 200), seconds=60, pace=later)
    assert not refused_at(sent)
    # An hour is over: the refusals may have been a mistake.
    assert per_s(pace, REQUESTS, START + 120) > 30_000 / 200


@pytest.mark.parametrize("seed", range(5))
def test_occasional_refusals_do_not_lower_the_rate(seed):
    sent, pace = drive(Service(OLD, noise=0.014, seed=seed), seconds=10)
    assert refused_at(sent)
    assert pace.rung == 0
    assert good_per_s(sent, 0, 10) >= 70


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_quota_is_shared_with_other_users(share):
    sent, pace = drive(Service(NEW * share, 200), seconds=300)
    assert good_per_s(sent, 60, 300) >= 0.55 * 27 * share
    assert len(refused_at(sent, after_s=60)) <= 0.2 * len(sent)
    assert pace.rung == 1


def test_a_burst_of_refusals_lowers_the_rate_once():
    pace = LimitState()
    for i in range(40):  # all were sent before the first answer arrived
        pace = answered(pace, REQUESTS, sent_at=START, refused=True, now=START + 1 + i / 100)
    assert pace.rung == 1
    assert per_s(pace, REQUESTS, START + 2) == pytest.approx(NEW * 0.95)
    for i in range(40):
        pace = answered(pace, REQUESTS, sent_at=START + 2, refused=True, now=START + 3 + i / 100)
    assert per_s(pace, REQUESTS, pace.cut_at) == pytest.approx(NEW * 0.95 / 2)
    assert per_s(pace, REQUESTS, pace.cut_at + 50) == pytest.approx(NEW * 0.95 * 0.75)
    assert per_s(pace, REQUESTS, pace.cut_at + 3600) == pytest.approx(NEW * 0.95)


def test_a_service_that_refuses_everything_is_rarely_asked():
    class Window(Service):
        def refuses(self, now):
            return now < START + 40

    sent, _ = drive(Window(0), seconds=100)
    assert len(refused_at(sent)) <= 6 * 16 - 1  # as many tries as 16 reads have
    assert good_per_s(sent, 90, 100) >= 5


@pytest.mark.parametrize(("real", "at_least"), [(3.0, 2.7), (2.0, 1.8)])
def test_items_are_created_as_fast_as_the_service_allows(real, at_least):
    sent, _ = drive(Service(real), seconds=300, ladder=CREATES, kind="create", in_flight=4)
    assert good_per_s(sent, 30, 300) >= at_least
    assert not refused_at(sent, after_s=30)
    assert sent[10][0] >= 2  # never a burst


def test_kinds_of_requests_have_the_costs_of_google():
    learned = LimitState(rung=1.0, cut_at=START, free_at=START)
    for kind, units in {"get": 5, "list": 100, "download": 200, "edit": 50, "create": 50, "other": 5}.items():
        after, wait_s = taken(learned, REQUESTS, kind, START)
        assert wait_s == 0
        assert after.free_at - learned.free_at == pytest.approx(units / (NEW * 0.95), abs=1e-6)
        after, _ = taken(LimitState(free_at=START), REQUESTS, kind, START)
        assert after.free_at - START == pytest.approx(1 / 190, abs=1e-6)


def test_readahead_leaves_half_of_a_burst_to_waiting_callers():
    pace, n = LimitState(free_at=START - 10), 0
    while spare_s(pace, REQUESTS, START) == 0:
        pace, wait_s = taken(pace, REQUESTS, "download", START)
        assert wait_s == 0
        n += 1
    assert 47 <= n <= 49  # a burst is half a second
    wait_s = spare_s(pace, REQUESTS, START)
    assert spare_s(pace, REQUESTS, START + wait_s) == pytest.approx(0, abs=1e-6)
    assert taken(pace, REQUESTS, "download", START)[1] == 0


anything = st.floats(allow_nan=True, allow_infinity=True)


@given(st.tuples(*[anything] * 5), st.booleans(), st.sampled_from(["get", "download", "?"]))
def test_any_stored_numbers_are_a_valid_state_with_a_bounded_wait(numbers, refused, kind):
    pace, wait_s = taken(LimitState(*numbers), REQUESTS, kind, START)
    assert 0 <= wait_s <= 60
    assert all(map(math.isfinite, pace))
    assert 0 <= spare_s(LimitState(*numbers), REQUESTS, START) <= 61
    after = answered(LimitState(*numbers), REQUESTS, sent_at=START, refused=refused, now=START)
    assert taken(after, REQUESTS, kind, START + 61)[1] == 0


def after(steps, ladder, kind):
    """Return a state and its time, after requests and answers `by_s` seconds apart."""
    pace, now = LimitState(), START
    for by_s, refused in steps:
        now += by_s
        pace, _ = taken(pace, ladder, kind, now)
        pace = answered(pace, ladder, sent_at=now, refused=refused, now=now)
    return pace, now


lives = st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60)
lanes = st.sampled_from([(REQUESTS, "download"), (REQUESTS, "get"), (CREATES, "create")])


@given(lives, lanes, st.floats(1e-3, 1e8))
def test_a_clock_set_back_delays_at_most_as_long_as_one_request(steps, lane, back_s):
    ladder, kind = lane
    pace, now = after(steps, ladder, kind)
    rate = ladder[int(pace.rung)].per_s * 0.95 * pace.share
    dearest = max([1.0, *ladder[int(pace.rung)].costs.values()])
    waiting, wait_s = taken(pace, ladder, kind, now - back_s)
    assert wait_s <= dearest / rate * 1.001 + 1e-6
    assert spare_s(pace, ladder, now - back_s) <= dearest / rate * 1.001 + 0.25 + 1e-6
    assert (waiting.rung, waiting.share) == (pace.rung, pace.share)  # what is known about the service is kept
    before = answered(waiting, ladder, sent_at=now - back_s, refused=False, now=now - back_s)
    assert before.refused < waiting.refused or waiting.refused == 0  # answers count at once


@given(lives, lanes, st.floats(0, 0.999))
def test_a_wait_stays_the_same_until_it_is_over(steps, lane, part):
    ladder, kind = lane
    pace, now = after([*steps, (0.0, False), (0.0, False)], ladder, kind)
    while not (wait_s := taken(pace, ladder, kind, now)[1]):
        pace, _ = taken(pace, ladder, kind, now)
    assert taken(pace, ladder, kind, now + wait_s * part)[1] == pytest.approx(wait_s * (1 - part), abs=1e-6)


def test_a_rate_that_recovers_keeps_the_wait_of_earlier_requests():
    slow = LimitState(rung=1.0, share=1 / 32, free_at=START, cut_at=START)
    pace, _ = taken(slow, CREATES, "create", START)
    assert pace.free_at - START == pytest.approx(32 / 2 / 0.95)
    assert taken(pace, CREATES, "create", START + 10)[1] == pytest.approx(pace.free_at - START - 10)


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60))
def test_a_clock_that_jumps_causes_no_long_wait(steps):
    pace, now = LimitState(), START
    for (by_s, refused), back in zip(steps, itertools.cycle([1, 1, -1]), strict=False):
        now += back * by_s * 1000
        pace, _ = taken(pace, REQUESTS, "download", now)
        pace = answered(pace, REQUESTS, sent_at=now, refused=refused, now=now)
    assert taken(pace, REQUESTS, "download", now)[1] <= 2
