"""`DriveWriter`: change a Drive by path, so that a path names one item."""

from __future__ import annotations

import asyncio
import errno
import logging
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from cachedfs.common.types import ANY_VERSION, AnyVersion, ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.errors import (
    CachedFSError,
    IsAFolder,
    NotDownloadable,
    ObjectExists,
    ObjectNotFound,
)
from cachedfs.origins.base import PathLock
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount, key_of
from cachedfs.origins.drive.drive_path import (
    id_and_key,
    missing,
    must_be_there,
    must_have_a_name,
    name_of,
    place_of,
)
from cachedfs.origins.drive.item_upload import ItemUpload
from cachedfs.origins.drive.paths import PathResolver
from cachedfs.origins.kept_mtime import rfc3339
from cachedfs.origins.upload import UploadContent, check_version, version_conflict

T = TypeVar("T")
logger = logging.getLogger("cachedfs.origins")

CHECKED_S = 5.0  # for so long, one check that a folder is where it was counts for all files written into it


class DriveWriter:
    """Changes by path. Changes of the same path run one after another: else Drive would create an item twice.

    The locks cover the changes through this object and, with `path_lock`, those of all processes it reaches.
    """

    def __init__(self, account: DriveAccount, tree: PathResolver, path_lock: PathLock | None = None) -> None:
        self._account, self._tree = account, tree
        self._path_lock = path_lock or (lambda path: nullcontext())
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by path, while in use

    # Files
    async def write(
        self,
        path: str,
        content: UploadContent,
        *,
        replaces: ObjectInfo | AnyVersion | None = ANY_VERSION,
        mtime_ns: int | None = None,
    ) -> ObjectInfo:
        """Write `content` to the file at `path` and return its metadata, as `Uploader.upload` does.

        A file that exists gets a new revision: one lookup by its id tells whether it is still the version `replaces`.
        Missing folders are created.
        """
        async with self._locked(path):
            if isinstance(replaces, ObjectInfo):
                await self._check_standing(path, replaces)
                return await self._write_into(path, content, replaces, mtime_ns)
            try:
                folder, items = await self._items(path, checked_s=CHECKED_S)
            except _NoFolder:
                folder = await self.make_folder(folder_of(path), exist_ok=True)
                items = await self._tree.named(path, folder)
            if items and replaces is None:
                raise ObjectExists(f"{api.url_of(path)}: exists already, and was to be new")
            if items:
                item, info = await self._tree.chosen(items, path)
                _must_have_content(path, item)
                return await self._write_into(path, content, info, mtime_ns)
            mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
            resource = {"mimeType": mime, **_times(mtime_ns), **await self._new_item(path, folder, mime)}
            item = await ItemUpload(self._account, path, content, resource).run()
            return self._tree.known.created(path, must_be_there(path, item))

    async def _check_standing(self, path: str, version: ObjectInfo) -> None:
        """Raise ObjectChanged if a file has another version than this one, or is no longer at `path`."""
        url = api.url_of(path)
        try:
            item = await self._account.item(
                _id_of(version, path), path, key=version.details.get("resourceKey")
            )
        except ObjectNotFound as error:
            raise version_conflict(url, version, None) from error
        if api.is_trashed(item) or not self._is_at(path, item, version):
            raise version_conflict(url, version, None)
        check_version(url, version, api.item_info(item, path))
        _must_have_content(path, item)

    def _is_at(self, path: str, item: Mapping[str, Any], version: ObjectInfo) -> bool:
        """Return whether an item has the name in `path`, and is in that folder as far as this is known."""
        if not place_of(path).names or "shortcut" in version.details:  # a target may be anywhere
            return True
        folder, parents = self._tree.known.get(folder_of(path)), item.get("parents")
        is_in = folder is None or parents is None or folder.id in (api.SHARED_WITH_ME, *parents)
        return is_in and api.shown(item["name"]) == name_of(path)

    async def _write_into(
        self, path: str, content: UploadContent, known: ObjectInfo, mtime_ns: int | None
    ) -> ObjectInfo:
        """Write a new revision of the file that is `known` at `path`; return its metadata."""
        resource = {"mimeType": known.details["mimeType"], **_times(mtime_ns)}
        item = await ItemUpload(self._account, path, content, resource, _id_of(known, path)).run()
        info = api.item_info(must_be_there(path, item), path)
        kept = {name: known.details[name] for name in ("shortcut", "same_name") if name in known.details}
        if not place_of(path).names:  # as `PathResolver.lookup` has it
            kept["title"] = item["name"]
        return replace(info, details={**info.details, **kept})

    async def remove(self, path: str, *, folders: bool = False) -> None:
        """Move the item that `path` names to the trash, or delete it if `trash_only` is off; a folder with its contents.

        Others of the same name stay, with a warning: the next one is what `path` names then. An old item that is also
        in other folders stays there. Raises IsAFolder for a folder unless `folders` is set.
        """
        async with self._locked(path):
            folder, item = await self._visible(path)
            if not folders and item["mimeType"] == api.FOLDER:
                raise IsAFolder(
                    f"{api.url_of(path)}: this is a folder; remove it with recursive=True, or by rmdir"
                )
            await self._remove(path, item, folder)

    # Folders
    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, created if it is missing; `parents`: create those above it too."""
        if not place_of(path).names:
            info = await self._tree.lookup(path)
            return info if exist_ok and info.kind == "directory" else _already_exists(path)
        began = self._account.policy.clock()
        async with self._locked(path):
            if exist_ok and (made := self._tree.known.get(path, since=began)) is not None:
                return made  # while this waited: of many files in a new folder the first one makes it for all
            try:
                info = await self._tree.lookup(path, checked_s=0.0, for_folder=True)
            except ObjectNotFound:
                parent = folder_of(path)
                make = self.make_folder(parent, exist_ok=True) if parents else self._tree.folder(parent)
                resource = {"mimeType": api.FOLDER, **await self._new_item(path, await make, api.FOLDER)}
                item = await self._account.change("POST", None, path, "making the folder", resource)
                return self._tree.known.created(path, must_be_there(path, item))
            if info.kind != "directory" or not exist_ok:
                _already_exists(path)
            return info

    async def remove_empty(self, path: str) -> None:
        """Remove an empty folder; raise OSError (ENOTEMPTY) if it is not empty."""
        async with self._locked(path):
            folder, item = await self._visible(path)
            info = await self._tree.followed(item, path)
            if info.kind != "directory":
                raise NotADirectoryError(f"{api.url_of(path)}: this is a file; remove it with rm")
            if await self._tree.children(info):
                raise OSError(
                    errno.ENOTEMPTY,
                    f"{api.url_of(path)}: the folder is not empty; rm(recursive=True) removes it",
                )
            await self._remove(path, item, folder)

    # Copying and moving
    async def copy(self, source: str, target: str) -> None:
        """Copy the file `source` to `target`, on the server; a file that was at `target` goes into the trash."""
        # To fsspec, a copied folder is a folder that is made.
        if await self._between(source, target, self._copy):
            await self.make_folder(target, exist_ok=True)

    async def _copy(self, source: str, target: str) -> bool:
        """Copy a file; return True, and do nothing, for a folder."""
        info = await self._tree.lookup(source, checked_s=0.0)
        if info.kind == "directory":
            return True
        id = _id_of(info, source)
        must_have_a_name(target)
        folder, before = await self._items(target)
        for item in before:
            if item["id"] == id:
                return False  # onto itself
            _must_have_content(target, item)
        # Of several, the one that the name means; the copy is newer than the others.
        replaced = (await self._tree.chosen(before, target))[0] if before else None
        resource, keys = await self._new_item(target, folder, info.details["mimeType"]), key_of(info)
        copy = await self._account.change("POST", id, target, "copying to it", resource, headers=keys)
        must_be_there(target, copy)
        await self._replace(target, replaced, folder, lambda: self._account.remove(copy["id"], target))
        self._tree.known.created(target, copy)
        return False

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id, and a file at `target` goes into the trash.

        Others of the name `source` stay, with a warning.
        """
        if target.startswith(f"{source}/"):
            raise ValueError(f"{api.url_of(source)}: a folder cannot be moved into itself ({target})")
        if not source.startswith("id:"):
            must_have_a_name(source)
        must_have_a_name(target)
        await self._between(source, target, self._move)

    async def _move(self, source: str, target: str) -> None:
        old, item = await self._visible(source)
        if not place_of(source).names:  # by its id
            must_have_a_name(source, item.get("parents", ()))
            old = api.folder_info("", item["parents"][0])
        new, there = await self._items(target)
        before = [other for other in there if other["id"] != item["id"]]
        if any(other["mimeType"] == api.FOLDER for other in before):
            _already_exists(target)
        if len(before) > 1:  # one that stays may be newer than what is moved
            raise CachedFSError(
                f"{api.url_of(target)}: {len(before)} items have this name; remove or rename all but one of them first"
            )
        try:
            moved = await self._shift(item, api.title_of(name_of(target)), old, new, source)
            must_be_there(target, moved)
            replaced = before[0] if before else None
            await self._replace(
                target, replaced, new, lambda: self._shift(item, item["name"], new, old, source)
            )
        finally:
            for path in (source, target):
                self._tree.known.expire(path)

    async def _shift(
        self, item: Mapping[str, Any], name: str, old: ObjectInfo, new: ObjectInfo, path: str
    ) -> dict[str, Any]:
        """Give an item a name and move it from one folder to another; return it."""
        params = {} if old.id == new.id else {"addParents": str(new.id), "removeParents": str(old.id)}
        # The time stays, because of several items of one name the last modified one counts.
        resource = {"name": name, "modifiedTime": item["modifiedTime"]}
        doing = f"moving it to the name {name}"
        return await self._account.change("PATCH", item["id"], path, doing, resource, params)

    async def _replace(
        self,
        target: str,
        replaced: Mapping[str, Any] | None,
        folder: ObjectInfo,
        undo: Callable[[], Awaitable[object]],
    ) -> None:
        """Remove the file that was at `target`; if Drive refuses that, `undo` the copy or move."""
        try:
            if replaced is not None:
                await self._remove(target, replaced, folder)
        except CachedFSError as error:
            left = "Nothing was copied or moved"
            try:
                await undo()
            except CachedFSError as trouble:
                logger.warning("%s: it could not be undone: %s", api.url_of(target), trouble)
                left = "It is there all the same, beside what was there before"
            raise type(error)(f"{error}. {left}") from error

    async def _between(self, source: str, target: str, change: Callable[[str, str], Awaitable[T]]) -> T:
        """Change two paths while no other writer changes either.

        A missing folder of the target is created while neither path is locked: another writer that creates it may wait
        for one of them.
        """
        try:
            async with self._locked(source, target):
                return await change(source, target)
        except _NoFolder:
            await self.make_folder(folder_of(target), exist_ok=True)
            async with self._locked(source, target):
                return await change(source, target)

    # Items of a path
    async def _items(
        self, path: str, *, is_write: bool = True, checked_s: float = 0.0
    ) -> tuple[ObjectInfo, list[dict[str, Any]]]:
        """Return the folder of `path` and the items of that name in it, to write there or to remove or move one.

        `checked_s`: as in `PathResolver.at`.
        """
        if place_of(path).names:
            try:
                folder, items = await self._tree.at(path, checked_s=checked_s)
            except ObjectNotFound as error:
                raise _NoFolder(str(error)) from error
            _must_be_real(path, folder, is_write=is_write)
            return folder, items
        if not path.startswith("id:"):
            raise IsAFolder(
                f"{api.url_of(path)}: this is where a Drive starts, and cannot be changed; name a file or folder in it"
            )
        id, key = id_and_key(path)
        item = await self._account.item(id, path, key=key)
        return api.folder_info("", ""), [must_be_there(path, item)]

    async def _visible(self, path: str) -> tuple[ObjectInfo, Mapping[str, Any]]:
        """Return the folder of `path` and the item in it that a read would give; warn of others of that name."""
        folder, items = await self._items(path, is_write=False)
        if not items:
            raise missing(path, "no item of this name is in the folder")
        if len(items) > 1:
            others = "1 other item has" if len(items) == 2 else f"{len(items) - 1} other items have"
            logger.warning("%s: %s this name, and stay there", api.url_of(path), others)
        return folder, (await self._tree.chosen(items, path))[0]

    async def _new_item(self, path: str, folder: ObjectInfo, mime: str) -> dict[str, Any]:
        """Return the metadata of a new item at `path`.

        It includes an id where its type accepts one, so that a repeated request creates no second item.
        """
        _must_be_real(path, folder)
        given = {"name": api.title_of(name_of(path)), "parents": [folder.id]}
        return given | ({"id": await self._account.new_id(path)} if api.takes_id(mime) else {})

    async def _remove(self, path: str, item: Mapping[str, Any], folder: ObjectInfo) -> None:
        """Remove an item from a folder, or entirely if it is in no other."""
        id, parents = item["id"], item.get("parents", ())
        # Until 2020 an item could be put into several folders.
        if folder.id in parents and len(parents) > 1:
            out, kept = {"removeParents": str(folder.id)}, {"modifiedTime": item["modifiedTime"]}
            with suppress(ObjectNotFound):
                await self._account.change("PATCH", id, path, "taking it out of the folder", kept, out)
        else:
            await self._account.remove(id, path)
        self._tree.known.expire(path)

    @asynccontextmanager
    async def _locked(self, *paths: str) -> AsyncIterator[None]:
        """Hold the locks on paths, the deepest first.

        Who holds one may wait only for those of the folders above it. So no two callers wait for each other.
        """
        async with AsyncExitStack() as held:
            for path in sorted(set(paths), key=lambda path: (-path.count("/"), path)):
                await held.enter_async_context(self._locks.setdefault(path, asyncio.Lock()))
                await held.enter_async_context(self._path_lock(path))
            yield


class _NoFolder(ObjectNotFound):
    """The folder of a path does not exist."""


def _times(mtime_ns: int | None) -> dict[str, str]:
    """Return the field of a file that has a time of modification: Drive keeps milliseconds."""
    at = rfc3339(mtime_ns, 3)
    return {} if at is None else {"modifiedTime": at}


def _id_of(info: ObjectInfo, path: str) -> str:
    if info.id is None:
        raise ObjectNotFound(
            f"{api.url_of(path)}: a shortcut to a file that is gone, or that is not shared with this account"
        )
    return info.id


def _must_have_content(path: str, item: Mapping[str, Any]) -> None:
    """Raise an error for what cannot be written to: a folder, a document, and a shortcut to one of them."""
    mime = api.mime_of(item)
    if mime == api.FOLDER:
        raise IsAFolder(f"{api.url_of(path)}: this leads to a folder; write to a file in it")
    if api.is_native(mime):
        raise NotDownloadable(
            f"{api.url_of(path)}: a document of Google's own ({mime}) has this name; choose another, or "
            "move the document away"
        )


def _must_be_real(path: str, folder: ObjectInfo, *, is_write: bool = True) -> None:
    if folder.id == api.SHARED_WITH_ME:
        to_do = "write to a folder in it, or to My Drive"
        if not is_write:
            to_do = "take the item out of it at drive.google.com, or remove or move it as drive://id:ID if it is yours"
        raise CachedFSError(
            f"{api.url_of(path)}: 'Shared with me' is a view, and holds nothing of its own; {to_do}"
        )


def _already_exists(path: str) -> NoReturn:
    raise ObjectExists(f"{api.url_of(path)}: exists already")
