"""Upload a file to a Google service: in one request if it is small, else in resumable pieces."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins.base import int_of
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy, foreign
from cachedfs.origins.upload import UploadContent

T = TypeVar("T")

UNKNOWN_SESSION = frozenset({404, 410})  # statuses of an upload session that the service no longer knows
PIECE = 8 << 20  # a multiple of 256 KiB, as Google wants; rclone's choice too
JSON = "application/json; charset=UTF-8"
_SESSIONS = 2  # how often an upload begins: a session that has expired means starting over


class SessionExpired(Exception):
    """The service no longer knows an upload session."""


class GoogleUpload(ABC, Generic[T]):
    """An upload to a Google service: one request if it is small, else pieces of 8 MiB in an upload session."""

    content: UploadContent
    policy: RetryPolicy
    base: str  # the service's address
    has_one_host = False  # whether sessions have the address of the service
    most_at_once: float = math.inf  # the most bytes that the service takes in one request

    @abstractmethod
    def begin(self, kind: str, headers: Mapping[str, str], data: bytes) -> HTTPRequest:
        """Return the first request of an upload of this type: "multipart" or "resumable"."""

    @abstractmethod
    def in_session(self, address: str, doing: str = "writing it", method: str = "PUT") -> HTTPRequest:
        """Return a request to an upload session, where `UNKNOWN_SESSION` is no failure."""

    @abstractmethod
    async def send(self, request: HTTPRequest) -> Answer:
        """Send a request once."""

    @abstractmethod
    async def answered(self, request: HTTPRequest, parse: Callable[[Answer], Any]) -> Any:
        """Return what `parse` makes of the answer, after retries."""

    @abstractmethod
    def finished(self, answer: Answer) -> T:
        """Return the new object; raise RetryableError unless the answer proves it."""

    async def session_ended(self, address: str, error: Exception) -> None:  # most need nothing
        """Clean up after a session that did not finish, because of `error`."""

    async def transfer(self, resource: Mapping[str, Any], mime: str) -> T:
        """Send the bytes with the metadata of their object; return the new object."""
        size, metadata = self.content.size, json.dumps(resource, ensure_ascii=False).encode()
        if _is_one_piece(size) and size <= self.most_at_once:
            boundary = secrets.token_hex(16).encode()
            part = b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n"
            body = part % (boundary, JSON.encode(), metadata)
            body += part % (boundary, mime.encode(), await self._read(0, size)) + b"--%s--\r\n" % boundary
            headers = {"Content-Type": f'multipart/related; boundary="{boundary.decode()}"'}
            return cast("T", await self.answered(self.begin("multipart", headers, body), self.finished))
        headers = {
            "Content-Type": JSON,
            "X-Upload-Content-Type": mime,
            "X-Upload-Content-Length": str(size),
        }
        request = self.begin("resumable", headers, metadata)
        for _ in range(_SESSIONS):
            address = await self.answered(request, self._address_of)
            try:
                return await self._send_pieces(self.in_session(address))
            except Exception as error:  # of any kind, and raised again
                await self.session_ended(address, error)
                if not isinstance(error, SessionExpired):
                    raise
        raise OriginUnavailable(
            f"{request.subject}: writing it failed: the service forgot the upload {_SESSIONS} times. Try again later"
        )

    async def _read(self, start: int, stop: int) -> bytes:
        data = await asyncio.to_thread(self.content.piece, start, stop)
        if len(data) != stop - start:
            subject = self.in_session("").subject
            raise CachedFSError(f"{subject}: the local file became shorter while it was sent")
        return data

    def _address_of(self, answer: Answer) -> str:
        address = answer.headers.get("Location", "")
        (scheme, host, *_), expected = urlsplit(address), urlsplit(self.base)
        # The token is sent there.
        if scheme != expected.scheme or not host or (self.has_one_host and host != expected.netloc):
            raise foreign("an upload was begun, and the answer has no address for it")
        return address

    async def _send_pieces(self, session: HTTPRequest) -> T:
        """Send all bytes in an upload session.

        Raises SessionExpired. After a failure, the service says how much it has. As long as that becomes more, all
        tries are there again: a slow line may not send a whole piece in one attempt.
        """
        size = self.content.size
        start, most, is_known, tries = 0, 0, True, RetryAttempts(self.policy)
        while True:
            stop = size if _is_one_piece(size - start) else start + PIECE
            request = replace(session, doing=f"sending bytes {start} to {stop}")
            try:
                if not is_known:
                    kept, result = await self._put(request, b"", f"bytes */{size}")
                elif start >= size:
                    raise RetryableError("the service has all bytes and makes no file of them")
                else:
                    data = await self._read(start, stop)
                    kept, result = await self._put(request, data, f"bytes {start}-{stop - 1}/{size}")
                    if result is None and kept <= start:
                        raise RetryableError(f"the service kept nothing after byte {kept}")
            except RetryableError as failed:
                await tries.pause(failed, request.subject, request.purpose)
                is_known = False
                continue
            if result is not None:
                return result
            if kept > most:  # not only what it lacked again
                most, tries = kept, RetryAttempts(self.policy)
            start, is_known = kept, True
            self.content.sent(start)

    async def _put(self, request: HTTPRequest, data: bytes, span: str) -> tuple[int, T | None]:
        """Send bytes, or ask (`bytes */N`) how many arrived; return what the service has, or the end's result."""
        answer = await self.send(replace(request, headers={"Content-Range": span}, data=data))
        if answer.status in UNKNOWN_SESSION:
            raise SessionExpired
        if answer.status != 308:
            return 0, self.finished(answer)
        last = int_of(answer.headers.get("range", "").rpartition("-")[2])
        return (0 if last is None else last + 1), None


def _is_one_piece(size: int) -> bool:
    return size <= PIECE + PIECE // 8  # a file of a shared cache has 8 MiB and an index
