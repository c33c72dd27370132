"""Callers of one lookup: who shares it, who gets its answer, and when it is canceled."""

import asyncio

import pytest

from cachedfs.common.single_flight import SingleFlight

SLOT = "caller", "b/x"


class Act:
    """A lookup that begins, waits for `go`, and then answers or raises."""

    def __init__(self, result=None, error=None):
        self.result, self.error, self.n = result, error, 0
        self.has_begun, self.go = asyncio.Event(), asyncio.Event()
        self.lookup, self.was_canceled = None, False

    async def __call__(self, lookup):
        self.lookup, self.n = lookup, self.n + 1
        self.has_begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.was_canceled = True
            raise
        if self.error is not None:
            raise self.error
        return self.result


async def begun(flights, act, counter=1):
    """Return a task that waits for a lookup, once that has begun."""
    task = asyncio.create_task(flights.run(SLOT, counter, act))
    await asyncio.sleep(0)  # the task waits for the lookup
    await act.has_begun.wait()
    return task


async def test_callers_share_a_lookup_with_the_same_counter_only():
    flights, act, other = SingleFlight(), Act("one"), Act("two")
    first, second, later = (
        await begun(flights, act),
        await begun(flights, act),
        await begun(flights, other, 2),
    )
    act.go.set(), other.go.set()
    assert await asyncio.gather(first, second, later) == ["one", "one", "two"]
    assert (act.n, other.n, flights._running) == (1, 1, {})


async def test_a_lookup_may_go_on_after_its_answer():
    flights, act, other = SingleFlight(), Act(), Act("two")
    caller = await begun(flights, act)
    act.lookup.answer("early")
    assert await caller == "early"
    assert not act.lookup.task.done()
    assert not await flights.wait(SLOT)  # nobody is to wait for the rest
    later = await begun(flights, other)
    act.go.set(), other.go.set()
    assert await later == "two"
    await act.lookup.task


async def test_all_callers_get_its_error():
    flights, act = SingleFlight(), Act(error=OSError("gone"))
    callers = [await begun(flights, act), await begun(flights, act)]
    waiting = asyncio.create_task(flights.wait(SLOT))
    await asyncio.sleep(0)
    act.go.set()
    for caller in callers:
        with pytest.raises(OSError, match="gone"):
            await caller
    assert await waiting
    assert flights._running == {}


async def test_it_is_canceled_with_its_last_caller():
    flights, act = SingleFlight(), Act("one")
    first, second = await begun(flights, act), await begun(flights, act)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not act.was_canceled
    second.cancel()
    await asyncio.gather(second, act.lookup.task, return_exceptions=True)
    assert act.was_canceled
    assert flights._running == {}


async def test_its_callers_are_canceled_with_it():
    flights, act = SingleFlight(), Act("one")
    caller = await begun(flights, act)
    act.lookup.task.cancel()
    await asyncio.gather(caller, act.lookup.task, return_exceptions=True)
    assert caller.cancelled()
    assert flights._running == {}
