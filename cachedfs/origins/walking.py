"""Walking folders that shortcuts may lead back into."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

from cachedfs.errors import SignInRefused

__all__ = ["WalksCycles"]


class WalksCycles(AsyncFileSystem):
    """A filesystem whose walks end: a shortcut to a folder that it lies in is named, and not entered.

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
        on_error_below: Any = None,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Walk as fsspec does; `above`: the ids of the folders on the way.

        `on_error_below`: `on_error` for all folders but the one that was asked for; None: the same.
        """
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
                        "on_error": on_error_below or on_error,
                        "detail": detail,
                        "above": ids,
                        **kwargs,
                    }
                    async for deeper in self._walk(info["name"], below, **options):
                        yield deeper
            if not topdown:
                yield level

    async def _find(
        self, path: Any, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> Any:
        """Find as fsspec does; that a folder could not be listed is an error, where fsspec takes it for empty."""
        if "on_error" not in kwargs:
            kwargs |= {"on_error": _but_for_one_missing, "on_error_below": _but_for_those_out_of_reach}
        return await super()._find(path, maxdepth=maxdepth, withdirs=withdirs, **kwargs)

    def walk(self, path: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any, Any]]:
        """Walk as fsspec does; a shortcut to a folder that it lies in is named and not entered."""
        levels = self._walk(path, *args, **options)
        while (level := sync(self.loop, anext, levels, None)) is not None:
            yield level


def _but_for_one_missing(error: OSError) -> None:
    """Raise, unless there is no such folder, in which fsspec finds nothing."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _but_for_those_out_of_reach(error: OSError) -> None:
    """Raise, unless a folder went meanwhile or is not to be seen, which is as if it were not there."""
    is_about_one = isinstance(error, FileNotFoundError | PermissionError)
    if not is_about_one or isinstance(error, SignInRefused):
        raise error
