"""Value types of packing: fields, pieces of a source, sample batches, and piece counts."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "BESIDE",
    "END",
    "OFFSETS",
    "Array",
    "Field",
    "FieldSpan",
    "PieceCounts",
    "SampleBatch",
    "SourcePiece",
    "empty_batch",
    "version_of",
]

Array = npt.NDArray[Any]
END = -1  # `stop` of a piece that ends where reading finds it large enough
BESIDE = ".cachedfs-pack"  # folder of the store with the working files of a pack, removed at its end
# Listing keys, in order of preference, whose value changes with the content of a file.
VERSIONS = ["generation", "md5Checksum", "ETag", "etag", "mtime", "LastModified", "last_modified", "modified"]
VERSIONS += ["created"]
OFFSETS = "_offsets"  # suffix of the array with the start of each sample of a ragged field


@dataclass(frozen=True)
class Field:
    """A named part of every sample: an array of one shape, or (ragged) a list of any length."""

    name: str
    dtype: str  # NumPy name of the type
    shape: tuple[int, ...] = ()  # shape of one sample, if all have the same
    is_ragged: bool = False
    # Meaning of the elements: "bytes", "utf-8" or "json" (all uint8), "" for numbers, else time units (CF conventions).
    means: str = ""
    shapes: str = ""  # name of the field with the shape of each sample, if a ragged field has several axes
    dimensions: tuple[str, ...] = ()  # name of each axis, the first included; "" for one without a name
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values
    is_small: bool = False  # tiny beside the others: its values are stored in `PieceCounts`

    @cached_property
    def row_size(self) -> int:
        """Bytes of one sample, or of one element of a ragged field."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        what = self.dtype + (f"[{', '.join(map(str, self.shape))}]" if self.shape else "")
        return f"ragged {self.means or what}" if self.is_ragged else what


class SourcePiece(NamedTuple):
    """A part of a source that is read as a unit.

    `start` and `stop` count bytes or rows of the file number `file`, or number files, by the kind of source.
    """

    file: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.file:06}-{self.start:014}"


@dataclass(frozen=True)
class SampleBatch:
    """Decoded samples.

    `values` has the rows or elements of each field, concatenated along the first axis. `sizes` has the number of
    elements of each sample, for ragged fields. `stop` is used for a piece that stops at END: the start of the piece
    that continues it, or END if nothing follows. `skipped` has the reason for each file that cannot be packed, by
    its number.
    """

    n: int
    values: Mapping[str, Array]
    sizes: Mapping[str, Array]
    stop: int = END
    skipped: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.values.values(), *self.sizes.values()))

    def counts(self, fields: Sequence[Field]) -> PieceCounts:
        small = {field.name: self.values[field.name] for field in fields if field.is_small}
        sizes = {field.name: self.sizes[field.name] for field in fields if field.is_ragged}
        return PieceCounts(self.n, small, sizes, stop=self.stop, skipped=self.skipped)


def empty_batch(fields: Sequence[Field], skipped: Mapping[int, str] | None = None) -> SampleBatch:
    """Return a batch without samples."""
    values = {field.name: np.empty((0, *field.shape), field.dtype) for field in fields}
    sizes = {field.name: np.empty(0, np.int64) for field in fields if field.is_ragged}
    return SampleBatch(0, values, sizes, skipped=skipped or {})


@dataclass(frozen=True)
class PieceCounts:
    """The counts of a piece: its number of samples, their sizes, and all values of small fields.

    They are needed before the samples of later pieces can be placed. `places` holds the byte positions that a source
    needs to find the samples again. `skipped` is that of `SampleBatch`.
    """

    n: int
    small: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    stop: int = END
    skipped: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def length(self, of: Field) -> int:
        """Return the number of rows, or of elements of a ragged field, in the piece."""
        return int(self.sizes[of.name].sum()) if of.is_ragged else self.n

    def as_bytes(self) -> bytes:
        """Return the counts as a NumPy npz file.

        Its arrays are numbered: npz confuses the names `a` and `a.npy`.
        """
        parts = {"small": self.small, "sizes": self.sizes, "places": self.places}
        names = [(part, name) for part, named in parts.items() for name in named]
        header = json.dumps(
            {"n": self.n, "stop": self.stop, "names": names, "skipped": [*self.skipped.items()]}
        )
        buffer = io.BytesIO()
        np.savez_compressed(buffer, np.array(header), *(parts[part][name] for part, name in names))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceCounts | None:
        """Return the counts that `as_bytes` encoded; None for other data, such as a truncated file."""
        parts: dict[str, dict[str, Array]] = {"small": {}, "sizes": {}, "places": {}}
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                header, *arrays = (stored[f"arr_{i}"] for i in range(len(stored.files)))
            header_values = json.loads(header.item())
            for (part, name), array in zip(header_values["names"], arrays, strict=True):
                parts[part][name] = array
            skipped = {int(number): str(reason) for number, reason in header_values["skipped"]}
            return cls(header_values["n"], **parts, stop=header_values["stop"], skipped=skipped)
        except Exception:  # zip, zlib and NumPy raise different errors for damaged bytes
            return None


def version_of(info: Mapping[str, Any]) -> str:
    """Return the version of a file in a listing, which changes with its content; "" without one."""
    return next((str(info[key]) for key in VERSIONS if info.get(key) is not None), "")


class FieldSpan(NamedTuple):
    """A range of rows, or of elements of a ragged field, counted from the start of a piece."""

    piece: SourcePiece
    start: int
    stop: int
