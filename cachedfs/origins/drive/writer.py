"""What changes a Drive: files written, copied and moved, folders made, items put in the trash."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from cachedfs.errors import CachedFSError, IsAFolder, NotDownloadable, ObjectNotFound
from cachedfs.model import ObjectInfo
from cachedfs.origins.drive import api
from cachedfs.origins.drive.account import Account, Connection
from cachedfs.origins.drive.tree import Tree, place_of
from cachedfs.origins.drive.upload import Content, upload

__all__ = ["Writer"]


class Writer:
    """Changes by path; a path names one item afterwards.

    Changes of one path wait for each other, so that a folder is not made twice and two writers make one file. That holds
    within one account object, which is one process under cachedfs.
    """

    def __init__(self, account: Account, tree: Tree) -> None:
        self._account, self._tree = account, tree
        self._busy: dict[str, tuple[asyncio.Lock, int]] = {}  # by path, with how many hold or want it

    async def write(self, path: str, content: Content, *, exclusive: bool = False) -> None:
        """Make `content` what the file at `path` holds: a new revision of the one that is there, else a new file.

        Folders on the way are made. `exclusive`: FileExistsError where there is one.
        """
        async with self._alone(path):
            folder, items = await self._place(path)
            to = await self._account.connection()
            into = None
            if items:
                if exclusive:
                    raise FileExistsError(f"{api.url_of(path)}: exists already, and was to be new")
                into = self._writable(path, api.newest(items))
            mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
            resource: dict[str, Any] = {"mimeType": mime}
            if into is None:
                resource |= await self._new(to, path, folder)
            await upload(to, path, content, resource, into=into)

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, made where it is missing; `parents`: those on the way too."""
        if not place_of(path).names:
            info = await self._tree.lookup(path)
            return info if exist_ok else _exists(path)
        async with self._alone(path):
            try:
                info = await self._tree.lookup(path)
            except ObjectNotFound:
                pass
            else:
                if info.kind != "directory" or not exist_ok:
                    _exists(path)
                return info
            parent = _folder_of(path)
            folder = await (self.make_folder(parent, exist_ok=True) if parents else self._tree.folder(parent))
            to = await self._account.connection()
            resource = {"mimeType": api.FOLDER, **await self._new(to, path, folder)}
            try:
                item = await to.change("POST", None, path, "making the folder", resource)
            except FileExistsError:  # an earlier try arrived, and only its answer was lost
                item = await to.item(resource["id"], path)
            made = api.item_info(item, path)
            self._tree.remember(made)
            return made

    async def remove(self, path: str, *, folders: bool = False) -> None:
        """Put all items of this name in the trash (or delete them, as the options say); a folder goes with all in it.

        All, because after the newest the one before would show again. Raises IsAFolder for folders unless `folders`.
        """
        async with self._alone(path):
            items = await self._named(path)
            if not items:
                raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder")
            if not folders and any(item["mimeType"] == api.FOLDER for item in items):
                raise IsAFolder(
                    f"{api.url_of(path)}: this is a folder; remove it with recursive=True, or by rmdir"
                )
            await self._discard(path, items)

    async def remove_empty(self, path: str) -> None:
        """Put an empty folder in the trash; raises OSError (ENOTEMPTY) for one that holds something."""
        info = await self._tree.lookup(path)
        if info.kind != "directory":
            raise NotADirectoryError(f"{api.url_of(path)}: this is a file; remove it with rm")
        if await self._tree.children(info):
            import errno

            raise OSError(
                errno.ENOTEMPTY, f"{api.url_of(path)}: the folder is not empty; rm(recursive=True) removes it"
            )
        await self.remove(path, folders=True)

    async def copy(self, source: str, target: str) -> None:
        """Make `target` a copy of the file `source`, on the server; what was there goes into the trash."""
        info = await self._tree.lookup(source)
        if info.kind == "directory":
            await self.make_folder(
                target, exist_ok=True
            )  # to fsspec, a copied folder is a folder that is made
            return
        if info.id is None:
            raise ObjectNotFound(f"{api.url_of(source)}: a shortcut to a file that is gone")
        async with self._alone(target):
            folder, before = await self._place(target)
            if any(item["id"] == info.id for item in before):
                return  # onto itself
            for item in before:
                self._writable(target, item)
            to = await self._account.connection()
            resource = await self._new(to, target, folder)
            try:
                await to.change("POST", f"{info.id}/copy", target, "copying to it", resource)
            except FileExistsError:  # an earlier try arrived, and only its answer was lost
                await to.item(resource["id"], target)
            await self._discard(target, before)

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id; a file that `target` named goes into the trash."""
        items = await self._named(source)
        if not items:
            raise ObjectNotFound(f"{api.url_of(source)}: no such file or folder")
        item = api.newest(items)
        old = await self._tree.folder(_folder_of(source))
        async with self._alone(target):
            folder, before = await self._place(target)
            before = [other for other in before if other["id"] != item["id"]]
            if any(other["mimeType"] == api.FOLDER for other in before):
                _exists(target)
            params = (
                {} if folder.id == old.id else {"addParents": folder.id or "", "removeParents": old.id or ""}
            )
            to = await self._account.connection()
            title = {"title": _name_of(target)}
            await to.change("PATCH", item["id"], source, f"moving it to {target}", title, params)
            await self._discard(target, before)
        self._tree.forget(source)
        self._tree.forget(target)

    # Steps
    async def _place(self, path: str) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder that `path` lies in, made where it is missing, and the items that have the name there."""
        if not place_of(path).names:
            raise IsAFolder(
                f"{api.url_of(path)}: a file needs a name in a folder, as in {api.url_of(path)}/name"
            )
        parent = _folder_of(path)
        try:
            folder = await self._tree.folder(parent)
        except ObjectNotFound:
            folder = await self.make_folder(parent, exist_ok=True)
            return folder, []
        if folder.id == api.SHARED_WITH_ME:
            raise CachedFSError(
                f"{api.url_of(path)}: 'Shared with me' is a view, and holds nothing of its own; write to a folder in it"
            )
        return folder, await self._named(path)

    async def _named(self, path: str) -> list[dict[str, Any]]:
        """Return the items that `path` names; a folder on the way that was remembered and is gone is looked up again."""
        if not place_of(path).names:
            raise IsAFolder(f"{api.url_of(path)}: this is where a Drive starts; it cannot be changed")
        parent = _folder_of(path)
        try:
            return await self._tree.named(path, await self._tree.folder(parent))
        except ObjectNotFound:
            self._tree.forget(parent)
            return await self._tree.named(path, await self._tree.folder(parent))

    async def _new(self, to: Connection, path: str, folder: ObjectInfo) -> dict[str, Any]:
        return {"id": await to.new_id(), "title": _name_of(path), "parents": [{"id": folder.id}]}

    def _writable(self, path: str, item: Mapping[str, Any]) -> str:
        """Return the id whose content is written for `path`; raises for what has no content."""
        if item["mimeType"] == api.FOLDER:
            raise IsAFolder(f"{api.url_of(path)}: this is a folder; write to a file in it")
        if (target := api.shortcut_target(item)) is not None:
            return str(target["targetId"])
        if "fileSize" not in item and "md5Checksum" not in item:
            raise NotDownloadable(
                f"{api.url_of(path)}: a document of Google's own ({item['mimeType']}) has this name; choose another, or "
                "move the document away"
            )
        return str(item["id"])

    async def _discard(self, path: str, items: list[dict[str, Any]]) -> None:
        to = await self._account.connection()
        for item in items:
            try:
                if to.options.trash_only:
                    await to.change("POST", f"{item['id']}/trash", path, "moving it to the trash")
                else:
                    await to.change("DELETE", item["id"], path, "deleting it")
            except ObjectNotFound:  # somebody else was faster
                continue
        self._tree.forget(path)

    @asynccontextmanager
    async def _alone(self, path: str) -> AsyncIterator[None]:
        lock, n_users = self._busy.get(path, (asyncio.Lock(), 0))
        self._busy[path] = lock, n_users + 1
        try:
            async with lock:
                yield
        finally:
            lock, n_users = self._busy.pop(path)
            if n_users > 1:
                self._busy[path] = lock, n_users - 1


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _name_of(path: str) -> str:
    """Return the title of a new item: as the path has it, with the sign for a slash turned back into one."""
    return api.title_of(path.rpartition("/")[2])[-1]


def _exists(path: str) -> NoReturn:
    raise FileExistsError(f"{api.url_of(path)}: exists already")
