"""Uploads to Drive: in one request if they are small, else in resumable pieces; and files open for writing."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

from cachedfs.errors import CachedFSError
from cachedfs.origins.drive import api
from cachedfs.origins.drive.client import GOOD, DriveAccount
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.origin_errors import failure_since, handled_exceptions, is_failure
from cachedfs.origins.upload import UNKNOWN_SESSION, GoogleUpload, UploadContent


class UploadMismatch(Exception):
    """Drive holds other bytes than were sent, in `item`; never raised outside `cachedfs.origins.drive`."""

    def __init__(self, item: Mapping[str, Any], expected: str) -> None:
        super().__init__(f"the MD5 is {item.get('md5Checksum')} instead of {expected}")
        self.item = item


class Upload(GoogleUpload[dict[str, Any]]):
    """One write of `content` at `path`: a new item that `resource` describes, or the item whose id is `into`."""

    has_one_host = True
    most_at_once = 5 << 20

    def __init__(
        self,
        account: DriveAccount,
        path: str,
        content: UploadContent,
        resource: Mapping[str, Any],
        into: str | None = None,
    ) -> None:
        self.account, self.path, self.content, self.resource, self.into = (
            account,
            path,
            content,
            resource,
            into,
        )
        self.base, self.policy = account.base, account.policy

    async def run(self) -> dict[str, Any]:
        """Return the item after the upload; raise UploadMismatch if Drive's checksum of the received bytes differs.

        Uploading twice creates one item, because `resource` contains the id of a new one.
        """
        expected = await asyncio.to_thread(self.content.md5)
        try:
            item = await self.transfer(self.resource, self.resource["mimeType"])
        except FileExistsError as error:
            if self.into is not None:
                raise
            # The id is ours alone: an earlier try arrived, and only its answer did not.
            item = await self.account.item(self.resource["id"], self.path)
            if item.get("md5Checksum") != expected:
                raise CachedFSError(
                    f"{api.url_of(self.path)}: the new file has the MD5 {item.get('md5Checksum')} instead of {expected}. Its "
                    "bytes may be from another writer, and are left: look at it, or write it again"
                ) from error
        if item.get("md5Checksum") != expected:
            raise UploadMismatch(item, expected)
        self.content.sent(self.content.size)
        return item

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


class WrittenDriveFile(io.RawIOBase):
    """A file open for writing: kept locally and sent at close, so a process that dies first changes nothing."""

    # Nothing in here may fail: Python closes what it has half made, and closing sends.
    def __init__(
        self, fs: AsyncFileSystem, path: str, mode: str, spool: Any, *, onto: str | None, autocommit: bool
    ) -> None:
        self.fs, self.path, self.mode, self.autocommit = fs, path, mode, autocommit
        self._spool, self._onto = spool, onto
        self._trouble: CachedFSError | None = None
        self._is_removed = False
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
        if not self.closed:  # not closed: nobody said that it was complete
            self.discard()
            super().close()

    def commit(self) -> None:
        """Make the written bytes the file's content.

        Does nothing after `discard`: a transaction may still list the file.
        """
        if self._is_removed:
            return
        if self._trouble is not None:
            raise self._trouble  # half a file is nobody's file
        try:
            sync(
                self.fs.loop,
                self.fs.origin.writer.write,
                self.path,
                UploadContent(self._spool),
                exclusive=self.mode == "xb",
                onto=self._onto,
            )
        finally:
            self._spool.close()

    def discard(self) -> None:
        """Drop what was written."""
        self._is_removed = True
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
