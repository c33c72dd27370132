"""Answers to a read behind a shared cache."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from cachedfs.common.types import ObjectInfo
from cachedfs.origins.base import Reply

__all__ = ["SharedReply", "WatchedReply"]


@dataclasses.dataclass
class SharedReply:
    """A read that begins with bytes of the shared cache, and may go on with those of the origin."""

    info: ObjectInfo
    start: int
    stop: int
    body: AsyncIterator[bytes]
    is_checked_at_end = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.body


class WatchedReply:
    """A read from the origin, of which is known whether all of it was read."""

    def __init__(self, reply: Reply) -> None:
        self.info, self.start, self.stop = reply.info, reply.start, reply.stop
        self._reply, self._body = reply, aiter(reply)
        self.is_complete = False

    @property
    def is_checked_at_end(self) -> bool:
        return self._reply.is_checked_at_end

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._body)
        except StopAsyncIteration:
            self.is_complete = True
            raise
