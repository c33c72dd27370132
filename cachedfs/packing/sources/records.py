"""Base class of sources that read each file in sequence, and the readers that stay open between two pieces."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cachedfs.packing.pack_types import SampleBatch, SourcePiece, empty_batch
from cachedfs.packing.sources.sample_source import DecodedSource, SourceFiles

__all__ = ["Chunk", "RecordSource", "first_bad"]


class Chunk(NamedTuple):
    """Consecutive records of a file: an Arrow table, or lines. `start` is the number of records before it."""

    start: int
    n: int
    records: Any
    is_last: bool


class RecordSource(DecodedSource):
    """Base class of sources that read the records of each file in sequence: lines, or rows.

    Pieces count records from the start of their file. A reader stays open at the end of a piece, so that nothing is
    read twice.
    """

    record = "row"

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, columns, **options)
        self._readers = OpenReaders()

    def chunks(self, file: int, start: int) -> Iterator[Chunk]:
        """Yield the records of a file in order, from record `start` on or from one before it."""
        raise NotImplementedError

    def batch(self, records: Any, file: int) -> SampleBatch:
        """Return records as samples. Raises ValueError if one does not fit the fields."""
        raise NotImplementedError

    def part(self, records: Any, n: int) -> Any:
        """Return the first `n` records."""
        return records.slice(0, n)

    def read(self, piece: SourcePiece) -> SampleBatch:
        reader = self._readers.pop(piece.file, None)
        if reader is None or reader.position > piece.start:
            reader = _Reader(self.chunks(piece.file, piece.start))
        try:
            with self.files.noted(piece.file):
                chunk = reader.read(piece.start)
            batch: SampleBatch = self.checked(chunk, piece.file)
        except BaseException:  # an interrupt, too: no other code closes this reader
            reader.close()
            raise
        if chunk.is_last:
            reader.close()
            return batch
        self._readers[piece.file] = reader
        return dataclasses.replace(batch, stop=reader.position)

    def checked(self, chunk: Chunk, file: int, parse: Callable[[Any, int], Any] | None = None) -> Any:
        """Return `parse(records, file)` of a chunk (None: `batch`). A ValueError names the first bad record."""
        parse = parse or self.batch
        if chunk.records is None:  # of a file without records
            return empty_batch(self.fields)
        try:
            return parse(chunk.records, file)
        except ValueError as error:
            bad = first_bad(chunk.n, lambda n: parse(self.part(chunk.records, n), file))
            where = f"{self.files.shown(file)}, {self.record} {chunk.start + bad + 1:,}"
            raise ValueError(f"{where}: {self.problem(chunk.records, bad, error)}") from error

    def problem(self, records: Any, bad: int, error: Exception) -> str:
        """Return what is wrong with record number `bad`, for which `batch` raised an error."""
        return str(error)

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the {self.record}s from {piece.start + 1:,} on"


class _Reader:
    """Reads the chunks of one file in sequence."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self.position = 0  # records before the next chunk

    def read(self, start: int) -> Chunk:
        """Return the chunk that begins at a record; those before it are read and left out."""
        for chunk in self._chunks:
            self.position = chunk.start + chunk.n
            if chunk.start == start:
                return chunk
        if start:
            raise ValueError(
                f"no {start + 1:,}th record is there, as it was before: the file was replaced; pack again"
            )
        return Chunk(0, 0, None, True)

    def close(self) -> None:
        self._chunks.close()  # type: ignore[attr-defined]  # a generator


class OpenReaders(dict[int, _Reader]):
    """The open reader of each file that is partly read, by its number, so that nothing is read twice.

    It pickles empty.
    """

    def __reduce__(self) -> Any:
        return type(self), ()


def first_bad(n: int, parse: Callable[[int], object]) -> int:
    """Return the number of the first of `n` records that cannot be parsed; `parse(k)` parses the first `k`."""

    def fails(k: int) -> bool:
        try:
            parse(k)
        except ValueError:
            return True
        return False

    return bisect_left(range(1, n), True, key=fails)
