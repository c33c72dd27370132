"""Parquet files as a source: a piece is a row group, or some rows of a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cachedfs.packing.pack_types import END, SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import (
    arrow_type,
    batch_of,
    chosen,
    fields_of,
    stored_type,
    structs_of,
    unfolded,
    unfolded_types,
)
from cachedfs.packing.sources.sample_source import (
    PIECE,
    BadFile,
    DecodedSource,
    Item,
    OpenReaders,
    SourceFiles,
    looked_at,
    spread,
)

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
        super().__init__(files)
        self.columns = chosen(columns)
        self._readers: OpenReaders[_Rows] = OpenReaders()

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        first, file_schema = self._first(numbers)
        schema, self._structs = unfolded_types(file_schema), structs_of(file_schema)
        wanted = list(self.columns) if self.columns is not None else schema.names
        if missing := [name for name in wanted if name not in schema.names]:
            raise ValueError(f"{self.files.url}: columns {missing} do not exist; there are {schema.names}")
        if duplicates := [name for name in wanted if schema.names.count(name) > 1]:
            raise ValueError(
                f"{self.files.url}: several columns are called {duplicates[0]!r}; columns=[...] says which others to pack"
            )
        self._schema = pa.schema([schema.field(name) for name in wanted])
        try:
            self.fields = fields_of(self._schema_as_asked(), self.columns)
        except ValueError as error:
            raise ValueError(f"{self.files.shown(first)}: {error}") from error
        chosen = sorted({first, *(numbers[i] for i in spread(len(numbers), SAMPLED))})
        found = [batch for _, batch in looked_at(chosen, self._sampled)]
        n = sum(batch.n for batch in found)
        # Decoded bytes: the file stores repeated values only once.
        self._row_size = max(1, sum(batch.nbytes for batch in found) // max(1, n))
        return found

    def _schema_as_asked(self) -> pa.Schema:
        """Return the schema with the types that the user gave."""
        types_given = self.columns or {}
        return pa.schema(
            [
                (each.name, arrow_type(each.name, type_, each.type))
                if (type_ := types_given.get(each.name))
                else each
                for each in self._schema
            ]
        )

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
        stored = pa.schema([(each.name, stored_type(each.type)) for each in self._schema])
        tables: list[pa.Table] = [stored.empty_table()]
        size = 0
        with self._file(number) as file:
            self._check(number, file)
            try:
                for batch in file.iter_batches(ROWS, columns=self._schema.names, use_threads=False):
                    table = unfolded(pa.Table.from_batches([batch]), self._structs)
                    tables.append(table.select(self._schema.names))
                    size += tables[-1].nbytes
                    if size > SAMPLED_SIZE or len(tables) > SAMPLED_BATCHES:
                        break
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
                group = metadata.row_group(i)
                if not group.num_rows:
                    continue
                # A large row group becomes several pieces, each read by the reader of the one before it.
                yield SourcePiece(
                    number, row, END if self._step(group) < group.num_rows else row + group.num_rows
                )
                row += group.num_rows

    def read(self, piece: SourcePiece) -> SampleBatch:
        reader = self._readers.take(piece.file, piece.start)
        try:
            if reader is None:
                reader = _Rows(self._file(piece.file), piece.start, self._schema.names)
            stop, end = (
                (piece.stop, piece.stop) if piece.stop != END else reader.span(piece.start, self._step)
            )
            table = unfolded(reader.read(stop - piece.start), self._structs)
            batch = batch_of(table, self.fields, END if stop == end else stop)
        except Exception as error:  # Arrow and the filesystem raise errors of many types
            error.add_note(f"in {self.shown(piece)}")
            raise
        if stop == reader.n_rows:
            reader.close()
        else:
            self._readers.put(piece.file, stop, reader)
        return batch

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        if not piece.start:
            yield self.files.paths[piece.file], 0, int(self.files.sizes[piece.file])

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the rows from {piece.start:,} on"

    def _step(self, group: Any) -> int:
        """Return the number of rows in a piece of a row group."""
        n_pieces = max(1, -(-group.total_byte_size // PIECE))
        return int(max(1, min(-(-group.num_rows // n_pieces), PIECE // self._row_size)))

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
        schema = unfolded_types(file.schema_arrow)
        for each in self._schema if file.metadata.num_rows else ():
            index = schema.get_field_index(each.name)
            if index < 0 or schema.field(index).type != each.type:
                found = "is not there" if index < 0 else f"is {schema.field(index).type}"
                raise ValueError(
                    f"{self.files.shown(number)}: column {each.name!r} {found}, and {each.type} in the first file that has rows; "
                    "columns=[...] says which to pack"
                )


class _Rows:
    """Reads the rows of an open file in order, from row `start` on."""

    def __init__(self, file: pq.ParquetFile, start: int, columns: list[str]) -> None:
        self._file, metadata = file, file.metadata
        self.n_rows = metadata.num_rows
        first, self.position = 0, 0
        while self.position + metadata.row_group(first).num_rows <= start:
            self.position += metadata.row_group(first).num_rows
            first += 1
        groups = list(range(first, metadata.num_row_groups))
        self._columns, self._groups = columns, groups
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rest: pa.Table | None = None
        self._skip = start - self.position

    def span(self, start: int, step: Callable[[Any], int]) -> tuple[int, int]:
        """Return the end of the piece that begins at row `start`, and the end of its row group."""
        metadata, end, i = self._file.metadata, 0, -1
        while end <= start:
            i += 1
            end += metadata.row_group(i).num_rows
        return min(start + step(metadata.row_group(i)), end), end

    def read(self, n: int) -> pa.Table:
        """Return the next `n` rows."""
        if self._batches is None:
            size = max(1, min(n, 64 << 10))
            self._batches = self._file.iter_batches(
                size, self._groups, columns=self._columns, use_threads=False
            )
        tables, n_rows = ([self._rest], self._rest.num_rows) if self._rest is not None else ([], 0)
        while n_rows < self._skip + n:
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError("the file has fewer rows than it says")
            table = pa.Table.from_batches([batch])
            if n_rows + table.num_rows <= self._skip:  # the whole batch is before the first row
                self._skip -= table.num_rows
                continue
            tables.append(table)
            n_rows += table.num_rows
        table_rows = pa.concat_tables(tables)
        found = table_rows.slice(self._skip, n)
        self._rest = table_rows.slice(self._skip + n)
        self._skip = 0
        return found

    def close(self) -> None:
        self._file.close(force=True)
