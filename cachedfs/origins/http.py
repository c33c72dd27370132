"""Requests over one aiohttp session: bounded, counted, retried. The only importer of aiohttp.

Whose service it is does not show here: an `Ask` says what to send, `judge` what an answer means, an
`Auth` which headers prove who asks.
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

__all__ = ["HTTPRequest", "Auth", "HTTPClient", "HTTPResponse", "other_host", "timeout_of"]

T = TypeVar("T")
MOST_REDIRECTS = 5  # Google's services need none
_GOOD = frozenset({200, 206, 416})
_ERROR_BODY = 64 << 10
_KIND = "download"  # of the requests that a pacer counts
_LATE_S = 0.05  # a loop that runs keeps its times better


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """One GET, before it is sent; `subject` and `doing` are what an error names."""

    url: str  # percent-encoded, without a query
    params: Mapping[str, str]
    subject: str
    doing: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    as_stored: bool = False  # the body is bytes of an object: never unpack it
    is_pinned: bool = False


class Auth(Protocol):
    """Who asks."""

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, from credentials that are valid now."""
        ...

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get other credentials than the refused headers; False where there are none to be had."""
        ...


class HTTPResponse:
    """A request whose headers are here."""

    def __init__(self, response: aiohttp.ClientResponse, told: LoggedRequest) -> None:
        self._response, self._told = response, told
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.other_host = other_host(response)  # that answered, None for the one that was asked

    async def read_some(self) -> bytes:
        """Return the next bytes of the body, empty at its end; raises Failed."""
        with _troubled():
            data = await self._response.content.readany()
        self._told.size += len(data)
        return data

    async def read_all(self) -> bytes:
        """Return the whole body; raises Failed."""
        with _troubled():
            data = await self._response.read()
        self._told.size += len(data)
        return data

    async def read_error(self) -> bytes:
        """Return the beginning of the body, as far as it says what is wrong; raises Failed."""
        data = bytearray()
        with _troubled():
            # One read gives what has come so far, however much it is asked for.
            while piece := await self._response.content.read(_ERROR_BODY - len(data)):
                data += piece
        self._told.size += len(data)
        return bytes(data)

    def close(self) -> None:
        """Read no more of it; the connection goes back when all was read, else it is dropped."""
        self._response.close()
        self._told.over()


class HTTPClient:
    """Sends requests; every try takes a slot for as long as its answer is being read."""

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
        """Send at the pace of `pacer`, and a second time by `hedge`, where there are such."""
        # It would send a request again by itself, uncounted, when the connection breaks before an answer.
        session._retry_connection = False
        self._session, self._auth, self._judge = session, auth, judge
        self._slots, self._on_request, self.new_tries = slots, on_request, new_tries
        self._rate_limiter, self._hedge = rate_limiter, hedge
        self._kwargs: dict[str, Any] = {} if keeps_session_timeout else {"timeout": timeout}
        # Later than this, a time-out of connecting was late itself. aiohttp rounds long ones up to the full second.
        rounded_s = 1.0 if (timeout.sock_connect or 0.0) > timeout.ceil_threshold else 0.0
        self._connected_s = (timeout.sock_connect or math.inf) + rounded_s + _LATE_S

    async def json(
        self, ask: HTTPRequest, is_answer: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        """Return the answer to `ask`, after retries; one that `is_answer` does not know is somebody else's."""

        async def attempt() -> dict[str, Any]:
            async with self.exchange(ask) as exchange:
                found = object_of(await exchange.read_all())
            if is_answer is not None and not is_answer(found):
                raise RetryableError(foreign("the answer is JSON without what the service always sends"))
            return found

        return await self.retried(attempt, ask, self.new_tries())

    async def retried(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest, tries: RetryAttempts) -> T:
        """Return what `attempt` returns, tried again while there is hope."""
        while True:
            try:
                return await attempt()
            except RetryableError as failed:
                await self.pause(failed, ask, tries)

    async def pause(self, failed: RetryableError, ask: HTTPRequest, tries: RetryAttempts) -> None:
        """Wait before the next try; raises OriginUnavailable when there shall be none."""
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
        """Send `ask` once; leaving before the end of the body drops the connection. Raises Failed, or what is final."""
        async with self._slots.mine:
            exchange = await self._send(ask)
            try:
                yield exchange
            finally:
                exchange.close()

    async def _send(self, ask: HTTPRequest) -> HTTPResponse:
        """Return a good response; a refusal of the credentials is answered with other ones, once."""
        proof = await self._auth.headers()
        sent_at, response = await self._first(ask, proof)
        if response.status == 401 and await self._renewed(response, proof):
            sent_at, response = await self._first(ask, await self._auth.headers())
        is_good = response.status in _GOOD
        if response.other_host and not (is_good and ask.as_stored):  # headers and checksums prove media
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
        raise RetryableError(verdict) if isinstance(verdict, RetryReason) else verdict

    async def _renewed(self, response: HTTPResponse, proof: Mapping[str, str]) -> bool:
        try:
            is_renewed = await self._auth.renew(proof)
        except BaseException:  # a cancellation too: the connection goes back with its response
            response.close()
            raise
        if is_renewed:
            response.close()
        return is_renewed

    async def _first(self, ask: HTTPRequest, proof: Mapping[str, str]) -> tuple[float, HTTPResponse]:
        """Return when `ask` was sent, and the answer to it, or to a second request where the first is late."""
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
        except BaseException as error:  # a cancellation too
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
            # A process that was stopped for so long, or a loop that was held up, says nothing of the service.
            raise RetryableError(
                dataclasses.replace(failed.trouble, is_unreachable=False)
            ) from failed.__cause__


def other_host(response: aiohttp.ClientResponse) -> str | None:
    """Return the host that answered where redirects led away from the one that was asked, else None."""
    asked, came = (response.history[0] if response.history else response).url, response.url
    is_same = asked.host == came.host and (asked.port == came.port or asked.scheme != came.scheme)
    return None if is_same else came.authority


def timeout_of(
    policy: RetryPolicy,
    *,
    given: float | aiohttp.ClientTimeout | None = None,
    can_wait_for_pool: bool = False,
) -> aiohttp.ClientTimeout:
    """Return the limits of one request: ours have none for the whole, but for connecting and for silence.

    `given` is the user's limit, in seconds for the whole or as aiohttp's own value.
    """
    if isinstance(given, aiohttp.ClientTimeout):
        return given
    return aiohttp.ClientTimeout(
        total=given,
        # aiohttp counts finding the host's address only here, and with it waiting for a free connection.
        connect=None if can_wait_for_pool else policy.connect_s,
        sock_connect=policy.connect_s,
        sock_read=policy.stall_s,
    )


@contextmanager
def _troubled() -> Iterator[None]:
    """Turn what aiohttp raises for a broken connection into Failed."""
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise RetryableError(untrusted(_text(error))) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise RetryableError(RetryReason(_text(error), is_unreachable=True)) from error
    except aiohttp.ClientHttpProxyError as error:  # its text has the proxy's URL, with the password
        why = f"the proxy does not connect: {error.status} {error.message}"
        raise RetryableError(RetryReason(why, is_unreachable=True)) from None
    except aiohttp.InvalidURL:
        raise
    except aiohttp.TooManyRedirects as error:
        raise RetryableError(RetryReason("the service redirects in a circle", is_final=True)) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RetryableError(RetryReason(_text(error))) from error


def _text(error: BaseException) -> str:
    # As aiohttp says it, of plain HTTP too.
    text = re.sub(" ssl:([a-z]+|<.+?>)", "", str(error), flags=re.IGNORECASE)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
