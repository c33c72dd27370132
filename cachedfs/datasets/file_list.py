"""List the files that URLs name, in natural order, in a form that is cheap to send to workers."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from fsspec.asyn import _run_coros_in_chunks, sync
from fsspec.core import has_magic

from cachedfs.common.urls import LOCAL_PROTOCOLS, cached_url, filesystem_at
from cachedfs.errors import ObjectNotFound

logger = logging.getLogger("cachedfs.datasets")

SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini"})  # of Windows; those of other systems begin with a dot
URLs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
_DIGITS = re.compile(r"[0-9]+")


class CompactStrings(Sequence[str]):
    """A sequence of strings in one block of memory: it pickles fast, and forked workers share its pages.

    Reading a list of strings writes their reference counts instead, so that each worker copies the pages.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        self._bytes = b"".join(encoded)
        self._ends = array("q", itertools.accumulate(map(len, encoded), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.at(range(*index.indices(len(self))))
        return self.at([range(len(self))[index]])[0]

    def at(self, indexes: Iterable[int]) -> list[str]:
        """Return the strings with these indexes, which must not be negative."""
        data, ends = self._bytes, self._ends
        return [data[ends[i] : ends[i + 1]].decode("utf-8", "surrogatepass") for i in indexes]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"<{len(self):,} names: {shown}{', ...' if len(self) > 3 else ''}>"


def natural_key(path: str) -> str:
    """Return a key that sorts paths in natural order: `img2` before `img10`, and the files of a folder together."""

    def measured(match: re.Match[str]) -> str:
        digits = match[0].lstrip("0") or "0"
        return f"{len(digits):05}{digits}"  # so that shorter numbers sort first

    return _DIGITS.sub(measured, path.replace("/", "\0"))  # NUL sorts before all else


def as_urls(given: URLs) -> tuple[str, list[str] | None]:
    """Return the first URL, and the list of all URLs (None if `given` is a single URL).

    Raises ValueError for an empty list or URLs of several filesystems, and TypeError for anything but URLs.
    """
    if isinstance(given, str | os.PathLike):
        return os.fspath(given), None
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"expected a URL, a path, or a list of them, not {type(given).__name__}")
    urls = [os.fspath(url) for url in given]
    if not urls:
        raise ValueError("expected files: the list is empty")
    prefixes = {before for before, scheme, _ in (url.rpartition("://") for url in urls) if scheme}
    if len(prefixes) > 1 or (prefixes and "://" not in urls[0]):
        shown = ", ".join(sorted(f"{prefix}://" for prefix in prefixes))
        raise ValueError(
            f"expected files of one filesystem, each URL with its protocol in front, not {shown}"
        )
    return urls[0], urls


def open_at(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return the filesystem and the path of a URL, with a warning if all epochs read it from a service."""
    protocol, _, rest = url.partition("://")
    is_near = not rest or protocol in (*LOCAL_PROTOCOLS, "memory")
    if not is_near and "::" not in url and (cached := cached_url(url)) != url:
        logger.warning("%s is read without the cache, in every epoch; with it: %s", url, cached)
    return filesystem_at(url, options or {})


def paths_of(fs: Any, urls: Iterable[str]) -> list[str]:
    """Return the filesystem's paths of these URLs, in the given order, without a request."""
    return [str(fs._strip_protocol(url)) for url in urls]


def files_of(fs: Any, url: str, path: str) -> dict[str, int | None]:
    """Return the files that a URL names, in natural order, with their sizes (None if unknown); see `infos_of`."""
    return {name: info.get("size") for name, info in infos_of(fs, url, path).items()}


def infos_of(fs: Any, url: str, path: str) -> dict[str, dict[str, Any]]:
    """Return the files that a URL names, in natural order, each with its entry from the listing.

    A pattern names the files that match it. Any other URL names a file, or all files below a folder. One listing finds
    them. Hidden files (`.DS_Store`, `.ipynb_checkpoints/a.png`, `Thumbs.db`) are left out, and the log says so, unless
    the URL itself spells one. Raises ObjectNotFound if there is no file.
    """
    is_pattern = has_magic(path)
    matched = fs.glob(path, detail=True) if is_pattern else {}
    # The name of a folder may contain `[`, too.
    files = _files(matched) or _files(fs.find(path, detail=True))
    if hidden := [name for name in files if _is_hidden(name, path)]:
        for name in hidden:
            del files[name]
        n, shown = len(hidden), fs.unstrip_protocol(hidden[0])
        logger.warning("%s: left out %d hidden file%s, such as %s", url, n, "s" * (n > 1), shown)
    if files:
        return dict(sorted(files.items(), key=lambda item: (natural_key(item[0]), item[0])))
    if matched:
        why = "this pattern matches folders only; with /** behind it, all files below them"
    elif is_pattern:
        why = "no file matches this pattern; see what fs.ls has of the folder before it"
    else:
        why = "no such file or folder; see what fs.ls has of the folder above it"
        if fs.isdir(path):
            why = "there is no file in this folder"
        if "://" not in url:
            why += f". It is taken as a local path: write cachedfs::gs://{url} for Google Cloud Storage, cachedfs::drive://{url} for Google Drive"
    raise ObjectNotFound(f"{url}: {why}")


def infos_at(fs: Any, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return `fs.info` of each of these files, several lookups at a time. Raises IsADirectoryError for a folder."""
    if fs.async_impl:
        coros = [fs._info(path) for path in paths]
        infos: list[dict[str, Any]] = sync(fs.loop, _run_coros_in_chunks, coros, batch_size=fs.batch_size)
    else:
        infos = [fs.info(path) for path in paths]
    for path, info in zip(paths, infos, strict=True):
        if info["type"] != "file":
            url = fs.unstrip_protocol(path)
            raise IsADirectoryError(
                errno.EISDIR,
                f"{url} is a folder, but a list must contain files only: pass the folder alone",
                url,
            )
    return infos


def _is_hidden(name: str, path: str) -> bool:
    """Return whether a file found at `path`, a folder or a pattern, is hidden in a way that `path` does not spell."""
    if "/." not in name and name[:1] != "." and name.rpartition("/")[2].lower() not in SYSTEM_FILES:
        return False
    pairs = zip(name.split("/"), path.split("/"), strict=False)
    n_spelled = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    found, pattern = name.split("/")[n_spelled:], path.split("/")[n_spelled:]
    if not found or any(part.startswith(".") for part in pattern):
        return False
    return found[-1].lower() in SYSTEM_FILES or any(part.startswith(".") for part in found)


def _files(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: info for name, info in found.items() if info["type"] == "file"}
