"""Schedule a pack.

Pieces are counted in source order; a shard is written once its samples are counted.
"""

from __future__ import annotations

import logging
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

MAX_HELD = 96 << 20  # decoded bytes that may wait in memory until their shards are complete
logger = logging.getLogger("cachedfs.packing")
CHECKSUMS_S = 10.0  # seconds between two writes of the checksums of finished shards
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
        self._checksums = task.store.kept_done(existing)
        self._fields = task.source.big
        self._unread_pieces = iter(task.source.pieces())
        # In source order; the first piece is the next one to get its position in the arrays.
        self._slots: deque[_Slot] = deque()
        self._writing: dict[Any, tuple[Field, int]] = {}
        self._measuring: dict[Any, _Slot] = {}
        self._starts: dict[str, list[int]] = {field.name: [0] for field in self._fields}
        # Index of the next shard along the first axis.
        self._next: dict[str, int] = {field.name: 0 for field in self._fields}
        self._ready: deque[tuple[Field, Place, list[FieldSpan], int]] = deque()
        self._held_bytes = 0  # bytes that are counted and not written yet
        self._written_at = time.monotonic()
        self._new_checksums: dict[str, str] = {}
        self._has_all_pieces = False
        self.pieces: list[tuple[SourcePiece, PieceInfo]] = []
        self.stored: dict[str, StoredObject] = {}
        self.skipped: dict[int, str] = {}  # the reason for each file that cannot be packed, by its number

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
        self._write_checksums()

    @property
    def n_samples(self) -> int:
        return sum(counts.n for _, counts in self.pieces)

    def length(self, name: str) -> int:
        """Return the number of rows, or of elements of a ragged field, counted so far in a big field."""
        return self._starts[name][-1]

    # Counting pieces.

    def _submit_calls(self) -> None:
        while len(self._writing) + len(self._measuring) < self._pool.n_workers:
            if self._ready:
                self._write(*self._ready.popleft())
            elif not self._measure():
                return

    def _measure(self) -> bool:
        """Start counting the next piece; return False if none is left or too many bytes are held."""
        if self._has_all_pieces:
            return False
        is_over_limit = self._task.source.is_decoded and self._held_bytes > MAX_HELD
        if is_over_limit and (self._writing or self._measuring):
            return False
        slot = next((slot for slot in self._slots if not slot.is_begun), None)
        if slot is None:
            piece = next(self._unread_pieces, None)
            if piece is None:
                self._place_pieces()
                return bool(self._ready)
            slot = _Slot(piece)
            self._slots.append(slot)
        slot.is_begun = True
        is_stored = f"{BESIDE}/{slot.piece.name}.npz" in self._existing
        if self._task.source.is_known:
            slot.counts = self._task.measure(slot.piece)
            self._place_pieces()
        else:
            self._measuring[self._pool.submit("measure", slot.piece, is_stored)] = slot
        return True

    def _record_skipped(self, skipped: Mapping[int, str]) -> None:
        files = self._task.source.files
        for number in skipped.keys() - files.removed:
            self.skipped[number] = skipped[number]
            logger.warning("cannot pack %s: %s", files.shown(number), skipped[number])

    def _place_pieces(self) -> None:
        """Give the samples of counted pieces their positions in the arrays, in source order."""
        while self._slots and (counts := self._slots[0].counts) is not None:
            piece = self._slots.popleft().piece
            self.pieces.append((piece, counts))
            for field in self._fields:
                starts = self._starts[field.name]
                starts.append(starts[-1] + counts.lengths[field.name])
                self._held_bytes += counts.lengths[field.name] * field.row_size
            if piece.stop == END and counts.stop != END:
                self._slots.appendleft(_Slot(SourcePiece(piece.file, counts.stop, END)))
            self._find_shards(is_last=False)
        if not self._slots and not self._has_all_pieces and self._exhausted():
            self._has_all_pieces = True
            self._find_shards(is_last=True)

    def _exhausted(self) -> bool:
        piece = next(self._unread_pieces, None)
        if piece is not None:
            self._slots.append(_Slot(piece))
        return piece is None

    # Writing shards.

    def _find_shards(self, *, is_last: bool) -> None:
        for field in self._fields:
            grid = self._task.encodings[field.name].grid
            rows, length = grid.shard[0], self.length(field.name)
            while (at := self._next[field.name]) * rows < length and (is_last or (at + 1) * rows <= length):
                start, stop = at * rows, min((at + 1) * rows, length)
                spans = self._spans(field.name, start, stop)
                for place, n_chunks in _places(field, grid.chunk, grid.shard, stop - start):
                    self._ready.append((field, (at, *place), spans, n_chunks))
                self._next[field.name] += 1

    def _spans(self, name: str, start: int, stop: int) -> list[FieldSpan]:
        starts = self._starts[name]
        found = []
        i = bisect_right(starts, start) - 1
        while start < stop:
            end = min(stop, starts[i + 1])
            if end > start:
                found.append(FieldSpan(self.pieces[i][0], start - starts[i], end - starts[i]))
            start, i = end, i + 1
        return found

    def _write(self, field: Field, place: Place, spans: list[FieldSpan], n_chunks: int) -> None:
        # If samples are cut along their own axes, this shard has about an equal share of their bytes.
        n_parts = math.prod(_counts(field, self._task.encodings[field.name].grid.shard))
        size = sum(span.stop - span.start for span in spans) * field.row_size // n_parts
        name = object_name(field.name, place)
        old = self._existing.get(name)
        if old is not None and old.checksum is not None and self._checksums.get(name) == old.checksum:
            self._record_stored(field, size, old)  # unchanged since it was verified
            return
        method, more = ("write", ()) if old is None else ("ensure", (n_chunks,))
        self._writing[self._pool.submit(method, field.name, place, spans, *more)] = field, size

    def _record_stored(self, field: Field, size: int, stored: StoredObject) -> None:
        if not stored.is_new:
            stored = stored._replace(checksum=self._existing[stored.name].checksum)
        self.stored[stored.name] = stored
        self._held_bytes -= size
        self._on_stored(size)
        if stored.checksum is not None and self._checksums.get(stored.name) != stored.checksum:
            self._new_checksums[stored.name] = stored.checksum
            if time.monotonic() - self._written_at > CHECKSUMS_S:
                self._write_checksums()

    def _write_checksums(self) -> None:
        if self._new_checksums:
            self._task.store.keep_done(self._new_checksums)
        self._new_checksums, self._written_at = {}, time.monotonic()


class _Slot:
    """A queued piece: waiting, being counted, or counted (`counts`)."""

    def __init__(self, piece: SourcePiece) -> None:
        self.piece = piece
        self.is_begun = False
        self.counts: PieceInfo | None = None


def _places(field: Field, chunk: Place, shard: Place, rows: int) -> Iterator[tuple[Place, int]]:
    """Yield the shards of `rows` rows: their index along the other axes, and their number of chunks."""
    for place in np.ndindex(*_counts(field, shard)):
        shape = [
            min((at + 1) * part, extent) - at * part
            for at, part, extent in zip(place, shard[1:], field.shape, strict=True)
        ]
        yield place, math.prod(-(-n // part) for n, part in zip((rows, *shape), chunk, strict=True))


def _counts(field: Field, shard: Place) -> list[int]:
    """Return the number of shards along each axis but the first."""
    return [-(-extent // part) for extent, part in zip(field.shape, shard[1:], strict=True)]
