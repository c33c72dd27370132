"""Immutable value types shared by all packages: ranges, keys, metadata, statistics."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import hashlib
import shlex
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from cachedfs.common.text import counted, per_cent, shown, size

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
        """Return a 64-bit hash of block `index`, which selects its access record and its fetch lock."""
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


class Stats(NamedTuple):
    """Counters of one process since its start, and the current contents of its cache.

    hits, misses: blocks read from the cache, and blocks fetched. requests, bytes_fetched: sent to and received from the
    origin. bytes_served: returned to callers. blocks, bytes_cached: currently in the cache, stored by any process.
    evictions: blocks that this process removed. cannot_store: why the last block could not be stored; None if it could.
    old_caches: directories that earlier releases made and this one does not use. bytes_shared: read from the shared cache,
    which `shared_cache` names, with the reason if it is not used.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_served: int = 0
    blocks: int = 0
    bytes_cached: int = 0
    evictions: int = 0
    cache_dir: str = ""
    cannot_store: str | None = None
    old_caches: tuple[str, ...] = ()
    bytes_shared: int = 0
    shared_cache: str = ""

    def _repr_html_(self) -> str:
        return shown("The cache, and this process", self.cannot_store or "", self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the statistics as rows of a table, each a label and a text."""
        n_blocks = self.hits + self.misses
        share = per_cent(self.hits / n_blocks) if n_blocks else ""
        return [
            ("cache", self.cache_dir or "none: nothing can be kept"),
            ("holds", f"{size(self.bytes_cached)} in {counted(self.blocks, 'block')}"),
            (
                "hits",
                f"{self.hits:,} of {counted(n_blocks, 'block')}, {share}" if share else "no block was read",
            ),
            ("read", size(self.bytes_served)),
            ("fetched", f"{size(self.bytes_fetched)} in {counted(self.requests, 'request')}"),
            (
                "from others",
                f"{size(self.bytes_shared)} from {self.shared_cache}" if self.shared_cache else "",
            ),
            ("evicted", counted(self.evictions, "block") if self.evictions else ""),
            ("unused", f"rm -r {shlex.join(self.old_caches)}" if self.old_caches else ""),
        ]


class Counted(NamedTuple):
    """Counters of all processes that use one cache directory.

    They count since the Unix time `since`; 0 means that nothing was counted yet. The names are those of `Stats`. A
    process adds its counters about once a second while it uses the cache, and when it exits. A killed process loses the
    rest. Deleting the directory resets the counters.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_served: int = 0
    evictions: int = 0
    bytes_shared: int = 0
    since: float = 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Hits divided by hits plus misses; None if both are 0."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def bytes_saved(self) -> int:
        """Bytes served minus bytes fetched, at least 0.

        Prefetched bytes count as fetched before they are read.
        """
        return max(0, self.bytes_served - self.bytes_fetched)

    @property
    def requests_saved(self) -> int:
        """Estimated number of requests that the hits avoided.

        Assumes that a hit saves as many requests as a missed block takes, at most 1.
        """
        return round(self.hits * min(1.0, self.requests / self.misses)) if self.misses else self.hits

    def since_then(self, before: Counted) -> Counted:
        """Return the difference to an earlier value `before`.

        All zeros if the counters were reset in between.
        """
        if before.since != self.since:
            return self._replace(since=self.since)
        added = [max(0, now - then) for now, then in zip(self[:-1], before[:-1], strict=True)]
        return Counted._make([*added, self.since])


class LinkStats(NamedTuple):
    """Network statistics of one origin in one process, measured on its speculative requests.

    n_timed: requests that were answered. wait_s: their total time until the first byte, in seconds. bytes_per_s: bytes
    per second over all response bodies that shared the link; None until a body of at least 1 MiB was measured.
    n_at_once: how many speculative requests may be in flight. requests_per_s: reads per second that the limits of the
    service allow; None without such limits.
    """

    n_timed: int = 0
    wait_s: float = 0.0
    bytes_per_s: float | None = None
    n_at_once: int = 0
    requests_per_s: float | None = None
