"""The metadata that all processes of a machine share: entries, listings, change feeds and change counters."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cachedfs.cache.change_counters import ChangeCounters, slots_of
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.database import IndexRows
from cachedfs.cache.index.metadata_records import (
    FeedPosition,
    FeedSnapshot,
    ListedName,
    ListingRecord,
    MetadataRecord,
    folder_of,
    is_within,
)
from cachedfs.cache.index.metadata_rows import Sweep
from cachedfs.cache.index.schema import Totals
from cachedfs.common.clock import boot_number, clock
from cachedfs.common.types import Change, Changes, ObjectInfo
from cachedfs.common.urls import is_url, stored_path
from cachedfs.errors import CacheError

__all__ = ["MetadataStore", "overtaken"]

_SWEEP_S, _SWEEP_N = 60.0, 500  # old metadata is removed after this time, or when so many entries were added
_SAME_CLOCK_US = 1_000_000  # clocks that differ less are not written


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


def _at(path: str, record: MetadataRecord) -> MetadataRecord:
    """Return the entry at another form of its path."""
    if path == record.path:
        return record
    return record._replace(path=path, info=record.info and replace(record.info, path=path))


def _share_clock(totals: Totals) -> None:
    """Learn the clock of other processes in this boot of the machine, or set ours in `totals` if it is ahead."""
    boot = boot_number()
    if boot is None:
        return
    ours = int(clock.offset * 1e6) if clock.offset > 0 else 0
    theirs = totals.clock_us if totals.boot == boot else 0
    if theirs > ours:
        clock.advance(theirs / 1e6)
    elif ours > theirs + _SAME_CLOCK_US:
        totals.boot, totals.clock_us = boot, ours


class MetadataStore:
    """The shared metadata: rows of the SQLite index, and change counters in shared files.

    A query returns None if the index cannot be read. A failed store raises CacheError.
    """

    slots_of = staticmethod(slots_of)

    def __init__(self, own: CacheDirectory, counters: ChangeCounters) -> None:
        self._own, self.counters = own, counters
        # Without a further call: these are used at every read.
        self.counter, self.listing_counter = counters.counter, counters.listing_counter
        self.counter_at, self.changed_at, self.epoch = counters.at, counters.changed_at, counters.epoch
        self.changed, self.overtaken = counters.changed, counters.overtaken
        self._sweep = Sweep()
        self._has_clock = False
        # Our clock and that of the other processes when they were last compared.
        self._clock_seen: object = None
        # What the table `versions` would hold, had it been stored: by (identity, folder).
        self._unstored: dict[tuple[str, str], float] = {}

    @property
    def sees_other_processes(self) -> bool:
        """True if changes by other processes are noticed: the change counters are in a shared file."""
        return not self.counters.is_private

    def look(self) -> float:
        """Once a second, use the shared files that other processes use now; return when to look again (monotonic)."""
        self._own.look()
        if not self._has_clock:
            self._has_clock = True
            self._own.query(lambda rows: _share_clock(rows.load_totals()), None)
        return self._own.look_at

    # Metadata entries and listings

    def lookup(self, identity: str, path: str) -> MetadataRecord | None:
        """Return the newest metadata of `path`; the caller compares its change counter with the current one."""
        return self.find(identity, path)[0]

    def find(self, identity: str, path: str) -> tuple[MetadataRecord | None, ListedName | None]:
        """Return the newest metadata of `path`, and what the listing of its folder says of it, in one query.

        The caller compares both change counters with the current ones.
        """
        stored = stored_path(path) if "://" in path else path
        nothing: tuple[MetadataRecord | None, ListedName | None] = None, None
        found, listed = self._own.query(lambda rows: rows.find(identity, stored), nothing)
        return found if found is None or stored == path else _at(path, found), listed

    def keep_records(self, records: Sequence[MetadataRecord]) -> None:
        """Store metadata entries, each replacing an older one of its path. Raises CacheError."""
        if not records:
            return
        if any("://" in record.path for record in records):
            records = [_at(stored_path(record.path), record) for record in records]
        try:
            with self._own.writing("metadata cannot be stored") as rows:
                rows.keep_records(records, clock.now())
                self._sweep.added += len(records)
                seen = clock.offset, rows.totals.clock_us, self._sweep.added < _SWEEP_N
                if seen != self._clock_seen or time.monotonic() >= self._sweep.due_at:
                    self._finish(rows)
        except CacheError:
            for each in records:
                self._remember(each.identity, folder_of(each.path), each.new_at)
            raise

    def _finish(self, rows: IndexRows) -> None:
        """Share the clock, and now and then remove old metadata."""
        _share_clock(rows.totals)
        self._clock_seen = clock.offset, rows.totals.clock_us, True
        if self._sweep.added >= _SWEEP_N or time.monotonic() >= self._sweep.due_at:
            self._sweep.due_at = time.monotonic() + _SWEEP_S
            rows.remove_old(time.time(), self._sweep)

    def _remember(self, identity: str, folder: str, at: float | None) -> None:
        """Keep the time of a new version in memory if it cannot be stored: older listings may lack objects."""
        if at is not None:
            key = identity, folder
            self._unstored[key] = max(at, self._unstored.get(key, at))

    def listing(self, identity: str, folder: str) -> ListingRecord | None:
        """Return the children in the last listing of `folder`, ignoring newer metadata of single children."""
        return self._own.query(lambda rows: rows.listing(identity, folder), None)

    def listing_size(self, identity: str, folder: str, *, most: int) -> int | None:
        """Return the number of children in the listing of `folder`, counted up to `most`; None without a listing.

        The listing may be of any age.
        """
        return self._own.query(lambda rows: rows.listing_size(identity, folder, most), None)

    def keep_listings(
        self,
        identity: str,
        listings: Mapping[str, Sequence[ObjectInfo]],
        *,
        checked_at: float,
        counters: Mapping[str, int],
        folder_counters: Mapping[str, int],
        watch: FeedSnapshot | None = None,
    ) -> None:
        """Store complete listings (all direct children) by folder. Raises CacheError.

        `counters` holds the change counters of the children by path; a child without one is listed but answers no lookup.
        `folder_counters` holds the counters of the listings by folder. All were read before the request to the origin.
        `watch` is given for a single listing only.
        """
        try:
            with self._own.writing("listings cannot be stored") as rows:
                for folder, infos in listings.items():
                    if is_url(folder) and any(info.path != stored_path(info.path) for info in infos):
                        continue  # names in it contain secrets
                    new_at = rows.keep_listing(
                        identity,
                        folder,
                        infos,
                        checked_at=checked_at,
                        counter=folder_counters[folder],
                        counters=counters,
                        watch=watch,
                    )
                    if new_at is not None:
                        rows.keep_version(identity, folder, new_at, clock.now())
                self._sweep.added += sum(map(len, listings.values()))
                self._finish(rows)
        except CacheError:
            for folder in listings:
                self._remember(identity, folder, clock.now())
            raise

    def newest_version(self, identity: str, folder: str) -> float:
        """Return the time by which the newest known version of an object in `folder`, or in a folder above it, existed.

        An older listing of `folder` may lack objects that belong to that version.
        """
        stored = stored_path(folder)
        newest = self._own.query(lambda rows: rows.newest_version(identity, stored), math.inf)
        unstored = list(self._unstored.items())
        above = (at for (origin, each), at in unstored if origin == identity and is_within(stored, each))
        return max([newest, *above])

    # Change feeds: the origin's own list of what changed

    def feed(self, identity: str, part: str) -> FeedPosition | None:
        """Return the stored position of the change feed of `part` of an origin; None without one."""
        if not self.sees_other_processes:
            return None  # the rows are shared, but other processes would not see our change counters
        return self._own.query(lambda rows: rows.feed(identity, part), None)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Store where a change feed begins, unless it is stored already. Raises CacheError."""
        with self._own.writing("a change feed cannot be stored") as rows:
            rows.begin_feed(identity, part, token, checked_at)

    def follow_feed(self, identity: str, feed: FeedPosition, changes: Changes, *, checked_at: float) -> None:
        """Invalidate what `changes` since `feed` made stale; the rest counts as checked at `checked_at`.

        Safe to repeat, and in two processes at once. Raises CacheError; then nothing counts as checked.
        """
        old: set[str] = set()
        folders: set[str] = set()
        with self._own.writing("changes cannot be stored") as rows:
            now = rows.feed_by_id(identity, feed.id)
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
            rows.advance_feed(
                identity, FeedPosition(now.id, token, checked_at, now.number + bool(changes.items))
            )

    def _outdated(
        self, rows: IndexRows, identity: str, feed: FeedPosition, change: Change
    ) -> tuple[set[str], list[str]]:
        """Return the paths whose stored metadata a change made stale, and those of the changed item if it is a folder."""
        here = {
            f"{folder}/{name}": change.info
            for id, name in change.places
            for folder in rows.folders_of(identity, feed, id)
        }
        stored = {
            path: [
                info for info, of, at in rows.stored_at(identity, path) if self.counter(identity, of) == at
            ]
            for path in {*rows.paths_of(identity, change.id), *here}
        }
        return overtaken(stored, here), rows.folders_of(identity, feed, change.id)

    def drop_feed(self, feed: FeedPosition) -> None:
        """Delete a change feed that cannot continue. Raises CacheError."""
        with self._own.writing("a change feed cannot be removed") as rows:
            rows.remove_feed(feed)
