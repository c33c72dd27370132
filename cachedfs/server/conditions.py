"""Ranges, and conditions on the version, of a request for an object. Pure functions."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime

from cachedfs.common.types import ObjectInfo, Range, modified_of
from cachedfs.origins.base import http_date
from cachedfs.server.s3_errors import S3Error
from cachedfs.server.signatures import Headers

_UNKNOWN = datetime.fromtimestamp(0, UTC)
Slice = tuple[int, int | None]

_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,40})-([0-9]{0,40})[ \t]*", re.IGNORECASE)


def modified_at(info: ObjectInfo) -> datetime:
    """Return when an object was last written, in whole seconds; 1970 if its origin does not say."""
    found = modified_of(info.details) or http_date(info.details.get("Last-Modified")) or _UNKNOWN
    return found.astimezone(UTC).replace(microsecond=0)


def fingerprint_of(info: ObjectInfo) -> str:
    """Return the fingerprint of a version; size and time where the origin has no other evidence."""
    return info.fingerprint or f"{info.size} {modified_at(info)}"


def etag_of(fingerprint: str) -> str:
    """Return the ETag of a version: of the form of a multipart upload's, so that nobody takes it for an MD5."""
    digest = hashlib.blake2b(fingerprint.encode("utf-8", "surrogatepass"), digest_size=16)
    return f'"{digest.hexdigest()}-1"'


def slice_of(text: str | None) -> Slice | None:
    """Return what a header Range selects, as the bounds of a Python slice.

    None for the whole object, also if the header is no single range of bytes: S3 ignores all others.
    """
    found = _RANGE.fullmatch(text or "")
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        return (-int(found[2]), None) if int(found[2]) else (0, 0)  # the last 0 bytes
    start, stop = int(found[1]), int(found[2]) + 1 if found[2] else None
    return None if stop is not None and stop <= start else (start, stop)


def range_in(wanted: Slice, size: int) -> Range:
    """Return the bytes to send of an object of `size` bytes. Raises S3Error if there are none in the range."""
    start, stop = wanted
    first = max(0, size + start) if start < 0 else start
    last = size if stop is None else min(stop, size)
    if first >= last:
        headers = {"Content-Range": f"bytes */{size}"}
        raise S3Error("InvalidRange", "No bytes are in this range", headers=headers, ActualObjectSize=size)
    return Range(first, last)


def is_not_modified(headers: Headers, etag: str, modified: datetime) -> bool:
    """Return whether the client has this version (304). Raises S3Error if it asks for another one (412).

    An ETag counts more than a time, as in RFC 9110.
    """
    if (given := headers.get("If-Match")) is not None:
        if not _is_in(etag, given):
            raise S3Error("PreconditionFailed", "The object has another version", Condition="If-Match")
    elif (since := _time_in(headers, "If-Unmodified-Since")) is not None and modified > since:
        raise S3Error("PreconditionFailed", "The object is newer", Condition="If-Unmodified-Since")
    if (given := headers.get("If-None-Match")) is not None:
        return _is_in(etag, given)
    since = _time_in(headers, "If-Modified-Since")
    return since is not None and modified <= since


def _time_in(headers: Headers, name: str) -> datetime | None:
    return http_date(headers[name]) if name in headers else None


def _is_in(etag: str, given: str) -> bool:
    each = {text.strip().removeprefix("W/").strip('"') for text in given.split(",")}
    return "*" in each or etag.strip('"') in each
