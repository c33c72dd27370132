"""Look up objects: from cached metadata, or with one request to the origin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from cachedfs.cache.index.metadata_records import hash_of
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.common.urls import without_slash
from cachedfs.core.change_feed import ChangeFeeds, is_covered
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.listings import Listings
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.offline import StaleFallback
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.errors import AccessDenied, ObjectNotFound
from cachedfs.origins.registry import is_whole, lookup_reads_names

__all__ = ["Lookups"]

NAMES_FIRST = 3  # single lookups in a folder that changed since it was listed, before listing it again
MOST_FOLDERS = 1000  # folders for which these lookups are counted
PAGE = 1000  # names per page of a listing: the maximum of Drive and GCS

Resolved = tuple[Entry, Download | None]


class Lookups:
    """Looks up paths, from cached metadata or else from the origin.

    Concurrent callers share one request. The coroutines run on the engine's event loop.
    """

    def __init__(self, objects: Objects, downloads: Downloads) -> None:
        self.objects = objects
        self._downloads = downloads
        self._change_feeds = ChangeFeeds(objects)
        self._stale_fallback = StaleFallback(objects)
        self.listings = Listings(objects, self._change_feeds, self._stale_fallback, self.info)
        # Folder -> (change counter of its listing, single lookups in it since the counter changed).
        self._n_single: dict[str, tuple[int, int]] = {}

    async def info(self, path: str) -> ObjectInfo:
        """Return the metadata of `path`, asking the origin if it is unknown or expired.

        If no object has a name that ends in a slash, return that of the name without it. Raises ObjectNotFound.
        """
        entry = self.objects.fresh(path) or await self.ask(path)
        if entry.info is None:
            if (folder := without_slash(path)) != path:
                return await self.info(folder)
            raise self.objects.not_found(path, entry)
        return entry.info

    async def describe(self, path: str) -> ObjectInfo:
        """Return the metadata of `path` with all details of a lookup; otherwise like `info`.

        Metadata from the headers of a read has fewer details, so the origin is asked again then.
        """
        info = await self.info(path)
        if info.path != path:
            path = without_slash(path)
        if is_whole(self.objects.identity, info):
            return info
        self.objects.known(path, newest=True)  # another process may have looked it up
        entry = self.objects.existing(path, whole=True) or await self.ask(path)
        if entry.info is None:
            raise self.objects.not_found(path, entry)
        return entry.info

    async def resolve(self, path: str, want: Range | Suffix, *, demand: int) -> Resolved:
        """Return the metadata entry of `path` and, if it was found by a read, its request.

        The read is of `want`. A read is the cheapest lookup of an unknown object: its headers carry the metadata.
        `demand` is the byte up to which that request may read before a reader wants more.
        """
        objects = self.objects
        # What is not in memory was looked up in the store by the caller, and is again under the lock.
        entry = objects.fresh(path) if path in objects.entries else None
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return entry, None
        if self._by_parent(path):
            return objects.fresh(path) or await self.ask(path), None
        resolved: Resolved = await self._share(path, partial(self._ask_by_reading, path, want, demand))
        return resolved

    async def ask(self, path: str) -> Entry:
        """Ask the origin for the current metadata of `path`."""
        entry: Entry = await self._share(path, lambda: self._lookup(path, self.objects.known(path)))
        return entry

    def _share(self, path: str, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        """Call `ask`, or wait for a running lookup of `path` for the same credentials and options.

        A running lookup is not shared if the path was written since it began, and never with `max_age=0`: its answer
        may be older than this call.
        """
        objects = self.objects
        counter = objects.counter(path) if objects.lifetime_s > 0 else object()  # equals no other
        return objects.engine.lookups.run((objects.caller_key, path), counter, ask)

    def _by_parent(self, path: str) -> bool:
        """Return whether a read cannot serve as a lookup.

        So it is if the origin looks names up by folder, or if `offline` is set.
        """
        return self.objects.config.offline or self.objects.origin(path).by_parent

    async def _ask_by_reading(self, path: str, want: Range | Suffix, demand: int) -> Resolved:
        """Read `want` and take the metadata of the object from the response headers.

        One process of the machine asks; the others wait for its metadata entry. Their reads then find the fetch locks
        of the blocks taken.
        """
        objects, locks, found = self.objects, self.objects.engine.cache.locks, None
        lock = hash_of(f"lookups at {objects.identity}", path)
        if objects.lifetime_s > 0:  # else an answer to others is too old
            found = await poll(lambda: locks.take(lock) or objects.fresh(path), within_s=OVERDUE_S)
            if isinstance(found, Entry):
                return found, None
        try:
            old = objects.known(path)
            is_fresh = old is not None and objects.is_fresh(old)
            if old is not None and is_fresh and (old.info is None or old.info.kind == "file"):
                return old, None
            # A folder of a listing may be an object as well. An expired object is probably unchanged: no need for a body.
            if old is not None and (is_fresh or self._is_cached(old)):
                return await self._lookup(path, old), None
            return await self._stale_fallback.instead_of(
                partial(self._downloads.first, path, want, demand=demand),
                path,
                lambda: None if old is None else (old, None),
                has_stale=old is not None and self._stale_fallback.can_serve(old),
            )
        finally:
            if found:  # once other processes can see the entry
                objects.engine.store_queue.put(then=partial(locks.release, lock))

    def _is_cached(self, entry: Entry) -> bool:
        version = self.objects.version(entry)
        return version is not None and self.objects.engine.cache.has(version, 0)

    async def _lookup(self, path: str, old: Entry | None) -> Entry:
        has_stale = old is not None and self._stale_fallback.can_serve(old)
        if self.objects.config.offline:
            if old is None or not has_stale:
                raise self.objects.offline(path)
            return old
        request = partial(self._newer, path, old, has_stale)
        return await self._stale_fallback.instead_of(request, path, lambda: old, has_stale=has_stale)

    async def _newer(self, path: str, old: Entry | None, has_stale: bool) -> Entry:
        entry = await self._from_feed(path, old) or await self._from_listing(path)
        if entry is not None:
            return entry
        async with self._lookup_slot(path):
            # Another lookup may have found the origin unreachable while this one waited.
            request = partial(self._request_entry, path)
            return await self._stale_fallback.instead_of(request, path, lambda: old, has_stale=has_stale)

    def _lookup_slot(self, path: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the semaphore that a lookup takes.

        It keeps the requests few until the origin is known to be unreachable. There is none for an origin that looks
        names up by folder: a lookup waits for the lookup of its folder, and would hold a slot that the other one needs.
        """
        if self._by_parent(path):
            return contextlib.nullcontext()
        return self.objects.engine.lookup_slots(self.objects.identity, self.objects.config.first_concurrency)

    async def _request_entry(self, path: str) -> Entry:
        objects, now, counter = self.objects, clock.now(), self.objects.counter(path)
        folder = without_slash(path)
        folder_counter = counter if folder == path else objects.counter(folder)
        position = self._change_feeds.position(path)
        info, origin_error = None, ""
        parents: list[ObjectInfo] = []
        try:
            info = await self._request(path, parents)
        except ObjectNotFound as error:
            if self._by_parent(path):  # a folder or a permission may be missing: keep the origin's text
                origin_error = error.message.partition(": ")[2]  # without the URL in front
        at = objects.not_after_folder(path, now)
        if info is not None and info.kind == "directory" and path != folder:
            # No object has this name, but there is a folder.
            objects.learn(info.path, info, asked_at=at, counter=folder_counter)
            info = None
        watch = None
        if info is None or is_covered(info):
            watch = self._change_feeds.snapshot(position, parents[0] if parents else None)
        return objects.learn(path, info, asked_at=at, counter=counter, watch=watch, origin_error=origin_error)

    async def _request(self, path: str, parents: list[ObjectInfo]) -> ObjectInfo:
        """Look up `path` at the origin.

        For origins that look names up by folder, look up the folder first. The folder that was used is appended to
        `parents`, even if the name is not in it.
        """
        objects, origin, folder = self.objects, self.objects.origin(path), path.rpartition("/")[0]
        if not origin.by_parent or not folder:
            return await origin.lookup(path)
        before = objects.known(folder)
        known = None if before is None or objects.is_fresh(before) else before.info
        if known is None or lookup_reads_names(known):
            parents.append(await self.info(folder))
            return await origin.lookup(path, parents[0])
        # Look up expired parent folders in parallel with the path, assuming them unchanged: they rarely change.
        asked = objects.engine.spawn(self.info(folder))
        info = None
        try:
            with contextlib.suppress(ObjectNotFound, AccessDenied):  # of the folder as it was
                info = await origin.lookup(path, known)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        finally:
            now = await asked
        parents.append(now)
        return info if info is not None and now.id == known.id else await origin.lookup(path, now)

    async def _from_feed(self, path: str, old: Entry | None) -> Entry | None:
        """Return the expired entry of `path` if a poll of its change feed confirms it, else None."""
        if old is None:
            return None
        if await self._change_feeds.catch_up(path):
            return self.objects.fresh(path)
        await self._change_feeds.begin(path)
        return None

    async def _from_listing(self, path: str) -> Entry | None:
        """Return the entry of `path` after listing its folder again; None if a lookup is cheaper.

        If the origin looks names up by folder, a lookup costs as much as one page of a listing, which renews all
        neighbors. An epoch over known files then costs one request per folder instead of one per file.
        """
        objects, folder = self.objects, path.rpartition("/")[0]
        if not folder or not objects.origin(path).by_parent or objects.lifetime_s == 0:
            return None
        store, identity = objects.engine.cache.metadata, objects.identity
        _, listed = store.find(identity, path)
        if listed is None or not self._is_worth_listing(folder, listed.counter):
            return None
        if (store.listing_size(identity, folder, most=PAGE + 1) or 0) > PAGE:
            return None
        with contextlib.suppress(ObjectNotFound):  # the folder is gone: the lookup will report it
            await self._relist(folder)
        return objects.fresh(path)

    async def _relist(self, folder: str) -> None:
        """List a folder again, once for all callers."""
        slot, counter = (self.objects.caller_key, f"{folder}/"), self.objects.counter(f"{folder}/")
        await self.objects.engine.lookups.run(
            slot, counter, lambda: self.listings.request(folder, deep=False)
        )

    def _is_worth_listing(self, folder: str, listed_counter: int) -> bool:
        """Return whether to list a folder again instead of looking up one more name in it.

        If the folder changed since it was listed, the first NAMES_FIRST names are looked up singly: it will probably
        change again, and the listing might renew few entries that are needed.
        """
        counter = self.objects.engine.cache.metadata.listing_counter(self.objects.identity, folder)
        at, n_asked = self._n_single.pop(folder, (counter, 0))
        n_asked = n_asked + 1 if at == counter else 1
        self._n_single[folder] = (counter, n_asked)
        while len(self._n_single) > MOST_FOLDERS:
            del self._n_single[next(iter(self._n_single))]
        return counter == listed_counter or n_asked > NAMES_FIRST
