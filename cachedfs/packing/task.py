"""The work of one packing worker: count the samples of a piece, write a shard, check a shard."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cachedfs.packing.pack_types import Array, Field, FieldSpan, PieceCounts, SourcePiece
from cachedfs.packing.shard_encoder import ChunkEncoding, ShardBytes, wrong_with
from cachedfs.packing.sources.sample_source import BadFile, SampleSource, without_samples
from cachedfs.packing.store import StoredObject, ZarrTarget

__all__ = ["PackTask", "PieceInfo", "object_name"]

SLAB = 8 << 20  # bytes of samples that are read, then encoded, in one step
MAX_TALLIES = 32  # pieces whose counts stay in memory


class PieceInfo(NamedTuple):
    """The counts of a piece that `ShardRunner` needs: samples, length by field, and end."""

    n: int
    lengths: Mapping[str, int]  # rows, or elements of a ragged field, by field name
    stop: int
    skipped: Mapping[int, str]  # the reason for each file that cannot be packed, by its number


class PackTask:
    """The methods and data of a worker. Pickling drops the cached counts and decoded batches."""

    def __init__(
        self, source: SampleSource, store: ZarrTarget, encodings: Mapping[str, ChunkEncoding]
    ) -> None:
        self.source, self.store, self.encodings = source, store, encodings
        self._fields = {field.name: field for field in source.fields}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._tallies: OrderedDict[SourcePiece, PieceCounts] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_tallies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def measure(self, piece: SourcePiece, is_kept: bool = False) -> PieceInfo:
        """Count the samples of a piece and store the counts.

        `is_kept`: an earlier run may have stored them.
        """
        tally = self.store.kept(piece.name) if is_kept else None
        if tally is None:
            tally = self._measured(piece)
            if not self.source.is_known:
                self.store.keep(piece.name, tally)
        self._remember(piece, tally)
        return PieceInfo(
            tally.n,
            {field.name: tally.length(field) for field in self.source.fields},
            tally.stop,
            tally.skipped,
        )

    def _measured(self, piece: SourcePiece) -> PieceCounts:
        try:
            return self.source.measure(piece)
        except BadFile as error:
            if piece.start:  # earlier samples of this file may be in the store
                raise
            return without_samples(self.source.fields, {piece.file: error.reason})

    def tally(self, piece: SourcePiece) -> PieceCounts:
        """Return the counts of a piece: from memory, from the store, or by counting again."""
        with self._lock:
            tally = self._tallies.get(piece)
        if tally is None:
            tally = None if self.source.is_known else self.store.kept(piece.name)
            tally = tally or self._measured(piece)
            self._remember(piece, tally)
        return tally

    def _remember(self, piece: SourcePiece, tally: PieceCounts) -> None:
        with self._lock:
            self._tallies[piece] = tally
            while len(self._tallies) > MAX_TALLIES:
                self._tallies.popitem(last=False)

    def write(self, name: str, place: tuple[int, ...], spans: Sequence[FieldSpan]) -> StoredObject:
        """Write the shard at `place` of the field `name` with one request.

        `place` is the index of the shard along each axis. `spans` are its rows or elements, in order.
        """
        field, encoding = self._fields[name], self.encodings[name]
        chunk, shard = encoding.grid.chunk, encoding.grid.shard
        box = tuple(
            slice(at * part, min((at + 1) * part, extent))
            for at, part, extent in zip(place[1:], shard[1:], field.shape, strict=True)
        )
        row = int(
            np.dtype(field.dtype).itemsize * np.prod([each.stop - each.start for each in box], dtype=np.int64)
        )
        slab = max(1, SLAB // max(1, row * chunk[0])) * chunk[0]
        data = ShardBytes(encoding)
        n = sum(span.stop - span.start for span in spans)
        for start in range(0, n, slab):
            values = self._gather(field, _cut(spans, start, min(start + slab, n)), box)
            for at, part in chunks_of(values, chunk):
                data.put((start // chunk[0] + at[0], *at[1:]), part)
        return self.store.put_checked(object_name(name, place), data.finish())

    def ensure(
        self, name: str, place: tuple[int, ...], spans: Sequence[FieldSpan], n_chunks: int
    ) -> StoredObject:
        """Read back a shard of an earlier run; write it again if a chunk is missing or damaged."""
        stored = self.store.read_back(object_name(name, place))
        if stored is None or wrong_with(stored, self.encodings[name], n_chunks) is not None:
            return self.write(name, place, spans)
        return StoredObject(object_name(name, place), len(stored), None, is_new=False)

    def _gather(self, field: Field, spans: Sequence[FieldSpan], box: tuple[slice, ...]) -> Array:
        parts = []
        for span in spans:
            part = self.source.rows(field, span, box, lambda piece=span.piece: self.tally(piece))  # type: ignore[misc]  # bound here
            if len(part) != span.stop - span.start:
                raise ValueError(
                    f"{self.source.shown(span.piece)}: its samples differ from those counted before: the file was replaced "
                    "meanwhile; pack again, with overwrite"
                )
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def object_name(name: str, place: tuple[int, ...]) -> str:
    """Return the object name of the shard at `place` of the array `name`."""
    return f"{name}/c.{'.'.join(map(str, place))}"


def chunks_of(values: Array, chunk: tuple[int, ...]) -> Any:
    """Yield the chunks of an array, each with its index along each axis."""
    for at in np.ndindex(*(-(-n // part) for n, part in zip(values.shape, chunk, strict=True))):
        yield at, values[tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, chunk, strict=True))]


def _cut(spans: Sequence[FieldSpan], start: int, stop: int) -> list[FieldSpan]:
    """Return the part of the concatenated spans from `start` to `stop`."""
    found, begin = [], 0
    for piece, first, last in spans:
        low, high = max(start, begin), min(stop, begin + last - first)
        if low < high:
            found.append(FieldSpan(piece, first + low - begin, first + high - begin))
        begin += last - first
    return found
