"""Convert the option `token=` for gcsfs."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import google.auth
from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

_SCOPE = "https://www.googleapis.com/auth/devstorage."  # gcsfs's; its option `access` is appended
_GCSFSS_OWN = (None, "authorized_user")  # JSON types left to gcsfs; a user's sign-in fails if it names scopes


def known_token(token: Any, access: str) -> Any:
    """Return `token` in a form that gcsfs accepts.

    Raises ValueError for a missing file and for damaged credentials.
    """
    if isinstance(token, AnonymousCredentials):
        return "anon"
    name = _file_of(token)
    info = token if name is None else _json_of(name)
    if isinstance(info, Mapping) and info.get("type") not in _GCSFSS_OWN:
        return _loaded(info, shown(token), access)
    return token if name is None else name


def shown(token: Any) -> str:
    """Return how an error names a token: by its file, never by its content."""
    return f"token={os.fspath(token)!r}" if isinstance(token, (str, os.PathLike)) else "token (a dictionary)"


def _file_of(token: Any) -> str | None:
    """Return the file name that a token is, with `~` expanded; None for every other form."""
    if not isinstance(token, (str, os.PathLike)):
        return None
    name: str = os.path.expanduser(token)
    if os.path.exists(name):
        return name
    looks_like_file = ("/" in name or name.endswith(".json")) and len(name) < 1000
    # gcsfs would take it for a raw token and send it to Google.
    if isinstance(token, os.PathLike) or (looks_like_file and not name.startswith(("ya29.", "1//"))):
        raise ValueError(
            f"gs option token={os.fspath(token)!r}: there is no such file; a token is a file's name, a dictionary, credentials, "
            "or 'anon', 'google_default', 'cloud', 'cache'"
        )
    return None


def _json_of(name: str) -> Any:
    """Return the JSON in a file, else None; a pipe can be read only once, so it is left to gcsfs."""
    with suppress(OSError, ValueError):
        if os.path.isfile(name):
            with open(name, encoding="utf-8") as file:
                return json.load(file)
    return None


def _loaded(info: Mapping[str, Any], what: str, access: str) -> Any:
    """Return google-auth's credentials from JSON.

    gcsfs itself reads only service account keys and user sign-ins, and takes a damaged key for a sign-in.
    """
    try:
        with warnings.catch_warnings():  # it warns of untrusted JSON; this is the user's own
            warnings.simplefilter("ignore", DeprecationWarning)
            # Scopes follow below: here they would make it ask Google for the project of a workload identity.
            credentials, _ = google.auth.load_credentials_from_dict(dict(info))  # type: ignore[no-untyped-call]
        return with_scopes_if_required(credentials, [_SCOPE + access])  # type: ignore[no-untyped-call]
    except Exception:  # damaged JSON may raise anything
        raise ValueError(
            f"gs option {what}: google-auth cannot read its JSON (type {info['type']!r}): it is damaged, "
            "incomplete, or of a type that it does not know; download it again"
        ) from None
