"""List folders of which several names are looked up, where a lookup costs as much as a page of the listing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.core.listings import Listings
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.offline import ZARR_METADATA
from cachedfs.errors import CachedFSError, ObjectNotFound
from cachedfs.origins.base import before_next_page

logger = logging.getLogger("cachedfs.core")

PAGE = 1000  # names per page of a listing: the maximum of Drive and GCS
LIST_AFTER = 3  # names of one folder looked up, until it is listed
MOST_ARRAYS = 4  # folders in a folder of a Zarr store, up to which all are listed ahead
MOST_FOLDERS = 1000  # whose names are counted
LISTING_ENDS_S = 60.0  # an unfinished listing ends if no further name is asked for so long


class _Call:
    """Lookups that the reads of one call share with `max_age=0`: these have begun together."""

    def __init__(self) -> None:
        self.folders: dict[str, asyncio.Future[ObjectInfo]] = {}
        self.names: dict[tuple[str, str], _FolderNames] = {}


current_call: ContextVar[_Call | None] = ContextVar("cachedfs_call", default=None)


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Look each folder up once for all reads in this context, which have begun together."""
    token = current_call.set(_Call())
    try:
        yield
    finally:
        current_call.reset(token)


class NameListings:
    """The folders of one origin of which names are looked up. Event loop thread only."""

    def __init__(self, objects: Objects, listings: Listings) -> None:
        self._objects, self._listings = objects, listings

    async def entry(self, path: str) -> Entry | None:
        """Return the entry of `path` once its folder is listed; None if it is to be looked up by its name.

        If the origin looks names up by folder, a lookup costs as much as one page of a listing, which has all neighbors.
        So a folder is listed if it was listed before, from its LIST_AFTER-th name on, or at once if it is of a Zarr store:
        its metadata, or the folder "c" of its chunks. No more pages are read than names were asked, and only the first
        page is waited for.
        """
        objects, folder = self._objects, folder_of(path)
        # What was asked before the call is too old for it.
        call = current_call.get() if objects.lifetime_s == 0 else None
        if not folder or (objects.lifetime_s == 0 and call is None):
            return None
        all_names = objects.engine.folder_names if call is None else call.names
        key = objects.caller_key, folder
        names = all_names.pop(key, None) or _FolderNames()
        all_names[key] = names  # the latest at the end
        while len(all_names) > MOST_FOLDERS:
            del all_names[next(iter(all_names))]
        names.ask()
        epoch, counter = objects.store.epoch(objects.identity), objects.counter(path)
        if names.epoch is None:
            size = objects.store.listing_size(objects.identity, folder, most=PAGE + 1)
            is_zarr = path[len(folder) + 1 :] in ZARR_METADATA or folder.endswith("/c")
            if names.n_asked < LIST_AFTER and not is_zarr and (size is None or size > PAGE):
                return None
            names.epoch = epoch
            objects.engine.spawn(self._list(folder, names, with_arrays=call is None))
        await names.first_page.wait()
        if names.error is not None:
            raise names.error
        if names.paths is not None and path not in names.paths and names.epoch == epoch:
            return objects.learn(path, None, asked_at=names.listed_at, counter=counter)
        if call is None:
            return objects.fresh(path)
        entry = objects.known(path) if names.paths is not None else None
        return entry if entry is not None and entry.asked_at >= names.listed_at else None

    async def _list(self, folder: str, names: _FolderNames, *, with_arrays: bool) -> None:
        objects = self._objects
        before_next_page.set(names.may_go_on)  # in this task only
        try:
            listing = await self._listings.of_names(folder)
            if with_arrays and any(info.path[len(folder) + 1 :] in ZARR_METADATA for info in listing.infos):
                self._list_arrays([info.path for info in listing.infos if info.kind == "directory"])
            # An empty one proves nothing: a file may have the name of the folder.
            if listing.infos and objects.origin(folder).lists_all(folder):
                names.paths, names.listed_at = {info.path for info in listing.infos}, listing.checked_at
        except (ObjectNotFound, TimeoutError) as error:
            logger.debug("not listed: %s", error)  # if the folder is gone, the lookups by name say so
        except CachedFSError as error:
            names.error = error
        finally:
            objects.engine.folder_names.pop((objects.caller_key, folder), None)
            names.first_page.set()

    def _list_arrays(self, folders: Sequence[str]) -> None:
        """List the few folders in one of a Zarr store: their metadata is read next."""
        objects = self._objects
        for folder in folders if len(folders) <= MOST_ARRAYS else ():
            key = objects.caller_key, folder
            if key not in objects.engine.folder_names and self._listings.cached(folder) is None:
                names = objects.engine.folder_names[key] = _FolderNames()
                names.epoch = objects.store.epoch(objects.identity)
                objects.engine.spawn(self._list(folder, names, with_arrays=False))


class _FolderNames:
    """The lookups of names in one folder, and the listing that saves further ones."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.n_pages = 0  # begun, after the first one
        self.epoch: int | None = None  # of the origin when the listing began
        self.paths: set[str] | None = None  # of the complete listing
        self.listed_at = 0.0
        self.error: CachedFSError | None = None  # of the listing
        self.first_page = asyncio.Event()  # it came, or the listing ended
        self._asked = asyncio.Event()

    def ask(self) -> None:
        self.n_asked += 1
        self._asked.set()

    async def may_go_on(self) -> None:
        """Wait until as many names were asked as pages were read; raise TimeoutError after LISTING_ENDS_S without one."""
        self.first_page.set()
        self.n_pages += 1
        while self.n_pages >= self.n_asked:
            self._asked.clear()
            await asyncio.wait_for(self._asked.wait(), LISTING_ENDS_S)
