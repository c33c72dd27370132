"""`CachedUPath`: universal_pathlib's class for paths that are read through the cache.

universal_pathlib finds it through an entry point.
"""

from __future__ import annotations

import fsspec
from upath import UPath

from cachedfs.common.urls import is_url

for _protocol in ("cachedfs", "cgs", "cdrive", "drive"):
    fsspec.get_filesystem_class(_protocol)  # UPath has the rules for paths only of classes that are imported


class CachedUPath(UPath):
    """A `UPath` of a cached filesystem, such as `UPath("cachedfs::gs://bucket/folder")`.

    Its text is the URL that opens it. UPath itself repeats the first path of a chain: "cachedfs://b/k/a::gs://b/k".
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = str(super().__str__())
        if not text.startswith("cachedfs:"):  # a relative path, or no chain
            return text
        prefix = "" if is_url(self.path) else f"{self.storage_options['target_protocol']}://"
        return f"cachedfs::{prefix}{self.path}"
