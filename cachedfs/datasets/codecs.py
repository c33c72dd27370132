"""Decode the stored bytes of Zarr chunks into arrays, with the codecs of numcodecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numcodecs.blosc
import numcodecs.lz4
import numcodecs.zstd
import numpy as np
import numpy.typing as npt

from cachedfs.common.checksums import crc32c_of

__all__ = ["ChunkDecoder", "Crc32c"]

# As zarr does: Blosc's own threads block other threads, and our threads already decode chunks in parallel.
numcodecs.blosc.use_threads = False

# What these codecs call after buffer checks that take longer than decoding a small chunk.
_UNCHECKED: dict[type, Callable[[Any], Any]] = {
    numcodecs.zstd.Zstd: numcodecs.zstd.decompress,
    numcodecs.lz4.LZ4: numcodecs.lz4.decompress,
    numcodecs.blosc.Blosc: numcodecs.blosc.decompress,
}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ChunkDecoder:
    """Decoder of the chunks of one array. A chunk always has the full shape, also at the edge of the array."""

    shape: tuple[int, ...]
    stored: np.dtype[Any]  # dtype with the byte order of the stored bytes
    steps: tuple[Any, ...] = ()  # codecs of numcodecs, in the order of decoding
    axes: tuple[int, ...] | None = None  # transposes the stored array to the chunk; None: no transposition

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.newbyteorder("=")

    @cached_property
    def size(self) -> int:
        """Bytes of a decoded chunk."""
        return self.stored.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @cached_property
    def is_plain(self) -> bool:
        """True if the decoded bytes are the chunk in C order and native byte order."""
        return self.axes is None and self.stored.isnative

    @cached_property
    def _decodes(self) -> list[Callable[[Any], Any]]:
        """The functions that decode a chunk, in order."""
        return [_UNCHECKED.get(type(step), step.decode) for step in self.steps]

    def array(self, data: Any) -> Array:
        """Decode these stored bytes into a chunk in native byte order.

        It may be a read-only view of the bytes. Raises the errors of the codecs, and ValueError if the bytes are not a
        whole chunk.
        """
        for decode in self._decodes:
            data = decode(data)
        is_array = isinstance(data, np.ndarray)
        flat = (data.reshape(-1, order="A") if is_array else np.frombuffer(data, "u1")).view(self.stored)
        if self.axes is None:
            found = flat.reshape(self.shape)
        else:
            found = flat.reshape([self.shape[axis] for axis in np.argsort(self.axes)]).transpose(self.axes)
        return found if self.stored.isnative else found.astype(self.dtype)

    def into(self, data: Any, out: memoryview) -> None:
        """Decode a chunk with `is_plain` into the bytes `out`, of its size."""
        for decode in self._decodes:
            data = decode(data)
        data = data if isinstance(data, bytes) else memoryview(data).cast("B")
        if len(data) != len(out):
            raise ValueError(f"a chunk has {len(out)} bytes, and this one has {len(data)}")
        out[:] = data


class Crc32c:
    """The codec `crc32c` of Zarr v3: a checksum in the last four bytes."""

    codec_id = "crc32c"

    def decode(self, data: Any) -> Any:
        """Return the bytes without their checksum. Raises ValueError if the checksum does not match."""
        stored = np.frombuffer(data, "u1")
        found = int.from_bytes(stored[-4:].tobytes(), "little")
        expected = crc32c_of(stored[:-4].tobytes() if stored.flags.writeable else stored[:-4])  # type: ignore[arg-type]  # any bytes that stay as they are
        if len(stored) < 4 or found != expected:
            raise ValueError(f"the CRC-32C of its bytes is {expected:08x}, and should be {found:08x}")
        return stored[:-4]
