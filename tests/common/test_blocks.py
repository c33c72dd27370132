"""Byte ranges to blocks and back."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.common.blocks import beginning, block_range, clip, covering, merge
from cachedfs.common.types import Range

sizes = st.integers(0, 5000)
block_sizes = st.integers(1, 700)


@given(st.one_of(st.none(), st.integers(-6000, 6000)), st.one_of(st.none(), st.integers(-6000, 6000)), sizes)
def test_clip_selects_the_bytes_that_a_slice_selects(start, stop, size):
    data = bytes(i % 251 for i in range(size))
    want = clip(start, stop, size)
    assert data[want.start : want.stop] == data[start:stop]


@given(sizes, sizes, block_sizes)
def test_covering_blocks_are_the_fewest_that_contain_the_range(start, length, block_size):
    want = Range(start, start + length)
    blocks = covering(want, block_size)
    if length == 0:
        assert len(blocks) == 0
        return
    assert blocks[0] * block_size <= want.start < (blocks[0] + 1) * block_size
    assert blocks[-1] * block_size < want.stop <= (blocks[-1] + 1) * block_size


bounds = st.one_of(st.none(), st.integers(-6000, 6000))


@given(bounds, bounds, block_sizes, sizes)
def test_the_start_of_a_slice_is_whole_blocks_within_its_limit(start, stop, block_size, most):
    want = beginning(start, stop, block_size=block_size, most=most)
    assert want.start % block_size == want.stop % block_size == 0
    assert block_size <= want.size <= max(most, block_size)
    assert want.start <= max(start or 0, 0) < want.start + block_size
    if stop is not None and stop >= 0:
        assert want.stop - block_size < max(stop, want.start + 1)


@given(st.integers(1, 5000), block_sizes)
def test_the_blocks_of_an_object_tile_it(size, block_size):
    ranges = [block_range(i, block_size, size) for i in covering(Range(0, size), block_size)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    assert all(r.size == block_size for r in ranges[:-1])


@given(st.integers(1, 3000), st.integers(1, 100), st.integers(1, 500), st.data())
def test_merged_requests_are_exactly_the_missing_blocks_within_the_limit(
    size, block_size, request_size, data
):
    n = -(-size // block_size)
    missing = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    requests = list(merge(missing, block_size, size=size, request_size=request_size))
    asked = [i for r in requests for i in covering(r, block_size)]
    assert asked == missing
    assert all(r.size <= max(block_size, request_size) for r in requests)
    assert all(r.start % block_size == 0 and (r.stop % block_size == 0 or r.stop == size) for r in requests)
    # Two adjacent requests are separate only because one would be too long.
    limit = max(1, request_size // block_size) * block_size
    assert all(a.stop < b.start or a.size == limit for a, b in itertools.pairwise(requests))
