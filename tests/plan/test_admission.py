"""Which blocks go first, and how much room there is: for all numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cachedfs.model import Bounds
from cachedfs.plan.admission import Candidate, allowance, automatic_size, oldest, victims

ages = st.lists(st.integers(0, 1000), max_size=100)
sizes = st.lists(st.integers(1, 1000), max_size=50)
amounts = st.one_of(st.integers(0, 10**9), st.floats(0, 1))
bytes_ = st.integers(0, 10**9)


def candidates(ages):
    return [Candidate(row, age, 1) for row, age in enumerate(ages)]


@given(ages, st.integers(1, 16))
def test_nothing_left_out_is_older_than_what_is_chosen(ages, share):
    given = candidates(ages)
    chosen = oldest(given, share=share)
    left = set(given) - set(chosen)
    assert len(chosen) == -(-len(given) // share)
    assert all(old.age >= young.age for old in chosen for young in left)


@given(ages)
def test_the_longest_untouched_comes_first_and_of_equals_the_older_row(ages):
    chosen = oldest(candidates(ages), share=1)
    assert chosen == sorted(chosen, key=lambda each: (-each.age, each.row))


@given(ages, st.randoms())
def test_the_order_in_which_candidates_come_does_not_matter(ages, random):
    given = candidates(ages)
    shuffled = given.copy()
    random.shuffle(shuffled)
    assert oldest(given) == oldest(shuffled)


@given(sizes, st.integers(-10, 60000))
@settings(deadline=None)  # a slow machine is not a wrong answer
def test_victims_free_what_is_needed_and_not_one_more_goes(sizes, need):
    queue = [Candidate(row, 0, size) for row, size in enumerate(sizes)]
    chosen = victims(queue, need)
    assert chosen == queue[: len(chosen)]
    freed = sum(each.size for each in chosen)
    assert freed >= need or chosen == queue
    assert not chosen or freed - chosen[-1].size < need


def test_a_queue_is_read_no_further_than_needed():
    queue = iter([Candidate(1, 9, 10), Candidate(2, 8, 10), Candidate(3, 7, 10)])
    assert [each.row for each in victims(queue, 15)] == [1, 2]


@given(amounts, amounts, bytes_, bytes_, bytes_, bytes_, bytes_)
def test_what_is_allowed_passes_neither_bound_nor_disk(
    size, keep_free, total, free, used, overhead, automatic
):
    bounds = Bounds(size, keep_free)
    allowed = allowance(bounds, total=total, free=free, used=used, overhead=overhead, automatic=automatic)
    most = size * total if isinstance(size, float) else size
    kept = int(keep_free * total) if isinstance(keep_free, float) else keep_free
    assert allowed >= 0
    assert allowed == 0 or allowed + overhead <= most
    assert allowed == 0 or free - (allowed - used) >= kept


@given(bytes_, bytes_)
def test_the_automatic_bound_is_used_when_none_was_given(free, used):
    automatic = automatic_size(free=free, used=used)
    allowed = allowance(
        Bounds(None, 0), total=free + used, free=free, used=used, overhead=0, automatic=automatic
    )
    assert allowed == automatic == (free + used) // 2
