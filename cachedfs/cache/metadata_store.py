"""What does not hold any more after an item changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedPosition,
    FeedSnapshot,
    ListingRecord,
    MetadataRecord,
)
from cachedfs.cache.index.metadata_rows import MetadataRows, SweepPosition
from cachedfs.cache.mapped_files import MappedFiles
from cachedfs.cache.shared_memory import ChangeCounters
from cachedfs.cache.writable_directory import WritableDirectory
from cachedfs.common.types import Changes, ObjectInfo

__all__ = ["MetadataStore", "follow", "overtaken"]


def overtaken(
    stored: Mapping[str, Sequence[ObjectInfo | None]], now: Mapping[str, ObjectInfo | None]
) -> set[str]:
    """Return the paths of which something is stored that may not hold any more.

    `stored` has all that is stored of every path where an item was or is, `now` what it is at those where it is now. Where
    all of it says the same, nothing happened that anybody asked about: a comment, a share.
    """
    return {
        path
        for path, infos in stored.items()
        if any(not _is_same(info, now.get(path), path) for info in infos)
    }


def _is_same(info: ObjectInfo | None, now: ObjectInfo | None, path: str) -> bool:
    if info is None or now is None:
        return False  # absent: but another of that name may have come to light
    return info == replace(now, path=path) and dict(info.details) == dict(now.details)


def follow(
    rows: MetadataRows,
    identity: str,
    feed: FeedPosition,
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
    rows.advance_feed(identity, FeedPosition(now.id, token, checked_at, now.number + bool(changes.items)))


class MetadataStore:
    """What all processes of a machine know: rows of the index, and change marks in shared memory.

    What is asked has no answer where the index fails; what cannot be kept is a CacheError.
    """

    def __init__(self, own: WritableDirectory, mapped: MappedFiles) -> None:
        self._own = own
        self._mapped = mapped
        self._sweep = SweepPosition()

    # Facts and listings

    def lookup(self, identity: str, path: str) -> MetadataRecord | None:
        """Return what was learnt last of `path`; the caller compares its mark with the path's mark of now."""
        self._own.look()
        return self._own.asked(lambda rows: rows.lookup(identity, path), None)

    def keep_records(self, facts: Sequence[MetadataRecord]) -> None:
        """Store facts, each instead of an older one of its path. Raises CacheError."""
        if not facts:
            return
        with self._own.writing("facts cannot be kept") as rows:
            rows.keep_records(facts)
            self._sweep = rows.forget_old(time.time(), added=len(facts), sweep=self._sweep)

    def listing(self, identity: str, folder: str) -> ListingRecord | None:
        """Return the children that the last listing of `folder` gave, whatever was learnt of one of them since."""
        self._own.look()
        return self._own.asked(lambda rows: rows.listing(identity, folder), None)

    def listing_has(
        self, identity: str, folder: str, path: str
    ) -> tuple[float, int, bool, FeedConfirmation | None] | None:
        """Return checked_at and mark of the listing of `folder`, whether it had `path`, and `told`; None: never listed."""
        self._own.look()
        return self._own.asked(lambda rows: rows.listing_has(identity, folder, path), None)

    def listing_size(self, identity: str, folder: str, *, most: int) -> int | None:
        """Return how many children the listing of `folder` names, of whatever age, counted up to `most`; None without one."""
        return self._own.asked(lambda rows: rows.listing_size(identity, folder, most), None)

    def keep_listings(
        self,
        identity: str,
        listings: Mapping[str, Sequence[ObjectInfo]],
        *,
        checked_at: float,
        marks: Mapping[str, int],
        folder_marks: Mapping[str, int],
        watch: FeedSnapshot | None = None,
    ) -> None:
        """Store complete listings: all direct children, by folder. Raises CacheError.

        `marks` has the children's own marks by path (a child without one is listed, but answers no lookup),
        `folder_marks` the listing marks of the folders; all read before the origin was asked. `watch`: of a single one.
        """
        with self._own.writing("listings cannot be kept") as rows:
            for folder, infos in listings.items():
                mark = folder_marks[folder]
                rows.keep_listing(
                    identity, folder, infos, checked_at=checked_at, mark=mark, marks=marks, watch=watch
                )
            added = sum(map(len, listings.values()))
            self._sweep = rows.forget_old(time.time(), added=added, sweep=self._sweep)

    # Feeds of changes: what an origin tells by itself

    def feed(self, identity: str, part: str) -> FeedPosition | None:
        """Return where the feed of one part of an origin was left; None when there is none."""
        self._own.look()
        if self._mapped.open_marks().is_private:
            return None  # others, whom what it tells would not reach, share its rows
        return self._own.asked(lambda rows: rows.feed(identity, part), None)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Remember where a feed begins, unless it did before. Raises CacheError."""
        with self._own.writing("no feed can be kept") as rows:
            rows.begin_feed(identity, part, token, checked_at)

    def lead_feed(self, identity: str, part: str, token: str, checked_at: float) -> FeedPosition | None:
        """Have the feed of a part begin at this token if it was given earlier than the one that is here; return the feed.

        What was watched from later on is told of once more. None: none can be shared. Raises CacheError.
        REQUIRES: nobody polls the feed meanwhile.
        """
        with self._own.writing("no feed can be kept") as rows:
            rows.begin_feed(identity, part, token, checked_at)
            feed = rows.feed(identity, part)
            if feed is not None and checked_at < feed.checked_at:
                rows.advance_feed(identity, feed._replace(token=token, checked_at=checked_at))
        return self.feed(identity, part)

    def follow_feed(self, identity: str, feed: FeedPosition, changes: Changes, *, checked_at: float) -> None:
        """Forget what `changes` since `feed` made old; all else that was watched counts as checked at `checked_at`.

        May be done twice, and by two processes at once. Raises CacheError, and then nothing counts as checked.
        """
        with self._own.writing("changes cannot be followed") as rows:
            follow(
                rows,
                identity,
                feed,
                changes,
                checked_at=checked_at,
                mark=partial(self.mark, identity),
                forget=partial(self.overtaken, identity),
            )

    def drop_feed(self, feed: FeedPosition) -> None:
        """Forget a feed that cannot go on. Raises CacheError."""
        with self._own.writing("a feed cannot be dropped") as rows:
            rows.drop_feed(feed)

    # Change marks: shared memory, no SQLite

    def mark(self, identity: str, path: str) -> int:
        """Return the change mark of `path`: another number after something happened to it, in any process."""
        marks = self._mapped.open_marks()
        return marks.at(marks.slots_of(identity, path))

    def listing_mark(self, identity: str, folder: str) -> int:
        """Return the change mark of the listing of `folder`: another number after something happened below it."""
        marks = self._mapped.open_marks()
        return marks.at(marks.listing_slots_of(identity, folder))

    def changed_at(self, identity: str, path: str) -> int:
        """Return the second in which something happened to `path` last, as far as this cache saw; 0 for nothing.

        A folder's name with "/" is its listing. Other paths may share what this is read from: it may be too late, never too early.
        """
        marks = self._mapped.open_marks()
        return marks.changed_at(marks.slots_of(identity, path))

    def epoch(self, identity: str) -> int:
        """Return a number that is another one after any change at this origin."""
        return self._mapped.open_marks().epoch(identity)

    def changed(self, identity: str, paths: Iterable[str], *, tree: bool = False) -> None:
        """Change the marks of `paths` and of everything above them; with `tree` of everything below them too."""
        paths = list(paths)
        self._change(lambda marks: marks.change(identity, paths, tree=tree))

    def overtaken(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the marks of `paths`, of the listings that name them, and of all below `folders`; of nothing above."""
        paths, folders = list(paths), list(folders)
        self._change(lambda marks: marks.change_alone(identity, paths, folders))

    def _change(self, change: Callable[[ChangeCounters], None]) -> None:
        before = self._mapped.open_marks()
        change(before)
        # Somebody may have deleted the file that we have mapped, and others may have a new one already.
        self._own.look_now()
        if self._mapped.open_marks() is not before:
            change(self._mapped.open_marks())

    def mark_slots(self, identity: str, path: str) -> tuple[int, ...]:
        """Return what `mark_at` wants; the same in every process, for ever. A folder's name with "/" is its listing."""
        return self._mapped.open_marks().slots_of(identity, path)

    def mark_at(self, slots: tuple[int, ...]) -> int:
        """Return the mark whose slots these are."""
        return (self._mapped.marks or self._mapped.open_marks()).at(slots)
