"""Logs: the loggers, one line for every request, and no secrets."""

import functools
import logging
import pathlib
import re

import pytest

from cachedfs.common.logging import PACKAGES, public_text, public_url
from cachedfs.errors import CachedFSError
from cachedfs.filesystem import CachedDriveFileSystem, CachedFileSystem, CachedGCSFileSystem
from cachedfs.origins.retry import RetryPolicy
from tests.support import ROOT, MiB, forget, noise

LINE = re.compile(
    r"(?P<method>[A-Z]+) (?P<url>http\S+)(?: bytes=(?P<first>\d+)-(?P<last>\d+))?: (?P<status>\w+), "
    r"(?P<bytes>\d+) bytes in (?P<took>[\d.]+) s, begun after (?P<wait>[\d.]+) s"
)


@pytest.fixture
def request_lines(caplog):
    """Return a function that returns the log lines of all requests so far."""
    caplog.set_level(logging.DEBUG, logger="cachedfs")

    def lines():
        said = [r.getMessage() for r in caplog.records if r.name == "cachedfs.origins"]
        return [found for text in said if (found := LINE.fullmatch(text))]

    return lines


def test_every_package_has_one_logger():
    sources = (path.read_text(encoding="utf-8") for path in pathlib.Path(ROOT / "cachedfs").rglob("*.py"))
    names = {name for text in sources for name in re.findall(r"getLogger\(([^)]*)\)", text)}
    assert names <= {f'"cachedfs.{package}"' for package in PACKAGES} | {
        '"cachedfs"',
        'f"cachedfs.{_package}"',
    }
    page = (ROOT / "docs/watching.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `cachedfs\.(\w+)` \|", page, re.MULTILINE) == list(PACKAGES)


def test_every_request_is_one_line_and_none_at_the_default_level(cloud, request_lines, caplog):
    data = cloud.put("key", noise(3 * MiB))
    fs = CachedGCSFileSystem(request_size=MiB)
    for _ in range(2):
        assert fs.cat_file(cloud.path("key")) == data
    forget()  # no request is in flight
    asked = [request for request in cloud.server.requests if request.kind == "media"]
    lines = request_lines()
    assert len(lines) == len(asked) == 3
    assert {line["status"] for line in lines} == {"206"}
    assert sum(int(line["bytes"]) for line in lines) == 3 * MiB
    ranges = sorted((int(line["first"]), int(line["last"]) + 1) for line in lines)
    assert ranges == [(at * MiB, (at + 1) * MiB) for at in range(3)]
    assert all(line["url"].endswith(f"/b/{cloud.bucket}/o/key") for line in lines)
    assert all(float(line["wait"]) <= float(line["took"]) for line in lines)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_request_without_an_answer_is_a_line_with_the_error(request_lines, monkeypatch):
    monkeypatch.setattr(
        "cachedfs.origins.fsspec_origin.RetryPolicy", functools.partial(RetryPolicy, connect_s=0.0)
    )
    fs = CachedFileSystem(target_protocol="gs", gs={"token": "anon", "endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(CachedFSError):
        fs.cat_file("bucket/key")
    assert {line["status"] for line in request_lines()} == {"ClientConnectorError"}


def test_requests_of_drive_are_lines_too(drive, request_lines):
    drive.put("file", noise(MiB))
    fs = CachedDriveFileSystem()
    fs.cat_file(drive.path("file"))
    fs.pipe_file(drive.path("new"), b"new")
    forget()
    lines = request_lines()
    assert len(lines) == len(drive.server.requests)
    assert {"GET", "POST"} <= {line["method"] for line in lines}
    assert not [line["url"] for line in lines if "?" in line["url"]]


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://me:word@host:1/a/b?sig=x#part", "https://host:1/a/b"),
        ("cachedfs::gs://bucket/a?b#1.txt", "cachedfs::gs://bucket/a?b#1.txt"),
        ("bucket/what?", "bucket/what?"),
        ("zip://報告：一/x.txt", "zip://報告：一/x.txt"),
    ],
)
def test_public_url(url, public):
    assert public_url(url) == public


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://h/a?sig=x&y=z: not found", "https://h/a?...: not found"),
        ("read 'cachedfs::https://me:w@h/a?q='x'&sig=y', then", "read 'cachedfs::https://h/a?...', then"),
        ("is it here? no", "is it here? no"),
        ("gs://b/a#1: not found", "gs://b/a#1: not found"),
        ("ftp://u:p@h/a#b (1 try)", "ftp://h/a?... (1 try)"),
    ],
)
def test_public_text(text, public):
    assert public_text(text) == public
