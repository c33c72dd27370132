"""Choose the sizes of chunks and shards, and codecs, each with a reason as text. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cachedfs.packing.pack_types import Field

__all__ = ["CODECS", "ChunkGridPlan", "choose_codec", "grid_of", "shard_size", "shares", "small_of"]

KiB, MiB = 1 << 10, 1 << 20
CHUNK = 256 * KiB  # decoding takes 0.1 ms, the delay of one random sample
MOST_CHUNK = 1 * MiB  # the cache fetches blocks of this size
SHARD = 64 * MiB  # 1 s at 500 Mbit/s; each worker builds one in memory
DRIVE_SHARD = 128 * MiB  # Drive creates about 2 files/s, and serves 27 to 200 downloads/s
SMALL = 0.1  # largest share of a sample's bytes for all small fields together
AT_ONCE = 64 * MiB  # most bytes of shards of all fields that cover the same samples (decoded sources)
CODECS = ("none", "lz4", "zstd")  # fastest first
WORTH = 0.9  # a slower codec must shrink the data to this share of the faster one


@dataclass(frozen=True)
class ChunkGridPlan:
    """The shapes of the chunks and shards of an array, and the reason for them."""

    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    reason: str


def shard_size(protocol: str) -> tuple[int, str]:
    """Return the bytes of a shard for an origin's protocol, and the reason."""
    if protocol in ("drive", "gdrive"):
        return DRIVE_SHARD, "Drive makes few new files a second, so there are fewer and larger ones"
    return SHARD, "large enough for the speed of a link, and several fit in memory"


def small_of(means: Mapping[str, float]) -> set[str]:
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


def shares(means: Mapping[str, float], size: int) -> dict[str, int]:
    """Return the shard size of each field, in bytes; `size` is the largest.

    The shards of all fields then cover about the same samples, so each sample is decoded once for all its fields.
    """
    largest, total = max(means.values(), default=1) or 1, max(1.0, sum(means.values()))
    most = min(size, AT_ONCE * largest / total)
    return {name: max(min(MiB, size), int(most * mean / largest)) for name, mean in means.items()}


def grid_of(field: Field, mean: float, *, chunk: int | None, shard: int, why: str) -> ChunkGridPlan:
    """Return the chunk and shard shapes of a field's array.

    `mean` is the mean bytes of a sample. `chunk` and `shard` are sizes in bytes; for `chunk`, None chooses one.
    `why` is the reason for the shard size.
    """
    if field.is_ragged:
        return _ragged(field, mean, chunk, shard, why)
    return _fixed(field, chunk, shard, why)


def _ragged(field: Field, mean: float, chunk: int | None, shard: int, why: str) -> ChunkGridPlan:
    reason = f"{_size(mean)} a sample"
    if chunk is None:
        chunk = min(max(1 << max(0, math.ceil(math.log2(max(mean, 1)))), CHUNK), MOST_CHUNK)
        reason += f": a random one decodes {_size(chunk)} or few of them"
    n = max(1, chunk // field.row_size)
    per_shard = max(1, shard // (n * field.row_size))
    return ChunkGridPlan(
        (n,), (n * per_shard,), f"{reason}; shards of {_size(n * per_shard * field.row_size)}: {why}"
    )


def _fixed(field: Field, chunk: int | None, shard: int, why: str) -> ChunkGridPlan:
    given, chunk = chunk, chunk or CHUNK
    size = max(1, field.row_size)
    if size > shard:  # one sample exceeds a shard: cut it along its own first axes, too
        inner, outer = _cut(field, given or MOST_CHUNK, shard)
        reason = f"a sample has {_size(size)}, more than a shard: it is cut along its axes; {why}"
        return ChunkGridPlan((1, *inner), (1, *outer), reason)
    rows = max(1, chunk // size)
    per_shard = max(1, shard // (rows * size))
    told = "1 sample" if rows == 1 else f"{rows:,} samples"
    reason = f"{told} of {_size(size)} a chunk: {'one is read by itself' if rows == 1 else f'about {_size(chunk)} are decoded for one'}"
    grid = (rows, *field.shape), (rows * per_shard, *field.shape)
    return ChunkGridPlan(*grid, f"{reason}; shards of {_size(rows * per_shard * size)}: {why}")


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


def choose_codec(measured: Mapping[str, float], *, is_given: bool = False) -> tuple[str, str]:
    """Return a codec and the reason; `measured` has the compressed share of some samples, by codec."""
    if is_given or not measured:
        return next(iter(measured), "none"), "as asked for" if is_given else "nothing to measure"
    best = "none"
    for name in CODECS:
        if measured.get(name, 1.0) <= WORTH * measured.get(best, 1.0):
            best = name
    told = ", ".join(f"{name} {100 * measured[name]:.0f} %" for name in CODECS if name in measured)
    if best == "none":
        return best, f"kept as it is: compressed, samples are {told} of their size"
    return best, f"samples are {told} of their size"


def _size(n: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.3g} bytes"
