"""The bookkeeping of the cache in SQLite: every SQL statement of the package is here.

The files are the truth about blocks, the rows only count them: a row is written before its file and removed after it,
so a crash over-counts and never under-counts. Sums are kept by triggers, in the same transaction as the rows, and
cannot drift from them. Names and paths are BLOBs: object names may hold what is not Unicode text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cachedfs.cache.claims import Claims
from cachedfs.cache.database import Database
from cachedfs.cache.facts import Fact, Feed, Listing, Told, Watch, folder_of, hash_of, sealed, unsealed
from cachedfs.model import ObjectInfo, ObjectKey

__all__ = ["TROUBLE", "BlockRow", "Index", "LeaseRow", "Rows"]

TROUBLE = (sqlite3.Error, OSError, ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What the index may raise. All but the first two: a row that is damaged, as columns of SQLite hold values of any type."""

_VERSION = 3

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('blocks', 0), ('bytes', 0), ('fixed', 0), ('facts', 0), ('counted', 0), ('staged', 0),
    ('settled', 0);

CREATE TABLE objects (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, origin INTEGER NOT NULL, path BLOB NOT NULL,
    pinned INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0);
CREATE INDEX objects_by_path ON objects (origin, path);
CREATE TRIGGER object_grown AFTER UPDATE OF bytes, pinned ON objects BEGIN
    UPDATE meta SET value = value + new.bytes * new.pinned - old.bytes * old.pinned WHERE name = 'fixed';
END;
CREATE TRIGGER object_out AFTER DELETE ON objects WHEN old.pinned BEGIN
    UPDATE meta SET value = value - old.bytes WHERE name = 'fixed';
END;

CREATE TABLE blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, object INTEGER NOT NULL, number INTEGER NOT NULL, size INTEGER NOT NULL,
    hash INTEGER NOT NULL, clock INTEGER NOT NULL, since REAL NOT NULL, writer INTEGER NOT NULL,
    UNIQUE (object, number));
CREATE TRIGGER block_in AFTER INSERT ON blocks BEGIN
    UPDATE meta SET value = value + 1 WHERE name = 'blocks';
    UPDATE meta SET value = value + new.size WHERE name IN ('bytes', 'staged');
    UPDATE objects SET bytes = bytes + new.size WHERE id = new.object;
END;
CREATE TRIGGER block_out AFTER DELETE ON blocks BEGIN
    UPDATE meta SET value = value - 1 WHERE name = 'blocks';
    UPDATE meta SET value = value - old.size WHERE name = 'bytes';
    UPDATE meta SET value = value - old.size WHERE name = 'staged'
        AND old.id > (SELECT value FROM meta WHERE name = 'settled');
    UPDATE objects SET bytes = bytes - old.size WHERE id = old.object;
    DELETE FROM objects WHERE id = old.object AND bytes <= 0;
END;
CREATE TRIGGER block_resized AFTER UPDATE OF size ON blocks BEGIN
    UPDATE meta SET value = value + new.size - old.size WHERE name = 'bytes';
    UPDATE meta SET value = value + new.size - old.size WHERE name = 'staged'
        AND old.id > (SELECT value FROM meta WHERE name = 'settled');
    UPDATE objects SET bytes = bytes + new.size - old.size WHERE id = new.object;
END;

CREATE TABLE pins (origin INTEGER NOT NULL, path BLOB NOT NULL, identity BLOB NOT NULL, PRIMARY KEY (origin, path))
    WITHOUT ROWID;

CREATE TABLE leases (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size INTEGER NOT NULL);
CREATE TRIGGER lease_in AFTER INSERT ON leases BEGIN
    UPDATE meta SET value = value + new.size WHERE name IN ('bytes', 'fixed');
END;
CREATE TRIGGER lease_out AFTER DELETE ON leases BEGIN
    UPDATE meta SET value = value - old.size WHERE name IN ('bytes', 'fixed');
END;

CREATE TABLE facts (
    id INTEGER PRIMARY KEY, origin INTEGER NOT NULL, path BLOB NOT NULL, info TEXT, checked_at REAL NOT NULL,
    mark INTEGER NOT NULL, feed INTEGER, place INTEGER, item INTEGER, UNIQUE (origin, path));
CREATE INDEX facts_by_age ON facts (checked_at);
CREATE INDEX facts_by_item ON facts (item) WHERE item IS NOT NULL;
CREATE TABLE listings (
    id INTEGER PRIMARY KEY AUTOINCREMENT, origin INTEGER NOT NULL, folder BLOB NOT NULL, checked_at REAL NOT NULL,
    mark INTEGER NOT NULL, feed INTEGER, place INTEGER, UNIQUE (origin, folder));
CREATE INDEX listings_by_age ON listings (checked_at);
CREATE TABLE children (
    listing INTEGER NOT NULL, path BLOB NOT NULL, info TEXT NOT NULL, mark INTEGER, item INTEGER,
    PRIMARY KEY (listing, path)) WITHOUT ROWID;
CREATE INDEX children_by_item ON children (item) WHERE item IS NOT NULL;
CREATE TABLE graves (listing INTEGER PRIMARY KEY);
CREATE TABLE feeds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, origin INTEGER NOT NULL, part BLOB NOT NULL, token TEXT NOT NULL,
    checked_at REAL NOT NULL, number INTEGER NOT NULL, UNIQUE (origin, part));
CREATE TABLE folders (feed INTEGER NOT NULL, item INTEGER NOT NULL, path BLOB NOT NULL,
    PRIMARY KEY (feed, item, path)) WITHOUT ROWID
"""
# staged: bytes of the blocks in staging, which are all rows after the one that "settled" names.
# graves: listings that are gone and whose children are deleted a few at a time, by whoever writes.
# feed: the one whose polls find this row, or none. item: the hash of the id of what it is about. place: that of the id of
# the folder that was asked. folders: where those are that lead to what a feed watches.

_BLOCK = """SELECT blocks.id, digest, number, size, hash, clock, since, writer, pinned
    FROM blocks JOIN objects ON objects.id = blocks.object """

_BELOW = """SELECT id FROM objects WHERE origin = ? AND path = ?
    UNION ALL SELECT id FROM objects WHERE origin = ? AND path > ? AND path < ?"""

_LOOKUP = """SELECT info, checked_at, mark, feed, place FROM facts WHERE origin = ? AND path = ?
    UNION ALL SELECT children.info, checked_at, children.mark, feed, place FROM listings
    JOIN children ON children.listing = listings.id AND children.path = ?
    WHERE origin = ? AND folder = ? AND children.mark IS NOT NULL
    ORDER BY 2 DESC LIMIT 1"""

_OLD_FACTS = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM objects WHERE objects.origin = facts.origin AND objects.path = facts.path)
    FROM facts WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""
# "0" is the character after "/": all paths below the folder are between the two.
_OLD_LISTINGS = """SELECT id, checked_at, EXISTS (
        SELECT 1 FROM objects WHERE objects.origin = listings.origin
        AND objects.path > CAST(folder || '/' AS BLOB) AND objects.path < CAST(folder || '0' AS BLOB))
    FROM listings WHERE checked_at < ? AND (checked_at, id) > (?, ?) ORDER BY checked_at, id LIMIT ?"""

_OLDEST_FACT_S = 7 * 86400.0
_MOST_FACTS = 1_000_000
_FEW = 512  # facts forgotten at one write, beyond twice what it adds


class Sweep(NamedTuple):
    """How far the search for old facts and old listings got: (checked_at, id) of the last ones looked at."""

    facts: tuple[float, int] = (0.0, 0)
    listings: tuple[float, int] = (0.0, 0)


def _reached(rows: list[tuple[int, float, int]], limit: int) -> tuple[float, int]:
    """Return where the next search starts: behind these rows, from the beginning when they were the last."""
    return (rows[-1][1], rows[-1][0]) if len(rows) == limit else (0.0, 0)


class BlockRow(NamedTuple):
    """The row of one block.

    `clock` is the touch clock when it was put, `since` the time in seconds, `writer` the number of the process that
    did, which has the claim on that number while it lives.
    """

    id: int
    digest: str
    number: int
    size: int
    hash: int
    clock: int
    since: float
    writer: int
    pinned: int

    @property
    def hash64(self) -> int:
        return self.hash & (1 << 64) - 1


class LeaseRow(NamedTuple):
    """The row of one leased file. Its name is a random number in hex, and the claim on that number is its owner's."""

    name: str
    size: int

    @property
    def claim(self) -> int:
        return int(self.name, 16)


@functools.lru_cache(64)
def _origin(identity: str) -> int:
    """Return a number for an identity, the same in every index."""
    data = identity.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


class Index:
    """The index of one cache: `reading` and `writing` lend its rows; writing is one transaction."""

    def __init__(self, path: str, *, is_network: bool, claims: Claims, temp: Callable[[], str]) -> None:
        self.database = Database(
            path, schema=_SCHEMA.strip(), version=_VERSION, is_network=is_network, claims=claims, temp=temp
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Rows]:
        with self.database.reading() as connection:
            yield Rows(connection)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Rows]:
        with self.database.writing() as connection:
            yield Rows(connection)

    def close(self) -> None:
        self.database.close()


class Rows:
    """The statements. Those that change something need a lender that was asked for `writing`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute
        self._run_many = connection.executemany

    # Numbers about the whole

    def number(self, name: str) -> int | None:
        """Return a recorded number, None when it is not recorded.

        "blocks", "bytes" (of blocks and leases), "fixed" (those of them that are pinned or leased), "staged" (of the
        blocks whose rows come after the one that "settled" names), "facts"; "counted" (1: every file has its row) and
        "auto_size" (the bound when the user gave none).
        """
        row = self._run("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return row and int(row[0])

    def record(self, name: str, value: int) -> None:
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def sums(self) -> dict[str, int]:
        """Return what "blocks", "bytes", "fixed", "staged" and "facts" should be, counted from the rows."""
        blocks, block_bytes = self._run("SELECT count(*), total(size) FROM blocks").fetchone()
        (lease_bytes,) = self._run("SELECT total(size) FROM leases").fetchone()
        (facts,) = self._run(
            "SELECT (SELECT count(*) FROM facts) + (SELECT count(*) FROM children)"
        ).fetchone()
        (pinned_bytes,) = self._run("SELECT total(bytes) FROM objects WHERE pinned").fetchone()
        (staged,) = self._run(
            "SELECT total(size) FROM blocks WHERE id > (SELECT value FROM meta WHERE name = 'settled')"
        ).fetchone()
        total, fixed = int(block_bytes + lease_bytes), int(pinned_bytes + lease_bytes)
        return {"blocks": blocks, "bytes": total, "fixed": fixed, "staged": int(staged), "facts": facts}

    def recount_objects(self) -> None:
        self._run("UPDATE objects SET bytes = (SELECT total(size) FROM blocks WHERE object = objects.id)")
        self._run("DELETE FROM objects WHERE bytes <= 0")

    # Blocks

    def block(self, key: ObjectKey, index: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE digest = ? AND number = ?", (key.digest, index))

    def block_by_id(self, id: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE blocks.id = ?", (id,))

    def add_block(
        self, key: ObjectKey, index: int, *, size: int, clock: int, since: float, writer: int
    ) -> None:
        """Count a block that will be written, or that was found; one that is counted already is counted anew."""
        hash64 = key.hash64(index)
        signed = hash64 - (1 << 64) if hash64 >> 63 else hash64
        self._run(
            "INSERT INTO blocks (object, number, size, hash, clock, since, writer) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (object, number) DO UPDATE SET size = excluded.size, clock = excluded.clock,"
            " since = excluded.since, writer = excluded.writer",
            (self._object(key), index, size, signed, clock, since, writer),
        )

    def release_block(self, id: int) -> None:
        """Count a block on, as nobody's: whoever puts it next may write it at once."""
        self._run("UPDATE blocks SET writer = 0, since = 0 WHERE id = ?", (id,))

    def remove_block(self, id: int) -> None:
        self._run("DELETE FROM blocks WHERE id = ?", (id,))

    def forget_blocks(self) -> None:
        self._run("DELETE FROM blocks")

    def resize_block(self, id: int, size: int) -> None:
        self._run("UPDATE blocks SET size = ? WHERE id = ?", (size, id))

    def blocks_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` blocks, oldest row first, of those with a row id beyond `id`."""
        return self._all(_BLOCK + "WHERE blocks.id > ? ORDER BY blocks.id LIMIT ?", (id, limit))

    def settled_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` unpinned blocks that left staging, oldest row first, with a row id beyond `id`."""
        where = "WHERE blocks.id > ? AND blocks.id <= (SELECT value FROM meta WHERE name = 'settled') AND NOT pinned"
        return self._all(f"{_BLOCK}{where} ORDER BY blocks.id LIMIT ?", (id, limit))

    def settle(self, last: int) -> None:
        """Let all blocks up to row `last` leave staging; those of them that may not stay are removed already."""
        first = self.number("settled") or 0
        (size,) = self._run(
            "SELECT total(size) FROM blocks WHERE id > ? AND id <= ?", (first, last)
        ).fetchone()
        self._run("UPDATE meta SET value = value - ? WHERE name = 'staged'", (int(size),))
        self.record("settled", max(first, last))

    def last_block(self) -> int:
        """Return the last row of a block; 0 when there is none."""
        return int(self._run("SELECT coalesce(max(id), 0) FROM blocks").fetchone()[0])

    def blocks_of(self, identity: str | None, path: str | None, *, after: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` blocks of a path (all versions) and of all below it, of an origin, or of all origins."""
        if identity is None:
            return self.blocks_after(after, limit)
        # "+": not by the index of origins, which would have all blocks of one sorted anew for every `limit` of them.
        where = "WHERE +origin = ? AND blocks.id > ?"
        values: list[Any] = [_origin(identity), after]
        if path is not None:
            # "0" is the character after "/": all paths below the folder are between the two.
            where += " AND (path = ? OR (path > ? AND path < ?))"
            values += [_blob(path), _blob(f"{path}/"), _blob(f"{path}0")]
            if not after:  # most evictions are small: those of one object look at its blocks alone
                where += f" AND objects.id IN ({_BELOW})"
                values += [values[0], values[2], values[0], *values[3:5]]
        return self._all(f"{_BLOCK}{where} ORDER BY blocks.id LIMIT ?", (*values, limit))

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths of which blocks are counted: `path` (empty: the whole origin) and all below it, by name."""
        statement = "SELECT DISTINCT path FROM objects WHERE origin = ?"
        values: list[Any] = [_origin(identity)]
        if path:
            statement += " AND (path = ? OR (path > ? AND path < ?))"
            values += [_blob(path), _blob(f"{path}/"), _blob(f"{path}0")]
        return [_text(found) for (found,) in self._run(f"{statement} ORDER BY path", values)]

    def last_clock(self) -> int:
        """Return the touch clock of the block that was put last; 0 when there is none."""
        row = self._run("SELECT clock FROM blocks ORDER BY id DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    def _object(self, key: ObjectKey) -> int:
        row = self._run("SELECT id FROM objects WHERE digest = ?", (key.digest,)).fetchone()
        if row:
            return int(row[0])
        pinned = self.is_pinned(key.identity, key.path)
        values = (key.digest, _origin(key.identity), _blob(key.path), pinned)
        return int(
            self._run(
                "INSERT INTO objects (digest, origin, path, pinned) VALUES (?, ?, ?, ?)", values
            ).lastrowid
            or 0
        )

    def _one(self, statement: str, values: Sequence[Any]) -> BlockRow | None:
        row = self._run(statement, values).fetchone()
        return row and BlockRow._make(row)

    def _all(self, statement: str, values: Sequence[Any]) -> list[BlockRow]:
        return [BlockRow._make(row) for row in self._run(statement, values)]

    # Pins

    def pin(self, identity: str, path: str, wanted: bool) -> None:
        """Store or forget the wish that the blocks of `path` stay, those that are here and those to come."""
        origin, blob = _origin(identity), _blob(path)
        if wanted:
            self._run("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", (origin, blob, _blob(identity)))
        else:
            self._run("DELETE FROM pins WHERE origin = ? AND path = ?", (origin, blob))
        self._run("UPDATE objects SET pinned = ? WHERE origin = ? AND path = ?", (wanted, origin, blob))

    def pins(self) -> list[tuple[str, str]]:
        rows = self._run("SELECT identity, path FROM pins ORDER BY identity, path")
        return [(_text(identity), _text(path)) for identity, path in rows]

    def is_pinned(self, identity: str, path: str) -> bool:
        values = (_origin(identity), _blob(path))
        return self._run("SELECT 1 FROM pins WHERE origin = ? AND path = ?", values).fetchone() is not None

    # Leases

    def add_lease(self, name: str, size: int) -> None:
        self._run("INSERT OR IGNORE INTO leases (name, size) VALUES (?, ?)", (name, size))

    def remove_lease(self, name: str) -> None:
        self._run("DELETE FROM leases WHERE name = ?", (name,))

    def leases(self) -> list[LeaseRow]:
        return [LeaseRow._make(row) for row in self._run("SELECT name, size FROM leases")]

    # Facts and listings

    def lookup(self, identity: str, path: str) -> Fact | None:
        """Return what was learnt last of `path`, by itself or as a child in a listing."""
        origin, name = _origin(identity), _blob(path)
        values = (origin, name, name, origin, _blob(folder_of(path)))
        row = self._run(_LOOKUP, values).fetchone()
        if row is None:
            return None
        text, checked_at, mark, *watch = row
        info = unsealed(text, path, identity, path, checked_at, mark, *watch)
        return Fact(identity, path, info, checked_at, mark, told=self._told(identity, *watch))

    def keep_facts(self, facts: Iterable[Fact]) -> None:
        rows = [self._row_of(fact) for fact in facts]
        (before,) = self._run("SELECT total_changes()").fetchone()
        self._run_many(
            "INSERT OR IGNORE INTO facts (info, checked_at, mark, feed, place, item, origin, path)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        (after,) = self._run("SELECT total_changes()").fetchone()
        self._count_facts(after - before)
        if after - before < len(rows):
            self._run_many(
                "UPDATE facts SET info = ?, checked_at = ?, mark = ?, feed = ?, place = ?, item = ?"
                " WHERE origin = ? AND path = ? AND checked_at <= ?",
                [(*row, row[1]) for row in rows],
            )

    def _row_of(self, fact: Fact) -> tuple[Any, ...]:
        feed, place = self._watched(fact.identity, fact.watch)
        item = None if feed is None else _item_of(fact.identity, fact.info)
        beside = (fact.identity, fact.path, float(fact.checked_at), fact.mark, feed, place)
        text = sealed(fact.info, *beside)
        return text, fact.checked_at, fact.mark, feed, place, item, _origin(fact.identity), _blob(fact.path)

    def listing(self, identity: str, folder: str) -> Listing | None:
        found = self._listing(identity, folder)
        if found is None:
            return None
        id, checked_at, mark, *watch = found
        children = self._run("SELECT path, info, mark FROM children WHERE listing = ? ORDER BY path", (id,))
        infos = [
            unsealed(info, _text(path), identity, _text(path), checked_at, own, *watch)
            for path, info, own in children
        ]
        told = self._told(identity, *watch)
        return Listing([info for info in infos if info is not None], checked_at, mark, told)

    def listing_has(
        self, identity: str, folder: str, path: str
    ) -> tuple[float, int, bool, Told | None] | None:
        """Return when and under which mark `folder` was listed, whether `path` was in it, and what a feed told since."""
        found = self._listing(identity, folder)
        if found is None:
            return None
        id, checked_at, mark, *watch = found
        child = self._run(
            "SELECT 1 FROM children WHERE listing = ? AND path = ?", (id, _blob(path))
        ).fetchone()
        return checked_at, mark, child is not None, self._told(identity, *watch)

    def listing_size(self, identity: str, folder: str, most: int) -> int | None:
        """Return how many children a listing of `folder` names, counted up to `most`; None without one."""
        found = self._listing(identity, folder)
        if found is None:
            return None
        counted = "SELECT count(*) FROM (SELECT 1 FROM children WHERE listing = ? LIMIT ?)"
        return int(self._run(counted, (found[0], most)).fetchone()[0])

    def keep_listing(
        self,
        identity: str,
        folder: str,
        infos: Sequence[ObjectInfo],
        *,
        checked_at: float,
        mark: int,
        marks: Mapping[str, int],
        watch: Watch | None = None,
    ) -> None:
        """Store all children of `folder` in place of an older listing; `marks` are the children's own, by path."""
        found = self._listing(identity, folder)
        if found is not None:
            self._bury(found[0])
        feed, place = self._watched(identity, watch)
        listing = self._run(
            "INSERT INTO listings (origin, folder, checked_at, mark, feed, place) VALUES (?, ?, ?, ?, ?, ?)",
            (_origin(identity), _blob(folder), checked_at, mark, feed, place),
        ).lastrowid
        children = {info.path: (info, marks.get(info.path)) for info in infos}
        beside = float(checked_at), feed, place
        self._run_many(
            "INSERT INTO children (listing, path, info, mark, item) VALUES (?, ?, ?, ?, ?)",
            (
                (
                    listing,
                    _blob(path),
                    sealed(info, identity, path, beside[0], own, *beside[1:]),
                    own,
                    None if feed is None else _item_of(identity, info),
                )
                for path, (info, own) in children.items()
            ),
        )
        self._count_facts(len(children))

    def forget_old(self, now_s: float, *, added: int, sweep: Sweep) -> Sweep:
        """Delete some facts that are too old or too many, and children of buried listings: more than were `added`.

        What has blocks here stays, so that it can be read offline for as long as they do. `sweep` is how far the last
        call got: those that stay are not looked at again before all others were.
        """
        too_many = (self.number("facts") or 0) > _MOST_FACTS
        limit = now_s if too_many else now_s - _OLDEST_FACT_S
        n = _FEW + 2 * added
        facts = self._run(_OLD_FACTS, (limit, *sweep.facts, n)).fetchall()
        gone = [(id,) for id, _, has_blocks in facts if not has_blocks]
        self._run_many("DELETE FROM facts WHERE id = ?", gone)
        few = 1 if too_many else _FEW
        listings = self._run(_OLD_LISTINGS, (limit, *sweep.listings, few)).fetchall()
        for listing, _, has_blocks in listings:
            if not has_blocks:
                self._bury(listing)
        self._count_facts(-len(gone) - self._clear_graves(n))
        return Sweep(_reached(facts, n), _reached(listings, few))

    def _listing(self, identity: str, folder: str) -> tuple[int, float, int, int | None, int | None] | None:
        values = (_origin(identity), _blob(folder))
        row = self._run(
            "SELECT id, checked_at, mark, feed, place FROM listings WHERE origin = ? AND folder = ?", values
        ).fetchone()
        return row and tuple(row)

    def _bury(self, listing: int) -> None:
        """Delete a listing at once and leave its children, perhaps a million, to later writes."""
        self._run("DELETE FROM listings WHERE id = ?", (listing,))
        self._run("INSERT INTO graves VALUES (?)", (listing,))

    def _clear_graves(self, limit: int) -> int:
        grave = self._run("SELECT listing FROM graves LIMIT 1").fetchone()
        if grave is None:
            return 0
        gone = self._run(
            "DELETE FROM children WHERE listing = ? AND path IN (SELECT path FROM children WHERE listing = ? LIMIT ?)",
            (grave[0], grave[0], limit),
        ).rowcount
        if gone == 0:
            self._run("DELETE FROM graves WHERE listing = ?", grave)
        return gone

    def _count_facts(self, change: int) -> None:
        self._run("UPDATE meta SET value = value + ? WHERE name = 'facts'", (change,))

    # Feeds of changes

    def feed(self, identity: str, part: str) -> Feed | None:
        """Return where the feed of one part of an origin was left; None when there is none."""
        found = self._run(
            "SELECT id, token, checked_at, number FROM feeds WHERE origin = ? AND part = ?",
            (_origin(identity), _blob(part)),
        ).fetchone()
        return found and _feed(identity, *found)

    def feed_by_id(self, identity: str, id: int) -> Feed | None:
        found = self._run("SELECT id, token, checked_at, number FROM feeds WHERE id = ?", (id,)).fetchone()
        return found and _feed(identity, *found)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Store where a feed begins, unless another process did."""
        text = sealed(None, identity, float(checked_at), 0, token) + token
        self._run(
            "INSERT OR IGNORE INTO feeds (origin, part, token, checked_at, number) VALUES (?, ?, ?, ?, 0)",
            (_origin(identity), _blob(part), text, checked_at),
        )

    def advance_feed(self, identity: str, feed: Feed) -> None:
        """Store where a feed is left now."""
        text = sealed(None, identity, float(feed.checked_at), feed.number, feed.token) + feed.token
        self._run(
            "UPDATE feeds SET token = ?, checked_at = ?, number = ? WHERE id = ?",
            (text, feed.checked_at, feed.number, feed.id),
        )

    def drop_feed(self, feed: Feed) -> None:
        """Forget a feed: it tells nothing any more of what was watched by it."""
        self._run("DELETE FROM feeds WHERE id = ?", (feed.id,))
        self._run("DELETE FROM folders WHERE feed = ?", (feed.id,))

    def paths_of(self, identity: str, id: str) -> list[str]:
        """Return the paths at which the item of this id is stored, and watched by a feed."""
        item = hash_of(identity, id)
        rows = self._run(
            "SELECT path FROM facts WHERE item = ? UNION SELECT path FROM children WHERE item = ?",
            (item, item),
        )
        return [_text(path) for (path,) in rows]

    def folders_of(self, identity: str, feed: Feed, id: str) -> list[str]:
        """Return the paths of the folder of this id, if it leads to something that a feed watches."""
        values = (feed.id, hash_of(identity, id))
        return [
            _text(path)
            for (path,) in self._run("SELECT path FROM folders WHERE feed = ? AND item = ?", values)
        ]

    def stored_at(self, identity: str, path: str) -> list[tuple[ObjectInfo | None, str, int]]:
        """Return all that is stored of `path`, by itself and in a listing of its folder; None says that it is absent.

        With each, what its mark is of (a folder's name with "/" is its listing), and the mark.
        """
        found = list[tuple[ObjectInfo | None, str, int]]()
        fact = self._run(
            "SELECT info, checked_at, mark, feed, place FROM facts WHERE origin = ? AND path = ?",
            (_origin(identity), _blob(path)),
        ).fetchone()
        if fact is not None:
            found.append((_believed(fact[0], identity, path, *fact[1:]), path, fact[2]))
        folder = folder_of(path)
        listing = self._listing(identity, folder)
        if listing is not None:
            id, checked_at, mark, *watch = listing
            child = self._run(
                "SELECT info, mark FROM children WHERE listing = ? AND path = ?", (id, _blob(path))
            ).fetchone()
            info = child and _believed(child[0], identity, path, checked_at, child[1], *watch)
            found.append((info, f"{folder}/", mark))
            if child and child[1] is not None:  # it answers for itself, whatever happened to its neighbours
                found.append((info, path, child[1]))
        return found

    def _watched(self, identity: str, watch: Watch | None) -> tuple[int | None, int | None]:
        """Return the feed that will tell of an answer, and whose folder it is about; Nones where it may have told already."""
        if watch is None:
            return None, None
        feed = self.feed_by_id(identity, watch.feed)
        if feed is None or feed.number != watch.number:
            return None, None
        hashes = {path: hash_of(identity, id) for path, id in watch.way}
        self._run_many(
            "INSERT OR IGNORE INTO folders VALUES (?, ?, ?)",
            [(watch.feed, item, _blob(path)) for path, item in hashes.items()],
        )
        return watch.feed, next(iter(hashes.values()), 0)

    def _told(self, identity: str, feed: int | None, folder: int | None) -> Told | None:
        if feed is None or folder is None:
            return None
        now = self.feed_by_id(identity, feed)
        return now and Told(now.checked_at, folder)


def _feed(identity: str, id: int, text: str, checked_at: float, number: int) -> Feed:
    """Return the feed in a row. Raises ValueError when it is damaged."""
    token = text[8:]
    unsealed(text[:8], "", identity, checked_at, number, token)
    return Feed(id, token, checked_at, number)


def _believed(text: str, identity: str, path: str, *beside: object) -> ObjectInfo | None:
    """Return what was sealed; None for what is damaged, which nobody believes."""
    with contextlib.suppress(ValueError):
        return unsealed(text, path, identity, path, *beside)
    return None


def _item_of(identity: str, info: ObjectInfo | None) -> int | None:
    return None if info is None or info.id is None else hash_of(identity, info.id)
