"""HDF5 files as a source: rows of datasets along the first axis, several files in sequence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import h5py
import numpy as np

from cachedfs.datasets.hdf5_features import elsewhere, unreadable
from cachedfs.packing.pack_types import END, Array, Field, SampleBatch, SourcePiece
from cachedfs.packing.sources.sample_source import PIECE, BadFile, DecodedSource, SourceFiles
from cachedfs.packing.sources.source_tools import checked_fields, joined, looked_at, names_of

__all__ = ["HDF5Source"]

SAMPLED_SIZE = 4 << 20  # bytes of each dataset that `look` reads
ROWS = 1024  # most variable-length rows in one read: their size is unknown before it
READ_SIZE = 1 << 20  # bytes of such a read, estimated from the rows before it
MAX_OPEN = 4  # largest number of open files
KIND = attrgetter("dtype", "shape", "is_ragged")  # what must be equal in all files
NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # largest item size that Zarr supports, by NumPy kind


class HDF5Source(DecodedSource):
    """A source with one field for each dataset; sample `i` is row `i` of all of them.

    HDF5 groups become Zarr groups. Pieces count rows from the start of their file.
    """

    kind = "hdf5"
    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, names_of(columns, "datasets keep their types: give a list of names"))
        self._open_files = _OpenFiles()

    def look(self) -> list[SampleBatch]:
        first = self._first()
        with self._open_files.file(self.files, first) as file:
            found, where = self._datasets(file, first), self.files.shown(first)
            names = self.columns or list(found)
            missing = [name for name in names if name not in found]
            for name in missing or ([] if names else file):
                if linked := elsewhere(file, name):
                    raise ValueError(f"{where}: {name!r} {linked}")
            if missing:
                raise ValueError(f"{where}: no datasets {missing}; there are {', '.join(found) or 'none'}")
            if not names:
                raise ValueError(f"{where}: has no datasets with rows")
            fields = [_field(name, found[name], where) for name in names]
            n = self._n_rows(found, fields, where)
            self.fields = checked_fields(fields)
            return [self._read(file, SourcePiece(first, 0, END), n, SAMPLED_SIZE)]

    def _first(self) -> int:
        """Return the number of the first file with rows; of the first one if none has rows."""
        first = None
        for number, has_rows in looked_at(self.files.numbers, self._has_rows):
            if has_rows:
                return number
            first = number if first is None else first
        return first or 0

    def _has_rows(self, number: int) -> bool:
        with self._open_files.file(self.files, number) as file:
            found = self._datasets(file, number)
            return any(found[name].shape[0] for name in self.columns or found if name in found)

    def read(self, piece: SourcePiece) -> SampleBatch:
        with self._open_files.file(self.files, piece.file) as file:
            n = file[self.fields[0].name].shape[0] if piece.start else self._checked(file, piece.file)
            return self._read(file, piece, n, PIECE)

    def _read(self, file: Any, piece: SourcePiece, n: int, size: int) -> SampleBatch:
        """Read rows from the start of a piece on, about `size` bytes, of a file with `n` rows."""
        ragged = [field for field in self.fields if field.is_ragged]
        fixed = [field for field in self.fields if not field.is_ragged]
        rows = max(1, size // max(1, sum(field.row_size for field in fixed)))
        if chunks := file[max(fixed, key=lambda field: field.row_size).name].chunks if fixed else None:
            # Whole HDF5 chunks of the largest dataset, so that each is decoded once.
            rows = max(chunks[0], rows // chunks[0] * chunks[0])
        stop = min(n, piece.start + rows)
        parts = {field.name: [(np.empty(0, field.dtype), np.empty(0, np.int64))] for field in ragged}
        at, step, n_bytes = piece.start, 1, 0
        while ragged and at < stop and n_bytes < size:
            end, before = min(stop, at + step), n_bytes
            for field in ragged:
                parts[field.name].append(self._values(file, field, piece, at, end))
                n_bytes += sum(array.nbytes for array in parts[field.name][-1])
            # Few rows at first, because their size is unknown before.
            estimate = (end - at) * READ_SIZE // (n_bytes - before)
            at, step = end, max(1, min(2 * step, estimate, ROWS))
        stop = at if ragged else stop
        values = {field.name: self._values(file, field, piece, piece.start, stop)[0] for field in fixed}
        values |= {name: np.concatenate([values for values, _ in found]) for name, found in parts.items()}
        sizes = {name: np.concatenate([sizes for _, sizes in found]) for name, found in parts.items()}
        return SampleBatch(stop - piece.start, values, sizes, END if stop == n else stop)

    def _values(
        self, file: Any, field: Field, piece: SourcePiece, start: int, stop: int
    ) -> tuple[Array, Array]:
        try:
            return _values(file[field.name], field, start, stop)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.shown(piece)}: dataset {field.name!r} is not valid UTF-8: {error}; leave it out: columns=[...]"
            ) from error
        except Exception as error:  # h5py and the filesystem raise errors of many types
            error.add_note(f"in {self.shown(piece)}, dataset {field.name!r}")
            raise

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the rows from {piece.start:,} on"

    def _datasets(self, file: Any, number: int) -> dict[str, Any]:
        """Return the datasets with at least one axis, by name. Links count, except those to other files.

        Raises ValueError for a circular link, unless the user chose the datasets.
        """
        found: dict[str, Any] = {}
        for name, what in _all(file, file["/"], "", []):
            if what is not None and what.shape:
                found[name] = what
            elif what is None and self.columns is None:
                where = self.files.shown(number)
                raise ValueError(
                    f"{where}: {name!r} is a circular link; columns=[...] says which datasets to pack"
                )
        return found

    def _checked(self, file: Any, number: int) -> int:
        """Return the number of rows of a file. Raises ValueError if its datasets differ from the first file's."""
        found, where = self._datasets(file, number), self.files.shown(number)
        for field in self.fields:
            other = _field(field.name, found[field.name], where) if field.name in found else None
            if other is None or KIND(other) != KIND(field):
                raise ValueError(
                    f"{where}: dataset {field.name!r} is {other or 'not there'}, and {field} in the first file"
                )
        return self._n_rows(found, self.fields, where)

    def _n_rows(self, found: dict[str, Any], fields: Iterable[Field], where: str) -> int:
        lengths = {field.name: int(found[field.name].shape[0]) for field in fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"{where}: datasets of unequal length have no common samples: {lengths}; name those of one "
                "length: columns=[...]"
            )
        return next(iter(lengths.values()))


class _OpenFiles:
    """The open HDF5 files of this process, under one lock: the HDF5 library runs one call at a time.

    It pickles empty.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._files: dict[int, tuple[Any, Any]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    @contextlib.contextmanager
    def file(self, files: SourceFiles, number: int) -> Iterator[Any]:
        """Return a context manager for an open file, with the lock held. Raises BadFile if it is not HDF5."""
        with self._lock:
            if number not in self._files:
                while len(self._files) >= MAX_OPEN:
                    for each in self._files.pop(next(iter(self._files))):
                        each.close()
                raw = files.fs.open(files.paths[number], "rb")
                try:
                    self._files[number] = h5py.File(raw, "r"), raw
                except OSError as error:
                    raw.close()
                    raise BadFile(files.shown(number), f"h5py cannot read it as HDF5: {error}") from error
            yield self._files[number][0]


def _all(file: Any, group: Any, head: str, above: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each dataset in a group, and the dataset; None for a circular link.

    Not a function inside another: it would be in a reference cycle with the datasets. If the garbage collector freed
    them in the event loop's thread, that thread would wait for the HDF5 lock, whose owner waits for the loop.
    """
    for name in group:
        path = head + name
        if why := elsewhere(file, path):
            if "another file" not in why:
                yield path, None
            continue
        try:
            what = group[name]
        except KeyError:
            continue  # the target does not exist
        if isinstance(what, h5py.Dataset):
            yield path, what
        elif isinstance(what, h5py.Group) and what in [*above, group]:
            yield path, None
        elif isinstance(what, h5py.Group):
            yield from _all(file, what, f"{path}/", [*above, group])


def _field(name: str, data: Any, where: str) -> Field:
    """Return the field of a dataset. Raises ValueError for types that cannot be packed."""
    base = h5py.check_vlen_dtype(data.dtype)
    text = h5py.check_string_dtype(data.dtype)
    if problem := unreadable(data):
        raise ValueError(f"{where}: dataset {name!r} {problem}, or leave it out: columns=[...]")
    if text is not None and data.ndim == 1:
        return Field(name, "uint8", is_ragged=True, means="utf-8" if text.encoding == "utf-8" else "bytes")
    if base is not None and data.ndim == 1 and _is_number(np.dtype(base)):
        return Field(name, np.dtype(base).name, is_ragged=True)
    if _is_number(data.dtype) and base is None:
        return Field(name, data.dtype.newbyteorder("=").name, tuple(data.shape[1:]))
    raise ValueError(
        f"{where}: dataset {name!r} of type {data.dtype} and shape {data.shape} cannot be packed; leave it out: columns=[...]"
    )


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize <= NUMBERS.get(dtype.kind, 0)


def _values(data: Any, field: Field, start: int, stop: int) -> tuple[Array, Array]:
    """Return rows, or the elements of ragged rows and the number in each row."""
    rows = data[start:stop]
    if not field.is_ragged:
        return np.asarray(rows).astype(field.dtype, copy=False), np.empty(0, np.int64)
    if field.means:
        texts = [bytes(row) for row in rows]
        if field.means == "utf-8":
            for text in texts:
                text.decode()
        return joined(texts)
    # The empty array sets the type if there are no rows. NumPy's default, float64, cannot hold all integers.
    return np.concatenate([np.empty(0, field.dtype), *rows]), np.fromiter(map(len, rows), np.int64, len(rows))
