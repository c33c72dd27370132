"""Rows of the index that count what is cached: blocks and their objects, pins and local copies.

The block files are authoritative; the rows only count them. A row is written before its file and deleted after it,
so a crash may count too much but never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cachedfs.cache.index.schema import TableRows, blob_of, origin_of, text_of
from cachedfs.common.types import ObjectKey

__all__ = ["BlockRow", "BlockRows", "CachedPath", "LeaseRow"]

_BLOCK = """SELECT blocks.id, digest, number, size, hash, clock, since, writer, pinned
    FROM blocks JOIN objects ON objects.id = blocks.object """

_BELOW = """SELECT id FROM objects WHERE origin = ? AND path = ?
    UNION ALL SELECT id FROM objects WHERE origin = ? AND path > ? AND path < ?"""


class BlockRow(NamedTuple):
    """The row of one block.

    `clock` is the access clock when the block was stored, `since` the time in seconds. `writer` is the number of the
    process that stored it, which holds the lock on that number while it lives.
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


class CachedPath(NamedTuple):
    """Cached data of one path: bytes, number of blocks, and when the first and the last were stored, in seconds.

    A time is None if it is not known, as for blocks that were counted again from their files.
    """

    path: str
    size: int
    blocks: int
    first_s: float | None
    last_s: float | None


class LeaseRow(NamedTuple):
    """The row of one local copy, named by a number in hex; its process holds the lock on that number.

    The upper half of the number is the process id, for systems without locks across processes. The rest is random.
    """

    name: str
    size: int

    @property
    def owner_lock(self) -> int:
        return int(self.name[:16], 16)  # a suffix may follow

    @property
    def pid(self) -> int:
        return self.owner_lock >> 32


class BlockRows(TableRows):
    """SQL statements on blocks, pins and local copies."""

    # Blocks

    def block(self, key: ObjectKey, index: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE digest = ? AND number = ?", (key.digest, index))

    def block_by_id(self, id: int) -> BlockRow | None:
        return self._one(_BLOCK + "WHERE blocks.id = ?", (id,))

    def add_block(
        self, key: ObjectKey, index: int, *, size: int, clock: int, since: float, writer: int
    ) -> None:
        """Add the row of a block that will be written, or was found on disk; replace an existing row."""
        hash64 = key.hash64(index)
        signed = hash64 - (1 << 64) if hash64 >> 63 else hash64
        at = origin_of(key.identity), blob_of(key.path)
        self._run(
            "INSERT OR IGNORE INTO objects (digest, origin, path, pinned)"
            " VALUES (?, ?, ?, EXISTS (SELECT 1 FROM pins WHERE origin = ? AND path = ?))",
            (key.digest, *at, *at),
        )
        self._run(
            "INSERT INTO blocks (object, number, size, hash, clock, since, writer)"
            " SELECT id, ?, ?, ?, ?, ?, ? FROM objects WHERE digest = ?"
            " ON CONFLICT (object, number) DO UPDATE SET size = excluded.size, clock = excluded.clock,"
            " since = excluded.since, writer = excluded.writer",
            (index, size, signed, clock, since, writer, key.digest),
        )

    def n_reserved(self, after: int, writer: int) -> int:
        """Return how many blocks with a row id above `after` a process has reserved."""
        values = (after, writer)
        return int(self._run("SELECT count(*) FROM blocks WHERE id > ? AND writer = ?", values).fetchone()[0])

    def release_block(self, id: int) -> None:
        """Keep a row but clear its writer, so that any process may write the block at once."""
        self._run("UPDATE blocks SET writer = 0, since = 0 WHERE id = ?", (id,))

    def remove_block(self, id: int) -> None:
        self._run("DELETE FROM blocks WHERE id = ?", (id,))

    def forget_blocks(self) -> None:
        self._run("DELETE FROM blocks")

    def resize_block(self, id: int, size: int) -> None:
        self._run("UPDATE blocks SET size = ? WHERE id = ?", (size, id))

    def blocks_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` blocks with a row id above `id`, oldest row first."""
        return self._all(_BLOCK + "WHERE blocks.id > ? ORDER BY blocks.id LIMIT ?", (id, limit))

    def settled_after(self, id: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` unpinned blocks out of staging with a row id above `id`, oldest row first."""
        where = "WHERE blocks.id > ? AND blocks.id <= (SELECT value FROM meta WHERE name = 'settled') AND NOT pinned"
        return self._all(f"{_BLOCK}{where} ORDER BY blocks.id LIMIT ?", (id, limit))

    def settle(self, last: int) -> None:
        """Move all blocks up to row `last` out of staging; those that may not stay must be removed before."""
        first = self.number("settled") or 0
        (size,) = self._run(
            "SELECT total(size) FROM blocks WHERE id > ? AND id <= ?", (first, last)
        ).fetchone()
        self._run("UPDATE meta SET value = value - ? WHERE name = 'staged'", (int(size),))
        self.record("settled", max(first, last))

    def last_block(self) -> int:
        """Return the highest row id of a block; 0 without blocks."""
        return int(self._run("SELECT coalesce(max(id), 0) FROM blocks").fetchone()[0])

    def blocks_of(self, identity: str | None, path: str | None, *, after: int, limit: int) -> list[BlockRow]:
        """Return up to `limit` blocks of a path and everything below it, of an origin, or of all origins.

        Includes all versions of each object.
        """
        if identity is None:
            return self.blocks_after(after, limit)
        # "+" disables the index on origins, with which SQLite would sort all blocks of the origin for each batch.
        where = "WHERE +origin = ? AND blocks.id > ?"
        values: list[Any] = [origin_of(identity), after]
        if path is not None:
            # "0" is the character after "/": all paths below the folder are between the two.
            where += " AND (path = ? OR (path > ? AND path < ?))"
            values += [blob_of(path), blob_of(f"{path}/"), blob_of(f"{path}0")]
            if not after:  # most evictions are small: look only at the blocks of the matching objects
                where += f" AND objects.id IN ({_BELOW})"
                values += [values[0], values[2], values[0], *values[3:5]]
        return self._all(f"{_BLOCK}{where} ORDER BY blocks.id LIMIT ?", (*values, limit))

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths with cached blocks, sorted: `path` and everything below it; empty means the whole origin."""
        statement = "SELECT DISTINCT path FROM objects WHERE origin = ?"
        values: list[Any] = [origin_of(identity)]
        if path:
            statement += " AND (path = ? OR (path > ? AND path < ?))"
            values += [blob_of(path), blob_of(f"{path}/"), blob_of(f"{path}0")]
        return [text_of(found) for (found,) in self._run(f"{statement} ORDER BY path", values)]

    def held(self) -> list[CachedPath]:
        """Return what is cached of each path of all origins, sorted by path."""
        rows = self._run(
            "SELECT path, sum(size), count(*), min(nullif(since, 0)), max(nullif(since, 0))"
            " FROM blocks JOIN objects ON objects.id = blocks.object GROUP BY path ORDER BY path"
        )
        return [CachedPath(text_of(path), *values) for path, *values in rows]

    def last_clock(self) -> int:
        """Return the access clock of the block stored last; 0 without blocks."""
        row = self._run("SELECT clock FROM blocks ORDER BY id DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    def recount_objects(self) -> None:
        self._run("UPDATE objects SET bytes = (SELECT total(size) FROM blocks WHERE object = objects.id)")
        self._run("DELETE FROM objects WHERE bytes <= 0")

    def _one(self, statement: str, values: Sequence[Any]) -> BlockRow | None:
        row = self._run(statement, values).fetchone()
        return row and BlockRow._make(row)

    def _all(self, statement: str, values: Sequence[Any]) -> list[BlockRow]:
        return [BlockRow._make(row) for row in self._run(statement, values)]

    # Pins

    def pin(self, identity: str, path: str, wanted: bool) -> None:
        """Set or remove the pin of `path`, which protects its present and future blocks from eviction."""
        origin, blob = origin_of(identity), blob_of(path)
        if wanted:
            self._run("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", (origin, blob, blob_of(identity)))
        else:
            self._run("DELETE FROM pins WHERE origin = ? AND path = ?", (origin, blob))
        self._run("UPDATE objects SET pinned = ? WHERE origin = ? AND path = ?", (wanted, origin, blob))

    def pins(self) -> list[tuple[str, str]]:
        rows = self._run("SELECT identity, path FROM pins ORDER BY identity, path")
        return [(text_of(identity), text_of(path)) for identity, path in rows]

    def has_pins(self) -> bool:
        return self._run("SELECT max(origin) FROM pins").fetchone()[0] is not None

    def is_pinned(self, identity: str, path: str) -> bool:
        values = (origin_of(identity), blob_of(path))
        return self._run("SELECT 1 FROM pins WHERE origin = ? AND path = ?", values).fetchone() is not None

    def has_pinned_object(self, digest: str) -> bool:
        """Return whether an object with cached blocks is pinned, given its digest."""
        found = self._run("SELECT 1 FROM objects WHERE digest = ? AND pinned", (digest,)).fetchone()
        return found is not None

    # Local copies

    def add_lease(self, name: str, size: int) -> None:
        self._run("INSERT OR IGNORE INTO leases (name, size) VALUES (?, ?)", (name, size))

    def remove_lease(self, name: str) -> None:
        self._run("DELETE FROM leases WHERE name = ?", (name,))

    def leases(self) -> list[LeaseRow]:
        return [LeaseRow._make(row) for row in self._run("SELECT name, size FROM leases")]
