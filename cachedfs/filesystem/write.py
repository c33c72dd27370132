"""The methods of a cached filesystem that write.

A write goes to the origin at once. It moves the change counters of its paths, so every process of the machine drops its
metadata of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import math
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import stringify_path

from cachedfs.common.clock import clock
from cachedfs.common.optional_imports import importing
from cachedfs.common.types import AnyVersion, ObjectInfo
from cachedfs.common.urls import LOCAL_PROTOCOLS, SLASH_NAMES, before_magic, is_pattern, without_slash
from cachedfs.core import write_through
from cachedfs.core.objects import folder_of
from cachedfs.errors import ABSENT, CachedFSError, IsAFolder, ObjectNotFound
from cachedfs.filesystem.move import MovedObject, ObjectMove, Requests, StatedContent
from cachedfs.origins.base import HasStorageQuota, Uploader
from cachedfs.origins.base_filesystem import BaseFileSystem, LiteralNames

if TYPE_CHECKING:
    from cachedfs.core.reader import Reader

__all__ = ["WriteMethods"]

_ONE_CALL = 8 << 20  # bytes of a file that is sent in one call, and so is in memory
_QUOTA_S = 60.0  # for which a storage quota is used


class WriteMethods(BaseFileSystem):
    """Mixin with the methods of `CachedFileSystem` that write."""

    _reader: Reader

    async def _pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_object(path)
        if self._intrans or self._is_local:
            await self._write_by_open(path, mode, functools.partial(io.BytesIO, value), **kwargs)
            return
        options = kwargs if mode == "overwrite" else {"mode": mode, **kwargs}
        await self._write([path], "pipe_file", path, value, **options)

    @property
    def _is_local(self) -> bool:
        return self.target_protocol in LOCAL_PROTOCOLS

    async def _write_by_open(
        self, path: str, mode: str, opened: Callable[[], AbstractContextManager[IO[bytes]]], **kwargs: Any
    ) -> None:
        """Write data through `open`: it delays a write in a transaction, and replaces a local file only by a whole one."""

        def write() -> None:
            with opened() as data, self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
                shutil.copyfileobj(data, file)

        # Made first: making it takes a thread, and many writes at once may take them all.
        await self._hop(self._reader.objects.origin(path).filesystem())
        await asyncio.to_thread(write)

    async def _put_file(
        self, lpath: Any, rpath: Any, mode: str = "overwrite", callback: Any = DEFAULT_CALLBACK, **kwargs: Any
    ) -> None:
        path = self._strip_object(rpath)
        about = os.stat(lpath)  # a missing local file is a plain FileNotFoundError, not an ObjectNotFound
        is_directory = stat.S_ISDIR(about.st_mode)
        if (self._intrans and not is_directory) or (self._is_local and _is_other_file(lpath, path)):
            await self._write_by_open(path, mode, functools.partial(io.FileIO, lpath), **kwargs)
            callback.set_size(about.st_size)
            callback.relative_update(about.st_size)
            return
        options = kwargs if mode == "overwrite" else {"mode": mode, **kwargs}
        await self._write([path], "put_file", os.fspath(lpath), path, callback=callback, **options)

    def _send(
        self,
        path: Any,
        file: BinaryIO,
        *,
        replaces: ObjectInfo | AnyVersion | None,
        mtime_ns: int | None = None,
    ) -> ObjectInfo:
        """Make the bytes of an open local file, from its start to its end, the object at `path`; return its metadata.

        Nobody sees a part of it: after an error, the object is as before. `replaces` is the version that must be there:
        metadata from an earlier lookup, None for no object, or ANY_VERSION for whatever is there. Else this raises
        ObjectChanged, or ObjectExists for None. Google Cloud Storage compares the versions itself. At all others they
        are compared just before the upload. `mtime_ns` is a modification time that the object keeps, where it can.
        """
        info: ObjectInfo = self._run(self._send_async(path, file, replaces, mtime_ns))
        return info

    async def _send_async(
        self, path: Any, file: BinaryIO, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        path, objects = self._strip_object(path), self._reader.objects
        origin = objects.origin(path)
        info: ObjectInfo
        if isinstance(origin, Uploader):
            info = await self._hop(
                write_through.upload(objects, origin, path, file, replaces=replaces, mtime_ns=mtime_ns)
            )
            return info
        await self._hop(write_through.check(objects, path, replaces))
        size = await asyncio.to_thread(file.seek, 0, os.SEEK_END)
        await asyncio.to_thread(file.seek, 0)
        if size <= _ONE_CALL and not self._is_local:
            await self._write([path], "pipe_file", path, await asyncio.to_thread(file.read))
        else:
            # A transaction does not delay it: the caller wants the new version.
            opened = contextlib.nullcontext(file)
            await self._write_by_open(path, "overwrite", lambda: opened, autocommit=True)
        info = await self._hop(write_through.look_up(objects, path))
        return info

    def _free_space(self, path: Any) -> tuple[int, int] | None:
        """Return the limit and the free bytes of the account's storage quota; None without one, or if it is not known.

        Asks the origin at most once in 60 s, and raises no error.
        """
        top = self._strip_object(path).partition("/")[0]
        known: dict[str, tuple[float, tuple[int, int] | None]] = self.__dict__.setdefault("_quotas", {})
        asked_at, quota = known.get(top, (-math.inf, None))
        if not 0 <= clock.now() - asked_at < _QUOTA_S:
            quota = None
            with contextlib.suppress(Exception):  # whatever is wrong, a read or a write will say it
                origin = self._reader.objects.origin(path)
                if isinstance(origin, HasStorageQuota):
                    quota = self._run(origin.storage_quota(top))
            known[top] = clock.now(), quota
        return quota

    async def _rm_file(self, path: Any, **kwargs: Any) -> None:
        path = self._strip_object(path)
        await self._write([path], "rm_file", path, **kwargs)

    async def _rm(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        path = (self._strip if recursive else self._strip_object)(_one_or_list(path))
        paths = path if isinstance(path, list) else [path]
        if any(map(is_pattern, paths)):
            await self._rm_matches(paths, recursive, maxdepth)
        else:
            await self._write(paths, "rm", path, recursive=recursive, maxdepth=maxdepth, tree=recursive)

    async def _rm_matches(self, paths: list[str], recursive: bool, maxdepth: int | None) -> None:
        """Remove what paths and patterns name.

        Most inner filesystems would expand a name with wildcard characters again: such objects are removed one by one.
        """
        for path in paths:
            self._expire_listing(path, recursive)
        limited = recursive and maxdepth is not None
        found = await self._expand_path(paths, limited, maxdepth if limited else None)
        inner = await self._hop(self._reader.objects.origin(paths[0]).filesystem())
        folders = recursive and isinstance(inner, LiteralNames)
        names = [path for path in found if not limited and (folders or not is_pattern(path))]
        if names:
            await self._write(names, "rm", names, recursive=recursive, tree=recursive)
        if others := sorted({*found}.difference(names)):
            await self._remove(
                await self._expand_path(others, recursive and not limited, assume_literal=True)
            )

    def _expire_listing(self, path: str, recursive: bool) -> None:
        """Expire the listings that decide what is removed: an older one may be incomplete."""
        if is_pattern(path) and not self._exists_in_cache(path):
            self.invalidate_cache(before_magic(path))
        elif recursive:
            self.invalidate_cache(path)

    async def _copy(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        await super()._copy(path1, path2, recursive, maxdepth, tree=recursive, **kwargs)

    async def _cp_file(
        self,
        path1: Any,
        path2: Any,
        tree: bool = False,
        pairs: list[tuple[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy one object or folder, as fsspec does.

        `tree` means the copy is part of a recursive one, so missing folders are created. With `pairs`, add source and
        target to it instead of copying.
        """
        source, target = self._strip_object(path1), self._strip_object(path2)
        if pairs is not None:
            pairs.append((source, target))
            return
        try:
            await self._copy_object(source, target, **kwargs)
        except FileNotFoundError:
            if await self._isdir(source):
                # fsspec copies a folder by creating it.
                await self._makedirs(target, exist_ok=True)
            elif tree and (await self._hop(self._reader.lookups.ask(source))).info is not None:
                # A concurrent copy has not created its folder yet.
                await self._makedirs(folder_of(target), exist_ok=True)
                await self._copy_object(source, target, **kwargs)
            else:
                raise

    async def _copy_object(self, source: str, target: str, **kwargs: Any) -> None:
        if self._is_local and await asyncio.to_thread(_is_other_file, source, target):
            with importing():
                from cachedfs.origins.origin_errors import mapped
            with mapped(self._reader.objects.url(source), "reading it"):
                opened = functools.partial(io.FileIO, source)
                # A transaction delays no copy, as at other origins: a move removes the source right after it.
                await self._write_by_open(target, "overwrite", opened, autocommit=True)
        else:
            await self._write([target], "cp_file", source, target, **kwargs)

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Move an object, or with `recursive` a folder.

        If an object of several cannot be moved, the others are brought back, and the error names it. Where the inner
        filesystem renames folders itself, this calls its `mv`. Object stores are asked to move each object, or to copy
        it; then exactly what was copied is removed.
        """
        path1 = _one_or_list(path1)
        inner = type(self.origin_fs)
        copies = getattr(inner.mv, "__qualname__", "").startswith(("AbstractFileSystem.", "AsyncFileSystem."))
        single = not isinstance(path1, list) and maxdepth is None
        if single and recursive and self._is_flat and not is_pattern(self._strip(path1)):
            self._run(self._move_folder(self._strip(path1), path2, **kwargs))
            return
        if single and not recursive and self._strip_object(path1) != self._strip(path1):
            copies = copies or self.isfile(path1)  # most filesystems would take its name for a folder's
        if single and is_pattern(self._strip(path1)):  # most filesystems would expand an existing name, too
            copies = copies or not (issubclass(inner, LiteralNames) and self.exists(path1))
        if copies or not single:
            self._run(self._copy_and_remove(path1, path2, recursive, maxdepth))
            return
        source, target = self._strip(path1), self._strip(path2)
        into = "/" if stringify_path(path2).endswith("/") else ""
        self._run(
            self._write(
                [source, target], "mv", source, target + into, recursive=recursive, tree=True, **kwargs
            )
        )

    @property
    def _is_flat(self) -> bool:
        """True where folders are only the beginnings of names, so that a folder is moved object by object."""
        return self.target_protocol in SLASH_NAMES

    async def _move_folder(
        self, source: str, path2: Any, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        """Move all objects whose names begin with a folder's.

        The names are those of the inner filesystem: it also lists the empty objects that make folders.
        """
        origin, target = self._reader.objects.origin(source), self._strip(path2)
        found = await self._hop(origin.call("find", source, detail=True))
        if not found:
            raise ObjectNotFound(
                f"{self._reader.objects.url(source)}: no object or folder has this name, so nothing was moved"
            )
        kind = "directory" if stringify_path(path2).endswith("/") else await self._kind_of(target)
        base = f"{target}/{source.rpartition('/')[2]}" if kind == "directory" else target
        if base == source:
            return
        # Where there is nothing, nothing can be replaced.
        known = set() if kind is None else await self._hop(self._names_below(base))
        objects = [
            MovedObject(name, to, StatedContent.of(info.get("size"), info), to in known or to in found)
            for name, info in found.items()
            for to in [base + name[len(source) :]]
        ]
        if source not in found and "/" in source:  # an object may have the folder's name
            objects.append(MovedObject(source, base, had_target=kind is not None, is_optional=True))
        if any(each.target in found for each in objects):  # into itself: the deepest ones first
            objects.sort(key=lambda each: len(each.source), reverse=True)
            batch_size = 1
        inner = await self._hop(origin.filesystem())

        async def move(source: str, target: str) -> None:
            await self._write([source, target], "mv_file", source, target, **kwargs)

        async def copy(source: str, target: str) -> None:
            await self._write([target], "cp_file", source, target)

        requests = self._requests(copy, move if _moves_objects(inner) else None, batch_size)
        paths = [source, target]
        try:
            await ObjectMove(objects, requests).run()
        finally:
            self._reader.objects.engine.cache.metadata.changed(
                self._reader.objects.identity, paths, tree=True
            )

    async def _names_below(self, folder: str) -> set[str]:
        """Return the names of a path and of all objects below it, also of those that make folders."""
        listed = self._reader.objects.origin(folder).list(folder, deep=True)
        infos = []
        with contextlib.suppress(*ABSENT):
            infos = [info async for info in listed]
        return {folder, *(info.path if info.kind == "file" else f"{info.path}/" for info in infos)}

    def _requests(
        self,
        copy: Callable[[str, str], Awaitable[None]],
        move: Callable[[str, str], Awaitable[None]] | None = None,
        batch_size: int | None = None,
    ) -> Requests:
        async def gather(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
            await _run_coros_in_chunks(
                list(coroutines), batch_size=batch_size or self.batch_size, nofiles=True
            )

        return Requests(copy, self._rm_file, move, self._content_now, gather, self._reader.objects.url)

    async def _content_now(self, path: str) -> StatedContent | None:
        """Return the content of an object as the origin states it now; None if there is no object."""
        try:
            info = await self._hop(self._reader.objects.origin(path).lookup(path))
        except ABSENT:
            return None
        return StatedContent.of(info.size, info.details) if info.kind == "file" else None

    async def _copy_and_remove(self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None) -> None:
        """Move by copying, then remove exactly what was copied: other writers may add objects meanwhile."""
        began_at = clock.now()
        for source in path1 if isinstance(path1, list) else [path1]:
            self._expire_listing(self._strip(source), recursive)
        pairs: list[tuple[str, str]] = []
        await self._copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", pairs=pairs)
        if not pairs and not isinstance(path1, list):  # then fsspec skips folders without an error
            raise await self._nothing_moved(self._strip(path1), recursive)
        folders = {source: target for source, target in pairs if await self._was_dir(source, began_at)}
        objects = [
            MovedObject(
                source, target, self._content_known(source, began_at), not self._is_absent(target, path2)
            )
            for source, target in pairs
            if source not in folders
        ]
        new = [target for source, target in folders.items() if self._is_absent(target, path2)]

        async def copy(source: str, target: str) -> None:
            await self._cp_file(source, target, tree=recursive)

        requests = self._requests(copy)
        try:
            await requests.gather([copy(source, target) for source, target in folders.items()])
            await ObjectMove(objects, requests).run()
        except Exception:  # of any kind, and raised again
            with contextlib.suppress(OSError):  # the first error matters
                await self._remove_folders(new)
            raise
        await self._remove_folders(folders.keys() - folders.values())  # keep what was moved onto itself

    def _content_known(self, path: str, since: float) -> StatedContent | None:
        """Return the content of an object from metadata checked after `since`."""
        entry = self._reader.objects.known(path)
        if entry is None or entry.info is None or entry.asked_at < since:
            return None
        return StatedContent.of(entry.info.size, entry.info.details)

    def _is_absent(self, path: str, above: Any) -> bool:
        """Return whether nothing has this name, from metadata: of the path itself, or of a path that it is below."""
        paths = [path]
        if isinstance(above, str) and (path == (top := self._strip(above)) or path.startswith(f"{top}/")):
            paths.append(top)
        entries = [self._reader.objects.known(each) for each in paths]
        return any(entry is not None and entry.info is None for entry in entries)

    async def _remove(self, paths: Collection[str]) -> None:
        """Remove these objects, one request each, and then the folders among them that are empty."""
        folders = {path for path in paths if await self._was_dir(path, 0.0)}
        files = [self._rm_file(path) for path in paths if path not in folders]
        await _run_coros_in_chunks(files, batch_size=self.batch_size)
        await self._remove_folders(folders)

    async def _remove_folders(self, folders: Collection[str]) -> None:
        """Remove those of the folders that are empty."""
        for folder in sorted(folders, reverse=True):
            try:
                await self._rmdir(folder)
            except FileNotFoundError:  # the folder existed only through the objects in it
                pass
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    async def _was_dir(self, path: str, since: float) -> bool:
        """Return whether `path` is a folder, from metadata checked after `since` or by asking the origin."""
        if path != without_slash(path):
            return False
        entry = self._reader.objects.known(path)
        if entry is None or entry.info is None or entry.asked_at < since:
            return bool(await self._isdir(path))
        return entry.info.kind == "directory"

    async def _nothing_moved(self, source: str, recursive: bool) -> CachedFSError:
        url = self._reader.objects.url(source)
        if recursive or not await self._isdir(source):
            return ObjectNotFound(f"{url}: nothing was moved: the path matches only folders, no objects")
        return IsAFolder(f"{url} is a folder, and was not moved: call mv with recursive=True")

    async def _mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        path = self._strip(path)
        await self._write([path], "mkdir", path, create_parents=create_parents, **kwargs)

    async def _makedirs(self, path: Any, exist_ok: bool = False) -> None:
        path = self._strip(path)
        await self._write([path], "makedirs", path, exist_ok=exist_ok)

    async def _rmdir(self, path: Any) -> None:
        path = self._strip(path)
        await self._write([path], "rmdir", path)

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder.

        Where the origin has real folders, raises OSError for a folder that is not empty.
        """
        self._run(self._rmdir(path))

    def touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """Create an empty object, or truncate an existing one.

        With `truncate=False`, most inner filesystems raise NotImplementedError.
        """
        path = self._strip_object(path)
        self._run(self._write([path], "touch", path, truncate=truncate, **kwargs))

    async def _write(
        self, paths: list[str], method: str, *args: Any, tree: bool = False, **options: Any
    ) -> Any:
        return await self._hop(
            write_through.call(self._reader.objects, paths, method, *args, tree=tree, **options)
        )


def _moves_objects(inner: Any) -> bool:
    """Return whether an async filesystem has a method of its own that moves one object, as gcsfs does."""
    own = getattr(type(inner), "_mv_file", None)
    return own is not None and own is not getattr(AsyncFileSystem, "_mv_file", None)


def _is_other_file(source: Any, target: str) -> bool:
    """Return whether `source` is a local file other than `target`: opening `target` for writing may empty it."""
    return os.path.isfile(source) and not (os.path.exists(target) and os.path.samefile(source, target))


def _one_or_list(path: Any) -> Any:
    return path if isinstance(path, str | os.PathLike) else list(path)
