"""A shard of Zarr's third version as bytes: chunks one by one, each with its checksum, and the index behind them. Pure.

Zarr's own writer would take all of a shard in memory before it encodes, and its store does not tell what was sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numcodecs.blosc
import numpy as np

from cachedfs.common.checksums import crc32c_of
from cachedfs.packing.chunk_sizes import CODECS, ChunkGridPlan
from cachedfs.packing.pack_types import Array, Field

__all__ = ["ChunkEncoding", "ShardBytes", "measured", "places", "wrong_with"]

numcodecs.blosc.use_threads = False  # its own threads stop those of others: shards are encoded side by side

LEVELS = {"lz4": 5, "zstd": 3}
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
NOTHING = 0xFFFF_FFFF_FFFF_FFFF  # offset and length of a chunk that a shard does not have
MEASURED = 4 << 20  # bytes of samples by which a codec is chosen


@dataclass(frozen=True)
class ChunkEncoding:
    """How the chunks of one array become bytes: its type, little-endian, a codec of `CODECS`, and a checksum."""

    dtype: str
    grid: ChunkGridPlan
    codec: str
    shuffle: int = 0

    @classmethod
    def of(cls, field: Field, grid: ChunkGridPlan, codec: str) -> ChunkEncoding:
        return cls(field.dtype, grid, codec, shuffle_of(field))

    @cached_property
    def per_shard(self) -> tuple[int, ...]:
        """Chunks of a shard, along each axis."""
        return tuple(whole // part for whole, part in zip(self.grid.shard, self.grid.chunk, strict=True))

    @property
    def shard_size(self) -> int:
        """Bytes of a shard before they are encoded."""
        return int(np.dtype(self.dtype).itemsize * math.prod(self.grid.shard))

    def chunk(self, values: Array) -> Any:
        """Return the bytes of a chunk; what lacks of it at the edge of the array is zero. It may be a view of `values`."""
        whole = values
        if values.shape != self.grid.chunk:
            whole = np.zeros(self.grid.chunk, self.dtype)
            whole[tuple(map(slice, values.shape))] = values
        return encoded(np.ascontiguousarray(whole, _little(self.dtype)), self.codec, self.shuffle)

    @property
    def described(self) -> list[dict[str, Any]]:
        """The codecs behind `bytes`, as Zarr's metadata name them."""
        compressors: list[dict[str, Any]] = [{"name": "crc32c"}]
        if self.codec != "none":
            settings = {
                "cname": self.codec,
                "clevel": LEVELS[self.codec],
                "shuffle": SHUFFLES[self.shuffle],
                "typesize": np.dtype(self.dtype).itemsize,
                "blocksize": 0,
            }
            compressors.insert(0, {"name": "blosc", "configuration": settings})
        return compressors


class ShardBytes:
    """The bytes of one shard as they come together. REQUIRES: chunks in the order of `places`, each once."""

    def __init__(self, encoding: ChunkEncoding) -> None:
        self._encoding = encoding
        self._index = np.full((math.prod(encoding.per_shard), 2), NOTHING, "<u8")
        self._data = bytearray()

    def put(self, place: tuple[int, ...], values: Array) -> None:
        """Encode the chunk at a place in the shard."""
        data = self._encoding.chunk(values)
        number = int(np.ravel_multi_index(place, self._encoding.per_shard))
        self._index[number] = len(self._data), len(data) + 4
        self._data += memoryview(data)  # of an array: it would add itself to the bytes as numbers
        self._data += crc32c_of(data).to_bytes(4, "little")

    def finish(self) -> bytearray:
        """Return all of the shard, its index at the end."""
        index = self._index.tobytes()
        self._data += index + crc32c_of(index).to_bytes(4, "little")
        return self._data


def places(encoding: ChunkEncoding, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the places of the chunks of a shard of which so much is in the array."""
    counts = (-(-n // part) for n, part in zip(shape, encoding.grid.chunk, strict=True))
    yield from itertools.product(*map(range, counts))


def wrong_with(data: bytes, encoding: ChunkEncoding, n_chunks: int) -> str | None:
    """Return what is wrong with the stored bytes of a shard that has so many chunks; None when each is what was encoded."""
    n = math.prod(encoding.per_shard)
    size = 16 * n + 4
    index = data[len(data) - size : -4] if len(data) >= size else b""
    if len(index) < size - 4 or crc32c_of(index) != int.from_bytes(data[-4:], "little"):
        return "its index is not that of a shard"
    table = np.frombuffer(index, "<u8").reshape(n, 2)
    there = table[table[:, 0] != NOTHING].tolist()
    if len(there) != n_chunks:
        return f"it has {len(there)} chunks, and should have {n_chunks}"
    for start, length in there:
        chunk = data[start : start + length]
        if crc32c_of(chunk[:-4]) != int.from_bytes(chunk[-4:], "little"):
            return f"the chunk at byte {start:,} has not the checksum that it was written with"
    return None


def measured(field: Field, samples: Array) -> Mapping[str, float]:
    """Return the share of their size that each codec leaves of some samples."""
    flat = np.ascontiguousarray(samples).reshape(-1)[: MEASURED // np.dtype(field.dtype).itemsize]
    if not flat.nbytes:
        return {}
    return {
        codec: len(encoded(flat, codec, shuffle_of(field))) / flat.nbytes
        for codec in CODECS
        if codec != "none"
    }


def shuffle_of(field: Field) -> int:
    """Return Blosc's shuffle: bits of pixels, which are smooth; bytes of wider numbers; nothing of text."""
    if np.dtype(field.dtype).itemsize > 1:
        return 1
    return 2 if field.shapes or field.shape else 0


def encoded(values: Array, codec: str, shuffle: int) -> Any:
    """Return the bytes of contiguous values, which may be their own."""
    if codec == "none":
        flat = values.reshape(-1).view("u1")
        flat.flags.writeable = False  # which the checksum asks for
        return flat
    blosc = numcodecs.blosc.Blosc(cname=codec, clevel=LEVELS[codec], shuffle=shuffle)
    return blosc.encode(values)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
