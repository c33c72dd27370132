"""Plan a store: its fields, and the chunks, shards and codec of each array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cachedfs.datasets.zarr_layout import RAGGED
from cachedfs.packing.chunk_sizes import CODECS, choose_codec, grid_of, shard_size, shares, small_of
from cachedfs.packing.pack_types import OFFSETS, Array, Field, SampleBatch
from cachedfs.packing.shard_encoder import ChunkEncoding, measured
from cachedfs.packing.small_arrays import small_arrays
from cachedfs.packing.sources.sample_source import SampleSource
from cachedfs.packing.store import ArrayPlan

__all__ = ["ATTRIBUTE", "FORMAT", "StorePlan", "array_plans", "attributes_of", "plan_of"]

ATTRIBUTE = "cachedfs_pack"  # name of the group attribute that describes the source
FORMAT = 1
PLAN_FORMAT = 2  # of the plan in the working files: 2 turns images by their EXIF orientation
SMALL_SHARD = 16 << 20  # bytes of a shard: all small arrays are built at the same time


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """The planned arrays of a store: the encodings of big and small ones by name, and the reasons."""

    fields: tuple[Field, ...]
    big: Mapping[str, ChunkEncoding]
    small: Mapping[str, ChunkEncoding]
    reasons: Mapping[str, str]  # for the codec of each big field

    def as_json(self, source: SampleSource, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plan as JSON. A run continues an earlier one only if their JSON is equal."""
        return {
            "format": PLAN_FORMAT,
            "source": {"digest": source.files.digest, "kind": source.kind, **options},
            "fields": [dataclasses.asdict(field) for field in self.fields],
            "arrays": {name: _as_json(encoding) for name, encoding in {**self.big, **self.small}.items()},
        }

    def lines(self) -> list[str]:
        """Return one line of text for each array: its chunks, shards and codec, with the reasons."""
        found = []
        for name, encoding in self.big.items():
            grid, reason = encoding.grid, self.reasons[name]
            found.append(
                f"{name}: {encoding.dtype}, chunks {_shape(grid.chunk)}, shards {_shape(grid.shard)} ({grid.reason}); "
                f"{encoding.codec} ({reason})"
            )
        return [*found, f"{', '.join(self.small)}: little beside the samples; zstd"] if self.small else found


def plan_of(
    source: SampleSource,
    sampled: list[SampleBatch],
    protocol: str,
    *,
    chunk: int | None,
    shard: int | None,
    codec: str | None,
) -> StorePlan:
    """Return the plan for a source, from some of its samples.

    `protocol` is that of the target's origin. `chunk` and `shard` are sizes in bytes. None: choose here.
    """
    n = sum(batch.n for batch in sampled)
    means = {field.name: _mean(field, sampled, n) for field in source.fields}
    small_ones = small_of({field.name: means[field.name] for field in source.fields if not field.is_small})
    fields = tuple(
        dataclasses.replace(field, is_small=field.is_small or field.name in small_ones)
        for field in source.fields
    )
    most, why = (shard, "as asked for") if shard is not None else shard_size(protocol)
    big_means = {field.name: means[field.name] for field in fields if not field.is_small}
    # Sources read by byte range hold no decoded pieces, so their shards need not cover the same samples.
    by_field = shares(big_means, most) if source.is_decoded else dict.fromkeys(big_means, most)
    big, small, reasons = {}, {}, {}
    for field in fields:
        if not field.is_small:
            values = np.concatenate([batch.values[field.name] for batch in sampled])
            chosen, reasons[field.name] = _codec(field, values, codec)
            grid = grid_of(field, means[field.name], chunk=chunk, shard=by_field[field.name], why=why)
            big[field.name] = ChunkEncoding.of(field, grid, chosen)
    for field in small_arrays(fields):
        size = min(most, SMALL_SHARD)
        grid = grid_of(
            field, means.get(field.name, 8.0), chunk=None, shard=size, why="little beside the samples"
        )
        small[field.name] = ChunkEncoding.of(field, grid, "zstd")
    return StorePlan(fields, big, small, reasons)


def array_plans(plan: StorePlan, lengths: Mapping[str, int]) -> list[ArrayPlan]:
    """Return the finished arrays; `lengths` has the length of each along the first axis."""
    fields = {field.name: field for field in (*plan.fields, *small_arrays(plan.fields))}
    ragged = {field.name for field in plan.fields if field.is_ragged}
    found = []
    for name, encoding in {**plan.big, **plan.small}.items():
        field = fields[name]
        if name in ragged:
            first = f"{name}_element"
        else:
            first = (
                f"{name.removesuffix(OFFSETS)}_edge"
                if name.removesuffix(OFFSETS) in ragged and name.endswith(OFFSETS)
                else "sample"
            )
        # xarray rejects an array with two axes of the same name.
        axes = (first, *(f"{name}_axis_{i}" for i in range(1, len(field.shape) + 1)))
        found.append(ArrayPlan(name, (lengths[name], *field.shape), encoding, axes, _attributes(field)))
    return found


def attributes_of(source: SampleSource, n: int, n_skipped: int) -> dict[str, Any]:
    """Return the attributes of the group: source, kind, and number of samples and of files left out."""
    found = {"format": FORMAT, "source": source.files.url, "kind": source.kind, "samples": n}
    return {ATTRIBUTE: found | ({"skipped": n_skipped} if n_skipped else {})}


def _attributes(field: Field) -> dict[str, Any]:
    """Return the attributes of an array: its time units, or the arrays that locate ragged samples."""
    if not field.is_ragged:
        return {"units": field.means} if field.means else {}
    told = {"offsets": _beside(field.name + OFFSETS), "means": field.means, "shapes": _beside(field.shapes)}
    return {RAGGED: {name: value for name, value in told.items() if value}}


def _beside(name: str) -> str:
    """Return the name of an array inside its own group, so that the group can be opened alone."""
    return name.rpartition("/")[2]


def _mean(field: Field, sampled: list[SampleBatch], n: int) -> float:
    if not field.is_ragged:
        return float(field.row_size)
    return field.row_size * sum(int(batch.sizes[field.name].sum()) for batch in sampled) / max(1, n)


def _codec(field: Field, values: Array, given: str | None) -> tuple[str, str]:
    if given is None:
        return choose_codec(measured(field, values))
    if given not in CODECS:
        raise ValueError(f"codec={given!r}: expected one of {', '.join(CODECS)}; None: by measuring samples")
    return choose_codec({given: 1.0}, is_given=True)


def _as_json(encoding: ChunkEncoding) -> list[Any]:
    return [
        encoding.dtype,
        list(encoding.grid.chunk),
        list(encoding.grid.shard),
        encoding.codec,
        encoding.shuffle,
    ]


def _shape(numbers: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in numbers)
