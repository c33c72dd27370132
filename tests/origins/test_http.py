"""Sending a body: a connection that takes none of it is given up."""

import asyncio
import dataclasses
import random
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import pytest

from cachedfs.origins.http import HTTPClient, HTTPRequest, timeout_of
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy

BODY = bytes(64 << 20)  # more than the buffers of two sockets hold
HASTY = RetryPolicy(connect_s=60.0, stall_s=0.2)


class NoAuth:
    async def headers(self):
        return {}

    async def renew(self, refused):
        return False


def client_of(session, policy):
    return HTTPClient(
        session,
        NoAuth(),
        lambda request, status, headers, body: OSError(f"answered {status}"),
        slots=RequestSlots(4),
        on_request=lambda: None,
        new_tries=partial(RetryAttempts, policy, clock=time.monotonic, rng=random.Random(0)),
        timeout=timeout_of(policy),
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
        async with client_of(session, policy).exchange(request) as response:
            return response.status


async def test_a_service_that_stops_reading_is_given_up():
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
