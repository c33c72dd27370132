"""Parts of chunks that a batch needs, the cache of decoded chunks, and the threads that decode them."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from cachedfs.common.executor import DaemonThreadPool, n_cores
from cachedfs.datasets.zarr_layout import ArrayLayout, ChunkPositions, Place

__all__ = ["BoundedLRU", "ChunkCache", "ChunkSlice", "in_threads", "parts_between", "parts_of"]

T = TypeVar("T")
Array = npt.NDArray[Any]
Rows = slice | list[int]
OWN_SIZE = 256  # bytes that each entry takes in addition to its value


@dataclass(eq=False)
class ChunkSlice:
    """The part of one chunk that a batch needs: the chunk's rows `within` go to the rows `rows` of `out`."""

    layout: ArrayLayout
    number: int  # index of the chunk along the first axis
    beside: ChunkPositions  # its position along the other axes
    out: Array
    n_rows: int
    rows: Rows
    within: Rows
    path: str  # the object that contains the chunk
    flat: memoryview | None  # the bytes of `out`, if decoded chunks may go there as they are
    start: Any = None  # its bytes in the object; None: it is all of the object
    stop: Any = None
    pool: ChunkCache | None = None  # set if other requests may need the chunk, too
    version: Hashable = None  # of the object, if it is known
    future: Future[Any] | None = None  # from the pool

    @property
    def key(self) -> tuple[str, int, Place, Hashable]:
        return self.layout.path, self.number, self.beside.place, self.version

    @property
    def sample(self) -> int:
        """The index of one of the samples that need the chunk."""
        first = self.within.start if isinstance(self.within, slice) else self.within[0]
        return self.number * self.layout.chunk[0] + int(first)

    @property
    def is_wanted_again(self) -> bool:
        """True if the chunk has other samples than these."""
        return self.n_rows < self.layout.chunk[0] and self.n_rows < self.layout.n_rows(self.number)

    @property
    def place(self) -> memoryview | None:
        """The bytes of `out` for the chunk, if it goes there whole, in order and as it is decoded; else None."""
        rows, within, n = self.rows, self.within, self.layout.chunk[0]
        if self.flat is None or self.n_rows != n or isinstance(rows, list) or isinstance(within, list):
            return None
        size = self.layout.decoder.size
        start = rows.start * (size // n)
        return self.flat[start : start + size]

    def put(self, chunk: Array | None) -> None:
        """Copy the needed rows into place. None as `chunk` stands for a chunk of the fill value."""
        there = (self.rows, *self.beside.there)
        self.out[there] = self.layout.fill if chunk is None else chunk[(self.within, *self.beside.here)]


def parts_of(layout: ArrayLayout, samples: Array, out: Array) -> Iterator[ChunkSlice]:
    """Yield the parts of chunks that these samples need, in the order of their first use."""
    n = layout.chunk[0]
    rows: dict[int, list[int]] = {}
    for row, number in enumerate((samples // n).tolist()):
        rows.setdefault(number, []).append(row)
    inside = (samples % n).tolist()
    flat = _flat(layout, out)
    for number, own in rows.items():
        if len(own) == 1:
            at = inside[own[0]]
            where: Rows = slice(own[0], own[0] + 1)
            within: Rows = slice(at, at + 1)
        else:
            where, within = _as_slice(own), _as_slice([inside[row] for row in own])
        for beside in layout.beside:
            path = layout.object_path(number, beside)
            yield ChunkSlice(layout, number, beside, out, len(own), where, within, path, flat)


def parts_between(layout: ArrayLayout, start: int, stop: int, out: Array, at: int) -> Iterator[ChunkSlice]:
    """Yield the parts of chunks that hold the rows `[start, stop)`, which go to `out` from row `at` on."""
    n = layout.chunk[0]
    flat = _flat(layout, out) if stop - start >= n else None
    while start < stop:
        number, inside = divmod(start, n)
        rows = min(n - inside, stop - start)
        where, within = slice(at, at + rows), slice(inside, inside + rows)
        for beside in layout.beside:
            path = layout.object_path(number, beside)
            yield ChunkSlice(layout, number, beside, out, rows, where, within, path, flat)
        start, at = start + rows, at + rows


def _flat(layout: ArrayLayout, out: Array) -> memoryview | None:
    is_flat = layout.is_whole and layout.decoder.is_plain and out.size and out.flags.c_contiguous
    return out.reshape(-1).view("u1").data if is_flat else None


def _as_slice(numbers: list[int]) -> Rows:
    """Return consecutive numbers as a slice, and other numbers unchanged."""
    first, n = numbers[0], len(numbers)
    if numbers[-1] - first == n - 1 and numbers == list(range(first, first + n)):
        return slice(first, first + n)
    return numbers


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
        with self._lock:
            self._size -= self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size + OWN_SIZE
            self._size += size + OWN_SIZE
            while self._size > self._limit:
                self._size -= self._values.popitem(last=False)[1][1]

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._size -= self._values.pop(key, (None, 0))[1]


class ChunkCache:
    """Decoded chunks up to a number of bytes.

    One thread decodes a chunk; other threads wait for the result. A chunk is dropped when all its samples were taken,
    because an epoch reads each sample only once.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: BoundedLRU[_Chunk] = BoundedLRU(limit)
        self._lock = threading.Lock()
        self._awaited: dict[Hashable, _Chunk] = {}  # Invariant: the chunks that a thread is decoding

    def take(self, part: ChunkSlice) -> Future[Any]:
        """Return the future of a chunk, and take the rows of `part` from it.

        If it is `part.future`, the caller must decode the chunk and call `fill` or `fail`. `part.future` is set before
        another thread can wait for it, because Ctrl-C may interrupt at any time.
        """
        key = part.key
        with self._lock:
            chunk = self._awaited.get(key) or self._chunks.get(key)
            if chunk is None:
                chunk = _Chunk(part.layout.n_rows(part.number))
                part.future = chunk.future
                self._awaited[key] = chunk
            chunk.left -= part.n_rows
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

    def fail(self, part: ChunkSlice) -> None:
        """Cancel the future that threads wait for, if `take` left the chunk to `part` and it is not filled yet."""
        if part.future is not None:
            with self._lock:
                chunk = self._awaited.get(part.key)
                if chunk is not None and chunk.future is part.future:
                    del self._awaited[part.key]
            part.future.cancel()


class _Chunk:
    def __init__(self, left: int) -> None:
        self.left = left  # samples not taken yet
        self.future: Future[Any] = Future()


@functools.cache
def _pool() -> DaemonThreadPool:
    return DaemonThreadPool(n_cores(), "cachedfs-decode")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child lacks the parent's threads


def in_threads(call: Callable[[Any], object], given: Sequence[Any]) -> None:
    """Call `call` with each value, in this thread and the shared ones. Raises the first error after all have ended."""
    n = min(n_cores(), len(given))

    def some(start: int) -> None:
        for one in given[start::n]:
            call(one)

    futures = [_pool().submit(some, start) for start in range(1, n)]
    try:
        some(0)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
