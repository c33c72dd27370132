"""Rows of the index that count what is cached: blocks, and pins.

The block files are authoritative; the rows only count them. A row is written before its file and deleted after it,
so a crash may count too much but never too little.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cachedfs.cache.index.schema import LOAD_TOTALS, Totals, blob_of, origin_of, text_of
from cachedfs.common.types import GOLDEN, MASK64, BlockKey, ObjectKey

_BLOCK = "SELECT blocks.id, name, size, clock, stored_at, writer, is_pinned FROM blocks "

_BELOW = """SELECT name FROM blocks WHERE origin = ? AND path = ?
    UNION ALL SELECT name FROM blocks WHERE origin = ? AND path > ? AND path < ?"""
_ADD = "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SUMS = """SELECT (SELECT count(*) FROM blocks),
    (SELECT total(size) FROM blocks),
    (SELECT total(size) FROM blocks WHERE is_pinned),
    (SELECT total(size) FROM blocks WHERE id > ?),
    (SELECT count(*) FROM metadata) + (SELECT count(*) FROM children), (SELECT count(*) FROM pins)"""


class BlockRow(NamedTuple):
    """The row of one block.

    `clock` is the access clock when the block was stored, `stored_at` the time in seconds. `writer` is the number of
    the process that stored it, which holds the lock on that number while it lives.
    """

    id: int
    name: str
    size: int
    clock: int
    stored_at: float
    writer: int
    is_pinned: int

    @property
    def place(self) -> tuple[str, int]:
        """The digest of the object version, and the index of the block in it."""
        digest, _, index = self.name.partition("-")
        return digest, int(index, 16)

    @property
    def hash64(self) -> int:
        digest, index = self.place
        return int(digest[:16], 16) + index * GOLDEN & MASK64


class CachedPath(NamedTuple):
    """Cached data of one path: bytes, number of blocks, and when the first and the last were stored, in seconds.

    A time is None if it is not known, as for blocks that were counted again from their files.
    """

    path: str
    size: int
    blocks: int
    first_s: float | None
    last_s: float | None


class IndexRows:
    """A connection to the index file `inode`, with the statements on blocks and pins.

    Those that change rows need a write transaction, and also change the totals. `seen`: the state of the folder of the
    file, or True, if the file was found to be the one at the path; None: check again.
    """

    totals: Totals  # set in transactions
    inode = 0  # 0: it is closed, or must be
    seen: object = None

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.sqlite = connection
        self.run = connection.execute
        self.run_many = connection.executemany

    def limit_wal(self, pages: int) -> None:
        """Limit the write-ahead log to about `pages` pages of 4 KiB."""
        self.run(f"PRAGMA wal_autocheckpoint={pages}")
        self.run(f"PRAGMA journal_size_limit={pages * 4096}")

    def load_totals(self) -> Totals:
        """Read the totals, outside of a write transaction."""
        return Totals(*self.run(LOAD_TOTALS).fetchone())

    def sums(self) -> dict[str, int]:
        """Return the totals that can be computed from the rows."""
        found = self.run(_SUMS, (self.totals.last_admitted,)).fetchone()
        names = "blocks", "bytes", "pinned", "staged", "entries", "pins"
        return dict(zip(names, map(int, found), strict=True))

    # Blocks

    def find_blocks(self, names: Iterable[str]) -> dict[str, BlockRow]:
        """Return the rows of the blocks with these names, by name; of absent ones nothing."""
        found = self._all(
            _BLOCK + "WHERE name IN (SELECT value FROM json_each(?))", (json.dumps(list(names)),)
        )
        return {block.name: block for block in found}

    def block(self, key: ObjectKey, index: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE name = ?", (key.name(index),))

    def block_by_id(self, id: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE blocks.id = ?", (id,))

    def add_blocks(
        self, blocks: Iterable[tuple[BlockKey, int]], clock: int, stored_at: float, writer: int
    ) -> None:
        """Add rows of blocks without one, given with their sizes, which will be written or were found on disk."""
        totals, added = self.totals, []
        for key, size in blocks:
            version, is_pinned = key.object, totals.pins > 0 and self.is_pinned(key.object)
            totals.last_block += 1
            totals.blocks += 1
            totals.bytes += size
            totals.staged += size
            totals.pinned += size * is_pinned
            place = origin_of(version.identity), blob_of(version.path)
            name = f"{version.digest}-{key.index:x}"
            added.append((totals.last_block, name, size, clock, stored_at, writer, is_pinned, *place))
        self.run_many(_ADD, added)

    def release_block(self, id: int) -> None:
        """Keep a row but clear its writer, so that any process may write the block at once."""
        self.run("UPDATE blocks SET writer = 0, stored_at = 0 WHERE id = ?", (id,))

    def remove_block(self, block: BlockRow) -> None:
        self.run("DELETE FROM blocks WHERE id = ?", (block.id,))
        totals = self.totals
        totals.blocks -= 1
        totals.bytes -= block.size
        totals.pinned -= block.size if block.is_pinned else 0
        totals.staged -= block.size if block.id > totals.last_admitted else 0

    def blocks_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` blocks with a row id above `id`, oldest row first."""
        return self._all(_BLOCK + "WHERE blocks.id > ? ORDER BY blocks.id LIMIT ?", (id, limit))

    def admitted_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` unpinned blocks out of staging with a row id above `id`, oldest row first."""
        where = "WHERE blocks.id > ? AND blocks.id <= ? AND NOT is_pinned ORDER BY blocks.id LIMIT ?"
        return self._all(_BLOCK + where, (id, self.totals.last_admitted, limit))

    def names_of(self, identity: str | None, path: str | None) -> list[str]:
        """Return the names of the blocks of a path and all below it, of an origin, or of all."""
        if identity is None:
            found = self.run("SELECT name FROM blocks")
        elif path is None:
            found = self.run("SELECT name FROM blocks WHERE origin = ?", (origin_of(identity),))
        else:
            origin, (here, first, last) = origin_of(identity), _places_below(path)
            found = self.run(_BELOW, (origin, here, origin, first, last))
        return [name for (name,) in found]

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths with cached blocks, sorted: `path` and everything below it; empty means the whole origin."""
        statement, values = "SELECT DISTINCT path FROM blocks WHERE origin = ?", [origin_of(identity)]
        if path:
            statement += " AND (path = ? OR (path > ? AND path < ?))"
            values += _places_below(path)
        return [text_of(found) for (found,) in self.run(f"{statement} ORDER BY path", values)]

    def cached_paths(self) -> list[CachedPath]:
        """Return what is cached of each path of all origins, sorted by path."""
        rows = self.run(
            "SELECT path, sum(size), count(*), min(nullif(stored_at, 0)), max(nullif(stored_at, 0))"
            " FROM blocks GROUP BY path ORDER BY path"
        )
        return [CachedPath(text_of(path), *values) for path, *values in rows]

    def last_clock(self) -> int:
        """Return the access clock of the block stored last; 0 without blocks."""
        row = self.run("SELECT clock FROM blocks ORDER BY id DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    def _one(self, statement: str, values: Sequence[Any]) -> BlockRow | None:
        row = self.run(statement, values).fetchone()
        return row and BlockRow._make(row)

    def _all(self, statement: str, values: Sequence[Any]) -> list[BlockRow]:
        return [BlockRow._make(row) for row in self.run(statement, values)]

    # Pins

    def pin(self, identity: str, path: str, wanted: bool) -> None:
        """Set or remove the pin of `path`, which protects its present and future blocks from eviction."""
        at = origin_of(identity), blob_of(path)
        if wanted:
            changed = self.run("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", (*at, blob_of(identity)))
        else:
            changed = self.run("DELETE FROM pins WHERE origin = ? AND path = ?", at)
        if not changed.rowcount:
            return
        self.run("UPDATE blocks SET is_pinned = ? WHERE origin = ? AND path = ?", (wanted, *at))
        (size,) = self.run("SELECT total(size) FROM blocks WHERE origin = ? AND path = ?", at).fetchone()
        self.totals.pins += 1 if wanted else -1
        self.totals.pinned += int(size) if wanted else -int(size)

    def pins(self) -> list[tuple[str, str]]:
        rows = self.run("SELECT identity, path FROM pins ORDER BY identity, path")
        return [(text_of(identity), text_of(path)) for identity, path in rows]

    def is_pinned(self, key: ObjectKey) -> bool:
        values = (origin_of(key.identity), blob_of(key.path))
        return self.run("SELECT 1 FROM pins WHERE origin = ? AND path = ?", values).fetchone() is not None


def _places_below(path: str) -> list[Any]:
    """Return a path, and the two between which all paths below it are: "0" is the character after "/"."""
    return [blob_of(path), blob_of(f"{path}/"), blob_of(f"{path}0")]
