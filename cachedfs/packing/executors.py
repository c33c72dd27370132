"""Task pools that run a `PackTask`: threads of this process, or the workers of a Dask cluster."""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.packing.store import ZarrTarget
from cachedfs.packing.task import PackTask

__all__ = ["DaskTaskPool", "TaskPool", "ThreadTaskPool", "client_of", "settle"]


class ThreadTaskPool:
    """Runs methods of a `PackTask` in threads of this process. Reads, codecs and Arrow release the GIL."""

    def __init__(self, task: PackTask, n_workers: int) -> None:
        self.n_workers, self._task = n_workers, task
        self._threads = DaemonThreadPool(n_workers, "cachedfs-pack")
        self._running: set[concurrent.futures.Future[Any]] = set()

    def submit(self, method: str, *args: Any) -> Any:
        """Start a method of the task; return a handle of the call."""
        future = self._threads.submit(getattr(self._task, method), *args)
        self._running.add(future)
        return future

    def finished(self) -> list[tuple[Any, Any]]:
        """Wait for the next calls to end; return (handle, result) pairs. Raises the error of a failed call."""
        done, self._running = concurrent.futures.wait(
            self._running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [(future, future.result()) for future in done]

    def close(self, *, wait: bool) -> None:
        """Cancel all calls that have not started.

        With `wait`, also wait for the running calls to end, so that nothing is written afterwards. An interrupt passes
        False, because a call may hang.
        """
        store = self._task.store
        store.is_interrupted = not wait
        # Before `shutdown`: an interrupt may end that wait, too.
        _abandoned.setdefault(store.place, set()).update(self._running)
        self._threads.shutdown(wait=wait, cancel_futures=True)
        if wait:
            _abandoned.pop(store.place, None)


# Calls of interrupted packs that still run in this process, by target (`ZarrTarget.place`).
_abandoned: dict[tuple[str, str], set[concurrent.futures.Future[Any]]] = {}
os.register_at_fork(after_in_child=_abandoned.clear)  # the child has none of these threads


def settle(store: ZarrTarget) -> None:
    """Wait for running calls of an interrupted pack to the same target.

    A late upload could otherwise overwrite a new shard.
    """
    if running := _abandoned.pop(store.place, None):
        try:
            concurrent.futures.wait(running)
        except BaseException:  # an interrupt: the calls still run
            _abandoned.setdefault(store.place, set()).update(running)
            raise


class DaskTaskPool:
    """Runs methods of a `PackTask` on the workers of a Dask cluster.

    Dask runs the calls of a lost worker again on another one.
    """

    def __init__(self, task: PackTask, client: Any) -> None:
        import dask
        from distributed import as_completed

        self._client = client
        workers = client.scheduler_info(n_workers=-1)["workers"]
        self._addresses = sorted(workers)
        threads = sum(each["nthreads"] for each in workers.values())
        if not threads:
            raise ValueError(f"{client}: has no workers; start some, or pack without client=")
        self.n_workers = 2 * threads  # each worker thread has one call queued while it runs another
        # The task goes to each worker once, since its file list may be long. It is the result of a call, which the
        # scheduler can repeat. Scattered data is lost with the one worker where Dask keeps a copy.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"}):
            self._task = client.submit(_same, task, pure=False)
        self._running: set[Any] = set()
        self._done = as_completed(loop=client.loop)

    def submit(self, method: str, *args: Any) -> Any:
        # Prefer one worker for all pieces of a file: it has the file open at the end of the previous piece.
        at = self._addresses[args[0].file % len(self._addresses)] if method == "measure" else None
        future = self._client.submit(
            _do, self._task, method, args, workers=at, allow_other_workers=at is not None, pure=False
        )
        self._running.add(future)
        self._done.add(future)
        return future

    def finished(self) -> list[tuple[Any, Any]]:
        future = next(self._done)
        self._running.discard(future)
        return [(future, future.result())]

    def close(self, *, wait: bool) -> None:
        from distributed import wait as wait_for

        if wait and self._running:
            wait_for(list(self._running))  # `cancel` does not stop a running task
        for future in self._running:
            future.cancel()


TaskPool = ThreadTaskPool | DaskTaskPool


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
