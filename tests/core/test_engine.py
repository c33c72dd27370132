"""Coroutines that cross from a thread, or from the event loop of a caller, to the loop of the engine."""

import asyncio
import contextvars
import threading

import pytest

from cachedfs.core.engine import Engine
from cachedfs.errors import OriginUnavailable
from tests.support import until

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def engine(tmp_path):
    engine = Engine([str(tmp_path)], explicit=True)
    yield engine
    engine.close()


@pytest.fixture(params=["from a thread", "from a loop"])
def call(request, engine):
    """Run a coroutine on the loop of the engine, and return its result."""
    if request.param == "from a thread":
        return engine.run
    return lambda coroutine: asyncio.run(engine.await_on_loop(coroutine))


def test_a_coroutine_runs_on_the_loop_of_the_engine_in_the_context_of_its_caller(engine, call):
    async def seen():
        return asyncio.get_running_loop() is engine.loop, variable.get()

    token = variable.set("mine")
    assert call(seen()) == (True, "mine")
    variable.reset(token)
    assert call(seen()) == (True, "unset")


def test_errors_reach_the_caller(call):
    async def fail():
        raise TimeoutError("gone")

    with pytest.raises(TimeoutError, match="gone"):
        call(fail())


def test_a_call_on_the_loop_of_the_engine_stays_there(engine):
    async def one():
        return 1

    async def both():
        with pytest.raises(RuntimeError, match="would deadlock"):
            engine.run(one())
        return await engine.await_on_loop(one())

    assert engine.run(both()) == 1


def test_a_cancelled_call_is_cancelled_there(engine):
    begun, cancelled = threading.Event(), threading.Event()

    async def wait():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def main():
        task = asyncio.ensure_future(engine.await_on_loop(wait()))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(cancelled.wait, 60)

    asyncio.run(main())
    assert cancelled.is_set()


def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing_behind(engine):
    may_go_on = threading.Event()

    async def never():
        raise AssertionError

    async def main():
        engine.loop.call_soon_threadsafe(may_go_on.wait, 60)
        coroutine = never()
        task = asyncio.ensure_future(engine.await_on_loop(coroutine))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await asyncio.to_thread(until, lambda: coroutine.cr_frame is None)

    asyncio.run(main())
    assert engine._tasks == {}


def test_reads_that_run_while_the_engine_is_closed_end_with_an_error(engine):
    begun, errors = threading.Event(), []

    async def wait():
        begun.set()
        await asyncio.Event().wait()

    def read():
        try:
            engine.run(wait())
        except OriginUnavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert errors == ["the process is exiting: the read was canceled"]


def test_a_call_to_an_engine_that_is_closed_fails_and_leaves_no_coroutine_behind(engine, call):
    async def never():
        raise AssertionError

    assert engine.loop.is_running()
    engine.close()
    coroutine = never()
    with pytest.raises(RuntimeError, match="closed"):
        call(coroutine)
    assert coroutine.cr_frame is None


def test_a_thread_that_cannot_start_is_an_error_and_leaves_no_coroutine_behind(engine, call, monkeypatch):
    async def never():
        raise AssertionError

    def fail(thread):
        raise RuntimeError("can't start new thread")

    coroutine = never()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(OriginUnavailable, match="can't start new thread"):
        call(coroutine)
    assert coroutine.cr_frame is None
