"""Text files as sources: plain lines, JSON lines and CSV."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from cachedfs.datasets.text_streams import is_compressed
from cachedfs.packing.pack_types import END, Field, SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import (
    arrow_type,
    batch_of,
    chosen,
    fields_of,
    merged,
    text_of,
    whole_type,
)
from cachedfs.packing.sources.csv_records import delimiter_of, first_record, last_record
from cachedfs.packing.sources.file_samples import spread
from cachedfs.packing.sources.json_values import objects_of, only, texts_of, whole_ranges, why
from cachedfs.packing.sources.record_blocks import RecordBlocks, last_line
from cachedfs.packing.sources.sample_source import DecodedSource, Item, SourceFiles

__all__ = ["CSVSource", "JSONSource", "LineSource"]

SAMPLED = 16  # files that `look` reads
SAMPLED_SIZE = 1 << 20  # first bytes of each that it reads
HEADER = 64 << 10  # first bytes that are read for the header of CSV
DELIMITERS = b",;\t|"
INTEGER = re.compile("-?[0-9]+")
MEANS = {
    None: "",
    "utf8": "utf-8",
    "bytes": "bytes",
}  # `Field.means` of lines, by the user's type; "": detect it


class _Text(DecodedSource):
    """Base class of text sources, which read complete records block by block."""

    by_range = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files)
        self.columns = chosen(columns)
        self._blocks = RecordBlocks(files, self.cut, by_range=self.by_range)

    def cut(self, data: bytes) -> int:
        """Return the length of all complete records in `data`."""
        return last_line(data)

    def pieces(self) -> Iterable[SourcePiece]:
        return self._blocks.pieces()

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        size = int(self.files.sizes[piece.file])
        if piece.stop == END or is_compressed(self.files.paths[piece.file]):
            if not piece.start:
                yield self.files.paths[piece.file], 0, size
        else:
            yield self.files.paths[piece.file], piece.start, piece.stop

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the lines from byte {piece.start:,} on"

    def _sampled_files(self) -> list[int]:
        """Return the numbers of the files that `look` reads."""
        nonempty = [file for file, size in enumerate(self.files.sizes.tolist()) if size]
        if not nonempty:
            raise ValueError(f"{self.files.url}: nothing to pack: all files are empty")
        return [nonempty[i] for i in spread(len(nonempty), SAMPLED)]

    def _head(self, file: int, n: int = SAMPLED_SIZE) -> bytes:
        """Return the first records of a file, about `n` bytes, without a byte order mark."""
        return _without_bom(self._blocks.head(file, n), SourcePiece(file, 0, END))


class LineSource(_Text):
    """A source with one sample for each line that is not empty: its bytes without the line end."""

    kind = "lines"

    def look(self) -> list[SampleBatch]:
        types_given = self.columns or {"data": None}
        if set(types_given) != {"data"} or types_given["data"] not in MEANS:
            raise ValueError(
                f"columns={self.columns}: lines are data, 'utf8' or 'bytes', and have no others; kind='jsonl' reads lines of JSON"
            )
        heads = [self._head(file) for file in self._sampled_files()]
        means = MEANS[types_given["data"]] or ("bytes" if any(_not_utf8(head) for head in heads) else "utf-8")
        self.fields = (Field("data", "uint8", is_ragged=True, means=means),)
        return [_lines_of(head, END) for head in heads]

    def read(self, piece: SourcePiece) -> SampleBatch:
        data, stop = self._blocks.read(piece)
        if self.fields[0].means == "utf-8" and (problem := _not_utf8(data)):
            raise ValueError(
                f'{self.shown(piece)}: {problem}; columns={{"data": "bytes"}} (--column data=bytes) packs lines as bytes'
            )
        return _lines_of(_without_bom(data, piece), stop)

    @property
    def total_size(self) -> int | None:
        is_plain = not any(map(is_compressed, self.files.paths))
        return self.files.size if is_plain else None


class JSONSource(_Text):
    """A source with one sample for each JSON line, and one field for each key."""

    kind = "jsonl"

    def look(self) -> list[SampleBatch]:
        heads = [(self._head(file), SourcePiece(file, 0, END)) for file in self._sampled_files()]
        schema = merged([self._guess_schema(head, piece) for head, piece in heads])
        if self.columns is not None:
            missing = [name for name in self.columns if name not in schema.names]
            if missing:
                raise ValueError(
                    f"{self.files.url}: columns {missing} do not exist; there are {schema.names}"
                )
            schema = pa.schema([schema.field(name) for name in self.columns])
        types_given = self.columns or {}
        found = {each.name: each.type for each in schema} | self._integer_types(schema, heads)
        schema = pa.schema(
            [(name, arrow_type(name, types_given.get(name), type_)) for name, type_ in found.items()]
        )
        self.fields = fields_of(schema, self.columns)
        self._expected_keys = frozenset(schema.names) if self.columns is None else None
        self._json_fields = [field.name for field in self.fields if field.means == "json"]
        self._schema = pa.schema([each for each in schema if each.name not in self._json_fields])
        return [self._samples(head, piece) for head, piece in heads]

    def read(self, piece: SourcePiece) -> SampleBatch:
        data, stop = self._blocks.read(piece)
        return self._samples(_without_bom(data, piece), piece, stop)

    def _integer_types(
        self, schema: pa.Schema, heads: list[tuple[bytes, SourcePiece]]
    ) -> dict[str, pa.DataType]:
        """Return integer types for columns of large integers, which Arrow reads as floats and rounds."""
        lists = {
            each.name
            for each in schema
            if pa.types.is_list(each.type) and pa.types.is_float64(each.type.value_type)
        }
        floats = [each.name for each in schema if pa.types.is_float64(each.type) or each.name in lists]
        objects = (each for head, _ in heads for each in _objects_replacing(head)) if floats else ()
        found = {name: whole_type(name, *ends) for name, ends in whole_ranges(objects, floats).items()}
        return {name: pa.list_(type_) if name in lists else type_ for name, type_ in found.items()}

    def _guess_schema(self, data: bytes, piece: SourcePiece) -> pa.Schema:
        """Return Arrow's guess of each type; null for a type that the user gave.

        Raises ValueError with the file.
        """
        try:
            if self.columns is None:
                return self._table(data, None).schema
            objects = list(_objects_replacing(data))
            to_guess = [name for name, type_ in self.columns.items() if type_ is None]
            schema = self._table(only(objects, to_guess), None).schema
        except ValueError as error:
            raise ValueError(f"{self.shown(piece)}: {error}") from error
        others = dict.fromkeys(name for each in objects for name in each if name not in schema.names)
        return pa.schema([*schema, *((name, pa.null()) for name in others)])

    def _samples(self, data: bytes, piece: SourcePiece, stop: int = END) -> SampleBatch:
        """Parse lines into samples.

        Python parses the JSON fields, because Arrow would guess or fill in their values. Raises ValueError with the
        file.
        """
        try:
            texts = texts_of(data, self._json_fields, self._expected_keys) if self._json_fields else {}
            table = self._table(data, self._schema)
            fields = [field for field in self.fields if field.name in table.schema.names]
            batch = batch_of(table, fields, stop)
        except ValueError as error:
            raise ValueError(f"{self.shown(piece)}: {error}") from error
        n = max([batch.n, *map(len, texts.values())])  # an Arrow table without columns has no rows
        joined = {name: text_of(found) for name, found in texts.items()}
        values = {name: elements for name, (elements, _) in joined.items()}
        sizes = {name: lengths for name, (_, lengths) in joined.items()}
        return SampleBatch(n, {**batch.values, **values}, {**batch.sizes, **sizes}, stop)

    def _table(self, data: bytes, schema: pa.Schema | None) -> pa.Table:
        """Parse lines with Arrow.

        Without a schema, Arrow guesses the types, except that texts that look like times stay texts.
        """
        if not data.strip() or (schema is not None and not schema.names):
            return (schema or pa.schema([])).empty_table()
        expected = None if schema is None else self._expected_keys
        # If there are JSON fields, `texts_of` has already rejected unexpected keys.
        unexpected = (
            "infer" if schema is None else "error" if expected and not self._json_fields else "ignore"
        )
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        # One block, no threads: pieces already run in parallel.
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pyarrow.json.read_json(pa.py_buffer(data), read_options=read, parse_options=parse)
        except pa.ArrowInvalid as error:
            raise ValueError(why(data, expected, f"{error}; {self._advice()}")) from error
        if schema is not None:
            return table.select(schema.names)
        return table.cast(pa.schema([(each.name, _text_if_time(each.type)) for each in table.schema]))

    def _advice(self) -> str:
        """Return the advice of an error message: types that the user has not tried yet."""
        others = [name for name in ("float64", "json") if name not in (self.columns or {}).values()]
        return (
            f"columns={{...}} can give a name another type{', such as ' * bool(others)}{' or '.join(others)}"
        )


class CSVSource(_Text):
    """A source with one sample for each CSV record, and one field for each column.

    Each file starts with a header.
    """

    kind = "csv"
    by_range = False  # the start of a record depends on all quotes before it
    _delimiters = DELIMITERS  # the candidates, until `look` has read the header

    def cut(self, data: bytes) -> int:
        return last_record(data, self._delimiters)

    def look(self) -> list[SampleBatch]:
        files = self._sampled_files()
        first = self._head(files[0], HEADER)
        header = first[: first_record(first, self._delimiters)]
        where = self.files.shown(files[0])
        if not header.strip():
            raise ValueError(f"{where}: its first line is empty; it must name the columns")
        is_tabbed = ".tsv" in self.files.paths[files[0]].lower()
        self._delimiters = b"\t" if is_tabbed else delimiter_of(header, DELIMITERS)
        self._header = header
        self._names = self._columns_of(header, where)
        wanted = list(self.columns) if self.columns is not None else self._names
        if missing := [name for name in wanted if name not in self._names]:
            raise ValueError(f"{self.files.url}: columns {missing} do not exist; there are {self._names}")
        self._schema = pa.schema([(name, pa.null()) for name in wanted])
        heads = [(self._head(file), SourcePiece(file, 0, END)) for file in files]
        tables = [self._parsed(head, piece, {}) for head, piece in heads]
        schema = merged([table.schema for table in tables])
        types_given = self.columns or {}
        floats = [
            name
            for name in wanted
            if types_given.get(name) is None and pa.types.is_float64(schema.field(name).type)
        ]
        types = {name: schema.field(name).type for name in wanted} | self._integer_types(floats, heads)
        self._schema = pa.schema(
            [(name, arrow_type(name, types_given.get(name), types[name])) for name in wanted]
        )
        self.fields = fields_of(self._schema, self.columns)
        return [batch_of(self._parsed(head, piece), self.fields) for head, piece in heads]

    def _integer_types(
        self, names: list[str], heads: list[tuple[bytes, SourcePiece]]
    ) -> dict[str, pa.DataType]:
        """Return integer types for columns of large integers, which Arrow reads as floats and rounds."""
        found: dict[str, list[int]] = {name: [] for name in names}
        for head, piece in heads if names else ():
            table = self._parsed(head, piece, dict.fromkeys(names, pa.string()), has_null=True)
            for name in [*found]:
                texts = [text.strip() for text in table.column(name).to_pylist() if text is not None]
                if all(map(INTEGER.fullmatch, texts)):
                    found[name].extend(map(int, texts))
                else:
                    del found[name]
        return {name: whole_type(name, min(each), max(each), "utf8") for name, each in found.items() if each}

    def _columns_of(self, header: bytes, where: str) -> list[str]:
        """Return the column names in the header. Raises ValueError if Arrow finds a second record in it."""
        others: list[Any] = []

        def on_extra_row(row: Any) -> str:
            others.append(row)
            return "skip"

        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(header) + 64)
        parse = pyarrow.csv.ParseOptions(
            delimiter=self._delimiters.decode(),
            newlines_in_values=True,
            invalid_row_handler=on_extra_row,
        )
        with_line_end = pa.py_buffer(header + b"\n")  # Arrow reports a header without a line end as empty
        table = pyarrow.csv.read_csv(with_line_end, read_options=read, parse_options=parse)
        if table.num_rows or others:
            raise ValueError(f"{where}: its lines end with \\r alone; make that \\n, or \\r\\n")
        return list(table.schema.names)

    def read(self, piece: SourcePiece) -> SampleBatch:
        data, stop = self._blocks.read(piece)
        try:
            return batch_of(self._parsed(data, piece), self.fields, stop)
        except ValueError as error:
            error.add_note(f"in {self.shown(piece)}")
            raise

    def _parsed(
        self,
        data: bytes,
        piece: SourcePiece,
        types: Mapping[str, pa.DataType] | None = None,
        *,
        has_null: bool = False,
    ) -> pa.Table:
        """Parse records with Arrow.

        Arrow guesses the types of columns that are not in `types`. If `types` is None, the schema gives all types.
        With `has_null`, words such as "NA" are null in text columns, too.
        """
        data = _without_bom(data, piece)
        if not piece.start:
            header = data[: first_record(data, self._delimiters)]
            where = self.files.shown(piece.file)
            if not header.strip() or self._columns_of(header, where) != self._names:
                raise ValueError(
                    f"{where}: begins with {header[:100]!r}, and the first file with {self._header[:100]!r}: "
                    "the first record must name the same columns"
                )
            data = data[len(header) :]
        if types is None:
            types = {each.name: each.type for each in self._schema}
        if not data.strip():
            return self._schema.empty_table()
        convert = pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=self._schema.names, strings_can_be_null=has_null
        )
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiters.decode(), newlines_in_values=True)
        try:
            return pyarrow.csv.read_csv(
                pa.py_buffer(data), read_options=read, parse_options=parse, convert_options=convert
            )
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{self.shown(piece)}: {error}; columns={{...}} can give a column another type, such as utf8"
            ) from error


def _lines_of(data: bytes, stop: int) -> SampleBatch:
    lines = data.split(b"\n")
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    lines = [line for line in lines if line]
    sizes = np.fromiter(map(len, lines), np.int64, len(lines))
    return SampleBatch(len(lines), {"data": np.frombuffer(b"".join(lines), "u1")}, {"data": sizes}, stop)


def _not_utf8(data: bytes) -> str:
    """Return a description of the first line that is not UTF-8; "" if all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        number, begin = data.count(b"\n", 0, error.start), data.rfind(b"\n", 0, error.start) + 1
        return f"byte {data[error.start]:#x} in line {number:,} of these is not UTF-8: {data[begin : error.start + 1][-80:]!r}"
    return ""


def _objects_replacing(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of lines.

    It replaces invalid UTF-8. `read` reports it later, unless the field is bytes.
    """
    return objects_of(data.decode(errors="replace").encode())


def _without_bom(data: bytes, piece: SourcePiece) -> bytes:
    return data if piece.start else data.removeprefix(codecs.BOM_UTF8)


def _text_if_time(type_: pa.DataType) -> pa.DataType:
    """Return string for the time types that Arrow guesses from text, else the type itself."""
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_) or pa.types.is_time(type_):
        return pa.string()
    return type_
