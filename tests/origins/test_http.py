"""Sending a body, waiting for the address of a host and for a token, and bodies that trickle."""

import asyncio
import dataclasses
import threading
import traceback
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from google.oauth2.credentials import Credentials

from cachedfs.errors import OriginUnavailable, OriginUnreachable
from cachedfs.origins import http
from cachedfs.origins.base import has_stale_answer
from cachedfs.origins.http import HTTPClient, new_connector
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryPolicy
from cachedfs.origins.tokens import TokenSource
from tests.fakes import FakeClock

timeouts_of = http.timeouts_of  # not the patient one of all other tests

BODY = bytes(64 << 20)  # more than the buffers of two sockets hold
HASTY = RetryPolicy(connect_s=60.0, stall_s=0.2)


def client_of(session, policy, **options):
    return HTTPClient(
        session,
        None,
        lambda request, status, headers, body: OSError(f"answered {status}"),
        slots=RequestSlots(4),
        on_request=lambda: None,
        policy=policy,
        timeouts=timeouts_of(policy),
        options=options,
    )


@asynccontextmanager
async def serving(answer):
    """The URL of a server that answers connections so, and is gone completely afterwards."""
    handlers = list[Any]()

    async def handle(reader, writer):
        handlers.append(asyncio.current_task())
        try:
            with suppress(asyncio.CancelledError):
                await answer(reader, writer)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1") as server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        finally:
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)


async def sent_to(answer, policy):
    """Send BODY once; return the status of the answer."""
    async with serving(answer) as url, aiohttp.ClientSession() as session:
        request = HTTPRequest(url=url, params={}, subject="x://y", doing="writing", method="PUT", data=BODY)
        return (await client_of(session, policy).answer(request)).status


async def test_a_service_that_stops_reading_is_removed():
    async def deaf(reader, writer):
        await asyncio.Event().wait()

    with pytest.raises(RetryableError, match="TimeoutError"):
        await sent_to(deaf, HASTY)


async def test_an_answer_before_the_end_of_the_body_is_an_answer():
    async def hasty(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        while await reader.read(1 << 20):
            pass

    with pytest.raises(OSError, match="answered 403"):
        await sent_to(hasty, dataclasses.replace(HASTY, stall_s=60.0))


async def test_bytes_that_are_not_http_are_unusable_and_no_400():
    """For example when bytes after one answer are taken for the next one on the same connection."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"bytes of an earlier answer\r\n\r\n")

    async with serving(answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(OriginUnavailable, match="gs://b/k") as caught, mapped("gs://b/k", "writing it"):
            await session.get(url)
    assert caught.value.__cause__.status == 400


class NameServer:
    """Answers lookups of host names when the test says so; `asked` counts them."""

    def __init__(self, monkeypatch):
        self.asked, self.may_answer = 0, asyncio.Event()
        self.answer, self.hosts = lambda: None, ["127.0.0.1"]

        async def resolve(resolver, host, port=0, family=0):
            self.asked += 1
            await self.may_answer.wait()
            self.answer()
            known = {"hostname": host, "port": port, "family": family, "proto": 0, "flags": 0}
            return [{**known, "host": address} for address in self.hosts]

        monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)


async def hello(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")


@asynccontextmanager
async def asking_by_name(policy):
    """A function that asks a server for its body, by a host name."""
    async with (
        serving(hello) as url,
        aiohttp.ClientSession(connector=new_connector(resolver=aiohttp.ThreadedResolver())) as session,
    ):
        client = client_of(session, policy)
        request = HTTPRequest(
            url=url.replace("127.0.0.1", "cloud.test"), params={}, subject="x://y", doing="reading"
        )

        async def attempt():
            return (await client.answer(request)).body

        yield lambda: client.retried(attempt, request)


async def test_an_address_that_comes_late_is_kept_for_the_next_request(monkeypatch):
    server = NameServer(monkeypatch)
    has_stale_answer.set(True)
    async with asking_by_name(RetryPolicy(tries=1, connect_s=60.0, stall_s=60.0, reach_stale_s=0.01)) as ask:
        with pytest.raises(OriginUnreachable):
            await ask()
        server.may_answer.set()
        has_stale_answer.set(False)  # this one may take its time
        assert await ask() == b"hello"
    assert server.asked == 1


async def test_a_name_that_cannot_be_found_is_unreachable_however_late_that_is_known(monkeypatch):
    server, clock = NameServer(monkeypatch), FakeClock()
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=clock))

    def fail():
        clock.now += 10
        raise OSError(-3, "Temporary failure in name resolution")

    server.answer = fail
    server.may_answer.set()
    async with asking_by_name(RetryPolicy(base_s=0.0, connect_s=0.0)) as ask:
        with pytest.raises(OriginUnreachable, match="after 1 try"):
            await ask()


async def test_all_addresses_of_a_host_are_tried_within_one_timeout(monkeypatch):
    server, tried = NameServer(monkeypatch), []
    server.hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    server.may_answer.set()

    async def never(addr_infos, **options):
        tried.append([address[0] for *_, address in addr_infos])
        await asyncio.Event().wait()

    monkeypatch.setattr(aiohttp.connector.aiohappyeyeballs, "start_connection", never)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=FakeClock()))
    async with asking_by_name(RetryPolicy(tries=1, connect_s=0.01)) as ask:
        with pytest.raises(OriginUnreachable):
            await ask()
    assert tried == [server.hosts]


async def test_a_traceback_has_no_signature_of_a_url():
    async def elsewhere(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: ftp://x/y?X-Amz-Signature=SECRET\r\nContent-Length: 0\r\n\r\n"
        )

    async with serving(elsewhere) as url, aiohttp.ClientSession() as session:
        client = client_of(session, RetryPolicy(tries=1))
        request = HTTPRequest(url=url, params={}, subject="x://y", doing="reading")

        with pytest.raises(OriginUnavailable) as raised:
            await client.retried(lambda: client.answer(request), request)
    assert "SECRET" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [(0.1, True), (2.0, True), (2.5, False), (19.9, False), (20.5, True), (21.5, False)],
)
def test_a_timeout_that_fires_late_says_that_the_process_was_blocked(waited_s, expected):
    timeout = aiohttp.ClientTimeout(connect=20.0, sock_connect=2.0)
    with pytest.raises(RetryableError) as failed:
        http.raise_retryable(aiohttp.ConnectionTimeoutError(), timeout, waited_s)
    assert failed.value.is_unreachable is expected


async def test_a_token_that_comes_late_is_kept_for_the_next_request():
    may_answer, credentials, asked = threading.Event(), Credentials("old", expiry=datetime(2020, 1, 1)), []  # noqa: DTZ001  # as google-auth stores it

    def refresh():
        asked.append(1)
        may_answer.wait(120)
        credentials.token, credentials.expiry = "new", None

    source = TokenSource(lambda: credentials, refresh, RetryPolicy(reach_stale_s=0.01))
    has_stale_answer.set(True)
    with pytest.raises(RetryableError) as failed:
        await source.headers()
    assert failed.value.is_unreachable
    may_answer.set()
    has_stale_answer.set(False)
    assert await source.headers() == {"authorization": "Bearer new"}
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("size", "every_s", "pause_s", "is_broken"),
    [(1, 0.5, 0.0, True), (600, 0.5, 0.0, False), (1, 0.0, 3600.0, False)],
    ids=["a byte each half second", "a slow body", "a reader that pauses"],
)
async def test_a_body_that_trickles_for_a_minute_is_broken(monkeypatch, size, every_s, pause_s, is_broken):
    clock = FakeClock()
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=clock))

    async def readany():
        clock.now += every_s
        return bytes(size)

    answer = SimpleNamespace(content=SimpleNamespace(readany=readany))
    response = http.HTTPResponse("GET", "", answer=answer)
    broken = pytest.raises(RetryableError, match="only 120 bytes of the body came in 60 s")
    with broken if is_broken else nullcontext():
        for _ in range(1000):
            assert len(await response.read_some()) == size
            clock.now += pause_s
