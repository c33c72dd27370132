"""The answers of a web server: what their headers state about an object, without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import AccessDenied, CachedFSError, ObjectChanged, ObjectNotFound, RequestRejected
from cachedfs.origins.base import content_range, http_date, number
from cachedfs.origins.evidence import fingerprint, is_same_evidence
from cachedfs.origins.origin_errors import error_of, trouble_of, without_secrets
from cachedfs.origins.retry import RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPRequest

__all__ = ["HTTPAnswer", "Comparison", "answer_of", "compared", "failure"]

_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})  # the encodings that aiohttp decodes
_ABSENT = frozenset({404, 410})
_REFUSED = frozenset({401, 403, 407})
_NOT_SUPPORTED = frozenset({400, 405, 501})
# nginx's ETag: the time and the size in hexadecimal digits. It is no stronger than the time itself.
_TIME_AND_SIZE = re.compile('"([0-9a-f]{1,16})-[0-9a-f]{1,16}"')
# As of Apache, Jetty and others: the ETag of an encoded body is that of the object, with the name of the encoding.
_ENCODING_SUFFIX = re.compile('(--?|;)(gzip|deflate|br|zstd)"$')

Comparison = Literal["same", "other", "other evidence"]


class HTTPAnswer(NamedTuple):
    """An object as the headers of an answer describe it, and the part of it that the body has.

    `span` is None if the headers do not tell: the body is encoded, or its length is not stated.
    """

    info: ObjectInfo
    span: Range | None


def answer_of(path: str, status: int, headers: Mapping[str, str], url: str, now_s: float) -> HTTPAnswer:
    """Return what an answer of 200 or 206 states; raise ValueError for an impossible Content-Range.

    `url` is where redirects led. `now_s` is the Unix time when the request was sent.
    """
    span: Range | None = None
    size: int | None = None
    if status == 206:
        start, stop, size = content_range(headers.get("Content-Range", ""))
        if start >= stop or (size is not None and stop > size):
            raise ValueError(f"the answer has an impossible Content-Range: {headers['Content-Range']!r}")
        span = Range(start, stop)
    elif "Transfer-Encoding" not in headers and "Content-Length" in headers:
        size = number(headers["Content-Length"])
        span = None if size is None else Range(0, size)
    if size is None or headers.get("Content-Encoding", "").strip().lower() in _DECODED:
        size = span = None
    details = _details(status, headers, url)
    return HTTPAnswer(ObjectInfo(path, "file", size, _version(headers, size, now_s), details=details), span)


def _details(status: int, headers: Mapping[str, str], url: str) -> dict[str, Any]:
    """Return the entries of the `info` of fsspec's HTTPFileSystem."""
    details: dict[str, Any] = {"url": url}
    if "Content-Type" in headers:
        details["mimetype"] = headers["Content-Type"].partition(";")[0]
    if headers.get("Accept-Ranges") == "none":
        details["partial"] = False
    # The Content-MD5 of a 206 is that of the part.
    names = ("ETag", "Digest", "Last-Modified") + (() if status == 206 else ("Content-MD5",))
    return details | {name: headers[name] for name in names if headers.get(name)}


def _version(headers: Mapping[str, str], size: int | None, now_s: float) -> str | None:
    """Return the fingerprint: a strong ETag, else the time of the last change, by the server's own clock."""
    etag, modified = headers.get("ETag", "").strip(), http_date(headers.get("Last-Modified"))
    if modified is not None and modified.timestamp() <= 0:  # a server that states no time
        modified = None
    repeated = _TIME_AND_SIZE.fullmatch(etag)
    is_time = repeated and modified is not None and int(repeated[1], 16) == int(modified.timestamp())
    if not etag.startswith('"') or is_time:  # a weak ETag may stay the same when bytes change
        etag = ""
    if (date := http_date(headers.get("Date"))) is not None:
        now_s = date.timestamp()
    return fingerprint({"size": size, "ETag": etag, "Last-Modified": modified}, now_s)


def compared(known: ObjectInfo, now: ObjectInfo) -> Comparison:
    """Return whether a later answer is of the version `known`.

    "other evidence": the fingerprints differ, but the size and the time are the same, as far as they are stated. Where
    a fingerprint is missing, the time decides, and the ETag where there is no time.
    """
    if known.size is not None and now.size is not None and known.size != now.size:
        return "other"
    tag, time = ((known.details.get(name), now.details.get(name)) for name in ("ETag", "Last-Modified"))
    is_same_time = time[0] == time[1]
    if known.fingerprint is None or now.fingerprint is None:
        if (known.size is None or now.size is None) and _are_other_etags(*tag):
            return "other"  # the time alone does not prove an encoded body, whose size is unknown
        return "same" if is_same_time and (time[0] or tag[0] == tag[1]) else "other"
    if is_same_evidence(known.fingerprint, now.fingerprint):
        return "same"
    return "other evidence" if is_same_time else "other"


def _is_strong(etag: str | None) -> bool:
    return etag is not None and etag.startswith('"')


def _are_other_etags(known: str | None, now: str | None) -> bool:
    """Return whether two strong ETags are of different versions; a suffix may name the encoding."""
    if not known or not now or not (_is_strong(known) and _is_strong(now)):
        return False
    return _ENCODING_SUFFIX.sub('"', known) != _ENCODING_SUFFIX.sub('"', now)


def failure(
    request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes
) -> RetryReason | Exception:
    """Return what an error answer means: a reason to retry, or the exception to raise."""
    text = without_secrets(error_of(body)[0])
    answer = f"{status}: {text}" if text else str(status)
    if (reason := trouble_of(status, set(), answer, headers, datetime.now(UTC))) is not None:
        return reason
    url, doing = request.subject, request.doing
    if status in _ABSENT and request.is_pinned:
        return ObjectChanged(f"{url}: the object was removed while it was read ({doing}); open it again")
    if status in _ABSENT:
        return ObjectNotFound(f"{url}: the server has nothing of this name ({doing}: {answer})")
    if status in _REFUSED:
        advice = (
            "access denied; check the credentials (headers, auth, cookies), and whether the URL has expired"
        )
        return AccessDenied(f"{url}: {advice} ({doing}: {answer})")
    if status in _NOT_SUPPORTED:
        return RequestRejected(f"{url}: the server did not accept the request ({doing}: {answer})")
    return CachedFSError(f"{url}: the server gave an unexpected answer ({doing}: {answer})")
