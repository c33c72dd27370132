"""Which chunks of an array to read next, from the places in its grid that were read before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cachedfs.readahead.chunk_grid import Place

__all__ = ["Extents", "ChunkHistory", "ChunkWalk", "ahead"]

NEEDED = 4  # places in order, before the next is asked for: random orders rarely have so many
REACH = (
    16  # places that a walk may be early or late by, once it is long: zarr has ten reads under way at once
)
LONG = 8  # places read, from which on a walk is that tolerant
YOUNG = 16  # walks that are too short to trust, kept at most; few in a small grid, where chance would make more of them
CHANCES = 16  # places of the grid for each of these
MATURE = 4  # walks that are trusted, kept at most
IDLE = 64  # places read elsewhere, after which a walk is taken as over
LATELY = 32  # places whose being read again says nothing
FORGIVEN = 20  # for so many places that were read in order, one that was asked for and not read is forgiven
MOST_MISLED = 6

Extents = tuple[int | None, ...]  # places along each axis; None: nobody knows


class ChunkWalk(NamedTuple):
    """A way through the grid: its axes turn like the wheels of a counter, each in steps of its own.

    `order` has the axes that turned, the fastest first; the last of them has no end but the grid's. `counts` are the
    positions of the others. A place's number is how many come before it on the way.
    """

    first: Place
    order: tuple[int, ...]
    steps: Place
    counts: Place
    last: int = 0  # highest number that was read
    n_read: int = 1
    asked: int = 0  # all with numbers below this were read, asked for, or passed over
    passed: int = 0  # how many were passed over: asked for perhaps, and not read
    moved_at: int = 0  # how many places had been read in the grid when this one was moved last

    @property
    def row(self) -> int:
        """How many places come before the slowest axis moves."""
        return math.prod(self.counts[axis] for axis in self.order[:-1])

    @property
    def is_unit(self) -> bool:
        """True when the slowest axis moves from neighbour to neighbour."""
        return bool(self.order) and abs(self.steps[self.order[-1]]) == 1

    @property
    def pending(self) -> int:
        """How many places were asked for and are still ahead."""
        return max(0, self.asked - self.last - 1)

    @property
    def is_lost(self) -> bool:
        """True when more was passed over than reads that come out of order explain."""
        return self.passed > REACH + self.n_read // FORGIVEN

    def has_overtaken(self, other: ChunkWalk) -> bool:
        """True when what `other` asked for is on this way: two that began on one way become one."""
        number = self.number(other.place(max(other.last, other.asked - 1)))
        return number is not None and number < max(self.asked, self.last + REACH)

    def number(self, place: Place) -> int | None:
        """Return the number of `place`; None when it is not on the way."""
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
        """Return the place with `number`."""
        found = list(self.first)
        for axis in self.order:
            number, digit = (0, number) if axis == self.order[-1] else divmod(number, self.counts[axis])
            found[axis] += digit * self.steps[axis]
        return tuple(found)

    def after(self, place: Place, extents: Extents) -> ChunkWalk | None:
        """Return the walk after `place` was read; None when it has nothing to do with it."""
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
        """True for the next place, and for one that comes a little before its turn, or after it."""
        if number <= self.last:
            return self.passed > 0 and number >= self.last - REACH
        is_dense = len(self.order) == 1 and self.is_unit and not self.passed
        return number - self.last <= (REACH if self.n_read >= LONG else 2 if is_dense else 1)

    def _slack(self) -> int:
        """How many places of a row may be missing when the next one begins, and how many of that may come first."""
        return LONG if self.n_read >= LONG else 0

    def _turned(self, place: Place, axis: int, extents: Extents) -> ChunkWalk | None:
        """Another axis moved, and the others went back to where they began: the row is known from now on."""
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
        # Any two places are some step apart: that is no evidence of a way, before there was much of it.
        n_read = self.n_read if abs(step) > 1 and self.n_read < NEEDED else walk.n_read
        return walk._replace(last=number, asked=number + 1, n_read=n_read)

    def _start(self, at: int, axis: int, extents: Extents) -> int:
        """Return where a row begins: where it began the first time, unless that was in the middle of the grid's."""
        extent, step = extents[axis], self.steps[axis]
        edge = 0 if step > 0 else (extent or 0) - 1
        first = self.first[axis]
        is_before = (first - at) * step > 0 and (first - at) % step == 0
        return at if is_before and at == edge and len(self.order) == 1 else first

    def _wider(self, place: Place) -> ChunkWalk | None:
        """A row turns out to be longer than it seemed when the next one began, before all of it was read."""
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
        """The same row, read at another place of the slowest axis: if that comes again, it is its step."""
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
        """Return the number up to which the way is known: to the end of the row, until the slowest axis has shown its step."""
        row = self.row
        lookup_slots = self.last // row
        is_line = len(self.order) == 1
        if is_line or lookup_slots >= (1 if self.is_unit else 2):
            return 1 << 62
        return (lookup_slots + 1) * row


class ChunkHistory(NamedTuple):
    """The places of one grid that were read lately, as the ways on which they lie, the one that moved last in front.

    `followed` places were read on walks that are trusted; `wasted` ones were asked for, on walks that ended before them.
    """

    walks: tuple[ChunkWalk, ...] = ()
    lately: tuple[Place, ...] = ()
    n_read: int = 0
    followed: int = 0
    wasted: int = 0
    misled: int = (
        0  # walks that ended before what was asked for was read; each doubles what the next ones have to show
    )

    @property
    def needed(self) -> int:
        return NEEDED << self.misled

    @property
    def before(self) -> Place | None:
        """The place that comes before the one read last, on its way; None where it has no way."""
        walk = self.walks[0] if self.walks else None
        return walk.place(walk.last - 1) if walk is not None and walk.last else None

    def after(self, place: Place, extents: Extents) -> ChunkHistory:
        """Return the history after `place` was read; what was read a moment ago says nothing."""
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
        """A place that is on no way may be where one begins, or the second of one in steps of more than one."""
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
        """Forget walks that are over, and of the others all but those that moved last."""
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
        """Return the history after the next `n` places of the walk in front were asked for."""
        walk = self.walks[0]
        asked = max(walk.asked, walk.last + 1) + n
        return self._replace(walks=(walk._replace(asked=asked), *self.walks[1:]))


def ahead(history: ChunkHistory, *, extents: Extents, most: int) -> Sequence[Place]:
    """Return the places to ask for now: the next ones of the walk that moved last, never beyond the grid.

    The window starts at one, doubles with every place that is read, and is never more than what was read on this walk.
    All that is asked for and not read, in walks that are over too, is at most `most` places.
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
    """Return the way row by row through all of the grid, when the places read last are close together on it, in any order.

    So begins a reader of many threads: it reads in order, but for the first places that has no order yet.
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
