"""Base class of our filesystems: what they do in another way than fsspec."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks, sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import LocalFileSystem, make_path_posix

from cachedfs.common.text import counted
from cachedfs.common.urls import is_pattern, without_slash
from cachedfs.errors import (
    ABSENT,
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectNotFound,
    QuotaExceeded,
    SignInRefused,
)
from cachedfs.origins.drive_links import NATIVE

_MOST_NAMED = 20  # objects in the error of a copy that left some


class BaseFileSystem(AsyncFileSystem):
    """Base class of our filesystems.

    `exists`, `isfile` and `isdir` return False only if the path does not exist, and raise every other error. `cat`,
    `get`, `copy`, `mv` and `rm` take a path such as `report [1].txt` as a pattern only if nothing has this name. `walk`
    lists a shortcut to a folder that contains it, but does not enter it. A recursive `get` copies what can be read, and
    then raises an error that names the rest.
    """

    # What exists
    async def _exists(self, path: Any, **kwargs: Any) -> bool:
        return await self._kind_of(self._strip_protocol(path)) is not None

    async def _isfile(self, path: Any) -> bool:
        return await self._kind_of(self._strip_object(path)) == "file"

    async def _isdir(self, path: Any) -> bool:
        return await self._kind_of(self._strip_protocol(path)) == "directory"

    async def _kind_of(self, path: str) -> str | None:
        """Return the type of the item at a path without protocol, or None if there is none.

        Other errors are raised. fsspec's `isfile` and `isdir` would return False.
        """
        try:
            return str((await self._info(path))["type"])
        except ABSENT:
            return None

    # Shortcuts
    async def _walk(
        self,
        path: Any,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "omit",
        *,
        detail: bool = False,
        above: frozenset[str | None] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Walk as fsspec does, but do not enter a folder that is its own ancestor.

        `above` has the ids of the parent folders. Origins without ids, such as GCS, have no shortcuts. `on_error="omit"`
        skips missing folders only. Other errors are raised, where fsspec treats the folder as empty: an expired sign-in
        must not look like a dataset without files.
        """
        if on_error == "omit":
            on_error = _raise_unless_absent
        if above is None:
            with contextlib.suppress(OSError):  # raised again by the walk below
                above = frozenset({(await self._info(path)).get("id")} - {None})
        below = None if maxdepth is None else maxdepth - 1
        # For a depth below 1, fsspec raises its error.
        one = maxdepth if maxdepth is not None and maxdepth < 1 else 1
        async for folder, dirs, files in super()._walk(path, one, on_error=on_error, detail=True, **kwargs):
            level = (folder, dirs, files) if detail else (folder, list(dirs), list(files))
            if topdown:
                yield level
            for info in [] if below == 0 else [dirs[name] for name in level[1]]:
                if info.get("id") not in (above or ()):
                    ids = (above or frozenset()) | ({info.get("id")} - {None})
                    options = {
                        "topdown": topdown,
                        "on_error": on_error,
                        "detail": detail,
                        "above": ids,
                        **kwargs,
                    }
                    async for deeper in self._walk(info["name"], below, **options):
                        yield deeper
            if not topdown:
                yield level

    def walk(self, path: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any, Any]]:
        """Walk as fsspec does, but list a shortcut to a folder that contains it without entering it."""
        levels = self._walk(path, *args, **options)
        while (level := sync(self.loop, anext, levels, None)) is not None:
            yield level

    # Copies to the local disk
    async def _get_file(
        self,
        rpath: Any,
        lpath: Any,
        callback: Any = DEFAULT_CALLBACK,
        left: list[CachedFSError] | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy one object to a local file; with `left`, add the error of one that cannot be read to it."""
        try:
            await self._get_one(rpath, lpath, callback)
        except (NotDownloadable, ObjectNotFound, AccessDenied, QuotaExceeded) as error:
            if left is None or isinstance(error, SignInRefused):
                raise
            left.append(error)

    async def _get_one(self, rpath: Any, lpath: Any, callback: Any) -> None:
        """Copy one object to a local file, or create a local folder for a folder."""
        raise NotImplementedError

    # Names that look like patterns
    def _strip_object(self, path: Any) -> Any:
        """Return the path of an object; unlike a folder's, it may end in a slash."""
        return self._strip_protocol(path)

    def _exists_in_cache(self, path: str) -> bool:
        """Return whether the metadata cache shows that a path exists; send no request."""
        return False

    async def _expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, assume_literal: bool = False
    ) -> list[str]:
        """Expand patterns and folders as fsspec does, but take the name of an existing object or folder literally."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found: set[str] = set()
        for name in [path] if isinstance(path, str | os.PathLike) else path:
            each, folder = self._strip_object(name), self._strip_protocol(name)
            if recursive:
                each = folder
            roots, depth = [each], maxdepth
            if not assume_literal and is_pattern(each) and not await self._is_literal(each):
                matched = await self._glob(folder, maxdepth=maxdepth)
                if each not in matched:
                    found.update(matched)
                    roots, depth = matched, None if maxdepth is None else maxdepth - 1
            for root in roots if recursive and depth != 0 else ():
                found.update(await self._find(root, maxdepth=depth, withdirs=True))
            if roots == [each] and each not in found and (not recursive or await self._exists(each)):
                found.add(each)
        if not found:
            raise FileNotFoundError(path)
        return sorted(found)

    async def _is_literal(self, path: str) -> bool:
        """Return whether an object or folder has this pattern as its name.

        A pattern without "[" matches its own name, so no request is sent for it: the caller finds the name among the
        matches.
        """
        if self._exists_in_cache(path):
            return True
        with contextlib.suppress(OSError):  # raised again by the listing that the pattern needs
            return "[" in path and await self._exists(path)
        return False

    async def _copy(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        if isinstance(path2, str) and (names := await self._names_of_literal(path1, recursive, maxdepth)):
            into = path2.endswith("/") or await self._isdir(path2)
            path1, path2 = _arguments_for_name(path1, path2, names, into=into)
        await super()._copy(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)

    async def _get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(lpath, list) and (
            names := await self._names_of_literal(rpath, recursive, maxdepth)
        ):
            lpath = os.fspath(lpath)
            into = lpath.endswith(("/", os.sep)) or LocalFileSystem().isdir(lpath)
            rpath, lpath = _arguments_for_name(rpath, make_path_posix(lpath), names, into=into)
        if not recursive:
            return await super()._get(rpath, lpath, recursive, callback, maxdepth, **kwargs)
        left: list[CachedFSError] = []
        copied = await super()._get(rpath, lpath, recursive, callback, maxdepth, left=left, **kwargs)
        if left:
            raise _not_copied(left)
        return copied

    async def _names_of_literal(self, path: Any, recursive: bool, maxdepth: int | None) -> list[str]:
        """Return the paths to copy if `path` contains wildcards but is the name of something that exists; else [].

        Without `recursive`, only the name of a file counts. The name of a file that ends in a slash, which fsspec would
        take for a folder, is returned too.
        """
        if not isinstance(path, str):
            return []
        if not recursive and (name := self._strip_object(path)) != without_slash(name):
            return [name] if await self._isfile(name) else []
        if not is_pattern(name := self._strip_protocol(path)):
            return []
        names = await self._expand_path(path, recursive, maxdepth)
        return names if name in names and (recursive or await self._isfile(name)) else []

    # Listings
    async def _find_near(
        self, path: str, prefix: str, maxdepth: int, withdirs: bool, **kwargs: Any
    ) -> dict[str, dict[str, Any]]:
        """Return what `find` returns with `maxdepth`, with the infos."""
        near = await super()._find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        # For a file, fsspec's own `_find` returns an empty info.
        return {
            name: info or await self._info(name)
            for name, info in near.items()
            if begins_with(name, path, prefix)
        }

    async def _du(
        self,
        path: Any,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the bytes below a path; a Google document has no size and counts as 0."""
        found = await self._find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        # The listing of a public folder of Drive has no sizes.
        unknown = [
            name
            for name, info in found.items()
            if info["size"] is None and not str(info.get("mimeType")).startswith(NATIVE)
        ]
        infos = await _run_coros_in_chunks(list(map(self._info, unknown)), batch_size=self.batch_size)
        found |= zip(unknown, infos, strict=True)
        sizes = {name: info["size"] or 0 for name, info in found.items()}
        return sum(sizes.values()) if total else sizes


def begins_with(name: str, folder: str, prefix: str) -> bool:
    """Return whether `name`, relative to `folder`, begins with `prefix`; the folder itself has no name then."""
    return not prefix or name.removeprefix(folder).removeprefix("/").startswith(prefix)


def _not_copied(left: list[CachedFSError]) -> CachedFSError:
    """Return the error of a recursive copy that left some objects."""
    named = "\n".join(str(error) for error in left[:_MOST_NAMED])
    more = f"\nand {len(left) - _MOST_NAMED:,} more" if len(left) > _MOST_NAMED else ""
    kind = type(left[0]) if len({type(error) for error in left}) == 1 else CachedFSError
    return kind(f"{counted(len(left), 'object')} could not be copied:\n{named}{more}")


def _raise_unless_absent(error: OSError) -> None:
    """Raise an error of listing a folder, unless the folder does not exist."""
    if not isinstance(error, ABSENT):
        raise error


def _arguments_for_name(source: str, target: Any, names: list[str], *, into: bool) -> tuple[Any, Any]:
    """Return the source and the target to pass to fsspec, so that it copies `source` as a name and not as a pattern.

    `names` are the paths to copy. With `into`, the target is a folder that receives the copy. A single name is passed
    in a list: if a pattern matches one name, fsspec takes every target for a folder.
    """
    if into and not source.endswith("/"):
        target = f"{target.rstrip('/')}/{names[0].rpartition('/')[2]}"
    return ([names[0]], [target]) if len(names) == 1 else (source, target)
