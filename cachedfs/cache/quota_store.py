"""The use of a service's daily quota by account, summed over all processes and kept for 60 days."""

from __future__ import annotations

from collections.abc import Mapping

from cachedfs.cache.directory import CacheDirectory

__all__ = ["QuotaStore"]


class QuotaStore:
    """Units and bytes by the identity of an account and by day ("2026-11-25"), in the SQLite index."""

    def __init__(self, own: CacheDirectory) -> None:
        self._own = own

    def add(self, identity: str, day: str, units: int, n_bytes: int) -> tuple[int, int]:
        """Add units and bytes; return the sums of the day. Raises CacheError."""
        with self._own.writing("the use of the quota cannot be stored") as rows:
            rows.add_quota(identity, day, units, n_bytes)
            return rows.quota_of(day)[identity]

    def of_day(self, day: str) -> Mapping[str, tuple[int, int]]:
        """Return the sums of a day by identity; empty if the index cannot be read."""
        return self._own.query(lambda rows: rows.quota_of(day), {})

    def of_account(self, identity: str, day: str) -> tuple[int, int]:
        """Return the sums of one account; zeros if nothing is stored, or if the index cannot be read."""
        return self.of_day(day).get(identity, (0, 0))
