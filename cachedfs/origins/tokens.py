"""Access tokens of google-auth credentials: when to renew one, and how waiting requests share the result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cachedfs.common.logging import without_secrets
from cachedfs.errors import OriginUnreachable
from cachedfs.origins.base import has_stale_answer
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.origin_errors import token_server_away
from cachedfs.origins.proxy import authorities
from cachedfs.origins.retry import RetryableError, RetryPolicy, time_limit, untrusted

_EXPIRES_SOON_S = 300  # as in gcsfs: a token that lasts less is renewed before it is used
_EXPIRED_S = 10  # a token that lasts less may be refused when it arrives
_SOON_AGAIN_S = 30  # a metadata server returns the same token until it expires: do not ask for every request


def finding_credentials(subject: str, policy: RetryPolicy) -> AbstractAsyncContextManager[None]:
    """Wait for the block, which looks for credentials, but not for long where a stale answer can be served.

    Raises OriginUnreachable then. Without a network, Google's library looks for default credentials for 15 s.
    """
    late = OriginUnreachable(f"{subject}: no credentials were found within {policy.reach_stale_s:g} s")
    return time_limit(policy.reach_stale_s if has_stale_answer.get() else None, late)


def _left_s(credentials: Any) -> float:
    """Return for how many seconds a token can be used: infinite if unknown, -1 without a token."""
    if credentials.token is None:
        return -1.0
    expiry: datetime | None = credentials.expiry
    if expiry is None:
        return math.inf
    # The libraries store UTC without a time zone.
    return ((expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def is_expired(credentials: Any) -> bool:
    """Return whether there is no token, or none that can still be used."""
    return _left_s(credentials) <= _EXPIRED_S


class TokenSource:
    """Request headers from google-auth credentials.

    A renewal blocks, so it runs in a thread, once for all requests that wait for it.
    """

    def __init__(
        self, credentials: Callable[[], Any], refresh: Callable[[], object], policy: RetryPolicy
    ) -> None:
        """`credentials` returns the credentials, None for anonymous access; `refresh` renews their token."""
        self._credentials, self._policy = credentials, policy
        self.without_token: dict[str, str] = {}  # the headers to send without credentials
        self._renewal = AsyncOnce(lambda: asyncio.to_thread(refresh), keeps=False)
        self._early_at = -math.inf  # when a token may be renewed early again

    async def headers(self) -> dict[str, str]:
        """Return the headers to send; renew a token that is about to expire."""
        if (held := self._credentials()) is None:
            return self.without_token
        lasts_s = _left_s(held)  # google-auth's own `valid` ends minutes earlier
        if lasts_s <= _EXPIRED_S:
            await self.renew(self.current())
        elif lasts_s <= _EXPIRES_SOON_S and self._renewal.is_idle and time.monotonic() >= self._early_at:
            try:
                await self.renew(self.current())
            except Exception:  # of any kind: the token still works for some minutes
                pass
            finally:  # a renewal that ends in a long timeout is not followed by the next
                self._early_at = time.monotonic() + _SOON_AGAIN_S
        return self.current()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless another request just did.

        Return False if there is none. Requests that wait for the same renewal share its failure, and a cancelled one
        does not stop it. It goes on in its thread if it takes longer than a request may wait.
        """
        if self._credentials() is None:
            return False
        if self.current() == refused:
            within_s = self._policy.reach_stale_s if has_stale_answer.get() else self._policy.reach_s
            late = RetryableError(f"no token came within {within_s:g} s", is_unreachable=True)
            async with time_limit(within_s, late):
                await self._renewal.get()
        return self.current() != refused

    def current(self) -> dict[str, str]:
        """Return the headers of the present token; without credentials those that take its place."""
        headers: dict[str, str] = {}
        if (credentials := self._credentials()) is None:
            return self.without_token
        if credentials.token is not None:
            credentials.apply(headers)
        return headers


def refresh(credentials: Any, policy: RetryPolicy) -> None:
    """Get a new token from Google.

    Raises RetryableError for problems of the network or of Google's servers, and google-auth's own error for a refusal.
    """
    import requests
    from google.auth.exceptions import RefreshError, TransportError
    from google.auth.transport.requests import Request

    timeout = policy.connect_s, policy.stall_s
    with requests.Session() as session:
        try:
            # google-auth's own timeout is two minutes. On some of Google's machines it mounts the certificates of the
            # metadata server on `request.session`.
            request: Any = partial(Request(session), timeout=timeout, verify=authorities())
            request.session = session
            credentials.refresh(request)
        except (TransportError, RefreshError) as error:
            if (failure := token_server_away(error)) is not None:
                if isinstance(failure.__cause__, requests.exceptions.SSLError):
                    raise untrusted(f"no token: {message_of(failure)}") from error
                is_unreachable = not _is_cut_off(failure)
                raise RetryableError(
                    f"no token: {message_of(failure)}", is_unreachable=is_unreachable
                ) from error
            if not error.retryable:
                raise
            raise RetryableError(f"no token: {message_of(error)}") from error


def message_of(error: Exception) -> str:
    """Return google-auth's message without the answer of the server that may follow it."""
    return without_secrets(str(error.args[0] if error.args else error))


def _is_cut_off(cause: BaseException | None) -> bool:
    """Return whether a server was reached that then went silent or closed the connection."""
    import requests
    from google.auth.exceptions import TransportError
    from urllib3.exceptions import ProtocolError

    while isinstance(cause, TransportError):  # for a metadata server they are nested
        cause = cause.__cause__
    reason = cause.args[0] if cause is not None and cause.args else None
    return isinstance(cause, requests.ReadTimeout) or isinstance(reason, ProtocolError)
