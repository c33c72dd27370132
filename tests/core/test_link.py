"""The number of concurrent speculative requests: enough to fill the link, few enough not to delay reads."""

import pytest

from cachedfs.core.speculation import FEWEST, LinkEstimate

MiB = 1 << 20


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
    assert link == LinkEstimate()._replace(wait_s=pytest.approx(0.05 + 0.45 / 8), n=1, waited_s=0.5)
