"""What packing is about, as frozen values: fields of samples, pieces of a source, and what is known of a piece."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["END", "OFFSETS", "Array", "SampleBatch", "Field", "SourcePiece", "FieldSpan", "PieceCounts"]

Array = npt.NDArray[Any]
END = -1  # where a piece stops that ends when it is large enough
OFFSETS = "_offsets"  # behind the name of a ragged field: where in it each sample begins


@dataclass(frozen=True)
class Field:
    """What each sample has under one name: an array of one shape and type, or elements of which each has its own number."""

    name: str
    dtype: str  # as NumPy names it
    shape: tuple[int, ...] = ()  # of a sample, where all have the same
    is_ragged: bool = False
    # What the elements are: "bytes", "utf-8" or "json", all uint8; "" for numbers; else units of time, as CF writes them.
    means: str = ""
    shapes: str = ""  # the field with the shape of each sample, where a ragged one has several axes
    is_small: bool = False  # next to nothing beside the others: kept with what is known of a piece

    @cached_property
    def row_size(self) -> int:
        """Bytes of a sample, or of an element."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        what = self.dtype + (f"[{', '.join(map(str, self.shape))}]" if self.shape else "")
        return f"ragged {self.means or what}" if self.is_ragged else what


class SourcePiece(NamedTuple):
    """A part of a source that is read at once, in the source's own numbers: bytes, rows or files of its `file`-th file."""

    file: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.file:06}-{self.start:014}"


@dataclass(frozen=True)
class SampleBatch:
    """Samples that were read: by field all values or elements along the first axis, of ragged ones also how many each has."""

    n: int
    values: Mapping[str, Array]
    sizes: Mapping[str, Array]
    stop: int = (
        END  # of a piece that was to end when it is large enough: where the next begins; END: it was the last
    )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.values.values(), *self.sizes.values()))


@dataclass(frozen=True)
class PieceCounts:
    """What has to be known of a piece before its samples have a place: their sizes, and all of its small fields.

    `places` is what else a source wants to find them again.
    """

    n: int
    small: Mapping[str, Array] = field(default_factory=dict)
    sizes: Mapping[str, Array] = field(default_factory=dict)
    places: Mapping[str, Array] = field(default_factory=dict)
    stop: int = END

    def length(self, of: Field) -> int:
        """Return how many values or elements of a field the piece has."""
        return int(self.sizes[of.name].sum()) if of.is_ragged else self.n

    def as_bytes(self) -> bytes:
        """Return it as NumPy's npz, whose arrays have numbers: of names it takes `a` and `a.npy` for one."""
        parts = {"small": self.small, "sizes": self.sizes, "places": self.places}
        names = [(part, name) for part, named in parts.items() for name in named]
        told = json.dumps({"n": self.n, "stop": self.stop, "names": names})
        buffer = io.BytesIO()
        np.savez_compressed(buffer, np.array(told), *(parts[part][name] for part, name in names))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceCounts | None:
        """Return what `as_bytes` wrote; None for anything else, as a write that was cut off leaves."""
        parts: dict[str, dict[str, Array]] = {"small": {}, "sizes": {}, "places": {}}
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                told, *arrays = (stored[f"arr_{i}"] for i in range(len(stored.files)))
            known = json.loads(told.item())
            for (part, name), array in zip(known["names"], arrays, strict=True):
                parts[part][name] = array
            return cls(known["n"], **parts, stop=known["stop"])
        except Exception:  # of any kind: zip, zlib and NumPy's header each have their own for damaged bytes
            return None


class FieldSpan(NamedTuple):
    """Some of the values or elements of a field, counted from the start of a piece."""

    piece: SourcePiece
    start: int
    stop: int
