"""Task pools that run a `PackTask`: threads of this process, or the workers of a Dask cluster."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.packing.store import ZarrTarget
from cachedfs.packing.task import PackTask

__all__ = ["DaskTaskPool", "TaskPool", "ThreadTaskPool", "client_of", "settle"]


class TaskPool:
    """Runs methods of a `PackTask`, up to `n_workers` at a time."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self._running: set[Future[Any]] = set()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Start a method of the task."""
        future = self._start(method, args)
        self._running.add(future)
        return future

    def _start(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        raise NotImplementedError

    def finished(self) -> list[tuple[Future[Any], Any]]:
        """Wait for the next calls to end; return (future, result) pairs. Raises the error of a failed call."""
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        return [(future, future.result()) for future in done]

    def close(self, *, is_waiting: bool) -> None:
        """Cancel all calls that have not started.

        With `is_waiting`, also wait for the running calls to end, so that nothing is written afterwards. An interrupt
        passes False, because a call may hang.
        """
        raise NotImplementedError


class ThreadTaskPool(TaskPool):
    """Threads of this process. Reads, codecs and Arrow release the GIL."""

    def __init__(self, task: PackTask, n_workers: int) -> None:
        super().__init__(n_workers)
        self._task, self._threads = task, DaemonThreadPool(n_workers, "cachedfs-pack")

    def _start(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        return self._threads.submit(getattr(self._task, method), *args)

    def close(self, *, is_waiting: bool) -> None:
        store = self._task.store
        store.is_interrupted = not is_waiting
        # Before `shutdown`: an interrupt may end that wait, too.
        _abandoned.setdefault(store.place, set()).update(self._running)
        self._threads.shutdown(wait=is_waiting, cancel_futures=True)
        if is_waiting:
            _abandoned.pop(store.place, None)


# Calls of interrupted packs that still run in this process, by target (`ZarrTarget.place`).
_abandoned: dict[tuple[str, str], set[Future[Any]]] = {}
os.register_at_fork(after_in_child=_abandoned.clear)  # the child has none of these threads


def settle(store: ZarrTarget) -> None:
    """Wait for running calls of an interrupted pack to the same target.

    A late upload could otherwise overwrite a new shard.
    """
    if running := _abandoned.pop(store.place, None):
        try:
            wait(running)
        except BaseException:  # an interrupt: the calls still run
            _abandoned.setdefault(store.place, set()).update(running)
            raise


class DaskTaskPool(TaskPool):
    """The workers of a Dask cluster. Dask runs the calls of a lost worker again on another one."""

    def __init__(self, task: PackTask, client: Any) -> None:
        import dask

        workers = client.scheduler_info(n_workers=-1)["workers"]
        threads = sum(each["nthreads"] for each in workers.values())
        if not threads:
            raise ValueError(f"{client}: has no workers; start some, or pack without client=")
        super().__init__(2 * threads)  # each worker thread has one call queued while it runs another
        self._addresses = sorted(workers)
        self._executor = client.get_executor(pure=False)
        # The task goes to each worker once, since its file list may be long. It is the result of a call, which the
        # scheduler can repeat. Scattered data is lost with the one worker where Dask keeps a copy.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"}):
            self._task = client.submit(_same, task, pure=False)

    def _start(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        # Prefer one worker for all pieces of a file: it has the file open at the end of the previous piece.
        at = self._addresses[args[0].file % len(self._addresses)] if method == "measure" else None
        found: Future[Any] = self._executor.submit(
            _do, self._task, method, args, workers=at, allow_other_workers=at is not None
        )
        return found

    def close(self, *, is_waiting: bool) -> None:
        if is_waiting:  # `cancel` does not stop a running call
            wait(self._running)
        for future in self._running:
            future.cancel()


def client_of(address: str) -> Any:
    """Return a client of the Dask scheduler at an address.

    Raises ImportError if distributed is not installed.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("packing on Dask needs distributed: pip install distributed") from error
    return Client(address, timeout=10)


def _same(task: PackTask) -> PackTask:
    return task


def _do(task: PackTask, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(task, method)(*args)
