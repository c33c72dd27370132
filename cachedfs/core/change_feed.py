"""Change feeds: one request lists all changes, instead of revalidating each expired entry.

A feed covers one part of an origin, the first name of a path: for Google Drive, My Drive or one shared drive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from cachedfs.cache.index.metadata_records import FeedPosition, FeedSnapshot
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.core.objects import Objects, folder_of, is_fresh
from cachedfs.errors import CachedFSError, OriginUnreachable
from cachedfs.origins.base import has_stale_answer

__all__ = ["ChangeFeeds", "is_covered"]

logger = logging.getLogger("cachedfs.core")

_WAIT_S = 10.0  # longest wait for another process's poll
_PAUSE_S = 60.0  # without a feed that failed, at least


class ChangeFeeds:
    """The change feeds of one origin, at most one per part. Use it on the event loop thread only.

    A feed is polled when a metadata entry has expired, once for all callers in all processes, and at most once per
    `max_age`.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        # Parts without a feed, or with a failed one -> monotonic time of the next try.
        self._not_before: dict[str, float] = {}

    async def begin(self, path: str) -> None:
        """Start the feed for `path` if there is none yet.

        It covers requests made *after* this call.
        """
        if self._may_follow(path) and self._feed(path) is None:
            await self._once(path, lambda feed: feed is not None, self._begin)

    async def catch_up(self, path: str) -> bool:
        """Poll the feed for `path` if the last poll is older than `max_age`.

        Return whether a poll was due.
        """
        feed = self._feed(path) if self._may_follow(path) else None
        if feed is None or self._is_fresh(feed):
            return False
        await self._once(path, lambda feed: feed is None or self._is_fresh(feed), self._poll)
        return True

    def position(self, path: str) -> FeedPosition | None:
        """Return the feed position to store with later answers about `path`, or None.

        It covers answers requested after this call.
        """
        return self._feed(path) if self._may_follow(path) else None

    def snapshot(self, position: FeedPosition | None, folder: ObjectInfo | None) -> FeedSnapshot | None:
        """Return the feed snapshot to store with an answer about a path in `folder`.

        `folder` is None at the top level. Return None if no feed reports all changes of the path. The parent folders
        must have metadata entries that are not older than the answer.
        """
        if position is None:
            return None
        parents, info = list[tuple[str, str]](), folder
        while info is not None:
            is_file = info.kind != "directory"  # a file may have the same name as the folder
            if info.id is None or is_file or not is_covered(info):
                return None
            parents.append((info.path, info.id))
            parent_path = folder_of(info.path)
            entry = self._objects.known(parent_path) if parent_path else None
            if parent_path and (entry is None or entry.info is None):
                return None
            info = entry.info if entry is not None else None
        return FeedSnapshot(position.id, position.number, tuple(parents))

    def _may_follow(self, path: str) -> bool:
        objects, lifetime_s = self._objects, self._objects.lifetime_s
        return (
            0 < lifetime_s < math.inf
            and objects.origin(path).by_parent
            and not objects.engine.is_unreachable(objects.identity)
            and time.monotonic() >= self._not_before.get(_part_of(path), 0.0)
        )

    def _feed(self, path: str) -> FeedPosition | None:
        return self._objects.engine.cache.metadata.feed(self._objects.identity, _part_of(path))

    def _is_fresh(self, feed: FeedPosition) -> bool:
        return is_fresh(feed.checked_at, clock.now(), lifetime_s=self._objects.lifetime_s)

    async def _once(
        self,
        path: str,
        is_done: Callable[[FeedPosition | None], bool],
        poll: Callable[[str], Awaitable[None]],
    ) -> None:
        """Call `poll`, or wait until another caller in this or another process has done so."""
        part = _part_of(path)

        async def poll_once() -> None:
            cache = self._objects.engine.cache
            poll_lock = _poll_lock(self._objects.identity, part)
            if not await self._objects.engine.locked(poll_lock, within_s=_WAIT_S):
                return  # asking the origin directly is cheaper than waiting longer
            try:
                if not is_done(self._feed(path)):
                    await poll(part)
            except OriginUnreachable:  # what is cached is served without asking again
                self._objects.engine.mark_unreachable(self._objects.identity)
            except CachedFSError as error:  # a feed only saves requests: go on without it
                logger.info("%s: the change feed failed: %s", self._objects.url(part), error)
                self._not_before[part] = time.monotonic() + max(_PAUSE_S, self._objects.lifetime_s)
            finally:
                cache.locks.release(poll_lock)

        await self._objects.engine.lookups.run((self._objects.identity, f"\0{part}"), 0, poll_once)

    async def _begin(self, part: str) -> None:
        objects, now = self._objects, clock.now()
        first = await objects.origin(part).changes(part, None)
        if first is not None:
            shared, identity = objects.engine.cache.metadata, objects.identity
            await asyncio.to_thread(shared.begin_feed, identity, part, first.token, now)
        if first is None or self._feed(part) is None:
            self._not_before[part] = math.inf

    async def _poll(self, part: str) -> None:
        objects, now = self._objects, clock.now()
        shared, identity = objects.engine.cache.metadata, objects.identity
        feed = shared.feed(identity, part)
        if feed is None:
            return
        has_stale_answer.set(objects.config.stale_if_error)  # in this task only
        changes = await objects.origin(part).changes(part, feed.token)
        if changes is None:
            await asyncio.to_thread(shared.drop_feed, feed)
            return
        await asyncio.to_thread(shared.follow_feed, identity, feed, changes, checked_at=now)


def _poll_lock(identity: str, part: str) -> int:
    """Return the hash of the lock to hold while polling or moving the feed of a part."""
    return ObjectKey(identity, part, "what changed?", 0).hash64(0)


def is_covered(info: ObjectInfo) -> bool:
    """Return whether the feed of its part reports all changes of the metadata of an item.

    This is False for shortcuts, and for `same_name`: a change is not attributed to the former place of an item that no
    entry is for.
    """
    return "shortcut" not in info.details and "same_name" not in info.details


def _part_of(path: str) -> str:
    return path.partition("/")[0]
