"""Run the methods of a `PackTask` in threads of this process, or in any `concurrent.futures.Executor`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from cachedfs.common.executor import DaemonThreadPool, n_cores
from cachedfs.packing.task import PackTask

T = TypeVar("T")
R = TypeVar("R")
THREADS = 4  # that write shards by default: they wait for the target


class TaskPool:
    """Runs methods of a `PackTask`, about `n_workers` at once. Reads, codecs and Arrow release the GIL."""

    def __init__(self, task: PackTask, executor: Any, n_workers: int | None) -> None:
        """`executor` is an Executor or a Dask client; None: threads, by default `THREADS`."""
        self._store, self._running = task.store, set[concurrent.futures.Future[Any]]()
        self.is_remote = executor is not None
        n_workers = n_workers if n_workers or self.is_remote else THREADS
        self._threads = DaemonThreadPool(
            (n_workers or 1) + (0 if self.is_remote else n_cores()), "cachedfs-pack"
        )
        self._executor: Any = executor if self.is_remote else self._threads
        self._task: Any = task
        self.n_workers = n_workers or getattr(executor, "_max_workers", None) or n_cores()
        if hasattr(executor, "get_executor"):  # a Dask client
            self._use_dask(executor, task, n_workers)

    def _use_dask(self, client: Any, task: PackTask, n_workers: int | None) -> None:
        import dask

        if not (n_threads := sum(client.nthreads().values())):
            raise ValueError(f"{client}: has no workers; start some, or pack without client=")
        self.n_workers = n_workers or 2 * n_threads  # each has one call queued while it runs another
        # Each worker gets the task once, since its file list may be long. It is the result of a call, not scattered
        # data: Dask makes it again if its worker is lost.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"}):
            self._task = client.submit(copy.copy, task, pure=False)
        self._executor = client.get_executor(pure=False)

    def submit(self, method: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Start a method of `PackTask` on the task."""
        return self._noted(self._executor.submit(method, self._task, *args))

    def here(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Start a call in a thread of this process."""
        return self._noted(self._threads.submit(call, *args))

    def _noted(self, future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def ahead(self, begin: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yield items and what `begin` returns for each, after `begin` was called for the next few items.

        Threads read as many as there are cores, since others write.
        """
        most = self.n_workers if self.is_remote else min(self.n_workers, max(2, n_cores()))
        begun = deque[tuple[T, R]]()
        for item in items:
            begun.append((item, begin(item)))
            if len(begun) > most:
                yield begun.popleft()
        yield from begun

    def read_ahead(
        self, read: Callable[[T], Iterator[R]], items: Iterable[T]
    ) -> Iterator[tuple[T, Iterator[R]]]:
        """Yield items and iterators of what is read of each, in threads: the next parts of several are read ahead."""

        def begin(item: T) -> tuple[Iterator[R], concurrent.futures.Future[Any]]:
            return (source := read(item)), self.here(next, source, None)

        def parts(source: Iterator[R], future: concurrent.futures.Future[Any]) -> Iterator[R]:
            while (part := future.result()) is not None:
                future = self.here(next, source, None)
                yield part

        return ((item, parts(*begun)) for item, begun in self.ahead(begin, items))

    def close(self) -> None:
        """Wait for all calls to end, so that nothing is written afterwards. After an error, threads write no more."""
        running = [future for future in list(self._running) if not future.done()]
        self._store.is_interrupted = bool(running)
        concurrent.futures.wait(running)
        self._threads.shutdown()


@contextlib.contextmanager
def dask_client(client: Any) -> Iterator[Any]:
    """Return a context manager for a Dask client; `client` may be the address of its scheduler.

    Raises ImportError if distributed is not installed.
    """
    if not isinstance(client, str):
        yield client
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("packing on Dask needs distributed: pip install distributed") from error
    with Client(client, timeout=10) as made:
        yield made
