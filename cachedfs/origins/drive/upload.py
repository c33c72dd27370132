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

from cachedfs.errors import OriginUnavailable
from cachedfs.origins.base import number
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import GOOD, Answer
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.drive.client import DriveConnection
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
    """Drive holds other bytes than were sent, in `item`; never raised outside `cachedfs.origins.drive`.

    `is_ours`: this write caused it. Otherwise another writer may have changed the item since.
    """

    def __init__(self, item: Mapping[str, Any], expected: str, *, is_ours: bool) -> None:
        super().__init__(f"the MD5 is {item.get('md5Checksum')} instead of {expected}")
        self.item, self.is_ours = item, is_ours


async def upload(
    to: DriveConnection, path: str, content: UploadContent, resource: Mapping[str, Any], *, into: str | None
) -> dict[str, Any]:
    """Upload `content`; return its item: a new one described by `resource`, or the one whose id is `into`.

    Raises UploadMismatch if Drive's checksum of the received bytes differs. Uploading twice creates one item, because
    `resource` contains the id of a new one.
    """
    expected = await asyncio.to_thread(content.md5)
    send, is_ours = _at_once if content.size <= _ONE_REQUEST else _in_pieces, True
    try:
        item = await send(to, path, content, resource, into)
    except FileExistsError:
        if into is not None:
            raise
        # The id is ours alone: an earlier try arrived, and only its answer was lost.
        item, is_ours = await to.item(resource["id"], path), False
    if item.get("md5Checksum") != expected:
        raise UploadMismatch(item, expected, is_ours=is_ours)
    content.sent(content.size)
    return item


async def _at_once(
    to: DriveConnection, path: str, content: UploadContent, resource: Mapping[str, Any], into: str | None
) -> dict[str, Any]:
    boundary = f"cachedfs-{secrets.token_hex(16)}"
    data = await asyncio.to_thread(content.piece, 0, content.size)
    body = api.multipart(resource, data, resource["mimeType"], boundary)
    headers = {"Content-Type": f'multipart/related; boundary="{boundary}"'}
    ask = _ask(to, path, into, "multipart", headers, body)

    async def attempt() -> dict[str, Any]:
        answer = await to.send(ask)
        return _item_of(answer, into or resource.get("id"))

    return await (to.created if into is None else to.retried)(attempt, ask)


async def _in_pieces(
    to: DriveConnection, path: str, content: UploadContent, resource: Mapping[str, Any], into: str | None
) -> dict[str, Any]:
    for _ in range(_SESSIONS):
        with suppress(_SessionForgotten):
            return await _in_one_session(to, path, content, resource, into)
    raise OriginUnavailable(
        f"{api.url_of(path)}: writing it failed: Drive forgot the upload {_SESSIONS} times. Try again later"
    )


async def _in_one_session(
    to: DriveConnection, path: str, content: UploadContent, resource: Mapping[str, Any], into: str | None
) -> dict[str, Any]:
    headers = {
        "Content-Type": "application/json; charset=UTF-8",
        "X-Upload-Content-Type": resource["mimeType"],
        "X-Upload-Content-Length": str(content.size),
    }
    body = json.dumps(resource, ensure_ascii=False).encode()
    ask = _ask(to, path, into, "resumable", headers, body)

    async def begin() -> str:
        address = (await to.send(ask)).headers.get("location", "")
        if urlsplit(address)[:2] != urlsplit(to.base)[:2]:  # the token is sent there
            raise RetryableError(RetryReason("the service opened no upload"))
        return address

    address = await (to.created if into is None else to.retried)(begin, ask)
    start, item, id = 0, None, into or resource.get("id")
    while item is None:
        # A piece that arrives is progress: the next one has all tries again.
        start, item = await _piece(to, path, address, content, start, id)
        content.sent(start)
    return item


async def _piece(
    to: DriveConnection, path: str, address: str, content: UploadContent, start: int, id: str | None
) -> tuple[int, dict[str, Any] | None]:
    """Send one piece; return where the next one starts, or the finished item.

    A slow line may not send a whole piece in one attempt: as long as more arrives each time, there are further
    attempts.
    """
    tries, has_failed, most = to.lookups.new_tries(), False, start
    while True:
        stop = min(start + PIECE, content.size)
        # Of a session, whoever says that it is unknown is believed: to start over loses nothing.
        doing = f"sending bytes {start} to {stop}"
        ask = to.ask(address, path, doing, {}, method="PUT", good=GOOD | _FORGOTTEN)
        try:
            if has_failed:
                kept, item = await _progress(to, ask, b"", f"bytes */{content.size}", start, id)
                if item is not None:
                    return kept, item
                if kept > most:  # not only again what it forgot meanwhile
                    most, tries = kept, to.lookups.new_tries()
                start = kept
                stop = min(start + PIECE, content.size)
            if start >= content.size:
                raise RetryableError(RetryReason("the service has all bytes and makes no file of them"))
            data = await asyncio.to_thread(content.piece, start, stop)
            span = f"bytes {start}-{stop - 1}/{content.size}"
            reached, item = await _progress(to, ask, data, span, start, id)
            if item is None and reached <= start:
                raise RetryableError(RetryReason(f"the service kept nothing after byte {reached}"))
            return reached, item
        except RetryableError as failed:
            await to.lookups.pause(failed, ask, tries)
            has_failed = True


async def _progress(
    to: DriveConnection, ask: HTTPRequest, data: bytes, span: str, start: int, id: str | None
) -> tuple[int, dict[str, Any] | None]:
    """Send bytes, or ask (`bytes */N`) how many have arrived; return what the service has, or the finished item."""
    answer = await to.send(replace(ask, headers={"Content-Range": span}, data=data))
    if answer.status in _FORGOTTEN:
        raise _SessionForgotten
    if answer.status != 308:
        return start, _item_of(answer, id)
    last = number(answer.headers.get("range", "").rpartition("-")[2])
    return (0 if last is None else last + 1), None


def _item_of(answer: Answer, id: str | None) -> dict[str, Any]:
    return api.confirm(api.resource_of(answer.status, answer.body, "drive#file"), {"id": id} if id else {})


def _ask(
    to: DriveConnection, path: str, into: str | None, kind: str, headers: Mapping[str, str], data: bytes
) -> HTTPRequest:
    params = {"uploadType": kind, "fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
    method, address = "POST" if into is None else "PATCH", api.upload_url(to.base, into)
    return to.ask(address, path, "writing it", params, method=method, headers=headers, data=data)
