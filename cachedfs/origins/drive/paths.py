"""`PathResolver`: find the items that paths name.

Drive looks items up by folder id. Names are not unique, and shortcuts point to other items.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cachedfs.common.event_loop import side_by_side
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectNotFound,
    QuotaExceeded,
    SignInRefused,
)
from cachedfs.origins.base import before_next_page
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.drive_path import (
    ID,
    MY_DRIVE,
    SHARED_WITH_ME,
    has_feed,
    id_and_key,
    missing,
    must_be_there,
    name_of,
    place_of,
)
from cachedfs.origins.drive.known_folders import KnownFolders
from cachedfs.origins.drive.public import not_listed

logger = logging.getLogger("cachedfs.origins")

# Zarr's default name of a chunk, and its array.
_CHUNK_IN_FOLDERS = re.compile(r"(.+)/c/[0-9]+/[0-9]+(?:/[0-9]+)*")
_AT_ONCE = 8  # sibling folders listed at once; a listing costs 100 units of 325,000 a minute


class PathResolver:
    """Finds the items that paths name in one account's Drive."""

    def __init__(self, account: DriveAccount) -> None:
        self._account, self.known = account, KnownFolders(account)
        self._my_drive: ObjectInfo | None = None  # always the same folder
        self.partly_listed: set[str] = set()  # folders whose listing may lack names
        self._warned: set[str] = set()

    async def lookup(
        self,
        path: str,
        parent: ObjectInfo | None = None,
        *,
        checked_s: float = math.inf,
        for_folder: bool = False,
    ) -> ObjectInfo:
        """Return the object or folder that `path` is, with one request if its folder is known; raise ObjectNotFound.

        `checked_s`: as in `at`. `for_folder` prefers a folder over other items of the same name.
        """
        place = place_of(path)
        if not place.names:
            return await self._top(path, place.top)
        if parent is not None and parent.kind == "directory":
            items = await self.named(path, parent)
        else:
            if parent is not None:  # a file: a folder may have its name, as it is now
                self.known.expire_way(parent.path)
            if (
                folder_of(path) == MY_DRIVE
                and self._my_drive is None
                and not (checked_s < math.inf or for_folder)
            ):
                # Its own id is not needed.
                items = await self.named(path, api.folder_info(MY_DRIVE, api.ROOT))
            else:
                _, items = await self.at(path, checked_s=checked_s)
        if not items:
            raise missing(path, "no item of this name is in the folder, or this account may not see it")
        if chunk := _CHUNK_IN_FOLDERS.fullmatch(path):
            self._say_once(
                chunk[1],
                "each chunk of this Zarr array is in folders of its own, so that reading it costs two more requests. Write it "
                'with shards=..., or with chunk_key_encoding={"name": "default", "separator": "."} for a single folder',
            )
        return (await self.chosen(items, path, for_folder=for_folder))[1]

    async def lookup_path(self, path: str) -> list[ObjectInfo]:
        """Return the items that the names of `path` lead to, from the first one on, as far as one request finds them.

        Each is the only one of its name, and no shortcut. More may be there than this finds.
        """
        top, names = place_of(path)
        # A view, or a folder by its id: what is below it may not be found by name alone.
        if not has_feed(top):
            return []
        here = self._my_drive or api.folder_info(top, api.ROOT) if top == MY_DRIVE else await self.folder(top)
        if (query := api.path_query(str(here.id), names)) is None:
            return []
        try:
            items = await self._found(
                query, here, path, "looking it up", page=100, before_page=_no_further_page
            )
        except TimeoutError:  # names that are everywhere
            return []
        found = list[ObjectInfo]()
        for name in names:
            above = found[-1].id if found else None  # the query had the first folder
            same = [
                item
                for item in items
                if api.shown(item["name"]) == name and (above is None or above in item.get("parents", ()))
            ]
            if len(same) != 1 or api.shortcut_target(same[0]) is not None:
                break
            here = api.item_info(same[0], f"{here.path}/{name}")
            found.append(here)
            if here.kind != "directory" or not api.may_list(same[0]):
                break
        return found

    async def chosen(
        self, items: Sequence[Mapping[str, Any]], path: str, *, for_folder: bool = False
    ) -> tuple[Mapping[str, Any], ObjectInfo]:
        """Return the item that counts among items of one name, and its metadata.

        This is the first by `api.rank` that is not a shortcut without a target. Its details have the ids and types of the
        others as `same_name`.
        """
        ranked = sorted(items, key=lambda item: api.rank(item, for_folder=for_folder))
        if len(ranked) > 1:
            self._say_once(
                path,
                f"{len(ranked)} items have this name; the one modified last counts (a Google document only where nothing else "
                "has it). Reach the others by drive://id:ID, or rename them",
            )
        chosen, info = ranked[0], await self.followed(ranked[0], path)
        for item in ranked[1:]:
            if not info.details.get("dangling"):
                break
            if not (other := await self.followed(item, path)).details.get("dangling"):
                chosen, info = item, other
        if len(ranked) > 1:
            same = {
                item["id"]: "directory" if api.is_folder(item) else "file"
                for item in ranked
                if item is not chosen
            }
            info = replace(info, details={**info.details, "same_name": same})
        return chosen, info

    async def named(self, path: str, folder: ObjectInfo) -> list[dict[str, Any]]:
        """Return the items that `path` names in its folder: usually one or none."""
        name = name_of(path)
        if await self._account.public.uses_pages(path):
            same = [
                item for item in await self._account.public.items(folder) if api.shown(item["name"]) == name
            ]
            if same:
                return await side_by_side(self._account.public.version(item, path) for item in same)
            if not await self._account.public.has_new_sign_in():
                raise not_listed(path)
        found = await self._found(api.child_query(str(folder.id), name), folder, path, "looking it up")
        # By id, because a listing of several pages may have an item twice.
        items = {item["id"]: item for item in found if api.shown(item["name"]) == name}
        # A query may not find it, and it must not be created twice.
        if not items and (item := await self.known.just_created(path, folder)):
            items = {item["id"]: item}
        if not items:
            others = (api.shown(item["name"]) for item in found)
            if other := next((other for other in others if api.looks_like(other, name)), None):
                self._say_once(
                    path,
                    f"no item has this name, {name!a}, but one that looks the same and is written in other characters: "
                    f"{other!a}. Take names from fs.ls, or rename it",
                )
        return [*items.values()]

    async def _found(
        self, query: str, folder: ObjectInfo, path: str, doing: str, **pages: Any
    ) -> list[dict[str, Any]]:
        """Return the items that a query finds in a folder; raise ObjectNotFound only if the folder itself is gone.

        Drive may fail to list a folder that exists. Its items would then look absent: they would be left out of
        listings, or created twice.
        """
        try:
            return await self._account.items(query, folder, path, doing, **pages)
        except ObjectNotFound as error:
            key = folder.details.get("resourceKey")
            item = await self._account.item(str(folder.id), path, key=key)
            if api.is_trashed(item):
                raise
            raise CachedFSError(
                f"{api.url_of(path)}: Drive shows the folder {folder.path!r}, and does not find its contents ({doing}). Try "
                "again; if that stays, ask its owner to share it anew with the account that signs in"
            ) from error

    async def at(self, path: str, *, checked_s: float = math.inf) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder of `path` and the items of that name in it.

        Remembered folders that are gone are looked up again. Those that were not checked within `checked_s` seconds to be
        where they were are checked in concurrent requests: a write must not follow a renamed folder.
        """
        parent = folder_of(path)
        if (folder := self.known.get(parent)) is not None:
            with suppress(ObjectNotFound):
                asked: list[Coroutine[Any, Any, Any]] = [self.named(path, folder)]
                asked += [self.known.stands_still(parent, checked_s)] if checked_s < math.inf else []
                items, *stands = await side_by_side(asked)
                if all(stands):
                    return folder, items
            self.known.expire_way(parent)
        folder = await self.folder(parent)
        return folder, await self.named(path, folder)

    async def folder(self, path: str) -> ObjectInfo:
        """Return a folder, remembered for 30 s; raise ObjectNotFound if there is none."""
        if (known := self.known.get(path)) is not None:
            return known
        info = await self.lookup(path, for_folder=True)
        if info.kind != "directory":
            raise missing(path, "this is a file, and not a folder")
        self.known.add(path, info)
        return info

    # Listings
    async def children(self, folder: ObjectInfo) -> list[ObjectInfo]:
        """Return what is in a folder, each name once."""
        if not folder.path:
            return await self._tops()
        if await self._account.public.uses_pages(folder.path):
            self.partly_listed.add(folder.path)
            items = await self._account.public.items(folder)
        else:
            query = api.children_query(str(folder.id))
            items = await self._found(
                query, folder, folder.path, "listing it", before_page=before_next_page.get()
            )
            self.partly_listed.discard(folder.path)
        by_name: dict[str, list[dict[str, Any]]] = {}
        for item in {item["id"]: item for item in items}.values():
            by_name.setdefault(api.shown(item["name"]), []).append(item)
        asked = {  # the others need no request
            name: same
            for name, same in by_name.items()
            if len(same) > 1 or api.shortcut_target(same[0]) is not None
        }
        found = await side_by_side(
            self._chosen_of(same, f"{folder.path}/{name}") for name, same in asked.items()
        )
        infos = dict(zip(asked, found, strict=True))
        return [
            infos.get(name) or api.item_info(same[0], f"{folder.path}/{name}")
            for name, same in by_name.items()
        ]

    async def _chosen_of(self, items: Sequence[dict[str, Any]], path: str) -> ObjectInfo:
        """Return the metadata of the item that counts among items of one name in a listing."""
        if await self._account.public.uses_pages(path):  # a page does not say which one was modified last
            items = await side_by_side(self._version_or_item(item, path) for item in items)
        return (await self.chosen(items, path))[1]

    async def _version_or_item(self, item: dict[str, Any], path: str) -> dict[str, Any]:
        with suppress(AccessDenied, NotDownloadable, QuotaExceeded):  # one item hides no neighbor
            return await self._account.public.version(item, path)
        return item

    async def below(self, folder: ObjectInfo) -> AsyncGenerator[ObjectInfo, None]:
        """Yield everything below a folder; sibling folders are listed concurrently.

        A shortcut to a folder that it is in is yielded with `cycle` in its details, and not entered.
        """
        gate = asyncio.Semaphore(_AT_ONCE)

        async def visit(here: ObjectInfo) -> list[ObjectInfo]:
            async with gate:
                try:
                    return await self.children(here)
                except ObjectNotFound:
                    if here is folder:
                        raise
                    return []  # it went while its siblings were listed: `children` asked

        above = {asyncio.ensure_future(visit(folder)): frozenset({folder.id})}
        try:
            while above:
                done, _ = await asyncio.wait(above, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    ids = above.pop(task)
                    for info in task.result():
                        if info.kind == "directory" and info.id in ids:
                            yield replace(info, details={**info.details, "cycle": True})
                            continue
                        if info.kind == "directory":
                            above[asyncio.ensure_future(visit(info))] = ids | {info.id}
                        yield info
        finally:
            for task in above:
                task.cancel()
            await asyncio.gather(*above, return_exceptions=True)

    # Where paths start
    async def _tops(self) -> list[ObjectInfo]:
        drives = await self._account.drives("")
        views = [await self._top(top, top) for top in (MY_DRIVE, SHARED_WITH_ME)]
        n_of = Counter(api.shown(drive["name"]) for drive in drives)
        # What has a name of its own is called by it, the others by their ids.
        return views + [
            _shared_drive(f"{api.SHARED}{name}" if n_of[name] == 1 else f"{ID}{drive['id']}", drive)
            for drive in drives
            if (name := api.shown(drive["name"]))
        ]

    async def _top(self, path: str, top: str) -> ObjectInfo:
        if not top:
            return api.folder_info("", "")
        if top == SHARED_WITH_ME:
            return api.folder_info(path, api.SHARED_WITH_ME)
        if top == MY_DRIVE and self._my_drive is not None:
            return self._my_drive
        if top.startswith(api.SHARED):
            return await self._shared_drive(path, top.removeprefix(api.SHARED))
        id, key = (api.ROOT, None) if top == MY_DRIVE else id_and_key(top)
        item = must_be_there(path, await self._account.item(id, path, key=key))
        item |= {"resourceKey": key} if key else {}
        if top == MY_DRIVE:
            self._my_drive = api.item_info(item, path)
            return self._my_drive
        info = await self.followed(item, path)
        # An id says nothing about the name, which a copy on the local disk needs.
        return replace(info, details={**info.details, "title": item["name"]})

    async def _shared_drive(self, path: str, name: str) -> ObjectInfo:
        drives = await self._account.drives(path)
        found = [drive for drive in drives if api.shown(drive["name"]) == name]
        if not found:
            names = ", ".join(sorted(drive["name"] for drive in drives)) or "none"
            raise missing(path, f"this account sees no shared drive of this name, but: {names}")
        if len(found) > 1:
            raise ValueError(
                f"{api.url_of(path)}: {len(found)} shared drives have this name; name one by its id: "
                + " or ".join(f"drive://id:{drive['id']}" for drive in found)
            )
        return _shared_drive(path, found[0])

    # Shortcuts and duplicates
    async def followed(self, item: Mapping[str, Any], path: str) -> ObjectInfo:
        """Return what an item is; for a shortcut, its target. Shortcuts to shortcuts do not exist."""
        if (target := api.shortcut_target(item)) is None:
            return api.item_info(item, path)
        try:
            found = await self._account.item(target["targetId"], path, key=target.get("targetResourceKey"))
        except SignInRefused:
            raise  # which says nothing of this target
        except (ObjectNotFound, AccessDenied, KeyError):
            found = {}  # one target that is out of reach hides no neighbour
        if not found or api.is_trashed(found):
            details = {"mimeType": api.SHORTCUT, "shortcut": item["id"], "dangling": True}
            return ObjectInfo(path, "file", details=details)
        return api.item_info(found, path, via=item)

    def warn_unprovable(self, path: str) -> None:
        """Warn once that Drive gives no way to tell versions of a file apart."""
        self._say_once(
            path,
            "Drive gives neither a checksum nor a revision of it, so that nothing of it can be cached safely: every read "
            "goes to Drive. A copy of it, made in Drive, has both",
        )

    def _say_once(self, path: str, what: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("%s: %s", api.url_of(path), what)


def _shared_drive(path: str, drive: Mapping[str, Any]) -> ObjectInfo:
    return api.folder_info(path, drive["id"], driveId=drive["id"], canListChildren=api.may_list(drive))


async def _no_further_page() -> None:
    raise TimeoutError
