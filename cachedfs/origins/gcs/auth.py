"""The gcsfs filesystem of an origin, and renewal of its access tokens."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fsspec.config import conf

from cachedfs.common.optional_imports import importing
from cachedfs.common.urls import import_error
from cachedfs.config import FSSPEC_KEYWORDS
from cachedfs.origins.inner_filesystem import make_private, without_listing_cache
from cachedfs.origins.retry import RetryPolicy
from cachedfs.origins.tokens import TokenSource, refresh

logger = logging.getLogger("cachedfs.origins")

_SCOPE = "https://www.googleapis.com/auth/devstorage."  # gcsfs's; its option `access` is appended
_READ_BY_GCSFS = (None, "authorized_user")  # types of JSON; a user's sign-in fails if it names scopes
# Options that fsspec takes from every filesystem without naming them in a signature.
_OF_FSSPEC = FSSPEC_KEYWORDS | {"default_block_size", "target_options", "target_protocol"}


def make_gcsfs(options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Return a new `GCSFileSystem`; looking for credentials may take 15 s without a network."""
    try:
        with importing():
            # Not `gcsfs.GCSFileSystem`: that one asks for the layout of every bucket, by gRPC.
            from cachedfs.origins.gcs.checked_gcsfs import CheckedGCSFileSystem
    except ImportError as error:
        raise import_error("gs", error) from error
    _check_names(CheckedGCSFileSystem, options)
    endpoint, token, access = (
        options.get(name) or conf.get("gs", {}).get(name) or conf.get("gcs", {}).get(name)
        for name in ("endpoint_url", "token", "access")
    )
    _check_endpoint(endpoint)
    given = {**make_private(options), "asynchronous": False, "loop": loop}
    if token:
        given["token"] = known_token(token, access or "full_control")
    try:
        return without_listing_cache(CheckedGCSFileSystem(**given))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"gs options ({', '.join(sorted(options)) or 'none'}): gcsfs rejects them: {error}"
        ) from error
    except KeyError as error:
        raise ValueError(
            f"gs option {shown(token)}: the JSON of credentials lacks {error}; it is neither the key of a service account "
            "nor somebody's sign-in"
        ) from None
    except FileNotFoundError as error:  # must not look like a missing object
        raise PermissionError(f"a file of credentials is missing: {error}") from error


def _check_names(kind: type, options: Mapping[str, Any]) -> None:
    """Warn of options that gcsfs does not have: it accepts and ignores them."""
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    supported = {name for maker in makers for name in inspect.signature(maker).parameters}
    for name in sorted(options.keys() - supported - _OF_FSSPEC):
        near = difflib.get_close_matches(name, supported, n=1)
        logger.warning(
            "gcsfs has no option %r, so it has no effect%s",
            name,
            f"; did you mean {near[0]!r}?" if near else "",
        )


def _check_endpoint(endpoint: Any) -> None:
    if isinstance(endpoint, str) and endpoint and "://" not in endpoint:
        raise ValueError(
            f"gs option endpoint_url={endpoint!r} has no scheme: write http://{endpoint}, or https://{endpoint}"
        )


# The option `token=`
def known_token(token: Any, access: str) -> Any:
    """Return `token` in a form that gcsfs accepts.

    Raises ValueError for a missing file and for damaged credentials.
    """
    from google.auth.credentials import AnonymousCredentials

    if isinstance(token, AnonymousCredentials):
        return "anon"
    name = _file_of(token)
    info = token if name is None else _json_of(name)
    if isinstance(info, Mapping) and info.get("type") not in _READ_BY_GCSFS:
        return _loaded(info, shown(token), access)
    return token if name is None else name


def shown(token: Any) -> str:
    """Return how an error names a token: by its file, never by its content."""
    return f"token={os.fspath(token)!r}" if isinstance(token, (str, os.PathLike)) else "token (a dictionary)"


def _file_of(token: Any) -> str | None:
    """Return the file that a token names, with `~` expanded; None for any other form of token."""
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
    import google.auth
    from google.auth.credentials import with_scopes_if_required

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


# Tokens
def tokens_of(gcsfs_auth: Any, policy: RetryPolicy) -> TokenSource:
    """Return the tokens of gcsfs's GoogleCredentials; its `credentials` is None for anonymous access."""

    def renew() -> None:
        with gcsfs_auth.lock:
            refresh(gcsfs_auth.credentials, policy)
            gcsfs_auth.credentials.apply(gcsfs_auth.heads)

    return TokenSource(lambda: gcsfs_auth.credentials, renew, policy)
