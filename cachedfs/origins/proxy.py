"""The proxy and the certificate authorities of requests, the same for aiohttp and for `requests`."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

if TYPE_CHECKING:
    import requests


def proxy_of(url: str) -> str | None:
    """Return the environment's proxy for `url`, or None; raise ValueError for a proxy that is not supported.

    Asked once per connection: aiohttp's own look at the environment would also read ~/.netrc for every request.
    """
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", getproxies_environment().get(parts.scheme)
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return None
    if not proxy or host == "localhost" or proxy_bypass(host):
        return None
    with suppress(ValueError):
        given = urlsplit(proxy)
        if given.scheme == "http" and given.hostname and given.port is not None:
            return proxy
    raise ValueError(
        f"{parts.scheme}_proxy in the environment: only HTTP proxies are supported: write it as http://HOST:PORT, "
        f"or set no_proxy={host}"
    )


def tls_context() -> ssl.SSLContext:
    """Return the TLS context of requests by aiohttp.

    It has the authorities in SSL_CERT_FILE or those of the system, and those of certifi where there are none.
    """
    context = ssl.create_default_context()
    folder = ssl.get_default_verify_paths().capath  # looked into when somebody answers
    if not context.cert_store_stats()["x509"] and not (folder and os.listdir(folder)):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


def configure(session: requests.Session, url: str) -> None:
    """Make a session of `requests` use the proxy and the authorities that all other requests to `url` use."""
    session.trust_env = False
    session.proxies = {scheme: proxy_of(url) or "" for scheme in ("http", "https")}
    session.verify = authorities()


def authorities() -> str | bool:
    """Return the file in SSL_CERT_FILE, as `requests` takes it: by itself, it looks only at a variable of its own."""
    bundle = os.environ.get("SSL_CERT_FILE", "")
    return bundle if os.path.isfile(bundle) else True
