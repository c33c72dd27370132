"""HDF5 files as a source: rows of datasets along the first axis, several files in sequence."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import struct
import threading
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import h5py
import numpy as np

from cachedfs.datasets.hdf5_layout import (
    attributes_of,
    dimensions_of,
    elsewhere,
    is_variable,
    members_of,
    unreadable,
)
from cachedfs.datasets.zarr_layout import with_samples
from cachedfs.packing.pack_types import END, Array, Field, SampleBatch, SourcePiece
from cachedfs.packing.sources.sample_source import MAX_SAMPLE, PIECE, BadFile, DecodedSource, SourceFiles
from cachedfs.packing.sources.source_tools import checked_fields, is_array_name, joined, looked_at, names_of

__all__ = ["HDF5Source"]

SAMPLED_SIZE = 4 << 20  # bytes of each dataset that `look` reads
ROWS = 1024  # most variable-length rows in one read: their size is unknown before it
READ_SIZE = 1 << 20  # bytes of such a read, estimated from the rows before it
MAX_OPEN = 4  # largest number of open files
KIND = attrgetter("dtype", "shape", "is_ragged")  # what must be equal in all files
NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # largest item size that Zarr supports, by NumPy kind
# Attributes that decide what a stored value means (CF conventions): they must be equal in all files.
DECODING = {"units", "calendar", "scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned"}
DECODING |= {"flag_values", "flag_masks", "flag_meanings"}
SCALES = {"scale_factor", "add_offset"}
FILL = "_FillValue"
NON_COORDINATE = "_nc4_non_coord_"  # prefix of a NetCDF variable that has the name of a dimension of others


class HDF5Source(DecodedSource):
    """A source with one field for each dataset; sample `i` is row `i` of all of them.

    HDF5 groups become Zarr groups. Pieces count rows from the start of their file. Attributes and dimension names are
    those of the first file. Datasets along the other axes (`lat`, `lon`) and single values are shared by all samples.
    """

    kind = "hdf5"
    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, names_of(columns, "datasets keep their types: give a list of names"))
        self._open_files = _OpenFiles()
        self._paths: dict[str, str] = {}  # path in the file of each field

    def look(self) -> list[SampleBatch]:
        first = self._first()
        with self._open_files.file(self.files, first) as file:
            members, where = self._members(file, first), self.files.shown(first)
            found = _datasets(members)
            names = self.columns or list(found)
            missing = [name for name in names if name not in found]
            for name in missing or ([] if names else file):
                if linked := elsewhere(file, name):
                    raise ValueError(f"{where}: {name!r} {linked}")
            if missing:
                raise ValueError(f"{where}: no datasets {missing}; there are {', '.join(found) or 'none'}")
            if not (rows := _with_rows(found, names)):
                raise ValueError(f"{where}: has no datasets with rows")
            notes: list[str] = []
            fields = [_field(name, found[name], where, notes) for name in rows]
            n = self._n_rows(found, fields, where)
            self._paths = {name: found[name].name for name in names}
            self.shared = self._shared(
                {name: found[name] for name in names if name not in rows}, where, notes
            )
            self.group_attributes = self._group_attributes(file, members, names, notes)
            self.notes = [*notes, *_left_out(rows, names, found)]
            self.fields = checked_fields([*fields, *(field for field, _ in self.shared)])[: len(fields)]
            return [self._read(file, SourcePiece(first, 0, END), n, SAMPLED_SIZE)]

    def _shared(self, datasets: dict[str, Any], where: str, notes: list[str]) -> list[tuple[Field, Array]]:
        """Return the datasets that all samples share: along the other axes, and single values of a single file."""
        found = []
        for name, data in datasets.items():
            try:
                if not data.shape and self.columns is None and len(self.files) > 1:
                    raise ValueError("each file has one")
                found.append(_shared_array(name, data, where, notes))
            except ValueError as error:
                if self.columns is not None:
                    raise
                notes.append(f"dataset {name!r} is left out: {error}")
        if found:
            notes.append(f"shared by all samples: {', '.join(field.name for field, _ in found)}")
        return found

    def _group_attributes(
        self, file: Any, members: dict[str, Any], names: list[str], notes: list[str]
    ) -> dict[str, dict[str, Any]]:
        groups = {name: each for name, each in members.items() if isinstance(each, h5py.Group)}
        if self.columns is not None:
            groups = {
                name: each for name, each in groups.items() if any(at.startswith(f"{name}/") for at in names)
            }
        groups = {name: each for name, each in groups.items() if is_array_name(name)}
        return {name: _attributes(name, each, None, notes) for name, each in {"": file, **groups}.items()}

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
            found = _datasets(self._members(file, number))
            return any(found[name].shape[0] for name in _with_rows(found, self.columns or found))

    def read(self, piece: SourcePiece) -> SampleBatch:
        with self._open_files.file(self.files, piece.file) as file:
            n = (
                file[self._paths[self.fields[0].name]].shape[0]
                if piece.start
                else self._checked(file, piece.file)
            )
            return self._read(file, piece, n, PIECE)

    def _read(self, file: Any, piece: SourcePiece, n: int, size: int) -> SampleBatch:
        """Read rows from the start of a piece on, about `size` bytes, of a file with `n` rows."""
        ragged = [field for field in self.fields if field.is_ragged]
        fixed = [field for field in self.fields if not field.is_ragged]
        rows = max(1, size // max(1, sum(field.row_size for field in fixed)))
        if (
            chunks := file[self._paths[max(fixed, key=lambda field: field.row_size).name]].chunks
            if fixed
            else None
        ):
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
            return _values(file[self._paths[field.name]], field, start, stop)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.shown(piece)}: dataset {field.name!r} is not valid UTF-8: {error}; leave it out: columns=[...]"
            ) from error
        except Exception as error:  # h5py and the filesystem raise errors of many types
            error.add_note(f"in {self.shown(piece)}, dataset {field.name!r}")
            raise

    def shown(self, piece: SourcePiece) -> str:
        return f"{self.files.shown(piece.file)}, the rows from {piece.start:,} on"

    def _members(self, file: Any, number: int) -> dict[str, Any]:
        """Return the datasets and groups by name. Links count, except those to other files.

        Raises ValueError for a circular link, unless the user chose the datasets.
        """
        found = dict(members_of(file["/"]))
        circular = [name for name, what in found.items() if what is None]
        if circular and self.columns is None:
            raise ValueError(
                f"{self.files.shown(number)}: {circular[0]!r} is a circular link; columns=[...] says which datasets to pack"
            )
        return found

    def _checked(self, file: Any, number: int) -> int:
        """Return the number of rows of a file. Raises ValueError if its datasets differ from the first file's."""
        found, where = _datasets(self._members(file, number)), self.files.shown(number)
        for field in self.fields:
            other = _field(field.name, found[field.name], where, []) if field.name in found else None
            if other is None or KIND(other) != KIND(field):
                raise ValueError(
                    f"{where}: dataset {field.name!r} is {other or 'not there'}, and {field} in the first file"
                )
            _check_attributes(field, other, where)
        for field, values in self.shared:
            same, others = (
                _shared_array(field.name, found[field.name], where, [])
                if field.name in found
                else (field, None)
            )
            _check_attributes(field, same, where)
            if others is None or not np.array_equal(values, others, equal_nan=values.dtype.kind in "fc"):
                raise ValueError(
                    f"{where}: dataset {field.name!r}, which all samples share, has other values than in the first file; "
                    "leave it out: columns=[...]"
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
                    is_classic = files.head(number, 3) == b"CDF"
                    advice = (
                        ": it is of NetCDF 3; nccopy -k nc4 makes NetCDF 4 of it"
                        if is_classic
                        else f": {error}"
                    )
                    raw.close()
                    raise BadFile(files.shown(number), f"h5py cannot read it as HDF5{advice}") from error
            yield self._files[number][0]


def _datasets(members: dict[str, Any]) -> dict[str, Any]:
    """Return the datasets among the members of a file, by the names that NetCDF gives them."""
    datasets = {name: each for name, each in members.items() if isinstance(each, h5py.Dataset)}
    return {name.replace(NON_COORDINATE, ""): each for name, each in datasets.items() if is_variable(each)}


def _with_rows(found: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names of the datasets whose rows are samples, among those that a file has."""
    return with_samples({name: dimensions_of(found[name]) for name in names if name in found})


def _field(name: str, data: Any, where: str, notes: list[str]) -> Field:
    """Return the field of a dataset, and add notes on what it cannot hold. Raises ValueError for unsupported types."""
    base = h5py.check_vlen_dtype(data.dtype)
    text = h5py.check_string_dtype(data.dtype)
    if problem := unreadable(data):
        raise ValueError(f"{where}: dataset {name!r} {problem}, or leave it out: columns=[...]")
    if text is not None and data.ndim == 1:
        field = Field(name, "uint8", is_ragged=True, means="utf-8" if text.encoding == "utf-8" else "bytes")
    elif base is not None and data.ndim == 1 and _is_number(np.dtype(base)):
        field = Field(name, np.dtype(base).name, is_ragged=True)
    elif _is_number(data.dtype) and base is None:
        field = Field(name, data.dtype.newbyteorder("=").name, tuple(data.shape[1:]))
    else:
        raise ValueError(
            f"{where}: dataset {name!r} of type {data.dtype} and shape {data.shape} cannot be packed; leave it out: columns=[...]"
        )
    return _described(field, data, notes)


def _shared_array(name: str, data: Any, where: str, notes: list[str]) -> tuple[Field, Array]:
    """Return a dataset that all samples share, as a field with all its axes, and its values."""
    is_text = h5py.check_string_dtype(data.dtype) is not None
    if problem := unreadable(data):
        raise ValueError(f"{where}: dataset {name!r} {problem}, or leave it out: columns=[...]")
    if not (is_text or _is_number(data.dtype)) or data.nbytes > MAX_SAMPLE:
        raise ValueError(
            f"{where}: dataset {name!r} of type {data.dtype} and shape {data.shape} cannot be packed"
        )
    if data.dtype.kind == "S":
        notes.append(f"dataset {name!r} of bytes is packed as text")
    dtype = "str" if is_text else data.dtype.newbyteorder("=").name
    values = np.asarray(data.asstr()[()] if is_text else data[()], object if is_text else dtype)
    return _described(Field(name, dtype, tuple(data.shape)), data, notes), values


def _described(field: Field, data: Any, notes: list[str]) -> Field:
    """Return a field with the attributes of its dataset, and its dimension scales as dimension names."""
    scales = dimensions_of(data)
    dimensions = tuple(scale.name.rpartition("/")[2] if scale is not None else "" for scale in scales)
    attributes = _attributes(field.name, data, field, notes)
    return dataclasses.replace(field, dimensions=dimensions, attributes=attributes)


def _attributes(name: str, of: Any, field: Field | None, notes: list[str]) -> dict[str, Any]:
    """Return the attributes of a dataset or group (without `field`) as JSON values that xarray decodes."""
    found, lost = attributes_of(of)
    if field is not None and FILL in of.attrs:
        found.pop(FILL, None)
        lost = [each for each in lost if each != FILL]
        try:
            found[FILL] = _coded(of.attrs[FILL], field)
        except (TypeError, ValueError, OverflowError):
            lost.append(FILL)
    notes += [
        f"attribute {each!r} of {name or '/'!r} is left out: Zarr cannot hold its value" for each in lost
    ]
    if enum := h5py.check_enum_dtype(of.dtype) if field is not None else None:
        found = {
            "flag_values": sorted(enum.values()),
            "flag_meanings": " ".join(sorted(enum, key=enum.__getitem__)),
        } | found
    for each in sorted(SCALES & found.keys()):
        if (dtype := np.asarray(of.attrs[each]).dtype) != "f8":
            notes.append(
                f"{name!r}: xarray decodes it as float64: Zarr keeps no type of {each}, here {dtype}"
            )
    return found


def _coded(value: Any, field: Field) -> Any:
    """Return a `_FillValue` as xarray keeps it in Zarr: floats in base64. Raises ValueError if it is none of the field."""
    number, kind = np.asarray(value).item(), np.dtype(field.dtype).kind
    if field.is_ragged or isinstance(number, (str, bytes)) or (kind not in "fc" and int(number) != number):
        raise ValueError(f"{value} is no value of {field}")
    if kind not in "fc":
        return bool(number) if kind == "b" else int(number)
    parts = [number.real, number.imag] if kind == "c" else [number]
    coded = [base64.b64encode(struct.pack("<d", part)).decode() for part in parts]
    return coded if kind == "c" else coded[0]


def _check_attributes(field: Field, other: Field, where: str) -> None:
    for name in sorted(DECODING):
        first, here = field.attributes.get(name), other.attributes.get(name)
        if first != here:
            raise ValueError(
                f"{where}: {name!r} of dataset {field.name!r} is {here!r}, and {first!r} in the first file: the stored values "
                "mean something else; pack it by itself"
            )


def _left_out(rows: list[str], names: list[str], found: dict[str, Any]) -> list[str]:
    """Return a note on the dimension scales of packed datasets that are not packed."""
    scales = {scale for name in rows for scale in dimensions_of(found[name])}
    left_out = [name for name, data in found.items() if data in scales and name not in names]
    return (
        [f"dimension scales that columns= does not name are left out: {', '.join(left_out)}"]
        if left_out
        else []
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
