"""The thread pool: number of threads, errors, cancellation, shutdown."""

import concurrent.futures
import threading
from concurrent.futures import CancelledError

import pytest

from cachedfs.common.executor import DaemonThreadPool
from tests.support import until


@pytest.fixture
def workers():
    made = DaemonThreadPool(4, "test")
    yield made
    made.shutdown()


def test_a_thousand_jobs_are_done_by_four_threads(workers):
    seen, together = set(), threading.Barrier(4)

    def job(i):
        seen.add(threading.current_thread())
        if i < 4:
            together.wait(120)
        return i * i

    assert list(workers.map(job, range(1000))) == [i * i for i in range(1000)]
    assert len(seen) == 4


def test_an_error_is_raised_by_the_future_and_the_thread_continues(workers):
    for error in (ValueError("mine"), SystemExit(3)):

        def failing(error=error):
            raise error

        with pytest.raises(type(error)):
            workers.submit(failing).result()
    assert workers.submit(lambda: 1).result() == 1


def test_a_shutdown_ends_the_threads_and_cancels_queued_jobs():
    workers, go_on = DaemonThreadPool(1, "test"), threading.Event()
    running, waiting = workers.submit(go_on.wait), workers.submit(int)
    until(running.running)
    workers.shutdown(wait=False, cancel_futures=True)
    assert concurrent.futures.wait([waiting], timeout=0).done == {waiting}
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="shut down"):
        workers.submit(int)
    go_on.set()
    workers.shutdown()
    assert running.result() is True
    assert not [thread for thread in workers._started if thread.is_alive()]


def test_running_threads_do_all_jobs_if_no_other_can_be_started(workers, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        workers.submit(int)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert workers.submit(int).result() == 0
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(workers.map(abs, range(-3, 0))) == [3, 2, 1]


@pytest.mark.parametrize("starts", [True, False])
def test_ctrl_c_while_a_thread_starts_leaves_a_pool_that_works_and_no_thread_behind(monkeypatch, starts):
    pool, gate, start = DaemonThreadPool(1, "test-interrupted"), threading.Event(), threading.Thread.start

    def interrupted(thread):
        if starts:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(gate.wait, 120)
    monkeypatch.undo()
    done = pool.submit(abs, -2)
    gate.set()
    assert done.result(60) == 2
    pool.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("test-interrupted")]
