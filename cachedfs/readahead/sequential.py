"""Predict the next blocks of an open file, or of an object read by ranges. Pure functions.

A reader reads pieces; a piece is a contiguous byte range. A file read from start to end is one long piece.
One column of a table, or a part of an image, is many pieces of one length at one distance. A file read
backward is many pieces, each before the previous one. So two patterns are recognized: a piece continues, and
pieces repeat at a constant step. Several readers may share one handle; each of them is a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["ENOUGH", "ReadHistory", "SequentialRun", "ahead"]

MOST_RUNS = 8
# One window, plus 1/20 of the blocks read, may be wasted. A gap may be 1/20 of its piece.
WASTE_SHARE = 20
PATIENCE = 64  # blocks read elsewhere after which a run's requests are dropped
ENOUGH = 2  # steps that make a pattern, from block to block or from piece to piece


class SequentialRun(NamedTuple):
    """One reader: its current piece, and the pattern of the pieces before.

    Positions and lengths are in bytes, except `asked`, which is a block index.
    """

    number: int  # unique in its history; replaced when the run's requests are dropped
    start: int  # of the current piece
    stop: int  # end of what was read of it
    n_steps: int = 0  # reads that continued into another block
    asked: int = 0  # all blocks of the piece below this index were requested
    origin: int = 0  # start of the first piece in the current sequence of evenly spaced pieces
    repeats: int = 0  # pieces in that sequence after the first
    length: int = 0  # of the shortest earlier piece
    pieces: tuple[range, ...] = ()  # blocks of future pieces that were requested, the next piece first
    at: int = 0  # `ReadHistory.n_touched` when this run was last read

    @property
    def step(self) -> float:
        """Mean bytes from the start of one piece to the start of the next. Requires an earlier piece."""
        return (self.start - self.origin) / self.repeats

    def piece(self, number: int, block_size: int) -> range:
        """Return the blocks of the piece `number` steps ahead; empty before the start of the object."""
        start = self.start + round(number * self.step)
        return range(max(0, start // block_size), max(0, _behind(start + self.length, block_size)))

    def unread(self, block_size: int) -> list[range]:
        """Return the blocks that were requested and not read yet: of this piece, and of future ones."""
        return [range(_behind(self.stop, block_size), self.asked), *self.pieces]

    def n_unread(self, block_size: int) -> int:
        return sum(map(len, self.unread(block_size)))


class ReadHistory(NamedTuple):
    """The reads of one open file or of one object, as runs, and the number of wasted blocks."""

    block_size: int
    runs: tuple[SequentialRun, ...] = ()  # most recently read first
    n_touched: int = 0  # blocks read
    n_wasted: int = 0  # blocks requested and skipped
    # Runs whose requests are no longer wanted. The caller stops them, and adds what still arrives to `n_wasted`.
    dropped: tuple[SequentialRun, ...] = ()
    n_runs: int = 0
    takes_turns: bool = False  # a run continued after another was read: both are active

    @property
    def last(self) -> int:
        """Index of the last block read in the latest piece; -1 when nothing was read."""
        return _behind(self.runs[0].stop, self.block_size) - 1 if self.runs else -1

    def after(self, start: int, stop: int, *, left: int | None = None) -> ReadHistory:
        """Return the history after a read of the bytes `[start, stop)`.

        Reads inside the block `last` need not be reported; `left` is then the position they reached.
        """
        history = self if left is None else self._reached(left)
        for place, run in enumerate(history.runs):
            if start > run.stop and run.repeats >= ENOUGH and history._steps(run, start):
                return history._stepping(place, start, stop)
            if history._goes_on(run, start):
                return history._going_on(place, start, stop)
        for place, run in enumerate(history.runs):
            if history._steps(run, start):
                return history._stepping(place, start, stop)
        return history._beginning(start, stop)

    def _reached(self, left: int) -> ReadHistory:
        """Extend the last piece to `left`, the end of the unreported reads in its last block."""
        if not self.runs or not self.runs[0].stop < left <= (self.last + 1) * self.block_size:
            return self
        return self._replace(runs=(self.runs[0]._replace(stop=left), *self.runs[1:]))

    def _goes_on(self, run: SequentialRun, start: int) -> bool:
        """Return whether a read continues a piece: at its end, a little before, or after a small gap."""
        first, begin = start // self.block_size, run.start // self.block_size
        behind = _behind(run.stop, self.block_size)
        return max(begin, behind - 2) <= first and WASTE_SHARE * (first - behind) <= behind - begin

    def _going_on(self, place: int, start: int, stop: int) -> ReadHistory:
        run, size = self.runs[place], self.block_size
        behind = _behind(run.stop, size)
        n_new = max(0, _behind(stop, size) - behind)
        n_passed = len(range(behind, min(start // size, run.asked)))
        run = run._replace(stop=max(run.stop, stop), n_steps=run.n_steps + (n_new > 0))
        return self._with(place, run, n_read=n_new, n_passed=n_passed)

    def _steps(self, run: SequentialRun, start: int) -> bool:
        return run.repeats > 0 and abs(start - run.start - run.step) < self.block_size

    def _stepping(self, place: int, start: int, stop: int) -> ReadHistory:
        run, size = self.runs[place], self.block_size
        n_passed = len(range(_behind(run.stop, size), run.asked))
        if self._is_next_below(run, start):
            start -= start % size
        asked = run.pieces[0] if run.pieces else range(0)
        n_passed += len(range(asked.start, min(asked.stop, start // size)))  # the prediction was too early
        run = run._replace(
            start=start,
            stop=stop,
            n_steps=0,
            asked=asked.stop,
            repeats=run.repeats + 1,
            length=min(run.length, run.stop - run.start),
            pieces=run.pieces[1:],
        )
        return self._with(place, run, n_read=1, n_passed=n_passed)

    def _is_next_below(self, run: SequentialRun, start: int) -> bool:
        return start // self.block_size == run.start // self.block_size - 1

    def _beginning(self, start: int, stop: int) -> ReadHistory:
        """Return the history after a read that no run predicts; it may start the second of several pieces."""
        run, history = SequentialRun(self.n_runs, start, stop), self._replace(n_runs=self.n_runs + 1)
        place, n_passed = None, 0
        if self.runs:
            before = self.runs[0]
            run = run._replace(origin=before.start, repeats=1, length=before.stop - before.start)
            if self._is_next_below(before, start):  # backward, at any step: rounded to whole blocks
                size = self.block_size
                origin = before.start - before.start % size
                run = run._replace(start=start - start % size, origin=origin, length=size)
            if before.stop <= start < before.asked * self.block_size:  # already requested: the same run
                run, place = run._replace(number=before.number, asked=before.asked), 0
                n_passed = before.n_unread(self.block_size) - (before.asked - start // self.block_size)
        return history._with(place, run, n_read=1, n_passed=n_passed)

    def _with(self, place: int | None, run: SequentialRun, *, n_read: int, n_passed: int) -> ReadHistory:
        """Return the history with `run` moved to the front from index `place`; None for a new run."""
        others = [other for at, other in enumerate(self.runs) if at != place]
        takes_turns = self.takes_turns or (place is not None and place > 0)
        n_touched, n_runs = self.n_touched + n_read, self.n_runs
        kept, dropped = [run._replace(at=n_touched)], [*self.dropped, *others[MOST_RUNS - 1 :]]
        for other in others[: MOST_RUNS - 1]:
            is_over = n_touched - other.at > PATIENCE if takes_turns else run.n_steps >= ENOUGH
            if is_over and other.n_unread(self.block_size):
                dropped.append(other)
                other = other._replace(number=n_runs, asked=0, pieces=())
                n_runs += 1
            kept.append(other)
        n_wasted = self.n_wasted + n_passed
        return ReadHistory(
            self.block_size, tuple(kept), n_touched, n_wasted, tuple(dropped), n_runs, takes_turns
        )


def ahead(
    history: ReadHistory, *, n_blocks: int, blocks_per_request: int, most: int
) -> tuple[ReadHistory, list[range]]:
    """Return the updated history, and the block ranges to request now, each at most one request long.

    The window starts at one request and doubles with every step, up to `most` blocks; runs that take turns
    share it. It is refilled one request at a time, so that requests overlap. Readahead never passes the end
    of the object. It wastes at most one window plus a twentieth of the blocks read.
    """
    if not history.runs or most <= 0:
        return history, []
    run, size = history.runs[0], history.block_size
    room = _room(history, most)
    in_piece = _of_piece(run, size, n_blocks, blocks_per_request, room)
    run = run._replace(asked=max(run.asked, in_piece.stop)) if in_piece else run
    room -= run.n_unread(size)
    pieces = _pieces(run, size, n_blocks, blocks_per_request, room)
    run = run._replace(pieces=(*run.pieces, *pieces))
    wanted = list(_requests([in_piece, *pieces], blocks_per_request))
    return history._replace(runs=(run, *history.runs[1:])), wanted


def _room(history: ReadHistory, most: int) -> int:
    """Return how many blocks the first run may have requested and not read yet."""
    others = history.runs[1:]
    n_active = 1 + sum(max(run.n_steps, run.repeats) >= ENOUGH for run in others)
    share = most // n_active if history.takes_turns else most
    to_come = sum(run.n_unread(history.block_size) for run in others)  # wasted at worst
    left = most + history.n_touched // WASTE_SHARE - history.n_wasted - to_come
    return min(share, left, 2 * most - to_come)  # other runs may have had a full window before


def _of_piece(run: SequentialRun, size: int, n_blocks: int, per_request: int, room: int) -> range:
    """Return the blocks to request of the current piece."""
    behind = _behind(run.stop, size)
    # if this piece is as long as the earlier ones
    end = _behind(run.start + run.length, size) if run.repeats else 0
    doublings, limit = run.n_steps - ENOUGH, n_blocks
    if behind <= end:
        limit = min(n_blocks, end)
        doublings = max(doublings, run.repeats - ENOUGH)
    start = max(run.asked, behind)
    if doublings < 0 or start >= limit:
        return range(0)
    stop = min(limit, behind + min(room, per_request << min(doublings, 32)))
    if stop < limit:
        stop -= (stop - start) % min(per_request, max(room, 1))
    return range(start, max(start, stop))


def _pieces(run: SequentialRun, size: int, n_blocks: int, per_request: int, room: int) -> list[range]:
    """Return the blocks of the next pieces to request."""
    pieces: list[range] = []
    if run.repeats < ENOUGH:
        return pieces
    is_dense = abs(run.step) < run.length + size  # pieces are adjacent, so one request covers several
    unit = max(1, per_request // max(1, len(run.piece(1, size)))) if is_dense else 1
    for number in range(len(run.pieces) + 1, (unit << min(run.repeats - ENOUGH, 32)) + 1):
        blocks = run.piece(number, size)
        if not blocks or blocks.stop > n_blocks:
            return pieces
        room -= len(blocks)
        if room < 0:
            break
        pieces.append(blocks)
    return pieces if len(pieces) >= unit else []


def _requests(pieces: Iterable[range], length: int) -> Iterator[range]:
    """Merge each piece with the one before it where they are adjacent, and split what is longer than `length`."""
    joined = [range(0)]
    for piece in pieces:
        last = joined[-1]
        if piece and last and piece.start <= last.stop and last.start <= piece.stop:
            joined[-1] = range(min(piece.start, last.start), max(piece.stop, last.stop))
        else:
            joined.append(piece)
    for blocks in joined:
        yield from (blocks[at : at + length] for at in range(0, len(blocks), length))


def _behind(stop: int, block_size: int) -> int:
    """Return the index after the last block that has a byte below `stop`."""
    return -(-stop // block_size)
