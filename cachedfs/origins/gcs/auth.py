"""Credentials for Google Cloud Storage: convert `token=` for gcsfs, and renew access tokens."""

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
from functools import partial
from typing import Any

import google.auth
from fsspec.config import conf
from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

from cachedfs.common.optional_imports import importing
from cachedfs.origins.inner_filesystem import make_private, without_listing_cache
from cachedfs.origins.origin_errors import token_server_away, without_secrets
from cachedfs.origins.retry import RetryableError, RetryPolicy, RetryReason
from cachedfs.origins.tokens import TokenRenewals, is_expired, left_s

__all__ = ["GCSAuth", "known_token", "make_gcsfs", "shown"]


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
    looks_like_one = ("/" in name or name.endswith(".json")) and len(name) < 1000
    # gcsfs would take it for a raw token and send it to Google.
    if isinstance(token, os.PathLike) or (looks_like_one and not name.startswith(("ya29.", "1//"))):
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
            f"gs option {what}: google-auth makes no credentials of its JSON (type {info['type']!r}): it is damaged or "
            "incomplete, or of a type that it does not know; download it again"
        ) from None


logger = logging.getLogger("cachedfs.origins")

# Options that fsspec takes from every filesystem without naming them in a signature.
_FSSPECS = {
    "default_block_size",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "target_options",
    "target_protocol",
}


def make_gcsfs(options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Return a new `GCSFileSystem`; looking for credentials may take 15 s without a network."""
    try:
        with importing():
            # Not `gcsfs.GCSFileSystem`: that one asks for the layout of every bucket, by gRPC.
            from cachedfs.origins.gcs.checked_gcsfs import CheckedGCSFileSystem
    except ImportError as error:
        raise ImportError(
            f'gs:// needs gcsfs, which cannot be imported ({error}): pip install "cachedfs[gcs]"'
        ) from error
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
            f"gs options ({', '.join(sorted(options)) or 'none'}): gcsfs refuses them: {error}"
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
    known = {name for maker in makers for name in inspect.signature(maker).parameters}
    for name in sorted(options.keys() - known - _FSSPECS):
        near = difflib.get_close_matches(name, known, n=1)
        logger.warning(
            "gs option %r is none of gcsfs's, and has no effect%s",
            name,
            f"; did you mean {near[0]!r}?" if near else "",
        )


def _check_endpoint(endpoint: Any) -> None:
    if isinstance(endpoint, str) and endpoint and "://" not in endpoint:
        raise ValueError(
            f"gs option endpoint_url={endpoint!r} has no scheme: write http://{endpoint}, or https://{endpoint}"
        )


class GCSAuth:
    """The credentials of a gcsfs filesystem; a renewal blocks, so it runs in a thread, once for all requests."""

    def __init__(self, held: Any, policy: RetryPolicy) -> None:
        self._held = held  # gcsfs's GoogleCredentials; its `credentials` is None for anonymous access
        self._timeout = policy.connect_s, policy.stall_s
        self._renewing = asyncio.Lock()
        self._renewals = TokenRenewals()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send; renew a token that is about to expire."""
        if self._held.credentials is None:
            return {}
        lasts_s = self._lasts_s()
        if is_expired(lasts_s):
            await self.renew(self._current())
        elif not self._renewals.is_fresh(lasts_s) and not self._renewing.locked():
            # If this fails, the token still works for some minutes.
            with self._renewals.early(), suppress(Exception):
                await self.renew(self._current())
        return self._current()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless another request just did; return False if there is none."""
        if self._held.credentials is None:
            return False
        failure = self._renewals.failure
        async with self._renewing:
            if self._current() == refused:
                with self._renewals.shared(failure):
                    await asyncio.to_thread(_refresh, self._held, self._timeout)
            return self._current() != refused

    def _lasts_s(self) -> float:
        """Return for how many seconds the token can be used; google-auth's own `valid` ends minutes earlier."""
        credentials = self._held.credentials
        return left_s(credentials.token, credentials.expiry)

    def _current(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._held.credentials.token is not None:
            self._held.credentials.apply(headers)
        return headers


def _refresh(held: Any, timeout: tuple[float, float]) -> None:
    """Get a new token from Google; raise RetryableError for trouble of the network or Google's servers."""
    import requests
    from google.auth.exceptions import RefreshError, TransportError
    from google.auth.transport.requests import Request

    with requests.Session() as session, held.lock:
        try:
            # google-auth's own timeout is two minutes. On some of Google's machines it mounts the certificates of the
            # metadata server on `request.session`.
            request: Any = partial(Request(session), timeout=timeout)
            request.session = session
            held.credentials.refresh(request)
        except (TransportError, RefreshError) as error:
            if (away := token_server_away(error)) is not None:
                trouble = RetryReason(f"no token: {_said(away)}", is_unreachable=not _is_cut_off(away))
                raise RetryableError(trouble) from error
            if not error.retryable:
                raise
            raise RetryableError(RetryReason(f"no token: {_said(error)}")) from error
        held.credentials.apply(held.heads)


def _said(error: Exception) -> str:
    """Return google-auth's message without the answer of the server that may follow it."""
    return without_secrets(str(error.args[0] if error.args else error))


def _is_cut_off(cause: BaseException | None) -> bool:
    """Return whether a server was reached that then went silent or closed the connection."""
    import requests
    from google.auth.exceptions import TransportError
    from urllib3.exceptions import ProtocolError

    while isinstance(cause, TransportError):  # for a metadata server they are nested
        cause = cause.__cause__
    reason = cause.args[0] if cause is not None and cause.args else None
    return isinstance(cause, requests.ReadTimeout) or isinstance(reason, ProtocolError)
