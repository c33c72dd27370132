"""Rows of the index for metadata entries, listings, change feeds and the folders that lead to watched items."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedPosition,
    FeedSnapshot,
    ListedName,
    ListingRecord,
    MetadataRecord,
    folder_of,
    hash_of,
    new_version_at,
    sealed,
    unsealed,
)
from cachedfs.cache.index.schema import TableRows, blob_of, origin_of, text_of
from cachedfs.common.types import ObjectInfo

__all__ = ["FeedRows", "MetadataRows", "Sweep"]

# The entry of a path, and the listing of its folder with the child of that path, if it has one.
_FIND = """SELECT NULL, info, checked_at, change_counter, feed, folder_hash FROM metadata WHERE origin = ? AND path = ?
    UNION ALL SELECT listings.change_counter, children.info, checked_at, children.change_counter, feed, folder_hash
    FROM listings LEFT JOIN children ON children.listing = listings.id AND children.path = ?
    WHERE origin = ? AND folder = ?"""
_OLD_ENTRIES = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM objects WHERE objects.origin = metadata.origin AND objects.path = metadata.path)
    FROM metadata WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""
# "0" is the character after "/": all paths below the folder are between the two.
_OLD_LISTINGS = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM objects WHERE objects.origin = listings.origin
        AND objects.path > CAST(folder || '/' AS BLOB) AND objects.path < CAST(folder || '0' AS BLOB))
    FROM listings WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""
# Children of one listing that are files, and not equal in another one; the first 8 characters are checksums.
_NEW_FILES = """SELECT 1 FROM children AS new WHERE listing = ? AND substr(info, 9, 7) = '["file"' AND NOT EXISTS (
    SELECT 1 FROM children AS old WHERE old.listing = ? AND old.path = new.path
    AND substr(old.info, 9) = substr(new.info, 9)) LIMIT 1"""
_ADD = """INSERT OR IGNORE INTO metadata
    (info, checked_at, change_counter, feed, folder_hash, item_hash, origin, path) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
_UPDATE = """UPDATE metadata
    SET info = ?, checked_at = ?, change_counter = ?, feed = ?, folder_hash = ?, item_hash = ?
    WHERE origin = ? AND path = ? AND checked_at <= ?"""
# Times before those of all listings are not needed.
_ADD_VERSION = """INSERT INTO versions SELECT ?, ?, ?
    WHERE ? > min(?, (SELECT coalesce(min(checked_at), 1e99) FROM listings))
    ON CONFLICT DO UPDATE SET known_at = max(known_at, excluded.known_at)"""
_OLD_VERSIONS = """DELETE FROM versions
    WHERE known_at <= min(?, (SELECT coalesce(min(checked_at), 1e99) FROM listings))"""
_OLDEST_ENTRY_S = 7 * 86400.0
_MOST_ENTRIES = 1_000_000
_LISTING_TAKES_S = 3600.0  # at most, from its first request until it is stored
_FEW = 512  # entries examined by a removal of old ones, besides twice the number added


class FeedRows(TableRows):
    """SQL statements on change feeds."""

    def feed(self, identity: str, part: str) -> FeedPosition | None:
        """Return the stored position of the change feed of `part` of an origin; None without one."""
        found = self.run(
            "SELECT id, token, checked_at, number FROM feeds WHERE origin = ? AND part = ?",
            (origin_of(identity), blob_of(part)),
        ).fetchone()
        return found and _feed(identity, *found)

    def feed_by_id(self, identity: str, id: int) -> FeedPosition | None:
        found = self.run("SELECT id, token, checked_at, number FROM feeds WHERE id = ?", (id,)).fetchone()
        return found and _feed(identity, *found)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Store where a change feed begins, unless another process did."""
        text = sealed(None, identity, float(checked_at), 0, token) + token
        self.run(
            "INSERT OR IGNORE INTO feeds (origin, part, token, checked_at, number) VALUES (?, ?, ?, ?, 0)",
            (origin_of(identity), blob_of(part), text, checked_at),
        )

    def advance_feed(self, identity: str, feed: FeedPosition) -> None:
        """Store the new position of a change feed."""
        text = sealed(None, identity, float(feed.checked_at), feed.number, feed.token) + feed.token
        self.run(
            "UPDATE feeds SET token = ?, checked_at = ?, number = ? WHERE id = ?",
            (text, feed.checked_at, feed.number, feed.id),
        )

    def remove_feed(self, feed: FeedPosition) -> None:
        """Delete a change feed; it no longer confirms the metadata that it watched."""
        self.run("DELETE FROM feeds WHERE id = ?", (feed.id,))
        self.run("DELETE FROM folders WHERE feed = ?", (feed.id,))

    def folders_of(self, identity: str, feed: FeedPosition, id: str) -> list[str]:
        """Return the paths of the folder with this id, if it leads to anything that the feed watches."""
        values = (feed.id, hash_of(identity, id))
        return [
            text_of(path)
            for (path,) in self.run("SELECT path FROM folders WHERE feed = ? AND item_hash = ?", values)
        ]

    def _watched(self, identity: str, watch: FeedSnapshot) -> tuple[int | None, int | None]:
        """Return the feed that watches a response and the hash of its folder's id, and store the folders above it.

        Returns (None, None) if the feed may have reported changes of it already.
        """
        feed = self.feed_by_id(identity, watch.feed)
        if feed is None or feed.number != watch.number:
            return None, None
        hashes = {path: hash_of(identity, id) for path, id in watch.way}
        self.run_many(
            "INSERT OR IGNORE INTO folders VALUES (?, ?, ?)",
            [(watch.feed, item, blob_of(path)) for path, item in hashes.items()],
        )
        return watch.feed, next(iter(hashes.values()), 0)

    def _confirmed(self, identity: str, feed: int | None, folder: int | None) -> FeedConfirmation | None:
        if feed is None or folder is None:
            return None
        now = self.feed_by_id(identity, feed)
        return now and FeedConfirmation(now.checked_at, folder)


def _feed(identity: str, id: int, text: str, checked_at: float, number: int) -> FeedPosition:
    """Return the position stored in a row. Raises ValueError if the row is damaged."""
    token = text[8:]
    unsealed(text[:8], "", identity, checked_at, number, token)
    return FeedPosition(id, token, checked_at, number)


class Sweep:
    """The removal of old metadata by one process: what it examined last, and how much was added since.

    `entries` and `listings` are the (checked_at, id) of the last row examined.
    """

    def __init__(self) -> None:
        self.entries: tuple[float, int] = (0.0, 0)
        self.listings: tuple[float, int] = (0.0, 0)
        self.added = 0
        self.due_at = 0.0


def _reached(rows: list[tuple[int, float, int]], limit: int) -> tuple[float, int]:
    """Return where the next search starts: after these rows, or at the beginning after the last ones."""
    return (rows[-1][1], rows[-1][0]) if len(rows) == limit else (0.0, 0)


class MetadataRows(FeedRows):
    """SQL statements on metadata entries and listings."""

    def find(self, identity: str, path: str) -> tuple[MetadataRecord | None, ListedName | None]:
        """Return the newest metadata of `path`, and what the listing of its folder says of it.

        The metadata is from the path's own entry, or from that listing. The listing is None if there is none.
        """
        origin, name = origin_of(identity), blob_of(path)
        values = (origin, name, name, origin, blob_of(folder_of(path)))
        newest, listed = None, None
        for listing_counter, text, checked_at, counter, *watch in self.run(_FIND, values).fetchall():
            confirmed = self._confirmed(identity, *watch)
            if listing_counter is not None:
                listed = ListedName(checked_at, listing_counter, text is not None, confirmed)
            if counter is not None and (newest is None or newest.checked_at < checked_at):
                info = unsealed(text, path, identity, path, checked_at, counter, *watch)
                newest = MetadataRecord(identity, path, info, checked_at, counter, confirmation=confirmed)
        return newest, listed

    def keep_records(self, records: Iterable[MetadataRecord], now_s: float) -> None:
        """Store metadata entries, each replacing an older one of its path, and the times of new versions."""
        rows, new = [], []
        for record in records:
            identity, path, info, checked_at, counter, watch = record[:6]
            watched = self._watched(identity, watch) if watch is not None else (None, None)
            item = _item_of(identity, info) if watched[0] is not None else None
            text = sealed(info, identity, path, float(checked_at), counter, *watched)
            origin, blob = origin_of(identity), blob_of(path)
            rows.append((text, checked_at, counter, *watched, item, origin, blob))
            if record.new_at is not None:
                new.append((origin, blob_of(path.rpartition("/")[0]), record.new_at, record.new_at))
        added = self.run_many(_ADD, rows).rowcount
        self.totals.entries += added
        if added < len(rows):
            self.run_many(_UPDATE, [(*row, row[1]) for row in rows])
        if new:
            self.run_many(_ADD_VERSION, [(*each, now_s - _LISTING_TAKES_S) for each in new])

    def listing(self, identity: str, folder: str) -> ListingRecord | None:
        found = self._listing(identity, folder)
        if found is None:
            return None
        id, checked_at, counter, *watch = found
        children = self.run(
            "SELECT path, info, change_counter FROM children WHERE listing = ? ORDER BY path", (id,)
        )
        infos = [
            unsealed(info, text_of(path), identity, text_of(path), checked_at, own, *watch)
            for path, info, own in children
        ]
        confirmed = self._confirmed(identity, *watch)
        return ListingRecord([info for info in infos if info is not None], checked_at, counter, confirmed)

    def listing_size(self, identity: str, folder: str, most: int) -> int | None:
        """Return the number of children in the listing of `folder`, counted up to `most`; None without one."""
        found = self._listing(identity, folder)
        if found is None:
            return None
        counted = "SELECT count(*) FROM (SELECT 1 FROM children WHERE listing = ? LIMIT ?)"
        return int(self.run(counted, (found[0], most)).fetchone()[0])

    def keep_listing(
        self,
        identity: str,
        folder: str,
        infos: Sequence[ObjectInfo],
        *,
        checked_at: float,
        counter: int,
        counters: Mapping[str, int],
        watch: FeedSnapshot | None = None,
    ) -> float | None:
        """Store all children of `folder`, replacing an older listing; `counters` holds their change counters by path.

        Return the time by which the newest object that was not known before existed; None without one.
        """
        found = self._listing(identity, folder)
        if found is not None:
            self._remove_listing(found[0])
        feed, place = self._watched(identity, watch) if watch is not None else (None, None)
        listing = self.run(
            "INSERT INTO listings (origin, folder, checked_at, change_counter, feed, folder_hash)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (origin_of(identity), blob_of(folder), checked_at, counter, feed, place),
        ).lastrowid
        children = {info.path: (info, counters.get(info.path)) for info in infos}
        beside = float(checked_at), feed, place
        self.run_many(
            "INSERT INTO children (listing, path, info, change_counter, item_hash) VALUES (?, ?, ?, ?, ?)",
            (
                (
                    listing,
                    blob_of(path),
                    sealed(info, identity, path, beside[0], own, *beside[1:]),
                    own,
                    None if feed is None else _item_of(identity, info),
                )
                for path, (info, own) in children.items()
            ),
        )
        self.totals.entries += len(children)
        if found is None:
            made = (new_version_at(info, None, checked_at, is_first=True) for info in infos)
            return max((at for at in made if at is not None), default=None)
        has_new = self.run(_NEW_FILES, (listing, found[0])).fetchone()
        return checked_at if has_new else None

    def keep_version(self, identity: str, folder: str, known_at: float, now_s: float) -> None:
        """Record by when the newest version of an object in a folder existed."""
        values = origin_of(identity), blob_of(folder), known_at, known_at, now_s - _LISTING_TAKES_S
        self.run(_ADD_VERSION, values)

    def newest_version(self, identity: str, folder: str) -> float:
        """Return the time by which the newest known version of an object in `folder`, or in a folder above it, existed.

        It is 0 if all of them are older than every listing.
        """
        newest, is_top = 0.0, False
        while not is_top:
            found = self.run(
                "SELECT known_at FROM versions WHERE origin = ? AND folder = ?",
                (origin_of(identity), blob_of(folder)),
            ).fetchone()
            newest = max(newest, found[0] if found else 0.0)
            folder, is_top = folder_of(folder), not folder
        return newest

    def remove_old(self, now_s: float, sweep: Sweep) -> None:
        """Delete some old or surplus entries, and children of removed listings; examine more rows than were added.

        Metadata of objects with cached blocks stays, so that they can be read offline. Entries that stay are not
        examined again before all others.
        """
        too_many = self.totals.entries > _MOST_ENTRIES
        limit = now_s if too_many else now_s - _OLDEST_ENTRY_S
        n, sweep.added = _FEW + 2 * sweep.added, 0
        entries = self.run(_OLD_ENTRIES, (limit, *sweep.entries, n)).fetchall()
        old = [(id,) for id, _, has_blocks in entries if not has_blocks]
        self.run_many("DELETE FROM metadata WHERE id = ?", old)
        few = 1 if too_many else _FEW
        listings = self.run(_OLD_LISTINGS, (limit, *sweep.listings, few)).fetchall()
        for listing, _, has_blocks in listings:
            if not has_blocks:
                self._remove_listing(listing)
        self.totals.entries -= len(old) + self._remove_children(n)
        self.run(_OLD_VERSIONS, (now_s - _LISTING_TAKES_S,))
        sweep.entries, sweep.listings = _reached(entries, n), _reached(listings, few)

    def paths_of(self, identity: str, id: str) -> list[str]:
        """Return the paths at which the item with this id is stored and watched by a change feed."""
        item = hash_of(identity, id)
        rows = self.run(
            "SELECT path FROM metadata WHERE item_hash = ? UNION SELECT path FROM children WHERE item_hash = ?",
            (item, item),
        )
        return [text_of(path) for (path,) in rows]

    def stored_at(self, identity: str, path: str) -> list[tuple[ObjectInfo | None, str, int]]:
        """Return all stored metadata of `path`: its own entry, and the listing of its folder; info None means absent.

        With each comes the name that its change counter belongs to (for a listing, the folder's name with "/"), and the
        counter.
        """
        found = list[tuple[ObjectInfo | None, str, int]]()
        record = self.run(
            "SELECT info, checked_at, change_counter, feed, folder_hash FROM metadata WHERE origin = ? AND path = ?",
            (origin_of(identity), blob_of(path)),
        ).fetchone()
        if record is not None:
            found.append((_believed(record[0], identity, path, *record[1:]), path, record[2]))
        folder = folder_of(path)
        listing = self._listing(identity, folder)
        if listing is not None:
            id, checked_at, counter, *watch = listing
            child = self.run(
                "SELECT info, change_counter FROM children WHERE listing = ? AND path = ?",
                (id, blob_of(path)),
            ).fetchone()
            info = child and _believed(child[0], identity, path, checked_at, child[1], *watch)
            found.append((info, f"{folder}/", counter))
            if child and child[1] is not None:  # its own counter is valid even if the listing's is not
                found.append((info, path, child[1]))
        return found

    def _listing(self, identity: str, folder: str) -> tuple[int, float, int, int | None, int | None] | None:
        values = (origin_of(identity), blob_of(folder))
        row = self.run(
            "SELECT id, checked_at, change_counter, feed, folder_hash FROM listings WHERE origin = ? AND folder = ?",
            values,
        ).fetchone()
        return row and tuple(row)

    def _remove_listing(self, listing: int) -> None:
        """Delete a listing at once; later writes delete its children, perhaps a million."""
        self.run("DELETE FROM listings WHERE id = ?", (listing,))
        self.run("INSERT INTO removed_listings VALUES (?)", (listing,))

    def _remove_children(self, limit: int) -> int:
        """Delete up to `limit` children of a removed listing; return how many."""
        found = self.run("SELECT listing FROM removed_listings LIMIT 1").fetchone()
        if found is None:
            return 0
        n = self.run(
            "DELETE FROM children WHERE listing = ? AND path IN (SELECT path FROM children WHERE listing = ? LIMIT ?)",
            (found[0], found[0], limit),
        ).rowcount
        if n == 0:
            self.run("DELETE FROM removed_listings WHERE listing = ?", found)
        return n


def _believed(text: str, identity: str, path: str, *beside: object) -> ObjectInfo | None:
    """Return the sealed info; None if it is damaged."""
    with contextlib.suppress(ValueError):
        return unsealed(text, path, identity, path, *beside)
    return None


def _item_of(identity: str, info: ObjectInfo | None) -> int | None:
    return None if info is None or info.id is None else hash_of(identity, info.id)
