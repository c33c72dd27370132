"""The gcsfs filesystem and its credentials: made and renewed in threads, because both block on the network."""

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
from cachedfs.origins.failures import without_secrets
from cachedfs.origins.google import token_server_away
from cachedfs.origins.inner import make_private, without_listing_cache
from cachedfs.origins.retry import Failed, Policy, Trouble
from cachedfs.origins.tokens import Renewals, is_expired, left_s

__all__ = ["GCSAuth", "make_gcsfs"]

logger = logging.getLogger("cachedfs.origins")

# What fsspec takes out of the options of every filesystem, and its signatures do not name.
_FSSPECS = {
    "default_block_size",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "target_options",
    "target_protocol",
}


def make_gcsfs(options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Return a `GCSFileSystem` of our own; looking for credentials may take 15 s without a network."""
    try:
        with importing():
            # Not the package's own class: that one asks for the layout of every bucket, by gRPC.
            from cachedfs.origins.gcs_inner import CheckedGCSFileSystem
            from cachedfs.origins.gcs_token import known_token, shown
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
    except FileNotFoundError as error:  # never to be taken for an object that is not there
        raise PermissionError(f"a file of credentials is missing: {error}") from error


def _check_names(kind: type, options: Mapping[str, Any]) -> None:
    """Warn of options that gcsfs does not have: it takes them, and makes nothing of them."""
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
    """The credentials of a gcsfs filesystem; renewing them blocks, so it is done in a thread, once for all."""

    def __init__(self, held: Any, policy: Policy) -> None:
        self._held = held  # gcsfs.credentials.GoogleCredentials; its own `credentials` is None: anonymous
        self._timeout = policy.connect_s, policy.stall_s
        self._renewing = asyncio.Lock()
        self._renewals = Renewals()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, renewed when they are about to expire."""
        if self._held.credentials is None:
            return {}
        lasts_s = self._lasts_s()
        if is_expired(lasts_s):
            await self.renew(self._current())
        elif not self._renewals.is_fresh(lasts_s) and not self._renewing.locked():
            # Whatever is in the way, the token still works for some minutes; the others use it meanwhile.
            with self._renewals.early(), suppress(Exception):
                await self.renew(self._current())
        return self._current()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless somebody just did; False where there is none."""
        if self._held.credentials is None:
            return False
        failure = self._renewals.failure
        async with self._renewing:
            if self._current() == refused:
                with self._renewals.shared(failure):
                    await asyncio.to_thread(_refresh, self._held, self._timeout)
            return self._current() != refused

    def _lasts_s(self) -> float:
        """Return for how long the token can be used: google-auth's own `valid` ends minutes before it does."""
        credentials = self._held.credentials
        return left_s(credentials.token, credentials.expiry)

    def _current(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._held.credentials.token is not None:
            self._held.credentials.apply(headers)
        return headers


def _refresh(held: Any, timeout: tuple[float, float]) -> None:
    """Get a new token from Google; Failed where the network is in the way, or Google's servers are in trouble."""
    import requests
    from google.auth.exceptions import RefreshError, TransportError
    from google.auth.transport.requests import Request

    with requests.Session() as session, held.lock:
        try:
            # Its own limit is two minutes. On some machines of Google's it mounts the certificates of the metadata server on
            # the request's session.
            request: Any = partial(Request(session), timeout=timeout)
            request.session = session
            held.credentials.refresh(request)
        except (TransportError, RefreshError) as error:
            if (away := token_server_away(error)) is not None:
                trouble = Trouble(f"no token: {_said(away)}", is_unreachable=not _is_cut_off(away))
                raise Failed(trouble) from error
            if not error.retryable:
                raise
            raise Failed(Trouble(f"no token: {_said(error)}")) from error
        held.credentials.apply(held.heads)


def _said(error: Exception) -> str:
    """Return what google-auth says, without the whole answer, which may be behind it."""
    return without_secrets(str(error.args[0] if error.args else error))


def _is_cut_off(cause: BaseException | None) -> bool:
    """Return whether somebody was there, who fell silent or hung up."""
    import requests
    from google.auth.exceptions import TransportError
    from urllib3.exceptions import ProtocolError

    while isinstance(cause, TransportError):  # of a metadata server, one is behind another
        cause = cause.__cause__
    reason = cause.args[0] if cause is not None and cause.args else None
    return isinstance(cause, requests.ReadTimeout) or isinstance(reason, ProtocolError)
