"""A pool of daemon threads for blocking calls: synchronous origins, long copies, disk access."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
AT_ONCE = 8  # files of a shared cache read or written at a time; each takes some MiB of memory


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class DaemonThreadPool(ThreadPoolExecutor):
    """A pool of at most `most` daemon threads, started on demand.

    It accepts work until the interpreter exits and does not delay the exit. The standard `ThreadPoolExecutor` refuses
    work once the main thread has ended, although other threads may still read, and the process cannot exit before its
    last call returns. This is a subclass of it because event loops accept no other class.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(max_workers=most, thread_name_prefix=name)  # starts no threads
        self._most, self._name = most, name
        # Enter this lock instead of the condition: `Condition.__enter__` is Python code, and a Ctrl-C inside it
        # would leave the lock held forever. Reentrant, because the garbage collector may shut down the pool.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._started: list[threading.Thread] = []
        self._n_idle = 0
        self._is_over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread and return its future. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError("the thread pool was shut down")
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            if len(self._jobs) > self._n_idle and len(self._started) < self._most:
                self._start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. Queued jobs still run, unless `cancel_futures`; `wait` joins the threads."""
        with self._lock:
            self._is_over = True
            canceled = list(self._jobs) if cancel_futures else []
            self._jobs = deque() if cancel_futures else self._jobs
            self._changed.notify_all()
        for future, _ in canceled:
            if future.cancel():
                future.set_running_or_notify_cancel()  # otherwise `concurrent.futures.wait` never returns
        for thread in self._started if wait else ():
            with suppress(RuntimeError):  # a Ctrl-C came before it was started
                thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._started)}", daemon=True)
        self._started.append(thread)  # first: a Ctrl-C may end `start` when the thread runs
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter exits: the running ones must do
            self._started.pop()
            if not self._started:
                self._jobs.pop()
                raise
        except BaseException:  # a Ctrl-C: nobody knows whether it runs, so another may take its place
            self._most += 1
            raise

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for a job and run it; return False after shutdown, when no job is left."""
        with self._lock:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_over)
            self._n_idle -= 1
            if not self._jobs:
                return False
            future, job = self._jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # of any kind: `future.result()` raises it
                future.set_exception(error)
                del future  # breaks a reference cycle between the error and this frame
        return True


def each_in_threads(work: Callable[[T], R], items: Iterable[T], *, at_once: int = AT_ONCE) -> list[R]:
    """Call `work` with each item, `at_once` at a time in threads; return the results. The first error ends it."""
    todo = list(items)
    if len(todo) == 1:
        return [work(todo[0])]
    pool = DaemonThreadPool(at_once, "cachedfs-each")
    try:
        return [future.result() for future in [pool.submit(work, item) for item in todo]]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
