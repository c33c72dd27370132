"""What the endpoint answers: objects, conditions, listings, errors, pages of folders; how often the origin is asked."""

import re
import threading
import time
import types

import fsspec
import pytest

from cachedfs.errors import AccessDenied, OriginUnavailable, QuotaExceeded
from cachedfs.server import bucket, endpoint, worker
from tests.server.served import KEYS, basic, target
from tests.support import MiB, WebServer, noise

DATA = noise(20 * MiB + 7, seed=1)


def names(answer):
    """Return the keys and the common prefixes of a listing."""
    text = answer.body.decode()
    return re.findall(r"<Key>(.*?)</Key>", text), re.findall(r"<CommonPrefixes><Prefix>(.*?)</Prefix>", text)


# Objects.


def test_ranges_have_the_bytes_of_the_object(origin, served):
    origin.put("b/top/a", DATA)
    n = len(DATA)
    for text, start, stop in [
        ("bytes=-9", n - 9, n),
        ("bytes=5-9", 5, 10),
        (f"bytes={MiB - 1}-{9 * MiB}", MiB - 1, 9 * MiB + 1),
    ]:
        answer = served.get("/data/a", {"Range": text})
        assert (answer.status, answer.body == DATA[start:stop]) == (206, True)
        assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{n}"
    assert served.get("/data/a", {"Range": "bytes=0-1,5-6"}).status == 200
    refused = served.get("/data/a", {"Range": f"bytes={n}-"})
    assert (refused.status, refused.code) == (416, "InvalidRange")
    assert refused.headers["Content-Range"] == f"bytes */{n}"


def test_the_first_range_of_an_unknown_object_asks_for_these_bytes_only(origin, served):
    origin.put("b/top/a", DATA)
    assert served.get("/data/a", {"Range": "bytes=-8"}).body == DATA[-8:]
    assert len(origin.log) == 1


def test_head_says_what_get_says(origin, served):
    origin.put("b/top/a", b"hello")
    head, got = served.ask("HEAD", "/data/a"), served.get("/data/a")
    del head.headers["Date"], got.headers["Date"]
    assert (head.status, head.headers, head.body) == (200, got.headers, b"")
    part = served.ask("HEAD", "/data/a", {"Range": "bytes=1-2"})
    assert (part.status, part.headers["Content-Length"]) == (206, "2")
    assert part.headers["Content-Range"] == "bytes 1-2/5"
    assert served.ask("HEAD", "/data/none")[::2] == (404, b"")


def test_an_etag_names_the_version(origin, served):
    origin.put("b/top/a", b"old")
    etag = served.get("/data/a").headers["ETag"]
    assert re.fullmatch(r'"[0-9a-f]{32}-1"', etag)
    assert served.get("/data/a", {"If-Match": etag}).body == b"old"
    assert served.get("/data/a", {"If-None-Match": etag})[::2] == (304, b"")
    assert served.get("/data/a", {"If-Match": '"x"'}).code == "PreconditionFailed"
    assert served.get("/data/a", {"If-Range": '"x"', "Range": "bytes=1-"}).body == b"old"
    assert served.get("/data/a", {"If-Range": etag, "Range": "bytes=1-"}).body == b"ld"


def test_a_replaced_object_is_read_anew_unless_its_version_is_pinned(origin, served):
    new = noise(len(DATA), seed=2)
    origin.put("b/top/a", DATA)
    etag = served.get("/data/a", {"Range": "bytes=0-9"}).headers["ETag"]
    origin.put("b/top/a", new)
    pinned = served.get("/data/a", {"Range": f"bytes={12 * MiB}-", "If-Match": etag})
    assert (pinned.status, pinned.code) == (412, "PreconditionFailed")
    answer = served.get("/data/a", {"Range": f"bytes={12 * MiB}-"})
    assert answer.body == new[12 * MiB :]
    assert answer.headers["ETag"] != etag


def test_an_object_that_is_replaced_while_it_is_sent_breaks_the_connection(origin, served, monkeypatch):
    origin.put("b/top/a", DATA)
    etag = served.get("/data/a", {"Range": "bytes=0-9"}).headers["ETag"]
    monkeypatch.setattr("cachedfs.server.bucket.AHEAD", MiB)
    is_replaced = threading.Event()

    def replace(*_):
        if not is_replaced.is_set():
            is_replaced.set()
            origin.put("b/top/a", noise(len(DATA), seed=2))

    pieces = type(served.endpoint._buckets["data"]).pieces

    async def replacing(self, entry, want, download):
        async for piece in pieces(self, entry, want, download):
            yield piece
            replace()

    monkeypatch.setattr(type(served.endpoint._buckets["data"]), "pieces", replacing)
    head, _, body = served.raw(served.signed_bytes("GET", "/data/a")).partition(b"\r\n\r\n")
    assert etag.encode() in head
    assert len(body) < len(DATA)
    assert DATA.startswith(body)


def test_a_name_as_it_is_stored(cloud, serving):
    served = serving({"data": cloud.url("top")})
    for key in ("ö c+%.txt", "a//b", "z/", "a%2Fb", "*[1]?", "'\"<&>"):
        cloud.put(f"top/{key}", key.encode())
        answer = served.get(target("data", key))
        assert (answer.status, answer.body) == (200, key.encode())
        assert served.ask("HEAD", target("data", key)).status == 200


def test_type_and_encoding_as_stored(cloud, serving):
    served = serving({"data": cloud.url("top")})
    cloud.put("top/a.csv", b"1", content_type="text/csv")
    for answer in (served.get("/data/a.csv"), served.ask("HEAD", "/data/a.csv")):
        assert answer.headers["Content-Type"] == "text/csv"
        assert "sandbox" in answer.headers["Content-Security-Policy"]


def test_a_path_that_the_origin_reads_as_another_one_is_no_key(tmp_path, serving):
    (tmp_path / "top").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "top/a").write_bytes(b"1")
    served = serving({"data": f"cachedfs::file://{tmp_path}/top"})
    assert served.get("/data/a").body == b"1"
    for path in ("/data//a", "/data/a/", "/data/b//a"):
        assert served.get(path).code == "NoSuchKey"
    for path in ("/data/../secret", "/data/%2e%2e/secret", "/data/..%2fsecret", "/data/./a"):
        assert served.get(path).code == "InvalidURI"
    assert served.get(f"/data/{tmp_path}/secret").code == "NoSuchKey"
    for prefix in ("../", "./", "a/../../", "%00/"):
        assert names(served.get(f"/data?list-type=2&prefix={prefix}")) == ([], [])
        assert names(served.get(f"/data?list-type=2&delimiter=/&prefix={prefix}")) == ([], [])


def test_a_path_that_a_web_server_takes_for_another_one_is_no_key(tmp_path, serving):
    (tmp_path / "top").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "top/a%20b").write_bytes(b"1")
    with WebServer(tmp_path) as web:
        served = serving({"data": f"cachedfs::{web.url}/top"})
        assert served.get("/data/a%252520b").body == b"1"
        for key in ("%252e%252e/secret", ".%252e/secret", "x/%252E%252E/%252e%252e/secret"):
            assert served.get(f"/data/{key}").code == "NoSuchKey"


# Errors.


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OriginUnavailable("gone"), 503, "ServiceUnavailable"),
        (AccessDenied("not yours"), 403, "AccessDenied"),
        (QuotaExceeded("used up"), 503, "SlowDown"),
        (ValueError("?"), 500, "InternalError"),
    ],
)
def test_errors_of_the_origin(origin, served, error, status, code, caplog):
    origin.put("b/top/a", b"1")
    origin.fail_with = dict.fromkeys(range(10), error)
    answer = served.get("/data/a?x-id=secret")
    assert (answer.status, answer.code) == (status, code)
    assert [f"GET /data/a: {code}" in line for line in caplog.messages].count(True) == 1
    assert "secret" not in caplog.text


def test_only_a_real_absence_is_404(origin, served):
    origin.put("b/top/folder/a", b"1")
    assert served.get("/data/none")[0] == 404
    assert (served.get("/data/folder").code, served.get("/data/folder/").code) == ("NoSuchKey", "NoSuchKey")
    assert served.get("/other/a").code == "NoSuchBucket"


def test_offline_serves_what_is_cached(origin, serving):
    origin.put("b/top/a", b"1")
    origin.put("b/top/b", b"2")
    assert serving({"data": "cachedfs::gs://b/top"}).get("/data/a").body == b"1"
    served = serving({"data": "cachedfs::gs://b/top"}, offline=True)
    assert served.get("/data/a").body == b"1"
    assert (served.get("/data/b").status, served.get("/data/b").code) == (503, "ServiceUnavailable")


def test_a_write_is_refused_before_its_body_is_sent(origin, serving, monkeypatch):
    monkeypatch.setattr(worker, "ENDS_WITHIN_S", 0.1)  # for which the rest of the body is awaited
    served = serving({"data": "cachedfs::gs://b/top"})
    lines = f"Content-Length: {1 << 40}", "Expect: 100-continue", "Content-Encoding: aws-chunked"
    answer = served.raw(served.signed_bytes("PUT", "/data/a", *lines)).decode()
    assert answer.startswith("HTTP/1.1 405 ")
    assert "<Code>MethodNotAllowed</Code>" in answer
    assert "Connection: close" in answer


def test_too_many_requests_at_once(served, origin, monkeypatch):
    origin.put("b/top/a", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "MOST_REQUESTS", 0)
        assert (served.get("/data/a").status, served.get("/data/a").code) == (503, "SlowDown")
    assert served.get("/data/a").status == 200


# Listings.


@pytest.fixture
def listed(cloud, serving):
    """A bucket with some keys."""
    for key in ("a.txt", "a/1", "a/2", "a/b/3", "é", "z"):
        cloud.put(f"top/{key}", key.encode())
    return serving({"data": cloud.url("top")})


def test_listing(listed):
    answer = listed.get("/data?list-type=2")
    assert names(answer) == (["a.txt", "a/1", "a/2", "a/b/3", "z", "é"], [])
    text = answer.body.decode()
    assert "<Size>5</Size>" in text
    assert f"<ETag>{listed.get('/data/a.txt').headers['ETag']}</ETag>".replace('"', "&#34;") in text
    assert names(listed.get("/data?list-type=2&prefix=a/")) == (["a/1", "a/2", "a/b/3"], [])
    assert names(listed.get("/data?list-type=2&delimiter=/&prefix=a/")) == (["a/1", "a/2"], ["a/b/"])
    assert names(listed.get("/data?list-type=2&delimiter=b&prefix=a/")) == (["a/1", "a/2"], ["a/b"])
    assert names(listed.get("/data?list-type=2&prefix=none/&delimiter=/")) == ([], [])
    assert names(listed.get("/data?list-type=2&start-after=a/2")) == (["a/b/3", "z", "é"], [])
    assert names(listed.get("/data?list-type=2&encoding-type=url&prefix=%C3%A9")) == (["%C3%A9"], [])
    assert names(listed.get("/data?list-type=2&max-keys=0")) == ([], [])
    assert listed.get("/data?list-type=2&max-keys=x").code == "InvalidArgument"
    assert listed.get("/data?list-type=2&encoding-type=x").code == "InvalidArgument"


@pytest.mark.parametrize("version", ["list-type=2", "list-type=1"])
def test_pages(listed, version, cloud):
    found, more = [], ""
    while True:
        answer = listed.get(f"/data?{version}&max-keys=2&delimiter=/{more}")
        found += [*names(answer)[0], *names(answer)[1]]
        text = answer.body.decode()
        if "<IsTruncated>false</IsTruncated>" in text:
            break
        token = re.search("<(?:NextContinuationToken|NextMarker)>(.*?)<", text)[1]
        more = f"&{'continuation-token' if version.endswith('2') else 'marker'}={token.replace('%', '%25')}"
    assert found == ["a.txt", "a/", "z", "é"]
    assert cloud.asked() == ["list"]


def test_pages_are_of_one_moment_unless_something_is_written_here(cloud, serving, clock, monkeypatch):
    served, fs = serving({"data": cloud.url("top")}), fsspec.url_to_fs(cloud.url())[0]
    for key in "abcd":
        cloud.put(f"top/{key}", b"1")
    first = served.get("/data?list-type=2&max-keys=2")
    token = re.search("<NextContinuationToken>(.*?)<", first.body.decode())[1]
    cloud.put("top/bb", b"1")
    clock(61)  # beyond `max_age`
    assert names(served.get(f"/data?list-type=2&continuation-token={token}"))[0] == ["c", "d"]
    with monkeypatch.context() as later:
        later.setattr(bucket, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + 901))
        assert names(served.get(f"/data?list-type=2&continuation-token={token}"))[0] == ["bb", "c", "d"]
    fs.pipe_file(cloud.path("top/cc"), b"1")
    assert names(served.get(f"/data?list-type=2&continuation-token={token}"))[0] == ["bb", "c", "cc", "d"]


def test_one_level_of_drive_asks_for_one_folder(drive, serving):
    for key in ("a", "b/c", "b/d/e"):
        drive.put(f"top/{key}", b"1")
    served = serving({"mine": drive.url("top")})
    assert names(served.get("/mine?delimiter=/")) == (["a"], ["b/"])
    assert drive.asked().count("list") == 2  # the folder by its name, and what is in it


def test_what_has_no_size_is_not_listed(drive, serving):
    drive.put("top/a", b"1")
    drive.server.document(f"{drive.name}/top/document", "text")
    served = serving({"mine": drive.url("top")})
    assert names(served.get("/mine"))[0] == ["a"]
    refused = served.get("/mine/document")
    assert (refused.status, refused.code) == (403, "InvalidObjectState")


def test_buckets(serving, origin):
    served = serving({"one": "cachedfs::gs://b/1", "two": "cachedfs::gs://b/2"})
    assert re.findall("<Name>(.*?)</Name>", served.get("/").body.decode()) == ["one", "two"]
    assert b"<LocationConstraint " in served.get("/one?location").body
    assert served.ask("HEAD", "/two").headers["x-amz-bucket-region"] == "us-east-1"
    assert served.ask("HEAD", "/none").status == 404
    assert served.get("/1", {"Host": f"one.localhost:{served.port}"}).code == "NoSuchKey"
    assert origin.log[-1][1] == "b/1/1"


# Plain HTTP.


def test_a_folder_is_a_page_for_browsers(listed):
    auth = basic(":".join(KEYS))
    page = listed.get("/data/", auth, signed=False)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert re.findall('href="(.*?)"', page.body.decode()) == ["a.txt", "a/", "z", "%C3%A9"]
    assert re.findall('href="(.*?)"', listed.get("/", auth, signed=False).body.decode()) == ["data/"]
    assert listed.get("/data/a", auth, signed=False).headers["Location"] == "/data/a/"
    assert listed.get("/data/none/", auth, signed=False).status == 404
    assert listed.get("/data/a/1", auth, signed=False).body == b"a/1"


# Read-ahead and memory.


def test_a_large_body_is_requested_ahead_and_sent_in_pieces(origin, served):
    origin.put("b/top/a", DATA)
    assert served.get("/data/a", {"Range": "bytes=0-9"}).body == DATA[:10]
    assert served.get("/data/a").body == DATA
    assert origin.most_bodies > 1
