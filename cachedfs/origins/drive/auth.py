"""The sign-in to Google Drive: every way that PyDrive2 and google-auth know, as one PyDrive2 `GoogleAuth`.

PyDrive2 itself renews a token by opening a browser where it can find no other way, and threads that find a
token expired at the same time renew it once each. So the credentials in the `GoogleAuth` are `Held`: to
PyDrive2 they never expire, and they are renewed here, behind one lock.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.oauth2.credentials as google_users
import google.oauth2.service_account as google_services
import platformdirs
from oauth2client.client import OAuth2Credentials
from pydrive2.auth import GoogleAuth

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive.held import (
    SCOPE,
    Found,
    GoogleSource,
    Held,
    OAuth2ClientSource,
    SavedFile,
    Source,
)
from cachedfs.origins.drive.options import SIGN_IN
from cachedfs.origins.drive.transport import abort, close, keep_308
from cachedfs.origins.failures import without_secrets
from cachedfs.origins.retry import Policy

__all__ = ["OPTIONS", "SCOPE", "DriveAuth", "Held", "describe", "sign_in"]

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

_POLICY = Policy()

_WAYS = (
    "in Colab run `from google.colab import auth; auth.authenticate_user()` first; on a laptop pass client_id= and "
    "client_secret= of an OAuth client, or run `gcloud auth application-default login "
    f"--scopes={SCOPE},https://www.googleapis.com/auth/cloud-platform`; on a server pass the key file of a service "
    "account as token="
)
_TOKEN_FORMS = (
    "a token is 'google_default', 'anon', an access token, or a JSON file or dictionary (service account key, "
    "authorized user, credentials saved by PyDrive2)"
)


# The door: options in, a GoogleAuth out.


def sign_in(options: Mapping[str, Any], *, connect_s: float, stall_s: float) -> GoogleAuth:
    """Return an authorised PyDrive2 GoogleAuth; blocks on the network and on files: call it in a thread.

    Tokens are asked for when they are first needed, so what is cached can be read without a network; only
    a search for default credentials may ask a metadata server. Never opens a browser. Raises ValueError for
    options that do not go together or name no file, AccessDenied where there are no credentials.
    """
    given = {name: value for name, value in options.items() if not _is_absent(value)}
    _check(given)
    if "google_auth" in given:
        return _guarded(given["google_auth"], connect_s, stall_s)
    found = _find(given)
    return _google_auth(Held(found, connect_s=connect_s, stall_s=stall_s), stall_s)


def describe(gauth: GoogleAuth) -> str:
    """Return one line that says who signs in, without secrets."""
    credentials = gauth.credentials
    return credentials.name if isinstance(credentials, Held) else _name_of(credentials)


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


def _find(given: Mapping[str, Any]) -> Found:
    if "credentials" in given:
        return _from_object(given["credentials"])
    if "token" in given:
        return _from_token(given["token"])
    if "client_json" in given:
        return _from_info(_parsed(given["client_json"], "client_json"), "client_json", given)
    if given:
        return _from_client(given)
    return _from_default()


def _google_auth(held: Held, stall_s: float) -> GoogleAuth:
    # Settings of our own, or PyDrive2 looks for a settings.yaml in the working directory.
    gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS), http_timeout=stall_s)
    gauth.credentials = held
    return gauth


def _guarded(gauth: Any, connect_s: float, stall_s: float) -> GoogleAuth:
    """Return `gauth` with its credentials held; a copy, because the user goes on using the original."""
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
    if isinstance(credentials, Held) or _source_of(credentials) is None:
        return gauth  # held already; or of a kind only its maker knows: used as it is, by its own `authorize`
    mine = copy.copy(gauth)
    mine.attr, mine.dirty = dict(gauth.attr), dict(gauth.dirty)  # where PyDrive2 keeps its attributes
    mine.thread_local, mine.http, mine.service = threading.local(), None, None
    mine.http_timeout = gauth.http_timeout or stall_s
    found = _from_object(credentials)._replace(remedy="authenticate google_auth= again")
    mine.credentials = Held(found, connect_s=connect_s, stall_s=stall_s)
    return mine


# Where credentials come from.


def _from_token(token: Any) -> Found:
    if isinstance(token, Mapping):
        return _from_info(dict(token), "token", {})
    if not isinstance(token, (str, os.PathLike)):
        raise ValueError(
            f"drive option token=: {type(token).__name__} is none; {_TOKEN_FORMS}; objects go in credentials="
        )
    text = os.fspath(token).strip()
    if text.startswith("{"):
        return _from_info(_parsed(text, "token"), "token", {})
    if text == "google_default":
        return _from_default()
    if text == "anon":
        return Found(None, "anonymous", "these files are not public: sign in")
    if isinstance(token, os.PathLike) or _is_file_name(text):
        return _from_info(_read_json(text, "token"), text, {"client_json_file_path": text})
    return _from_access_token(text)


def _is_file_name(text: str) -> bool:
    """Whether a string is meant as the name of a file: access tokens hold no `.json`, but may hold a `/`."""
    if text.startswith(("ya29.", "1//")) or len(text) > 1000:
        return False
    return text.endswith(".json") or text.startswith(("/", "~", "./", "../")) or os.path.isfile(text)


def _from_access_token(token: str) -> Found:
    if not token.isprintable() or " " in token:
        raise ValueError(f"drive option token=: this is no access token; {_TOKEN_FORMS}")
    return Found(
        GoogleSource(google_users.Credentials(token)),  # type: ignore[no-untyped-call]
        "access token",
        "it has expired or was revoked: pass a new one",
    )


def _from_default() -> Found:
    """Return what google-auth finds: Colab's sign-in, gcloud's, a key file in the environment, the machine's."""
    try:
        credentials, _ = google.auth.default(scopes=[SCOPE])
    except google.auth.exceptions.DefaultCredentialsError as error:
        said = without_secrets(str((error.args or ("",))[0])).split("\n")[0]
        raise AccessDenied(
            "Google Drive: no credentials found in GOOGLE_APPLICATION_CREDENTIALS, in gcloud's application default "
            f"credentials and at the metadata server of this machine ({said}): {_WAYS}"
        ) from None
    name = f"application default credentials ({_name_of(credentials)})"
    return Found(GoogleSource(credentials), name, f"sign in again: {_WAYS}")


def _from_object(credentials: Any) -> Found:
    source = _source_of(credentials)
    if source is None:
        raise ValueError(
            f"drive option credentials=: a google-auth credentials object is expected, not {type(credentials).__name__}"
        )
    if _is_anonymous(credentials):
        return _from_token("anon")
    return Found(source, _name_of(credentials), "make new credentials")


def _from_client(given: Mapping[str, Any]) -> Found:
    """Return what a JSON file holds: the one named, or the one where PyDrive2 and DVC save an OAuth sign-in."""
    path = os.fspath(
        given.get("client_json_file_path") or _saved_by_pydrive2(given["client_id"], given.get("profile"))
    )
    if os.path.isfile(path):
        return _from_info(
            _read_json(path, "client_json_file_path"), path, {**given, "client_json_file_path": path}
        )
    if "use_service_account" in given:
        raise ValueError(f"drive option client_json_file_path={path!r}: there is no such file")
    raise AccessDenied(f"Google Drive: no saved sign-in (there is no {path}): {_once(given)}")


def _saved_by_pydrive2(client_id: str, profile: str | None) -> str:
    folder = os.path.join(platformdirs.user_cache_dir("pydrive2fs", appauthor=False), client_id)
    return os.path.join(folder, f"{profile or 'default'}.json")


def _once(given: Mapping[str, Any]) -> str:
    """Return how to sign in by hand; what it saves is found here."""
    names = ("client_id", "profile", "client_json_file_path")
    named = [f"{name}={os.fspath(given[name])!r}" for name in names if name in given]
    if "client_id" not in given:
        named.insert(0, "client_id='...'")
    named.insert(1, "client_secret='...'")
    return (
        "sign in once where there is a browser: `from pydrive2.fs import GDriveFileSystem; "
        f"GDriveFileSystem('root', {', '.join(named)})` (pip install \"pydrive2[fsspec]\")"
    )


def _read_json(path: str, option: str) -> dict[str, Any]:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise ValueError(f"drive option {option}={path!r}: there is no such file; {_TOKEN_FORMS}") from None
    except OSError as error:
        raise ValueError(
            f"drive option {option}={path!r}: the file cannot be read ({error.strerror})"
        ) from None
    return _parsed(text, f"{option}={path!r}")


def _parsed(text: Any, what: str) -> dict[str, Any]:
    """Return JSON as a dictionary; raises ValueError that does not quote it."""
    if isinstance(text, Mapping):
        return dict(text)
    with suppress(ValueError, TypeError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ValueError(f"drive option {what}: this is not JSON of credentials")


def _from_info(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> Found:
    """Return the credentials that a JSON dictionary describes; `where` is what an error names."""
    kind = info.get("type")
    try:
        if kind == "service_account":
            return _from_key(info, given.get("client_user_email"))
        if "use_service_account" in given or "client_user_email" in given:
            raise ValueError(f"drive option {where}: this is not the key of a service account")
        if kind == "authorized_user":
            return _from_authorized_user(info)
        if "access_token" in info and "client_id" in info:
            return _from_saved(info, where, given)
    except KeyError as error:
        raise ValueError(f"drive option {where}: the JSON of credentials lacks {error}") from None
    if "installed" in info or "web" in info:
        raise ValueError(
            f"drive option {where}: this is an OAuth client (client_secrets.json), nobody's sign-in: pass its "
            "client_id= and client_secret="
        )
    raise ValueError(
        f"drive option {where}: JSON of credentials of type {kind!r}; {_TOKEN_FORMS}; what else google-auth reads goes "
        "in GOOGLE_APPLICATION_CREDENTIALS"
    )


def _from_key(info: dict[str, Any], user: str | None) -> Found:
    try:
        credentials = google_services.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            info, scopes=[SCOPE], subject=user
        )
    except (ValueError, google.auth.exceptions.GoogleAuthError):  # its message may quote the key
        raise ValueError(
            "the key of the service account is damaged or incomplete: download it again"
        ) from None
    name = f"service account {info['client_email']}" + (f" for {user}" if user else "")
    return Found(
        GoogleSource(credentials),
        name,
        "the key was deleted or may not do this: make a new key for the service account",
    )


def _from_authorized_user(info: dict[str, Any]) -> Found:
    try:
        credentials = google_users.Credentials.from_authorized_user_info(info)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(
            "the JSON of an authorized user needs client_id, client_secret and refresh_token"
        ) from None
    return Found(
        GoogleSource(credentials), f"authorized user of client {info['client_id']}", f"sign in again: {_WAYS}"
    )


def _from_saved(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> Found:
    """Return credentials saved by PyDrive2; renewed ones are saved where they came from."""
    credentials = OAuth2Credentials.from_json(json.dumps({"user_agent": None, "invalid": False, **info}))
    path = given.get("client_json_file_path")
    if path is not None:
        credentials.set_store(SavedFile(os.fspath(path)))
    name = f"saved OAuth credentials of client {info['client_id']}" + (
        f" ({where})" if path is not None else ""
    )
    remove = f"remove {path} and " if path is not None else ""
    return Found(
        OAuth2ClientSource(credentials), name, remove + _once({"client_id": info["client_id"], **given})
    )


def _source_of(credentials: Any) -> Source | None:
    """Return what renews these credentials; None for a kind that is not known."""
    if isinstance(credentials, google.auth.credentials.Credentials):
        scoped = google.auth.credentials.with_scopes_if_required(credentials, [SCOPE])  # type: ignore[no-untyped-call]
        return GoogleSource(scoped)
    if isinstance(credentials, OAuth2Credentials):
        return OAuth2ClientSource(credentials)
    return None


def _is_anonymous(credentials: Any) -> bool:
    return isinstance(credentials, google.auth.credentials.AnonymousCredentials)


def _name_of(credentials: Any) -> str:
    """Return who credentials are, as far as they say: never what they hold."""
    for attribute, words in (
        ("service_account_email", "service account"),
        ("client_id", "OAuth credentials of client"),
    ):
        if isinstance(value := getattr(credentials, attribute, None), str) and value:
            return f"{words} {value}"
    return f"credentials of the kind {type(credentials).__name__}"


# What the origin holds.


class DriveAuth:
    """Who asks Google Drive: headers for asyncio, http objects for threads, one token for both."""

    def __init__(self, gauth: GoogleAuth) -> None:
        if not isinstance(gauth.credentials, Held):
            gauth = _guarded(gauth, _POLICY.connect_s, _POLICY.stall_s)
        self._gauth, self._stall_s = gauth, _POLICY.stall_s
        self._held: Held | None = gauth.credentials if isinstance(gauth.credentials, Held) else None
        self._renewing = asyncio.Lock()
        self._here = threading.local()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # of all threads, to close them

    @property
    def name(self) -> str:
        """Who signs in, without secrets."""
        return describe(self._gauth)

    def scopes(self) -> list[str] | None:
        """Return what the tokens are for, as far as that is known."""
        return None if self._held is None else self._held.scopes()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, renewed when they are about to expire."""
        held = self._held
        if held is None:
            return _headers_of_foreign(self._gauth.credentials)
        if not held.is_fresh():
            async with self._renewing:
                if not held.is_fresh():
                    return await asyncio.to_thread(self._asked, lambda http: http.fresh_headers())
        return held.headers()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless somebody just did; False where there is none."""
        held = self._held
        if held is None:
            return False
        async with self._renewing:
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
        """Break off the requests of all threads, and close their connections."""
        for http in list(self._made):
            abort(http)  # first: closing alone would wake nobody
            close(http)

    def _asked(self, question: Any) -> Any:
        """Return the answer of a new http object: tokens are asked for once an hour."""
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
