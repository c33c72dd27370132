"""Change a Drive by path: write, copy, move and remove; a failed change is undone."""

from __future__ import annotations

import errno
import logging
import mimetypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cachedfs.common.types import ObjectInfo
from cachedfs.errors import CachedFSError, IsAFolder, ObjectChanged, ObjectNotFound, OriginUnavailable
from cachedfs.origins.base import Alone
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount, DriveConnection, key_of
from cachedfs.origins.drive.path_locks import PathLocks, already_exists, folder_of, name_of, writable
from cachedfs.origins.drive.paths import MY_DRIVE, PathResolver, place_of
from cachedfs.origins.drive.upload import UploadContent, UploadMismatch, upload

__all__ = ["DriveWriter", "ServerSideMove"]


logger = logging.getLogger("cachedfs.origins")

_NOTHING = "Nothing was copied or moved"
_PERHAPS = "It may have been moved all the same, as no answer came: look at both paths before you try again"


class ServerSideMove:
    """Copies and moves on the server, while no other writer changes either path."""

    def __init__(self, account: DriveAccount, tree: PathResolver, places: PathLocks) -> None:
        self._account, self._tree, self._places = account, tree, places

    async def copy(self, source: str, target: str) -> None:
        """Copy the file `source` to `target`, on the server; a file that was at `target` goes into the trash."""
        try:
            await self._between(source, target, self._copy)
        except _IsFolder:  # to fsspec, a copied folder is a folder that is made
            await self._places.make_folder(target, exist_ok=True)

    async def _copy(self, source: str, target: str) -> bool:
        info = await self._tree.lookup(source, sure=True)
        if info.kind == "directory":
            raise _IsFolder
        if info.id is None:
            raise ObjectNotFound(f"{api.url_of(source)}: a shortcut to a file that is gone")
        _must_have_a_name(target)
        if (place := await self._places.standing(target)) is None:
            return False
        folder, before = place
        for item in before:
            if item["id"] == info.id:
                return True  # onto itself
            writable(target, item)
        to = await self._account.connection()
        resource, keys = await self._places.new_item(target, folder, info.details["mimeType"]), key_of(info)
        try:
            item = await to.change("POST", f"{info.id}/copy", target, "copying to it", resource, headers=keys)
        except FileExistsError:
            if "id" not in resource:
                raise
            # An earlier try arrived, and only its answer was lost.
            item = await to.item(resource["id"], target)
        except ObjectNotFound:
            return False
        if api.is_trashed(item):
            return False
        try:
            # Of several, the one that the name means; the copy is newer than the others.
            replaced = [(await self._tree.chosen(before, target))[0]] if before else []
            await self._places.discard(target, replaced, folder)
        except CachedFSError as error:
            left = await self._undone(target, self._places.discard(target, [item], None))
            raise type(error)(f"{error}. {left}") from error
        self._places.made(target, item)
        return True

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id, and a file at `target` goes into the trash.

        Older items of the same name move along: otherwise they would appear at the old path.
        """
        if target.startswith(f"{source}/"):
            raise ValueError(f"{api.url_of(source)}: a folder cannot be moved into itself ({target})")
        _must_have_a_name(target)
        await self._between(source, target, self._move)

    async def _move(self, source: str, target: str) -> bool:
        old, items = await self._places.named(source)
        if not items:
            raise ObjectNotFound(f"{api.url_of(source)}: no such file or folder")
        if not place_of(source).names:
            raise CachedFSError(
                f"{api.url_of(source)}: the source of a move must be given by its path, not by its id"
            )
        if (place := await self._places.standing(target)) is None:
            return False
        folder, before = place
        moving = {item["id"] for item in items}
        before = [other for other in before if other["id"] not in moving]
        if any(other["mimeType"] == api.FOLDER for other in before):
            already_exists(target)
        if len(before) > 1:  # one that stays may be newer than what is moved
            raise CachedFSError(
                f"{api.url_of(target)}: {len(before)} items have this name; remove or rename all but one of them first"
            )
        way, moved = _Way(old.id or "", folder.id or ""), list[Mapping[str, Any]]()
        try:
            for item in sorted(items, key=api.age, reverse=True):
                now = await self._shift(item, name_of(target), way, source)
                moved.append(item)
            if api.is_trashed(now):
                raise ObjectNotFound(f"{api.url_of(target)}: its folder is in the trash")
            await self._places.discard(target, before, folder)
        except CachedFSError as error:
            is_unsure = isinstance(error, OriginUnavailable) and len(moved) < len(items)
            undone = _PERHAPS if is_unsure else _NOTHING
            left = await self._undone(target, self._shift_back(moved, way, source), undone)
            if isinstance(error, ObjectNotFound):  # the folder went
                return False
            raise type(error)(f"{error}. {left}") from error
        finally:
            for path in (source, target):
                self._places.forget(path)
        return True

    async def _shift(self, item: Mapping[str, Any], name: str, way: _Way, path: str) -> dict[str, Any]:
        """Give an item a name and move it from one folder to another; return it."""
        params = {} if way.out_of == way.into else {"addParents": way.into, "removeParents": way.out_of}
        # The time stays, because of several items of one name the last modified one counts.
        resource = {"name": name, "modifiedTime": item["modifiedTime"]}
        to = await self._account.connection()
        return await to.change("PATCH", item["id"], path, f"moving it to the name {name}", resource, params)

    async def _shift_back(self, moved: Sequence[Mapping[str, Any]], way: _Way, path: str) -> None:
        for item in reversed(moved):
            await self._shift(item, item["name"], way.back(), path)

    async def _undone(self, target: str, undoing: Awaitable[None], undone: str = _NOTHING) -> str:
        """Undo a failed change at `target`; return what is left of it, or `undone`, in words for the error."""
        try:
            await undoing
        except CachedFSError as trouble:  # the change failed in any case
            logger.warning(
                "%s: the item created there could not be removed again: %s", api.url_of(target), trouble
            )
            return "It is there all the same, beside what was there before"
        return undone

    async def _between(self, source: str, target: str, change: Callable[[str, str], Awaitable[bool]]) -> None:
        """Change two paths while no other writer changes either.

        `change` returns False if the target's folder is missing. The folder is then created while neither path is
        locked: another writer that creates it may wait for one of them.
        """
        for _ in range(2):
            async with self._places.both_alone(source, target):
                if await change(source, target):
                    return
            self._tree.forget_way(folder_of(target))
            await self._places.make_folder(folder_of(target), exist_ok=True)
        raise ObjectNotFound(f"{api.url_of(target)}: its folder is removed as often as it is made")


class _Way(NamedTuple):
    """The ids of the folders that an item moves from and to."""

    out_of: str
    into: str

    def back(self) -> _Way:
        return _Way(self.into, self.out_of)


class _IsFolder(Exception):
    """The source of a copy is a folder."""


def _must_have_a_name(path: str) -> None:
    if not place_of(path).names:
        raise CachedFSError(
            f"{api.url_of(path)}: the target of a copy or move needs a name in a folder; give its path, as in "
            f"{api.url_of(f'{MY_DRIVE}/folder/name')}"
        )


class DriveWriter:
    """Changes by path: afterwards a path names one item, and changes of the same path run one after another."""

    def __init__(self, account: DriveAccount, tree: PathResolver, elsewhere: Alone | None = None) -> None:
        self._account, self._tree = account, tree
        self._places = PathLocks(account, tree, elsewhere)
        self._moves = ServerSideMove(account, tree, self._places)

    async def write(
        self, path: str, content: UploadContent, *, exclusive: bool = False, onto: str | None = None
    ) -> None:
        """Write `content` to the file at `path`: as a new revision if it exists, else as a new file.

        Missing folders are created. `exclusive`: raise FileExistsError if the file exists. `onto`: raise ObjectChanged
        if its fingerprint is another, where "" means no file.
        """
        async with self._places.alone(path):
            await self._places.in_place(path, lambda: self._write(path, content, exclusive, onto))

    async def _write(
        self, path: str, content: UploadContent, exclusive: bool, onto: str | None
    ) -> dict[str, Any]:
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
        self,
        to: DriveConnection,
        path: str,
        content: UploadContent,
        resource: Mapping[str, Any],
        into: str | None,
    ) -> dict[str, Any]:
        try:
            return await upload(to, path, content, resource, into=into)
        except UploadMismatch as error:
            left = await self._take_back(to, path, error, into, {"id": resource.get("id")})
            raise CachedFSError(
                f"{api.url_of(path)}: Drive holds other bytes than were sent: {error}. {left}; write it again"
            ) from error

    async def _take_back(
        self, to: DriveConnection, path: str, error: UploadMismatch, into: str | None, made: Mapping[str, Any]
    ) -> str:
        """Undo a write that stored wrong bytes, as far as Drive allows; return what is left, in words for the error."""
        item = error.item
        if not error.is_ours:
            return "They may be from another writer, and are left"
        try:
            if into is None:
                await self._places.discard(path, [made], None)
                return "The new file was removed"
            revision = api.revision_url(to.base, into, item["headRevisionId"])
            await to.json("DELETE", revision, path, "taking the write back", {}, kind=None)
            if (await to.item(into, path)).get("md5Checksum") != item.get("md5Checksum"):
                return "The file is what it was before"
        except (CachedFSError, KeyError, ValueError) as trouble:  # the write failed in any case
            logger.warning("%s: wrong bytes could not be taken back: %s", api.url_of(path), trouble)
        return "They are its newest version now; Drive keeps the ones before under 'Manage versions'"

    async def _written_into(
        self, to: DriveConnection, path: str, items: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the item that holds the content of `path`: for a shortcut its target, unless that is in the trash."""
        item = items[0] if len(items) == 1 else (await self._tree.chosen(items, path))[0]
        into = writable(path, item)
        if (target := api.shortcut_target(item)) is None:
            return item
        found = await to.item(into, path, key=target.get("targetResourceKey"))
        if api.is_trashed(found):
            raise ObjectNotFound(f"{api.url_of(path)}: a shortcut to a file that is in the trash")
        return found

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> ObjectInfo:
        """Return the folder at `path`, created if it is missing; `parents`: create those above it too."""
        return await self._places.make_folder(path, exist_ok=exist_ok, parents=parents)

    async def copy(self, source: str, target: str) -> None:
        """Copy the file `source` to `target`, on the server; a file that was at `target` goes into the trash."""
        await self._moves.copy(source, target)

    async def move(self, source: str, target: str) -> None:
        """Move a file or folder, on the server: it keeps its id, and a file at `target` goes into the trash."""
        await self._moves.move(source, target)

    async def remove(self, path: str, *, folders: bool = False) -> None:
        """Move the item that `path` names to the trash, or delete it if `trash_only` is off; a folder with its contents.

        Others of the same name stay, with a warning: the next one is what `path` names then. An old item that is also
        in other folders stays there. Raises IsAFolder for a folder unless `folders` is set.
        """
        async with self._places.alone(path):
            folder, item, n_others = await self._to_remove(path)
            if not folders and item["mimeType"] == api.FOLDER:
                raise IsAFolder(
                    f"{api.url_of(path)}: this is a folder; remove it with recursive=True, or by rmdir"
                )
            await self._places.discard(path, [item], folder)
            self._warn_of_others(path, n_others)

    async def remove_empty(self, path: str) -> None:
        """Remove an empty folder; raise OSError (ENOTEMPTY) if it is not empty."""
        async with self._places.alone(path):
            folder, item, n_others = await self._to_remove(path)
            info = await self._tree.followed(item, path)
            if info.kind != "directory":
                raise NotADirectoryError(f"{api.url_of(path)}: this is a file; remove it with rm")
            if await self._tree.children(info):
                raise OSError(
                    errno.ENOTEMPTY,
                    f"{api.url_of(path)}: the folder is not empty; rm(recursive=True) removes it",
                )
            await self._places.discard(path, [item], folder)
            self._warn_of_others(path, n_others)

    async def _to_remove(self, path: str) -> tuple[ObjectInfo, Mapping[str, Any], int]:
        """Return the folder of `path`, the item in it that a read would give, and the number of others of that name."""
        folder, items = await self._places.named(path)
        if not items:
            raise ObjectNotFound(f"{api.url_of(path)}: no such file or folder")
        item, _ = await self._tree.chosen(items, path)
        return folder, item, len(items) - 1

    def _warn_of_others(self, path: str, n_others: int) -> None:
        if n_others:
            others = "1 other item has" if n_others == 1 else f"{n_others} other items have"
            logger.warning("%s: removed; %s this name and stayed", api.url_of(path), others)


def _fingerprint_of(item: Mapping[str, Any] | None, path: str) -> str:
    return "" if item is None else (api.item_info(item, path).fingerprint or "")
