"""Look up objects: from cached metadata, or with one request to the origin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from cachedfs.cache.index.metadata_records import hash_of
from cachedfs.common.clock import clock
from cachedfs.common.single_flight import Lookup
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.common.urls import folder_of, without_slash
from cachedfs.core.change_feed import ChangeFeeds, is_covered
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.listings import Listings
from cachedfs.core.name_listings import NameListings, current_call
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.offline import answer_of, can_stand
from cachedfs.core.path_errors import not_cached
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.errors import AccessDenied, ObjectNotFound
from cachedfs.origins.registry import is_whole, lookup_reads_names

logger = logging.getLogger("cachedfs.core")

Resolved = tuple[Entry, Download | None]
_Want = Range | Suffix


class Lookups:
    """Looks up paths, from cached metadata or else from the origin.

    Concurrent callers share one request. The coroutines run on the engine's event loop.
    """

    def __init__(self, objects: Objects, downloads: Downloads) -> None:
        self.objects = objects
        self._downloads = downloads
        self._change_feeds = ChangeFeeds(objects)
        self.listings = Listings(objects, self._change_feeds, self._once_a_call)
        self._name_listings = NameListings(objects, self.listings)

    async def info(self, path: str) -> ObjectInfo:
        """Return the metadata of `path`, asking the origin if it is unknown or expired.

        If no object has a name that ends in a slash, return that of the name without it. Raises ObjectNotFound.
        """
        entry = await self._current(path)
        if entry.info is None and (folder := without_slash(path)) != path:
            return await self.info(folder)
        return self._existing(entry)

    async def describe(self, path: str) -> ObjectInfo:
        """Return the metadata of `path` with all details of a lookup; otherwise like `info`.

        Metadata from the headers of a read has fewer details, so the origin is asked again then.
        """
        info = await self.info(path)
        if is_whole(self.objects.identity, info):
            return info
        path = path if info.path == path else without_slash(path)
        self.objects.known(path, newest=True)  # another process may have looked it up
        return self._existing(self.objects.existing(path, whole=True) or await self.ask(path))

    def _existing(self, entry: Entry) -> ObjectInfo:
        if entry.info is None:
            raise self.objects.not_found(entry)
        return entry.info

    async def resolve(self, path: str, want: _Want, *, demand: int) -> Resolved:
        """Return the metadata entry of `path` and, if it was found by a read, its request.

        The read is of `want`. A read is the cheapest lookup of an unknown object: its headers carry the metadata.
        `demand` is the byte up to which that request may read before a reader wants more.
        """
        objects = self.objects
        # What is not in memory was looked up in the store by the caller, and is again under the lock.
        entry = objects.fresh(path) if path in objects.entries else None
        if entry is None and objects.engine.shared is not None and await objects.has_renewed():
            entry = objects.fresh(path)
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return entry, None
        try:
            is_read = not (objects.config.offline or objects.origin(path).by_parent)
        except Exception:  # the origin cannot be opened
            is_read = False
        if not is_read:  # a read cannot serve as a lookup
            return await self._current(path), None
        read, slot = partial(self._read, path, want, demand), (objects.caller_key, path)
        # With `max_age=0`, a running lookup may be older than this call.
        resolved: Resolved = await objects.engine.lookups.run(
            slot, objects.counter(path), read, joins=objects.lifetime_s > 0
        )
        return resolved

    async def _current(self, path: str) -> Entry:
        """Return the entry of `path`, asking the origin if it is unknown or expired."""
        objects = self.objects
        entry = objects.known(path)
        if not (entry and objects.is_fresh(entry)) and await objects.has_renewed():
            entry = objects.known(path)
        return entry if entry and objects.is_fresh(entry) else await self._ask(path, entry)

    async def ask(self, path: str) -> Entry:
        """Ask the origin for the current metadata of `path`."""
        return await self._ask(path, self.objects.known(path))

    async def _ask(self, path: str, old: Entry | None) -> Entry:
        """Ask the origin for `path`. `old` is the entry that the caller saw: a listing may replace it at any moment."""
        objects, slot = self.objects, (self.objects.caller_key, path)

        async def look_up(_: Lookup) -> Resolved:
            return await self._lookup(path, old), None

        joins = objects.lifetime_s > 0
        resolved: Resolved = await objects.engine.lookups.run(
            slot, objects.counter(path), look_up, joins=joins
        )
        return resolved[0]

    async def _read(self, path: str, want: _Want, demand: int, lookup: Lookup) -> Resolved | None:
        """Read `want`, and take the metadata of the object from the headers; return None after the body.

        One process of the machine asks. The others wait for its entry, and then find the fetch locks of its blocks taken.
        """
        objects, locks = self.objects, self.objects.engine.cache.locks
        lock = hash_of(f"lookups at {objects.identity}", path)
        found: Entry | int = 0
        if objects.lifetime_s > 0:  # else an answer to others is too old
            found = locks.take(lock) or await self._wait_for_other_process(path, lock)
            if isinstance(found, Entry):
                return found, None
        release = partial(locks.release, lock) if found else None  # when others can see the entry
        try:
            if (old := objects.known(path)) and (answer := await self._answer_without_body(path, old)):
                return answer, None
            fetch = partial(self._downloads.fetch_unknown, path, want, lookup, demand=demand, then=release)
            if old is None or not can_stand(objects, old):
                await fetch()
                return None
            stale: Resolved = old, None
            return await answer_of(objects, fetch, path, lambda: stale)
        finally:
            if release is not None and not lookup.is_answered:
                objects.engine.store_queue.put(then=release)

    async def _wait_for_other_process(self, path: str, lock: int) -> Entry | int:
        """Wait while another process looks `path` up: return its answer, or else whether the lock was taken."""
        take = self.objects.engine.cache.locks.take
        return await poll(lambda: self._answer(path) or take(lock), within_s=OVERDUE_S)

    async def _answer_without_body(self, path: str, old: Entry) -> Entry | None:
        """Return the entry `old` if it is fresh, or the answer of a lookup; None if a read is to find the object.

        A folder of a listing may be an object as well. An expired object is probably unchanged: no need for a body.
        """
        is_fresh = self.objects.is_fresh(old)
        if is_fresh and (old.info is None or old.info.kind == "file"):
            return old
        return await self._lookup(path, old) if is_fresh or await self._is_cached(old) else None

    def _answer(self, path: str) -> Entry | None:
        """Return the fresh entry of `path` unless it is a folder: that may be an object as well."""
        entry = self.objects.fresh(path)
        is_folder = entry is not None and entry.info is not None and entry.info.kind == "directory"
        return None if is_folder else entry

    async def _is_cached(self, entry: Entry) -> bool:
        version, engine = self.objects.version(entry), self.objects.engine
        if version is None or engine.cache.has(version, 0):
            return version is not None
        return engine.shared is not None and await engine.shared.has(version.identity, version.info, 0)

    async def _lookup(self, path: str, old: Entry | None) -> Entry:
        """Look `path` up without reading it; `old` is its expired entry."""
        objects = self.objects
        stale = old if old is not None and can_stand(objects, old) else None
        if not objects.config.offline:
            request = partial(self._newer, path, old, stale)
            return await answer_of(objects, request, path, None if stale is None else lambda: stale)
        if stale is None:
            raise not_cached(objects.url(path))
        return stale

    async def _newer(self, path: str, old: Entry | None, stale: Entry | None) -> Entry:
        """Return the entry that the change feed confirms, or that a listing of the folder or a request brings."""
        objects = self.objects
        if old is not None and await self._change_feeds.catch_up(path) and (entry := objects.fresh(path)):
            return entry
        if not objects.origin(path).by_parent:
            # `answer_of` again: the origin may have become unreachable while this lookup waited for its slot.
            async with objects.engine.lookup_slots(objects.identity, objects.config.first_concurrency):
                request = partial(self._request, path)
                return await answer_of(objects, request, path, None if stale is None else lambda: stale)
        # Without a slot, because a lookup waits here for those of its folders.
        return await self._name_listings.entry(path) or await self._request(path)

    async def _request(self, path: str) -> Entry:
        """Ask the origin for `path`, and keep its answer."""
        objects, now, counter = self.objects, clock.now(), self.objects.counter(path)
        folder = without_slash(path)
        folder_counter = counter if folder == path else objects.counter(folder)
        position = self._change_feeds.position(path)
        info = parent = None
        origin_error = ""
        try:
            parent, info = await self._folder(path)
            info = info or await objects.origin(path).lookup(path, parent)
        except ObjectNotFound as error:
            # A folder or a permission may be missing: keep the origin's text, without the URL in front.
            if objects.origin(path).by_parent:
                origin_error = error.message.partition(": ")[2]
        at = objects.not_after_folder(path, now)
        if info is not None and info.kind == "directory" and path != folder:
            # No object has this name, but there is a folder.
            objects.learn(info.path, info, asked_at=at, counter=folder_counter)
            info = None
        watch = None
        if info is None or is_covered(info):
            watch = self._change_feeds.snapshot(position, parent)
        entry = objects.learn(path, info, asked_at=at, counter=counter, watch=watch)
        entry.origin_error = origin_error
        return entry

    async def _folder(self, path: str) -> tuple[ObjectInfo | None, ObjectInfo | None]:
        """Return the folder of `path` if the origin looks names up in it, and what is at `path` if that is known then.

        An expired folder is looked up at the same time as the path, assuming it unchanged: folders rarely change.
        """
        objects, folder = self.objects, folder_of(path)
        if not folder or not objects.origin(path).by_parent:
            return None, None
        before = objects.known(folder)
        is_followed, top = self._change_feeds.position(path) is not None, path.partition("/")[0]
        if before is None and not is_followed and folder in objects.origin(path).roots:
            return None, None
        if is_followed and objects.known(top) is None:
            await self.info(top)  # a feed names folders by their ids
        known = None if before is None or objects.is_fresh(before) else before.info
        if known is None or lookup_reads_names(known):
            parent = await self._folder_info(path)
            entry = objects.fresh(path) if path in objects.entries else None
            return parent, None if entry is None else entry.info

        async def assumed() -> ObjectInfo | None:
            with contextlib.suppress(ObjectNotFound, AccessDenied):  # of the folder as it was
                return await objects.origin(path).lookup(path, known)
            return None

        asking = asyncio.ensure_future(assumed())
        try:
            now = await self._folder_info(path)
        except BaseException:  # a cancellation too: leave no request behind
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            raise
        info = await asking
        return now, info if now.id == known.id else None

    async def _folder_info(self, path: str) -> ObjectInfo:
        """Return the metadata of the folder of `path`; with `max_age=0`, all reads of one call share one lookup of it."""
        objects, folder = self.objects, folder_of(path)
        if objects.lifetime_s > 0:
            if unknown := self._unknown_folders(folder):
                slot = (objects.caller_key, f"the path of {folder}")
                await objects.engine.lookups.run(
                    slot, objects.counter(folder), partial(self._look_up_path, [*unknown, path])
                )
            for above in unknown[:-1]:  # what that did not find, from the top
                await self.info(above)
        return await self._once_a_call(folder)

    async def _once_a_call(self, folder: str) -> ObjectInfo:
        call = current_call.get()
        if call is None or self.objects.lifetime_s > 0:
            return await self.info(folder)
        if folder not in call.folders:
            call.folders[folder] = asyncio.ensure_future(self.info(folder))
        return await asyncio.shield(call.folders[folder])

    def _unknown_folders(self, folder: str) -> list[str]:
        """Return `folder` and those above it, from the top, which is left out; nothing if one of them is known."""
        found = list[str]()
        while above := folder_of(folder):
            if self.objects.fresh(folder) is not None:
                return []
            found.insert(0, folder)
            folder = above
        return found

    async def _look_up_path(self, paths: Sequence[str], _: Lookup) -> None:
        """Look up a path with one request. `paths` are its folders, from the top, and the path itself."""
        objects, now, top = self.objects, clock.now(), paths[0].partition("/")[0]
        origin, position = objects.origin(top), self._change_feeds.position(top)
        counters = [objects.counter(path) for path in paths]
        parent = await self.info(top) if position is not None else None  # a feed names folders by their ids
        found = await origin.lookup_path(paths[-1])
        for path, counter, info in zip(paths, counters, found, strict=False):
            watch = self._change_feeds.snapshot(position, parent) if is_covered(info) else None
            objects.learn(path, info, asked_at=now, counter=counter, watch=watch)
            parent = info
