"""The gcsfs filesystem of an origin, and renewal of its access tokens."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from fsspec.config import conf

from cachedfs.common.optional_imports import importing
from cachedfs.common.urls import import_error
from cachedfs.origins.inner_filesystem import make_private, without_listing_cache
from cachedfs.origins.retry import RetryPolicy
from cachedfs.origins.tokens import TokenSource, refresh

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
            from cachedfs.origins.gcs.checked_gcsfs import CheckedGCSFileSystem, known_token, shown
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


def tokens_of(gcsfs_auth: Any, policy: RetryPolicy) -> TokenSource:
    """Return the tokens of gcsfs's GoogleCredentials; its `credentials` is None for anonymous access."""

    def renew() -> None:
        with gcsfs_auth.lock:
            refresh(gcsfs_auth.credentials, policy)
            gcsfs_auth.credentials.apply(gcsfs_auth.heads)

    return TokenSource(lambda: gcsfs_auth.credentials, renew, policy)
