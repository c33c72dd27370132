"""Answers to a read behind a shared cache."""

from __future__ import annotations

from collections.abc import AsyncIterator

from cachedfs.origins.base import Reply


class SharedReply(Reply):
    """A read that begins with bytes of the shared cache, and may go on with those of the origin."""


class WatchedReply(Reply):
    """A read from the origin, of which is known whether all of it was read."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.info, reply.start, reply.stop, self, reply.is_checked_at_end)
        self._bytes = reply.body
        self.is_complete = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._bytes)
        except StopAsyncIteration:
            self.is_complete = True
            raise
