"""The SQLite index of one cache: all its rows, available in transactions.

All SQL statements of the package are here, in `schema`, in `block_rows` (what is cached), in `metadata_rows` and in
`quota_rows`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator

from cachedfs.cache.index.block_rows import BlockRows
from cachedfs.cache.index.database import Database
from cachedfs.cache.index.metadata_rows import MetadataRows
from cachedfs.cache.index.quota_rows import QuotaRows
from cachedfs.cache.index.schema import SCHEMA, VERSION
from cachedfs.cache.locks import ByteRangeLocks

__all__ = ["TROUBLE", "CacheIndex", "IndexRows"]

TROUBLE = (
    sqlite3.Error,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
)
"""Errors of the index. All but the first two come from damaged rows: SQLite columns hold values of any type."""


class CacheIndex:
    """The index of one cache: `reading` and `writing` provide its rows; `writing` is one transaction."""

    def __init__(self, path: str, *, has_wal: bool, locks: ByteRangeLocks, temp: Callable[[], str]) -> None:
        self.database = Database(
            path, schema=SCHEMA.strip(), version=VERSION, has_wal=has_wal, locks=locks, temp=temp
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[IndexRows]:
        with self.database.reading() as connection:
            yield IndexRows(connection)

    @contextlib.contextmanager
    def writing(self) -> Iterator[IndexRows]:
        with self.database.writing() as connection:
            yield IndexRows(connection)

    def close(self) -> None:
        self.database.close()


class IndexRows(BlockRows, MetadataRows, QuotaRows):
    """All rows as seen by one transaction. Methods that change rows need `writing`."""

    def sums(self) -> dict[str, int]:
        """Return "blocks", "bytes", "fixed", "staged" and "facts", computed from the rows."""
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
