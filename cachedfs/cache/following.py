"""What follows from a poll of a feed of changes. It only forgets: nothing that a feed says is ever stored as a fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cachedfs.cache.fact_rows import FactRows
from cachedfs.cache.facts import Feed
from cachedfs.common.types import Changes
from cachedfs.plan.changes import overtaken

__all__ = ["follow"]


def follow(
    rows: FactRows,
    identity: str,
    feed: Feed,
    changes: Changes,
    *,
    checked_at: float,
    mark: Callable[[str], int],
    forget: Callable[[Iterable[str], Iterable[str]], None],
) -> None:
    """Forget what `changes` since `feed` made old, and have all else that the feed watches count as checked.

    `mark` returns a change mark, `forget` is given paths, and folders below which nothing counts any more.
    REQUIRES: one transaction around it. Who dies in it has forgotten something too much, and asks for the same again.
    """
    now = rows.feed_by_id(identity, feed.id)
    if now is None:
        return  # it was dropped meanwhile, and what it watched with it
    old: set[str] = set()
    folders: set[str] = set()
    for change in changes.items:
        ways = rows.folders_of(identity, feed, change.id)
        here = {
            f"{folder}/{name}": change.info
            for id, name in change.places
            for folder in rows.folders_of(identity, feed, id)
        }
        stored = {
            path: [info for info, of, at in rows.stored_at(identity, path) if mark(of) == at]
            for path in {*rows.paths_of(identity, change.id), *here}
        }
        old |= overtaken(stored, here)
        # A folder may have been out of sight for a while, and all below it with it, without a word about that. Not
        # the one at the top.
        folders.update(way for way in ways if "/" in way or change.info is None)
    if old or folders:
        forget(old, folders)
    # Another process may have asked from the same token. What it was told is the same, perhaps more.
    token = changes.token if now.token == feed.token else now.token
    rows.advance_feed(identity, Feed(now.id, token, checked_at, now.number + bool(changes.items)))
