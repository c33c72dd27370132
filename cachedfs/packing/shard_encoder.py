"""Encode Zarr v3 shards: chunks one by one, each with its CRC-32C, then the index. No I/O.

zarr's own writer gives the same bytes in 1.4 times the CPU time for chunks of 256 KiB, and in 6 times for 4 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numcodecs.blosc
import numpy as np

from cachedfs.common.checksums import crc32c_of
from cachedfs.packing.pack_types import Array, Field

# Blosc's global threads block all other callers, and shards are encoded in parallel.
numcodecs.blosc.use_threads = False

CODECS = ("none", "lz4", "zstd")  # fastest first
LEVELS = {"lz4": 5, "zstd": 3}
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
NOTHING = 0xFFFF_FFFF_FFFF_FFFF  # offset and length of a missing chunk in the index
MEASURED = 4 << 20  # bytes of samples that are compressed to choose a codec


@dataclass(frozen=True)
class ArrayEncoding:
    """The encoding of an array: its chunk and shard shapes, and a codec of `CODECS`. Values are little-endian."""

    dtype: str
    shape: tuple[int, ...]  # of a sample
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    codec: str
    shuffle: int = 0

    @property
    def shard_size(self) -> int:
        """Bytes of a full shard before encoding."""
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shard))

    def shards_at(self, index: int) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Yield the shards at an index along the first axis: the key of each, and its slices of a sample."""
        sides = self.shard[1:]
        for place in np.ndindex(*(-(-n // part) for n, part in zip(self.shape, sides, strict=True))):
            box = (slice(i * part, (i + 1) * part) for i, part in zip(place, sides, strict=True))
            yield f"c.{'.'.join(map(str, (index, *place)))}", tuple(box)

    def encoded(self, values: Array) -> bytearray:
        """Return a shard. At the edge of the array, chunks are padded with zeros."""
        per_shard = tuple(whole // part for whole, part in zip(self.shard, self.chunk, strict=True))
        index, data = np.full((math.prod(per_shard), 2), NOTHING, "<u8"), bytearray()
        for at in np.ndindex(*(-(-n // part) for n, part in zip(values.shape, self.chunk, strict=True))):
            box = tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, self.chunk, strict=True))
            chunk = self._chunk(values[box])
            index[np.ravel_multi_index(at, per_shard)] = len(data), len(chunk) + 4
            data += memoryview(chunk)  # a plain ndarray would add its numbers element by element
            data += crc32c_of(chunk).to_bytes(4, "little")
        ending = index.tobytes()
        data += ending + crc32c_of(ending).to_bytes(4, "little")
        return data

    def _chunk(self, values: Array) -> Any:
        whole = values
        if values.shape != self.chunk:
            whole = np.zeros(self.chunk, self.dtype)
            whole[tuple(map(slice, values.shape))] = values
        little = np.dtype(self.dtype).newbyteorder("<")
        return _encoded(np.ascontiguousarray(whole, little), self.codec, self.shuffle)

    @property
    def compressors(self) -> list[dict[str, Any]]:
        """The codecs after `bytes`, in the form of Zarr metadata."""
        checksum: list[dict[str, Any]] = [{"name": "crc32c"}]
        if self.codec == "none":
            return checksum
        settings = {
            "cname": self.codec,
            "clevel": LEVELS[self.codec],
            "shuffle": SHUFFLES[self.shuffle],
            "typesize": np.dtype(self.dtype).itemsize,
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": settings}, *checksum]


def compressed_shares(field: Field, samples: Array) -> Mapping[str, float]:
    """Return the compressed size of some samples for each codec, as a share of their size."""
    flat = np.ascontiguousarray(samples).reshape(-1)[: MEASURED // np.dtype(field.dtype).itemsize]
    names = [codec for codec in CODECS if codec != "none"] if flat.nbytes else []
    return {codec: len(_encoded(flat, codec, shuffle_of(field))) / flat.nbytes for codec in names}


def shuffle_of(field: Field) -> int:
    """Return Blosc's shuffle mode: bits (2) for pixels, bytes (1) for wider numbers, else none (0)."""
    if np.dtype(field.dtype).itemsize > 1:
        return 1
    return 2 if field.shapes or field.shape else 0


def _encoded(values: Array, codec: str, shuffle: int) -> Any:
    """Return contiguous values encoded by a codec; "none" returns a view of them."""
    if codec == "none":
        flat = values.reshape(-1).view("u1")
        flat.flags.writeable = False  # read-only, as the checksum expects
        return flat
    return numcodecs.blosc.Blosc(cname=codec, clevel=LEVELS[codec], shuffle=shuffle).encode(values)
