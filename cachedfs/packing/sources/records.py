"""Base class of sources that read the records of each file in sequence: lines, or rows of tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from cachedfs.packing.pack_types import SampleBatch
from cachedfs.packing.sources.sample_source import SampleSource

__all__ = ["RecordSource"]


class RecordSource(SampleSource):
    """Base class of sources with one sample for each record: a row of an Arrow table, or a line of bytes."""

    record = "row"

    def chunks(self, number: int) -> Iterator[Any]:
        """Yield the records of a file in order: tables, or blocks of lines."""
        raise NotImplementedError

    def batch(self, records: Any, number: int) -> SampleBatch:
        """Return records as samples. Raises ValueError if one does not fit the fields."""
        raise NotImplementedError

    def n_of(self, records: Any) -> int:
        return len(records)

    def first(self, records: Any, n: int) -> Any:
        """Return the first `n` records."""
        return records.slice(0, n)

    def read(self, number: int) -> Iterator[SampleBatch]:
        row = 0
        for records in self.chunks(number):
            yield self.checked(records, number, row)
            row += self.n_of(records)

    def checked(
        self, records: Any, number: int, row: int = 0, parse: Callable[[Any, int], Any] | None = None
    ) -> Any:
        """Return `parse(records, number)`, by default `batch`. A ValueError names the first bad record."""
        parse = parse or self.batch
        try:
            return parse(records, number)
        except ValueError as error:

            def fails(n: int) -> bool:
                try:
                    parse(self.first(records, n), number)
                except ValueError:
                    return True
                return False

            bad = bisect_left(range(1, self.n_of(records)), True, key=fails)
            where = f"{self.files.shown(number)}, {self.record} {row + bad + 1:,}"
            raise ValueError(f"{where}: {self.problem(records, bad, error)}") from error

    def problem(self, records: Any, bad: int, error: Exception) -> str:
        """Return what is wrong with record number `bad`, for which `batch` raised an error."""
        return str(error)
