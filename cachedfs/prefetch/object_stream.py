"""The objects of a prefetch plan: its items in order, with folders and patterns expanded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachedfs.common.blocks import block_range, clip, covering
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.common.urls import is_pattern
from cachedfs.common.version import Version
from cachedfs.core.objects import Entry
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError
from cachedfs.prefetch.belady import Belady, Use
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.requests import PlanRequests, Spawn

Slice = tuple[int | None, int | None]  # start and stop, as in a Python slice
Glob = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclass(eq=False, slots=True)
class PrefetchObject:
    """One object of a plan, or a byte range of it. `position` is that of its first use in the plan."""

    position: float
    path: str
    listed_size: int | None = None  # bytes counted for it in the plan's total; None: not known
    bounds: Slice | None = None
    version: Version | None = None  # set by `begin`, as `wanted` and `left`
    wanted: range = range(0)  # its blocks
    left: range = range(0)  # of these, the blocks that the plan has not asked for
    span: int = 0  # the positions that its uses share; the next object follows
    n_tasks: int = 0
    n_tries: int = 0
    is_over: bool = False  # cached, failed, or replaced by the objects below it

    def begin(self, version: Version) -> None:
        """Set the object's version, and its blocks to fetch."""
        want = clip(*(self.bounds or (None, None)), version.size)
        self.version, self.wanted = version, covering(want, version.block_size)
        self.left, self.span = self.wanted, self.span or max(1, len(self.wanted))

    @property
    def wanted_size(self) -> int:
        """Bytes of the blocks to fetch. Requires `begin`."""
        return self.bytes_of(self.wanted[-1]).stop - self.bytes_of(self.wanted[0]).start if self.wanted else 0

    @property
    def begun(self) -> Version:
        """The version. Requires `begin`."""
        assert self.version is not None
        return self.version

    def bytes_of(self, index: int) -> Range:
        return block_range(index, self.begun.block_size, self.begun.size)

    def use(self, index: int) -> Use:
        """Return the plan's use of block `index`. Requires `begin`."""
        position = self.position + (index - self.wanted.start) * self.span / len(self.wanted)
        return Use(position, self.begun, index, self.bytes_of(index).size)


class ObjectStream:
    """The objects of a plan in order, with their positions. Event loop thread only.

    `strip` turns a user's path or URL into a path. `glob` expands patterns. `spawn` starts tasks that end with the plan.
    """

    def __init__(
        self,
        reader: Reader,
        items: PrefetchItems,
        requests: PlanRequests,
        uses: Belady,
        *,
        spawn: Spawn,
        strip: Callable[[str], str],
        glob: Glob,
    ) -> None:
        self._objects, self._lookups, self._items, self._requests = (
            reader.objects,
            reader.lookups,
            items,
            requests,
        )
        self._counts, self._uses, self._spawn = requests.counts, uses, spawn
        self._strip, self._glob = strip, glob
        self._position = 0  # of the next object
        self.ahead: deque[PrefetchObject] = deque()  # returned by `look_ahead`; the plan takes them from here
        # Objects to come whose version is not known, by path.
        self._unknown: dict[str, list[PrefetchObject]] = {}
        self._children: deque[ObjectInfo] = deque()  # objects of an expanded folder that come next
        # Folders being listed, in order; their objects follow `_children`.
        self._folders: deque[tuple[str, asyncio.Task[list[ObjectInfo]]]] = deque()
        self.error: Exception | None = None  # to be raised when all `ahead` are taken

    @property
    def is_over(self) -> bool:
        """True when nothing is left to take."""
        return self._items.n_left == 0 and not (self.ahead or self._children or self._folders or self.error)

    def look_ahead(self) -> PrefetchObject | None:
        """Return the next object, which has begun if its version is known; None when none is available now.

        `error` is one that ends the plan: of the caller's iterator, an invalid item, or a listing error that is no
        CachedFSError.
        """
        found = None
        if self.error is None:
            try:
                found = self._next()
            except Exception as error:  # of any kind, as it comes from the caller's iterator
                self.error = error
        if found is not None:
            self.ahead.append(found)
            self._add(found)
        return found

    def _add(self, obj: PrefetchObject) -> None:
        """Add the uses of an object, after those of earlier objects that waited for its version; or let it wait."""
        waiting = self._unknown.pop(obj.path, [])
        if obj.version is None:
            self._unknown[obj.path] = [*waiting, obj]
            return
        for each in dict.fromkeys([*waiting, obj]):
            if each.version is None:
                each.begin(obj.version)
            self._uses.add(map(each.use, each.wanted))

    def set_version(self, obj: PrefetchObject, version: Version | None) -> None:
        """Set the current version of an object, and its blocks to fetch. None: it is not known."""
        if obj.version != version:
            self._uses.remove(map(obj.use, obj.wanted))
            obj.version, obj.wanted, obj.left = None, range(0), range(0)
            if version is not None:
                obj.begin(version)
                self._add(obj)
        if version is not None and obj.listed_size != obj.wanted_size:
            self._counts.replace([obj.listed_size], [obj.wanted_size])
            obj.listed_size = obj.wanted_size

    def _next(self) -> PrefetchObject | None:
        if self._folders:
            self._enter_listed()
        if self._children:
            child = self._children.popleft()
            return self._object(child.path, self._known(child.path), size=child.size)
        # The objects of a folder come before the next item.
        while not self._folders and (item := self._items.take()) is not None:
            path = self._strip(item.text)
            self._counts.replace([], [None])
            entry = self._known(path)
            if item.range is not None or not _may_be_many(item.text, path, entry):
                return self._object(path, entry, bounds=item.range)
            self.enter(path)
        return None

    def _known(self, path: str) -> Entry | None:
        """Return the entry of a path in memory, which may have expired, or else a fresh one from the store.

        That costs no system call for what is in memory. The plan checks the entry before it fetches.
        """
        return self._objects.entries.get(path) or self._objects.fresh(path)

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
        expand = partial(self._matches if is_pattern(path) else self._below, path)
        self._folders.append((path, self._spawn(self._requests.until_reachable(expand))))

    def _enter_listed(self) -> None:
        """Take the objects of the first folders that have been listed."""
        while self._folders and not self._children and self._folders[0][1].done():
            path, task = self._folders.popleft()
            try:
                found = task.result()
            except CachedFSError as error:
                self._counts.replace([None], [0])
                self._counts.n_done += 1
                self._requests.failed(path, error)
            else:
                self._counts.replace([None], [info.size for info in found])
                self._children.extend(found)

    async def _below(self, path: str) -> list[ObjectInfo]:
        """Return the objects below a folder."""
        found = [info for info in await self._lookups.listings.find(path) if info.kind == "file"]
        if not found and (info := await self._lookups.info(path)).kind == "file":
            found = [info]
        return found

    async def _matches(self, pattern: str) -> list[ObjectInfo]:
        """Return the objects that match a pattern, and those below folders that do."""
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
