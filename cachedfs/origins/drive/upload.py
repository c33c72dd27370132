"""Uploads to Drive: in one request if they are small, else in resumable pieces; and files open for writing."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from fsspec.asyn import AsyncFileSystem, sync

from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins.base import number
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import GOOD, Answer
from cachedfs.origins.origin_errors import failure_since, handled_exceptions, is_failure
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.drive.client import DriveAccount
    from cachedfs.origins.http import HTTPRequest

__all__ = ["PIECE", "UploadContent", "UploadMismatch", "WrittenDriveFile", "not_kept", "upload"]

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


class WrittenDriveFile(io.RawIOBase):
    """A file open for writing: kept locally and sent at close, so a process that dies first changes nothing."""

    # Nothing in here may fail: Python closes what it has half made, and closing sends.
    def __init__(
        self, fs: AsyncFileSystem, path: str, mode: str, spool: Any, *, onto: str | None, autocommit: bool
    ) -> None:
        self.fs, self.path, self.mode, self.autocommit = fs, path, mode, autocommit
        self._spool, self._onto = spool, onto
        self._trouble: CachedFSError | None = None
        self._is_given_up = False
        self._handled = handled_exceptions()  # while the file is opened

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self._trouble is not None:
            raise self._trouble
        try:
            with not_kept(self.path):
                return int(self._spool.write(data))
        except CachedFSError as error:
            self._spool.close()
            self._trouble = error
            raise

    def tell(self) -> int:
        return int(self._spool.tell())

    def close(self) -> None:
        """Send what was written, unless a transaction will do it.

        A call while an exception is handled that was raised after the file was opened sends nothing and raises that
        exception again: a text wrapper closes its binary file this way when its writer fails.
        """
        if self.closed:
            return
        error = failure_since(self._handled)
        self._handled = ()  # they hold the frames that hold this file
        try:
            if error is not None:
                self.discard()
                raise error
            if self.autocommit:
                self.commit()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *traceback: object
    ) -> None:
        if kind is not None and is_failure(error or kind()):
            self.discard()  # half a file is nobody's file
            super().close()
        self.close()

    def __del__(self) -> None:
        if not self.closed:  # dropped without a close: nobody said that it was complete
            self.discard()
            super().close()

    def commit(self) -> None:
        """Make the written bytes the file's content.

        Does nothing for a file that was discarded, which a transaction may still list.
        """
        if self._is_given_up:
            return
        if self._trouble is not None:
            raise self._trouble  # half a file is nobody's file
        try:
            sync(
                self.fs.loop,
                self.fs.writer.write,
                self.path,
                UploadContent(self._spool),
                exclusive=self.mode == "xb",
                onto=self._onto,
            )
        finally:
            self._spool.close()

    def discard(self) -> None:
        """Drop what was written."""
        self._is_given_up = True
        self._spool.close()


@contextmanager
def not_kept(path: str) -> Iterator[None]:
    """Explain an OSError of the local disk, which keeps written bytes until they are sent."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CachedFSError):
            raise
        ours = CachedFSError(
            f"drive://{path}: data being written is stored in {tempfile.gettempdir()} until it is sent, and that failed "
            f"({error.strerror}); nothing is sent. TMPDIR names another folder"
        )
        ours.errno = error.errno
        raise ours from error
