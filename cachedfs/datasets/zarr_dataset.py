"""`ZarrDataset`: a map-style dataset over Zarr arrays, which reads their chunks itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from zarr.storage import FsspecStore

from cachedfs.config import parse_size
from cachedfs.datasets.nodes import Keys, run_keys
from cachedfs.datasets.ragged_arrays import RaggedArray
from cachedfs.datasets.samples import Item, Samples, once_each
from cachedfs.datasets.zarr_layout import RAGGED, arrays_at, beside, layout_of, with_samples
from cachedfs.datasets.zarr_reader import ChunkReader, Reads, items_of

logger = logging.getLogger("cachedfs.datasets")

# Decoded bytes of a shard that one fetch is assumed to read: the default block size. It ignores the configured block
# size and the compression, because the order of an epoch must depend on the array alone.
FETCHED = 1 << 20


class ZarrDataset(Samples):
    """Samples along the first axis of Zarr arrays: sample `i` is `array[i]` of each array.

        train = ZarrDataset("cachedfs::gs://my-bucket/digits.zarr", arrays=("image", "label"))
        image, label = train[13]

    A sample is a tuple of NumPy arrays in the order of `arrays`, or a dict by name with `named=True`. It is a single
    array if `url` is the URL of an array or `arrays` is one name. The arrays have the stored dtype in native byte
    order; of an array with one axis, a sample is a scalar. Of a ragged array that `pack` wrote, it is `bytes`, a `str`
    or an array, of its own length. `dtypes` and `shapes` are those of the whole arrays, by name, without shapes of
    ragged ones.

    Chunks are read directly: each shard index once per process, and only the needed byte ranges of a shard. numcodecs
    decodes numbers in the usual codecs, and zarr itself everything else.
    """

    def __init__(
        self,
        url: str,
        arrays: str | Sequence[str] | None = None,
        *,
        named: bool = False,
        pool: int | str = "256MiB",
        transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the metadata of the arrays once. An array that grows later keeps this length here.

        `arrays`: names of arrays in the group at `url`; a single name for single arrays as samples; None for the
        array at `url`, or for all arrays of the group and of the groups in it ("train/image"). The log names what is
        left out then: arrays that all samples share (without axes, or along another dimension, as `lat` beside
        `temperature[time, lat]`), and those in inner groups of another length than the group's own arrays.

        `pool`: memory for decoded chunks with samples still to be read, in bytes or as a size like "256MiB". A window
        shuffle of `window` chunks needs room for twice as many. A chunk that was rewritten is read again after
        `max_age`, as with any read of the filesystem.

        Raises FileNotFoundError if an array does not exist, and ValueError for arrays of different lengths or a
        repeated name.
        """
        super().__init__(url, transform=transform, storage_options=storage_options)
        pool_size = parse_size(pool)
        if isinstance(pool_size, float):
            raise ValueError(f"pool={pool!r}: expected bytes, or a size like '256MiB'")
        names = [arrays] if isinstance(arrays, str) else arrays and once_each(arrays, self.url)
        store = FsspecStore.from_url(self.url, storage_options=dict(storage_options or {}), read_only=True)
        found = arrays_at(store, self.url, names)
        ragged = [name for name in found if name and RAGGED in (found[name].attributes or {})]
        needed = {each for name in ragged for each in beside(name, found[name]).values()}
        more = sorted(needed - found.keys())
        every = {**found, **(arrays_at(store, self.url, more) if more else {})}
        self._ragged = {name: RaggedArray(self.fs, self.path, name, every, pool_size) for name in ragged}
        if names is None:
            found = self._kept({name: each for name, each in found.items() if name not in needed})
            self._ragged = {name: one for name, one in self._ragged.items() if name in found}
        self.arrays = tuple(found)
        self._is_single = isinstance(arrays, str) or self.arrays == ("",)
        if named and self._is_single:
            raise ValueError(f"{self!r}: named=True is for arrays of a group")
        self._is_named = named
        self._length = self._common_length(found)
        layouts = {
            name: layout_of(f"{self.path}/{name}" if name else self.path, metadata)
            for name, metadata in found.items()
            if name not in self._ragged
        }
        self.shapes = {name: layout.shape for name, layout in layouts.items()}
        every_layout = layouts | {name: one.layout for name, one in self._ragged.items()}
        self.dtypes = {name: every_layout[name].decoder.dtype for name in found}
        self._direct = ChunkReader(self.fs, layouts, pool_size=pool_size, naming=self.naming)
        self.group_size, self._object_size = self._group_sizes_of(layouts)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these indexes, read in one round trip, as views of the whole batch."""
        numbers = self._numbers(indexes)
        found = self._read(numbers)
        samples: list[Any]
        if self._is_single:
            samples = [*found[0]]
        elif self._is_named:
            samples = [dict(zip(self.arrays, sample, strict=True)) for sample in zip(*found, strict=True)]
        else:
            samples = [*zip(*found, strict=True)]
        if self.transform is None:
            return samples
        return [self.transformed(i, sample) for i, sample in zip(numbers.tolist(), samples, strict=True)]

    def batch(self, indexes: Sequence[int], collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """Return a batch as `collate` makes it, by default torch's `default_collate`.

        Without `collate` and `transform`, samples are copied straight from the chunks into the batch.
        """
        is_plain = all(dtype.kind in "biufc" for dtype in self.dtypes.values()) and not self._ragged
        is_ours = type(self).__getitems__ is ZarrDataset.__getitems__
        if collate is not None or self.transform is not None or not is_plain or not is_ours:
            return super().batch(indexes, collate)
        found = [torch.from_numpy(array) for array in self._read(self._numbers(indexes))]
        if self._is_single:
            return found[0]
        return dict(zip(self.arrays, found, strict=True)) if self._is_named else found

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the objects, or byte ranges of shards, that these samples read, as `fs.prefetch` takes them.

        A shard's index comes about 256 samples before the first chunk that it locates. This iterator itself reads it
        then, and the offsets of ragged arrays.
        """
        direct: Reads = (lambda samples: [(sample,) for sample in samples], self._direct)
        ragged = [(one.touched, one.elements) for one in self._ragged.values()]
        return items_of([direct, *ragged], map(self.number, indexes))

    def objects(self) -> tuple[Keys, None]:
        """Return a hash of each sample's shard, or of its chunk without shards, of the array with the largest samples."""
        return run_keys(len(self), self._object_size), None

    def _numbers(self, indexes: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.asarray(indexes)
        if numbers.dtype.kind != "i" or ((numbers < 0) | (numbers >= len(self))).any():
            numbers = np.fromiter(map(self.number, indexes), np.int64, len(indexes))
        return numbers.astype(np.int64, copy=False)

    def _read(self, numbers: npt.NDArray[np.int64]) -> list[Any]:
        """Return these samples of each array, as new arrays."""
        found: dict[str, Any] = {
            name: np.empty((len(numbers), *shape[1:]), self.dtypes[name])
            for name, shape in self.shapes.items()
        }
        self._direct.read(numbers, found)
        found |= {name: one.rows(numbers) for name, one in self._ragged.items()}
        return [found[name] for name in self.arrays]

    def _kept(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a sample has if no arrays were named, and log what is left out.

        That is what all samples share, by the dimensions that xarray writes, and arrays of inner groups of another
        length than the group's own.
        """
        dimensions = {
            name: getattr(each, "dimension_names", None)
            or each.attributes.get("_ARRAY_DIMENSIONS")  # Zarr 3, 2
            for name, each in found.items()
            if name not in self._ragged
        }
        rows = with_samples(
            {name: dimensions.get(name) or [None] * len(each.shape) for name, each in found.items()},
            {name: each.shape for name, each in found.items()},
        )
        # The dimension of ragged samples has no name: theirs is the length of what is not shared.
        lengths = {len(one) for one in self._ragged.values()}
        rows = [
            name for name in rows if not (lengths and dimensions.get(name)) or found[name].shape[0] in lengths
        ]
        if shared := [name for name in found if rows and name not in rows]:
            logger.info("%s: left out %s, which all samples share", self.url, ", ".join(shared))
        kept = {name: self._length_of(name, each) for name, each in found.items() if name not in shared}
        own = {n for name, n in kept.items() if "/" not in name}
        if others := [name for name, n in kept.items() if "/" in name and own and n not in own]:
            logger.warning(
                "%s: left out %s, of another length than the other arrays; arrays=(...) names what a sample has",
                self.url,
                ", ".join(f"{name!r} ({kept[name]})" for name in others),
            )
        return {name: found[name] for name in kept if name not in others}

    def _length_of(self, name: str, metadata: Any) -> int | None:
        """Return the number of samples of an array; None if it has no axes."""
        return len(self._ragged[name]) if name in self._ragged else next(iter(metadata.shape), None)

    def _common_length(self, found: Mapping[str, Any]) -> int:
        lengths = {name: self._length_of(name, metadata) for name, metadata in found.items()}
        if not lengths:
            raise FileNotFoundError(f"{self!r}: the group has no arrays")
        first = next(iter(lengths.values()))
        if first is not None and set(lengths.values()) == {first}:
            return int(first)
        described = ", ".join(f"{name!r} {'no axes' if n is None else n}" for name, n in lengths.items())
        raise ValueError(
            f"{self!r}: arrays of different lengths have no common samples: {described}; name those of one length, arrays=(...)"
        )

    def _group_sizes_of(self, fixed: Mapping[str, Any]) -> tuple[int, int]:
        """Return how many samples one fetch reads of the array with the most bytes per sample, and one object has.

        They are those of one chunk, or in a shard those of as many adjacent chunks as fit into a cache block.
        """
        arrays = [(layout, 1.0) for layout in fixed.values()]  # with the rows of a sample
        arrays += [(one.layout, one.mean) for one in self._ragged.values()]
        sizes = [
            each * layout.decoder.dtype.itemsize * math.prod(layout.shape[1:]) for layout, each in arrays
        ]
        size = max(sizes)
        layout, each = arrays[sizes.index(size)]
        rows = max(1, int(layout.chunk[0] / max(1.0, each)))
        if layout.index is None:
            return rows, rows
        in_shard = layout.chunk[0] * layout.per_object[0] / max(1.0, each)
        group_size = rows * max(1, int(min(in_shard, FETCHED / max(1, size))) // rows)
        return group_size, max(group_size, int(in_shard))
