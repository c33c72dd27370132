"""`HTTPClient`: requests over one aiohttp session, with request slots, counting and retries.

It is independent of the service: `judge` interprets an error response, and a `TokenSource`
provides the headers that prove the account.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import aiohttp
from yarl import URL

from cachedfs.errors import QuotaExceeded
from cachedfs.origins.base import has_stale_answer
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.origin_errors import object_of, well_formed
from cachedfs.origins.request_slots import OpenRequest, RequestSlots, is_speculative
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy, foreign, time_limit, untrusted
from cachedfs.origins.tokens import TokenSource

T = TypeVar("T")
MOST_REDIRECTS = 5  # Google's services need none
_MOST_RENEWALS = 2  # of the credentials for one attempt: others may renew them in between
_OVERLOADED = 503
_ERROR_BODY = 64 << 10
_LONGEST_BODY = 256 << 20  # of JSON and exports, which are kept in memory; Google's have up to some 20 MB
_RATE_OVER_S, _LEAST_BYTES_PER_S = 60.0, 1024  # a body that is slower for so long trickles
# Bytes of a body that are sent at once: a line of 2 kB/s takes one within the limit for silence.
_SLICE = 64 << 10
_LATE_FACTOR, _WEIGHT = 4, 1 / 8  # an answer is late after this many mean waits; weight of the newest wait
_ADDRESS_S = 60  # for which the address of a host is used
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)  # the last: of a host's name
_INSTALL = "Please install"  # in the message of aiohttp for an encoding that it cannot decode
_TIMER_LATE_S = 0.05  # a loop whose timer fires later than this was blocked


class RequestLimits(Protocol):
    """Delays requests that a service would refuse, and counts them against a quota."""

    async def wait(self, request: HTTPRequest) -> Any:
        """Wait until the request may be sent; return what `answered` needs. Raises an error if it may not be sent."""
        ...

    def answered(self, sent: Any, *, refused: bool) -> None:
        """Adjust the limits to an answer; `refused` means it said "too many requests"."""
        ...

    def count(self, request: HTTPRequest, n_bytes: int) -> None:
        """Count a request whose answer ended after `n_bytes`. One that was refused for its rate is not counted."""
        ...


@dataclasses.dataclass(eq=False)
class HTTPResponse(OpenRequest):
    """A response whose headers have arrived; it holds its slot until it is closed."""

    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _waited_s: float = 0.0  # for the bytes of the body, since its rate was last checked
    _checked_size: int = 0  # the size then

    async def read_some(self) -> bytes:
        """Return the next bytes of the body, empty at its end; raise RetryableError if it breaks or trickles."""
        began = time.monotonic()
        try:
            data: bytes = await self.answer.content.readany()
        except _BROKEN as error:
            raise_retryable(error)
        self.size += len(data)
        # Only the time spent here counts: a reader that pauses does not make a body slow.
        self._waited_s += time.monotonic() - began
        if self._waited_s >= _RATE_OVER_S and data:
            self._check_rate()
        return data

    def _check_rate(self) -> None:
        n_bytes, waited_s = self.size - self._checked_size, self._waited_s
        if n_bytes < _LEAST_BYTES_PER_S * waited_s:
            raise RetryableError(f"only {n_bytes} bytes of the body came in {waited_s:.0f} s")
        self._checked_size, self._waited_s = self.size, 0.0

    async def read_all(self) -> bytes:
        """Return the whole body; raise RetryableError if it breaks, or is longer than any answer."""
        data = await self.read_start(_LONGEST_BODY + 1)
        if len(data) > _LONGEST_BODY:
            raise foreign("the answer does not end")
        return data

    async def read_start(self, size: int = _ERROR_BODY) -> bytes:
        """Return the start of the body, by default as much as errors have; raise RetryableError if it breaks."""
        data = bytearray()
        while len(data) < size and (piece := await self.read_some()):
            data += piece
        return bytes(memoryview(data)[:size])


class HTTPClient:
    """Sends requests; every attempt holds a request slot while its response is read."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        auth: TokenSource | None,
        judge: Callable[[HTTPRequest, int, Mapping[str, str], bytes], Exception],
        *,
        slots: RequestSlots,
        on_request: Callable[[], None],
        policy: RetryPolicy,
        timeouts: Timeouts,
        options: Mapping[str, Any] = {},
        limits: RequestLimits | None = None,
    ) -> None:
        """Create a client that calls `on_request` for each request sent.

        `judge` returns the error for an error response: a RetryableError, or the final one. `limits` delays
        and counts requests, and may not let more be sent. `options` are further arguments of
        aiohttp for each request.
        """
        # aiohttp would repeat a request, uncounted, when the connection breaks before the response.
        session._retry_connection = False
        self._request: Callable[..., Awaitable[aiohttp.ClientResponse]] = session.request
        self._auth, self._judge = auth, judge
        self._slots, self._on_request, self.policy = slots, on_request, policy
        self._wait_s = 0.0  # moving average of the time until an answer, of requests with a timeout
        self._date = "", 0.0  # header of the latest answer, and when it came (monotonic)
        self._timeouts, self._limits = timeouts, limits
        # `judge` raises for a status.
        self._options = {"max_redirects": MOST_REDIRECTS, **options, "raise_for_status": False}

    async def json(self, request: HTTPRequest, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return what `parse` makes of the JSON object that the service answers to `request`, after retries.

        An answer that `parse` fails on is from another server, such as a proxy, and is retried.
        """

        async def attempt() -> T:
            found = object_of((await self.answer(request)).body)
            with well_formed():
                return parse(found)

        return await self.retried(attempt, request)

    async def retried(self, attempt: Callable[[], Awaitable[T]], request: HTTPRequest) -> T:
        """Return the result of `attempt`, which sends `request`, after retries."""
        tries = RetryAttempts(self.policy)
        while True:
            try:
                return await attempt()
            except RetryableError as failed:
                await tries.pause(failed, request.subject, request.purpose)

    async def answer(self, request: HTTPRequest) -> Answer:
        """Send `request` once, as `send` does; return the whole answer."""
        with closing(await self.send(request)) as response:
            return Answer(int(response.status), response.headers, await response.read_all())

    async def send(self, request: HTTPRequest, *, n_renewed: int = 0) -> HTTPResponse:
        """Send `request` once; return a good response, to be closed. Raises RetryableError or the final error."""
        range_, slots, is_ahead = request.headers.get("Range", ""), self._slots, is_speculative()
        await slots.kinds[is_ahead].acquire()
        slots.kinds[is_ahead].n_used += 1
        response = HTTPResponse(request.method, request.url, range_, slots, is_ahead)
        try:
            auth = await self._auth.headers() if self._auth else {}
            sent = await self._limits.wait(request) if self._limits else None
            timeout = self._timeouts.stale if has_stale_answer.get() else self._timeouts.usual
            options = {"timeout": timeout, **self._options, "params": request.params}
            options["headers"] = {**request.headers, **auth}
            if request.as_stored:
                options["auto_decompress"] = False
            self._on_request()
            url, response.began = URL(request.url, encoded=True), time.monotonic()
            is_plain = (request.data, request.within_s, request.follows_redirects) == (None, None, True)
            ask = self._request if is_plain and "auth" not in options else partial(self._ask, request)
            try:
                response.answer = answer = await ask(request.method, url, **options)
            except _BROKEN as error:
                raise_retryable(error, options["timeout"], time.monotonic() - response.began)
            response.wait_s = time.monotonic() - response.began
            response.status, response.headers = answer.status, answer.headers
            response.is_good = answer.status in request.good
            self._date = answer.headers.get("Date", ""), response.began + response.wait_s
            if response.is_good and self._limits is None and not answer.history:
                return response
            return await self._checked(request, response, auth, sent, n_renewed)
        except BaseException as error:  # a cancellation too
            response.close(error)
            raise

    def server_time(self) -> float | None:
        """Return the time now by the server's clock, up to a second ahead; None if unknown. From any thread."""
        date, came_at = self._date
        with suppress(ValueError):
            return parsedate_to_datetime(date).timestamp() + 1.0 + time.monotonic() - came_at
        return None

    async def _ask(
        self, request: HTTPRequest, method: str, url: URL, **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request with a body, a limit of its own on the wait for the answer, credentials, or no redirects."""
        if not request.follows_redirects:
            options["allow_redirects"] = False
        if url.user is not None:
            options.pop("auth", None)  # aiohttp does not choose
        ask = self._request if request.data is None else partial(self._send_body, request.data)
        if request.within_s is None:
            return await ask(method, url, **options)
        began, within_s = time.monotonic(), max(request.within_s, _LATE_FACTOR * self._wait_s)
        async with time_limit(
            within_s, RetryableError(f"no answer came within {within_s:g} s", is_late=True)
        ):
            response = await ask(method, url, **options)
        wait_s = time.monotonic() - began
        self._wait_s += (wait_s - self._wait_s) * (_WEIGHT if self._wait_s else 1)
        return response

    async def _send_body(
        self, data: bytes, *args: Any, headers: Mapping[str, str], **options: Any
    ) -> aiohttp.ClientResponse:
        """Send the body in slices; raise TimeoutError for a connection that takes none of it for too long.

        aiohttp has no timeout for sending.
        """
        loop, stall_s = asyncio.get_running_loop(), self._timeouts.usual.sock_read
        async with asyncio.timeout(stall_s) as silence:

            async def slices() -> AsyncIterator[bytes]:
                for start in range(0, len(data), _SLICE):
                    if stall_s is not None:
                        with suppress(RuntimeError):  # the answer came before the end of the body
                            silence.reschedule(loop.time() + stall_s)
                    yield data[start : start + _SLICE]

            headers = {**headers, "Content-Length": str(len(data))}
            return await self._request(*args, headers=headers, data=slices() if data else None, **options)

    async def _checked(
        self,
        request: HTTPRequest,
        response: HTTPResponse,
        auth: Mapping[str, str],
        sent: Any,
        n_renewed: int,
    ) -> HTTPResponse:
        """Return a response if it is good; after a 401, renew the credentials and send `request` again."""
        may_renew = response.status == 401 and n_renewed < _MOST_RENEWALS
        if may_renew and self._auth is not None and await self._auth.renew(auth):
            self._count_at_close(request, response)
            response.close()
            return await self.send(request, n_renewed=n_renewed + 1)
        # Headers and checksums prove that data of an object comes from the service, whichever host sent it.
        is_trusted = request.trusts_redirects or (response.is_good and request.as_stored)
        if not is_trusted and (host := other_host(response.answer)):
            response.is_good = False
            raise foreign(f"redirected to {host}, which answered {response.status}")
        if not response.is_good:
            raise await self._failure(request, response, sent)
        self._count_at_close(request, response)
        if self._limits is not None:
            self._limits.answered(sent, refused=False)
        return response

    async def _failure(self, request: HTTPRequest, response: HTTPResponse, sent: Any) -> Exception:
        """Return the error for a response that is a failure, and adapt the limits to it."""
        body = await response.read_start()
        error = self._judge(request, int(response.status), response.headers, body)
        is_rate = isinstance(error, RetryableError) and error.is_rate
        response.refused = is_rate or isinstance(error, QuotaExceeded)
        if self._limits is not None:
            self._limits.answered(sent, refused=is_rate)
        if not is_rate:
            self._count_at_close(request, response)
        # A rate is the concern of the limits: after a full minute, as many requests as before are allowed at a time.
        if (is_rate and self._limits is None) or response.status == _OVERLOADED:
            self._slots.refused(response.began or 0.0, time.monotonic())
        return error

    def _count_at_close(self, request: HTTPRequest, response: HTTPResponse) -> None:
        if self._limits is not None:
            response.at_close = partial(self._limits.count, request)


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
        return limit_s + (1.0 if limit_s > timeout.ceil_threshold else 0.0) + _TIMER_LATE_S

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


def raise_retryable(
    error: Exception, timeout: float | aiohttp.ClientTimeout | None = None, waited_s: float = 0.0
) -> NoReturn:
    """Raise the RetryableError for aiohttp's exception of a broken connection, after `waited_s` seconds."""
    failed = RetryableError(_text(error))
    if isinstance(error, aiohttp.InvalidURL) and not isinstance(error, aiohttp.RedirectClientError):
        raise error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        failed = untrusted(_text(error))
    elif isinstance(error, aiohttp.ConnectionTimeoutError):
        # Or the process or its event loop was blocked: then a timeout says nothing about the service.
        failed.is_unreachable = not isinstance(timeout, aiohttp.ClientTimeout) or is_on_time(
            timeout, waited_s
        )
    elif isinstance(error, aiohttp.ClientConnectorError):
        failed.is_unreachable = True
    elif isinstance(error, aiohttp.ClientHttpProxyError):
        why = f"the proxy does not connect: {error.status} {error.message}"
        # Its text contains the proxy's URL and password.
        raise RetryableError(why, is_unreachable=True) from None
    elif isinstance(error, aiohttp.RedirectClientError):
        failed = foreign(f"redirected to no address: {_text(error)}")
    elif isinstance(error, aiohttp.TooManyRedirects):
        failed = RetryableError("the service redirects in a loop", is_final=True)
    elif isinstance(error, aiohttp.ClientResponseError) and _INSTALL in error.message:
        why, _, package = error.message.partition(_INSTALL)
        failed = RetryableError(why.strip(" ."), is_final=True, remedy=f"Install {package.strip('` ')}")
    raise failed from error


def _text(error: BaseException) -> str:
    # aiohttp mentions ssl for plain HTTP too.
    text = re.sub(" ssl:([a-z]+|<.+?>)", "", str(error), flags=re.IGNORECASE)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
