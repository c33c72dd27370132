"""Answers that no service sends: every call of every origin gives right bytes or an error that names the URL."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import itertools
import json
import logging
import random
import traceback
import types
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import gcsfs.retry
import hypothesis
import pytest
from fsspec.core import url_to_fs
from hypothesis import strategies as st
from yarl import URL

from cachedfs.common.types import Range, Suffix
from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.origins import http
from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.gcs.origin import GCSOrigin
from cachedfs.origins.retry import RetryableError, RetryPolicy
from cachedfs.sim.drive import DriveService
from cachedfs.sim.gcs import GCSService
from cachedfs.sim.messages import Call, Response
from cachedfs.sim.network import PROFILES, Network
from cachedfs.sim.stored_objects import DataBody
from tests.fakes import FakeClock
from tests.support import WebServer, forget, make_old

DATA, NEW = random.Random(1).randbytes(3000), random.Random(2).randbytes(2000)
POLICY = RetryPolicy(tries=3, base_s=0.0, patience_s=0.0, media_s=3600.0, metadata_s=3600.0)
DEEP = "<deep>"


@dataclasses.dataclass(frozen=True)
class Odd:
    """What is odd about the answers to requests of one `kind`."""

    kind: str
    times: int | None = None  # None: always
    status: int | None = None  # in place of an answer of the service, which does nothing then
    body: bytes | None = None
    headers: tuple[tuple[str, str | None], ...] = ()  # None: without it
    place: int | str | None = None  # of a value in the JSON of the answer: its number, or its name
    value: Any = "absent"  # in this place
    framing: str = "length"  # how the end of the body is told: or "chunked", "close"
    is_packed: bool = False  # by a proxy, with gzip
    cut: int | None = None  # bytes that arrive


class OddServer:
    """Answers as a simulated service does, but for what is odd."""

    def __init__(self):
        self.service: Any = None
        self.odd = Odd("")
        self.kinds: set[str] = set()
        self._n_odd = 0

    def begin(self, service, odd):
        self.service, self.odd, self._n_odd, self.kinds = service, odd, 0, set()

    @contextlib.asynccontextmanager
    async def running(self):
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"

    async def _answer(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ", 2)
            headers = {
                name.lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:-2])
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path, _, query = target.partition("?")
            writer.write(
                self._reply(Call(method, path, dict(parse_qsl(query, keep_blank_values=True)), headers, body))
            )
            writer.close()
            await writer.wait_closed()

    def _reply(self, call):
        route = self.service._route(call)
        self.kinds.add(route.kind)
        odd = self.odd
        is_odd = odd.kind == route.kind and (odd.times is None or self._n_odd < odd.times)
        if not is_odd:
            return raw(Odd(""), self.service.answer(call, route), call)
        self._n_odd += 1
        if odd.status is not None:
            return raw(odd, Response(odd.status, {}, DataBody(odd.body or b"")), call)
        return raw(odd, self.service.answer(call, route), call)


def raw(odd, answer, call):
    """Return the bytes of an answer with all that is odd about it."""
    body = bytes(answer.body.read(0, answer.body.size))
    headers: dict[str, str | None] = {**answer.headers}
    if odd.place is not None:
        body = changed(body, odd.place, odd.value)
    if odd.body is not None:
        body = odd.body
    if odd.is_packed:
        body = gzip.compress(body, mtime=0)
        headers["Content-Encoding"] = "gzip"
    if odd.framing == "length":
        headers["Content-Length"] = str(answer.body.size if call.method == "HEAD" else len(body))
    elif odd.framing == "chunked":
        headers["Transfer-Encoding"] = "chunked"
        if body and call.method != "HEAD":
            body = b"%x\r\n%b\r\n" % (len(body), body)
        body += b"0\r\n\r\n"
    headers |= {**dict(odd.headers), "Connection": "close"}
    lines = [f"{name}: {text}" for name, text in headers.items() if text is not None]
    head = "\r\n".join([f"HTTP/1.1 {answer.status} Odd", *lines, "", ""]).encode("utf-8", "surrogatepass")
    whole = head if call.method == "HEAD" or answer.status in (204, 304) else head + body
    return whole if odd.cut is None else whole[: odd.cut]


def changed(body, place, value):
    """Return JSON with another value in one place, or without it; other bodies as they are."""
    try:
        found = json.loads(body)
    except ValueError:
        return body
    places = [each for each in places_of(found) if each[1] == place or isinstance(place, int)]
    if not places and (isinstance(place, int) or value == "absent"):
        return body
    holder, name = places[place % len(places) if isinstance(place, int) else 0] if places else (found, place)
    if value == "absent":
        del holder[name]
    else:
        holder[name] = value
    return json.dumps(found).replace(f'"{DEEP}"', "[" * 40_000 + "]" * 40_000).encode()


def places_of(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in list(pairs):
        yield value, name
        yield from places_of(item)


# What is odd
VALUES = [
    "absent", DEEP, None, True, -5, 0.5, 10**25, "", "²", "-5", "x" * 30, "9" * 30, "\ud800", "/", [], {}, [None], {"id": 5},
    "0001-01-01T00:00:00+23:59", "token",
]  # fmt: skip
BODIES = [
    b"", b"{}", b"[]", b"null", b"5", b"{", b"\xff\xfe", b"\0" * 10, b"[" * 65536, b'{"a":' * 20_000, b"<html>welcome</html>",
    b"No such object: b/k", json.dumps({"error": {"code": [], "message": {}}}).encode(), b'{"error": "invalid"}',
    json.dumps({"error": {"code": 200, "message": "invalid", "errors": [5]}}).encode(),
    json.dumps({"error": {"code": 404, "errors": [{"reason": "notFound"}]}}).encode(),
    json.dumps({"error": {"code": "²", "message": "requester pays", "errors": [{"reason": []}]}}).encode(),
]  # fmt: skip
HEADERS = {
    "Retry-After": ["²", "-5", "9" * 30, "1e9", "Sun, 06 Nov 1994 08:49:37 +9999999", "Sun, 99 Nov 9999 99:99:99 GMT", "é"],
    "Content-Range": [None, "bytes 0-9/10", "bytes 5-3/3000", "bytes ²-3/*", f"bytes 0-{'9' * 5000}/*", "bytes */3000", "é"],
    "Content-Length": ["0", "²", "-5", "10", "9" * 30],
    "Content-Encoding": ["gzip", "deflate", "br", "²", "identity"],
    "Content-Type": [None, "text/html", "application/json; charset=é", "²"],
    "Location": [None, "", "http://[::1", "http://a b/", "//", "ftp://x/", "mailto:x", "http://127.0.0.1:99999/", "http://é..x/",
                 "http://user:pw@/", "²", "/", "http://" + "a" * 300 + "/"],
    "Range": [None, "bytes=0-9", "bytes=0-99999999", "²", f"bytes=0-{'9' * 5000}"],
    "x-goog-generation": [None, "²", "5"],
    "x-goog-metageneration": [None, "²"],
    "x-goog-stored-content-length": [None, "²", "-5", "9" * 30, "10"],
    "x-goog-stored-content-encoding": [None, "gzip", "²"],
    "x-goog-hash": [None, "crc32c=²", "=", "md5=AAAA"],
    "X-GUploader-UploadID": [None, "x"],
}  # fmt: skip
STATUSES = [
    200, 201, 204, 206, 301, 302, 304, 307, 308, 400, 401, 403, 404, 408, 409, 410, 412, 416, 429, 500, 503, 999,
]  # fmt: skip


def odd_headers():
    pairs = [(name, text) for name, texts in HEADERS.items() for text in texts]
    return st.lists(st.sampled_from(pairs), max_size=2).map(tuple)


def odd_answers(kind):
    times = st.sampled_from([1, None])
    framing = st.sampled_from(["length", "length", "chunked", "close"])
    cut = st.none() | st.integers(0, 4000)
    return st.one_of(
        st.builds(Odd, st.just(kind), times, place=st.integers(0, 200), value=st.sampled_from(VALUES)),
        st.builds(
            Odd,
            st.just(kind),
            times,
            st.sampled_from(STATUSES),
            st.sampled_from(BODIES) | st.binary(max_size=50),
            odd_headers(),
            framing=framing,
            cut=cut,
        ),
        st.builds(
            Odd,
            st.just(kind),
            times,
            headers=odd_headers(),
            framing=framing,
            is_packed=st.booleans(),
            cut=cut,
        ),
    )


def odd_calls(pair):
    call, kind = pair
    return st.tuples(st.just(call), odd_answers(kind))


# Calls
Act = Callable[[Any, str], Awaitable[Any]]
WANTS: dict[str, Range | Suffix | None] = {
    "all": None,
    "a range": Range(1000, 2000),
    "its end": Suffix(500),
    "past the end": Range(2900, 5000),
}


def reading(want, *, is_pinned=False):
    async def act(world, path):
        pinned = world.info if is_pinned else None
        async with world.origin.read(path, want, pinned) as reply:
            data = b"".join([piece async for piece in reply.body])
        assert len(data) == reply.stop - reply.start
        assert data == DATA[reply.start : reply.stop]

    return act


async def lookup(world, path):
    is_sane(await world.origin.lookup(path))


async def listed(world, path):
    for deep in (False, True):
        async for info in world.origin.list(world.folder, deep=deep):
            is_sane(info)


def is_sane(info):
    assert isinstance(info.path, str)
    assert info.size is None or (isinstance(info.size, int) and info.size >= 0)
    assert info.fingerprint is None or isinstance(info.fingerprint, str)
    json.dumps(dict(info.details), default=str)


async def listed_top(world, path):
    async for info in world.origin.list(""):
        is_sane(info)


async def removed_with_contents(world, path):
    await world.origin.call("rm", f"{world.folder}/d", recursive=True)


async def changes(world, path):
    if first := await world.origin.changes(path, None):
        world.touch()
        await world.origin.changes(path, first.token)


def writing(method):
    async def act(world, path):
        new = f"{world.folder}/new"
        args = {"pipe_file": (new, NEW), "cp_file": (path, new), "mv_file": (path, new), "rm_file": (path,)}
        await world.origin.call(method, *args[method])
        there = {"pipe_file": (DATA, NEW), "cp_file": (DATA, DATA), "mv_file": (None, DATA)}
        if method in there:  # of a removal, the service says nothing that could be checked
            assert (world.stored("k"), world.stored("new")) == there[method]

    return act


READS: dict[str, Act] = {
    "look it up": lookup,
    "list": listed,
    **{f"read {name}": reading(want) for name, want in WANTS.items()},
    **{f"read {name} of a version": reading(want, is_pinned=True) for name, want in WANTS.items()},
}
WRITES: dict[str, Act] = {
    "list the top": listed_top,
    **{name: writing(name) for name in ("pipe_file", "cp_file", "mv_file", "rm_file")},
    "rm": removed_with_contents,
}


# Worlds: an origin over the odd server
class World:
    folder = url = ""
    calls = READS

    def __init__(self, server, base):
        self.server, self.base = server, base
        self.origin: Any = None
        self.info: Any = None

    async def begin(self, odd):
        """Start afresh, and know the object."""
        self.server.begin(self.service(), Odd(""))
        await self.open()
        self.info = self.info or await self.origin.lookup(f"{self.folder}/k")
        self.server.begin(self.server.service, odd)

    async def open(self): ...

    def service(self): ...

    async def close(self):
        await self.origin.aclose()


class GCSWorld(World):
    folder, url = "b", "gs://"
    calls = READS | WRITES

    def service(self):
        service = GCSService(Network(PROFILES["off"]))
        service.do_put("b", "k", DATA)
        service.do_put("b", "d/x", b"x")
        return service

    async def open(self):
        if self.origin is None:
            self.origin = GCSOrigin(
                {"token": "anon", "endpoint_url": self.base},
                identity="gs",
                loop=asyncio.get_running_loop(),
                on_request=lambda: None,
                policy=POLICY,
            )
        generation = self.server.service.store.get("b", "k").generation
        self.info = self.info and dataclasses.replace(self.info, fingerprint=str(generation))

    def stored(self, key):
        found = self.server.service.store.get("b", key)
        return None if found is None else found.content()


class DriveWorld(World):
    folder, url = "My Drive", "drive://"
    calls = READS | WRITES | {"ask what changed": changes}

    def service(self):
        service = DriveService(Network(PROFILES["off"]))
        service.do_put("k", DATA)
        service.do_put("d/x", b"x")
        self.info = None
        return service

    async def open(self):
        if self.origin is not None:
            await self.origin.aclose()
        self.origin = DriveOrigin(
            {"token": "anon", "endpoint_url": self.base},
            identity="drive",
            loop=asyncio.get_running_loop(),
            on_request=lambda: None,
            policy=POLICY,
            filesystem_over=DriveFileSystem.over,
        )

    def touch(self):
        self.server.service.do_put("k", DATA + b"more")

    def stored(self, key):
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.server.service.do_get(key))
        return None


@contextlib.contextmanager
def running(cls):
    """Yield what makes one call while answers are odd and asserts that it is right, and the requests of each call."""
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    server = OddServer()
    base = loop.run_until_complete(stack.enter_async_context(server.running()))
    world = cls(server, base)

    async def one(call, odd):
        await world.begin(odd)
        try:
            await asyncio.wait_for(world.calls[call](world, f"{world.folder}/k"), 60.0)
        except CachedFSError as error:
            names_the_url = world.url in str(error)
            assert names_the_url

    async def used(call):
        await one(call, Odd(""))
        return sorted(server.kinds)

    try:
        kinds = {call: loop.run_until_complete(used(call)) for call in cls.calls}
        yield lambda call, odd: loop.run_until_complete(one(call, odd)), kinds
    finally:
        loop.run_until_complete(world.close())
        loop.run_until_complete(stack.aclose())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Let gcsfs wait for nothing between its tries."""
    monkeypatch.setattr(gcsfs.retry, "random", types.SimpleNamespace(random=lambda: -100.0))


N_EXAMPLES = {GCSWorld: 300, DriveWorld: 150}


def endless(kind):
    """Return a page that names itself as the next one."""
    return json.dumps({"kind": kind, "nextPageToken": "x"}).encode()


RANGE, PINNED = "read a range", "read a range of a version"
BARE = (("x-goog-stored-content-encoding", None), ("x-goog-stored-content-length", None))
LATER = [(("Retry-After", text),) for text in HEADERS["Retry-After"]]
NOWHERE = [(("Location", text),) for text in HEADERS["Location"]]
EXAMPLES: dict[type[World], list[tuple[str, Odd]]] = {
    GCSWorld: [
        *((RANGE, Odd("media", headers=BARE, framing=framing, is_packed=True)) for framing in ("chunked", "close")),
        (PINNED, Odd("media", 1, headers=BARE, framing="chunked", is_packed=True)),
        *((RANGE, Odd("media", 1, 503, headers=headers)) for headers in LATER),
        *((RANGE, Odd("media", 1, 302, headers=headers)) for headers in NOWHERE),
        *(("cp_file", Odd("copy", None, 302, headers=headers)) for headers in NOWHERE),
        *((call, Odd(kind, None, 500, b"[" * 65536)) for call, kind in [(RANGE, "media"), ("pipe_file", "upload")]),
        *(("look it up", Odd("metadata", place=name)) for name in ("name", "generation", "size")),
        *(("list", Odd("list", place=name)) for name in ("name", "generation", "size")),
        ("list", Odd("list", place="name", value="other")),
        *((call, Odd(kind, place="size", value=-5)) for call, kind in [("look it up", "metadata"), ("list", "list")]),
        *((call, Odd(kind, place="metadata", value=DEEP)) for call, kind in [("look it up", "metadata"), ("list", "list")]),
        *((call, Odd("list", None, 200, endless("storage#objects"))) for call in ("list", "rm")),
        ("list the top", Odd("bucket", None, 200, endless("storage#buckets"))),
        ("list the top", Odd("bucket", 1, 412, b"")),
        *((call, Odd(kind, None, 200, b"{}")) for call, kind in [("pipe_file", "upload"), ("cp_file", "copy"), ("mv_file", "copy")]),
        *((call, Odd("copy", place="name", value="other")) for call in ("cp_file", "mv_file")),
        ("cp_file", Odd("copy", place="done", value=False)),
        ("cp_file", Odd("copy", place="size", value="1")),
    ],
    DriveWorld: [
        *((RANGE, Odd("media", framing=framing, is_packed=True)) for framing in ("chunked", "close")),
        *((RANGE, Odd("media", 1, 503, headers=headers)) for headers in LATER),
        *((RANGE, Odd("media", 1, 302, headers=headers)) for headers in NOWHERE),
        *(("look it up", Odd("list", 1, 302, headers=headers)) for headers in NOWHERE),
        *((call, Odd(kind, None, 500, b"[" * 65536)) for call, kind in [(RANGE, "media"), ("pipe_file", "upload")]),
        *(("list", Odd("list", place=name)) for name in ("id", "name", "mimeType", "kind")),
        ("list", Odd("list", place="size", value="-5")),
        ("list", Odd("list", place="capabilities", value=DEEP)),
        *((call, Odd("list", None, 200, endless("drive#fileList"))) for call in ("look it up", "list", "rm")),
        ("ask what changed", Odd("change", place="newStartPageToken")),
        *((call, Odd(kind, None, 200, b"{}")) for call, kind in [("pipe_file", "upload"), ("cp_file", "copy"), ("mv_file", "update")]),
        *((call, Odd(kind, place="id", value="other")) for call, kind in [("pipe_file", "upload"), ("cp_file", "copy"), ("mv_file", "update")]),
        ("mv_file", Odd("update", place="name", value="other")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("cls", [GCSWorld, DriveWorld])
def test_odd_answers_give_right_bytes_or_an_error_that_names_the_url(cls, no_rate_limits, long_timeouts):
    with running(cls) as (one, kinds):
        pairs = [(call, kind) for call in kinds for kind in kinds[call]]

        @hypothesis.settings(max_examples=N_EXAMPLES[cls])
        @hypothesis.given(st.sampled_from(pairs).flatmap(odd_calls))
        def check(each):
            one(*each)

        for call, odd in EXAMPLES[cls]:
            check = hypothesis.example((call, odd))(check)
        check()


# A body that trickles
@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(http, "time", types.SimpleNamespace(monotonic=clock))
    return clock


class Trickle:
    """A response with `size` bytes every `every_s` seconds."""

    status, headers, history = 200, types.MappingProxyType({}), ()

    def __init__(self, clock, size, every_s):
        self.url = URL("http://host")
        self.content, self._clock, self._size, self._every_s = self, clock, size, every_s

    async def readany(self):
        self._clock.now += self._every_s
        return bytes(self._size)


async def test_a_body_that_trickles_is_broken_after_a_minute(clock):
    response = http.HTTPResponse("GET", "", answer=Trickle(clock, 1, 0.5))
    with pytest.raises(RetryableError, match="only 120 bytes of the body came in 60 s"):
        await response.read_all()
    assert clock.now == 160.0


async def test_a_body_that_is_slow_or_not_read_for_a_while_is_not_broken(clock):
    slow = http.HTTPResponse("GET", "", answer=Trickle(clock, 600, 0.5))
    for _ in range(1000):
        assert len(await slow.read_some()) == 600
    paused = http.HTTPResponse("GET", "", answer=Trickle(clock, 1, 0.0))
    for _ in range(1000):
        assert len(await paused.read_some()) == 1
        clock.now += 3600.0


async def test_a_body_that_keeps_trickling_is_an_error_after_the_last_try(monkeypatch):
    server = OddServer()
    async with server.running() as base:
        world = GCSWorld(server, base)
        await world.begin(Odd(""))
        seconds = itertools.count(step=61)
        monkeypatch.setattr(http, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
        with pytest.raises(OriginUnavailable, match=r"gs://b/k: .* 3 tries .* of the body came in 61 s"):
            await reading(Range(1000, 2000))(world, "b/k")
        await world.close()


# Secrets

SECRETS = ["PASSWORD", "SIGNATURE", "CREDENTIAL"]


@pytest.fixture
def secret_url(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "k").write_bytes(DATA)
    make_old(tmp_path / "www" / "k")
    with WebServer(tmp_path / "www") as server:
        yield (
            f"{server.url.replace('//', '//user:PASSWORD@')}/k"
            "?X-Goog-Credential=CREDENTIAL&Expires=5&X-Goog-Signature=SIGNATURE"
        )


def test_a_signed_url_with_a_password_is_nowhere_but_in_memory(secret_url, own_cache, caplog):
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    for n_requests in (1, 0):  # the second process finds all of it in the cache
        fs, path = url_to_fs(f"cachedfs::{secret_url}")
        assert path == secret_url
        assert fs.cat_file(path) == DATA
        fs.pin(path)
        with fs.open(path) as file:
            said += [repr(file), repr(fs), str(fs.stats())]
        assert fs.stats().requests == n_requests
        said.append(fs.to_json(include_password=False))
        with pytest.raises(FileNotFoundError) as caught:
            fs.cat_file(path.replace("/k?", "/none?"))
        said += traceback.format_exception(caught.value)
        assert fs.verify(path)[0].ok
        forget()
    fs, path = url_to_fs(f"cachedfs::{secret_url}")
    fs.unpin(path)
    assert fs.evict(path) > 0
    said += [record.getMessage() for record in caplog.records if record.name.startswith("cachedfs")]
    files = [each for each in own_cache.rglob("*") if each.is_file()]
    said += [f"{each.name}: {each.read_bytes().decode('latin-1')}" for each in files]
    assert len(files) > 3
    assert [text[:300] for text in said if any(secret in text for secret in SECRETS)] == []
