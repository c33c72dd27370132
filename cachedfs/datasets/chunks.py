"""Parts of chunks that a batch needs, the cache of decoded chunks, and the threads that decode them."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from cachedfs.common.executor import DaemonThreadPool, n_cores
from cachedfs.datasets.zarr_layout import ArrayLayout, ChunkPositions

Array = npt.NDArray[Any]
Rows = slice | list[int]
OWN_SIZE = 256  # bytes that a cached chunk takes in addition to its values


@dataclass(eq=False, slots=True)
class ChunkSlice:
    """The part of one chunk that a batch needs: the chunk's rows `within` go to the rows `rows` of `out`."""

    layout: ArrayLayout
    number: int  # index of the chunk along the first axis
    beside: ChunkPositions  # its position along the other axes
    path: str  # the object that contains the chunk
    out: Array
    n_rows: int
    rows: Rows
    within: Rows
    start: Any = None  # its bytes in the object; None: it is all of the object
    stop: Any = None
    key: tuple[Hashable, ...] = ()  # in the cache of decoded chunks
    own: Future[Any] | None = None  # for which other threads wait until this chunk is decoded

    @property
    def sample(self) -> int:
        """The index of one of the samples that need the chunk."""
        first = self.within.start if isinstance(self.within, slice) else self.within[0]
        return self.number * self.layout.chunk[0] + int(first)

    def put(self, chunk: Array | None) -> None:
        """Copy the needed rows into place. None as `chunk` stands for a chunk that was never written."""
        there = (self.rows, *self.beside.there)
        if chunk is None:
            self.out[there] = self.layout.decoder.fill
        else:
            self.out[there] = chunk[(self.within, *self.beside.here)]


# Index of a chunk along the first axis, number of rows, `rows`, `within`.
ChunkRows = tuple[int, int, Rows, Rows]


def rows_of(n: int, samples: Array) -> Iterator[ChunkRows]:
    """Yield which rows of chunks of `n` rows these samples are, in the order of the first use of a chunk."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate((samples // n).tolist()):
        rows.setdefault(number, []).append(row)
    inside = (samples % n).tolist()
    for number, own in rows.items():
        if len(own) == 1:
            row, at = own[0], inside[own[0]]
            yield number, 1, slice(row, row + 1), slice(at, at + 1)
        else:
            yield number, len(own), _as_slice(own), _as_slice([inside[row] for row in own])


def rows_between(n: int, start: int, stop: int, at: int) -> Iterator[ChunkRows]:
    """Yield which rows of chunks of `n` rows `[start, stop)` are; they go to row `at` and those after it."""
    while start < stop:
        number, inside = divmod(start, n)
        rows = min(n - inside, stop - start)
        yield number, rows, slice(at, at + rows), slice(inside, inside + rows)
        start, at = start + rows, at + rows


def parts_of(layout: ArrayLayout, out: Array, needed: Iterable[ChunkRows]) -> Iterator[ChunkSlice]:
    """Yield the parts of chunks with the needed rows, which go to `out`."""
    paths: dict[int, list[str]] = {}  # by the number of the object
    for number, n_rows, rows, within in needed:
        of_object = number // layout.per_object[0]
        if of_object not in paths:
            paths[of_object] = [layout.object_path(of_object, beside) for beside in layout.beside]
        for beside, path in zip(layout.beside, paths[of_object], strict=True):
            yield ChunkSlice(layout, number, beside, path, out, n_rows, rows, within)


def _as_slice(numbers: list[int]) -> Rows:
    """Return consecutive numbers as a slice, and other numbers unchanged."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return slice(run.start, run.stop) if numbers == [*run] else numbers


@dataclass(eq=False, slots=True)
class _Chunk:
    left: int  # samples not taken yet
    future: Future[Any] = field(default_factory=Future)
    size: int = 0  # bytes, once it is decoded


class ChunkCache:
    """Decoded chunks up to a number of bytes, and those that are being decoded.

    One thread decodes a chunk; other threads wait for the result. A chunk is removed when all its samples were taken,
    because an epoch reads each sample only once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        # Invariant: the sizes of all chunks add up to `_size`.
        self._chunks, self._size = OrderedDict[Hashable, _Chunk](), 0

    def take(self, part: ChunkSlice) -> Future[Any] | None:
        """Take the rows of `part` from its chunk; return the chunk's future, or None if the caller must decode it.

        Then it must call `fill` or `fail`. `part.own` is set before another thread can wait for it, because Ctrl-C may
        interrupt at any time.
        """
        with self._lock:
            chunk = found = self._chunks.get(part.key)
            if chunk is None:
                chunk = _Chunk(part.layout.n_rows(part.number))
                part.own = chunk.future
                self._chunks[part.key] = chunk
            chunk.left -= part.n_rows
            self._chunks.move_to_end(part.key)
            if chunk.left <= 0:
                self._remove(part.key)
        return None if found is None else chunk.future

    def fill(self, part: ChunkSlice, value: Array | None, kept_as: Hashable) -> None:
        """Give a chunk to the threads that wait for it, and cache it under `kept_as` unless it is None."""
        assert part.own is not None
        with self._lock:
            chunk = self._removed(part)
            if chunk is not None and kept_as is not None:
                self._remove(kept_as)
                chunk.size = OWN_SIZE + (0 if value is None else value.nbytes)
                self._chunks[kept_as], self._size = chunk, self._size + chunk.size
                while self._size > self._limit:
                    self._remove(next(iter(self._chunks)))
        part.own.set_result(value)

    def fail(self, part: ChunkSlice) -> None:
        """Cancel the future that threads wait for, if `take` left the chunk to `part` and it is not filled yet."""
        if part.own is not None:
            with self._lock:
                self._removed(part)
            part.own.cancel()

    def _removed(self, part: ChunkSlice) -> _Chunk | None:
        """Remove and return the chunk that `part` decodes; None if its samples were taken, or its place is another's."""
        chunk = self._chunks.get(part.key)
        if chunk is None or chunk.future is not part.own:
            return None
        self._remove(part.key)
        return chunk

    def _remove(self, key: Hashable) -> None:
        if (chunk := self._chunks.pop(key, None)) is not None:
            self._size -= chunk.size


@functools.cache
def _pool() -> DaemonThreadPool:
    return DaemonThreadPool(n_cores(), "cachedfs-decode")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child lacks the parent's threads


def in_threads(call: Callable[..., object], given: Sequence[Sequence[Any]]) -> None:
    """Call `call` with each of these arguments, in this thread and the shared ones.

    Raises the first error after all have ended.
    """
    n = min(n_cores(), len(given))

    def some(start: int) -> None:
        for each in given[start::n]:
            call(*each)

    futures = [_pool().submit(some, start) for start in range(1, n)]
    try:
        some(0)
    finally:
        wait(futures)
    for future in futures:
        future.result()
