"""What one worker does, in whatever thread, process or machine: measure a piece, write a shard, check one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cachedfs.packing.pack_types import Array, Field, FieldSpan, PieceCounts, SourcePiece
from cachedfs.packing.shard_encoder import ChunkEncoding, ShardBytes, wrong_with
from cachedfs.packing.sources.sample_source import SampleSource
from cachedfs.packing.store import StoredObject, ZarrTarget

__all__ = ["PackTask", "PieceInfo", "object_name"]

SLAB = 8 << 20  # bytes of samples that are read before they are encoded
TALLIES = 32  # pieces of which it is remembered what is known


class PieceInfo(NamedTuple):
    """What the one who hands out the work has to know of a piece."""

    n: int
    lengths: Mapping[str, int]  # values or elements, by field
    stop: int


class PackTask:
    """All that a worker needs. It pickles; what is read of a source stays with the worker."""

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
        """Find out what is in a piece; `is_kept`: an earlier run did, and wrote it down."""
        tally = self.store.kept(piece.name) if is_kept else None
        if tally is None:
            tally = self.source.measure(piece)
            if not self.source.is_known:
                self.store.keep(piece.name, tally)
        self._remember(piece, tally)
        return PieceInfo(
            tally.n, {field.name: tally.length(field) for field in self.source.fields}, tally.stop
        )

    def tally(self, piece: SourcePiece) -> PieceCounts:
        """Return what was found out of a piece."""
        with self._lock:
            tally = self._tallies.get(piece)
        if tally is None:
            tally = None if self.source.is_known else self.store.kept(piece.name)
            tally = tally or self.source.measure(piece)
            self._remember(piece, tally)
        return tally

    def _remember(self, piece: SourcePiece, tally: PieceCounts) -> None:
        with self._lock:
            self._tallies[piece] = tally
            while len(self._tallies) > TALLIES:
                self._tallies.popitem(last=False)

    def write(self, name: str, place: tuple[int, ...], spans: Sequence[FieldSpan]) -> StoredObject:
        """Write a shard of a field: what of the source is in these spans, in order; all of it is sent by one request."""
        field, encoding = self._fields[name], self.encodings[name]
        chunk, shard = encoding.grid.chunk, encoding.grid.shard
        box = tuple(
            slice(at * part, min((at + 1) * part, whole))
            for at, part, whole in zip(place[1:], shard[1:], field.shape, strict=True)
        )
        row = int(
            np.dtype(field.dtype).itemsize * np.prod([each.stop - each.start for each in box], dtype=np.int64)
        )
        slab = max(1, SLAB // max(1, row * chunk[0])) * chunk[0]
        data = ShardBytes(encoding)
        n = sum(span.stop - span.start for span in spans)
        for start in range(0, n, slab):
            values = self._gathered(field, _cut(spans, start, min(start + slab, n)), box)
            for at, part in chunks_of(values, chunk):
                data.put((start // chunk[0] + at[0], *at[1:]), part)
        return self.store.put_checked(object_name(name, place), data.finish())

    def ensure(
        self, name: str, place: tuple[int, ...], spans: Sequence[FieldSpan], n_chunks: int
    ) -> StoredObject:
        """Read back a shard that an earlier run wrote; write it again unless it has all its chunks, as they were encoded."""
        stored = self.store.read_back(object_name(name, place))
        if stored is None or wrong_with(stored, self.encodings[name], n_chunks) is not None:
            return self.write(name, place, spans)
        return StoredObject(object_name(name, place), len(stored), None, is_new=False)

    def _gathered(self, field: Field, spans: Sequence[FieldSpan], box: tuple[slice, ...]) -> Array:
        parts = []
        for span in spans:
            part = self.source.rows(field, span, box, lambda piece=span.piece: self.tally(piece))  # type: ignore[misc]  # bound here
            if len(part) != span.stop - span.start:
                raise ValueError(
                    f"{self.source.shown(span.piece)}: its samples are others than when they were counted: it was replaced "
                    "meanwhile; pack again, with overwrite"
                )
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def object_name(name: str, place: tuple[int, ...]) -> str:
    """Return the name of a shard's object in the store."""
    return f"{name}/c.{'.'.join(map(str, place))}"


def chunks_of(values: Array, chunk: tuple[int, ...]) -> Any:
    """Yield the chunks of some values, each with its place among them."""
    for at in np.ndindex(*(-(-n // part) for n, part in zip(values.shape, chunk, strict=True))):
        yield at, values[tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, chunk, strict=True))]


def _cut(spans: Sequence[FieldSpan], start: int, stop: int) -> list[FieldSpan]:
    """Return what of spans is from `start` to `stop`, counted over all of them."""
    found, begin = [], 0
    for piece, first, last in spans:
        low, high = max(start, begin), min(stop, begin + last - first)
        if low < high:
            found.append(FieldSpan(piece, first + low - begin, first + high - begin))
        begin += last - first
    return found
