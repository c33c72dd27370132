"""The summary of events: exact sums, spans of time, folders."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.common.event_log import COUNTS
from cachedfs.report.event_reader import EventRecords, RequestEvent, SampleEvent, WaitEvent
from cachedfs.report.summary import by_folder, merged, size_of, split, summary_of


def request(at, wait_s, took_s, size=0, **given):
    values = {"status": 206, "ahead": False, "refused": False} | given
    return RequestEvent(at=at, wait_s=wait_s, took_s=took_s, bytes=size, **values)


def sample(at, over_s, **counts):
    return SampleEvent(at, over_s, dict.fromkeys(COUNTS, 0) | counts)


def test_waiting_is_divided_by_what_was_in_progress():
    # Sent at 10, answered at 12, complete at 15; a reader waited from 11 to 18, and one from 13 to 14 as well.
    records = EventRecords(
        # The second is sent while bytes of the first arrive: that is no waiting for an answer.
        requests=(request(10.0, 2.0, 5.0, size=3_000_000), request(12.0, 2.0, 2.5, size=1)),
        waits=(WaitEvent(11.0, "b/k", 7.0), WaitEvent(13.0, "b/k", 1.0)),
        samples=(sample(20.0, 10.0, bytes_fetched=3_000_000),),
    )
    summary = summary_of(records)
    waited = summary.waited
    assert summary.elapsed_s == 10.0
    assert waited == pytest.approx({"for_answers_s": 1.0, "for_bytes_s": 3.0, "for_others_s": 3.0})
    assert summary.longest == (("b/k", 2, 8.0),)


def test_bins_contain_the_counts_of_their_time():
    records = EventRecords(
        requests=(request(0.0, 1.0, 3.0, size=400), request(2.0, 2.0, 2.0, status=503)),
        waits=(WaitEvent(0.0, "b/k", 1.0),),
        samples=(sample(2.0, 1.0, bytes_fetched=400, misses=4), sample(4.0, 2.0, hits=8)),
    )
    summary = summary_of(records, n_bins=4)
    bins = summary.bins
    assert bins.width_s == 1.0
    assert bins.counts["bytes_fetched"] == pytest.approx([0, 400, 0, 0])
    assert bins.counts["hits"] == pytest.approx([0, 0, 4, 4])
    assert bins.asking == pytest.approx([1, 0, 1, 1])
    assert bins.coming == pytest.approx([0, 1, 1, 0])
    assert bins.waited == pytest.approx([1, 0, 0, 0])
    assert (summary.n_requests, summary.n_failed, summary.bytes_answered) == (2, 1, 400)
    assert summary.bound_per_s == 400.0
    assert summary_of(dataclasses.replace(records, bytes_per_s=500), n_bins=4).bound_per_s == 500


amounts = st.floats(0.001, 100)


@given(
    st.lists(st.tuples(st.floats(0, 100), amounts, st.integers(0, 10**9)), min_size=1, max_size=20),
    st.integers(1, 70),
)
def test_bins_keep_the_total_number_of_bytes(samples, n_bins):
    records = EventRecords(samples=[sample(at, over_s, bytes_fetched=n) for at, over_s, n in samples])
    summary = summary_of(records, n_bins=n_bins)
    total = sum(n for _, _, n in samples)
    assert summary.counts["bytes_fetched"] == total
    assert sum(summary.bins.counts["bytes_fetched"]) == pytest.approx(total)


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))), max_size=8
)


def seconds_of(spans):
    return {second for start, stop in spans for second in range(start, stop)}


@given(spans, spans, spans)
def test_spans_are_sets_of_time(waits, first, second):
    united = merged(waits)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(united))
    some, bytes_, answers = map(seconds_of, (united, first, second))
    assert some == seconds_of(waits)
    parts = some & bytes_, some & answers - bytes_, some - bytes_ - answers
    assert split(united, first, second) == tuple(map(len, parts))


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="format 2"):
        EventRecords().add_process(['{"kind":"process","at":0,"format":2,"pid":1}'])


def test_lines_that_are_cut_or_foreign_are_counted():
    whole = '{"kind":"wait","at":1.0,"path":"b/k","took_s":2.0}'
    records = EventRecords()
    records.add_process(["nonsense", "[]", whole[:-1], '{"kind":"wait"}', '{"kind":"later"}', whole])
    assert (records.n_cut, records.waits) == (4, [WaitEvent(1.0, "b/k", 2.0)])


@pytest.mark.parametrize(
    ("held", "most", "found"),
    [
        ([], 8, []),
        ([("b/a/1", 5), ("b/a/2", 5), ("b/c/1", 7)], 8, [("b/a", 10), ("b/c", 7)]),
        ([("b/a/1", 5), ("b/c/1", 7)], 1, [("b", 12)]),
        ([("a/1", 1), ("b/1", 2), ("c/1", 3)], 2, [("c", 3), ("2 others", 3)]),
        ([("alone", 1)], 8, [("alone", 1)]),
        ([("b/top", 1), ("b/deep/er/1", 2)], 8, [("b/deep/er", 2), ("b", 1)]),
    ],
)
def test_by_folder(held, most, found):
    held = [CachedPath(path, n, 1, None, None) for path, n in held]
    assert [(name, size_of(some)) for name, some in by_folder(held, most)] == found
