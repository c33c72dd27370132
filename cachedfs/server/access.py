"""Access to the endpoint: the keys, and the allowed `Host` and `Origin` headers of a request."""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import ipaddress
import time
from collections.abc import Collection

from cachedfs.server.s3_errors import S3Error
from cachedfs.server.s3_requests import Query, host_name
from cachedfs.server.signatures import ALGORITHM, Headers, Keys, check_headers, check_query

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="cachedfs", charset="UTF-8"'}


class AccessRules:
    """The rules for all requests. Without `keys`, any request of a program on this machine is answered."""

    def __init__(self, keys: Keys | None, domains: Collection[str], origins: Collection[str]) -> None:
        self._keys, self._domains, self._origins = keys, domains, origins

    def check_origin(self, headers: Headers) -> dict[str, str]:
        """Return the headers of CORS for the answer. Raises S3Error for a page of another origin.

        A page in a browser can send requests to this machine, also under a name of its own that leads here.
        """
        hosts = headers.getall("Host", ())
        if len(hosts) != 1 or not self._is_ours(host_name(hosts[0])):
            raise S3Error("AccessDenied", "The header Host names another server; --domain NAME allows a name")
        origin = headers.get("Origin")
        if origin is None or origin in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return {}
        if origin not in self._origins:
            raise S3Error("AccessDenied", "A page of this origin may not read; --allow-origin URL allows it")
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "ETag, Content-Range, Accept-Ranges, Last-Modified",
            "Vary": "Origin",
        }

    def _is_ours(self, name: str) -> bool:
        """Return whether no other server can have this name: an address, localhost, or a given domain."""
        if any(name == each or name.endswith(f".{each}") for each in self._domains):
            return True
        return _is_address(name)

    def check(self, method: str, path: str, query: Query, headers: Headers) -> bool:
        """Return whether the request is signed, as those of S3 clients are. Raises S3Error unless it may be answered."""
        given = headers.get("Authorization", "")
        in_header = given.startswith(f"{ALGORITHM} ")
        in_query = any(name == "X-Amz-Signature" for name, _ in query)
        if self._keys is None:
            return in_header or in_query
        if len(headers.getall("Authorization", ())) + in_query > 1:
            raise S3Error("InvalidRequest", "A request has one signature, in a header or in its URL")
        if in_header or in_query:
            check_signature = check_headers if in_header else check_query
            check_signature(self._keys, method, path, query, headers, time.time())
        elif given[:6].lower() == "basic ":
            self._check_password(given[6:], self._keys)
        elif given.startswith("AWS ") or any(name == "AWSAccessKeyId" for name, _ in query):
            raise S3Error("InvalidRequest", f"Signature version 2 is not supported: sign with {ALGORITHM}")
        elif "text/html" in headers.get("Accept", ""):  # a browser asks for the keys
            raise S3Error("AccessDenied", "The user is the access key", status=401, headers=_CHALLENGE)
        else:
            raise S3Error("AccessDenied", "The request is not signed with the keys of this endpoint")
        return in_header or in_query

    def _check_password(self, given: str, keys: Keys) -> None:
        try:
            found = base64.b64decode(given, validate=True)
        except binascii.Error:
            found = b""
        if not hmac.compare_digest(found, f"{keys.access}:{keys.secret}".encode()):
            raise S3Error("AccessDenied", "User or password is wrong", status=401, headers=_CHALLENGE)


@functools.lru_cache(256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
