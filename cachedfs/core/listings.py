"""Folder listings: complete ones in the metadata store, shared by all processes of the machine, else from the origin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
from collections.abc import Awaitable, Callable, Container, Iterable
from functools import partial

from cachedfs.cache.index.metadata_records import FeedSnapshot, ListingRecord
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import without_slash
from cachedfs.core.change_feed import ChangeFeeds, is_covered
from cachedfs.core.objects import Objects, is_fresh
from cachedfs.core.offline import StaleFallback
from cachedfs.core.polling import poll
from cachedfs.errors import CacheError, NoSuchBucket, ObjectNotFound
from cachedfs.origins.request_slots import is_speculative

__all__ = ["Listings"]

logger = logging.getLogger("cachedfs.core")

AT_ONCE = 8  # folders listed in parallel; a Drive listing costs 100 of 325,000 quota units a minute

_by_path = operator.attrgetter("path")


class Listings:
    """Lists folders, from complete listings in the metadata store or else from the origin.

    The coroutines run on the engine's event loop. Long listings take time: the other methods are called off it.
    """

    def __init__(
        self,
        objects: Objects,
        change_feeds: ChangeFeeds,
        stale_fallback: StaleFallback,
        info: Callable[[str], Awaitable[ObjectInfo]],
    ) -> None:
        self._objects, self._change_feeds, self._stale_fallback = objects, change_feeds, stale_fallback
        self._info = info  # looks a path up

    async def get(self, folder: str) -> ListingRecord:
        """Return the children of `folder`, sorted by path; for an object, the object itself.

        Raises ObjectNotFound.
        """
        # In a thread: a long listing would block the event loop.
        here = await asyncio.to_thread(self.cached, folder)
        if here is not None:
            return here
        if self._objects.config.offline:
            raise self._objects.offline(folder)
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self.cached, folder)
            if here is not None:
                return here
        entry = self._objects.fresh(folder)
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return _for_once([entry.info])
        listing = await self.request(folder, deep=False)
        if not listing.infos:
            info = await self._info(folder)
            return _for_once([info]) if info.kind == "file" else listing
        return listing

    async def find(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, sorted by path."""
        here = await asyncio.to_thread(self._below, folder)
        if here is not None:
            return here
        if not self._objects.origin(folder).by_parent:
            return (await self.request(folder, deep=True)).infos
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self._below, folder)
        return here if here is not None else await self._walk(folder)

    async def _walk(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, from cached listings where possible.

        Sends up to AT_ONCE list requests in parallel.
        """
        gate = asyncio.Semaphore(AT_ONCE)
        found: list[ObjectInfo] = []

        async def visit(here: str, above: frozenset[str | None]) -> None:
            async with gate:
                listing = await asyncio.to_thread(self.cached, here)
                if listing is None:
                    await self._wait_for_spare_rate(here)
                    # A folder that is missing, or was removed during the walk, counts as empty.
                    with contextlib.suppress(ObjectNotFound):
                        listing = await self.request(here, deep=False)
            children = [] if listing is None else listing.infos
            entry = self._objects.known(here)
            above |= {entry.info.id} if entry is not None and entry.info is not None else set()
            found.extend(children)
            async with asyncio.TaskGroup() as group:
                for child in children:
                    if child.kind == "directory" and (child.id is None or child.id not in above):
                        group.create_task(visit(child.path, above))

        try:
            await visit(folder, frozenset())
        except* Exception as group:  # raise one error as it is, not a group
            failure: BaseException = group
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            raise failure from None
        return sorted(found, key=_by_path)

    async def _wait_for_spare_rate(self, folder: str) -> None:
        """Wait until a request that no caller waits for delays no other."""
        if is_speculative():
            origin = self._objects.origin(folder)
            await poll(lambda: not origin.spare_s())

    async def request(self, folder: str, *, deep: bool) -> ListingRecord:
        """Request a listing of one level, or of all levels if `deep`, and store it.

        The metadata of every child is stored too.
        """
        if not deep:
            await self._change_feeds.begin(folder)
        objects = self._objects
        stored = objects.engine.cache.metadata.listing_size(objects.identity, folder, most=1)
        return await self._stale_fallback.instead_of(
            partial(self._ask, folder, deep=deep),
            folder,
            partial(self._stale, folder, deep=deep),
            has_stale=stored is not None,
        )

    async def _ask(self, folder: str, *, deep: bool) -> ListingRecord:
        objects, now = self._objects, clock.now()
        position = self._change_feeds.position(folder)
        epoch, counter = objects.engine.cache.metadata.epoch(objects.identity), objects.counter(folder)
        found: list[ObjectInfo] = []
        origin, here = objects.origin(folder), None
        try:
            if origin.by_parent and folder:
                here = await self._info(folder)
                now = objects.not_after_folder(f"{folder}/", now)
            async for info in origin.list(folder, here, deep=deep):
                found.append(info)
        except ObjectNotFound as error:
            if deep and not isinstance(error, NoSuchBucket):  # a misspelled bucket is not an empty folder
                return _for_once([])
            raise
        listings = _by_folder(folder, found) if deep else {folder: found}
        is_folder = here is not None and here.kind == "directory"
        kept: dict[str, int] = {}
        if found or is_folder:  # an empty answer may also mean an object or an absence: needs a lookup
            entry = objects.fresh(folder)
            # GCS may have an object and a folder of the same name: the object counts.
            if not is_folder and (entry is None or entry.info is None or entry.info.kind != "file"):
                objects.learn(folder, ObjectInfo(folder, "directory", 0), asked_at=now, counter=counter)
            is_watched = here is not None and all(map(is_covered, found))
            watch = self._change_feeds.snapshot(position, here) if is_watched else None
            if origin.lists_all(folder):  # a stored listing proves that other names are absent
                kept = await asyncio.to_thread(self._store, listings, now, epoch, watch)
        named = (
            child
            for here, children in listings.items()
            for child in children
            if not _is_nameless(child, here)
        )
        children = sorted(named, key=_by_path)
        return ListingRecord(children, now, kept[folder]) if folder in kept else _for_once(children)

    def _stale(self, folder: str, *, deep: bool) -> ListingRecord | None:
        """Return what the store has of a listing, of any age."""
        if not deep:
            listing = self.cached(folder, math.inf)
            return listing and _for_once(listing.infos)
        below = self._below(folder, math.inf)
        return None if below is None else _for_once(below)

    def _store(
        self, listings: dict[str, list[ObjectInfo]], now: float, epoch: int, watch: FeedSnapshot | None
    ) -> dict[str, int]:
        """Store complete listings as of `now`; return the change counters of those that were stored, by folder.

        Nothing is stored if a write to the origin changed `epoch` since they were requested. A listing is not stored if
        it has a child without a name, or an object and a folder of the same name: the store keeps one entry per name,
        which would hide the other.
        """
        listings = {
            folder: found for folder, found in listings.items() if not _is_ambiguous(folder, found, listings)
        }
        shared, identity = self._objects.engine.cache.metadata, self._objects.identity
        counters = {
            info.path: shared.counter(identity, info.path)
            for children in listings.values()
            for info in children
        }
        folder_counters = {folder: shared.listing_counter(identity, folder) for folder in listings}
        if shared.epoch(identity) != epoch:
            return {}  # a write happened during the request: return the listing, but do not cache it
        try:
            shared.keep_listings(
                identity,
                listings,
                checked_at=now,
                counters=counters,
                folder_counters=folder_counters,
                watch=watch,
            )
        except CacheError as error:
            logger.debug("not kept: %s", error)  # the cache warns once; a listing never fails because of it
            folder_counters = {}
        for path in counters:  # an older absence in memory would hide a path that was just listed
            if (old := self._objects.entries.get(path)) is not None and old.asked_at < now:
                self._objects.entries.pop(path, None)
        return folder_counters

    def cached(self, folder: str, lifetime_s: float | None = None) -> ListingRecord | None:
        """Return the cached listing of `folder`, sorted by path; None if it is expired.

        It expires after `lifetime_s`, or after `max_age`.
        """
        listing = self._objects.engine.cache.metadata.listing(self._objects.identity, folder)
        if listing is None:
            return None
        at = self._objects.confirmed_until(folder, listing.checked_at, listing.confirmation)
        listing = listing._replace(checked_at=at)
        if not self.is_current(folder, listing, lifetime_s):
            return None
        listing.infos.sort(key=_by_path)
        return listing

    def is_current(self, folder: str, listing: ListingRecord, lifetime_s: float | None = None) -> bool:
        """Return whether nothing below `folder` is known to have changed since, and `listing` is not expired."""
        lifetime_s = self._objects.lifetime_s if lifetime_s is None else lifetime_s
        counter = self._objects.engine.cache.metadata.listing_counter(self._objects.identity, folder)
        return counter == listing.counter and is_fresh(listing.checked_at, clock.now(), lifetime_s=lifetime_s)

    def _below(
        self, folder: str, lifetime_s: float | None = None, above: frozenset[str | None] = frozenset()
    ) -> list[ObjectInfo] | None:
        """Return all objects and folders below `folder`, if every listing is cached; else None.

        `above` has the ids of the parent folders, to stop at cycles.
        """
        entry = self._objects.known(folder)
        above |= {entry.info.id} if entry is not None and entry.info is not None else set()
        listing = self.cached(folder, lifetime_s)
        found = listing and listing.infos
        for child in found or []:
            is_cycle = child.id is not None and child.id in above
            if found is not None and child.kind == "directory" and not is_cycle:
                below = self._below(child.path, lifetime_s, above | {child.id})
                found = None if below is None else found + below
        return None if found is None else sorted(found, key=_by_path)

    async def is_folder(self, path: str) -> bool:
        """Return whether `path`, which is not an object, is a folder.

        Asks the origin, and stores a folder that it finds.
        """
        if self._objects.config.offline or self._objects.origin(path).by_parent:
            return False
        path = without_slash(path)
        now, counter = clock.now(), self._objects.counter(path)
        async for _ in self._objects.origin(path).list(path):
            folder = ObjectInfo(path, kind="directory", size=0)
            self._objects.learn(path, folder, asked_at=now, counter=counter)
            return True
        return False


def _for_once(infos: list[ObjectInfo]) -> ListingRecord:
    """Return a listing that is never current: no change counter is negative."""
    return ListingRecord(infos, 0.0, -1)


def _is_nameless(info: ObjectInfo, folder: str) -> bool:
    """Return whether `info` is the unnamed folder that an object `a//b` implies in `a`.

    It has no path of its own.
    """
    return info.path == f"{folder}/" and info.kind == "directory"


def _is_ambiguous(folder: str, found: list[ObjectInfo], listings: Container[str]) -> bool:
    """Return whether a child has no name, or is both an object and a folder."""
    kinds: dict[str, str] = {}
    return any(
        _is_nameless(info, folder)
        or kinds.setdefault(info.path, info.kind) != info.kind
        or (info.kind == "file" and info.path in listings)
        for info in found
    )


def _by_folder(folder: str, found: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Split a recursive listing of `folder` into the complete listing of each folder."""
    listings: dict[str, dict[str, ObjectInfo]] = {folder: {}}
    for info in found:
        child = info
        while child.path != folder:
            parent = child.path.rpartition("/")[0]
            is_known = child.path in listings.get(parent, {})
            listings.setdefault(parent, {}).setdefault(child.path, child)
            is_listed = child.kind == "directory" and not child.details.get("cycle")
            if is_listed:
                listings.setdefault(child.path, {})
            if is_known or parent == folder or not parent or not parent.startswith(folder):
                break
            child = ObjectInfo(path=parent, kind="directory", size=0)
    return {name: list(children.values()) for name, children in listings.items()}
