"""Files of JSON lines as a source: one sample for each object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import pyarrow as pa
import pyarrow.json

from cachedfs.packing.pack_types import SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import (
    as_json,
    batch_of,
    fields_of,
    merged,
    selected,
    typed,
    whole_type,
)
from cachedfs.packing.sources.source_tools import joined
from cachedfs.packing.sources.text_lines import TextSource

__all__ = ["JSONSource"]

ADVICE = "columns={...} can give a name another type, such as float64 or json"


class JSONSource(TextSource):
    """A source with one sample for each JSON line, and one field for each key.

    Arrow parses numbers, texts and lists. Python parses the other fields, which are packed as JSON, because Arrow
    would guess or fill in their values.
    """

    kind = "jsonl"
    _schema = pa.schema([])  # the fields that Arrow parses
    _json_fields: Sequence[str] = ()
    _expected_keys: frozenset[str] | None = None  # None: any

    def look(self) -> list[SampleBatch]:
        samples = self.samples()
        schema = merged([self.checked(self._guessed_schema, *sample) for sample in samples])
        schema = selected(schema, self.columns, self.files.url)
        found = {each.name: each.type for each in schema}
        found |= self._integer_types(schema, [data for data, _ in samples])
        schema = typed(pa.schema(list(found.items())), self.columns)
        self.fields = fields_of(schema, self.columns)
        self._expected_keys = frozenset(schema.names) if self.columns is None else None
        self._json_fields = [field.name for field in self.fields if field.means == "json"]
        self._schema = pa.schema([each for each in schema if each.name not in self._json_fields])
        return [self.checked(self.parsed, *sample) for sample in samples]

    def parsed(self, data: bytes, piece: SourcePiece) -> SampleBatch:
        texts = _texts_of(data, self._json_fields, self._expected_keys) if self._json_fields else {}
        # If there are JSON fields, `_texts_of` has already rejected unexpected keys.
        table = self._table(
            data, self._schema, "error" if self._expected_keys and not self._json_fields else "ignore"
        )
        batch = batch_of(table, [field for field in self.fields if field.name in table.schema.names])
        values, sizes = {**batch.values}, {**batch.sizes}
        for name, found in texts.items():
            values[name], sizes[name] = joined(found)
        # An Arrow table without columns has no rows.
        return SampleBatch(max([batch.n, *map(len, texts.values())]), values, sizes)

    def problem(self, record: bytes, error: Exception) -> str:
        try:
            _texts_of(record, (), self._expected_keys, "replace")
        except ValueError as wrong:
            return str(wrong)
        for column in self._schema:
            try:
                self._table(record, pa.schema([column]), "ignore")
            except ValueError as wrong:
                return f"column {column.name!r}: {wrong}"
        return str(error)

    def _integer_types(self, schema: pa.Schema, datas: list[bytes]) -> dict[str, pa.DataType]:
        """Return integer types for columns of large integers, which Arrow reads as floats and rounds."""
        lists = {
            each.name
            for each in schema
            if pa.types.is_list(each.type) and pa.types.is_float64(each.type.value_type)
        }
        floats = lists | {each.name for each in schema if pa.types.is_float64(each.type)}
        numbers: dict[str, list[Any]] = {name: [] for name in floats}
        for each in (each for data in datas for each in _objects_of(data, "replace") if floats):
            for name in floats:
                value = each.get(name)
                some = value if isinstance(value, list) else [value]
                numbers[name].extend(one for one in some if one is not None)
        found = {}
        for name in floats:
            if numbers[name] and all(isinstance(number, int) for number in numbers[name]):
                type_ = whole_type(name, numbers[name])
                found[name] = pa.list_(type_) if name in lists else type_
        return found

    def _guessed_schema(self, data: bytes, piece: SourcePiece) -> pa.Schema:
        """Return Arrow's guess of each type; null for a type that the user gave."""
        if self.columns is None:
            return self._table(data, None, "infer").schema
        # Parsing reports invalid UTF-8 later, unless the field is bytes.
        objects = list(_objects_of(data, "replace"))
        to_guess = {name for name, type_ in self.columns.items() if type_ is None}
        only = (as_json({name: each[name] for name in each if name in to_guess}) for each in objects)
        schema = self._table(b"\n".join(only), None, "infer").schema
        others = dict.fromkeys(name for each in objects for name in each if name not in schema.names)
        return pa.schema([*schema, *((name, pa.null()) for name in others)])

    def _table(self, data: bytes, schema: pa.Schema | None, unexpected: str) -> pa.Table:
        """Parse lines with Arrow.

        Without a schema, Arrow guesses the types, except that texts that look like times stay texts.
        """
        if not data.strip() or (schema is not None and not schema.names):
            return (schema or pa.schema([])).empty_table()
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        # One block, no threads: pieces already run in parallel.
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pyarrow.json.read_json(pa.py_buffer(data), read_options=read, parse_options=parse)
        except pa.ArrowInvalid as error:
            reason = re.sub(r" in row [0-9]+", "", str(error))
            raise ValueError(f"{reason}; {ADVICE}") from error
        if schema is not None:
            return table.select(schema.names)
        return table.cast(pa.schema([(each.name, _text_if_time(each.type)) for each in table.schema]))


def _objects_of(data: bytes, errors: str = "strict") -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not empty; `errors` is what `bytes.decode` does with invalid UTF-8.

    Raises ValueError for a line that is not a JSON object.
    """
    for line in filter(None, (line.strip() for line in data.split(b"\n"))):
        try:
            found = json.loads(line.decode(errors=errors))
        except (ValueError, RecursionError) as wrong:
            raise ValueError(f"the line is not JSON ({wrong}): {_shown(line)}") from wrong
        if not isinstance(found, dict):
            raise ValueError(
                f"the line is not a JSON object: {_shown(line)}; kind='lines' packs lines as they are"
            )
        yield found


def _texts_of(
    data: bytes, names: Iterable[str], known: Set[str] | None, errors: str = "strict"
) -> dict[str, list[bytes]]:
    """Return the values of each name as JSON, one for each line; b"" for null and for a missing key.

    Raises ValueError for a line with a key that is not in `known`. None allows any key.
    """
    found: dict[str, list[bytes]] = {name: [] for name in names}
    for each in _objects_of(data, errors):
        if known is not None and (more := sorted(each.keys() - known)):
            raise ValueError(
                f"it has {', '.join(map(repr, more))}, which the lines that were looked at do not have: "
                f"{_shown(as_json(each))}; name all that is to be packed: columns=[...]"
            )
        for name, texts in found.items():
            value = each.get(name)
            texts.append(b"" if value is None else as_json(value))
    return found


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace")) + ("..." if len(line) > 80 else "")


def _text_if_time(type_: pa.DataType) -> pa.DataType:
    """Return string for the time types that Arrow guesses from text, else the type itself."""
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_) or pa.types.is_time(type_):
        return pa.string()
    return type_
