"""Plan the chunks, shards and codec of each array, with the reasons, and write their Zarr metadata. No I/O."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cachedfs.datasets.zarr_layout import RAGGED
from cachedfs.packing.pack_types import OFFSETS, Array, Field, SampleBatch
from cachedfs.packing.shard_encoder import CODECS, ArrayEncoding, compressed_shares, shuffle_of

KiB, MiB = 1 << 10, 1 << 20
CHUNK = 256 * KiB  # decoding takes 0.1 ms, the delay of one random sample
MOST_CHUNK = 1 * MiB  # the cache fetches blocks of this size
SHARD = 64 * MiB  # 1 s at 500 Mbit/s; each worker builds one in memory
DRIVE_SHARD = 128 * MiB  # Drive creates about 2 files/s, and serves 27 to 200 downloads/s
SMALL_SHARD = 16 * MiB  # of small arrays: all of them are built at the same time
SMALL = 0.1  # largest share of a sample's bytes for all small fields together
IN_MEMORY = 256 * MiB  # most bytes of the shards of many arrays that are not full yet
WORTH = 0.9  # a slower codec must shrink the data to this share of the faster one


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """The planned arrays: their fields and encodings by name, and a line of text for each."""

    fields: tuple[Field, ...]
    encodings: Mapping[str, ArrayEncoding]
    lines: list[str]

    def as_json(self) -> dict[str, Any]:
        encodings = {name: dataclasses.asdict(each) for name, each in self.encodings.items()}
        return {"fields": [dataclasses.asdict(field) for field in self.fields], "arrays": encodings}


def plan_of(
    fields: tuple[Field, ...],
    sampled: list[SampleBatch],
    protocol: str,
    *,
    chunk: int | None,
    shard: int | None,
    codec: str | None,
) -> StorePlan:
    """Return the plan for fields, from some samples. `protocol` is that of the target's origin.

    `chunk` and `shard` are sizes in bytes. None for them or for `codec`: choose here.
    """
    if codec is not None and codec not in CODECS:
        raise ValueError(f"codec={codec!r}: expected one of {', '.join(CODECS)}; None: by measuring samples")
    means = {field.name: _mean(field, sampled) for field in fields}
    small = small_fields({field.name: means[field.name] for field in fields if not field.is_small})
    fields = tuple(
        dataclasses.replace(field, is_small=field.is_small or field.name in small) for field in fields
    )
    most, why = (shard, "as asked for") if shard is not None else default_shard_size(protocol)
    big = [field for field in fields if not field.is_small]
    by_field = shard_sizes({field.name: means[field.name] for field in big}, most)
    encodings, lines = dict[str, ArrayEncoding](), []
    for field in big:
        values = np.concatenate([batch.values[field.name] for batch in sampled])
        best, reason = (codec, "as asked for") if codec else choose_codec(compressed_shares(field, values))
        inner, outer, why_shapes = shapes_of(
            field, means[field.name], chunk=chunk, shard=by_field[field.name], why=why
        )
        encodings[field.name] = ArrayEncoding(field.dtype, field.shape, inner, outer, best, shuffle_of(field))
        chunks, shards = (" x ".join(f"{n:,}" for n in shape) for shape in (inner, outer))
        lines.append(
            f"{field.name}: {field.dtype}, chunks {chunks}, shards {shards} ({why_shapes}); {best} ({reason})"
        )
    small_arrays = _small_arrays(fields)
    of_small = min(most, SMALL_SHARD, IN_MEMORY // max(1, len(small_arrays)))
    for field in small_arrays:
        inner, outer, _ = shapes_of(field, means.get(field.name, 8.0), chunk=None, shard=of_small, why="")
        encodings[field.name] = ArrayEncoding(
            field.dtype, field.shape, inner, outer, "zstd", shuffle_of(field)
        )
    if small_arrays:
        lines.append(f"{', '.join(field.name for field in small_arrays)}: little beside the samples; zstd")
    return StorePlan(fields, encodings, lines)


def default_shard_size(protocol: str) -> tuple[int, str]:
    """Return the bytes of a shard for the protocol of the target's origin, and the reason."""
    if protocol in ("drive", "gdrive"):
        return DRIVE_SHARD, "Drive makes few new files a second, so there are fewer and larger ones"
    return SHARD, "large enough for the speed of a link, and several fit in memory"


def small_fields(means: Mapping[str, float]) -> set[str]:
    """Return the names of the small fields: together they have at most `SMALL` of a sample's bytes.

    `means` are the mean bytes of each field in a sample. The largest field is never small.
    """
    found, left = set(), SMALL * sum(means.values())
    for name in sorted(means, key=lambda name: means[name])[:-1]:
        left -= means[name]
        if left < 0:
            break
        found.add(name)
    return found


def shard_sizes(means: Mapping[str, float], size: int) -> dict[str, int]:
    """Return the shard size of each big field, in bytes; `size` is the largest.

    The shards of all fields cover about the same samples. Together they have up to 64 MiB, or `size` if that is more:
    those that are not full yet are in memory.
    """
    largest, total = max(means.values(), default=1) or 1, max(1.0, sum(means.values()))
    most = min(size, max(SHARD, size) * largest / total)
    least = min(MiB, size, IN_MEMORY // max(1, len(means)))
    return {name: max(least, int(most * mean / largest)) for name, mean in means.items()}


def shapes_of(
    field: Field, mean: float, *, chunk: int | None, shard: int, why: str
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return the chunk and shard shapes of a field's array, and the reason.

    `mean` is the mean bytes of a sample. `chunk` and `shard` are sizes in bytes; for `chunk`, None chooses one. `why`
    is the reason for the shard size.
    """
    size = max(1, field.row_size)
    if size > shard:  # one sample exceeds a shard: cut it along its own first axes, too
        inner, outer = _cut(field, chunk or MOST_CHUNK, shard)
        reason = f"a sample has {_size(size)}, more than a shard: it is cut along its axes; {why}"
        return (1, *inner), (1, *outer), reason
    reason = f"{_size(mean)} a sample"
    if field.is_ragged and chunk is None:
        chunk = min(max(1 << max(0, math.ceil(math.log2(max(mean, 1)))), CHUNK), MOST_CHUNK)
        reason += f": a random one decodes {_size(chunk)} or few of them"
    rows = max(1, (chunk or CHUNK) // size)
    if not field.is_ragged:
        n_samples = "1 sample" if rows == 1 else f"{rows:,} samples"
        read = "one is read by itself" if rows == 1 else f"about {_size(chunk or CHUNK)} are decoded for one"
        reason = f"{n_samples} of {_size(size)} a chunk: {read}"
    n = max(1, shard // (rows * size)) * rows
    return (rows, *field.shape), (n, *field.shape), f"{reason}; shards of {_size(n * size)}: {why}"


def choose_codec(shares_by_codec: Mapping[str, float]) -> tuple[str, str]:
    """Return a codec and the reason, from the compressed share of some samples by codec."""
    if not shares_by_codec:
        return "none", "nothing to measure"
    best = "none"
    for name in CODECS:
        if shares_by_codec.get(name, 1.0) <= WORTH * shares_by_codec.get(best, 1.0):
            best = name
    sizes = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares_by_codec.items())
    if best == "none":
        return best, f"kept as it is: compressed, samples are {sizes} of their size"
    return best, f"samples are {sizes} of their size"


def metadata_of(
    plan: StorePlan,
    lengths: Mapping[str, int],
    attributes: Mapping[str, Mapping[str, Any]],
    shared: Sequence[tuple[Field, Array]],
) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Return the `zarr.json` documents of the groups and arrays, and the chunks of shared arrays, by name.

    `lengths` has the length of each array along the first axis, `attributes` those of each group. The document of the
    store's own group, "", has the metadata of all arrays.
    """
    import zarr
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(files), attributes=dict(attributes[""]))
    for name in sorted(attributes.keys() - {""}):
        group.create_group(name, attributes=dict(attributes[name]))
    # Flat names: `/` would need a folder for each axis, and Drive creates 2 to 3 folders a second.
    flat: Any = {"name": "default", "separator": "."}
    for field in [*(field for field in plan.fields if not field.is_small), *_small_arrays(plan.fields)]:
        encoding = plan.encodings[field.name]
        group.create_array(
            field.name,
            shape=(lengths[field.name], *field.shape),
            dtype=encoding.dtype,
            chunks=encoding.chunk,
            shards=encoding.shard,
            compressors=encoding.compressors,
            fill_value=0,
            chunk_key_encoding=flat,
            dimension_names=_dimensions(field, {each.name for each in plan.fields if each.is_ragged}),
            attributes=_attributes(field),
        )
    for field, values in shared:
        dtype = "u1" if field.dtype == "str" else field.dtype
        encoding = ArrayEncoding(dtype, (), field.shape, field.shape, "zstd")
        group.create_array(
            field.name,
            shape=field.shape,
            dtype=field.dtype,
            chunks=field.shape,
            compressors=encoding.compressors,
            chunk_key_encoding=flat,
            dimension_names=[name or f"{field.name}_axis_{i}" for i, name in enumerate(field.dimensions)],
            attributes=dict(field.attributes),
        )[...] = values
    chunks = {name: files.pop(name).to_bytes() for name in [*files] if not name.endswith("zarr.json")}
    documents = {name: json.loads(value.to_bytes()) for name, value in files.items()}
    members = {
        name.removesuffix("/zarr.json"): each for name, each in sorted(documents.items()) if "/" in name
    }
    metadata = {"kind": "inline", "must_understand": False, "metadata": members}
    documents["zarr.json"] = {**documents["zarr.json"], "consolidated_metadata": metadata}
    return documents, chunks


def _small_arrays(fields: tuple[Field, ...]) -> list[Field]:
    offsets = [Field(field.name + OFFSETS, "int64") for field in fields if field.is_ragged]
    return [field for field in fields if field.is_small] + offsets


def _dimensions(field: Field, ragged: set[str]) -> list[str]:
    of = field.name.removesuffix(OFFSETS)
    if field.is_ragged or of in ragged:
        return [f"{of}_element" if field.is_ragged else f"{of}_edge"]
    # xarray rejects an array with two axes of the same name.
    names = ["sample", *(f"{field.name}_axis_{i}" for i in range(1, len(field.shape) + 1))]
    return [own or name for own, name in zip(field.dimensions or names, names, strict=True)]


def _attributes(field: Field) -> dict[str, Any]:
    """Return the attributes of an array: its own, its time units, or the arrays that locate ragged samples."""
    if not field.is_ragged:
        return {**field.attributes, **({"units": field.means} if field.means else {})}
    found = {"offsets": field.name + OFFSETS, "means": field.means, "shapes": field.shapes}
    # Names inside the array's own group, so that the group can be opened alone.
    own = {key: value.rpartition("/")[2] for key, value in found.items() if value}
    return {**field.attributes, RAGGED: own}


def _mean(field: Field, sampled: list[SampleBatch]) -> float:
    """Return the mean bytes of a field in a sample."""
    if not field.is_ragged:
        return float(field.row_size)
    sizes: Array = np.concatenate([batch.sizes[field.name] for batch in sampled])
    return float(field.row_size * sizes.sum() / max(1, len(sizes)))


def _cut(field: Field, chunk: int, shard: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chunk shape and the shard shape of one large sample, along its own axes."""
    item = field.row_size // math.prod(field.shape)
    inner = list(field.shape)
    for axis in range(len(inner)):
        while inner[axis] > 1 and math.prod(inner) * item > chunk:
            inner[axis] = -(-inner[axis] // 2)
    outer = list(inner)
    for axis in reversed(range(len(outer))):
        while outer[axis] < field.shape[axis] and 2 * math.prod(outer) * item <= shard:
            outer[axis] *= 2
    return tuple(inner), tuple(outer)


def _size(n: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.3g} bytes"
