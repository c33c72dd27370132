"""`PathLocks`: the items at paths that are being changed, one change of a path at a time.

A query may not find an item that was just created, so created items are remembered for 30 s.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any, NoReturn, TypeVar

from cachedfs.common.types import ObjectInfo
from cachedfs.errors import CachedFSError, IsAFolder, NotDownloadable, ObjectNotFound
from cachedfs.origins.base import Alone
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.paths import PathResolver, id_and_key, place_of

__all__ = ["PathLocks", "already_exists", "folder_of", "name_of", "writable"]

Item = TypeVar("Item", bound=Mapping[str, Any])

_MADE_LASTS_S = 30.0  # how long a query may not find what was made; as long as folders are remembered
_MOST_MADE = 1000


class PathLocks:
    """The items at paths that are being changed, their folders, and locks on the paths.

    Changes of the same path run one after another. Otherwise two writers could create a folder or file twice. The locks
    cover the changes through this object and, with `elsewhere`, those of all processes it reaches.
    """

    def __init__(self, account: DriveAccount, tree: PathResolver, elsewhere: Alone | None = None) -> None:
        self._account, self._tree, self._elsewhere = account, tree, elsewhere or _nobody_else
        self._busy: dict[str, tuple[asyncio.Lock, int]] = {}  # by path, with how many hold or want it
        self._made: dict[str, tuple[str, float]] = {}  # ids by path, oldest first, with when they were made

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, created if it is missing; `parents`: create those above it too."""
        if not place_of(path).names:
            info = await self._tree.lookup(path)
            return info if exist_ok and info.kind == "directory" else already_exists(path)
        began = self._tree.now()
        async with self.alone(path):
            if exist_ok and (made := self._tree.remembered(path, since=began)) is not None:
                return made  # while this waited: of many files in a new folder the first one makes it for all
            # What was just made may not be found by a query yet.
            if (
                exist_ok
                and (known := self._tree.remembered(path)) is not None
                and await self._tree.stands(path)
            ):
                return known
            try:
                info = await self._tree.lookup(path, sure=True, for_folder=True)
            except ObjectNotFound:
                pass
            else:
                if info.kind != "directory" or not exist_ok:
                    already_exists(path)
                return info
            item = await self.in_place(path, lambda: self._new_folder(path, parents))
            made = api.item_info(self.made(path, item), path)
            self._tree.remember(made)
            return made

    async def _new_folder(self, path: str, parents: bool) -> dict[str, Any]:
        parent = folder_of(path)
        folder = await (self.make_folder(parent, exist_ok=True) if parents else self._tree.folder(parent))
        _must_be_real(path, folder)
        to = await self._account.connection()
        resource = {"mimeType": api.FOLDER, **await self.new_item(path, folder, api.FOLDER)}
        try:
            return await to.change("POST", None, path, "making the folder", resource)
        except FileExistsError:  # an earlier try arrived, and only its answer was lost
            return await to.item(resource["id"], path)

    async def in_place(self, path: str, make: Callable[[], Awaitable[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the item that `make` puts at `path`; repeat it if the remembered folder is gone or in the trash."""
        with suppress(ObjectNotFound):
            if not api.is_trashed(item := await make()):
                return dict(item)
        self._tree.forget_way(folder_of(path))
        return dict(_must_be_there(path, await make()))

    async def place(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder of `path`, created if it is missing, and the items of that name in it."""
        if not place_of(path).names:
            item = await self._item_of(path)
            if item is None or item["mimeType"] == api.FOLDER:
                raise IsAFolder(
                    f"{api.url_of(path)}: a file needs a name in a folder, as in {api.url_of(path)}/name"
                )
            return api.folder_info("", ""), [item]
        began = time.monotonic()
        if (place := await self.standing(path)) is not None:
            return place
        folder = await self.make_folder(folder_of(path), exist_ok=True)
        id, made_at = self._made.get(folder.path, ("", 0.0))
        if id == folder.id and made_at >= began:
            return folder, []
        # It was there all the same, out of sight for a moment, and so was what is in it.
        return folder, await self._tree.named(path, folder) or await self._just_made(path, folder)

    def forget(self, path: str) -> None:
        """Forget what was created at `path`, and the folders there."""
        self._made.pop(path, None)
        self._tree.forget(path)

    async def standing(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]] | None:
        """Return the folder of `path` and the items of that name in it; None if the folder does not exist."""
        try:
            folder, items = await self._tree.at(path, sure=True)
        except ObjectNotFound:
            return None
        _must_be_real(path, folder)
        return folder, items or await self._just_made(path, folder)

    async def named(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder of `path` and the items of that name in it; raise ObjectNotFound without the folder."""
        if not place_of(path).names:
            item = await self._item_of(path)
            if item is None:
                raise IsAFolder(f"{api.url_of(path)}: this is where a Drive starts; it cannot be changed")
            return api.folder_info("", ""), [item]
        folder, items = await self._tree.at(path, sure=True)
        _must_be_real(path, folder)
        return folder, items

    async def _item_of(self, path: str) -> dict[str, Any] | None:
        """Return the item of a path of the form `id:ID`; None for other paths without names."""
        if not path.startswith("id:"):
            return None
        to = await self._account.connection()
        id, key = id_and_key(path)
        return _must_be_there(path, await to.item(id, path, key=key))

    async def new_item(self, path: str, folder: ObjectInfo, mime: str) -> dict[str, Any]:
        """Return the metadata of a new item at `path`.

        It includes an id where its type accepts one, so that a repeated request creates no second item.
        """
        given: dict[str, Any] = {"name": name_of(path), "parents": [folder.id]}
        if api.takes_id(mime):
            to = await self._account.connection()
            given["id"] = await to.new_id()
        return given

    def made(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        """Remember and return an item that was just created: a query may not find it yet."""
        self._made.pop(path, None)
        self._made[path] = item["id"], time.monotonic()
        if len(self._made) > _MOST_MADE:
            del self._made[next(iter(self._made))]
        return item

    async def _just_made(self, path: str, folder: ObjectInfo) -> list[dict[str, Any]]:
        """Return the item that was just created at `path`, if it is still there: otherwise a second one is created."""
        id, at = self._made.get(path, ("", 0.0))
        if not id or time.monotonic() > at + _MADE_LASTS_S:
            return []
        to = await self._account.connection()
        with suppress(ObjectNotFound):
            item = await to.item(id, path)
            is_there = folder.id in item.get("parents", ())
            if is_there and not api.is_trashed(item) and item["name"] in api.title_of(name_of(path)):
                return [item]
        return []

    async def discard(self, path: str, items: Sequence[Mapping[str, Any]], folder: ObjectInfo | None) -> None:
        """Remove items from a folder, or entirely if `folder` is None.

        The newest goes last, so that no older one appears meanwhile.
        """
        to = await self._account.connection()
        for item in sorted(items, key=api.age, reverse=True):
            # Until 2020 an item could be put into several folders.
            parents = item.get("parents", ())
            try:
                if folder is not None and folder.id and folder.id in parents and len(parents) > 1:
                    out = {"removeParents": folder.id}
                    kept = {"modifiedTime": item["modifiedTime"]}
                    await to.change("PATCH", item["id"], path, "taking it out of the folder", kept, out)
                elif to.options.trash_only:
                    await to.change("PATCH", item["id"], path, "moving it to the trash", {"trashed": True})
                else:
                    await to.change("DELETE", item["id"], path, "deleting it")
            except ObjectNotFound:  # somebody else was faster
                continue
        self.forget(path)

    @asynccontextmanager
    async def alone(self, path: str) -> AsyncIterator[None]:
        """Hold the lock on `path`.

        A caller that waits here may only hold locks on paths below, so no two callers wait for each other.
        """
        lock, n_users = self._busy.get(path, (asyncio.Lock(), 0))
        self._busy[path] = lock, n_users + 1
        try:
            async with lock, self._elsewhere(path):
                yield
        finally:
            lock, n_users = self._busy.pop(path)
            if n_users > 1:
                self._busy[path] = lock, n_users - 1

    @asynccontextmanager
    async def both_alone(self, one: str, other: str) -> AsyncIterator[None]:
        """Hold the locks on two paths, the deeper one first: the same order for all callers prevents a deadlock."""
        async with AsyncExitStack() as held:
            for path in sorted({one, other}, key=lambda path: (-path.count("/"), path)):
                await held.enter_async_context(self.alone(path))
            yield


def _nobody_else(path: str) -> AbstractAsyncContextManager[None]:
    return nullcontext()


def folder_of(path: str) -> str:
    """Return the path of the folder that `path` is in."""
    return path.rpartition("/")[0]


def name_of(path: str) -> str:
    """Return the title of a new item: its name in the path, with each "／" turned back into a slash."""
    return api.title_of(path.rpartition("/")[2])[-1]


def writable(path: str, item: Mapping[str, Any]) -> str:
    """Return the id of the item that is written to for `path`; raise if it has no content."""
    target = api.shortcut_target(item)
    mime = item["mimeType"] if target is None else target.get("targetMimeType", "")
    if mime == api.FOLDER:
        raise IsAFolder(f"{api.url_of(path)}: this leads to a folder; write to a file in it")
    if api.is_native(mime):
        raise NotDownloadable(
            f"{api.url_of(path)}: a document of Google's own ({mime}) has this name; choose another, or "
            "move the document away"
        )
    return str(item["id"] if target is None else target["targetId"])


def _must_be_real(path: str, folder: ObjectInfo) -> None:
    if folder.id == api.SHARED_WITH_ME:
        raise CachedFSError(
            f"{api.url_of(path)}: 'Shared with me' is a view, and holds nothing of its own; write to a folder in it, "
            "or to My Drive"
        )


def _must_be_there(path: str, item: Item) -> Item:
    if api.is_trashed(item):
        raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder: it is in the trash")
    return item


def already_exists(path: str) -> NoReturn:
    """Raise FileExistsError."""
    raise FileExistsError(errno.EEXIST, f"{api.url_of(path)}: exists already")
