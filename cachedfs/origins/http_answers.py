"""The answers of a web server: what their headers state about an object, without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import formatdate
from typing import Any, Literal, NamedTuple

from cachedfs.common.logging import without_secrets
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import AccessDenied, ObjectNotFound, RequestRejected
from cachedfs.origins.base import content_range, http_date, int_of
from cachedfs.origins.evidence import fingerprint, is_recent, is_same_evidence
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import ErrorRow, error_of, refusal, retryable

_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})  # the encodings that aiohttp decodes
_DENIED = "access denied; check the credentials (headers, auth, cookies), and whether the URL has expired"
_ERRORS = (
    *(ErrorRow(status, "", ObjectNotFound, "the server has nothing of this name") for status in (404, 410)),
    *(ErrorRow(status, "", AccessDenied, _DENIED) for status in (401, 403, 407)),
    *(
        ErrorRow(each, "", RequestRejected, "the server did not accept the request")
        for each in (400, 405, 501)
    ),
)
# nginx's ETag: the time and the size in hexadecimal digits. It is no stronger than the time itself.
_TIME_AND_SIZE = re.compile('"([0-9a-f]{1,16})-[0-9a-f]{1,16}"')
# As of Apache, Jetty and others: the ETag of an encoded body is that of the object, with the name of the encoding.
_ENCODING_SUFFIX = re.compile('(--?|;)(gzip|deflate|br|zstd)"$')

Comparison = Literal["same", "other", "unreliable etag", "other evidence"]


class HTTPAnswer(NamedTuple):
    """An object as the headers of an answer describe it, and the part of it that the body has.

    `span` is None if the headers do not tell: the body is encoded, its length is not stated, or its range is unusable.
    """

    info: ObjectInfo
    span: Range | None
    status: int

    @property
    def is_unusable_part(self) -> bool:
        """True for a 206 that does not say which bytes it has, or has them encoded: the whole object is to be requested."""
        return self.status == 206 and self.span is None


def answer_of(
    path: str, status: int, headers: Mapping[str, str], url: str, now_s: float, *, decodes: bool = True
) -> HTTPAnswer:
    """Return what an answer of 200, 204 or 206 states.

    `url` is where redirects led. `now_s` is the Unix time when the request was sent. `decodes`: aiohttp decodes the body.
    """
    span: Range | None = None
    size: int | None = None
    if status == 206:
        with suppress(ValueError):
            start, stop, size = content_range(headers.get("Content-Range", ""))
            span = Range(start, stop) if size is not None and start < stop <= size else None
    elif status == 204:
        size, span = 0, Range(0, 0)
    elif "Transfer-Encoding" not in headers and "Content-Length" in headers:
        size = int_of(headers["Content-Length"])
        span = None if size is None else Range(0, size)
    is_encoded = headers.get("Content-Encoding", "").strip().lower() in _DECODED
    if span is None or (decodes and is_encoded):
        size = span = None
    if (date := http_date(headers.get("Date"))) is not None:
        now_s = date.timestamp()
    details = _details(status, headers, url, now_s)
    info = ObjectInfo(path, "file", size, _version(headers, size, now_s), details=details)
    return HTTPAnswer(info, span, status)


def _details(status: int, headers: Mapping[str, str], url: str, now_s: float) -> dict[str, Any]:
    """Return the entries of the `info` of fsspec's HTTPFileSystem, and the `Date` where the object has just changed."""
    details: dict[str, Any] = {"url": url}
    if "Content-Type" in headers:
        details["mimetype"] = headers["Content-Type"].partition(";")[0]
    if headers.get("Accept-Ranges") == "none":
        details["partial"] = False
    # The Content-MD5 of a 206 is that of the part.
    names = ("ETag", "Digest", "Last-Modified") + (() if status == 206 else ("Content-MD5",))
    details |= {name: headers[name] for name in names if headers.get(name)}
    if (modified := _modified(headers)) is not None and is_recent(modified.timestamp(), now_s):
        details["Date"] = formatdate(now_s, usegmt=True)
    return details


def _version(headers: Mapping[str, str], size: int | None, now_s: float) -> str | None:
    """Return the fingerprint: a strong ETag, else the time of the last change, by the server's own clock."""
    etag, modified = _strong_etag(headers), _modified(headers)
    repeated = _TIME_AND_SIZE.fullmatch(etag)
    if repeated and modified is not None and int(repeated[1], 16) == int(modified.timestamp()):
        etag = ""
    return fingerprint({"size": size, "ETag": etag, "Last-Modified": modified}, now_s)


def _strong_etag(headers: Mapping[str, str]) -> str:
    """Return the ETag; "" if it is weak, as it may stay the same when bytes change, or empty."""
    etag = headers.get("ETag", "").strip()
    return etag if etag.startswith('"') and len(etag) > len('""') else ""


def _modified(headers: Mapping[str, str]) -> datetime | None:
    modified = http_date(headers.get("Last-Modified"))
    # Some servers state the start of 1970 where they know no time.
    return None if modified is None or modified.timestamp() <= 0 else modified


def compared(known: ObjectInfo, now: ObjectInfo) -> Comparison:
    """Return whether a later answer is of the version `known`.

    The fingerprints decide. Where one is missing, the time decides; where there is no time, the strong ETags do, so
    that without these only the size is compared.

    "unreliable etag": only the ETags differ, and no change could have left the size and the time as they are. "other
    evidence": only the ETags differ, but the time is missing or was recent.
    """
    infos = (known, now)
    is_sized = known.size is not None and now.size is not None
    if is_sized and known.size != now.size:
        return "other"
    times = [_modified(info.details) for info in infos]
    if known.fingerprint is None or now.fingerprint is None:
        etags = [_ENCODING_SUFFIX.sub('"', _strong_etag(info.details)) for info in infos]
        if not is_sized and all(etags) and etags[0] != etags[1]:
            return "other"  # the time alone does not prove an encoded body, whose size is unknown
        return "same" if times[0] == times[1] and (times[0] or etags[0] == etags[1]) else "other"
    if is_same_evidence(known.fingerprint, now.fingerprint):
        return "same"
    if times[0] != times[1]:
        return "other"
    is_final = times[0] is not None and not any("Date" in info.details for info in infos)
    return "unreliable etag" if is_final else "other evidence"


def failure(request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """Return what an error answer means: a reason to retry, or the exception to raise."""
    text = without_secrets(error_of(body)[0])
    said = f"{status}: {text}" if text else str(status)
    if (failed := retryable(status, (), said, headers)) is not None:
        return failed
    return refusal(request, status, said, _ERRORS)
