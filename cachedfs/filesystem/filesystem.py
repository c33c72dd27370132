"""The fsspec filesystem classes.

They map paths, list folders, and connect synchronous and asynchronous methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from fsspec.asyn import mirror_sync_methods
from fsspec.config import conf
from fsspec.core import has_magic
from fsspec.spec import _Cached

from cachedfs.common.optional_imports import importing
from cachedfs.common.text import shown
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import ORIGINS, is_pattern, is_url, jsonable, target_of
from cachedfs.config import FSSPEC_KEYWORDS, Config
from cachedfs.core.objects import Objects
from cachedfs.errors import ABSENT
from cachedfs.filesystem.cache_api import AnyPath, CacheMethods
from cachedfs.filesystem.read_methods import ObjectName, ReadMethods
from cachedfs.filesystem.write import WriteMethods
from cachedfs.origins.base_filesystem import begins_with
from cachedfs.origins.drive_links import is_drive_link
from cachedfs.origins.registry import strip, strip_object

if TYPE_CHECKING:
    from cachedfs.core.reader import Reader

if sys.platform == "win32":
    raise ImportError(
        "cachedfs needs Linux or macOS: its cache relies on POSIX file locks; on Windows use WSL"
    )

_NO_LOOP = object()  # keeps fsspec from starting its own event loop thread; ours starts at the first miss


class _DriveLinks(_Cached):
    """Metaclass that makes Google Drive the target of `cachedfs::https://drive.google.com/...`.

    It does so before fsspec looks for an existing instance, because `fo` (the link) is no part of what it looks for.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_drive_link(str(kwargs.get("fo"))):
            kwargs["target_protocol"] = "drive"
        return super().__call__(*args, **kwargs)


class CachedFileSystem(ReadMethods, CacheMethods, WriteMethods, metaclass=_DriveLinks):
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
        target_protocol, target_options, options = target_of(
            fo, target_protocol or ORIGINS.get(self.protocol), target_options, options
        )
        own["loop"] = _NO_LOOP
        super().__init__(**own)
        self._mirror_all()
        self.target_protocol = target_protocol
        self.target_options = target_options
        self.config = Config.resolve(options, defaults=conf.get("cachedfs"), protocol=target_protocol)
        self._objects = Objects(target_protocol, target_options, self.config, self.unstrip_protocol)
        self._name_of = functools.lru_cache(4096)(
            functools.partial(strip_object, self.protocol, target_protocol)
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
        return strip_object(cls.protocol, ORIGINS.get(cls.protocol), path)

    def _strip(self, path: Any) -> Any:
        if isinstance(path, list):
            return [strip(self.protocol, self.target_protocol, p) for p in path]
        return strip(self.protocol, self.target_protocol, path)

    def _strip_unless_named(self, path: Any) -> Any:
        return path if isinstance(path, ObjectName) else self._strip(path)

    def _strip_object(self, path: Any) -> Any:
        """Return the target's path of an object, whose name may end in a slash; a folder's has none: `_strip`."""
        if type(path) is str:
            # What is known in memory is stripped already: the usual case with more names than `_name_of` keeps.
            return path if path in self._objects.entries else self._name_of(path)
        if isinstance(path, list):
            return [self._strip_object(each) for each in path]
        return strip_object(self.protocol, self.target_protocol, path)

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL that opens `name`, such as `cachedfs::gs://bucket/key`."""
        name = self._strip_object(name)
        # A name that is a whole URL needs no protocol in front.
        if is_url(name):
            return f"cachedfs::{name}"
        prefix = self.protocol if self.protocol in ORIGINS else f"cachedfs::{self.target_protocol}"
        return f"{prefix}://{name}"

    @property
    def origin_fs(self) -> Any:
        """The target filesystem itself, created at first use: for uncached reads and methods only it has.

        The cache treats a write through it like a write from another machine. Raises ImportError where the target's
        package is not installed.
        """
        engine = self._objects.engine
        return engine.run(self._objects.origin("").filesystem())

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

    # The cache. Methods that fsspec does not have are in `cache_api`.

    def invalidate_cache(self, path: Any = None) -> None:
        """Expire the metadata at and below `path`, or all metadata of this origin; cached blocks stay.

        The next use in any process of the machine asks the origin.
        """
        below = "" if path is None else self._strip(path)
        self._objects.engine.cache.metadata.changed(self._objects.identity, [below], tree=True)
        super().invalidate_cache(path)

    # Blocking methods.

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


class CachedDriveFileSystem(CachedFileSystem):
    """Google Drive through the cache, as one protocol: `cdrive://My Drive/key`.

    For code that cannot handle URLs with `::`. Options of `DriveFileSystem` go in `drive={...}`.
    """

    protocol: ClassVar[str] = "cdrive"
