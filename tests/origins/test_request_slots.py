"""The number of requests in flight: how it adapts, and that slots follow it."""

import asyncio

from cachedfs.origins.request_slots import ConcurrencyWindow, RequestSlots, speculative


class Service:
    """Finished requests of a service with `rate` requests a second at most, 50 ms for each."""

    def __init__(self, window, rate=float("inf")):
        self.window, self.rate, self.now = window, rate, 0.0

    def round(self, *, is_full=True):
        """Finish as many requests as the window has."""
        n = self.window.size
        self.window.was_full |= is_full
        self.now += max(0.05, n / self.rate)
        for _ in range(n):
            self.window.finished(100, self.now)


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


async def test_slots_follow_the_window_down_as_requests_end_and_up_at_once():
    slots = RequestSlots(8, clock=lambda: 0.0)
    for _ in range(8):
        await slots.semaphore().acquire()
    waiting = asyncio.ensure_future(slots.semaphore().acquire())
    slots.refused(sent_at=0.0)
    assert slots.window == 4
    for _ in range(4):
        slots.semaphore().release()
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.semaphore().release()
    await asyncio.sleep(0)
    assert waiting.done()


async def test_a_pause_between_requests_is_no_part_of_a_round():
    now = 1000.0
    slots = RequestSlots(128, clock=lambda: now)
    for window in (64, 128):
        held = [slots.semaphore() for _ in range(slots.window)]
        for slot in held:
            await slot.acquire()
        now += 1.0
        for slot in held:
            slots.finished(100)
            slot.release()
        now += 3600.0
        assert slots.window == window


async def test_speculative_requests_have_twice_as_many_slots_of_their_own():
    slots = RequestSlots(2)
    await slots.semaphore().acquire()
    await slots.semaphore().acquire()
    with speculative():
        for _ in range(4):
            await asyncio.wait_for(slots.semaphore().acquire(), 10)
        assert slots.semaphore().locked()
