"""Rows of the index that count what accounts use of a service's daily quota."""

from __future__ import annotations

from cachedfs.cache.index.schema import TableRows, blob_of, text_of

__all__ = ["QuotaRows"]

_ADD = """INSERT INTO quota VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE
    SET units = units + excluded.units, bytes = bytes + excluded.bytes"""


class QuotaRows(TableRows):
    """SQL statements on the use of quotas, by account and day ("2026-11-25")."""

    def add_quota(self, identity: str, day: str, units: int, n_bytes: int) -> None:
        """Add units and bytes to a row; delete rows that are older than 60 days."""
        self.run(_ADD, (blob_of(identity), day, units, n_bytes))
        self.run("DELETE FROM quota WHERE day < date(?, '-60 days')", (day,))

    def quota_of(self, day: str) -> dict[str, tuple[int, int]]:
        """Return units and bytes on one day, by the identity of the account."""
        rows = self.run("SELECT identity, units, bytes FROM quota WHERE day = ?", (day,))
        return {text_of(identity): (int(units), int(n_bytes)) for identity, units, n_bytes in rows}
