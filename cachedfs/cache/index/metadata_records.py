"""Metadata entries, listings and change feed positions as values, and as the text stored in the index."""

from __future__ import annotations

import datetime
import hashlib
import json
import zlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from cachedfs.common.types import ObjectInfo, modified_of

_DATETIME = "$datetime"
AGELESS = 1.0
"""The time of an answer of another machine that is old, or of unknown age: never fresh, and not removed for its age."""
CLOCK_SKEW_S = 300.0  # between our clock and the origin's, as Kerberos allows (RFC 4120, section 8.2)


class FeedPosition(NamedTuple):
    """The stored position of a change feed of one part of an origin, as of `checked_at`.

    `number` differs after each poll that reported changes.
    """

    id: int
    token: str
    checked_at: float
    number: int


class FeedSnapshot(NamedTuple):
    """The change feed as it was *before* a request, and the folders above the result.

    `way` holds (path, id) of these folders, the lowest first. If the feed is still at `number` when the response is
    stored, every later poll that reports a change of it finds it.
    """

    feed: int
    number: int
    way: tuple[tuple[str, str], ...]


class FeedConfirmation(NamedTuple):
    """A change feed reported all changes until `at`, and none concerned this metadata.

    `folder` is the hash of the id of its folder.
    """

    at: float
    folder: int


class MetadataRecord(NamedTuple):
    """The metadata of one path as of `checked_at` (seconds since the epoch): `info`, or None if the path is absent.

    It is valid only while the change counter of the path equals `counter`, read *before* the request to the origin. So a
    response that a write overtook is stored as invalid, in whatever order they are stored. `watch` and `new_at` (see
    `new_version_at`) are set when storing, `confirmation` when reading.
    """

    identity: str
    path: str
    info: ObjectInfo | None
    checked_at: float
    counter: int
    watch: FeedSnapshot | None = None
    confirmation: FeedConfirmation | None = None
    new_at: float | None = None


class ListingRecord(NamedTuple):
    """All direct children of a folder as one listing returned them; `counter` is the change counter of the listing.

    `counters` are those of the children by path, without those that changed during the request.
    """

    infos: list[ObjectInfo]
    checked_at: float
    counter: int
    confirmation: FeedConfirmation | None = None
    counters: Mapping[str, int] = {}


class ListedName(NamedTuple):
    """One name in the listing of its folder; `counter` is the change counter of the listing."""

    checked_at: float
    counter: int
    is_present: bool
    confirmation: FeedConfirmation | None = None


def is_within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or below it; "" is the top."""
    return not folder or f"{path}/".startswith(f"{folder}/")


def new_version_at(
    info: ObjectInfo | None, old: ObjectInfo | None, now_s: float, *, is_first: bool
) -> float | None:
    """Return the latest time at which a version that was just learned of can have been made.

    None if it is no object, or the version that was known before (`old`). `is_first` says that nothing was known of
    the path, not even its absence. Then the modification time of the object counts.
    """
    if info is None or info.kind != "file":
        return None
    if old is not None and old.fingerprint is not None and old == info:
        return None
    modified = modified_of(info.details) if is_first else None
    return now_s if modified is None else min(now_s, modified.timestamp() + CLOCK_SKEW_S)


def encode_info(info: ObjectInfo) -> str:
    """Return `info` without its path as text. Raises TypeError for details other than JSON and datetimes."""
    return _encode([*_FIELDS(info), dict(info.details)])


def decode_info(path: str, text: str) -> ObjectInfo:
    decoder = _DECODER if _DATETIME in text else _PLAIN_DECODER
    kind, size, fingerprint, id, details = decoder.decode(text)
    return ObjectInfo(path, kind, size, fingerprint, id, details)


def hash_of(identity: str, id: str) -> int:
    """Return a 64-bit hash for an item id, or for a name, of an origin."""
    data = f"{identity}\0{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def sealed(info: ObjectInfo | None, *beside: object) -> str:
    """Return `info` (None: absent) as text that starts with a checksum over it and over the other columns `beside`.

    SQLite has no checksums.
    """
    text = "" if info is None else _encode([*_FIELDS(info), dict(info.details)])
    return f"{zlib.crc32(repr((text, *beside)).encode()):08x}{text}"


def unsealed(text: str, path: str, *beside: object) -> ObjectInfo | None:
    """Return the info in text made by `sealed`. Raises ValueError if the text or a value in `beside` changed."""
    seal, text = text[:8], text[8:]
    if int(seal, 16) != zlib.crc32(repr((text, *beside)).encode()):
        raise ValueError("a metadata row is damaged")
    return decode_info(path, text) if text else None


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, datetime.datetime):
        return {_DATETIME: value.isoformat()}
    raise TypeError(f"neither JSON nor a datetime: {value!r}")


def _untag(found: dict[str, Any]) -> Any:
    if len(found) == 1 and isinstance(found.get(_DATETIME), str):
        try:
            return datetime.datetime.fromisoformat(found[_DATETIME])
        except ValueError:  # user metadata that happens to use our key
            return found
    return found


_FIELDS = attrgetter("kind", "size", "fingerprint", "id")
_encode = json.JSONEncoder(separators=(",", ":"), default=_tag).encode
_DECODER = json.JSONDecoder(object_hook=_untag)  # `json.loads` would make one for each text
_PLAIN_DECODER = json.JSONDecoder()
