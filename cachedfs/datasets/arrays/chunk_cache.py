"""Decoded chunks that are kept for the samples that follow, and the threads that decode them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["ChunkRequest", "BoundedLRU", "ChunkCache", "in_threads", "n_threads"]

T = TypeVar("T")
OWN_SIZE = 256  # bytes that it takes to keep even nothing


class BoundedLRU(Generic[T]):
    """Values up to a number of bytes; those used longest ago go first. In any thread."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._lock = threading.Lock()
        # Invariant: their sizes are `_size`.
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T, size: int) -> None:
        size += OWN_SIZE
        with self._lock:
            self._drop(key)
            self._values[key] = value, size
            self._size += size
            while self._size > self._limit:
                self._drop(next(iter(self._values)))

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        if key in self._values:
            self._size -= self._values.pop(key)[1]


class ChunkCache:
    """Decoded chunks up to a number of bytes, each decoded by one thread while others wait for it.

    A chunk goes when as many of its samples were taken as it has: in an epoch nobody comes for it again.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: BoundedLRU[_Chunk] = BoundedLRU(limit)
        self._lock = threading.Lock()
        self._awaited: dict[Hashable, _Chunk] = {}  # Invariant: those that a thread is decoding

    def take(self, key: Hashable, n: int, of: int, by: ChunkRequest) -> Future[Any]:
        """Return what will be the chunk. Where it is `by.future`, the caller is to decode it, and to call `fill` or `fail`.

        `n` of its `of` samples are taken. `by` has its future before anyone can wait for it: a Ctrl-C may come at any time.
        """
        with self._lock:
            chunk = self._awaited.get(key) or self._chunks.get(key)
            if chunk is None:
                chunk = _Chunk(of)
                by.future = chunk.future
                self._awaited[key] = chunk
            chunk.left -= n
            if chunk.left <= 0:
                self._chunks.drop(key)
            return chunk.future

    def fill(self, key: Hashable, value: Any, size: int, kept_as: Hashable) -> None:
        """Give a chunk to those that wait for it, and keep it for those who come for `kept_as`; None: do not."""
        with self._lock:
            chunk = self._awaited.pop(key)
            if chunk.left > 0 and kept_as is not None:
                self._chunks.put(kept_as, chunk, size)
        chunk.future.set_result(value)

    def fail(self, key: Hashable, future: Future[Any]) -> None:
        """Tell those that wait for a chunk that it does not come: their future is cancelled. Nothing if it came.

        REQUIRES: it is the caller's, from `take`.
        """
        with self._lock:
            chunk = self._awaited.get(key)
            if chunk is not None and chunk.future is future:
                del self._awaited[key]
        future.cancel()


class ChunkRequest(Protocol):
    """What asks for a chunk."""

    future: Future[Any] | None


class _Chunk:
    def __init__(self, left: int) -> None:
        self.left = left  # samples that were not taken
        self.future: Future[Any] = Future()


# Threads of this process.

_threads: tuple[int, ThreadPoolExecutor] | None = None
_threads_lock = threading.Lock()


def _renew() -> None:
    # The threads of a parent are not in its fork, and its lock may have been held.
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_renew)


def n_threads() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(call: Callable[[Any], object], given: Sequence[Any]) -> None:
    """Call with each of those given, in this thread and in those that all share. The first error is raised, after all ended."""
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = n_threads(), ThreadPoolExecutor(n_threads(), thread_name_prefix="cachedfs-decode")
        n, executor = _threads

    def some(start: int) -> None:
        for one in given[start::n]:
            call(one)

    futures = [executor.submit(some, start) for start in range(1, min(n, len(given)))]
    try:
        some(0)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
