"""Look up objects and list folders: from cached metadata, or with one request to the origin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from cachedfs.cache.index.metadata_records import ListingRecord
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.common.urls import without_slash
from cachedfs.core.change_feed import ChangeFeeds, is_covered
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.listings import Listings, by_folder, by_path, is_nameless
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.offline import StaleFallback
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.errors import AccessDenied, NoSuchBucket, ObjectNotFound, OriginUnreachable
from cachedfs.origins.registry import is_whole, lookup_reads_names
from cachedfs.origins.request_slots import is_speculative

__all__ = ["Lookups"]

T = TypeVar("T")

AT_ONCE = 8  # folders listed in parallel; a Drive listing costs 100 of 325,000 quota units a minute
NAMES_FIRST = 3  # single lookups in a folder that changed since it was listed, before listing it again
MOST_FOLDERS = 1000  # folders for which these lookups are counted
PAGE = 1000  # names per page of a listing: the maximum of Drive and GCS


class Lookups:
    """Looks up paths and lists folders, from cached metadata or else from the origin.

    Concurrent callers share one request. The coroutines run on the engine's event loop.
    """

    def __init__(self, objects: Objects, downloads: Downloads) -> None:
        self.objects = objects
        self._downloads = downloads
        self._change_feeds = ChangeFeeds(objects)
        self._listings = Listings(objects)
        self._stale_fallback = StaleFallback(objects, self._listings)
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
        self.objects.newest(path)  # another process may have looked it up
        entry = self.objects.existing_whole(path) or await self.ask(path)
        if entry.info is None:
            raise self.objects.not_found(path, entry)
        return entry.info

    async def resolve(self, path: str, want: Range | Suffix, *, demand: int) -> tuple[Entry, Download | None]:
        """Return the metadata entry of `path` and, if it was found by a read, its request.

        The read is of `want`. A read is the cheapest lookup of an unknown object: its headers carry the metadata.
        `demand` is the byte up to which that request may read before a reader wants more.
        """
        is_in_memory = path in self.objects.entries
        entry = self.objects.fresh(path) if is_in_memory else None
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return entry, None
        # Of an object that is not in memory, `_ask_by_reading` looks into the store first.
        if is_in_memory or self._by_parent(path):
            old = self.objects.known(path)
            if self._needs_lookup(path, old):
                return await self.ask(path), None
            if old is not None and self.objects.is_fresh(old):
                return old, None
        return await self._shared_lookup(path, partial(self._ask_by_reading, path, want, demand))

    def _needs_lookup(self, path: str, old: Entry | None) -> bool:
        """Return whether a lookup without a body is needed for `path`, or cheaper than a read."""
        if old is not None and self.objects.is_fresh(old):
            # A folder of a listing may be an object as well.
            return old.info is not None and old.info.kind != "file" and not self._by_parent(path)
        key = None if old is None else self.objects.version(old)
        is_cached = key is not None and self.objects.engine.cache.has(key, 0)
        return is_cached or self._by_parent(path)  # expired, but probably unchanged: no need to fetch a body

    def _by_parent(self, path: str) -> bool:
        """Return whether a read cannot serve as a lookup.

        So it is if the origin looks names up by folder, or if `offline` is set.
        """
        return self.objects.config.offline or self.objects.origin(path).by_parent

    async def ask(self, path: str) -> Entry:
        """Ask the origin for the current metadata of `path`."""
        entry, _ = await self._shared_lookup(path, lambda: self._lookup(path, self.objects.known(path)))
        return entry

    async def _shared_lookup(self, path: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call `ask`, or wait for a running lookup of `path` for the same credentials and options.

        A running lookup is not shared if the path was written since it began, and never with `max_age=0`: its answer
        may be older than this call.
        """
        if self.objects.lifetime_s == 0:
            return await ask()
        slot, counter = (self.objects.caller_key, path), self.objects.counter(path)
        return await self.objects.engine.lookups.run(slot, counter, ask)  # type: ignore[no-any-return]  # as `ask` says

    async def _lookup(self, path: str, old: Entry | None) -> tuple[Entry, Download | None]:
        if (stale := self._stale_fallback.of(path, old)) is not None:
            return stale, None
        if (held := await self._from_feed(path, old)) is not None:
            return held, None
        if (listed := await self._from_listing(path)) is not None:
            return listed, None
        async with self._lookup_slot(path):
            # Another lookup may have found the origin unreachable while this one waited.
            if (stale := self._stale_fallback.of(path, old)) is not None:
                return stale, None
            return await self._request_entry(path, old), None

    def _lookup_slot(self, path: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the semaphore that a lookup takes.

        It keeps the requests few until the origin is known to be unreachable. There is none for an origin that looks
        names up by folder: a lookup waits for the lookup of its folder, and would hold a slot that the other one needs.
        """
        if self._by_parent(path):
            return contextlib.nullcontext()
        return self.objects.engine.lookup_slots(self.objects.identity, self.objects.config.first_concurrency)

    async def _request_entry(self, path: str, old: Entry | None) -> Entry:
        now, counter = clock.now(), self.objects.counter(path)
        folder = without_slash(path)
        folder_counter = counter if folder == path else self.objects.counter(folder)
        position = self._change_feeds.position(path)
        info, origin_error = None, ""
        parents: list[ObjectInfo] = []
        try:
            with self._stale_fallback.waiting_less(old):
                info = await self._request(path, parents)
        except ObjectNotFound as error:
            if self._by_parent(path):  # a folder or a permission may be missing: keep the origin's text
                origin_error = error.message.partition(": ")[2]  # without the URL in front
        except OriginUnreachable as error:
            return self._stale_fallback.entry_after(error, old)
        at = self._checked_at(path, now)
        if info is not None and info.kind == "directory" and path != folder:
            # No object has this name, but there is a folder.
            self.objects.learn(info.path, info, asked_at=at, counter=folder_counter)
            info = None
        watch = None
        if info is None or is_covered(info):
            watch = self._change_feeds.snapshot(position, parents[0] if parents else None)
        return self.objects.learn(
            path, info, asked_at=at, counter=counter, watch=watch, origin_error=origin_error
        )

    async def _from_feed(self, path: str, old: Entry | None) -> Entry | None:
        """Return the expired entry of `path` if a poll of its change feed confirms it, else None."""
        if old is None:
            return None
        if await self._change_feeds.catch_up(path):
            return self.objects.fresh(path)
        await self._change_feeds.begin(path)
        return None

    def _checked_at(self, path: str, now: float) -> float:
        """Return the `checked_at` of an answer requested at `now`.

        It is not later than that of the folder used for the lookup.
        """
        folder = path.rpartition("/")[0]
        entry = self.objects.get(folder) if folder and self.objects.origin(path).by_parent else None
        return now if entry is None else min(now, entry.asked_at)

    async def _from_listing(self, path: str) -> Entry | None:
        """Return the entry of `path` after listing its folder again; None if a lookup is cheaper.

        If the origin looks names up by folder, a lookup costs as much as one page of a listing, which renews all
        neighbors. An epoch over known files then costs one request per folder instead of one per file.
        """
        folder = path.rpartition("/")[0]
        if not folder or not self.objects.origin(path).by_parent or self.objects.lifetime_s == 0:
            return None
        shared, identity = self.objects.engine.cache.metadata, self.objects.identity
        _, listed = shared.find(identity, path)
        if listed is None or not self._is_worth_listing(folder, listed.counter):
            return None
        if (shared.listing_size(identity, folder, most=PAGE + 1) or 0) > PAGE:
            return None
        with contextlib.suppress(ObjectNotFound):  # the folder is gone: the lookup will report it
            await self._shared_lookup(f"{folder}/", lambda: self._relist(folder))
        return self.objects.fresh(path)

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

    async def _relist(self, folder: str) -> None:
        await self._list(folder, deep=False)

    async def _request(self, path: str, parents: list[ObjectInfo]) -> ObjectInfo:
        """Look up `path` at the origin.

        For origins that look names up by folder, look up the folder first. The folder that was used is appended to
        `parents`, even if the name is not in it.
        """
        origin, folder = self.objects.origin(path), path.rpartition("/")[0]
        if not origin.by_parent or not folder:
            return await origin.lookup(path)
        before = self.objects.known(folder)
        if (
            before is None
            or before.info is None
            or self.objects.is_fresh(before)
            or lookup_reads_names(before.info)
        ):
            parents.append(await self.info(folder))
            return await origin.lookup(path, parents[0])
        # Look up expired parent folders in parallel with the path, assuming them unchanged: they rarely change.
        asked = self.objects.engine.spawn(self.info(folder))
        info = None
        try:
            with contextlib.suppress(ObjectNotFound, AccessDenied):  # of the folder as it was
                info = await origin.lookup(path, before.info)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        finally:
            now = await asked
        parents.append(now)
        return info if info is not None and now.id == before.info.id else await origin.lookup(path, now)

    async def _ask_by_reading(
        self, path: str, want: Range | Suffix, demand: int
    ) -> tuple[Entry, Download | None]:
        """Read `want` and take the metadata of the object from the response headers.

        One process of the machine asks; the others wait for its metadata entry. Their reads then find the fetch locks
        of the blocks taken.
        """
        lookup_lock = ObjectKey(self.objects.identity, path, "what is it?", 0).hash64(0)
        cache = self.objects.engine.cache
        if self.objects.lifetime_s > 0:
            known = await poll(
                lambda: cache.locks.take(lookup_lock) or self.objects.fresh(path), within_s=OVERDUE_S
            )
            if isinstance(known, Entry):
                return known, None
        try:
            old = self.objects.known(path)
            if self._needs_lookup(path, old):
                return await self._lookup(path, old)
            if old is not None and self.objects.is_fresh(old):
                return old, None
            if (stale := self._stale_fallback.of(path, old)) is not None:
                return stale, None
            download, learned = Download(demand=demand), list[Entry]()
            download.keep_bytes(True)  # for the callers of this lookup, who get it
            read = partial(self._downloads.read_unknown, download, path, want, learned)
            with self._stale_fallback.waiting_less(old):
                request = self.objects.engine.spawn(self._downloads.run(download, read))
            try:
                await download.wait_for_headers()
            except asyncio.CancelledError:
                if download.info is None:
                    request.cancel()  # no other reader knows the request before its headers
                raise
            except ObjectNotFound:
                return learned[0], None
            except OriginUnreachable as error:
                return self._stale_fallback.entry_after(error, old), None
            return learned[0], download
        finally:
            if self.objects.lifetime_s > 0:
                self.objects.engine.store_queue.after_metadata(lambda: cache.locks.release(lookup_lock))

    async def listing(self, folder: str) -> ListingRecord:
        """Return the children of `folder`, sorted by path; for an object, the object itself.

        Raises ObjectNotFound.
        """
        # In a thread: a long listing would block the event loop.
        here = await asyncio.to_thread(self._listings.of, folder)
        if here is not None:
            return here
        if self.objects.config.offline:
            raise self.objects.offline(folder)
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self._listings.of, folder)
            if here is not None:
                return here
        entry = self.objects.fresh(folder)
        if entry is not None and entry.info is not None and entry.info.kind == "file":
            return _for_once([entry.info])
        listing = await self._list(folder, deep=False)
        if not listing.infos:
            info = await self.info(folder)
            return _for_once([info]) if info.kind == "file" else listing
        return listing

    def is_current(self, folder: str, listing: ListingRecord) -> bool:
        """Return whether `listing` would still be returned without a request."""
        return self._listings.is_current(folder, listing)

    async def find(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, sorted by path."""
        here = await asyncio.to_thread(self._listings.below, folder)
        if here is not None:
            return here
        if not self.objects.origin(folder).by_parent:
            return (await self._list(folder, deep=True)).infos
        if await self._change_feeds.catch_up(folder):
            here = await asyncio.to_thread(self._listings.below, folder)
        return here if here is not None else await self._walk(folder)

    async def _walk(self, folder: str) -> list[ObjectInfo]:
        """Return all objects and folders below `folder`, from cached listings where possible.

        Sends up to AT_ONCE list requests in parallel.
        """
        gate = asyncio.Semaphore(AT_ONCE)
        found: list[ObjectInfo] = []

        async def visit(here: str, above: frozenset[str | None]) -> None:
            async with gate:
                listing = await asyncio.to_thread(self._listings.of, here)
                if listing is None:
                    await self._wait_for_spare_rate(here)
                    # A folder that is missing, or was removed during the walk, counts as empty.
                    with contextlib.suppress(ObjectNotFound):
                        listing = await self._list(here, deep=False)
            children = [] if listing is None else listing.infos
            entry = self.objects.get(here)
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
        return sorted(found, key=by_path)

    async def _wait_for_spare_rate(self, folder: str) -> None:
        """Wait until a request that no caller waits for delays no other."""
        if is_speculative():
            origin = self.objects.origin(folder)
            await poll(lambda: not origin.spare_s())

    async def _list(self, folder: str, *, deep: bool) -> ListingRecord:
        """Request a listing of one level, or of all levels if `deep`, and store it.

        The metadata of every child is stored too.
        """
        if not deep:
            await self._change_feeds.begin(folder)
        shared, now = self.objects.engine.cache.metadata, clock.now()
        position = self._change_feeds.position(folder)
        epoch, counter = shared.epoch(self.objects.identity), self.objects.counter(folder)
        if (stale := self._stale_fallback.listing(folder, deep=deep)) is not None:
            return _for_once(stale)
        found: list[ObjectInfo] = []
        origin = self.objects.origin(folder)
        here = None
        try:
            if origin.by_parent and folder:
                here = await self.info(folder)
                now = self._checked_at(f"{folder}/", now)
            with self._stale_fallback.waiting_less_for_listing(folder):
                async for info in origin.list(folder, here, deep=deep):
                    found.append(info)
        except OriginUnreachable as error:
            return _for_once(self._stale_fallback.listing_after(folder, error, deep=deep))
        except ObjectNotFound as error:
            if deep and not isinstance(error, NoSuchBucket):  # a misspelled bucket is not an empty folder
                return _for_once([])
            raise
        listings = by_folder(folder, found) if deep else {folder: found}
        is_folder = here is not None and here.kind == "directory"
        kept: dict[str, int] = {}
        if found or is_folder:  # an empty answer may also mean an object or an absence: needs a lookup
            entry = self.objects.fresh(folder)
            # GCS may have an object and a folder of the same name: the object counts.
            if not is_folder and (entry is None or entry.info is None or entry.info.kind != "file"):
                self.objects.learn(folder, ObjectInfo(folder, "directory", 0), asked_at=now, counter=counter)
            is_watched = here is not None and all(map(is_covered, found))
            watch = self._change_feeds.snapshot(position, here) if is_watched else None
            if origin.lists_all(folder):  # a stored listing proves that other names are absent
                kept = await asyncio.to_thread(self._listings.store, listings, now, epoch, watch)
        named = (
            child for here, children in listings.items() for child in children if not is_nameless(child, here)
        )
        children = sorted(named, key=by_path)
        return ListingRecord(children, now, kept[folder]) if folder in kept else _for_once(children)

    async def is_folder(self, path: str) -> bool:
        """Return whether `path`, which is not an object, is a folder.

        Asks the origin, and stores a folder that it finds.
        """
        if self._by_parent(path):
            return False
        path = without_slash(path)
        now, counter = clock.now(), self.objects.counter(path)
        async for _ in self.objects.origin(path).list(path):
            folder = ObjectInfo(path, kind="directory", size=0)
            self.objects.learn(path, folder, asked_at=now, counter=counter)
            return True
        return False


def _for_once(infos: list[ObjectInfo]) -> ListingRecord:
    """Return a listing that is never current: no change counter is negative."""
    return ListingRecord(infos, 0.0, -1)
