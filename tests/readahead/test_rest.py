"""When fetching the rest of an object pays off, measured with simulated readers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.fetch.fetch_queue import LinkEstimate
from cachedfs.readahead.object_history import LEAST, is_rest_worth_it

B, REQUEST, WINDOW = 1 << 20, 8, 64
LINK = LinkEstimate()


def worth(n_misses: int, n_missing: int, link: LinkEstimate = LINK) -> bool:
    return is_rest_worth_it(n_misses, n_missing, block_size=B, blocks_per_request=REQUEST, link=link)


def cost(n_blocks: int, n_reads: int, seed: int, *, with_rest: bool) -> tuple[float, int]:
    """Return the seconds and the requests of n random reads over a link that works like a queue."""
    rng, here, arrives = random.Random(seed), set[int](), dict[int, float]()
    now, link_free_at, n_requests, n_misses, n_earned = 0.0, 0.0, 0, 0, 0
    rest: list[int] | None = None
    for _ in range(n_reads):
        block = rng.randrange(n_blocks)
        if block not in here and arrives.get(block, math.inf) > now:
            alone = now + LINK.wait_s + B / LINK.best_per_s
            n_requests += arrives.get(block, math.inf) > alone
            n_misses += 1
            now = min(arrives.get(block, math.inf), alone)
        here.add(block)
        if rest is not None:
            n_earned += REQUEST
        elif with_rest and worth(n_misses, n_blocks - len(here)):
            rest, n_earned = [index for index in range(n_blocks) if index not in here], WINDOW
        while rest and n_earned > 0:
            blocks, rest = rest[:REQUEST], rest[REQUEST:]
            n_earned, n_requests = n_earned - len(blocks), n_requests + 1
            link_free_at = max(link_free_at, now + LINK.wait_s) + len(blocks) * B / LINK.total_per_s
            arrives |= dict.fromkeys(blocks, link_free_at)
    return now, n_requests


@pytest.mark.parametrize("n_blocks", [25, 192, 1000])
def test_fetching_the_rest_saves_time_and_adds_no_requests_on_average(n_blocks):
    rng = random.Random(5)
    lengths = [min(10 * n_blocks, int(1 / (1 - rng.random()))) for _ in range(300)]
    with_rest = [cost(n_blocks, n, seed, with_rest=True) for seed, n in enumerate(lengths)]
    without = [cost(n_blocks, n, seed, with_rest=False) for seed, n in enumerate(lengths)]
    assert sum(s for s, _ in with_rest) < 0.85 * sum(s for s, _ in without)
    assert sum(n for _, n in with_rest) <= 1.0 * sum(n for _, n in without)


def test_300_reads_of_192_mib_take_a_fifth_of_the_time():
    assert cost(192, 300, 1, with_rest=True)[0] < 2.0
    assert cost(192, 300, 1, with_rest=False)[0] > 9.0


@pytest.mark.parametrize("n_reads", [1, 2, 12, 30, 59])
def test_a_reader_that_stops_wastes_at_most_the_requests_of_one_window(n_reads):
    _, n_with = cost(192, n_reads, 3, with_rest=True)
    _, n_without = cost(192, n_reads, 3, with_rest=False)
    assert n_with <= 2 * n_without + WINDOW // REQUEST


@given(st.integers(0, 500), st.integers(0, 5000))
def test_the_decision_holds_with_more_misses_and_with_less_to_fetch(n_misses, n_missing):
    if worth(n_misses, n_missing):
        assert worth(n_misses + 1, n_missing)
        assert n_missing == 1 or worth(n_misses, n_missing - 1)


def test_larger_rests_need_more_misses():
    assert [worth(n, REQUEST) for n in range(4)] == [False, False, True, True]
    assert not worth(LEAST - 1, REQUEST + 1)
    assert worth(LEAST, REQUEST + 1)
    assert next(n for n in range(100) if worth(n, 180)) == 12
    assert not worth(1000, 0)


def test_a_slow_link_is_not_filled_for_few_reads():
    slow = LinkEstimate(wait_s=0.01, best_per_s=1e6, per_s=1e6, n_bodies=1)
    assert not worth(12, 180, slow), "going on costs a seventh of the time"
