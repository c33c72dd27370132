"""Request rates under a quota, against a simulated service and clock."""

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.drive.quota import CREATES, REQUESTS
from cachedfs.origins.rate_limit import RETRY_HIGHER_S, LimitState, answered, per_s, spare_s, taken
from cachedfs.origins.retry import RetryPolicy, delay

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


def test_an_old_quota_is_never_exceeded():
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


def test_a_learned_limit_is_used_for_an_hour():
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


@pytest.mark.parametrize(("real", "at_least"), [(3.0, 2.7), (2.0, 1.8)])
def test_items_are_created_as_fast_as_the_service_allows(real, at_least):
    sent, _ = drive(Service(real), seconds=300, ladder=CREATES, kind="create", in_flight=4)
    assert good_per_s(sent, 30, 300) >= at_least
    assert not refused_at(sent, after_s=30)
    assert sent[10][0] >= 2  # never a burst


def test_readahead_leaves_half_of_a_burst_to_waiting_callers():
    pace, n = LimitState(free_at=START - 10), 0
    while spare_s(pace, START) == 0:
        pace, wait_s = taken(pace, REQUESTS, "download", START)
        assert wait_s == 0
        n += 1
    assert 47 <= n <= 49  # a burst is half a second
    wait_s = spare_s(pace, START)
    assert spare_s(pace, START + wait_s) == pytest.approx(0, abs=1e-6)
    assert taken(pace, REQUESTS, "download", START)[1] == 0


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


@given(lives, lanes, st.floats(0, 0.999))
def test_a_wait_stays_the_same_until_it_is_over(steps, lane, part):
    ladder, kind = lane
    pace, now = after([*steps, (0.0, False), (0.0, False)], ladder, kind)
    while not (wait_s := taken(pace, ladder, kind, now)[1]):
        pace, _ = taken(pace, ladder, kind, now)
    assert taken(pace, ladder, kind, now + wait_s * part)[1] == pytest.approx(wait_s * (1 - part), abs=1e-6)


def test_a_rate_that_recovers_keeps_the_wait_of_earlier_requests():
    slow = LimitState(rung=1, share=1 / 32, free_at=START, cut_at=START)
    pace, _ = taken(slow, CREATES, "create", START)
    assert pace.free_at - START == pytest.approx(32 / 2 / 0.95)
    assert taken(pace, CREATES, "create", START + 10)[1] == pytest.approx(pace.free_at - START - 10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_processes", [2, 4, 8])
def test_processes_that_share_a_quota_all_finish_without_errors(n_processes, seed):
    """Each of them backs off; no request is refused as often as a read is tried."""
    service, policy, rng = Service(NEW, 200), RetryPolicy(), random.Random(seed)
    paces, good, most_failed = [LimitState()] * n_processes, [0] * n_processes, 0
    # Of each request: the time of its next event, its process, how often it was refused, and, if the event is the
    # answer, when it was sent.
    events = [(START + rng.random(), i, 0, 0.0) for i in range(n_processes) for _ in range(8)]
    heapq.heapify(events)
    while (event := heapq.heappop(events))[0] < START + 120:
        now, i, n_failed, sent_at = event
        if sent_at:
            paces[i] = answered(paces[i], REQUESTS, sent_at=sent_at, refused=n_failed > 0, now=now)
            good[i] += not n_failed
            wait_s = delay(n_failed, policy, rng) if n_failed else 0.0
            heapq.heappush(events, (now + wait_s, i, n_failed, 0.0))
            continue
        paces[i], wait_s = taken(paces[i], REQUESTS, "download", now)
        if wait_s:
            heapq.heappush(events, (now + wait_s + 1e-6, i, n_failed, 0.0))
        else:
            n_failed = n_failed + 1 if service.refuses(now) else 0
            most_failed = max(most_failed, n_failed)
            heapq.heappush(events, (now + 0.2, i, n_failed, now))
    assert most_failed < policy.tries
    assert sum(good) >= 0.9 * 27 * 120
    assert min(good) >= 0.1 * sum(good) / n_processes
