"""A queue of batches that threads make ahead of the consumer, in order and within limits."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.datasets.thread_choice import MadeBatch, ThreadChoice

UNKNOWN = 2  # batches made at the same time while their size is unknown
RECENT = 32  # recent batches; the largest of them is the estimate for the next
END_S = 5.0  # longest wait of `close` for the batches being made
Made = tuple[Any, MadeBatch]  # a batch, and how it was made


class BatchQueue:
    """The results of `make` for each of `jobs`, in order; as many threads as `threads` says make them in advance.

    Each thread calls `enter` before its first `make`. At most `most` batches, of an estimated `most_bytes`, are ready or
    being made; one may always be made. The consumer's thread makes all decisions. The threads end after `close`, when
    the queue is garbage-collected, and when the process ends.
    """

    def __init__(
        self,
        make: Callable[[Any], Made],
        jobs: Iterator[Any],
        *,
        threads: ThreadChoice,
        most: int,
        most_bytes: int,
        enter: Callable[[], object],
    ) -> None:
        self._jobs, self._most, self._most_bytes = jobs, most, most_bytes
        self._futures: deque[Future[Made]] = deque()
        self._made_by: deque[int] = deque()  # the number of threads of each future
        self._sizes: deque[int] = deque(maxlen=RECENT)
        self._pid = os.getpid()
        self._threads = threads
        threads.begin()
        self._pools = {n: DaemonThreadPool(n, "cachedfs-loader") for n in (1, threads.most)}
        entered: set[int] = set()

        # No method: a reference to `self` would keep the queue.
        def make_in_thread(job: Any) -> Made:
            if threading.get_ident() not in entered:
                entered.add(threading.get_ident())
                enter()
            return make(job)

        self._make = make_in_thread
        self._finalizer = weakref.finalize(self, _stop, self._pools.values(), self._futures, self._pid)

    def take(self) -> Made | None:
        """Wait for the next batch and return it, with how it was made; None after the last one.

        Raises the error that `make` raised, and RuntimeError in a forked child: the threads run in the parent only.
        """
        if self._pid != os.getpid():
            raise RuntimeError(
                "this loop belongs to the parent process; after a fork, start a new loop in the child"
            )
        self._fill()
        if not self._futures:
            return None
        while not self._futures[0].done():
            # The sizes of batches that finish earlier may allow to start more.
            wait([future for future in self._futures if not future.done()], return_when=FIRST_COMPLETED)
            self._fill()
        # Taken out first: an error has the frames of the consumer, and they have this queue, which the finalizer would keep.
        batch, made = self._futures.popleft().result()
        if not self._sizes:
            # Exit handlers run in reverse order. Registered after the first read, this one stops the threads before
            # the handlers of the libraries that read close their files.
            atexit.register(self._finalizer)
        self._sizes.append(made.size)
        self._threads.add(self._made_by.popleft(), made)
        self._fill()  # starts another batch, which is made while this one is used
        return batch, made

    def close(self) -> None:
        """Start no more batches, and wait up to 5 s for those being made. A thread ends after its batch."""
        self._jobs = iter(())
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _fill(self) -> None:
        while self._may_start():
            job = next(self._jobs, None)
            if job is None:
                return
            n = self._threads.next()
            self._made_by.append(n)
            self._futures.append(self._pools[n].submit(self._make, job))

    def _may_start(self) -> bool:
        if not self._futures or len(self._futures) >= self._most:
            return not self._futures
        done = [future for future in self._futures if future.done()]
        sizes = [future.result()[1].size for future in done if future.exception() is None]
        expected = max([*self._sizes, *sizes], default=None)
        if expected is None:
            return len(self._futures) < UNKNOWN
        return sum(sizes) + (len(self._futures) - len(done) + 1) * expected <= self._most_bytes


def _stop(pools: Iterable[DaemonThreadPool], futures: deque[Future[Made]], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child: the threads run in the parent only
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    making = [future for future in futures if not future.cancelled()]
    futures.clear()
    if threading.current_thread().name.startswith("cachedfs-"):
        return  # the garbage collector runs in a thread of ours, which the batches being made may need
    if not wait(making, END_S).not_done:
        for pool in pools:
            pool.shutdown()
