"""The gcsfs filesystem and its credentials: made and renewed in threads, because both block on the network."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fsspec.config import conf

from cachedfs.origins.inner import make_private, without_listing_cache
from cachedfs.origins.retry import Failed, Trouble

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

_EXPIRES_SOON_S = 300  # as gcsfs: a token that lasts less is renewed before it is used


def make_gcsfs(options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Return a `GCSFileSystem` of our own; looking for credentials may take 15 s without a network."""
    try:
        # Not the package's own class: that one asks for the layout of every bucket, by gRPC.
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        raise ImportError(
            f'gs:// needs gcsfs, which cannot be imported ({error}): pip install "cachedfs[gcs]"'
        ) from error
    _check_names(GCSFileSystem, options)
    endpoint, token = (
        options.get(name) or conf.get("gs", {}).get(name) or conf.get("gcs", {}).get(name)
        for name in ("endpoint_url", "token")
    )
    _check_endpoint(endpoint)
    _check_token(token)
    given = {**make_private(options), "asynchronous": False, "loop": loop}
    try:
        return without_listing_cache(GCSFileSystem(**given))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"gs options ({', '.join(sorted(options)) or 'none'}): gcsfs refuses them: {error}"
        ) from error
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


def _check_token(token: Any) -> None:
    """Raise ValueError for the name of a token file that is not there: gcsfs would take it for a token."""
    looks_like_a_file = (
        isinstance(token, str) and ("/" in token or token.endswith(".json")) and len(token) < 1000
    )
    if (
        looks_like_a_file
        and not token.startswith(("ya29.", "1//"))
        and not os.path.exists(os.path.expanduser(token))
    ):
        raise ValueError(
            f"gs option token={token!r}: there is no such file; a token is a file's name, a dictionary, credentials, "
            "or 'anon', 'google_default', 'cloud', 'cache'"
        )


class GCSAuth:
    """The credentials of a gcsfs filesystem; renewing them blocks, so it is done in a thread, once for all."""

    def __init__(self, held: Any) -> None:
        self._held = held  # gcsfs.credentials.GoogleCredentials; its own `credentials` is None: anonymous
        self._renewing = asyncio.Lock()

    async def headers(self) -> dict[str, str]:
        """Return the headers to send, renewed when they are about to expire."""
        credentials = self._held.credentials
        if credentials is None:
            return {}
        if not credentials.valid:
            await self.renew(self._current())
        elif not self._held._credentials_valid(_EXPIRES_SOON_S):
            with suppress(Exception):  # whatever is in the way, the token still works for some minutes
                await self.renew(self._current())
        return self._current()

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless somebody just did."""
        if self._held.credentials is None:
            return False
        async with self._renewing:
            if self._current() != refused:
                return True
            await asyncio.to_thread(_refresh, self._held)
            return True

    def _current(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._held.credentials.token is not None:
            self._held.credentials.apply(headers)
        return headers


def _refresh(held: Any) -> None:
    """Get a new token from Google; Failed where the network is in the way."""
    import requests
    from google.auth.exceptions import TransportError
    from google.auth.transport.requests import Request

    with requests.Session() as session, held.lock:
        try:
            held.credentials.refresh(Request(session))
        except TransportError as error:
            raise Failed(Trouble(f"no token: {error}", is_unreachable=True)) from error
        held.credentials.apply(held.heads)
