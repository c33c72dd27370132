"""Change feeds: one request lists all changes, instead of revalidating each expired entry.

A feed covers one part of an origin, the first name of a path: for Google Drive, My Drive or one shared drive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial

from cachedfs.cache.index.metadata_records import FeedPosition, FeedSnapshot, hash_of
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of
from cachedfs.core.objects import Objects, is_fresh
from cachedfs.core.offline import answer_of
from cachedfs.errors import CachedFSError, OriginUnreachable

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

    async def catch_up(self, path: str) -> bool:
        """Poll the feed for `path` if the last poll is older than `max_age`, or start it; return whether a poll was due.

        A feed that is started here covers requests made *after* this call.
        """
        if not self._may_follow(path) or self._is_fresh(feed := self._feed(path)):
            return False
        await self._advance(_part_of(path))
        return feed is not None

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
            # A file may have the same name as the folder.
            if info.id is None or info.kind != "directory" or not is_covered(info):
                return None
            parents.append((info.path, info.id))
            above = folder_of(info.path)
            entry = self._objects.known(above) if above else None
            if above and (entry is None or entry.info is None):
                return None
            info = None if entry is None else entry.info
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
        return self._objects.store.feed(self._objects.identity, _part_of(path))

    def _is_fresh(self, feed: FeedPosition | None) -> bool:
        lifetime_s = self._objects.lifetime_s
        return feed is not None and is_fresh(feed.checked_at, clock.now(), lifetime_s=lifetime_s)

    async def _advance(self, part: str) -> None:
        """Poll or start a feed, unless another caller in this or another process has done so meanwhile."""
        objects, engine = self._objects, self._objects.engine
        lock = hash_of(f"change feeds at {objects.identity}", part)
        if not await engine.take_lock(lock, within_s=_WAIT_S):
            return  # asking the origin directly is cheaper than waiting longer
        try:
            if self._may_follow(part) and not self._is_fresh(feed := self._feed(part)):
                await answer_of(objects, partial(self._ask, part, feed), part, lambda: None)
        except OriginUnreachable:
            pass  # what is cached is served without asking again
        except CachedFSError as error:  # a feed only saves requests: go on without it
            logger.info("%s: the change feed failed: %s", objects.url(part), error)
            self._not_before[part] = time.monotonic() + max(_PAUSE_S, objects.lifetime_s)
        finally:
            engine.cache.locks.release(lock)

    async def _ask(self, part: str, feed: FeedPosition | None) -> None:
        """Ask for the changes since `feed`; start again without one, or if it cannot continue."""
        objects, now = self._objects, clock.now()
        store, identity, ask = objects.store, objects.identity, objects.origin(part).changes
        if feed is not None:
            if (changes := await ask(part, feed.token)) is not None:
                await asyncio.to_thread(store.follow_feed, identity, feed, changes, checked_at=now)
                return
            await asyncio.to_thread(store.remove_feed, feed)
        if (first := await ask(part, None)) is not None:
            await asyncio.to_thread(store.begin_feed, identity, part, first.token, now)
        if first is None or self._feed(part) is None:
            self._not_before[part] = math.inf


def is_covered(info: ObjectInfo) -> bool:
    """Return whether the feed of its part reports all changes of the metadata of an item.

    False for shortcuts, and with `same_name`: the others of this name have no entries, and where an item without one was
    before a change is unknown.
    """
    return "shortcut" not in info.details and "same_name" not in info.details


def _part_of(path: str) -> str:
    return path.partition("/")[0]
