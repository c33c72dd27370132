"""The tables of the index, and helpers that all statements share: column encodings and recorded numbers.

Triggers update the sums in the same transaction as the rows, so they cannot drift apart. Names and paths are BLOBs,
because object names may contain invalid Unicode.
"""

from __future__ import annotations

import functools
import hashlib
import sqlite3

__all__ = ["SCHEMA", "VERSION", "TableRows", "blob_of", "origin_of", "text_of"]

VERSION = 4

SCHEMA = """
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
CREATE TABLE versions (origin INTEGER NOT NULL, folder BLOB NOT NULL, known_at REAL NOT NULL,
    PRIMARY KEY (origin, folder)) WITHOUT ROWID;
CREATE INDEX versions_by_age ON versions (known_at);
CREATE TABLE feeds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, origin INTEGER NOT NULL, part BLOB NOT NULL, token TEXT NOT NULL,
    checked_at REAL NOT NULL, number INTEGER NOT NULL, UNIQUE (origin, part));
CREATE TABLE folders (feed INTEGER NOT NULL, item INTEGER NOT NULL, path BLOB NOT NULL,
    PRIMARY KEY (feed, item, path)) WITHOUT ROWID
"""
# versions: the time by which the newest known version of an object directly in a folder existed, where a listing may be
# older. staged: bytes of the blocks after row "settled". graves: deleted listings whose children go with later writes.
# feed: the change feed that watches the row, or NULL. item: hash of the item's id. place: hash of its folder's id.
# folders: paths of the folders that lead to watched items.


class TableRows:
    """Access to the recorded numbers; base class of the classes with the SQL statements."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute
        self._run_many = connection.executemany

    def number(self, name: str) -> int | None:
        """Return a recorded number, None if it is not recorded.

        The names: "blocks"; "bytes" (of blocks and local copies); "fixed" (bytes pinned or in local copies); "staged"
        (bytes in staging); "settled" (the last block row out of staging); "facts" (metadata entries and children);
        "counted" (1: every file has its row); "auto_size" (the automatic cache size); "clock" (µs from the boot of the
        machine, "boot", to the epoch, by the clock of metadata).
        """
        row = self._run("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return row and int(row[0])

    def record(self, name: str, value: int) -> None:
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


@functools.lru_cache(64)
def origin_of(identity: str) -> int:
    """Return a 64-bit hash of an identity, the same in every index."""
    data = identity.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def blob_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def text_of(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")
