"""Parquet and Feather files as sources: one sample for each row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cachedfs.packing.pack_types import SampleBatch
from cachedfs.packing.sources.arrow_types import empty_table, structs_of, unfolded
from cachedfs.packing.sources.sample_source import spread, without_bad
from cachedfs.packing.sources.source_files import BadFile
from cachedfs.packing.sources.tables import TableSource, distinct_names

SAMPLED = 16  # files whose schema `look` reads
SAMPLED_ROWS = 4  # files of which it reads rows
SAMPLED_SIZE = 1 << 20  # bytes of such a file
SAMPLED_BATCHES = 512  # reads of it, which are enough for narrow rows
ROWS = 16  # rows in one read of `look`, whose width is unknown
READ = 1 << 20  # bytes of rows that are decoded in one step


class ParquetSource(TableSource):
    """A source with one sample for each row, and one field for each column.

    Structs that hold bytes, such as Hugging Face images, are split: `image.bytes` is a column.
    """

    may_skip = True
    _row_size = READ // ROWS  # bytes of a decoded row, until `look` has found it

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        some = [numbers[i] for i in spread(len(numbers), SAMPLED)]
        schemas, gaps = self._schemas(some, sorted({*numbers} - {*some}))
        chosen = [number for number in some[:: SAMPLED // SAMPLED_ROWS] if number in schemas]
        rows = dict(without_bad(chosen or [*schemas][:1], self._sampled))
        # Decoded bytes: the file stores repeated values only once.
        size, n = sum(each.nbytes for each in rows.values()), sum(map(len, rows.values()))
        self._row_size = max(1, size // max(1, n))
        self.plan([(i, rows.get(i, empty_table(schema))) for i, schema in schemas.items()], gaps)
        return [self.checked(table, i) for i, table in rows.items()]

    def _schemas(self, some: list[int], others: list[int]) -> tuple[dict[int, pa.Schema], set[str]]:
        """Return the schemas of some files with rows, and the names of columns with missing values.

        If none of them has rows, they are those of the first other file with rows. Files without rows do not count,
        because pandas writes their columns without types.
        """
        schemas, gaps = dict[int, pa.Schema](), set[str]()
        for number, (schema, n_rows, missing) in without_bad([*some, *others], self._described):
            if schemas and number not in some:
                break
            if n_rows:
                schemas[number], gaps = schema, gaps | missing
        if not schemas:
            raise ValueError(f"{self.files.url}: nothing to pack: no file has rows")
        return schemas, gaps

    def _described(self, number: int) -> tuple[pa.Schema, int, set[str]]:
        """Return the schema of a file, its number of rows, and the columns with missing values."""
        with self._file(number) as file:
            metadata, schema = file.metadata, file.schema_arrow
        named, names = _named(empty_table(schema), schema).schema, _names_of(schema)
        gaps = {each.name for each in named if pa.types.is_null(each.type)}
        for i in range(metadata.num_row_groups):
            for j in range(metadata.num_columns):
                column = metadata.row_group(i).column(j)
                if column.statistics is not None and column.statistics.null_count:
                    gaps.update(names.get(column.path_in_schema, ()))
        return named, metadata.num_rows, gaps

    def _sampled(self, number: int) -> pa.Table:
        found, size = list[pa.Table](), 0
        for table in self.chunks(number):
            found.append(table)
            size += table.nbytes
            if size > SAMPLED_SIZE or len(found) >= SAMPLED_BATCHES:
                break
        return pa.concat_tables(found)

    def chunks(self, number: int) -> Iterator[pa.Table]:
        with self._file(number) as file:
            schema = file.schema_arrow
            paths = _names_of(schema)
            wanted = [path for path in paths if {*paths[path]} & {*(self._wanted or ())}] or [*paths][:1]
            columns = None if self._wanted is None else wanted  # at least one, which tells the number of rows
            n = max(1, READ // self._row_size)
            for batch in file.iter_batches(n, columns=columns, use_threads=False):
                yield _named(pa.Table.from_batches([batch]), schema)

    @contextmanager
    def _file(self, number: int) -> Iterator[pq.ParquetFile]:
        """Return a context manager for an open file. Raises BadFile if it is not Parquet."""
        with self.files.open(number) as raw:
            try:
                # No pre-buffering: a row group may be larger than memory.
                file = pq.ParquetFile(
                    raw, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
                )
            except pa.ArrowInvalid as error:
                reason = f"Arrow cannot read it as Parquet: {error}"
                raise BadFile(self.files.url_of(number), reason) from error
            yield file


class FeatherSource(ParquetSource):
    """A source with one sample for each row of Feather and Arrow IPC files, and one field for each column."""

    def _described(self, number: int) -> tuple[pa.Schema, int, set[str]]:
        first = next(filter(len, self.chunks(number)), pa.table({}))
        return first.schema, len(first), {name for name in first.column_names if first[name].null_count}

    def chunks(self, number: int) -> Iterator[pa.Table]:
        with self.files.open(number) as raw:
            for batch in _arrow_batches(raw, self.files.url_of(number)):
                yield _named(pa.Table.from_batches([batch]), batch.schema)


def _arrow_batches(raw: Any, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow IPC file or stream. Raises BadFile for other files."""
    try:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        opened = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
    except pa.ArrowInvalid as error:
        raise BadFile(where, f"Arrow cannot read it as Feather or Arrow IPC: {error}") from error
    if not is_file:
        yield from opened
        return
    for i in range(opened.num_record_batches):
        yield opened.get_batch(i)


def _names_of(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the columns by their path in the file, of which several may be equal."""
    paths = unfolded(empty_table(schema), structs_of(schema)).column_names
    found: dict[str, list[str]] = {}
    for path, name in zip(paths, distinct_names(paths), strict=True):
        found.setdefault(path, []).append(name)
    return found


def _named(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the split structs and the names of a file with this schema; it has some of the columns."""
    table = unfolded(table, structs_of(schema))
    names = {path: iter(each) for path, each in _names_of(schema).items()}
    return table.rename_columns([next(names[path]) for path in table.column_names])
