"""The admission rule, and the sizes of the parts of a cache."""

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.cache.access_stats import BlockAccess
from cachedfs.cache.disk import DiskSpace
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.space import admits, allowance, staging_size
from cachedfs.common.types import CacheBounds

amounts = st.one_of(st.integers(0, 10**9), st.floats(0, 1))
bytes_ = st.integers(0, 10**9)


def history(uses=1, is_new=False):
    return BlockAccess(0, uses, is_new)


@given(st.integers(0, 1 << 32), st.integers(0, 255), st.integers(0, 1 << 32))
def test_what_is_new_is_always_let_in(idle, uses, gap):
    assert admits(history(is_new=True), history(uses), idle=idle, longest_gap=gap)


@given(st.integers(0, 1 << 32), st.integers(0, 255), st.integers(0, 1 << 32))
def test_what_only_passes_through_replaces_nothing(idle, uses, gap):
    assert not admits(BlockAccess(0, 255, True, passes=True), history(uses), idle=idle, longest_gap=gap)


@given(st.integers(0, 1 << 31), st.integers(0, 255), st.integers(1, 1 << 31))
def test_of_two_used_equally_often_the_old_one_stays_until_it_is_forgotten(idle, uses, gap):
    assert admits(history(uses), history(uses), idle=idle, longest_gap=gap) == (idle > 1.25 * gap)


@given(st.integers(0, 1 << 31), st.integers(0, 255))
def test_nothing_is_forgotten_before_anything_was_used_again(idle, uses):
    assert not admits(history(uses), history(uses), idle=idle, longest_gap=0)


@given(st.integers(0, 255), st.integers(0, 255))
def test_what_is_used_clearly_more_often_is_let_in(uses, more):
    assert admits(history(more), history(uses), idle=0, longest_gap=0) == (more > uses + 2)


@given(st.integers(0, 1 << 50))
def test_staging_is_at_most_half_and_at_least_what_one_file_reads_ahead(allowed):
    size = staging_size(allowed)
    assert 0 <= 2 * size <= allowed
    assert size == allowed // 2 or (size >= 64 << 20 and 100 * size >= allowed - 100)


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
