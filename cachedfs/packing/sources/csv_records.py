"""Find record ends and the delimiter in CSV, outside quoted fields, as Arrow does. No I/O."""

from __future__ import annotations

import codecs

import numpy as np

from cachedfs.packing.pack_types import Array

__all__ = ["delimiter_of", "first_record", "last_record", "record_ends"]

LINE_END, QUOTE = b'\n"'


def delimiter_of(record: bytes, delimiters: bytes) -> bytes:
    """Return the most frequent delimiter of a record, or the first one if it has none.

    `record` must start at the beginning of a record.
    """
    values = np.frombuffer(record, "u1")
    found = _unquoted(record, np.flatnonzero(np.isin(values, list(delimiters))), delimiters)
    return bytes([max(delimiters, key=values[found].tolist().count)])


def first_record(data: bytes, delimiters: bytes) -> int:
    """Return the length of the first record, with its line end."""
    ends = record_ends(data, delimiters)
    return int(ends[0]) + 1 if len(ends) else len(data)


def last_record(data: bytes, delimiters: bytes) -> int:
    """Return the length of all complete records."""
    ends = record_ends(data, delimiters)
    return int(ends[-1]) + 1 if len(ends) else 0


def record_ends(data: bytes, delimiters: bytes) -> Array:
    """Return the positions of the line ends that end a record.

    `data` must start at the beginning of a record.
    """
    return _unquoted(data, np.flatnonzero(np.frombuffer(data, "u1") == LINE_END), delimiters)


def _unquoted(data: bytes, places: Array, delimiters: bytes) -> Array:
    """Return the positions that are outside quoted fields.

    A quote opens a quoted field only as its first character. Elsewhere it is text, such as the sign for inches.
    """
    values = np.frombuffer(data, "u1")
    quotes = np.flatnonzero(values == QUOTE)
    begins = np.zeros(256, bool)
    begins[list(delimiters + b"\r\n")] = True
    first = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    # In a run of adjacent quotes, each pair is an escaped quote or an empty field. Only runs of odd length matter:
    # such a run closes a quoted field. Outside one it opens a field, if it starts there, or is text.
    runs = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
    runs = runs[np.diff(runs, append=len(quotes)) % 2 == 1]
    at = quotes[runs]
    may_open = begins[values[at - 1]] | (at == first)
    # After a run that cannot open a field, no field is quoted. From there on, runs open and close fields in turn.
    n_turns = np.cumsum(may_open)
    is_quoted = (n_turns - np.maximum.accumulate(np.where(may_open, 0, n_turns))) % 2 == 1
    return np.asarray(places[~np.concatenate([[False], is_quoted])[np.searchsorted(at, places)]])
