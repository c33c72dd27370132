"""Belady's rule for a plan: what it fetches and evicts, compared with the offline optimum; where its readers are."""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.common.types import BlockKey
from cachedfs.prefetch import belady
from cachedfs.prefetch.belady import Belady, Use

orders = st.lists(st.integers(0, 7), max_size=60)


class Object:
    """Stands for a version; its blocks are numbers."""

    @staticmethod
    def hash64(index):
        return index

    def block(self, index):
        return BlockKey(self, index)


OBJECT = Object()
A, B, C, D, E, F = range(6)


@pytest.fixture(autouse=True)
def sizes_of_data(monkeypatch):
    monkeypatch.setattr(belady, "file_size", lambda version, size: size)


class Reader:
    """A plan over blocks of one byte, a cache with room for `size` of them, and a reader. `known`: uses known ahead."""

    def __init__(self, order, size, *, window=math.inf, known=1 << 30):
        self.order, self.size, self.known = list(order), size, known
        self.here, self.fetched, self.evicted = set(), [], []
        self.done = []
        self.rule = Belady(
            window=window, reads=self.reads, has=self.has, is_in_memory=lambda version, block: False
        )
        self.rule.fit(size)
        self.at = self.cursor = self.n_added = 0

    def has(self, version, block):
        return block in self.here

    def reads(self):
        done, self.done = self.done, []
        return done

    def look(self, *blocks):
        """Let the plan see reads of these blocks."""
        self.done += blocks
        return self.rule.look()

    def use(self, position):
        return Use(float(position), OBJECT, self.order[position], 1)

    def read(self, n=None):
        """Read the next n blocks, or all; the plan goes on before each."""
        for _ in range(len(self.order) - self.at if n is None else n):
            self.go_on()
            block = self.order[self.at]
            if block not in self.here:
                self.fetch(block)
            self.look(block)
            self.at += 1
        return self

    def go_on(self):
        """Let the plan fetch what it may."""
        stop = min(len(self.order), self.at + self.known)
        self.rule.add(map(self.use, range(self.n_added, stop)))
        self.n_added = max(self.n_added, stop)
        self.cursor = max(self.cursor, self.at)
        while self.cursor < self.n_added and self.may_fetch(self.use(self.cursor)):
            self.cursor += 1

    def may_fetch(self, use):
        is_cached = use.block in self.here
        if not self.rule.ask([use], is_cached=is_cached):
            return False
        if not is_cached:
            self.fetch(use.block)
        self.rule.arrived(use)
        return True

    def fetch(self, block):
        self.fetched.append(block)
        self.here.add(block)
        stored, victims = self.rule.store([(BlockKey(OBJECT, block), b"")])
        if not stored:
            self.here.remove(block)
        elif len(self.here) > self.size and (found := next(victims, None)):
            self.here.remove(found.index)
            self.evicted.append((self.at, block, found.index))

    @property
    def misses(self):
        return len(self.fetched)


def optimum(order, size):
    """Return the misses of the exact optimum: what is used furthest ahead goes, or is not kept."""
    following, last = [math.inf] * len(order), {}
    for at in range(len(order) - 1, -1, -1):
        following[at] = last.get(order[at], math.inf)
        last[order[at]] = at
    here, heap, misses = {}, [], 0
    for at, block in enumerate(order):
        misses += block not in here
        here[block] = following[at]
        heapq.heappush(heap, (-following[at], block))
        while len(here) > size:
            negative, furthest = heapq.heappop(heap)
            if here.get(furthest) == -negative:
                del here[furthest]
    return misses


# What is fetched and evicted.


@given(orders, st.integers(4, 12))
def test_what_is_known_to_its_end_is_read_with_few_more_misses_than_there_must_be(order, size):
    """A quarter of a small cache is for blocks that do not stay."""
    misses = Reader(order, size).read().misses
    assert optimum(order, size) <= misses <= max(optimum(order, size - size // 4), optimum(order, size) + 1)


@given(orders, st.integers(4, 8), st.integers(1, 8), st.integers(1, 60))
def test_what_must_be_evicted_is_used_later_than_what_it_is_evicted_for(order, size, window, known):
    read = Reader(order, size, window=window, known=max(known, window)).read()
    for at, fetched, gone in read.evicted:
        uses = [order.index(block, at) if block in order[at:] else math.inf for block in (fetched, gone)]
        assert uses[0] < uses[1] or uses[0] - at >= known or math.inf in uses
    assert len(read.here) <= size + 1


@given(st.lists(st.integers(0, 100), max_size=60, unique=True), st.integers(1, 30))
def test_with_room_for_all_everything_is_fetched_once_and_nothing_goes(order, window):
    read = Reader(order * 3, 300, window=window).read()
    assert sorted(read.fetched) == sorted(order)
    assert not read.evicted


@pytest.mark.parametrize("window", [math.inf, 8, 1])
def test_random_epochs_through_half_of_the_room_are_read_as_well_as_can_be(window):
    chance = random.Random(0)
    order = [index for _ in range(4) for index in chance.sample(range(600), 600)]
    assert Reader(order, 300, window=window).read().misses <= optimum(order, 300) + 1


def test_unread_blocks_are_not_evicted_and_the_plan_waits():
    plan = Reader(range(30), 10)
    plan.go_on()
    assert plan.fetched == list(range(9))  # nine tenths
    plan.read(1)
    assert plan.fetched == list(range(9))  # half of that, while somebody reads
    plan.read(10)
    assert plan.rule.ahead <= 0.45 * 10
    assert not [gone for at, _, gone in plan.evicted if gone > at]


def test_what_was_read_before_it_is_stored_and_is_not_needed_is_not_stored_in_a_full_cache():
    plan = Reader([A, B, C], 2)
    for position in range(3):
        assert plan.rule.ask([plan.use(position)])
        plan.rule.arrived(plan.use(position))
        plan.look(plan.order[position])
    stored, victims = plan.rule.store([(BlockKey(OBJECT, block), b"") for block in (A, B, C)])
    assert ([key.index for key, _ in stored], list(victims)) == ([B, C], [])


# Where the readers are.


def ahead_of(names):
    """Return a plan that has fetched all these blocks."""
    plan = Reader(names, 10_000)
    plan.rule.add(map(plan.use, range(len(names))))
    for position in range(len(names)):
        assert plan.rule.ask([plan.use(position)])
        plan.here.add(names[position])
        plan.rule.arrived(plan.use(position))
    return plan


def test_a_slow_read_is_not_the_next_use_of_the_block():
    plan = ahead_of([A, B, C, D, E, F, A, B])
    plan.look(B, C, D)  # and another reader is still at the first
    assert not plan.look(A)
    assert plan.rule.reader == 3
    plan.look(E, F, A, B)
    assert plan.rule.reader == 7


def test_a_read_before_the_use_is_known_counts_if_no_reader_has_come_further_since():
    plan = Reader([A, B, C, A], 100)
    plan.look(A, B)
    plan.rule.add([plan.use(0)])
    plan.rule.add([plan.use(1)])
    assert plan.rule.reader == 1
    plan.look(A)  # of its last use
    plan.rule.add([plan.use(3)])
    assert plan.rule.reader == 1


def test_beyond_the_horizon_only_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(belady, "HORIZON", 4)
    plan = Reader(range(30), 20)
    assert sum(plan.rule.ask([plan.use(position)]) for position in range(30)) == 18


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200))
def test_reading_everything_in_order_empties_the_window(blocks):
    plan = ahead_of(blocks)
    for block in [*blocks, blocks[-1]]:
        plan.look(block)
    assert plan.rule.ahead <= 1


# Other plans.


class Sharing(Reader):
    """A plan of which others share the cache: without a victim, the block that was fetched or read first goes."""

    def __init__(self, order, size, others):
        super().__init__(order, size)
        self.here, self.others = {}, others  # in the order of the last use
        others.append(self)

    def read(self, n=None):
        super().read(n)
        if (block := self.order[self.at - 1]) in self.here:
            self.here[block] = self.here.pop(block) and next(TIME)
        return self

    def fetch(self, block):
        self.fetched.append(block)
        self.here[block] = next(TIME)
        stored, victims = self.rule.store([(BlockKey(OBJECT, block), b"")])
        if not stored:
            del self.here[block]
        elif sum(len(each.here) for each in self.others) > self.size:
            if (victim := next(victims, None)) is not None:
                del self.here[victim.index]
            else:
                plan = min(
                    (each for each in self.others if each.here), key=lambda each: min(each.here.values())
                )
                del plan.here[min(plan.here, key=plan.here.get)]


TIME = itertools.count(1)


def test_two_plans_share_a_cache():
    """Each evicts its own blocks for those that it fetches again, so neither ends up without room."""
    chance, plans = random.Random(0), []
    for first in (0, 1000):
        Sharing([first + n for _ in range(6) for n in chance.sample(range(200), 200)], 100, plans)
    for _ in range(1200):
        for plan in plans:
            if plan.at == 400:
                plan.fetched.clear()
            plan.read(1)
    hits = [1 - plan.misses / 800 for plan in plans]
    assert sum(hits) > 0.4  # 0.5 at best
    assert min(hits) >= 0.2  # 0.8 of an equal share
