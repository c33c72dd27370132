"""Credentials of google-auth and oauth2client behind one interface, renewed by one thread for all."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import google.oauth2.credentials as google_users
from oauth2client.client import AssertionCredentials, OAuth2Credentials

from cachedfs.errors import AccessDenied, SignInRefused
from cachedfs.origins.drive.transport import SignedHttp, troubled
from cachedfs.origins.retry import RetryableError, RetryReason
from cachedfs.origins.tokens import TokenRenewals, is_expired, left_s

__all__ = [
    "SCOPE",
    "CredentialSource",
    "FoundToken",
    "GoogleCredentials",
    "OAuth2ClientCredentials",
    "SavedFile",
    "SharedCredentials",
]

log = logging.getLogger("cachedfs.origins")

SCOPE = "https://www.googleapis.com/auth/drive"


class CredentialSource(Protocol):
    """Credentials of one library; only `SharedCredentials` calls them."""

    @property
    def can_renew(self) -> bool:
        """True if another token can be requested."""
        ...

    def lasts_s(self) -> float:
        """Return for how many seconds the token can be used: infinite if unknown, -1 without a token."""
        ...

    def headers(self) -> dict[str, str]:
        """Return the headers of the present token."""
        ...

    def renew(self, http: Any) -> None:
        """Get another token over `http`; raises the library's own exceptions."""
        ...

    def scopes(self) -> list[str] | None:
        """Return the scopes of the tokens, as granted or else as requested; None if the library does not know."""
        ...


class FoundToken(NamedTuple):
    source: CredentialSource | None  # None: anonymous
    name: str  # who it is, without secrets
    remedy: str  # what to do when its tokens are refused


class GoogleCredentials:
    """Credentials of google-auth."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    @property
    def can_renew(self) -> bool:
        held = self._credentials
        return not isinstance(held, google_users.Credentials) or bool(
            held.refresh_token or held.refresh_handler
        )

    def lasts_s(self) -> float:
        return left_s(self._credentials.token, self._credentials.expiry)

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._credentials.token is not None:
            self._credentials.apply(headers)
        return headers

    def renew(self, http: Any) -> None:
        self._credentials.refresh(_Caller(http))

    def scopes(self) -> list[str] | None:
        known = getattr(self._credentials, "granted_scopes", None) or getattr(
            self._credentials, "scopes", None
        )
        return sorted(known) if known else None


class OAuth2ClientCredentials:
    """Credentials of oauth2client, which PyDrive2 creates."""

    def __init__(self, credentials: Any) -> None:
        needs_scope = getattr(credentials, "create_scoped_required", lambda: False)
        self._credentials = credentials.create_scoped([SCOPE]) if needs_scope() else credentials

    @property
    def can_renew(self) -> bool:
        return (
            isinstance(self._credentials, AssertionCredentials) or self._credentials.refresh_token is not None
        )

    def lasts_s(self) -> float:
        # Whatever `invalid` says: oauth2client sets it, and saves it, for a service in trouble too.
        return left_s(self._credentials.access_token, self._credentials.token_expiry)

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._credentials.access_token is not None:
            self._credentials.apply(headers)
        return headers

    def renew(self, http: Any) -> None:
        self._credentials.refresh(http)

    def scopes(self) -> list[str] | None:
        return sorted(getattr(self._credentials, "scopes", None) or ()) or None


class _Caller:
    """The callable that google-auth sends requests with; timeouts are those of the http object."""

    class _Response(NamedTuple):
        status: int
        headers: Mapping[str, str]
        data: bytes

    def __init__(self, http: Any) -> None:
        self._http = http

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _Response:
        response, data = self._http.request(url, method=method, body=body, headers=dict(headers or {}))
        return self._Response(response.status, dict(response), data)


class SavedFile:
    """The JSON file in which oauth2client saves credentials; replaced atomically, as other processes read it."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(os.path.expanduser(path))
        self._lock = threading.Lock()

    def acquire_lock(self) -> None:
        self._lock.acquire()

    def release_lock(self) -> None:
        self._lock.release()

    def locked_get(self) -> Any:
        """Return the saved credentials, which another process may have renewed; None if there are none."""
        try:
            with open(self._path, encoding="utf-8") as file:
                return OAuth2Credentials.from_json(file.read())
        except (OSError, ValueError, KeyError):
            return None

    def locked_put(self, credentials: Any) -> None:
        """Save credentials, readable by their owner only; if that fails, this process can still use them."""
        try:
            number, temp = tempfile.mkstemp(dir=os.path.dirname(self._path), prefix=".", suffix=".json")
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(credentials.to_json())
            os.replace(temp, self._path)  # dies before this: a hidden file more, and the old credentials
        except OSError as error:
            log.warning("renewed credentials cannot be saved in %s: %s", self._path, error.strerror)


class SharedCredentials:
    """Credentials in the form PyDrive2 needs, renewed by one thread for all."""

    # What PyDrive2 asks before it would renew them in its own way.
    access_token_expired = False
    invalid = False
    refresh_token = None

    def __init__(self, found: FoundToken, *, connect_s: float, stall_s: float) -> None:
        self.name = found.name
        self.connect_s, self._stall_s = connect_s, stall_s
        self._source, self._remedy = found.source, found.remedy
        self._lock = threading.Lock()
        self.renewals = TokenRenewals()

    def authorize(self, http: Any) -> SignedHttp:
        """Return an http object that sends these credentials; PyDrive2 calls this in each thread."""
        if http.timeout is None:
            http.timeout = self._stall_s
        return SignedHttp(self, http)

    def headers(self) -> dict[str, str]:
        """Return the headers of the present token, empty without one."""
        headers = self._source.headers() if self._source is not None else {}
        return {name.lower(): str(text) for name, text in headers.items()}

    def scopes(self) -> list[str] | None:
        """Return the scopes of the tokens; None if unknown."""
        return None if self._source is None else self._source.scopes()

    def is_fresh(self) -> bool:
        """Return whether the present headers can be sent without renewing the token."""
        return self._source is None or self.renewals.is_fresh(self._source.lasts_s())

    def is_expired(self) -> bool:
        """Return whether the present token can no longer be used."""
        return self._source is not None and is_expired(self._source.lasts_s())

    def fresh_headers(self, http: Any) -> dict[str, str]:
        """Return headers that can be sent; renew a token over `http` when it is about to expire.

        Raises RetryableError for network trouble, AccessDenied if no token can be had.
        """
        failure = self.renewals.failure
        if self._source is not None and not self.is_fresh():
            if self.is_expired():
                self._renew_late(self._source, http, failure)
            else:
                self._renew_early(self._source, http)
        return self.headers()

    def renew(self, refused: Mapping[str, str], http: Any) -> bool:
        """Get another token than the refused one, unless another thread just did; return False if there is none."""
        if self._source is None or not self._source.can_renew:
            return False
        failure = self.renewals.failure
        with self._lock:
            if self.headers() == refused:
                with self.renewals.shared(failure):
                    self._renew(self._source, http)
            return self.headers() != refused

    def _renew_early(self, source: CredentialSource, http: Any) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the others use the token meanwhile
        try:
            # Whatever is in the way, the token still works for some minutes.
            with self.renewals.early(), suppress(RetryableError, AccessDenied):
                if source.can_renew:
                    self._renew(source, http)
        finally:
            self._lock.release()

    def _renew_late(self, source: CredentialSource, http: Any, failure: RetryReason | None) -> None:
        with self._lock:
            if not is_expired(source.lasts_s()):
                return  # somebody was faster
            if not source.can_renew:
                raise SignInRefused(f"Google Drive: the token has expired ({self.name}): {self._remedy}")
            with self.renewals.shared(failure):
                self._renew(source, http)

    def _renew(self, source: CredentialSource, http: Any) -> None:
        with troubled(self._remedy):
            source.renew(http)
