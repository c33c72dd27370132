"""`ResumableRead`: a read of one version over HTTP, with the only loop that retries and resumes reads."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from cachedfs.common.checksums import HASHERS, StatedChecksum, stated_of
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ChecksumMismatch
from cachedfs.origins.base import Read, clipped, int_of
from cachedfs.origins.origin_errors import raise_mapped
from cachedfs.origins.request_slots import OpenRequest
from cachedfs.origins.retry import RetryableError, RetryAttempts

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPResponse

WHOLE = 8 << 20  # most bytes held back until their checksum is verified: one request of the reader

_NOT_SENT = OpenRequest("", "", is_closed=True)
_MOST_HELD = 64 << 20  # most bytes held back until a body of no stated length has ended


def reaches(want: Range | Suffix | None, size: int) -> bool:
    """Return whether an object of this size has any of the bytes in `want`."""
    return size > (want.start if isinstance(want, Range) else 0)


def check_length(response: HTTPResponse, expected: int) -> None:
    """Raise RetryableError if the body states another length than `expected`, which aiohttp would ensure."""
    length = int_of(response.headers.get("Content-Length"))
    if "Transfer-Encoding" not in response.headers and length not in (None, expected):
        raise RetryableError(f"the answer has {length} bytes instead of {expected}")


class ResumableRead(Read):
    """A read over HTTP.

    A subclass sends one attempt in `_open`. It sets what the body has, and once the version, the range and the proof.
    """

    _is_open: bool = False  # the headers of an attempt were accepted
    _at: int = 0  # offset of the next byte to receive
    _response: Any = _NOT_SENT  # the `HTTPResponse` of the running attempt
    _offset: int = 0  # offset of its next byte; before `_at` if the server ignored the range
    _body_stop: int = 0  # offset of its end
    _began: float = 0.0  # time of the policy's clock
    _held: deque[bytes]  # received bytes, until they are proven
    _stated: StatedChecksum | None = None  # what the bytes of a whole object have to have
    _hasher: Any = None  # computes it from the bytes received so far
    _holds: bool = False  # no byte is returned before the checksum is verified
    _look: asyncio.Task[None] | None = None  # a lookup during the read: no byte is returned before it is done

    @abstractmethod
    async def _open(self) -> None:
        """Send one attempt for the bytes `want` of `pinned`.

        Sets `_response`, `_offset` and `_body_stop`. Before the first answer it also sets `info`, `start`, `stop`,
        `_at` and the proof: `_expect_checksum` or `_look`.
        """

    async def _explain(self, failed: RetryableError) -> None:  # most have nothing to add
        """Raise the error that explains a failed attempt; return if another attempt may succeed."""

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield b"" when the headers have arrived, then the bytes. Retry and resume broken attempts."""
        self._began, self._held = self.origin.policy.clock(), deque()
        while not self._is_open or self._at < self.stop:
            try:
                await self._open()
                if not self._is_open:
                    self._is_open = True
                    yield b""
                response, stated, end = self._response, self._stated, min(self.stop, self._body_stop)
                if self._at < end and not self._holds and "Content-Length" not in response.headers:
                    await self._hold_body(end)
                while self._at < end or self._held:
                    if self._at < end:
                        if not (piece := await response.read_some()):
                            raise RetryableError(f"the body ended at byte {self._offset}")
                        skip, self._offset = self._at - self._offset, self._offset + len(piece)
                        if skip or self._offset > end:
                            piece = piece[skip : len(piece) + min(0, end - self._offset)]
                        self._at += len(piece)
                        self._held.append(piece)
                        if self._hasher is not None:
                            self._hasher.update(piece)
                    if self._at < self.stop and self._holds:
                        continue
                    if self._at == self.stop and stated and self._hasher.digest().hex() != stated.value:
                        await self._raise_checksum(stated)
                    if self._look is not None and not await self._is_confirmed(self._look):
                        continue
                    while self._held:
                        if piece := self._held.popleft():
                            yield piece
            except RetryableError as failed:
                await self._retry(failed)
            except Exception as error:  # `raise_mapped` raises one that it does not know as it is
                raise_mapped(error, self.url, self.doing)
            finally:
                self._response.close()
                if self._look is not None:
                    await self._cancel_look(self._look)

    async def _hold_body(self, end: int) -> None:
        """Hold a body of unstated length until it has ended where it has to; else raise RetryableError.

        HTTP ensures the length that the headers state. A proxy that compresses a range states none.
        """
        if end - self._at > _MOST_HELD:
            raise RetryableError("the answer does not state its length", is_final=True)
        pieces, offset = list[bytes](), self._offset
        while offset <= self._body_stop and (piece := await self._response.read_some()):
            pieces.append(piece[max(0, self._at - offset) : max(0, end - offset)])
            offset += len(piece)
        if offset != self._body_stop:
            raise RetryableError(f"the body ended at byte {offset} instead of {self._body_stop}")
        for piece in pieces:
            self._held.append(piece)
            if self._hasher is not None:
                self._hasher.update(piece)
        self._at, self._offset = end, offset

    async def _raise_checksum(self, stated: StatedChecksum) -> None:
        """Raise the error for bytes with another checksum than the stated one."""
        found = self._hasher.digest().hex()
        wrong = f"the {stated.name.upper()} of its bytes is {found}, and should be {stated.value}"
        if not self._holds:
            raise ChecksumMismatch(f"{self.url}: {self.doing} failed: {wrong}. Read it again")
        self._held.clear()
        self._at, self._hasher = self.start, HASHERS[stated.name]()
        raise RetryableError(wrong, is_damaged=True)

    async def _is_confirmed(self, look: asyncio.Task[None]) -> bool:
        """Return whether the lookup during the read is done. At the end or when much is held, wait for it."""
        n_held = sum(map(len, self._held))
        if self._at < self.stop and n_held < 2 * WHOLE and not look.done():
            return False
        await look
        self._look = None
        return True

    @functools.cached_property
    def _tries(self) -> RetryAttempts:
        return RetryAttempts(self.origin.policy, self._began)

    async def _retry(self, failed: RetryableError) -> None:
        """End a failed attempt, and wait before the next one."""
        self._response.close()  # the slot is free while it waits
        if self._look is not None:
            await self._cancel_look(self._look)
        if self._is_open:
            self.want, self.pinned = Range(self._at, self.stop), self.info
        await self._explain(failed)
        await self._tries.pause(failed, self.url, self.doing)

    async def _cancel_look(self, look: asyncio.Task[None]) -> None:
        self._look = None
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)  # whoever waits for bytes has had the outcome

    def _expect_checksum(self, most_held: int) -> None:
        """Compare the bytes of a whole object with its checksum, if it has one; hold so many until they are compared.

        With 0, nothing is compared.
        """
        self._stated = stated = stated_of(self.info.details) if most_held else None
        self._holds = stated is not None and self.stop - self.start <= most_held
        self.is_checked_at_end = stated is not None and not self._holds
        self._hasher = HASHERS[stated.name]() if stated else None

    def _take_nothing(self, info: ObjectInfo) -> None:
        at = info.size or 0
        if isinstance(self.want, Range):
            at = min(self.want.start, at)
        self.info, self.start, self._at, self.stop = info, at, at, at

    def _take_whole(self, info: ObjectInfo, data: bytes) -> None:
        """Take the range that was requested from all bytes of an object whose size was unknown before."""
        span = clipped(self.want, len(data))
        self.info, self.start, self.stop = dataclasses.replace(info, size=len(data)), span.start, span.stop
        self._at = span.stop
        self._held.append(data[span.start : span.stop])
