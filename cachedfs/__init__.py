"""An fsspec filesystem that reads remote files through a persistent block cache on local disk.

Put `cachedfs::` in front of a URL, as in `fsspec.open("cachedfs::gs://bucket/key")`. The protocols `cachedfs`, `cgs`,
`cdrive` and `drive` are registered with fsspec. This module exports the filesystem classes, `serve` and the exceptions.
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
    from cachedfs.server.serving import serve

__version__ = "0.1.0"  # pyproject.toml reads it from here

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
    "serve",
]


def __getattr__(name: str) -> Any:
    # Lazy, because they import fsspec and aiohttp.
    if name in ("CachedDriveFileSystem", "CachedFileSystem", "CachedGCSFileSystem"):
        return getattr(import_module("cachedfs.filesystem"), name)
    if name == "serve":
        return import_module("cachedfs.server.serving").serve
    raise AttributeError(f"module 'cachedfs' has no attribute {name!r}")
