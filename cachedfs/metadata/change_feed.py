"""What an origin tells by itself: one question about all that changed, in place of one about each thing that is old."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from cachedfs.cache.index.metadata_records import FeedPosition, FeedSnapshot
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.errors import CachedFSError, OriginUnreachable
from cachedfs.fetch.metadata_cache import folder_of
from cachedfs.fetch.source import Source, is_fresh

__all__ = ["WAIT_S", "ChangeFeeds", "claim_of", "is_told"]

logger = logging.getLogger("cachedfs.metadata")

WAIT_S = 10.0  # longest wait for a poll of another process


class ChangeFeeds:
    """The feeds of one origin, one for each part that has one. On the runtime's loop.

    A feed is polled when something that is known has grown old, once for all who ask and at most once in `max_age`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        # By part, of those without a feed, or whose feed failed: when to try again.
        self._not_before: dict[str, float] = {}

    async def begin(self, path: str) -> None:
        """Have what is asked for from now on watched, where that can be: once, and *before* it is asked for."""
        if self._may_follow(path) and self._feed(path) is None:
            await self._once(path, lambda feed: feed is not None, self._begin)

    async def catch_up(self, path: str) -> bool:
        """Ask what changed, if that was not asked for longer than `max_age`; return whether it was asked now."""
        feed = self._feed(path) if self._may_follow(path) else None
        if feed is None or self._is_fresh(feed):
            return False
        await self._once(path, lambda feed: feed is None or self._is_fresh(feed), self._poll)
        return True

    def seen(self, path: str) -> FeedPosition | None:
        """Return the feed that watches an answer about `path` which is asked for after this."""
        return self._feed(path) if self._may_follow(path) else None

    def watch(self, seen: FeedPosition | None, folder: ObjectInfo | None) -> FeedSnapshot | None:
        """Return how an answer about what is in `folder` is watched (None: the top); None where no feed tells all about it.

        REQUIRES: the folders above are known, and that they were is as old as the answer at most.
        """
        if seen is None:
            return None
        way, info = list[tuple[str, str]](), folder
        while info is not None:
            is_file = info.kind != "directory"  # it may have the name of a folder
            if info.id is None or is_file or not is_told(info):
                return None
            way.append((info.path, info.id))
            above = folder_of(info.path)
            known = self._source.metadata.get(above) if above else None
            if above and (known is None or known.info is None):
                return None
            info = known.info if known is not None else None
        return FeedSnapshot(seen.id, seen.number, tuple(way))

    def _may_follow(self, path: str) -> bool:
        source, lifetime_s = self._source, self._source.config.lifetime_s
        return (
            0 < lifetime_s < math.inf
            and source.origin(path).by_parent
            and not source.runtime.is_unreachable(source.identity)
            and time.monotonic() >= self._not_before.get(_part_of(path), 0.0)
        )

    def _feed(self, path: str) -> FeedPosition | None:
        return self._source.runtime.cache.metadata.feed(self._source.identity, _part_of(path))

    def _is_fresh(self, feed: FeedPosition) -> bool:
        return is_fresh(feed.checked_at, time.time(), lifetime_s=self._source.config.lifetime_s)

    async def _once(
        self, path: str, is_done: Callable[[FeedPosition | None], bool], ask: Callable[[str], Awaitable[None]]
    ) -> None:
        """Ask, or wait until somebody else in this process, or in another, has."""
        part = _part_of(path)

        async def question() -> None:
            cache = self._source.runtime.cache
            fetch_lock = claim_of(self._source.identity, part)
            if not await self._source.runtime.locked(fetch_lock, within_s=WAIT_S):
                return  # what is spared is not worth waiting for longer
            try:
                if not is_done(self._feed(path)):
                    await ask(part)
            except OriginUnreachable:
                pass  # the question itself meets it, and knows what to do
            except CachedFSError as error:  # a feed spares questions: without one they are asked
                logger.info("%s: the changes are not known: %s", self._source.url(part), error)
                self._not_before[part] = time.monotonic() + self._source.config.lifetime_s
            finally:
                cache.release_lock(fetch_lock)

        await self._source.runtime.lookups.ask((self._source.identity, f"\0{part}"), 0, question)

    async def _begin(self, part: str) -> None:
        source, now = self._source, time.time()
        first = await source.origin(part).changes(part, None)
        if first is not None:
            shared, identity = source.runtime.cache.metadata, source.identity
            await asyncio.to_thread(shared.begin_feed, identity, part, first.token, now)
        if first is None or self._feed(part) is None:
            self._not_before[part] = math.inf

    async def _poll(self, part: str) -> None:
        source, now = self._source, time.time()
        shared, identity = source.runtime.cache.metadata, source.identity
        feed = shared.feed(identity, part)
        if feed is None:
            return
        changes = await source.origin(part).changes(part, feed.token)
        if changes is None:
            await asyncio.to_thread(shared.drop_feed, feed)
            return
        await asyncio.to_thread(shared.follow_feed, identity, feed, changes, checked_at=now)


def claim_of(identity: str, part: str) -> int:
    """Return what who polls a feed, or puts it elsewhere, has claimed."""
    return ObjectKey(identity, part, "what changed?", 0).hash64(0)


def is_told(info: ObjectInfo) -> bool:
    """Return whether the feed of the part that a path is in tells of all that changes this: not what a shortcut is."""
    return "shortcut" not in info.details


def _part_of(path: str) -> str:
    return path.partition("/")[0]
