"""Sending a body: a connection that takes none of it is given up."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from functools import partial

import aiohttp
import pytest

from cachedfs.origins.http import HTTPClient, HTTPRequest, timeout_of
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy

BODY = bytes(64 << 20)  # more than the buffers of two sockets hold
HASTY = RetryPolicy(stall_s=0.2)


class NoAuth:
    async def headers(self) -> dict[str, str]:
        return {}

    async def renew(self, refused: object) -> bool:
        return False


def client_of(session: aiohttp.ClientSession, policy: RetryPolicy) -> HTTPClient:
    return HTTPClient(
        session,
        NoAuth(),
        lambda request, status, headers, body: OSError(f"answered {status}"),
        slots=RequestSlots(4),
        on_request=lambda: None,
        new_tries=partial(RetryAttempts, policy, clock=time.monotonic, rng=random.Random(0)),
        timeout=timeout_of(policy),
    )


async def sent_to(server: asyncio.Server, policy: RetryPolicy) -> int:
    """Send BODY once; return the status of the answer."""
    port = server.sockets[0].getsockname()[1]
    request = HTTPRequest(
        url=f"http://127.0.0.1:{port}/", params={}, subject="x://y", doing="writing", method="PUT", data=BODY
    )
    async with (
        server,
        aiohttp.ClientSession() as session,
        client_of(session, policy).exchange(request) as response,
    ):
        return response.status


async def test_a_service_that_stops_reading_is_given_up() -> None:
    done = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    with pytest.raises(RetryableError, match="TimeoutError"):
        await sent_to(await asyncio.start_server(deaf, "127.0.0.1"), HASTY)
    done.set()


async def test_an_answer_before_the_end_of_the_body_is_an_answer() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        while await reader.read(1 << 20):
            pass
        writer.close()

    with pytest.raises(OSError, match="answered 403"):
        await sent_to(
            await asyncio.start_server(hasty, "127.0.0.1"), dataclasses.replace(HASTY, stall_s=60.0)
        )
