"""Write small arrays and offsets at the end of a pack, from the counts of all pieces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cachedfs.packing.pack_types import OFFSETS, Array, Field, SourcePiece
from cachedfs.packing.shard_encoder import ChunkEncoding, ShardBytes
from cachedfs.packing.store import StoredObject, ZarrTarget
from cachedfs.packing.task import PackTask, chunks_of, object_name

__all__ = ["small_arrays", "write_small"]

AT_ONCE = 8  # arrays whose last shards are written at the same time


def small_arrays(fields: tuple[Field, ...]) -> list[Field]:
    """Return the small fields, and a field for the offsets of each ragged field."""
    found = [field for field in fields if field.is_small]
    return found + [Field(field.name + OFFSETS, "int64") for field in fields if field.is_ragged]


def write_small(
    job: PackTask, pieces: list[SourcePiece], encodings: dict[str, ChunkEncoding]
) -> tuple[list[StoredObject], dict[str, int]]:
    """Write the small arrays and the offsets; return the objects, and the length of each array."""
    fields = job.source.fields
    growing = {name: _Growing(job.store, name, encoding) for name, encoding in encodings.items()}
    ends = {field.name: 0 for field in fields if field.is_ragged}
    for name in ends:
        growing[name + OFFSETS].add(np.zeros(1, np.int64))
    for piece in pieces:
        tally = job.tally(piece)
        for field in fields:
            if field.is_small:
                growing[field.name].add(tally.small[field.name])
            if field.is_ragged:
                edges = ends[field.name] + np.cumsum(tally.sizes[field.name], dtype=np.int64)
                growing[field.name + OFFSETS].add(edges)
                ends[field.name] = int(edges[-1]) if len(edges) else ends[field.name]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in threads.map(_Growing.finish, growing.values()):
            pass
    return [stored for each in growing.values() for stored in each.stored], {
        name: each.length for name, each in growing.items()
    }


class _Growing:
    """An array that grows along its first axis and writes each shard when it is full."""

    def __init__(self, store: ZarrTarget, name: str, encoding: ChunkEncoding) -> None:
        self._store, self._name, self._encoding = store, name, encoding
        self._parts: list[Array] = []
        self._have = 0  # rows in `_parts`
        self._shard: ShardBytes | None = None
        self._row = 0  # index of the next chunk along the first axis
        self.length = 0
        self.stored: list[StoredObject] = []

    def add(self, values: Array) -> None:
        self._parts.append(values)
        self._have += len(values)
        self.length += len(values)
        rows = self._encoding.grid.chunk[0]
        if self._have >= rows:
            self._put(self._have // rows * rows)

    def finish(self) -> None:
        self._put(self._have)
        self._write()

    def _put(self, n: int) -> None:
        if not n:
            return
        values = np.concatenate(self._parts)
        self._parts, self._have = [values[n:].copy()], len(values) - n
        chunk, per_shard = self._encoding.grid.chunk, self._encoding.per_shard
        for at, part in chunks_of(values[:n], chunk):
            self._shard = self._shard or ShardBytes(self._encoding)
            self._shard.put((self._row % per_shard[0], *at[1:]), part)
            self._row += 1
            if self._row % per_shard[0] == 0:
                self._write()

    def _write(self) -> None:
        if self._shard is not None:
            place = (len(self.stored), *(0 for _ in self._encoding.grid.chunk[1:]))
            self.stored.append(self._store.put_checked(object_name(self._name, place), self._shard.finish()))
            self._shard = None
