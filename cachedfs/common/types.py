"""Immutable value types shared by all packages: ranges, keys, metadata."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["file", "directory"]

_CONTAINERS = frozenset({dict, list})  # the mutable JSON types
# Consecutive blocks have their access records in consecutive buckets of four slots, with different tags (the high bits).
GOLDEN = 0x9E3779B97F800004
MASK64 = (1 << 64) - 1


class Range(NamedTuple):
    """A half-open range of bytes, `[start, stop)`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Suffix(NamedTuple):
    """The last `size` bytes of an object, or the whole object if it is shorter; more than none."""

    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of one version of an object, or of a folder.

    `fingerprint` differs whenever the bytes may differ. None means that the origin cannot identify versions, and the
    object is not cached. `id` is the origin's own identifier if that is not the path (Google Drive). `details` are the
    further entries of fsspec's `info`, beside name, size and type: JSON values and datetimes.
    """

    path: str
    kind: Kind = "file"
    size: int | None = None
    fingerprint: str | None = None
    id: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    def as_info(self) -> dict[str, Any]:
        """Return the dictionary of fsspec's `info` and `ls(detail=True)`.

        The caller may modify it, at any depth.
        """
        size = 0 if self.kind == "directory" and self.size is None else self.size
        details = self.details
        if not _CONTAINERS.isdisjoint(map(type, details.values())):  # rare, and the check takes 0.5 us
            details = copy.deepcopy(dict(details))
        return {**details, "name": self.path, "size": size, "type": self.kind}


class AnyVersion(enum.Enum):
    """The type of `ANY_VERSION`."""

    ANY_VERSION = enum.auto()


ANY_VERSION: Final = AnyVersion.ANY_VERSION
"""Says that a write replaces whatever is there."""


def modified_of(info: Mapping[str, Any]) -> datetime.datetime | None:
    """Return the modification time in fsspec's `info`, under whichever key its filesystem uses; None if unknown."""
    for name in ("mtime", "modified", "updated", "last_modified", "LastModified"):
        value = info.get(name)
        with contextlib.suppress(ValueError, OSError, OverflowError):
            if isinstance(value, (int, float)):
                value = datetime.datetime.fromtimestamp(value, datetime.UTC)
            elif isinstance(value, str):
                value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    return None


class Change(NamedTuple):
    """One entry of a change feed: an item after a change, at an origin that identifies items by id.

    `places`: (folder id, name) for each folder that contains the item now, as far as the account can see. `info`: its
    metadata with an empty path; None if it was deleted or is no longer visible to the account.
    """

    id: str
    places: tuple[tuple[str, str], ...] = ()
    info: ObjectInfo | None = None


class Changes(NamedTuple):
    """The changes at one part of an origin since a token was issued, and the token for the next call."""

    token: str
    items: tuple[Change, ...] = ()


class ObjectKey:
    """The common part of the keys of all blocks of one object version.

    The hash is computed once and used for all block names. `digest`: 32 hex digits, the blake2b-128 of identity, path,
    fingerprint and block size. Each field is prefixed with its length, so that different fields never give the same
    bytes. `encoded`: the first three fields as they are in the files of blocks.
    """

    __slots__ = ("block_size", "digest", "encoded", "fingerprint", "identity", "number", "path")

    def __init__(self, identity: str, path: str, fingerprint: str, block_size: int) -> None:
        self.identity = identity
        self.path = path
        self.fingerprint = fingerprint
        self.block_size = block_size
        hasher, encoded = hashlib.blake2b(digest_size=16), list[bytes]()
        for field in (identity, path, fingerprint, str(block_size)):
            data = field.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
            encoded += len(data).to_bytes(4, "little"), data
        self.encoded = b"".join(encoded[:-2])
        self.digest = hasher.hexdigest()
        self.number = int(self.digest[:16], 16)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"ObjectKey({self.path!r}, fingerprint={self.fingerprint!r})"

    def block(self, index: int) -> BlockKey:
        """Return the key of block `index` of this object version."""
        return BlockKey(self, index)

    def name(self, index: int) -> str:
        """Return the unique name of block `index`: hex digits and one hyphen."""
        return f"{self.digest}-{index:x}"

    def hash64(self, index: int) -> int:
        """Return a 64-bit hash of block `index`, which selects its access record."""
        return (self.number + index * GOLDEN) & MASK64


class BlockKey(NamedTuple):
    """The complete key of one block: object version, block size and index."""

    object: ObjectKey
    index: int  # type: ignore[assignment]  # hides the method of tuples

    @property
    def name(self) -> str:
        """The block's unique name: see `ObjectKey.name`."""
        return self.object.name(self.index)

    @property
    def hash64(self) -> int:
        """The block's 64-bit hash: see `ObjectKey.hash64`."""
        return self.object.hash64(self.index)


class CacheBounds(NamedTuple):
    """The maximum size of the cache, and how much of the disk it keeps free.

    An int is bytes, a float is a fraction of the whole disk (0.1: ten percent). `size` None: half of the space that was
    free when the cache directory was first used.
    """

    size: int | float | None = None
    keep_free: int | float = 0.1
