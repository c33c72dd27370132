"""Read compressed files as streams, and read the lines in a byte range of a text file."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import lzma
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

__all__ = ["END", "LineBatch", "LineSpan", "decompressed", "first_line", "is_compressed", "lines_from"]
__all__ += ["spans_of"]

_INPUT = 128 << 10  # compressed bytes read at a time

END = sys.maxsize  # the `stop` of a span over a whole file
READ = 256 << 10  # bytes read and split at a time; their lines are in memory together
TAIL = 32 << 10  # bytes read at a time for a line that extends into the next part


def is_compressed(path: str) -> bool:
    """Return whether the file name has the suffix of a compressed file: .gz, .bz2, .xz or .zst."""
    return _suffix(path) in _READERS


def decompressed(path: str, file: Any) -> Any:
    """Return a reader of the content of an open compressed file, with `read(n)`, forward `seek`, and `close`.

    It reads all members or frames in sequence. `read` raises the library's errors for corrupt data, and EOFError for a
    truncated file. `close` leaves `file` open.
    """
    return _READERS[_suffix(path)](file)


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


class _Frames:
    """Reader of all zstd frames of a file.

    zstandard's own reader takes a truncated frame for a complete one.
    """

    def __init__(self, file: Any, begin: Callable[[], Any]) -> None:
        self._file, self._begin = file, begin
        self._frame: Any = None  # None between two frames
        self._input = self._over = b""
        self._position = 0

    def read(self, n: int = -1) -> bytes:
        """Return the next bytes, regardless of `n`; empty only at the end."""
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


def first_line(file: Any, start: int, stop: int) -> int:
    """Return the offset of the first line that begins at `start` or later.

    Returns `stop` or more if no line begins before `stop`. The file is left at that offset. It needs only `seek` and
    `readline`.
    """
    if start == 0:
        file.seek(0)
        return 0
    position = start - 1  # a line begins at `start` if the byte before it is a line end
    file.seek(position)
    while position < stop:
        data = file.readline(TAIL)
        position += len(data)
        if data.endswith(b"\n"):
            return position
        if not data:
            break
    return stop


class LineBatch(NamedTuple):
    """Consecutive lines and the offset of the first one. Each lacks its b"\\n", but still has a b"\\r"."""

    begin: int
    lines: list[bytes]
    may_return: bool  # False: no line ends with b"\\r"


def lines_from(file: Any, start: int, stop: int) -> Iterator[LineBatch]:
    """Yield the lines that begin in `[start, stop)`, many at a time.

    A line must begin at `start`, and the file must be at `start`. The last line of a file may lack its line end. One
    `split` call handles all that a `read` returns, so this runs at the speed of C. Raises ValueError for a file whose
    lines end with b"\\r" alone.
    """
    begin = position = start  # offsets of the incomplete line, and of the next read
    pending: list[bytes] = []  # pieces of the incomplete line
    while position < stop or pending:
        is_tail = position >= stop
        data = file.read(TAIL if is_tail else min(READ, stop - position))
        if not data:
            last = b"".join(pending)
            if last and (begin or last != codecs.BOM_UTF8):  # a byte order mark alone is no line
                yield LineBatch(begin, [last], True)
            return
        if position == 0 and b"\n" not in data and b"\r" in data[:-1]:
            raise ValueError(
                "its lines end with \\r alone: make that \\n or \\r\\n, as `tr '\\r' '\\n'` does"
            )
        position += len(data)
        lines = data.split(b"\n", 1) if is_tail else data.split(b"\n")
        pending.append(lines[0])
        if len(lines) == 1:
            continue
        lines[0] = b"".join(pending)
        rest = lines.pop()
        yield LineBatch(begin, lines, b"\r" in data or lines[0].endswith(b"\r"))
        if is_tail:
            return
        begin, pending = position - len(rest), [rest] if rest else []
