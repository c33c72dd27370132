"""`KnownFolders`: where folders were seen in the last 30 s, and which items were just created."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cachedfs.common.event_loop import side_by_side
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.errors import CachedFSError, ObjectNotFound
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.drive_path import name_of, place_of

_REMEMBERED_S = 30.0


class KnownFolders:
    """Remembers for 30 s where folders are, and which items were just created here: a query may not find them yet."""

    def __init__(self, account: DriveAccount) -> None:
        self._account, self._clock = account, account.policy.clock
        self._folders: dict[str, tuple[ObjectInfo, float]] = {}  # by path, with when each was seen
        self._created: dict[str, tuple[str, float]] = {}  # ids by path, with when they were created
        self._checks: dict[str, tuple[asyncio.Task[bool], float]] = {}  # by folder: the latest, and its start

    async def stands_still(self, path: str, within_s: float) -> bool:
        """Return whether the remembered folder at `path`, and those above it, are where they were and can be listed.

        A check by any caller counts that began within the last `within_s` seconds.
        """
        check, began = self._checks.get(path, (None, -math.inf))
        if check is None or self._clock() >= began + within_s:
            check = asyncio.ensure_future(self._stands(path))
            self._checks[path] = check, self._clock()
        try:
            return await asyncio.shield(check)
        except CachedFSError:  # the next caller checks again
            self._checks.pop(path, None)
            raise

    async def _stands(self, path: str) -> bool:
        asked: list[tuple[str, ObjectInfo, str, str | None]] = []
        while place_of(path).names:
            known, above = self.get(path), self.get(folder_of(path))
            if known is None or above is None:
                return False
            id = known.details.get("shortcut") or str(known.id)
            asked.append((path, above, id, known.details.get("resourceKey")))
            path = folder_of(path)
        found = await side_by_side(self._still_at(*each) for each in asked)
        return all(item is not None and api.may_list(item) for item in found)

    def get(self, path: str, *, since: float = -math.inf) -> ObjectInfo | None:
        """Return a folder that was seen within the last 30 s, and not before `since`; else None."""
        known, at = self._folders.get(path, (None, 0.0))
        return known if self._clock() < at + _REMEMBERED_S and at >= since else None

    async def _still_at(
        self, path: str, folder: ObjectInfo, id: str, key: str | None = None
    ) -> dict[str, Any] | None:
        """Return an item if it is in the folder, under the name in `path`."""
        with suppress(ObjectNotFound):
            item = await self._account.item(id, path, key=key)
            is_in = folder.id == api.SHARED_WITH_ME or folder.id in item.get("parents", ())
            if is_in and not api.is_trashed(item) and api.shown(item["name"]) == name_of(path):
                return item
        return None

    def add(self, path: str, folder: ObjectInfo) -> None:
        self._folders[path] = folder, self._clock()

    async def just_created(self, path: str, folder: ObjectInfo) -> dict[str, Any] | None:
        """Return the item that was just created at `path`, if it is still in the folder."""
        id, at = self._created.get(path, ("", -math.inf))
        return await self._still_at(path, folder, id) if self._clock() < at + _REMEMBERED_S else None

    def created(self, path: str, item: Mapping[str, Any]) -> ObjectInfo:
        """Remember an item that was just created; return its metadata."""
        now, info = self._clock(), api.item_info(item, path)
        recent = {name: seen for name, seen in self._created.items() if seen[1] >= now - _REMEMBERED_S}
        self._created = {**recent, path: (info.id or "", now)}
        if info.kind == "directory":
            self.add(path, info)
        return info

    def expire(self, path: str) -> None:
        """Expire what was created at `path`, the folder there, and those below it."""
        self._created.pop(path, None)
        for known in (self._folders, self._checks):
            for name in [name for name in known if name == path or name.startswith(f"{path}/")]:
                del known[name]

    def expire_way(self, path: str) -> None:
        """Expire a folder, those below it and those above it."""
        self.expire(path)
        while path:
            self._folders.pop(path, None)
            self._checks.pop(path, None)
            path = folder_of(path)
