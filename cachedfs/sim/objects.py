"""Storage of the simulated Google Cloud Storage: buckets of objects, in memory or in a folder."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import os
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import google_crc32c

__all__ = [
    "NO_BODY",
    "Body",
    "Content",
    "DataBody",
    "FileBody",
    "FolderStore",
    "Page",
    "SimObject",
    "Store",
    "list_page",
]

# Larger files in a folder have no such checksum: computing it would block the server too long.
_MD5_LIMIT, _CRC_LIMIT = 8 << 20, 64 << 20
_LAST = "\U0010ffff"


class Body(Protocol):
    """Bytes of a reply."""

    @property
    def size(self) -> int: ...
    def read(self, start: int, stop: int) -> bytes | memoryview: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DataBody:
    """A body in memory."""

    data: bytes | memoryview

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        return memoryview(self.data)[start:stop]

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


NO_BODY = DataBody(b"")


class FileBody:
    """Part of an open file. It keeps its content if another file is renamed over it."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self._fd, self._start, self.size = os.open(path, os.O_RDONLY), start, stop - start

    def read(self, start: int, stop: int) -> bytes:
        data = os.pread(self._fd, stop - start, self._start + start)
        if len(data) < stop - start:
            raise ConnectionError("the file became shorter while it was served")
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


class Content:
    """Base of objects with bytes, in memory or in a file."""

    __slots__ = ()
    data: bytes | Path
    size: int

    def body(self, start: int, stop: int) -> Body:
        """Return the bytes `[start:stop]` as a body."""
        if isinstance(self.data, Path):
            return FileBody(self.data, start, stop)
        return DataBody(memoryview(self.data)[start:stop])

    def content(self) -> bytes:
        """Return all bytes."""
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data


@dataclass(frozen=True, slots=True)
class SimObject(Content):
    """One version of an object. `fields` are its editable properties, by their names in the JSON API."""

    bucket: str
    name: str
    data: bytes | Path
    size: int
    generation: int
    created_s: float
    updated_s: float
    crc32c: str  # base64 as in the API; empty for large files found in a folder
    md5: bytes | None  # None for composed objects, and for large files found in a folder
    fields: Mapping[str, Any]
    metageneration: int = 1
    key_sha256: str | None = None  # SHA-256 of the customer-supplied encryption key, base64
    n_components: int | None = None

    @property
    def etag(self) -> str:
        text = f"{self.generation}/{self.metageneration}".encode()
        return base64.b64encode(hashlib.md5(text).digest()[:9]).decode()


class Store:
    """Unversioned buckets in memory. Every write creates a new, larger generation."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, SimObject]] = {}
        self._sorted: dict[
            str, list[str]
        ] = {}  # sorted names by bucket; removed when a name is added or deleted
        self._generation = 0

    def buckets(self) -> list[str]:
        """Return the names of all buckets, sorted."""
        return sorted(self._buckets)

    def make_bucket(self, bucket: str) -> None:
        self._buckets.setdefault(bucket, {})

    def remove_bucket(self, bucket: str) -> None:
        del self._buckets[bucket]

    def names(self, bucket: str) -> Sequence[str]:
        """Return the names of all objects of a bucket, in the order of the service."""
        # Python sorts by code point, which equals the order of the UTF-8 bytes.
        if bucket not in self._sorted:
            self._sorted[bucket] = sorted(self._buckets[bucket])
        return self._sorted[bucket]

    def get(self, bucket: str, key: str) -> SimObject | None:
        """Return the live version of an object, or None if there is none."""
        return self._buckets.get(bucket, {}).get(key)

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        fields: Mapping[str, Any],
        *,
        key_sha256: str | None = None,
        n_components: int | None = None,
    ) -> SimObject:
        """Store a new version and return it; create the bucket if missing."""
        self.make_bucket(bucket)
        now, generation = time.time(), self._next_generation()
        stored = SimObject(
            bucket=bucket,
            name=key,
            data=self._keep(bucket, key, data, generation),
            size=len(data),
            generation=generation,
            created_s=now,
            updated_s=now,
            crc32c=_crc32c(data),
            md5=None if n_components else hashlib.md5(data).digest(),
            fields={"contentType": "application/octet-stream", **fields},
            key_sha256=key_sha256,
            n_components=n_components,
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

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def _keep(self, bucket: str, key: str, data: bytes, generation: int) -> bytes | Path:
        return data


class FolderStore(Store):
    """Store in a local folder: its subfolders are the buckets and their files the objects.

    Properties are kept in memory only. Generations are modification times in ns, so a file replaced by hand
    is a new version.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._temporary = folder / ".sim"  # on the same filesystem, and not a bucket name
        self._temporary.mkdir(parents=True, exist_ok=True)

    def buckets(self) -> list[str]:
        return sorted(p.name for p in self._folder.iterdir() if p.is_dir() and p.name[0] != ".")

    def make_bucket(self, bucket: str) -> None:
        self._path(bucket).mkdir(parents=True, exist_ok=True)
        super().make_bucket(bucket)

    def remove_bucket(self, bucket: str) -> None:
        self._path(bucket).rmdir()
        self._buckets.pop(bucket, None)

    def names(self, bucket: str) -> Sequence[str]:
        root = self._path(bucket)
        return sorted(
            os.path.join(at, name)[len(str(root)) + 1 :] for at, _, files in os.walk(root) for name in files
        )

    def get(self, bucket: str, key: str) -> SimObject | None:
        try:
            path = self._path(bucket, key)
            seen = path.stat()
        except (OSError, ValueError):
            return None
        if not path.is_file():
            return None
        known = super().get(bucket, key)
        if known and (known.generation, known.size) == (seen.st_mtime_ns, seen.st_size):
            return known
        size = seen.st_size
        data = path.read_bytes() if size <= _CRC_LIMIT else b""
        found = SimObject(
            bucket=bucket,
            name=key,
            data=path,
            size=size,
            generation=seen.st_mtime_ns,
            created_s=seen.st_mtime,
            updated_s=seen.st_mtime,
            crc32c=_crc32c(data) if size <= _CRC_LIMIT else "",
            md5=hashlib.md5(data).digest() if size <= _MD5_LIMIT else None,
            fields={"contentType": mimetypes.guess_type(key)[0] or "application/octet-stream"},
        )
        self._buckets.setdefault(bucket, {})[key] = found
        return found

    def remove(self, bucket: str, key: str) -> bool:
        super().remove(bucket, key)
        path = self._path(bucket, key)
        if not path.is_file():
            return False
        path.unlink()
        return True

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, time.time_ns())
        return self._generation

    def _keep(self, bucket: str, key: str, data: bytes, generation: int) -> bytes | Path:
        path = self._path(bucket, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=self._temporary)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.utime(temporary, ns=(generation, generation))
        os.replace(temporary, path)
        return path

    def _path(self, bucket: str, key: str = "") -> Path:
        """Return the path of an object. Raises ValueError for a name that no file can have."""
        parts = [bucket, *key.split("/")] if key else [bucket]
        if bucket.startswith(".") or any(p in ("", ".", "..") or "\0" in p for p in parts):
            raise ValueError(f"a folder cannot hold {bucket}/{key}")
        return self._folder.joinpath(*parts)


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
    with_trailing: bool = False,
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
        if cut < 0 or (with_trailing and name == common):
            page.names.append(name)
        if cut >= 0:
            page.prefixes.append(common)
        resume = common + _LAST if cut >= 0 else name + "\0"
        at = bisect_left(names, resume, at)
    return page


def _crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
