"""Run the methods of a `PackTask` in threads of this process, or in any `concurrent.futures.Executor`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from cachedfs.common.executor import DaemonThreadPool, n_cores
from cachedfs.packing.task import PackTask

__all__ = ["TaskPool", "dask_client"]

T = TypeVar("T")
R = TypeVar("R")


class TaskPool:
    """Runs methods of a `PackTask`, about `n_workers` at once. Reads, codecs and Arrow release the GIL."""

    def __init__(self, task: PackTask, executor: Any = None, n_workers: int = 0) -> None:
        """`executor` is an Executor or a Dask client; None: `n_workers` threads."""
        self._store, self._running = task.store, set[concurrent.futures.Future[Any]]()
        self.is_remote = executor is not None
        self._threads = DaemonThreadPool(n_workers or 1, "cachedfs-pack")
        self._call: tuple[Any, ...] = _here, task
        if not self.is_remote:
            self._executor: Any = self._threads
            self.n_workers = n_workers
            return
        given: Any = task
        most = getattr(executor, "_max_workers", None) or n_cores()
        if hasattr(executor, "get_executor"):  # a Dask client
            import dask

            # Each worker thread has one call queued while it runs another.
            most = 2 * sum(executor.nthreads().values())
            if not most:
                raise ValueError(f"{executor}: has no workers; start some, or pack without client=")
            # Each worker gets the task once, since its file list may be long.
            with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"}):
                given = executor.submit(_same, task, pure=False)
            executor = executor.get_executor(pure=False)
        self._executor, self.n_workers = executor, n_workers or most
        self._call = _there, uuid.uuid4().hex, given

    def submit(self, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        """Start a method of the task."""
        return self._noted(self._executor.submit(*self._call, method, args))

    def here(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Start a call in a thread of this process."""
        return self._noted(self._threads.submit(call, *args))

    def _noted(self, future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def in_order(self, method: str, items: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """Yield items, and what a method of the task returns for each."""
        calls = deque[tuple[T, concurrent.futures.Future[Any]]]()
        for item in items:
            calls.append((item, self.submit(method, item)))
            if len(calls) > self.n_workers:
                yield calls[0][0], calls.popleft()[1].result()
        yield from ((item, future.result()) for item, future in calls)

    def read_ahead(
        self, read: Callable[[T], Iterator[R]], items: Iterable[T]
    ) -> Iterator[tuple[T, Iterator[R]]]:
        """Yield items and iterators of what is read of each, in threads: the next parts of several are read ahead."""
        waiting, begun = iter(items), deque[tuple[T, Iterator[R], concurrent.futures.Future[Any]]]()

        def parts(source: Iterator[R], future: concurrent.futures.Future[Any]) -> Iterator[R]:
            while (part := future.result()) is not None:
                future = self.here(next, source, None)
                yield part

        while True:
            for item in islice(waiting, self.n_workers + 1 - len(begun)):
                begun.append((item, source := read(item), self.here(next, source, None)))
            if not begun:
                return
            item, source, future = begun.popleft()
            yield item, parts(source, future)

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


# The task of the pack that this worker does, by its token.
_tasks: dict[str, PackTask] = {}


def _here(task: PackTask, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(task, method)(*args)


def _there(token: str, task: PackTask, method: str, args: tuple[Any, ...]) -> Any:
    if token not in _tasks:
        _tasks.clear()
        _tasks[token] = task
    return _here(_tasks[token], method, args)


def _same(task: PackTask) -> PackTask:
    return task
