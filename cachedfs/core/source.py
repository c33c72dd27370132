"""One origin under one configuration, with its metadata and the rules for its freshness."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsspec.utils import tokenize

from cachedfs.common.clock import clock
from cachedfs.common.types import LinkStats, ObjectInfo, ObjectKey
from cachedfs.common.urls import GCS_PROTOCOLS, without_slash
from cachedfs.config import Config
from cachedfs.core.engine import Engine
from cachedfs.core.engines import engine_for
from cachedfs.core.metadata_cache import Entry, MetadataCache
from cachedfs.errors import CachedFSError, IsAFolder, ObjectNotFound, OriginUnavailable
from cachedfs.origins.base import Origin
from cachedfs.origins.registry import check_options, identity_lasts_s, identity_of, is_whole
from cachedfs.origins.request_slots import SPECULATIVE_FACTOR

__all__ = ["ABSENCE_S", "Source", "is_fresh"]


ABSENCE_S = 10.0
"""Maximum age in seconds of an absence known from a 404: objects appear more often than they change (gcsfuse: 5 s)."""


def is_fresh(checked_at: float, now: float, *, lifetime_s: float, absence: bool = False) -> bool:
    """Return whether an answer from `checked_at` is fresh at `now`, both in seconds since the epoch.

    With a lifetime of 0 no answer is fresh, with an infinite one every answer is. An answer from the future (the clock
    was set back) is not fresh. `absence` limits the lifetime to ABSENCE_S.
    """
    if math.isinf(lifetime_s):
        return True
    age = now - checked_at
    return 0 <= age < (min(lifetime_s, ABSENCE_S) if absence else lifetime_s)


class Source:
    """One origin under one configuration, as this process sees it.

    Cheap to create: engine, origin and inner filesystem are created on first use, and again after a fork.
    """

    def __init__(
        self, protocol: str, options: Mapping[str, Any], config: Config, url: Callable[[str], str]
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.config = config
        self.url = url  # returns the full URL of a path, for messages
        check_options(protocol, options)
        self._identity: str | None = None
        self._look_again_at = math.inf  # when to ask again whose data this is
        self._looking: asyncio.Future[str] | None = None
        self._engine: Engine | None = None
        self._metadata: MetadataCache | None = None
        self._origin: tuple[Engine, Origin] | None = None

    @property
    def identity(self) -> str:
        """Text that identifies the data, part of every block key.

        The first use may ask Drive whose credentials these are. It changes if nobody had signed in, and somebody does.
        """
        known = self._identity
        if known is None or time.monotonic() >= self._look_again_at:
            found = identity_of(self.protocol, self.options, may_ask=not self.config.offline)
            self._look_again_at = time.monotonic() + identity_lasts_s(found)
            if found != known:
                self._identity, self._metadata, self._origin = found, None, None
            return found
        return known

    async def find_identity(self) -> None:
        """Find the identity in a thread, if it is not known: `identity` may block on a request."""
        if self._identity is not None and time.monotonic() < self._look_again_at:
            return
        looking = self._looking
        if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
            looking = self._looking = asyncio.ensure_future(asyncio.to_thread(lambda: self.identity))
        await asyncio.shield(looking)

    @functools.cached_property
    def caller_key(self) -> str:
        """Key of the callers that may share a lookup.

        They have the same credentials and the same options for stale answers.
        """
        config = self.config
        settings = (config.offline, config.stale_if_error, config.lifetime_s)
        return str(tokenize(self.protocol, dict(self.options), *settings))

    @property
    def engine(self) -> Engine:
        engine = self._engine
        if engine is None or not engine.pid:
            engine = engine_for(self.config)
            # Assign the engine last: a thread that sees it must also see its metadata cache.
            self._origin = None
            self._metadata = engine.metadata_cache(self.identity)
            self._engine = engine
        return engine

    @property
    def metadata(self) -> MetadataCache:
        engine, known = self.engine, self._metadata
        if known is None:
            known = self._metadata = engine.metadata_cache(self.identity)
        return known

    def origin(self, path: str) -> Origin:
        """Return the origin; raises OriginUnavailable, naming `path`, if `offline` is set."""
        if self.config.offline:
            raise self.offline(path)
        engine, identity, opened = self.engine, self.identity, self._origin
        if opened is None or opened[0] is not engine:
            found = engine.origin(
                self.protocol, self.options, identity=identity, concurrency=self.config.concurrency
            )
            opened = self._origin = (engine, found)
        return opened[1]

    def link_stats(self) -> LinkStats:
        """Return the measurements of the link to the origin, without a request.

        It does not open the origin either.
        """
        engine, opened = self.engine, self._origin
        if opened is None or opened[0] is not engine:
            return LinkStats(n_at_once=SPECULATIVE_FACTOR * self.config.first_concurrency)
        return engine.speculation.link_stats(opened[1])

    def last_known(self, path: str) -> Entry | None:
        """Return the valid metadata entry of `path`, of any age; None if there is none."""
        entry = self.metadata.get(path)
        return entry if entry is None or self.is_fresh(entry) else self.metadata.renewed(path)

    def fresh(self, path: str) -> Entry | None:
        """Return the fresh metadata entry of `path`; None if there is none."""
        entry = self.metadata.get(path)
        if entry is None or self.is_fresh(entry):
            return entry
        entry = self.metadata.renewed(path)
        return entry if entry is not None and self.is_fresh(entry) else None

    def existing(self, path: str) -> Entry | None:
        """Return the fresh metadata entry of `path`, or None.

        Raises ObjectNotFound if the path is known to be absent, without or with the slash that it ends in.
        """
        entry = self.fresh(path)
        if entry is not None and entry.info is None:
            if path != without_slash(path):
                return None
            raise self.not_found(path, entry)
        return entry

    def fresh_with_details(self, path: str) -> Entry | None:
        """Return the fresh entry of `path` if it has all the details of a lookup, else None.

        Raises like `existing`.
        """
        entry = self.existing(path)
        return entry if entry is not None and is_whole(self.identity, entry.object) else None

    def key(self, entry: Entry) -> ObjectKey | None:
        """Return the key of this version's blocks; None if it cannot be cached."""
        return entry.key(self.identity, self.config.block_size)

    @property
    def lifetime_s(self) -> float:
        """Seconds until metadata expires: as configured, or 0 if changes by other processes cannot be noticed."""
        lifetime_s = self.config.lifetime_s
        metadata = self._metadata or self.metadata
        return lifetime_s if math.isinf(lifetime_s) or metadata.sees_other_processes else 0.0

    def is_fresh(self, entry: Entry) -> bool:
        """Return whether `entry` can be used without asking the origin.

        With `offline`, the resolver decides whether an absence still counts.
        """
        if entry.info is None and self.config.offline and not math.isinf(self.config.max_age):
            return False
        return is_fresh(
            entry.checked_at,
            clock.now(),
            lifetime_s=self.lifetime_s,
            absence=entry.info is None and not entry.by_listing,
        )

    def not_found(self, path: str, entry: Entry) -> CachedFSError:
        """Return the error for an absent path; for a known folder with a slash at its end, IsAFolder.

        It has the origin's error text if known, which may name a remedy.
        """
        folder = without_slash(path)
        known = None if folder == path else self.fresh(folder)
        if known is not None and known.info is not None and known.info.kind == "directory":
            return self.is_a_folder(path)
        if self.protocol == "file":
            reason = (
                "no such file or folder on the local disk. For Google Cloud Storage write gs://BUCKET/KEY, "
                "for Google Drive drive://My Drive/NAME"
            )
        else:
            parent = "its bucket" if self.protocol in GCS_PROTOCOLS else "the folder it is in"
            reason = f"no such object or folder; check the name, and that of {parent}, with ls"
        reason = entry.origin_error or reason
        return ObjectNotFound(f"{self.url(path)}: {reason}")

    def is_a_folder(self, path: str) -> IsAFolder:
        return IsAFolder(f"{self.url(path)} is a folder: read one of the objects in it (ls shows them)")

    def offline(self, path: str) -> OriginUnavailable:
        return OriginUnavailable(
            f"{self.url(path)}: not all of it is in the cache, and offline=True forbids asking for it"
        )

    def uncached(self, path: str, info: ObjectInfo) -> CachedFSError:
        """Return the error for an object of which nothing is cached."""
        if info.size is None:
            kind = info.details.get("mimeType", "of no known kind")
            return CachedFSError(
                f"{self.url(path)}: it has no known size ({kind}), so nothing of it is cached"
            )
        return CachedFSError(
            f"{self.url(path)}: its origin does not distinguish versions, so nothing of it is cached; read it instead"
        )
