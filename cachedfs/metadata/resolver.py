"""What the objects and listings of an origin are: known, or asked for, once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from cachedfs.common.types import ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.errors import NoSuchBucket, ObjectNotFound, OriginUnreachable
from cachedfs.fetch.fetcher import OVERDUE_S, Fetcher
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.metadata.change_feed import ChangeFeeds, is_told
from cachedfs.metadata.listings import Listings, by_folder, by_path, is_nameless
from cachedfs.metadata.offline import StaleFallback
from cachedfs.origins.registry import is_whole

__all__ = ["MetadataResolver"]

T = TypeVar("T")

AT_ONCE = 8  # sibling folders listed at once; a listing costs 100 units of 325,000 a minute
NAMES_FIRST = 3  # names that are asked for one by one in a folder that changed since it was listed
MOST_FOLDERS = 1000  # of which that is counted
PAGE = 1000  # names in one answer of a listing: the most that Drive and GCS give
POLL_S = 0.002, 0.05  # shortest and longest wait between two looks at what another process asks


class MetadataResolver:
    """Answers what a path is and what a folder holds: from what is known, else from the origin, which is asked once.

    The coroutines run on the runtime's loop.
    """

    def __init__(self, source: Source, fetcher: Fetcher) -> None:
        self.source = source
        self._fetcher = fetcher
        self._change_feeds = ChangeFeeds(source)
        self._listings = Listings(source)
        self._stale_fallback = StaleFallback(source, self._listings)
        # Folders in whose present state names were asked for one by one: the mark of their listing, and how many.
        self._asked_in: dict[str, tuple[int, int]] = {}

    async def know(self, path: str) -> ObjectInfo:
        """Return what `path` is; asks when that is unknown or too old. Raises ObjectNotFound."""
        known = self.source.fresh(path) or await self.ask(path)
        if known.info is None:
            raise self.source.not_found(path, known)
        return known.info

    async def describe(self, path: str) -> ObjectInfo:
        """Return what `path` is with all its metadata, as `know` does; asks also when only a read told of it so far."""
        info = await self.know(path)
        if is_whole(self.source.identity, info):
            return info
        self.source.metadata.renewed(path)  # another process may have asked
        known = self.source.described(path) or await self.ask(path)
        if known.info is None:
            raise self.source.not_found(path, known)
        return known.info

    async def resolve(
        self, path: str, want: Range | Suffix, *, demand: int
    ) -> tuple[MetadataEntry, InflightRequest | None]:
        """Return what `path` is; the question is the read of `want` itself where that is cheapest.

        `demand`: how far into the object that read may go by itself.
        """
        by_reading = partial(self._ask_by_reading, path, want, demand)
        if self._is_asked(path) or self._is_new(path):
            # What others may have learnt is of no use where the answer is on its way, and is looked up before it is asked.
            return await self._once(path, by_reading)
        old = self.source.last_known(path)
        if self._is_asked_without_body(path, old):
            return await self.ask(path), None
        if old is not None and self.source.is_fresh(old):
            return old, None
        return await self._once(path, by_reading)

    def _is_new(self, path: str) -> bool:
        """Return whether this process never heard of `path`, and would ask what it is by reading it."""
        return self.source.metadata.in_memory(path) is None and not self._by_parent(path)

    def _is_asked_without_body(self, path: str, old: MetadataEntry | None) -> bool:
        """Return whether to ask what `path` is although something is known, or can be had for less than a read."""
        if old is not None and self.source.is_fresh(old):
            # What a listing calls a folder may be an object as well.
            return old.info is not None and old.info.kind != "file" and not self._by_parent(path)
        key = None if old is None else self.source.key(old)
        is_here = key is not None and self.source.runtime.cache.has(key, 0)
        return is_here or self._by_parent(path)  # too old, but probably unchanged

    def _is_asked(self, path: str) -> bool:
        """Return whether somebody in this process asked what `path` is, and waits for the answer."""
        if self.source.config.lifetime_s == 0:
            return False
        slot = (self.source.asker, path)
        return self.source.runtime.lookups.is_asked(slot, self.source.metadata.mark(path))

    def _by_parent(self, path: str) -> bool:
        """Return whether a lookup is all that there is to ask: by the origin's nature, or because nobody may be asked."""
        return self.source.config.offline or self.source.origin(path).by_parent

    async def ask(self, path: str) -> MetadataEntry:
        """Ask the origin what `path` is now."""
        known, _ = await self._once(path, lambda: self._lookup(path, self.source.last_known(path)))
        return known

    async def _once(self, path: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask, or wait for the answer to the same question that the same asker in this process asked already.

        Not when something was written to the path since that was asked, and never with max_age=0: then the answer on its
        way may be older than this question.
        """
        if self.source.config.lifetime_s == 0:
            return await ask()
        slot, mark = (self.source.asker, path), self.source.metadata.mark(path)
        return await self.source.runtime.lookups.ask(slot, mark, ask)  # type: ignore[no-any-return]  # as `ask` says

    async def _lookup(
        self, path: str, old: MetadataEntry | None
    ) -> tuple[MetadataEntry, InflightRequest | None]:
        if (stale := self._stale_fallback.of(path, old)) is not None:
            return stale, None
        if (held := await self._by_feed(path, old)) is not None:
            return held, None
        if (listed := await self._by_listing(path)) is not None:
            return listed, None
        async with self._turn(path):
            if (
                stale := self._stale_fallback.of(path, old)
            ) is not None:  # another learnt it while this one waited
                return stale, None
            return await self._looked_up(path, old), None

    def _turn(self, path: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Return what a lookup waits in for its turn, so that few are sent to an origin before it is known to be away.

        None is to be waited for where a lookup may first have to look up its folder, which takes a turn as well.
        """
        if self._by_parent(path):
            return contextlib.nullcontext()
        return self.source.runtime.lookup_slots(self.source.identity, self.source.config.concurrency)

    async def _looked_up(self, path: str, old: MetadataEntry | None) -> MetadataEntry:
        now, mark = time.time(), self.source.metadata.mark(path)
        seen = self._change_feeds.seen(path)
        info, why = None, ""
        way: list[ObjectInfo] = []
        try:
            info = await self._look_at(path, way)
        except ObjectNotFound as error:
            if self._by_parent(path):  # what is missing may be a folder, or a permission: the origin knows
                why = error.message.partition(": ")[2]  # the URL in front is its own
        except OriginUnreachable as error:
            return self._stale_fallback.despite(error, old)
        at = self._age_of_way(path, now)
        watch = None
        if info is None or is_told(info):
            watch = self._change_feeds.watch(seen, way[0] if way else None)
        return self.source.metadata.learn(path, info, checked_at=at, mark=mark, watch=watch, why=why)

    async def _by_feed(self, path: str, old: MetadataEntry | None) -> MetadataEntry | None:
        """Return what was known of `path` and has grown old, where the origin tells that it still holds."""
        if old is None:
            return None
        if await self._change_feeds.catch_up(path):
            return self.source.fresh(path)
        await self._change_feeds.begin(path)
        return None

    def _age_of_way(self, path: str, now: float) -> float:
        """Return since when an answer about `path` counts that was asked for at `now`: it is as old as what led to it."""
        folder = path.rpartition("/")[0]
        known = self.source.metadata.get(folder) if folder and self.source.origin(path).by_parent else None
        return now if known is None else min(now, known.checked_at)

    async def _by_listing(self, path: str) -> MetadataEntry | None:
        """Return what is known of `path` after its folder was listed again; None where that would cost more than asking.

        Where names are looked up in their folder, a question about one name costs as much as one page of a listing, which
        answers for all neighbours: an epoch over known files costs a request a folder then, not one a file.
        """
        folder = path.rpartition("/")[0]
        if not folder or not self.source.origin(path).by_parent or self.source.config.lifetime_s == 0:
            return None
        shared, identity = self.source.runtime.cache.metadata, self.source.identity
        listed = shared.listing_has(identity, folder, path)
        if listed is None or not self._is_worth_listing(folder, listed[1]):
            return None
        if (shared.listing_size(identity, folder, most=PAGE + 1) or 0) > PAGE:
            return None
        with contextlib.suppress(ObjectNotFound):  # the folder is gone: the question itself will tell
            await self._once(f"{folder}/", lambda: self._listed_anew(folder))
        return self.source.fresh(path)

    def _is_worth_listing(self, folder: str, listed_mark: int) -> bool:
        """Return whether to list a folder again rather than ask for one more name in it.

        Not at once where it changed since it was listed, as it will again: nobody knows how much a listing would bring.
        """
        mark = self.source.runtime.cache.metadata.listing_mark(self.source.identity, folder)
        at, n_asked = self._asked_in.pop(folder, (mark, 0))
        n_asked = n_asked + 1 if at == mark else 1
        self._asked_in[folder] = (mark, n_asked)
        while len(self._asked_in) > MOST_FOLDERS:
            del self._asked_in[next(iter(self._asked_in))]
        return mark == listed_mark or n_asked > NAMES_FIRST

    async def _listed_anew(self, folder: str) -> None:
        await self._list(folder, deep=False)

    async def _look_at(self, path: str, way: list[ObjectInfo]) -> ObjectInfo:
        """Ask the origin what `path` is; one that looks names up in their folder is told the folder, which becomes known.

        The folder that the answer is about goes into `way`, also when there is no such name in it.
        """
        origin, folder = self.source.origin(path), path.rpartition("/")[0]
        if not origin.by_parent or not folder:
            return await origin.lookup(path)
        before = self.source.last_known(folder)
        if before is None or before.info is None or self.source.is_fresh(before):
            way.append(await self.know(folder))
            return await origin.lookup(path, way[0])
        # The way to a path is asked for at once, not one folder after another: its folders rarely change.
        asked = self.source.runtime.spawn(self.know(folder))
        info = None
        try:
            with contextlib.suppress(ObjectNotFound):
                info = await origin.lookup(path, before.info)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        finally:
            now = await asked
        way.append(now)
        return info if info is not None and now.id == before.info.id else await origin.lookup(path, now)

    async def _ask_by_reading(
        self, path: str, want: Range | Suffix, demand: int
    ) -> tuple[MetadataEntry, InflightRequest | None]:
        """Send the read of `want` and learn from its headers what the object is.

        Across processes one asks, the others wait for the fact: their reads then meet the claims on its blocks.
        """
        fetch_lock = ObjectKey(self.source.identity, path, "what is it?", 0).hash64(0)
        cache = self.source.runtime.cache
        pause, overdue_at = POLL_S[0], time.monotonic() + OVERDUE_S
        while self.source.config.lifetime_s > 0 and not cache.take_lock(fetch_lock):
            if time.monotonic() > overdue_at:
                break  # who has it was stopped: then it is asked twice
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
            if (known := self.source.fresh(path)) is not None:
                return known, None
        try:
            old = self.source.last_known(path)
            if self._is_asked_without_body(path, old):
                return await self._lookup(path, old)
            if old is not None and self.source.is_fresh(old):
                return old, None
            if (stale := self._stale_fallback.of(path, old)) is not None:
                return stale, None
            inflight = InflightRequest(demand=demand)
            learnt: list[MetadataEntry] = []
            request = self.source.runtime.spawn(
                self._fetcher.run_request(
                    inflight, partial(self._fetcher.unknown, inflight, path, want, learnt)
                )
            )
            try:
                await inflight.began()
            except asyncio.CancelledError:
                if inflight.info is None:
                    request.cancel()  # before its headers nobody else knows of it, and nobody could wait for it again
                raise
            except ObjectNotFound:
                return learnt[0], None
            except OriginUnreachable as error:
                return self._stale_fallback.despite(error, old), None
            return learnt[0], inflight
        finally:
            if self.source.config.lifetime_s > 0:
                self.source.runtime.cache_writer.after_facts(lambda: cache.release_lock(fetch_lock))

    async def listing(self, folder: str) -> list[ObjectInfo]:
        """Return the children of `folder` by name; the object itself for an object. Raises ObjectNotFound."""
        # A long one takes its time: not on the loop.
        here = await asyncio.to_thread(self._listings.of, folder)
        if here is not None:
            return here
        if self.source.config.offline:
            raise self.source.offline(folder)
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self._listings.of, folder)
            if here is not None:
                return here
        known = self.source.fresh(folder)
        if known is not None and known.info is not None and known.info.kind == "file":
            return [known.info]
        children = await self._list(folder, deep=False)
        if not children:
            info = await self.know(folder)
            return [info] if info.kind == "file" else []
        return children

    async def find(self, folder: str) -> list[ObjectInfo]:
        """Return all objects below `folder`, and the folders between, by name."""
        here = await asyncio.to_thread(self._listings.below, folder)
        if here is not None:
            return here
        if not self.source.origin(folder).by_parent:
            return await self._list(folder, deep=True)
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self._listings.below, folder)
        return here if here is not None else await self._walk(folder)

    async def _walk(self, folder: str) -> list[ObjectInfo]:
        """Return all that is below `folder`; listings that are known are not asked for, sibling folders side by side."""
        gate = asyncio.Semaphore(AT_ONCE)
        found: list[ObjectInfo] = []

        async def visit(here: str, above: frozenset[str | None]) -> None:
            async with gate:
                children = await asyncio.to_thread(self._listings.of, here)
                if children is None:
                    # It went while its siblings were listed: an origin says so of nothing that is there.
                    with contextlib.suppress(ObjectNotFound):
                        children = await self._list(here, deep=False)
            known = self.source.metadata.get(here)
            above |= {known.info.id} if known is not None and known.info is not None else set()
            found.extend(children or ())
            async with asyncio.TaskGroup() as group:
                for child in children or ():
                    if child.kind == "directory" and (child.id is None or child.id not in above):
                        group.create_task(visit(child.path, above))

        try:
            await visit(folder, frozenset())
        except* Exception as group:  # one failure, whatever the others
            failure: BaseException = group
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            raise failure from None
        return sorted(found, key=by_path)

    async def _list(self, folder: str, *, deep: bool) -> list[ObjectInfo]:
        """Ask for a listing, one level or all, and remember it with every child it names."""
        if not deep:
            await self._change_feeds.begin(folder)
        shared, now = self.source.runtime.cache.metadata, time.time()
        seen = self._change_feeds.seen(folder)
        epoch, mark = shared.epoch(self.source.identity), self.source.metadata.mark(folder)
        if (stale := self._stale_fallback.listing(folder, deep=deep)) is not None:
            return stale
        found: list[ObjectInfo] = []
        origin = self.source.origin(folder)
        here = None
        try:
            if origin.by_parent and folder:
                here = await self.know(folder)
                now = self._age_of_way(f"{folder}/", now)
            async for info in origin.list(folder, here, deep=deep):
                found.append(info)
        except OriginUnreachable as error:
            return self._stale_fallback.listed_before(folder, error, deep=deep)
        except ObjectNotFound as error:
            if deep and not isinstance(error, NoSuchBucket):  # a misspelt bucket is no empty data set
                return []
            raise
        listings = by_folder(folder, found) if deep else {folder: found}
        is_folder = here is not None and here.kind == "directory"
        if found or is_folder:  # nothing at all may also be an object, or absence: only a lookup can tell
            known = self.source.fresh(folder)
            # GCS may have both: the object counts.
            if not is_folder and (known is None or known.info is None or known.info.kind != "file"):
                self.source.metadata.learn(
                    folder, ObjectInfo(folder, "directory", 0), checked_at=now, mark=mark
                )
            is_watched = here is not None and all(map(is_told, found))
            watch = self._change_feeds.watch(seen, here) if is_watched else None
            await asyncio.to_thread(self._listings.keep, listings, now, epoch, watch)
        named = (
            child for here, children in listings.items() for child in children if not is_nameless(child, here)
        )
        return sorted(named, key=by_path)

    async def is_folder(self, path: str) -> bool:
        """Return whether something is below `path`, of which no object is known; asks the origin, remembers a folder."""
        if self._by_parent(path):
            return False
        now, mark = time.time(), self.source.metadata.mark(path)
        async for _ in self.source.origin(path).list(path):
            folder = ObjectInfo(path, kind="directory", size=0)
            self.source.metadata.learn(path, folder, checked_at=now, mark=mark)
            return True
        return False
