"""Questions and walks of a filesystem that raise what went wrong, and end where shortcuts form a cycle."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

__all__ = ["ABSENT", "CycleSafeWalk"]

ABSENT = (FileNotFoundError, NotADirectoryError)  # the errors that say that nothing is there


class CycleSafeWalk(AsyncFileSystem):
    """A filesystem that raises where it cannot tell, and whose walks end.

    A shortcut to a folder that it lies in is named, and not entered.
    Folders are known by the `id` in their `info`; where there is none, as on GCS, there are no shortcuts either.
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
        """Walk as fsspec does; `above`: the ids of the folders on the way.

        `on_error="omit"` leaves out folders that are not there. That one cannot be listed raises, where fsspec takes it for
        empty: an expired sign-in would look like a dataset without files.
        """
        if on_error == "omit":
            on_error = _but_for_absence
        if above is None:
            with contextlib.suppress(OSError):  # said below
                above = frozenset({(await self._info(path)).get("id")} - {None})
        below = None if maxdepth is None else maxdepth - 1
        one = maxdepth if maxdepth is not None and maxdepth < 1 else 1  # fsspec says what is wrong with it
        async for here, dirs, files in super()._walk(path, one, on_error=on_error, detail=True, **kwargs):
            level = (here, dirs, files) if detail else (here, list(dirs), list(files))
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
        """Return the type of what is at a path, None for nothing; who cannot tell raises, where fsspec takes it for nothing."""
        try:
            return str((await self._info(path))["type"])
        except ABSENT:
            return None

    def walk(self, path: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any, Any]]:
        """Walk as fsspec does; a shortcut to a folder that it lies in is named and not entered."""
        levels = self._walk(path, *args, **options)
        while (level := sync(self.loop, anext, levels, None)) is not None:
            yield level


def _but_for_absence(error: OSError) -> None:
    """Raise what went wrong, unless there is no such folder."""
    if not isinstance(error, ABSENT):
        raise error
