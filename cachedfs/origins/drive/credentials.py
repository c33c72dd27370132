"""Find the credentials for Google Drive: those that an option names, or the default ones."""

from __future__ import annotations

import json
import logging
import os
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

from cachedfs.common.optional_imports import preload
from cachedfs.errors import AccessDenied
from cachedfs.origins.drive.held import (
    SCOPE,
    CredentialSource,
    FoundToken,
    GoogleCredentials,
    OAuth2ClientCredentials,
    SavedFile,
)
from cachedfs.origins.drive.options import ANONYMOUS, DEFAULT, token_file
from cachedfs.origins.origin_errors import without_secrets

__all__ = ["find", "from_object", "name_of", "source_of"]

log = logging.getLogger("cachedfs.origins")

_WAYS = (
    "in Colab run `from google.colab import auth; auth.authenticate_user()` first; on a laptop pass client_id= and "
    "client_secret= of an OAuth client, or run `gcloud auth application-default login --client-id-file=client.json "
    f"--scopes={SCOPE},https://www.googleapis.com/auth/cloud-platform` with that client's JSON; on a server pass the key file of a service "
    "account as token="
)
_TOKEN_FORMS = (
    "a token is 'google_default', 'anon', an access token, or a JSON file or dictionary (service account key, "
    "authorized user, credentials saved by PyDrive2 or google-auth)"
)
_OF_A_USER = frozenset({"refresh_token", "client_id", "client_secret"})


def find(given: Mapping[str, Any]) -> FoundToken:
    if "credentials" in given:
        return from_object(given["credentials"])
    if "token" in given:
        return _from_token(given["token"])
    if "client_json" in given:
        return _from_info(_parsed(given["client_json"], "client_json"), "client_json", given)
    if given:
        return _from_client(given)
    return _from_default()


def _from_token(token: Any) -> FoundToken:
    if isinstance(token, Mapping):
        return _from_info(dict(token), "token", {})
    if (name := token_file(token)) is not None:
        return _from_info(_read_json(name, "token"), name, {"client_json_file_path": name})
    if not isinstance(token, str):
        raise ValueError(
            f"drive option token=: {type(token).__name__} is none; {_TOKEN_FORMS}; objects go in credentials="
        )
    text = token.strip()
    if text.startswith("{"):
        return _from_info(_parsed(text, "token"), "token", {})
    if text == DEFAULT:
        return _from_default()
    if text == ANONYMOUS:
        return FoundToken(None, "anonymous", "these files are not public: sign in")
    return _from_access_token(text)


def _from_access_token(token: str) -> FoundToken:
    if not token.isprintable() or " " in token:
        raise ValueError(f"drive option token=: this is no access token; {_TOKEN_FORMS}")
    return FoundToken(
        GoogleCredentials(google_users.Credentials(token)),  # type: ignore[no-untyped-call]
        "access token",
        "it has expired or was revoked: pass a new one",
    )


def _from_default() -> FoundToken:
    """Return google-auth's default credentials.

    These are Colab's sign-in, gcloud's, a key file in the environment, or the machine's.
    """
    try:
        preload(["google.auth.compute_engine", "google.auth.transport.requests", "google.oauth2.credentials"])
        credentials, _ = google.auth.default(scopes=[SCOPE])
    except google.auth.exceptions.DefaultCredentialsError as error:
        said = without_secrets(str((error.args or ("",))[0])).split("\n")[0]
        raise AccessDenied(
            "Google Drive: no credentials found in GOOGLE_APPLICATION_CREDENTIALS, in gcloud's application default "
            f"credentials and at the metadata server of this machine ({said}): {_WAYS}"
        ) from None
    name = f"application default credentials ({name_of(credentials)})"
    return FoundToken(GoogleCredentials(credentials), name, f"sign in again: {_WAYS}")


def from_object(credentials: Any) -> FoundToken:
    source = source_of(credentials)
    if source is None:
        raise ValueError(
            f"drive option credentials=: a google-auth credentials object is expected, not {type(credentials).__name__}"
        )
    if _is_anonymous(credentials):
        return _from_token(ANONYMOUS)
    return FoundToken(source, name_of(credentials), "make new credentials")


def _from_client(given: Mapping[str, Any]) -> FoundToken:
    """Return the credentials of a JSON file: the named one, or where PyDrive2 and DVC save an OAuth sign-in."""
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
    """Return JSON as a dictionary; raise a ValueError that does not quote it."""
    if isinstance(text, Mapping):
        return dict(text)
    with suppress(ValueError, TypeError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ValueError(f"drive option {what}: this is not JSON of credentials")


def _from_info(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> FoundToken:
    """Return the credentials that a JSON dictionary describes; `where` is its name in errors."""
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
        if (
            kind is None and info.keys() >= _OF_A_USER
        ):  # as google-auth saves them, in a token.json for instance
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


def _from_key(info: dict[str, Any], user: str | None) -> FoundToken:
    try:
        credentials = google_services.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            info, scopes=[SCOPE], subject=user
        )
    except (ValueError, google.auth.exceptions.GoogleAuthError):  # its message may quote the key
        raise ValueError(
            "the key of the service account is damaged or incomplete: download it again"
        ) from None
    name = f"service account {info['client_email']}" + (f" for {user}" if user else "")
    return FoundToken(
        GoogleCredentials(credentials),
        name,
        "the key was deleted or may not do this: make a new key for the service account",
    )


def _from_authorized_user(info: dict[str, Any]) -> FoundToken:
    try:
        credentials = google_users.Credentials.from_authorized_user_info(info)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(
            "the JSON of an authorized user needs client_id, client_secret and refresh_token"
        ) from None
    return FoundToken(
        GoogleCredentials(credentials),
        f"authorized user of client {info['client_id']}",
        f"sign in again: {_WAYS}",
    )


def _from_saved(info: dict[str, Any], where: str, given: Mapping[str, Any]) -> FoundToken:
    """Return credentials saved by PyDrive2; renewed ones are saved to the same file."""
    credentials = OAuth2Credentials.from_json(json.dumps({"user_agent": None, "invalid": False, **info}))
    path = given.get("client_json_file_path")
    if path is not None:
        credentials.set_store(SavedFile(os.fspath(path)))
    name = f"saved OAuth credentials of client {info['client_id']}" + (
        f" ({where})" if path is not None else ""
    )
    remove = f"remove {path} and " if path is not None else ""
    return FoundToken(
        OAuth2ClientCredentials(credentials), name, remove + _once({"client_id": info["client_id"], **given})
    )


def source_of(credentials: Any) -> CredentialSource | None:
    """Return the credential source of these credentials; None for an unknown type."""
    if isinstance(credentials, google.auth.credentials.Credentials):
        scoped = google.auth.credentials.with_scopes_if_required(credentials, [SCOPE])  # type: ignore[no-untyped-call]
        return GoogleCredentials(scoped)
    if isinstance(credentials, OAuth2Credentials):
        return OAuth2ClientCredentials(credentials)
    return None


def _is_anonymous(credentials: Any) -> bool:
    return isinstance(credentials, google.auth.credentials.AnonymousCredentials)


def name_of(credentials: Any) -> str:
    """Return the account of credentials as far as they name it, never their secrets."""
    for attribute, words in (
        ("service_account_email", "service account"),
        ("client_id", "OAuth credentials of client"),
    ):
        if isinstance(value := getattr(credentials, attribute, None), str) and value:
            return f"{words} {value}"
    return f"credentials of the kind {type(credentials).__name__}"
