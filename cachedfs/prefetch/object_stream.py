"""The objects of a prefetch plan: its items in order, with folders and patterns expanded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import is_pattern
from cachedfs.core.objects import Entry
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError, OriginUnreachable
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.object_fetcher import ObjectFetcher
from cachedfs.prefetch.progress import PrefetchObject, Slice

__all__ = ["Glob", "ObjectStream"]

Glob = Callable[[str], Awaitable[Mapping[str, Any]]]


class ObjectStream:
    """The objects of a plan in order, with their positions. Event loop thread only.

    `strip` turns a user's path or URL into a path. `glob` expands patterns.
    """

    def __init__(
        self,
        reader: Reader,
        items: PrefetchItems,
        fetcher: ObjectFetcher,
        *,
        strip: Callable[[str], str],
        glob: Glob,
    ) -> None:
        self._objects, self._lookups = reader.objects, reader.lookups
        self._items, self._fetcher, self._strip, self._glob = items, fetcher, strip, glob
        self._position = 0  # of the next object
        self._seen: deque[PrefetchObject] = deque()  # returned by `look_ahead`, and not by `take`
        self._children: deque[ObjectInfo] = deque()  # objects of an expanded folder that come next
        # Folders being listed, in order; their objects follow `_children`.
        self._folders: deque[tuple[str, asyncio.Task[list[ObjectInfo]]]] = deque()
        self._error: Exception | None = None  # raised when the plan gets there

    @property
    def is_over(self) -> bool:
        """True when nothing is left to take."""
        is_left = self._seen or self._children or self._folders or self._error
        return self._items.n_left == 0 and not is_left

    @property
    def n_seen(self) -> int:
        """The number of objects that `look_ahead` returned and `take` did not."""
        return len(self._seen)

    def take(self) -> PrefetchObject | None:
        """Return the next object; None when none is available now.

        Raises errors that end the plan: those of the caller's iterator, invalid items, and listing errors that are no
        CachedFSError.
        """
        if not self._seen:
            self.look_ahead()
        if self._seen:
            return self._seen.popleft()
        if self._error is not None:
            raise self._error
        return None

    def look_ahead(self) -> PrefetchObject | None:
        """Return the object after all those that this method returned before; None when none is available now.

        It has begun if its version is known.
        """
        if self._error is None:
            try:
                found = self._next()
            except Exception as error:  # `take` raises it, after the objects before it
                self._error = error
                return None
            if found is not None:
                self._seen.append(found)
            return found
        return None

    def _next(self) -> PrefetchObject | None:
        if self._folders:
            self._enter_listed()
        if self._children:
            child = self._children.popleft()
            return self._object(child.path, self._objects.fresh(child.path), size=child.size)
        # The objects of a folder come before the next item.
        while not self._folders and (item := self._items.take()) is not None:
            path = self._strip(item.text)
            self._fetcher.counts.declared()
            entry = self._objects.fresh(path)
            if item.range is not None or not _may_be_many(item.text, path, entry):
                return self._object(path, entry, bounds=item.range)
            self.enter(path)
        return None

    def _object(
        self, path: str, entry: Entry | None, *, size: int | None = None, bounds: Slice | None = None
    ) -> PrefetchObject:
        """Return an object with its positions: one for each block, or one if its version is not known yet."""
        obj = PrefetchObject(self._position, path, size, bounds)
        if entry is not None and (version := self._objects.version(entry)) is not None:
            obj.begin(version)
        obj.span = obj.span or 1
        self._position += obj.span
        return obj

    # Expand folders and patterns.

    def enter(self, path: str) -> None:
        """Expand a folder: its objects come next, after those of folders that are being listed."""
        self._folders.append((path, self._fetcher.spawn(self._expand(path))))

    def _enter_listed(self) -> None:
        """Take the objects of the first folders that have been listed."""
        while self._folders and not self._children and self._folders[0][1].done():
            path, task = self._folders.popleft()
            try:
                found = task.result()
            except CachedFSError as error:
                self._fetcher.count_failure(path, error)
                continue
            self._fetcher.counts.expanded([info.size for info in found])
            self._children.extend(found)

    async def _expand(self, path: str) -> list[ObjectInfo]:
        """Return the objects below a folder, or those that match a pattern."""
        while True:
            try:
                return await (self._matches(path) if is_pattern(path) else self._below(path))
            except OriginUnreachable as error:
                await self._fetcher.wait_for_origin(error)

    async def _below(self, path: str) -> list[ObjectInfo]:
        found = [info for info in await self._lookups.listings.find(path) if info.kind == "file"]
        if not found and (info := await self._lookups.info(path)).kind == "file":
            found = [info]
        return found

    async def _matches(self, pattern: str) -> list[ObjectInfo]:
        named = await self._glob(pattern)
        if not named:  # perhaps a name with a wildcard character in it
            return await self._below(pattern)
        found: dict[str, ObjectInfo] = {}
        for name, info in named.items():
            is_file = info["type"] == "file"
            below = [ObjectInfo(name, size=info["size"])] if is_file else await self._below(name)
            found |= {each.path: each for each in below if each.path not in found}
        return list(found.values())


def _may_be_many(text: str, path: str, entry: Entry | None) -> bool:
    """Return whether an item may be a folder or a pattern. Another folder is found when it is looked up."""
    if entry is not None and entry.info is not None:
        return entry.info.kind == "directory"
    return text.endswith("/") or is_pattern(path)
