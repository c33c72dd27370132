"""Uploads to Drive: in one request if they are small, else in resumable pieces."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from cachedfs.errors import CachedFSError
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.connection import GOOD
from cachedfs.origins.google_upload import UNKNOWN_SESSION, GoogleUpload
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.upload import UploadContent

logger = logging.getLogger("cachedfs.origins")


@dataclasses.dataclass(eq=False)
class ItemUpload(GoogleUpload[dict[str, Any]]):
    """One write of `content` at `path`: a new item that `resource` describes, or the item whose id is `into`."""

    has_one_host = True
    most_at_once = 5 << 20

    account: DriveAccount
    path: str
    content: UploadContent
    resource: Mapping[str, Any]
    into: str | None = None

    def __post_init__(self) -> None:
        self.base, self.policy = self.account.base, self.account.policy

    async def run(self) -> dict[str, Any]:
        """Return the item after the upload; undo one that stored wrong bytes, as far as Drive allows.

        Uploading twice creates one item, because `resource` contains the id of a new one.
        """
        expected, url = await asyncio.to_thread(self.content.md5), api.url_of(self.path)
        try:
            item = await self.transfer(self.resource, self.resource["mimeType"])
        except FileExistsError as error:
            if self.into is not None:
                raise
            # The id is ours alone: an earlier try arrived, and only its answer did not.
            item = await self.account.item(self.resource["id"], self.path)
            if (found := item.get("md5Checksum")) != expected:
                raise CachedFSError(
                    f"{url}: the new file has the MD5 {found} instead of {expected}. Its bytes may be from another writer, "
                    "and are left: look at it, or write it again"
                ) from error
        if (found := item.get("md5Checksum")) != expected:
            left = await self._take_back(item)
            raise CachedFSError(
                f"{url}: Drive holds other bytes than were sent: the MD5 is {found} instead of {expected}. {left}; write it "
                "again"
            )
        self.content.sent(self.content.size)
        return item

    async def _take_back(self, item: Mapping[str, Any]) -> str:
        """Undo the upload, as far as Drive allows; return what is left."""
        try:
            if self.into is None:
                await self.account.remove(item["id"], self.path)
                return "The new file was removed"
            revision = item["headRevisionId"]
            await self.account.delete(self.into, self.path, "taking the write back", revision=revision)
            return "The file is what it was before"
        except (CachedFSError, KeyError) as trouble:  # the write failed in any case
            logger.warning("%s: wrong bytes could not be taken back: %s", api.url_of(self.path), trouble)
            return "They are its newest version now; Drive keeps the ones before under 'Manage versions'"

    # Requests
    async def send(self, request: HTTPRequest) -> Answer:
        return await self.account.send(request)

    async def answered(self, request: HTTPRequest, parse: Callable[[Answer], Any]) -> Any:
        return await self.account.answered(request, parse)

    def begin(self, kind: str, headers: Mapping[str, str], data: bytes) -> HTTPRequest:
        url, method = f"{self.base}/upload/drive/v3/files", "POST"
        if self.into is not None:
            url, method = f"{url}/{quote(self.into, safe='')}", "PATCH"
        params = {"uploadType": kind, "fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
        more: dict[str, Any] = {"params": params, "headers": headers, "data": data}
        return self.account.request(url, self.path, "writing it", method=method, **more)

    def in_session(self, address: str, doing: str = "writing it", method: str = "PUT") -> HTTPRequest:
        # Of a session, whoever says that it is unknown is believed: to start over loses nothing.
        return self.account.request(address, self.path, doing, method=method, good=GOOD | UNKNOWN_SESSION)

    def finished(self, answer: Answer) -> dict[str, Any]:
        asked = {"id": self.into or self.resource["id"]}
        return api.resource_of(answer.status, answer.body, "drive#file", asked)
