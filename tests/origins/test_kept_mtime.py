"""The modification time that an object keeps in its metadata."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.origins.kept_mtime import kept_mtime_ns, mtime_metadata

S = 10**9


@given(st.integers(-62135596800 * S, 253402300799 * S))
def test_a_time_is_read_as_it_was_kept(at_ns):
    metadata = mtime_metadata(at_ns)
    assert kept_mtime_ns({"metadata": metadata}) == at_ns
    assert kept_mtime_ns({"metadata": {**metadata, "mtime": "unknown"}}) == at_ns // S * S


@pytest.mark.parametrize("at_ns", [None, -62135596801 * S, 253402300800 * S, 10**40])
def test_a_time_that_has_no_text_is_not_kept(at_ns):
    assert mtime_metadata(at_ns) == {}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"mtime": "1970-01-01T00:00:01Z"}, S),
        ({"mtime": "1970-01-01T00:00:01.5Z"}, 3 * S // 2),
        ({"mtime": "1970-01-01T00:00:01.1234567899Z"}, S + 123456789),
        ({"mtime": "1970-01-01T01:00:01+01:00", "goog-reserved-file-mtime": "7"}, S),
        ({"mtime": "1970-13-01T00:00:01Z", "goog-reserved-file-mtime": "-7"}, -7 * S),
        ({"mtime": "0001-01-01T00:00:00+01:00"}, -62135600400 * S),
        ({"mtime": "1.5"}, None),
        ({"mtime": 5}, None),
        ({"goog-reserved-file-mtime": "1e9"}, None),
        ({"goog-reserved-file-mtime": "9" * 13}, None),
        ({}, None),
        (None, None),
        ("mtime", None),
    ],
)
def test_times_of_other_writers(metadata, expected):
    assert kept_mtime_ns({"metadata": metadata}) == expected
    assert kept_mtime_ns({"mtime": "1970-01-01T00:00:01Z"}) is None  # the origin's own
