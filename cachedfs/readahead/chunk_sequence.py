"""Predict the next chunks that will be read of an array, from the chunks read before. Pure functions.

A reader is modeled as a walk through the chunk grid: a counter with one digit per axis, the fastest axis first.
So one rule covers every axis order, backward reads, strides, and reads of the same part of every step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cachedfs.readahead.chunk_grid import Place

__all__ = ["ChunkHistory", "ChunkWalk", "Extents", "ahead"]

NEEDED = 4  # chunks read in order before readahead starts; random orders rarely have so many
LONG = 8  # reads after which chunks may be out of order
REACH = 16  # chunks by which a read may then be early or late: zarr has ten reads in flight
MOST_WALKS = 8
LATELY = 32  # latest chunks remembered; reading one of them again is ignored
WASTE_SHARE = 20  # one window, plus 1/20 of the chunks read in order, may be requested and not read
ENDLESS = 1 << 62

Extents = tuple[int | None, ...]  # number of chunks along each axis; None: unknown


class Digit(NamedTuple):
    """The movement along one axis: `length` chunks, `step` apart."""

    axis: int
    step: int
    length: int = ENDLESS  # of the slowest axis, which is bounded only by the grid


class ChunkWalk(NamedTuple):
    """One traversal of the chunk grid. The number of a chunk is its position in the walk, counted from 0."""

    first: Place
    digits: tuple[Digit, ...] = ()  # the axes that have moved, the fastest first
    last: int = 0  # highest number read
    n_read: int = 1
    asked: int = 1  # every number below this was read, requested or skipped
    n_skipped: int = 0  # numbers below `last` that were not read

    @property
    def row(self) -> int:
        """Number of chunks per row, that is before the slowest axis moves."""
        return math.prod(digit.length for digit in self.digits[:-1])

    @property
    def n_ahead(self) -> int:
        """Number of chunks requested beyond the last one read."""
        return max(0, self.asked - self.last - 1)

    @property
    def n_unread(self) -> int:
        """Number of chunks that were requested, or may have been, and were not read."""
        return self.n_ahead + self.n_skipped if self.n_read >= NEEDED else 0

    def number(self, place: Place) -> int | None:
        """Return the number of chunk `place`; None when it is not on the walk."""
        number, weight = 0, 1
        offset = [here - there for here, there in zip(place, self.first, strict=True)]
        for axis, step, length in self.digits:
            digit, rest = divmod(offset[axis], step)
            if rest or not 0 <= digit < length:
                return None
            number, weight, offset[axis] = number + digit * weight, weight * length, 0
        return None if any(offset) else number

    def place(self, number: int) -> Place:
        """Return the chunk with this number."""
        found = list(self.first)
        for axis, step, length in self.digits:
            number, digit = divmod(number, length)
            found[axis] += digit * step
        return tuple(found)

    def after(self, place: Place) -> ChunkWalk | None:
        """Return the walk after a read of chunk `place`; None when the chunk does not belong to it."""
        number, n_read = self.number(place), self.n_read + 1
        if number is not None and number > self.last:
            n_skipped = self.n_skipped + number - self.last - 1
            is_near = n_skipped <= min(self.n_read - 2, REACH + self.n_read // WASTE_SHARE)
            if is_near or number == self.last + 1:
                return self._replace(last=number, n_read=n_read, n_skipped=n_skipped)
        elif number is not None and self.n_skipped and number >= self.last - REACH:
            return self._replace(n_read=n_read, n_skipped=self.n_skipped - 1)
        n_rows, n_more = divmod(self.last + 1, self.row)
        return None if n_more else self._with_next_row(place, n_rows)

    def _with_next_row(self, place: Place, n_rows: int) -> ChunkWalk | None:
        """Return the walk if its next row begins at `place`, after `n_rows` complete rows.

        Another axis may move for the first time; then the rows before were all of the slowest axis. Or the slowest
        axis jumps; the jump is its new step.
        """
        axes = [digit.axis for digit in self.digits]
        moved = _moved(self.first, place)
        if len(moved) == 1 and moved[0].axis not in axes and (axes or abs(moved[0].step) == 1):
            done = [*self.digits[:-1], *(digit._replace(length=n_rows) for digit in self.digits[-1:])]
            return self._replace(
                digits=(*done, *moved), last=self.last + 1, asked=self.last + 2, n_read=self.n_read + 1
            )
        start = self.place(self.last + 1 - self.row)
        moved = _moved(start, place)
        if len(axes) > 1 and len(moved) == 1 and moved[0].axis == axes[-1]:
            digits, row = (*self.digits[:-1], *moved), self.row
            return self._replace(first=start, digits=digits, last=row, asked=row + 1, n_read=self.n_read + 1)
        return None

    def end(self) -> int:
        """Return the first number not predicted: the row's end, until the slowest axis has shown its step."""
        n_rows = self.last // self.row
        is_known = len(self.digits) == 1 or n_rows >= (1 if abs(self.digits[-1].step) == 1 else 2)
        return ENDLESS if is_known else (n_rows + 1) * self.row


class ChunkHistory(NamedTuple):
    """The recent reads of one grid, as walks."""

    walks: tuple[ChunkWalk, ...] = ()  # the one that advanced last comes first
    lately: tuple[Place, ...] = ()
    n_followed: int = 0  # chunks read in order
    n_wasted: int = 0  # chunks requested on walks that ended before them

    @property
    def before(self) -> Place | None:
        """The chunk before the last one read on its walk; None when there is no walk."""
        walk = self.walks[0] if self.walks else None
        return walk.place(walk.last - 1) if walk is not None and walk.last else None

    def after(self, place: Place, extents: Extents) -> ChunkHistory:
        """Return the history after a read of chunk `place`. A chunk that was read recently changes nothing."""
        if place in self.lately:
            return self
        history = self._replace(lately=(*self.lately[1 - LATELY :], place))
        for walk in self.walks:
            moved = walk.after(place)
            if moved is not None:
                others = [other for other in self.walks if other is not walk]
                has_turned = moved.digits != walk.digits or moved.first != walk.first
                return history._with(
                    [moved, *others],
                    n_followed=moved.n_read > NEEDED,
                    n_wasted=walk.n_ahead if has_turned else 0,
                )
        if (near := _any_order(history.lately[-LONG:], extents)) is not None:
            return history._with([near, *(walk for walk in self.walks if walk.n_read >= NEEDED)])
        moved_by = _moved(self.lately[-1], place) if self.lately else ()
        # Any two chunks are some step apart, so two reads are no more evidence than one.
        strided = [ChunkWalk(self.lately[-1], moved_by, last=1, asked=2)] if len(moved_by) == 1 else []
        return history._with([ChunkWalk(place), *strided, *self.walks])

    def _with(self, walks: list[ChunkWalk], *, n_followed: int = 0, n_wasted: int = 0) -> ChunkHistory:
        n_wasted += sum(walk.n_unread for walk in walks[MOST_WALKS:])
        return self._replace(
            walks=tuple(walks[:MOST_WALKS]),
            n_followed=self.n_followed + n_followed,
            n_wasted=self.n_wasted + n_wasted,
        )

    def having_asked(self, n: int) -> ChunkHistory:
        """Return the history after the next `n` chunks of the first walk were requested."""
        walk = self.walks[0]
        return self._replace(walks=(walk._replace(asked=max(walk.asked, walk.last + 1) + n), *self.walks[1:]))


def ahead(history: ChunkHistory, *, extents: Extents, most: int) -> Iterator[Place]:
    """Yield the chunks to request now: the next ones of the walk that advanced last, inside the grid.

    The window starts at one chunk, doubles with every read, and never exceeds the number of reads on this
    walk. At most `most` chunks are requested and unread at a time, including those of walks that are over.
    """
    walk = history.walks[0] if history.walks else None
    if walk is None or walk.n_read < NEEDED:
        return
    others = sum(other.n_unread for other in history.walks[1:]) + walk.n_skipped
    left = most - max(0, others + history.n_wasted - history.n_followed // WASTE_SHARE)
    window = min(walk.n_read, 1 << min(walk.n_read - NEEDED, 32), left)
    for number in range(max(walk.asked, walk.last + 1), min(walk.last + 1 + window, walk.end())):
        place = walk.place(number)
        if any(
            at < 0 or (extent is not None and at >= extent) for at, extent in zip(place, extents, strict=True)
        ):
            return
        yield place


def _moved(there: Place, here: Place) -> tuple[Digit, ...]:
    """Return the axes along which two chunks differ, with the distance as the step."""
    return tuple(Digit(axis, b - a) for axis, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)


def _any_order(lately: Sequence[Place], extents: Extents) -> ChunkWalk | None:
    """Return a walk through the whole grid if the latest reads are close together on it, in any order.

    A reader with many threads starts like this: it reads in order, but its first reads arrive out of order.
    """
    lengths = [extent or 0 for extent in extents]
    if len(lately) < LONG or math.prod(lengths) < REACH * LONG:
        return None
    axes = [axis for axis, length in enumerate(lengths) if length > 1]
    for order, step in itertools.product((axes[::-1], axes), (1, -1)):
        digits = [Digit(axis, step, lengths[axis]) for axis in order]
        first = tuple(0 if step > 0 else length - 1 for length in lengths)
        walk = ChunkWalk(first, (*digits[:-1], Digit(order[-1], step)), n_read=LONG)
        numbers = [walk.number(place) or 0 for place in lately]
        low, high = min(numbers), max(numbers)
        if high - low < REACH and sum(numbers[LONG // 2 :]) >= sum(numbers[: LONG // 2]):
            return walk._replace(last=high, asked=high + 1, n_skipped=high - low + 1 - LONG)
    return None
