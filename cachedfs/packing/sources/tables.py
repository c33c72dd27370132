"""Tables as sources: one sample for each row, one field for each column, and the columns of hive folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from cachedfs.packing.pack_types import SampleBatch
from cachedfs.packing.sources.arrow_columns import batch_of, cast, fields_of, parse_columns, unified
from cachedfs.packing.sources.arrow_types import decoded
from cachedfs.packing.sources.sample_source import RecordSource
from cachedfs.packing.sources.source_files import SourceFiles

MISSING = "__HIVE_DEFAULT_PARTITION__"  # the value of a hive folder for a missing value


class TableSource(RecordSource):
    """Base class of sources whose files are tables.

    The files that `look` reads decide the type of each column. Values of other files are converted to it, if none of
    them changes.
    """

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files)
        # The columns to pack (None: all), the types of those that the user named, and those types that are given.
        self._wanted, self._asked = parse_columns(columns)
        self._given = {name: type_ for name, type_ in self._asked.items() if type_ is not None}
        self._rename: Mapping[str, str] = dict(options.get("rename") or {})
        self._hive = Hive(files)
        self.notes: list[str] = []

    def as_table(self, records: Any) -> pa.Table:
        """Return records as a table, with the types that were found."""
        return records

    def plan(self, sampled: list[tuple[int, pa.Table]], gaps: Iterable[str] = ()) -> None:
        """Set the fields from the number of some files and a table of each, as `as_table` returns it.

        `gaps` are columns with missing values outside of these tables.
        """
        (first, schema), *others = [(file, decoded(table.schema)) for file, table in sampled]
        for file, other in others:
            try:
                schema = unified(schema, other, self._given)
            except ValueError as error:
                raise ValueError(f"{self.files.url_of(file)}: {error}") from error
            self._note_others(schema, other, file)
        self._hive.columns = [each for each in self._hive.columns if each.name not in schema.names]
        schema = self._selected(pa.schema([*schema, *self._hive.columns]))
        found = (name for _, table in sampled for name in table.column_names if table[name].null_count)
        gaps = {*gaps, *found} - {*self._given}
        types = {each.name: _with_gaps(each.type) if each.name in gaps else each.type for each in schema}
        try:
            names = self._array_names(schema.names)
            self.fields = fields_of(pa.schema([*types.items()]), self._given, names)
        except ValueError as error:
            raise ValueError(f"{self.files.url_of(first)}: {error}") from error
        self._schema = pa.schema(
            [(name, pa.null() if name in self._given else type_) for name, type_ in types.items()]
        )

    def batch(self, records: Any, number: int) -> SampleBatch:
        table = self._hive.added(self.as_table(records), number)
        return batch_of(cast(table, self._schema), self.fields)

    def _selected(self, schema: pa.Schema) -> pa.Schema:
        """Return the chosen columns. Raises ValueError if one does not exist."""
        names = schema.names if self._wanted is None else self._wanted
        asked = dict.fromkeys([*names, *self._asked, *self._rename])
        if missing := [name for name in asked if name not in schema.names]:
            raise ValueError(f"{self.files.url}: columns {missing} do not exist; there are {schema.names}")
        return pa.schema([schema.field(name) for name in names])

    def _array_names(self, names: list[str]) -> list[str]:
        """Return the name of the array of each column: Zarr reserves names that begin with `__`."""
        allowed = [self._rename.get(name) or _without_underscores(name) for name in names]
        found = distinct_names(allowed)
        self._note_names(names, found)
        return found

    def _note_names(self, names: Iterable[str], found: Iterable[str]) -> None:
        for i, (name, new) in enumerate(zip(names, found, strict=True)):
            if name != new and name not in self._rename:
                self.notes.append(f"column {i + 1}, {name!r}, is packed as {new!r}")

    def _note_others(self, schema: pa.Schema, other: pa.Schema, file: int) -> None:
        if more := [name for name in other.names if name not in schema.names]:
            self.notes.append(
                f"{self.files.url_of(file)}: columns {more} are not in the first file and are left out"
            )


class Hive:
    """The columns that hive folders, such as `label=cat/`, give to the files in them."""

    def __init__(self, files: SourceFiles) -> None:
        self._paths = files.paths
        root, *pattern = re.split(r"[*?[]", files.root, maxsplit=1)
        self._n = len(root.rpartition("/")[0] if pattern else root)
        keys = self._of(0)
        values = [self._of(file) for file in range(len(files))] if keys else []
        self.columns = [pa.field(key, _type_of_folders({each.get(key) for each in values})) for key in keys]

    def _of(self, file: int) -> dict[str, str | None]:
        folders = self._paths[file][self._n :].rpartition("/")[0].split("/")
        pairs = (unquote(folder).partition("=") for folder in folders)
        return {key: None if value == MISSING else value for key, is_pair, value in pairs if key and is_pair}

    def added(self, table: pa.Table, file: int) -> pa.Table:
        """Return a table of a file with the columns of its folders."""
        values = self._of(file) if self.columns else {}
        for each in self.columns:
            value = pa.scalar(values.get(each.name), pa.string()).cast(each.type)
            table = table.append_column(each, pa.repeat(value, table.num_rows))
        return table


def _type_of_folders(values: set[str | None]) -> pa.DataType:
    """Return the type of a hive column as Arrow infers it: int32, or text. With gaps, integers are float64."""
    try:
        pa.array([value for value in values if value is not None], pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.float64() if None in values else pa.int32()


def distinct_names(names: Iterable[str]) -> list[str]:
    """Return distinct names, as pandas gives them: `Unnamed: 0` for a column without a name, `a.1` for a second `a`."""
    named = [name or f"Unnamed: {i}" for i, name in enumerate(names)]
    n_of, found = Counter(named), list[str]()
    for name in named:
        new, n = name, 0
        while new in found or (n and new in n_of):
            n += 1
            new = f"{name}.{n}"
        found.append(new)
    return found


def _without_underscores(name: str) -> str:
    return "/".join(part.strip("_") if part.startswith("__") else part for part in name.split("/"))


def _with_gaps(type_: pa.DataType) -> pa.DataType:
    """Return the type of a column with missing values: float64 for integers and booleans, with NaN, as in pandas."""
    return pa.float64() if pa.types.is_integer(type_) or pa.types.is_boolean(type_) else type_
