"""Sign in to Google Drive in every way PyDrive2 and google-auth support, as one source of tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.oauth2.credentials as google_users
import google.oauth2.service_account as google_services

from cachedfs.common.atomic_files import write_private
from cachedfs.common.optional_imports import preload
from cachedfs.errors import AccessDenied, SignInRefused
from cachedfs.origins.drive import accounts
from cachedfs.origins.drive.options import ANONYMOUS, DEFAULT, SIGN_IN, said, saved_by_pydrive2, token_file
from cachedfs.origins.origin_errors import without_secrets
from cachedfs.origins.proxy import configure
from cachedfs.origins.retry import RetryPolicy
from cachedfs.origins.tokens import TokenSource, is_expired, left_s, message_of, refresh

if TYPE_CHECKING:
    import requests

__all__ = ["SCOPE", "DriveAuth", "SavedToken", "SignIn", "about", "headers_now", "name_of", "sign_in"]

log = logging.getLogger("cachedfs.origins")

SCOPE = "https://www.googleapis.com/auth/drive"
_SEARCH_AGAIN_S = 5.0  # a search for credentials may ask a metadata server that does not answer
_CLIENT = (
    "client_id",
    "client_secret",
    "client_json",
    "client_json_file_path",
    "profile",
    "use_service_account",
    "client_user_email",
)
_WAYS = (
    "run `cachedfs login drive` once; in Colab run `from google.colab import auth; auth.authenticate_user()` first; on a "
    "server pass the key file of a service account as token="
)
_TOKEN_FORMS = (
    "a token is 'google_default', 'anon', an access token, or a JSON file or dictionary (service account key, "
    "authorized user, credentials saved by PyDrive2 or google-auth)"
)
_OF_A_USER = frozenset({"refresh_token", "client_id", "client_secret"})


class SignIn(NamedTuple):
    """Credentials, and what messages say about them."""

    credentials: Any  # of google-auth; None: anonymous
    name: str  # the account as far as it is known, without secrets
    remedy: str  # what to do when its tokens are refused
    saved: SavedToken | None = None
    api_key: str | None = None  # names a project in place of an account
    is_missing: bool = False  # no credentials were named, and none found


_ANONYMOUS = SignIn(
    None, "anonymous", "sign in, or give an API key for what is public, drive={'api_key': '...'}"
)


class SavedToken:
    """The token in a JSON file of PyDrive2 or google-auth, which other processes renew too."""

    def __init__(self, path: str, info: Mapping[str, Any]) -> None:
        self._path = os.path.realpath(os.path.expanduser(path))
        self._account, self._refresh_token = info.get("account"), info["refresh_token"]
        is_pydrive2 = "access_token" in info
        self._token, self._expiry = ("access_token", "token_expiry") if is_pydrive2 else ("token", "expiry")

    def load(self, credentials: Any) -> None:
        """Give `credentials` the token in the file, if that is the same account's and lasts longer than theirs."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            info = _parsed(_text_of(self._path), self._path)
            if self._account is not None and info["account"] == self._account:
                # Of a newer sign-in, where the old one may have been revoked.
                self._refresh_token = credentials._refresh_token = info["refresh_token"]
            if info["refresh_token"] != self._refresh_token:
                return  # somebody else signed in
            expiry = datetime.fromisoformat(info[self._expiry]).replace(tzinfo=None)
            is_later = credentials.expiry is None or expiry > credentials.expiry
            if is_later and not is_expired(left_s(info[self._token], expiry)):
                credentials.token, credentials.expiry = info[self._token], expiry

    def save(self, credentials: Any) -> None:
        """Put the token of `credentials` into the file; if that fails, this process can still use it."""
        try:
            info = _parsed(_text_of(self._path), self._path)
            if info.get("refresh_token") != self._refresh_token:
                return  # there was another sign-in meanwhile
            self._refresh_token = credentials.refresh_token
            info |= {self._token: credentials.token, "refresh_token": credentials.refresh_token}
            if credentials.expiry is not None:
                info[self._expiry] = credentials.expiry.strftime("%Y-%m-%dT%H:%M:%SZ")
            write_private(self._path, json.dumps(info))
        except (OSError, ValueError) as error:
            log.warning("a renewed token cannot be saved in %s: %s", self._path, without_secrets(str(error)))


class DriveAuth(TokenSource):
    """The tokens of one Drive account."""

    def __init__(self, signed_in: SignIn, policy: RetryPolicy) -> None:
        super().__init__(lambda: self._signed_in.credentials, lambda: _refresh(self._signed_in, policy))
        self._signed_in = signed_in
        self._search: asyncio.Future[SignIn] | None = None
        self._search_again_at = 0.0

    @property
    def name(self) -> str:
        """The account, without secrets."""
        return self._signed_in.name

    @property
    def has_api_key(self) -> bool:
        """True if an API key is sent in place of a token."""
        return self._signed_in.api_key is not None

    @property
    def is_missing(self) -> bool:
        """True if the options name no credentials and none were found."""
        return self._signed_in.is_missing

    async def search(self, options: Mapping[str, Any], is_same: Callable[[], bool]) -> bool:
        """Look for default credentials again; return whether there are any now.

        They are used only if `is_same` returns True: they belong to the account in the cache keys. It is called in a thread.
        """
        if self._search is None or time.monotonic() >= self._search_again_at:
            self._search = asyncio.ensure_future(asyncio.to_thread(sign_in, options))
            self._search.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._search_again_at = time.monotonic() + _SEARCH_AGAIN_S
        found = await asyncio.shield(self._search)
        if self._signed_in.is_missing and not found.is_missing and await asyncio.to_thread(is_same):
            self._signed_in = found
        return not self._signed_in.is_missing

    @property
    def remedy(self) -> str:
        """Advice for when its tokens are refused."""
        return self._signed_in.remedy

    def current(self) -> dict[str, str]:
        """Return the headers of the present token, or of the API key; empty without one."""
        key = self._signed_in.api_key
        return super().current() if key is None else {"x-goog-api-key": key}

    def scopes(self) -> list[str] | None:
        """Return the scopes of the tokens, as granted or else as requested; None if unknown."""
        held = self._signed_in.credentials
        known = getattr(held, "granted_scopes", None) or getattr(held, "scopes", None)
        return sorted(known) if known else None

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one; return False if these credentials have no other.

        Raises SignInRefused if the token has expired or Google gives no other.
        """
        held = self._signed_in.credentials
        if held is None or _can_renew(held):
            return await super().renew(refused)
        if is_expired(left_s(held.token, held.expiry)):
            raise SignInRefused(f"Google Drive: the token has expired ({self.name}): {self.remedy}")
        return False


def _can_renew(credentials: Any) -> bool:
    return not isinstance(credentials, google_users.Credentials) or bool(
        credentials.refresh_token or credentials.refresh_handler
    )


def _refresh(signed_in: SignIn, policy: RetryPolicy) -> None:
    held, saved, before = signed_in.credentials, signed_in.saved, signed_in.credentials.token
    if saved is not None:
        saved.load(held)
        if held.token != before:
            return  # another process was faster
    try:
        refresh(held, policy)
    except google.auth.exceptions.GoogleAuthError as error:
        # Not chained: a traceback would print the token server's whole answer.
        raise SignInRefused(
            f"Google Drive: no token for {signed_in.name} ({message_of(error)}): {signed_in.remedy}"
        ) from None
    if saved is not None:
        saved.save(held)


def headers_now(signed_in: SignIn, policy: RetryPolicy) -> dict[str, str]:
    """Return the headers of a token that works now; blocks on the network if it has to be renewed."""
    headers: dict[str, str] = {}
    if (held := signed_in.credentials) is not None:
        if is_expired(left_s(held.token, held.expiry)):
            _refresh(signed_in, policy)
        held.apply(headers)
    return headers


def about(signed_in: SignIn, endpoint_url: str, fields: str) -> requests.Response:
    """Return Drive's `about` response; blocks on the network."""
    import requests

    policy = RetryPolicy()
    with requests.Session() as session:
        configure(session, endpoint_url)
        return session.get(
            f"{endpoint_url}/drive/v3/about",
            params={"fields": fields},
            headers=headers_now(signed_in, policy),
            timeout=(policy.connect_s, policy.metadata_s),
        )


# Finding credentials
def sign_in(options: Mapping[str, Any]) -> SignIn:
    """Return the credentials that options name, or the default ones; blocks on files, so call it in a thread.

    Tokens are requested when they are first needed, so cached data can be read without a network. Only a search for
    default credentials may ask a metadata server. Never opens a browser. Raises ValueError for options that contradict
    each other or name a missing file, and AccessDenied where the named credentials do not exist.
    """
    given = said(options)
    _check(given)
    if (account := accounts.chosen(given)) is not None:
        return _from_account(account, given.get("client_user_email"))
    if "google_auth" in given:
        return _from_pydrive2(given["google_auth"])
    if "api_key" in given:
        return SignIn(
            None,
            "an API key",
            "an API key reads what is shared with 'Anyone with the link' and nothing else: sign in for the rest, or check the "
            "key and that its project has enabled the Drive API",
            api_key=str(given["api_key"]).strip(),
        )
    if "credentials" in given:
        return _from_object(given["credentials"])
    if "token" in given:
        return _from_token(given["token"], given)
    if "client_json" in given:
        return _from_info(_parsed(given["client_json"], "client_json"), "client_json", given)
    if given:
        return _from_client(given)
    return _from_default()


def _check(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are unknown, incomplete or contradict each other."""
    if unknown := sorted(given.keys() - set(SIGN_IN)):
        raise ValueError(
            f"drive options: no sign-in is called {', '.join(unknown)}; known: {', '.join(sorted(SIGN_IN))}"
        )
    # A service account's key in token= may act for a user.
    client = [
        name
        for name in _CLIENT
        if name in given and not (name == "client_user_email" and {"token", "account"} & given.keys())
    ]
    ways = [
        [name] for name in ("account", "google_auth", "credentials", "token", "api_key") if name in given
    ] + ([client] if client else [])
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


def _from_account(name: str, acts_for: str | None) -> SignIn:
    """Return a sign-in that `cachedfs login drive` saved; renewed tokens are saved to the same file."""
    info = accounts.load(name)
    if info["type"] == "service_account":
        found = _from_key(info, acts_for)
        return found._replace(credentials=found.credentials.with_scopes(info.get("scopes") or [SCOPE]))
    if acts_for is not None:
        raise ValueError(f"drive option client_user_email=: account {name} is no service account")
    saved = SavedToken(str(accounts.path_of(name)), info)
    user = {key: info[key] for key in ("refresh_token", "token_uri", "client_id", "client_secret")}
    held = google_users.Credentials(None, scopes=info.get("scopes"), **user)  # type: ignore[no-untyped-call]
    saved.load(held)
    remedy = f"sign in again with `cachedfs login drive --account {name}`"
    return SignIn(held, f"account {name}", remedy, saved)


def _from_pydrive2(given: Any) -> SignIn:
    """Return the credentials of a `GoogleAuth`, of a `GoogleDrive`, or of a settings.yaml."""
    from pydrive2.auth import AuthError, GoogleAuth

    if isinstance(given, (str, os.PathLike)):
        if not os.path.isfile(path := os.path.expanduser(given)):
            raise ValueError(f"drive option google_auth={path!r}: there is no such settings file of PyDrive2")
        given = GoogleAuth(settings_file=path)
        if given.settings.get("client_config_backend") == "service":
            given.ServiceAuth()
    gauth = getattr(given, "auth", given)
    if not hasattr(gauth, "LoadCredentials"):
        raise ValueError(
            "drive option google_auth=: a pydrive2 GoogleAuth, a GoogleDrive or the name of a settings.yaml is expected, "
            f"not {type(given).__name__}"
        )
    if gauth.credentials is None and gauth.settings.get("save_credentials"):
        with suppress(AuthError):
            gauth.LoadCredentials()
    if gauth.credentials is None:
        raise AccessDenied(
            "drive option google_auth=: it has no credentials; call its LocalWebserverAuth() or ServiceAuth() first"
        )
    found = _from_object(gauth.credentials, "google_auth")
    return found._replace(remedy="authenticate google_auth= again")


def _from_token(token: Any, given: Mapping[str, Any]) -> SignIn:
    if isinstance(token, Mapping):
        return _from_info(dict(token), "token", given)
    if (name := token_file(token)) is not None:
        return _from_info(_read_json(name, "token"), name, {**given, "client_json_file_path": name})
    if not isinstance(token, str):
        raise ValueError(
            f"drive option token=: {type(token).__name__} is not a token; {_TOKEN_FORMS}; objects go in credentials="
        )
    text = token.strip()
    if text.startswith("{"):
        return _from_info(_parsed(text, "token"), "token", given)
    if "client_user_email" in given:
        raise ValueError("drive option client_user_email=: token= must be the key of a service account")
    if text == DEFAULT:
        return _from_default()
    if text == ANONYMOUS:
        return _ANONYMOUS
    if not text.isprintable() or " " in text:
        raise ValueError(f"drive option token=: this is no access token; {_TOKEN_FORMS}")
    held = google_users.Credentials(text)  # type: ignore[no-untyped-call]
    return SignIn(held, "access token", "it has expired or was revoked: pass a new one")


def _from_default() -> SignIn:
    """Return google-auth's default credentials, or nobody's: public files need none.

    These are Colab's sign-in, gcloud's, a key file in the environment, or the machine's.
    """
    try:
        preload(["google.auth.compute_engine", "google.auth.transport.requests", "google.oauth2.credentials"])
        credentials, _ = google.auth.default(scopes=[SCOPE])
    except google.auth.exceptions.DefaultCredentialsError as error:
        said = without_secrets(str((error.args or ("",))[0])).split("\n")[0]
        why = "" if "not found" in said and "default" in said else f" ({said})"
        return SignIn(
            None,
            "nobody",
            "Google Drive: no credentials found in GOOGLE_APPLICATION_CREDENTIALS, in gcloud's application default "
            f"credentials and at the metadata server of this machine{why}: {_WAYS}",
            is_missing=True,
        )
    name = f"application default credentials ({name_of(credentials)})"
    return SignIn(credentials, name, f"sign in again: {_WAYS}")


def _from_object(credentials: Any, option: str = "credentials") -> SignIn:
    """Return live credentials of google-auth or of oauth2client, which PyDrive2 makes."""
    if isinstance(credentials, google.auth.credentials.AnonymousCredentials):
        return _ANONYMOUS
    if not isinstance(credentials, google.auth.credentials.Credentials):
        credentials = _converted(credentials, option)
    held = google.auth.credentials.with_scopes_if_required(credentials, [SCOPE])  # type: ignore[no-untyped-call]
    return SignIn(held, name_of(held), "make new credentials")


def _converted(credentials: Any, option: str) -> Any:
    """Return oauth2client's credentials as google-auth's."""
    from oauth2client.client import OAuth2Credentials
    from oauth2client.service_account import ServiceAccountCredentials

    if isinstance(credentials, ServiceAccountCredentials):
        info = {**credentials.serialization_data, "token_uri": credentials.token_uri}
        if info["private_key"] is not None:  # not a P12 key
            return google_services.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
                info, scopes=credentials._scopes.split() or [SCOPE], subject=credentials._kwargs.get("sub")
            )
    elif isinstance(credentials, OAuth2Credentials) and (
        credentials.access_token or credentials.refresh_token
    ):
        return google_users.Credentials(  # type: ignore[no-untyped-call]
            credentials.access_token,
            refresh_token=credentials.refresh_token,
            token_uri=credentials.token_uri,
            client_id=credentials.client_id,
            client_secret=credentials.client_secret,
            expiry=credentials.token_expiry,
            granted_scopes=sorted(credentials.scopes) or None,
        )
    raise ValueError(
        f"drive option {option}=: credentials of google-auth are expected, or of PyDrive2 with a token, a refresh token or "
        f"a JSON key, not {type(credentials).__name__} (convert a P12 key to JSON)"
    )


def _from_client(given: Mapping[str, Any]) -> SignIn:
    """Return the credentials of a JSON file: the named one, or where PyDrive2 and DVC save an OAuth sign-in."""
    path = os.fspath(
        given.get("client_json_file_path") or saved_by_pydrive2(given["client_id"], given.get("profile"))
    )
    if os.path.isfile(path):
        return _from_info(
            _read_json(path, "client_json_file_path"), path, {**given, "client_json_file_path": path}
        )
    if "use_service_account" in given:
        raise ValueError(f"drive option client_json_file_path={path!r}: there is no such file")
    raise AccessDenied(f"Google Drive: no saved sign-in (there is no {path}): {_how_to_sign_in(given)}")


def _how_to_sign_in(given: Mapping[str, Any]) -> str:
    """Return how to sign in by hand, so that the saved credentials are found here."""
    names = ("client_id", "profile", "client_json_file_path")
    named = [f"{name}={os.fspath(given[name])!r}" for name in names if name in given]
    if "client_id" not in given:
        named.insert(0, "client_id='...'")
    named.insert(1, "client_secret='...'")
    return (
        "sign in once where there is a browser: `from pydrive2.fs import GDriveFileSystem; "
        f"GDriveFileSystem('root', {', '.join(named)})` (pip install \"pydrive2[fsspec]\")"
    )


def _text_of(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _read_json(path: str, option: str) -> dict[str, Any]:
    try:
        text = _text_of(os.path.expanduser(path))
    except FileNotFoundError:
        raise ValueError(f"drive option {option}={path!r}: there is no such file; {_TOKEN_FORMS}") from None
    except OSError as error:
        raise ValueError(
            f"drive option {option}={path!r}: the file cannot be read ({error.strerror})"
        ) from None
    return _parsed(text, f"{option}={path!r}")


def _parsed(text: Any, what: str) -> dict[str, Any]:
    """Return JSON as a dictionary; raise a ValueError that does not quote it."""
    if isinstance(text, Mapping):
        return dict(text)
    with suppress(ValueError, TypeError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ValueError(f"drive option {what}: this is not JSON of credentials")


def _from_info(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> SignIn:
    """Return the credentials that a JSON dictionary describes; `where` is its name in errors."""
    kind = info.get("type")
    try:
        if kind == "service_account":
            return _from_key(info, given.get("client_user_email"))
        if "use_service_account" in given or "client_user_email" in given:
            raise ValueError(f"drive option {where}: this is not the key of a service account")
        if "access_token" in info and "client_id" in info:
            return _from_saved(info, where, given)
        # google-auth saves an authorized user without a type too, in a token.json for instance.
        if kind == "authorized_user" or (kind is None and info.keys() >= _OF_A_USER):
            return _from_authorized_user(info)
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


def _from_key(info: dict[str, Any], user: str | None) -> SignIn:
    try:
        held = google_services.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            info, scopes=[SCOPE], subject=user
        )
    except (ValueError, google.auth.exceptions.GoogleAuthError):  # its message may quote the key
        raise ValueError(
            "the key of the service account is damaged or incomplete: download it again"
        ) from None
    name = f"service account {info['client_email']}" + (f" for {user}" if user else "")
    return SignIn(
        held, name, "the key was deleted or may not do this: make a new key for the service account"
    )


def _from_authorized_user(info: dict[str, Any]) -> SignIn:
    try:
        held = google_users.Credentials.from_authorized_user_info(info)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(
            "the JSON of an authorized user needs client_id, client_secret and refresh_token"
        ) from None
    return SignIn(held, f"authorized user of client {info['client_id']}", f"sign in again: {_WAYS}")


def _from_saved(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> SignIn:
    """Return credentials saved by PyDrive2; renewed ones are saved to the same file."""
    expiry = info.get("token_expiry")
    held = google_users.Credentials(  # type: ignore[no-untyped-call]
        info["access_token"],
        refresh_token=info["refresh_token"],
        token_uri=info["token_uri"],
        client_id=info["client_id"],
        client_secret=info["client_secret"],
        expiry=datetime.fromisoformat(expiry).replace(tzinfo=None) if expiry else None,
        granted_scopes=sorted(info.get("scopes") or ()) or None,
    )
    path = given.get("client_json_file_path")
    name = f"saved OAuth credentials of client {info['client_id']}"
    remedy = _how_to_sign_in({"client_id": info["client_id"], **given})
    if path is None:
        return SignIn(held, name, remedy)
    return SignIn(held, f"{name} ({where})", f"remove {path} and {remedy}", SavedToken(os.fspath(path), info))


def name_of(credentials: Any) -> str:
    """Return the account of credentials as far as they name it, never their secrets."""
    for attribute, words in (
        ("service_account_email", "service account"),
        ("client_id", "OAuth credentials of client"),
    ):
        if isinstance(value := getattr(credentials, attribute, None), str) and value:
            return f"{words} {value}"
    return f"credentials of the kind {type(credentials).__name__}"
