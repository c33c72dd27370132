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

MOST_RUNS = 4
# One window, plus 1/20 of the blocks read, may be wasted. A gap may be 1/20 of its piece.
WASTE_SHARE = 20
PATIENCE = 64  # blocks read elsewhere after which a run's requests are dropped
ENOUGH = 2  # steps that make a pattern, from block to block or from piece to piece


class SequentialRun(NamedTuple):
    """One reader: its current piece, and the pattern of the pieces before.

    Positions and lengths are in bytes, except `asked` and `lost`, which are block indexes.
    """

    number: int  # unique in its history; replaced when the run's requests are dropped
    start: int  # of the current piece
    stop: int  # end of what was read of it
    n_steps: int = 0  # reads that continued into another block
    asked: int = 0  # all blocks of the piece below this index were requested
    origin: int = 0  # start of the first piece in the current sequence of evenly spaced pieces
    repeats: int = 0  # pieces in that sequence after the first
    length: int = 0  # of the shortest earlier piece
    n_pieces: int = 0  # future pieces requested
    lost: int = 0  # blocks of the piece from `asked` up to this index were requested and then dropped
    was: int = -1  # former number, until it is known which of the dropped blocks still arrive
    at: int = 0  # `ReadHistory.n_touched` when this run was last read

    @property
    def step(self) -> float:
        """Mean bytes from the start of one piece to the start of the next. Requires an earlier piece."""
        return (self.start - self.origin) / self.repeats

    def piece(self, number: int, block_size: int) -> range:
        """Return the blocks of the piece `number` steps ahead; empty before the start of the object."""
        start = self.start + round(number * self.step)
        return range(max(0, start // block_size), max(0, _behind(start + self.length, block_size)))

    def n_lost(self, start: int, stop: int | None = None) -> int:
        """Return how many blocks from `start` on count as wasted, although the run may still read them."""
        return len(range(max(start, self.asked), self.lost if stop is None else min(stop, self.lost)))

    def unread(self, block_size: int) -> int:
        """Return how many blocks were requested and not read yet."""
        return max(0, self.asked - _behind(self.stop, block_size)) + self.n_to_come(block_size)

    def n_to_come(self, block_size: int) -> int:
        """Return how many blocks of future pieces were requested."""
        return sum(len(self.piece(number, block_size)) for number in range(1, self.n_pieces + 1))


class ReadHistory(NamedTuple):
    """The reads of one open file or of one object, as runs, and the number of wasted blocks."""

    block_size: int
    runs: tuple[SequentialRun, ...] = ()  # most recently read first
    n_touched: int = 0  # blocks read
    n_wasted: int = 0  # blocks requested and skipped
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
        """Return the history after a finished run's requests were stopped; only the blocks `coming` arrive.

        Blocks that do not arrive no longer count as wasted.
        """
        for place, run in enumerate(self.runs):
            if run.was == number:
                lost = set(range(max(run.asked, _behind(run.stop, self.block_size)), run.lost))
                n = len(lost.difference(*coming))
                runs = (*self.runs[:place], run._replace(lost=run.lost - n, was=-1), *self.runs[place + 1 :])
                return self._replace(runs=runs, n_wasted=self.n_wasted - n)
        return self

    def _until(self, left: int) -> ReadHistory:
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
        behind, first = _behind(run.stop, size), start // size
        n_new = max(0, _behind(stop, size) - behind)
        n_passed = max(0, min(first, run.asked) - behind)
        # no longer wasted: they were read after all
        n_passed -= run.n_lost(max(first, behind), behind + n_new)
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
        if awaited:  # the new prediction may differ a little from the old one
            n_passed += max(0, start // size - awaited[0].start)
            now = (run.piece(number, size) for number in range(1, run.n_pieces + 1))
            n_passed += sum(len({*old} - {*new}) for old, new in zip(awaited[1:], now, strict=True))
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
                n_passed = start // self.block_size - _behind(before.stop, self.block_size)
                n_passed += before.n_to_come(self.block_size)
        return history._with(place, run, n_read=1, n_passed=n_passed)

    def _with(self, place: int | None, run: SequentialRun, *, n_read: int, n_passed: int) -> ReadHistory:
        """Return the history with `run` moved to the front from index `place`; None for a new run."""
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
    """Return the updated history, and the block ranges to request now, each at most one request long.

    The window starts at one request and doubles with every step, up to `most` blocks; runs that take turns
    share it. It is refilled one request at a time, so that requests overlap. Readahead never passes the end
    of the object. It wastes at most one window plus a twentieth of the blocks read.
    """
    if not history.runs or most <= 0:
        return history, []
    run, size = history.runs[0], history.block_size
    room = _room(history, blocks_per_request, most)
    in_piece = _of_piece(run, size, n_blocks, blocks_per_request, room)
    n_again = run.n_lost(in_piece.start, in_piece.stop)  # no longer wasted
    run = run._replace(asked=max(run.asked, in_piece.stop)) if in_piece else run
    room -= run.unread(size) + run.n_lost(_behind(run.stop, size))
    n_pieces = _pieces_wanted(run, size, n_blocks, blocks_per_request, room)
    pieces = [run.piece(number, size) for number in range(run.n_pieces + 1, n_pieces + 1)]
    run = run._replace(n_pieces=n_pieces)
    wanted = [part for whole in (in_piece, *_joined(pieces)) for part in _requests(whole, blocks_per_request)]
    return history._replace(runs=(run, *history.runs[1:]), n_wasted=history.n_wasted - n_again), wanted


def _room(history: ReadHistory, per_request: int, most: int) -> int:
    """Return how many blocks the first run may have requested and not read yet."""
    run, others = history.runs[0], history.runs[1:]
    share = most // (1 + sum(map(_reads_on, others))) if history.takes_turns else most
    to_come = sum(other.unread(history.block_size) for other in others)  # wasted at worst
    # The run requests its own dropped blocks again first.
    in_vain = history.n_wasted - run.n_lost(_behind(run.stop, history.block_size))
    left = most + history.n_touched // WASTE_SHARE - in_vain - to_come
    if run.repeats < ENOUGH and 2 * left < most:
        # A run without a pattern gets half of it, so that a jump leaves some readahead for later runs.
        left = min(left, max(per_request, left // 2))
    return min(share, left, 2 * most - to_come)  # other runs may have had a full window before


def _reads_on(run: SequentialRun) -> bool:
    return max(run.n_steps, run.repeats) >= ENOUGH


def _of_piece(run: SequentialRun, size: int, n_blocks: int, per_request: int, room: int) -> range:
    """Return the blocks to request of the current piece."""
    behind = _behind(run.stop, size)
    # if this piece is as long as the earlier ones
    end = _behind(run.start + run.length, size) if run.repeats else 0
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
    """Return how many future pieces should be requested in total."""
    if run.repeats < ENOUGH:
        return run.n_pieces
    is_dense = abs(run.step) < run.length + size  # pieces are adjacent, so one request covers several
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
    """Merge each piece with the one before it where they are adjacent."""
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
    """Return the index after the last block that has a byte below `stop`."""
    return -(-stop // block_size)
