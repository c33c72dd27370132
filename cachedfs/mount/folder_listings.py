"""The last listed folders: names, sizes and versions of the files in them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any, NamedTuple

from cachedfs.cache.index.metadata_records import ListingRecord
from cachedfs.common.types import ObjectInfo, modified_of
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.names import MAX_BYTES, file_name, with_id
from cachedfs.origins.kept_mtime import kept_mtime_ns

logger = logging.getLogger("cachedfs.mount")
_UTF8 = 4  # most bytes of a character
_LISTED = 8  # folders whose listings are kept
_BEGAN_NS = time.time_ns()  # the time of files and folders that have none


class Metadata(NamedTuple):
    """Metadata of a file or folder. `size`: in bytes, None for a folder. `version`: differs between versions of a file."""

    size: int | None
    mtime_ns: int
    version: Hashable


FOLDER = Metadata(None, _BEGAN_NS, None)
"""A folder of which nothing else is known."""


class ExportedSize(NamedTuple):
    """The version of a file whose size is not known before it is read, such as a Google document."""

    fingerprint: str | None
    size: int


Files = dict[str, Metadata | None]
"""Metadata of the names in a folder; None for a file without a known size."""


class _Listed(NamedTuple):
    """The files of a folder, as of a listing."""

    identity: str
    listing: ListingRecord  # without its objects, which take much more memory
    files: Files


class FolderListings:
    """The files of the last listed folders. Threads may call it at once."""

    def __init__(self, fs: CachedFileSystem) -> None:
        self._fs = fs
        self._lock = Lock()
        self._listed: dict[str, _Listed] = {}  # by object path of the folder

    def of(self, folder: str) -> Files:
        """Return the files of a folder; raise FileNotFoundError if there is none."""
        files = self.current(folder)
        return self._list(folder) if files is None else files

    def _list(self, folder: str) -> Files:
        identity = self._fs.fsid
        listing = self._fs._run(self._fs._reader.lookups.listings.get(folder))
        files: Files = {}
        for info in listing.infos:
            path = info.path.rstrip("/")
            if path == folder or not (name := path.rpartition("/")[2]):
                continue  # nothing that a file system can show
            for each, known in _items(name, info):
                shown = file_name(each)
                if len(shown) > MAX_BYTES // _UTF8 and len(os.fsencode(shown)) > MAX_BYTES:
                    logger.warning("left out of %s: %s: the name is too long for a file system", folder, each)
                elif shown not in files or (known is not None and known.size is None):
                    files[shown] = known  # of an object and a folder of one name, the folder
        with self._lock:
            self._listed.pop(folder, None)
            self._listed[folder] = _Listed(identity, listing._replace(infos=[]), files)
            if len(self._listed) > _LISTED:
                del self._listed[next(iter(self._listed))]
        return files

    def current(self, folder: str) -> Files | None:
        """Return the files of the last listing, if the filesystem would return it again without a request."""
        kept = self._listed.get(folder)
        if kept is None or kept.identity != self._fs.fsid:
            return None
        return kept.files if self._fs._reader.lookups.listings.is_current(folder, kept.listing) else None


def _items(name: str, info: ObjectInfo) -> list[tuple[str, Metadata | None]]:
    """Return all items that have this name: usually one."""
    items = [(name, metadata_of(info))]
    for id, kind in info.details.get("same_name", {}).items():
        is_folder = kind == "directory"
        items.append((with_id(name, id, is_folder=is_folder), FOLDER if is_folder else None))
    return items


def metadata_of(info: ObjectInfo) -> Metadata | None:
    """Return the metadata that a mount shows; None for a file without a known size."""
    mtime_ns = mtime_ns_of(info.details)
    if info.kind == "directory":
        return Metadata(None, mtime_ns, None)
    return None if info.size is None else Metadata(info.size, mtime_ns, version_of(info))


def version_of(info: ObjectInfo) -> Hashable:
    """Return the fingerprint, or what tells versions apart where there is none."""
    return info.fingerprint or (info.size, mtime_ns_of(info.details))


def mtime_ns_of(info: Mapping[str, Any], default: int = _BEGAN_NS) -> int:
    """Return when an object was last written, in nanoseconds.

    This is the time that its writer kept with it, else that of the origin.
    """
    if (kept_ns := kept_mtime_ns(info)) is not None:
        return kept_ns
    found = modified_of(info)
    return default if found is None else round(found.timestamp() * 1e6) * 1000
