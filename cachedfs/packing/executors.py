"""Who does the work: threads of this process, or the processes of a Dask cluster. Both do the same jobs."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from typing import Any, Protocol

from cachedfs.common.executor import DaemonThreadPool
from cachedfs.packing.store import ZarrTarget
from cachedfs.packing.task import PackTask

__all__ = ["DaskTaskPool", "TaskPool", "ThreadTaskPool", "client_of", "settle"]


class TaskPool(Protocol):
    """Runs methods of a job, several at a time."""

    n_workers: int

    def submit(self, method: str, *args: Any) -> Any:
        """Begin one; return what stands for it."""
        ...

    def finished(self) -> Iterable[tuple[Any, Any]]:
        """Wait until any has ended; return those that have, each with its result. Raises what one raised."""
        ...

    def close(self, *, wait: bool) -> None:
        """Give up what has not begun, and wait for what has, so that nothing is written afterwards; unless it may hang."""
        ...


class ThreadTaskPool:
    """Threads: reading, codecs and Arrow let go of the interpreter's lock."""

    def __init__(self, job: PackTask, n_workers: int) -> None:
        self.n_workers, self._job = n_workers, job
        self._threads = DaemonThreadPool(n_workers, "cachedfs-pack")
        self._going: set[concurrent.futures.Future[Any]] = set()

    def submit(self, method: str, *args: Any) -> Any:
        future = self._threads.submit(getattr(self._job, method), *args)
        self._going.add(future)
        return future

    def finished(self) -> Iterable[tuple[Any, Any]]:
        done, self._going = concurrent.futures.wait(
            self._going, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [(future, future.result()) for future in done]

    def close(self, *, wait: bool) -> None:
        store = self._job.store
        store.is_given_up = not wait
        _left.setdefault(store.place, set()).update(self._going)  # first: to wait may be interrupted, too
        self._threads.shutdown(wait=wait, cancel_futures=True)
        if wait:
            _left.pop(store.place, None)


# What interrupted packs of this process still do, by the place that they write to.
_left: dict[tuple[str, str], set[concurrent.futures.Future[Any]]] = {}
os.register_at_fork(after_in_child=_left.clear)  # the child has none of these threads


def settle(store: ZarrTarget) -> None:
    """Wait until nothing that was interrupted can write to a place any more: an upload that was begun may end late."""
    if going := _left.pop(store.place, None):
        try:
            concurrent.futures.wait(going)
        except BaseException:  # an interrupt: it is still so
            _left.setdefault(store.place, set()).update(going)
            raise


class DaskTaskPool:
    """The workers of a Dask cluster. What one of them did not finish when it was lost is done by another."""

    def __init__(self, job: PackTask, client: Any) -> None:
        import dask
        from distributed import as_completed

        self._client = client
        workers = client.scheduler_info(n_workers=-1)["workers"]
        self._addresses = sorted(workers)
        threads = sum(each["nthreads"] for each in workers.values())
        if not threads:
            raise ValueError(f"{client}: has no workers; start some, or pack without client=")
        self.n_workers = 2 * threads  # one waits while another is done
        # Once to each worker: the list of a source's files may be long. As a task's result, which the scheduler can have made
        # again: of what is scattered to all, Dask drops all copies but one, and that is gone with its worker.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"}):
            self._job = client.submit(_same, job, pure=False)
        self._going: set[Any] = set()
        self._done = as_completed(loop=client.loop)

    def submit(self, method: str, *args: Any) -> Any:
        # The pieces of one file at one worker, if it is free: it has the file open where the piece before ended.
        at = self._addresses[args[0].file % len(self._addresses)] if method == "measure" else None
        future = self._client.submit(
            _do, self._job, method, args, workers=at, allow_other_workers=at is not None, pure=False
        )
        self._going.add(future)
        self._done.add(future)
        return future

    def finished(self) -> Iterable[tuple[Any, Any]]:
        future = next(self._done)
        self._going.discard(future)
        return [(future, future.result())]

    def close(self, *, wait: bool) -> None:
        from distributed import wait as wait_for

        if wait and self._going:
            wait_for(list(self._going))  # a task that is cancelled goes on where it runs
        for future in self._going:
            future.cancel()


def client_of(address: str) -> Any:
    """Return a client of the Dask scheduler at an address. Raises ImportError saying what to install."""
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("packing on Dask needs it: pip install distributed") from error
    return Client(address, timeout=10)


def _same(job: PackTask) -> PackTask:
    return job


def _do(job: PackTask, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(job, method)(*args)
