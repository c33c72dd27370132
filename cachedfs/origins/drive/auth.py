"""Sign in to Google Drive in every way PyDrive2 and google-auth support, as one PyDrive2 `GoogleAuth`.

PyDrive2 renews a token by opening a browser if it finds no other way, and threads that find a token expired renew it
once each. So the `GoogleAuth` holds `SharedCredentials`: to PyDrive2 they never expire, and we renew them behind one
lock.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from pydrive2.auth import GoogleAuth

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive.credentials import find, from_object, name_of, source_of
from cachedfs.origins.drive.held import SCOPE, SharedCredentials
from cachedfs.origins.drive.options import SIGN_IN
from cachedfs.origins.drive.transport import abort, close, keep_308
from cachedfs.origins.retry import RetryPolicy

__all__ = ["OPTIONS", "SCOPE", "DriveAuth", "SharedCredentials", "describe", "sign_in"]

log = logging.getLogger("cachedfs.origins")

_CLIENT = (
    "client_id",
    "client_secret",
    "client_json",
    "client_json_file_path",
    "profile",
    "use_service_account",
    "client_user_email",
)
OPTIONS = frozenset(SIGN_IN)

_POLICY = RetryPolicy()


# The door: options in, a GoogleAuth out.


def sign_in(options: Mapping[str, Any], *, connect_s: float, stall_s: float) -> GoogleAuth:
    """Return an authorized PyDrive2 GoogleAuth; blocks on the network and on files, so call it in a thread.

    Tokens are requested when they are first needed, so cached data can be read without a network. Only a search for
    default credentials may ask a metadata server. Never opens a browser. Raises ValueError for options that contradict
    each other or name a missing file, and AccessDenied where there are no credentials.
    """
    given = {name: value for name, value in options.items() if not _is_absent(value)}
    _check(given)
    if "google_auth" in given:
        return _guarded(given["google_auth"], connect_s, stall_s)
    found = find(given)
    return _google_auth(SharedCredentials(found, connect_s=connect_s, stall_s=stall_s), stall_s)


def describe(gauth: GoogleAuth) -> str:
    """Return one line that names the account, without secrets."""
    credentials = gauth.credentials
    return credentials.name if isinstance(credentials, SharedCredentials) else name_of(credentials)


def _is_absent(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str) and not value)


def _check(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are unknown, incomplete or contradict each other."""
    if unknown := sorted(given.keys() - OPTIONS):
        raise ValueError(
            f"drive options: no sign-in is called {', '.join(unknown)}; known: {', '.join(sorted(OPTIONS))}"
        )
    client = [name for name in _CLIENT if name in given]
    ways = [[name] for name in ("google_auth", "credentials", "token") if name in given] + (
        [client] if client else []
    )
    if len(ways) > 1:
        raise ValueError(
            f"drive options {', '.join(name for way in ways for name in way)}: these are different ways to sign in; keep one"
        )
    if "client_json" in given and "client_json_file_path" in given:
        raise ValueError("drive options client_json and client_json_file_path say the same twice; keep one")
    has_json = "client_json" in given or "client_json_file_path" in given
    if "use_service_account" in given and not has_json:
        raise ValueError(
            "drive option use_service_account=True needs client_json= or client_json_file_path= with its key"
        )
    if "use_service_account" in given and (
        extra := [name for name in ("client_id", "client_secret", "profile") if name in given]
    ):
        raise ValueError(
            f"drive options use_service_account and {', '.join(extra)}: a service account has a key, no OAuth client"
        )
    if client and not has_json and "client_id" not in given:
        raise ValueError(
            f"drive options {', '.join(client)}: client_id= is needed to find the saved credentials"
        )


def _google_auth(held: SharedCredentials, stall_s: float) -> GoogleAuth:
    # Settings of our own, or PyDrive2 looks for a settings.yaml in the working directory.
    gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS), http_timeout=stall_s)
    gauth.credentials = held
    return gauth


def _guarded(gauth: Any, connect_s: float, stall_s: float) -> GoogleAuth:
    """Return `gauth` with its credentials shared; a copy, because the user keeps using the original."""
    if not hasattr(gauth, "Get_Http_Object"):
        raise ValueError(
            f"drive option google_auth=: a pydrive2.auth.GoogleAuth is expected, not {type(gauth).__name__}"
        )
    if gauth.credentials is None and gauth.settings.get("save_credentials"):
        gauth.LoadCredentials()
    credentials = gauth.credentials
    if credentials is None:
        raise AccessDenied(
            "drive option google_auth=: it has no credentials; call its LocalWebserverAuth() or ServiceAuth() first"
        )
    if isinstance(credentials, SharedCredentials) or source_of(credentials) is None:
        return gauth  # held already; or of a kind only its maker knows: used as it is, by its own `authorize`
    mine = copy.copy(gauth)
    mine.attr, mine.dirty = dict(gauth.attr), dict(gauth.dirty)  # where PyDrive2 keeps its attributes
    mine.thread_local, mine.http, mine.service = threading.local(), None, None
    mine.http_timeout = gauth.http_timeout or stall_s
    found = from_object(credentials)._replace(remedy="authenticate google_auth= again")
    mine.credentials = SharedCredentials(found, connect_s=connect_s, stall_s=stall_s)
    return mine


# What the origin holds.


class DriveAuth:
    """The credentials of a Drive account: headers for asyncio, http objects for threads, one token for both."""

    def __init__(self, gauth: GoogleAuth) -> None:
        if not isinstance(gauth.credentials, SharedCredentials):
            gauth = _guarded(gauth, _POLICY.connect_s, _POLICY.stall_s)
        self._gauth, self._stall_s = gauth, _POLICY.stall_s
        self._held: SharedCredentials | None = (
            gauth.credentials if isinstance(gauth.credentials, SharedCredentials) else None
        )
        self._renewing = asyncio.Lock()
        self._here = threading.local()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # of all threads, to close them

    @property
    def name(self) -> str:
        """The account, without secrets."""
        return describe(self._gauth)

    def scopes(self) -> list[str] | None:
        """Return the scopes of the tokens; None if unknown."""
        return None if self._held is None else self._held.scopes()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send; renew a token that is about to expire."""
        held = self._held
        if held is None:
            return _headers_of_foreign(self._gauth.credentials)
        failure = held.renewals.failure
        # While somebody else asks for another token, the present one does as long as it works.
        if not held.is_fresh() and (held.is_expired() or not self._renewing.locked()):
            async with self._renewing:
                if not held.is_fresh():
                    held.renewals.share(failure)
                    return await asyncio.to_thread(self._asked, lambda http: http.fresh_headers())
        return held.headers()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless another request just did; return False if there is none."""
        held = self._held
        if held is None:
            return False
        failure = held.renewals.failure
        async with self._renewing:
            if held.headers() == refused:
                held.renewals.share(failure)
            return await asyncio.to_thread(self._asked, lambda http: http.renew(refused))

    def transport(self) -> Any:
        """Return this thread's own http object of `Get_Http_Object`; it renews its token by itself."""
        # A fork inherits connections, but shares them.
        is_mine = getattr(self._here, "pid", None) == os.getpid()
        if not is_mine or getattr(self._here.http, "is_aborted", False):
            http = self._gauth.Get_Http_Object()
            keep_308(http)
            if getattr(http, "timeout", self._stall_s) is None:  # of credentials that are not held
                http.timeout = self._stall_s
            self._made.add(http)
            self._here.http, self._here.pid = http, os.getpid()
        return self._here.http

    def close(self) -> None:
        """Abort the requests of all threads and close their connections."""
        for http in list(self._made):
            abort(http)  # first: closing alone would wake nobody
            close(http)

    def _asked(self, question: Any) -> Any:
        """Return the result of `question` for a new http object; tokens are requested only about once an hour."""
        http = self._gauth.Get_Http_Object()
        try:
            return question(http)
        finally:
            http.close()


def _headers_of_foreign(credentials: Any) -> dict[str, str]:
    token = getattr(credentials, "access_token", None)
    if not isinstance(token, str):
        raise AccessDenied(
            f"drive option google_auth=: its credentials ({type(credentials).__name__}) do not show their token; "
            "pass google-auth credentials as credentials="
        )
    return {"authorization": f"Bearer {token}"}
