"""Files that are compressed, read as a stream: which they are, and what decompresses them."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["decompressed", "is_compressed"]

_INPUT = 128 << 10  # compressed bytes at a time


def is_compressed(path: str) -> bool:
    """Return whether the name says that the file is compressed: .gz, .bz2, .xz, .zst."""
    return _suffix(path) in _READERS


def decompressed(path: str, file: Any) -> Any:
    """Return what reads the content of an open compressed file: `read(n)`, `seek` forwards, `close` of itself alone.

    All members or frames, one after the other. Its `read` raises what the library does for wrong data (OSError,
    zlib.error, lzma.LZMAError, ...), and EOFError for a file that ends too early.
    """
    return _READERS[_suffix(path)](file)


def _suffix(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _zstd(file: Any) -> Any:
    # Python's own, from 3.14 on, and the same for older ones.
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return import_module(name).ZstdFile(file)
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise ImportError("files that end in .zst need Python 3.14, or: pip install zstandard") from None
    return _Frames(file, lambda: zstandard.ZstdDecompressor().decompressobj())


class _Frames:
    """Reads frame after frame. The library's own reader takes the end of the file for the end of a frame."""

    def __init__(self, file: Any, begin: Callable[[], Any]) -> None:
        self._file, self._begin = file, begin
        self._frame: Any = None  # None between two frames
        self._input = self._over = b""
        self._position = 0

    def read(self, n: int = -1) -> bytes:
        """Return what comes next, of any size; nothing at the end only."""
        data, self._over = self._over, b""
        while not data:
            self._input = self._input or self._file.read(_INPUT)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end of its last frame")
                return b""
            self._frame = self._frame or self._begin()
            data = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        self._position += len(data)
        return data

    def seek(self, offset: int) -> None:
        while self._position < offset and (data := self.read()):
            self._over = data[len(data) - max(0, self._position - offset) :]
            self._position -= len(self._over)

    def close(self) -> None:
        self._frame = None


_READERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zst": _zstd,
}
