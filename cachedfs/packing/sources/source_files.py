"""The files of a source: their listing, names and bytes."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cachedfs.common.urls import filesystem_at
from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, infos_at, infos_of, paths_of
from cachedfs.filesystem import CachedFileSystem
from cachedfs.packing.pack_types import Array

# Listing keys, in order of preference, whose value changes with the content of a file.
VERSIONS = ["generation", "md5Checksum", "ETag", "etag", "mtime", "LastModified", "last_modified", "modified"]
VERSIONS += ["created"]


class BadFile(ValueError):
    """A file that cannot be read or decoded. A pack may leave it out."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.reason}"


class SourceFiles:
    """The files of a source, listed once, and `digest`, which is equal for two listings of unchanged files.

    If a pack goes on after files were removed, it keeps the list of the earlier run, because the numbers of the files
    are in its counts. `removed` has the numbers of those files. `listing_digest` is the digest of the files that exist.
    """

    def __init__(self, urls: URLs, options: Mapping[str, Any] | None = None) -> None:
        """List the files.

        Raises ObjectNotFound if there is none, and ValueError for a file without bytes, such as a Google document.
        """
        given: Any = urls
        self._urls = given if isinstance(given, str) or hasattr(given, "__fspath__") else list(given)
        self._options = dict(options or {})
        self.url, url_list = as_urls(self._urls)
        self.fs, path = filesystem_at(self.url, self._options)
        self.root = "" if url_list is not None else str(path)  # the folder, file or pattern that was given
        if url_list is None:
            found = infos_of(self.fs, self.url, path)
            paths, infos = list(found), list(found.values())
        else:  # a list may name a file twice
            paths = paths_of(self.fs, url_list)
            infos = infos_at(self.fs, paths)
        unknown = [at for at, info in enumerate(infos) if info.get("size") is None]
        for at, info in zip(unknown, infos_at(self.fs, [paths[at] for at in unknown]), strict=True):
            infos[at] = info  # not every listing has sizes
            if info.get("size") is None:
                name = paths[at]
                raise ValueError(
                    f"{self.fs.unstrip_protocol(name)} has no bytes to pack, as a document of Google's own: leave it "
                    "out, or name a type to export it as"
                )
        self.removed: frozenset[int] = frozenset()
        sizes = np.fromiter((info["size"] for info in infos), np.int64, len(infos))
        self._set(paths, sizes, np.array([_key(*each) for each in zip(paths, infos, strict=True)], "u8"))
        self.listing_digest = self.digest

    def _set(self, paths: list[str], sizes: Array, keys: Array) -> None:
        self.paths, self.sizes, self._keys = CompactStrings(paths), sizes, keys
        first, last = min(paths), max(paths)
        n = next((i for i in range(len(first)) if first[i] != last[i : i + 1]), len(first))
        self._common_folder = first[: first.rfind("/", 0, n) + 1]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def size(self) -> int:
        return int(self.sizes.sum() - self.sizes[[*self.removed]].sum())

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self._keys.tobytes(), digest_size=16).hexdigest()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the files that exist."""
        return [number for number in range(len(self)) if number not in self.removed]

    def as_bytes(self) -> bytes:
        """Return the list of files as a NumPy npz file."""
        buffer = io.BytesIO()
        paths = np.frombuffer("\0".join(self.paths).encode("utf-8", "surrogatepass"), "u1")
        np.savez_compressed(buffer, paths=paths, sizes=self.sizes, keys=self._keys)
        return buffer.getvalue()

    def adopt(self, data: bytes) -> None:
        """Take over the list of an earlier run (`as_bytes`), if files were only removed since."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                paths = stored["paths"].tobytes().decode("utf-8", "surrogatepass").split("\0")
                sizes, keys = stored["sizes"], stored["keys"]
        except Exception:  # zip, zlib and NumPy raise different errors for damaged bytes
            return
        n, removed = 0, []
        for number, key in enumerate(keys.tolist()):
            if n < len(self) and self._keys[n] == key:
                n += 1
            else:
                removed.append(number)
        if n == len(self) and removed:
            self.removed = frozenset(removed)
            self._set(paths, sizes, keys)

    def name(self, number: int) -> str:
        """Return the path of a file relative to the common folder of all files."""
        return self.paths[number].removeprefix(self._common_folder)

    def url_of(self, number: int) -> str:
        return str(self.fs.unstrip_protocol(self.paths[number]))

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[Any]:
        """Return a context manager for an open file. Errors in it get a note with the name of the file."""
        try:
            with self.fs.open(self.paths[number], "rb") as file:
                yield file
        except Exception as error:  # each library raises its own errors for damaged data
            error.add_note(f"in {self.url_of(number)}")
            raise

    def list_again(self) -> SourceFiles:
        """List the files again. An offline filesystem keeps its metadata, since it cannot list anew."""
        is_offline = isinstance(self.fs, CachedFileSystem) and self.fs.config.offline
        if hasattr(self.fs, "invalidate_cache") and not is_offline:
            self.fs.invalidate_cache()
        return SourceFiles(self._urls, self._options)

    def prefetch_items(self, numbers: Iterable[int]) -> Iterator[tuple[str, int, int]]:
        """Yield some files as items of `fs.prefetch`: path, start and stop."""
        for number in numbers:
            if self.sizes[number] and number not in self.removed:
                yield self.paths[number], 0, int(self.sizes[number])

    def head(self, number: int, n: int) -> bytes:
        """Return the first `n` bytes of a file."""
        size = int(self.sizes[number])
        return bytes(self.fs.cat_file(self.paths[number], start=0, end=min(n, size))) if size else b""

    def ranges(
        self, wanted: Iterable[tuple[int, int, int]], bad: dict[int, str] | None = None
    ) -> list[bytes]:
        """Read byte ranges `(file number, start, stop)` with one `cat_ranges` call.

        If `bad` is given, it gets the reason for each file that may not be read. Its bytes are then empty. Raises the
        filesystem's error with a note that names the file, and ValueError for a file shorter than listed.
        """
        wanted = list(wanted)
        if not wanted:
            return []
        numbers, starts, stops = map(list, zip(*wanted, strict=True))
        found = self.fs.cat_ranges(self.paths.at(numbers), starts, stops, on_error="return")
        for i, (number, start, stop) in enumerate(wanted):
            data = found[i]
            if isinstance(data, PermissionError) and bad is not None:
                bad[number] = f"cannot be read: {data}"
                found[i] = b""
            elif isinstance(data, BaseException):
                data.add_note(f"while packing {self.url_of(number)}")
                raise data
            elif len(data) != stop - start:
                raise ValueError(
                    f"{self.url_of(number)}: {len(data):,} bytes at {start:,}, where its listing has {stop - start:,}: "
                    "it was replaced meanwhile; pack again, with overwrite"
                )
        return list(found)


def version_of(info: Mapping[str, Any]) -> str:
    """Return the version of a file in a listing, which changes with its content; "" without one."""
    return next((str(info[key]) for key in VERSIONS if info.get(key) is not None), "")


def _key(path: str, info: Mapping[str, Any]) -> int:
    """Return a number that changes with the name, size or content of a file."""
    data = f"{path}\0{info['size']}\0{version_of(info)}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
