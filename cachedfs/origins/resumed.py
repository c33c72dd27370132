"""A reply whose body is resumed, of the same version, where it breaks. What a try is, an origin says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from cachedfs.model import ObjectInfo, Range, Suffix
from cachedfs.origins.base import Reply, describe
from cachedfs.origins.failures import mapped
from cachedfs.origins.retry import Failed, Trouble

if TYPE_CHECKING:
    from cachedfs.origins.http import Exchange

__all__ = ["BehindTheEnd", "ResumedRead", "reaches"]


class BehindTheEnd(Failed):
    """416: no byte of the object is in the range, as far as this try could see."""


def reaches(want: Range | Suffix | None, size: int) -> bool:
    """Return whether any byte that is wanted is in an object of this size."""
    return size > (want.start if isinstance(want, Range) else 0)


class ResumedRead(ABC):
    """A read of one version. Subclasses begin it, and send again for what is left."""

    info: ObjectInfo
    start: int
    stop: int

    def __init__(self, url: str, want: Range | Suffix | None, pinned: ObjectInfo | None) -> None:
        self._url, self._doing = url, describe(want)
        self._want, self._pinned = want, pinned
        self._attempt = AsyncExitStack()  # holds what the try that runs holds: slot and connection
        self._body: Exchange | None = None
        self._position = 0  # of the next byte to give
        self._offset = 0  # of the next byte of the body: before the position where a range was ignored

    @abstractmethod
    async def _begin(self) -> None:
        """Settle what is read, and have its body coming."""

    @abstractmethod
    async def _resume(self, left: Range, failed: Failed) -> None:
        """Have the body of what is left coming, after a wait; raises OriginUnavailable when there is no hope."""

    async def __aenter__(self) -> Reply:
        try:
            with mapped(self._url, self._doing):
                await self._begin()
        except BaseException:
            await self._attempt.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._attempt.aclose()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while self._position < self.stop:
            with mapped(self._url, self._doing):
                try:
                    if piece := self._wanted(await self._next_piece()):
                        return piece
                except Failed as failed:
                    await self._attempt.aclose()
                    await self._resume(Range(self._position, self.stop), failed)
        raise StopAsyncIteration

    async def _next_piece(self) -> bytes:
        assert self._body is not None  # there is one wherever bytes are left to give
        piece = await self._body.read_some()
        if not piece:
            raise Failed(Trouble(f"the body ended at byte {self._offset}, before {self.stop}"))
        return piece

    def _wanted(self, piece: bytes) -> bytes:
        """Return what of a piece of the body was asked for and not given yet; often all of it, as it is."""
        skip, left = self._position - self._offset, self.stop - self._position
        self._offset += len(piece)
        wanted = piece if not skip and len(piece) <= left else piece[skip : skip + left]
        self._position += len(wanted)
        return wanted

    def _settle(self, info: ObjectInfo, span: Range) -> None:
        self.info, self.start, self.stop = info, span.start, span.stop
        self._position = span.start

    def _settle_empty(self, info: ObjectInfo) -> None:
        size = info.size or 0
        at = min(self._want.start, size) if isinstance(self._want, Range) else size
        self._settle(info, Range(at, at))
