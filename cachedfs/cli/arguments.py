"""Parse the URLs that users type and resolve them to a filesystem and path."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cachedfs.cli.output import Given, tell
from cachedfs.errors import AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["ABOUT_ONE", "Place", "at_each", "cached_url", "place_of"]

OURS = ("cachedfs", "cgs", "cdrive")  # protocols that already read through the cache
AT_DRIVE = ("My Drive", "Shared with me", "shared:", "id:")  # prefixes of Google Drive paths
ABOUT_ONE = (AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound)  # errors of a single object


@dataclasses.dataclass(frozen=True)
class Place:
    """A URL as the user wrote it, with the filesystem and path it resolves to."""

    text: str
    fs: CachedFileSystem
    path: str

    def url(self, path: str) -> str:
        """Return the URL of another path of this filesystem, in the form the user chose for this one."""
        url = self.fs.unstrip_protocol(path)
        if not self.text.startswith("cachedfs::"):
            url = url.removeprefix("cachedfs::")
        return url if "://" in self.text else url.removeprefix("file://")

    @property
    def is_pattern(self) -> bool:
        return "*" in self.path

    def named(self, path: str) -> str | None:
        """Return the match of this URL that equals or contains `path`; None if there is none.

        Uses the path text only and sends no request.
        """
        above = self.path.rstrip("/")
        if not self.is_pattern:
            return above if path == above or path.startswith(f"{above}/") or not above else None
        from fsspec.utils import glob_translate

        is_named = re.compile(glob_translate(above)).fullmatch
        ends = [at for at, letter in enumerate(path) if letter == "/"]
        return next((path[:end] for end in [*ends, len(path)] if is_named(path[:end])), None)

    def matches(self) -> list[dict[str, Any]]:
        """Return the entries that match the pattern. Raises ObjectNotFound if there are none."""
        found = list(self.fs.glob(self.path, detail=True).values())
        if not found:
            raise ObjectNotFound(f"{self.text}: nothing has such a name")
        return found


def place_of(text: str, given: Given, **more: Any) -> Place:
    """Resolve a URL under the given options, overridden by `more` options of cachedfs.

    From then on error messages name this URL.
    """
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


def at_each(urls: Sequence[str], given: Given, do: Callable[[Place], None]) -> bool:
    """Call `do` for each URL; report a URL that cannot be read and go on with the others.

    Returns True if all URLs succeeded. Raises errors that affect more than one URL, and every error if there
    is only one.
    """
    is_ok = True
    for text in urls:
        place = place_of(text, given)
        try:
            do(place)
        except ABOUT_ONE as error:
            if len(urls) == 1:
                raise
            tell(error, given)
            is_ok = False
    return is_ok


def cached_url(text: str) -> str:
    """Return the cachedfs URL for a URL or local path. Raises ValueError if it is not valid."""
    above, chained, last = text.rpartition("::")
    if found := re.match("(gs|gcs|drive|cgs|cdrive|https?):/(?!/)", last):
        raise ValueError(f"{text!r} is no URL: write {above}{chained}{found[1]}://{last[found.end() :]}")
    if "://" in text or "::" in text:
        _refuse_unknown(text, last)
        first = re.split("::|://", text, maxsplit=1)[0]
        return text if first in OURS else f"cachedfs::{text}"
    path = os.path.expanduser(text)
    if os.path.isabs(path) or text.startswith((".", "~")) or os.path.lexists(path):
        return f"cachedfs::file://{os.path.abspath(path)}"
    if text.startswith(AT_DRIVE):
        raise ValueError(f"{text!r} has no protocol: write 'drive://{text}' for Google Drive")
    at_drive = text.removeprefix("MyDrive/")  # where a mounted Drive has its files
    raise ValueError(
        f"{text!r} has no protocol, and no local file has this name: "
        f"write gs://{text or 'my-bucket'} for Google Cloud Storage, 'drive://My Drive/{at_drive}' for Google Drive"
    )


def _refuse_unknown(text: str, last: str) -> None:
    """Raise ValueError if the last protocol of a URL is not installed or has no path."""
    from fsspec.registry import available_protocols, registry

    known = {*available_protocols(), *registry}
    protocol, has_path, _ = last.partition("://")
    if not has_path:
        if not last or last in known:
            example = f"{text}://..." if last else f"{text}gs://my-bucket"
            raise ValueError(f"{text!r} is no URL: a path is missing, as in {example}")
        return  # a local path
    if protocol not in known:
        # Ignore case and blanks. Suggest the protocols of cachedfs before others.
        wanted, ours = protocol.strip().lower(), ["gs", "drive"]
        near = difflib.get_close_matches(wanted, ours, n=1) or difflib.get_close_matches(wanted, known, n=1)
        meant = f"; did you mean {near[0]}://?" if near else ""
        raise ValueError(f"{text!r}: no protocol that is installed is called {protocol!r}{meant}")
