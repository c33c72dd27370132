"""`mv` of a cached filesystem: all objects are moved, or none and the error says where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks
from fsspec.utils import stringify_path

from cachedfs.common.clock import clock
from cachedfs.common.urls import SLASH_NAMES, is_pattern
from cachedfs.errors import ABSENT, CachedFSError, IsAFolder, ObjectNotFound
from cachedfs.filesystem.move import MovedObject, ObjectMove, Requests, StatedContent
from cachedfs.origins.base_filesystem import BaseFileSystem


class Mover:
    """Moves objects and folders of one `CachedFileSystem`."""

    def __init__(self, fs: Any) -> None:
        self._fs, self._objects = fs, fs._objects

    def mv(self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None, **kwargs: Any) -> None:
        inner = type(self._fs.origin_fs)
        copies = getattr(inner.mv, "__qualname__", "").startswith(("AbstractFileSystem.", "AsyncFileSystem."))
        single = not isinstance(path1, list) and maxdepth is None
        # Where folders are only the beginnings of names, a folder is moved object by object.
        is_flat = self._fs.target_protocol in SLASH_NAMES
        if single and recursive and is_flat and not is_pattern(self._fs._strip(path1)):
            self._fs._run(self._move_folder(self._fs._strip(path1), path2, **kwargs))
            return
        if single and not recursive and self._fs._strip_object(path1) != self._fs._strip(path1):
            copies = copies or self._fs.isfile(path1)  # most filesystems would take its name for a folder's
        if single and is_pattern(self._fs._strip(path1)):
            # Most filesystems would expand an existing name, too.
            copies = copies or not (issubclass(inner, BaseFileSystem) and self._fs.exists(path1))
        if copies or not single:
            self._fs._run(self._copy_and_remove(path1, path2, recursive, maxdepth))
            return
        source, target = self._fs._strip(path1), self._fs._strip(path2)
        into = "/" if stringify_path(path2).endswith("/") else ""
        self._fs._run(
            self._fs._write(
                [source, target], "mv", source, target + into, recursive=recursive, tree=True, **kwargs
            )
        )

    async def _move_folder(
        self, source: str, path2: Any, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        """Move all objects whose names begin with a folder's.

        The names are those of the inner filesystem: it also lists the empty objects that make folders.
        """
        origin, target = self._objects.origin(source), self._fs._strip(path2)
        found = await self._fs._hop(origin.call("find", source, detail=True))
        if not found:
            raise ObjectNotFound(
                f"{self._objects.url(source)}: no object or folder has this name, so nothing was moved"
            )
        kind = "directory" if stringify_path(path2).endswith("/") else await self._fs._kind_of(target)
        base = f"{target}/{source.rpartition('/')[2]}" if kind == "directory" else target
        if base == source:
            return
        # Where there is nothing, nothing can be replaced.
        known = set() if kind is None else await self._fs._hop(self._names_below(base))
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
        inner = await self._fs._hop(origin.filesystem())

        async def move(source: str, target: str) -> None:
            await self._fs._write([source, target], "mv_file", source, target, **kwargs)

        async def copy(source: str, target: str) -> None:
            await self._fs._write([target], "cp_file", source, target)

        requests = self._requests(copy, move if _moves_objects(inner) else None, batch_size)
        paths = [source, target]
        try:
            await ObjectMove(objects, requests).run()
        finally:
            self._objects.engine.cache.metadata.changed(self._objects.identity, paths, tree=True)

    async def _names_below(self, folder: str) -> set[str]:
        """Return the names of a path and of all objects below it, also of those that make folders."""
        listed = self._objects.origin(folder).list(folder, deep=True)
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
                list(coroutines), batch_size=batch_size or self._fs.batch_size, nofiles=True
            )

        return Requests(copy, self._fs._rm_file, move, self._content_now, gather, self._objects.url)

    async def _content_now(self, path: str) -> StatedContent | None:
        """Return the content of an object as the origin states it now; None if there is no object."""
        try:
            info = await self._fs._hop(self._objects.origin(path).lookup(path))
        except ABSENT:
            return None
        return StatedContent.of(info.size, info.details) if info.kind == "file" else None

    async def _copy_and_remove(self, path1: Any, path2: Any, recursive: bool, maxdepth: int | None) -> None:
        """Move by copying, then remove exactly what was copied: other writers may add objects meanwhile."""
        began_at = clock.now()
        for source in path1 if isinstance(path1, list) else [path1]:
            self._fs._expire_listing(self._fs._strip(source), recursive)
        pairs: list[tuple[str, str]] = []
        await self._fs._copy(
            path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", pairs=pairs
        )
        if not pairs and not isinstance(path1, list):  # then fsspec skips folders without an error
            raise await self._nothing_moved(self._fs._strip(path1), recursive)
        folders = {source: target for source, target in pairs if await self._fs._was_dir(source, began_at)}
        objects = [
            MovedObject(
                source, target, self._content_known(source, began_at), not self._is_absent(target, path2)
            )
            for source, target in pairs
            if source not in folders
        ]
        new = [target for source, target in folders.items() if self._is_absent(target, path2)]

        async def copy(source: str, target: str) -> None:
            await self._fs._cp_file(source, target, tree=recursive)

        requests = self._requests(copy)
        try:
            await requests.gather([copy(source, target) for source, target in folders.items()])
            await ObjectMove(objects, requests).run()
        except Exception:  # of any kind, and raised again
            with contextlib.suppress(OSError):  # the first error matters
                await self._fs._remove_folders(new)
            raise
        await self._fs._remove_folders(folders.keys() - folders.values())  # keep what was moved onto itself

    def _content_known(self, path: str, since: float) -> StatedContent | None:
        """Return the content of an object from metadata checked after `since`."""
        entry = self._objects.known(path)
        if entry is None or entry.info is None or entry.asked_at < since:
            return None
        return StatedContent.of(entry.info.size, entry.info.details)

    def _is_absent(self, path: str, above: Any) -> bool:
        """Return whether nothing has this name, from metadata: of the path itself, or of a path that it is below."""
        paths = [path]
        if isinstance(above, str) and (path == (top := self._fs._strip(above)) or path.startswith(f"{top}/")):
            paths.append(top)
        entries = [self._objects.known(each) for each in paths]
        return any(entry is not None and entry.info is None for entry in entries)

    async def _nothing_moved(self, source: str, recursive: bool) -> CachedFSError:
        url = self._objects.url(source)
        if recursive or not await self._fs._isdir(source):
            return ObjectNotFound(f"{url}: nothing was moved: the path matches only folders, no objects")
        return IsAFolder(f"{url} is a folder, and was not moved: call mv with recursive=True")


def _moves_objects(inner: Any) -> bool:
    """Return whether an async filesystem has a method of its own that moves one object, as gcsfs does."""
    own = getattr(type(inner), "_mv_file", None)
    return own is not None and own is not getattr(AsyncFileSystem, "_mv_file", None)
