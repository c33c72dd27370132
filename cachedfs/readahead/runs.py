"""Predict the next blocks of an open file, or of an object read by ranges. No I/O.

A reader reads pieces; a piece is a contiguous byte range. A file read from start to end is one long piece.
One column of a table, or a part of an image, is many pieces of one length at one distance. A file read
backward is many pieces, each before the previous one. So two patterns are recognized: a piece continues, and
pieces repeat at a constant step. Several readers may share one handle; each of them is a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachedfs.common.blocks import merge

MOST_RUNS = 8
# One window, plus 1/20 of the blocks read, may be wasted. A gap may be 1/20 of its piece.
WASTE_SHARE = 20
PATIENCE = 64  # blocks read elsewhere after which a run is over
ENDLESS = 1 << 62
MAY_STEP, GOES_ON, STEPS = 1, 2, 3  # how a read follows the reads of a run
ENOUGH = 2  # steps that make a pattern, from block to block or from piece to piece
FUTURE = 2  # a reader is assumed to go on for this many times as long as so far
MUCH = 4  # 1 / MUCH of an object read: the rest is likely to be read too
LEAST_MISSES = 6  # reads that waited; reading a table's footer and a few of its columns takes fewer


def is_rest_worth_it(n_misses: int, n_missing: int, *, per_request: int) -> bool:
    """Return whether to fetch the `n_missing` blocks of an object after `n_misses` reads had to wait.

    It is if going on as before would take more requests. If they fit into one request, the second read that waits is
    enough, and its request takes them along.
    """
    n_requests = -(-n_missing // per_request)
    if n_requests <= 1:
        return n_requests == 1 and n_misses >= ENOUGH
    return n_misses >= LEAST_MISSES and FUTURE * n_misses >= n_requests


def earned(n_touched: int, n_blocks: int, *, per_request: int, is_metered: bool) -> int:
    """Return how many blocks of the rest of an object a read of a further block allows to request.

    Where bytes are limited it is one, so that at most as many blocks are fetched in vain as were read, until a quarter of
    the object was read.
    """
    return 1 if is_metered and MUCH * n_touched < n_blocks else per_request


def requests_for(blocks: Iterable[int], per_request: int) -> list[range]:
    """Return the ranges to request for blocks in ascending order, each of at most `per_request` blocks."""
    merged = merge(blocks, 1, size=ENDLESS, request_size=per_request)
    return [range(request.start, request.stop) for request in merged]


@dataclass(eq=False, slots=True)
class Run:
    """One reader: its current piece, and the pattern of the pieces before. Positions and lengths are in bytes."""

    block_size: int
    start: int  # of the current piece
    stop: int  # end of what was read of it
    n_steps: int = 0  # reads that continued into another block
    asked: int = 0  # all blocks of the piece below this index were requested
    origin: int = 0  # start of the first piece in the current sequence of evenly spaced pieces
    repeats: int = 0  # pieces in that sequence after the first
    length: int = 0  # of the shortest earlier piece
    n_ahead: int = 0  # pieces after this one that were requested
    at: int = 0  # `ReadHistory.n_touched` when this run was last read
    requests: deque[Any] = field(default_factory=deque)  # the caller's, for what was requested ahead of it

    @property
    def next_block(self) -> int:
        """Index after the last block that was read of the piece."""
        return -(-self.stop // self.block_size)

    @property
    def step(self) -> float:
        """Mean bytes from the start of one piece to the start of the next. Requires an earlier piece."""
        return (self.start - self.origin) / self.repeats

    def piece(self, number: int) -> range:
        """Return the blocks of the piece `number` steps ahead; empty before the start of the object."""
        start = self.start + round(number * self.step)
        stop = -(-(start + self.length) // self.block_size)
        return range(max(0, start // self.block_size), max(0, stop))

    def follows(self, start: int) -> int:
        """Return how a read at `start` follows: STEPS, GOES_ON or MAY_STEP, the surest the highest; else 0."""
        steps = self.repeats > 0 and abs(start - self.start - self.step) < self.block_size
        if steps and self.repeats >= ENOUGH and start > self.stop:
            return STEPS
        # It goes on at the end of the piece, a little before, or after a small gap.
        first, begin, next_block = start // self.block_size, self.start // self.block_size, self.next_block
        if max(begin, next_block - 2) <= first and WASTE_SHARE * (first - next_block) <= next_block - begin:
            return GOES_ON
        return MAY_STEP if steps else 0

    def go_on(self, stop: int) -> int:
        """Record a read that continues the piece; return the number of further blocks."""
        before, self.stop = self.next_block, max(self.stop, stop)
        n_read = self.next_block - before
        self.n_steps += n_read > 0
        return n_read

    def take_step(self, start: int, stop: int) -> int:
        """Record the first read of the next piece; return 1, the number of further blocks."""
        self.length = min(self.length, self.stop - self.start)
        if self.is_next_below(start):
            start -= start % self.block_size
        self.start, self.stop, self.n_steps, self.asked = start, stop, 0, 0
        self.repeats, self.n_ahead = self.repeats + 1, max(0, self.n_ahead - 1)
        return 1

    def is_next_below(self, start: int) -> bool:
        return start // self.block_size == self.start // self.block_size - 1

    def rest_of_piece(self, n_blocks: int, per_request: int, room: int) -> range:
        """Return the blocks to request of the current piece, of which `room` may be requested and unread."""
        next_block, limit, doublings = self.next_block, n_blocks, self.n_steps - ENOUGH
        # the end if this piece is as long as the earlier ones
        end = -(-(self.start + self.length) // self.block_size) if self.repeats else 0
        if next_block <= end:
            limit, doublings = min(n_blocks, end), max(doublings, self.repeats - ENOUGH)
        start = max(self.asked, next_block)
        if doublings < 0 or start >= limit:
            return range(0)
        stop = min(limit, next_block + min(room, per_request << min(doublings, 32)))
        if stop < limit:
            stop -= (stop - start) % min(per_request, max(room, 1))
        return range(start, max(start, stop))

    def next_pieces(self, n_blocks: int, per_request: int, share: int, left: int) -> list[range]:
        """Return the blocks of the next pieces to request: at most `left`, and `share` with those requested before."""
        pieces: list[range] = []
        if self.repeats < ENOUGH:
            return pieces
        size = max(1, len(self.piece(1)))
        room = min(share - self.n_ahead * size, left)
        # If pieces are adjacent, one request covers several.
        unit = max(1, per_request // size) if abs(self.step) < self.length + self.block_size else 1
        for number in range(self.n_ahead + 1, (unit << min(self.repeats - ENOUGH, 32)) + 1):
            blocks = self.piece(number)
            if not blocks or blocks.stop > n_blocks:
                return pieces
            room -= len(blocks)
            if room < 0:
                break
            pieces.append(blocks)
        return pieces[: len(pieces) - len(pieces) % unit]


class ReadHistory:
    """The reads of one object as runs, and the blocks that were requested ahead of them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.runs: list[Run] = []  # most recently read first
        self.unread: dict[int, Run] = {}  # blocks requested ahead of a run, and not read yet
        self.n_touched = 0  # blocks read
        self.takes_turns = False  # a run continued after another was read: both are active

    def observe(self, start: int, stop: int, *, last_stop: int | None = None) -> list[Run]:
        """Record a read of the bytes `[start, stop)`; return the runs that are over. Call `end` for each.

        Reads inside the block read last need not be reported; `last_stop` is then where they ended.
        """
        latest = self.runs[0] if self.runs else None
        if latest and last_stop and latest.stop < last_stop <= latest.next_block * self.block_size:
            latest.stop = last_stop
        kinds = [run.follows(start) for run in self.runs]
        if kind := max(kinds, default=0):
            run = self.runs[kinds.index(kind)]
            n_read = run.go_on(stop) if kind == GOES_ON else run.take_step(start, stop)
        else:
            run, n_read = self._begin(start, stop), 1
        blocks = range(start // self.block_size, -(-stop // self.block_size))
        owners = [self.unread.pop(index) for index in blocks if index in self.unread]
        return self._moved(run, n_read, owners)

    def _begin(self, start: int, stop: int) -> Run:
        """Return a run for a read that no run predicts; it may start the second of several pieces."""
        size = self.block_size
        if not self.runs:
            return Run(size, start, stop)
        before = self.runs[0]
        origin, length = before.start, before.stop - before.start
        if before.is_next_below(start):  # backward, at any step: rounded to whole blocks
            start, origin, length = start - start % size, origin - origin % size, size
        # What was requested is still wanted after a jump into it.
        run = before if self.unread.get(start // size) is before else Run(size, start, stop)
        run.start, run.stop, run.n_steps, run.n_ahead = start, stop, 0, 0
        run.origin, run.repeats, run.length = origin, 1, length
        return run

    def _moved(self, run: Run, n_read: int, owners: Sequence[Run]) -> list[Run]:
        """Make `run` the latest; return the runs that are over. Those who requested its blocks, `owners`, are not."""
        others = [other for other in self.runs if other is not run]
        self.takes_turns |= run in self.runs[1:]
        self.n_touched += n_read
        for each in (run, *owners):
            each.at = self.n_touched
        self.runs, over = [run, *others[: MOST_RUNS - 1]], others[MOST_RUNS - 1 :]
        for other in others[: MOST_RUNS - 1]:
            n_elsewhere = self.n_touched - other.at
            is_settled = n_elsewhere > 0 and run.n_steps >= ENOUGH
            is_over = n_elsewhere > PATIENCE if self.takes_turns else is_settled
            if is_over and (other.asked or other.n_ahead):
                other.asked = other.n_ahead = 0
                over.append(other)
        return over

    def end_all(self) -> list[Run]:
        """Return the runs, which are over, and start without any."""
        runs, self.runs, self.unread, self.n_touched, self.takes_turns = self.runs, [], {}, 0, False
        return runs

    def end(self, run: Run, arriving: Container[int]) -> None:
        """Record that of the blocks requested ahead of a run, only those in `arriving` still come."""
        self.unread = {at: owner for at, owner in self.unread.items() if owner is not run or at in arriving}

    def ahead(
        self, n_blocks: int, per_request: int, most: int, is_missing: Callable[[int], bool]
    ) -> list[range]:
        """Return the ranges of blocks to request now, each of at most `per_request` blocks.

        The window starts at one request and doubles with every step, up to `most` blocks; runs that take turns
        share it. It is refilled one request at a time, so that requests overlap. Readahead never passes the end
        of the object. It wastes at most one window plus a twentieth of the blocks read.
        """
        if not self.runs or most <= 0:
            return []
        run, others = self.runs[0], self.runs[1:] if self.takes_turns else []
        share = most // (1 + sum(max(each.n_steps, each.repeats) >= ENOUGH for each in others))
        left = most + self.n_touched // WASTE_SHARE - len(self.unread)
        n_asked = max(0, run.asked - run.next_block)
        piece = run.rest_of_piece(n_blocks, per_request, min(share, left + n_asked))
        run.asked = max(run.asked, piece.stop)
        n_new = len(piece)
        pieces = run.next_pieces(n_blocks, per_request, share - n_asked - n_new, left - n_new)
        run.n_ahead += len(pieces)
        wanted = {
            at for blocks in (piece, *pieces) for at in blocks if at not in self.unread and is_missing(at)
        }
        self.unread.update(dict.fromkeys(wanted, run))
        ranges = requests_for(sorted(wanted), per_request)
        return ranges[::-1] if run.repeats and run.step < 0 else ranges
