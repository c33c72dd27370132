"""Where records of CSV end, as Arrow finds them, and what is between their fields: what is not in quotes. Pure."""

from __future__ import annotations

import codecs

import numpy as np

from cachedfs.packing.pack_types import Array

__all__ = ["delimiter_of", "first_record", "last_record", "record_ends"]

LINE_END, QUOTE = b'\n"'


def delimiter_of(record: bytes, delimiters: bytes) -> bytes:
    """Return the delimiter that a record has most often; the first one where it has none. REQUIRES: it begins there."""
    values = np.frombuffer(record, "u1")
    found = _unquoted(record, np.flatnonzero(np.isin(values, list(delimiters))), delimiters)
    return bytes([max(delimiters, key=values[found].tolist().count)])


def first_record(data: bytes, delimiters: bytes) -> int:
    """Return how many bytes the first record has, with its line end."""
    ends = record_ends(data, delimiters)
    return int(ends[0]) + 1 if len(ends) else len(data)


def last_record(data: bytes, delimiters: bytes) -> int:
    """Return how many bytes are whole records."""
    ends = record_ends(data, delimiters)
    return int(ends[-1]) + 1 if len(ends) else 0


def record_ends(data: bytes, delimiters: bytes) -> Array:
    """Return the places of the line ends that end a record. REQUIRES: a record begins the data."""
    return _unquoted(data, np.flatnonzero(np.frombuffer(data, "u1") == LINE_END), delimiters)


def _unquoted(data: bytes, places: Array, delimiters: bytes) -> Array:
    """Return those of the places that are in no quoted field.

    A quote opens a field where it is the first character of it; elsewhere it is a character as any other, as that of inches.
    """
    values = np.frombuffer(data, "u1")
    quotes = np.flatnonzero(values == QUOTE)
    begins = np.zeros(256, bool)
    begins[list(delimiters + b"\r\n")] = True
    first = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    # Of quotes that follow one another two are one character in a quoted field, and nothing in between elsewhere: what
    # matters is whether one is left. It closes a field that is quoted; else it opens one, or is nothing.
    runs = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
    runs = runs[np.diff(runs, append=len(quotes)) % 2 == 1]
    at = quotes[runs]
    may_open = begins[values[at - 1]] | (at == first)
    # After one that cannot open, no field is quoted; from there on the others open and close by turns.
    n_turns = np.cumsum(may_open)
    is_quoted = (n_turns - np.maximum.accumulate(np.where(may_open, 0, n_turns))) % 2 == 1
    return np.asarray(places[~np.concatenate([[False], is_quoted])[np.searchsorted(at, places)]])
