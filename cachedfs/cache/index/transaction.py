"""The bookkeeping of the cache in SQLite: the rows of one cache, lent in transactions.

Every SQL statement of the package is here, in `schema`, and in the modules of the rows: `block_rows` (what is counted),
`fact_rows` and `feed_rows` (what is known).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator

from cachedfs.cache.index.block_rows import BlockRows
from cachedfs.cache.index.database import Database
from cachedfs.cache.index.metadata_rows import MetadataRows
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
"""What the index may raise. All but the first two: a row that is damaged, as columns of SQLite hold values of any type."""


class CacheIndex:
    """The index of one cache: `reading` and `writing` lend its rows; writing is one transaction."""

    def __init__(
        self, path: str, *, is_network: bool, locks: ByteRangeLocks, temp: Callable[[], str]
    ) -> None:
        self.database = Database(
            path, schema=SCHEMA.strip(), version=VERSION, is_network=is_network, locks=locks, temp=temp
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


class IndexRows(BlockRows, MetadataRows):
    """All rows, as one transaction sees them. What changes some needs a lender that was asked for `writing`."""

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
