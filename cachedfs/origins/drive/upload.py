"""Uploads to Drive: in one request if they are small, else in resumable pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.connection import GOOD
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.upload import UNKNOWN_SESSION, GoogleUpload, UploadContent


@dataclasses.dataclass(eq=False)
class Upload(GoogleUpload[dict[str, Any]]):
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

    async def send(self, request: HTTPRequest) -> Answer:
        return await self.account.send(request)

    async def answered(self, request: HTTPRequest, parse: Callable[[Answer], Any]) -> Any:
        return await self.account.answered(request, parse)

    def begin(self, kind: str, headers: Mapping[str, str], data: bytes) -> HTTPRequest:
        url, method = self.account.address("files", self.into, upload=True), "PATCH" if self.into else "POST"
        params = {"uploadType": kind, "fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
        more: dict[str, Any] = {"params": params, "headers": headers, "data": data}
        return self.account.request(url, self.path, "writing it", method=method, **more)

    def in_session(self, address: str, doing: str = "writing it", method: str = "PUT") -> HTTPRequest:
        # Of a session, whoever says that it is unknown is believed: to start over loses nothing.
        return self.account.request(address, self.path, doing, method=method, good=GOOD | UNKNOWN_SESSION)

    def finished(self, answer: Answer) -> dict[str, Any]:
        asked = {"id": self.into or self.resource["id"]}
        return api.resource_of(answer.status, answer.body, "drive#file", asked)
