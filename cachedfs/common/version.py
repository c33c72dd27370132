"""One version of an object: what is read of it, and what names its blocks."""

from __future__ import annotations

from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.common.urls import stored_path


class Version(ObjectKey):
    """One version of an object that can be cached: the common part of the keys of its blocks, and its metadata."""

    __slots__ = ("info", "size")

    info: ObjectInfo
    size: int

    @property
    def n_blocks(self) -> int:
        return -(-self.size // self.block_size)


def version_of(identity: str, info: ObjectInfo | None, block_size: int) -> Version | None:
    """Return the version that metadata describes; None for an absence, a folder, and what cannot be cached."""
    if info is None or info.fingerprint is None or info.kind != "file" or info.size is None:
        return None
    path = stored_path(info.path) if "://" in info.path else info.path
    version = Version(identity, path, info.fingerprint, block_size)
    version.info, version.size = info, info.size
    return version
