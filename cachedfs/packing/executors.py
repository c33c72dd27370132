"""Run the methods of a `PackTask` in threads of this process, or in any `concurrent.futures.Executor`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from cachedfs.common.executor import DaemonThreadPool, n_cores
from cachedfs.packing.task import PackTask

__all__ = ["TaskPool", "dask_client"]


class TaskPool:
    """Runs methods of a `PackTask`, up to `n_workers` at once. Reads, codecs and Arrow release the GIL."""

    def __init__(self, task: PackTask, executor: Any = None, n_workers: int | None = None) -> None:
        """`executor` is an Executor or a Dask client; None: `n_workers` threads."""
        self._store, self._running = task.store, set[concurrent.futures.Future[Any]]()
        self._threads: DaemonThreadPool | None = None
        self._call: tuple[Any, ...] = _here, task
        if executor is None:
            self.n_workers = n_workers or 1
            self._executor: Any = DaemonThreadPool(self.n_workers, "cachedfs-pack")
            self._threads = self._executor
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
        future: concurrent.futures.Future[Any] = self._executor.submit(*self._call, method, args)
        self._running.add(future)
        return future

    def finished(self) -> list[tuple[concurrent.futures.Future[Any], Any]]:
        """Wait for the next calls to end; return (future, result) pairs. Raises the error of a failed call."""
        first = concurrent.futures.FIRST_COMPLETED
        done, self._running = concurrent.futures.wait(self._running, return_when=first)
        return [(future, future.result()) for future in done]

    def close(self) -> None:
        """Wait for all calls to end, so that nothing is written afterwards. After an error, threads write no more."""
        self._store.is_interrupted = bool(self._running)
        concurrent.futures.wait(self._running)
        if self._threads is not None:
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


# The task of the pack that this worker does, with its open files, by its token.
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
