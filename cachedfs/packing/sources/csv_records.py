"""CSV files as a source: one sample for each record."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cachedfs.packing.pack_types import SampleBatch
from cachedfs.packing.sources.arrow_columns import arrow_type, for_each
from cachedfs.packing.sources.arrow_types import empty_table
from cachedfs.packing.sources.source_files import SourceFiles
from cachedfs.packing.sources.tables import TableSource, distinct_names
from cachedfs.packing.sources.text_lines import RANGE_SIZE, opened, sampled_ranges

DELIMITERS = ",;\t|"
OPTIONS = ("comment", "delimiter", "encoding", "skipinitialspace")
ROWS = 4096  # records that Python reads in one step, if an option needs it
# Bytes that Arrow parses in one step, until a record is larger. It reads up to 32 blocks ahead.
BLOCKS = (1 << 20, 8 << 20, 32 << 20)
QUOTED = re.compile(rb'(?<![^,;\t|\r\n])"(?:[^"]|"")*"')
# The first quotes that begin or end a field.
QUOTE = re.compile(rb'[,;\t|\n]"[^"]|[^"](?P<end>"[,;\t|\r\n])')
RECORD = re.compile(rb'(?:"(?:[^"]|"")*"|[^"\n])*\n')
# Texts that pandas reads as missing numbers.
MISSING = pa.array([*pyarrow.csv.ConvertOptions().null_values, "<NA>", "None"])
ZEROS, HEX, BIT = r"^\s*[+-]?0[0-9]", r"^\s*[+-]?0[xX]", r"^\s*[01]\s*$"
# What the texts of each type look like.
TYPES = {
    r"^[+-]?(?:0|[1-9][0-9]*)$": (pa.int64(), pa.uint64()),
    r"^[+-]?[0-9]+$": (),
    r"^[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:inf|infinity))$": (pa.float64(),),
    r"^(?i:true|false)$": (pa.bool_(),),
}


class CSVSource(TableSource):
    """A source with one sample for each CSV record, and one field for each column.

    Arrow splits the records, and all values are read as text first: Arrow's own guess makes numbers of hexadecimal
    ids and of postal codes.
    """

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, columns, **options)
        self._options: dict[str, Any] = dict(options.get("csv") or {})
        if wrong := [name for name in self._options if name not in OPTIONS]:
            raise ValueError(f"csv={self._options}: {wrong[0]!r} is none of {', '.join(OPTIONS)}")
        self._encoding: str | None = self._options.get("encoding")
        self._delimiter: str = self._options.get("delimiter") or ""
        # Arrow has no such options.
        self._is_split_by_python = bool(self._options.get("comment") or self._options.get("skipinitialspace"))

    def look(self) -> list[SampleBatch]:
        parts = [each for each in sampled_ranges(self.files) if each[2].strip()]
        if not parts:
            raise ValueError(f"{self.files.url}: nothing to pack: all files are empty")
        self._read_header(parts[0][0], parts[0][2])
        # Python splits from the start only, and a part of UTF-16 may begin within a character.
        has_middles = not (self._encoding or self._is_split_by_python)
        firsts = [(number, self._first_records(number, data)) for number, at, data in parts if not at]
        others = [self._middle(data) for _, at, data in parts if at and has_middles]
        texts = pa.concat_tables([*(table for _, table in firsts), *others])
        self._types, found = {}, {}
        for name in self._columns:
            given = self._given.get(name)
            type_ = self._types[name] = arrow_type(name, given, pa.null()) if given else _type_of(texts[name])
            found[name] = pa.nulls(len(texts), type_) if given else _parsed(texts[name], type_)
        self.plan([(parts[0][0], pa.table(found))])
        return [self.checked(table, number) for number, table in firsts]

    def _read_header(self, file: int, head: bytes) -> None:
        """Find the encoding, the delimiter and the columns from the first bytes of a file."""
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            self._encoding = self._encoding or "utf-16"
        head = self._utf8(head)
        self._delimiter = self._delimiter or _delimiter_of(head, self.files.paths[file])
        self._header = next(self._rows(io.StringIO(head.decode("utf-8-sig", "replace"), newline="")))
        self._columns = distinct_names(self._header)
        self._note_names(self._header, self._columns)

    def _first_records(self, file: int, data: bytes) -> pa.Table:
        """Return the first records of a file, which begins with `data`."""
        text = self._utf8(data)
        text = text[: text.rfind(b"\n") + 1] if len(data) >= RANGE_SIZE else text
        try:
            table = pa.concat_tables(self._tables(io.BytesIO(text), file, len(text) + 1, is_sample=True))
        except pa.ArrowInvalid as error:
            raise self._located(error, file) from error
        return table if len(table) else next(self.chunks(file), table)

    def _middle(self, data: bytes) -> pa.Table:
        """Return the records in a part of a file, as far as its first quotes tell whether it begins inside quotes."""
        quote = QUOTE.search(data := data.lstrip(b'"'))
        data = b'"' + data if quote and quote["end"] else data
        first = RECORD.match(data)
        text = data[first.end() if first else 0 : data.rfind(b"\n") + 1]
        try:
            return pa.Table.from_batches(
                self._split_by_arrow(io.BytesIO(text), len(text) + 1, is_sample=True, has_header=False)
            )
        except pa.ArrowInvalid:
            return empty_table(pa.schema([(name, pa.string()) for name in self._columns]))

    def as_table(self, table: pa.Table) -> pa.Table:
        def converted(name: str) -> pa.ChunkedArray:
            type_ = self._types[name]
            if name not in self._given and pa.types.is_integer(type_):
                _refuse(table[name], ZEROS, "has zeros in front, which a number has not")
            if name not in self._given and pa.types.is_boolean(type_):
                _refuse(table[name], BIT, "is a number, and not true or false")
            return _parsed(table[name], type_)

        return pa.table(for_each(self._types, converted))

    def chunks(self, file: int) -> Iterator[pa.Table]:
        """Yield the records of a file as text. If one is larger than a block, the file is read again in larger ones."""
        n = 0
        for block in BLOCKS:
            at = 0
            try:
                with opened(self.files, file) as raw:
                    for table in self._tables(self._utf8_stream(raw), file, block):
                        if at + len(table) > n:
                            yield table.slice(n - at)
                            n = at + len(table)
                        at += len(table)
                return
            except pa.ArrowInvalid as error:
                if "straddling" not in str(error):
                    raise self._located(error, file) from error
        raise ValueError(
            f"{self.files.url_of(file)}: a record of more than {BLOCKS[-1]:,} bytes is not packed as CSV"
        )

    def _tables(self, text: Any, file: int, block: int, *, is_sample: bool = False) -> Iterator[pa.Table]:
        """Yield the records in a stream of UTF-8 as text, without the header."""
        columns: list[str] = []
        split = self._split_by_python if self._is_split_by_python else self._split_by_arrow
        for batch in split(text, block, is_sample=is_sample):
            table = pa.Table.from_batches([batch])
            if not columns:
                header = [str(each[0]) for each in table.slice(0, 1).to_pydict().values()]
                columns, table = self._columns_of(header, file), table.slice(1)
            yield table.rename_columns(columns).select(self._columns)

    def _columns_of(self, header: list[str], file: int) -> list[str]:
        """Return the columns that the first record of a file names. Raises ValueError if they are others."""
        columns = distinct_names(header)
        if sorted(columns) != sorted(self._columns):
            raise ValueError(
                f"{self.files.url_of(file)}: the first record is {header}, and that of the first file {self._header}: it "
                "must name the same columns"
            )
        return columns

    def _split_by_arrow(
        self, text: Any, block: int, *, is_sample: bool, has_header: bool = True
    ) -> Iterator[pa.RecordBatch]:
        texts = dict.fromkeys(self._columns, pa.string())

        def skip(row: Any) -> str:
            return "error" if has_header and row.number == 1 else "skip"

        yield from pa.csv.open_csv(
            text,
            pa.csv.ReadOptions(use_threads=False, block_size=block, column_names=self._columns),
            pa.csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=True,
                invalid_row_handler=skip if is_sample else None,
            ),
            pa.csv.ConvertOptions(column_types=texts, check_utf8=False),
        )

    def _split_by_python(self, text: Any, block: int, *, is_sample: bool) -> Iterator[pa.RecordBatch]:
        rows, at, n = self._rows(io.TextIOWrapper(text, "utf-8-sig", newline="")), 0, len(self._columns)
        while some := list(itertools.islice(rows, ROWS)):
            bad = next((i for i, row in enumerate(some) if len(row) != n), None)
            if bad is not None and not is_sample:
                message = f"CSV parse error: Row #{at + bad + 1}: Expected {n} columns, got {len(some[bad])}"
                raise pa.ArrowInvalid(message)
            at += len(some)
            texts = [[row[i] for row in some if len(row) == n] for i in range(n)]
            yield pa.record_batch([pa.array(each, pa.string()) for each in texts], names=self._columns)

    def _rows(self, text: Iterable[str]) -> Iterator[list[str]]:
        """Yield the records in text, without empty lines and comments, as Python's csv module splits them."""
        comment, is_skipping = self._options.get("comment"), bool(self._options.get("skipinitialspace"))
        for row in csv.reader(text, delimiter=self._delimiter, skipinitialspace=is_skipping):
            if row and not (comment and row[0].startswith(comment)):
                yield row

    def _utf8(self, data: bytes) -> bytes:
        return data.decode(self._encoding, "ignore").encode() if self._encoding else data

    def _utf8_stream(self, raw: Any) -> Any:
        stream = pa.PythonFile(raw, "r")
        return pa.transcoding_input_stream(stream, self._encoding, "utf-8") if self._encoding else stream

    def _located(self, error: Exception, file: int) -> ValueError:
        """Return the error of Arrow's parser with the file and the number of the record."""
        row = re.search(r"Row #([0-9]+): ", str(error))
        where = self.files.url_of(file) + (f", row {int(row[1]) - 1:,}" if row else "")
        reason = str(error).replace(row[0] if row else "", "")
        if row and row[1] == "1":
            reason += f"; the first record must name the columns of the first file, {self._header}"
        return ValueError(f"{where}: {reason}")


def _delimiter_of(head: bytes, path: str = "") -> str:
    """Return the most frequent delimiter of the first record, or a comma if it has none."""
    if ".tsv" in path.lower():
        return "\t"
    first = QUOTED.sub(b"", head).lstrip(b"\r\n").partition(b"\n")[0].decode(errors="replace")
    return max(DELIMITERS, key=first.count)


def _type_of(texts: pa.ChunkedArray) -> pa.DataType:
    """Return the type of a column of text as pandas finds it, except that integers with zeros in front stay text."""
    texts = pc.ascii_trim_whitespace(texts)
    texts = texts.filter(pc.invert(pc.is_in(texts, MISSING)))
    if not len(texts):
        return pa.null()
    matches = functools.partial(pc.match_substring_regex, texts)
    for pattern, types in TYPES.items():
        if pc.all(matches(pattern)).as_py():
            return next((type_ for type_ in types if _can_be(texts, type_)), pa.string())
    return pa.string()


def _parsed(texts: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    """Return texts as values of a type. Raises ArrowInvalid for a text that pandas does not read as such a value."""
    if not (pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_)):
        return texts
    if pa.types.is_integer(type_):
        _refuse(texts, HEX, "is hexadecimal, which pandas keeps as text")
    try:
        return texts.cast(type_)
    except pa.ArrowInvalid:
        texts = pc.ascii_trim_whitespace(texts)
        texts = pc.if_else(pc.is_in(texts, MISSING), None, texts)
        return pc.replace_substring_regex(texts, r"^\+", "").cast(type_)


def _refuse(texts: pa.ChunkedArray, pattern: str, reason: str) -> None:
    found = pc.match_substring_regex(texts, pattern)
    if (i := pc.index(found, True).as_py()) >= 0:
        raise pa.ArrowInvalid(f"{texts[i].as_py()!r} {reason}")


def _can_be(texts: pa.ChunkedArray, type_: pa.DataType) -> bool:
    try:
        _parsed(texts, type_)
    except pa.ArrowInvalid:
        return False
    return True
