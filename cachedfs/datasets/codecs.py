"""Decode the stored bytes of Zarr chunks into arrays, with the codecs of numcodecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numcodecs.blosc
import numcodecs.lz4
import numcodecs.zstd
import numpy as np
import numpy.typing as npt

from cachedfs.common.checksums import crc32c_of

__all__ = ["ChunkDecoder", "Crc32c", "stated_size"]

# As zarr does: Blosc's own threads block other threads, and our threads already decode chunks in parallel.
numcodecs.blosc.use_threads = False

# Up to so many decoded bytes, a copy is faster than the buffer checks of numcodecs.
SMALL = 32 << 10
# The functions that these codecs call after their buffer checks.
_UNLOOKED: dict[type, Callable[[Any], Any]] = {
    numcodecs.zstd.Zstd: numcodecs.zstd.decompress,
    numcodecs.lz4.LZ4: numcodecs.lz4.decompress,
    numcodecs.blosc.Blosc: numcodecs.blosc.decompress,
}
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ChunkDecoder:
    """Decoder of the chunks of one array. A chunk always has the full shape, also at the edge of the array."""

    shape: tuple[int, ...]
    stored: np.dtype[Any]  # dtype with the byte order of the stored bytes
    steps: tuple[Any, ...] = ()  # codecs of numcodecs, in the order of decoding
    axes: tuple[int, ...] | None = None  # transposes the stored array to the chunk; None: no transposition
    order: Literal["C", "F"] = "C"

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
        return self.axes is None and (self.order == "C" or len(self.shape) == 1) and self.stored.isnative

    @cached_property
    def _decodes(self) -> list[Callable[[Any], Any]]:
        """The functions that decode a chunk, in order."""
        unlooked = _UNLOOKED if self.size <= SMALL else {}
        return [unlooked.get(type(step), step.decode) for step in self.steps]

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
            found = flat.reshape(self.shape, order=self.order)
        else:
            found = flat.reshape([self.shape[axis] for axis in np.argsort(self.axes)]).transpose(self.axes)
        return found if self.stored.isnative else found.astype(self.dtype)

    def into(self, data: Any, out: memoryview) -> None:
        """Decode a chunk with `is_plain` into the bytes `out`, of its size; if possible without a copy."""
        if self.size > SMALL and self.steps:
            for step in self.steps[:-1]:
                data = step.decode(data)
            last = self.steps[-1]
            # numcodecs accepts an `out` that it fills only in part, so check the size first.
            if stated_size(last.codec_id, data) == len(out):
                last.decode(data, out=out)
                return
            data = last.decode(data)
        else:
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


def stated_size(codec_id: str, data: Any) -> int | None:
    """Return the decoded size that the header of compressed bytes states; None if it states none."""
    if codec_id == "zstd":
        return _zstd_size(bytes(data[:18]))
    at = {"blosc": 4, "lz4": 0}.get(codec_id)
    n = 16 if codec_id == "blosc" else 4  # bytes of the header
    return None if at is None or len(data) < n else int.from_bytes(bytes(data[at : at + 4]), "little")


def _zstd_size(head: bytes) -> int | None:
    """Return the content size of a zstd frame, or None if the frame does not state it. See RFC 8878, 3.1.1.1."""
    if len(head) < 6 or head[:4] != ZSTD_MAGIC:
        return None
    flags = head[4]
    is_single, size_flag = flags >> 5 & 1, flags >> 6
    at = 5 + (0 if is_single else 1) + (0, 1, 2, 4)[flags & 3]
    width = (is_single, 2, 4, 8)[size_flag]
    if not width or len(head) < at + width:
        return None
    return int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)
