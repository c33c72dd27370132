"""Schedule a pack.

Pieces are counted in source order; a shard is written once its samples are counted.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cachedfs.packing.executors import TaskPool
from cachedfs.packing.pack_types import END, Field, FieldSpan, SourcePiece
from cachedfs.packing.store import BESIDE, StoredObject
from cachedfs.packing.task import PackTask, PieceInfo, object_name

__all__ = ["ShardRunner"]

MEASURED = 96 << 20  # decoded bytes that may wait in memory until their shards are complete
NOTED_S = 10.0  # seconds between two writes of the checksums of finished shards
Place = tuple[int, ...]


class ShardRunner:
    """Submits counting and writing calls until every shard of every big field is in the store.

    The samples of a shard depend only on the source, so a shard of an earlier run equals the one this run would write.
    """

    def __init__(
        self, job: PackTask, pool: TaskPool, there: Mapping[str, StoredObject], told: Callable[[int], object]
    ) -> None:
        """`there` has the objects in the store.

        `told(n)` is called after `n` bytes of samples are stored.
        """
        self._job, self._pool, self._there, self._told = job, pool, there, told
        self._checksums = job.store.kept_done(there)
        self._fields = job.source.big
        self._coming = iter(job.source.pieces())
        # In source order; the first piece is the next one to get its position in the arrays.
        self._slots: deque[_Slot] = deque()
        self._writing: dict[Any, tuple[Field, int]] = {}
        self._measuring: dict[Any, _Slot] = {}
        self._begins: dict[str, list[int]] = {field.name: [0] for field in self._fields}
        # Index of the next shard along the first axis.
        self._next: dict[str, int] = {field.name: 0 for field in self._fields}
        self._ready: deque[tuple[Field, Place, list[FieldSpan], int]] = deque()
        self._held = 0  # bytes that are counted and not written yet
        self._noted = time.monotonic()
        self._notes: dict[str, str] = {}
        self._is_placed = False
        self.pieces: list[tuple[SourcePiece, PieceInfo]] = []
        self.stored: dict[str, StoredObject] = {}

    def __call__(self) -> None:
        """Run the pack to its end. Raises the error of a failed worker."""
        while True:
            self._hand_out()
            if not (self._writing or self._measuring):
                break
            for handle, result in self._pool.finished():
                if (slot := self._measuring.pop(handle, None)) is not None:
                    slot.known = result
                    self._place()
                else:
                    self._note(*self._writing.pop(handle), result)
        self._write_notes()

    @property
    def n_samples(self) -> int:
        return sum(known.n for _, known in self.pieces)

    def length(self, name: str) -> int:
        """Return the number of rows, or of elements of a ragged field, counted so far in a big field."""
        return self._begins[name][-1]

    # Counting pieces.

    def _hand_out(self) -> None:
        while len(self._writing) + len(self._measuring) < self._pool.n_workers:
            if self._ready:
                self._write(*self._ready.popleft())
            elif not self._measure():
                return

    def _measure(self) -> bool:
        """Start counting the next piece; return False if none is left or too many bytes are held."""
        if self._is_placed:
            return False
        is_enough = self._job.source.is_decoded and self._held > MEASURED
        if is_enough and (self._writing or self._measuring):
            return False
        slot = next((slot for slot in self._slots if not slot.is_begun), None)
        if slot is None:
            piece = next(self._coming, None)
            if piece is None:
                self._place()
                return bool(self._ready)
            slot = _Slot(piece)
            self._slots.append(slot)
        slot.is_begun = True
        is_kept = f"{BESIDE}/{slot.piece.name}.npz" in self._there
        if self._job.source.is_known:
            slot.known = self._job.measure(slot.piece)
            self._place()
        else:
            self._measuring[self._pool.submit("measure", slot.piece, is_kept)] = slot
        return True

    def _place(self) -> None:
        """Give the samples of counted pieces their positions in the arrays, in source order."""
        while self._slots and (known := self._slots[0].known) is not None:
            piece = self._slots.popleft().piece
            self.pieces.append((piece, known))
            for field in self._fields:
                begins = self._begins[field.name]
                begins.append(begins[-1] + known.lengths[field.name])
                self._held += known.lengths[field.name] * field.row_size
            if piece.stop == END and known.stop != END:
                self._slots.appendleft(_Slot(SourcePiece(piece.file, known.stop, END)))
            self._find_shards(is_last=False)
        if not self._slots and not self._is_placed and self._exhausted():
            self._is_placed = True
            self._find_shards(is_last=True)

    def _exhausted(self) -> bool:
        piece = next(self._coming, None)
        if piece is not None:
            self._slots.append(_Slot(piece))
        return piece is None

    # Writing shards.

    def _find_shards(self, *, is_last: bool) -> None:
        for field in self._fields:
            grid = self._job.encodings[field.name].grid
            rows, length = grid.shard[0], self.length(field.name)
            while (at := self._next[field.name]) * rows < length and (is_last or (at + 1) * rows <= length):
                start, stop = at * rows, min((at + 1) * rows, length)
                spans = self._spans(field.name, start, stop)
                for place, n_chunks in _places(field, grid.chunk, grid.shard, stop - start):
                    self._ready.append((field, (at, *place), spans, n_chunks))
                self._next[field.name] += 1

    def _spans(self, name: str, start: int, stop: int) -> list[FieldSpan]:
        begins = self._begins[name]
        found = []
        i = bisect_right(begins, start) - 1
        while start < stop:
            end = min(stop, begins[i + 1])
            if end > start:
                found.append(FieldSpan(self.pieces[i][0], start - begins[i], end - begins[i]))
            start, i = end, i + 1
        return found

    def _write(self, field: Field, place: Place, spans: list[FieldSpan], n_chunks: int) -> None:
        # If samples are cut along their own axes, this shard has about an equal share of their bytes.
        n_beside = math.prod(_counts(field, self._job.encodings[field.name].grid.shard))
        size = sum(span.stop - span.start for span in spans) * field.row_size // n_beside
        name = object_name(field.name, place)
        old = self._there.get(name)
        if old is not None and old.checksum is not None and self._checksums.get(name) == old.checksum:
            self._note(field, size, old)  # unchanged since it was verified
            return
        method, more = ("write", ()) if old is None else ("ensure", (n_chunks,))
        self._writing[self._pool.submit(method, field.name, place, spans, *more)] = field, size

    def _note(self, field: Field, size: int, stored: StoredObject) -> None:
        if not stored.is_new:
            stored = stored._replace(checksum=self._there[stored.name].checksum)
        self.stored[stored.name] = stored
        self._held -= size
        self._told(size)
        if stored.checksum is not None and self._checksums.get(stored.name) != stored.checksum:
            self._notes[stored.name] = stored.checksum
            if time.monotonic() - self._noted > NOTED_S:
                self._write_notes()

    def _write_notes(self) -> None:
        if self._notes:
            self._job.store.keep_done(self._notes)
        self._notes, self._noted = {}, time.monotonic()


class _Slot:
    """A queued piece: waiting, being counted, or counted (`known`)."""

    def __init__(self, piece: SourcePiece) -> None:
        self.piece = piece
        self.is_begun = False
        self.known: PieceInfo | None = None


def _places(field: Field, chunk: Place, shard: Place, rows: int) -> Iterator[tuple[Place, int]]:
    """Yield the shards of `rows` rows: their index along the other axes, and their number of chunks."""
    for place in np.ndindex(*_counts(field, shard)):
        there = [
            min((at + 1) * part, whole) - at * part
            for at, part, whole in zip(place, shard[1:], field.shape, strict=True)
        ]
        yield place, math.prod(-(-n // part) for n, part in zip((rows, *there), chunk, strict=True))


def _counts(field: Field, shard: Place) -> list[int]:
    """Return the number of shards along each axis but the first."""
    return [-(-whole // part) for whole, part in zip(field.shape, shard[1:], strict=True)]
