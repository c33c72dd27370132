"""Predict the next chunks that will be read of an array, from the chunks read before.

A reader is modeled as a walk through the chunk grid. A walk is a counter with one digit per axis, the fastest
axis first; each axis has its own start, step and length. So one rule covers every axis order, backward reads,
strides, and reads of the same part of every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cachedfs.readahead.chunk_grid import Place

__all__ = ["ChunkHistory", "ChunkWalk", "Extents", "ahead"]

NEEDED = 4  # chunks read in order before readahead starts; random orders rarely have so many
REACH = 16  # chunks by which a read may be early or late on a long walk: zarr has ten reads in flight
LONG = 8  # reads after which a walk counts as long
YOUNG = 16  # most untrusted walks kept; fewer in a small grid, where chance would create more of them
CHANCES = 16  # chunks (times the squared number of axes) that a grid has for each untrusted walk kept
MATURE = 4  # most trusted walks kept
IDLE = 64  # reads elsewhere in the grid after which a walk is over
LATELY = 32  # latest chunks remembered; reading one of them again is ignored
FORGIVEN = 20  # one wasted chunk is forgiven for this many chunks read in order
MOST_MISLED = 6  # upper bound of `ChunkHistory.misled`

Extents = tuple[int | None, ...]  # number of chunks along each axis; None: unknown


class ChunkWalk(NamedTuple):
    """One traversal of the chunk grid, modeled as a counter whose digits are the axes.

    `order` lists the axes that have moved, the fastest first. `counts` has the length of each axis; the
    slowest axis of `order` is bounded only by the grid. The number of a chunk is its position in the walk,
    counted from 0.
    """

    first: Place
    order: tuple[int, ...]
    steps: Place
    counts: Place
    last: int = 0  # highest number read
    n_read: int = 1
    asked: int = 0  # every number below this was read, requested or skipped
    passed: int = 0  # skipped numbers: not read, perhaps requested
    moved_at: int = 0  # `ChunkHistory.n_read` when this walk last advanced

    @property
    def row(self) -> int:
        """Number of chunks per row, that is before the slowest axis moves."""
        return math.prod(self.counts[axis] for axis in self.order[:-1])

    @property
    def is_unit(self) -> bool:
        """True when the slowest axis advances by one chunk at a time."""
        return bool(self.order) and abs(self.steps[self.order[-1]]) == 1

    @property
    def pending(self) -> int:
        """Number of chunks requested beyond the last one read."""
        return max(0, self.asked - self.last - 1)

    @property
    def is_lost(self) -> bool:
        """True when more chunks were skipped than out-of-order reads explain."""
        return self.passed > REACH + self.n_read // FORGIVEN

    def has_overtaken(self, other: ChunkWalk) -> bool:
        """Return whether this walk covers the chunks that `other` requested.

        Then both started on the same traversal, and one walk is enough.
        """
        number = self.number(other.place(max(other.last, other.asked - 1)))
        return number is not None and number < max(self.asked, self.last + REACH)

    def number(self, place: Place) -> int | None:
        """Return the number of chunk `place`; None when it is not on the walk."""
        number, weight = 0, 1
        for axis in self.order:
            digit, rest = divmod(place[axis] - self.first[axis], self.steps[axis])
            is_slowest = axis == self.order[-1]
            if rest or digit < 0 or not (is_slowest or digit < self.counts[axis]):
                return None
            number += digit * weight
            weight *= self.counts[axis]
        on_way = all(
            here == there or axis in self.order
            for axis, (here, there) in enumerate(zip(place, self.first, strict=True))
        )
        return number if on_way else None

    def place(self, number: int) -> Place:
        """Return the chunk with this number."""
        found = list(self.first)
        for axis in self.order:
            number, digit = (0, number) if axis == self.order[-1] else divmod(number, self.counts[axis])
            found[axis] += digit * self.steps[axis]
        return tuple(found)

    def after(self, place: Place, extents: Extents) -> ChunkWalk | None:
        """Return the walk after a read of chunk `place`; None when the chunk does not belong to it."""
        number = self.number(place)
        if number is not None and self._is_near(number):
            passed = number - self.last - 1 if number > self.last else -1
            return self._replace(
                last=max(self.last, number), n_read=self.n_read + 1, passed=self.passed + passed
            )
        moved = [axis for axis, (a, b) in enumerate(zip(place, self.first, strict=True)) if a != b]
        new = [axis for axis in moved if axis not in self.order]
        if len(new) == 1:
            return self._turned(place, new[0], extents)
        if not new and len(self.order) > 1:
            return self._wider(place) or self._elsewhere(place)
        return None

    def _is_near(self, number: int) -> bool:
        """Return whether `number` is the next on the walk, or close enough for an out-of-order read."""
        if number <= self.last:
            return self.passed > 0 and number >= self.last - REACH
        is_dense = len(self.order) == 1 and self.is_unit and not self.passed
        return number - self.last <= (REACH if self.n_read >= LONG else 2 if is_dense else 1)

    def _slack(self) -> int:
        """Return how many chunks may be missing at the end of a row, or at the start of the next one."""
        return LONG if self.n_read >= LONG else 0

    def _turned(self, place: Place, axis: int, extents: Extents) -> ChunkWalk | None:
        """Start a new row along `axis`, which moved for the first time. This fixes the row length."""
        step = place[axis] - self.first[axis]
        if not self.order:
            return self._with(order=(axis,), axis=axis, step=step, last=1) if abs(step) == 1 else None
        slowest, missing = self.order[-1], -(self.last + 1) % self.row
        if missing > self._slack():
            return None
        start = self._start(place[slowest], slowest, extents)
        furthest = self.place(self.last)[slowest]
        count = (furthest - start) // self.steps[slowest] + 1
        walk = self._replace(
            first=_put(self.first, slowest, start), counts=_put(self.counts, slowest, count)
        )._with(order=(*self.order, axis), axis=axis, step=step, last=0)
        number = walk.number(place)
        if number is None or number - walk.row > self._slack():
            return None
        # Any two chunks are some step apart. On a short walk, a step above 1 is therefore no evidence.
        n_read = self.n_read if abs(step) > 1 and self.n_read < NEEDED else walk.n_read
        return walk._replace(last=number, asked=number + 1, n_read=n_read)

    def _start(self, at: int, axis: int, extents: Extents) -> int:
        """Return where rows start along `axis`: at the grid's edge if only the first row started inside it."""
        extent, step = extents[axis], self.steps[axis]
        edge = 0 if step > 0 else (extent or 0) - 1
        first = self.first[axis]
        is_before = (first - at) * step > 0 and (first - at) % step == 0
        return at if is_before and at == edge and len(self.order) == 1 else first

    def _wider(self, place: Place) -> ChunkWalk | None:
        """Lengthen the row when the next row began before all of this one was read."""
        if self.last >= 2 * self.row or self.n_read < LONG:
            return None
        before = self.order[-2]
        digit, rest = divmod(place[before] - self.first[before], self.steps[before])
        if rest or not self.counts[before] <= digit < self.counts[before] + LONG:
            return None
        walk = self._replace(counts=_put(self.counts, before, digit + 1))
        last, number = walk.number(self.place(self.last)), walk.number(place)
        if last is None or number is None or number > last + REACH:
            return None
        last = max(last, number)
        return walk._replace(last=last, asked=last + 1, n_read=self.n_read + 1)

    def _elsewhere(self, place: Place) -> ChunkWalk | None:
        """Restart the row after a jump along the slowest axis; the jump becomes the step if it repeats."""
        slowest, here = self.order[-1], self.place(self.last)
        if -(self.last + 1) % self.row > self._slack():
            return None
        step = place[slowest] - here[slowest]
        if not step:
            return None
        walk = self._replace(first=_put(self.first, slowest, here[slowest]))._with(
            order=self.order, axis=slowest, step=step, last=0
        )
        number = walk.number(place)
        if number is None or number - walk.row > self._slack():
            return None
        return walk._replace(last=number, asked=number + 1)

    def _with(self, *, order: tuple[int, ...], axis: int, step: int, last: int) -> ChunkWalk:
        return self._replace(
            order=order,
            steps=_put(self.steps, axis, step),
            last=last,
            asked=last + 1,
            n_read=self.n_read + 1,
        )

    def end(self) -> int:
        """Return the first number not predicted: the row's end, until the slowest axis has shown its step."""
        row = self.row
        rows_done = self.last // row
        is_line = len(self.order) == 1
        if is_line or rows_done >= (1 if self.is_unit else 2):
            return 1 << 62
        return (rows_done + 1) * row


class ChunkHistory(NamedTuple):
    """The recent reads of one grid as walks; the walk that advanced last comes first.

    `followed` counts chunks read on trusted walks. `wasted` counts chunks requested on walks that ended
    before them.
    """

    walks: tuple[ChunkWalk, ...] = ()
    lately: tuple[Place, ...] = ()
    n_read: int = 0
    followed: int = 0
    wasted: int = 0
    # Walks that ended with requested chunks unread. Each doubles the reads needed before a walk is trusted.
    misled: int = 0

    @property
    def needed(self) -> int:
        """Number of reads before a walk is trusted."""
        return NEEDED << self.misled

    @property
    def before(self) -> Place | None:
        """The chunk before the last one read on its walk; None when there is no walk."""
        walk = self.walks[0] if self.walks else None
        return walk.place(walk.last - 1) if walk is not None and walk.last else None

    def after(self, place: Place, extents: Extents) -> ChunkHistory:
        """Return the history after a read of chunk `place`. A chunk that was read recently changes nothing."""
        if place in self.lately:
            return self
        history = self._replace(lately=(*self.lately[1 - LATELY :], place), n_read=self.n_read + 1)
        for at, walk in enumerate(self.walks):
            moved = walk.after(place, extents)
            if moved is not None:
                return history._moved(at, walk, moved)
        return history._begun(place, extents)

    def _moved(self, at: int, walk: ChunkWalk, moved: ChunkWalk) -> ChunkHistory:
        is_turned = (moved.order, moved.first, moved.steps) != (walk.order, walk.first, walk.steps)
        return self._replace(
            walks=(moved._replace(moved_at=self.n_read), *self.walks[:at], *self.walks[at + 1 :]),
            wasted=self.wasted + (walk.pending if is_turned else 0),
            followed=self.followed + (moved.n_read > self.needed),
            misled=max(0, self.misled - (moved.n_read == LONG * self.needed)),
        )._tidied(YOUNG)

    def _begun(self, place: Place, extents: Extents) -> ChunkHistory:
        """Start walks at a chunk that is on no walk: as a first chunk, or as the second at a step above 1."""
        none, ones = (0,) * len(place), (1,) * len(place)
        begun = [ChunkWalk(place, (), none, ones, moved_at=self.n_read)]
        for walk in self.walks:
            moved = [axis for axis in range(len(place)) if place[axis] != walk.first[axis]]
            if not walk.order and len(moved) == 1:
                step = place[moved[0]] - walk.first[moved[0]]
                line = walk._with(order=(moved[0],), axis=moved[0], step=step, last=1)
                begun.append(line._replace(n_read=1, moved_at=self.n_read))
        crowd = _crowd(self.lately[-LONG:], extents)
        if crowd is not None:
            return self._replace(
                walks=(crowd._replace(moved_at=self.n_read), *(w for w in self.walks if w.n_read >= NEEDED))
            )._tidied(0)
        chances = math.prod(extent or CHANCES for extent in extents) // (CHANCES * len(extents) ** 2)
        return self._replace(walks=(*begun, *self.walks))._tidied(min(YOUNG, max(2, chances)))

    def _tidied(self, n_young: int) -> ChunkHistory:
        """Drop the walks that are over, and all but the latest of the others."""
        kept: list[ChunkWalk] = []
        wasted = n_misled = 0
        room = {True: n_young, False: MATURE}
        for walk in self.walks:
            is_young = walk.n_read < NEEDED
            room[is_young] -= 1
            if room[is_young] >= 0 and self.n_read - walk.moved_at <= IDLE and not walk.is_lost:
                kept.append(walk)
            elif not is_young and not any(other.has_overtaken(walk) for other in kept):
                wasted += walk.pending + walk.passed
                n_misled += bool(walk.pending) or walk.is_lost
        misled = min(MOST_MISLED, self.misled + n_misled)
        return self._replace(walks=tuple(kept), wasted=self.wasted + wasted, misled=misled)

    def having_asked(self, n: int) -> ChunkHistory:
        """Return the history after the next `n` chunks of the first walk were requested."""
        walk = self.walks[0]
        asked = max(walk.asked, walk.last + 1) + n
        return self._replace(walks=(walk._replace(asked=asked), *self.walks[1:]))


def ahead(history: ChunkHistory, *, extents: Extents, most: int) -> Sequence[Place]:
    """Return the chunks to request now: the next ones of the walk that advanced last, inside the grid.

    The window starts at one chunk, doubles with every read, and never exceeds the number of reads on this
    walk. At most `most` chunks are requested and unread at a time, including those of walks that are over.
    """
    walk = history.walks[0] if history.walks else None
    if walk is None or not walk.order:
        return ()
    if walk.n_read < history.needed:
        return ()
    others = sum(other.pending for other in history.walks[1:])
    left = most - others - max(0, history.wasted - history.followed // FORGIVEN)
    window = min(walk.n_read, 1 << min(walk.n_read - history.needed, 32), left)
    start = max(walk.asked, walk.last + 1)
    found = []
    for number in range(start, min(walk.last + 1 + window, walk.end())):
        place = walk.place(number)
        if not all(
            at >= 0 and (extent is None or at < extent) for at, extent in zip(place, extents, strict=True)
        ):
            break
        found.append(place)
    return found


def _crowd(lately: Sequence[Place], extents: Extents) -> ChunkWalk | None:
    """Return a row-by-row walk through the grid if the latest reads are close together, in any order.

    A reader with many threads starts like this: it reads in order, but its first reads arrive out of order.
    """
    lengths = [extent or 0 for extent in extents]
    if len(lately) < LONG or math.prod(lengths) < CHANCES * LONG:
        return None
    order = tuple(axis for axis in reversed(range(len(lengths))) if lengths[axis] > 1)
    ones, none = (1,) * len(lengths), (0,) * len(lengths)
    up = ChunkWalk(none, order, ones, tuple(lengths), n_read=LONG)
    numbers = [up.number(place) or 0 for place in lately]
    low, high = min(numbers), max(numbers)
    if high - low >= REACH:
        return None
    passed = high - low + 1 - LONG
    if sum(numbers[LONG // 2 :]) >= sum(numbers[: LONG // 2]):
        return up._replace(last=high, asked=high + 1, passed=passed)
    down = up._replace(first=tuple(length - 1 for length in lengths), steps=(-1,) * len(lengths))
    last = math.prod(lengths) - 1 - low
    return down._replace(last=last, asked=last + 1, passed=passed)


def _put(values: Place, axis: int, value: int) -> Place:
    return (*values[:axis], value, *values[axis + 1 :])
