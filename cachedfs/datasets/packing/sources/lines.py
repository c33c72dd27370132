"""Lines of text files: as they are, as JSON, as CSV."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from cachedfs.datasets.compressed import is_compressed
from cachedfs.datasets.packing.model import END, Batch, Field, Piece
from cachedfs.datasets.packing.sources.base import Decoded, Files, Item
from cachedfs.datasets.packing.sources.blocks import Blocks, last_line, last_record
from cachedfs.datasets.packing.sources.columns import arrow_type, batch_of, chosen, fields_of, merged
from cachedfs.datasets.packing.sources.files import spread

__all__ = ["CSVSource", "JSONSource", "LineSource"]

SAMPLED = 16  # files whose first lines are looked at
SAMPLED_SIZE = 1 << 20  # bytes of each


class _Text(Decoded):
    """Records of text files, block by block."""

    by_range = True
    cut = staticmethod(last_line)

    def __init__(self, files: Files, columns: Any = None, **options: Any) -> None:
        super().__init__(files)
        self.columns = chosen(columns)
        self._blocks = Blocks(files, self.cut, by_range=self.by_range)

    def pieces(self) -> Iterable[Piece]:
        return self._blocks.pieces()

    def items(self, piece: Piece) -> Iterator[Item]:
        size = int(self.files.sizes[piece.file])
        if piece.stop == END or is_compressed(self.files.paths[piece.file]):
            if not piece.start:
                yield self.files.paths[piece.file], 0, size
        else:
            yield self.files.paths[piece.file], piece.start, piece.stop

    def shown(self, piece: Piece) -> str:
        return f"{self.files.shown(piece.file)}, the lines from byte {piece.start:,} on"

    def _heads(self) -> Iterator[tuple[int, bytes]]:
        """Yield the first records of some files."""
        there = [file for file, size in enumerate(self.files.sizes.tolist()) if size]
        if not there:
            raise ValueError(f"{self.files.url}: nothing to pack: all files are empty")
        for i in spread(len(there), SAMPLED):
            yield there[i], self._blocks.head(there[i], SAMPLED_SIZE)


class LineSource(_Text):
    """A sample for each line, its bytes without the line's end; empty ones are left out."""

    kind = "lines"

    def look(self) -> list[Batch]:
        if self.columns is not None:
            raise ValueError(
                f"columns={list(self.columns)}: lines have none; kind='jsonl' reads lines of JSON"
            )
        heads = [head for _, head in self._heads()]
        try:
            means = "utf-8" if all(head.decode() is not None for head in heads) else "bytes"
        except UnicodeDecodeError:
            means = "bytes"
        self.fields = (Field("data", "uint8", is_ragged=True, means=means),)
        return [_lines_of(head, END) for head in heads]

    def read(self, piece: Piece) -> Batch:
        data, stop = self._blocks.read(piece)
        return _lines_of(_without_mark(data, piece), stop)

    @property
    def total_size(self) -> int | None:
        is_plain = not any(map(is_compressed, self.files.paths))
        return self.files.size if is_plain else None


class JSONSource(_Text):
    """A sample for each line of JSON, an array for each name in it."""

    kind = "jsonl"

    def look(self) -> list[Batch]:
        heads = list(self._heads())
        schema = merged([self._parsed(head, None, Piece(file, 0, END)).schema for file, head in heads])
        if self.columns is not None:
            missing = [name for name in self.columns if name not in schema.names]
            if missing:
                raise ValueError(
                    f"{self.files.url}: columns {missing} are not there; there are {schema.names}"
                )
            schema = pa.schema([schema.field(name) for name in self.columns])
        given = self.columns or {}
        self._schema = pa.schema(
            [(each.name, arrow_type(each.name, given.get(each.name), each.type)) for each in schema]
        )
        self.fields = fields_of(self._schema, self.columns)
        return [
            batch_of(self._parsed(head, self._schema, Piece(file, 0, END)), self.fields)
            for file, head in heads
        ]

    def read(self, piece: Piece) -> Batch:
        data, stop = self._blocks.read(piece)
        try:
            return batch_of(self._parsed(data, self._schema, piece), self.fields, stop)
        except ValueError as error:
            error.add_note(f"in {self.shown(piece)}")
            raise

    def _parsed(self, data: bytes, schema: pa.Schema | None, piece: Piece) -> pa.Table:
        data = _without_mark(data, piece)
        if not data.strip():
            return (schema or pa.schema([])).empty_table()
        unexpected = "infer" if schema is None else "error" if self.columns is None else "ignore"
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        # One block: pieces are what is done side by side.
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pyarrow.json.read_json(pa.py_buffer(data), read_options=read, parse_options=parse)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{self.shown(piece)}: {_why(data, schema, error)}") from error
        if schema is not None:
            return table.select(schema.names)
        return table.cast(pa.schema([(each.name, _plain(each.type)) for each in table.schema]))


class CSVSource(_Text):
    """A sample for each record of CSV, an array for each column; the first record of each file has their names."""

    kind = "csv"
    by_range = False  # where a record begins follows from all the quotes before it
    cut = staticmethod(last_record)

    def look(self) -> list[Batch]:
        heads = list(self._heads())
        first = _without_mark(heads[0][1], Piece(0, 0, END))
        header = first[: _first_record(first)]
        path = self.files.paths[heads[0][0]].lower()
        self._delimiter = (
            "\t" if ".tsv" in path else max(",;\t|", key=header.decode("utf-8", "replace").count)
        )
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(header) + 64)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        self._header = header
        self._names = pyarrow.csv.read_csv(
            pa.py_buffer(header), read_options=read, parse_options=parse
        ).schema.names
        wanted = list(self.columns) if self.columns is not None else self._names
        if missing := [name for name in wanted if name not in self._names]:
            raise ValueError(f"{self.files.url}: columns {missing} are not there; there are {self._names}")
        self._schema = pa.schema([(name, pa.null()) for name in wanted])
        tables = [self._parsed(head, Piece(file, 0, END), is_typed=False) for file, head in heads]
        schema = merged([table.schema for table in tables])
        given = self.columns or {}
        self._schema = pa.schema(
            [(name, arrow_type(name, given.get(name), schema.field(name).type)) for name in wanted]
        )
        self.fields = fields_of(self._schema, self.columns)
        return [batch_of(self._parsed(head, Piece(file, 0, END)), self.fields) for file, head in heads]

    def read(self, piece: Piece) -> Batch:
        data, stop = self._blocks.read(piece)
        try:
            return batch_of(self._parsed(data, piece), self.fields, stop)
        except ValueError as error:
            error.add_note(f"in {self.shown(piece)}")
            raise

    def _parsed(self, data: bytes, piece: Piece, *, is_typed: bool = True) -> pa.Table:
        data = _without_mark(data, piece)
        if not piece.start:
            header = data[: _first_record(data)]
            if header.rstrip(b"\r\n") != self._header.rstrip(b"\r\n"):
                raise ValueError(
                    f"{self.files.shown(piece.file)}: begins with {header[:100]!r}, and the first file with {self._header[:100]!r}: "
                    "the first record has to name the same columns"
                )
            data = data[len(header) :]
        types = {each.name: each.type for each in self._schema} if is_typed else {}
        if not data.strip():
            return self._schema.empty_table()
        convert = pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=self._schema.names, strings_can_be_null=False
        )
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names)
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        try:
            return pyarrow.csv.read_csv(
                pa.py_buffer(data), read_options=read, parse_options=parse, convert_options=convert
            )
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{self.shown(piece)}: {error}; columns={{...}} can give a column another type, such as utf8"
            ) from error


def _lines_of(data: bytes, stop: int) -> Batch:
    lines = data.split(b"\n")
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    lines = [line for line in lines if line]
    sizes = np.fromiter(map(len, lines), np.int64, len(lines))
    return Batch(len(lines), {"data": np.frombuffer(b"".join(lines), "u1")}, {"data": sizes}, stop)


def _without_mark(data: bytes, piece: Piece) -> bytes:
    return data if piece.start else data.removeprefix(codecs.BOM_UTF8)


def _first_record(data: bytes) -> int:
    """Return how many bytes the first record has, with its line end."""
    end = 0
    while True:
        end = data.find(b"\n", end) + 1
        if not end:
            return len(data)
        if data.count(b'"', 0, end) % 2 == 0:
            return end


def _plain(type_: pa.DataType) -> pa.DataType:
    """Return the type without what Arrow guesses from words: a text that looks like a date is a text."""
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_) or pa.types.is_time(type_):
        return pa.string()
    return type_


def _why(data: bytes, schema: pa.Schema | None, error: Exception) -> str:
    """Return which line is wrong, in words: Arrow says little of it."""
    names = None if schema is None else set(schema.names)
    for number, line in enumerate(filter(None, (line.strip() for line in data.split(b"\n")))):
        try:
            found = json.loads(line)
        except ValueError as wrong:
            return f"line {number} of these is no JSON ({wrong}): {_shown(line)}"
        if not isinstance(found, dict):
            return f"line {number} of these is no JSON object: {_shown(line)}; kind='lines' packs lines as they are"
        if names is not None and (more := sorted(found.keys() - names)):
            return (
                f"line {number} of these has {', '.join(map(repr, more))}, which the lines looked at first do not have: {_shown(line)}; "
                "name all that is to be packed: columns=[...]"
            )
    return f"{error}; columns={{...}} can give a name another type, such as float64 or json"


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace")) + ("..." if len(line) > 80 else "")
