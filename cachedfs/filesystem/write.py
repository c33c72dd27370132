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
import os
import shutil
import stat
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import IO, Any, BinaryIO

from fsspec.asyn import _run_coros_in_chunks
from fsspec.callbacks import DEFAULT_CALLBACK

from cachedfs.common.optional_imports import importing
from cachedfs.common.types import AnyVersion, ObjectInfo
from cachedfs.common.urls import LOCAL_PROTOCOLS, before_magic, folder_of, is_pattern, without_slash
from cachedfs.core import write_through
from cachedfs.filesystem.metadata_methods import MetadataMethods
from cachedfs.origins.base import Uploader
from cachedfs.origins.base_filesystem import BaseFileSystem

_ONE_CALL = 8 << 20  # bytes of a file that is sent in one call, and so is in memory


class WriteMethods(MetadataMethods):
    """Mixin with the methods of `CachedFileSystem` that write."""

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
        await self._hop(self._objects.origin(path).filesystem())
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
        path, objects = self._strip_object(path), self._objects
        origin = objects.origin(path)
        info: ObjectInfo
        if isinstance(origin, Uploader):
            upload = write_through.upload(objects, origin, path, file, replaces=replaces, mtime_ns=mtime_ns)
            info = await self._hop(upload)
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

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Move an object, or with `recursive` a folder.

        If an object of several cannot be moved, the others are brought back, and the error names it. Where the inner
        filesystem renames folders itself, this calls its `mv`. Object stores are asked to move each object, or to copy
        it; then exactly what was copied is removed.
        """
        with importing():
            from cachedfs.filesystem.mover import Mover
        Mover(self).mv(_one_or_list(path1), path2, recursive, maxdepth, **kwargs)

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
        inner = await self._hop(self._objects.origin(paths[0]).filesystem())
        folders = recursive and isinstance(inner, BaseFileSystem)
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
            with mapped(self._objects.url(source), "reading it"):
                opened = functools.partial(io.FileIO, source)
                # A transaction delays no copy, as at other origins: a move removes the source right after it.
                await self._write_by_open(target, "overwrite", opened, autocommit=True)
        else:
            await self._write([target], "cp_file", source, target, **kwargs)

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
        entry = self._objects.known(path)
        if entry is None or entry.info is None or entry.asked_at < since:
            return bool(await self._isdir(path))
        return entry.info.kind == "directory"

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
        return await self._hop(write_through.call(self._objects, paths, method, *args, tree=tree, **options))


def _is_other_file(source: Any, target: str) -> bool:
    """Return whether `source` is a local file other than `target`: opening `target` for writing may empty it."""
    return os.path.isfile(source) and not (os.path.exists(target) and os.path.samefile(source, target))


def _one_or_list(path: Any) -> Any:
    return path if isinstance(path, str | os.PathLike) else list(path)
