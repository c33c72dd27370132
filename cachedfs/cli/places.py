"""URLs as users write them, and what they mean."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any

from cachedfs.cli.shared import Given

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["Place", "cached_url", "place_of"]

OURS = ("cachedfs", "cgs", "cdrive")  # protocols that read through the cache


@dataclasses.dataclass(frozen=True)
class Place:
    """One URL as the user wrote it, and the filesystem and path that it means."""

    text: str
    fs: CachedFileSystem
    path: str

    def url(self, path: str) -> str:
        """Return the URL of another path of this filesystem in the form in which the user wrote his."""
        url = self.fs.unstrip_protocol(path)
        if not self.text.startswith("cachedfs::"):
            url = url.removeprefix("cachedfs::")
        return url if "://" in self.text else url.removeprefix("file://")

    @property
    def is_pattern(self) -> bool:
        return "*" in self.path

    def named(self, path: str) -> str | None:
        """Return the object or folder named by the URL that a path is, or is below; None: it names neither. Nobody is asked."""
        above = self.path.rstrip("/")
        if not self.is_pattern:
            return above if path == above or path.startswith(f"{above}/") or not above else None
        from fsspec.utils import glob_translate

        is_named = re.compile(glob_translate(above)).fullmatch
        ends = [at for at, letter in enumerate(path) if letter == "/"]
        return next((path[:end] for end in [*ends, len(path)] if is_named(path[:end])), None)

    def matches(self) -> list[dict[str, Any]]:
        """Return what the pattern names. Raises FileNotFoundError when that is nothing."""
        found = list(self.fs.glob(self.path, detail=True).values())
        if not found:
            raise FileNotFoundError(f"{self.text}: nothing has such a name")
        return found


def place_of(text: str, given: Given, **more: Any) -> Place:
    """Return what a URL means under the options given, and `more` of ours; it is the URL of errors from now on."""
    from fsspec.core import split_protocol, url_to_fs

    given.url = text
    ours, theirs = given.ours_and_theirs()
    ours |= more
    url = cached_url(text)
    if url.startswith("cachedfs::"):
        target = split_protocol(url.rpartition("::")[2])[0] or "file"
        fs, path = url_to_fs(url, cachedfs=ours, **{target: theirs})
    else:
        fs, path = url_to_fs(url, target_options=theirs, **ours)
    return Place(text, fs, path)


def cached_url(text: str) -> str:
    """Return the URL that reads what the user wrote through the cache. Raises ValueError for what cannot be one."""
    if "://" in text or "::" in text:
        first = re.split("::|://", text, maxsplit=1)[0]
        return text if first in OURS else f"cachedfs::{text}"
    path = os.path.expanduser(text)
    if os.path.isabs(path) or text.startswith((".", "~")) or os.path.lexists(path):
        return f"cachedfs::file://{os.path.abspath(path)}"
    raise ValueError(
        f"{text!r} has no protocol, and no local file has this name: "
        f"write gs://{text} for Google Cloud Storage, 'drive://My Drive/{text}' for Google Drive"
    )
