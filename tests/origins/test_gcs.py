"""Google Cloud Storage over the simulated service: the contract, request counts, options, faults."""

import asyncio
import base64
import dataclasses
import gzip
import hashlib
import json
import socket
import threading
import traceback
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import aiohttp.web
import gcsfs.credentials
import google.auth.credentials
import google.auth.exceptions
import google.auth.identity_pool
import google.oauth2.credentials
import pytest
from google.auth.credentials import AnonymousCredentials

from cachedfs.common import checksums
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import (
    AccessDenied,
    IsAFolder,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
    OriginUnreachable,
    SignInRefused,
)
from cachedfs.origins.base import has_stale_answer
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.auth import known_token, make_gcsfs
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.request_slots import speculative
from cachedfs.origins.retry import RetryableError, RetryPolicy
from cachedfs.origins.tokens import TokenSource
from cachedfs.sim import Fault
from tests.origins.contract import CONCURRENCY, DATA, OriginContract, World, names, read
from tests.support import until

PATIENT = RetryPolicy(base_s=0.001, cap_s=0.001)  # a busy machine may seem to hang


@pytest.fixture
def server(cloud):
    yield cloud.server
    cloud.server.require_no_token()


@pytest.fixture
def make(server, opened):
    """Return a function that opens origins with these options."""

    def make_origin(policy=PATIENT, **options):
        return opened("gs", policy, **{"token": "anon", "endpoint_url": server.endpoint_url, **options})

    return make_origin


@pytest.fixture
async def origin(make):
    return make()


@pytest.fixture
def world(cloud):
    return World(cloud.bucket, cloud.put, cloud.delete)


@pytest.fixture
def path(world):
    world.put("a/b.bin", DATA)
    return f"{world.root}/a/b.bin"


async def test_credentials_that_are_found_late_are_used_by_the_next_request(make, monkeypatch):
    may_go_on = threading.Event()

    def make_late(options, loop):
        may_go_on.wait(120)
        monkeypatch.setattr("cachedfs.origins.gcs.origin.make_gcsfs", pytest.fail)
        return make_gcsfs(options, loop)

    monkeypatch.setattr("cachedfs.origins.gcs.origin.make_gcsfs", make_late)
    origin = make(RetryPolicy(reach_stale_s=0.01))
    has_stale_answer.set(True)
    with pytest.raises(OriginUnreachable, match=r"gs://: no credentials were found within 0\.01 s"):
        await origin.lookup("b/a")
    may_go_on.set()
    has_stale_answer.set(False)
    with pytest.raises(ObjectNotFound):
        await origin.lookup("b/a")


class TestContract(OriginContract):
    folder_read = ObjectNotFound  # to know that it is a folder would cost a request for every missing object


def kinds(server):
    return [request.kind for request in server.requests]


# Cost in requests
async def test_a_read_is_one_request(origin, server, path):
    pinned = await origin.lookup(path)
    server.reset()
    for want in (None, Range(0, 8 << 20), Range(3, 9), Suffix(10), Suffix(1 << 20)):
        await read(origin, path, want)
        await read(origin, path, want, pinned)
    await read(origin, path, Range(1 << 20, 2 << 20), pinned)
    assert kinds(server) == ["media"] * 11


async def test_a_lookup_is_one_request_or_two_if_there_is_no_object(origin, server, path, world):
    await origin.lookup(path)
    assert kinds(server) == ["metadata"]
    await origin.lookup(f"{world.root}/a")
    assert kinds(server) == ["metadata", "metadata", "list"]
    assert server.requests[-1].query["maxResults"] == "1"
    server.reset()
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"{world.root}/none")
    assert kinds(server) == ["metadata", "list"]
    server.reset()
    assert (await origin.lookup("")).kind == (await origin.lookup(world.root)).kind == "directory"
    assert kinds(server) == ["bucket"]


async def test_a_listing_is_one_request_per_thousand_objects(origin, server, world):
    for i in range(2001):
        world.put(f"many/{i:04}", b"")
    server.reset()
    assert len(await names(origin.list(f"{world.root}/many"))) == 2001
    assert len(await names(origin.list(world.root, deep=True))) == 2001
    assert kinds(server) == ["list"] * 6


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("cuts", [("b",), ("b-", "c"), ("a", "b", "z"), ("é",)])
async def test_a_listing_in_parts_is_the_same(origin, server, world, cuts, deep):
    for name in ("a", "b/1", "b/2", "b-", "b0", "c", "é", "é/x", "\U0001f600"):
        world.put(f"parts/{name}", b"")
    folder = f"{world.root}/parts"
    expected = [info async for info in origin.list(folder, deep=deep)]
    server.reset()
    cuts = [f"{folder}/{cut}" for cut in cuts]
    found = [info async for info in origin.list_again(folder, deep=deep, cuts=cuts)]
    assert sorted(info.path for info in found) == sorted(info.path for info in expected)
    assert kinds(server) == ["list"] * (len(cuts) + 1)


async def test_requests_in_flight_are_bounded(origin, server, path):
    await asyncio.gather(*(read(origin, path, Range(i, i + 5)) for i in range(30)))
    assert server.peak_concurrency <= CONCURRENCY


async def test_speculative_requests_have_their_own_limit(origin, server, path):
    await origin.lookup(path)
    server.fail(Fault(kind="media", stall_s=3600, times=None))  # so that all are in flight together
    ranges = [Range(i, i + 5) for i in range(4 * CONCURRENCY)]
    with speculative():
        reads = [asyncio.create_task(read(origin, path, each)) for each in ranges]
    await asyncio.to_thread(until, lambda: server.peak_concurrency >= 2 * CONCURRENCY)
    reads += [asyncio.create_task(read(origin, path, each)) for each in ranges]
    await asyncio.to_thread(until, lambda: server.peak_concurrency >= 3 * CONCURRENCY)
    for _ in range(100):  # time in which more would be sent
        await asyncio.sleep(0)
    for each in reads:
        each.cancel()
    await asyncio.wait(reads)
    assert server.peak_concurrency == 3 * CONCURRENCY


async def test_one_slot_is_enough(make, server, path):
    origin = make(slots=1)
    server.fail(Fault(kind="media", nth=2, close_after=100))
    for want in (Range(1 << 20, 2 << 20), None, Range(5, 5)):
        await read(origin, path, want)
    async with origin.read(path, None, None):
        await origin.call("pipe_file", path + ".new", b"x")  # a write does not wait for the open body


# Requests and answers
async def test_media_requests_use_closed_ranges_and_a_generation_condition(origin, server, path):
    pinned = await origin.lookup(path)
    server.reset()
    for want in (None, Range(5, 8), Suffix(7)):
        await read(origin, path, want, pinned)
    asked = server.requests
    assert [r.headers.get("range") for r in asked] == [None, "bytes=5-7", "bytes=-7"]
    assert all(r.headers["accept-encoding"] == "gzip" for r in asked)
    assert all(r.query["ifGenerationMatch"] == pinned.fingerprint for r in asked)
    assert not any("generation" in r.query for r in asked)


async def test_a_gzipped_object_is_read_as_stored_in_ranges(origin, server, world):
    stored = gzip.compress(DATA * 10)
    server.put(world.root, "z.json", stored, content_encoding="gzip")
    path = f"{world.root}/z.json"
    data, info, _, stop = await read(origin, path)
    assert (data, info.size, stop) == (stored, len(stored), len(stored))
    assert info.details["contentEncoding"] == "gzip"
    assert (await read(origin, path, Range(3, 50)))[0] == stored[3:50]
    assert (await read(origin, path, Suffix(9)))[0] == stored[-9:]
    assert await origin.lookup(path) == info


async def test_details_are_those_of_gcsfs(origin, path):
    info = await origin.lookup(path)
    shown = {**await origin.call("info", path)}
    from_both = ("generation", "metageneration", "md5Hash", "crc32c", "contentType", "storageClass")
    for name in (*from_both, "etag", "bucket", "updated", "timeCreated", "mtime", "ctime"):
        assert info.as_info()[name] == shown[name], name
    _, from_read, _, _ = await read(origin, path, Range(0, 1))
    assert [from_read.details[name] for name in from_both] == [shown[name] for name in from_both]
    assert abs(from_read.details["mtime"] - shown["mtime"]) < timedelta(seconds=1)
    assert from_read.details["md5Hash"] == base64.b64encode(hashlib.md5(DATA).digest()).decode()
    _, pinned_read, _, _ = await read(origin, path, Range(0, 1), info)
    assert pinned_read.details == info.details


async def test_folder_markers_are_no_objects(origin, world, path):
    for name in ("a/", "a/empty/", "a//odd"):
        world.put(name, b"")
    root = world.root
    assert await names(origin.list(f"{root}/a")) == {
        (path, "file"),
        (f"{root}/a/empty", "directory"),
        (f"{root}/a/", "directory"),  # from "a//odd", a folder without a name
    }
    assert await names(origin.list(root, deep=True)) == {
        (path, "file"),
        (f"{root}/a//odd", "file"),
        (f"{root}/a", "directory"),
        (f"{root}/a/empty", "directory"),
    }
    assert (await origin.lookup(f"{root}/a/empty")).kind == "directory"


async def test_buckets_are_listed_once_and_cannot_be_read(origin, world):
    found = await names(origin.list(""))
    assert (world.root, "directory") in found
    assert await names(origin.list_again("", cuts=["a", "b"])) == found  # which fails for a name twice
    with pytest.raises(IsAFolder, match=f"gs://{world.root}"):
        await read(origin, world.root)


async def test_every_form_of_a_path_means_the_same_object(origin, path):
    for form in (f"gs://{path}", f"gcs://{path}", f"/{path}", path):
        assert (await origin.lookup(form)).path == path
        assert (await read(origin, form, Range(0, 1)))[1].path == path


async def test_a_bucket_that_can_only_be_listed_is_a_folder(origin, server, world):
    server.fail(Fault(kind="bucket", status=403, times=None))
    assert (await origin.lookup(world.root)).kind == "directory"
    assert kinds(server) == ["bucket", "list"]


async def test_a_named_generation_is_read(make, server, path):
    origin = make(version_aware=True)
    generation = (await origin.lookup(path)).fingerprint
    assert (await read(origin, f"{path}#{generation}"))[0] == DATA
    assert server.requests[-1].query["generation"] == generation
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"{path}#1")


# Options: each reaches gcsfs, and our requests are like those of gcsfs
async def ask_all(origin, path):
    await read(origin, path)
    await origin.lookup(path)
    await names(origin.list(path))


@pytest.mark.parametrize(
    ("pays", "project"), [({"requester_pays": "me"}, "me"), ({"requester_pays": True, "project": "p"}, "p")]
)
async def test_a_project_that_pays_and_headers_go_with_each_request(make, server, path, pays, project):
    await ask_all(make(session_kwargs={"headers": {"x-goog-encryption-key": "abc"}}, **pays), path)
    assert kinds(server) == ["media", "metadata", "list"]
    assert {request.query["userProject"] for request in server.requests} == {project}
    assert {request.headers["x-goog-encryption-key"] for request in server.requests} == {"abc"}


async def test_a_proxy_is_used(make, server, path):
    origin = make(endpoint_url="http://storage.invalid", session_kwargs={"proxy": server.endpoint_url})
    with pytest.raises(Exception):  # noqa: B017 - the stand-in for a proxy only records
        await read(origin, path)
    assert server.requests[0].headers["host"] == "storage.invalid"


async def test_the_emulator_of_the_environment_is_used(make, server, path, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint_url)
    origin = make(endpoint_url=None)
    assert (await read(origin, path))[0] == DATA
    assert origin.identity == f"gs|{server.endpoint_url.removeprefix('http://')}|anon"


@pytest.mark.parametrize(
    "options", [{"requests_timeout": 0.3}, {"session_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.3)}}]
)
async def test_the_time_limits_of_the_user_apply(make, server, path, options):
    server.fail(Fault(kind="media", stall_s=600))
    patient = dataclasses.replace(PATIENT, stall_s=600)  # no other limit would end it
    assert (await read(make(patient, **options), path))[0] == DATA
    assert server.count(kind="media") >= 2  # a busy machine may be late once more


# Credentials
WORKLOAD = {
    "type": "external_account",
    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": "https://sts.googleapis.com/v1/token",
    "credential_source": {"file": "/var/run/token"},
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


class Renewable(google.auth.credentials.Credentials):
    """Credentials that get the next token of a list when they are refreshed."""

    def __init__(self, *tokens, expired=False):
        super().__init__()
        self.tokens, self.token = list(tokens[1:]), tokens[0]
        self.n_refreshed = 0
        self.expiry = _utc(-60) if expired else None

    def refresh(self, request):
        self.n_refreshed += 1
        if not self.tokens:
            raise google.auth.exceptions.RefreshError("no more tokens")
        self.token, self.expiry = self.tokens.pop(0), _utc(3600)


def _utc(seconds):
    return datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("token", "header"), [("ya29.raw", "Bearer ya29.raw"), (AnonymousCredentials(), None)]
)
async def test_a_raw_access_token_is_sent_and_anonymous_credentials_send_none(
    make, server, path, monkeypatch, token, header
):
    monkeypatch.setenv("FETCH_RAW_TOKEN_EXPIRY", "false")
    await ask_all(make(token=token), path)
    assert {request.headers.get("authorization") for request in server.requests} == {header}


@pytest.mark.parametrize("form", [str, Path, dict])
def test_workload_credentials_get_the_scope_of_gcsfs(home, form):
    (home / "key.json").write_text(json.dumps(WORKLOAD))
    found = known_token(WORKLOAD if form is dict else form("~/key.json"), "read_only")
    assert isinstance(found, google.auth.identity_pool.Credentials)
    assert found.scopes == ["https://www.googleapis.com/auth/devstorage.read_only"]


@pytest.mark.parametrize("form", [str, dict])
async def test_the_sign_in_of_a_user_is_renewed_before_use(make, server, path, home, monkeypatch, form):
    def refresh(self, request):
        self.token = f"for-{self.refresh_token}"

    monkeypatch.setattr(google.oauth2.credentials.Credentials, "refresh", refresh)
    # This function sends a raw token in newer releases of gcsfs.
    monkeypatch.setattr(gcsfs.credentials, "_get_creds_from_raw_token", pytest.fail, raising=False)
    token = {"refresh_token": "r", "client_id": "i", "client_secret": "s", "type": "authorized_user"}
    (home / "key.json").write_text(json.dumps(token))
    server.require_token("for-r")
    assert (await read(make(token=token if form is dict else "~/key.json"), path))[0] == DATA
    with pytest.raises(ValueError, match=r"'~/none.json': there is no such file"):
        await read(make(token="~/none.json"), path)


@pytest.mark.parametrize("form", [str, dict])
@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"type": "service_account", "private_key": "SECRET", "client_email": "a@b"}, "'service_account'"),
        ({"type": "something else", "token": "SECRET"}, "'something else'"),
        ({"installed": {"client_secret": "SECRET"}}, "lacks 'refresh_token'"),
    ],
)
async def test_damaged_credentials_raise_a_value_error_without_secrets(make, path, home, form, info, why):
    (home / "key.json").write_text(json.dumps(info))
    token = info if form is dict else "~/key.json"
    with pytest.raises(ValueError, match=rf"gs option token.*{why}") as caught:
        await read(make(token=token), path)
    assert ("~/key.json" in str(caught.value)) == (form is str)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


async def test_credentials_that_stay_refused_are_access_denied(make, server, path):
    server.require_token("other")
    for tokens, n_sent in (("one", "two", "three"), 3), (("same", "same"), 1):
        server.reset()
        with pytest.raises(SignInRefused, match=rf"gs://{path}.*Invalid Credentials"):
            await read(make(token=Renewable(*tokens)), path)
        assert [r.status for r in server.requests] == [401] * n_sent
    with pytest.raises(SignInRefused, match="no more tokens"):
        await read(make(token=Renewable("one")), path)


async def test_refused_anonymous_requests_say_what_to_do(make, server, path):
    server.require_token()
    for ask in (read(make(), path), make().lookup(path), names(make().list(path))):
        with pytest.raises(AccessDenied, match=r"Anonymous caller .*|token=\.\.\..*objectViewer") as caught:
            await ask
        assert not isinstance(caught.value, SignInRefused)  # other objects may be public
    assert len(server.requests) == 3


async def test_six_failures_are_origin_unavailable(origin, server, path):
    counted = []
    origin.on_request = lambda: counted.append(1)
    server.fail(Fault(kind="media", status=503, times=None))
    with pytest.raises(OriginUnavailable, match=rf"gs://{path}.*reading bytes 0 to 5.*6 tries in .* s.*503"):
        await read(origin, path, Range(0, 5))
    assert server.count() == len(counted) == 6


@pytest.fixture
def waits(monkeypatch):
    """Record the seconds between tries instead of waiting; their sum can serve as the clock."""
    sleep, waits = asyncio.sleep, list[float]()
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: waits.append(delay_s) or sleep(0))
    return waits


async def test_retry_after_is_respected(make, server, path, waits):
    server.fail(Fault(status=429, headers={"Retry-After": "9"}))
    await read(make(), path)
    assert max(waits) >= 9
    server.fail(Fault(status=503, headers={"Retry-After": "3600"}))
    with pytest.raises(OriginUnavailable, match="1 try"):
        await read(make(), path)


async def test_a_broken_body_is_resumed_where_it_broke_and_pinned(origin, server, path):
    server.fail(Fault(kind="media", close_after=1000))
    server.fail(Fault(kind="media", nth=2, close_after=500))
    data, info, _, _ = await read(origin, path, Range(10, 9000))
    assert data == DATA[10:9000]
    assert [(r.headers["range"], r.query.get("ifGenerationMatch")) for r in server.requests] == [
        ("bytes=10-8999", None),
        ("bytes=1010-8999", info.fingerprint),
        ("bytes=1510-8999", info.fingerprint),
    ]


@pytest.mark.parametrize("want", [None, Range(10, 20)])
async def test_an_html_page_is_never_taken_for_an_object(origin, server, path, want):
    known = await origin.lookup(path)
    server.fail(Fault(kind="media", status=200, html=True, times=None))
    for pinned in (None, known):
        with pytest.raises(
            OriginUnavailable, match=rf"gs://{path}.*6 tries.*of an object of \d+ bytes, not {len(DATA)}"
        ):
            await read(origin, path, want, pinned)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 416},  # although the object has the range
        *(
            {"status": 302, "headers": {"Location": to}}
            for to in ("http://[::1", "ftp://x/", "http://h:99999/")
        ),
    ],
)
async def test_an_answer_that_cannot_be_true_is_requested_again(origin, server, path, fault):
    server.fail(Fault(kind="media", **fault))
    assert (await read(origin, path, Range(3, 9)))[0] == DATA[3:9]


async def test_a_redirect_loop_fails_at_once(origin, server, path):
    server.fail(Fault(redirect="", times=None))
    with pytest.raises(OriginUnavailable, match=rf"gs://{path}.*1 try.*redirects in a loop"):
        await read(origin, path)
    assert server.count() <= 6


async def test_a_connection_that_breaks_without_an_answer_is_tried_six_times(origin, server, path):
    server.fail(Fault(close_before=True, reset=True, times=None))
    with pytest.raises(OriginUnavailable, match="6 tries"):
        await read(origin, path)
    assert server.count() == 6


# Complete bodies with wrong bytes
@pytest.mark.parametrize(
    ("want", "has_crc32c"), [(None, True), (Range(0, 8 << 20), False), (Suffix(1 << 20), True)]
)
async def test_a_whole_body_that_fails_its_checksum_is_requested_again(
    origin, server, path, monkeypatch, want, has_crc32c
):
    if not has_crc32c:
        monkeypatch.setattr(checksums, "has_crc32c", lambda: False)
    server.fail(Fault(kind="media", flip=7, times=2))
    data, info, _, _ = await read(origin, path, want)
    assert data == DATA
    pins = [request.query.get("ifGenerationMatch") for request in server.requests]
    assert pins == [None, info.fingerprint, info.fingerprint]


async def test_the_checksum_of_the_metadata_is_used_if_the_answer_has_none(origin, server, path):
    known = await origin.lookup(path)
    server.fail(Fault(kind="media", flip=7, headers={"x-goog-hash": ""}))
    assert (await read(origin, path, None, known))[0] == DATA
    assert server.count("media") == 2


async def test_a_refused_connection_is_retried_for_two_seconds(make, waits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        origin = make(RetryPolicy(clock=lambda: sum(waits)), endpoint_url=url)
        with pytest.raises(OriginUnavailable, match=r"gs://b/k: reading all bytes.*endpoint"):
            await read(origin, "b/k")
    assert 0 < sum(waits) <= RetryPolicy().connect_s


# Services that do less than Google's
class Proxy:
    """A misbehaving service: it gives the next of `answers` to requests for media, or `everything` to all requests."""

    def __init__(self):
        self.answers, self.asked, self.everything, self.url = [], [], None, ""

    async def handle(self, request):
        self.asked.append(request.path_qs)
        if self.everything:
            status, body = self.everything
            return aiohttp.web.Response(status=status, body=body, content_type="application/json")
        if "/download/" not in request.path:
            resource = {"kind": "storage#object", "name": "k", "generation": "7", "size": str(len(DATA))}
            return aiohttp.web.json_response(resource)
        return self.answers.pop(0)


@pytest.fixture
async def proxy(make):
    proxy = Proxy()
    server = aiohttp.web.Server(proxy.handle)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield proxy, make(endpoint_url=proxy.url)
    listener.close()
    await server.shutdown(0.1)


SEVEN = {"x-goog-generation": "7"}


def answered(body, status=206, headers=SEVEN):
    return aiohttp.web.Response(status=status, headers=headers, body=body)


async def test_a_wrong_content_range_is_never_used(proxy):
    service, origin = proxy
    wrong = {**SEVEN, "Content-Range": f"bytes 4-9/{len(DATA)}", "x-goog-stored-content-length": "²"}
    right = {**SEVEN, "Content-Range": f"bytes 3-8/{len(DATA)}"}
    service.answers += [answered(DATA[4:10], headers=wrong), answered(DATA[3:9])]
    service.answers += [answered(DATA[3:9], headers=right)]
    assert (await read(origin, "b/k", Range(3, 9)))[0] == DATA[3:9]


@pytest.mark.parametrize("want", [None, Range(3, 9)])
async def test_a_body_with_another_encoding_than_its_object_is_never_used(proxy, want):
    service, origin = proxy
    data, status = (DATA, 200) if want is None else (DATA[3:9], 206)
    headers = {**SEVEN, "Content-Range": f"bytes 3-8/{len(DATA)}", "Content-Length": str(len(data))}
    headers |= {"x-goog-stored-content-encoding": "identity", "x-goog-stored-content-length": str(len(DATA))}
    packed = gzip.compress(data)[: len(data)].ljust(len(data))
    if want is None:  # something decompressed it
        service.answers += [answered(DATA, 200, {**SEVEN, "x-goog-stored-content-length": "99"})]
    service.answers += [answered(packed, status, {**headers, "Content-Encoding": "gzip"})]
    service.answers += [answered(data, status, headers)]
    assert (await read(origin, "b/k", want))[0] == data
    assert service.answers == []


async def test_a_body_of_no_stated_length_is_used_only_if_it_ends_where_it_has_to(proxy):
    service, origin = proxy

    def chunked(data, status=206, **more):
        answer = answered(data, status, {**SEVEN, "Content-Range": f"bytes 3-8/{len(DATA)}", **more})
        answer.enable_chunked_encoding()
        return answer

    packed = gzip.compress(DATA[3:9])
    service.answers += [chunked(packed, **{"Content-Encoding": "gzip"})]
    service.answers += [chunked(DATA[3:stop]) for stop in (8, 10, 9)]
    assert (await read(origin, "b/k", Range(3, 9)))[0] == DATA[3:9]
    whole = {"status": 200, "x-goog-hash": f"md5={base64.b64encode(hashlib.md5(DATA).digest()).decode()}"}
    whole["x-goog-stored-content-length"] = str(len(DATA))
    service.answers += [chunked(DATA[:-1], **whole), chunked(DATA, **whole)]
    assert (await read(origin, "b/k"))[0] == DATA
    assert service.answers == []


async def test_a_hidden_generation_is_looked_up_and_then_pinned(proxy):
    service, origin = proxy
    part = {"Content-Range": f"bytes 3-8/{len(DATA)}"}
    service.answers += [answered(DATA[3:9], headers=part) for _ in range(3)]
    data, info, _, _ = await read(origin, "b/k", Range(3, 9))
    assert (data, info.fingerprint) == (DATA[3:9], "7")
    assert len(service.asked) == 3
    assert "ifGenerationMatch=7" in service.asked[2]
    pinned = ObjectInfo("b/k", size=len(DATA), fingerprint="7")
    assert (await read(origin, "b/k", Range(3, 9), pinned))[1].fingerprint == "7"
    assert len(service.asked) == 4
    service.answers += [answered(DATA, 200)]
    with pytest.raises(ObjectChanged, match="generation 7 was received instead of 6"):
        await read(origin, "b/k", None, dataclasses.replace(pinned, fingerprint="6"))


# Closing
async def test_aclose_closes_all_sessions(make, path):
    origin = make()
    await read(origin, path)
    await origin.call("pipe_file", path, b"x")
    inner, connection = await origin.filesystem(), await origin.connection()
    sessions = [connection.session, inner._session]
    assert not any(session.closed for session in sessions)
    await origin.aclose()
    assert all(session.closed for session in sessions)
    await origin.aclose()


@pytest.mark.parametrize("left_s", [290, 100])
async def test_a_valid_token_is_used_if_it_cannot_be_renewed(make, server, path, left_s):
    server.require_token("old")
    credentials = Renewable("old")
    credentials.expiry = _utc(left_s)
    origin = make(token=credentials)
    for _ in range(3):
        assert (await read(origin, path))[0] == DATA
    assert credentials.n_refreshed == 1  # not once for every request


async def test_callers_that_wait_for_the_same_renewal_share_its_failure():
    begun, go_on, n_asked = threading.Event(), threading.Event(), 0

    def refresh():
        nonlocal n_asked
        n_asked += 1
        begun.set()
        assert go_on.wait(120)
        raise RetryableError("no answer")

    tokens = TokenSource(lambda: types.SimpleNamespace(token=None, expiry=None), refresh, PATIENT)
    waiting = [asyncio.create_task(tokens.headers()) for _ in range(8)]
    await asyncio.to_thread(begun.wait, 60)
    go_on.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["no answer"] * 8
    assert n_asked == 1
    with pytest.raises(RetryableError):  # a later caller tries again
        await tokens.headers()
    assert n_asked == 2


def of_a_machine(status=None):
    answer = () if status is None else (types.SimpleNamespace(status=status, data=b"SECRET"),)
    error = google.auth.exceptions.RefreshError("of a metadata server")
    error.__cause__ = google.auth.exceptions.TransportError("the metadata server says", *answer)
    return error


OF_A_USER = google.auth.exceptions.RefreshError("internal_failure", {}, retryable=True)


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (OF_A_USER, True),
        *((of_a_machine(status), status in (None, 503, 429)) for status in (None, 503, 429, 404, 403)),
    ],
)
async def test_a_failing_token_server_is_retried_and_a_refusal_is_not(make, server, path, error, is_retried):
    class Failing(Renewable):
        def refresh(self, request):
            self.n_refreshed += 1
            if self.n_refreshed == 1:
                raise error
            super().refresh(request)

    server.require_token("new")
    credentials = Failing("old", "new", expired=True)
    if is_retried:
        assert (await read(make(token=credentials), path))[0] == DATA
        return
    with pytest.raises(SignInRefused, match="metadata server"):
        await read(make(token=credentials), path)
    assert credentials.n_refreshed == 1


async def test_a_missing_credentials_file_is_not_a_missing_object(make, monkeypatch):
    def connect(self, method):
        raise FileNotFoundError("/no/such/key.json")

    monkeypatch.setattr("gcsfs.credentials.GoogleCredentials.connect", connect)
    with pytest.raises(AccessDenied, match=r"gs://.*key\.json"):
        await make().lookup("b/k")


# Without requests
@pytest.mark.parametrize(
    ("status", "pinned", "kind"),
    [
        (404, False, RetryableError), (404, True, RetryableError), (412, True, ObjectChanged), (401, True, AccessDenied),
        (403, False, AccessDenied), (400, False, ValueError), (503, True, RetryableError), (599, False, RetryableError),
        (418, False, OSError),
    ],
)  # fmt: skip
def test_every_status_maps_to_an_error_or_a_retry(status, pinned, kind):
    request = HTTPRequest(url="", subject="gs://b/k", doing="reading", is_pinned=pinned)
    for body in (b"", b"<html>no</html>", b'{"error": "x"}', b"[1]", b"\xff", b'{"error": {}}'):
        verdict = api.failure(request, status, {}, body)
        assert isinstance(verdict, kind)
        if not isinstance(verdict, RetryableError):
            assert "gs://b/k" in str(verdict)
            assert "<html>" not in str(verdict)
    pays = b'{"error": {"message": "Bucket is a requester pays bucket but no user project provided."}}'
    assert status != 400 or "requester_pays=True" in str(api.failure(request, status, {}, pays))
    key = b"Permission denied on Cloud KMS key."
    assert status != 403 or "the key of Cloud KMS" in str(api.failure(request, status, {}, key))


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"error": {"code": 404, "message": "No such object: b/k"}}', {}),
        (b"No such object: b/k", {}),
        (b"The specified bucket does not exist.", {}),
        (b"Not Found", {"X-GUploader-UploadID": "x"}),
    ],
)
def test_only_the_404_of_the_service_means_absence(body, headers):
    assert api.is_absence(headers, body)
    for other in (b"", b"Not Found", b"<html>" + body, b"404 page not found", b'{"detail": "Not Found"}'):
        assert not api.is_absence({}, other)


# From a proxy, a load balancer, or a network with a login page.
OTHERS = {"a page": {"html": True}, "an empty body": {"body": ""}, "text": {"body": "404 page not found"}}


@pytest.mark.parametrize("fault", OTHERS.values(), ids=OTHERS)
async def test_a_404_of_a_proxy_is_not_an_absence(origin, server, path, fault):
    server.fail(Fault(status=404, times=None, **fault))
    about = rf"gs://{path}.* failed after 6 tries.*Something between, such as a proxy"
    for ask in (origin.lookup(path), read(origin, path), read(origin, path, Range(0, 9))):
        with pytest.raises(OriginUnavailable, match=about):
            await ask
    with pytest.raises(OriginUnavailable, match="Something between"):
        await names(origin.list(path.rpartition("/")[0]))
    server.heal()
    server.fail(Fault(status=404, **fault))
    assert (await read(origin, path))[0] == DATA


async def test_an_unclear_404_of_media_is_decided_by_the_json_api(origin, server, path):
    server.fail(Fault(kind="media", status=404, body="Not Found\n", times=None))  # an emulator
    with pytest.raises(ObjectNotFound, match=path):
        await read(origin, f"{path}-none")
    with pytest.raises(OriginUnavailable, match=path):
        await read(origin, path)


OF_THE_SERVICE = {"kind": "storage#object", "name": "a/b.bin", "generation": "1"}


@pytest.mark.parametrize(
    "answer",
    [
        "{}", "[]", "<html>", '{"kind": "drive#fileList"}', json.dumps(OF_THE_SERVICE),
        json.dumps({**OF_THE_SERVICE, "size": "-5"}), json.dumps({**OF_THE_SERVICE, "size": "5", "name": "c"}),
        '{"kind": "storage#objects", "nextPageToken": "x"}', '{"kind": "storage#objects", "items": [{"name": "other"}]}',
    ],
)  # fmt: skip
async def test_json_that_the_service_never_sends_is_retried(origin, server, path, answer):
    server.fail(Fault(status=200, body=answer, times=None))
    bucket = path.partition("/")[0]
    for ask in (origin.lookup(path), origin.lookup(bucket), names(origin.list(f"{bucket}/a"))):
        with pytest.raises(OriginUnavailable, match=f"gs://{bucket}"):
            await ask


@pytest.mark.parametrize("status", [200, 404])
async def test_the_answer_of_another_host_is_not_an_absence(origin, server, proxy, status):
    there, _ = proxy
    body = b'{"error": {"code": 404}}' if status == 404 else b'{"kind": "storage#objects"}'
    there.everything = status, body
    server.fail(Fault(redirect=there.url, times=None))
    for ask in (names(origin.list("b/d")), origin.lookup("b/d/k"), read(origin, "b/d/k")):
        with pytest.raises(OriginUnavailable, match=r"gs://b/d"):
            await ask


async def test_an_empty_page_token_is_the_end(origin, server, world):
    page = {
        "kind": "storage#objects",
        "items": [{"name": "d/x", "generation": "1", "size": "0"}],
        "nextPageToken": "",
    }
    server.fail(Fault(kind="list", status=200, body=json.dumps(page)))
    assert await names(origin.list(f"{world.root}/d")) == {(f"{world.root}/d/x", "file")}
    assert kinds(server) == ["list"]
