"""Fingerprints from what an origin states, and times that are too recent to be evidence."""

from datetime import UTC, datetime

import pytest

from cachedfs.origins.evidence import (
    evidence_of,
    fingerprint,
    is_recent,
    is_same_evidence,
    unique_fingerprint,
)

AT = 1767312000  # 2026-01-02
DAY = datetime(2026, 1, 2, tzinfo=UTC)
NAIVE = DAY.replace(tzinfo=None)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"size": 3, "generation": "17", "etag": "x", "mtime": 1.0}, "generation:17-3"),
        ({"size": 3, "ETag": '"abc"', "LastModified": 1}, 'etag:"abc"-3'),
        ({"size": 3, "md5Hash": "q==", "mtime": 1.0}, "hash:q==-3"),
        ({"size": 3, "mtime": 1.5, "ino": 9, "created": 1.0}, "time:1.5-3-9"),
        ({"size": 0, "last_modified": DAY}, "time:1767312000.0-0"),
        ({"size": None, "etag": "x"}, None), ({"etag": "x"}, None), ({"size": 3}, None),
        ({"size": 3, "etag": "", "mtime": None}, None),
    ],
)  # fmt: skip
def test_the_fingerprint_is_the_strongest_evidence(info, expected):
    assert evidence_of(info) == fingerprint(info, AT + 60) == expected


# What the filesystems that fsspec knows report of a file, beside its name and type.
REPORTED = {
    "abfs": ({"etag": "0x8DE", "last_modified": DAY, "content_settings": {}}, "etag:0x8DE-3"),
    "dropbox": ({}, None),
    "ftp": ({"modify": "20260102000000", "unix.mode": "0644"}, None),
    "git": ({"hex": "9ae9e8", "mode": "100644"}, "hash:9ae9e8-3"),
    "github": ({"sha": "9ae9e8", "mode": "100644"}, "hash:9ae9e8-3"),
    "hf": ({"blob_id": "9ae9e8", "lfs": None, "xet_hash": None, "last_commit": None}, "hash:9ae9e8-3"),
    "hf, a large file": ({"blob_id": "9ae9e8", "lfs": {"sha256": "b6d1"}, "xet_hash": "76d4"}, "hash:b6d1-3"),
    "hf, a bucket": ({"xet_hash": "76d4", "mtime": DAY}, "hash:76d4-3"),
    "lakefs": ({"checksum": "b6d1", "mtime": AT, "content-type": "text/plain"}, "hash:b6d1-3"),
    "oss": ({"LastModified": AT}, f"time:{AT}-3"),
    "pelican": ({"modified": NAIVE}, f"time:{AT}.0-3"),
    "sftp": ({"mtime": DAY, "time": AT, "uid": 0}, f"time:{AT}.0-3"),
    "webdav": ({"etag": "v1", "modified": DAY, "created": None}, "etag:v1-3"),
    "webdav, a weak ETag": ({"etag": 'W/"v1"', "modified": DAY}, f"time:{AT}.0-3"),
    "webhdfs": ({"modificationTime": AT * 1000 + 500, "fileId": 16387}, f"time:{AT}.5-3-16387"),
}


@pytest.mark.parametrize(("info", "expected"), REPORTED.values(), ids=REPORTED)
def test_what_a_filesystem_reports_is_evidence_of_a_version(info, expected):
    assert fingerprint({"size": 3, **info}, AT + 60) == expected


@pytest.mark.parametrize(
    "unknown", [0, 0.0, datetime(1970, 1, 1, tzinfo=UTC), "Thu, 01 Jan 1970 00:00:00 GMT"]
)
def test_the_start_of_1970_is_no_time(unknown):
    assert evidence_of({"size": 3, "mtime": unknown}) is None
    assert evidence_of({"size": 3, "mtime": unknown, "ino": 7}) is not None  # a local file may have that time


@pytest.mark.parametrize(
    ("modified", "now_s", "is_once"),
    [
        (AT, AT, True), (AT, AT + 1.9, True), (AT, AT + 2, False), (AT + 9, AT, True),
        (AT + 0.5, AT + 0.51, False), (DAY, AT + 1, True),
        (NAIVE, AT + 1, True), (NAIVE, AT + 2, False),
        ("Fri, 02 Jan 2026 00:00:00 GMT", AT + 1, True), ("Fri, 02 Jan 2026 00:00:00 GMT", AT + 2, False),
        ("2026-01-02T00:00:00+00:00", AT + 1, True), ("no time", AT, False),
    ],
)  # fmt: skip
def test_a_time_that_is_seconds_old_is_evidence_once(modified, now_s, is_once):
    info = {"size": 3, "modified": modified}
    one, other = fingerprint(info, now_s), fingerprint(info, now_s)
    assert (one != other) == is_once
    assert is_same_evidence(one, other)
    assert not is_same_evidence(one, fingerprint({**info, "size": 4}, now_s))


def test_the_time_of_a_local_file_is_as_coarse_as_a_tick():
    assert is_recent(AT + 0.5, AT + 0.51, has_inode=True)
    assert not is_recent(AT + 0.5, AT + 0.53, has_inode=True)
    info = {"size": 3, "mtime": AT + 0.5, "ino": 7}
    assert fingerprint(info, AT + 0.51) != fingerprint(info, AT + 0.51)
    assert fingerprint(info, AT + 0.53) == "time:1767312000.5-3-7"


def test_stronger_evidence_does_not_age():
    info = {"size": 3, "etag": "x", "mtime": AT}
    assert fingerprint(info, AT) == "etag:x-3"
    assert not is_same_evidence(fingerprint(info, AT), None)
    assert is_same_evidence(None, None)
    assert unique_fingerprint("x") != unique_fingerprint("x")
