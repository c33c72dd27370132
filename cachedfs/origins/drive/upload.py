"""Uploads to Drive: in one request if they are small, else in resumable pieces."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins.base import number
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import GOOD, Answer
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.drive.client import DriveAccount
    from cachedfs.origins.http import HTTPRequest

__all__ = ["PIECE", "UploadContent", "UploadMismatch", "upload"]

PIECE = 8 << 20  # a multiple of 256 KiB, as the service wants; rclone's choice too
_ONE_REQUEST = 5 << 20  # the most that the service takes with the metadata
_FORGOTTEN = frozenset({404, 410})
_SESSIONS = 2  # how often an upload begins: a session that the service forgot means starting over


class UploadContent:
    """The bytes of an open file, from its start to its end; the caller closes the file.

    `sent` receives the number of bytes that the service has; it decreases if the service forgot some.
    """

    def __init__(self, file: BinaryIO, sent: Callable[[int], object] = lambda n_bytes: None) -> None:
        self._file, self.sent = file, sent
        self.size = file.seek(0, 2)

    def piece(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start:stop]`; blocks on the disk."""
        self._file.seek(start)
        return self._file.read(stop - start)

    def md5(self) -> str:
        """Return the MD5 of all bytes as Drive writes it; blocks on the disk."""
        total = hashlib.md5(usedforsecurity=False)
        for start in range(0, self.size, PIECE):
            total.update(self.piece(start, start + PIECE))
        return total.hexdigest()


class _SessionForgotten(Exception):
    """The service no longer knows an upload session."""


class UploadMismatch(Exception):
    """Drive holds other bytes than were sent, in `item`; never raised outside `cachedfs.origins.drive`."""

    def __init__(self, item: Mapping[str, Any], expected: str) -> None:
        super().__init__(f"the MD5 is {item.get('md5Checksum')} instead of {expected}")
        self.item = item


async def upload(
    account: DriveAccount,
    path: str,
    content: UploadContent,
    resource: Mapping[str, Any],
    *,
    into: str | None,
) -> dict[str, Any]:
    """Upload `content`; return its item: a new one described by `resource`, or the one whose id is `into`.

    Raises UploadMismatch if Drive's checksum of the received bytes differs. Uploading twice creates one item, because
    `resource` contains the id of a new one.
    """
    expected = await asyncio.to_thread(content.md5)
    send = _at_once if content.size <= _ONE_REQUEST else _in_pieces
    try:
        item = await send(account, path, content, resource, into)
    except FileExistsError as error:
        if into is not None:
            raise
        # The id is ours alone: an earlier try arrived, and only its answer was lost.
        item = await account.item(resource["id"], path)
        if item.get("md5Checksum") != expected:
            raise CachedFSError(
                f"{api.url_of(path)}: the new file has other bytes than were sent (the MD5 is {item.get('md5Checksum')} "
                f"instead of {expected}). They may be from another writer, and are left; look at it, or write it again"
            ) from error
    if item.get("md5Checksum") != expected:
        raise UploadMismatch(item, expected)
    content.sent(content.size)
    return item


async def _at_once(
    account: DriveAccount,
    path: str,
    content: UploadContent,
    resource: Mapping[str, Any],
    into: str | None,
) -> dict[str, Any]:
    boundary = f"cachedfs-{secrets.token_hex(16)}"
    data = await asyncio.to_thread(content.piece, 0, content.size)
    body = api.multipart(resource, data, resource["mimeType"], boundary)
    headers = {"Content-Type": f'multipart/related; boundary="{boundary}"'}
    request = _request(account, path, into, "multipart", headers, body)

    async def attempt() -> dict[str, Any]:
        return _item_of(await account.send(request), into or resource.get("id"))

    return await account.tried(attempt, request)


async def _in_pieces(
    account: DriveAccount,
    path: str,
    content: UploadContent,
    resource: Mapping[str, Any],
    into: str | None,
) -> dict[str, Any]:
    headers = {
        "Content-Type": "application/json; charset=UTF-8",
        "X-Upload-Content-Type": resource["mimeType"],
        "X-Upload-Content-Length": str(content.size),
    }
    body = json.dumps(resource, ensure_ascii=False).encode()
    request = _request(account, path, into, "resumable", headers, body)

    async def begin() -> str:
        address = (await account.send(request)).headers.get("location", "")
        if urlsplit(address)[:2] != urlsplit(account.base)[:2]:  # the token is sent there
            raise RetryableError(RetryReason("the service opened no upload"))
        return address

    for _ in range(_SESSIONS):
        address = await account.tried(begin, request)
        with suppress(_SessionForgotten):
            return await _send_pieces(account, path, content, address, into or resource.get("id"))
    raise OriginUnavailable(
        f"{api.url_of(path)}: writing it failed: Drive forgot the upload {_SESSIONS} times. Try again later"
    )


async def _send_pieces(
    account: DriveAccount, path: str, content: UploadContent, address: str, id: str | None
) -> dict[str, Any]:
    """Send all pieces; return the finished item.

    After a failure, the service says how much it has. As long as that becomes more, all tries are there again: a slow
    line may not send a whole piece in one attempt.
    """
    to = (await account.connection()).metadata
    start, most, is_known, tries = 0, 0, True, account.new_tries()
    while True:
        stop = min(start + PIECE, content.size)
        # Of a session, whoever says that it is unknown is believed: to start over loses nothing.
        good, doing = GOOD | _FORGOTTEN, f"sending bytes {start} to {stop}"
        request = account.request(address, path, doing, method="PUT", good=good)
        try:
            if not is_known:
                kept, item = await _put(account, request, b"", f"bytes */{content.size}", id)
            elif start >= content.size:
                raise RetryableError(RetryReason("the service has all bytes and makes no file of them"))
            else:
                data = await asyncio.to_thread(content.piece, start, stop)
                kept, item = await _put(
                    account, request, data, f"bytes {start}-{stop - 1}/{content.size}", id
                )
                if item is None and kept <= start:
                    raise RetryableError(RetryReason(f"the service kept nothing after byte {kept}"))
        except RetryableError as failed:
            await to.pause(failed, request, tries)
            is_known = False
            continue
        if item is not None:
            return item
        if kept > most:  # not only again what it forgot meanwhile
            most, tries = kept, account.new_tries()
        start, is_known = kept, True
        content.sent(start)


async def _put(
    account: DriveAccount, request: HTTPRequest, data: bytes, span: str, id: str | None
) -> tuple[int, dict[str, Any] | None]:
    """Send bytes, or ask (`bytes */N`) how many have arrived; return what the service has, or the finished item."""
    answer = await account.send(replace(request, headers={"Content-Range": span}, data=data))
    if answer.status in _FORGOTTEN:
        raise _SessionForgotten
    if answer.status != 308:
        return 0, _item_of(answer, id)
    last = number(answer.headers.get("range", "").rpartition("-")[2])
    return (0 if last is None else last + 1), None


def _item_of(answer: Answer, id: str | None) -> dict[str, Any]:
    return api.resource_of(answer.status, answer.body, "drive#file", {"id": id} if id else {})


def _request(
    account: DriveAccount, path: str, into: str | None, kind: str, headers: Mapping[str, str], data: bytes
) -> HTTPRequest:
    return account.request(
        account.address("files", *([into] if into else []), upload=True),
        path,
        "writing it",
        method="POST" if into is None else "PATCH",
        params={"uploadType": kind, "fields": api.ITEM_FIELDS, **api.ANY_DRIVE},
        headers=headers,
        data=data,
    )
