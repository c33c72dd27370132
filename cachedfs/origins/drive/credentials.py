"""Find the credentials that options of `drive://` name: no requests, and no import of Google's libraries."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import platformdirs

from cachedfs.common.user_folders import found_folder
from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import accounts

SCOPE = "https://www.googleapis.com/auth/drive"
ANONYMOUS, DEFAULT = "anon", "google_default"  # the tokens that are names
LIVE = ("credentials", "google_auth")  # the options that are objects of other libraries
HOW_TO_SIGN_IN = (
    "run `cachedfs login drive` once; in Colab run `from google.colab import auth; auth.authenticate_user()` first; on a "
    "server pass the key file of a service account as token="
)
# With gcloud's own OAuth client, Google blocks the scope of Drive.
GCLOUD_LOGIN = (
    "gcloud auth application-default login --client-id-file=client.json "
    f"--scopes={SCOPE},https://www.googleapis.com/auth/cloud-platform"
)
SCOPE_BY_GCLOUD = (
    f"sign in again with `{GCLOUD_LOGIN}` (client.json is your OAuth client), or run `cachedfs login drive`"
)
_TOKEN_FORMS = (
    "a token is 'google_default', 'anon', an access token, or a JSON file or dictionary (service account key, "
    "authorized user, credentials saved by PyDrive2 or google-auth)"
)
_SECRETS = ("refresh_token", "access_token", "token")  # the longest lived first
_OF_A_USER = frozenset({"refresh_token", "client_id", "client_secret"})
# The name of a saved sign-in, google-auth's names, and PyDrive2's own.
SIGN_IN = (
    "account", "token", "api_key", "credentials", "google_auth", "client_id", "client_secret", "client_json",
    "client_json_file_path", "client_user_email", "use_service_account", "profile",
)  # fmt: skip
_CLIENT, _KEY = {"client_id", "client_secret", "profile"}, {"client_user_email", "use_service_account"}
# For each way to sign in, the options that may be given together.
_WAYS = (
    {"account", "client_user_email"},
    {"token", "client_user_email"},
    {"api_key"},
    {"credentials"},
    {"google_auth"},
    {"client_json"} | _KEY,
    {"client_json"} | _CLIENT,
    {"client_json_file_path"} | _KEY,
    {"client_json_file_path"} | _CLIENT,
)


class SignIn(NamedTuple):
    """The credentials that options name, whose they are as far as they show it, and what messages say about them."""

    kind: str  # "service_account", "user", "token", "api_key", "credentials", "google_auth", ANONYMOUS or DEFAULT
    value: Any = None  # JSON of the first two, or what the option has
    name: str = ""  # who signs in, for messages, without secrets; empty where only the credentials tell
    remedy: str = ""  # what to do when its tokens are refused
    account: str | None = None  # whose they are; or
    secret: str | None = None  # a secret that belongs to one account
    acts_for: str | None = None  # the user that a service account acts for
    path: str | None = None  # the file that has the token for all processes
    for_scope: str = ""  # what to do when its tokens lack the scope of Drive
    credentials: Any = None  # those of google-auth, which `auth.sign_in` makes; None: anonymous
    is_missing: bool = False  # no credentials were named, and none found


def find(sign_in: Mapping[str, Any]) -> SignIn:
    """Return the credentials that options name, or the default ones.

    Raises ValueError for options that contradict each other or name a missing file, and AccessDenied if the sign-in that
    they name is not saved.
    """
    given = {name: sign_in.get(name) for name in SIGN_IN}
    given = {name: value.strip() if isinstance(value, str) else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value is not False and value not in (None, "")}
    if given.keys() <= {"client_user_email"} and (default := accounts.default_name()) is not None:
        given["account"] = default
    if not any(given.keys() <= way for way in _WAYS):
        raise ValueError(f"drive options {', '.join(given)}: these are different ways to sign in; keep one")
    found = _found(given)
    if found.kind != "service_account" and given.keys() & _KEY:
        raise ValueError(
            f"drive options {', '.join(given)}: client_user_email= and use_service_account= need the key of a service account"
        )
    return found


def _found(given: dict[str, Any]) -> SignIn:
    if not given:
        return _default()
    if "account" in given:
        name = str(given["account"])
        return _of_json(accounts.load(name), name, given, str(accounts.path_of(name)))
    if "token" in given:
        return _of_token(given["token"], given)
    if "client_json" in given:
        return _of_json(_parsed(given["client_json"], "drive option client_json"), "client_json", given)
    if given.keys() & {"client_json_file_path", "client_id"}:
        return _of_client(given)
    if "api_key" in given:
        remedy = (
            "an API key reads what is shared with 'Anyone with the link' and nothing else: sign in for the rest, or check the "
            "key and that its project has enabled the Drive API"
        )
        return SignIn("api_key", str(given["api_key"]), "an API key", remedy, account=ANONYMOUS)
    for kind in given.keys() & {*LIVE}:
        return SignIn(kind, given[kind])
    raise ValueError(
        f"drive options {', '.join(given)}: pass client_id=, client_json= or client_json_file_path= too"
    )


def _of_token(token: Any, given: Mapping[str, Any]) -> SignIn:
    if (path := _token_file(token)) is not None:
        return _of_file(path, "token", given)
    if isinstance(token, Mapping) or (isinstance(token, str) and token.startswith("{")):
        return _of_json(_parsed(token, "drive option token"), "token", given)
    if not isinstance(token, str):
        raise ValueError(
            f"drive option token=: {type(token).__name__} is not a token; {_TOKEN_FORMS}; objects go in credentials="
        )
    if token == DEFAULT:
        return _default()
    if token == ANONYMOUS:
        remedy = "sign in, or give an API key for what is public, drive={'api_key': '...'}"
        return SignIn(ANONYMOUS, None, "anonymous", remedy, account=ANONYMOUS)
    if not token.isprintable() or " " in token:
        raise ValueError(f"drive option token=: this is no access token; {_TOKEN_FORMS}")
    remedy = "it has expired or was revoked: pass a new one"
    return SignIn(
        "token", token, "access token", remedy, secret=token, for_scope="pass a token with this scope"
    )


def _token_file(token: Any) -> str | None:
    """Return the file name in `token=`; None for a token itself.

    Access tokens never contain `.json`, but may contain a `/`.
    """
    if isinstance(token, os.PathLike):
        return os.fspath(token)  # type: ignore[no-any-return]
    if not isinstance(token, str) or token.startswith(("ya29.", "1//", "{")) or len(token) > 1000:
        return None
    if token in (ANONYMOUS, DEFAULT):
        return None
    is_name = token.endswith(".json") or token.startswith(("/", "~", "./", "../"))
    return token if is_name or os.path.isfile(token) else None


def _of_client(given: Mapping[str, Any]) -> SignIn:
    """Return the JSON in a file: the named one, or the one in which PyDrive2 and DVC save an OAuth sign-in."""
    path = given.get("client_json_file_path")
    if path is None:
        folder = found_folder(partial(platformdirs.user_cache_dir, "pydrive2fs", appauthor=False))
        if folder is None:
            raise AccessDenied(
                "Google Drive: no saved sign-in (this user has no home folder): set HOME or XDG_CACHE_HOME, or pass "
                "client_json_file_path="
            )
        path = os.path.join(folder, str(given["client_id"]), f"{given.get('profile', 'default')}.json")
    if "use_service_account" not in given and not os.path.isfile(os.path.expanduser(path)):
        raise AccessDenied(
            f"Google Drive: no saved sign-in (there is no {os.fspath(path)}): {_how_by_pydrive2(given)}"
        )
    return _of_file(os.fspath(path), "client_json_file_path", given)


def _how_by_pydrive2(given: Mapping[str, Any]) -> str:
    """Return how to sign in with PyDrive2, so that the saved credentials are found here."""
    known = {"client_id": "...", **given, "client_secret": "..."}
    names = ("client_id", "client_secret", "profile", "client_json_file_path")
    named = [f"{name}={os.fspath(known[name])!r}" for name in names if name in known]
    return (
        "sign in once where there is a browser: `from pydrive2.fs import GDriveFileSystem; "
        f"GDriveFileSystem('root', {', '.join(named)})` (pip install \"pydrive2[fsspec]\")"
    )


def _of_file(name: str, option: str, given: Mapping[str, Any]) -> SignIn:
    path = os.path.expanduser(name)
    what = f"drive option {option}={path!r}"
    try:
        return _of_json(read_json(path, what), path, given, os.path.realpath(path))
    except FileNotFoundError:
        raise ValueError(f"{what}: there is no such file; {_TOKEN_FORMS}") from None
    except OSError as error:
        raise ValueError(f"{what}: the file cannot be read ({error.strerror})") from None


def _of_json(info: dict[str, Any], where: str, given: Mapping[str, Any], path: str | None = None) -> SignIn:
    """Return the sign-in of a service account or a user; messages name the account, option or file `where`."""
    saved = f"--account {shlex.quote(where)}` (without --read-only, if it is to change anything)"
    if info.get("type") == "service_account":
        user = given.get("client_user_email")
        account, _ = owner_of(info, user)
        remedy = "the key was deleted or may not do this: make a new key for the service account"
        for_scope = f"save its key again with `cachedfs login drive --service-account FILE {saved}"
        if "account" not in given:
            for_scope = (
                'remove "scopes" from the JSON of the key, which are asked for in place of the one for Drive'
            )
        name = f"service account {account}"
        return SignIn("service_account", info, name, remedy, account, acts_for=user, for_scope=for_scope)
    if "installed" in info or "web" in info:
        raise ValueError(
            f"drive option {where}: this is an OAuth client (client_secrets.json), nobody's sign-in: pass its "
            "client_id= and client_secret="
        )
    # google-auth and PyDrive2 save a user without a type.
    if info.get("type", "authorized_user") != "authorized_user" or not info.keys() >= _OF_A_USER:
        raise ValueError(
            f"drive option {where}: this JSON (type {info.get('type')}) is no key of a service account, and no user's "
            f"credentials with client_id, client_secret and refresh_token; {_TOKEN_FORMS}; what else google-auth reads goes "
            "in GOOGLE_APPLICATION_CREDENTIALS"
        )
    if "account" in given:
        name, remedy = f"account {where}", f"sign in again with `cachedfs login drive --account {where}`"
        for_scope = f"sign in again with `cachedfs login drive {saved}"
    elif "access_token" not in info:
        name, path = f"authorized user of client {info['client_id']}", None
        remedy, for_scope = f"sign in again: {HOW_TO_SIGN_IN}", SCOPE_BY_GCLOUD
    else:
        named = {"client_json_file_path": where} if path else {}
        name = f"saved OAuth credentials of client {info['client_id']}" + (f" ({where})" if path else "")
        remedy = _how_by_pydrive2({"client_id": info["client_id"], **given, **named})
        remedy = f"remove {where} and {remedy}" if path else remedy
        for_scope = f"sign in again with this scope; PyDrive2 asks for {SCOPE}"
    account, secret = owner_of(info)
    return SignIn("user", info, name, remedy, account, secret, path=path, for_scope=for_scope)


def _default() -> SignIn:
    """Return application default credentials, with the owner of their file: that in the environment, or gcloud's."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
    of_gcloud = f"{folder}/application_default_credentials.json"
    name = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or of_gcloud
    path = os.path.realpath(os.path.expanduser(name))
    try:
        info = read_json(path, path)
    except (OSError, ValueError):
        return SignIn(DEFAULT)
    account, secret = owner_of(info)
    # The text of a file whose fields we do not know belongs to one account.
    return SignIn(DEFAULT, account=account, secret=secret or f"{path} {json.dumps(info, sort_keys=True)}")


def owner_of(info: Mapping[str, Any], acts_for: str | None = None) -> tuple[str | None, str | None]:
    """Return the account that JSON of credentials names, and a secret in it that belongs to one account."""
    if isinstance(email := info.get("client_email"), str):
        return (f"{email} for {acts_for}" if acts_for else email), None
    account = info.get("account")
    secrets = (info.get(name) for name in _SECRETS)
    secret = next((secret for secret in secrets if isinstance(secret, str)), None)
    return (account if isinstance(account, str) and account else None), secret


def read_json(path: str, what: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise a ValueError that does not quote it if there is none."""
    with open(path, encoding="utf-8") as file:
        return _parsed(file.read(), what)


def _parsed(text: Any, what: str) -> dict[str, Any]:
    """Return a JSON object, given as text or as a dictionary; raise a ValueError that does not quote it."""
    if isinstance(text, Mapping):
        return dict(text)
    with suppress(ValueError, TypeError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError(f"{what}: this is not JSON of credentials")
