"""`ResumableRead`: a response whose body is checked.

A broken body is resumed with the same version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from cachedfs.common.checksums import RunningChecksum, StatedChecksum
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ChecksumMismatch
from cachedfs.origins.base import Reply, describe, number
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPResponse

__all__ = ["WHOLE", "RangeNotSatisfiable", "ResumableRead", "reaches"]

WHOLE = 8 << 20  # most bytes held back until their checksum is verified: one request of the reader

_MOST_HELD = 64 << 20  # most bytes held back until a body of no stated length has ended


class RangeNotSatisfiable(RetryableError):
    """HTTP 416: no byte of the object is in the range, as far as this attempt could see."""


def reaches(want: Range | Suffix | None, size: int) -> bool:
    """Return whether an object of this size has any of the bytes in `want`."""
    return size > (want.start if isinstance(want, Range) else 0)


class ResumableRead(ABC):
    """A read of one version.

    Subclasses open it, request the remaining bytes after a failure, and set the checksum to verify.
    """

    info: ObjectInfo
    start: int
    stop: int

    def __init__(self, url: str, want: Range | Suffix | None, pinned: ObjectInfo | None) -> None:
        self._url, self._doing = url, describe(want)
        self._want, self._pinned = want, pinned
        self._attempt = AsyncExitStack()  # slot and connection of the running attempt
        self._body: HTTPResponse | None = None
        self._arrived = 0  # offset of the next byte to receive
        self._offset = 0  # offset of the body's next byte; before `_arrived` if the server ignored the range
        self._ends_at: int | None = None  # where the body has to end, until its length is known to be that
        # Received bytes that were not returned yet. Invariant: `_proof` is None whenever a piece is returned.
        self._held: deque[bytes] = deque()
        self._proof: StatedChecksum | None = None  # checksum of the whole object, until it is verified
        self._total: RunningChecksum | None = None  # checksum of the bytes received so far
        self._running: RunningChecksum | None = (
            None  # the same, of a whole body whose bytes are not held back
        )

    @abstractmethod
    async def _begin(self) -> None:
        """Choose the version and the range, and open the body."""

    @abstractmethod
    async def _resume(self, left: Range, failed: RetryableError) -> None:
        """Wait, then open the body of the remaining range.

        Raises OriginUnavailable after too many attempts.
        """

    async def __aenter__(self) -> Reply:
        try:
            with mapped(self._url, self._doing):
                await self._begin()
        except BaseException:  # also on cancellation: __aexit__ is not called when this fails
            await self._attempt.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._attempt.aclose()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    @property
    def is_checked_at_end(self) -> bool:
        """True if iteration raises ChecksumMismatch instead of yielding the last bytes of a wrong body."""
        return self._running is not None

    async def __anext__(self) -> bytes:
        while self._held or self._arrived < self.stop:
            with mapped(self._url, self._doing):
                try:
                    await self._prove()
                    return self._checked(self._held.popleft() if self._held else await self._take())
                except RetryableError as failed:
                    await self._attempt.aclose()
                    await self._resume(Range(self._arrived, self.stop), failed)
        raise StopAsyncIteration

    async def _take(self) -> bytes:
        """Return the next bytes, never empty, uncopied where possible.

        Raises RetryableError if the body breaks.
        """
        assert self._body is not None  # set whenever bytes are left to receive
        while True:
            piece = await self._body.read_some()
            if not piece:
                raise RetryableError(
                    RetryReason(f"the body ended at byte {self._offset}, before {self.stop}")
                )
            skip, left = self._arrived - self._offset, self.stop - self._arrived
            self._offset += len(piece)
            wanted = piece if not skip and len(piece) <= left else piece[skip : skip + left]
            if wanted:
                self._arrived += len(wanted)
                return wanted

    def _checked(self, piece: bytes) -> bytes:
        """Return the piece; raise ChecksumMismatch if it completes a body with another checksum than stated."""
        if self._running is not None:
            self._running.add(piece)
            if self._arrived == self.stop and not self._held and (wrong := self._running.contradiction()):
                raise ChecksumMismatch(f"{self._url}: {self._doing} failed: {wrong}. Read it again")
        return piece

    async def _prove(self) -> None:
        """Hold bytes back until their checksum is verified; raise RetryableError if it is wrong."""
        if self._proof is None:
            if self._ends_at is not None and self._arrived < self.stop:
                self._held += await self._rest(self._ends_at)
            return
        self._total = self._total or RunningChecksum(self._proof)
        while self._arrived < self.stop:
            self._held.append(await self._take())
            self._total.add(self._held[-1])
        if wrong := self._total.contradiction():
            self._held.clear()
            self._arrived, self._total = self.start, None
            await self._doubt()
            raise RetryableError(RetryReason(wrong))
        self._proof = None

    def _receive(self, body: HTTPResponse, offset: int, stop: int) -> None:
        """Begin to receive a body, which must have the bytes from `offset` to `stop` and no others.

        HTTP ensures the length that the headers state. A proxy that compresses a range states none.
        """
        length = None if "Transfer-Encoding" in body.headers else number(body.headers.get("Content-Length"))
        if length not in (None, stop - offset):
            raise RetryableError(RetryReason(f"the answer has {length} bytes instead of {stop - offset}"))
        self._body, self._offset = body, offset
        self._ends_at = stop if length is None else None

    async def _rest(self, ends_at: int) -> list[bytes]:
        """Return the rest of the body, once it has ended where it has to; else drop it and raise RetryableError."""
        assert self._body is not None
        began, pieces, stop = self._arrived, list[bytes](), min(self.stop, ends_at)
        try:
            if stop - began > _MOST_HELD:
                raise RetryableError(RetryReason("the answer does not state its length", is_final=True))
            while self._arrived < stop:
                pieces.append(await self._take())
            while self._offset <= ends_at and (piece := await self._body.read_some()):
                self._offset += len(piece)
            if self._offset != ends_at:
                raise RetryableError(
                    RetryReason(f"the body ended at byte {self._offset} instead of {ends_at}")
                )
        except BaseException:  # a cancellation too
            self._arrived = began
            raise
        self._ends_at = None
        return pieces

    @abstractmethod
    async def _doubt(self) -> None:
        """Raise the error that explains a wrong checksum; return if the transfer damaged the bytes."""

    def _settle(self, info: ObjectInfo, span: Range) -> None:
        self.info, self.start, self.stop = info, span.start, span.stop
        self._arrived, self._proof, self._running = span.start, None, None

    def _settle_empty(self, info: ObjectInfo) -> None:
        size = info.size or 0
        at = min(self._want.start, size) if isinstance(self._want, Range) else size
        self._settle(info, Range(at, at))
