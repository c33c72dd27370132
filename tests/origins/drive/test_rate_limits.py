"""Request rates under a quota, against a simulated service and in virtual time."""

import heapq
import itertools
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.drive.quota import CREATES, REQUESTS, SentRequests
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy
from cachedfs.sim.quota import Budget, Minute

pytestmark = pytest.mark.usefixtures("default_rate_limits")
START = 6e8  # a full minute, and not zero
A_MINUTE = 325_000 // 200  # downloads in a minute of a new project
TOO_MANY = RetryableError("too many", is_rate=True)


class Service:
    """Counts units in any minute or in each minute of the clock; refuses at random with probability `noise`."""

    def __init__(self, units, cost=1.0, *, is_fixed=False, noise=0.0, seed=0):
        self.limit, self.cost, self.noise = Minute(units, is_fixed=is_fixed), cost, noise
        self.rng = random.Random(seed)

    def refuses(self, now):
        if not self.limit.has(self.cost, now) or self.rng.random() < self.noise:
            return True
        self.limit.take(self.cost, now)
        return False


class Bucket(Service):
    """A token bucket that holds a second of its rate."""

    def __init__(self, per_s):
        super().__init__(0)
        self.bucket = Budget(per_s, max(per_s, 1.0))

    def refuses(self, now):
        return not self.bucket.take(1, now)


class Process:
    """Sends `n` requests, `in_flight` at a time; the first in the queue waits for the limit, as in `DriveLimits`."""

    def __init__(self, n, *, in_flight=16, begins_at=START, ladder=REQUESTS, kind="download", seed=0):
        self.left, self.in_flight, self.begins_at, self.kind = n, in_flight, begins_at, kind
        self.limit, self.rng = SentRequests(ladder), random.Random(seed)
        self.queue, self.is_waiting = deque(), False
        self.good, self.refused = [], []  # times
        self.most_failed = self.n_errors = 0

    def begin(self, now):
        """Begin a request, if one is left."""
        if self.left:
            self.left -= 1
            self.queue.append(RetryAttempts(RetryPolicy(clock=lambda: now, rng=self.rng)))

    def answered(self, tries, sent, now, *, refused):
        """Handle an answer; return in how many seconds to send the request again, None if it is over."""
        self.limit.answered(sent, now, refused=refused)
        (self.refused if refused else self.good).append(now)
        wait_s = tries.next_wait_s(TOO_MANY) if refused else None
        self.most_failed = max(self.most_failed, tries.n_failed)
        self.n_errors += refused and wait_s is None
        return wait_s


def run(service, *processes, until_s=1e6):
    """Run processes against a service; requests arrive after half of a latency that varies."""
    rng, number, events = random.Random(7), itertools.count(), []

    def at(when, do, *args):
        heapq.heappush(events, (when, next(number), do, args))

    def begin(process, now):
        process.begin(now)
        send(process, now)

    def wake(process, now):
        process.is_waiting = False
        send(process, now)

    def send(process, now):
        while process.queue and not process.is_waiting:
            if wait_s := process.limit.wait_s(process.kind, now):
                process.is_waiting = True
                at(now + min(wait_s, 1.0), wake, process)
                return
            sent, latency_s = process.limit.send(process.kind, now), rng.lognormvariate(-1.6, 0.5)
            at(now + latency_s / 2, arrive, process, process.queue.popleft(), sent, latency_s / 2)

    def arrive(process, tries, sent, latency_s, now):
        at(now + latency_s, answer, process, tries, sent, service.refuses(now))

    def answer(process, tries, sent, refused, now):
        if (wait_s := process.answered(tries, sent, now, refused=refused)) is None:
            begin(process, now)
        else:
            at(now + wait_s, again, process, tries)

    def again(process, tries, now):
        process.queue.append(tries)
        send(process, now)

    for process in processes:
        for _ in range(process.in_flight):
            at(process.begins_at, begin, process)
    while events and events[0][0] < START + until_s:
        now, _, do, args = heapq.heappop(events)
        do(*args, now)
    return processes[0]


def exact_s(n, a_minute, in_flight=16):
    """Return the time of a client that knows the limit: each minute's requests at once, as early as allowed."""
    minutes, rest = divmod(n - 1, a_minute)
    return 60 * minutes + (rest + 1) * 0.23 / in_flight


@pytest.mark.parametrize(
    ("is_fixed", "others", "in_flight"), [(False, 0, 16), (False, 0.7, 64), (True, 0.5, 64)]
)
def test_three_thousand_files_take_as_long_as_the_quota_makes_them(is_fixed, others, in_flight):
    """`others`: the share of another program."""
    a_minute = int(A_MINUTE * (1 - others))
    one = run(Service(a_minute, is_fixed=is_fixed), Process(3000, in_flight=in_flight))
    assert one.n_errors == 0
    assert one.most_failed <= 2
    assert one.good[-1] - START <= 1.1 * exact_s(3000, a_minute, in_flight)


def test_the_quota_of_a_new_project_is_found_at_its_first_full_minute_and_never_exceeded_again():
    one = run(Service(325_000, 200), Process(10_000, in_flight=64))
    assert one.limit.rung == 1
    assert 0 < len(one.refused) <= 6 + 2 * 64
    assert max(one.refused) < START + 30
    assert one.good[-1] - START <= 1.1 * exact_s(10_000, A_MINUTE, 64)


def test_a_learned_limit_is_used_for_an_hour():
    limit = run(Service(325_000, 200), Process(3000)).limit
    limit.wait_s("download", START + 3600)
    assert limit.rung == 1
    limit.wait_s("download", START + 3600 + 60)
    assert (limit.rung, limit.share) == (0, 1.0)  # the refusals may have been a mistake


def test_occasional_refusals_do_not_lower_the_rate():
    one = run(Service(12_000, noise=0.014), Process(1000))
    assert one.refused
    assert (one.limit.rung, one.limit.share) == (0, 1.0)


@pytest.mark.parametrize(("real", "at_least"), [(3.0, 2.7), (2.0, 1.8)])
def test_items_are_created_as_fast_as_the_service_allows(real, at_least):
    one = run(Bucket(real), Process(1000, in_flight=4, ladder=CREATES, kind="create"), until_s=300)
    assert sum(at >= START + 30 for at in one.good) >= 270 * at_least
    assert not [at for at in one.refused if at >= START + 30]
    assert one.good[10] >= START + 2  # never a burst


ladders = st.sampled_from([(REQUESTS, "download"), (REQUESTS, "get"), (CREATES, "create")])
lives = st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60)


@given(lives, ladders)
def test_after_any_answers_a_request_is_sent_after_its_wait(life, ladder):
    rates, kind = ladder
    limit, now = SentRequests(rates), START
    for by_s, refused in life:
        now += by_s
        limit.answered(limit.send(kind, now), now, refused=refused)
    for _ in range(3):
        wait_s = limit.wait_s(kind, now)
        assert 0 <= wait_s <= 61
        now += wait_s + 1e-3
    assert limit.wait_s(kind, now) == 0


@pytest.mark.parametrize(("n_processes", "is_fixed"), [(2, True), (8, False)])
def test_processes_that_share_a_quota_all_finish_without_errors(n_processes, is_fixed):
    """Each of them backs off; no request is refused as often as a read is tried."""
    processes = [Process(1000, in_flight=8, seed=i) for i in range(n_processes)]
    run(Service(325_000, 200, is_fixed=is_fixed), *processes)
    assert max(process.most_failed for process in processes) < RetryPolicy().tries
    took_s = [process.good[-1] - START for process in processes]
    assert max(took_s) <= 1.15 * (60 * n_processes * 1000 / A_MINUTE) + 15
    assert min(took_s) >= max(took_s) / 3


@pytest.mark.parametrize("seed", range(3))
def test_a_single_request_outlasts_a_minute_that_another_program_used_up(seed):
    service = Service(A_MINUTE)
    run(service, Process(A_MINUTE, in_flight=1000))
    one = run(service, Process(1, in_flight=1, begins_at=START + 3, seed=seed))
    assert (len(one.good), one.n_errors) == (1, 0)
    assert 1 <= one.most_failed < RetryPolicy().tries


def test_a_minute_of_an_old_project_is_used_up_and_never_exceeded():
    one = run(Service(12_000), Process(14_000, in_flight=64))
    assert not one.refused
    assert one.good[-1] - START <= 1.1 * exact_s(14_000, 12_000, 64)
