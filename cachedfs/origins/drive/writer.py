"""What changes a Drive: files written, copied and moved, folders made, items put in the trash."""

from __future__ import annotations

import errno
import logging
import mimetypes
from collections.abc import Mapping, Sequence
from typing import Any

from cachedfs.common.types import ObjectInfo
from cachedfs.errors import CachedFSError, IsAFolder, ObjectChanged, ObjectNotFound
from cachedfs.origins.base import Alone
from cachedfs.origins.drive import api
from cachedfs.origins.drive.account import Account
from cachedfs.origins.drive.connection import Connection
from cachedfs.origins.drive.moves import Moves
from cachedfs.origins.drive.places import Places, writable
from cachedfs.origins.drive.tree import Tree
from cachedfs.origins.drive.upload import Content, OtherBytes, upload

__all__ = ["Writer"]

logger = logging.getLogger("cachedfs.origins")


class Writer:
    """Changes by path; a path names one item afterwards, and changes of one path wait for each other."""

    def __init__(self, account: Account, tree: Tree, elsewhere: Alone | None = None) -> None:
        self._account, self._tree = account, tree
        self._places = Places(account, tree, elsewhere)
        self._moves = Moves(account, tree, self._places)

    async def write(
        self, path: str, content: Content, *, exclusive: bool = False, onto: str | None = None
    ) -> None:
        """Make `content` what the file at `path` holds: a new revision of the one that is there, else a new file.

        Folders on the way are made. `exclusive`: FileExistsError where there is one. `onto`: ObjectChanged where it is not
        of this fingerprint any more, "" for no file.
        """
        async with self._places.alone(path):
            await self._places.in_place(path, lambda: self._write(path, content, exclusive, onto))

    async def _write(self, path: str, content: Content, exclusive: bool, onto: str | None) -> dict[str, Any]:
        folder, items = await self._places.place(path)
        to = await self._account.connection()
        if items and exclusive:
            raise FileExistsError(errno.EEXIST, f"{api.url_of(path)}: exists already, and was to be new")
        before = await self._written_into(to, path, items) if items else None
        if onto is not None and onto != _fingerprint_of(before, path):
            raise ObjectChanged(
                f"{api.url_of(path)}: the file changed while it was being appended to; it is left as it is now: open it again"
            )
        if before is not None:
            return await self._uploaded(to, path, content, {"mimeType": before["mimeType"]}, before["id"])
        mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
        resource = {"mimeType": mime, **await self._places.new_item(path, folder, mime)}
        return self._places.made(path, await self._uploaded(to, path, content, resource, None))

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
                await self._places.discard(path, [made], None)
                return "The new file was removed"
            revision = f"{api.file_url(to.base, into)}/revisions/{item['headRevisionId']}"
            await to.json("DELETE", revision, path, "taking the write back", {}, kind=None)
            if (await to.item(into, path)).get("md5Checksum") != item.get("md5Checksum"):
                return "The file is what it was before"
        except (CachedFSError, KeyError, ValueError) as trouble:  # the write failed in any case
            logger.warning("%s: wrong bytes could not be taken back: %s", api.url_of(path), trouble)
        return "They are its newest version now; Drive keeps the ones before under 'Manage versions'"

    async def _written_into(
        self, to: Connection, path: str, items: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return what holds the content for `path`: a shortcut's target, unless that is in the trash."""
        item = items[0] if len(items) == 1 else (await self._tree.chosen(items, path))[0]
        into = writable(path, item)
        if (target := api.shortcut_target(item)) is None:
            return item
        found = await to.item(into, path, key=target.get("targetResourceKey"))
        if api.is_trashed(found):
            raise ObjectNotFound(f"{api.url_of(path)}: a shortcut to a file that is in the trash")
        return found

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, made where it is missing; `parents`: those on the way too."""
        return await self._places.make_folder(path, exist_ok=exist_ok, parents=parents)

    async def copy(self, source: str, target: str) -> None:
        """Make `target` a copy of the file `source`, on the server; what was there goes into the trash."""
        await self._moves.copy(source, target)

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id; a file that `target` named goes into the trash."""
        await self._moves.move(source, target)

    async def remove(self, path: str, *, folders: bool = False) -> None:
        """Put all items of this name in the trash (or delete them, as the options say); a folder goes with all in it.

        An item of old that lies in other folders too stays in those. All, because after the newest the one before would show again. Raises IsAFolder for folders unless `folders`.
        """
        async with self._places.alone(path):
            folder, items = await self._places.named(path)
            if not items:
                raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder")
            if not folders and any(item["mimeType"] == api.FOLDER for item in items):
                raise IsAFolder(
                    f"{api.url_of(path)}: this is a folder; remove it with recursive=True, or by rmdir"
                )
            await self._places.discard(path, items, folder)

    async def remove_empty(self, path: str) -> None:
        """Put an empty folder in the trash, with all of its name; raises OSError (ENOTEMPTY) where one holds something."""
        async with self._places.alone(path):
            folder, items = await self._places.named(path)
            if not items:
                raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder")
            for info in [await self._tree.followed(item, path) for item in items]:
                if info.kind != "directory":
                    raise NotADirectoryError(f"{api.url_of(path)}: this is a file; remove it with rm")
                if await self._tree.children(info):
                    raise OSError(
                        errno.ENOTEMPTY,
                        f"{api.url_of(path)}: the folder is not empty; rm(recursive=True) removes it",
                    )
            await self._places.discard(path, items, folder)


def _fingerprint_of(item: Mapping[str, Any] | None, path: str) -> str:
    return "" if item is None else (api.item_info(item, path).fingerprint or "")
