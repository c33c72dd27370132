"""Read ragged arrays that `pack` wrote: the elements of all samples, and the offsets of the samples in them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem

from cachedfs.datasets.chunks import parts_of, rows_between
from cachedfs.datasets.samples import naming
from cachedfs.datasets.zarr_layout import RAGGED, beside, layout_of
from cachedfs.datasets.zarr_reader import ChunkReader

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class RaggedArray:
    """Reader of the samples of one ragged array. Thread-safe; it pickles and forks without its caches."""

    def __init__(
        self, fs: AbstractFileSystem, path: str, name: str, found: Mapping[str, Any], pool_size: int
    ) -> None:
        """Make a reader of the array `name` of the group at `path`, from zarr's metadata of its arrays by name."""
        self._name = f"{fs.unstrip_protocol(path)}/{name}"
        # The type of the samples: bytes, utf-8, json, or "" for arrays.
        self._means: str = found[name].attributes[RAGGED].get("means", "")
        self.layout = layout_of(f"{path}/{name}", found[name])
        self._others = {
            word: layout_of(f"{path}/{each}", found[each]) for word, each in beside(name, found[name]).items()
        }
        make = functools.partial(ChunkReader, fs, pool_size=pool_size, naming=self._naming)
        self.elements, self._beside = make({"elements": self.layout}), make(self._others)

    def __len__(self) -> int:
        return self._others["offsets"].shape[0] - 1

    @property
    def mean(self) -> float:
        """The mean number of elements of a sample."""
        return self.layout.shape[0] / max(1, len(self))

    def rows(self, numbers: Numbers) -> list[Any]:
        """Return the samples with these indexes; each of their chunks is fetched and decoded once."""
        samples, places = np.unique(numbers, return_inverse=True)
        starts, stops = self._bounds(samples)
        sizes = stops - starts
        ends = np.cumsum(sizes)
        out = np.empty(int(ends[-1]) if len(ends) else 0, self.layout.decoder.dtype)
        runs, n = _runs(starts, stops, ends - sizes), self.layout.chunk[0]
        needed = chain.from_iterable(rows_between(n, *run) for run in runs)
        self.elements.put(parts_of(self.layout, out, needed))
        found = self._samples(samples, out, ends - sizes, ends)
        # A repeated sample is copied, so that in-place changes stay separate.
        is_shared = len(samples) < len(numbers) and not self._means
        return [found[place].copy() if is_shared else found[place] for place in places.tolist()]

    def touched(self, samples: Sequence[int]) -> Sequence[Iterable[int]]:
        """Return for each of these samples one element of each of its chunks."""
        n = self.layout.chunk[0]
        starts, stops = self._bounds(np.array(samples, np.int64))
        return [
            range(start // n * n, stop, n) if start < stop else ()
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def _bounds(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first and the stop element of each sample. Raises ValueError for invalid offsets."""
        wanted, places = np.unique(np.concatenate([samples, samples + 1]), return_inverse=True)
        edges = np.empty(len(wanted), self._others["offsets"].decoder.dtype)
        self._beside.read(wanted, {"offsets": edges})
        found = edges.astype(np.int64)[places].reshape(2, -1)
        if (found[0] > found[1]).any() or (found < 0).any() or (found > self.layout.shape[0]).any():
            raise ValueError(f"{self._name}: its offsets do not match its elements; pack it again")
        return found[0], found[1]

    def _samples(self, samples: Numbers, out: Array, starts: Numbers, stops: Numbers) -> list[Any]:
        parts = [out[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        if self._means == "bytes":
            return [part.tobytes() for part in parts]
        if self._means:  # utf-8, json
            return [part.tobytes().decode("utf-8", "surrogatepass") for part in parts]
        if "shapes" not in self._others:
            return parts
        shapes = np.empty((len(samples), self._others["shapes"].shape[1]), np.int32)
        self._beside.read(samples, {"shapes": shapes})
        return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]

    def _naming(self, element: int, what: str) -> AbstractContextManager[None]:
        return naming(f"element {element:,} of {self._name}: {what}")


def _runs(starts: Numbers, stops: Numbers, ats: Numbers) -> Iterator[tuple[int, int, int]]:
    """Yield `(start, stop, at)`: ranges of elements and where each goes. Adjacent ranges are merged."""
    if len(starts):
        firsts = np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]]))
        lasts = np.append(firsts[1:], len(starts)) - 1
        yield from zip(starts[firsts].tolist(), stops[lasts].tolist(), ats[firsts].tolist(), strict=True)
