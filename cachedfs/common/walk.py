"""A base class for filesystems: lookups raise errors, and walks end despite cycles."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

__all__ = ["ABSENT", "CycleSafeWalk"]

ABSENT = (FileNotFoundError, NotADirectoryError)  # the errors that mean "no such file or folder"


class CycleSafeWalk(AsyncFileSystem):
    """Base class: lookups raise all errors but absence, and `walk` does not loop.

    This applies to `exists`, `isfile`, `isdir` and `walk`. A shortcut to a folder that contains it is listed but not
    entered. Folders are compared by the `id` in their `info`. Origins without ids, such as GCS, have no shortcuts.
    """

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

        `above` has the ids of the parent folders. `on_error="omit"` skips missing folders only. Other errors are
        raised, where fsspec treats the folder as empty: an expired sign-in must not look like a dataset without files.
        """
        if on_error == "omit":
            on_error = _but_for_absence
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

    async def _exists(self, path: Any, **kwargs: Any) -> bool:
        return await self._kind_of(path) is not None

    async def _isfile(self, path: Any) -> bool:
        return await self._kind_of(path) == "file"

    async def _isdir(self, path: Any) -> bool:
        return await self._kind_of(path) == "directory"

    async def _kind_of(self, path: Any) -> str | None:
        """Return the type of the item at a path, or None if there is none.

        Other errors are raised; fsspec would hide them.
        """
        try:
            return str((await self._info(path))["type"])
        except ABSENT:
            return None

    def walk(self, path: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any, Any]]:
        """Walk as fsspec does, but list a shortcut to a folder that contains it without entering it."""
        levels = self._walk(path, *args, **options)
        while (level := sync(self.loop, anext, levels, None)) is not None:
            yield level


def _but_for_absence(error: OSError) -> None:
    """Raise an error of listing a folder, unless the folder does not exist."""
    if not isinstance(error, ABSENT):
        raise error
