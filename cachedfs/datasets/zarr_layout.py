"""Find the Zarr arrays at a URL, and describe how their chunks are stored. zarr itself parses the metadata."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore

from cachedfs.datasets.codecs import ChunkDecoder, without_crc32c

# The attribute of an array of elements: {"offsets": name, "means": "utf-8", "shapes": name}. The last two are optional.
# The names are those of arrays in the same group.
RAGGED = "cachedfs_ragged"

# Errors of filesystems that mean a missing key, as in zarr.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

Place = tuple[int, ...]


def with_samples(dimensions: Mapping[str, Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the arrays whose first axis counts samples, from the dimensions and shape of each.

    The others have no axes, or their first one is a later axis of another array, as that of `lat` is for
    `temperature[time, lat]`. If lengths still differ, the largest array decides. A dimension of None is no other's.
    """
    later = {
        each for axes in dimensions.values() for each in axes[1:] if each is not None and each != axes[0]
    }
    with_axes = [name for name, axes in dimensions.items() if axes]
    found = [name for name in with_axes if dimensions[name][0] not in later] or with_axes
    firsts = {name: dimensions[name][0] for name in found}
    if len({shapes[name][0] for name in found}) > 1 and None not in firsts.values():
        largest = max(found, key=lambda name: math.prod(shapes[name]))
        found = [name for name in found if firsts[name] == firsts[largest]]
    return found


def beside(name: str, metadata: Any) -> dict[str, str]:
    """Return the names of the arrays that belong to a ragged array: its "offsets", and its "shapes" if it has some."""
    spec, group = metadata.attributes[RAGGED], "".join(name.rpartition("/")[:2])
    return {word: group + spec[word] for word in ("offsets", "shapes") if spec.get(word)}


@dataclass(frozen=True)
class ShardIndexFormat:
    """Storage format of the index of a shard: an array with the offset and the length of each chunk."""

    shape: Place  # chunks per shard along each axis
    dtype: str
    has_checksum: bool
    is_at_end: bool

    @cached_property
    def bounds(self) -> tuple[int, int | None]:
        """The position of the index in its shard, as the start and stop of a slice."""
        size = 16 * math.prod(self.shape) + 4 * self.has_checksum
        return (-size, None) if self.is_at_end else (0, size)

    def decode(self, data: bytes) -> npt.NDArray[np.uint64]:
        """Return the offset and the length of each chunk, one after another. Raises ValueError if they are invalid."""
        found = np.frombuffer(without_crc32c(data) if self.has_checksum else data, self.dtype)
        return found.reshape(2 * math.prod(self.shape))


class ChunkPositions(NamedTuple):
    """Position of a chunk along all axes but the first, which the samples are on."""

    place: Place
    of_object: Place  # position of its object
    inner: int  # its number among the chunks of its shard that hold one sample
    # Slices of the sample and of the chunk, without the part of the chunk beyond the edge of the array.
    there: tuple[slice, ...]
    here: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class ArrayLayout:
    """The storage of an array. `chunk` is the shape of a decoded chunk: in shards, an inner chunk."""

    path: str
    shape: Place
    decoder: ChunkDecoder
    index: ShardIndexFormat | None  # None: each chunk is an object
    metadata: Any  # of zarr; it names the objects

    @cached_property
    def chunk(self) -> Place:
        return self.decoder.shape

    @cached_property
    def per_object(self) -> Place:
        """Chunks per object along each axis."""
        return (1,) * len(self.shape) if self.index is None else self.index.shape

    @cached_property
    def n_beside(self) -> int:
        """Chunks of an object that hold one sample."""
        return math.prod(self.per_object[1:])

    def n_rows(self, number: int) -> int:
        """Return how many samples a chunk holds, given its index along the first axis."""
        return min(self.chunk[0], self.shape[0] - number * self.chunk[0])

    def object_path(self, number: int, beside: ChunkPositions) -> str:
        """Return the path of an object, given its index along the first axis."""
        return f"{self.path}/{self.metadata.encode_chunk_key((number, *beside.of_object))}"

    @cached_property
    def beside(self) -> list[ChunkPositions]:
        """The positions of the chunks that hold one sample, along the other axes."""
        parts, n_each = self.chunk[1:], self.per_object[1:]
        counts = [-(-whole // part) for whole, part in zip(self.shape[1:], parts, strict=True)]
        found = []
        for place in itertools.product(*map(range, counts)):
            starts = np.multiply(place, parts)
            stops = np.minimum(starts + parts, self.shape[1:])
            of_object = tuple(at // n for at, n in zip(place, n_each, strict=True))
            inner = int(np.ravel_multi_index(np.mod(place, n_each), n_each)) if place else 0
            there = tuple(map(slice, starts.tolist(), stops.tolist()))
            here = tuple(map(slice, (stops - starts).tolist()))
            found.append(ChunkPositions(place, of_object, inner, there, here))
        return found


# Finding arrays.


def arrays_at(store: FsspecStore, url: str, names: Sequence[str] | None) -> dict[str, Any]:
    """Return zarr's metadata of the arrays with these names in the store, by name.

    With None as `names`, return the array at `url` under the name "", or all arrays of the group and of the groups in
    it ("train/image"). Raises FileNotFoundError for a missing array.
    """
    if names is not None:
        with ThreadPoolExecutor() as threads:
            nodes = dict(zip(names, threads.map(partial(_node, store, url), names), strict=True))
        found = {name: node.metadata for name, node in nodes.items() if isinstance(node, zarr.Array)}
        if missing := [name for name in names if name not in found]:
            raise FileNotFoundError(f"{url} has no array {', '.join(map(repr, missing))}")
        return found
    root = _node(store, url, "")
    if root is None:
        raise FileNotFoundError(f"{url} is not a Zarr array or group")
    if isinstance(root, zarr.Array):
        return {"": root.metadata}
    with _naming(url):
        members = sorted(root.members(max_depth=None))
    return {name: node.metadata for name, node in members if isinstance(node, zarr.Array)}


def _node(store: FsspecStore, url: str, name: str) -> Any:
    """Return the array or group of this name in the store; None if there is none."""
    for zarr_format in (3, 2):
        with contextlib.suppress(FileNotFoundError), _naming(f"{url}/{name}" if name else url):
            return zarr.open(store, path=name, mode="r", zarr_format=zarr_format)
    return None


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # any type: zarr raises what its parsing meets
        raise ValueError(f"{url} has no valid Zarr metadata, or none that zarr supports: {error}") from error


# Chunk layout.


def _dtype_of(metadata: Any) -> np.dtype[Any]:
    dtype = metadata.dtype
    return np.dtype(dtype.to_native_dtype() if hasattr(dtype, "to_native_dtype") else dtype)  # type: ignore[no-any-return]


def layout_of(path: str, metadata: Any) -> ArrayLayout:
    """Return the layout of the array with zarr's `metadata`. Raises ValueError for chunks of different shapes."""
    name = "zarr.json" if metadata.zarr_format == 3 else ".zarray"
    document = json.loads(metadata.to_buffer_dict(default_buffer_prototype())[name].to_bytes())
    index = None
    one: dict[str, Any]  # what describes an array of one chunk
    if metadata.zarr_format == 2:
        chunk, one = tuple(document["chunks"]), {"dimension_separator": "."}
    else:
        grid, codecs = document["chunk_grid"], document["codecs"]
        if grid["name"] != "regular":
            raise ValueError(f"{path}: its chunks have different shapes; write it with chunks of one shape")
        chunk = tuple(grid["configuration"]["chunk_shape"])
        if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
            chunk, codecs, index = _in_shards(chunk, codecs, codecs[0]["configuration"])
        one = {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": codecs,
        }
    one = {**document, **one, "shape": chunk, "attributes": {}}
    return ArrayLayout(
        path, tuple(metadata.shape), ChunkDecoder(one, chunk, _dtype_of(metadata)), index, metadata
    )


def _in_shards(
    shard: Place, codecs: Any, settings: Mapping[str, Any]
) -> tuple[Place, Any, ShardIndexFormat | None]:
    """Return the shape and the codecs of the chunks in shards, and the format of the index.

    A shard with a compressed index, whose size is not known, is one chunk for us, which zarr decodes.
    """
    serializer, *checksums = settings["index_codecs"]
    if serializer["name"] != "bytes" or [codec["name"] for codec in checksums] not in ([], ["crc32c"]):
        return shard, codecs, None
    chunk = tuple(settings["chunk_shape"])
    shape = tuple(whole // part for whole, part in zip(shard, chunk, strict=True))
    order = ">" if (serializer.get("configuration") or {}).get("endian") == "big" else "<"
    is_at_end = settings.get("index_location", "end") == "end"
    return chunk, settings["codecs"], ShardIndexFormat(shape, f"{order}u8", bool(checksums), is_at_end)
