"""`DriveFileSystem`: Google Drive as an fsspec filesystem, `drive://`, uncached, with ranged reads."""

from __future__ import annotations

import asyncio
import io
import os
import weakref
from pathlib import PurePosixPath
from typing import Any, ClassVar, Self

from fsspec.asyn import sync, sync_wrapper
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import stringify_path

from cachedfs.common.atomic_files import filled
from cachedfs.common.event_loop import side_by_side
from cachedfs.common.types import ANY_VERSION, AnyVersion, ObjectInfo, Range
from cachedfs.common.urls import is_pattern
from cachedfs.config import FSSPEC_KEYWORDS
from cachedfs.errors import ObjectChanged, ObjectExists
from cachedfs.origins.base_filesystem import BaseFileSystem, begins_with
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import key_of
from cachedfs.origins.drive.drive_path import place_of, plain_path
from cachedfs.origins.drive.options import DriveOptions, refuse_live
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.drive.read import must_have_bytes
from cachedfs.origins.spooled_file import SpooledFile, kept_locally, new_spool
from cachedfs.origins.upload import UploadContent

_INHERITED: list[DriveOrigin] = []  # of a parent process: what is closed here would be closed there


class DriveFileSystem(BaseFileSystem):
    """Google Drive: `drive://My Drive/a/b`, `drive://shared:DRIVE/a`, `drive://Shared with me/a`, `drive://id:ID/a`.

        fs = fsspec.filesystem("drive", token="google_default")
        fs.ls("My Drive")

    `account` is the name of a sign-in that `cachedfs login drive` saved. The other sign-in options have PyDrive2's
    names. `google_auth` is an authenticated GoogleAuth. `client_id`, `client_secret` and `profile` name an OAuth client
    whose sign-in PyDrive2 saved. `client_json` or `client_json_file_path` are saved credentials, or with
    `use_service_account` the key of a service account, which acts for `client_user_email`. Instead of these, give
    `credentials` (a google-auth object) or `token` ("google_default", "anon", a JSON file, its content, or an access
    token). Without any, the default saved account is used, or else google-auth's default credentials, such as Colab's
    after `google.colab.auth.authenticate_user()`.

    `endpoint_url` is another server than https://www.googleapis.com. `trash_only` (default True) moves removed items to
    the trash. `acknowledge_abuse` (default False) reads files that Google takes for malware. `export` is the type that
    Google documents are read as: {"document": "docx", "spreadsheet": "csv"}, or one type for all. Without it they
    cannot be read. `daily_limit` is a share of Google's daily quota, at which speculative requests stop, or all of them with
    `daily_limit_stops="everything"`.

    Of several items with the same name, the last modified one counts. Shortcuts are followed. A slash in a name is
    shown as "／".
    """

    protocol: ClassVar[str] = "drive"
    root_marker = ""

    def __init__(self, **options: Any) -> None:
        if self._cached:
            return  # fsspec gave an instance that exists already
        own = {name: value for name, value in options.items() if name in FSSPEC_KEYWORDS}
        super().__init__(**own)
        self._options = {name: value for name, value in options.items() if name not in FSSPEC_KEYWORDS}
        DriveOptions.of(self._options)  # what is wrong is said here, and not at the first read
        self._origin: DriveOrigin | None = None

    @classmethod
    def over(cls, origin: DriveOrigin) -> Self:
        """Return a filesystem over the account of an existing origin, on its event loop."""
        made = cls(**origin.options, loop=origin.account.loop, skip_instance_cache=True)
        made._origin = origin
        return made

    @property
    def origin(self) -> DriveOrigin:
        """The origin behind this filesystem; it signs in at the first request."""
        if self._origin is None:
            made = DriveOrigin(self._options, identity="drive", loop=self._loop, on_request=lambda: None)
            weakref.finalize(self, _close, self._loop, made, os.getpid())
            self._origin = made
        return self._origin

    # Names
    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return plain_path(stringify_path(path))

    def unstrip_protocol(self, name: Any) -> str:
        """Return the URL of a path, in its canonical form."""
        return f"drive://{self._strip_protocol(name)}"

    @property
    def fsid(self) -> str:
        """Name of the service, not of the account."""
        return "drive"

    # Reading
    async def _info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        return (await self.origin.lookup(self._strip_protocol(path))).as_info()

    async def _ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        here = await self.origin.lookup(path)
        found = [here] if here.kind == "file" else [info async for info in self.origin.list(path, here)]
        found.sort(key=lambda info: info.path)
        return [info.as_info() for info in found] if detail else [info.path for info in found]

    async def _find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        path, prefix = self._strip_protocol(path), kwargs.pop("prefix", None) or ""
        if maxdepth is not None:
            near = await self._find_near(path, prefix, maxdepth, withdirs, **kwargs)
            return near if detail else list(near)
        try:
            here = await self.origin.lookup(path)
        except FileNotFoundError:
            return {} if detail else []
        found = {info.path: info async for info in self.origin.list(path, here, deep=True)}
        if path and (here.kind == "file" or withdirs):
            found[path] = here
        wanted = {
            name: found[name].as_info()
            for name in sorted(found)
            if (withdirs or found[name].kind == "file") and begins_with(name, path, prefix)
        }
        return wanted if detail else list(wanted)

    async def _cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        try:
            return await self._part(await self.origin.lookup(path), start, end)
        except ObjectChanged:  # nobody has seen a byte: the newer version is as good
            return await self._part(await self.origin.lookup(path), start, end)

    async def _part(self, info: ObjectInfo, start: int | None, end: int | None) -> bytes:
        """Return the bytes `[start:end]` of a version, as Python slices them."""
        if info.size is None:  # an export has a size when it is here
            return (await self._bytes(info, None))[start:end]
        first, last, _ = slice(start, end).indices(info.size)
        return await self._bytes(info, Range(first, max(first, last)))

    async def _bytes(self, info: ObjectInfo, want: Range | None) -> bytes:
        async with self.origin.read(info.path, want, info) as reply:
            return b"".join([piece async for piece in reply.body])

    async def _get_one(self, rpath: Any, lpath: Any, callback: Any) -> None:
        info = await self.origin.lookup(self._strip_protocol(rpath))
        if info.kind == "directory":
            os.makedirs(lpath, exist_ok=True)
            return
        await filled(lpath, lambda file: self._copy_out(info, file, callback))

    async def _copy_out(self, info: ObjectInfo, file: Any, callback: Any) -> None:
        callback.set_size(info.size)
        async with self.origin.read(info.path, None, info) as reply:
            async for piece in reply.body:
                await asyncio.to_thread(file.write, piece)
                callback.relative_update(len(piece))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> DriveFile | SpooledFile:
        place_of(path)  # what is wrong with it is said here, and not when a written file is closed
        if mode in ("rb", "r"):
            kwargs.pop("size", None)  # of a handle that travelled: the file may have another by now
            info, whole = sync(self.loop, self._readable, path)
            return DriveFile(
                self, path, info, whole, block_size=block_size, cache_options=cache_options, **kwargs
            )
        if mode not in ("wb", "xb", "ab"):
            raise ValueError(f"drive://{path}: mode {mode!r} is none of rb, wb, xb and ab")
        if mode == "xb" and self.exists(path):
            raise ObjectExists(f"drive://{path}: exists already; mode 'w' would replace it")
        spool, replaces = new_spool(), None if mode == "xb" else ANY_VERSION
        try:
            if mode == "ab":
                replaces = sync(self.loop, self._begin_append, path, spool)
        except BaseException:  # an interrupt too: nobody else knows of the spool
            spool.close()
            raise

        def send(file: Any) -> None:
            try:
                sync(self.loop, self.origin.upload, path, file, replaces=replaces, mtime_ns=None)
            except (ObjectChanged, ObjectExists) as error:
                if mode != "ab":
                    raise
                raise ObjectChanged(
                    f"{api.url_of(path)}: the file changed while it was being appended to; it is left as it is now: open it "
                    "again"
                ) from error

        return SpooledFile(api.url_of(path), mode, send, spool, autocommit=autocommit)

    async def _readable(self, path: str) -> tuple[ObjectInfo, bytes | None]:
        """Return the version that a new file reads, and for a Google document its export; raise if it has no bytes."""
        info = await self.origin.lookup(path)
        must_have_bytes(info, self.origin.account.options.export)
        return info, await self._bytes(info, None) if info.size is None else None

    async def _begin_append(self, path: str, spool: Any) -> ObjectInfo | AnyVersion | None:
        """Copy the file's present content into `spool`; return the version to replace, as `upload` takes it."""
        try:
            info = await self.origin.lookup(path)
        except FileNotFoundError:
            return None
        must_have_bytes(info)
        with kept_locally(api.url_of(path)):
            await self._copy_out(info, spool, DEFAULT_CALLBACK)
        return ANY_VERSION if info.fingerprint is None else info

    # Changing
    async def _pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        await self._send(self._strip_protocol(path), UploadContent(io.BytesIO(value)), mode)

    async def _send(self, path: str, content: UploadContent, mode: str) -> None:
        await self.origin.writer.write(path, content, replaces=None if mode == "create" else ANY_VERSION)

    async def _put_file(
        self, lpath: Any, rpath: Any, mode: str = "overwrite", callback: Any = DEFAULT_CALLBACK, **kwargs: Any
    ) -> None:
        path = self._strip_protocol(rpath)
        if await asyncio.to_thread(os.path.isdir, lpath):
            await self.origin.writer.make_folder(path, exist_ok=True)
            return
        with await asyncio.to_thread(open, lpath, "rb") as file:
            content = UploadContent(file, callback.absolute_update)
            callback.set_size(content.size)
            await self._send(path, content, mode)

    async def _mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        await self.origin.writer.make_folder(
            self._strip_protocol(path), exist_ok=False, parents=create_parents
        )

    async def _makedirs(self, path: Any, exist_ok: bool = False) -> None:
        await self.origin.writer.make_folder(self._strip_protocol(path), exist_ok=exist_ok)

    async def _rm_file(self, path: Any, **kwargs: Any) -> None:
        await self.origin.writer.remove(self._strip_protocol(path))

    async def _rm(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Remove files, or with `recursive` folders with all their contents; one request per named item."""
        if recursive and maxdepth is not None:
            await super()._rm(path, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        paths = await self._expand_path(path)
        if recursive:  # what is below another goes with it
            given = set(paths)
            paths = [each for each in paths if given.isdisjoint(map(str, PurePosixPath(each).parents))]
        await side_by_side(self.origin.writer.remove(each, folders=recursive) for each in paths)

    async def _rmdir(self, path: Any) -> None:
        """Remove an empty folder; raise OSError (ENOTEMPTY) if it is not empty."""
        await self.origin.writer.remove_empty(self._strip_protocol(path))

    async def _mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        await self.origin.writer.move(self._strip_protocol(path1), self._strip_protocol(path2))

    async def _cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        await self.origin.writer.copy(self._strip_protocol(path1), self._strip_protocol(path2))

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Move a file or folder. A single one is moved on the server and keeps its id."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        single = not isinstance(source, list) and maxdepth is None
        if not single or (is_pattern(source) and not self.exists(source)):
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        if stringify_path(path2).endswith("/"):
            target = f"{target}/{source.rpartition('/')[2]}"
        if source != target:
            sync(self.loop, self.origin.writer.move, source, target)

    # What Drive says of a file
    async def _created(self, path: Any) -> Any:
        """Return when the file was created, by Drive's clock."""
        return (await self._info(path)).get("created")

    async def _modified(self, path: Any) -> Any:
        """Return when the file was last written, by Drive's clock."""
        return (await self._info(path)).get("modified")

    async def _ukey(self, path: Any) -> str | None:
        """Return the fingerprint of a file: a text that changes whenever its bytes may have changed."""
        return (await self.origin.lookup(self._strip_protocol(path))).fingerprint

    async def _identity(self) -> str:
        """Return the way of signing in, and the account as far as the credentials name it, without secrets."""
        return (await self.origin.account.signed_in()).name

    async def _about(self) -> dict[str, Any]:
        """Return what Drive reports about the account (`user`, `storageQuota`), and the `scopes` of its tokens.

        `scopes` is None if they are unknown.
        """
        account = self.origin.account
        found = await account.about(api.ABOUT_FIELDS)
        return {**found, "scopes": (await account.clients()).auth.scopes()}

    async def _capabilities(self, path: Any) -> dict[str, bool]:
        """Return what the account may do with a file or folder: `canEdit`, `canAddChildren`, `canDownload`, ...

        The values are booleans, under Drive's own names.
        """
        info, account = await self.origin.lookup(self._strip_protocol(path)), self.origin.account
        params = {"fields": "kind,id,name,mimeType,capabilities", **api.ANY_DRIVE}
        request = account.request(
            ("files", info.id), info.path, "looking up permissions", params=params, headers=key_of(info)
        )
        item = await account.call(request)
        return dict(item.get("capabilities") or {})

    # fsspec makes only its own methods synchronous.
    rmdir = sync_wrapper(_rmdir)
    created = sync_wrapper(_created)
    modified = sync_wrapper(_modified)
    ukey = checksum = sync_wrapper(_ukey)
    identity = sync_wrapper(_identity)
    about = sync_wrapper(_about)
    capabilities = sync_wrapper(_capabilities)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values; raise TypeError for live objects among them."""
        refuse_live(self._options)
        return super().to_dict(include_password=include_password)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        refuse_live(self._options)
        return super().__reduce__()


class DriveFile(AbstractBufferedFile):
    """A file of Drive open for reading, in the version it had when it was opened."""

    def __init__(
        self, fs: DriveFileSystem, path: str, info: ObjectInfo, whole: bytes | None, **options: Any
    ) -> None:
        """`whole` is the export of a Google document."""
        self._info, self._whole, self._details = info, whole, info.as_info()
        super().__init__(fs, path, size=info.size if whole is None else len(whole), **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._whole is not None:
            return self._whole[start:end]
        return sync(self.fs.loop, self.fs._part, self._info, start, end)  # type: ignore[no-any-return]


def _close(loop: asyncio.AbstractEventLoop | None, origin: DriveOrigin, pid: int) -> None:
    """Close the connections of a filesystem that is no longer used, unless they belong to a parent process."""
    if os.getpid() != pid:
        _INHERITED.append(origin)
    elif (clients := origin.account.connected.take()) is not None:
        from fsspec.implementations.http import HTTPFileSystem  # which imports aiohttp, as the clients did

        HTTPFileSystem.close_session(loop, clients.session)
