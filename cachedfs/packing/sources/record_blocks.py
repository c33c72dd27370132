"""Read text files in blocks of complete records, by byte range or in sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from cachedfs.datasets.text_streams import decompressed, is_compressed
from cachedfs.packing.pack_types import END, SourcePiece
from cachedfs.packing.sources.sample_source import MAX_SAMPLE, PIECE, SourceFiles

__all__ = ["RecordBlocks", "last_line"]

TAIL = 64 << 10  # bytes in one read while searching for the end of a record


class RecordBlocks:
    """Reader of blocks of complete records.

    `cut` returns the length of the complete records in some data. `by_range`: each line is a record, so that a block
    may start at any byte. Compressed files are still read in sequence. One reader of each sequential file stays open at
    the end of its last block, so that nothing is decompressed twice. It pickles without its readers.
    """

    def __init__(self, files: SourceFiles, cut: Callable[[bytes], int], *, by_range: bool) -> None:
        self._files, self._cut, self._by_range = files, cut, by_range
        self._lock = threading.Lock()
        self._readers: dict[int, _Reader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_readers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def pieces(self) -> Iterable[SourcePiece]:
        for file, size in enumerate(self._files.sizes.tolist()):
            if not self._by_range or is_compressed(self._files.paths[file]):
                yield SourcePiece(file, 0, END)
            else:
                yield from (SourcePiece(file, at, min(at + PIECE, size)) for at in range(0, size, PIECE))

    def read(self, piece: SourcePiece) -> tuple[bytes, int]:
        """Return the records that begin in a piece, and the start of the next piece, or END.

        Raises ValueError, with the file, for a record of more than `MAX_SAMPLE` bytes.
        """
        if self._by_range and not is_compressed(self._files.paths[piece.file]):
            return self._lines(piece), END
        with self._lock:
            reader = self._readers.pop(piece.file, None)
        if reader is None or reader.position != piece.start:
            if reader is not None:
                reader.close()
            reader = _Reader(self._files, piece.file, piece.start)
        try:
            data = (
                reader.read(self._cut, PIECE) if piece.stop == END else reader.take(piece.stop - piece.start)
            )
        except BaseException:  # an interrupt, too: no other code closes this reader
            reader.close()
            raise
        stop = END if reader.is_over else reader.position
        with self._lock:
            left = reader if reader.is_over else self._readers.get(piece.file)
            if not reader.is_over:
                self._readers[piece.file] = reader
        if left is not None:
            left.close()
        return data, stop

    def head(self, file: int, n: int) -> bytes:
        """Return the first complete records of a file, about `n` bytes."""
        reader = _Reader(self._files, file, 0)
        try:
            return reader.read(self._cut, n)
        finally:
            reader.close()

    def _lines(self, piece: SourcePiece) -> bytes:
        file, start, stop = piece
        begin = max(0, start - 1)  # a line begins at `start` if another ends right before it
        (data,) = self._files.ranges([(file, begin, stop)])
        if start:
            end = data.find(b"\n")
            if end < 0:
                return b""
            data = data[end + 1 :]
        size = int(self._files.sizes[file])
        tail = [data]
        while data and not data.endswith(b"\n") and stop < size:
            (data,) = self._files.ranges([(file, stop, min(size, stop + TAIL))])
            end = data.find(b"\n") + 1
            data = data[:end] if end else data
            stop += len(data)
            tail.append(data)
            if stop - start > MAX_SAMPLE:
                raise _too_large(self._files, file)
        return b"".join(tail)


class _Reader:
    """Reads one file in sequence, decompressed, from byte `start` of its content on."""

    def __init__(self, files: SourceFiles, file: int, start: int) -> None:
        self._files, self._file = files, file
        path = files.paths[file]
        self._raw = files.fs.open(path, "rb")
        self._stream = decompressed(path, self._raw) if is_compressed(path) else self._raw
        if start:
            self._stream.seek(start)
        self.position, self._over = start, b""
        self.is_over = False

    def read(self, cut: Callable[[bytes], int], n: int) -> bytes:
        """Return the next complete records, about `n` bytes."""
        data, want = self._more(b"", n), n
        while not self.is_over and not (end := cut(data)):
            if len(data) > MAX_SAMPLE:
                raise _too_large(self._files, self._file)
            want *= 2
            data = self._more(data, want)
        if self.is_over:
            end = len(data)
        self._over = data[end:]
        self.position += end
        return data[:end]

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes, or fewer at the end of the file."""
        data = self._more(b"", n)
        self._over = data[n:]
        self.is_over = self.is_over and not self._over
        self.position += min(n, len(data))
        return data[:n]

    def _more(self, data: bytes, n: int) -> bytes:
        parts = [data, self._over]
        size = len(data) + len(self._over)
        self._over = b""
        try:
            while size < n:
                part = self._stream.read(n - size)
                if not part:
                    self.is_over = True
                    break
                parts.append(part)
                size += len(part)
        except Exception as error:  # each library raises its own errors for damaged data
            error.add_note(f"while packing {self._files.shown(self._file)}")
            raise
        return b"".join(parts)

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()
        self._raw.close()


def last_line(data: bytes) -> int:
    """Return the length of all complete lines."""
    return data.rfind(b"\n") + 1


def _too_large(files: SourceFiles, file: int) -> ValueError:
    return ValueError(
        f"{files.shown(file)}: a record of more than {MAX_SAMPLE:,} bytes is not packed by line; "
        'kind="files" keeps the bytes of whole files, of any size'
    )
