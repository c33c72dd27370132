"""The metadata that all processes of a machine share: entries, listings, change feeds and change counters."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cachedfs.cache.change_counters import ChangeCounters
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.feed_store import STORED, FeedStore
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.index.database import TROUBLE
from cachedfs.cache.index.metadata_records import (
    AGELESS,
    FeedSnapshot,
    ListedName,
    ListingRecord,
    MetadataRecord,
    hash_of,
    new_version_at,
    sealed,
    unsealed,
)
from cachedfs.cache.index.schema import Totals, blob_of, origin_of, text_of
from cachedfs.common.clock import boot_number, clock
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of, is_url, stored_path
from cachedfs.errors import CacheError

_SWEEP_S, _SWEEP_N = 60.0, 500  # old metadata is removed after this time, or when so many entries were added
_SAME_CLOCK_US = 1_000_000  # clocks that differ less are not written
_OLDEST_ENTRY_S = 7 * 86400.0
_MOST_ENTRIES = 1_000_000
PART = 1000  # least names in a part of a listing that is requested again: a page of Google Cloud Storage
MOST_PARTS = 8  # of one listing, requested at the same time
_LISTING_TAKES_S = 3600.0  # at most, from its first request until it is stored
_FEW = 512  # entries examined by a removal of old ones, besides twice the number added

_ADD = """INSERT OR IGNORE INTO metadata
    (info, checked_at, change_counter, feed, folder_hash, item_hash, origin, path) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
_UPDATE = """UPDATE metadata
    SET info = ?, checked_at = ?, change_counter = ?, feed = ?, folder_hash = ?, item_hash = ?
    WHERE origin = ? AND path = ? AND checked_at <= ?"""
_LISTING = (
    "SELECT id, checked_at, change_counter, feed, folder_hash FROM listings WHERE origin = ? AND folder = ?"
)
_LISTING_SIZE = """SELECT (SELECT count(*) FROM (SELECT 1 FROM children WHERE listing = listings.id LIMIT ?))
    FROM listings WHERE origin = ? AND folder = ?"""
_CHILD_AT = """SELECT path FROM children WHERE listing = (SELECT id FROM listings WHERE origin = ? AND folder = ?)
    ORDER BY path LIMIT 1 OFFSET ?"""
_CHILDREN = "SELECT path, info, change_counter FROM children WHERE listing = ? ORDER BY path"
_ADD_LISTING = """INSERT INTO listings (origin, folder, checked_at, change_counter, feed, folder_hash)
    VALUES (?, ?, ?, ?, ?, ?)"""
_ADD_CHILD = "INSERT INTO children (listing, path, info, change_counter, item_hash) VALUES (?, ?, ?, ?, ?)"
# Children of one listing that are files, and not equal in another one; the first 8 characters are checksums.
_NEW_FILES = """SELECT 1 FROM children AS new WHERE listing = ? AND substr(info, 9, 7) = '["file"' AND NOT EXISTS (
    SELECT 1 FROM children AS old WHERE old.listing = ? AND old.path = new.path
    AND substr(old.info, 9) = substr(new.info, 9)) LIMIT 1"""
# Times before those of all listings are not needed.
_ADD_VERSION = """INSERT INTO versions SELECT ?, ?, ?
    WHERE ? > min(?, (SELECT coalesce(min(checked_at), 1e99) FROM listings))
    ON CONFLICT DO UPDATE SET known_at = max(known_at, excluded.known_at)"""
_NEWEST = "SELECT known_at FROM versions WHERE origin = ? AND folder = ?"
_OLD_VERSIONS = """DELETE FROM versions
    WHERE known_at <= min(?, (SELECT coalesce(min(checked_at), 1e99) FROM listings))"""
_OLD_ENTRIES = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM blocks WHERE blocks.origin = metadata.origin AND blocks.path = metadata.path)
    FROM metadata WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""
_NEWER = """SELECT path FROM metadata WHERE origin = ? AND checked_at > ?
    AND path IN (SELECT CAST(value AS BLOB) FROM json_each(?))"""
# "0" is the character after "/": all paths below the folder are between the two.
_OLD_LISTINGS = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM blocks WHERE blocks.origin = listings.origin
        AND blocks.path > CAST(folder || '/' AS BLOB) AND blocks.path < CAST(folder || '0' AS BLOB))
    FROM listings WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""
_REMOVED = "SELECT min(listing) FROM removed_listings"
_REMOVE_CHILDREN = f"""DELETE FROM children WHERE listing = ({_REMOVED})
    AND path IN (SELECT path FROM children WHERE listing = ({_REMOVED}) LIMIT ?)"""


def _as_stored(record: MetadataRecord) -> MetadataRecord:
    """Return the entry at the form of its path that is stored."""
    path = stored_path(record.path)
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


class MetadataStore(FeedStore):
    """The shared metadata: rows of the SQLite index, and change counters in shared files.

    A query returns None if the index cannot be read. A failed store raises CacheError.
    """

    def __init__(self, own: CacheDirectory, counters: ChangeCounters) -> None:
        super().__init__(own, counters)
        self._has_clock = False
        # What the table `versions` would hold, had it been stored: by (identity, folder).
        self._unstored: dict[tuple[str, str], float] = {}
        # Old metadata is removed now and then: when, entries added since, and the (checked_at, id) examined last.
        self._sweep_at, self._n_added = 0.0, 0
        self._last_entry = self._last_listing = (0.0, 0)

    def look(self) -> float:
        """Once a second, use the shared files that other processes use now; return when to look again (monotonic)."""
        self._own.look()
        if not self._has_clock:
            self._has_clock = True
            self._own.query(lambda rows: _share_clock(rows.load_totals()), None)
        return self._own.look_at

    # Entries

    def lookup(self, identity: str, path: str) -> MetadataRecord | None:
        """Return the newest metadata of `path`; the caller compares its change counter with the current one."""
        return self.find(identity, path)[0]

    def find(self, identity: str, path: str) -> tuple[MetadataRecord | None, ListedName | None]:
        """Return the newest metadata of `path`, and what the listing of its folder says of it, in one query.

        The metadata is from the path's own entry, or from that listing. The listing is None if there is none. The caller
        compares both change counters with the current ones.
        """
        stored = stored_path(path) if "://" in path else path
        newest, listed = None, None
        origin, name, folder = origin_of(identity), blob_of(stored), blob_of(stored.rpartition("/")[0])
        values = origin, name, name, origin, folder
        found: list[Any] = self._own.query(lambda rows: rows.run(STORED, values).fetchall(), [])
        try:
            for of_listing, text, at, counter, *watch in found:
                confirmed = self._confirmed(identity, *watch)
                if of_listing is not None:
                    listed = ListedName(float(at), of_listing, text is not None, confirmed)
                if counter is not None and (newest is None or newest.checked_at < at):
                    info = unsealed(text, path, identity, stored, at, counter, *watch)
                    newest = MetadataRecord(identity, path, info, at, counter, confirmation=confirmed)
        except TROUBLE:  # a row is damaged
            return None, None
        return newest, listed

    def newer_than(self, at: float, identity: str, paths: Iterable[str]) -> set[str]:
        """Return those of `paths` that have an entry of their own from after `at`; one query for all of them."""
        values = origin_of(identity), at, json.dumps(list(map(stored_path, paths)))
        found: list[Any] = self._own.query(lambda rows: rows.run(_NEWER, values).fetchall(), [])
        return {text_of(row[0]) for row in found}

    def keep_records(self, records: Sequence[MetadataRecord], *, waits: bool = False) -> None:
        """Store metadata entries, each replacing an older one of its path. Raises CacheError. `waits`: as in `writing`."""
        try:
            with self._own.writing("metadata cannot be stored", waits=waits) as rows:
                self.add_records(rows, records)
        except CacheError:
            for each in map(_as_stored, records):
                if each.new_at is not None:
                    self._keep_unstored({(each.identity, folder_of(each.path)): each.new_at})
            raise

    def add_records(self, rows: IndexRows, records: Sequence[MetadataRecord]) -> None:
        """Store metadata entries in a transaction; if that fails, `keep_records` is to store them."""
        added, new = [], dict[tuple[str, str], float]()
        for record in records:
            record = _as_stored(record) if "://" in record.path else record
            identity, path, info, at, counter, watch, _, new_at = record
            if new_at is not None:
                key = identity, path.rpartition("/")[0]
                new[key] = max(new_at, new.get(key, new_at))
            watched = self._watched(rows, identity, watch) if watch else (None, None)
            item = _item_of(identity, info) if watched[0] is not None else None
            text = sealed(info, identity, path, float(at), counter, *watched)
            added.append((text, at, counter, *watched, item, origin_of(identity), blob_of(path)))
        n_added = rows.run_many(_ADD, added).rowcount
        rows.totals.entries += n_added
        if n_added < len(added):
            rows.run_many(_UPDATE, [(*row, row[1]) for row in added])
        self._end(rows, len(records), new)

    def _end(self, rows: IndexRows, n_added: int, new: Mapping[tuple[str, str], float]) -> None:
        """Store the times of new versions at the end of a transaction. Now and then, remove old metadata."""
        if new:
            now = clock.now() - _LISTING_TAKES_S
            values = [(origin_of(each), blob_of(at), t, t, now) for (each, at), t in new.items()]
            rows.run_many(_ADD_VERSION, values)
        if clock.offset > 0 and abs(clock.offset * 1e6 - rows.totals.clock_us) > _SAME_CLOCK_US:
            _share_clock(rows.totals)
        self._n_added += n_added
        if self._n_added >= _SWEEP_N or time.monotonic() >= self._sweep_at:
            self._remove_old(rows, time.time())

    def _keep_unstored(self, new: Mapping[tuple[str, str], float]) -> None:
        """Keep times of new versions in memory that could not be stored: older listings may lack objects."""
        for key, at in new.items():
            self._unstored[key] = max(at, self._unstored.get(key, at))

    # Listings

    def listing(self, identity: str, folder: str, *, with_infos: bool = True) -> ListingRecord | None:
        """Return the last listing of `folder`, ignoring newer metadata of its children; these can be left out."""
        found = self._own.query(lambda rows: _listing(rows, identity, folder, with_infos), None)
        if found is None:
            return None
        infos, counters, checked_at, counter, *watch = found
        return ListingRecord(infos, checked_at, counter, self._confirmed(identity, *watch), counters)

    def listing_size(self, identity: str, folder: str, *, most: int) -> int | None:
        """Return the number of children in the listing of `folder`, counted up to `most`; None without a listing.

        The listing may be of any age.
        """
        at = origin_of(identity), blob_of(folder)
        found = self._own.query(lambda rows: rows.run(_LISTING_SIZE, (most, *at)).fetchone(), None)
        return None if found is None else int(found[0])

    def cuts(self, identity: str, folder: str) -> list[str]:
        """Return some paths in the listing of `folder`, in order, with about as many names between each two.

        They cut it into at most MOST_PARTS parts, of PART names or more. The listing may be of any age; without one there
        are none.
        """
        n = self.listing_size(identity, folder, most=_MOST_ENTRIES) or 0
        at = origin_of(identity), blob_of(folder)
        offsets = range(n)[:: max(PART, -(-n // MOST_PARTS))][1:]
        found: list[Any] = self._own.query(
            lambda rows: [rows.run(_CHILD_AT, (*at, offset)).fetchone() for offset in offsets], []
        )
        return [text_of(row[0]) for row in found if row is not None]

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
        new = dict[tuple[str, str], float]()
        try:
            with self._own.writing("listings cannot be stored") as rows:
                for folder, infos in listings.items():
                    if is_url(folder) and any(info.path != stored_path(info.path) for info in infos):
                        continue  # names in it contain secrets
                    watched = self._watched(rows, identity, watch)
                    at = checked_at, folder_counters[folder], *watched
                    new_at = self._keep_listing(rows, identity, folder, infos, at, counters)
                    if new_at is not None:
                        new[identity, folder] = new_at
                self._end(rows, sum(map(len, listings.values())), new)
        except CacheError:
            self._keep_unstored(dict.fromkeys(((identity, folder) for folder in listings), clock.now()))
            raise

    def _keep_listing(
        self,
        rows: IndexRows,
        identity: str,
        folder: str,
        infos: Sequence[ObjectInfo],
        at: tuple[float, int, int | None, int | None],
        counters: Mapping[str, int],
    ) -> float | None:
        """Store all children of `folder`, replacing an older listing, whose children later writes delete.

        Return the time by which the newest object that was not known before existed; None without one.
        """
        checked_at, _, *watched = at
        place = origin_of(identity), blob_of(folder)
        found = rows.run(_LISTING, place).fetchone()
        if found is not None:
            _remove_listing(rows, found[0])
        listing = rows.run(_ADD_LISTING, (*place, *at)).lastrowid
        children = {info.path: (info, counters.get(info.path)) for info in infos}
        rows.run_many(
            _ADD_CHILD,
            (
                (
                    listing,
                    blob_of(path),
                    sealed(info, identity, path, float(checked_at), own, *watched),
                    own,
                    None if watched[0] is None else _item_of(identity, info),
                )
                for path, (info, own) in children.items()
            ),
        )
        rows.totals.entries += len(children)
        if found is not None:
            has_new = rows.run(_NEW_FILES, (listing, found[0])).fetchone()
            return checked_at if has_new else None
        made = (new_version_at(info, None, checked_at, is_first=True) for info in infos)
        return max((at for at in made if at is not None), default=None)

    def newest_version(self, identity: str, folder: str) -> float:
        """Return the time by which the newest known version of an object in `folder`, or in a folder above it, existed.

        An older listing of `folder` may lack objects that belong to that version. It is 0 if all are older than every
        listing.
        """
        names = [stored_path(folder)]
        while names[-1]:
            names.append(folder_of(names[-1]))
        keys = [(origin_of(identity), blob_of(name)) for name in names]
        newest = self._own.query(
            lambda rows: max([0.0, *(at for key in keys for (at,) in rows.run(_NEWEST, key))]), math.inf
        )
        return max([newest, *(self._unstored.get((identity, name), 0.0) for name in names)])

    # What is removed

    def _remove_old(self, rows: IndexRows, now_s: float) -> None:
        """Delete some old or surplus entries, and children of removed listings; examine more rows than were added.

        Metadata of objects with cached blocks stays, so that they can be read offline. Entries that stay are not
        examined again before all others.
        """
        too_many = rows.totals.entries > _MOST_ENTRIES
        limit = now_s if too_many else now_s - _OLDEST_ENTRY_S
        n, few = _FEW + 2 * self._n_added, 1 if too_many else _FEW
        self._n_added, self._sweep_at = 0, time.monotonic() + _SWEEP_S
        least = (0.0, 0) if too_many else (AGELESS, 1 << 62)
        entries = rows.run(_OLD_ENTRIES, (limit, *max(least, self._last_entry), n)).fetchall()
        listings = rows.run(_OLD_LISTINGS, (limit, *max(least, self._last_listing), few)).fetchall()
        self._last_entry, self._last_listing = _reached(entries, n), _reached(listings, few)
        old = [(id,) for id, _, has_blocks in entries if not has_blocks]
        rows.run_many("DELETE FROM metadata WHERE id = ?", old)
        for listing, _, has_blocks in listings:
            if not has_blocks:
                _remove_listing(rows, listing)
        n_children = rows.run(_REMOVE_CHILDREN, (n,)).rowcount
        if not n_children:
            rows.run(f"DELETE FROM removed_listings WHERE listing = ({_REMOVED})")
        rows.totals.entries -= len(old) + n_children
        rows.run(_OLD_VERSIONS, (now_s - _LISTING_TAKES_S,))


def _reached(rows: list[Any], limit: int) -> tuple[float, int]:
    """Return where the next search starts: after these rows, or at the beginning after the last ones."""
    return (rows[-1][1], rows[-1][0]) if len(rows) == limit else (0.0, 0)


def _listing(rows: IndexRows, identity: str, folder: str, with_infos: bool) -> tuple[Any, ...] | None:
    """Return the children in a listing, their change counters, and the columns of the listing after its id."""
    found = rows.run(_LISTING, (origin_of(identity), blob_of(folder))).fetchone()
    if found is None:
        return None
    id, checked_at, counter, *watch = found
    infos, counters = list[ObjectInfo](), dict[str, int]()
    for name, text, own in rows.run(_CHILDREN, (id,)) if with_infos else ():
        path = text_of(name)
        if (info := unsealed(text, path, identity, path, checked_at, own, *watch)) is not None:
            infos.append(info)
            if own is not None:
                counters[path] = own
    return infos, counters, checked_at, counter, *watch


def _remove_listing(rows: IndexRows, listing: int) -> None:
    """Delete a listing at once; later writes delete its children, perhaps a million."""
    rows.run("DELETE FROM listings WHERE id = ?", (listing,))
    rows.run("INSERT INTO removed_listings VALUES (?)", (listing,))


def _item_of(identity: str, info: ObjectInfo | None) -> int | None:
    return None if info is None or info.id is None else hash_of(identity, info.id)
