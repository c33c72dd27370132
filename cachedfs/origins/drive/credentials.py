"""Find the credentials that options of `drive://` name: no requests, and no import of Google's libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import accounts

__all__ = [
    "ANONYMOUS",
    "DEFAULT",
    "SCOPE",
    "SIGN_IN",
    "TOKEN_FORMS",
    "Found",
    "find",
    "how_to_sign_in",
    "parsed",
    "read_json",
]

SCOPE = "https://www.googleapis.com/auth/drive"
ANONYMOUS, DEFAULT = "anon", "google_default"  # the tokens that are names
TOKEN_FORMS = (
    "a token is 'google_default', 'anon', an access token, or a JSON file or dictionary (service account key, "
    "authorized user, credentials saved by PyDrive2 or google-auth)"
)
# The name of a saved sign-in, google-auth's names, and PyDrive2's own.
SIGN_IN = (
    "account",
    "token",
    "api_key",
    "credentials",
    "google_auth",
    "client_id",
    "client_secret",
    "client_json",
    "client_json_file_path",
    "client_user_email",
    "use_service_account",
    "profile",
)
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


class Found(NamedTuple):
    """The credentials that options name."""

    kind: str  # "api_key", "credentials", "google_auth", "json", "token", ANONYMOUS or DEFAULT
    options: Mapping[str, Any]  # those that say something
    value: Any = None
    where: str = "token"  # the option or file of it, for messages
    path: str | None = None  # the file of JSON


def find(sign_in: Mapping[str, Any]) -> Found:
    """Return the credentials that options name, or the default ones.

    Raises ValueError for options that contradict each other or name a missing file, and AccessDenied if the sign-in that
    they name is not saved.
    """
    given = {name: sign_in.get(name) for name in SIGN_IN}
    given = {name: value.strip() if isinstance(value, str) else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value is not False and value not in (None, "")}
    if given.keys() <= {"client_user_email"} and (default := accounts.default_name()) is not None:
        given["account"] = default
    if not given:
        return Found(DEFAULT, given)
    if not any(given.keys() <= way for way in _WAYS):
        raise ValueError(f"drive options {', '.join(given)}: these are different ways to sign in; keep one")
    if "account" in given:
        name = str(given["account"])
        return Found("json", given, accounts.load(name), f"account {name}", str(accounts.path_of(name)))
    if "token" in given:
        return _of_token(given["token"], given)
    if "client_json" in given:
        return Found("json", given, parsed(given["client_json"], "drive option client_json"), "client_json")
    if given.keys() & {"client_json_file_path", "client_id"}:
        return _of_client(given)
    for kind in given.keys() & {"api_key", "credentials", "google_auth"}:
        return Found(kind, given, given[kind])
    raise ValueError(
        f"drive options {', '.join(given)}: pass client_id=, client_json= or client_json_file_path= too"
    )


def _of_token(token: Any, given: Mapping[str, Any]) -> Found:
    if (path := _token_file(token)) is not None:
        return _of_file(path, "token", given)
    if isinstance(token, Mapping) or (isinstance(token, str) and token.startswith("{")):
        return Found("json", given, parsed(token, "drive option token"))
    if not isinstance(token, str):
        raise ValueError(
            f"drive option token=: {type(token).__name__} is not a token; {TOKEN_FORMS}; objects go in credentials="
        )
    if token in (ANONYMOUS, DEFAULT):
        return Found(token, given)
    if not token.isprintable() or " " in token:
        raise ValueError(f"drive option token=: this is no access token; {TOKEN_FORMS}")
    return Found("token", given, token)


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


def _of_client(given: Mapping[str, Any]) -> Found:
    """Return the JSON in a file: the named one, or the one in which PyDrive2 and DVC save an OAuth sign-in."""
    path = given.get("client_json_file_path")
    if path is None:
        import platformdirs

        folder = os.path.join(
            platformdirs.user_cache_dir("pydrive2fs", appauthor=False), str(given["client_id"])
        )
        path = os.path.join(folder, f"{given.get('profile', 'default')}.json")
    if "use_service_account" not in given and not os.path.isfile(os.path.expanduser(path)):
        raise AccessDenied(
            f"Google Drive: no saved sign-in (there is no {os.fspath(path)}): {how_to_sign_in(given)}"
        )
    return _of_file(os.fspath(path), "client_json_file_path", given)


def how_to_sign_in(given: Mapping[str, Any]) -> str:
    """Return how to sign in with PyDrive2, so that the saved credentials are found here."""
    known = {"client_id": "...", **given, "client_secret": "..."}
    names = ("client_id", "client_secret", "profile", "client_json_file_path")
    named = [f"{name}={os.fspath(known[name])!r}" for name in names if name in known]
    return (
        "sign in once where there is a browser: `from pydrive2.fs import GDriveFileSystem; "
        f"GDriveFileSystem('root', {', '.join(named)})` (pip install \"pydrive2[fsspec]\")"
    )


def _of_file(name: str, option: str, given: Mapping[str, Any]) -> Found:
    path = os.path.expanduser(name)
    what = f"drive option {option}={path!r}"
    try:
        return Found("json", given, read_json(path, what), path, os.path.realpath(path))
    except FileNotFoundError:
        raise ValueError(f"{what}: there is no such file; {TOKEN_FORMS}") from None
    except OSError as error:
        raise ValueError(f"{what}: the file cannot be read ({error.strerror})") from None


def read_json(path: str, what: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise a ValueError that does not quote it if there is none."""
    with open(path, encoding="utf-8") as file:
        return parsed(file.read(), what)


def parsed(text: Any, what: str) -> dict[str, Any]:
    """Return a JSON object, given as text or as a dictionary; raise a ValueError that does not quote it."""
    if isinstance(text, Mapping):
        return dict(text)
    with suppress(ValueError, TypeError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError(f"{what}: this is not JSON of credentials")
