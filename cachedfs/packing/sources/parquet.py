"""Parquet files as a source: a piece is a row group, or some rows of a large one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cachedfs.packing.pack_types import END, SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import (
    batch_of,
    chosen,
    empty_table,
    fields_of,
    selected,
    structs_of,
    typed,
    unfolded,
)
from cachedfs.packing.sources.sample_source import PIECE, BadFile, DecodedSource, OpenReaders, SourceFiles
from cachedfs.packing.sources.source_tools import looked_at, spread

__all__ = ["ParquetSource"]

SAMPLED = 4  # files that `look` reads
ROWS = 16  # rows in one read of `look`
SAMPLED_SIZE = 1 << 20  # bytes of a file after which it stops
SAMPLED_BATCHES = 512  # reads after which it stops: enough for narrow rows


class ParquetSource(DecodedSource):
    """A source with one sample for each row, and one field for each column.

    Pieces count rows from the start of their file. Structs that hold bytes, such as Hugging Face images, are split:
    `image.bytes` is a column.
    """

    kind = "parquet"
    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, chosen(columns))
        self._readers = OpenReaders()

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        first, file_schema = self._first(numbers)
        self._structs = structs_of(file_schema)
        self._schema = selected(self._unfolded(file_schema), self.columns, self.files.url)
        try:
            self.fields = fields_of(typed(self._schema, self.columns), self.columns)
        except ValueError as error:
            raise ValueError(f"{self.files.shown(first)}: {error}") from error
        files = sorted({first, *(numbers[i] for i in spread(len(numbers), SAMPLED))})
        found = [batch for _, batch in looked_at(files, self._sampled)]
        # Decoded bytes: the file stores repeated values only once.
        self._row_size = max(1, sum(batch.nbytes for batch in found) // max(1, sum(each.n for each in found)))
        return found

    def _unfolded(self, schema: pa.Schema) -> pa.Schema:
        return unfolded(empty_table(schema), structs_of(schema)).schema

    def _first(self, numbers: list[int]) -> tuple[int, pa.Schema]:
        """Return the number and schema of the first file with rows.

        Files without rows are skipped, because pandas writes their columns without types.
        """
        for number, (n_rows, schema) in looked_at(numbers, self._n_rows_and_schema):
            if n_rows:
                return number, schema
        raise ValueError(f"{self.files.url}: nothing to pack: no file has rows")

    def _n_rows_and_schema(self, number: int) -> tuple[int, pa.Schema]:
        with self._file(number) as file:
            return file.metadata.num_rows, file.schema_arrow

    def _sampled(self, number: int) -> SampleBatch:
        tables: list[pa.Table] = [empty_table(self._schema)]
        size = 0
        with self._file(number) as file:
            self._check(number, file)
            try:
                for batch in file.iter_batches(ROWS, columns=self._schema.names, use_threads=False):
                    tables.append(unfolded(pa.Table.from_batches([batch]), self._structs))
                    size += tables[-1].nbytes
                    if size > SAMPLED_SIZE or len(tables) > SAMPLED_BATCHES:
                        break
                tables = [table.select(self._schema.names) for table in tables]
                return batch_of(pa.concat_tables(tables), self.fields)
            except Exception as error:  # Arrow and the filesystem raise errors of many types
                error.add_note(f"in {self.files.shown(number)}")
                raise

    def pieces(self) -> Iterable[SourcePiece]:
        for number in self.files.numbers:
            try:
                with self._file(number) as file:
                    self._check(number, file)
                    metadata = file.metadata
            except BadFile:
                yield SourcePiece(number, 0, END)  # `measure` raises the error again
                continue
            row = 0
            for i in range(metadata.num_row_groups):
                if n_rows := metadata.row_group(i).num_rows:
                    # A large row group becomes several pieces, each read by the reader of the one before it.
                    yield SourcePiece(number, row, END)
                row += n_rows

    def read(self, piece: SourcePiece) -> SampleBatch:
        reader: _RowGroup | None = self._readers.take(piece.file, piece.start)
        try:
            if reader is None or reader.is_over:
                file = self._file(piece.file) if reader is None else reader.file
                reader = _RowGroup(file, piece.start, self._row_size, self._schema.names)
            table = unfolded(reader.read(piece.start), self._structs)
            batch = batch_of(table, self.fields, END if reader.is_over else reader.position)
        except Exception as error:  # Arrow and the filesystem raise errors of many types
            error.add_note(f"in {self.shown(piece)}")
            raise
        if reader.position == reader.file.metadata.num_rows:
            reader.close()
        else:
            self._readers.put(piece.file, reader.position, reader)
        return batch

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the rows from {piece.start:,} on"

    def _file(self, number: int) -> pq.ParquetFile:
        raw = self.files.fs.open(self.files.paths[number], "rb")
        try:
            # No pre-buffering: a row group may be larger than memory.
            return pq.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
        except pa.ArrowInvalid as error:
            raw.close()
            raise BadFile(self.files.shown(number), f"Arrow cannot read it as Parquet: {error}") from error

    def _check(self, number: int, file: pq.ParquetFile) -> None:
        """Raise ValueError for a file with rows whose columns differ from the schema."""
        schema = self._unfolded(file.schema_arrow)
        for each in self._schema if file.metadata.num_rows else ():
            index = schema.get_field_index(each.name)
            if index < 0 or schema.field(index).type != each.type:
                found = "is not there" if index < 0 else f"is {schema.field(index).type}"
                raise ValueError(
                    f"{self.files.shown(number)}: column {each.name!r} {found}, and {each.type} in the first file that "
                    "has rows; columns=[...] says which to pack"
                )


class _RowGroup:
    """Reads the row group with row `start` of a file, in parts of about `PIECE` bytes."""

    def __init__(self, file: pq.ParquetFile, start: int, row_size: int, columns: list[str]) -> None:
        self.file = file
        i, self.position, self.end = (
            -1,
            0,
            0,
        )  # the rows before the next part, and before the end of the group
        while self.end <= start:
            i, self.position = i + 1, self.end
            group = file.metadata.row_group(i)
            self.end += group.num_rows
        n_parts = max(1, -(-group.total_byte_size // PIECE))
        n = int(max(1, min(-(-group.num_rows // n_parts), PIECE // row_size)))
        self._parts: Iterator[pa.RecordBatch] = file.iter_batches(n, [i], columns=columns, use_threads=False)

    def read(self, start: int) -> pa.Table:
        """Return the part that begins at row `start`, behind those that were read."""
        while (part := next(self._parts, None)) is not None:
            self.position += part.num_rows
            if self.position - part.num_rows == start:
                return pa.Table.from_batches([part])
        raise ValueError(f"no part of the row group begins at row {start:,}, as it did before")

    @property
    def is_over(self) -> bool:
        return self.position == self.end

    def close(self) -> None:
        self.file.close(force=True)
