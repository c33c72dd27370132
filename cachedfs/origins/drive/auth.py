"""Sign in to Google Drive in every way PyDrive2 and google-auth support, as one source of tokens."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.oauth2.credentials as google_users
import google.oauth2.service_account as google_services

from cachedfs.common.atomic_files import write_private
from cachedfs.common.logging import without_secrets
from cachedfs.common.optional_imports import preload
from cachedfs.errors import AccessDenied, SignInRefused
from cachedfs.origins.drive.credentials import (
    ANONYMOUS,
    DEFAULT,
    HOW_TO_SIGN_IN,
    SCOPE,
    SCOPE_BY_GCLOUD,
    SignIn,
    find,
    owner_of,
    read_json,
)
from cachedfs.origins.drive.failures import token_remedy
from cachedfs.origins.proxy import configure
from cachedfs.origins.retry import RetryPolicy
from cachedfs.origins.tokens import TokenSource, is_expired, message_of, refresh

if TYPE_CHECKING:
    import requests

log = logging.getLogger("cachedfs.origins")

_SCOPE_OF_MACHINE = (
    "a machine gets its scopes while it is stopped, by `gcloud compute instances set-service-account NAME "
    f"--scopes={SCOPE}`; or run `cachedfs login drive`, or pass the key file of a service account as token="
)


class DriveAuth(TokenSource):
    """The tokens of one Drive account."""

    def __init__(self, signed_in: SignIn, policy: RetryPolicy) -> None:
        super().__init__(lambda: self.signed_in.credentials, lambda: _refresh(self.signed_in, policy), policy)
        self.use(signed_in)

    def use(self, signed_in: SignIn) -> None:
        """Sign in with other credentials from now on."""
        self.signed_in = signed_in
        if signed_in.kind == "api_key":  # which is sent in place of a token
            self.without_token = {"x-goog-api-key": signed_in.value}

    def scopes(self) -> list[str] | None:
        """Return the scopes of the tokens, as granted or else as requested; None if unknown."""
        held = self.signed_in.credentials
        known = getattr(held, "granted_scopes", None) or getattr(held, "scopes", None)
        return sorted(known) if known else None

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one; return False if these credentials have no other.

        Raises SignInRefused if the token has expired or Google gives no other.
        """
        held = self.signed_in.credentials
        if not isinstance(held, google_users.Credentials) or held.refresh_token or held.refresh_handler:
            return await super().renew(refused)
        if is_expired(held):
            raise SignInRefused(
                f"Google Drive: the token has expired ({self.signed_in.name}): {self.signed_in.remedy}"
            )
        return False


def _refresh(signed_in: SignIn, policy: RetryPolicy) -> None:
    held, path, before = signed_in.credentials, signed_in.path, signed_in.credentials.token
    if path is not None:
        _load_token(path, held)
        if held.token != before:
            return  # another process was faster
    refresh_token = getattr(held, "refresh_token", None)
    try:
        refresh(held, policy)
    except google.auth.exceptions.GoogleAuthError as error:
        # Not chained: a traceback would print the token server's whole answer.
        said = message_of(error)
        raise SignInRefused(
            f"Google Drive: no token for {signed_in.name} ({said}): {token_remedy(said, signed_in.remedy)}"
        ) from None
    if path is not None:
        _save_token(path, held, refresh_token)


# A JSON file of PyDrive2 or of a saved account: other processes renew its token too
def _load_token(path: str, held: Any) -> None:
    """Give `held` the token in its file, if that is the same account's and lasts longer."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = _user(read_json(path, path))
        if held.account and saved.account == held.account:
            held._refresh_token = saved.refresh_token  # of a newer sign-in: the old one may be revoked
        is_later = held.expiry is None or saved.expiry > held.expiry
        is_same = saved.refresh_token == held.refresh_token  # or else somebody else signed in
        if is_same and is_later and not is_expired(saved):
            held.token, held.expiry = saved.token, saved.expiry


def _save_token(path: str, held: Any, refresh_token: str | None) -> None:
    """Put the token of `held` into its file, unless that has another refresh token by now.

    If this fails, this process can still use it.
    """
    try:
        info = read_json(path, path)
        if info.get("refresh_token") != refresh_token:
            return  # there was another sign-in meanwhile
        token, expiry = _names_in(info)
        info |= {token: held.token, "refresh_token": held.refresh_token}
        if held.expiry is not None:
            info[expiry] = held.expiry.strftime("%Y-%m-%dT%H:%M:%SZ")
        write_private(path, json.dumps(info))
    except (OSError, ValueError) as error:
        log.warning("a renewed token cannot be saved in %s: %s", path, without_secrets(str(error)))


def about(signed_in: SignIn, endpoint_url: str, fields: str) -> requests.Response:
    """Return Drive's `about` response; blocks on the network, first for a token that works now."""
    import requests

    policy, headers = RetryPolicy(), dict[str, str]()
    if (held := signed_in.credentials) is not None:
        if is_expired(held):
            _refresh(signed_in, policy)
        held.apply(headers)
    with requests.Session() as session:
        configure(session, endpoint_url)
        return session.get(
            f"{endpoint_url}/drive/v3/about",
            params={"fields": fields},
            headers=headers,
            timeout=(policy.connect_s, policy.metadata_s),
        )


# Making credentials
def sign_in(options: Mapping[str, Any]) -> SignIn:
    """Return the credentials that options name, or the default ones, as `find` and `with_credentials` do."""
    return with_credentials(find(options))


def with_credentials(found: SignIn) -> SignIn:
    """Return a sign-in with google-auth's credentials; blocks on files, so call it in a thread.

    Tokens are requested when they are first needed, so cached data can be read without a network. Only a search for
    default credentials may ask a metadata server. Never opens a browser. Raises ValueError for a damaged key.
    """
    if found.credentials is not None:
        return found
    if found.kind == DEFAULT:
        return _default(found)
    if found.kind == "credentials":
        return _from_object(found.value)
    if found.kind == "google_auth":
        return _from_pydrive2(found.value)
    if found.kind == "service_account":
        return found._replace(credentials=_service_account(found.value, found.acts_for))
    if found.kind == "user":
        return found._replace(credentials=_user(found.value))
    if found.kind == "token":
        return found._replace(credentials=google_users.Credentials(found.value))  # type: ignore[no-untyped-call]
    return found


def _service_account(info: Mapping[str, Any], user: str | None) -> Any:
    try:
        return google_services.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            info, scopes=info.get("scopes") or [SCOPE], subject=user
        )
    except (ValueError, google.auth.exceptions.GoogleAuthError):  # its message may quote the key
        raise ValueError(
            "the key of the service account is damaged, incomplete or not JSON: download it again"
        ) from None


def _user(info: Mapping[str, Any]) -> Any:
    """Return a user's credentials from JSON of google-auth or of oauth2client, which PyDrive2 saves."""
    token, expiry = (info.get(name) for name in _names_in(info))
    scopes = info.get("scopes") or ()
    scopes = scopes.split() if isinstance(scopes, str) else sorted(scopes)
    is_pydrive2 = "access_token" in info  # whose scopes were asked for, and perhaps not all granted
    return google_users.Credentials(  # type: ignore[no-untyped-call]
        token,
        refresh_token=info["refresh_token"],
        token_uri=info.get("token_uri") or "https://oauth2.googleapis.com/token",
        client_id=info["client_id"],
        client_secret=info["client_secret"],
        scopes=None if is_pydrive2 else scopes or None,
        granted_scopes=scopes if is_pydrive2 else None,
        expiry=datetime.fromisoformat(expiry).replace(tzinfo=None) if expiry else None,
        quota_project_id=info.get("quota_project_id"),
        rapt_token=info.get("rapt_token"),
        account=info.get("account"),
    )


def _names_in(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the token and of its expiry."""
    return ("access_token", "token_expiry") if "access_token" in info else ("token", "expiry")


def _from_pydrive2(given: Any) -> SignIn:
    """Return the credentials of a `GoogleAuth`, of a `GoogleDrive`, or of a settings.yaml."""
    from pydrive2.auth import AuthError, GoogleAuth

    kind = "credentials"
    if isinstance(given, (str, os.PathLike)):
        if not os.path.isfile(path := os.path.expanduser(given)):
            raise ValueError(f"drive option google_auth={path!r}: there is no such settings file of PyDrive2")
        kind, given = "google_auth", GoogleAuth(settings_file=path)
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
    return _from_object(gauth.credentials)._replace(kind=kind, remedy="authenticate google_auth= again")


def _default(found: SignIn) -> SignIn:
    """Return google-auth's default credentials, or nobody's: public files need none.

    These are Colab's sign-in, gcloud's, a key file in the environment, or the machine's.
    """
    try:
        preload(["google.auth.compute_engine", "google.auth.transport.requests", "google.oauth2.credentials"])
        credentials, _ = google.auth.default(scopes=[SCOPE])
    except google.auth.exceptions.DefaultCredentialsError as error:
        said = without_secrets(str((error.args or ("",))[0])).split("\n")[0]
        why = "" if "not found" in said and "default" in said else f" ({said})"
        remedy = (
            f"Google Drive: nobody is signed in: {HOW_TO_SIGN_IN}. There are no credentials in "
            "GOOGLE_APPLICATION_CREDENTIALS, in gcloud's application default credentials, and at the metadata server of "
            f"this machine{why}"
        )
        return found._replace(name="nobody", remedy=remedy, is_missing=True)
    name = f"application default credentials ({_name_of(credentials)})"
    from google.auth.compute_engine import Credentials  # which takes long to import, and is by now

    is_machine = isinstance(credentials, Credentials)
    for_scope = _SCOPE_OF_MACHINE if is_machine else SCOPE_BY_GCLOUD
    remedy = f"sign in again: {HOW_TO_SIGN_IN}"
    return found._replace(credentials=credentials, name=name, remedy=remedy, for_scope=for_scope)


def _from_object(live: Any) -> SignIn:
    """Return live credentials of google-auth or of oauth2client, which PyDrive2 makes."""
    if isinstance(live, google.auth.credentials.AnonymousCredentials):
        return find({"token": ANONYMOUS})
    if not isinstance(live, google.auth.credentials.Credentials):
        from oauth2client.client import OAuth2Credentials
        from oauth2client.service_account import ServiceAccountCredentials

        if isinstance(live, ServiceAccountCredentials):
            info = {"token_uri": live.token_uri, "scopes": live._scopes.split()}
            subject = live._kwargs.get("sub")
            live = _service_account({**live.serialization_data, **info}, subject)
        elif isinstance(live, OAuth2Credentials):
            live = _user(json.loads(live.to_json()))
        else:
            raise ValueError(
                "drive option credentials=: an object of google-auth or PyDrive2 is expected, not "
                f"{type(live).__name__}"
            )
    held = google.auth.credentials.with_scopes_if_required(live, [SCOPE])  # type: ignore[no-untyped-call]
    names = ("service_account_email", "refresh_token", "token")
    shown = {name: getattr(held, name, None) for name in names}
    if "@" in (email := shown["service_account_email"] or ""):  # a machine's may be "default"
        shown["client_email"] = email
    account, secret = owner_of(shown, getattr(held, "_subject", None))
    made = SignIn("credentials", live, _name_of(held), "make new credentials", account, secret)
    return made._replace(credentials=held, for_scope="make the credentials with this scope")


def _name_of(credentials: Any) -> str:
    """Return the account of credentials as far as they name it, never their secrets."""
    if isinstance(email := getattr(credentials, "service_account_email", None), str) and email:
        return f"service account {email}"
    if isinstance(client := getattr(credentials, "client_id", None), str) and client:
        return f"OAuth credentials of client {client}"
    return f"credentials of the kind {type(credentials).__name__}"
