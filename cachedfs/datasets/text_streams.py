"""Files that are compressed, read as a stream: which they are, and what decompresses them."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

__all__ = [
    "END",
    "LineBatch",
    "LineSpan",
    "decompressed",
    "first_line",
    "is_compressed",
    "lines_from",
    "spans_of",
]


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


END = sys.maxsize  # a span that stops here has all of its file
READ = 256 << 10  # bytes that are split into lines at once: the lines of it are in memory together
TAIL = 32 << 10  # bytes read at a time for the end of a line that runs over into the next part


class LineSpan(NamedTuple):
    """The lines that begin in `[start, stop)` of one file."""

    file: int
    start: int
    stop: int


def spans_of(sizes: Sequence[int], is_whole: Sequence[bool], part: int, n_parts: int) -> list[LineSpan]:
    """Return what part number `part` of `n_parts` reads, in order: its share of the bytes of all files.

    Files that cannot be read from the middle (`is_whole`) go to the part in which their middle is. The parts, one after
    the other, are all of the files in their order, where none is whole; else each byte still belongs to exactly one.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    low, high = total * part // n_parts, total * (part + 1) // n_parts
    if part == n_parts - 1:
        high += 1  # and what has no bytes, at the end of all
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
    """Return where the first line begins that begins at `start` or later; `stop` or more when that is not before it.

    Leaves the file there. It is enough for it to be `seek`ed and to have `readline`.
    """
    if start == 0:
        file.seek(0)
        return 0
    position = start - 1  # a line begins at `start` if another ends right before it
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
    """Lines that follow one another, and where the first begins. They are without their b"\\n"; a b"\\r" is still there."""

    begin: int
    lines: list[bytes]
    may_return: bool  # False: none of them ends with b"\\r"


def lines_from(file: Any, start: int, stop: int) -> Iterator[LineBatch]:
    """Yield the lines that begin in `[start, stop)`, many at a time. One begins at `start`, and there the file is.

    The last line of a file may have no end. What one `read` returns is split by one call, so this runs at the speed of C.
    """
    begin = position = start  # of the line that is not read to its end, and of the next read
    pending: list[bytes] = []  # of that line
    while position < stop or pending:
        is_tail = position >= stop
        data = file.read(TAIL if is_tail else min(READ, stop - position))
        if not data:
            if pending:
                yield LineBatch(begin, [b"".join(pending)], True)
            return
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
