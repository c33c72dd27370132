"""Coroutines that cross from the event loop of a caller to that of the engine."""

import asyncio
import contextvars
import threading

import pytest

from cachedfs.core.loop_bridge import LoopBridge

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def loop():
    """An event loop in a thread of its own, which counts how often other threads wake it."""
    loop = asyncio.new_event_loop()
    wake, loop.n_woken = loop.call_soon_threadsafe, 0

    def counted(*args, **options):
        loop.n_woken += 1
        return wake(*args, **options)

    loop.call_soon_threadsafe = counted
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    wake(loop.stop)
    thread.join()
    loop.close()


def test_what_is_called_in_one_turn_of_the_loop_wakes_the_other_once_and_what_ends_there_as_well(loop):
    async def square(number):
        assert asyncio.get_running_loop() is loop
        return number * number

    async def main():
        here = asyncio.get_running_loop()
        woken, wake = [], here.call_soon_threadsafe
        here.call_soon_threadsafe = lambda *args, **options: (woken.append(1), wake(*args, **options))
        bridge = LoopBridge(here, loop)
        # The other loop runs nothing until all are called, nor this one until all have ended.
        may_go_on = threading.Event()
        loop.call_soon_threadsafe(may_go_on.wait, 60)
        tasks = [asyncio.ensure_future(bridge.run(square(number))) for number in range(20)]
        await asyncio.sleep(0)
        n_woken = loop.n_woken
        may_go_on.set()
        asyncio.run_coroutine_threadsafe(turns(), loop).result(60)
        return await asyncio.gather(*tasks), n_woken, len(woken)

    async def turns():
        for _ in range(3):  # until all have ended
            await asyncio.sleep(0)

    assert asyncio.run(main()) == ([number * number for number in range(20)], 2, 1)


def test_a_coroutine_runs_in_the_context_of_its_caller(loop):
    async def seen():
        return variable.get()

    async def main():
        bridge = LoopBridge(asyncio.get_running_loop(), loop)
        first = asyncio.ensure_future(bridge.run(seen()))
        variable.set("mine")
        return await first, await bridge.run(seen())

    assert asyncio.run(main()) == ("unset", "mine")


def test_errors_reach_the_caller(loop):
    async def fail():
        raise FileNotFoundError("gone")

    async def main():
        await LoopBridge(asyncio.get_running_loop(), loop).run(fail())

    with pytest.raises(FileNotFoundError, match="gone"):
        asyncio.run(main())


def test_a_cancelled_call_is_cancelled_there(loop):
    begun, cancelled = threading.Event(), threading.Event()

    async def wait():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def main():
        task = asyncio.ensure_future(LoopBridge(asyncio.get_running_loop(), loop).run(wait()))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(cancelled.wait, 60)

    asyncio.run(main())
    assert cancelled.is_set()


def test_a_call_to_a_loop_that_is_closed_fails_and_leaves_no_coroutine_behind():
    closed = asyncio.new_event_loop()
    closed.close()

    async def never():
        raise AssertionError

    async def main():
        coroutine = never()
        with pytest.raises(RuntimeError, match="closed"):
            await LoopBridge(asyncio.get_running_loop(), closed).run(coroutine)
        assert coroutine.cr_frame is None

    asyncio.run(main())
