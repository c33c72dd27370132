"""What comes next in a plan: its items, and in the place of a folder or a pattern the objects that it stands for."""

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

__all__ = ["PlanCursor", "Glob", "Spawn"]

Glob = Callable[[str], Awaitable[Mapping[str, Any]]]
Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class PlanCursor:
    """The objects of a plan in their order, numbered as they are taken. On the runtime's loop.

    `strip` makes a path of what users write, `glob` answers patterns, `spawn` starts what the plan ends with itself, `answered`
    is told of a folder or pattern why it did not come, and after OriginAway, when it is asked for again, that it did.
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
        self.n_begun = 0  # objects that were taken: the number of the next one
        # Of a folder: objects that come next, with their sizes.
        self._children: deque[tuple[str, int | None]] = deque()
        self._entering: deque[_Folder] = deque()  # they come after these, in order

    @property
    def is_over(self) -> bool:
        """Whether nothing comes any more."""
        return self._items.n_left == 0 and not (self._children or self._entering)

    def take(self) -> list[PrefetchObject] | None:
        """Take what comes next: one object; none yet of a folder or a pattern that came. None when there is nothing now.

        Raises what ends the plan: what its iterator raised, or a listing that is no error of the folder alone.
        """
        if self._children:
            return [self._begin(*self._children.popleft())]
        if self._entering:  # what is below a folder goes before what comes after it
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

    # Folders and patterns.

    def enter(self, path: str) -> None:
        """An object turned out to be a folder: what is below it comes next, after folders that are being entered."""
        self._entering.append(_Folder(path, self._spawn(self._expand(path))))

    def _entered(self) -> list[PrefetchObject] | None:
        """Take what the first folder stands for; None while that is not known."""
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
            # All that were asked together failed together: one pause.
            self._entering = deque(each.unless_away() for each in self._entering)
            self._answered(folder.path, error)
            return None
        except CachedFSError as error:
            self._entering.popleft()
            self._answered(folder.path, error)
            return []
        self._entering.popleft()
        # Others may be known: nobody was asked then, and nothing is learnt of the origin.
        if folder.is_again:
            self._answered(folder.path, None)
        self._tally.expanded([info.size for info in found])
        self._children.extend((info.path, info.size) for info in found)
        return []

    def _may_be_many(self, text: str, path: str) -> bool:
        known = self._source.fresh(path)
        if known is not None and known.info is not None:
            return known.info.kind == "directory"
        return text.endswith("/") or is_pattern(path)

    async def _expand(self, path: str) -> list[ObjectInfo]:
        """Return what is below a folder, or what a pattern names."""
        return await self._matches(path) if is_pattern(path) else await self._below(path)

    async def _below(self, path: str) -> list[ObjectInfo]:
        found = [info for info in await self._catalog.find(path) if info.kind == "file"]
        if not found and (info := await self._catalog.know(path)).kind == "file":
            found = [info]
        return found

    async def _matches(self, pattern: str) -> list[ObjectInfo]:
        named = await self._glob(pattern)
        if not named:  # perhaps a name with one of these characters in it
            return await self._below(pattern)
        found: dict[str, ObjectInfo] = {}
        for name, info in named.items():
            is_file = info["type"] == "file"
            below = [ObjectInfo(name, size=info["size"])] if is_file else await self._below(name)
            found |= {each.path: each for each in below if each.path not in found}
        return list(found.values())

    # Where its reader may be.

    def beyond(self, skip: Callable[[int, int], None]) -> Beyond:
        """Yield the first block of each object that comes, as far as it is known; `skip` goes on behind so many of each kind."""
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
        known = self._source.last_known(path)
        key = None if known is None else self._source.key(known)
        if known is None or key is None:
            return None
        want = clip(*(bounds or (None, None)), known.object.size or 0)
        return (key, want.start // key.block_size) if want.size else None

    def skip(self, n_children: int, n_items: int) -> None:
        """Go on behind so many of the objects of a folder and of the items that come next."""
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
    """A folder or a pattern, and the question what it stands for; without one, it is to be asked for again."""

    path: str
    asked: asyncio.Task[list[ObjectInfo]] | None
    is_again: bool = False

    def unless_away(self) -> _Folder:
        """Return this, without a question that ended because the origin is away."""
        asked = self.asked
        if asked is None or not asked.done() or asked.cancelled():
            return self
        return self._replace(asked=None) if isinstance(asked.exception(), OriginUnreachable) else self
