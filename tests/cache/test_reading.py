"""Progress of readers through a plan: several readers out of order, one of them stuck."""

import random
from collections import deque

import pytest

from cachedfs.cache.eviction.future_uses import UseTracker
from cachedfs.cache.eviction.schedule import EvictionSchedule, FutureAccess
from cachedfs.prefetch.future_reads import FutureBlock, UnreadBlocks

N, EPOCHS, BATCH = 320, 4, 8
AHEAD = 0.45  # of what fits: how much of it may be ahead of the readers, as in a real plan


class Training:
    """Readers who take batches of an order in turn and read within them at once, and a plan that sees touches alone.

    None gets further than `n_ahead` batches from the first that is not read; the one who has each tenth is stuck until then.
    """

    def __init__(self, share, *, n_readers, seed, n_touches=1):
        self.chance = random.Random(seed)
        self.order = [block for _ in range(EPOCHS) for block in self.chance.sample(range(N), N)]
        self.clocks, self.now, self.n_fit = (
            {},
            0xFFFFFFFF - N,
            round(share * N),
        )  # the clock turns over on the way
        self.schedule = EvictionSchedule(horizon=len(self.order), limit=self.n_fit - 2, passing=2)
        self.reading = UseTracker(self.schedule, self.clocks.get)
        for block in range(N):
            self.reading.comes(block)
        self.schedule.extend(map(FutureAccess, self.order))
        self.unread, self.at = UnreadBlocks(), 0
        self.here, self.fetched = set(), []
        self.left = [list(range(at, at + BATCH)) for at in range(0, len(self.order), BATCH)]
        self.n_readers, self.n_ahead, self.furthest = n_readers, n_readers + 2, 0
        self.n_touches, self.open = n_touches, deque(maxlen=2 * n_readers)

    # The readers.

    def read_some(self, n):
        first = next(i for i, batch in enumerate(self.left) if batch)
        open_ = [i for i in range(first, first + self.n_ahead) if i < len(self.left) and self.left[i]]
        free = [i for i in open_ if i % 10][: self.n_readers] or open_[:1]
        for _ in range(n):
            batch = self.left[self.chance.choice(free)]
            if batch:
                self.read(batch.pop(self.chance.randrange(len(batch))))

    def read(self, position):
        block = self.order[position]
        is_missing = block not in self.here
        self.touch(block)
        self.furthest = max(self.furthest, position + 1)
        if is_missing:
            self.fetched.append(position)
            self.schedule.stored(block, is_read=self.reading.was_read(block))
            self.put(block)
        self.open.append(block)
        for _ in range(self.n_touches - 1):  # one more range of one that is being read
            self.touch(self.chance.choice(self.open))

    def touch(self, block):
        self.now = self.now + 1 & 0xFFFFFFFF
        self.clocks[block] = self.now

    # The plan.

    def look(self):
        self.unread.look(self.clocks.get, 128, lambda block, place: self.reading.is_made(block, place[0]))
        first = next((piece.place[0] for piece in self.unread), self.at)
        assert first <= self.furthest  # it is never ahead of whoever reads
        self.reading.reached(first)
        while self.at < len(self.order) and self.unread.size < AHEAD * self.n_fit:
            block = self.order[self.at]
            if not self.reading.is_made(block, self.at):
                if not self.schedule.ask(block, is_awaited=not self.unread.size):
                    return
                if block not in self.here:
                    self.fetched.append(self.at)
                self.schedule.stored(block)
                self.put(block)
                self.unread.add(FutureBlock((self.at, 0), block, 1), self.clocks.get(block))
            self.at += 1

    def put(self, block):
        self.here.add(block)
        for gone in self.schedule.given_up() if len(self.here) > self.n_fit else ():
            self.here.discard(gone)
            if len(self.here) <= self.n_fit:
                return

    def hit_ratio(self, at_once):
        """Return the hits of all epochs but the first, the plan looking after each `at_once` reads."""
        while any(self.left):
            self.look()
            self.read_some(at_once)
        return 1 - sum(position >= N for position in self.fetched) / N / (EPOCHS - 1)


# What slower readers have still to read is here beside what is ahead: with room for a quarter more of them would leave no room.
@pytest.mark.parametrize(
    ("share", "n_readers", "at_once"), [(0.25, 1, 8), (0.25, 4, 40), (0.5, 8, 1), (0.75, 8, 40)]
)
def test_readers_out_of_order_hit_what_fits_and_the_plan_stays_where_they_are(share, n_readers, at_once):
    training = Training(share, n_readers=n_readers, seed=n_readers)
    assert share - 0.02 <= training.hit_ratio(at_once) <= share + 0.01


@pytest.mark.parametrize(("share", "n_readers", "n_touches"), [(0.25, 1, 8), (0.5, 8, 2), (0.75, 4, 8)])
def test_a_use_of_several_touches_is_one_use(share, n_readers, n_touches):
    training = Training(share, n_readers=n_readers, seed=n_readers, n_touches=n_touches)
    assert share - 0.02 <= training.hit_ratio(8) <= share + 0.01


def test_touches_while_no_use_is_known_count_for_none():
    clocks, schedule = {}, EvictionSchedule(horizon=4, limit=9)
    reading = UseTracker(schedule, clocks.get)
    for block in "ab":
        reading.comes(block)
    schedule.extend(map(FutureAccess, "ab"))
    schedule.stored("a")
    clocks["a"] = 1
    assert reading.is_made("a", 0)
    clocks["a"] = 900  # by somebody else
    reading.comes("a")
    schedule.extend([FutureAccess("a")])
    assert not reading.was_read("a")
    clocks["a"] = 1800
    assert reading.was_read("a")


def test_what_was_read_before_its_uses_were_known_may_have_been_the_first_of_them():
    clocks, schedule = {"a": 1}, EvictionSchedule(horizon=9, limit=9)
    reading = UseTracker(schedule, clocks.get)
    for block in "ab":
        reading.comes(block)
    schedule.extend(map(FutureAccess, "abab"))
    assert not reading.is_made("a", 0)
    assert [reading.may_be_at(block, at) for at, block in enumerate("abab")] == [True, False, False, False]
    clocks |= {"a": 2, "b": 3}
    assert reading.is_made("a", 0)
    assert [reading.may_be_at(block, at) for at, block in enumerate("abab")] == [True, True, False, False]
