"""Size and time of the files of listed folders: programs ask for those of each file next."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

from cachedfs.cache.index.metadata_records import ListingRecord
from cachedfs.common.types import ObjectInfo
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.names import MAX_BYTES, file_name, with_id

__all__ = ["FolderListings", "mtime_ns_of"]

logger = logging.getLogger("cachedfs.mount")
_LISTED = 8  # folders whose listings are kept

# Size (None: a folder) and mtime_ns by file name; None for a file without a known size.
Files = dict[str, tuple[int | None, int] | None]


class _Listed(NamedTuple):
    """The files of a folder, as of a listing."""

    identity: str
    listing: ListingRecord  # without its objects, which take much more memory
    files: Files


class FolderListings:
    """The files of the last listed folders. Threads may call it at once."""

    def __init__(self, fs: CachedFileSystem, began_ns: int) -> None:
        """Create it; `began_ns` is the time of files and folders that have none."""
        self._fs, self._began_ns = fs, began_ns
        self._lock = Lock()
        self._listed: dict[str, _Listed] = {}  # by object path of the folder

    def of(self, folder: str) -> Files:
        """Return the files of a folder; raise FileNotFoundError if there is none."""
        files = self.current(folder)
        return self._list(folder) if files is None else files

    def _list(self, folder: str) -> Files:
        identity, listing = self._fs.fsid, self._fs._listing(folder)
        files: Files = {}
        for info in listing.infos:
            name = info.path.rstrip("/").rpartition("/")[2] if info.path.rstrip("/") != folder else ""
            mtime_ns = mtime_ns_of(info.details, self._began_ns)
            for each, kind, size in _items(name, info) if name else ():
                if len(os.fsencode(shown := file_name(each))) > MAX_BYTES:
                    logger.warning("left out of %s: %s: the name is too long for a file system", folder, each)
                elif kind == "directory" or shown in files:
                    files[shown] = None, mtime_ns
                else:
                    files[shown] = None if size is None else (size, mtime_ns)
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
        return kept.files if self._fs._is_current(folder, kept.listing) else None


def _items(name: str, info: ObjectInfo) -> list[tuple[str, str, int | None]]:
    """Return name, type and size (None: unknown) of all items that have this name: usually one."""
    others = info.details.get("same_name", {}).items()
    return [(name, info.kind, info.size)] + [
        (with_id(name, id, is_folder=kind == "directory"), kind, None) for id, kind in others
    ]


def mtime_ns_of(info: Mapping[str, Any], default: int) -> int:
    """Return when an object was last written, in nanoseconds."""
    names = ("mtime", "modified", "updated", "LastModified")  # of different filesystems
    found: Any = next((info[name] for name in names if info.get(name)), None)
    seconds = found.timestamp() if hasattr(found, "timestamp") else found
    return int(seconds * 1e9) if isinstance(seconds, int | float) else default
