"""Threads that make batches ahead of who takes them, in order, and within bounds."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from cachedfs.common.executor import DaemonThreadPool

__all__ = ["QueueLimits", "BatchQueue", "PreparedBatch", "may_begin"]

UNKNOWN = 2  # batches that are made at once while nobody knows how large they are
RECENT = 32  # batches of which the largest tells how large the next may be
END_S = 5.0  # longest that `close` waits for batches that are being made


class QueueLimits(NamedTuple):
    """What may be ahead of who takes the batches: so many of them, and so many bytes."""

    n: int
    size: int


class PreparedBatch(NamedTuple):
    """A batch of so many samples, the bytes that it takes, how long a thread made it, and of that waited for bytes."""

    batch: Any
    n_samples: int
    size: int
    load_s: float
    read_s: float


def may_begin(bounds: QueueLimits, *, n_ahead: int, ready: int, n_making: int, expected: int | None) -> bool:
    """Return whether one more batch may be made.

    `n_ahead` of them are ready, with `ready` bytes, or being made: `n_making`. Each of those is expected to take `expected`
    bytes; None: that is not known yet. One may always be.
    """
    if n_ahead == 0:
        return True
    if n_ahead >= bounds.n:
        return False
    if expected is None:
        return n_ahead < UNKNOWN
    return ready + (n_making + 1) * expected <= bounds.size


class BatchQueue:
    """Results of `make` for each of `jobs`, in their order, made by `n_threads` threads ahead of `take`.

    All is decided in the thread that takes; the others only make. None of them is there after `close`, nor when this is
    dropped, nor at the end of the process.
    """

    def __init__(
        self,
        make: Callable[[Any], PreparedBatch],
        jobs: Iterator[Any],
        *,
        n_threads: int,
        bounds: QueueLimits,
        enter: Callable[[], object],
    ) -> None:
        """`enter` is called in each thread before all else there."""
        self._jobs, self._bounds = jobs, bounds
        self._ahead: deque[Future[PreparedBatch]] = deque()
        self._sizes: deque[int] = deque(maxlen=RECENT)
        self._pid = os.getpid()
        self._make = _Making(make, enter)
        self._pool = DaemonThreadPool(n_threads, "cachedfs-loader")
        self._end = weakref.finalize(self, _end, self._pool, self._ahead, self._make.threads, self._pid)

    def take(self) -> PreparedBatch | None:
        """Return the next batch; None after the last. Raises what making it raised."""
        self._fill()
        if not self._ahead:
            return None
        while not self._ahead[0].done():
            # Others that come before it tell how large they are, so that more may be begun.
            wait([future for future in self._ahead if not future.done()], return_when=FIRST_COMPLETED)
            self._fill()
        made = self._ahead[0].result()
        if not self._sizes:
            # At exit the last who registered is the first: batches are no longer made when what they are read by is closed.
            atexit.register(self._end)
        self._ahead.popleft()
        self._sizes.append(made.size)
        self._fill()  # there is room for another, which is made while this one is used
        return made

    def must_be_ours(self) -> None:
        """Raise RuntimeError in a child of the process that began it: the threads are not there."""
        if self._pid != os.getpid():
            raise RuntimeError("this loop was begun before a fork and stays with the parent: begin one here")

    def close(self) -> None:
        """Make no more. What is being made is waited for some seconds; its thread ends with it."""
        self._jobs = iter(())
        self._end()
        atexit.unregister(self._end)

    def _fill(self) -> None:
        while self._may_begin():
            job = next(self._jobs, None)
            if job is None:
                return
            self._ahead.append(self._pool.submit(self._make, job))

    def _may_begin(self) -> bool:
        done = [future for future in self._ahead if future.done()]
        sizes = [future.result().size for future in done if future.exception() is None]
        known = [*self._sizes, *sizes]
        return may_begin(
            self._bounds,
            n_ahead=len(self._ahead),
            ready=sum(sizes),
            n_making=len(self._ahead) - len(done),
            expected=max(known, default=None),
        )


class _Making:
    """Makes batches in any thread, and begins there what has to be begun in each."""

    def __init__(self, make: Callable[[Any], PreparedBatch], enter: Callable[[], object]) -> None:
        self._make, self._enter = make, enter
        self.threads: set[int] = set()

    def __call__(self, job: Any) -> PreparedBatch:
        if threading.get_ident() not in self.threads:
            self.threads.add(threading.get_ident())
            self._enter()
        return self._make(job)


def _end(pool: DaemonThreadPool, ahead: deque[Future[PreparedBatch]], threads: set[int], pid: int) -> None:
    if pid != os.getpid():
        return  # the threads are the parent's
    pool.shutdown(wait=False, cancel_futures=True)
    making = [future for future in ahead if not future.cancelled()]
    ahead.clear()
    if threading.get_ident() in threads:
        return  # the garbage collector came by in one of them
    if not wait(making, END_S).not_done:
        pool.shutdown()
