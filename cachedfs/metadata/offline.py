"""Serve stale metadata while the origin is unreachable (`stale_if_error`) or `offline` is set."""

from __future__ import annotations

import logging
import math

from cachedfs.common.types import ObjectInfo
from cachedfs.errors import OriginUnreachable
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.metadata.listings import Listings

__all__ = ["StaleFallback"]

logger = logging.getLogger("cachedfs.metadata")


class StaleFallback:
    """Stale metadata entries and listings, for an unreachable origin or with `offline`.

    The first stale answer for an unreachable origin logs a warning.
    """

    def __init__(self, source: Source, listings: Listings) -> None:
        self._source = source
        self._listings = listings
        self._warned = False

    def of(self, path: str, old: MetadataEntry | None) -> MetadataEntry | None:
        """Return `old` if the origin must not be asked now, else None.

        Raises OriginUnavailable if `offline` is set and `old` is not an existing object or folder.
        """
        config, source = self._source.config, self._source
        if config.offline:
            if old is None or old.info is None:
                raise source.offline(path)
            return old
        if old is None or old.info is None or not self._is_needed():
            return None
        self._warn(f"{source.url(path)}: the origin could not be reached a moment ago")
        return old

    def entry_after(self, error: OriginUnreachable, old: MetadataEntry | None) -> MetadataEntry:
        """Return `old` after the origin turned out to be unreachable.

        Raises `error` if that is not possible.
        """
        self._source.runtime.mark_unreachable(self._source.identity)
        if old is None or old.info is None or not self._source.config.stale_if_error:
            raise error
        self._warn(str(error))
        return old

    def listing(self, folder: str, *, deep: bool) -> list[ObjectInfo] | None:
        """Return a stale listing if the origin was unreachable a moment ago, else None."""
        if not self._is_needed():
            return None
        old = self._stale_listing(folder, deep=deep)
        if old is not None:
            self._warn(f"{self._source.url(folder)}: the origin could not be reached a moment ago")
        return old

    def listing_after(self, folder: str, error: OriginUnreachable, *, deep: bool) -> list[ObjectInfo]:
        """Return a stale listing after the origin turned out to be unreachable.

        Raises `error` if there is none.
        """
        self._source.runtime.mark_unreachable(self._source.identity)
        old = self._stale_listing(folder, deep=deep) if self._source.config.stale_if_error else None
        if old is None:
            raise error
        self._warn(str(error))
        return old

    def _is_needed(self) -> bool:
        """Return whether the origin was unreachable a moment ago and `stale_if_error` is set."""
        source = self._source
        return source.config.stale_if_error and source.runtime.is_unreachable(source.identity)

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
