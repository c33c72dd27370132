"""Base classes of sources, and what several of them use: names of fields, files to look at, texts as arrays."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from cachedfs.packing.pack_types import OFFSETS, WORK_FOLDER, Array, Field, SampleBatch, empty_batch
from cachedfs.packing.sources.source_files import BadFile, SourceFiles

PIECE = 16 << 20  # bytes of a source that are read and decoded at a time
PER_PART = 4096  # most files that are read as one part
# Largest sample in bytes, if it must fit in memory. Samples that are copied as bytes may have any size.
MAX_SAMPLE = 128 << 20
NAMES = "names"  # field with the name of each sample in the source

Found = TypeVar("Found")


class Counts(NamedTuple):
    """The counted samples of some files: `lengths` of big fields; `batches` with small fields and all sizes."""

    lengths: dict[str, int]
    batches: list[SampleBatch]


class SampleSource:
    """Base class of sources, which read the samples of files in order.

    Sources pickle. `look` sets `fields`, `shared` and `group_attributes`. The plan then replaces the fields by the same
    ones with `is_small` set.
    """

    may_skip: ClassVar[bool] = False  # True: files that cannot be read or decoded can be left out
    is_prefetched = True  # False: reads of many files are requested together
    notes: Sequence[str] = ()  # what `look` found and the user should know
    fields: tuple[Field, ...] = ()
    shared: Sequence[tuple[Field, Array]] = ()  # arrays that are not cut into samples, with all their axes
    total_size: int | None = None  # bytes of all big fields, if they are the files' bytes

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        self.files, self.columns = files, columns
        # By the path of the group; "": the store's own.
        self.group_attributes: Mapping[str, Mapping[str, Any]] = {}

    def look(self) -> list[SampleBatch]:
        """Set `fields`, and return some samples. The caller must call it once, before any other method."""
        raise NotImplementedError

    def parts(self) -> list[range]:
        """Return the numbers of the files, cut into parts that are read one by one: a large file, or many small ones."""
        found, start, size = [], 0, 0
        for number, n in enumerate(self.files.sizes.tolist()):
            if number > start and (size + n > PIECE or number == start + PER_PART):
                found.append(range(start, number))
                start, size = number, 0
            size += n
        return [*found, range(start, len(self.files))]

    def known(self, numbers: range) -> Counts | None:
        """Return the counts of some files if the listing tells them."""
        return None

    def batches(self, numbers: range) -> Iterator[SampleBatch]:
        """Read some files in order, a few MB at a time."""
        for number in numbers:
            if number in self.files.removed:
                continue
            is_begun = False
            try:
                for batch in self.read(number):
                    yield batch
                    is_begun = True
            except BadFile as error:
                if is_begun:  # samples of this file may be in the store
                    raise
                yield empty_batch(self.fields, {number: error.reason})

    def read(self, number: int) -> Iterator[SampleBatch]:
        """Read a file. Raises BadFile for one that can be left out if nothing of it was returned."""
        raise NotImplementedError


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
            where = f"{self.files.url_of(number)}, {self.record} {row + bad + 1:,}"
            raise ValueError(f"{where}: {self.problem(records, bad, error)}") from error

    def problem(self, records: Any, bad: int, error: Exception) -> str:
        """Return what is wrong with record number `bad`, for which `batch` raised an error."""
        return str(error)


def joined(parts: Iterable[bytes | str]) -> tuple[Array, Array]:
    """Return texts as one array of bytes (UTF-8), and the length of each."""
    datas = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return np.frombuffer(b"".join(datas), "u1"), np.fromiter(map(len, datas), np.int64, len(datas))


def checked_fields(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Return the fields. Raises ValueError if they cannot be arrays of one Zarr group."""
    fields, advice = tuple(fields), "columns= says which columns to pack"
    taken = Counter(field.name for field in fields)
    taken.update(field.name + OFFSETS for field in fields if field.is_ragged)
    folders = {name[:i] for name in taken for i, character in enumerate(name) if character == "/"}
    for field in fields:
        if not is_array_name(field.name) or field.name in folders:
            raise ValueError(f"{field.name!r} cannot be the name of an array; {advice}")
        if not all(field.shape):
            raise ValueError(f"{field.name!r} is {field}, which has no values; {advice}")
    if twice := [name for name, n in taken.items() if n > 1]:
        names = [field.name for field in fields]
        raise ValueError(f"two arrays would be called {twice[0]!r}, of {names}; {advice}")
    return fields


def is_array_name(name: str) -> bool:
    parts = name.split("/")
    return (
        all(part and set(part) != {"."} and not part.startswith("__") for part in parts)
        and "\\" not in name  # a path separator on Windows
        and parts[-1] != "zarr.json"
        and parts[0] != WORK_FOLDER
    )


def names_of(columns: Any, advice: str) -> list[str] | None:
    """Return the user's `columns` as a list of names. Raises ValueError, with advice, for anything else."""
    if columns is None:
        return None
    names = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(columns, Mapping) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"columns={columns!r}: {advice}")
    return names


def without_bad(numbers: Iterable[int], read: Callable[[int], Found]) -> Iterator[tuple[int, Found]]:
    """Yield the number of each file and what `read` returns for it, without files for which it raises BadFile.

    If all are bad, this raises the first error.
    """
    bad: tuple[Any, ...] = ()
    is_any = False
    for number in numbers:
        try:
            found = read(number)
        except BadFile as error:
            bad = bad or error.args  # not the error: its traceback would keep files open
            continue
        is_any = True
        yield number, found
    if bad and not is_any:
        raise BadFile(*bad)


def spread(n: int, most: int) -> list[int]:
    """Return up to `most` numbers below `n`, evenly spaced, with the first and the last."""
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / max(1, most - 1)) for i in range(most)})
