"""Folder listings, from the metadata store that all processes of the machine share, or from the origin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
from collections.abc import Awaitable, Callable, Container, Iterable
from functools import partial
from itertools import chain
from typing import TypeVar

from cachedfs.cache.index.metadata_records import FeedSnapshot, ListingRecord
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.core.change_feed import ChangeFeeds, is_covered
from cachedfs.core.objects import Objects, is_fresh
from cachedfs.core.offline import answer_of
from cachedfs.core.polling import poll
from cachedfs.errors import CacheError, NoSuchBucket, ObjectNotFound
from cachedfs.origins.request_slots import is_speculative

logger = logging.getLogger("cachedfs.core")

AT_ONCE = 8  # folders listed in parallel; a Drive listing costs 100 of 325,000 quota units a minute

T = TypeVar("T")
_Ids = frozenset[str | None]  # of a folder and those above it, to stop at cycles
_by_path = operator.attrgetter("path")


class Listings:
    """Lists folders, from complete listings in the metadata store or else from the origin.

    The coroutines run on the engine's event loop. Long listings take time: the other methods are called off it.
    """

    def __init__(
        self,
        objects: Objects,
        change_feeds: ChangeFeeds,
        info: Callable[[str], Awaitable[ObjectInfo]],
    ) -> None:
        self._objects, self._change_feeds = objects, change_feeds
        self._info = info  # looks a path up

    async def get(self, folder: str) -> ListingRecord:
        """Return the children of `folder`, sorted by path; for an object, the object itself.

        Raises ObjectNotFound.
        """
        listing = await self._after_poll(self.cached, folder)
        if listing is not None:
            return listing
        entry = self._objects.fresh(folder)
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return _for_once([entry.info])
        listing = await self._request(folder, deep=False)
        if listing.infos or (info := await self._info(folder)).kind != "file":
            return listing
        return _for_once([info])

    async def of_names(self, folder: str) -> ListingRecord:
        """Return the children of `folder` for lookups of their names.

        A later lookup of a name that is not among them asks for it, unless a caller listed the folder before: who lists a
        folder expects that nothing else is in it for `max_age`, who opens some of its files does not.
        """
        listing = self._objects.store.listing(self._objects.identity, folder, with_infos=False)
        if listing is not None and listing.counter >= 0:
            return await self.get(folder)
        return await self._ask(folder, deep=False, is_for_names=True)

    async def find(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, sorted by path."""
        listing = await self._after_poll(self._below, folder)
        if listing is not None:
            return listing.infos
        if self._objects.origin(folder).by_parent:
            return await self._walk(folder)
        try:
            return (await self._request(folder, deep=True)).infos
        except NoSuchBucket:  # a misspelled bucket is not an empty folder
            raise
        except ObjectNotFound:
            return []

    async def _after_poll(self, cached: Callable[[str], T | None], folder: str) -> T | None:
        """Return what is cached of `folder`; if that is expired, look again after the shared cache and the change feed."""
        # In a thread: a long listing would block the event loop.
        found = await asyncio.to_thread(cached, folder)
        if found is None and await self._objects.has_renewed():
            found = await asyncio.to_thread(cached, folder)
        if found is None and await self._change_feeds.catch_up(folder):
            found = await asyncio.to_thread(cached, folder)
        return found

    async def _walk(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, from cached listings where possible.

        Sends up to AT_ONCE list requests in parallel.
        """
        gate, origin = asyncio.Semaphore(AT_ONCE), self._objects.origin(folder)
        found: list[ObjectInfo] = []

        async def visit(here: str, ids: _Ids) -> None:
            async with gate:
                listing = await asyncio.to_thread(self.cached, here)
                if listing is None and is_speculative():  # no caller waits: delay no other request
                    await poll(lambda: not origin.spare_s())
                # A folder that is missing, or was removed during the walk, counts as empty.
                with contextlib.suppress(ObjectNotFound):
                    listing = listing or await self._request(here, deep=False)
            if listing is not None:
                found.extend(listing.infos)
                for child in _folders(listing.infos, ids):
                    group.create_task(visit(*child))

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(visit(folder, self._ids(folder)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return sorted(found, key=_by_path)

    def _ids(self, folder: str) -> _Ids:
        entry = self._objects.known(folder)
        return frozenset() if entry is None or entry.info is None else frozenset([entry.info.id])

    async def _request(self, folder: str, *, deep: bool) -> ListingRecord:
        """Request a listing of one level, or of all levels if `deep`, and store it.

        The metadata of every child is stored too.
        """
        ask, stale = partial(self._ask, folder, deep=deep), partial(self._stale, folder, deep=deep)
        is_stored = self._objects.store.listing_size(self._objects.identity, folder, most=1) is not None
        return await answer_of(self._objects, ask, folder, stale if is_stored else None)

    async def _ask(self, folder: str, *, deep: bool, is_for_names: bool = False) -> ListingRecord:
        objects, origin, now = self._objects, self._objects.origin(folder), clock.now()
        position = self._change_feeds.position(folder)
        before, counter = self._changes(folder), objects.counter(folder)
        here = None
        if origin.by_parent and folder:
            here = await self._info(folder)
            now = objects.not_after_folder(f"{folder}/", now)
        cuts = await asyncio.to_thread(objects.store.cuts, objects.identity, folder)
        found = [info async for info in origin.list_again(folder, here, deep=deep, cuts=cuts)]
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
                kept = await asyncio.to_thread(
                    self._store, folder, listings, now, before, watch, is_for_names
                )
        children = [child for at, infos in listings.items() for child in infos if not _is_nameless(child, at)]
        return ListingRecord(sorted(children, key=_by_path), now, kept.get(folder, -1))

    def _stale(self, folder: str, *, deep: bool) -> ListingRecord | None:
        """Return what the store has of a listing, of any age."""
        listing = (self._below if deep else self.cached)(folder, math.inf)
        return listing and _for_once(listing.infos)

    def _changes(self, folder: str) -> int:
        """Return a number that differs after a change below `folder`, which a listing meanwhile may have missed.

        What Google Drive reports may be of an unknown folder: there it differs after any change.
        """
        objects = self._objects
        if objects.origin(folder).by_parent:
            return objects.store.epoch(objects.identity)
        return objects.store.listing_counter(objects.identity, folder)

    def _store(
        self,
        folder: str,
        listings: dict[str, list[ObjectInfo]],
        now: float,
        before: int,
        watch: FeedSnapshot | None,
        is_for_names: bool,
    ) -> dict[str, int]:
        """Store complete listings as of `now`; return the change counters of those that were stored, by folder.

        Nothing is stored if `_changes` are not those of `before` the request. A listing is not stored if
        it has a child without a name, or an object and a folder of the same name: the store keeps one entry per name,
        which would hide the other.
        """
        store, identity = self._objects.store, self._objects.identity
        listings = {
            name: found for name, found in listings.items() if not _is_ambiguous(name, found, listings)
        }
        paths = [info.path for found in listings.values() for info in found]
        counters = {path: store.counter(identity, path) for path in paths}
        folder_counters = {name: store.listing_counter(identity, name) for name in listings}
        if is_for_names:
            folder_counters = {name: _of_names(counter) for name, counter in folder_counters.items()}
        if self._changes(folder) != before:
            return {}  # a write happened during the request: return the listing, but do not cache it
        try:
            store.keep_listings(
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
        self._objects.keep_listed(chain.from_iterable(listings.values()), counters, asked_at=now)
        return folder_counters

    def cached(self, folder: str, lifetime_s: float | None = None) -> ListingRecord | None:
        """Return the cached listing of `folder`, sorted by path; None if it is expired.

        It expires after `lifetime_s`, or after `max_age`.
        """
        # First without the children: those of an expired listing would be decoded for nothing.
        if self._current(folder, lifetime_s, with_infos=False) is None:
            return None
        listing = self._current(folder, lifetime_s, with_infos=True)
        if listing is not None:
            listing.infos.sort(key=_by_path)
            store, identity, at = self._objects.store, self._objects.identity, listing.checked_at
            newer = store.newer_than(at, identity, listing.counters)
            known = [info for info in listing.infos if info.path not in newer]
            self._objects.keep_listed(known, listing.counters, asked_at=at)
        return listing

    def _current(self, folder: str, lifetime_s: float | None, *, with_infos: bool) -> ListingRecord | None:
        listing = self._objects.store.listing(self._objects.identity, folder, with_infos=with_infos)
        if listing is None:
            return None
        at = self._objects.confirmed_until(folder, listing.checked_at, listing.confirmation)
        listing = listing._replace(checked_at=at)
        return listing if self.is_current(folder, listing, lifetime_s) else None

    def is_current(self, folder: str, listing: ListingRecord, lifetime_s: float | None = None) -> bool:
        """Return whether nothing below `folder` is known to have changed since, and `listing` is not expired."""
        lifetime_s = self._objects.lifetime_s if lifetime_s is None else lifetime_s
        counter = self._objects.store.listing_counter(self._objects.identity, folder)
        is_same = listing.counter in (counter, _of_names(counter))
        return is_same and is_fresh(listing.checked_at, clock.now(), lifetime_s=lifetime_s)

    def _below(self, folder: str, lifetime_s: float | None = None) -> ListingRecord | None:
        """Return all objects and folders below `folder`, if every listing is cached; else None."""
        found: list[ObjectInfo] = []
        pending = [(folder, self._ids(folder))]
        while pending:
            here, ids = pending.pop()
            listing = self.cached(here, lifetime_s)
            if listing is None:
                return None
            found += listing.infos
            pending += _folders(listing.infos, ids)
        return _for_once(sorted(found, key=_by_path))


def _of_names(counter: int) -> int:
    """Return the change counter of a listing for lookups of names, with which it proves no absence."""
    return -2 - counter


def _for_once(infos: list[ObjectInfo]) -> ListingRecord:
    """Return a listing that is never current: no change counter is negative."""
    return ListingRecord(infos, 0.0, -1)


def _folders(infos: Iterable[ObjectInfo], ids: _Ids) -> list[tuple[str, _Ids]]:
    """Return the folders of a listing, each with its ids; without those that the listing is in."""
    return [
        (info.path, ids | {info.id})
        for info in infos
        if info.kind == "directory" and (info.id is None or info.id not in ids)
    ]


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
    listings: dict[str, dict[str, ObjectInfo]] = {folder: {}}  # each but `folder` is a child in another one
    for info in found:
        child = info
        if info.kind == "directory":
            listings.setdefault(info.path, {})
        while child.path != folder:
            parent = folder_of(child.path)
            is_known = parent in listings
            listings.setdefault(parent, {}).setdefault(child.path, child)
            if is_known:
                break
            child = ObjectInfo(parent, "directory", 0)
    return {name: list(children.values()) for name, children in listings.items()}
