"""`GCSMediaRead`: one read of a version from Google Cloud Storage.

It is resumed where it breaks off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from cachedfs.common.checksums import stated_of
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
        self._to = await self._connect()
        self._tries = self._to.client.new_tries()
        return await super().__aenter__()

    async def _resume(self, left: Range, failed: RetryableError) -> None:
        """Request the remaining bytes, of the same generation."""
        ask = self._to.media(self._path, left, self.info.fingerprint)
        await self._to.client.pause(failed, ask, self._tries)

        async def attempt() -> None:
            try:
                self._offset = (await self._headers(ask, left, self.info)).offset
            except RetryableError as failed:
                await self._ask_of_absence(failed)
                raise

        await self._to.client.retried(attempt, ask, self._tries)

    # Opening
    async def _begin(self) -> None:
        if isinstance(self._want, Range) and self._want.size == 0:
            self._settle_empty(await self._current())  # HTTP cannot express an empty range
            return
        known = self._pinned if self._pinned and self._pinned.fingerprint is not None else None
        ask = self._to.media(self._path, self._want, known.fingerprint if known else None)
        await self._to.client.retried(partial(self._open, ask, known), ask, self._tries)

    async def _open(self, ask: HTTPRequest, known: ObjectInfo | None) -> None:
        """Take version and range from the headers of one attempt; `known` is the pinned version."""
        try:
            head = await self._headers(ask, self._want, known)
        except RangeNotSatisfiable:
            info = known if known and known.size is not None else await self._current()
            if reaches(self._want, info.size or 0):
                raise  # the object grew meanwhile
            self._settle_empty(info)
            return
        except RetryableError as failed:
            await self._ask_of_absence(failed)
            raise
        if known is None and head.generation is None:
            await self._open_blind()
            return
        self._settle(_merged(known, head.info(self._path)), head.span)
        self._offset = head.offset
        if head.span.size == head.size <= WHOLE:
            self._proof = stated_of(head.details) or stated_of(self.info.details)

    async def _ask_of_absence(self, failed: RetryableError) -> None:
        """Look the object up if the 404 may be from another server.

        The JSON API decides whether it is missing.
        """
        if failed.trouble.is_absence:
            await self._current()

    async def _doubt(self) -> None:
        """Raise nothing: the service ensures the generation, so the transfer damaged the bytes."""

    async def _open_blind(self) -> None:
        """Look up the generation, then read that one: a proxy removed it from the headers."""
        await self._attempt.aclose()
        known = await self._current()
        await self._open(self._to.media(self._path, self._want, known.fingerprint), known)

    async def _headers(
        self, ask: HTTPRequest, want: Range | Suffix | None, known: ObjectInfo | None
    ) -> api.ReadHeaders:
        """Send one attempt and return its parsed headers; its body becomes the one being read.

        `known` is the pinned version.
        """
        await self._attempt.aclose()
        self._body = body = await self._attempt.enter_async_context(self._to.client.exchange(ask))
        if body.status == 416:
            await self._attempt.aclose()
            raise RangeNotSatisfiable(RetryReason("no byte of the object is in the range"))
        try:
            head = api.head_of(body.status, body.headers, want)
            if (
                known is not None
                and head.size != known.size is not None
                and head.generation in (None, known.fingerprint)
            ):
                raise ValueError(f"the answer is of an object of {head.size} bytes, not {known.size}")
        except ValueError as error:
            await self._attempt.aclose()
            raise RetryableError(RetryReason(str(error))) from error
        if known is not None and head.generation not in (None, known.fingerprint):
            self._raise_changed(f"generation {head.generation} came instead of {known.fingerprint}")
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


def _merged(known: ObjectInfo | None, info: ObjectInfo) -> ObjectInfo:
    """Return the object from a pinned read's headers, with the details that were known before."""
    if known is None:
        return info
    # The service kept to the pinned generation, even if the headers do not show it.
    return replace(info, fingerprint=known.fingerprint, details={**info.details, **known.details})
