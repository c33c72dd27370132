"""Read compressed files as streams, and the lines that begin in a byte range of a text file."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

_INPUT = 128 << 10  # compressed bytes read at a time
_READ = 256 << 10  # bytes of text read at a time

END = sys.maxsize  # the `stop` of a span over a whole file


def is_compressed(path: str) -> bool:
    """Return whether the file name has the suffix of a compressed file: .gz, .bz2, .xz or .zst."""
    return _suffix(path) in _READERS


def buffered(path: str, file: Any) -> io.BufferedReader:
    """Return a buffered reader of the content of an open file, decompressed if its name has such a suffix.

    It reads all members or frames in sequence. Reading raises the library's errors for corrupt data, and EOFError for a
    truncated file.
    """
    decompressed = _READERS.get(_suffix(path))
    return io.BufferedReader(file if decompressed is None else decompressed(file), _READ)


def _suffix(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _zstd(file: Any) -> Any:
    # The standard library's module (Python 3.14), or its backport.
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return import_module(name).ZstdFile(file)
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        raise ImportError("files that end in .zst need Python 3.14, or: pip install zstandard") from None
    return _Frames(file, lambda: zstandard.ZstdDecompressor().decompressobj())


class _Frames(io.RawIOBase):
    """Reader of all zstd frames of a file.

    zstandard's own reader takes a truncated frame for a complete one.
    """

    def __init__(self, file: Any, begin: Callable[[], Any]) -> None:
        self._file, self._begin = file, begin
        self._frame: Any = None  # None between two frames
        self._input = b""
        self._output = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and (self._input or (compressed := self._file.read(_INPUT))):
            self._frame = self._frame or self._begin()
            self._output = memoryview(self._frame.decompress(self._input or compressed))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        if not self._output and self._frame is not None:
            raise EOFError("compressed file ended before the end of its last frame")
        n = min(len(buffer), len(self._output))
        buffer[:n], self._output = self._output[:n], self._output[n:]
        self._position += n
        return n

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Read up to `offset`, from the start and not before the position."""
        while self._position < offset and self.read(min(_INPUT, offset - self._position)):
            pass
        return self._position


_READERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zst": _zstd,
}


class LineSpan(NamedTuple):
    """The lines that begin in `[start, stop)` of one file."""

    file: int
    start: int
    stop: int


def spans_of(sizes: Sequence[int], is_whole: Sequence[bool], part: int, n_parts: int) -> list[LineSpan]:
    """Return the byte ranges of part number `part` of `n_parts`, in order.

    A part is an equal share of the bytes of all files. A file that cannot be split (`is_whole`) belongs to the part
    that contains its middle. Each byte belongs to exactly one part. If no file is whole, the parts in sequence are all
    files in order.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    low, high = total * part // n_parts, total * (part + 1) // n_parts
    if part == n_parts - 1:
        high += 1  # includes empty files at the very end
    found = []
    for i in range(bisect_left(ends, low), len(sizes)):
        begin, end = ends[i] - sizes[i], ends[i]
        if begin >= high:
            break
        if is_whole[i]:
            if low <= (begin + end) // 2 < high:
                found.append(LineSpan(i, 0, END))
        elif max(begin, low) < min(end, high):
            found.append(LineSpan(i, max(begin, low) - begin, min(end, high) - begin))
    return found


def lines_in(
    file: io.BufferedReader, start: int, stop: int, *, is_start: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of the lines that begin in `[start, stop)` of a file, with their ends.

    `is_start`: a line begins at `start`. The last line of a file may lack its end; a byte order mark alone is no line.
    Raises ValueError for a file whose lines end with b"\\r" alone.
    """
    if not start:
        head = file.peek()
        if b"\n" not in head and b"\r" in head[:-1]:
            raise ValueError(
                "its lines end with \\r alone: make that \\n or \\r\\n, as `tr '\\r' '\\n'` does"
            )
    else:
        file.seek(start - (not is_start))
        if not is_start:  # a line begins at `start` if the byte before it is a line end
            rest = file.readline(stop - start + 1)
            start = start - 1 + len(rest) if rest.endswith(b"\n") else stop
    while start < stop and (line := file.readline()):
        if start or line != codecs.BOM_UTF8:
            yield start, line
        start += len(line)
