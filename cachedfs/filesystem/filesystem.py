"""The fsspec filesystem classes.

They map paths, and connect synchronous and asynchronous methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from fsspec.asyn import mirror_sync_methods
from fsspec.config import conf
from fsspec.core import has_magic
from fsspec.spec import _Cached

from cachedfs.common.atomic_files import filled
from cachedfs.common.drive_links import is_drive_link
from cachedfs.common.optional_imports import importing
from cachedfs.common.text import shown
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import ORIGINS, is_pattern, is_url, jsonable, object_name, strip, target_of
from cachedfs.config import FSSPEC_KEYWORDS, Config
from cachedfs.core.objects import Objects
from cachedfs.errors import ABSENT, ChecksumMismatch, ObjectChanged, ObjectExists
from cachedfs.filesystem.cache_api import WINDOW, AnyPath, CacheMethods
from cachedfs.filesystem.move_methods import MoveMethods
from cachedfs.origins.base_filesystem import begins_with

if TYPE_CHECKING:
    from cachedfs.cache.index.metadata_records import ListingRecord
    from cachedfs.core.download import Download
    from cachedfs.core.objects import Entry
    from cachedfs.core.reader import Reader
    from cachedfs.filesystem.file import CachedFile
    from cachedfs.filesystem.write_file import WrittenFile

if sys.platform == "win32":
    raise ImportError(
        "cachedfs needs Linux or macOS: its cache relies on POSIX file locks; on Windows use WSL"
    )

T = TypeVar("T")
_NO_LOOP = object()  # keeps fsspec from starting its own event loop thread; ours starts at the first miss


class _ObjectName(str):
    """The path of an object, from which `_strip_protocol` must not remove a slash at the end."""

    __slots__ = ()


class _DriveLinks(_Cached):
    """Metaclass that makes Google Drive the target of `cachedfs::https://drive.google.com/...`.

    It does so before fsspec looks for an existing instance, because `fo` (the link) is no part of what it looks for.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_drive_link(str(kwargs.get("fo"))):
            kwargs["target_protocol"] = "drive"
        return super().__call__(*args, **kwargs)


@functools.cache
def _file_class() -> type[CachedFile]:
    with importing():
        from cachedfs.filesystem.file import CachedFile
    return CachedFile


class CachedFileSystem(CacheMethods, MoveMethods, metaclass=_DriveLinks):
    """An fsspec filesystem that reads any other one through a persistent cache on local disk.

    All processes of the machine share the cache. Open `cachedfs::gs://bucket/key` as a URL, or create the filesystem:

        fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs={"token": "anon"})
        data = fs.cat_file("bucket/key")

    The options are those of `cachedfs.config.Config`. Options of the target filesystem go in `target_options`, or in a
    dictionary named like its protocol, such as `gs={"token": "anon"}`. Paths are the target's, with or without `gs://`
    or `cachedfs::gs://` in front.

    Creating a filesystem is cheap: no thread, no connection and no import of the target before the first fetch. Raises
    ValueError for an unknown option (the message names the nearest one), for an invalid value and for an unknown
    protocol.

    Methods that read data or metadata raise ObjectNotFound, IsAFolder, AccessDenied, QuotaExceeded or
    OriginUnavailable, and ObjectChanged where one version can no longer be read.
    """

    protocol: ClassVar[str] = "cachedfs"
    mirror_sync_methods: ClassVar[bool] = False  # `_mirror_all` does this
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if self._cached:
            return  # fsspec returned an existing instance
        # Some callers leave the options of each part of a chained URL in a dictionary, ours too.
        for name in ("cachedfs", self.protocol):
            if isinstance(options.get(name), Mapping):
                options = {**options.pop(name), **options}
        own = {name: value for name, value in options.items() if name in FSSPEC_KEYWORDS}
        options = {name: value for name, value in options.items() if name not in FSSPEC_KEYWORDS}
        target_protocol, target_options, options = target_of(fo, target_protocol, target_options, options)
        own["loop"] = _NO_LOOP
        super().__init__(**own)
        self._mirror_all()
        self.target_protocol = target_protocol
        self.target_options = target_options
        self.config = Config.resolve(options, defaults=conf.get("cachedfs"), protocol=target_protocol)
        self._objects = Objects(target_protocol, target_options, self.config, self.unstrip_protocol)
        self._name_of = functools.lru_cache(4096)(
            functools.partial(object_name, self.protocol, target_protocol)
        )
        if self.asynchronous and target_protocol == "drive":
            self._find_identity_first()
        # An instance knows the target's rules for bare paths; the class knows only URLs with a protocol.
        self._strip_protocol = self._strip_unless_named  # type: ignore[method-assign]

    @functools.cached_property
    def _reader(self) -> Reader:  # type: ignore[override]
        with importing():  # lazily: many programs create filesystems that they do not read
            from cachedfs.core.reader import Reader
        reader: Reader = self.__dict__.setdefault("_reader", Reader(self._objects))
        return reader  # of the first thread, if there are several

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the target and `stats`; sends no request."""
        stats = self.stats()
        title = f"{type(self).__name__} over {self.target_protocol}://"
        return shown(title, stats.cannot_store or "", stats.rows())

    # Names.

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of this process's engine."""
        return self._objects.engine.loop

    @property
    def fsid(self) -> str:
        """Name of the origin and account: instances with the same name share cached blocks."""
        return f"cachedfs-{self._objects.identity}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        # As in gcsfs: a slash at the end may be part of the name of an object.
        return object_name(cls.protocol, ORIGINS.get(cls.protocol), path)

    def _strip(self, path: Any) -> Any:
        if isinstance(path, list):
            return [strip(self.protocol, self.target_protocol, p) for p in path]
        return strip(self.protocol, self.target_protocol, path)

    def _strip_unless_named(self, path: Any) -> Any:
        return path if isinstance(path, _ObjectName) else self._strip(path)

    def _strip_object(self, path: Any) -> Any:
        """Return the target's path of an object, whose name may end in a slash; a folder's has none: `_strip`."""
        if type(path) is str:
            return self._name_of(path)
        if isinstance(path, list):
            return [self._strip_object(each) for each in path]
        return object_name(self.protocol, self.target_protocol, path)

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL that opens `name`, such as `cachedfs::gs://bucket/key`."""
        name = self._strip_object(name)
        # A name that is a whole URL needs no protocol in front.
        return f"cachedfs::{name}" if is_url(name) else f"{self._url_prefix()}{name}"

    def _url_prefix(self) -> str:
        return f"cachedfs::{self.target_protocol}://"

    @property
    def origin_fs(self) -> Any:
        """The target filesystem itself, created at first use: for uncached reads and methods only it has.

        The cache treats a write through it like a write from another machine. Raises ImportError where the target's
        package is not installed.
        """
        engine = self._objects.engine
        return engine.run(self._objects.origin("").filesystem())

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *args: Any, **kwargs: Any) -> CachedFile: ...
    @overload
    def open(self, path: AnyPath, mode: str, *args: Any, **kwargs: Any) -> IO[Any]: ...
    def open(self, path: AnyPath, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        """Open an object for reading (`rb`, `r`) or writing (`wb`, `xb`), as fsspec does."""
        return super().open(_ObjectName(self._strip_object(path)), mode, *args, **kwargs)

    if TYPE_CHECKING:  # fsspec has no types: these are for type checkers

        @overload
        def ls(self, path: AnyPath, detail: Literal[False], **kwargs: Any) -> list[str]: ...
        @overload
        def ls(self, path: AnyPath, detail: Literal[True] = True, **kwargs: Any) -> list[dict[str, Any]]: ...
        def ls(self, path: AnyPath, detail: bool = True, **kwargs: Any) -> list[Any]: ...
        @overload
        def find(
            self, path: AnyPath, *, detail: Literal[True], **kwargs: Any
        ) -> dict[str, dict[str, Any]]: ...
        @overload
        def find(self, path: AnyPath, *, detail: Literal[False] = False, **kwargs: Any) -> list[str]: ...
        def find(self, path: AnyPath, *, detail: bool = False, **kwargs: Any) -> Any: ...
        @overload
        def glob(
            self, path: AnyPath, *, detail: Literal[True], **kwargs: Any
        ) -> dict[str, dict[str, Any]]: ...
        @overload
        def glob(self, path: AnyPath, *, detail: Literal[False] = False, **kwargs: Any) -> list[str]: ...
        def glob(self, path: AnyPath, *, detail: bool = False, **kwargs: Any) -> Any: ...

    # Reading.

    def info(self, path: AnyPath, **kwargs: Any) -> dict[str, Any]:
        """Return the metadata of an object or folder.

        No request is sent while it is younger than `max_age`. The result is a dictionary: `name`; `size` in bytes, 0
        for a folder, None where the origin does not state it; `type`, "file" or "directory"; and the origin's own
        details, as JSON values and datetimes. For a GCS object known only from a read, one request gets the details
        that the read's headers lacked.
        """
        return self._described(path).as_info()

    async def _info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_object(path)
        entry = self._objects.existing(path, whole=True)
        if entry is not None:
            return entry.object.as_info()
        return (await self._hop(self._reader.lookups.describe(path))).as_info()

    def size(self, path: AnyPath) -> int | None:
        """Return the size in bytes: 0 for a folder, None where the origin does not state it."""
        size: int | None = self._object(path).as_info()["size"]
        return size

    async def _size(self, path: Any) -> int | None:
        size: int | None = (await self._object_at(path)).as_info()["size"]
        return size

    def exists(self, path: AnyPath, **kwargs: Any) -> bool:
        """Return whether an object or folder exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip(path)) is not None

    def isfile(self, path: AnyPath) -> bool:
        """Return whether an object exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip_object(path)) == "file"

    def isdir(self, path: AnyPath) -> bool:
        """Return whether a folder exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip(path)) == "directory"

    def _kind(self, path: str) -> str | None:
        try:
            return self._object(path).kind
        except ABSENT:
            return None

    def _exists_in_cache(self, path: str) -> bool:
        entry = self._objects.fresh(path)
        return entry is not None and entry.info is not None

    async def _isfile(self, path: Any) -> bool:
        return await self._kind_at(self._strip_object(path)) == "file"

    async def _kind_of(self, path: Any) -> str | None:
        return await self._kind_at(self._strip(path))

    async def _kind_at(self, path: str) -> str | None:
        try:
            return (await self._object_at(path)).kind
        except ABSENT:
            return None

    def cat_file(
        self, path: AnyPath, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return the bytes `[start:end]` of one version of an object.

        Offsets work as in a slice: None is the start or the end, negative offsets count from the end, and offsets past
        the end are clipped. If the object is replaced during the read, the read starts again; the third time it raises
        ObjectChanged.
        """
        name: str = self._strip_object(path)
        data = self._reader.cached(name, start, end)
        return data if data is not None else self._run(self._reader.read(name, start, end))

    async def _cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        path, reader = self._strip_object(path), self._reader
        try:
            data = reader.cached(path, start, end, nowait=True)
        except BlockingIOError:  # on disk but not in the page cache: do not block the caller's loop
            data = await asyncio.to_thread(reader.cached, path, start, end)
        return data if data is not None else await self._hop(reader.read(path, start, end))

    async def _cat(self, path: Any, recursive: bool = False, **kwargs: Any) -> Any:
        if isinstance(path, str) and not recursive:
            path = _ObjectName(self._strip_object(path))
        return await super()._cat(path, recursive, **kwargs)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """Return the bytes of one object, or a dictionary from path to bytes for several.

        `path` is one path, a list or a glob pattern; the keys of the dictionary are the target's paths. `recursive`
        includes all objects below. Cached objects are read at once, the others are fetched concurrently. `on_error` is
        "raise" for the first error, "omit" to leave out objects that cannot be read, or "return" to return errors in
        place of bytes. For a single object, "omit" raises the error too.
        """
        single = isinstance(path, str | os.PathLike)
        paths = [path] if single else list(path)
        names = list(dict.fromkeys(map(self._strip_object, paths)))
        if recursive or kwargs or any(is_pattern(name) and not self._exists_in_cache(name) for name in names):
            return self._run(self._cat(path, recursive=recursive, on_error=on_error, **kwargs))
        raises = on_error != "return" if single else on_error == "raise"
        datas = self._read_many([(name, None, None) for name in names], raises=raises)
        found = dict(zip(names, datas, strict=True))
        if single:
            return next(iter(found.values()))
        return {k: v for k, v in found.items() if on_error != "omit" or not isinstance(v, BaseException)}

    def cat_ranges(
        self,
        paths: Any,
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Return a list with the bytes `[start:end]` of each path.

        `starts` and `ends` are offsets as in `cat_file`, one for each path or one for all. Cached ranges are read at
        once, the others are fetched concurrently. An error takes the place of the bytes; `on_error="raise"` raises the
        first one instead. `max_gap` is accepted for fsspec and has no effect. Raises TypeError where `paths` is not a
        list or tuple: use `cat_file` for a single object.
        """
        if not isinstance(paths, list | tuple):  # a str would be taken for a list of its characters
            raise TypeError(
                f"paths of cat_ranges: {paths!r} is not a list or tuple; for one object, use cat_file"
            )
        names = {path: self._strip_object(path) for path in set(paths)}
        wanted = zip((names[path] for path in paths), _each(starts, paths), _each(ends, paths), strict=True)
        return self._read_many(list(wanted), raises=on_error != "return", **kwargs)

    def _read_many(
        self,
        wanted: list[tuple[str, int | None, int | None]],
        *,
        raises: bool,
        batch_size: int | None = None,
        **_: Any,
    ) -> list[Any]:
        """Return the bytes or the error of each `(path, start, stop)`; `raises`: raise the first error."""
        found = self._reader.read_many(wanted, batch_size or self.batch_size)
        for data in found if raises else ():
            if isinstance(data, BaseException):
                raise data
        return found

    async def _cat_ranges(
        self, paths: Any, starts: Any, ends: Any, max_gap: int | None = None, **kwargs: Any
    ) -> list[Any]:
        # `max_gap` would have no effect: ranges of one block are one request anyway.
        return await super()._cat_ranges(paths, _each(starts, paths), _each(ends, paths), **kwargs)  # type: ignore[no-any-return]

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        cache_type: Any = None,
        **kwargs: Any,
    ) -> CachedFile | WrittenFile:
        path = str(path)  # not an `_ObjectName`
        # Libraries pass block_size, cache_type and cache_options to speed up other filesystems; a read ignores them.
        if mode in ("rb", "r"):
            entry = self._objects.existing(path)
            download = None
            if entry is None or entry.object.kind == "directory":
                entry, download = self._run(self._reader.open(path))
            else:
                self._reader.opened(path)
            return _file_class()(self, path, self._reader, entry, download)
        if block_size is not None:
            kwargs["block_size"] = block_size
        if "x" in mode:
            self._must_be_new(path)
        with importing():
            from cachedfs.filesystem.write_file import WrittenFile
        return WrittenFile(self, path, mode, autocommit=autocommit, **kwargs)

    def _open_version(self, path: str, fingerprint: str | None) -> CachedFile:
        """Return an open file of exactly this version; raise ObjectChanged if the object has another one."""
        entry = self._objects.known(path)
        if entry is not None and entry.info is not None and entry.info.fingerprint == fingerprint is not None:
            self._reader.opened(path)
            return _file_class()(self, path, self._reader, entry, None)
        file: CachedFile = self.open(path)
        if file._object().fingerprint != fingerprint:
            file.close()
            raise ObjectChanged(f"{self.unstrip_protocol(path)}: it was replaced; open it again")
        return file

    async def _open_entry(
        self, path: str, start: int | None = None, stop: int | None = None
    ) -> tuple[Entry, Download | None]:
        """Return the version of an object whose bytes `[start:stop]` are read next, for `_cat_entry`.

        An unknown object is looked up by a request for these bytes: the download. Raises ObjectNotFound and IsAFolder.
        """
        entry = self._objects.existing(path)
        if entry is not None and entry.object.kind == "file":
            return entry, None
        with importing():
            from cachedfs.core.download import ALL
        return await self._hop(self._reader.open(path, start, stop, demand=ALL))

    async def _cat_entry(
        self, entry: Entry, start: int | None, stop: int | None, download: Download | None = None, **more: Any
    ) -> bytes:
        """Return bytes of exactly the version of `entry`, as `Reader.collect` does; cached ones without its thread."""
        cached = functools.partial(self._reader.cached, entry.path, start, stop, of=entry)
        try:
            data = cached(nowait=True)
        except BlockingIOError:  # on disk but not in the page cache: do not block the caller's loop
            data = await asyncio.to_thread(cached)
        return (
            data
            if data is not None
            else await self._hop(self._reader.collect(entry, start, stop, download, **more))
        )

    def _must_be_new(self, path: str) -> None:
        """Raise ObjectExists if `path` exists at the origin now.

        An inner filesystem may notice that only at close.
        """
        self.invalidate_cache(path)
        if self._kind(path) is not None:
            raise ObjectExists(f"{self.unstrip_protocol(path)}: exists already; mode 'w' would replace it")

    async def _get_one(self, rpath: Any, lpath: Any, callback: Any) -> None:
        path = self._strip_object(rpath)
        info = await self._hop(self._reader.lookups.info(path))
        if info.kind == "directory" or (path.endswith("/") and os.fspath(lpath).endswith("/")):
            os.makedirs(lpath, exist_ok=True)  # a local folder has no bytes
            return
        await filled(lpath, lambda file: self._copy_out(path, file, callback))

    async def _copy_out(self, path: str, file: Any, callback: Any) -> None:
        begin = file.tell() if getattr(file, "seekable", bool)() else None
        from cachedfs.core.reader import TRIES

        for tries_left in reversed(range(TRIES)):
            entry = self._objects.existing(path) or (await self._hop(self._reader.open(path)))[0]
            size = entry.object.size
            callback.set_size(size)
            try:
                for start in range(0, size or 1, WINDOW):
                    stop = None if size is None else min(size, start + WINDOW)
                    data = await self._hop(self._reader.collect(entry, start, stop))
                    await asyncio.to_thread(file.write, data)
                    callback.relative_update(len(data))
                return
            except (ObjectChanged, ChecksumMismatch):
                if not tries_left or begin is None:
                    raise
                self._objects.expire(path)
                file.seek(begin)
                file.truncate()
                callback.absolute_update(0)

    # Listing.

    async def _ls(self, path: Any, detail: bool = True, refresh: bool = False, **kwargs: Any) -> list[Any]:
        path = self._strip(path)
        if refresh:
            self._objects.engine.cache.metadata.changed(self._objects.identity, [path])
        found = (await self._hop(self._reader.lookups.listings.get(path))).infos
        if not detail:
            return [info.path for info in found]
        if [info.path for info in found] == [path]:  # an object, maybe known only from a read's headers
            return [await self._info(path)]
        return [info.as_info() for info in found]

    def _listing(self, folder: str) -> ListingRecord:
        """Return the listing of a folder; `_is_current` tells how long it may be used."""
        return self._run(self._reader.lookups.listings.get(folder))

    def _is_current(self, folder: str, listing: ListingRecord) -> bool:
        return self._reader.lookups.listings.is_current(folder, listing)

    async def _find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        prefix, path = kwargs.pop("prefix", None) or "", self._strip(path)
        if kwargs.pop("refresh", False):
            self.invalidate_cache(path)
        if maxdepth is not None:
            if withdirs and path and self.config.lifetime_s:
                # fsspec first asks whether `path` is a folder: the listing tells.
                with contextlib.suppress(*ABSENT):
                    await self._hop(self._reader.lookups.listings.get(path))
            wanted = await self._find_near(path, prefix, maxdepth, withdirs, **kwargs)
            return wanted if detail else list(wanted)
        found = await self._hop(self._reader.lookups.listings.find(path))
        if not found:
            found = await self._itself(path, withdirs, detail)
        elif withdirs and path:
            found = [ObjectInfo(path, kind="directory", size=0), *found]
        wanted = {
            info.path: info.as_info()
            for info in found
            if (withdirs or info.kind == "file") and begins_with(info.path, path, prefix)
        }
        return wanted if detail else list(wanted)

    async def _glob(self, path: Any, maxdepth: int | None = None, **kwargs: Any) -> Any:
        name = self._strip(path)
        if not has_magic(name) or is_pattern(name):
            return await super()._glob(path, maxdepth=maxdepth, **kwargs)
        found = {name: await self._info(name)} if await self._exists(name) else {}
        return found if kwargs.get("detail") else list(found)

    async def _itself(self, path: str, withdirs: bool, detail: bool) -> list[ObjectInfo]:
        lookups = self._reader.lookups
        try:
            info = await self._hop(lookups.describe(path) if detail else lookups.info(path))
        except FileNotFoundError:
            return []
        return [info] if withdirs or info.kind == "file" else []

    # Metadata of one object.

    def ukey(self, path: AnyPath) -> str | None:
        """Return the fingerprint of an object: a text that changes whenever its bytes may have changed.

        None where the origin gives no way to tell versions apart.
        """
        return self._object(path).fingerprint

    def checksum(self, path: AnyPath) -> str | None:
        """Return the fingerprint, as `ukey` does."""
        return self.ukey(path)

    def created(self, path: AnyPath) -> Any:
        """Return when the object was created, by the origin's clock: a datetime with a time zone."""
        return self._time(path, "created", ("ctime", "created"))

    def modified(self, path: AnyPath) -> Any:
        """Return when the object was last written, by the origin's clock: a datetime with a time zone."""
        return self._time(path, "modified", ("mtime", "modified"))

    def _time(self, path: Any, method: str, names: tuple[str, ...]) -> Any:
        details = self._described(path).details
        for name in names:
            if hasattr(details.get(name), "isoformat"):
                return details[name]
        path = self._strip_object(path)
        return self._run(self._objects.origin(path).call(method, path))

    def _object(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path)
        return entry.object if entry is not None else self._run(self._reader.lookups.info(path))

    async def _object_at(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path)
        return entry.object if entry is not None else await self._hop(self._reader.lookups.info(path))

    def _described(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path, whole=True)
        return entry.object if entry is not None else self._run(self._reader.lookups.describe(path))

    def sign(self, path: Any, expiration: int = 100, **kwargs: Any) -> Any:
        """Return a signed URL that opens the object for `expiration` seconds without an account.

        Raises NotImplementedError at Google Drive, AccessDenied for credentials that cannot sign.
        """
        path = self._strip_object(path)
        return self._run(self._objects.origin(path).call("sign", path, expiration=expiration, **kwargs))

    # The cache. Methods that fsspec does not have are in `cache_api`.

    def invalidate_cache(self, path: Any = None) -> None:
        """Expire the metadata at and below `path`, or all metadata of this origin; cached blocks stay.

        The next use in any process of the machine asks the origin.
        """
        below = "" if path is None else self._strip(path)
        self._objects.engine.cache.metadata.changed(self._objects.identity, [below], tree=True)
        super().invalidate_cache(path)

    # Running coroutines on the engine's event loop.

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._objects.engine.run(coroutine)

    def _mirror_all(self) -> None:
        """Create the blocking versions of the coroutines, as fsspec does.

        Unlike in fsspec, an interrupt cancels the work.
        """
        mirror_sync_methods(self)
        for name, mirror in list(vars(self).items()):
            coroutine = getattr(mirror, "__wrapped__", None)
            if inspect.iscoroutinefunction(coroutine):
                setattr(self, name, self._mirror(coroutine, mirror))

    def _mirror(self, coroutine: Callable[..., Any], mirror: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(mirror)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout"):  # only fsspec's own wrapper has a timeout
                return mirror(*args, **kwargs)
            return self._run(coroutine(*args, **kwargs))

        return call

    def _find_identity_first(self) -> None:
        """Make the first coroutine find the account in a thread: Drive may have to be asked, in the caller's event loop."""

        def after_identity(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            async def call(*args: Any, **kwargs: Any) -> Any:
                await self._objects.find_identity()
                return await method(*args, **kwargs)

            return call

        for name, _ in inspect.getmembers(type(self), inspect.iscoroutinefunction):
            setattr(self, name, after_identity(getattr(self, name)))

    async def _hop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._objects.engine.await_on_loop(coroutine)

    def __reduce__(self) -> Any:
        if self.target_protocol == "drive":
            from cachedfs.origins.drive.options import refuse_live

            refuse_live(self.target_options)
        return super().__reduce__()

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return JSON values that create this filesystem again.

        `include_password=False` leaves out tokens, secrets and credentials. Raises TypeError for live credentials,
        which cannot be written as JSON; the message names what can be.
        """
        cls = type(self)
        options = jsonable(self.storage_options, "storage_options", include_password)
        return {
            "cls": f"{cls.__module__}:{cls.__name__}",
            "protocol": self.protocol,
            "args": jsonable(self.storage_args, "storage_args", include_password),
            **options,
        }


class CachedGCSFileSystem(CachedFileSystem):
    """Google Cloud Storage through the cache, as one protocol: `cgs://bucket/key`.

    For code that cannot handle URLs with `::`. Options of gcsfs go in `gs={...}`.
    """

    protocol: ClassVar[str] = "cgs"

    def __init__(self, **options: Any) -> None:
        options.setdefault("target_protocol", "gs")
        super().__init__(**options)

    def _url_prefix(self) -> str:
        return "cgs://"


class CachedDriveFileSystem(CachedFileSystem):
    """Google Drive through the cache, as one protocol: `cdrive://My Drive/key`.

    For code that cannot handle URLs with `::`. Options of `DriveFileSystem` go in `drive={...}`.
    """

    protocol: ClassVar[str] = "cdrive"

    def __init__(self, **options: Any) -> None:
        options.setdefault("target_protocol", "drive")
        super().__init__(**options)

    def _url_prefix(self) -> str:
        return "cdrive://"


def _each(value: Any, paths: Any) -> list[Any]:
    """Return one offset for each path, as Python ints: numpy's end at 64 bits, keys of blocks do not."""
    offsets = value if hasattr(value, "__iter__") else [value] * len(paths)
    return [None if offset is None else operator.index(offset) for offset in offsets]
