"""Predict the next objects that will be read of an array or of numbered files. No I/O.

A reader is modeled as a walk through the chunk grid: a counter with one digit per axis, the fastest axis first.
So one rule covers every axis order, backward reads, strides, and reads of the same part of every step.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cachedfs.readahead.object_names import Place

NEEDED = 4  # chunks read in order before readahead starts; random orders rarely have so many
LONG = 8  # reads after which chunks may be out of order
REACH = 16  # chunks by which a read may then be early or late: zarr has ten reads in flight
MOST_WALKS = 8
RECENT = 32  # latest chunks remembered; reading one of them again is ignored
WASTE_SHARE = 20  # one window, plus 1/20 of the chunks read in order, may be requested and not read
MOST_AHEAD = 256  # chunks
ENDLESS = 1 << 62

Extents = tuple[int | None, ...]  # number of chunks along each axis; None: unknown


class Digit(NamedTuple):
    """The movement along one axis: `length` chunks, `step` apart."""

    axis: int
    step: int
    length: int = ENDLESS  # of the slowest axis, which is bounded only by the grid


class GridWalk(NamedTuple):
    """One traversal of the chunk grid. The number of a chunk is its position in the walk, counted from 0."""

    first: Place
    digits: tuple[Digit, ...] = ()  # the axes that have moved, the fastest first
    last: int = 0  # highest number read
    n_read: int = 1
    n_skipped: int = 0  # numbers below `last` that were not read

    @property
    def row(self) -> int:
        """Number of chunks per row, that is before the slowest axis moves."""
        return math.prod(digit.length for digit in self.digits[:-1])

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

    def after(self, place: Place) -> GridWalk | None:
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

    def _with_next_row(self, place: Place, n_rows: int) -> GridWalk | None:
        """Return the walk if its next row begins at `place`, after `n_rows` complete rows.

        Another axis may move for the first time; then the rows before were all of the slowest axis. Or the slowest
        axis jumps; the jump is its new step.
        """
        axes = [digit.axis for digit in self.digits]
        moved = _moved(self.first, place)
        if len(moved) == 1 and moved[0].axis not in axes and (axes or abs(moved[0].step) == 1):
            done = [*self.digits[:-1], *(digit._replace(length=n_rows) for digit in self.digits[-1:])]
            return self._replace(digits=(*done, *moved), last=self.last + 1, n_read=self.n_read + 1)
        start = self.place(self.last + 1 - self.row)
        moved = _moved(start, place)
        if len(axes) > 1 and len(moved) == 1 and moved[0].axis == axes[-1]:
            digits = (*self.digits[:-1], *moved)
            return self._replace(first=start, digits=digits, last=self.row, n_read=self.n_read + 1)
        return None

    def end(self, extents: Extents) -> int:
        """Return the first number not predicted: the row's end, until the slowest axis has shown its step."""
        axis, step, _ = self.digits[-1]
        n_rows = self.last // self.row
        if len(self.digits) > 1 and n_rows < (1 if abs(step) == 1 else 2):
            return (n_rows + 1) * self.row
        first, extent = self.first[axis], extents[axis]
        if step > 0:
            return ENDLESS if extent is None else ((extent - 1 - first) // step + 1) * self.row
        return (first // -step + 1) * self.row


class GridHistory:
    """The recent reads of one grid as walks, and the chunks that were requested and not read yet."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.walks: list[GridWalk] = []  # the one that advanced last comes first
        self.recent: deque[Place] = deque(maxlen=RECENT)
        self.unread: set[Place] = set()
        self.n_followed = 0  # chunks read in order

    @property
    def before(self) -> Place | None:
        """The chunk before the last one read on its walk; None when there is no walk."""
        walk = self.walks[0] if self.walks else None
        return walk.place(walk.last - 1) if walk is not None and walk.last else None

    def observe(self, place: Place) -> None:
        """Record a read of chunk `place`."""
        self.unread.discard(place)
        previous = self.recent[-1] if self.recent else None
        self.recent.append(place)
        for walk in self.walks:
            if (moved := walk.after(place)) is not None:
                self.walks = [moved, *(other for other in self.walks if other is not walk)]
                self.n_followed += moved.n_read > NEEDED
                return
        if (near := _any_order(list(self.recent)[-LONG:], self.extents)) is not None:
            self.walks = [near, *(walk for walk in self.walks if walk.n_read >= NEEDED)][:MOST_WALKS]
            return
        moved_by = _moved(previous, place) if previous is not None else ()
        # Any two chunks are some step apart, so two reads are no more evidence than one.
        strided = (
            [GridWalk(previous, moved_by, last=1)] if previous is not None and len(moved_by) == 1 else []
        )
        self.walks = [GridWalk(place), *strided, *self.walks][:MOST_WALKS]

    def ahead(self, most: int) -> list[Place]:
        """Return the chunks to request now: the next ones of the walk that advanced last, inside the grid.

        The window starts at one chunk, doubles with every read, and never exceeds the number of reads on this
        walk. At most `most` chunks, and 1/20 of those read in order, are requested and unread at a time.
        """
        walk = self.walks[0] if self.walks else None
        if walk is None or walk.n_read < NEEDED:
            return []
        window = min(walk.n_read, 1 << min(walk.n_read - NEEDED, 32), most, MOST_AHEAD)
        found: list[Place] = []
        # From the far end, so that a window that was requested already costs one step.
        for number in range(min(walk.last + window, walk.end(self.extents) - 1), walk.last, -1):
            place = walk.place(number)
            if place in self.unread:
                break
            if place not in self.recent:
                found.append(place)
        return found[::-1][: max(0, most + self.n_followed // WASTE_SHARE - len(self.unread))]


def _moved(there: Place, here: Place) -> tuple[Digit, ...]:
    """Return the axes along which two chunks differ, with the distance as the step."""
    return tuple(Digit(axis, b - a) for axis, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)


def _any_order(recent: Sequence[Place], extents: Extents) -> GridWalk | None:
    """Return a walk through the whole grid if the latest reads are close together on it, in any order.

    A reader with many threads starts like this: it reads in order, but its first reads arrive out of order.
    """
    lengths = [extent or 0 for extent in extents]
    if len(recent) < LONG or math.prod(lengths) < REACH * LONG:
        return None
    axes = [axis for axis, length in enumerate(lengths) if length > 1]
    for order, step in itertools.product((axes[::-1], axes), (1, -1)):
        digits = [Digit(axis, step, lengths[axis]) for axis in order]
        first = tuple(0 if step > 0 else length - 1 for length in lengths)
        walk = GridWalk(first, (*digits[:-1], Digit(order[-1], step)), n_read=LONG)
        numbers = [walk.number(place) or 0 for place in recent]
        low, high = min(numbers), max(numbers)
        if high - low < REACH and sum(numbers[LONG // 2 :]) >= sum(numbers[: LONG // 2]):
            return walk._replace(last=high, n_skipped=high - low + 1 - LONG)
    return None
