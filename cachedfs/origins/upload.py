"""Upload a local file as one whole object, if the version that it replaces is still there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import BinaryIO, Protocol, TypeVar, runtime_checkable

from cachedfs.common.types import ANY_VERSION, AnyVersion, ObjectInfo
from cachedfs.errors import CachedFSError, ObjectChanged, ObjectExists
from cachedfs.origins.base import number
from cachedfs.origins.evidence import is_same_evidence
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy

__all__ = [
    "UNKNOWN_SESSION",
    "HasStorageQuota",
    "SessionExpired",
    "UploadContent",
    "Uploader",
    "check_version",
    "send_pieces",
    "version_conflict",
]

T = TypeVar("T")

UNKNOWN_SESSION = frozenset({404, 410})  # statuses of an upload session that the service no longer knows
_PIECE = 1 << 20  # bytes read at a time for a checksum


@runtime_checkable
class Uploader(Protocol):
    """An origin with an upload of its own. At the others, the inner filesystem writes."""

    async def upload(
        self, path: str, file: BinaryIO, *, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        """Make the bytes of `file` the object at `path`, and return its metadata.

        Raises ObjectExists or ObjectChanged if the origin has another version than `replaces` (None: no object).
        `mtime_ns` is a modification time that the object keeps.
        """
        ...


@runtime_checkable
class HasStorageQuota(Protocol):
    """An origin whose accounts have a quota of bytes."""

    async def storage_quota(self, path: str) -> tuple[int, int] | None:
        """Return the limit and the free bytes of the account's storage at `path`; None without a limit."""
        ...


# The version that is replaced
def check_version(url: str, expected: ObjectInfo | AnyVersion | None, found: ObjectInfo | None) -> None:
    """Raise ObjectExists or ObjectChanged unless `found` is the version to be replaced (None: no object)."""
    if expected is ANY_VERSION:
        return
    if expected is None:
        if found is not None and found.kind == "file":  # an object store may have a folder of the same name
            raise version_conflict(url, expected, found)
        return
    if found is None or not is_same_evidence(found.fingerprint, expected.fingerprint):
        raise version_conflict(url, expected, found)
    if (found.kind, found.size, found.id) != (expected.kind, expected.size, expected.id):
        raise version_conflict(url, expected, found)


def version_conflict(
    url: str, expected: ObjectInfo | None, found: ObjectInfo | None, *, is_known: bool = True
) -> CachedFSError:
    """Return the error for a write to an object that has another version than `expected` (None: to a new one).

    `is_known`: whether `found` tells what is there now.
    """
    if expected is None:
        there = f" (version {found.fingerprint})" if found is not None and found.fingerprint else ""
        return ObjectExists(f"{url}: exists already{there}, and was to be new; nothing was written")
    if found is not None:
        how = f"was replaced: its version is {found.fingerprint} and not {expected.fingerprint}"
    elif is_known:
        how = f"was removed: version {expected.fingerprint} was to be replaced"
    else:
        how = f"was replaced or removed: its version is no longer {expected.fingerprint}"
    return ObjectChanged(
        f"{url}: the object {how}; nothing was written: open it again, or write to another name"
    )


# The bytes
class UploadContent:
    """The bytes of an open file, from its start to its end; the caller closes the file.

    `sent` receives the number of bytes that the service has; it decreases if the service lacks some again.
    """

    def __init__(self, file: BinaryIO, sent: Callable[[int], object] = lambda n_bytes: None) -> None:
        self._file, self.sent = file, sent
        self.size = file.seek(0, 2)

    def piece(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start:stop]`; blocks on the disk."""
        self._file.seek(start)
        return self._file.read(stop - start)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes; blocks on the disk."""
        for start in range(0, self.size, _PIECE):
            yield self.piece(start, min(start + _PIECE, self.size))

    def md5(self) -> str:
        """Return the MD5 of all bytes as Drive writes it; blocks on the disk."""
        total = hashlib.md5(usedforsecurity=False)
        for piece in self.pieces():
            total.update(piece)
        return total.hexdigest()


# Google's resumable uploads
class SessionExpired(Exception):
    """The service no longer knows an upload session."""


async def send_pieces(
    session: HTTPRequest,
    content: UploadContent,
    piece_size: int,
    finished: Callable[[Answer], T],
    *,
    send: Callable[[HTTPRequest], Awaitable[Answer]],
    policy: RetryPolicy,
) -> T:
    """Send all bytes in an upload session; return what `finished` makes of the last answer.

    `session` is the request without its bytes. Raises SessionExpired. After a failure, the service says how much it
    has. As long as that becomes more, all tries are there again: a slow line may not send a whole piece in one attempt.
    """
    size = content.size
    start, most, is_known, tries = 0, 0, True, RetryAttempts(policy)

    async def read(start: int, stop: int) -> bytes:
        data = await asyncio.to_thread(content.piece, start, stop)
        if len(data) != stop - start:
            raise CachedFSError(f"{session.subject}: the local file became shorter while it was sent")
        return data

    async def put(request: HTTPRequest, data: bytes, span: str) -> tuple[int, T | None]:
        """Send bytes, or ask (`bytes */N`) how many arrived; return what the service has, or the end's result."""
        answer = await send(replace(request, headers={"Content-Range": span}, data=data))
        if answer.status in UNKNOWN_SESSION:
            raise SessionExpired
        if answer.status != 308:
            return 0, finished(answer)
        last = number(answer.headers.get("range", "").rpartition("-")[2])
        return (0 if last is None else last + 1), None

    while True:
        stop = min(start + piece_size, size)
        request = replace(session, doing=f"sending bytes {start} to {stop}")
        try:
            if not is_known:
                kept, result = await put(request, b"", f"bytes */{size}")
            elif start >= size:
                raise RetryableError("the service has all bytes and makes no file of them")
            else:
                kept, result = await put(request, await read(start, stop), f"bytes {start}-{stop - 1}/{size}")
                if result is None and kept <= start:
                    raise RetryableError(f"the service kept nothing after byte {kept}")
        except RetryableError as failed:
            await tries.pause(failed, request.subject, request.purpose)
            is_known = False
            continue
        if result is not None:
            return result
        if kept > most:  # not only what it lacked again
            most, tries = kept, RetryAttempts(policy)
        start, is_known = kept, True
        content.sent(start)
