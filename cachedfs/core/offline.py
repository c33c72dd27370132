"""Serve stale metadata while the origin is unreachable (`stale_if_error`) or `offline` is set."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo
from cachedfs.core.listings import Listings
from cachedfs.core.objects import ABSENCE_S, Entry, Objects, folder_of
from cachedfs.errors import OriginUnreachable
from cachedfs.origins.base import has_stale_answer

__all__ = ["StaleFallback"]

# A node of version 3 has the first one. A reader that does not know the version asks for all of them.
ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")

logger = logging.getLogger("cachedfs.core")


class StaleFallback:
    """Stale metadata entries and listings, for an unreachable origin or with `offline`.

    The first stale answer for an unreachable origin logs a warning.
    """

    def __init__(self, objects: Objects, listings: Listings) -> None:
        self._objects = objects
        self._listings = listings
        self._warned = False

    def of(self, path: str, old: Entry | None) -> Entry | None:
        """Return `old` if the origin must not be asked now, else None.

        Raises OriginUnavailable if `offline` is set and `old` cannot be served.
        """
        objects = self._objects
        if objects.config.offline:
            if old is None or not self._can_serve(old):
                raise objects.offline(path)
            return old
        if old is None or not self._is_needed() or not self._can_serve(old):
            return None
        self._warn(f"{objects.url(path)}: the origin could not be reached a moment ago")
        return old

    def entry_after(self, error: OriginUnreachable, old: Entry | None) -> Entry:
        """Return `old` after the origin turned out to be unreachable.

        Raises `error` if that is not possible.
        """
        self._objects.engine.mark_unreachable(self._objects.identity)
        if old is None or not self._objects.config.stale_if_error or not self._can_serve(old):
            raise error
        self._warn(str(error))
        return old

    def waiting_less(self, old: Entry | None) -> AbstractContextManager[None]:
        """Let requests in the block connect within seconds if `old` can be served instead of their answer."""
        is_set = self._objects.config.stale_if_error
        return _has_stale_answer(is_set and old is not None and self._can_serve(old))

    def waiting_less_for_listing(self, folder: str) -> AbstractContextManager[None]:
        """Let requests in the block connect within seconds if a listing of `folder` is cached."""
        shared, identity = self._objects.engine.cache.metadata, self._objects.identity
        is_set = self._objects.config.stale_if_error
        return _has_stale_answer(is_set and shared.listing_size(identity, folder, most=1) is not None)

    def listing(self, folder: str, *, deep: bool) -> list[ObjectInfo] | None:
        """Return a stale listing if the origin was unreachable a moment ago, else None."""
        if not self._is_needed():
            return None
        old = self._stale_listing(folder, deep=deep)
        if old is not None:
            self._warn(f"{self._objects.url(folder)}: the origin could not be reached a moment ago")
        return old

    def listing_after(self, folder: str, error: OriginUnreachable, *, deep: bool) -> list[ObjectInfo]:
        """Return a stale listing after the origin turned out to be unreachable.

        Raises `error` if there is none.
        """
        self._objects.engine.mark_unreachable(self._objects.identity)
        old = self._stale_listing(folder, deep=deep) if self._objects.config.stale_if_error else None
        if old is None:
            raise error
        self._warn(str(error))
        return old

    def _can_serve(self, old: Entry) -> bool:
        """Return whether a stale entry can stand for the origin's answer.

        An object or folder can. An absence becomes the fill value of a Zarr array, so it needs a complete listing that
        lacks the path, and no known object beside or above it may be newer than the listing: a writer that appends to
        an array also replaces its metadata. A 404 can stand only for one of the metadata files of a Zarr node.
        """
        if old.info is not None:
            return True
        now = clock.now()
        newest_at = self._objects.newest_version_at(folder_of(old.path))
        unlisted_at = self._objects.unlisted_at(old.path)
        # A time to come is that of a clock that was wrong, and proves nothing.
        if unlisted_at is not None and newest_at <= unlisted_at <= now:
            return True
        # Requests of one open overlap, so its 404 may be a little older than what it was used with.
        is_newest = newest_at <= old.asked_at + ABSENCE_S and old.asked_at <= now
        return is_newest and self._is_zarr_node(old.path)

    def _is_zarr_node(self, path: str) -> bool:
        """Return whether `path` is a metadata file of a Zarr node of which another one is known."""
        folder, _, name = path.rpartition("/")
        if name not in ZARR_METADATA:
            return False
        known = (self._objects.known(f"{folder}/{other}") for other in ZARR_METADATA if other != name)
        return any(entry is not None and entry.info is not None for entry in known)

    def _is_needed(self) -> bool:
        """Return whether the origin was unreachable a moment ago and `stale_if_error` is set."""
        objects = self._objects
        return objects.config.stale_if_error and objects.engine.is_unreachable(objects.identity)

    def _stale_listing(self, folder: str, *, deep: bool) -> list[ObjectInfo] | None:
        if deep:
            return self._listings.below(folder, math.inf)
        listing = self._listings.of(folder, math.inf)
        return listing and listing.infos

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s; serving the versions known to the cache (stale_if_error=False forbids it)", reason
            )


@contextmanager
def _has_stale_answer(value: bool) -> Iterator[None]:
    token = has_stale_answer.set(value)
    try:
        yield
    finally:
        has_stale_answer.reset(token)
