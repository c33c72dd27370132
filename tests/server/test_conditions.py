"""Ranges and conditions on versions."""

from datetime import UTC, datetime

import pytest
from multidict import CIMultiDict

from cachedfs.common.types import Range
from cachedfs.server.conditions import is_not_modified, range_in, slice_of
from cachedfs.server.s3_errors import S3Error

ETAG, AT = '"abc-1"', datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BEFORE, THEN, AFTER = (f"Fri, 02 Jan 2026 03:04:0{second} GMT" for second in (4, 5, 6))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-0", (0, 1)), ("bytes=2-4", (2, 5)), ("bytes=2-", (2, 10)), ("bytes=2-99999999999999999999999", (2, 10)),
        ("bytes=-3", (7, 10)), ("bytes=-30", (0, 10)), ("Bytes= 2-4 ", (2, 5)),
    ],
)  # fmt: skip
def test_a_range(text, expected):
    assert range_in(slice_of(text), 10) == Range(*expected)


@pytest.mark.parametrize(
    "text",
    [
        None, "", "bytes=", "bytes=-", "bytes=4-2", "bytes=a-b", "rows=1-2", "bytes=0-1,4-5", "bytes=0x1-2", "0-1",
        "bytes=--1", "bytes=1-2-3", "bytes=١-٢", f"bytes=0-{'9' * 5000}",
    ],
)  # fmt: skip
def test_what_is_no_single_range_is_ignored_as_s3_does(text):
    assert slice_of(text) is None


@pytest.mark.parametrize(
    ("text", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-9", 0), ("bytes=-1", 0)]
)
def test_a_range_without_bytes_is_refused(text, size):
    with pytest.raises(S3Error) as refused:
        range_in(slice_of(text), size)
    assert refused.value.status == 416
    assert refused.value.headers == {"Content-Range": f"bytes */{size}"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"If-Match": ETAG}, False),
        ({"If-Match": "*"}, False),
        ({"If-Match": 'abc-1, "x"'}, False),
        ({"If-Match": '"x"'}, 412),
        ({"If-Match": ETAG, "If-Unmodified-Since": BEFORE}, False),
        ({"If-Unmodified-Since": BEFORE}, 412),
        ({"If-Unmodified-Since": THEN}, False),
        ({"If-None-Match": ETAG}, True),
        ({"If-None-Match": 'W/"abc-1"'}, True),
        ({"If-None-Match": "*"}, True),
        ({"If-None-Match": '"x", "y"'}, False),
        ({"If-None-Match": '"x"', "If-Modified-Since": AFTER}, False),
        ({"If-Modified-Since": BEFORE}, False),
        ({"If-Modified-Since": THEN}, True),
        ({"If-Modified-Since": "yesterday"}, False),
        ({"If-Match": ETAG, "If-None-Match": ETAG}, True),
    ],
)
def test_conditions(headers, expected):
    if expected == 412:
        with pytest.raises(S3Error) as refused:
            is_not_modified(CIMultiDict(headers), ETAG, AT)
        assert refused.value.status == 412
    else:
        assert is_not_modified(CIMultiDict(headers), ETAG, AT) is expected
