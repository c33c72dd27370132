"""`HTTPClient`: requests over one aiohttp session, with request slots, counting and retries.

It is independent of the service: an `HTTPRequest` is what to send, `judge` interprets an error response, and an `Auth`
provides the headers that prove the account.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import aiohttp
from yarl import URL

from cachedfs.errors import OriginUnavailable, OriginUnreachable, QuotaExceeded
from cachedfs.origins.base import has_stale_answer
from cachedfs.origins.origin_errors import has_secrets, object_of, well_formed
from cachedfs.origins.request_log import LoggedRequest
from cachedfs.origins.retry import (
    BodyRate,
    RetryableError,
    RetryAttempts,
    RetryPolicy,
    RetryReason,
    answered_within,
    foreign,
    untrusted,
)

if TYPE_CHECKING:
    from cachedfs.origins.rate_limit import RateLimiter, SentRequest
    from cachedfs.origins.request_slots import RequestSlots

__all__ = [
    "Auth",
    "HTTPClient",
    "HTTPRequest",
    "HTTPResponse",
    "RequestMeter",
    "Timeouts",
    "is_on_time",
    "new_connector",
    "other_host",
    "timeouts_of",
]

T = TypeVar("T")
MOST_REDIRECTS = 5  # Google's services need none
_GOOD = frozenset({200, 206, 416})
_MOST_RENEWALS = 2  # of the credentials for one attempt: others may renew them in between
_OVERLOADED = 503
_ERROR_BODY = 64 << 10
_LONGEST_BODY = 256 << 20  # of JSON and exports, which are kept in memory; Google's have up to some 20 MB
_SLICE = (
    64 << 10
)  # bytes of a body that are sent at once: a line of 2 kB/s takes one within the limit for silence
_LATE, _WEIGHT = 4, 1 / 8  # an answer is late after _LATE times the mean wait; weight of the newest
_ADDRESS_S = 60  # for which the address of a host is used
_INSTALL = "Please install"  # in the message of aiohttp for an encoding that it cannot decode
_LATE_S = 0.05  # a running event loop fires its timers sooner than this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """One request before it is sent; errors name its `subject` and what it was `doing`."""

    url: str  # percent-encoded
    params: Mapping[str, str]
    subject: str
    doing: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    as_stored: bool = False  # the body is an object's bytes: do not decompress it
    is_pinned: bool = False
    method: str = "GET"
    data: bytes | None = None  # the body to send
    kind: str = "download"  # as the rate limiter counts it
    good: frozenset[int] = _GOOD  # the statuses that are no failures
    follows_redirects: bool = True
    trusts_redirects: bool = False  # any answer of another host counts as the service's own


class Auth(Protocol):
    """The credentials of an account, as request headers."""

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, from credentials that are valid now."""
        ...

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Replace the credentials of the `refused` headers; return False if there are no others."""
        ...


class RequestMeter(Protocol):
    """Counts requests against a quota."""

    def check(self, request: HTTPRequest) -> None:
        """Raise an error if the request may not be sent."""
        ...

    def answered(self, request: HTTPRequest, n_bytes: int) -> None:
        """Count a request whose answer ended after `n_bytes`. A refusal for its rate is not counted."""
        ...


class HTTPResponse:
    """A response whose headers have arrived."""

    def __init__(self, response: aiohttp.ClientResponse, logged: LoggedRequest) -> None:
        self._response, self._logged = response, logged
        self._rate = BodyRate()
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.url = str(response.url)
        self.other_host = other_host(response)  # where redirects led; None for the host that was asked

    async def read_some(self) -> bytes:
        """Return the next bytes of the body, empty at its end; raise RetryableError if it breaks or trickles."""
        began = time.monotonic()
        with _retryable_errors():
            data = await self._response.content.readany()
        self._logged.size += len(data)
        if data:
            self._rate = self._rate.after(len(data), time.monotonic() - began)
        return data

    async def read_all(self) -> bytes:
        """Return the whole body; raise RetryableError if it breaks, or is longer than any answer."""
        data = await self._start(_LONGEST_BODY + 1)
        if len(data) > _LONGEST_BODY:
            raise RetryableError(foreign("the answer does not end"))
        return data

    async def read_error(self) -> bytes:
        """Return the start of an error response's body, up to 64 KiB; raise RetryableError if it breaks."""
        return await self._start(_ERROR_BODY)

    async def _start(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (piece := await self.read_some()):
            data += piece
        return bytes(data[:size])

    @property
    def size(self) -> int:
        """Bytes of the body that were read."""
        return self._logged.size

    def log_refusal(self) -> None:
        """Log this response as a refusal for a rate limit or a quota."""
        self._logged.refused = True

    def close(self) -> None:
        """Stop reading; the connection is reused if the body was read to its end, else dropped."""
        self._response.close()
        self._logged.over()


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
        timeouts: Timeouts,
        keeps_session_timeout: bool = False,
        options: Mapping[str, Any] = {},
        rate_limiter: RateLimiter | None = None,
        meter: RequestMeter | None = None,
    ) -> None:
        """Create a client that calls `on_request` for each request sent.

        `judge` turns an error response into a reason to retry or into the exception to raise. `rate_limiter` delays
        requests. `meter` counts the answered ones, and may refuse to send more. `options` are further arguments of
        aiohttp for each request.
        """
        # aiohttp would repeat a request, uncounted, when the connection breaks before the response.
        session._retry_connection = False
        self._session, self._auth, self._judge = session, auth, judge
        self._slots, self._on_request, self.new_tries = slots, on_request, new_tries
        self._rate_limiter, self._meter = rate_limiter, meter
        self._wait_s = 0.0  # moving average of the time until an answer, of requests with a timeout
        self._timeouts, self._stall_s = timeouts, timeouts.usual.sock_read
        self._keeps_session_timeout = keeps_session_timeout
        self._options = {"max_redirects": MOST_REDIRECTS, **options}

    async def json(self, request: HTTPRequest, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return what `parse` makes of the JSON object that the service answers to `request`, after retries.

        An answer that `parse` fails on is from another server, such as a proxy, and is retried.
        """

        async def attempt() -> T:
            async with self.exchange(request) as exchange:
                found = object_of(await exchange.read_all())
            with well_formed():
                return parse(found)

        return await self.retried(attempt, request, self.new_tries())

    async def retried(
        self, attempt: Callable[[], Awaitable[T]], request: HTTPRequest, tries: RetryAttempts
    ) -> T:
        """Return the result of `attempt`, repeated for as long as `tries` allows."""
        while True:
            try:
                return await attempt()
            except RetryableError as failed:
                await self.pause(failed, request, tries)

    async def pause(self, failed: RetryableError, request: HTTPRequest, tries: RetryAttempts) -> None:
        """Wait before the next attempt; raise OriginUnavailable when there is none left."""
        wait_s = tries.next_wait_s(failed.trouble)
        if wait_s is None:
            kind = OriginUnreachable if failed.trouble.is_unreachable else OriginUnavailable
            cause = failed.__cause__ or failed
            raise kind(
                f"{request.subject}: {request.doing} failed after {tries.summary()}; the last time: {failed}. "
                f"{failed.trouble.remedy}"
            ) from (None if has_secrets(cause) else cause)  # a traceback prints it, too
        await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def exchange(
        self, request: HTTPRequest, *, within_s: float | None = None
    ) -> AsyncIterator[HTTPResponse]:
        """Send `request` once; leaving before the end of the body drops the connection.

        Raises RetryableError, also if there is no answer within `within_s` seconds (longer where answers usually take
        long), or the final error.
        """
        async with self._slots.semaphore():
            exchange = await self._send(request, within_s)
            try:
                yield exchange
            finally:
                exchange.close()
                self._slots.finished(exchange.size)
                self._count(request, exchange)

    async def _send(self, request: HTTPRequest, within_s: float | None) -> HTTPResponse:
        """Return a successful response; after a 401, renew the credentials and send again."""
        auth_headers, began_at = await self._auth.headers(), self._slots.now()
        sent, response = await self._request_at_rate(request, auth_headers, within_s)
        n_renewed = 0
        while (
            response.status == 401
            and n_renewed < _MOST_RENEWALS
            and await self._renewed(response, auth_headers)
        ):
            self._count(request, response)
            n_renewed, auth_headers = n_renewed + 1, await self._auth.headers()
            sent, response = await self._request_at_rate(request, auth_headers, within_s)
        is_good = response.status in request.good
        # Headers and checksums prove that data of an object comes from the service, whichever host sent it.
        is_trusted = request.trusts_redirects or (is_good and request.as_stored)
        if response.other_host and not is_trusted:
            response.close()
            raise RetryableError(
                foreign(f"redirected to {response.other_host}, which answered {response.status}")
            )
        if is_good:
            self._report_answer(sent, refused=False)
            return response
        try:
            body = await response.read_error()
            outcome = self._judge(request, response.status, response.headers, body)
            is_refused = isinstance(outcome, RetryReason) and outcome.is_rate
            if is_refused or isinstance(outcome, QuotaExceeded):
                response.log_refusal()
        finally:
            response.close()
        self._report_answer(sent, refused=is_refused)
        if not is_refused:
            self._count(request, response)
        # A rate is the rate limiter's concern: after a full minute, as many requests as before are allowed at a time.
        is_overload = is_refused and self._rate_limiter is None
        if isinstance(outcome, RetryReason) and (is_overload or response.status == _OVERLOADED):
            self._slots.refused(began_at)
        raise RetryableError(outcome) if isinstance(outcome, RetryReason) else outcome

    async def _renewed(self, response: HTTPResponse, auth_headers: Mapping[str, str]) -> bool:
        try:
            is_renewed = await self._auth.renew(auth_headers)
        except BaseException:  # also on cancellation: closing the response frees the connection
            response.close()
            raise
        if is_renewed:
            response.close()
        return is_renewed

    async def _request_at_rate(
        self, request: HTTPRequest, auth_headers: Mapping[str, str], within_s: float | None
    ) -> tuple[tuple[SentRequest, ...], HTTPResponse]:
        """Return what the rate limiter counted for `request`, and its response."""
        if self._meter is not None:
            self._meter.check(request)
        sent = () if self._rate_limiter is None else await self._rate_limiter.spend(request.kind)
        answer = self._request(request, auth_headers)
        if within_s is None:
            return sent, await answer
        began = time.monotonic()
        response = await answered_within(max(within_s, _LATE * self._wait_s), answer)
        wait_s = time.monotonic() - began
        self._wait_s += (wait_s - self._wait_s) * (_WEIGHT if self._wait_s else 1)
        return sent, response

    def _report_answer(self, sent: tuple[SentRequest, ...], *, refused: bool) -> None:
        if self._rate_limiter is not None:
            self._rate_limiter.answered(sent, refused=refused)

    def _count(self, request: HTTPRequest, response: HTTPResponse) -> None:
        if self._meter is not None:
            self._meter.answered(request, response.size)

    async def _request(self, request: HTTPRequest, auth_headers: Mapping[str, str]) -> HTTPResponse:
        self._on_request()
        logged = LoggedRequest(request.method, request.url, request.headers.get("Range", ""))
        try:
            response = await self._open(request, auth_headers)
        except BaseException as error:  # also on cancellation
            logged.over(error)
            raise
        logged.answered(response.status)
        return HTTPResponse(response, logged)

    async def _open(self, request: HTTPRequest, auth_headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        started = time.monotonic()
        headers = {**request.headers, **auth_headers}
        try:
            with _retryable_errors():
                if request.data is not None:
                    return await self._open_after_body(request, request.data, headers)
                return await self._request_with(request, headers)
        except RetryableError as failed:
            is_timeout = isinstance(failed.__cause__, aiohttp.ConnectionTimeoutError)
            if not is_timeout or is_on_time(self._timeouts.now(), time.monotonic() - started):
                raise
            # The process or its event loop was blocked, so the timeout says nothing about the service.
            raise RetryableError(
                dataclasses.replace(failed.trouble, is_unreachable=False)
            ) from failed.__cause__

    async def _open_after_body(
        self, request: HTTPRequest, data: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Send the body in slices; raise TimeoutError for a connection that takes none of it for too long.

        aiohttp has no timeout for sending.
        """
        loop, stall_s = asyncio.get_running_loop(), self._stall_s
        async with asyncio.timeout(stall_s) as silence:

            async def slices() -> AsyncIterator[bytes]:
                for start in range(0, len(data), _SLICE):
                    if stall_s is not None:
                        with suppress(RuntimeError):  # the answer came before the end of the body
                            silence.reschedule(loop.time() + stall_s)
                    yield data[start : start + _SLICE]

            return await self._request_with(
                request, {**headers, "Content-Length": str(len(data))}, slices() if data else None
            )

    async def _request_with(
        self, request: HTTPRequest, headers: dict[str, str], data: AsyncIterator[bytes] | None = None
    ) -> aiohttp.ClientResponse:
        options: dict[str, Any] = {"allow_redirects": request.follows_redirects}
        if not self._keeps_session_timeout:
            options["timeout"] = self._timeouts.now()
        options |= self._options
        options["raise_for_status"] = False  # `judge` does it
        if request.as_stored:
            options["auto_decompress"] = False
        url = URL(request.url, encoded=True)
        if url.user is not None:
            options.pop("auth", None)  # aiohttp refuses to choose
        return await self._session.request(
            request.method,
            url,
            params=request.params,
            headers=headers,
            data=data,
            **options,
        )


def other_host(response: aiohttp.ClientResponse) -> str | None:
    """Return the host that answered if redirects led to another host, else None."""
    if not response.history:
        return None
    requested, answered = response.history[0].url, response.url
    is_same = requested.host == answered.host and (
        requested.port == answered.port or requested.scheme != answered.scheme
    )
    return None if is_same else answered.authority


class Timeouts(NamedTuple):
    """The timeouts of a request, and those of one whose caller can serve a stale answer."""

    usual: aiohttp.ClientTimeout
    stale: aiohttp.ClientTimeout

    def now(self) -> aiohttp.ClientTimeout:
        return self.stale if has_stale_answer.get() else self.usual


def timeouts_of(
    policy: RetryPolicy,
    *,
    own_timeout: float | aiohttp.ClientTimeout | None = None,
    can_wait_for_pool: bool = False,
) -> Timeouts:
    """Return the timeouts of one request: for connecting and for silence, none for the whole.

    `own_timeout` is the user's own: seconds for the whole request, or an aiohttp value, which is used as it is.
    """
    if isinstance(own_timeout, aiohttp.ClientTimeout):
        return Timeouts(own_timeout, own_timeout)

    def within(reach_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=own_timeout,
            # Only `connect` includes finding the host's address, but also waiting for a free connection.
            connect=None if can_wait_for_pool else reach_s,
            sock_connect=policy.connect_s,
            sock_read=policy.stall_s,
        )

    return Timeouts(within(policy.reach_s), within(policy.reach_stale_s))


def is_on_time(timeout: aiohttp.ClientTimeout, waited_s: float) -> bool:
    """Return whether a connect timeout fired after `waited_s` seconds as it should, or was itself delayed."""

    def latest_s(limit_s: float) -> float:
        # aiohttp rounds long timeouts up to full seconds.
        return limit_s + (1.0 if limit_s > timeout.ceil_threshold else 0.0) + _LATE_S

    if timeout.sock_connect is None or waited_s < latest_s(timeout.sock_connect):
        return True
    return timeout.connect is not None and timeout.connect <= waited_s < latest_s(timeout.connect)


class _Connector(aiohttp.TCPConnector):
    """Tries the addresses of a host once: after a timeout, aiohttp tries those again that it tried at the same time."""

    async def _wrap_create_connection(self, *args: Any, addr_infos: list[Any], **options: Any) -> Any:
        try:
            return await super()._wrap_create_connection(*args, addr_infos=addr_infos, **options)
        except TimeoutError:
            addr_infos.clear()
            raise


def new_connector(**options: Any) -> aiohttp.TCPConnector:
    """Return a connector without a limit of its own: our request slots are the limit.

    aiohttp completes a lookup of an address whose request timed out. The address is kept for longer than an origin
    counts as unreachable, so that the next try has it.
    """
    return _Connector(limit=0, ttl_dns_cache=_ADDRESS_S, **options)


@contextmanager
def _retryable_errors() -> Iterator[None]:
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
    except aiohttp.RedirectClientError as error:
        raise RetryableError(foreign(f"redirected to no address: {_text(error)}")) from error
    except aiohttp.InvalidURL:
        raise
    except aiohttp.TooManyRedirects as error:
        raise RetryableError(RetryReason("the service redirects in a loop", is_final=True)) from error
    except aiohttp.ClientResponseError as error:
        if _INSTALL not in error.message:
            raise RetryableError(RetryReason(_text(error))) from error
        why, _, package = error.message.partition(_INSTALL)
        reason = RetryReason(why.strip(" ."), is_final=True, remedy=f"Install {package.strip('` ')}")
        raise RetryableError(reason) from error
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:  # the last: of a host's name
        raise RetryableError(RetryReason(_text(error))) from error


def _text(error: BaseException) -> str:
    # aiohttp mentions ssl for plain HTTP too.
    text = re.sub(" ssl:([a-z]+|<.+?>)", "", str(error), flags=re.IGNORECASE)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
