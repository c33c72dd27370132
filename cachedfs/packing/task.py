"""The work of one packing worker: count the samples of a piece, write a shard, check a shard."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cachedfs.packing.pack_types import Array, Field, FieldSpan, PieceCounts, SourcePiece, empty_batch
from cachedfs.packing.shard_encoder import ArrayEncoding, ShardBytes, object_name
from cachedfs.packing.sources.sample_source import BadFile, SampleSource
from cachedfs.packing.store import StoredObject, ZarrTarget

__all__ = ["PackTask", "PieceInfo"]

SLAB = 8 << 20  # bytes of samples that are read, then encoded, in one step
MAX_COUNTS = 32  # pieces whose counts stay in memory


class PieceInfo(NamedTuple):
    """The counts of a piece that `ShardRunner` needs: samples, length by field, and end."""

    n: int
    lengths: Mapping[str, int]  # rows, or elements of a ragged field, by field name
    stop: int
    skipped: Mapping[int, str]  # the reason for each file that cannot be packed, by its number


class PackTask:
    """The methods and data of a worker. Pickling drops the cached counts and decoded batches."""

    def __init__(
        self, source: SampleSource, store: ZarrTarget, encodings: Mapping[str, ArrayEncoding]
    ) -> None:
        self.source, self.store, self.encodings = source, store, encodings
        self._lock = threading.Lock()
        self._counts: dict[SourcePiece, PieceCounts] = {}

    def __reduce__(self) -> Any:
        return type(self), (self.source, self.store, self.encodings)

    def measure(self, piece: SourcePiece, is_stored: bool = False) -> PieceInfo:
        """Count the samples of a piece and store the counts. `is_stored`: an earlier run may have stored them."""
        counts = self.counts(piece, is_stored=is_stored)
        lengths = {field.name: counts.length(field) for field in self.source.fields}
        return PieceInfo(counts.n, lengths, counts.stop, counts.skipped)

    def counts(self, piece: SourcePiece, *, is_stored: bool = True) -> PieceCounts:
        """Return the counts of a piece: from memory, from the store, or by counting again."""
        with self._lock:
            counts = self._counts.get(piece)
        if counts is None:
            counts = self.store.kept(piece.name) if is_stored and not self.source.is_known else None
            if counts is None:
                counts = self._counted(piece)
                if not self.source.is_known:
                    self.store.keep(piece.name, counts)
            with self._lock:
                self._counts[piece] = counts
                while len(self._counts) > MAX_COUNTS:
                    del self._counts[next(iter(self._counts))]
        return counts

    def _counted(self, piece: SourcePiece) -> PieceCounts:
        try:
            return self.source.measure(piece)
        except BadFile as error:
            if piece.start:  # earlier samples of this file may be in the store
                raise
            fields = self.source.fields
            return empty_batch(fields, {piece.file: error.reason}).counts(fields)

    def write(self, field: Field, place: tuple[int, ...], spans: Sequence[FieldSpan]) -> StoredObject:
        """Write a shard of a field with one request.

        `place` is the index of the shard along each axis. `spans` are its rows or elements, in order.
        """
        encoding, box = self.encodings[field.name], self._box(field, place)
        chunk = encoding.chunk
        row = np.dtype(field.dtype).itemsize * math.prod(each.stop - each.start for each in box)
        slab = max(1, SLAB // max(1, row * chunk[0])) * chunk[0]
        data = ShardBytes(encoding)
        n = sum(span.stop - span.start for span in spans)
        for start in range(0, n, slab):
            data.append(self._gather(field, _cut(spans, start, min(start + slab, n)), box))
        return self.store.put_checked(object_name(field.name, place), data.finish())

    def _box(self, field: Field, place: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the part of each sample that is in a shard."""
        axes = zip(place[1:], self.encodings[field.name].shard[1:], field.shape, strict=True)
        return tuple(slice(at * part, min((at + 1) * part, extent)) for at, part, extent in axes)

    def _gather(self, field: Field, spans: Sequence[FieldSpan], box: tuple[slice, ...]) -> Array:
        parts = []
        for span in spans:
            counts = PieceCounts(0) if self.source.is_decoded else self.counts(span.piece)
            part = self.source.rows(field, span, box, counts)
            if len(part) != span.stop - span.start:
                raise ValueError(
                    f"{self.source.shown(span.piece)}: its samples differ from those counted before: the file was "
                    "replaced meanwhile; pack again, with overwrite"
                )
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cut(spans: Sequence[FieldSpan], start: int, stop: int) -> list[FieldSpan]:
    """Return the part of the concatenated spans from `start` to `stop`."""
    found, begin = [], 0
    for piece, first, last in spans:
        low, high = max(start, begin), min(stop, begin + last - first)
        if low < high:
            found.append(FieldSpan(piece, first + low - begin, first + high - begin))
        begin += last - first
    return found
