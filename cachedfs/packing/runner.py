"""Schedule a pack: count pieces in source order, and write each shard once its samples are counted."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cachedfs.packing.executors import TaskPool
from cachedfs.packing.pack_types import END, OFFSETS, Array, Field, FieldSpan, SourcePiece
from cachedfs.packing.shard_encoder import ArrayEncoding, ShardBytes, object_name
from cachedfs.packing.store import BESIDE, StoredObject, ZarrTarget
from cachedfs.packing.task import PackTask, PieceInfo

__all__ = ["ShardRunner", "write_small"]

MAX_HELD = 96 << 20  # decoded bytes that may wait in memory until their shards are complete
NOTES_S = 10.0  # seconds between two notes of verified shards
ARRAYS_AT_ONCE = 8  # small arrays whose last shards are written at the same time
logger = logging.getLogger("cachedfs.packing")
Place = tuple[int, ...]


class ShardRunner:
    """Submits counting and writing calls until every shard of every big field is in the store.

    The samples of a shard depend only on the source, so a shard of an earlier run equals the one this run would write.
    """

    def __init__(
        self,
        task: PackTask,
        pool: TaskPool,
        existing: Mapping[str, StoredObject],
        on_stored: Callable[[int], object],
        most_skipped: float = math.inf,
    ) -> None:
        """`existing` has the objects in the store.

        `on_stored(n)` is called after `n` bytes of samples are stored. The run stops after `most_skipped` files that
        cannot be packed.
        """
        self._task, self._pool, self._existing, self._on_stored = task, pool, existing, on_stored
        self._most_skipped = most_skipped
        self._fields = [field for field in task.source.fields if not field.is_small]
        self._unread = iter(task.source.pieces())
        self._is_exhausted = False
        # In source order; the first piece is the next one to get its position in the arrays.
        self._slots: deque[_Slot] = deque()
        self._measuring: dict[Any, _Slot] = {}
        self._ready: deque[tuple[Field, Place, list[FieldSpan]]] = deque()
        self._writing: dict[Any, tuple[Field, int]] = {}
        self._starts: dict[str, list[int]] = {field.name: [0] for field in self._fields}
        # Index of the next shard along the first axis.
        self._next: dict[str, int] = {field.name: 0 for field in self._fields}
        self._held_bytes = 0  # bytes that are counted and not written yet
        # Versions of objects that an earlier run verified, and of those that are not noted yet.
        self._verified, self._new = task.store.kept_done(existing), dict[str, str]()
        self._noted_at = time.monotonic()
        self.n_samples = 0
        self.pieces: list[SourcePiece] = []
        self.stored: dict[str, StoredObject] = {}
        self.skipped: dict[int, str] = {}  # the reason for each file that cannot be packed, by its number

    @property
    def lengths(self) -> dict[str, int]:
        """The number of rows, or of elements of a ragged field, counted so far in each big field."""
        return {name: starts[-1] for name, starts in self._starts.items()}

    def __call__(self) -> None:
        """Run the pack to its end. Raises the error of a failed worker."""
        while len(self.skipped) < self._most_skipped:
            self._submit_calls()
            if not (self._writing or self._measuring):
                break
            for handle, result in self._pool.finished():
                if (slot := self._measuring.pop(handle, None)) is not None:
                    slot.counts = result
                    self._record_skipped(result.skipped)
                    self._place_pieces()
                else:
                    self._record_stored(*self._writing.pop(handle), result)
        self._note()

    def _submit_calls(self) -> None:
        while len(self._writing) + len(self._measuring) < self._pool.n_workers:
            if self._ready:
                self._write(*self._ready.popleft())
            elif (slot := self._next_slot()) is not None:
                slot.is_begun = True
                if self._task.source.is_known:
                    slot.counts = self._task.measure(slot.piece)
                    self._place_pieces()
                    continue
                is_stored = f"{BESIDE}/{slot.piece.name}.npz" in self._existing
                self._measuring[self._pool.submit("measure", slot.piece, is_stored)] = slot
            elif not self._ready:
                return

    # Counting pieces.

    def _next_slot(self) -> _Slot | None:
        """Return the next piece to count; None if none is left or too many bytes are held."""
        is_over_limit = self._task.source.is_decoded and self._held_bytes > MAX_HELD
        if is_over_limit and (self._writing or self._measuring):
            return None
        slot = next((slot for slot in self._slots if not slot.is_begun), None)
        if slot is None and (piece := next(self._unread, None)) is not None:
            slot = _Slot(piece)
            self._slots.append(slot)
        if slot is None and not self._is_exhausted:
            self._is_exhausted = True
            self._find_shards()
        return slot

    def _record_skipped(self, skipped: Mapping[int, str]) -> None:
        files = self._task.source.files
        for number in skipped.keys() - files.removed:
            self.skipped[number] = skipped[number]
            logger.warning("cannot pack %s: %s", files.shown(number), skipped[number])

    def _place_pieces(self) -> None:
        """Give the samples of counted pieces their positions in the arrays, in source order."""
        while self._slots and (counts := self._slots[0].counts) is not None:
            piece = self._slots.popleft().piece
            self.pieces.append(piece)
            self.n_samples += counts.n
            for field in self._fields:
                starts = self._starts[field.name]
                starts.append(starts[-1] + counts.lengths[field.name])
                self._held_bytes += counts.lengths[field.name] * field.row_size
            if piece.stop == END and counts.stop != END:
                self._slots.appendleft(_Slot(SourcePiece(piece.file, counts.stop, END)))
            self._find_shards()

    # Writing shards.

    def _find_shards(self) -> None:
        is_last = self._is_exhausted and not self._slots
        for field in self._fields:
            shard, length = self._task.encodings[field.name].shard, self._starts[field.name][-1]
            rows = shard[0]
            while (at := self._next[field.name]) * rows < length and (is_last or (at + 1) * rows <= length):
                spans = self._spans(field.name, at * rows, min((at + 1) * rows, length))
                for place in np.ndindex(*_counts(field, shard)):
                    self._ready.append((field, (at, *place), spans))
                self._next[field.name] += 1

    def _spans(self, name: str, start: int, stop: int) -> list[FieldSpan]:
        starts = self._starts[name]
        found = []
        i = bisect_right(starts, start) - 1
        while start < stop:
            end = min(stop, starts[i + 1])
            if end > start:
                found.append(FieldSpan(self.pieces[i], start - starts[i], end - starts[i]))
            start, i = end, i + 1
        return found

    def _write(self, field: Field, place: Place, spans: list[FieldSpan]) -> None:
        # If samples are cut along their own axes, this shard has about an equal share of their bytes.
        n_parts = math.prod(_counts(field, self._task.encodings[field.name].shard))
        size = sum(span.stop - span.start for span in spans) * field.row_size // n_parts
        name = object_name(field.name, place)
        old = self._existing.get(name)
        if old is not None and self._verified.get(name) == old.version:
            self._record_stored(field, size, old)
        else:
            self._writing[self._pool.submit("write", field, place, spans)] = field, size

    def _record_stored(self, field: Field, size: int, stored: StoredObject) -> None:
        self.stored[stored.name] = stored
        self._held_bytes -= size
        self._on_stored(size)
        if stored.is_new and stored.version:
            self._new[stored.name] = stored.version
            if time.monotonic() - self._noted_at > NOTES_S:
                self._note()

    def _note(self) -> None:
        if self._new:
            self._task.store.keep_done(self._new)
        self._new, self._noted_at = {}, time.monotonic()


class _Slot:
    """A queued piece: waiting, being counted, or counted (`counts`)."""

    def __init__(self, piece: SourcePiece) -> None:
        self.piece = piece
        self.is_begun = False
        self.counts: PieceInfo | None = None


def _counts(field: Field, shard: Place) -> list[int]:
    """Return the number of shards along each axis but the first."""
    return [-(-extent // part) for extent, part in zip(field.shape, shard[1:], strict=True)]


def write_small(
    task: PackTask, pieces: list[SourcePiece], encodings: Mapping[str, ArrayEncoding]
) -> tuple[list[StoredObject], dict[str, int]]:
    """Write the small arrays and the offsets from the counts of all pieces; return the objects and the lengths."""
    arrays = {name: _GrowingArray(task.store, name, encoding) for name, encoding in encodings.items()}
    ends = {field.name: 0 for field in task.source.fields if field.is_ragged}
    for name in ends:
        arrays[name + OFFSETS].add(np.zeros(1, np.int64))
    for piece in pieces:
        counts = task.counts(piece)
        for name, values in counts.small.items():
            arrays[name].add(values)
        for name in ends:
            edges = np.cumsum(counts.sizes[name], dtype=np.int64) + ends[name]
            arrays[name + OFFSETS].add(edges)
            ends[name] = int(edges[-1]) if len(edges) else ends[name]
    with ThreadPoolExecutor(ARRAYS_AT_ONCE) as threads:
        list(threads.map(_GrowingArray.finish, arrays.values()))
    stored = [stored for each in arrays.values() for stored in each.stored]
    return stored, {name: each.length for name, each in arrays.items()}


class _GrowingArray:
    """An array that grows along its first axis and writes each shard when it is full."""

    def __init__(self, store: ZarrTarget, name: str, encoding: ArrayEncoding) -> None:
        self._store, self._name, self._encoding = store, name, encoding
        self._parts: list[Array] = []  # values that do not fill a chunk yet
        self._n = 0  # rows in `_parts`
        self._shard = ShardBytes(encoding)
        self.length = 0
        self.stored: list[StoredObject] = []

    def add(self, values: Array) -> None:
        self._parts.append(values)
        self._n += len(values)
        self.length += len(values)
        rows = self._encoding.chunk[0]
        if self._n >= rows:
            whole, stop = np.concatenate(self._parts), self._n // rows * rows
            self._parts, self._n = [whole[stop:].copy()], self._n - stop
            for start in range(0, stop, rows):
                self._append(whole[start : start + rows])

    def finish(self) -> None:
        if self._n:
            self._append(np.concatenate(self._parts))
        if self.length > len(self.stored) * self._encoding.shard[0]:
            self._write()

    def _append(self, values: Array) -> None:
        self._shard.append(values)
        if self._shard.is_full:
            self._write()

    def _write(self) -> None:
        place = (len(self.stored), *(0 for _ in self._encoding.chunk[1:]))
        self.stored.append(self._store.put_checked(object_name(self._name, place), self._shard.finish()))
        self._shard = ShardBytes(self._encoding)
