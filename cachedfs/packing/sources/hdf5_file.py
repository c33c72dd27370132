"""HDF5 files as a source: rows of datasets along the first axis, several files in sequence."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import h5py
import numpy as np

from cachedfs.datasets.hdf5_layout import (
    common_length,
    dataset_at,
    dimensions_of,
    fetch_headers,
    is_variable,
    members_of,
    native,
    unreadable,
)
from cachedfs.datasets.zarr_layout import with_samples
from cachedfs.packing.pack_types import Array, Field, SampleBatch
from cachedfs.packing.sources.hdf5_attributes import attributes_of, check_same
from cachedfs.packing.sources.sample_source import (
    MAX_SAMPLE,
    PIECE,
    SampleSource,
    checked_fields,
    is_array_name,
    joined,
    names_of,
    without_bad,
)
from cachedfs.packing.sources.source_files import BadFile, SourceFiles

SAMPLED_SIZE = 4 << 20  # bytes of each dataset that `look` reads
ROWS = 1024  # most variable-length rows in one read: their size is unknown before it
READ_SIZE = 1 << 20  # bytes of such a read, estimated from the rows before it
KIND = attrgetter("dtype", "shape", "is_ragged")  # what must be equal in all files
NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # largest item size that Zarr supports, by NumPy kind


class HDF5Source(SampleSource):
    """A source with one field for each dataset; sample `i` is row `i` of all of them.

    HDF5 groups become Zarr groups. Attributes and dimension names are those of the first file. Datasets along the other axes (`lat`, `lon`) and single values are shared by all samples.
    """

    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, names_of(columns, "datasets keep their types: give a list of names"))

    def look(self) -> list[SampleBatch]:
        first = self._first()
        with self._file(first) as file:
            datasets, groups = self._chosen(file)
            rows = _with_rows(datasets)
            notes: list[str] = []
            fields = [_field(name, datasets[name], notes) for name in rows]
            self.shared = self._shared({name: datasets[name] for name in datasets if name not in rows}, notes)
            self.group_attributes = {
                name: attributes_of(name, each, None, notes) for name, each in groups.items()
            }
            scales = {scale for name in rows for scale in dimensions_of(datasets[name]) if scale is not None}
            if left_out := [each.name[1:] for each in scales - {*datasets.values()} if is_variable(each)]:
                notes.append(f"left out, as columns= does not name it: {', '.join(sorted(left_out))}")
            self.notes = notes
            self.fields = checked_fields([*fields, *(field for field, _ in self.shared)])[: len(fields)]
            read = {name: datasets[name] for name in rows}
            return [self._rows(read, first, 0, SAMPLED_SIZE)[0]]

    def _chosen(
        self, file: Any, before: Callable[[Any], object] = lambda group: None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the datasets to pack, and the groups to keep, by name. Links count, except those to other files.

        `before` is called with each group before its members are read.
        """
        if self.columns is not None:
            datasets = {name: dataset_at(file, name) for name in self.columns}
            heads = {name[:i] for name in datasets for i, character in enumerate(name) if character == "/"}
            groups = {name: file[name] for name in sorted(heads)}
        else:
            members = dict(members_of(file["/"], before=before))
            if circular := [name for name, each in members.items() if each is None]:
                raise ValueError(
                    f"{circular[0]!r} is a circular link; columns=[...] says which datasets to pack"
                )
            datasets = {name: each for name, each in members.items() if isinstance(each, h5py.Dataset)}
            groups = {
                name: each
                for name, each in members.items()
                if isinstance(each, h5py.Group) and is_array_name(name)
            }
        if not any(data.shape for data in datasets.values()):
            for name in file:
                dataset_at(file, name)  # names a link to another file
            raise ValueError("has no datasets with rows; kind='files' packs whole files")
        return datasets, {"": file, **groups}

    def _shared(self, datasets: dict[str, Any], notes: list[str]) -> list[tuple[Field, Array]]:
        """Return what all samples share: datasets along the other axes, and single values of a single file."""
        found: list[tuple[Field, Array]] = []
        for name, data in datasets.items():
            try:
                if sum(values.nbytes for _, values in found) + data.nbytes > MAX_SAMPLE:
                    raise ValueError(f"{name!r}: what all samples share has more than 128 MiB")
                if not data.shape and self.columns is None and len(self.files) > 1:
                    raise ValueError(f"{name!r}: each file has one value")
                found.append((_field(name, data, notes, is_shared=True), _shared_values(data)))
            except ValueError as error:
                if self.columns is not None:
                    raise
                notes.append(f"left out: {error}")
        if found:
            notes.append(f"shared by all samples: {', '.join(field.name for field, _ in found)}")
        return found

    def _first(self) -> int:
        """Return the number of the first file with rows; of the first one if none has rows."""
        first = None
        for number, has_rows in without_bad(self.files.numbers, self._has_rows):
            if has_rows:
                return number
            first = number if first is None else first
        return first or 0

    def _has_rows(self, number: int) -> bool:
        with self._file(number) as file:
            datasets, _ = self._chosen(file, partial(fetch_headers, self.files.fs, self.files.paths[number]))
            return any(datasets[name].shape[0] for name in _with_rows(datasets))

    def read(self, number: int) -> Iterator[SampleBatch]:
        with self._file(number) as file:
            datasets = {field.name: dataset_at(file, field.name) for field in self.fields}
            self._check(file, datasets)
            row, n = 0, common_length(datasets)
            while row < n:
                batch, row = self._rows(datasets, number, row, PIECE)
                yield batch

    def _check(self, file: Any, datasets: dict[str, Any]) -> None:
        """Raise ValueError if the datasets of a file differ from the first file's."""
        for field in self.fields:
            other = _field(field.name, datasets[field.name], [])
            if KIND(other) != KIND(field):
                raise ValueError(f"{field.name!r} is {other}, and {field} in the first file")
            check_same(other, field)
        for field, values in self.shared:
            data = dataset_at(file, field.name)
            check_same(_field(field.name, data, [], is_shared=True), field)
            if not np.array_equal(values, _shared_values(data), equal_nan=values.dtype.kind in "fc"):
                raise ValueError(
                    f"{field.name!r}, which all samples share, has other values than in the first file; leave it out: columns=[...]"
                )

    @contextlib.contextmanager
    def _file(self, number: int) -> Iterator[Any]:
        """Return a context manager for an open file. Its ValueErrors name the file. Raises BadFile if it is not HDF5."""
        where = self.files.url_of(number)
        with self.files.fs.open(self.files.paths[number], "rb") as raw:
            try:
                file = h5py.File(raw, "r")
            except OSError as error:
                why = "it is of NetCDF 3; nccopy -k nc4 makes NetCDF 4 of it"
                why = why if self.files.head(number, 3) == b"CDF" else str(error)
                raise BadFile(where, f"h5py cannot read it as HDF5: {why}") from error
            with file:
                try:
                    yield file
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error

    def _rows(self, datasets: dict[str, Any], number: int, start: int, size: int) -> tuple[SampleBatch, int]:
        """Read about `size` bytes of rows; return them, and the number of the next row."""
        ragged = [field for field in self.fields if field.is_ragged]
        fixed = [field for field in self.fields if not field.is_ragged]
        rows = max(1, size // max(1, sum(field.row_size for field in fixed)))
        largest = max(fixed, key=lambda field: field.row_size, default=None)
        if largest and (chunks := datasets[largest.name].chunks):
            # Whole HDF5 chunks of the largest dataset, so that each is decoded once.
            rows = max(chunks[0], rows // chunks[0] * chunks[0])
        stop = min(common_length(datasets), start + rows)
        parts = {field.name: [(np.empty(0, field.dtype), np.empty(0, np.int64))] for field in ragged}
        at, step, n_bytes = start, 1, 0
        while ragged and at < stop and n_bytes < size:
            end, before = min(stop, at + step), n_bytes
            for field in ragged:
                parts[field.name].append(self._values(datasets, field, number, at, end))
                n_bytes += sum(array.nbytes for array in parts[field.name][-1])
            # Few rows at first, because their size is unknown before.
            estimate = (end - at) * READ_SIZE // (n_bytes - before)
            at, step = end, max(1, min(2 * step, estimate, ROWS))
        stop = at if ragged else stop
        values = {field.name: self._values(datasets, field, number, start, stop)[0] for field in fixed}
        values |= {name: np.concatenate([values for values, _ in found]) for name, found in parts.items()}
        sizes = {name: np.concatenate([sizes for _, sizes in found]) for name, found in parts.items()}
        return SampleBatch(values, sizes), stop

    def _values(
        self, datasets: dict[str, Any], field: Field, number: int, start: int, stop: int
    ) -> tuple[Array, Array]:
        try:
            return _values(datasets[field.name], field, start, stop)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the rows from {start:,} on: {field.name!r} is not valid UTF-8: {error}; leave it out: columns=[...]"
            ) from error
        except Exception as error:  # h5py and the filesystem raise errors of many types
            error.add_note(
                f"in {self.files.url_of(number)}, the rows from {start:,} on, dataset {field.name!r}"
            )
            raise


def _with_rows(datasets: dict[str, Any]) -> list[str]:
    """Return the names of the datasets whose rows are samples."""
    dimensions = {name: dimensions_of(data) for name, data in datasets.items()}
    return with_samples(dimensions, {name: data.shape for name, data in datasets.items()})


def _field(name: str, data: Any, notes: list[str], *, is_shared: bool = False) -> Field:
    """Return the field of a dataset, and add notes on what it cannot keep; with all axes of one that samples share.

    Raises ValueError for types that cannot be packed.
    """
    base, text = h5py.check_vlen_dtype(data.dtype), h5py.check_string_dtype(data.dtype)
    is_list = data.ndim == 1 or (data.ndim == 2 and data.dtype == "S1")  # S1: the characters of texts
    if problem := unreadable(data):
        raise ValueError(f"{name!r} {problem}, or leave it out: columns=[...]")
    if _is_number(data.dtype) and base is None:
        field = Field(name, native(data.dtype).name, data.shape if is_shared else data.shape[1:])
    elif data.dtype == "S1" and data.ndim > 2:
        field = Field(name, "uint8", data.shape if is_shared else data.shape[1:])
        notes.append(f"{name!r} of characters is packed as uint8")
    elif is_shared and text is not None:
        field = Field(name, "str", data.shape)
        notes += [f"{name!r} of bytes is packed as text"] if data.dtype.kind == "S" else []
    elif text is not None and is_list:
        field = Field(name, "uint8", is_ragged=True, means="utf-8" if text.encoding == "utf-8" else "bytes")
    elif base is not None and is_list and _is_number(np.dtype(base)) and not is_shared:
        field = Field(name, np.dtype(base).name, is_ragged=True)
    else:
        raise ValueError(
            f"{name!r} of type {data.dtype} and shape {data.shape} cannot be packed; leave it out: columns=[...]"
        )
    scales = dimensions_of(data)
    dimensions = tuple(scale.name.rpartition("/")[2] if scale is not None else "" for scale in scales)
    return dataclasses.replace(
        field, dimensions=dimensions, attributes=attributes_of(name, data, field, notes)
    )


def _shared_values(data: Any) -> Array:
    """Return all values of a dataset; texts as objects."""
    if h5py.check_string_dtype(data.dtype) is not None and not (data.dtype == "S1" and data.ndim > 2):
        return np.asarray(data.asstr()[()], object)
    values = np.asarray(data[()], native(data.dtype))
    return values.view("u1") if values.dtype == "S1" else values


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize <= NUMBERS.get(dtype.kind, 0)


def _values(data: Any, field: Field, start: int, stop: int) -> tuple[Array, Array]:
    """Return rows, or the elements of ragged rows and the number in each row."""
    rows = data[start:stop]
    if not field.is_ragged:
        rows = rows.view("u1") if data.dtype == "S1" else rows
        return np.asarray(rows).astype(field.dtype, copy=False), np.empty(0, np.int64)
    if field.means:
        texts = [bytes(row).rstrip(b"\0") if rows.ndim == 2 else bytes(row) for row in rows]
        if field.means == "utf-8":
            for text in texts:
                text.decode()
        return joined(texts)
    # The empty array sets the type if there are no rows. NumPy's default, float64, cannot hold all integers.
    return np.concatenate([np.empty(0, field.dtype), *rows]), np.fromiter(map(len, rows), np.int64, len(rows))
