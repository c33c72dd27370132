"""Eviction and admission rules: which blocks go first, and the sizes of the parts of a cache."""

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.cache.admission import (
    AccessHistory,
    admits,
    aging_of,
    allowance,
    oldest,
    staging_size,
    window_of,
)
from cachedfs.cache.disk import DiskSpace
from cachedfs.cache.index.schema import Totals
from cachedfs.common.types import CacheBounds

ages = st.lists(st.integers(0, 1000), max_size=100)
amounts = st.one_of(st.integers(0, 10**9), st.floats(0, 1))
bytes_ = st.integers(0, 10**9)


def candidates(ages):
    return dict(enumerate(ages))


@given(ages, st.integers(1, 16))
def test_nothing_left_out_is_older_than_what_is_chosen(ages, share):
    given = candidates(ages)
    chosen = oldest(given, share=share)
    left = set(given) - set(chosen)
    assert len(chosen) == -(-len(given) // share)
    assert all(given[old] >= given[young] for old in chosen for young in left)


@given(ages)
def test_the_longest_untouched_comes_first_and_of_equals_the_older_row(ages):
    chosen = oldest(candidates(ages), share=1)
    assert chosen == sorted(chosen, key=lambda row: (-ages[row], row))


@given(ages, st.randoms())
def test_the_order_in_which_candidates_come_does_not_matter(ages, random):
    given = candidates(ages)
    shuffled = list(given.items())
    random.shuffle(shuffled)
    assert oldest(given) == oldest(dict(shuffled))


def claimant(idle=0, uses=1, is_new=False):
    return AccessHistory(idle, uses, is_new)


@given(st.integers(0, 1 << 32), st.integers(0, 255), st.integers(0, 1 << 32))
def test_what_is_new_is_always_let_in(idle, uses, gap):
    assert admits(claimant(is_new=True), claimant(idle, uses), longest_gap=gap)


@given(st.integers(0, 1 << 32), st.integers(0, 255), st.integers(0, 1 << 32))
def test_what_only_passes_through_replaces_nothing(idle, uses, gap):
    assert not admits(AccessHistory(0, 255, True, passes=True), claimant(idle, uses), longest_gap=gap)


@given(st.integers(0, 1 << 31), st.integers(0, 255), st.integers(1, 1 << 31))
def test_of_two_used_equally_often_the_old_one_stays_until_it_is_forgotten(idle, uses, gap):
    assert admits(claimant(uses=uses), claimant(idle, uses), longest_gap=gap) == (idle > 1.25 * gap)


@given(st.integers(0, 1 << 31), st.integers(0, 255))
def test_nothing_is_forgotten_before_anything_was_used_again(idle, uses):
    assert not admits(claimant(uses=uses), claimant(idle, uses), longest_gap=0)


@given(st.integers(0, 255), st.integers(0, 255))
def test_what_is_used_clearly_more_often_is_let_in(uses, more):
    assert admits(claimant(uses=more), claimant(uses=uses), longest_gap=0) == (more > uses + 2)


@given(st.integers(0, 1 << 50))
def test_staging_is_at_most_half_and_at_least_what_one_file_reads_ahead(allowed):
    size = staging_size(allowed)
    assert 0 <= 2 * size <= allowed
    assert size == allowed // 2 or (size >= 64 << 20 and 100 * size >= allowed - 100)


@given(st.integers(0, 1 << 24))
def test_windows_follow_the_number_of_blocks_that_fit(n_blocks):
    assert 5 <= window_of(n_blocks) <= aging_of(n_blocks) <= 31
    if n_blocks >= 128:
        assert 0.7 < (1 << window_of(n_blocks)) / (n_blocks / 4) < 1.42
        assert 0.7 < (1 << aging_of(n_blocks)) / (10 * n_blocks) < 1.42


@given(amounts, amounts, bytes_, bytes_, bytes_, bytes_, bytes_)
def test_what_is_allowed_passes_neither_bound_nor_disk(size, keep_free, total, free, used, present, growth):
    bounds, overhead = CacheBounds(size, keep_free), present + growth
    allowed = allowance(bounds, DiskSpace(total, free), Totals(bytes=used), overhead, growth)
    most = size * total if isinstance(size, float) else size
    kept = int(keep_free * total) if isinstance(keep_free, float) else keep_free
    assert allowed >= 0
    assert allowed == 0 or allowed + overhead <= most
    assert allowed == 0 or free - (allowed - used) - growth >= kept


@given(bytes_, bytes_, bytes_)
def test_the_automatic_bound_is_set_once_and_used_when_none_was_given(free, used, later):
    totals, bounds = Totals(bytes=used), CacheBounds(None, 0)
    space = DiskSpace(free + used, free)
    assert allowance(bounds, space, totals, 0, 0) == (free + used) // 2
    allowed = allowance(bounds, DiskSpace(later, later), totals, 0, 0)
    assert allowed == min(totals.automatic_size, used + later) or free + used < 2
