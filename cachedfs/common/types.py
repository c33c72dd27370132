"""The values that travel between the rooms: all frozen, none of them does anything."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cachedfs.common.text import counted, per_cent, shown, size

__all__ = [
    "BlockKey",
    "CacheBounds",
    "Change",
    "Changes",
    "Counted",
    "Exported",
    "Imported",
    "Kind",
    "LinkStats",
    "ObjectInfo",
    "ObjectKey",
    "Range",
    "Stats",
    "Suffix",
    "Verified",
]

Kind = Literal["file", "directory"]

_CONTAINERS = frozenset({dict, list})  # in which values of JSON may be nested
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive block indexes over all slots
_MASK64 = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Half-open range of bytes `[start, stop)`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Suffix:
    """The last `size` bytes of an object of any size (all of it when it is shorter)."""

    size: int

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ValueError(f"not a suffix: {self.size} bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of one object in one version, or of one folder.

    `fingerprint` differs whenever the bytes may differ; None says that the origin offers no evidence,
    and then nothing of the object is stored. `id` is the origin's own name for it where that is not the
    path (Drive). `details` is what fsspec's `info` shows beyond name, size and type: JSON values and datetimes.
    """

    path: str
    kind: Kind = "file"
    size: int | None = None
    fingerprint: str | None = None
    id: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    def as_info(self) -> dict[str, Any]:
        """Return the dictionary that fsspec's `info` and `ls(detail=True)` give, a fresh one each time, all of it."""
        size = 0 if self.kind == "directory" and self.size is None else self.size
        details = self.details
        if not _CONTAINERS.isdisjoint(map(type, details.values())):  # few have some, and 0.5 us tell
            details = copy.deepcopy(dict(details))
        return {**details, "name": self.path, "size": size, "type": self.kind}


class Change(NamedTuple):
    """An item of an origin that knows items by ids, after something happened to it.

    `places`: the id of each folder that it lies in now, and its name there, as far as anybody may know. `info` is what it
    is, with no path; None when it is gone or out of sight.
    """

    id: str
    places: tuple[tuple[str, str], ...] = ()
    info: ObjectInfo | None = None


class Changes(NamedTuple):
    """All that happened at a part of an origin since a token was given, and the token to ask with next."""

    token: str
    items: tuple[Change, ...] = ()


class ObjectKey:
    """What all blocks of one object version share in their keys; makes their names without hashing again.

    `digest` is 32 hex digits: blake2b-128 over the length-prefixed fields, so that no two field lists
    can run into each other.
    """

    __slots__ = ("_number", "block_size", "digest", "fingerprint", "identity", "path")

    def __init__(self, identity: str, path: str, fingerprint: str, block_size: int) -> None:
        self.identity = identity
        self.path = path
        self.fingerprint = fingerprint
        self.block_size = block_size
        hasher = hashlib.blake2b(digest_size=16)
        for field in (identity, path, fingerprint, str(block_size)):
            data = field.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        self.digest = hasher.hexdigest()
        self._number = int(self.digest[:16], 16)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"ObjectKey({self.path!r}, fingerprint={self.fingerprint!r})"

    def block(self, index: int) -> BlockKey:
        """Return the key of block `index` of this object version."""
        return BlockKey(self, index)

    def name(self, index: int) -> str:
        """Return the name of block `index`: unique, and made of hex digits and one hyphen."""
        return f"{self.digest}-{index:x}"

    def hash64(self, index: int) -> int:
        """Return 64 well-spread bits for block `index`: its touch record and its claim."""
        return (self._number + index * _GOLDEN) & _MASK64


@dataclasses.dataclass(frozen=True, slots=True)
class BlockKey:
    """The whole key of one block: object version, block size and index."""

    object: ObjectKey
    index: int

    @property
    def name(self) -> str:
        return self.object.name(self.index)

    @property
    def hash64(self) -> int:
        return self.object.hash64(self.index)


class CacheBounds(NamedTuple):
    """How much the cache may hold, and how much of the disk it leaves free.

    An int is bytes, a float a share of the whole disk (0.1: ten per cent). `size` None is half of what was
    free when this cache directory was used first.
    """

    size: int | float | None = None
    keep_free: int | float = 0.1


class Stats(NamedTuple):
    """Counters of one process since its start, and what its cache holds now.

    hits, misses: blocks. requests, bytes_fetched: to the origin. bytes_served: to callers.
    blocks, bytes_cached: in the cache, of all processes. evictions: blocks that this process dropped.
    cannot_store: why the last block could not be kept; None when the last attempt worked.
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

    def _repr_html_(self) -> str:
        return shown("The cache, and this process", self.cannot_store or "", self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of a table of it, each what it is about and what is said of it."""
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
            ("evicted", counted(self.evictions, "block") if self.evictions else ""),
        ]


class Counted(NamedTuple):
    """What all processes counted of one cache directory since `since`, a time in seconds; 0: nothing yet.

    The names are those of `Stats`. What a process counts is here within a second of its use of the cache, and at its end; what a
    killed one did not write down is missing, and all of it begins anew when the directory is deleted.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_fetched: int = 0
    bytes_served: int = 0
    evictions: int = 0
    since: float = 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Hits of all blocks that were read or fetched; None where there were none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def bytes_saved(self) -> int:
        """Bytes that were read beyond all that came, whatever it came for: none before what was prefetched was read."""
        return max(0, self.bytes_served - self.bytes_fetched)

    @property
    def requests_saved(self) -> int:
        """About how many requests the hits would have been: at as many for a block as there were for those fetched."""
        return round(self.hits * min(1.0, self.requests / self.misses)) if self.misses else self.hits

    def since_then(self, before: Counted) -> Counted:
        """Return what came after `before`; nothing where counting began anew."""
        if before.since != self.since:
            return self._replace(since=self.since)
        came = [max(0, now - then) for now, then in zip(self[:-1], before[:-1], strict=True)]
        return Counted._make([*came, self.since])


class LinkStats(NamedTuple):
    """What one process saw of the way to an origin since its start, by the requests that it sent ahead.

    `n_timed` of them were answered, and waited `wait_s` seconds in all for their first byte. `bytes_per_s`: what came in a
    second, of all bodies that shared the link; None while no body of a MiB or more was timed. `n_at_once`: requests
    that may be in flight ahead of their readers.
    """

    n_timed: int = 0
    wait_s: float = 0.0
    bytes_per_s: float | None = None
    n_at_once: int = 0


class Verified(NamedTuple):
    """What a look over all cached blocks of one object, in the version that is known, found.

    `blocks` are here and right, `bad` (their indexes) were not and are dropped, `missing` are not here. `whole`: True when
    all of the object is here and has the checksum that the origin states of it; False when it has another one, and then
    all blocks are bad, though each is sound in itself; None when that could not be compared. `reason` says in words what
    was compared, what is wrong, or why nothing was compared.
    """

    path: str
    blocks: int
    bad: tuple[int, ...]
    missing: int
    size: int | None
    whole: bool | None
    reason: str

    @property
    def ok(self) -> bool:
        """True when nothing that was here was wrong."""
        return not self.bad and self.whole is not False


class Exported(NamedTuple):
    """What an export is made of: blocks of so many objects, with their bytes, in so many bundles.

    `sent`: bytes of the bundles that were not there yet.
    """

    objects: int
    blocks: int
    bytes: int
    sent: int
    bundles: int


class Imported(NamedTuple):
    """What an import did: `blocks` and their `bytes` came and are in the cache, `here` blocks were before.

    `facts`: how many objects and folders are known by it. `left` blocks stayed where they are: the cache has no room for
    them beside what is pinned. `bad` names, with the reason, each object of the export of which something was wrong and is not taken.
    """

    blocks: int
    bytes: int
    here: int
    facts: int
    left: int
    bad: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when all that was asked for is in the cache."""
        return not self.bad and not self.left
