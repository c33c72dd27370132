"""Resolve the URLs that users type to a filesystem and path."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cachedfs.cli.arguments import CommonOptions
from cachedfs.cli.output import print_error
from cachedfs.common.drive_links import canonical_path, is_bare_link, is_drive_link
from cachedfs.errors import AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound

if TYPE_CHECKING:
    from cachedfs.cache.block_store import BlockStore
    from cachedfs.filesystem import CachedFileSystem

OURS = ("cachedfs", "cgs", "cdrive")  # protocols that already read through the cache
AT_DRIVE = ("My Drive", "Shared with me", "shared:", "id:")  # prefixes of Google Drive paths
OBJECT_ERRORS = (AccessDenied, NotDownloadable, ObjectChanged, ObjectNotFound)  # errors of a single object
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Location:
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
        """Return what this URL names of a path, by its text alone: the path or a folder above it, or None."""
        above = self.path.rstrip("/")
        if not above:
            return ""
        from fsspec.utils import glob_translate

        pattern = glob_translate(above) if self.is_pattern else re.escape(above)
        return next(
            filter(re.compile(pattern).fullmatch, itertools.accumulate(path.split("/"), "{}/{}".format)), None
        )

    def cached_bytes(self, path: str) -> int:
        """Return how many bytes of an object are cached."""
        return sum(stop - start for start, stop in self.fs.cached_extent(path))

    def cached_paths(self) -> list[str]:
        """Return the path, or what has cached blocks and matches the pattern. Sends no request."""
        if not self.is_pattern:
            return [self.path]
        above = self.path.partition("*")[0].rpartition("/")[0]
        named = map(self.named, self.cache.paths_below(self.identity, above))
        return sorted({name for name in named if name is not None})

    @property
    def cache(self) -> BlockStore:
        return self.fs._objects.engine.cache

    @property
    def identity(self) -> str:
        """The name under which the cache has the blocks of this origin."""
        return self.fs._objects.identity

    def entries(self) -> list[dict[str, Any]]:
        """Return the entry of the path, or those that match the pattern. Raises ObjectNotFound if there are none."""
        if not self.is_pattern:
            return [self.fs.info(self.path)]
        found = list(self.fs.glob(self.path, detail=True).values())
        if not found:
            raise ObjectNotFound(f"{self.text}: nothing has such a name")
        return found

    def paths(self) -> list[str]:
        """Return the path, as that of an object, whose name may end in a slash; or the paths that match the pattern."""
        if self.is_pattern:
            return [str(info["name"]) for info in self.entries()]
        ends_in_slash = self.text.endswith("/") and not self.path.endswith("/")
        return [str(self.fs._strip_object(f"{self.path}/" if ends_in_slash else self.path))]


def locate(text: str, common: CommonOptions, **more: Any) -> Location:
    """Resolve a URL under the common options, overridden by `more` options of cachedfs.

    From then on error messages name this URL.
    """
    from cachedfs.common.urls import filesystem_at

    common.url = text
    url = cached_url(text)
    fs, path = filesystem_at(url, options_of(url, common, **more))
    return Location(text, fs, fs._strip(path))


def options_of(url: str, common: CommonOptions, **more: Any) -> dict[str, Any]:
    """Return the common options, and `more` of cachedfs, as storage options for a URL; a bare path has none."""
    from fsspec.core import split_protocol

    ours, theirs = common.split()
    ours |= more
    if url.startswith("cachedfs::"):
        return {"cachedfs": ours, split_protocol(url.rpartition("::")[2])[0] or "file": theirs}
    return {} if os.path.isabs(url) else {"target_options": theirs, **ours}


def at_each(urls: Sequence[str], common: CommonOptions, do: Callable[[Location], T]) -> list[T]:
    """Return the results of `do` for each URL; report a URL that cannot be read and go on with the others.

    Raises errors that affect more than one URL, and every error if there is only one.
    """
    results = []
    for text in urls:
        location = locate(text, common)
        try:
            results.append(do(location))
        except OBJECT_ERRORS as error:
            if len(urls) == 1:
                raise
            print_error(error, common.url, as_json=common.as_json)
            common.has_failed = True
    return results


def cached_url(text: str) -> str:
    """Return the cachedfs URL for a URL or local path. Raises ValueError if it is not valid."""
    above, chained, last = text.rpartition("::")
    if found := re.match("(gs|gcs|drive|cgs|cdrive|https?):/(?!/)", last):
        raise ValueError(f"{text!r} is no URL: write {above}{chained}{found[1]}://{last[found.end() :]}")
    if (at_drive := drive_url(text)) is not None:
        return f"cachedfs::{at_drive}"
    if "://" in text or "::" in text:
        _refuse_unknown(text, last)
        first = re.split("::|://", text, maxsplit=1)[0]
        return text if first in OURS else f"cachedfs::{text}"
    path = os.path.expanduser(text)
    if os.path.isabs(path) or text.startswith((".", "~")) or os.path.lexists(path):
        return f"cachedfs::file://{os.path.abspath(path)}"
    if text.startswith(AT_DRIVE):
        raise ValueError(f"{text!r} has no protocol: write 'drive://{text}' for Google Drive")
    known = canonical_path(text)
    at_drive = f"My Drive/{text}" if known == text else known
    raise ValueError(
        f"{text!r} has no protocol, and no local file has this name: "
        f"write gs://{text or 'my-bucket'} for Google Cloud Storage, 'drive://{at_drive}' for Google Drive"
    )


def drive_url(text: str) -> str | None:
    """Return the `drive://` URL that a link, an id alone or a path of Colab's mount stands for; else None.

    Without a protocol, a local file of this name comes first.
    """
    above, _, last = text.rpartition("::")
    if above and above not in OURS:
        return None
    is_bare = is_bare_link(last) and not os.path.lexists(last)
    is_drive = is_drive_link(last) or is_bare or (not above and _is_at_colab(last))
    return f"drive://{canonical_path(last)}" if is_drive else None


def _is_at_colab(text: str) -> bool:
    """Return whether a path is one of Google Drive as Colab mounts it, and it is not mounted here."""
    mounted = "/".join(text.split("/")[:3])
    return text.startswith("/content/") and canonical_path(text) != text and not os.path.lexists(mounted)


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
