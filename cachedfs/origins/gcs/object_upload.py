"""Uploads to Google Cloud Storage under a condition: in one request if they are small, else in resumable pieces.

gcsfs has no other condition than that an object is new.
"""

from __future__ import annotations

import asyncio
import logging
import mimetypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import quote

from cachedfs.common.checksums import google_checksum
from cachedfs.common.types import AnyVersion, ObjectInfo
from cachedfs.errors import AccessDenied, CachedFSError, ObjectNotFound
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.connection import GCSConnection
from cachedfs.origins.google_upload import UNKNOWN_SESSION, GoogleUpload, SessionExpired
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.kept_mtime import mtime_metadata
from cachedfs.origins.origin_errors import advice_of, error_of, object_of, well_formed
from cachedfs.origins.retry import RetryableError, foreign
from cachedfs.origins.upload import UploadContent, version_conflict

logger = logging.getLogger("cachedfs.origins")

_UNMET = 412
_REDIRECTS = frozenset({301, 302, 303, 307})
_GOOD = frozenset({200, 201, _UNMET}) | _REDIRECTS  # all others are failures
_IN_SESSION = frozenset({204, 308, 499})  # the first and the last after its end


class _UnmetCondition(Exception):
    """The object has another version than the upload was to replace."""


class ObjectUpload(GoogleUpload[ObjectInfo]):
    """One write of `content` at `path`, over the version `replaces` (None: no object)."""

    def __init__(
        self,
        connection: GCSConnection,
        path: str,
        content: UploadContent,
        replaces: ObjectInfo | AnyVersion | None,
        mtime_ns: int | None,
    ) -> None:
        self._connection, self._path, self.content = connection, path, content
        self.base, self.policy = connection.location, connection.uploads.policy
        self._bucket, self._key, generation = connection.split(path)
        if generation:
            raise ValueError(f"gs://{path}: a generation cannot be written to; leave it out of the path")
        if not self._key:
            raise ValueError(f"gs://{path}: this is a bucket; write to an object in it")
        self._replaces = replaces if isinstance(replaces, ObjectInfo) else None
        self._condition = "0" if replaces is None else None
        if self._replaces is not None:
            self._condition = self._replaces.fingerprint or ""
            if not self._condition.isdigit():
                raise ValueError(f"gs://{path}: {self._replaces.fingerprint!r} is no generation")
        mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
        self._resource: dict[str, Any] = {"name": self._key, "contentType": mime}
        if metadata := mtime_metadata(mtime_ns):
            self._resource["metadata"] = metadata
        self._checksum: dict[str, str] = {}
        self._may_have_arrived = False  # an attempt had no answer that proves what became of it

    async def run(self) -> ObjectInfo:
        """Return the metadata of the new version; raise ObjectExists or ObjectChanged if the condition is not met."""
        self._checksum = await asyncio.to_thread(google_checksum, self.content.pieces())
        try:
            # With the checksum, the service itself refuses bytes that were damaged on the way.
            return await self.transfer({**self._resource, **self._checksum}, self._resource["contentType"])
        except _UnmetCondition:
            pass
        found, is_known = await self._found()
        if found is not None and self._may_have_arrived and self._is_ours(found):
            return found
        raise version_conflict(f"gs://{self._path}", self._replaces, found, is_known=is_known)

    async def session_ended(self, address: str, error: Exception) -> None:
        """End an upload session, with one request; otherwise the service keeps its bytes for a week."""
        if isinstance(error, SessionExpired):
            self._may_have_arrived = True
            return
        try:
            await self.send(self.in_session(address, "cancelling the upload", "DELETE"))
        except (RetryableError, CachedFSError) as failed:
            logger.debug("an upload session could not be ended: %s", failed)
        except _UnmetCondition:
            pass

    # Requests
    def begin(self, kind: str, headers: Mapping[str, str], data: bytes) -> HTTPRequest:
        return self._request(
            f"{self.base}/upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
            "writing it",
            params={"uploadType": kind, "name": self._key, "ifGenerationMatch": self._condition},
            method="POST",
            headers=headers,
            data=data,
            good=_GOOD,
        )

    def in_session(self, address: str, doing: str = "writing it", method: str = "PUT") -> HTTPRequest:
        return self._request(address, doing, method=method, good=_GOOD | _IN_SESSION | UNKNOWN_SESSION)

    def _request(self, address: str, doing: str, **more: Any) -> HTTPRequest:
        # The service redirects no upload: another host must not receive the bytes.
        return self._connection.request(address, self._path, doing, follows_redirects=False, **more)

    async def answered(self, request: HTTPRequest, parse: Callable[[Answer], Any]) -> Any:
        async def attempt() -> Any:
            return parse(await self.send(request))

        return await self._connection.uploads.retried(attempt, request)

    async def send(self, request: HTTPRequest) -> Answer:
        """Send a request once; raise RetryableError, _UnmetCondition or the final error."""
        try:
            answer = await self._connection.uploads.answer(request)
        except RetryableError as failed:
            self._may_have_arrived |= not failed.is_unreachable
            raise
        if answer.status in _REDIRECTS:
            raise foreign(f"redirected, by an answer {answer.status}")
        if answer.status == _UNMET:
            self._raise_unmet(answer)
        return answer

    def _raise_unmet(self, answer: Answer) -> NoReturn:
        """Raise what a 412 means: the service also refuses so what a policy of the organization forbids."""
        text, reasons = error_of(answer.body)
        said = f"({_UNMET}: {text})"
        if advice := advice_of(text, reasons):
            raise AccessDenied(f"gs://{self._path}: {advice} {said}")
        if self._condition is None:
            raise CachedFSError(f"gs://{self._path}: the service gave an unexpected answer {said}")
        raise _UnmetCondition

    # Answers
    def finished(self, answer: Answer) -> ObjectInfo:
        """Return the metadata of the new version; raise RetryableError unless the answer proves that it has our bytes."""
        self._may_have_arrived = True
        with well_formed():
            found = api.resource_of(object_of(answer.body), "object", self._key)
            info = api.object_info(found, self._path)
        if not self._has_our_bytes(info):
            raise foreign("an upload was answered with another size or checksum")
        return info

    def _has_our_bytes(self, info: ObjectInfo) -> bool:
        return info.size == self.content.size and self._checksum.items() <= info.details.items()

    def _is_ours(self, found: ObjectInfo) -> bool:
        """Return whether an object is what an attempt made whose answer did not arrive."""
        is_newer = int(found.fingerprint or 0) > int(self._condition or 0)
        return is_newer and self._has_our_bytes(found)

    async def _found(self) -> tuple[ObjectInfo | None, bool]:
        """Return the object that is there now, and whether that is known."""
        with suppress(CachedFSError):
            try:
                return await self._connection.metadata(self._path, self._bucket, self._key, None), True
            except ObjectNotFound:
                return None, True
        return None, False
