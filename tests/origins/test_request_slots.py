"""The number of requests in flight: how it adapts, and that slots follow it."""

import asyncio
from types import SimpleNamespace

import pytest

from cachedfs.origins import request_slots
from cachedfs.origins.request_slots import RequestSlots
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("limit", "rate", "is_full", "expected"),
    [
        (128, float("inf"), True, [64, 128, 128, 128]),
        (128, 640, True, [64, *[32] * 9, 64, 32]),  # 32 in 50 ms
        (128, float("inf"), False, [32, 32, 32]),
        (3, float("inf"), True, [3, 3, 3]),
    ],
    ids=["it grows while throughput does", "else it goes back", "slots are free", "the limit is reached"],
)
def test_the_window_adapts_to_throughput(limit, rate, is_full, expected):
    """In each round, as many requests end as the window has, 50 ms for each, and at most `rate` a second."""
    slots, now, windows = RequestSlots(limit), 1.0, list[int]()
    slots.begin_round(now)
    for _ in expected:
        now += max(0.05, slots.window / rate)
        slots.was_full, slots.n_ended, slots.n_bytes = is_full, slots.window, 100 * slots.window
        slots.end_round(now)
        windows.append(slots.window)
    assert windows == expected


@pytest.mark.parametrize(("limit", "expected"), [(128, [16, 4]), (3, [3, 3])])
def test_a_refusal_halves_the_window_once_for_all_requests_that_were_sent_before(limit, expected):
    slots = RequestSlots(limit)
    for _ in range(20):
        slots.refused(sent_at=0.0, now=1.0)
    windows = [slots.window]
    for number in range(2, 9):
        slots.refused(sent_at=float(number), now=float(number))
    assert [*windows, slots.window] == expected


async def taken(slots):
    """Return a request that has taken a slot."""
    manager = slots.slot("GET")
    request = await manager.__aenter__()
    request.manager = manager  # it would leave the block when it is freed
    return request


async def has_free_slot(slots):
    """Return whether a slot can be taken now; it is, then."""
    waiting = asyncio.ensure_future(taken(slots))
    for _ in range(5):
        await asyncio.sleep(0)
    return waiting.done() or not waiting.cancel()


async def test_slots_follow_the_window_down_as_requests_end():
    slots = RequestSlots(8)
    requests = [await taken(slots) for _ in range(8)]
    slots.refused(0.0, 0.0)
    assert slots.window == 4
    for _ in range(4):
        requests.pop().close()
    assert not await has_free_slot(slots)
    requests.pop().close()
    assert await has_free_slot(slots)
    assert not await has_free_slot(slots)


async def test_free_slots_are_taken_away_at_once():
    slots = RequestSlots(8)
    slots.refused(0.0, 0.0)
    assert [await has_free_slot(slots) for _ in range(6)] == [True] * 4 + [False] * 2


async def test_a_slot_is_released_once():
    slots = RequestSlots(1)
    request = await taken(slots)
    request.close()
    request.close()
    await taken(slots)
    assert not await has_free_slot(slots)


async def test_a_request_that_is_cancelled_while_it_waits_takes_no_slot():
    slots = RequestSlots(1)
    request = await taken(slots)
    waiting = [asyncio.ensure_future(taken(slots)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # before there is a slot
    await asyncio.sleep(0)
    request.close()
    waiting[1].cancel()  # when it has just got it
    assert await asyncio.wait_for(waiting[2], 10)
    assert waiting[1].cancelled()


async def test_a_pause_between_requests_is_no_part_of_a_round(monkeypatch):
    clock, slots = FakeClock(), RequestSlots(128)
    monkeypatch.setattr(request_slots, "time", SimpleNamespace(monotonic=clock))
    for window in (64, 128):
        requests = [await taken(slots) for _ in range(slots.window)]
        clock.now += 1.0
        for request in requests:
            request.is_good = True
            request.close()
        clock.now += 3600.0
        assert slots.window == window
