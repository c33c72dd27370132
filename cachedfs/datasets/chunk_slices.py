"""`ChunkSlice`: the part of one chunk that a batch needs, and functions that find these parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from cachedfs.datasets.chunk_cache import ChunkCache
from cachedfs.datasets.zarr_layout import ArrayLayout, ChunkPositions, Place

__all__ = ["ChunkSlice", "parts_between", "parts_of"]

Array = npt.NDArray[Any]
Rows = slice | list[int]


class ChunkSlice:
    """The part of one chunk that a batch needs.

    The chunk's rows `within` go to the rows `rows` of `out`. The chunk has the index `number` along the first axis, and
    the position `beside` along the other axes. `path` is the object that contains it.
    """

    __slots__ = (
        "beside",
        "future",
        "layout",
        "n_rows",
        "number",
        "out",
        "path",
        "pool",
        "rows",
        "version",
        "within",
    )

    def __init__(
        self,
        layout: ArrayLayout,
        number: int,
        beside: ChunkPositions,
        out: Array,
        n_rows: int,
        rows: Rows,
        within: Rows,
    ) -> None:
        self.layout, self.number, self.beside = layout, number, beside
        self.out, self.n_rows, self.rows, self.within = out, n_rows, rows, within
        self.path = layout.object_path(number, beside)
        self.pool: ChunkCache | None = None  # set if other requests may need the chunk, too
        self.version: Hashable = None  # of the object, if it is known
        self.future: Future[Any] | None = None  # from the pool

    @property
    def key(self) -> tuple[str, int, Place, Hashable]:
        return self.layout.path, self.number, self.beside.place, self.version

    @property
    def sample(self) -> int:
        """The index of one of the samples that need the chunk."""
        within = self.within
        first = within.start if isinstance(within, slice) else within[0]
        return self.number * self.layout.chunk[0] + int(first)

    @property
    def is_all(self) -> bool:
        """True if this is the whole chunk, in order, and goes to one contiguous place."""
        rows, within = self.rows, self.within
        is_in_order = isinstance(rows, slice) and isinstance(within, slice) and within.start == 0
        return is_in_order and self.n_rows == self.layout.chunk[0] and self.layout.is_whole

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
    for number, own in rows.items():
        where, within = _as_slice(own), _as_slice([inside[row] for row in own])
        for beside in layout.beside:
            yield ChunkSlice(layout, number, beside, out, len(own), where, within)


def parts_between(layout: ArrayLayout, start: int, stop: int, out: Array, at: int) -> Iterator[ChunkSlice]:
    """Yield the parts of chunks that hold the rows `[start, stop)`.

    They go to `out` from row `at` on.
    """
    n = layout.chunk[0]
    while start < stop:
        number, inside = divmod(start, n)
        rows = min(n - inside, stop - start)
        for beside in layout.beside:
            yield ChunkSlice(
                layout, number, beside, out, rows, slice(at, at + rows), slice(inside, inside + rows)
            )
        start, at = start + rows, at + rows


def _as_slice(numbers: list[int]) -> Rows:
    """Return consecutive numbers as a slice, and other numbers unchanged."""
    first, n = numbers[0], len(numbers)
    is_run = n == 1 or (numbers[-1] - first == n - 1 and numbers == list(range(first, first + n)))
    return slice(first, first + n) if is_run else numbers
