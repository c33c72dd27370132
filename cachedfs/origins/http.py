"""`HTTPClient`: GET requests over one aiohttp session, with request slots, counting and retries.

It is independent of the service: an `HTTPRequest` is what to send, `judge` interprets an error response, and an `Auth`
provides the headers that prove the account.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import aiohttp
from yarl import URL

from cachedfs.errors import OriginUnavailable, OriginUnreachable
from cachedfs.origins.origin_errors import object_of
from cachedfs.origins.request_log import LoggedRequest
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy, RetryReason, foreign, untrusted

if TYPE_CHECKING:
    from cachedfs.origins.hedging import HedgedRequests
    from cachedfs.origins.rate_limit import RateLimiter
    from cachedfs.origins.request_slots import RequestSlots

__all__ = ["Auth", "HTTPClient", "HTTPRequest", "HTTPResponse", "other_host", "timeout_of"]

T = TypeVar("T")
MOST_REDIRECTS = 5  # Google's services need none
_GOOD = frozenset({200, 206, 416})
_OVERLOADED = 503
_ERROR_BODY = 64 << 10
_KIND = "download"  # as the rate limiter counts these requests
_LATE_S = 0.05  # a running event loop fires its timers sooner than this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """One GET request before it is sent; errors name its `subject` and what it was `doing`."""

    url: str  # percent-encoded, without a query
    params: Mapping[str, str]
    subject: str
    doing: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    as_stored: bool = False  # the body is an object's bytes: do not decompress it
    is_pinned: bool = False


class Auth(Protocol):
    """The credentials of an account, as request headers."""

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, from credentials that are valid now."""
        ...

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Replace the credentials of the `refused` headers; return False if there are no others."""
        ...


class HTTPResponse:
    """A response whose headers have arrived."""

    def __init__(self, response: aiohttp.ClientResponse, told: LoggedRequest) -> None:
        self._response, self._told = response, told
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.other_host = other_host(response)  # where redirects led; None for the host that was asked

    async def read_some(self) -> bytes:
        """Return the next bytes of the body, empty at its end; raise RetryableError if it breaks."""
        with _troubled():
            data = await self._response.content.readany()
        self._told.size += len(data)
        return data

    async def read_all(self) -> bytes:
        """Return the whole body; raise RetryableError if it breaks."""
        with _troubled():
            data = await self._response.read()
        self._told.size += len(data)
        return data

    async def read_error(self) -> bytes:
        """Return the start of an error response's body, up to 64 KiB; raise RetryableError if it breaks."""
        data = bytearray()
        with _troubled():
            # One `read` returns only the bytes that have arrived.
            while piece := await self._response.content.read(_ERROR_BODY - len(data)):
                data += piece
        self._told.size += len(data)
        return bytes(data)

    @property
    def size(self) -> int:
        """Bytes of the body that were read."""
        return self._told.size

    def close(self) -> None:
        """Stop reading; the connection is reused if the body was read to its end, else dropped."""
        self._response.close()
        self._told.over()


class HTTPClient:
    """Sends requests; every attempt holds a request slot while its response is read."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        auth: Auth,
        judge: Callable[[HTTPRequest, int, Mapping[str, str], bytes], RetryReason | Exception],
        *,
        slots: RequestSlots,
        on_request: Callable[[], None],
        new_tries: Callable[[], RetryAttempts],
        timeout: aiohttp.ClientTimeout,
        keeps_session_timeout: bool = False,
        rate_limiter: RateLimiter | None = None,
        hedge: HedgedRequests | None = None,
    ) -> None:
        """Create a client that calls `on_request` for each request sent.

        `judge` turns an error response into a reason to retry or into the exception to raise. `rate_limiter` delays
        requests, and `hedge` sends late ones a second time, where they are given.
        """
        # aiohttp would repeat a request, uncounted, when the connection breaks before the response.
        session._retry_connection = False
        self._session, self._auth, self._judge = session, auth, judge
        self._slots, self._on_request, self.new_tries = slots, on_request, new_tries
        self._rate_limiter, self._hedge = rate_limiter, hedge
        self._kwargs: dict[str, Any] = {} if keeps_session_timeout else {"timeout": timeout}
        # A connect timeout that fires later than this was itself delayed. aiohttp rounds long ones up to full seconds.
        rounded_s = 1.0 if (timeout.sock_connect or 0.0) > timeout.ceil_threshold else 0.0
        self._connected_s = (timeout.sock_connect or math.inf) + rounded_s + _LATE_S

    async def json(
        self, ask: HTTPRequest, is_answer: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object that the service answers to `ask`, after retries.

        An answer that `is_answer` rejects is from another server, such as a proxy, and is retried.
        """

        async def attempt() -> dict[str, Any]:
            async with self.exchange(ask) as exchange:
                found = object_of(await exchange.read_all())
            if is_answer is not None and not is_answer(found):
                raise RetryableError(foreign("the answer is JSON without what the service always sends"))
            return found

        return await self.retried(attempt, ask, self.new_tries())

    async def retried(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest, tries: RetryAttempts) -> T:
        """Return the result of `attempt`, repeated for as long as `tries` allows."""
        while True:
            try:
                return await attempt()
            except RetryableError as failed:
                await self.pause(failed, ask, tries)

    async def pause(self, failed: RetryableError, ask: HTTPRequest, tries: RetryAttempts) -> None:
        """Wait before the next attempt; raise OriginUnavailable when there is none left."""
        wait_s = tries.next_wait_s(failed.trouble)
        if wait_s is None:
            kind = OriginUnreachable if failed.trouble.is_unreachable else OriginUnavailable
            raise kind(
                f"{ask.subject}: {ask.doing} failed after {tries.summary()}; the last time: {failed}. "
                f"{failed.trouble.remedy}"
            ) from (failed.__cause__ or failed)
        await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def exchange(self, ask: HTTPRequest) -> AsyncIterator[HTTPResponse]:
        """Send `ask` once; leaving before the end of the body drops the connection.

        Raises RetryableError, or the final error.
        """
        async with self._slots.mine:
            exchange = await self._send(ask)
            try:
                yield exchange
            finally:
                exchange.close()
                self._slots.finished(exchange.size)

    async def _send(self, ask: HTTPRequest) -> HTTPResponse:
        """Return a successful response; after a 401, renew the credentials and send once more."""
        proof, began_at = await self._auth.headers(), self._slots.now()
        sent_at, response = await self._first(ask, proof)
        if response.status == 401 and await self._renewed(response, proof):
            sent_at, response = await self._first(ask, await self._auth.headers())
        is_good = response.status in _GOOD
        if response.other_host and not (is_good and ask.as_stored):  # headers and checksums prove object data
            response.close()
            raise RetryableError(
                foreign(f"redirected to {response.other_host}, which answered {response.status}")
            )
        if is_good:
            self._learn(sent_at, refused=False)
            return response
        try:
            body = await response.read_error()
        finally:
            response.close()
        verdict = self._judge(ask, response.status, response.headers, body)
        self._learn(sent_at, refused=isinstance(verdict, RetryReason) and verdict.is_rate)
        if isinstance(verdict, RetryReason) and (verdict.is_rate or response.status == _OVERLOADED):
            self._slots.refused(began_at)
        raise RetryableError(verdict) if isinstance(verdict, RetryReason) else verdict

    async def _renewed(self, response: HTTPResponse, proof: Mapping[str, str]) -> bool:
        try:
            is_renewed = await self._auth.renew(proof)
        except BaseException:  # also on cancellation: closing the response frees the connection
            response.close()
            raise
        if is_renewed:
            response.close()
        return is_renewed

    async def _first(self, ask: HTTPRequest, proof: Mapping[str, str]) -> tuple[float, HTTPResponse]:
        """Return when `ask` was sent, and the response to it or to a hedged second request."""
        sent_at = await self._turn()
        if self._hedge is None:
            return sent_at, await self._request(ask, proof)
        again = partial(self._in_turn, ask, proof)
        return sent_at, await self._hedge.first(self._request(ask, proof), again, HTTPResponse.close)

    async def _in_turn(self, ask: HTTPRequest, proof: Mapping[str, str]) -> HTTPResponse:
        await self._turn()
        return await self._request(ask, proof)

    async def _turn(self) -> float:
        return 0.0 if self._rate_limiter is None else await self._rate_limiter.spend(_KIND)

    def _learn(self, sent_at: float, *, refused: bool) -> None:
        if self._rate_limiter is not None:
            self._rate_limiter.answered(_KIND, sent_at, refused=refused)

    async def _request(self, ask: HTTPRequest, proof: Mapping[str, str]) -> HTTPResponse:
        self._on_request()
        told = LoggedRequest("GET", ask.url, ask.headers.get("Range", ""))
        try:
            response = await self._answer(ask, proof)
        except BaseException as error:  # also on cancellation
            told.over(error)
            raise
        told.answered(response.status)
        return HTTPResponse(response, told)

    async def _answer(self, ask: HTTPRequest, proof: Mapping[str, str]) -> aiohttp.ClientResponse:
        started = time.monotonic()
        try:
            with _troubled():
                return await self._session.get(
                    URL(ask.url, encoded=True),
                    params=ask.params,
                    headers={**ask.headers, **proof},
                    auto_decompress=not ask.as_stored,
                    raise_for_status=False,
                    max_redirects=MOST_REDIRECTS,
                    **self._kwargs,
                )
        except RetryableError as failed:
            if not failed.trouble.is_unreachable or time.monotonic() - started < self._connected_s:
                raise
            # The process or its event loop was blocked, so the timeout says nothing about the service.
            raise RetryableError(
                dataclasses.replace(failed.trouble, is_unreachable=False)
            ) from failed.__cause__


def other_host(response: aiohttp.ClientResponse) -> str | None:
    """Return the host that answered if redirects led to another host, else None."""
    asked, came = (response.history[0] if response.history else response).url, response.url
    is_same = asked.host == came.host and (asked.port == came.port or asked.scheme != came.scheme)
    return None if is_same else came.authority


def timeout_of(
    policy: RetryPolicy,
    *,
    given: float | aiohttp.ClientTimeout | None = None,
    can_wait_for_pool: bool = False,
) -> aiohttp.ClientTimeout:
    """Return the timeouts of one request: for connecting and for silence, none for the whole.

    `given` is the user's own: seconds for the whole request, or an aiohttp value, which is used as it is.
    """
    if isinstance(given, aiohttp.ClientTimeout):
        return given
    return aiohttp.ClientTimeout(
        total=given,
        # Only `connect` includes finding the host's address, but also waiting for a free connection.
        connect=None if can_wait_for_pool else policy.connect_s,
        sock_connect=policy.connect_s,
        sock_read=policy.stall_s,
    )


@contextmanager
def _troubled() -> Iterator[None]:
    """Turn the exceptions of aiohttp for a broken connection into RetryableError."""
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise RetryableError(untrusted(_text(error))) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise RetryableError(RetryReason(_text(error), is_unreachable=True)) from error
    except aiohttp.ClientHttpProxyError as error:  # its text contains the proxy's URL and password
        why = f"the proxy does not connect: {error.status} {error.message}"
        raise RetryableError(RetryReason(why, is_unreachable=True)) from None
    except aiohttp.InvalidURL:
        raise
    except aiohttp.TooManyRedirects as error:
        raise RetryableError(RetryReason("the service redirects in a circle", is_final=True)) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RetryableError(RetryReason(_text(error))) from error


def _text(error: BaseException) -> str:
    # aiohttp mentions ssl for plain HTTP too.
    text = re.sub(" ssl:([a-z]+|<.+?>)", "", str(error), flags=re.IGNORECASE)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
