"""When fetching the rest of an object pays off."""

from hypothesis import given
from hypothesis import strategies as st

from cachedfs.core.object_history import LEAST, is_rest_worth_it
from cachedfs.core.speculation import LinkEstimate

B, REQUEST = 1 << 20, 8
LINK = LinkEstimate()


def worth(n_misses, n_missing, link=LINK):
    return is_rest_worth_it(n_misses, n_missing, block_size=B, blocks_per_request=REQUEST, link=link)


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
