"""Cached folder listings of one origin, shared by all processes of the machine."""

from __future__ import annotations

import logging
import operator
from collections.abc import Container, Iterable

from cachedfs.cache.index.metadata_records import FeedSnapshot, ListingRecord
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo
from cachedfs.core.objects import Objects, is_fresh
from cachedfs.errors import CacheError

__all__ = ["Listings", "by_folder", "by_path", "is_nameless"]

logger = logging.getLogger("cachedfs.core")

by_path = operator.attrgetter("path")


class Listings:
    """Complete listings of folders in the metadata store.

    Long listings take time: call it off the event loop.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def store(
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
        # Otherwise an older absence in memory would hide a path that was just listed.
        self._objects.remove_older(counters, now)
        return folder_counters

    def of(self, folder: str, lifetime_s: float | None = None) -> ListingRecord | None:
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
        listing.infos.sort(key=by_path)
        return listing

    def is_current(self, folder: str, listing: ListingRecord, lifetime_s: float | None = None) -> bool:
        """Return whether nothing below `folder` is known to have changed since, and `listing` is not expired."""
        lifetime_s = self._objects.lifetime_s if lifetime_s is None else lifetime_s
        counter = self._objects.engine.cache.metadata.listing_counter(self._objects.identity, folder)
        return counter == listing.counter and is_fresh(listing.checked_at, clock.now(), lifetime_s=lifetime_s)

    def below(
        self, folder: str, lifetime_s: float | None = None, above: frozenset[str | None] = frozenset()
    ) -> list[ObjectInfo] | None:
        """Return all objects and folders below `folder`, if every listing is cached; else None.

        `above` has the ids of the parent folders, to stop at cycles.
        """
        entry = self._objects.known(folder)
        above |= {entry.info.id} if entry is not None and entry.info is not None else set()
        listing = self.of(folder, lifetime_s)
        found = listing and listing.infos
        for child in found or []:
            is_cycle = child.id is not None and child.id in above
            if found is not None and child.kind == "directory" and not is_cycle:
                below = self.below(child.path, lifetime_s, above | {child.id})
                found = None if below is None else found + below
        return None if found is None else sorted(found, key=by_path)


def is_nameless(info: ObjectInfo, folder: str) -> bool:
    """Return whether `info` is the unnamed folder that an object `a//b` implies in `a`.

    It has no path of its own.
    """
    return info.path == f"{folder}/" and info.kind == "directory"


def _is_ambiguous(folder: str, found: list[ObjectInfo], listings: Container[str]) -> bool:
    """Return whether a child has no name, or is both an object and a folder."""
    kinds: dict[str, str] = {}
    return any(
        is_nameless(info, folder)
        or kinds.setdefault(info.path, info.kind) != info.kind
        or (info.kind == "file" and info.path in listings)
        for info in found
    )


def by_folder(folder: str, found: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
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
