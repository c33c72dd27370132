"""Encode a Zarr v3 shard: chunks one by one, each with its CRC-32C, then the index. No I/O.

zarr's own writer gives the same bytes, but needs the whole shard in memory. With two threads it takes a third longer
for chunks of 256 KiB, and four to five times as long for chunks of 4 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numcodecs.blosc
import numpy as np

from cachedfs.common.checksums import crc32c_of
from cachedfs.packing.chunk_sizes import CODECS, ChunkGridPlan
from cachedfs.packing.pack_types import Array, Field

__all__ = ["ChunkEncoding", "ShardBytes", "measured", "wrong_with"]

# Blosc's global threads block all other callers, and shards are encoded in parallel.
numcodecs.blosc.use_threads = False

LEVELS = {"lz4": 5, "zstd": 3}
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
NOTHING = 0xFFFF_FFFF_FFFF_FFFF  # offset and length of a missing chunk in the index
MEASURED = 4 << 20  # bytes of samples that are compressed to choose a codec


@dataclass(frozen=True)
class ChunkEncoding:
    """The chunk encoding of one array: little-endian values, a codec of `CODECS`, and CRC-32C."""

    dtype: str
    grid: ChunkGridPlan
    codec: str
    shuffle: int = 0

    @classmethod
    def of(cls, field: Field, grid: ChunkGridPlan, codec: str) -> ChunkEncoding:
        return cls(field.dtype, grid, codec, shuffle_of(field))

    @cached_property
    def per_shard(self) -> tuple[int, ...]:
        """Number of chunks in a shard along each axis."""
        return tuple(whole // part for whole, part in zip(self.grid.shard, self.grid.chunk, strict=True))

    @property
    def shard_size(self) -> int:
        """Bytes of a full shard before encoding."""
        return int(np.dtype(self.dtype).itemsize * math.prod(self.grid.shard))

    def chunk(self, values: Array) -> Any:
        """Return the encoded chunk, padded with zeros at the edge of the array.

        It may be a view of `values`.
        """
        whole = values
        if values.shape != self.grid.chunk:
            whole = np.zeros(self.grid.chunk, self.dtype)
            whole[tuple(map(slice, values.shape))] = values
        return encoded(np.ascontiguousarray(whole, _little(self.dtype)), self.codec, self.shuffle)

    @property
    def described(self) -> list[dict[str, Any]]:
        """The codecs after `bytes`, in the form of Zarr metadata."""
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
    """The growing bytes of one shard.

    The caller must add the chunks in the order of their indexes, each once.
    """

    def __init__(self, encoding: ChunkEncoding) -> None:
        self._encoding = encoding
        self._index = np.full((math.prod(encoding.per_shard), 2), NOTHING, "<u8")
        self._data = bytearray()

    def put(self, place: tuple[int, ...], values: Array) -> None:
        """Encode the chunk with the index `place` in the shard and append it."""
        data = self._encoding.chunk(values)
        number = int(np.ravel_multi_index(place, self._encoding.per_shard))
        self._index[number] = len(self._data), len(data) + 4
        self._data += memoryview(data)  # a plain ndarray would add its numbers element by element
        self._data += crc32c_of(data).to_bytes(4, "little")

    def finish(self) -> bytearray:
        """Append the index and return the complete shard."""
        index = self._index.tobytes()
        self._data += index + crc32c_of(index).to_bytes(4, "little")
        return self._data


def wrong_with(data: bytes, encoding: ChunkEncoding, n_chunks: int) -> str | None:
    """Return the defect of a stored shard as text; None if all `n_chunks` checksums match."""
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
    """Return the compressed size of some samples for each codec, as a share of their size."""
    flat = np.ascontiguousarray(samples).reshape(-1)[: MEASURED // np.dtype(field.dtype).itemsize]
    if not flat.nbytes:
        return {}
    return {
        codec: len(encoded(flat, codec, shuffle_of(field))) / flat.nbytes
        for codec in CODECS
        if codec != "none"
    }


def shuffle_of(field: Field) -> int:
    """Return Blosc's shuffle mode: bits (2) for pixels, bytes (1) for wider numbers, else none (0)."""
    if np.dtype(field.dtype).itemsize > 1:
        return 1
    return 2 if field.shapes or field.shape else 0


def encoded(values: Array, codec: str, shuffle: int) -> Any:
    """Return contiguous values encoded by a codec; "none" returns a view of them."""
    if codec == "none":
        flat = values.reshape(-1).view("u1")
        flat.flags.writeable = False  # read-only, as the checksum expects
        return flat
    blosc = numcodecs.blosc.Blosc(cname=codec, clevel=LEVELS[codec], shuffle=shuffle)
    return blosc.encode(values)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
