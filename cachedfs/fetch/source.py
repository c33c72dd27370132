"""How long what we know of an object or a listing counts."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsspec.utils import tokenize

from cachedfs.common.types import LinkStats, ObjectKey
from cachedfs.config import Config
from cachedfs.errors import CachedFSError, IsAFolder, ObjectNotFound, OriginUnavailable
from cachedfs.fetch.metadata_cache import MetadataCache, MetadataEntry
from cachedfs.fetch.runtime import Runtime
from cachedfs.fetch.runtimes import runtime_for
from cachedfs.origins.base import Origin
from cachedfs.origins.registry import identity_of, is_whole
from cachedfs.origins.request_slots import SPECULATIVE_FACTOR

__all__ = ["ABSENCE_S", "Source", "is_fresh"]


ABSENCE_S = 10.0
"""Longest life of an absence learnt from one 404: objects appear more often than they change (gcsfuse: 5 s)."""


def is_fresh(checked_at: float, now: float, *, lifetime_s: float, absence: bool = False) -> bool:
    """Return whether an answer from `checked_at` counts at `now`, both in seconds since the epoch.

    A lifetime of 0 counts for nobody, an infinite one for ever. An answer from the future (the clock was set
    back) does not count.
    """
    if math.isinf(lifetime_s):
        return True
    age = now - checked_at
    return 0 <= age < (min(lifetime_s, ABSENCE_S) if absence else lifetime_s)


class Source:
    """Where objects come from: an origin behind an runtime, under one config.

    Cheap to make: runtime, origin and inner filesystem come with the first need, and anew after a fork.
    """

    def __init__(
        self, protocol: str, options: Mapping[str, Any], config: Config, url: Callable[[str], str]
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.config = config
        self.url = url  # a path's full URL, for messages
        self.identity = identity_of(protocol, options)
        self._runtime: Runtime | None = None
        self._metadata: MetadataCache | None = None
        self._origin: tuple[Runtime, Origin] | None = None

    @functools.cached_property
    def asker(self) -> str:
        """Who asks, as far as answers differ by it: credentials, and what may be answered although nobody was asked just now."""
        config = self.config
        told = (config.offline, config.stale_if_error, config.lifetime_s)
        return str(tokenize(self.protocol, dict(self.options), *told))

    @property
    def runtime(self) -> Runtime:
        runtime = self._runtime
        if runtime is None or runtime.pid != os.getpid():
            runtime = runtime_for(self.config)
            # The runtime last: another thread that sees it must find what belongs to it.
            self._origin = None
            self._metadata = runtime.metadata_cache(self.identity)
            self._runtime = runtime
        return runtime

    @property
    def metadata(self) -> MetadataCache:
        _ = self.runtime
        assert self._metadata is not None
        return self._metadata

    def origin(self, path: str) -> Origin:
        """Return the origin, to be called about `path`; raises OriginUnavailable where offline forbids it."""
        if self.config.offline:
            raise self.offline(path)
        runtime = self.runtime
        if self._origin is None or self._origin[0] is not runtime:
            found = runtime.origin(self.protocol, self.options, concurrency=self.config.concurrency)
            self._origin = (runtime, found)
        return self._origin[1]

    def link_stats(self) -> LinkStats:
        """Return what was measured of the way to the origin; nobody is asked, and nothing is made."""
        runtime, made = self.runtime, self._origin
        if made is None or made[0] is not runtime:
            return LinkStats(n_at_once=SPECULATIVE_FACTOR * self.config.concurrency)
        return runtime.fetch_queue.link_stats(made[1])

    def last_known(self, path: str) -> MetadataEntry | None:
        """Return what is known of `path`, of any age; None when nothing valid is."""
        known = self.metadata.get(path)
        return known if known is None or self.is_fresh(known) else self.metadata.renewed(path)

    def fresh(self, path: str) -> MetadataEntry | None:
        """Return what is known of `path` and young enough to count."""
        known = self.last_known(path)
        return known if known is not None and self.is_fresh(known) else None

    def existing(self, path: str) -> MetadataEntry | None:
        """Return what is known of the object or folder; raises ObjectNotFound for a known absence."""
        known = self.fresh(path)
        if known is not None and known.info is None:
            raise self.not_found(path, known)
        return known

    def described(self, path: str) -> MetadataEntry | None:
        """Return what is known of the object or folder when that is all its metadata; raises like `existing`."""
        known = self.existing(path)
        return known if known is not None and is_whole(self.identity, known.object) else None

    def key(self, known: MetadataEntry) -> ObjectKey | None:
        """Return the key of the version known; None for what cannot be cached."""
        return known.key(self.identity, self.config.block_size)

    def is_fresh(self, known: MetadataEntry) -> bool:
        return is_fresh(
            known.checked_at,
            time.time(),
            lifetime_s=self.config.lifetime_s,
            absence=known.info is None and not known.by_listing,
        )

    def not_found(self, path: str, known: MetadataEntry) -> ObjectNotFound:
        """Return the error for an absence, in the origin's own words where it told us: they may name a remedy."""
        where = "the folder it is in" if self.protocol == "drive" else "its bucket"
        why = known.why or f"no such object or folder; check the name, and that of {where}, with ls"
        return ObjectNotFound(f"{self.url(path)}: {why}")

    def is_a_folder(self, path: str) -> IsAFolder:
        return IsAFolder(f"{self.url(path)} is a folder: read one of the objects in it (ls shows them)")

    def offline(self, path: str) -> OriginUnavailable:
        return OriginUnavailable(
            f"{self.url(path)}: not all of it is in the cache, and offline=True forbids asking for it"
        )

    def uncached(self, path: str) -> CachedFSError:
        return CachedFSError(
            f"{self.url(path)}: its origin does not tell its versions apart, so that nothing of it is kept; read it"
        )
