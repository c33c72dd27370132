"""Files of JSON lines as a source: one sample for each object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json

from cachedfs.packing.pack_types import SampleBatch
from cachedfs.packing.sources.arrow_columns import arrow_type, as_json
from cachedfs.packing.sources.arrow_types import empty_table
from cachedfs.packing.sources.tables import TableSource, distinct_names
from cachedfs.packing.sources.text_lines import TextLines

JSON = pa.struct([])  # the type of a column whose values are packed as JSON
BLOCK = 1 << 20  # bytes that a thread of Arrow parses in one step, if no line is longer
ADVICE = "columns={...} can give a name another type, such as float64 or json"


class JSONSource(TextLines, TableSource):
    """A source with one sample for each JSON line, and one field for each key.

    Arrow parses numbers, texts and lists. Python parses the other fields, which are packed as JSON, because Arrow
    would guess or fill in their values.
    """

    _types = pa.schema([])  # of the keys that Arrow parses
    _expected: set[str] | None = None  # keys that a line may have; None: any

    def look(self) -> list[SampleBatch]:
        parts = self.sampled()
        objects = [each for part in parts for each in self._objects(*part)]
        keys = dict.fromkeys(key for each in objects for key in each)
        names = distinct_names(keys)
        self._note_names(keys, names)
        self._keys = dict(zip(names, keys, strict=True))
        packed = [name for name in names if self._wanted is None or name in self._wanted]
        packed = packed or names[:1]  # at least one, which tells the number of lines
        types = {name: self._type_of(name, objects) if name in packed else pa.null() for name in names}
        gaps = {name for name, key in self._keys.items() if any(each.get(key) is None for each in objects)}
        self.plan([(parts[0][0], empty_table(pa.schema([*types.items()])))], gaps)
        self._json = [name for name in packed if types[name] == JSON or self._given.get(name) == "json"]
        given = {name: arrow_type(name, self._given.get(name), types[name]) for name in packed}
        self._types = pa.schema(
            [(self._keys[name], given[name]) for name in packed if name not in self._json]
        )
        self._expected = {*keys} if self._wanted is None else None
        firsts = [(file, data) for file, at, data in parts if not at]
        return [self.checked(data, file) for file, data in firsts]

    def _objects(self, file: int, at: int, data: bytes) -> list[dict[str, Any]]:
        """Return the objects in a part of a file; none if the part is bad, which is named when it is packed."""
        try:
            return list(_objects_of(data, "replace"))
        except ValueError:
            if at:
                return []
            found: list[dict[str, Any]] = self.checked(
                data, file, 0, lambda lines, _: [*_objects_of(lines, "replace")]
            )
            return found

    def _type_of(self, name: str, objects: list[dict[str, Any]]) -> pa.DataType:
        """Return the type of a key from its values. Raises ValueError for values without a common type."""
        if name in self._given:
            return JSON if self._given[name] == "json" else pa.null()
        values = [value for each in objects if (value := each.get(self._keys[name])) is not None]
        kinds = {*map(type, values)}
        if kinds == {list}:
            items = [item for value in values for item in value if item is not None]
            is_flat = (items and {*map(type, items)} <= {int, float}) or {*map(type, items)} == {bool}
            return pa.list_(_scalar_type(name, items)) if is_flat else JSON
        if kinds <= {int, float} or len(kinds) == 1:
            return _scalar_type(name, values)
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{self.files.url}: values of {name!r} are of several types: {found}; {ADVICE}")

    def as_table(self, records: bytes) -> pa.Table:
        keys = [self._keys[name] for name in self._json]
        # If there are JSON fields, `_texts_of` refuses unexpected keys.
        unexpected = "ignore" if keys or self._expected is None else "error"
        texts = _texts_of(records, keys, self._expected) if keys else {}
        table = self._table(records, self._types, unexpected)
        names = {key: name for name, key in self._keys.items()}
        columns = {names[key]: column for key, column in zip(table.column_names, table.columns, strict=True)}
        return pa.table(columns | {names[key]: pa.array(each, pa.binary()) for key, each in texts.items()})

    def problem(self, records: bytes, bad: int, error: Exception) -> str:
        line, where = records.split(b"\n")[bad], ""
        try:
            _texts_of(line, (), self._expected, "replace")
            for column in self._types:
                where = f"column {column.name!r}: "
                self._table(line, pa.schema([column]), "ignore")
        except ValueError as wrong:
            return f"{where}{wrong}"
        return str(error)

    def _table(self, lines: bytes, schema: pa.Schema, unexpected: str) -> pa.Table:
        """Parse lines with Arrow."""
        if not lines.strip() or not schema.names:
            return schema.empty_table()
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        try:
            table = _parsed(lines, parse, BLOCK)
        except pa.ArrowInvalid as error:
            reason = re.sub(r" in row [0-9]+", "", str(error))
            raise ValueError(f"{reason}; {ADVICE}") from error
        return table.select(schema.names)


def _parsed(lines: bytes, parse: Any, block: int) -> pa.Table:
    read = pyarrow.json.ReadOptions(block_size=block)
    try:
        return pyarrow.json.read_json(pa.py_buffer(lines), read, parse)
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error) or block > len(lines):
            raise
        return _parsed(lines, parse, len(lines) + 1)


def _scalar_type(name: str, values: Sequence[Any]) -> pa.DataType:
    """Return the type of values of one kind, or of numbers; null if there are none, and JSON for objects."""
    kinds = {*map(type, values)}
    if kinds == {int}:
        return _integer_type(name, min(values), max(values))
    found = {bool: pa.bool_(), str: pa.string(), dict: JSON}
    return found.get(kinds.pop(), pa.float64()) if kinds else pa.null()


def _integer_type(name: str, least: int, largest: int) -> pa.DataType:
    if least >= -(2**63) and largest < 2**63:
        return pa.int64()
    if least >= 0 and largest < 2**64:
        return pa.uint64()
    raise ValueError(
        f"column {name!r}: no integer type holds {least} to {largest}; columns={{...}} can give it another, such as "
        "float64 or json"
    )


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
    data: bytes, names: Sequence[str], known: set[str] | None, errors: str = "strict"
) -> dict[str, list[bytes | None]]:
    """Return the values of each name as JSON, one for each line; None for null and for a missing key.

    Raises ValueError for a line with a key that is not in `known`. None allows any key.
    """
    found: dict[str, list[bytes | None]] = {name: [] for name in names}
    for each in _objects_of(data, errors):
        if known is not None and (more := sorted(each.keys() - known)):
            raise ValueError(
                f"it has {', '.join(map(repr, more))}, which the lines that were looked at do not have: "
                f"{_shown(as_json(each))}; name all that is to be packed: columns=[...]"
            )
        for name, texts in found.items():
            value = each.get(name)
            texts.append(None if value is None else as_json(value))
    return found


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace")) + ("..." if len(line) > 80 else "")
