"""What is known of objects and listings, as values and as the text that the index keeps."""

from __future__ import annotations

import datetime
import hashlib
import json
import zlib
from typing import Any, NamedTuple

from cachedfs.common.types import ObjectInfo

__all__ = [
    "MetadataRecord",
    "FeedPosition",
    "ListingRecord",
    "FeedConfirmation",
    "FeedSnapshot",
    "decode_info",
    "encode_info",
    "folder_of",
    "hash_of",
    "sealed",
    "unsealed",
]

_DATETIME = "$datetime"


class FeedPosition(NamedTuple):
    """Where the feed of changes of one part of an origin was left, at `checked_at`.

    `number` is another one after a poll that told of something.
    """

    id: int
    token: str
    checked_at: float
    number: int


class FeedSnapshot(NamedTuple):
    """The feed as it was *before* a question was asked, and the folders that led to it, by path and id, the lowest first.

    An answer that is stored while the feed still is the same is found by every later poll that tells of it.
    """

    feed: int
    number: int
    way: tuple[tuple[str, str], ...]


class FeedConfirmation(NamedTuple):
    """A feed told of all changes until `at`, and of none of this, in the folder whose id has the hash `folder`."""

    at: float
    folder: int


class MetadataRecord(NamedTuple):
    """What was learnt of one path at `checked_at` (seconds since the epoch): `info`, or None for absent.

    It is valid only while the path's change mark is still `mark`, the one read *before* the origin was asked:
    so a fact that a write overtook is stored invalid, and no order of storing can hide the write. `watch` is of one that
    is to be stored, `told` of one that was.
    """

    identity: str
    path: str
    info: ObjectInfo | None
    checked_at: float
    mark: int
    watch: FeedSnapshot | None = None
    told: FeedConfirmation | None = None


class ListingRecord(NamedTuple):
    """The direct children of a folder, all of them, as one listing gave them; `mark` is the folder's listing mark."""

    infos: list[ObjectInfo]
    checked_at: float
    mark: int
    told: FeedConfirmation | None = None


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


def hash_of(identity: str, id: str) -> int:
    """Return a number for an item of an origin, or for a name."""
    data = f"{identity}\0{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def sealed(info: ObjectInfo | None, *beside: object) -> str:
    """Return `info` (None: absent) as text, with a checksum over it and over what is kept beside it: SQLite has none."""
    text = "" if info is None else encode_info(info)
    return f"{_seal(text, *beside):08x}{text}"


def unsealed(text: str, path: str, *beside: object) -> ObjectInfo | None:
    """Return what of `path` was sealed. Raises ValueError when it, or something beside it, is not what it was."""
    seal, text = text[:8], text[8:]
    if int(seal, 16) != _seal(text, *beside):
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
