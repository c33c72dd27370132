"""Value types of packing: fields, and batches of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
WORK_FOLDER = ".cachedfs-pack"  # in the store, for the plan and the progress; removed at the end
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
    is_small: bool = False  # tiny beside the others

    @cached_property
    def row_size(self) -> int:
        """Bytes of one sample, or of one element of a ragged field."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        what = self.dtype + (f"[{', '.join(map(str, self.shape))}]" if self.shape else "")
        return f"ragged {self.means or what}" if self.is_ragged else what


@dataclass(frozen=True)
class SampleBatch:
    """The next samples of a source, in order.

    `values` has the rows or elements of each field, concatenated along the first axis. `sizes` has the number of
    elements of each sample, for ragged fields. The elements of a large sample may follow in later batches. `skipped`
    has the reason for each file that cannot be packed, by its number.
    """

    values: Mapping[str, Array]
    sizes: Mapping[str, Array]
    skipped: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(next(iter((self.sizes or self.values).values())))


def empty_batch(fields: Sequence[Field], skipped: Mapping[int, str]) -> SampleBatch:
    """Return a batch without samples."""
    values = {field.name: np.empty((0, *field.shape), field.dtype) for field in fields}
    sizes = {field.name: np.empty(0, np.int64) for field in fields if field.is_ragged}
    return SampleBatch(values, sizes, skipped)
