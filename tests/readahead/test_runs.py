"""Readahead of one open file or object, measured with simulated readers."""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachedfs.readahead.runs import MOST_RUNS, ReadHistory, Run

B = 1 << 20
REQUEST, WINDOW = 8, 64  # blocks


@dataclasses.dataclass
class Reader:
    """Reads as an open file does, which reports a read when another block begins.

    Requested blocks are received in order, `pace` for each block that is read. What was not received when the reader
    jumps elsewhere never is.
    """

    n_blocks: int
    most: int = WINDOW
    pace: int = 2 * WINDOW
    history: ReadHistory = dataclasses.field(default_factory=lambda: ReadHistory(B))
    asked: list[range] = dataclasses.field(default_factory=list)
    known: set[int] = dataclasses.field(default_factory=set)  # blocks that were requested
    read: set[int] = dataclasses.field(default_factory=set)
    coming: list[tuple[Run, int]] = dataclasses.field(default_factory=list)  # which run requested which block
    n_waits: int = 0  # blocks that had to be read without being requested
    position: int = 0
    last: int = -1  # the block of the last read
    n_over: int = 0  # runs whose requests were canceled

    def take(self, start, stop):
        """Read the bytes `[start, stop)`, given in blocks."""
        at, end = int(start * B), min(int(stop * B), self.n_blocks * B)
        while at < end:
            index, next_at = at // B, min(end, (at // B + 1) * B)
            if index != self.last:
                self.last = index
                self.observe(at, next_at, last_stop=self.position)
            self.position = at = next_at

    def observe(self, start, stop, last_stop=None):
        blocks = set(range(start // B, -(-stop // B)))
        self.end(self.history.observe(start, stop, last_stop=last_stop))
        self.n_waits += len(blocks - self.known - self.read)
        self.read |= blocks
        del self.coming[: self.pace]
        wanted = self.history.ahead(
            n_blocks=self.n_blocks,
            per_request=REQUEST,
            most=self.most,
            is_missing=lambda block: block not in self.read,
        )
        for request in wanted:
            assert 0 <= request.start < request.stop <= self.n_blocks, "never past the end"
            assert len(request) <= REQUEST
        self.asked += wanted
        new = [block for request in wanted for block in request if block not in self.known]
        self.known.update(new)
        self.coming += [(self.history.runs[0], block) for block in new]

    def end(self, over):
        self.n_over += len(over)
        for run in over:
            never = {block for owner, block in self.coming if owner is run}
            self.coming = [(owner, block) for owner, block in self.coming if owner is not run]
            self.known -= never
            self.history.end(run, self.known)

    @property
    def n_wasted(self):
        return len(self.known - self.read)


def test_the_window_starts_at_one_request_and_doubles_to_its_limit():
    reader, windows = Reader(1000), []
    for index in range(7):
        before = len(reader.known)
        reader.take(index, index + 1)
        windows.append(len(reader.known) - before)
    assert windows == [0, 0, 8, 8, 16, 32, 0]
    assert max(reader.known) <= 6 + WINDOW


@settings(max_examples=25)
@given(st.integers(1, 400), st.sampled_from([0.008, 0.06, 0.3, 1, 2.5, 16]))
def test_a_sequential_read_requests_every_block_once_and_in_order(n, step):
    reader = Reader(n)
    for number in range(int(n / step) + 1):
        reader.take(number * step, (number + 1) * step)
    asked = [block for request in reader.asked for block in request]
    assert asked == list(range(asked[0], n)) if n > 3 else not asked or n == 3
    assert reader.n_waits <= 3
    assert reader.n_wasted == 0


PIECES = [  # how long each is, and from the start of one to that of the next; in blocks
    (1, 2), (3, 20), (9, 10), (0.05, 1.9), (1.5, 3.1), (2.5, 10.3),
]  # fmt: skip


@pytest.mark.parametrize("n_reads", [1, 50])  # of each piece
@pytest.mark.parametrize(("length", "step"), PIECES)
def test_strided_reads_are_read_ahead_and_nothing_between_them(length, step, n_reads):
    n = 600
    reader = Reader(int(n * step) + 20)
    for number in range(n):
        start = number * int(step * B) / B
        for i in range(n_reads):
            reader.take(start + length * i / n_reads, start + length * (i + 1) / n_reads)
    assert reader.n_waits <= 20
    assert reader.n_wasted < 0.05 * len(reader.read)


@pytest.mark.parametrize("step", [0.3, 1, 16])
def test_a_file_read_backwards_is_read_ahead_in_large_requests(step):
    n = 320
    reader, most_unread = Reader(n), 0
    for number in range(int(n / step)):
        reader.take(n - (number + 1) * step, n - number * step)
        most_unread = max(most_unread, len(reader.history.unread))
    assert most_unread > WINDOW - 2 * REQUEST
    assert reader.n_waits <= 3 * max(1, step)
    assert reader.n_wasted < 0.05 * n
    assert len(reader.asked) <= 1.1 * n / REQUEST + step


@pytest.mark.parametrize(
    ("n_readers", "burst", "most_waits"),
    [(2, 10, 12), (3, 1, 12), (4, 2, 12), (4, 4, 12), (MOST_RUNS, 4, 20)],
)
def test_readers_that_alternate_in_one_object_are_each_followed(n_readers, burst, most_waits):
    reader, at = Reader(400 * n_readers), [400 * number for number in range(n_readers)]
    for _ in range(320 // burst):
        for number in range(n_readers):
            reader.take(at[number], at[number] + burst)
            at[number] += burst
    assert reader.n_waits <= most_waits * n_readers
    assert reader.n_wasted <= WINDOW


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_random_reads_request_almost_nothing(seed):
    rng, reader = random.Random(seed), Reader(10_000)
    for _ in range(200):
        at = rng.randrange(9_999)
        reader.take(at, at + 0.06)
    assert reader.n_wasted <= REQUEST  # three may be adjacent by chance


def patterns(rng, n_blocks):
    """Yield the reads of a reader with changing patterns, in blocks."""
    for _ in range(rng.randrange(1, 12)):
        at, n = rng.randrange(n_blocks), rng.randrange(1, 60)
        kind = rng.choice(["sequence", "random", "pieces", "backwards", "gaps", "lengths"])
        step, length = rng.uniform(0.5, 12), rng.uniform(0.1, 6)
        for number in range(n):
            if kind == "random":
                at = rng.randrange(n_blocks)
            elif kind == "lengths":
                at, length = rng.randrange(n_blocks), rng.uniform(0.1, 30)
            elif kind == "gaps":
                at += length + (rng.random() < 0.2)
            elif number:
                at += {"sequence": length, "pieces": step, "backwards": -step}[kind]
            if 0 <= at < n_blocks:
                yield at, min(n_blocks, at + length)


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from([20, 300, 3000]),
    st.sampled_from([8, WINDOW]),
    st.sampled_from([0, 1, 2, 2 * WINDOW]),
)
@example(9720, 3000, WINDOW, 2 * WINDOW)  # a run that was over continues, and not with all of its requests
@example(7799, 3000, 8, 2 * WINDOW)  # a gap inside a requested range where strided reads were expected
def test_any_pattern_wastes_less_than_a_window_and_a_twentieth(seed, n_blocks, most, pace):
    reader = Reader(n_blocks, most, pace)
    for start, stop in patterns(random.Random(seed), n_blocks):
        reader.take(start, stop)
        assert reader.n_wasted <= len(reader.history.unread), "each is counted"
        assert reader.n_wasted <= most + reader.history.n_touched / 20


def test_requests_of_a_reader_that_left_are_canceled_once_it_reads_elsewhere():
    reader = Reader(1000)
    reader.take(0, 20)
    reader.take(500, 502)
    assert reader.n_over == 0, "the reader may have looked something up"
    reader.take(502, 503)
    assert reader.n_over == 1
    reader.take(20, 21)
    waits = reader.n_waits
    reader.take(503, 540)
    assert reader.n_waits <= waits + 2, "both are read ahead"


def test_requests_whose_blocks_are_being_read_are_not_canceled():
    reader = Reader(300, most=256, pace=0)
    reader.observe(B, 200 * B)  # by range: another run
    reader.take(0, 70)  # cached from here to block 200, so that the next reads need not be reported
    n_known = len(reader.known)
    assert reader.known >= set(range(200, 300))
    reader.take(200, 300)  # where the other run ended
    assert (reader.n_over, reader.n_waits, len(reader.known)) == (0, 200, n_known)
