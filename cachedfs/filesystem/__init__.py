"""The fsspec filesystems `cachedfs`, `cgs` and `cdrive`."""

from cachedfs.filesystem.filesystem import CachedDriveFileSystem, CachedFileSystem, CachedGCSFileSystem

__all__ = ["CachedDriveFileSystem", "CachedFileSystem", "CachedGCSFileSystem"]
