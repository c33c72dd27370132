"""Cursor of a prefetch plan: take its items in order, and expand folders and patterns into objects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from cachedfs.cache.eviction.future_uses import Block
from cachedfs.common.blocks import clip
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import is_pattern
from cachedfs.errors import CachedFSError, OriginUnreachable
from cachedfs.prefetch.future_reads import Beyond, FutureReads
from cachedfs.prefetch.items import PrefetchItems
from cachedfs.prefetch.progress import PrefetchObject, ProgressCounts, Slice
from cachedfs.read.reader import Reader

__all__ = ["Glob", "PlanCursor", "Spawn"]

Glob = Callable[[str], Awaitable[Mapping[str, Any]]]
Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class PlanCursor:
    """The objects of a prefetch plan in order, numbered as they are taken. Event loop thread only.

    `strip` turns a user's path or URL into a path. `glob` expands patterns. `spawn` starts tasks that end
    with the plan. `answered` is called with the path of a folder or pattern and the error that its listing
    raised; or with None, when a retry after OriginUnreachable succeeded.
    """

    def __init__(
        self,
        reader: Reader,
        items: PrefetchItems,
        foresight: FutureReads,
        tally: ProgressCounts,
        *,
        strip: Callable[[str], str],
        glob: Glob,
        spawn: Spawn,
        answered: Callable[[str, CachedFSError | None], object],
    ) -> None:
        self._source, self._catalog = reader.source, reader.resolver
        self._items, self._foresight, self._tally = items, foresight, tally
        self._strip, self._glob, self._spawn, self._answered = strip, glob, spawn, answered
        self.n_begun = 0  # objects taken so far, which is the number of the next one
        # The objects of an expanded folder that come next, with their sizes.
        self._children: deque[tuple[str, int | None]] = deque()
        self._entering: deque[_Folder] = deque()  # folders being listed; their objects follow `_children`

    @property
    def is_over(self) -> bool:
        """True when nothing is left to take."""
        return self._items.n_left == 0 and not (self._children or self._entering)

    def take(self) -> list[PrefetchObject] | None:
        """Take the next object: a list with one object, or None when nothing is available now.

        The list is empty after a folder or pattern was expanded. Raises errors that end the plan: those of
        the caller's iterator, and listing errors that are no CachedFSError.
        """
        if self._children:
            return [self._begin(*self._children.popleft())]
        if self._entering:  # objects of a folder come before the next item
            return self._entered()
        if (item := self._items.take()) is None:
            return None
        span = self._foresight.took()
        path = self._strip(item.text)
        self._tally.declared()
        if item.range is None and self._may_be_many(item.text, path):
            self.enter(path)
            return None
        self._foresight.begins(self.n_begun, span)
        return [self._begin(path, bounds=item.range)]

    def _begin(self, path: str, size: int | None = None, bounds: Slice | None = None) -> PrefetchObject:
        self.n_begun += 1
        return PrefetchObject(self.n_begun - 1, path, size, bounds)

    # Expand folders and patterns.

    def enter(self, path: str) -> None:
        """Expand a folder: its objects come next, after those of folders that are being listed."""
        self._entering.append(_Folder(path, self._spawn(self._expand(path))))

    def _entered(self) -> list[PrefetchObject] | None:
        """Take the objects of the first folder into the plan; return None while it is being listed."""
        folder = self._entering[0]
        if folder.asked is None:
            asked = self._spawn(self._expand(folder.path))
            self._entering[0] = _Folder(folder.path, asked, is_again=True)
            return None
        if not folder.asked.done():
            return None
        try:
            found = folder.asked.result()
        except OriginUnreachable as error:
            # Listings sent together fail together, and cause one pause.
            self._entering = deque(each.unless_away() for each in self._entering)
            self._answered(folder.path, error)
            return None
        except CachedFSError as error:
            self._entering.popleft()
            self._answered(folder.path, error)
            return []
        self._entering.popleft()
        # Report only retries: a first listing may come from the cache, and then says nothing about the
        # origin.
        if folder.is_again:
            self._answered(folder.path, None)
        self._tally.expanded([info.size for info in found])
        self._children.extend((info.path, info.size) for info in found)
        return []

    def _may_be_many(self, text: str, path: str) -> bool:
        entry = self._source.fresh(path)
        if entry is not None and entry.info is not None:
            return entry.info.kind == "directory"
        return text.endswith("/") or is_pattern(path)

    async def _expand(self, path: str) -> list[ObjectInfo]:
        """Return the objects below a folder, or those that match a pattern."""
        return await self._matches(path) if is_pattern(path) else await self._below(path)

    async def _below(self, path: str) -> list[ObjectInfo]:
        found = [info for info in await self._catalog.find(path) if info.kind == "file"]
        if not found and (info := await self._catalog.info(path)).kind == "file":
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

    # Find the reader.

    def beyond(self, skip: Callable[[int, int], None]) -> Beyond:
        """Yield a `Beyond` entry for each object to come, with its first block if that is known.

        The last element of an entry calls `skip` with the numbers of folder objects and of items before that
        object.
        """
        children = list(self._children)
        for i, (path, _) in enumerate(children):
            yield self._first_block(path, None), _nobody_knows, partial(skip, i, 0)
        i = 0
        while (item := self._items.peek(i)) is not None:
            named = self._foresight.path_of(item)
            block = None if named is None else self._first_block(named, item.range)
            may_be = partial(self._foresight.may_be_later, block, i) if block else _nobody_knows
            yield block, may_be, partial(skip, len(children), i)
            i += 1

    def _first_block(self, path: str, bounds: Slice | None) -> Block | None:
        entry = self._source.last_known(path)
        key = None if entry is None else self._source.key(entry)
        if entry is None or key is None:
            return None
        want = clip(*(bounds or (None, None)), entry.object.size or 0)
        return (key, want.start // key.block_size) if want.size else None

    def skip(self, n_children: int, n_items: int) -> None:
        """Skip the next `n_children` objects of a folder, and then `n_items` items."""
        for _ in range(n_children):
            self._tally.passed(self._children.popleft()[1])
        for _ in range(n_items):
            self._items.take()
            self._foresight.took()
            self._tally.declared()
            self._tally.passed(None)


def _nobody_knows() -> None:
    return None


class _Folder(NamedTuple):
    """A folder or pattern, and the task that lists it; without a task, it has to be listed again."""

    path: str
    asked: asyncio.Task[list[ObjectInfo]] | None
    is_again: bool = False

    def unless_away(self) -> _Folder:
        """Return this folder, without its task if the task failed because the origin is unreachable."""
        asked = self.asked
        if asked is None or not asked.done() or asked.cancelled():
            return self
        return self._replace(asked=None) if isinstance(asked.exception(), OriginUnreachable) else self
