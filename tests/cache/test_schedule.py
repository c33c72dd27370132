"""The schedule of a prefetch plan: what it fetches and gives up, compared with the offline optimum."""

import heapq
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.cache.eviction import schedule
from cachedfs.cache.eviction.schedule import EvictionSchedule

orders = st.lists(st.integers(0, 7), max_size=60)


class Simulated:
    """A cache of `size` blocks beside those that pass, and a reader of an order of which `known` uses ahead are known."""

    def __init__(self, order, size, *, known=1 << 30, window=1, passing=1):
        self.order, self.size, self.window, self.passing = list(order), size, window, passing
        self.schedule = EvictionSchedule(limit=size, passing=passing)
        self.here, self.fetched, self.given_up = set(), [], []
        self.at = self.n_added = 0
        self.known = known

    def read(self, n=None, *, known=None):
        """Read the next n accesses, of all when there is no n; hand over the order up to `known`."""
        for _ in range(len(self.order) - self.at if n is None else n):
            stop = min(len(self.order), self.at + self.known if known is None else known)
            for position in range(self.n_added, stop):
                self.schedule.add(self.order[position], position)
            self.n_added = max(self.n_added, stop)
            for position in range(self.at, min(self.at + self.window, self.n_added)):
                block = self.order[position]
                if self.schedule.next_use(block) != position:  # it comes for an earlier use
                    continue
                if not self.schedule.ask(block):
                    break
                self.fetch(block)
            if self.order[self.at] not in self.here:  # nothing may make room for it yet
                self.fetched.append(self.order[self.at])
            self.schedule.read(self.order[self.at], self.at)
            self.at += 1
        return self

    def fetch(self, block):
        if block not in self.here:
            self.fetched.append(block)
            self.here.add(block)
        self.schedule.stored(block)
        for gone in self.schedule.given_up() if len(self.here) > self.size + self.passing else ():
            self.here.remove(gone)
            self.given_up.append((self.at, block, gone))
            if len(self.here) <= self.size + self.passing:
                break
        assert len(self.here) <= self.size + self.passing

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


def following(order, at, block):
    """Return where a block is used next, from position `at` on."""
    return order.index(block, at) if block in order[at:] else math.inf


@given(orders, st.integers(0, 8))
def test_what_is_known_to_its_end_is_read_with_the_fewest_misses_there_can_be(order, size):
    """With no more than a cache has that keeps `size` blocks and reads the others from memory; one more may be here."""
    assert optimum(order, size + 1) <= Simulated(order, size).read().misses <= optimum(order, size)


@given(orders, st.integers(1, 8), st.integers(1, 6), st.integers(0, 6), st.integers(1, 60))
def test_reading_ahead_costs_no_more_than_what_passes_takes(order, size, window, passing, horizon):
    read = Simulated(order, size, window=window, passing=passing, known=max(horizon, window)).read()
    assert read.misses >= optimum(order, size + passing)
    if horizon >= len(order) and window < passing:  # else what is read ahead takes the place of what stays
        assert read.misses <= optimum(order, size)


@given(orders, st.integers(1, 8), st.integers(1, 8), st.integers(0, 4), st.integers(1, 60))
def test_nothing_goes_that_is_needed_before_what_was_fetched_for_it(order, size, window, passing, horizon):
    read = Simulated(order, size, window=window, passing=passing, known=max(horizon, window)).read()
    for at, fetched, gone in read.given_up:
        assert following(order, at, gone) > following(order, at, fetched)


@given(st.lists(st.integers(0, 100), max_size=60, unique=True), st.integers(1, 30))
def test_with_room_for_all_everything_is_fetched_once_and_nothing_goes(order, window):
    read = Simulated(order * 3, 100, window=window).read()
    assert read.fetched == order
    assert not read.given_up


def to_fetch(plan, until):
    """Ask for what is used before position `until`, in the order of use; yield what is neither here nor under way."""
    uses = sorted((plan.next_use(block), block) for block in list(plan._records))
    for _, block in [use for use in uses if use[0] < until]:
        before = plan.taken
        if not plan.ask(block):
            return
        if plan.taken > before:
            yield block


def read_of(order, n, *, limit):
    """Return the schedule of these blocks after the first `n` were fetched together, and read."""
    plan = schedule_of(order, limit=limit)
    for block in list(to_fetch(plan, n)):
        plan.stored(block)
    read_up_to(plan, n)
    return plan


def schedule_of(order, sizes=None, **limits):
    plan = EvictionSchedule(**limits)
    for position, block in enumerate(order):
        plan.add(block, position, sizes[position] if sizes else 1)
    return plan


def read_up_to(plan, position):
    """Read all that is used before a position."""
    for block in list(plan._records):
        plan.read(block, position - 1)


def test_a_block_with_no_known_use_goes_first_and_of_those_the_one_longest_without():
    plan = read_of("abcdeab", 5, limit=5)
    assert list(plan.given_up()) == ["c", "d", "e", "b", "a"]


def test_what_others_removed_is_fetched_again_in_its_turn():
    plan = read_of("abcabc", 3, limit=3)
    plan.lost("b")
    assert list(to_fetch(plan, 6)) == ["b"]


def test_what_did_not_come_is_asked_for_again():
    plan = schedule_of("abc", limit=3)
    assert list(to_fetch(plan, 2)) == ["a", "b"]
    plan.lost("a")
    assert list(to_fetch(plan, 3)) == ["a", "c"]


def test_what_was_here_from_the_start_is_not_fetched():
    plan = schedule_of("abc", limit=3)
    for block in "ac":
        plan.stored(block)
    assert list(to_fetch(plan, 3)) == ["b"]


def test_of_what_was_here_from_the_start_the_blocks_that_are_used_first_stay():
    plan = schedule_of("abcdef", limit=2)
    for block in "fdbaec":
        plan.stored(block)
    assert set(itertools.islice(plan.given_up(), 4)) == set("cdef")
    assert not list(to_fetch(plan, 2))


def test_what_is_under_way_goes_only_when_it_is_here():
    plan = schedule_of("ab", limit=1)
    assert list(to_fetch(plan, 2)) == ["a"]  # before it was read nothing may take its place
    read_up_to(plan, 1)
    assert list(to_fetch(plan, 2)) == ["b"]
    assert not list(plan.given_up())
    plan.stored("a")
    assert list(plan.given_up()) == ["a"]


def test_a_block_that_comes_when_nobody_asked_counts_as_here():
    plan = schedule_of("aab", [5, 5, 5], limit=8)
    plan.stored("unknown")
    plan.stored("b")
    assert plan.taken == 5
    assert list(to_fetch(plan, 1)) == ["a"]
    assert plan.taken == 10
    assert list(plan.given_up()) == ["b"]


def test_sizes_count():
    plan = schedule_of("abcd", [4, 4, 4, 11], limit=10)
    assert list(to_fetch(plan, 4)) == ["a", "b"]
    read_up_to(plan, 2)
    assert list(to_fetch(plan, 4)) == ["c"]
    read_up_to(plan, 3)
    assert not list(to_fetch(plan, 4))  # it never fits


def test_a_smaller_limit_is_kept_by_what_is_asked_for_next():
    plan = read_of("abcdefabcd", 4, limit=4)
    plan.limit, plan.passing = 2, 2
    assert list(to_fetch(plan, 6)) == ["e", "f"]
    assert list(plan.given_up()) == ["d", "c", "b", "a"]


def test_what_is_read_out_of_turn_is_used_after_that():
    plan = schedule_of("abcacb", limit=2)
    for block in "ab":
        plan.stored(block)
    plan.read("b", 1)
    assert [plan.next_use(block) for block in "abc"] == [0, 5, 2]
    assert list(plan.given_up()) == ["b", "a"]  # it is used last now
    plan.read("a", 3)
    assert plan.next_use("a") == schedule.NEVER


def test_a_use_that_becomes_known_late_comes_in_its_turn():
    plan = schedule_of("ab", limit=9)
    plan.add("c", 9)
    plan.add("b", 5)
    plan.add("c", 0)
    assert [plan.next_use(block) for block in "abc"] == [0, 1, 0]
    plan.read("c", 0)
    plan.read("b", 1)
    assert [plan.next_use(block) for block in "bc"] == [5, 9]


def test_what_came_for_somebody_ahead_of_the_plan_stays_only_if_it_is_used_again_before_others():
    plan = schedule_of("abcbca", limit=1)
    plan.stored("b")
    plan.stored("a", is_read=True)
    assert next(plan.given_up()) == "a"
    plan.stored("c", is_read=True)  # at 4, and b at 1
    assert next(plan.given_up()) == "c"


def test_what_only_passes_waits_while_as_much_passes_as_may():
    plan = schedule_of("abcaabc", limit=1, passing=1)
    plan.stored("a")
    assert plan.ask("b")
    assert not plan.ask("c")
    assert plan.ask("b")  # it is under way
    plan.stored("b", is_read=True)
    assert plan.ask("c")
    assert plan.ask("unknown")


@given(st.lists(st.tuples(st.sampled_from("elsfgraoO"), st.integers(0, 7)), max_size=80), st.integers(0, 5))
def test_whatever_is_told_in_whatever_order_the_sums_are_right(told, limit):
    """Blocks that nobody asked for come, others that were never here are lost, and so on."""
    plan, uses = EvictionSchedule(limit=limit, passing=2), itertools.count()
    for what, number in told:
        if what == "e":
            plan.add(number, next(uses), number + 1)
        elif what == "a":
            plan.ask(number)
        elif what == "o":
            plan.read(number, plan.next_use(number))
        elif what == "O":
            plan.stored(number, is_read=True)
        elif what == "l":
            plan.lost(number)
        elif what == "s":
            plan.stored(number)
        elif what == "f":
            list(to_fetch(plan, number))
        elif what == "g":
            list(itertools.islice(plan.given_up(), number))
        else:
            read_up_to(plan, number)
        check(plan)


def check(plan):
    records = plan._records.values()
    for place in plan._sizes:
        assert plan._sizes[place] == sum(each.size for each in records if each.place is place)
    for record in records:
        assert record.uses == sorted(record.uses)
        assert record.uses or record.is_under_way or record.place is not schedule._Place.AWAY
    assert plan.taken == sum(each.size for each in records if each.place is not schedule._Place.AWAY)
