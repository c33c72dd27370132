"""Hedged requests: when a second one is sent, which answer counts, and what is cancelled."""

import asyncio

import pytest

from cachedfs.origins.hedging import HedgedRequests
from cachedfs.origins.retry import RetryableError, RetryPolicy, RetryReason

QUICK = RetryPolicy(hedge_least_s=0.01, hedge_early_s=0.02)
NEVER = 60.0  # never waited for


class Requests:
    """Requests with planned delays and results; records which were canceled or discarded."""

    def __init__(self, *plans):
        self.plans, self.n_sent = list(plans), 0
        self.cancelled, self.discarded = [], []
        self.second_sent = asyncio.Event()

    async def send(self):
        number, self.n_sent = self.n_sent, self.n_sent + 1
        if number:
            self.second_sent.set()
        wait_s, outcome = self.plans[number]
        try:
            if isinstance(wait_s, asyncio.Event):
                await wait_s.wait()
            else:
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def first(self, hedge):
        return await hedge.first(self.send(), self.send, self.discarded.append)


async def test_an_answer_in_time_is_one_request():
    requests = Requests((0, "a"))
    assert await requests.first(HedgedRequests(QUICK)) == "a"
    assert (requests.n_sent, requests.cancelled, requests.discarded) == (1, [], [])


async def test_a_late_request_is_sent_again_and_the_first_answer_is_used():
    requests = Requests((NEVER, "a"), (0, "b"))
    assert await requests.first(HedgedRequests(QUICK)) == "b"
    assert (requests.n_sent, requests.cancelled) == (2, [0])


async def test_the_first_request_may_still_answer_first():
    requests = Requests((None, "a"), (NEVER, "b"))
    requests.plans[0] = (requests.second_sent, "a")
    assert await requests.first(HedgedRequests(QUICK)) == "a"
    await asyncio.sleep(0)
    assert (requests.n_sent, requests.cancelled, requests.discarded) == (2, [1], [])


@pytest.mark.parametrize("is_first_late", [False, True])
async def test_a_failed_request_does_not_win_while_the_other_is_in_flight(is_first_late):
    failure = RetryableError(RetryReason("no"))
    requests = (
        Requests((None, failure), (0.05, "b")) if not is_first_late else Requests((0.1, "a"), (0, failure))
    )
    if not is_first_late:
        requests.plans[0] = (requests.second_sent, failure)
    assert await requests.first(HedgedRequests(QUICK)) == ("a" if is_first_late else "b")
    assert requests.n_sent == 2


async def test_if_both_fail_the_first_failure_is_raised():
    first, second = RetryableError(RetryReason("first")), RetryableError(RetryReason("second"))
    requests = Requests((0.05, first), (0, second))
    with pytest.raises(RetryableError, match="first"):
        await requests.first(HedgedRequests(QUICK))


@pytest.mark.parametrize("after_both", [False, True])
async def test_cancelling_leaves_no_request_behind(after_both):
    requests = Requests((NEVER, "a"), (NEVER, "b"))
    task = asyncio.ensure_future(requests.first(HedgedRequests(QUICK if after_both else RetryPolicy())))
    await (requests.second_sent.wait() if after_both else asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert sorted(requests.cancelled) == [0, 1][: requests.n_sent]
    assert len(asyncio.all_tasks()) == 1


async def test_the_answer_of_a_cancelled_caller_is_discarded():
    answers = asyncio.Event()
    requests = Requests((NEVER, "a"), (answers, "b"))
    task = asyncio.ensure_future(requests.first(HedgedRequests(QUICK)))
    await requests.second_sent.wait()
    answers.set()
    for _ in range(2):  # it has its answer, and its owner has not run since
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert requests.discarded == ["b"]


async def test_a_hedged_caller_can_still_be_cancelled_later():
    requests = Requests((NEVER, "a"), (0, "b"))

    async def read():
        assert await requests.first(HedgedRequests(QUICK)) == "b"
        assert asyncio.current_task().cancelling() == 0
        async with asyncio.timeout(0.01):
            await asyncio.sleep(NEVER)

    with pytest.raises(TimeoutError):
        await read()


async def test_lateness_is_learned_from_earlier_answers():
    hedge = HedgedRequests(RetryPolicy(hedge_least_s=0.02, hedge_early_s=NEVER))
    for _ in range(100):
        await Requests((0, "a")).first(hedge)
    requests = Requests((NEVER, "a"), (0, "b"))
    assert await requests.first(hedge) == "b"
