"""A folder of a filesystem as a bucket: objects by their keys, and tables of keys."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.common.urls import is_url
from cachedfs.errors import NoSuchBucket, ObjectNotFound
from cachedfs.filesystem import CachedFileSystem
from cachedfs.server.conditions import Slice, etag_of, fingerprint_of, modified_at
from cachedfs.server.key_pages import KeyTable, table_of
from cachedfs.server.s3_errors import S3Error

if TYPE_CHECKING:
    from cachedfs.core.download import Download
    from cachedfs.core.objects import Entry

PIECE = 1 << 20  # bytes read and sent at a time
AHEAD = 16 << 20  # bytes of a body that are requested ahead of what is sent
MOST_TABLES = 64
MOST_KEYS = 2_000_000  # in tables that are kept, beside the latest
MOST_DESCRIBED = 20_000
KEPT_S = 1.0  # for which a table answers for the first page; less if `max_age` is
PAGED_S = 900.0  # for which it answers for later pages, so that all are of one moment
_TYPES = ("contentType", "ContentType", "mimeType", "mimetype")
_ENCODINGS = ("contentEncoding", "ContentEncoding")
_NEVER_A_PAGE = {  # stored HTML must not act as a page of this endpoint, with the keys that a browser keeps for it
    "Content-Security-Policy": "sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Described(NamedTuple):
    """A version of an object, with the headers of an answer."""

    info: ObjectInfo
    size: int
    etag: str
    modified: datetime
    headers: dict[str, str]


class _Listed(NamedTuple):
    """A table that is kept, or is being made, and the state of the origin that it is of."""

    table: asyncio.Task[KeyTable]
    asked_at: float
    epoch: int


class Bucket:
    """The folder `root` of a filesystem. Coroutines run in any event loop; cached bytes need no other thread."""

    def __init__(self, fs: CachedFileSystem, root: str) -> None:
        self._fs, self._root = fs, root
        self._above = root if not root or root.endswith("/") else f"{root}/"
        self._described: dict[str, Described] = {}
        self._tables: dict[tuple[str, bool], _Listed] = {}

    async def open_origin(self) -> None:
        """Open the cache and the origin, so that the first request need not. Its errors are those of that request."""
        objects = self._fs._objects
        with contextlib.suppress(Exception):
            origin = await asyncio.to_thread(objects.origin, "")
            await self._fs._hop(origin.filesystem())

    # Objects.

    def path(self, key: str) -> str:
        """Return the path of a key. Raises S3Error if the filesystem reads it as the path of something else."""
        path = f"{self._above}{key}"
        if self._fs._strip_object(path) != path or self._leads_above(key):
            raise S3Error("NoSuchKey", "No object of this origin can have such a key")
        return path

    def _leads_above(self, name: str) -> bool:
        """Return whether an origin may take a name for one outside of the bucket."""
        if "." not in name and "%" not in name and "\0" not in name:
            return False
        parts = (unquote(name) if is_url(self._root) else name).split("/")
        return "\0" in name or not {".", ".."}.isdisjoint(parts)

    async def head(self, key: str) -> Described:
        """Return the headers of an object. Its metadata is requested if it is unknown or expired."""
        path = self.path(key)
        info = await self._fs._object_at(path)
        if info.kind != "file" or info.path != path:  # of the path without the slash at its end
            raise S3Error("NoSuchKey", "There is no such object; a folder has no key")
        return self.described(info)

    async def open(self, key: str, wanted: Slice | None) -> tuple[Entry, Download | None]:
        """Return the version whose `wanted` bytes are read next, and the request that has looked it up, if any."""
        return await self._fs._open_entry(self.path(key), *(wanted or (None, None)))

    def described(self, info: ObjectInfo) -> Described:
        """Return what to answer about a version. Raises S3Error for one without a size, such as a Google document."""
        known = self._described.get(info.path)
        if known is None or known.info is not info:
            if len(self._described) >= MOST_DESCRIBED:
                self._described.clear()
            known = self._described[info.path] = _described(info)
        return known

    async def read(self, entry: Entry, want: Range, download: Download | None = None) -> bytes:
        """Return a few bytes of exactly this version. Raises ObjectChanged."""
        return await self._fs._cat_entry(entry, want.start, want.stop, download)

    async def pieces(self, entry: Entry, want: Range, download: Download | None) -> AsyncIterator[bytes]:
        """Yield bytes of exactly this version, requested ahead where they are not cached. Raises ObjectChanged."""
        start = want.start
        while start < want.stop:
            stop = min(want.stop, (start // PIECE + 1) * PIECE)
            ahead = Range(start, min(want.stop, start + AHEAD))
            yield await self._fs._cat_entry(entry, start, stop, download, ahead=ahead)
            start = stop

    def expire(self, entry: Entry) -> None:
        """Look the object up again next time: this version was replaced."""
        self._fs._objects.expire(entry.path)

    # Keys.

    async def table(self, prefix: str, *, one_level: bool, is_first: bool) -> KeyTable:
        """Return a table of all keys that begin with `prefix`, with more, and with folders if it is of one level.

        Later pages are of the table of the first one, unless something was written through the cache since.
        """
        objects = self._fs._objects
        folder = prefix.partition("//")[0] if "//" in prefix else prefix.rpartition("/")[0]
        name = folder, one_level and "//" not in prefix  # what an empty name is in belongs to no level
        epoch, now = objects.store.epoch(objects.identity), time.monotonic()
        kept_s = min(KEPT_S, objects.lifetime_s) if is_first else PAGED_S
        listed = self._tables.pop(name, None)
        if listed is None or listed.epoch != epoch or self._is_old(listed, now, kept_s):
            listed = _Listed(asyncio.ensure_future(self._list(*name)), now, epoch)
        self._tables[name] = listed  # the latest at the end
        try:
            return await asyncio.shield(listed.table)
        except Exception:  # of any kind: the next request lists again
            self._tables.pop(name, None)
            raise

    @staticmethod
    def _is_old(listed: _Listed, now: float, kept_s: float) -> bool:
        is_shared = kept_s > 0 and not listed.table.done()
        return not is_shared and now - listed.asked_at >= kept_s

    def _evict(self) -> None:
        made = {name: each.table.result() for name, each in self._tables.items() if _is_made(each.table)}
        n_keys = sum(len(table.keys) for table in made.values())
        for name, table in made.items():
            if n_keys <= MOST_KEYS and len(self._tables) <= MOST_TABLES:
                break
            del self._tables[name]
            n_keys -= len(table.keys)

    async def _list(self, folder: str, one_level: bool) -> KeyTable:
        path, listings = f"{self._above}{folder}" if folder else self._root, self._fs._reader.lookups.listings
        infos = list[ObjectInfo]()
        try:
            if self._leads_above(folder):
                pass  # no key begins like that
            elif one_level:
                infos = (await self._fs._hop(listings.get(path))).infos
            else:
                infos = await self._fs._hop(listings.find(path))
        except NoSuchBucket:
            raise
        except ObjectNotFound as error:
            if not folder:
                raise NoSuchBucket(error.message) from error
        self._evict()
        return await asyncio.to_thread(table_of, infos, self._above, with_folders=one_level)


def _is_made(table: asyncio.Task[KeyTable]) -> bool:
    return table.done() and not table.cancelled() and table.exception() is None


def _described(info: ObjectInfo) -> Described:
    if info.size is None:
        raise S3Error("InvalidObjectState", "It has no size before it is exported, so it cannot be sent")
    details, modified, etag = info.details, modified_at(info), etag_of(fingerprint_of(info))
    headers = {
        "Server": "cachedfs",
        "Accept-Ranges": "bytes",
        "Content-Type": _first(details, _TYPES) or "binary/octet-stream",
        "ETag": etag,
        "Last-Modified": email.utils.format_datetime(modified, usegmt=True),
        **_NEVER_A_PAGE,
    }
    if encoding := _first(details, _ENCODINGS):
        headers["Content-Encoding"] = encoding
    return Described(info, info.size, etag, modified, headers)


def _first(details: Mapping[str, Any], names: Sequence[str]) -> str:
    texts = (str(details.get(name) or "") for name in names)
    return next((text for text in texts if text and text.isprintable()), "")
