"""Put `cachedfs::` in front of a URL, and the cloud reads like the local disk.

The filesystems register themselves with fsspec (`cachedfs`, `cgs`, `cdrive`, `drive`); this module holds what a user may want by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cachedfs.common.event_log import log_events
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
    QuotaExceeded,
)

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedDriveFileSystem, CachedFileSystem, CachedGCSFileSystem

__version__ = "0.1.0"  # the one place: pyproject.toml takes it from here

__all__ = [
    "AccessDenied",
    "CachedDriveFileSystem",
    "CachedFSError",
    "CachedFileSystem",
    "CachedGCSFileSystem",
    "IsAFolder",
    "NotDownloadable",
    "ObjectChanged",
    "ObjectNotFound",
    "OriginUnavailable",
    "QuotaExceeded",
    "__version__",
    "log_events",
]


def __getattr__(name: str) -> Any:
    # The filesystems import fsspec and aiohttp; the errors do not.
    if name in ("CachedDriveFileSystem", "CachedFileSystem", "CachedGCSFileSystem"):
        return getattr(import_module("cachedfs.filesystem"), name)
    raise AttributeError(f"module 'cachedfs' has no attribute {name!r}")
