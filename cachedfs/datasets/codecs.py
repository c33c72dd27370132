"""Decode the stored chunks of a Zarr array: by numcodecs where that is faster, else by zarr."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numcodecs.blosc
import numcodecs.lz4
import numcodecs.zstd
import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from cachedfs.common.checksums import crc32c_of

# As zarr does: Blosc's own threads block other threads, and our threads already decode chunks in parallel.
numcodecs.blosc.use_threads = False

NUMBERS = "biufcmM"  # kinds of dtypes that are given in native byte order
BY_NUMCODECS = {"blosc", "gzip", "zstd", "crc32c"}  # of Zarr v3; the stored bytes say how to decode them
# What these codecs call after buffer checks that take longer than decoding a small chunk.
_UNCHECKED: dict[type, Callable[[Any], Any]] = {
    numcodecs.zstd.Zstd: numcodecs.zstd.decompress,
    numcodecs.lz4.LZ4: numcodecs.lz4.decompress,
    numcodecs.blosc.Blosc: numcodecs.blosc.decompress,
}

Array = npt.NDArray[Any]


class ChunkDecoder:
    """Decoder of the chunks of one array. A chunk always has the full shape, also at the edge of the array.

    `document` is the metadata of an array of one chunk. Numbers that were not transposed are decoded directly if
    numcodecs has their codecs, everything else by zarr, which takes about 0.3 ms more for each chunk.
    """

    def __init__(self, document: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._given = document, shape, dtype
        self._steps = _steps(document) if dtype.kind in NUMBERS else None
        big = (
            "codecs" in document and (document["codecs"][0].get("configuration") or {}).get("endian") == "big"
        )
        self._stored = dtype.newbyteorder(">") if big else dtype
        self._order = document.get("order", "C")
        self._own = threading.local()  # an array of one chunk for each thread
        self.shape = shape
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=") if dtype.kind in NUMBERS else dtype
        self.size = dtype.itemsize * math.prod(shape)

    def __reduce__(self) -> Any:
        return type(self), self._given

    @cached_property
    def fill(self) -> Any:
        """The value of what was never written."""
        return self._by_zarr(None).reshape(-1)[0]

    def array(self, data: Any) -> Array:
        """Decode these stored bytes. The chunk may be a read-only view of them.

        Raises the errors of the codecs, and ValueError if the bytes are not a whole chunk.
        """
        if self._steps is None:
            return self._by_zarr(data)
        for step in self._steps:
            data = step(data)
        stored = np.frombuffer(data, self._stored).reshape(self.shape, order=self._order)
        return stored.astype(self.dtype, copy=False)

    def _by_zarr(self, data: Any) -> Array:
        """Return the chunk that zarr decodes; without `data`, one that was never written."""
        own, buffer = self._own, default_buffer_prototype().buffer
        if not hasattr(own, "array"):
            name = "zarr.json" if self._given[0]["zarr_format"] == 3 else ".zarray"
            own.files = {name: buffer.from_bytes(json.dumps(self._given[0]).encode())}
            own.array = zarr.open_array(MemoryStore(own.files), mode="r")
        key = ".".join("0" * len(self.shape))
        try:
            if data is not None:
                own.files[key] = buffer.from_bytes(data)
            return np.asarray(own.array[...]).astype(self.dtype, copy=False)
        finally:
            own.files.pop(key, None)


def _steps(document: Mapping[str, Any]) -> list[Callable[[Any], Any]] | None:
    """Return what decodes the bytes of a chunk, in order; None if zarr must do it."""
    if document["zarr_format"] == 2:
        codecs = [document["compressor"], *reversed(document["filters"] or ())]
        return [_step(codec) for codec in codecs if codec]
    serializer, *encoders = document["codecs"]
    if serializer["name"] != "bytes" or not {codec["name"] for codec in encoders} <= BY_NUMCODECS:
        return None
    return [_step({"id": codec["name"]}) for codec in reversed(encoders)]


def _step(codec: dict[str, Any]) -> Callable[[Any], Any]:
    if codec["id"] == "crc32c":
        return without_crc32c
    found: Any = numcodecs.get_codec(codec)
    decode: Callable[[Any], Any] = _UNCHECKED.get(type(found), found.decode)
    return decode


def without_crc32c(data: Any) -> Any:
    """Return bytes without the CRC-32C in the last four. Raises ValueError if it does not match."""
    stored = np.frombuffer(data, "u1")
    found = int.from_bytes(stored[-4:].tobytes(), "little")
    expected = crc32c_of(stored[:-4].tobytes() if stored.flags.writeable else stored[:-4])  # type: ignore[arg-type]  # any bytes that stay as they are
    if len(stored) < 4 or found != expected:
        raise ValueError(f"the CRC-32C of its bytes is {expected:08x}, and should be {found:08x}")
    return stored[:-4]
