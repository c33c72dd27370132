"""The keys of a bucket in byte order, and pages of them. Pure functions."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from cachedfs.common.types import ObjectInfo
from cachedfs.server.conditions import fingerprint_of, modified_at


class KeyTable(NamedTuple):
    """Sorted keys, with the size, the time and the fingerprint of each: 200 bytes of memory for a key.

    A folder of a listing of one level is a key that ends in a slash.
    """

    keys: list[str]
    sizes: array[int]
    times: array[float]
    fingerprints: list[str]


class KeyPage(NamedTuple):
    """Rows of a table, groups of keys up to the delimiter, and the last of both; whether more follows."""

    rows: list[int]
    groups: list[str]
    last: str
    is_truncated: bool


def table_of(infos: Iterable[ObjectInfo], above: str, *, with_folders: bool) -> KeyTable:
    """Return the table of what is listed below `above`, which ends in a slash, without items that have no size."""
    found = []
    for info in infos:
        is_folder = info.kind == "directory"
        is_below = info.path.startswith(above) and info.path != above
        if is_below and (with_folders if is_folder else info.size is not None):
            found.append((info.path[len(above) :] + "/" * is_folder, info))
    found.sort(key=itemgetter(0))  # code points sort as their UTF-8 does
    return KeyTable(
        [key for key, _ in found],
        array("q", (info.size or 0 for _, info in found)),
        array("d", (modified_at(info).timestamp() for _, info in found)),
        [fingerprint_of(info) for _, info in found],
    )


def page_of(keys: Sequence[str], *, prefix: str, delimiter: str, after: str, most: int) -> KeyPage:
    """Return the page of the keys that begin with `prefix`, after the key or group `after`.

    With a delimiter, keys are grouped by their text up to the first one behind the prefix.
    """
    at, rows, groups, last = bisect_left(keys, prefix), list[int](), list[str](), ""
    if after:
        is_group = after == _group(after, prefix, delimiter)
        at = max(at, _behind(keys, after) if is_group else bisect_right(keys, after))
    while most and at < len(keys) and keys[at].startswith(prefix):
        if len(rows) + len(groups) == most:
            return KeyPage(rows, groups, last, True)
        if group := _group(keys[at], prefix, delimiter):
            groups.append(group)
            last, at = group, _behind(keys, group)
        else:
            rows.append(at)
            last, at = keys[at], at + 1
    return KeyPage(rows, groups, last, False)


def _group(key: str, prefix: str, delimiter: str) -> str:
    """Return the key up to its first delimiter behind the prefix; empty if it has none."""
    end = key.find(delimiter, len(prefix)) if delimiter and key.startswith(prefix) else -1
    return key[: end + len(delimiter)] if end >= 0 else ""


def _behind(keys: Sequence[str], text: str) -> int:
    """Return the index of the first key above all those that begin with `text`."""
    kept = text.rstrip("\U0010ffff")  # above these, nothing is but what begins with them
    return bisect_left(keys, f"{kept[:-1]}{chr(ord(kept[-1]) + 1)}") if kept else len(keys)
