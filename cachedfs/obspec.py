"""`CachedStore`: obspec's read protocols over the cache, for code that reads with obstore and not with fsspec."""

from __future__ import annotations

import contextlib
import operator
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from cachedfs.common.blocks import clip
from cachedfs.common.types import ObjectInfo, modified_of
from cachedfs.common.urls import cached_url, filesystem_at, is_url
from cachedfs.core.objects import Entry
from cachedfs.core.path_errors import is_a_folder
from cachedfs.errors import ABSENT, AccessDenied, IsAFolder, ObjectNotFound
from cachedfs.filesystem.filesystem import CachedFileSystem
from cachedfs.origins.obstore_origin import identity_of_store, root_of_store

__all__ = ["CachedStore", "NotFoundError", "PermissionDeniedError"]

_WITHOUT_BUCKET = ("file", "local", "memory", "LocalStore", "MemoryStore")
_PIECE = 8 << 20  # bytes that iterating over a result gives at a time
_COALESCE = 1 << 20  # obstore's default
_UNKNOWN = datetime.fromtimestamp(0, UTC)
_ROWS = 1000  # objects that a listing gives at a time
_E_TAGS = ("e_tag", "etag", "ETag")


class NotFoundError(ObjectNotFound):
    """The object does not exist; obspec recognizes this error by its name."""


class PermissionDeniedError(AccessDenied):
    """The origin denied access; obspec recognizes this error by its name."""


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raise errors under the names that obspec knows."""
    try:
        yield
    except (ObjectNotFound, IsAFolder) as error:
        raise NotFoundError(error.message) from error
    except AccessDenied as error:
        raise PermissionDeniedError(error.message) from error


class CachedStore:
    """A store to read from, through the cache, with the methods of obspec's protocols.

        store = CachedStore("gs://bucket/prefix", gs={"token": "anon"})
        store = CachedStore(obstore.store.S3Store("bucket", region="us-east-1"))
        data = store.get_range("a.nc", start=0, end=1000)

    `store` is a URL, with or without `cachedfs::`, or a store of obstore. Then no fsspec filesystem is needed, and blocks
    are kept under the ETag of their object. `prefix` is a folder in it: all paths are relative to it. `options` are
    those of `CachedFileSystem`.

    Objects of one bucket are cached once for all stores with the same endpoint and credentials. `account` is any name
    that takes the place of the credentials: give one if keys expire, or if the store has a `credential_provider`.

    A store that you make for each task or read would open connections each time: make one, and keep it. It can be
    pickled if the given store can. In a forked process, an obstore store reads only what is cached, as obstore does not
    support `fork`.

    Raises NotFoundError, PermissionDeniedError, and otherwise what `CachedFileSystem` raises.
    """

    def __init__(self, store: Any, *, prefix: str = "", account: str | None = None, **options: Any) -> None:
        if isinstance(store, str | os.PathLike):
            if account is not None:
                raise ValueError("CachedStore(url): account= is for stores of obstore; a URL needs none")
            url = os.fspath(store)
            is_local = os.path.isabs(url) or url.startswith((".", "~")) or os.path.lexists(url)
            if not ("::" in url or is_url(url) or is_local):
                raise ValueError(
                    f"CachedStore({url!r}): it has no protocol, and no local file has this name: "
                    f"write gs://{url} for Google Cloud Storage, s3://{url} for S3"
                )
            fs, root = filesystem_at(cached_url(url), options)
            kind = fs.target_protocol
        else:
            given = {
                "store": store,
                "identity": identity_of_store(store, account),
                "instance": uuid.uuid4().hex,  # fsspec takes stores for the same if their texts are
            }
            fs = CachedFileSystem(target_protocol="obstore", target_options=given, **options)
            root, kind = root_of_store(store), given["identity"].split("|")[1]
        #: The filesystem that reads: for `prefetch`, `stats`, `invalidate_cache` and so on.
        self.fs: CachedFileSystem = fs
        self.root = _join(root, prefix)
        path = urlsplit(self.root).path if is_url(self.root) else self.root
        is_below_bucket = kind not in _WITHOUT_BUCKET and not is_url(self.root)
        #: The path of the store in its bucket; registries remove it from the paths of URLs.
        self.prefix = path.partition("/")[2] if is_below_bucket else path.strip("/")

    def __repr__(self) -> str:
        return f"CachedStore({self.fs.unstrip_protocol(self.root)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CachedStore):
            return NotImplemented
        return (self.fs.fsid, self.root) == (other.fs.fsid, other.root)

    def __hash__(self) -> int:
        return hash((self.fs.fsid, self.root))

    # Bytes.

    def get(self, path: str, *, options: dict[str, Any] | None = None) -> GetResult:
        """Return an object, of one version: metadata now, bytes as they are read.

        `options` may have a `range`: `(start, end)`, `{"offset": n}` for all from there, or `{"suffix": n}` for the last
        n bytes. Raises ValueError for a range without bytes, except a suffix, and NotImplementedError for other options.
        """
        with _named():
            entry = self._existing(path) or self.fs._run(self.fs._reader.open(self._full(path)))[0]
            return GetResult(self, entry, options)

    async def get_async(self, path: str, *, options: dict[str, Any] | None = None) -> GetResult:
        """Do what `get` does, in any event loop."""
        with _named():
            entry = self._existing(path) or (await self.fs._hop(self.fs._reader.open(self._full(path))))[0]
            return GetResult(self, entry, options)

    def _existing(self, path: str) -> Entry | None:
        entry = self.fs._objects.existing(self._full(path))
        if entry is not None and entry.object.kind == "directory":
            raise is_a_folder(self.fs._objects.url(entry.path))
        return entry

    def get_range(self, path: str, *, start: int, end: int | None = None, length: int | None = None) -> bytes:
        """Return the bytes `[start, end)`. Raises ValueError if there are none."""
        with _named():
            data = self.fs.cat_file(self._full(path), *_span(start, end, length))
        return self._not_empty(data, path, start)

    async def get_range_async(
        self, path: str, *, start: int, end: int | None = None, length: int | None = None
    ) -> bytes:
        """Do what `get_range` does, in any event loop."""
        with _named():
            data = await self.fs._cat_file(self._full(path), *_span(start, end, length))
        return self._not_empty(data, path, start)

    def get_ranges(
        self,
        path: str,
        *,
        starts: Sequence[int],
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        coalesce: int = _COALESCE,
    ) -> list[bytes]:
        """Return several ranges of an object; those that are not cached are requested together.

        `coalesce` is accepted for obstore and has no effect: ranges of neighboring blocks are one request anyway.
        """
        begins, stops = _spans(starts, ends, lengths)
        with _named():
            datas = self.fs.cat_ranges([self._full(path)] * len(stops), begins, stops, on_error="raise")
        return [self._not_empty(data, path, start) for data, start in zip(datas, begins, strict=True)]

    async def get_ranges_async(
        self,
        path: str,
        *,
        starts: Sequence[int],
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        coalesce: int = _COALESCE,
    ) -> list[bytes]:
        """Do what `get_ranges` does, in any event loop."""
        begins, stops = _spans(starts, ends, lengths)
        with _named():
            datas = await self.fs._cat_ranges(
                [self._full(path)] * len(stops), begins, stops, on_error="raise"
            )
        return [self._not_empty(data, path, start) for data, start in zip(datas, begins, strict=True)]

    def _not_empty(self, data: bytes, path: str, start: int) -> bytes:
        if not data:
            raise _without_bytes(self.fs.unstrip_protocol(self._full(path)), start)
        return data

    # Metadata.

    def head(self, path: str) -> dict[str, Any]:
        """Return `path`, `size`, `e_tag`, `last_modified` and `version` of an object."""
        with _named():
            return self._meta(self.fs._object(self._full(path)))

    async def head_async(self, path: str) -> dict[str, Any]:
        """Do what `head` does, in any event loop."""
        with _named():
            return self._meta(await self.fs._object_at(self._full(path)))

    def list(
        self, prefix: str | None = None, *, offset: str | None = None
    ) -> Iterator[Sequence[dict[str, Any]]]:
        """Yield the metadata of all objects below `prefix`, a thousand at a time; after `offset`, if given."""
        with _named():
            found = self.fs.find(self._folder(prefix), detail=True)
        yield from self._pages(found, prefix, offset)

    async def list_async(
        self, prefix: str | None = None, *, offset: str | None = None
    ) -> AsyncIterator[Sequence[dict[str, Any]]]:
        """Do what `list` does, in any event loop."""
        with _named():
            found = await self.fs._find(self._folder(prefix), detail=True)
        for page in self._pages(found, prefix, offset):
            yield page

    def _pages(
        self, found: dict[str, dict[str, Any]], prefix: str | None, offset: str | None
    ) -> Iterator[Sequence[dict[str, Any]]]:
        # fsspec lists an object below itself, obspec does not.
        rows = [self._meta(info) for path, info in found.items() if path != self._folder(prefix)]
        rows = sorted((row for row in rows if offset is None or row["path"] > offset), key=_path_of)
        for start in range(0, len(rows), _ROWS):
            yield rows[start : start + _ROWS]

    def list_with_delimiter(self, prefix: str | None = None) -> dict[str, Any]:
        """Return `objects`, the metadata of those in a folder, and `common_prefixes`, the folders in it."""
        with _named(), contextlib.suppress(*ABSENT):
            return self._level(self.fs.ls(self._folder(prefix), detail=True), prefix)
        return {"common_prefixes": [], "objects": []}

    async def list_with_delimiter_async(self, prefix: str | None = None) -> dict[str, Any]:
        """Do what `list_with_delimiter` does, in any event loop."""
        with _named(), contextlib.suppress(*ABSENT):
            return self._level(await self.fs._ls(self._folder(prefix), detail=True), prefix)
        return {"common_prefixes": [], "objects": []}

    def _level(self, infos: Iterable[dict[str, Any]], prefix: str | None) -> dict[str, Any]:
        infos = [info for info in infos if info["name"] != self._folder(prefix)]
        return {
            "common_prefixes": sorted(
                self._short(each["name"]).rstrip("/") for each in infos if _is_folder(each)
            ),
            "objects": sorted((self._meta(each) for each in infos if not _is_folder(each)), key=_path_of),
        }

    def _full(self, path: str) -> str:
        full = self._folder(path)
        is_slashed = path.endswith("/") and not is_url(full)  # the name of an object in GCS or S3 may be
        return str(self.fs._strip_object(f"{full}/")) if is_slashed else full

    def _folder(self, prefix: str | None) -> str:
        return _join(self.root, prefix or "")

    def _short(self, name: str) -> str:
        return name.removeprefix(self.root).lstrip("/")

    def _meta(self, found: ObjectInfo | dict[str, Any]) -> dict[str, Any]:
        info = found.as_info() if isinstance(found, ObjectInfo) else found
        if _is_folder(info):
            raise is_a_folder(self.fs._objects.url(info["name"]))
        return {
            "path": self._short(info["name"]),
            "last_modified": modified_of(info) or modified_of({"mtime": info.get("created")}) or _UNKNOWN,
            "size": info["size"],
            "e_tag": next((info[name] for name in _E_TAGS if info.get(name)), None),
            "version": info.get("version") or info.get("generation"),
        }


class GetResult:
    """An object that `CachedStore.get` found; the bytes are read when they are asked for, all of this version."""

    def __init__(self, store: CachedStore, entry: Entry, options: dict[str, Any] | None) -> None:
        self._fs, self._entry = store.fs, entry
        self.attributes: dict[str, str] = {}
        self.meta = store._meta(entry.object)
        given = {name: value for name, value in (options or {}).items() if value is not None}
        wanted = given.pop("range", None)
        if given:
            raise NotImplementedError(f"CachedStore.get has no option {', '.join(given)}: only range")
        url = self._fs.unstrip_protocol(entry.path)
        self._start, self._stop = _bounds(wanted, self.meta["size"], url)

    @property
    def range(self) -> tuple[int, int]:
        """The bytes of the object that these are, `[start, stop)`."""
        want = clip(self._start, self._stop, self.meta["size"])
        return want.start, want.stop

    def buffer(self) -> bytes:
        """Return all bytes."""
        with _named():
            return self._fs._run(self._fs._reader.read_version(self._entry, self._start, self._stop))

    async def buffer_async(self) -> bytes:
        """Return all bytes."""
        with _named():
            return await self._fs._cat_entry(self._entry, self._start, self._stop)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        start, stop = self.range
        return ((at, min(at + _PIECE, stop)) for at in range(start, stop, _PIECE))

    def __iter__(self) -> Iterator[bytes]:
        for start, stop in self._pieces():
            with _named():
                yield self._fs._run(self._fs._reader.read_version(self._entry, start, stop))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start, stop in self._pieces():
            with _named():
                yield await self._fs._cat_entry(self._entry, start, stop)


def _join(folder: str, path: str) -> str:
    path = path.strip("/")
    return f"{folder}/{path}" if folder and path else folder or path


def _bounds(wanted: Any, size: int | None, url: str) -> tuple[int | None, int | None]:
    """Return start and stop of what a range of obspec selects in an object of `size` bytes; None: all of it.

    Raises ValueError for a range without bytes. Only a suffix may have none.
    """
    if wanted is None:
        return None, None
    numbers = _numbers(wanted, url)
    if size is None:
        raise ValueError(f"{url}: it has no known size, so get it without a range")
    if min(numbers) < 0:
        raise ValueError(f"{url}: the range {wanted!r} has a negative number")
    if "suffix" in wanted:
        return max(0, size - numbers[0]), size
    start, stop = numbers if "offset" not in wanted else (numbers[0], size)
    if start >= min(stop, size):
        raise _without_bytes(url, start)
    return start, stop


def _numbers(wanted: Any, url: str) -> list[int]:
    """Return the numbers in a range of obspec. Raises ValueError for any other form."""
    if isinstance(wanted, dict):
        is_range, values = [*wanted] in (["offset"], ["suffix"]), [*wanted.values()]
    else:
        is_range, values = isinstance(wanted, (tuple, list)) and len(wanted) == 2, wanted
    with contextlib.suppress(TypeError):  # a value that is no integer
        if is_range:
            return [operator.index(each) for each in values]
    raise ValueError(
        f"{url}: the option range is {wanted!r}; it must be (start, end), {{'offset': n}} or {{'suffix': n}}, of integers"
    )


def _without_bytes(url: str, start: int) -> ValueError:
    return ValueError(
        f"{url}: no bytes in a range from {start}: it is empty, or begins after the end of the object"
    )


def _span(start: int, end: int | None, length: int | None) -> tuple[int, int]:
    """Return start and stop of a range as Python ints."""
    if (end is None) == (length is None) or start < 0:
        raise ValueError("a range has a start of at least 0, and either an end or a length")
    stop = end if end is not None else start + length  # type: ignore[operator]
    return operator.index(start), operator.index(stop)


def _spans(
    starts: Sequence[int], ends: Sequence[int] | None, lengths: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return the starts and the stops of ranges."""
    n: list[None] = [None] * len(starts)
    for name, given in (("ends", ends), ("lengths", lengths)):
        if given is not None and len(given) != len(starts):
            raise ValueError(f"there are {len(starts)} starts, but {len(given)} {name}")
    # Not `or`: the sequences may be arrays.
    pairs = zip(starts, n if ends is None else ends, n if lengths is None else lengths, strict=True)
    spans = [_span(*each) for each in pairs]
    return [start for start, _ in spans], [stop for _, stop in spans]


def _is_folder(info: dict[str, Any]) -> bool:
    return bool(info["type"] == "directory")


def _path_of(row: dict[str, Any]) -> str:
    return str(row["path"])
