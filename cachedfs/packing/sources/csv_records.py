"""CSV files as a source: one sample for each record."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.csv

from cachedfs.packing.pack_types import Array, SampleBatch, SourcePiece
from cachedfs.packing.sources.arrow_columns import batch_of, fields_of, selected, typed, whole_type
from cachedfs.packing.sources.text_lines import TextSource, line_ends

__all__ = ["CSVSource", "delimiter_of", "record_ends", "stray_quotes"]

DELIMITERS = b",;\t|"
INTEGER = re.compile("-?[0-9]+")
NULLS = set(pyarrow.csv.ConvertOptions().null_values)  # words that Arrow reads as missing numbers


class CSVSource(TextSource):
    """A source with one sample for each CSV record, and one field for each column.

    Each file starts with a header. Arrow parses blocks of complete records. Its streaming reader is not used: it
    reads 32 blocks ahead, refuses a record larger than a block, and does not tell where a record ends.
    """

    kind = "csv"
    is_record_a_line = False  # the start of a record depends on all quotes before it
    _delimiters = DELIMITERS  # the candidates, until `look` has read the header

    def ends(self, data: bytes) -> Array:
        return record_ends(data, self._delimiters)

    def last_end(self, data: bytes) -> int:
        ends = self.ends(data)
        return int(ends[-1]) if len(ends) else 0

    def look(self) -> list[SampleBatch]:
        samples = self.samples()
        first, piece = samples[0]
        header = self._header_of(first)
        if not header.strip():
            raise ValueError(
                f"{self.files.shown(piece.file)}: its first line is empty; it must name the columns"
            )
        is_tabbed = ".tsv" in self.files.paths[piece.file].lower()
        self._delimiters = b"\t" if is_tabbed else delimiter_of(header)
        self._header = self._header_of(first)
        found = self.checked(lambda header, _: self._columns_of(header), self._header, piece)
        self._names = [name or f"Unnamed: {i}" for i, name in enumerate(found)]
        self.notes = [
            f"column {i + 1} has no name: it is packed as {self._names[i]!r}, the name that pandas gives it"
            for i, name in enumerate(found)
            if not name
        ]
        names = pa.schema([(name, pa.null()) for name in self._names])
        self._schema = selected(names, self.columns, self.files.url)
        # One table, so that Arrow finds a type for the values of all samples.
        records = b"\n".join(self.checked(self._sampled_records, *sample) for sample in samples)
        table = self._table(records, {}, is_skipping=True)
        types = {each.name: each.type for each in table.schema} | self._integer_types(table.schema, records)
        self._schema = typed(pa.schema([(name, types[name]) for name in self._schema.names]), self.columns)
        self.fields = fields_of(self._schema, self.columns)
        return [self.checked(self.parsed, *sample) for sample in samples if not sample[1].start]

    def parsed(self, data: bytes, piece: SourcePiece) -> SampleBatch:
        types = {each.name: each.type for each in self._schema}
        return batch_of(self._table(self._records(data, piece), types), self.fields)

    def problem(self, record: bytes, error: Exception) -> str:
        text = re.sub(r"(?<=CSV )(parse error): Row #[0-9]+|: Row #[0-9]+", r"\1", str(error))
        return re.sub(
            r"In CSV column #([0-9]+)", lambda match: f"column {self._names[int(match[1])]!r}", text
        )

    def _sampled_records(self, data: bytes, piece: SourcePiece) -> bytes:
        """Return the records of a sample, without the header; none if the sample seems to begin inside quotes."""
        data = self._records(data, piece)
        if not piece.start:
            return data
        if len(stray := stray_quotes(data, self._delimiters)):  # perhaps the end of quotes that began before
            data = data[data.find(b"\n", stray[0]) + 1 :]
        try:
            self._table(data, {})
        except ValueError:  # such as too few columns
            return b""
        return b"" if len(stray_quotes(data, self._delimiters)) else data

    def _records(self, data: bytes, piece: SourcePiece) -> bytes:
        """Return the data of a piece without the header.

        Raises ValueError for another header than that of the first file.
        """
        if piece.start:
            return data
        header = self._header_of(data)
        if not header.strip() or self._columns_of(header) != self._columns_of(self._header):
            raise ValueError(
                f"the file begins with {header[:100]!r}, and the first file with {self._header[:100]!r}: "
                "the first record must name the same columns"
            )
        return data[len(header) :]

    def _header_of(self, data: bytes) -> bytes:
        ends = self.ends(data)
        return data[: ends[0]] if len(ends) else data

    def _columns_of(self, header: bytes) -> list[str]:
        """Return the column names in the header. Raises ValueError if there is a second record in it."""
        text = io.StringIO(header.decode(), newline="")
        names, *others = csv.reader(text, delimiter=self._delimiters.decode())
        if others:
            raise ValueError("its lines end with \\r alone; make that \\n, or \\r\\n")
        return names

    def _integer_types(self, schema: pa.Schema, records: bytes) -> dict[str, pa.DataType]:
        """Return integer types for columns of large integers, which Arrow reads as floats and rounds."""
        is_given = {name for name, type_ in (self.columns or {}).items() if type_ is not None}
        floats = [
            each.name for each in schema if pa.types.is_float64(each.type) and each.name not in is_given
        ]
        if not floats:
            return {}
        found = {}
        table = self._table(records, dict.fromkeys(floats, pa.string()), is_skipping=True)
        for name in floats:
            texts = {text.strip() for text in table.column(name).unique().to_pylist()} - NULLS
            if texts and all(map(INTEGER.fullmatch, texts)):
                found[name] = whole_type(name, list(map(int, texts)), "utf8")
        return found

    def _table(self, data: bytes, types: Mapping[str, pa.DataType], *, is_skipping: bool = False) -> pa.Table:
        """Parse records with Arrow, which guesses the types of columns that are not in `types`.

        With `is_skipping`, records with too few or too many columns are left out.
        """
        if not data.strip():
            return pa.schema(
                [(each.name, types.get(each.name, pa.null())) for each in self._schema]
            ).empty_table()
        convert = pyarrow.csv.ConvertOptions(column_types=types, include_columns=self._schema.names)
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names)
        parse = pyarrow.csv.ParseOptions(
            delimiter=self._delimiters.decode(),
            newlines_in_values=True,
            invalid_row_handler=(lambda row: "skip") if is_skipping else None,
        )
        try:
            return pyarrow.csv.read_csv(
                pa.py_buffer(data), read_options=read, parse_options=parse, convert_options=convert
            )
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{error}; columns={{...}} can give a column another type, such as utf8"
            ) from error


def delimiter_of(record: bytes, delimiters: bytes = DELIMITERS) -> bytes:
    """Return the most frequent delimiter of a record, or the first one if it has none.

    `record` must start at the beginning of a record.
    """
    values = np.frombuffer(record, "u1")
    found = _unquoted(record, np.flatnonzero(np.isin(values, list(delimiters))), delimiters)
    return bytes([max(delimiters, key=values[found].tolist().count)])


def record_ends(data: bytes, delimiters: bytes) -> Array:
    """Return the end of each record, outside quotes, as Arrow finds it.

    `data` must start at the beginning of a record.
    """
    return _unquoted(data, line_ends(data) - 1, delimiters) + 1


def stray_quotes(data: bytes, delimiters: bytes) -> Array:
    """Return the positions of quotes that neither begin nor end a quoted field."""
    at, is_quoted = _quotes(data, delimiters)
    return np.asarray(at[~is_quoted & ~np.concatenate([[False], is_quoted])[:-1]])


def _unquoted(data: bytes, places: Array, delimiters: bytes) -> Array:
    """Return the positions that are outside quoted fields."""
    at, is_quoted = _quotes(data, delimiters)
    return np.asarray(places[~np.concatenate([[False], is_quoted])[np.searchsorted(at, places)]])


def _quotes(data: bytes, delimiters: bytes) -> tuple[Array, Array]:
    """Return the positions of single quotes, and whether the text behind each is quoted.

    A quote opens a quoted field only as its first character. Elsewhere it is text, such as the sign for inches.
    """
    values = np.frombuffer(data, "u1")
    quotes = np.flatnonzero(values == ord('"'))
    begins = np.zeros(256, bool)
    begins[list(delimiters + b"\r\n")] = True
    # In a run of adjacent quotes, each pair is an escaped quote or an empty field. Only runs of odd length matter:
    # such a run closes a quoted field. Outside one it opens a field, if it starts there, or is text.
    runs = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
    runs = runs[np.diff(runs, append=len(quotes)) % 2 == 1]
    at = quotes[runs]
    may_open = begins[values[at - 1]] | (at == 0)
    # After a run that cannot open a field, no field is quoted. From there on, runs open and close fields in turn.
    n_turns = np.cumsum(may_open)
    return at, (n_turns - np.maximum.accumulate(np.where(may_open, 0, n_turns))) % 2 == 1
