"""The number of requests in flight: how it adapts, and that slots follow it."""

import asyncio

from cachedfs.origins.request_slots import ConcurrencyWindow, OpenRequest, RequestSlots, speculative


class Service:
    """Finished requests of a service with `rate` requests a second at most, 50 ms for each."""

    def __init__(self, window, rate=float("inf")):
        self.window, self.rate, self.now = window, rate, 0.0

    def round(self, *, is_full=True):
        """Finish as many requests as the window has."""
        n = self.window.size
        self.window.was_full |= is_full
        self.now += max(0.05, n / self.rate)
        self.window.n, self.window.total = n, 100 * n
        self.window.end_round(self.now)


def test_the_window_grows_to_the_limit_while_throughput_grows():
    window = ConcurrencyWindow(128)
    service = Service(window)
    sizes = []
    for _ in range(6):
        service.round()
        sizes.append(window.size)
    assert sizes == [64, 128, 128, 128, 128, 128]


def test_the_window_goes_back_when_more_requests_are_not_faster():
    window = ConcurrencyWindow(128)
    service = Service(window, rate=640)  # 32 in 50 ms
    sizes = []
    for _ in range(12):
        service.round()
        sizes.append(window.size)
    assert sizes == [64, *[32] * 9, 64, 32]


def test_the_window_does_not_grow_while_slots_are_free():
    window = ConcurrencyWindow(128)
    service = Service(window)
    for _ in range(5):
        service.round(is_full=False)
    assert window.size == 32


def test_a_refusal_halves_the_window_once_for_all_requests_that_were_sent_before():
    window = ConcurrencyWindow(128)
    for _ in range(20):
        window.refused(sent_at=0.0, now=1.0)
    assert window.size == 16
    for number in range(2, 9):
        window.refused(sent_at=float(number), now=float(number))
    assert window.size == 4


def test_a_small_limit_is_never_exceeded():
    window = ConcurrencyWindow(3)
    service = Service(window)
    for _ in range(5):
        service.round()
    window.refused(sent_at=service.now, now=service.now)
    assert window.size == 3


async def taken(slots, *, n_bytes=None):
    """Return a request that has taken a slot, and that succeeds with `n_bytes` if there are any."""
    return OpenRequest(
        "GET", "", "", slots, await slots.acquire(), size=n_bytes or 0, is_good=n_bytes is not None
    )


async def test_slots_follow_the_window_down_as_requests_end_and_up_at_once():
    slots = RequestSlots(8, clock=lambda: 0.0)
    requests = [await taken(slots) for _ in range(8)]
    waiting = asyncio.ensure_future(taken(slots))
    slots.refused(sent_at=0.0)
    assert slots.window == 4
    for _ in range(4):
        requests.pop().close()
    await asyncio.sleep(0)
    assert not waiting.done()
    requests.pop().close()
    assert await asyncio.wait_for(waiting, 10)


async def test_a_slot_is_released_once():
    slots = RequestSlots(1)
    request = await taken(slots)
    request.close()
    request.close()
    await taken(slots)
    waiting = asyncio.ensure_future(taken(slots))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


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


async def test_a_pause_between_requests_is_no_part_of_a_round():
    now = 1000.0
    slots = RequestSlots(128, clock=lambda: now)
    for window in (64, 128):
        requests = [await taken(slots, n_bytes=100) for _ in range(slots.window)]
        now += 1.0
        for request in requests:
            request.close()
        now += 3600.0
        assert slots.window == window


async def test_speculative_requests_have_twice_as_many_slots_of_their_own():
    slots = RequestSlots(2)
    await taken(slots)
    await taken(slots)
    with speculative():
        for _ in range(4):
            await asyncio.wait_for(taken(slots), 10)
        waiting = asyncio.ensure_future(taken(slots))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
