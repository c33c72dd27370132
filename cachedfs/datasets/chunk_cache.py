"""The cache of decoded chunks that later samples need, and the threads that decode chunks."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from cachedfs.common.executor import n_cores

__all__ = ["BoundedLRU", "ChunkCache", "ChunkRequest", "in_threads"]

T = TypeVar("T")
OWN_SIZE = 256  # bytes that each entry takes in addition to its value


class BoundedLRU(Generic[T]):
    """A thread-safe LRU cache, bounded by the bytes of its values."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._lock = threading.Lock()
        # Invariant: the sizes of all values add up to `_size`.
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
    """Decoded chunks up to a number of bytes.

    One thread decodes a chunk; other threads wait for the result. A chunk is dropped when all its samples were taken,
    because an epoch reads each sample only once.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: BoundedLRU[_Chunk] = BoundedLRU(limit)
        self._lock = threading.Lock()
        self._awaited: dict[Hashable, _Chunk] = {}  # Invariant: the chunks that a thread is decoding

    def take(self, key: Hashable, n: int, of: int, by: ChunkRequest) -> Future[Any]:
        """Return the future of a chunk, and take `n` of the chunk's `of` samples.

        If it is `by.future`, the caller must decode the chunk and call `fill` or `fail`. `by.future` is set before
        another thread can wait for it, because Ctrl-C may interrupt at any time.
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
        """Give a chunk to the threads that wait for it, and cache it under `kept_as` unless it is None."""
        with self._lock:
            chunk = self._awaited.pop(key)
            if chunk.left > 0 and kept_as is not None:
                self._chunks.put(kept_as, chunk, size)
        chunk.future.set_result(value)

    def fail(self, key: Hashable, future: Future[Any]) -> None:
        """Cancel the future that threads wait for. Does nothing if the chunk was filled.

        Requires that `take` made the caller responsible for `future`.
        """
        with self._lock:
            chunk = self._awaited.get(key)
            if chunk is not None and chunk.future is future:
                del self._awaited[key]
        future.cancel()


class ChunkRequest(Protocol):
    """A request for a chunk."""

    future: Future[Any] | None


class _Chunk:
    def __init__(self, left: int) -> None:
        self.left = left  # samples not taken yet
        self.future: Future[Any] = Future()


# The decoding threads of this process.

_threads: tuple[int, ThreadPoolExecutor] | None = None
_threads_lock = threading.Lock()


def _renew() -> None:
    # A forked child lacks the parent's threads, and the lock may have been held at the fork.
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_renew)


def in_threads(call: Callable[[Any], object], given: Sequence[Any]) -> None:
    """Call `call` with each value, in this thread and the shared ones.

    Raises the first error after all have ended.
    """
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = n_cores(), ThreadPoolExecutor(n_cores(), thread_name_prefix="cachedfs-decode")
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
