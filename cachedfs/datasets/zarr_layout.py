"""Find the Zarr arrays at a URL, and describe how their chunks are stored. zarr itself parses the metadata."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import FsspecStore

from cachedfs.datasets.codecs import ChunkDecoder, Crc32c

__all__ = ["ABSENT", "NUMBERS", "RAGGED", "ArrayLayout", "ChunkPositions", "Place", "ShardIndexFormat"]
__all__ += [
    "UnsupportedArray",
    "arrays_at",
    "beside",
    "dtype_of",
    "layout_of",
    "with_samples",
]

# The attribute of an array of elements: {"offsets": name, "means": "utf-8", "shapes": name}. The last two are optional.
# The names are those of arrays in the same group.
RAGGED = "cachedfs_ragged"

# Errors of filesystems that mean a missing key, as in zarr.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
NUMBERS = "biufcmM"  # kinds of dtypes that are decoded directly
# The bytes-to-bytes codecs among those of numcodecs that Zarr v3 has.
NUMCODECS = {"adler32", "blosc", "bz2", "crc32", "crc32c", "fletcher32", "gzip", "lz4", "lzma", "shuffle", "zlib", "zstd"}  # fmt: skip

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


class UnsupportedArray(Exception):
    """An array that only zarr can read; the message says which feature is not supported here."""


@dataclass(frozen=True)
class ShardIndexFormat:
    """Storage format of the index of a shard: an encoded array with the offset and the length of each chunk."""

    decoder: ChunkDecoder
    is_at_end: bool

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Chunks per shard along each axis."""
        return self.decoder.shape[:-1]

    @cached_property
    def bounds(self) -> tuple[int, int | None]:
        """The position of the index in its shard, as the start and stop of a slice."""
        size = self.decoder.size + 4 * len(self.decoder.steps)  # each of them adds a checksum
        return (-size, None) if self.is_at_end else (0, size)

    def decode(self, data: bytes) -> npt.NDArray[np.uint64]:
        """Return an array with the offset and length of each chunk in its last axis. Raises ValueError if invalid."""
        return self.decoder.array(data)


class ChunkPositions(NamedTuple):
    """Position of a chunk along all axes but the first, which the samples are on."""

    place: Place
    tail: str  # end of the object's name, after the first number
    inner: Place  # position in its shard
    # Slices of the sample and of the chunk, without the part of the chunk beyond the edge of the array.
    there: tuple[slice, ...]
    here: tuple[slice, ...]


@dataclass(frozen=True)
class ArrayLayout:
    """An array whose chunks are read directly. `chunk` is the shape of a decoded chunk: in shards, an inner chunk."""

    path: str
    shape: tuple[int, ...]
    fill: Any
    decoder: ChunkDecoder
    head: str  # start of the names of its objects: "c/", "c." or ""
    separator: str
    index: ShardIndexFormat | None  # None: each chunk is an object

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        return self.decoder.shape

    @cached_property
    def per_shard(self) -> tuple[int, ...]:
        """Chunks per object along each axis."""
        return (1,) * len(self.shape) if self.index is None else self.index.shape

    @cached_property
    def is_whole(self) -> bool:
        """True if each chunk contains whole samples and no padding along the other axes."""
        return self.shape[1:] == self.chunk[1:]

    def n_rows(self, number: int) -> int:
        """Return how many samples a chunk holds, given its index along the first axis."""
        return min(self.chunk[0], self.shape[0] - number * self.chunk[0])

    def object_path(self, number: int, beside: ChunkPositions) -> str:
        """Return the path of the object that contains a chunk."""
        return f"{self.path}/{self.head}{number // self.per_shard[0]}{beside.tail}"

    @cached_property
    def beside(self) -> list[ChunkPositions]:
        """The positions of the chunks that hold one sample, along the other axes."""
        axes = list(zip(self.shape[1:], self.chunk[1:], self.per_shard[1:], strict=True))
        places = itertools.product(*(range(-(-whole // part)) for whole, part, _ in axes))
        return [self._beside(place, axes) for place in places]

    def _beside(self, place: Place, axes: list[tuple[int, int, int]]) -> ChunkPositions:
        numbers = [str(at // n) for at, (_, _, n) in zip(place, axes, strict=True)]
        starts = [at * part for at, (_, part, _) in zip(place, axes, strict=True)]
        stops = [min(whole, start + part) for start, (whole, part, _) in zip(starts, axes, strict=True)]
        spans = list(zip(starts, stops, strict=True))
        return ChunkPositions(
            place,
            "".join(self.separator + number for number in numbers),
            tuple(at % n for at, (_, _, n) in zip(place, axes, strict=True)),
            tuple(slice(start, stop) for start, stop in spans),
            tuple(slice(0, stop - start) for start, stop in spans),
        )


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


def layout_of(path: str, metadata: Any) -> ArrayLayout:
    """Return the layout of the array with zarr's `metadata`. Raises UnsupportedArray if only zarr can read it."""
    dtype = _stated(metadata)
    if dtype.kind not in NUMBERS:
        raise UnsupportedArray(f"its type is {dtype}")
    if not metadata.shape:
        raise UnsupportedArray("it has no axes")
    index = None
    if metadata.zarr_format == 2:
        head, separator, chunk = "", metadata.dimension_separator, tuple(metadata.chunks)
        steps = (*filter(None, [metadata.compressor]), *reversed(metadata.filters or ()))
        axes = tuple(range(len(chunk)))[::-1] if metadata.order == "F" and len(chunk) > 1 else None
        decoder = ChunkDecoder(chunk, dtype, steps, axes)
    else:
        grid = metadata.chunk_grid.to_dict()
        if grid.get("name") != "regular":
            raise UnsupportedArray(f"its grid of chunks is {grid.get('name')!r}")
        chunk = tuple(grid["configuration"]["chunk_shape"])
        head, separator = _keys(metadata.chunk_key_encoding)
        codecs = [codec.to_dict() for codec in metadata.codecs]
        if codecs[0]["name"] == "sharding_indexed":
            shard, settings = chunk, codecs[0]["configuration"]
            if len(codecs) > 1:
                raise UnsupportedArray("its shards are encoded once more")
            chunk = tuple(settings["chunk_shape"])
            index = _index(tuple(whole // part for whole, part in zip(shard, chunk, strict=True)), settings)
            codecs = [_as_dict(codec) for codec in settings["codecs"]]
        decoder = _decoder(chunk, dtype, codecs)
    fill = metadata.fill_value
    if fill is None:
        fill = metadata.dtype.default_scalar() if hasattr(metadata.dtype, "default_scalar") else 0
    fill = np.asarray(fill).astype(decoder.dtype)
    return ArrayLayout(path, tuple(metadata.shape), fill, decoder, head, separator, index)


def dtype_of(metadata: Any) -> np.dtype[Any]:
    """Return the dtype of an array; numeric dtypes in native byte order."""
    dtype = _stated(metadata)
    return dtype.newbyteorder("=") if dtype.kind in NUMBERS else dtype


def _stated(metadata: Any) -> np.dtype[Any]:
    dtype = metadata.dtype
    return np.dtype(dtype.to_native_dtype() if hasattr(dtype, "to_native_dtype") else dtype)  # type: ignore[no-any-return]


def _keys(encoding: Any) -> tuple[str, str]:
    described = encoding.to_dict()
    name, separator = described.get("name"), (described.get("configuration") or {}).get("separator")
    if name not in ("default", "v2") or separator not in (".", "/"):
        raise UnsupportedArray(f"its chunks are named by {name!r}")
    return (f"c{separator}" if name == "default" else ""), separator


def _as_dict(codec: Any) -> dict[str, Any]:
    return codec if isinstance(codec, dict) else dict(codec.to_dict())


def _index(shape: tuple[int, ...], settings: dict[str, Any]) -> ShardIndexFormat:
    codecs = [_as_dict(codec) for codec in settings["index_codecs"]]
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        raise UnsupportedArray(f"the index of its shards is encoded by {', '.join(names)}")
    is_at_end = str(settings.get("index_location", "end")) == "end"
    return ShardIndexFormat(_decoder((*shape, 2), np.dtype(np.uint64), codecs), is_at_end)


def _stored(dtype: np.dtype[Any], codec: dict[str, Any]) -> np.dtype[Any]:
    endian = (codec.get("configuration") or {}).get("endian")
    order: Any = ">" if endian == "big" else "<"
    return np.dtype(dtype.newbyteorder(order))


def _decoder(chunk: tuple[int, ...], dtype: np.dtype[Any], codecs: list[dict[str, Any]]) -> ChunkDecoder:
    """Return the decoder for a list of Zarr v3 codecs: array to array, array to bytes, then bytes to bytes."""
    names = [codec["name"] for codec in codecs]
    if "bytes" not in names:
        raise UnsupportedArray(f"it is encoded by {', '.join(names)}")
    at = names.index("bytes")
    axes = list(range(len(chunk)))
    for codec in codecs[:at]:
        if codec["name"] != "transpose":
            raise UnsupportedArray(f"it is encoded by {codec['name']}")
        axes = [axes[axis] for axis in codec["configuration"]["order"]]
    is_plain = axes == sorted(axes)
    back = None if is_plain else tuple(int(axis) for axis in np.argsort(axes))
    steps = tuple(_step(codec) for codec in reversed(codecs[at + 1 :]))
    return ChunkDecoder(chunk, _stored(dtype, codecs[at]), steps, back)


def _step(codec: dict[str, Any]) -> Any:
    import numcodecs

    name, settings = codec["name"], codec.get("configuration") or {}
    if name == "crc32c":
        return Crc32c()
    if name in ("blosc", "gzip", "zstd"):
        settings = {}  # the stored bytes say how to decode them
    elif name.startswith("numcodecs.") and name.removeprefix("numcodecs.") in NUMCODECS:
        name = name.removeprefix("numcodecs.")
    else:
        raise UnsupportedArray(f"it is encoded by {name}")
    return numcodecs.get_codec({**settings, "id": name})
