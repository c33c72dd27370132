"""The tables of the index, and what all statements share: totals and column encodings.

Names and paths are BLOBs, because object names may contain invalid Unicode.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from operator import attrgetter, methodcaller

VERSION = 7


@dataclasses.dataclass(slots=True)
class Totals:
    """Numbers about the whole cache: the only row of the table `totals`.

    Each transaction reads them when it begins and stores them when it ends. The bytes are those on disk, with trailers.
    """

    blocks: int = 0
    bytes: int = 0  # of blocks
    pinned: int = 0  # the part of `bytes` that is pinned
    staged: int = 0  # bytes of the blocks in staging
    last_block: int = 0  # the highest row id of a block so far
    last_admitted: int = 0  # blocks with a higher row id are in staging
    entries: int = 0  # metadata entries and children of listings
    pins: int = 0
    copies: int = 0  # how many local copies were made: a new one is counted at once
    is_counted: int = 0  # 1: every file has its row
    automatic_size: int = 0  # the size limit where the user set none; 0 before its first use
    boot: int = 0  # this boot of the machine, and its clock of metadata in microseconds from boot to epoch
    clock_us: int = 0


_NAMES = [field.name for field in dataclasses.fields(Totals)]
STORED = attrgetter(*_NAMES)
LOAD_TOTALS = f"SELECT {', '.join(_NAMES)} FROM totals"
SAVE_TOTALS = f"UPDATE totals SET {', '.join(f'{name} = ?' for name in _NAMES)}"

SCHEMA = f"""
CREATE TABLE totals ({", ".join(f"{name} INTEGER NOT NULL" for name in _NAMES)});
INSERT INTO totals VALUES ({", ".join("0" for _ in _NAMES)});

CREATE TABLE blocks (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size INTEGER NOT NULL, clock INTEGER NOT NULL,
    stored_at REAL NOT NULL, writer INTEGER NOT NULL, is_pinned INTEGER NOT NULL,
    origin INTEGER NOT NULL, path BLOB NOT NULL);
CREATE INDEX blocks_by_path ON blocks (origin, path);
CREATE TABLE pins (origin INTEGER NOT NULL, path BLOB NOT NULL, identity BLOB NOT NULL, PRIMARY KEY (origin, path))
    WITHOUT ROWID;

CREATE TABLE metadata (
    id INTEGER PRIMARY KEY, origin INTEGER NOT NULL, path BLOB NOT NULL, info TEXT, checked_at REAL NOT NULL,
    change_counter INTEGER NOT NULL, feed INTEGER, folder_hash INTEGER, item_hash INTEGER, UNIQUE (origin, path));
CREATE INDEX metadata_by_age ON metadata (checked_at);
CREATE INDEX metadata_by_item ON metadata (item_hash) WHERE item_hash IS NOT NULL;
CREATE TABLE listings (
    id INTEGER PRIMARY KEY AUTOINCREMENT, origin INTEGER NOT NULL, folder BLOB NOT NULL, checked_at REAL NOT NULL,
    change_counter INTEGER NOT NULL, feed INTEGER, folder_hash INTEGER, UNIQUE (origin, folder));
CREATE INDEX listings_by_age ON listings (checked_at);
CREATE TABLE children (
    listing INTEGER NOT NULL, path BLOB NOT NULL, info TEXT NOT NULL, change_counter INTEGER, item_hash INTEGER,
    PRIMARY KEY (listing, path)) WITHOUT ROWID;
CREATE INDEX children_by_item ON children (item_hash) WHERE item_hash IS NOT NULL;
CREATE TABLE removed_listings (listing INTEGER PRIMARY KEY);
CREATE TABLE versions (origin INTEGER NOT NULL, folder BLOB NOT NULL, known_at REAL NOT NULL,
    PRIMARY KEY (origin, folder)) WITHOUT ROWID;
CREATE INDEX versions_by_age ON versions (known_at);
CREATE TABLE feeds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, origin INTEGER NOT NULL, part BLOB NOT NULL, token TEXT NOT NULL,
    checked_at REAL NOT NULL, number INTEGER NOT NULL, UNIQUE (origin, part));
CREATE TABLE folders (feed INTEGER NOT NULL, item_hash INTEGER NOT NULL, path BLOB NOT NULL,
    PRIMARY KEY (feed, item_hash, path)) WITHOUT ROWID;
CREATE TABLE quota (
    identity BLOB NOT NULL, day TEXT NOT NULL, units INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (day, identity)) WITHOUT ROWID
"""
# versions: the time by which the newest known version
# of an object directly in a folder existed, where a listing may be older. removed_listings: their children go with later
# writes. feed: the change feed that watches the row, or NULL. item_hash, folder_hash: hashes of the ids of the item and
# of its folder. folders: paths of the folders that lead to watched items.


@functools.lru_cache(64)
def origin_of(identity: str) -> int:
    """Return a 64-bit hash of an identity, the same in every index."""
    data = identity.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


blob_of = methodcaller("encode", "utf-8", "surrogatepass")
text_of = methodcaller("decode", "utf-8", "surrogatepass")
