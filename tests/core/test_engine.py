"""Coroutines that cross from a thread, or from the event loop of a caller, to the loop of the engine."""

import asyncio
import contextvars
import threading
from functools import partial
from queue import SimpleQueue

import pytest

from cachedfs.core import polling, speculation, store_queue
from cachedfs.core.engine import Engine
from cachedfs.errors import OriginUnavailable
from cachedfs.prefetch import plan, requests
from tests.support import until

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def engine(tmp_path):
    engine = Engine(str(tmp_path), explicit=True)
    yield engine
    engine.close()


@pytest.fixture(params=["from a thread", "from a loop"])
def call(request, engine):
    """Run a coroutine on the loop of the engine, and return its result."""
    if request.param == "from a thread":
        return engine.run
    return lambda coroutine: asyncio.run(engine.await_on_loop(coroutine))


async def never():
    raise AssertionError


def test_the_waits_and_the_memory_that_are_promised():
    assert polling.OVERDUE_S == 30  # for a stopped process that fetches
    assert store_queue.DRAIN_S == 5  # at the end of a process
    assert requests.AWAY_S == 60  # of a plan, for an unreachable origin
    assert plan.POLL_S[1] == 0.05  # between two looks at what was read
    assert speculation.MEMORY >> 20 == 256  # MiB that are requested ahead and not on the disk


def test_a_coroutine_runs_on_the_loop_of_the_engine_in_the_context_of_its_caller(engine, call):
    async def seen():
        return asyncio.get_running_loop() is engine.loop, variable.get()

    token = variable.set("mine")
    assert call(seen()) == (True, "mine")
    variable.reset(token)
    assert call(seen()) == (True, "unset")


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


def test_reads_that_run_while_the_engine_is_closed_end_with_an_error(engine, call):
    begun, errors = threading.Event(), []

    async def wait():
        begun.set()
        await asyncio.Event().wait()

    def read():
        try:
            call(wait())
        except OriginUnavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert errors == ["the process is exiting: the read was canceled"]


def test_a_call_to_an_engine_that_is_closed_fails_and_leaves_no_coroutine_behind(engine, call):
    engine.run(asyncio.sleep(0))
    engine.close()
    coroutine = never()
    with pytest.raises(OriginUnavailable, match="exiting"):
        call(coroutine)
    assert coroutine.cr_frame is None


def test_a_thread_that_cannot_start_is_an_error_and_leaves_no_coroutine_behind(engine, call, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    coroutine = never()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(OriginUnavailable, match="can't start new thread"):
        call(coroutine)
    assert coroutine.cr_frame is None


def test_a_call_that_comes_between_the_last_step_of_the_loop_and_its_end_is_an_error(
    engine, call, monkeypatch
):
    loop, found, handed, begin = engine.loop, [], threading.Event(), engine._begin

    async def never():
        found.append("it ran")

    def late():
        with pytest.raises(OriginUnavailable, match="exiting"):
            call(never())
        found.append("an error")

    def handing(*args):
        begin(*args)
        if threading.current_thread() is thread:
            handed.set()

    def close():
        thread.start()
        assert handed.wait(60)
        type(loop).close(loop)

    thread = threading.Thread(target=late)
    monkeypatch.setattr(engine, "_begin", handing)
    monkeypatch.setattr(loop, "close", close)
    engine.close()
    thread.join(60)
    assert found == ["an error"]


def interrupt_after_start(monkeypatch, name):
    """Interrupt the next start of a thread of this name, once it runs; return a list that will have the thread."""
    start, interrupted = threading.Thread.start, []

    def started(thread):
        start(thread)
        if thread.name == name:
            monkeypatch.setattr(threading.Thread, "start", start)
            interrupted.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", started)
    return interrupted


def test_ctrl_c_in_the_start_of_the_loop_leaves_no_second_one(engine, call, monkeypatch):
    async def thread():
        return threading.current_thread()

    interrupted = interrupt_after_start(monkeypatch, "cachedfs-io")
    with pytest.raises(KeyboardInterrupt):
        call(thread())
    assert call(thread()) is engine.thread
    interrupted[0].join(60)
    assert not interrupted[0].is_alive()


def test_ctrl_c_in_the_start_of_the_writer_leaves_no_second_one(engine, monkeypatch):
    interrupted, ran = interrupt_after_start(monkeypatch, "cachedfs-write"), []
    with pytest.raises(KeyboardInterrupt):
        engine.store_queue.put(then=lambda: ran.append(1))
    engine.store_queue.put(then=lambda: ran.append(threading.current_thread()))
    assert engine.drain(60)
    interrupted[0].join(60)
    assert not interrupted[0].is_alive()
    assert ran[0] == 1
    assert ran[1] is not interrupted[0]


def test_what_is_added_to_a_closed_store_queue_is_stored(engine):
    queue, added = engine.store_queue, SimpleQueue()
    queue.put(then=lambda: (queue.close(), queue.put(then=partial(added.put, 1))))
    assert added.get(timeout=60) == 1
    queue.close()
    until(lambda: queue._thread is None)
    queue.put(then=partial(added.put, 2))
    assert added.get(timeout=60) == 2
