"""`DriveAccount`: the requests to Google Drive for items, listings, changes and media."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import AccessDenied, ObjectNotFound, OriginUnavailable, RequestRejected
from cachedfs.origins.base import range_header
from cachedfs.origins.drive import api, failures
from cachedfs.origins.drive.connection import DriveConnection
from cachedfs.origins.drive.public import PublicDrive
from cachedfs.origins.http_request import HTTPRequest

BeforePage = Callable[[], Awaitable[object]]
_IDS = 100  # item ids asked for at once
_MOST_PAGES = 50  # of changes: to list again what is wanted costs less then
_MEDIA = frozenset({200, 206, 416})


class DriveAccount(DriveConnection):
    """Requests to Google Drive as one account."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.public = PublicDrive(self)
        self.without_revisions: set[str] = set()  # ids of files whose revisions Google does not give
        self._ids: list[str] = []
        self._asking_ids = asyncio.Lock()
        self._out_of_sight: set[str] = set()  # shared drives that this account is no member of

    # Items
    async def item(
        self, id: str, path: str, *, key: str | None = None, is_pinned: bool = False
    ) -> dict[str, Any]:
        """Return an item by its id; `key` is its resource key.

        Without an account and an API key, Google tells only about files and folders that are public, at other addresses.
        """
        given = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
        keys = api.key_headers(id, key)
        request = self.request(
            ("files", id), path, "looking it up", params=given, headers=keys, is_pinned=is_pinned
        )
        find = partial(self.call, request, asked={} if id == api.ROOT else {"id": id})
        if not path.startswith("id:"):
            return await find()
        await self.clients()
        if not self.is_public:
            try:
                return await find()
            except failures.DriveAnonymous:
                self.is_public = True
        was_missing = (await self.signed_in()).is_missing
        try:
            return await self.public.item(id, path, key, is_pinned=is_pinned)
        except AccessDenied:
            # Not public; but an account that signed in since may see it.
            if not was_missing or await self.is_missing():
                raise
            return await find()

    async def items(
        self,
        query: str,
        folder: ObjectInfo,
        path: str,
        doing: str,
        *,
        page: int = 1000,
        before_page: BeforePage | None = None,
    ) -> list[dict[str, Any]]:
        """Return all items that a query finds in one folder, with one request per `page` items (1000 at most).

        `before_page` is awaited before each page but the first.

        A listing names the shared drive only if the path begins with it, and only members can list it so. A folder that
        was shared with others is listed like one outside any drive.

        Raises AccessDenied for a folder that the account may see and not open: Drive would answer that it is empty.
        """
        if not folder.details.get("canListChildren", True):
            raise AccessDenied(
                f"{api.url_of(path)}: you may see the folder {api.url_of(folder.path)}, not open it ({doing}): its access is "
                f"limited. Ask its owner to share this folder itself with the account that signs in ({(await self.signed_in()).name})"
            )
        params = {"q": query, "pageSize": str(page), "fields": api.LIST_FIELDS, **api.EVERYWHERE}
        request = self.request(("files",), path, doing, params=params, headers=key_of(folder))
        drive_id = folder.details.get("driveId") if folder.path.startswith(api.SHARED) else None
        if drive_id is not None and drive_id not in self._out_of_sight:
            of_drive = {**params, "corpora": "drive", "driveId": drive_id}
            with suppress(failures.DriveOutOfSight):  # a shortcut led to a folder of another drive
                of_drive_request = dataclasses.replace(request, params=of_drive)
                return await self._all("files", of_drive_request, before_page=before_page)
            self._out_of_sight.add(drive_id)
        return await self._all("files", request, before_page=before_page)

    async def drives(self, path: str) -> list[dict[str, Any]]:
        """Return the ids and names of the shared drives, to find `path`."""
        params = {
            "pageSize": "100",
            "fields": "kind,nextPageToken,drives(id,name,capabilities(canListChildren))",
        }
        request = self.request(("drives",), path, "listing the shared drives", params=params)
        drives = await self._all("drives", request, kind="drive#driveList")
        # One that is renamed meanwhile may be on two pages.
        return list({drive["id"]: drive for drive in drives}.values())

    async def _all(
        self,
        key: str,
        request: HTTPRequest,
        *,
        kind: str = "drive#fileList",
        before_page: BeforePage | None = None,
        is_again: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the items of all pages; if the listing expires in the middle, list again once."""
        found, token, seen = list[dict[str, Any]](), "", set[str]()
        while token not in seen:
            seen.add(token)
            more = {"pageToken": token} if token else {}
            try:
                page = await self.call(
                    dataclasses.replace(request, params={**request.params, **more}), kind=kind
                )
            except RequestRejected:
                if is_again or not token:
                    raise
                return await self._all(key, request, kind=kind, before_page=before_page, is_again=True)
            found += page.get(key, ())
            # A page may be short, or empty, before the end: only the token tells.
            if not (token := page.get("nextPageToken", "")):
                return found
            if before_page is not None:
                await before_page()
        raise OriginUnavailable(
            f"{request.subject}: {request.doing} does not end: Drive names a page as the next one that came before. Try "
            "again later"
        )

    # Changes by others
    async def start_token(self, drive_id: str, path: str) -> str:
        """Return a token for the changes from now on, in a shared drive or ("") in everything the account owns."""
        params = {"fields": "kind,startPageToken", **api.ANY_DRIVE} | (
            {"driveId": drive_id} if drive_id else {}
        )
        doing = "asking where its changes begin"
        request = self.request(("changes", "startPageToken"), path, doing, params=params)
        # The feed only saves other requests: these do not wait for it.
        return str((await self.call(request, kind="drive#startPageToken", most_tries=2))["startPageToken"])

    async def changes(self, drive_id: str, token: str, path: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the next token and the changes since `token`; raise ValueError if the token is no longer usable.

        Changes of everything the account owns include shared drives: else Drive does not report what moves there.
        """
        params = {"pageToken": token, "pageSize": "1000", "fields": api.CHANGE_FIELDS, **api.EVERYWHERE}
        params |= {"driveId": drive_id} if drive_id else {}
        entries: list[dict[str, Any]] = []
        for _ in range(_MOST_PAGES):
            request = self.request(("changes",), path, "asking what changed", params=params)
            page = await self.call(request, kind="drive#changeList", most_tries=2)
            entries += page.get("changes", ())
            if (after := page.get("newStartPageToken")) is not None:
                return str(after), entries
            params = {**params, "pageToken": page["nextPageToken"]}
        raise RequestRejected(f"{api.url_of(path)}: too many changes to list")

    async def about(self, fields: str, *, most_tries: int | None = None) -> dict[str, Any]:
        """Return what Drive reports about the account."""
        params = {"fields": f"kind,{fields}"}
        request = self.request(("about",), "", "looking up the account", params=params)
        return await self.call(request, kind="drive#about", most_tries=most_tries)

    # Own changes
    async def new_id(self, path: str) -> str:
        """Return an unused id for a new item at `path`, so that a repeated create makes one item."""
        async with self._asking_ids:
            if not self._ids:
                params = {"count": str(_IDS), "space": "drive", "fields": "kind,ids"}
                request = self.request(("files", "generateIds"), path, "asking for an id", params=params)
                self._ids += (await self.call(request, kind="drive#generatedIds"))["ids"]
            return self._ids.pop()

    async def change(
        self,
        method: str,
        id: str | None,
        path: str,
        doing: str,
        resource: Mapping[str, Any],
        params: Mapping[str, str] = {},
        *,
        headers: Mapping[str, str] = {},
    ) -> dict[str, Any]:
        """Return the item after a change. A POST creates an item: a copy of the item `id`, if there is one."""
        is_copy = method == "POST" and id is not None
        asked = {name: resource[name] for name in ("id", "name", "mimeType", "trashed") if name in resource}
        if id and not is_copy:
            asked["id"] = id
        given = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE, **params}
        to = ("files", id, "copy" if is_copy else None)
        request = self.request(to, path, doing, method=method, body=resource, params=given, headers=headers)
        try:
            return await self.call(request, asked=asked, has_id="id" in resource)
        except FileExistsError:
            if "id" not in resource:
                raise
            # An earlier try arrived, and only its answer did not.
            return await self.item(resource["id"], path)

    async def remove(self, id: str, path: str) -> None:
        """Move an item to the trash, or delete it if `trash_only` is off."""
        with suppress(ObjectNotFound):  # somebody else was faster
            if self.options.trash_only:
                await self.change("PATCH", id, path, "moving it to the trash", {"trashed": True})
            else:
                await self.delete(id, path, "deleting it")

    async def delete(self, id: str, path: str, doing: str, *, revision: str = "") -> None:
        """Delete an item, or one revision of it, for good."""
        to = ("files", id, revision and "revisions", revision)
        params = {} if revision else api.ANY_DRIVE
        await self.call(self.request(to, path, doing, method="DELETE", params=params), kind=None)

    # Media
    async def media(self, info: ObjectInfo, path: str, want: Range, revision: str = "") -> HTTPRequest:
        """Return the request for bytes of one item.

        The range always has an end, because Drive charges an open one as the whole file.
        """
        await self.clients()
        if self.is_public:
            key = info.details.get("resourceKey")
            return self.public.request(str(info.id), key, path, want, is_pinned=True)
        return await self._bytes(
            info,
            path,
            ("files", info.id, revision and "revisions", revision),
            want=want,
            params={"alt": "media"} | ({} if revision else api.ANY_DRIVE),
            headers={"Accept-Encoding": "identity", "Range": range_header(want) or ""},
            as_stored=True,
        )

    async def export(self, info: ObjectInfo, path: str, mime: str) -> HTTPRequest:
        """Return the request for a Google document as a file of the type `mime`."""
        to, params = ("files", info.id, "export"), {"mimeType": mime}  # no supportsAllDrives
        return await self._bytes(info, path, to, doing=f"exporting it as {mime}", params=params)

    async def _bytes(
        self,
        info: ObjectInfo,
        path: str,
        to: tuple[str | None, ...],
        *,
        doing: str = "",
        headers: Mapping[str, str] = {},
        **more: Any,
    ) -> HTTPRequest:
        has_key = (await self.signed_in()).kind == "api_key"
        return self.request(
            to,
            path,
            doing,
            headers={**headers, **key_of(info)},
            kind="download",
            good=_MEDIA,
            is_pinned=True,
            follows_redirects=not has_key,  # which aiohttp would send along to another host
            **more,
        )


def key_of(info: ObjectInfo) -> dict[str, str]:
    """Return the headers that open a link-shared item."""
    return api.key_headers(info.id, info.details.get("resourceKey"))
