"""Change feeds in the index: how far each was followed, and which stored metadata a change makes stale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cachedfs.cache.change_counters import ChangeCounters, slots_of
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedPosition,
    FeedSnapshot,
    hash_of,
    sealed,
    unsealed,
)
from cachedfs.cache.index.schema import blob_of, origin_of, text_of
from cachedfs.common.types import Change, Changes, ObjectInfo
from cachedfs.common.urls import folder_of

STORED = """SELECT NULL, info, checked_at, change_counter, feed, folder_hash FROM metadata WHERE origin = ? AND path = ?
    UNION ALL SELECT listings.change_counter, children.info, checked_at, children.change_counter, feed, folder_hash
    FROM listings LEFT JOIN children ON children.listing = listings.id AND children.path = ?
    WHERE origin = ? AND folder = ?"""
"""Finds what is stored of a path: its own entry, and the listing of its folder with the path as a child.

In each row: the change counter of the listing, or None for the entry; the sealed info, or None if the listing lacks the
path; the time; the change counter of the path, or None without one; the feed, and the hash of the folder.
"""
_FEED = "SELECT id, token, checked_at, number FROM feeds "
_PATHS = "SELECT path FROM metadata WHERE item_hash = ? UNION SELECT path FROM children WHERE item_hash = ?"


def overtaken(
    stored: Mapping[str, Sequence[ObjectInfo | None]], now: Mapping[str, ObjectInfo | None]
) -> set[str]:
    """Return the paths whose stored metadata may be stale.

    `stored` holds all stored metadata of each path where an item was or is now. `now` holds the current metadata at the
    paths where it is now. If all of it is equal, nothing relevant changed (perhaps only a comment or a share).
    """
    return {
        path
        for path, infos in stored.items()
        if any(not _is_same(info, now.get(path), path) for info in infos)
    }


def _is_same(info: ObjectInfo | None, now: ObjectInfo | None, path: str) -> bool:
    if info is None or now is None:
        return False  # absent: another item of that name may have become visible
    return info == replace(now, path=path) and dict(info.details) == dict(now.details)


class FeedStore:
    """The change feeds of all origins, and what is watched by them. Methods that write raise CacheError."""

    slots_of = staticmethod(slots_of)

    def __init__(self, own: CacheDirectory, counters: ChangeCounters) -> None:
        self._own, self.counters = own, counters
        # Without a further call: these are used at every read.
        self.counter, self.listing_counter = counters.counter, counters.listing_counter
        self.counter_at, self.changed_at, self.epoch = counters.at, counters.changed_at, counters.epoch
        self.changed, self.overtaken = counters.changed, counters.overtaken

    @property
    def sees_other_processes(self) -> bool:
        """True if changes by other processes are noticed: the change counters are in a shared file."""
        return not self.counters.is_private

    def feed(self, identity: str, part: str) -> FeedPosition | None:
        """Return the stored position of the change feed of `part` of an origin; None without one."""
        if not self.sees_other_processes:
            return None  # the rows are shared, but other processes would not see our change counters
        at = origin_of(identity), blob_of(part)
        return self._own.query(lambda rows: _feed(rows, identity, "WHERE origin = ? AND part = ?", *at), None)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Store where a change feed begins, unless it is stored already."""
        text = sealed(None, identity, float(checked_at), 0, token) + token
        with self._own.writing("a change feed cannot be stored") as rows:
            rows.run(
                "INSERT OR IGNORE INTO feeds (origin, part, token, checked_at, number) VALUES (?, ?, ?, ?, 0)",
                (origin_of(identity), blob_of(part), text, checked_at),
            )

    def remove_feed(self, feed: FeedPosition) -> None:
        """Delete a change feed that cannot continue; it no longer confirms the metadata that it watched."""
        with self._own.writing("a change feed cannot be removed") as rows:
            rows.run("DELETE FROM feeds WHERE id = ?", (feed.id,))
            rows.run("DELETE FROM folders WHERE feed = ?", (feed.id,))

    def follow_feed(self, identity: str, feed: FeedPosition, changes: Changes, *, checked_at: float) -> None:
        """Invalidate what `changes` since `feed` made stale; the rest counts as checked at `checked_at`.

        Safe to repeat, and in two processes at once. After an error nothing counts as checked.
        """
        old, folders = set[str](), set[str]()
        with self._own.writing("changes cannot be stored") as rows:
            now = _feed(rows, identity, "WHERE id = ?", feed.id)
            if now is None:
                return  # the feed was removed meanwhile, and no longer confirms what it watched
            for change in changes.items:
                paths, above = self._outdated(rows, identity, feed, change)
                old |= paths
                # The feed does not say whether a folder, and everything below it, was invisible for a while.
                # This does not concern the top folder, unless it is gone.
                folders.update(path for path in above if "/" in path or change.info is None)
            if old or folders:
                # After a crash here too much is invalidated, and the same changes are requested again.
                self.overtaken(identity, old, folders)
            # Another process may have polled from the same token. It saw at least these changes.
            token = changes.token if now.token == feed.token else now.token
            number = now.number + bool(changes.items)
            rows.run(
                "UPDATE feeds SET token = ?, checked_at = ?, number = ? WHERE id = ?",
                (
                    sealed(None, identity, float(checked_at), number, token) + token,
                    checked_at,
                    number,
                    now.id,
                ),
            )

    def _outdated(
        self, rows: IndexRows, identity: str, feed: FeedPosition, change: Change
    ) -> tuple[set[str], list[str]]:
        """Return the paths whose stored metadata a change made stale, and those of the changed item if it is a folder."""
        here = {
            f"{folder}/{name}": change.info
            for id, name in change.places
            for folder in _folders(rows, identity, feed, id)
        }
        item = hash_of(identity, change.id)
        found = {text_of(path) for (path,) in rows.run(_PATHS, (item, item))}
        stored = {path: list(self._valid_at(rows, identity, path)) for path in {*found, *here}}
        return overtaken(stored, here), _folders(rows, identity, feed, change.id)

    def _valid_at(self, rows: IndexRows, identity: str, path: str) -> Iterator[ObjectInfo | None]:
        """Yield all valid metadata of `path`: that of its own entry and of the listing of its folder."""
        counter, listing_counter = self.counters.counter, self.counters.listing_counter
        origin, name, folder = origin_of(identity), blob_of(path), blob_of(folder_of(path))
        found = rows.run(STORED, (origin, name, name, origin, folder)).fetchall()
        for of_listing, text, checked_at, own, *watch in found:
            try:
                info = text and unsealed(text, path, identity, path, checked_at, own, *watch)
            except ValueError:  # damaged: as if it were absent
                info = None
            if of_listing is not None and of_listing == listing_counter(identity, folder_of(path)):
                yield info
            if own is not None and own == counter(identity, path):
                yield info

    # What is watched

    def _watched(
        self, rows: IndexRows, identity: str, watch: FeedSnapshot | None
    ) -> tuple[int | None, int | None]:
        """Return the feed that watches a response and the hash of its folder's id, and store the folders above it.

        Returns (None, None) if there is none, or if it may have reported changes of the response already.
        """
        feed = None if watch is None else _feed(rows, identity, "WHERE id = ?", watch.feed)
        if watch is None or feed is None or feed.number != watch.number:
            return None, None
        hashes = {path: hash_of(identity, id) for path, id in watch.way}
        rows.run_many(
            "INSERT OR IGNORE INTO folders VALUES (?, ?, ?)",
            [(watch.feed, item, blob_of(path)) for path, item in hashes.items()],
        )
        return watch.feed, next(iter(hashes.values()), 0)

    def _confirmed(self, identity: str, feed: int | None, folder: int | None) -> FeedConfirmation | None:
        if feed is None or folder is None:
            return None
        now = self._own.query(lambda rows: _feed(rows, identity, "WHERE id = ?", feed), None)
        return now and FeedConfirmation(now.checked_at, folder)


def _feed(rows: IndexRows, identity: str, where: str, *values: object) -> FeedPosition | None:
    """Return the position stored in a row. Raises ValueError if the row is damaged."""
    found = rows.run(_FEED + where, values).fetchone()
    if found is None:
        return None
    id, text, checked_at, number = found
    token = text[8:]
    unsealed(text[:8], "", identity, checked_at, number, token)
    return FeedPosition(id, token, checked_at, number)


def _folders(rows: IndexRows, identity: str, feed: FeedPosition, id: str) -> list[str]:
    """Return the paths of the folder with this id, if it leads to anything that the feed watches."""
    values = feed.id, hash_of(identity, id)
    found = rows.run("SELECT path FROM folders WHERE feed = ? AND item_hash = ?", values)
    return [text_of(path) for (path,) in found]
