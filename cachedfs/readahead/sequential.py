"""What to read next of one open file, or of one object that is read by ranges, from what was read before. Pure.

A reader reads *pieces*: bytes without a gap. A file that is read from start to end is one long piece; a table of which
one column is read, or a part of an image, is many of one length at one distance; a file that is read backwards, many that
each begin before the last. So two things are recognised: that a piece goes on, and that pieces follow one another by a
step. Several readers may share one handle: each has its *run*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["ENOUGH", "ReadHistory", "SequentialRun", "ahead"]

MOST_RUNS = 4
WASTE_SHARE = (
    20  # this part of what was read, and one window, may be asked for in vain; and of a piece be passed over
)
PATIENCE = 64  # blocks read elsewhere after which nothing is kept for a run
ENOUGH = 2  # steps of a kind make a pattern: from block to block, as from piece to piece


class SequentialRun(NamedTuple):
    """One reader: the piece that it reads, and those before. In bytes, but for `asked`."""

    number: (
        int  # tells it from all other runs of its history; another one once what it asked for is not wanted
    )
    start: int  # of the piece
    stop: int  # how far it was read
    n_steps: int = 0  # reads that went on to another block
    asked: int = 0  # all blocks of the piece below it were asked for
    origin: int = 0  # the start of the first piece of those that follow one another by about one step
    repeats: int = 0  # the number of pieces after that
    length: int = 0  # of the shortest of those before this one
    n_pieces: int = 0  # pieces to come that were asked for
    lost: int = (
        0  # blocks of the piece below it, from `asked` on, were asked for and then not wanted any more
    )
    was: int = -1  # its number when they were, until it is known which of them come
    at: int = 0  # how many blocks had been touched when this was touched last

    @property
    def step(self) -> float:
        """From the start of one piece to that of the next, on average; there has to be one before."""
        return (self.start - self.origin) / self.repeats

    def piece(self, number: int, block_size: int) -> range:
        """Return the blocks of the piece that comes after `number` steps; none where that is before the start."""
        start = self.start + round(number * self.step)
        return range(max(0, start // block_size), max(0, _behind(start + self.length, block_size)))

    def n_lost(self, start: int, stop: int | None = None) -> int:
        """Return how many blocks from `start` on count as asked for in vain, though they are of the piece and to come."""
        return len(range(max(start, self.asked), self.lost if stop is None else min(stop, self.lost)))

    def unread(self, block_size: int) -> int:
        """Return how many blocks were asked for and not read yet."""
        return max(0, self.asked - _behind(self.stop, block_size)) + self.n_to_come(block_size)

    def n_to_come(self, block_size: int) -> int:
        """Return how many blocks of other pieces were asked for."""
        return sum(len(self.piece(number, block_size)) for number in range(1, self.n_pieces + 1))


class ReadHistory(NamedTuple):
    """What is known of the reads of one open file, or of one object."""

    block_size: int
    runs: tuple[SequentialRun, ...] = ()  # touched last, first
    n_touched: int = 0  # blocks
    n_wasted: int = 0  # blocks that were asked for and passed by
    n_runs: int = 0
    takes_turns: bool = False  # a run was gone on with after another was read: both are wanted

    @property
    def last(self) -> int:
        """The last block that was read of the piece that was touched last; -1: none."""
        return _behind(self.runs[0].stop, self.block_size) - 1 if self.runs else -1

    def after(self, start: int, stop: int, *, left: int | None = None) -> ReadHistory:
        """Return the history after a read of the bytes `[start, stop)`.

        Reads in the block `last` need not be told; `left` then is where they had come to.
        """
        history = self if left is None else self._until(left)
        for place, run in enumerate(history.runs):
            if start > run.stop and run.repeats >= ENOUGH and history._steps(run, start):
                return history._stepping(place, start, stop)
            if history._goes_on(run, start):
                return history._going_on(place, start, stop)
        for place, run in enumerate(history.runs):
            if history._steps(run, start):
                return history._stepping(place, start, stop)
        return history._beginning(start, stop)

    def given_up(self, number: int, coming: Iterable[range]) -> ReadHistory:
        """Return the history once requests for a run that is over were ended: of its blocks only these come."""
        for place, run in enumerate(self.runs):
            if run.was == number:
                lost = set(range(max(run.asked, _behind(run.stop, self.block_size)), run.lost))
                n = len(lost.difference(*coming))
                runs = (*self.runs[:place], run._replace(lost=run.lost - n, was=-1), *self.runs[place + 1 :])
                return self._replace(runs=runs, n_wasted=self.n_wasted - n)
        return self

    def _until(self, left: int) -> ReadHistory:
        """Return the history with the end of what was read of its last block."""
        if not self.runs or not self.runs[0].stop < left <= (self.last + 1) * self.block_size:
            return self
        return self._replace(runs=(self.runs[0]._replace(stop=left), *self.runs[1:]))

    def _goes_on(self, run: SequentialRun, start: int) -> bool:
        """Return whether a read goes on with a piece: where it ends, a little before, or after a small gap."""
        first, begin = start // self.block_size, run.start // self.block_size
        behind = _behind(run.stop, self.block_size)
        return max(begin, behind - 2) <= first and WASTE_SHARE * (first - behind) <= behind - begin

    def _going_on(self, place: int, start: int, stop: int) -> ReadHistory:
        run, size = self.runs[place], self.block_size
        behind, first = _behind(run.stop, size), start // size
        n_new = max(0, _behind(stop, size) - behind)
        n_passed = max(0, min(first, run.asked) - behind)
        n_passed -= run.n_lost(max(first, behind), behind + n_new)  # they were wanted after all
        run = run._replace(stop=max(run.stop, stop), n_steps=run.n_steps + (n_new > 0))
        return self._with(place, run, n_read=n_new, n_passed=n_passed)

    def _steps(self, run: SequentialRun, start: int) -> bool:
        return run.repeats > 0 and abs(start - run.start - run.step) < self.block_size

    def _stepping(self, place: int, start: int, stop: int) -> ReadHistory:
        run, size = self.runs[place], self.block_size
        n_passed = max(0, run.asked - _behind(run.stop, size))
        if self._is_next_below(run, start):
            start -= start % size
        awaited = [run.piece(number, size) for number in range(1, run.n_pieces + 1)]
        run = run._replace(
            start=start,
            stop=stop,
            n_steps=0,
            lost=0,
            asked=awaited[0].stop if awaited else 0,
            repeats=run.repeats + 1,
            length=min(run.length, run.stop - run.start),
            n_pieces=max(0, run.n_pieces - 1),
        )
        if awaited:  # what is expected now may differ a little from what was
            n_passed += max(0, start // size - awaited[0].start)
            now = (run.piece(number, size) for number in range(1, run.n_pieces + 1))
            n_passed += sum(len({*old} - {*new}) for old, new in zip(awaited[1:], now, strict=True))
        return self._with(place, run, n_read=1, n_passed=n_passed)

    def _is_next_below(self, run: SequentialRun, start: int) -> bool:
        return start // self.block_size == run.start // self.block_size - 1

    def _beginning(self, start: int, stop: int) -> ReadHistory:
        """Return the history after a read that nothing led to: perhaps the second of several pieces."""
        run, history = SequentialRun(self.n_runs, start, stop), self._replace(n_runs=self.n_runs + 1)
        place, n_passed = None, 0
        if self.runs:
            before = self.runs[0]
            run = run._replace(origin=before.start, repeats=1, length=before.stop - before.start)
            if self._is_next_below(before, start):  # backwards, in steps of any length: taken as whole blocks
                size = self.block_size
                origin = before.start - before.start % size
                run = run._replace(start=start - start % size, origin=origin, length=size)
            if before.stop <= start < before.asked * self.block_size:  # asked for already: one run, not two
                run, place = run._replace(number=before.number, asked=before.asked), 0
                n_passed = start // self.block_size - _behind(before.stop, self.block_size)
                n_passed += before.n_to_come(self.block_size)
        return history._with(place, run, n_read=1, n_passed=n_passed)

    def _with(self, place: int | None, run: SequentialRun, *, n_read: int, n_passed: int) -> ReadHistory:
        """Return the history with `run` in front, which was at `place`."""
        others = [other for at, other in enumerate(self.runs) if at != place]
        takes_turns = self.takes_turns or (place is not None and place > 0)
        n_touched, n_runs, n_wasted = self.n_touched + n_read, self.n_runs, self.n_wasted + n_passed
        n_wasted += sum(other.unread(self.block_size) for other in others[MOST_RUNS - 1 :])
        kept = []
        for other in others[: MOST_RUNS - 1]:
            is_over = n_touched - other.at > PATIENCE if takes_turns else run.n_steps >= ENOUGH
            if is_over and (n_unread := other.unread(self.block_size)):
                lost = max(other.asked, other.lost)
                other = other._replace(number=n_runs, was=other.number, asked=0, n_pieces=0, lost=lost)
                n_runs, n_wasted = n_runs + 1, n_wasted + n_unread
            kept.append(other)
        runs = (run._replace(at=n_touched), *kept)
        return ReadHistory(self.block_size, runs, n_touched, n_wasted, n_runs, takes_turns)


def ahead(
    history: ReadHistory, *, n_blocks: int, blocks_per_request: int, most: int
) -> tuple[ReadHistory, list[range]]:
    """Return what to ask for now, in blocks of a request at most, and the history after that was done.

    The window starts at one request and doubles with every step, up to `most` blocks, which runs that take turns share.
    It is refilled in steps of one request, so that requests overlap instead of waiting for one another. Never
    past the end; and only so much that not more than a window and a twentieth of what was read is asked for in vain.
    """
    if not history.runs or most <= 0:
        return history, []
    run, size = history.runs[0], history.block_size
    room = _room(history, blocks_per_request, most)
    in_piece = _of_piece(run, size, n_blocks, blocks_per_request, room)
    n_again = run.n_lost(in_piece.start, in_piece.stop)  # no longer in vain
    run = run._replace(asked=max(run.asked, in_piece.stop)) if in_piece else run
    room -= run.unread(size) + run.n_lost(_behind(run.stop, size))
    n_pieces = _pieces_wanted(run, size, n_blocks, blocks_per_request, room)
    pieces = [run.piece(number, size) for number in range(run.n_pieces + 1, n_pieces + 1)]
    run = run._replace(n_pieces=n_pieces)
    wanted = [part for whole in (in_piece, *_joined(pieces)) for part in _requests(whole, blocks_per_request)]
    return history._replace(runs=(run, *history.runs[1:]), n_wasted=history.n_wasted - n_again), wanted


def _room(history: ReadHistory, per_request: int, most: int) -> int:
    """Return how many blocks may be asked for and not read yet by the run in front."""
    run, others = history.runs[0], history.runs[1:]
    share = most // (1 + sum(map(_reads_on, others))) if history.takes_turns else most
    to_come = sum(other.unread(history.block_size) for other in others)  # all in vain, at worst
    # Those are asked for first.
    in_vain = history.n_wasted - run.n_lost(_behind(run.stop, history.block_size))
    left = most + history.n_touched // WASTE_SHARE - in_vain - to_come
    if run.repeats < ENOUGH and 2 * left < most:
        # Not all of it, or the next reader who goes elsewhere would leave nothing to those after him.
        left = min(left, max(per_request, left // 2))
    return min(share, left, 2 * most - to_come)  # others had all of it before they took turns


def _reads_on(run: SequentialRun) -> bool:
    return max(run.n_steps, run.repeats) >= ENOUGH


def _of_piece(run: SequentialRun, size: int, n_blocks: int, per_request: int, room: int) -> range:
    """Return what to ask for of the piece that is being read."""
    behind = _behind(run.stop, size)
    end = _behind(run.start + run.length, size) if run.repeats else 0  # if this piece is like the last
    doublings, limit = run.n_steps - ENOUGH, n_blocks
    if behind <= end:
        limit = min(n_blocks, end)
        doublings = max(doublings, run.repeats - ENOUGH)
    elif run.repeats:
        doublings = min(doublings, behind - end - 1)
    start = max(run.asked, behind)
    if doublings < 0 or start >= limit:
        return range(0)
    stop = min(limit, behind + min(room, per_request << min(doublings, 32)))
    if stop < limit:
        stop -= (stop - start) % min(per_request, max(room, 1))
    return range(start, max(start, stop))


def _pieces_wanted(run: SequentialRun, size: int, n_blocks: int, per_request: int, room: int) -> int:
    """Return how many pieces to come should have been asked for."""
    if run.repeats < ENOUGH:
        return run.n_pieces
    is_dense = abs(run.step) < run.length + size  # no block is between two pieces: a request is several
    unit = max(1, per_request // max(1, len(run.piece(1, size)))) if is_dense else 1
    most, wanted = unit << min(run.repeats - ENOUGH, 32), run.n_pieces
    while wanted < most:
        blocks = run.piece(wanted + 1, size)
        if not blocks or blocks.stop > n_blocks:
            return wanted
        room -= len(blocks)
        if room < 0:
            break
        wanted += 1
    return wanted if wanted - run.n_pieces >= unit else run.n_pieces


def _joined(pieces: Iterable[range]) -> list[range]:
    """Return the pieces in their order, each joined to the one before where that is next to it."""
    out: list[range] = []
    for piece in pieces:
        if out and piece.start <= out[-1].stop and out[-1].start <= piece.stop:
            out[-1] = range(min(piece.start, out[-1].start), max(piece.stop, out[-1].stop))
        else:
            out.append(piece)
    return out


def _requests(blocks: range, length: int) -> Iterator[range]:
    for start in range(blocks.start, blocks.stop, length):
        yield range(start, min(start + length, blocks.stop))


def _behind(stop: int, block_size: int) -> int:
    """Return the block behind the last one that has a byte below `stop`."""
    return -(-stop // block_size)
