"""What is known of objects and listings, as values and as the text that the index keeps."""

from __future__ import annotations

import datetime
import json
import zlib
from typing import Any, NamedTuple

from cachedfs.model import ObjectInfo

__all__ = ["Fact", "Listing", "decode_info", "encode_info", "folder_of", "sealed", "unsealed"]

_DATETIME = "$datetime"


class Fact(NamedTuple):
    """What was learnt of one path at `checked_at` (seconds since the epoch): `info`, or None for absent.

    It is valid only while the path's change mark is still `mark`, the one read *before* the origin was asked:
    so a fact that a write overtook is stored invalid, and no order of storing can hide the write.
    """

    identity: str
    path: str
    info: ObjectInfo | None
    checked_at: float
    mark: int


class Listing(NamedTuple):
    """The direct children of a folder, all of them, as one listing gave them; `mark` is the folder's listing mark."""

    infos: list[ObjectInfo]
    checked_at: float
    mark: int


def folder_of(path: str) -> str:
    """Return the folder whose listing names `path`; "" for what is at the top."""
    return path.rpartition("/")[0]


def encode_info(info: ObjectInfo) -> str:
    """Return `info` without its path as text. Raises TypeError for details that are neither JSON nor datetimes."""
    fields = [info.kind, info.size, info.fingerprint, info.id, dict(info.details)]
    return json.dumps(fields, separators=(",", ":"), default=_tag)


def decode_info(path: str, text: str) -> ObjectInfo:
    kind, size, fingerprint, id, details = json.loads(text, object_hook=_untag if _DATETIME in text else None)
    return ObjectInfo(path, kind, size, fingerprint, id, details)


def sealed(info: ObjectInfo | None, identity: str, path: str, checked_at: float, mark: int | None) -> str:
    """Return `info` (None: absent) as text, with a checksum over it and over what is kept beside it: SQLite has none."""
    text = "" if info is None else encode_info(info)
    return f"{_seal(text, identity, path, checked_at, mark):08x}{text}"


def unsealed(text: str, identity: str, path: str, checked_at: float, mark: int | None) -> ObjectInfo | None:
    """Return what was sealed. Raises ValueError when it, or one of the others, is not what it was."""
    seal, text = text[:8], text[8:]
    if int(seal, 16) != _seal(text, identity, path, checked_at, mark):
        raise ValueError("a fact is damaged")
    return decode_info(path, text) if text else None


def _seal(*fields: object) -> int:
    return zlib.crc32(repr(fields).encode())


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, datetime.datetime):
        return {_DATETIME: value.isoformat()}
    raise TypeError(f"neither JSON nor a datetime: {value!r}")


def _untag(found: dict[str, Any]) -> Any:
    if len(found) == 1 and isinstance(found.get(_DATETIME), str):
        try:
            return datetime.datetime.fromisoformat(found[_DATETIME])
        except ValueError:  # somebody's own metadata that looks like ours
            return found
    return found
