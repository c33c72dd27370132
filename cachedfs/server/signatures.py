"""Verify AWS Signature Version 4, in the headers or in the URL of a request. Pure functions.

The rules are those of "Authenticating Requests (AWS Signature Version 4)" in the S3 API reference.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

from multidict import CIMultiDict, CIMultiDictProxy

from cachedfs.server.s3_errors import S3Error
from cachedfs.server.s3_requests import Query

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

ALGORITHM = "AWS4-HMAC-SHA256"
SKEW_S = 900.0  # between the client's clock and ours
MOST_EXPIRES_S = 604_800
_UNSIGNED = "UNSIGNED-PAYLOAD"
_NO_PAYLOAD = hashlib.sha256().hexdigest()  # what curl signs without saying so


class Keys(NamedTuple):
    """The access key and the secret key of all clients."""

    access: str
    secret: str


def check_headers(keys: Keys, method: str, path: str, query: Query, headers: Headers, now: float) -> None:
    """Raise S3Error unless the header Authorization has the signature of this request."""
    fields = headers["Authorization"].partition(" ")[2].split(",")
    given = dict(field.strip().partition("=")[::2] for field in fields)
    given["Date"] = headers.get("x-amz-date", "")
    if abs(_moment(given["Date"]) - now) > SKEW_S:
        raise S3Error("RequestTimeTooSkewed", "The clock of the client differs by more than 15 minutes")
    _check(keys, method, path, query, headers, given, headers.get("x-amz-content-sha256", _NO_PAYLOAD))


def check_query(keys: Keys, method: str, path: str, query: Query, headers: Headers, now: float) -> None:
    """Raise S3Error unless this request has a presigned URL that has not expired."""
    given = {name.removeprefix("X-Amz-"): value for name, value in query}
    sent_at, expires = _moment(given.get("Date", "")), given.get("Expires", "")
    if not (re.fullmatch("[0-9]{1,6}", expires) and 1 <= int(expires) <= MOST_EXPIRES_S):
        raise S3Error("AuthorizationHeaderMalformed", "X-Amz-Expires must be 1 to 604800 seconds")
    if not -SKEW_S <= now - sent_at <= int(expires):
        raise S3Error("AccessDenied", "Request has expired, or is of the future")
    unsigned = tuple(each for each in query if each[0] != "X-Amz-Signature")
    _check(keys, method, path, unsigned, headers, given, _UNSIGNED)


@functools.lru_cache(256)
def _moment(at: str) -> float:
    try:
        return datetime.strptime(at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise S3Error("AccessDenied", "A signature needs X-Amz-Date, as 20260102T030405Z") from None


def _bytes(text: str) -> bytes:
    """Return a text of a request as it was sent."""
    return text.encode("utf-8", "surrogateescape")


def _check(
    keys: Keys, method: str, path: str, query: Query, headers: Headers, given: Mapping[str, str], payload: str
) -> None:
    """Raise S3Error unless `given`, the fields of a signature, has that of the request."""
    try:
        credential, signed, signature = given["Credential"], given["SignedHeaders"], given["Signature"]
    except KeyError as error:
        raise S3Error("AuthorizationHeaderMalformed", f"The signature lacks {error.args[0]}") from None
    access, _, scope = credential.partition("/")
    date, region, service, last = (scope.split("/") + [""] * 3)[:4]
    if (service, last) != ("s3", "aws4_request") or date != given["Date"][:8]:
        raise S3Error(
            "AuthorizationHeaderMalformed", "The credential must be KEY/DATE/REGION/s3/aws4_request"
        )
    if not hmac.compare_digest(_bytes(access), keys.access.encode()):
        raise S3Error("InvalidAccessKeyId", "There is no such access key; a restart generates new keys")
    names = signed.lower().split(";")
    if "host" not in names:
        raise S3Error("AccessDenied", "The signature must cover the header Host")
    fixed = "\n".join(f"{name}:{_value(headers, name)}" for name in names)
    rest = f"{_canonical(query)}\n{fixed}\n\n{signed}\n{payload}"
    key = _signing_key(keys.secret, date, region)
    digest = hashlib.sha256(_bytes(f"{method}\n{path}\n{rest}")).hexdigest()
    expected = hmac.digest(key, _bytes(f"{ALGORITHM}\n{given['Date']}\n{scope}\n{digest}"), "sha256").hex()
    if not hmac.compare_digest(expected.encode(), _bytes(signature)):
        raise S3Error("SignatureDoesNotMatch", "The secret key, or the way of signing, is another one")


def _value(headers: Headers, name: str) -> str:
    values = headers.getall(name, ())
    return ",".join(" ".join(value.split()) if " " in value else value for value in values)


def _canonical(query: Query) -> str:
    encoded = query and sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in encoded)


@functools.lru_cache(64)
def _signing_key(secret: str, date: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, _bytes(part), "sha256")
    return key
