"""The number of concurrent speculative requests: enough to fill the link, few enough not to delay reads."""

import math
import random

import pytest

from cachedfs.fetch.fetch_queue import COURTESY, FEWEST, LinkEstimate, LinkTotals
from cachedfs.sim.network import Link as Fluid

MiB = 1 << 20
LINKS = [  # bytes a second of one stream and of all, seconds to the first byte
    (60e6, 200e6, 0.05),
    (60e6, 200e6, 0.22),
    (60e6, 60e6, 0.05),
    (200e6, 400e6, 0.04),
    (25e6, 60e6, 0.45),
    (200e6, 1200e6, 0.04),
]


def fill(stream: float, total: float, wait_s: float, *, n: int, size: int = 8 * MiB):
    """Simulate n requests over a shared link; return bytes per second, the estimate, the totals and the numbers of bodies."""
    rng, link, fluid, now = random.Random(1), LinkEstimate(), Fluid(stream, total), 0.0
    timed = LinkTotals()
    waiting: list[tuple[float, float]] = []
    bodies: list[tuple[object, float, float]] = []
    counts, n_done = [], 0
    while n_done < n:
        n_flying = len(waiting) + len(bodies)
        if n_flying == 0 or ((n_flying + 1) * link.load(size) <= link.n_bodies + 1 and n_flying < 16):
            late_s = wait_s * math.exp(rng.normalvariate(0, 0.35))
            waiting.append((now + late_s, late_s))
            continue
        for at, late_s in [each for each in waiting if each[0] <= now]:
            waiting.remove((at, late_s))
            bodies.append((fluid.open(size, now), now, late_s))
        for body in [each for each in bodies if fluid.due(each[0], size, now) <= now]:
            bodies.remove(body)
            n_others = len(waiting) + len(bodies)
            link = link.after(wait_s=body[2], size=size, took_s=now - body[1], n_others=n_others, most=16)
            timed = timed.after(wait_s=body[2], size=size, took_s=now - body[1], n_others=n_others)
            n_done += 1
        counts.append(len(bodies))
        now += 0.004
    return n * size / now, link, timed, counts[len(counts) // 2 :]


@pytest.mark.parametrize(("stream", "total", "wait_s"), LINKS)
def test_speculative_requests_fill_the_link(stream, total, wait_s):
    rate, link, timed, _ = fill(stream, total, wait_s, n=400)
    assert rate > 0.9 * total
    assert timed.per_s == pytest.approx(total, rel=0.15)
    assert link.wait_s == pytest.approx(wait_s, rel=0.5)


@pytest.mark.parametrize(("stream", "total", "wait_s"), [LINKS[0], LINKS[1], LINKS[4]])
def test_a_block_that_a_reader_waits_for_is_hardly_later(stream, total, wait_s):
    _, _, _, counts = fill(stream, total, wait_s, n=150)
    n = sum(counts) / len(counts)
    alone_s = wait_s + MiB / stream
    beside_s = wait_s + MiB / min(stream, total / (n + 1))
    assert beside_s <= COURTESY * alone_s or n <= FEWEST + 1


def test_small_objects_are_bounded_by_slots_and_not_by_the_link():
    assert 16 * LinkEstimate().load(64 << 10) < FEWEST


def test_bodies_received_alone_do_not_change_the_number_allowed():
    link = LinkEstimate()
    for _ in range(100):
        link = link.after(wait_s=0.05, size=8 * MiB, took_s=0.01, n_others=0, most=16)
    assert link.n_bodies == FEWEST
    assert link.best_per_s > 500e6


def test_small_bodies_only_measure_the_latency_of_the_link():
    link = LinkEstimate().after(wait_s=0.5, size=1000, took_s=0.001, n_others=9, most=16)
    assert link == LinkEstimate()._replace(wait_s=pytest.approx(0.05 + 0.45 / 8))
