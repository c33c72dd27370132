"""The gcsfs filesystem of an origin, and renewal of its access tokens."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fsspec.config import conf

from cachedfs.common.optional_imports import importing
from cachedfs.origins.inner_filesystem import make_private, without_listing_cache
from cachedfs.origins.origin_errors import token_server_away, without_secrets
from cachedfs.origins.retry import RetryableError, RetryPolicy, RetryReason
from cachedfs.origins.tokens import TokenRenewals, is_expired, left_s

__all__ = ["GCSAuth", "make_gcsfs"]


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
            from cachedfs.origins.gcs.credentials import known_token, shown
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
    for name in sorted(options.keys() - supported - _FSSPECS):
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


class GCSAuth:
    """The credentials of a gcsfs filesystem.

    A renewal blocks, so it runs in a thread, once for all requests.
    """

    def __init__(self, gcsfs_auth: Any, policy: RetryPolicy) -> None:
        self._gcsfs_auth = (
            gcsfs_auth  # gcsfs's GoogleCredentials; its `credentials` is None for anonymous access
        )
        self._timeout = policy.connect_s, policy.stall_s
        self._renewing = asyncio.Lock()
        self._renewals = TokenRenewals()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send; renew a token that is about to expire."""
        if self._gcsfs_auth.credentials is None:
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
        """Get another token than the refused one, unless another request just did.

        Return False if there is none.
        """
        if self._gcsfs_auth.credentials is None:
            return False
        failure = self._renewals.failure
        async with self._renewing:
            if self._current() == refused:
                with self._renewals.shared(failure):
                    await asyncio.to_thread(_refresh, self._gcsfs_auth, self._timeout)
            return self._current() != refused

    def _lasts_s(self) -> float:
        """Return for how many seconds the token can be used.

        google-auth's own `valid` ends minutes earlier.
        """
        credentials = self._gcsfs_auth.credentials
        return left_s(credentials.token, credentials.expiry)

    def _current(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._gcsfs_auth.credentials.token is not None:
            self._gcsfs_auth.credentials.apply(headers)
        return headers


def _refresh(gcsfs_auth: Any, timeout: tuple[float, float]) -> None:
    """Get a new token from Google.

    Raises RetryableError for problems of the network or of Google's servers.
    """
    import requests
    from google.auth.exceptions import RefreshError, TransportError
    from google.auth.transport.requests import Request

    with requests.Session() as session, gcsfs_auth.lock:
        try:
            # google-auth's own timeout is two minutes. On some of Google's machines it mounts the certificates of the
            # metadata server on `request.session`.
            request: Any = partial(Request(session), timeout=timeout)
            request.session = session
            gcsfs_auth.credentials.refresh(request)
        except (TransportError, RefreshError) as error:
            if (failure := token_server_away(error)) is not None:
                reason = RetryReason(
                    f"no token: {_message(failure)}", is_unreachable=not _is_cut_off(failure)
                )
                raise RetryableError(reason) from error
            if not error.retryable:
                raise
            raise RetryableError(RetryReason(f"no token: {_message(error)}")) from error
        gcsfs_auth.credentials.apply(gcsfs_auth.heads)


def _message(error: Exception) -> str:
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
