"""What changes a Drive: files written, copied and moved, folders made, items put in the trash."""

from __future__ import annotations

import asyncio
import errno
import logging
import mimetypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, NoReturn

from cachedfs.errors import CachedFSError, IsAFolder, NotDownloadable, ObjectChanged, ObjectNotFound
from cachedfs.model import ObjectInfo
from cachedfs.origins.base import Alone
from cachedfs.origins.drive import api
from cachedfs.origins.drive.account import Account, Connection, key_of
from cachedfs.origins.drive.tree import Tree, id_and_key, place_of
from cachedfs.origins.drive.upload import Content, OtherBytes, upload

__all__ = ["Writer"]

logger = logging.getLogger("cachedfs.origins")

_MADE_LASTS_S = 30.0  # how long a query may not find what was made; as long as folders are remembered
_MOST_MADE = 1000


class Writer:
    """Changes by path; a path names one item afterwards.

    Changes of one path wait for each other, so that a folder is not made twice and two writers make one file: those of
    this writer, and with `elsewhere` all others that it reaches.
    """

    def __init__(self, account: Account, tree: Tree, elsewhere: Alone | None = None) -> None:
        self._account, self._tree, self._elsewhere = account, tree, elsewhere or _nobody_else
        self._busy: dict[str, tuple[asyncio.Lock, int]] = {}  # by path, with how many hold or want it
        self._made: dict[str, tuple[str, float]] = {}  # ids by path, oldest first, with when they were made

    async def write(
        self, path: str, content: Content, *, exclusive: bool = False, onto: str | None = None
    ) -> None:
        """Make `content` what the file at `path` holds: a new revision of the one that is there, else a new file.

        Folders on the way are made. `exclusive`: FileExistsError where there is one. `onto`: ObjectChanged where it is not
        of this fingerprint any more, "" for no file.
        """
        async with self._alone(path):
            await self._in_place(path, lambda: self._write(path, content, exclusive, onto))

    async def _write(self, path: str, content: Content, exclusive: bool, onto: str | None) -> dict[str, Any]:
        folder, items = await self._place(path)
        to = await self._account.connection()
        if items and exclusive:
            raise FileExistsError(errno.EEXIST, f"{api.url_of(path)}: exists already, and was to be new")
        before = await self._written_into(to, path, api.newest(items)) if items else None
        if onto is not None and onto != _fingerprint_of(before, path):
            raise ObjectChanged(
                f"{api.url_of(path)}: the file changed while it was being appended to; it is left as it is now: open it again"
            )
        if before is not None:
            return await self._uploaded(to, path, content, {"mimeType": before["mimeType"]}, before["id"])
        mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
        resource = {"mimeType": mime, **await self._new(to, path, folder)}
        return self._remembered(path, await self._uploaded(to, path, content, resource, None))

    async def _uploaded(
        self, to: Connection, path: str, content: Content, resource: Mapping[str, Any], into: str | None
    ) -> dict[str, Any]:
        try:
            return await upload(to, path, content, resource, into=into)
        except OtherBytes as error:
            left = await self._take_back(to, path, error, into, {"id": resource.get("id")})
            raise CachedFSError(
                f"{api.url_of(path)}: Drive holds other bytes than were sent: {error}. {left}; write it again"
            ) from error

    async def _take_back(
        self, to: Connection, path: str, error: OtherBytes, into: str | None, made: Mapping[str, Any]
    ) -> str:
        """Undo a write that went wrong, as far as Drive lets us; return what is left."""
        item = error.item
        if not error.is_ours:
            return "They may be of somebody who wrote it since, and are left"
        try:
            if into is None:
                await self._discard(path, [made], None)
                return "The new file was removed"
            revision = f"{api.file_url(to.base, into)}/revisions/{item['headRevisionId']}"
            await to.json("DELETE", revision, path, "taking the write back", {})
            if (await to.item(into, path)).get("md5Checksum") != item.get("md5Checksum"):
                return "The file is what it was before"
        except (CachedFSError, KeyError, ValueError) as trouble:  # the write failed in any case
            logger.warning("%s: wrong bytes could not be taken back: %s", api.url_of(path), trouble)
        return "They are its newest version now; Drive keeps the ones before under 'Manage versions'"

    async def _written_into(self, to: Connection, path: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what holds the content for `path`: a shortcut's target, unless that is in the trash."""
        into = self._writable(path, item)
        if (target := api.shortcut_target(item)) is None:
            return item
        found = await to.item(into, path, key=target.get("targetResourceKey"))
        if api.is_trashed(found):
            raise ObjectNotFound(f"{api.url_of(path)}: a shortcut to a file that is in the trash")
        return found

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, made where it is missing; `parents`: those on the way too."""
        if not place_of(path).names:
            info = await self._tree.lookup(path)
            return info if exist_ok else _exists(path)
        began = self._tree.now()
        async with self._alone(path):
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
                info = await self._tree.lookup(path, sure=True)
            except ObjectNotFound:
                pass
            else:
                if info.kind != "directory" or not exist_ok:
                    _exists(path)
                return info
            item = await self._in_place(path, lambda: self._new_folder(path, parents))
            made = api.item_info(item, path)
            self._tree.remember(made)
            return made

    async def _new_folder(self, path: str, parents: bool) -> dict[str, Any]:
        parent = _folder_of(path)
        folder = await (self.make_folder(parent, exist_ok=True) if parents else self._tree.folder(parent))
        _must_be_real(path, folder)
        to = await self._account.connection()
        resource = {"mimeType": api.FOLDER, **await self._new(to, path, folder)}
        try:
            return await to.change("POST", None, path, "making the folder", resource)
        except FileExistsError:  # an earlier try arrived, and only its answer was lost
            return await to.item(resource["id"], path)

    async def remove(self, path: str, *, folders: bool = False) -> None:
        """Put all items of this name in the trash (or delete them, as the options say); a folder goes with all in it.

        An item of old that lies in other folders too stays in those. All, because after the newest the one before would show again. Raises IsAFolder for folders unless `folders`.
        """
        async with self._alone(path):
            folder, items = await self._named(path)
            if not items:
                raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder")
            if not folders and any(item["mimeType"] == api.FOLDER for item in items):
                raise IsAFolder(
                    f"{api.url_of(path)}: this is a folder; remove it with recursive=True, or by rmdir"
                )
            await self._discard(path, items, folder)

    async def remove_empty(self, path: str) -> None:
        """Put an empty folder in the trash; raises OSError (ENOTEMPTY) for one that holds something."""
        info = await self._tree.lookup(path, sure=True)
        if info.kind != "directory":
            raise NotADirectoryError(f"{api.url_of(path)}: this is a file; remove it with rm")
        if await self._tree.children(info):
            raise OSError(
                errno.ENOTEMPTY, f"{api.url_of(path)}: the folder is not empty; rm(recursive=True) removes it"
            )
        await self.remove(path, folders=True)

    async def copy(self, source: str, target: str) -> None:
        """Make `target` a copy of the file `source`, on the server; what was there goes into the trash."""
        info = await self._tree.lookup(source, sure=True)
        if info.kind == "directory":
            await self.make_folder(
                target, exist_ok=True
            )  # to fsspec, a copied folder is a folder that is made
            return
        if info.id is None:
            raise ObjectNotFound(f"{api.url_of(source)}: a shortcut to a file that is gone")
        async with self._alone(target):
            await self._in_place(target, lambda: self._copy(info, target))

    async def _copy(self, info: ObjectInfo, target: str) -> Mapping[str, Any]:
        folder, before = await self._place(target)
        for item in before:
            if item["id"] == info.id:
                return item  # onto itself
            self._writable(target, item)
        to = await self._account.connection()
        resource, keys = await self._new(to, target, folder), key_of(info)
        try:
            item = await to.change("POST", f"{info.id}/copy", target, "copying to it", resource, headers=keys)
        except FileExistsError:  # an earlier try arrived, and only its answer was lost
            item = await to.item(resource["id"], target)
        await self._discard(target, before, folder)
        return self._remembered(target, item)

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id; a file that `target` named goes into the trash.

        Older items of the same name go along: else they would show where it was.
        """
        if target.startswith(f"{source}/"):
            raise ValueError(f"{api.url_of(source)}: a folder cannot be moved into itself ({target})")
        old, items = await self._named(source)
        if not items:
            raise ObjectNotFound(f"{api.url_of(source)}: no such file or folder")
        if not place_of(source).names:
            raise CachedFSError(
                f"{api.url_of(source)}: what is moved has to be named by its path, not by its id"
            )
        by_age, parent = sorted(items, key=api.age, reverse=True), old.id or ""
        moving = {item["id"] for item in items}

        async def to_target() -> dict[str, Any]:
            nonlocal parent
            folder, before = await self._place(target)
            before = [other for other in before if other["id"] not in moving]
            if any(other["mimeType"] == api.FOLDER for other in before):
                _exists(target)
            here = folder.id or ""
            params = {} if here == parent else {"addParents": here, "removeParents": parent}
            to, title = await self._account.connection(), {"title": _name_of(target)}
            params |= {"modifiedDateBehavior": "noChange"}  # which of several counts stays what it was
            for item in by_age:
                moved = await to.change("PATCH", item["id"], source, f"moving it to {target}", title, params)
            parent = here
            await self._discard(target, before, folder)
            return moved

        async with self._alone(target):
            await self._in_place(target, to_target)
        for path in (source, target):
            self._made.pop(path, None)
            self._tree.forget(path)

    # Steps
    async def _in_place(self, path: str, make: Callable[[], Awaitable[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the item that `make` puts at `path`: again, where the folder that was remembered is gone or in the trash."""
        with suppress(ObjectNotFound):
            if not api.is_trashed(item := await make()):
                return dict(item)
        self._tree.forget_way(_folder_of(path))
        return dict(await make())

    async def _place(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder that `path` lies in, made where it is missing, and the items that have the name there."""
        if not place_of(path).names:
            item = await self._item_of(path)
            if item is None or item["mimeType"] == api.FOLDER:
                raise IsAFolder(
                    f"{api.url_of(path)}: a file needs a name in a folder, as in {api.url_of(path)}/name"
                )
            return api.folder_info("", ""), [item]
        try:
            folder, items = await self._tree.at(path, sure=True)
        except ObjectNotFound:
            return await self.make_folder(_folder_of(path), exist_ok=True), []
        _must_be_real(path, folder)
        return folder, items or await self._just_made(path, folder)

    def _remembered(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        """Return the item that was just made, which no query may find yet."""
        self._made.pop(path, None)
        self._made[path] = item["id"], time.monotonic()
        if len(self._made) > _MOST_MADE:
            del self._made[next(iter(self._made))]
        return item

    async def _just_made(self, path: str, folder: ObjectInfo) -> list[dict[str, Any]]:
        """Return what this writer put at `path` a moment ago, if it still is there: else a second one would be made."""
        id, at = self._made.get(path, ("", 0.0))
        if not id or time.monotonic() > at + _MADE_LASTS_S:
            return []
        to = await self._account.connection()
        with suppress(ObjectNotFound):
            item = await to.item(id, path)
            is_there = any(parent["id"] == folder.id for parent in item.get("parents", ()))
            if is_there and not api.is_trashed(item) and item["title"] in api.title_of(_name_of(path)):
                return [item]
        return []

    async def _item_of(self, path: str) -> dict[str, Any] | None:
        """Return what a path without names is, where it is an item at all: the one that `id:` names."""
        if not path.startswith("id:"):
            return None
        to = await self._account.connection()
        id, key = id_and_key(path)
        return await to.item(id, path, key=key)

    async def _named(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder of `path`, and the items that it names there."""
        if not place_of(path).names:
            item = await self._item_of(path)
            if item is None:
                raise IsAFolder(f"{api.url_of(path)}: this is where a Drive starts; it cannot be changed")
            return api.folder_info("", ""), [item]
        folder, items = await self._tree.at(path, sure=True)
        _must_be_real(path, folder)
        return folder, items

    async def _new(self, to: Connection, path: str, folder: ObjectInfo) -> dict[str, Any]:
        return {"id": await to.new_id(), "title": _name_of(path), "parents": [{"id": folder.id}]}

    def _writable(self, path: str, item: Mapping[str, Any]) -> str:
        """Return the id whose content is written for `path`; raises for what has no content."""
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

    async def _discard(
        self, path: str, items: Sequence[Mapping[str, Any]], folder: ObjectInfo | None
    ) -> None:
        """Remove items from a folder; None: they lie in no other."""
        to = await self._account.connection()
        for item in items:
            # Until 2020 an item could be put into several folders.
            parents = {parent["id"] for parent in item.get("parents", ())}
            try:
                if folder is not None and folder.id and folder.id in parents and len(parents) > 1:
                    out = {"removeParents": folder.id, "modifiedDateBehavior": "noChange"}
                    await to.change("PATCH", item["id"], path, "taking it out of the folder", {}, out)
                elif to.options.trash_only:
                    await to.change("POST", f"{item['id']}/trash", path, "moving it to the trash")
                else:
                    await to.change("DELETE", item["id"], path, "deleting it")
            except ObjectNotFound:  # somebody else was faster
                continue
        self._made.pop(path, None)
        self._tree.forget(path)

    @asynccontextmanager
    async def _alone(self, path: str) -> AsyncIterator[None]:
        """Be the only one that changes `path`. Who waits here holds only what lies below, so that nobody waits in a circle."""
        lock, n_users = self._busy.get(path, (asyncio.Lock(), 0))
        self._busy[path] = lock, n_users + 1
        try:
            async with lock, self._elsewhere(path):
                yield
        finally:
            lock, n_users = self._busy.pop(path)
            if n_users > 1:
                self._busy[path] = lock, n_users - 1


def _fingerprint_of(item: Mapping[str, Any] | None, path: str) -> str:
    return "" if item is None else (api.item_info(item, path).fingerprint or "")


def _nobody_else(path: str) -> AbstractAsyncContextManager[None]:
    return nullcontext()


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _name_of(path: str) -> str:
    """Return the title of a new item: as the path has it, with the sign for a slash turned back into one."""
    return api.title_of(path.rpartition("/")[2])[-1]


def _must_be_real(path: str, folder: ObjectInfo) -> None:
    if folder.id == api.SHARED_WITH_ME:
        raise CachedFSError(
            f"{api.url_of(path)}: 'Shared with me' is a view, and holds nothing of its own; write to a folder in it, "
            "or to My Drive"
        )


def _exists(path: str) -> NoReturn:
    raise FileExistsError(errno.EEXIST, f"{api.url_of(path)}: exists already")
