"""Text files as sources: blocks of complete records, and plain lines as samples."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, TypeVar

import numpy as np

from cachedfs.datasets.text_streams import decompressed, is_compressed
from cachedfs.packing.pack_types import END, Array, Field, SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import chosen
from cachedfs.packing.sources.sample_source import (
    MAX_SAMPLE,
    PIECE,
    DecodedSource,
    Item,
    OpenReaders,
    SourceFiles,
)
from cachedfs.packing.sources.source_tools import joined, spread

__all__ = ["LineSource", "TextSource", "line_ends"]

SAMPLED = 16  # files that `look` reads, and parts of the source if it has fewer files
PART = 512 << 10  # bytes of such a part
TAIL = 64 << 10  # bytes in one read while searching for the end of a line
Parsed = TypeVar("Parsed")


class TextSource(DecodedSource):
    """Base class of text sources, which read complete records block by block.

    Any block of a file may be read by itself if each line is a record. Other files, and compressed ones, are read in
    sequence: one reader of each stays open at the end of its last block, so that nothing is read twice.
    """

    is_record_a_line = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, chosen(columns))
        self._readers = OpenReaders()

    def ends(self, data: bytes) -> Array:
        """Return the end of each complete record. `data` must start at the beginning of a record."""
        return line_ends(data)

    def last_end(self, data: bytes) -> int:
        """Return the length of all complete records."""
        return data.rfind(b"\n") + 1

    def parsed(self, data: bytes, piece: SourcePiece) -> SampleBatch:
        """Return complete records as samples. Raises ValueError if one does not fit the fields."""
        raise NotImplementedError

    def problem(self, record: bytes, error: Exception) -> str:
        """Return what is wrong with a record for which `parsed` raised an error."""
        return str(error)

    def pieces(self) -> Iterable[SourcePiece]:
        for file, size in enumerate(self.files.sizes.tolist()):
            if self._is_sequential(file):
                yield SourcePiece(file, 0, END)
            else:
                yield from (SourcePiece(file, at, min(at + PIECE, size)) for at in range(0, size, PIECE))

    def read(self, piece: SourcePiece) -> SampleBatch:
        data, stop = self._next_block(piece) if self._is_sequential(piece.file) else (self._lines(piece), END)
        return dataclasses.replace(self.checked(self.parsed, data, piece), stop=stop)

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        if self._is_sequential(piece.file):
            yield from super().items(piece)
        else:
            yield self.files.paths[piece.file], piece.start, piece.stop

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the lines from byte {piece.start:,} on"

    def samples(self) -> list[tuple[bytes, SourcePiece]]:
        """Return records from all over the source: the first ones of up to 16 files, and others of the same files.

        Of compressed files it returns only the first ones, because all before the others would be decompressed.
        """
        sizes = self.files.sizes.tolist()
        nonempty = [file for file, size in enumerate(sizes) if size]
        if not nonempty:
            raise ValueError(f"{self.files.url}: nothing to pack: all files are empty")
        files = [nonempty[i] for i in spread(len(nonempty), SAMPLED)]
        n = max(2, SAMPLED // len(files))
        wanted = {
            SourcePiece(file, at, min(at + PART, sizes[file]))
            for file in files
            if sizes[file] > PART and not is_compressed(self.files.paths[file])
            for i in range(1, n + 1)
            for at in [max(PART, (sizes[file] - PART) * i // n)]
        }
        found = []
        for file in files:
            with closing(_Reader(self.files, file, 0)) as reader:
                found.append((reader.read(self.last_end, PART), SourcePiece(file, 0, END)))
        pieces = sorted(wanted)
        datas = self.files.ranges((piece.file, piece.start - 1, piece.stop) for piece in pieces)
        for data, piece in zip(datas, pieces, strict=True):
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
            found.append((data[: self.last_end(data)], piece))
        return found

    def checked(
        self, parse: Callable[[bytes, SourcePiece], Parsed], data: bytes, piece: SourcePiece
    ) -> Parsed:
        """Return `parse(data, piece)`. If it raises ValueError, the error names the line of the first bad record."""
        try:
            return parse(data, piece)
        except ValueError as wrong:
            error = wrong
        edges = sorted({0, *self.ends(data).tolist(), len(data)})
        # The records before `edges[good]` can be parsed, those before `edges[bad]` cannot.
        good, bad = 0, len(edges) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                parse(data[: edges[middle]], piece)
                good = middle
            except ValueError as wrong:
                bad, error = middle, wrong
        line = self._n_lines(piece) + data.count(b"\n", 0, edges[good]) + 1
        problem = self.problem(data[edges[good] : edges[bad]], error)
        raise ValueError(f"{self.files.shown(piece.file)}, line {line:,}: {problem}") from error

    def _n_lines(self, piece: SourcePiece) -> int:
        """Return the number of lines before the first record of a piece."""
        if not piece.start:
            return 0
        with closing(_Reader(self.files, piece.file, 0)) as reader:
            return 1 + reader.n_lines(piece.start - 1)  # the line that ends at `start` or behind it

    def _is_sequential(self, file: int) -> bool:
        return not self.is_record_a_line or is_compressed(self.files.paths[file])

    def _next_block(self, piece: SourcePiece) -> tuple[bytes, int]:
        """Return the records from the start of a piece on, and the start of the next piece, or END."""
        kept: _Reader | None = self._readers.take(piece.file, piece.start)
        reader = kept or _Reader(self.files, piece.file, piece.start)
        try:
            data = reader.read(self.last_end, PIECE)
        except BaseException:  # an interrupt, too: no other code closes this reader
            reader.close()
            raise
        if reader.is_over:
            reader.close()
            return data, END
        self._readers.put(piece.file, reader.position, reader)
        return data, reader.position

    def _lines(self, piece: SourcePiece) -> bytes:
        """Return the lines that begin in a piece."""
        file, start, stop = piece
        size = int(self.files.sizes[file])
        # A line begins at `start` if another ends right before it.
        (data,) = self.files.ranges([(file, max(0, start - 1), stop)])
        if start:
            end = data.find(b"\n") + 1
            if not end:
                return b""
            data = data[end:]
        parts = [data]
        while parts[-1] and not parts[-1].endswith(b"\n") and stop < size:
            (data,) = self.files.ranges([(file, stop, min(size, stop + TAIL))])
            parts.append(data[: data.find(b"\n") + 1] or data)
            stop += len(parts[-1])
            if stop - start > MAX_SAMPLE:
                raise _too_large(self.files, file)
        data = b"".join(parts)
        return data if start else data.removeprefix(codecs.BOM_UTF8)


class LineSource(TextSource):
    """A source with one sample for each line that is not empty: its bytes without the line end."""

    kind = "lines"

    def look(self) -> list[SampleBatch]:
        given = self.columns or {"data": None}
        if set(given) != {"data"} or given["data"] not in (None, "utf8", "bytes"):
            raise ValueError(
                f"columns={self.columns}: lines are data, 'utf8' or 'bytes', and have no others; kind='jsonl' reads lines of JSON"
            )
        datas = [data for data, _ in self.samples()]
        is_text = given["data"] == "utf8" or (given["data"] is None and all(map(_is_utf8, datas)))
        self.fields = (Field("data", "uint8", is_ragged=True, means="utf-8" if is_text else "bytes"),)
        return [_samples_of(data) for data in datas]

    def parsed(self, data: bytes, piece: SourcePiece) -> SampleBatch:
        if self.fields[0].means == "utf-8":
            data.decode()
        return _samples_of(data)

    def problem(self, record: bytes, error: Exception) -> str:
        try:
            record.decode()
        except UnicodeDecodeError as wrong:
            found = record[: wrong.start + 1]
            return (
                f"byte {found[-1]:#x} is not UTF-8: {found[-80:]!r}; "
                'columns={"data": "bytes"} (--column data=bytes) packs lines as bytes'
            )
        return str(error)

    @property
    def total_size(self) -> int | None:
        return None if any(map(is_compressed, self.files.paths)) else self.files.size


class _Reader:
    """Reads one file in sequence, decompressed, from byte `start` of its content on, without a byte order mark."""

    def __init__(self, files: SourceFiles, file: int, start: int) -> None:
        self._files, self._file = files, file
        path = files.paths[file]
        self._raw = files.fs.open(path, "rb")
        self._stream = decompressed(path, self._raw) if is_compressed(path) else self._raw
        if start:
            self._stream.seek(start)
        self.position, self._over = start, b""
        self.is_over = False

    def read(self, last_end: Callable[[bytes], int], n: int) -> bytes:
        """Return the next complete records, about `n` bytes.

        Raises ValueError, with the file, for a record of more than `MAX_SAMPLE` bytes.
        """
        data, end = self._over, 0
        while not end and not self.is_over:
            if len(data) > MAX_SAMPLE:
                raise _too_large(self._files, self._file)
            data = self._more(data, max(n, 2 * len(data)))
            if not self.position and data.startswith(codecs.BOM_UTF8):
                data, self.position = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
            end = len(data) if self.is_over else last_end(data)
        self._over = data[end:]
        self.position += end
        return data[:end]

    def n_lines(self, n: int) -> int:
        """Return the number of line ends in the next `n` bytes."""
        found = 0
        while n > 0 and not self.is_over:
            data = self._more(b"", min(n, PIECE))
            found, n = found + data.count(b"\n"), n - len(data)
        return found

    def _more(self, data: bytes, n: int) -> bytes:
        """Return the data with the bytes that follow it, `n` bytes together, or fewer at the end of the file."""
        parts, size = [data], len(data)
        try:
            while size < n and not self.is_over:
                parts.append(self._stream.read(n - size))
                size += len(parts[-1])
                self.is_over = not parts[-1]
        except Exception as error:  # each library raises its own errors for damaged data
            error.add_note(f"while packing {self._files.shown(self._file)}")
            raise
        return b"".join(parts)

    def close(self) -> None:
        self._stream.close()
        self._raw.close()


def line_ends(data: bytes) -> Array:
    return np.flatnonzero(np.frombuffer(data, "u1") == ord("\n")) + 1


def _samples_of(data: bytes) -> SampleBatch:
    lines = data.split(b"\n")
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    values, sizes = joined(filter(None, lines))
    return SampleBatch(len(sizes), {"data": values}, {"data": sizes})


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _too_large(files: SourceFiles, file: int) -> ValueError:
    return ValueError(
        f"{files.shown(file)}: a record of more than {MAX_SAMPLE:,} bytes is not packed by line; "
        'kind="files" keeps the bytes of whole files, of any size'
    )
