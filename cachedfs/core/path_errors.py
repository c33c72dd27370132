"""Errors about a path: what its URL is, what is wrong, and what to do."""

from __future__ import annotations

from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import GCS_PROTOCOLS
from cachedfs.errors import CachedFSError, IsAFolder, ObjectNotFound, OriginUnavailable


def no_such_object(url: str, protocol: str, origin_error: str) -> ObjectNotFound:
    """Return the error for an absent path, with the origin's error text if known: it may name a remedy."""
    parent = "its bucket" if protocol in GCS_PROTOCOLS else "the folder it is in"
    kind = "file or folder, or this account may not see it" if protocol == "drive" else "object or folder"
    reason = f"no such {kind}; check the name, and that of {parent}, with ls"
    if protocol == "file":
        clouds = "Google Cloud Storage write gs://BUCKET/KEY, for Google Drive drive://My Drive/NAME"
        reason = f"no such file or folder on the local disk. For {clouds}"
    return ObjectNotFound(f"{url}: {origin_error or reason}")


def is_a_folder(url: str) -> IsAFolder:
    """Return the error for a read of a folder."""
    return IsAFolder(f"{url} is a folder: read one of the objects in it (ls shows them)")


def not_cached(url: str) -> OriginUnavailable:
    """Return the error for what only the origin has, while `offline` is set."""
    reason = "not all of it, or of its listing, is in the cache, and offline=True forbids asking for it"
    return OriginUnavailable(f"{url}: {reason}")


def not_cacheable(url: str, info: ObjectInfo) -> CachedFSError:
    """Return the error for an object of which nothing can be cached."""
    reason = "its origin does not distinguish versions"
    if info.size is None:
        reason = f"it has no known size ({info.details.get('mimeType', 'of no known kind')})"
    return CachedFSError(f"{url}: {reason}, so nothing of it is cached; read it instead")
