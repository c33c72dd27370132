"""The network model of the simulated services: delays, bandwidth and quota, on a simulated clock."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.sim.network import PROFILES, Link, Profile

MB = 1e6
TABLE = PROFILES["table"]


def table_link() -> Link:
    return Link(stream_rate=60 * MB, total_rate=200 * MB)


def test_24_parallel_streams_share_the_total_rate() -> None:
    link = table_link()
    streams = [link.open(8 << 20, now=0.0) for _ in range(24)]
    ends = [link.due(stream, 8 << 20, now=0.0) for stream in streams]
    assert ends == pytest.approx([(192 << 20) / (200 * MB)] * 24)


@pytest.mark.parametrize("size", [1000, math.inf])
def test_a_body_keeps_its_share_until_it_is_closed(size: float) -> None:
    link = Link(stream_rate=100.0, total_rate=100.0)
    closed, other = link.open(size, now=0.0), link.open(100, now=0.0)
    assert link.due(other, 100, now=0.0) == pytest.approx(2.0)
    link.close(closed, now=1.0)
    assert link.due(other, 100, now=1.0) == pytest.approx(1.5)


def test_a_client_that_paused_catches_up_by_at_most_one_window() -> None:
    link = table_link()
    stream = link.open(100 * MB, now=0.0)
    link.slip(stream, 6 * MB, now=1.0)  # 60 MB could have been sent by then, 6 MB were
    left = 94 * MB - (2 << 20)
    assert link.due(stream, 100 * MB, now=1.0) == pytest.approx(1.0 + left / (60 * MB))


@given(
    jobs=st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 2)), min_size=1, max_size=12),
    total_rate=st.sampled_from([1e6, 5e6, 1e8]),
)
def test_no_schedule_exceeds_the_rates_or_leaves_the_link_idle(
    jobs: list[tuple[int, float]], total_rate: float
) -> None:
    link = Link(stream_rate=2e6, total_rate=total_rate)
    starts = sorted(start for _, start in jobs)
    streams = [
        (size, start, link.open(size, now=start)) for (size, _), start in zip(jobs, starts, strict=True)
    ]
    ends = [link.due(stream, size, now=starts[-1]) for size, _, stream in streams]
    for (size, start, _), end in zip(streams, ends, strict=True):
        assert end >= starts[-1] or size / 2e6 <= starts[-1] - start
        assert max(end - start, starts[-1] - start) >= size / min(2e6, total_rate) * (1 - 1e-9)
    # Served one after the other at the slowest share, nothing takes longer than this.
    assert max(ends) <= starts[-1] + sum(size for size, *_ in streams) / min(2e6, total_rate) + 1e-6


def test_the_profile_table_has_a_median_latency_of_45_ms() -> None:
    for kind in ("media", "metadata"):
        rng = random.Random(0)
        waits = [TABLE.first_byte(kind, new_connection=False, rng=rng).wait_s for _ in range(5000)]
        assert statistics.median(waits) == pytest.approx(0.045, rel=0.03)
        assert statistics.stdev(map(math.log, waits)) == pytest.approx(0.35, rel=0.03)


def test_a_profile_survives_json() -> None:
    assert Profile.resolve(TABLE.to_json()) == TABLE
