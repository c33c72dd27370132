"""The use of a service's daily quota by account, summed over all processes and kept for 60 days."""

from __future__ import annotations

from collections.abc import Mapping

from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.schema import blob_of, text_of

_ADD = """INSERT INTO quota VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE
    SET units = units + excluded.units, bytes = bytes + excluded.bytes RETURNING units, bytes"""


class QuotaStore:
    """Units and bytes by the identity of an account and by day ("2026-11-25"), in the SQLite index."""

    def __init__(self, own: CacheDirectory) -> None:
        self._own = own

    def add(self, identity: str, day: str, units: int, n_bytes: int) -> tuple[int, int]:
        """Add units and bytes; return the sums of the day. Raises CacheError."""
        with self._own.writing("the use of the quota cannot be stored") as rows:
            rows.run("DELETE FROM quota WHERE day < date(?, '-60 days')", (day,))
            sums: tuple[int, int] = rows.run(_ADD, (blob_of(identity), day, units, n_bytes)).fetchone()
            return sums

    def of_day(self, day: str) -> Mapping[str, tuple[int, int]]:
        """Return the sums of a day by identity; empty if the index cannot be read."""
        statement = "SELECT identity, units, bytes FROM quota WHERE day = ?"
        return self._own.query(
            lambda rows: {text_of(who): (int(u), int(n)) for who, u, n in rows.run(statement, (day,))}, {}
        )

    def of_account(self, identity: str, day: str) -> tuple[int, int]:
        """Return the sums of one account; zeros if nothing is stored, or if the index cannot be read."""
        return self.of_day(day).get(identity, (0, 0))
