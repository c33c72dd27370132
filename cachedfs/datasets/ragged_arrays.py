"""Read ragged arrays that `pack` wrote.

A ragged array consists of an array with the elements of all samples, and an array of the samples' offsets in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem

from cachedfs.datasets.chunk_slices import parts_between
from cachedfs.datasets.samples import Item, naming
from cachedfs.datasets.zarr_layout import ArrayLayout, UnsupportedArray, layout_of
from cachedfs.datasets.zarr_reader import ChunkReader

__all__ = ["RaggedArray"]

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class RaggedArray:
    """Reader of the samples of one ragged array. Thread-safe.

    It pickles and forks without its caches.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        name: str,
        layouts: Mapping[str, ArrayLayout],
        means: str,
        pool_size: int,
    ) -> None:
        """Make a reader.

        `layouts` has the keys "elements" and "offsets", and "shapes" if samples have several axes. `means` is the
        type of the samples: "bytes", "utf-8", "json", or "" for arrays. `pool_size`: bytes of decoded chunks to keep.
        """
        self._name, self._means = f"{fs.unstrip_protocol(path)}/{name}", means
        self._layout, self._offsets = layouts["elements"], layouts["offsets"]
        self._n_axes = layouts["shapes"].shape[1] if "shapes" in layouts else 0
        self._elements = ChunkReader(
            fs, {"elements": layouts["elements"]}, pool_size=pool_size, naming=self._naming
        )
        self._edges = ChunkReader(
            fs, {"offsets": layouts["offsets"]}, pool_size=pool_size, naming=self._naming
        )
        self._shapes: ChunkReader | None = None
        if "shapes" in layouts:
            self._shapes = ChunkReader(
                fs, {"shapes": layouts["shapes"]}, pool_size=pool_size, naming=self._naming
            )

    @classmethod
    def of(
        cls, fs: AbstractFileSystem, path: str, attributes: Mapping[str, Any], *, pool_size: int
    ) -> dict[str, RaggedArray]:
        """Return the ragged arrays of a group, by name.

        `attributes` has the attributes of each array by name, with the `metadata` of the arrays it consists of. Raises
        ValueError for an array with another layout than `pack` writes.
        """
        found = {}
        for name, spec in attributes.items():
            words = {"elements": name, "offsets": spec["offsets"], "shapes": spec.get("shapes")}
            try:
                layouts = {
                    word: layout_of(f"{path}/{array}", spec["metadata"][array])
                    for word, array in words.items()
                    if array
                }
            except UnsupportedArray as why:
                raise ValueError(
                    f"{fs.unstrip_protocol(path)}/{name}: this ragged array cannot be read: {why}"
                ) from why
            found[name] = cls(fs, path, name, layouts, spec.get("means", ""), pool_size)
        return found

    def __len__(self) -> int:
        return self._offsets.shape[0] - 1

    @property
    def mean(self) -> float:
        """The mean number of elements of a sample."""
        return self._layout.shape[0] / max(1, len(self))

    def rows(self, numbers: Numbers) -> list[Any]:
        """Return the samples with these indexes; each of their chunks is fetched and decoded once."""
        samples, places = np.unique(numbers, return_inverse=True)
        starts, stops = self._bounds(samples)
        sizes = stops - starts
        ends = np.cumsum(sizes)
        out = np.empty(int(ends[-1]) if len(ends) else 0, self._layout.decoder.dtype)
        self._elements.put(
            part
            for start, stop, at in _runs(starts, stops, ends - sizes)
            for part in parts_between(self._layout, start, stop, out, at)
        )
        found = self._samples(samples, out, ends - sizes, ends)
        # A repeated sample is copied, so that in-place changes stay separate.
        is_shared = len(samples) < len(numbers) and not self._means
        return [found[place].copy() if is_shared else found[place] for place in places.tolist()]

    # The interface `ArrayReads`; the rows are elements.

    def touched(self, samples: Sequence[int]) -> Sequence[Iterable[int]]:
        n = self._layout.chunk[0]
        starts, stops = self._bounds(np.array(samples, np.int64))
        return [
            range(start // n * n, stop, n) if start < stop else ()
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def indexes(self, rows: Iterable[int], yielded: set[str]) -> Iterator[Item]:
        return self._elements.indexes(rows, yielded)

    def chunks(self, row: int) -> Iterator[Item]:
        return self._elements.chunks(row)

    def _bounds(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first and the stop element of each sample. Raises ValueError for invalid offsets."""
        wanted, places = np.unique(np.concatenate([samples, samples + 1]), return_inverse=True)
        edges = np.empty(len(wanted), self._offsets.decoder.dtype)
        self._edges.read(wanted, {"offsets": edges})
        found = edges.astype(np.int64)[places].reshape(2, -1)
        if (found[0] > found[1]).any() or (found < 0).any() or (found > self._layout.shape[0]).any():
            raise ValueError(f"{self._name}: its offsets do not match its elements; pack it again")
        return found[0], found[1]

    def _samples(self, samples: Numbers, out: Array, starts: Numbers, stops: Numbers) -> list[Any]:
        parts = [out[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        if self._means == "bytes":
            return [part.tobytes() for part in parts]
        if self._means:  # utf-8, json
            return [part.tobytes().decode("utf-8", "surrogatepass") for part in parts]
        if self._shapes is None:
            return list(parts)
        shapes = np.empty((len(samples), self._n_axes), np.int32)
        self._shapes.read(samples, {"shapes": shapes})
        return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]

    def _naming(self, element: int, what: str) -> AbstractContextManager[None]:
        return naming(f"element {element:,} of {self._name}: {what}")


def _runs(starts: Numbers, stops: Numbers, ats: Numbers) -> Iterator[tuple[int, int, int]]:
    """Yield `(start, stop, at)`: ranges of elements and where each goes. Adjacent ranges are merged."""
    first: tuple[int, int, int] | None = None
    for start, stop, at in zip(starts.tolist(), stops.tolist(), ats.tolist(), strict=True):
        if first is not None and first[1] == start:
            first = first[0], stop, first[2]
            continue
        if first is not None:
            yield first
        first = start, stop, at
    if first is not None:
        yield first
