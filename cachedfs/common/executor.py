"""Threads for what blocks: calls of synchronous origins, long copies, questions to the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonThreadPool"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreadPool(ThreadPoolExecutor):
    """At most `most` threads, started as they are needed; an executor that the end of a process does not touch.

    The standard library's refuses all work as soon as the main thread has ended, though a program goes on while one of
    its own threads still reads; and no process ends before the last call in it has. These threads serve until the
    interpreter goes away, and go with it. It is a subclass because no event loop takes anything else.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(max_workers=most, thread_name_prefix=name)  # which starts no thread by itself
        self._most, self._name = most, name
        # Entered itself, and not by its condition: that one's `__enter__` is Python, and a Ctrl-C that comes in there leaves
        # the lock taken for ever, and its threads waiting for it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._started: list[threading.Thread] = []
        self._n_idle = 0
        self._is_over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError("these threads were shut down")
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            if len(self._jobs) > self._n_idle and len(self._started) < self._most:
                self._start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_over = True
            given_up = list(self._jobs) if cancel_futures else []
            self._jobs = deque() if cancel_futures else self._jobs
            self._changed.notify_all()
        for future, _ in given_up:
            if future.cancel():
                future.set_running_or_notify_cancel()  # else `concurrent.futures.wait` waits for it for ever
        for thread in self._started if wait else ():
            thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._started)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many of them, or the interpreter is going away: those that run will do
            if not self._started:
                self._jobs.pop()
                raise
        else:
            self._started.append(thread)

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for a job and do it; False when there will be none any more."""
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
            except BaseException as error:  # whatever it is: the one who waits for it is told
                future.set_exception(error)
                del future  # else its error and this frame would keep each other
        return True
