"""The complete listings of one origin that are known: kept in the cache, for all processes of the machine."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Container, Iterable

from cachedfs.cache.index.metadata_records import FeedSnapshot
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import CacheError
from cachedfs.fetch.source import Source, is_fresh

__all__ = ["Listings", "by_folder", "by_path", "is_nameless"]

logger = logging.getLogger("cachedfs.metadata")

by_path = operator.attrgetter("path")


class Listings:
    """What folders hold, as far as that is known and young enough. A long listing takes its time: not on the loop."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def keep(
        self, listings: dict[str, list[ObjectInfo]], now: float, epoch: int, watch: FeedSnapshot | None
    ) -> None:
        """Remember complete listings as of `now`, unless something was written since `epoch` was read.

        Not where a child is two things, or has no name: one of a name is remembered, and would stand for all.
        """
        listings = {
            folder: found for folder, found in listings.items() if not _is_odd(folder, found, listings)
        }
        shared, identity = self._source.runtime.cache.metadata, self._source.identity
        marks = {
            info.path: shared.mark(identity, info.path) for children in listings.values() for info in children
        }
        folder_marks = {folder: shared.listing_mark(identity, folder) for folder in listings}
        if shared.epoch(identity) != epoch:
            return  # something was written while the origin answered: the answer is given, not kept
        try:
            shared.keep_listings(
                identity, listings, checked_at=now, marks=marks, folder_marks=folder_marks, watch=watch
            )
        except CacheError as error:
            logger.debug("not kept: %s", error)  # the cache says it aloud, once; a listing never fails for it
        self._source.metadata.overtaken(
            marks, now
        )  # else what was just listed might be absent for who reads it

    def of(self, folder: str, lifetime_s: float | None = None) -> list[ObjectInfo] | None:
        """Return a listing that is here and young enough: for `max_age`, if nothing else is said."""
        shared, identity = self._source.runtime.cache.metadata, self._source.identity
        listing = shared.listing(identity, folder)
        if listing is None or listing.mark != shared.listing_mark(identity, folder):
            return None
        lifetime_s = self._source.config.lifetime_s if lifetime_s is None else lifetime_s
        at = self._source.metadata.held_until(folder, listing.checked_at, listing.told)
        if not is_fresh(at, time.time(), lifetime_s=lifetime_s):
            return None
        return sorted(listing.infos, key=by_path)

    def below(
        self, folder: str, lifetime_s: float | None = None, above: frozenset[str | None] = frozenset()
    ) -> list[ObjectInfo] | None:
        """Return all that is below `folder` when every listing of it is here; `above`: ids of the folders on the way."""
        here = self._source.metadata.get(folder)
        above |= {here.info.id} if here is not None and here.info is not None else set()
        found = self.of(folder, lifetime_s)
        for child in found or []:
            is_cycle = child.id is not None and child.id in above
            if found is not None and child.kind == "directory" and not is_cycle:
                below = self.below(child.path, lifetime_s, above | {child.id})
                found = None if below is None else found + below
        return None if found is None else sorted(found, key=by_path)


def is_nameless(info: ObjectInfo, folder: str) -> bool:
    """Return whether this is the folder without a name that is in `a` where there is `a//b`: it is no path of its own."""
    return info.path == f"{folder}/"


def _is_odd(folder: str, found: list[ObjectInfo], listings: Container[str]) -> bool:
    """Return whether one of what was found has no name, or is an object and a folder too."""
    kinds: dict[str, str] = {}
    return any(
        is_nameless(info, folder)
        or kinds.setdefault(info.path, info.kind) != info.kind
        or (info.kind == "file" and info.path in listings)
        for info in found
    )


def by_folder(folder: str, found: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Return the complete listings that a listing of all that is below `folder` amounts to."""
    listings: dict[str, dict[str, ObjectInfo]] = {folder: {}}
    for info in found:
        child = info
        while child.path != folder:
            parent = child.path.rpartition("/")[0]
            known = child.path in listings.get(parent, {})
            listings.setdefault(parent, {}).setdefault(child.path, child)
            was_listed = child.kind == "directory" and not child.details.get("cycle")
            if was_listed:
                listings.setdefault(child.path, {})
            if known or parent == folder or not parent or not parent.startswith(folder):
                break
            child = ObjectInfo(path=parent, kind="directory", size=0)
    return {name: list(children.values()) for name, children in listings.items()}
