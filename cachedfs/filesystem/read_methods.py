"""The methods of a cached filesystem that read objects. What is cached needs no other thread."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
from typing import IO, TYPE_CHECKING, Any, Literal, overload

from cachedfs.common.atomic_files import filled
from cachedfs.common.optional_imports import importing
from cachedfs.common.urls import is_pattern
from cachedfs.errors import ChecksumMismatch, ObjectChanged, ObjectExists
from cachedfs.filesystem.cache_api import WINDOW, AnyPath
from cachedfs.filesystem.metadata_methods import MetadataMethods

if TYPE_CHECKING:
    from cachedfs.core.download import Download
    from cachedfs.core.objects import Entry
    from cachedfs.filesystem.file import CachedFile
    from cachedfs.filesystem.write_file import WrittenFile


class ObjectName(str):
    """The path of an object, from which `_strip_protocol` must not remove a slash at the end."""

    __slots__ = ()


@functools.cache
def _file_class() -> type[CachedFile]:
    with importing():
        from cachedfs.filesystem.file import CachedFile
    return CachedFile


class ReadMethods(MetadataMethods):
    """Mixin with the methods of `CachedFileSystem` that read."""

    @overload
    def open(self, path: AnyPath, mode: Literal["rb"] = "rb", *args: Any, **kwargs: Any) -> CachedFile: ...
    @overload
    def open(self, path: AnyPath, mode: str, *args: Any, **kwargs: Any) -> IO[Any]: ...
    def open(self, path: AnyPath, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        """Open an object for reading (`rb`, `r`) or writing (`wb`, `xb`), as fsspec does."""
        return super().open(ObjectName(self._strip_object(path)), mode, *args, **kwargs)

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
        return data if data is not None else self._objects.engine.run(self._reader.read(name, start, end))

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
            path = ObjectName(self._strip_object(path))
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
        path = str(path)  # not an `ObjectName`
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
        if "x" in mode:  # an inner filesystem may notice only at close that it exists
            self.invalidate_cache(path)
            if self._kind(path) is not None:
                url = self.unstrip_protocol(path)
                raise ObjectExists(f"{url}: exists already; mode 'w' would replace it")
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
        """Return bytes of exactly the version of `entry`, as `Reader.read_version` does; cached ones without its thread."""
        cached = functools.partial(self._reader.cached, entry.path, start, stop, of=entry)
        try:
            data = cached(nowait=True)
        except BlockingIOError:  # on disk but not in the page cache: do not block the caller's loop
            data = await asyncio.to_thread(cached)
        if data is not None:
            return data
        return await self._hop(self._reader.read_version(entry, start, stop, download, **more))

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
                    data = await self._hop(self._reader.read_version(entry, start, stop))
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


def _each(value: Any, paths: Any) -> list[Any]:
    """Return one offset for each path, as Python ints: numpy's end at 64 bits, keys of blocks do not."""
    offsets = value if hasattr(value, "__iter__") else [value] * len(paths)
    return [None if offset is None else operator.index(offset) for offset in offsets]
