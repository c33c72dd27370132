"""`GCSMediaRead`: one read of a version from Google Cloud Storage.

It is resumed where it breaks off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from cachedfs.common.checksums import RunningChecksum, stated_of
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import IsAFolder, ObjectChanged, ObjectNotFound
from cachedfs.origins.base import Reply
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.connection import GCSConnection
from cachedfs.origins.resumable_stream import RangeNotSatisfiable, ResumableRead, reaches
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPRequest

__all__ = ["WHOLE", "GCSMediaRead"]

# Objects up to this size are held back until their checksum is verified: 17 ms at 60 MB/s, and one block.
WHOLE = 1 << 20


class GCSMediaRead(ResumableRead):
    """A read of one generation."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[GCSConnection]],
        lookup: Callable[[str], Awaitable[ObjectInfo]],
        path: str,
        want: Range | Suffix | None,
        pinned: ObjectInfo | None,
    ) -> None:
        super().__init__(api.url_of(path), want, pinned)
        self._connect, self._lookup, self._path = connect, lookup, path

    async def __aenter__(self) -> Reply:
        if "/" not in self._path:
            raise IsAFolder(f"{self._url}: this is a bucket; list it, or read an object in it")
        self._connection = await self._connect()
        self._tries = self._connection.client.new_tries()
        return await super().__aenter__()

    async def _resume(self, remaining: Range, failed: RetryableError) -> None:
        """Request the remaining bytes, of the same generation."""
        request = self._connection.media(self._path, remaining, self.info.fingerprint)
        await self._connection.client.pause(failed, request, self._tries)

        async def attempt() -> None:
            try:
                await self._headers(request, remaining, self.info)
            except RetryableError as failed:
                await self._check_absence(failed)
                raise

        await self._connection.client.retried(attempt, request, self._tries)

    # Opening
    async def _begin(self) -> None:
        if isinstance(self._want, Range) and self._want.size == 0:
            self._settle_empty(await self._current())  # HTTP cannot express an empty range
            return
        pinned = self._pinned if self._pinned and self._pinned.fingerprint is not None else None
        request = self._connection.media(self._path, self._want, pinned.fingerprint if pinned else None)
        await self._connection.client.retried(partial(self._open, request, pinned), request, self._tries)

    async def _open(self, request: HTTPRequest, pinned: ObjectInfo | None) -> None:
        """Take version and range from the headers of one attempt; `pinned` is the pinned version."""
        try:
            head = await self._headers(request, self._want, pinned)
        except RangeNotSatisfiable:
            info = pinned if pinned and pinned.size is not None else await self._current()
            if reaches(self._want, info.size or 0):
                raise  # the object grew meanwhile
            self._settle_empty(info)
            return
        except RetryableError as failed:
            await self._check_absence(failed)
            raise
        if pinned is None and head.generation is None:
            await self._open_unversioned()
            return
        if not head.size and self._path.endswith("/"):  # as `api.children` has it
            raise IsAFolder(f"{self._url}: this is a folder; list it, or read an object in it")
        self._settle(_merged(pinned, head.info(self._path)), head.span)
        stated = stated_of(head.details) or stated_of(self.info.details)
        if head.span.size == head.size and stated is not None:
            if head.size <= WHOLE:
                self._proof = stated
            else:
                self._running = RunningChecksum(stated)

    async def _check_absence(self, failed: RetryableError) -> None:
        """Look the object up if the 404 may be from another server.

        The JSON API decides whether it is missing.
        """
        if failed.trouble.is_absence:
            await self._current()

    async def _doubt(self) -> None:
        """Raise nothing: the service ensures the generation, so the transfer damaged the bytes."""

    async def _open_unversioned(self) -> None:
        """Look up the generation, then read that one: a proxy removed it from the headers."""
        await self._attempt.aclose()
        pinned = await self._current()
        await self._open(self._connection.media(self._path, self._want, pinned.fingerprint), pinned)

    async def _headers(
        self, request: HTTPRequest, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> api.ReadHeaders:
        """Send one attempt and return its parsed headers; its body becomes the one being read.

        `pinned` is the pinned version.
        """
        await self._attempt.aclose()
        body = await self._attempt.enter_async_context(self._connection.client.exchange(request))
        if body.status == 416:
            await self._attempt.aclose()
            raise RangeNotSatisfiable(RetryReason("no byte of the object is in the range"))
        try:
            head = api.head_of(body.status, body.headers, want)
            if (
                pinned is not None
                and head.size != pinned.size is not None
                and head.generation in (None, pinned.fingerprint)
            ):
                raise ValueError(f"the answer is of an object of {head.size} bytes, not {pinned.size}")
            self._receive(body, head.offset, head.size if body.status == 200 else head.span.stop)
        except ValueError as error:
            await self._attempt.aclose()
            raise RetryableError(RetryReason(str(error))) from error
        if pinned is not None and head.generation not in (None, pinned.fingerprint):
            self._raise_changed(f"generation {head.generation} was received instead of {pinned.fingerprint}")
        return head

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        try:
            info = await self._lookup(self._path)
        except ObjectNotFound as error:
            if self._pinned is None:
                raise
            raise ObjectChanged(f"{self._url}: the object was removed; open it again") from error
        if self._pinned and info.fingerprint != self._pinned.fingerprint:
            self._raise_changed(f"it is generation {info.fingerprint} now, not {self._pinned.fingerprint}")
        if info.kind == "directory":
            raise IsAFolder(f"{self._url}: this is a folder; list it, or read an object in it")
        return info

    def _raise_changed(self, how: str) -> NoReturn:
        raise ObjectChanged(f"{self._url}: the object was replaced while it was read ({how}); open it again")


def _merged(pinned: ObjectInfo | None, info: ObjectInfo) -> ObjectInfo:
    """Return the object from a pinned read's headers, with the details that were known before."""
    if pinned is None:
        return info
    # The service kept to the pinned generation, even if the headers do not show it.
    return replace(info, fingerprint=pinned.fingerprint, details={**info.details, **pinned.details})
