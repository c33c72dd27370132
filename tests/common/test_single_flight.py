"""Callers of one lookup: when it is canceled. Who shares it, and its answers: `tests/core/test_lookups.py`."""

import asyncio

from cachedfs.common.single_flight import SingleFlight

SLOT = "caller", "b/x"


class Act:
    """A lookup that begins, and waits until it is canceled."""

    def __init__(self):
        self.has_begun, self.lookup, self.was_canceled = asyncio.Event(), None, False

    async def __call__(self, lookup):
        self.lookup = lookup
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_canceled = True
            raise


async def begun(flights, act):
    """Return a task that waits for a lookup, once that has begun."""
    task = asyncio.create_task(flights.run(SLOT, 1, act))
    await asyncio.sleep(0)  # the task waits for the lookup
    await act.has_begun.wait()
    return task


async def test_it_is_canceled_with_its_last_caller():
    flights, act = SingleFlight(), Act()
    first, second = await begun(flights, act), await begun(flights, act)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not act.was_canceled
    second.cancel()
    await asyncio.gather(second, act.lookup.task, return_exceptions=True)
    assert act.was_canceled
    assert flights._running == {}


async def test_its_callers_are_canceled_with_it():
    flights, act = SingleFlight(), Act()
    caller = await begun(flights, act)
    act.lookup.task.cancel()
    await asyncio.gather(caller, act.lookup.task, return_exceptions=True)
    assert caller.cancelled()
    assert flights._running == {}
