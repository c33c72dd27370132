"""Storage of the simulated Google Cloud Storage: unversioned buckets of objects."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c

from cachedfs.sim.stored_objects import Content

# Larger files of a folder have no such checksum: computing it would block the server too long.
_MD5_LIMIT, _CRC_LIMIT = 8 << 20, 64 << 20
_LAST = "\U0010ffff"


def checksums(data: bytes, *, with_md5: bool = True) -> dict[str, str]:
    found = {"crc32c": google_crc32c.value(data).to_bytes(4, "big")}
    found |= {"md5Hash": hashlib.md5(data).digest()} if with_md5 else {}
    return {name: base64.b64encode(digest).decode() for name, digest in found.items()}


@dataclass(slots=True)
class SimObject(Content):
    """One version of an object. `fields` are its editable properties, by their names in the JSON API."""

    bucket: str
    name: str
    data: bytes | Path
    size: int
    generation: int
    created_s: float
    updated_s: float
    fields: Mapping[str, Any]
    metageneration: int = 1
    _checksums: dict[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        text = f"{self.generation}/{self.metageneration}".encode()
        return base64.b64encode(hashlib.md5(text).digest()[:9]).decode()

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums that the service tells. Those of a file are computed on first use."""
        if not self._checksums and isinstance(self.data, Path) and self.size <= _CRC_LIMIT:
            self._checksums = checksums(self.data.read_bytes(), with_md5=self.size <= _MD5_LIMIT)
        return self._checksums


class Store:
    """Buckets in memory. Every write creates a new, larger generation.

    The files of a folder, whose subfolders are buckets, are read on demand; nothing is written there. Their
    modification times in ns are their generations, which are the same when the folder is served again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._buckets: dict[str, dict[str, SimObject]] = {}
        # Names by bucket; removed when a name is added or deleted.
        self._sorted: dict[str, list[str]] = {}
        self._generation = 0
        for path in sorted(folder.rglob("*")) if folder else ():
            bucket, *parts = path.relative_to(folder or path).parts
            if path.is_dir() and not parts:
                self.make_bucket(bucket)
            elif path.is_file() and parts:
                self._load(path, bucket, "/".join(parts))

    def _load(self, path: Path, bucket: str, key: str) -> None:
        seen = path.stat()
        at_s, generation = seen.st_mtime, seen.st_mtime_ns
        fields = {"contentType": mimetypes.guess_type(key)[0] or "application/octet-stream"}
        self._buckets[bucket][key] = SimObject(
            bucket, key, path, seen.st_size, generation, at_s, at_s, fields
        )
        self._generation = max(self._generation, generation)

    def buckets(self) -> list[str]:
        return sorted(self._buckets)

    def make_bucket(self, bucket: str) -> None:
        self._buckets.setdefault(bucket, {})

    def names(self, bucket: str) -> Sequence[str]:
        """Return the names of all objects of a bucket, in the order of the service."""
        # Python sorts by code point, which equals the order of the UTF-8 bytes.
        if bucket not in self._sorted:
            self._sorted[bucket] = sorted(self._buckets[bucket])
        return self._sorted[bucket]

    def get(self, bucket: str, key: str) -> SimObject | None:
        """Return the live version of an object, or None if there is none."""
        return self._buckets.get(bucket, {}).get(key)

    def put(self, bucket: str, key: str, data: bytes, fields: Mapping[str, Any]) -> SimObject:
        """Store a new version and return it; create the bucket if missing."""
        self.make_bucket(bucket)
        now_s = time.time()
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        fields = {"contentType": "application/octet-stream", **fields}
        stored = SimObject(
            bucket, key, data, len(data), self._generation, now_s, now_s, fields, _checksums=checksums(data)
        )
        if key not in self._buckets[bucket]:
            self._sorted.pop(bucket, None)
        self._buckets[bucket][key] = stored
        return stored

    def update(self, stored: SimObject, fields: Mapping[str, Any]) -> SimObject:
        """Replace the properties of an object: a new metageneration of the same version."""
        new = replace(stored, fields=fields, metageneration=stored.metageneration + 1, updated_s=time.time())
        self._buckets[stored.bucket][stored.name] = new
        return new

    def remove(self, bucket: str, key: str) -> bool:
        """Delete an object; return False if it did not exist."""
        self._sorted.pop(bucket, None)
        return self._buckets.get(bucket, {}).pop(key, None) is not None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. `resume` is the position of the next page, None at the end."""

    names: list[str]
    prefixes: list[str]
    resume: str | None


def list_page(
    names: Sequence[str],
    *,
    prefix: str = "",
    delimiter: str = "",
    resume: str = "",
    start: str = "",
    end: str = "",
    limit: int = 1000,
) -> Page:
    """Return one page of names and common prefixes, from the position `resume` on.

    `names` must be sorted. Names and prefixes count toward `limit` together, in a common order.
    """
    page = Page([], [], None)
    at = max(bisect_left(names, first) for first in (prefix, start, resume))
    while at < len(names) and names[at].startswith(prefix) and (not end or names[at] < end):
        if len(page.names) + len(page.prefixes) >= limit:
            return replace(page, resume=resume)
        name = names[at]
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        common = name[: cut + len(delimiter)]
        (page.names if cut < 0 else page.prefixes).append(name if cut < 0 else common)
        resume = common + _LAST if cut >= 0 else name + "\0"
        at = bisect_left(names, resume, at)
    return page
