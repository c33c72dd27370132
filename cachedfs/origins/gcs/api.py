"""The JSON API of Google Cloud Storage: build requests and interpret answers, without I/O.

Written from cloud.google.com/storage/docs: json_api/v1, request-endpoints, status-codes, transcoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectNotFound,
    RequestRejected,
    SignInRefused,
)
from cachedfs.origins.base import clipped, content_range, http_date, int_of
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import ErrorRow, advice_of, error_of, refusal, retryable, size_of, text_of
from cachedfs.origins.retry import RetryableError, foreign

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPResponse

# The fields that `info` shows, the same from a lookup and from a listing.
FIELDS = (
    "kind,bucket,name,size,generation,metageneration,etag,md5Hash,crc32c,contentType,contentEncoding,"
    "contentLanguage,contentDisposition,cacheControl,storageClass,timeCreated,updated,metadata,customTime,"
    "componentCount,customerEncryption,temporaryHold,eventBasedHold"
)
_DETAILS = frozenset(FIELDS.split(",")) - {"name", "size"}
LIST_FIELDS = f"kind,nextPageToken,prefixes,items({FIELDS})"
PAGE = 1000  # objects and folders in one page: the service's maximum
_CUSTOM = "x-goog-meta-"  # begins the headers with custom metadata
_STORED_ENCODING = "x-goog-stored-content-encoding"
_HEADERS = (  # of a read, by the names of the JSON API
    ("generation", "x-goog-generation"),
    ("metageneration", "x-goog-metageneration"),
    ("contentType", "Content-Type"),
    ("contentEncoding", _STORED_ENCODING),
    ("storageClass", "x-goog-storage-class"),
)
_HASH = re.compile(r"\b(md5|crc32c)=([^,\s]+)")
_ABSENT = ("No such object: ", "The specified bucket does not exist.")
_LONGEST_WORDS = 2048  # of a text error, in characters; an object's name has up to 1,024 bytes
_HINT_403 = "pass token=..., or ask the owner for roles/storage.object"  # and the role
_HINT_PAYS = "the requester pays for this bucket: pass requester_pays=True (and project=...) or requester_pays='PROJECT'"
_REPLACED = "the object was replaced while it was read; open it again"
_ERRORS = (
    ErrorRow(412, "", ObjectChanged, _REPLACED, when=lambda request: request.is_pinned),
    ErrorRow(None, "", AccessDenied, _HINT_PAYS, text="(?i)requester pays"),
    # An anonymous request also gets a 401, for objects that are not public.
    ErrorRow(401, "", AccessDenied, "{advice}", text="(?i)anonymous"),
    ErrorRow(401, "", SignInRefused, "{advice}"),
    ErrorRow(403, "", AccessDenied, "{advice}"),
    ErrorRow(404, "", ObjectNotFound, "no object or folder has this name"),
    ErrorRow(400, "", RequestRejected, "the service did not accept the request"),
)

UNUSUAL = re.compile("^(?:gc?s:|/)|/$")  # paths that `object_path` may change


# Names
def plain_path(path: str) -> str:
    """Return `bucket/key` without protocol and without slashes around it."""
    return object_path(path).rstrip("/")


def object_path(path: str) -> str:
    """Return `bucket/key` without protocol, with the slashes that end the names of some objects."""
    if UNUSUAL.search(path):
        for prefix in ("gs://", "gcs://", "gs::", "gcs::"):
            path = path.removeprefix(prefix)
        path = path.lstrip("/")
        if "/" not in path.rstrip("/"):
            path = path.rstrip("/")
    return path


# Reading
class ReadHeaders(NamedTuple):
    """The parsed headers of a read of `start` to `stop`; the body has `offset` to `body_stop`."""

    info: ObjectInfo
    start: int
    stop: int
    offset: int
    body_stop: int


def head_of(
    path: str, response: HTTPResponse, want: Range | Suffix | None, known: Mapping[str, Any] = {}
) -> ReadHeaders:
    """Parse the headers of a 200 or 206, which add to `known` details; raise RetryableError for impossible ones."""
    status, headers = int(response.status), cast("Any", response.headers)
    stored, length = headers.get("x-goog-stored-content-length"), headers.get("Content-Length")
    size, start, stop = int(stored) if stored and stored.isascii() and stored.isdigit() else -1, 0, 0
    if status == 206 and isinstance(want, Range):
        start, stop = want.start, min(want.stop, size)
    encoding = headers.get("Content-Encoding", "identity")
    stored_encoding, part = headers.get(_STORED_ENCODING, encoding), f"bytes {start}-{stop - 1}/{stored}"
    if (headers.get("Content-Range"), length, encoding) != (part, str(stop - start), stored_encoding):
        span, size = _span_of(status, headers, want)  # other forms, and answers of others
        start, stop = span.start, span.stop
    details: dict[str, Any] = {name: text for name, at in _HEADERS if (text := headers.get(at)) is not None}
    hashes = _HASH.findall(",".join(headers.getall("x-goog-hash", ())))
    details |= {"md5Hash" if kind == "md5" else kind: value for kind, value in hashes}
    if details.get("contentEncoding") == "identity":
        del details["contentEncoding"]
    if (changed := http_date(headers.get("Last-Modified"))) is not None:
        details["mtime"] = changed
    if custom := [name for name in headers if name.lower().startswith(_CUSTOM)]:
        details["metadata"] = {name[len(_CUSTOM) :]: headers[name] for name in custom}
    info = ObjectInfo(path, "file", size, details.get("generation"), details={**details, **known})
    return ReadHeaders(info, start, stop, *((start, stop) if status == 206 else (0, size)))


def _span_of(status: int, headers: Mapping[str, str], want: Range | Suffix | None) -> tuple[Range, int]:
    """Return the requested range, clipped to the size of the object, and this size."""
    encoding = headers.get("Content-Encoding", "identity")
    stored_encoding = headers.get(_STORED_ENCODING, encoding)
    if encoding.lower() != stored_encoding.lower():
        raise RetryableError(
            f"the answer is encoded as {encoding}, and the object as {stored_encoding}: something recompressed it"
        )
    offset, stop, size = 0, None, int_of(headers.get("x-goog-stored-content-length"))
    length = None if "Transfer-Encoding" in headers else int_of(headers.get("Content-Length"))
    if status == 206:
        try:
            offset, stop, total = content_range(headers.get("Content-Range", ""))
        except ValueError as error:
            raise RetryableError(str(error)) from error
        if None not in (total, size) and total != size:
            raise RetryableError(f"the answer is of an object of {total} bytes, and of {size}")
        size = total if total is not None else size
    elif size is None:
        size = length
    if size is None:
        raise RetryableError("the response does not state the size of the object")
    span = clipped(want, size)
    if status == 206 and (offset, stop) != (span.start, span.stop):
        raise RetryableError(f"the answer is of bytes {offset} to {stop}, not {span.start} to {span.stop}")
    if status == 206 and length not in (None, span.size):
        raise RetryableError(f"the answer has {length} bytes for a range of {span.size}")
    if status == 200 and length not in (None, size):
        raise RetryableError(
            f"the answer has {length} bytes of an object of {size}: something on the way decompressed it"
        )
    return span, size


# Metadata and listings; the functions raise ValueError, TypeError and the like for JSON that the service never sends
def object_info(resource: Mapping[str, Any], path: str) -> ObjectInfo:
    """Return the object that a resource describes; its details are those that gcsfs shows."""
    details = {name: value for name, value in resource.items() if name in _DETAILS}
    for name, at in (("mtime", "updated"), ("ctime", "timeCreated")):
        if at in resource:
            details[name] = datetime.fromisoformat(resource[at])
    generation = text_of(resource["generation"])
    return ObjectInfo(path, "file", size_of(resource["size"]), generation, details=details)


def folder_info(path: str) -> ObjectInfo:
    """Return a folder that is implied by the names of the objects in it."""
    bucket = path.partition("/")[0]
    return ObjectInfo(path, "directory", details={"bucket": bucket, "storageClass": "DIRECTORY"})


def bucket_info(resource: Mapping[str, Any]) -> ObjectInfo:
    """Return the bucket that a resource describes."""
    details = {name: value for name, value in resource.items() if name not in ("name", "size", "type")}
    return ObjectInfo(text_of(resource["name"]), "directory", details=details)


def children(page: Mapping[str, Any], bucket: str, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects and folders in one page of a listing of `prefix`.

    An empty object "d/" is the folder d, as created by hand; one that has bytes is also an object in d. A folder with
    an empty name, such as the one in `a` for `a//b`, is `a/`: see `cachedfs.core.listings`.
    """
    for name in page.get("prefixes", ()):
        yield folder_info(f"{bucket}/{_below(prefix, name).removesuffix('/')}")
    for resource in page.get("items", ()):
        name = _below(prefix, resource["name"])
        if name.endswith("/") and size_of(resource["size"]) == 0:
            if name != prefix:
                yield folder_info(f"{bucket}/{name.rstrip('/')}")
        else:
            yield object_info(resource, f"{bucket}/{name}")


def _below(prefix: str, name: Any) -> str:
    if not text_of(name).startswith(prefix):
        raise ValueError(f"a listing of {prefix!r} has {name!r}")
    return str(name)


def next_token(page: Mapping[str, Any], seen: Collection[str]) -> str | None:
    """Return the token of the next page; None after the last one.

    Raises ValueError for a token in `seen`: the listing would never end.
    """
    if (token := page.get("nextPageToken")) in seen:
        raise ValueError("a page names itself, or one before it, as the next one")
    return text_of(token) if token else None


# Recognizing the service's own answers
def is_absence(headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether a 404 is the service's own, so that the object, bucket or folder does not exist.

    gcsfs and google-cloud-storage check the status alone. An answer of Google Cloud Storage looks like this:

    * JSON API: JSON. A success has a `kind` that begins with "storage#", an empty listing too. An error is {"error":
      {"code": ..., "message": ...}}.
    * Media: an error is short text, sent as text/html, such as "No such object: bucket/key". Every answer of the media
      server has the header X-GUploader-UploadID.
    * It never follows a redirect to another host; `HTTPClient` takes those answers for foreign ones.

    Emulators send the same JSON. For media, some send only "Not Found", as proxies do: `GCSMediaRead` then asks the
    JSON API.
    """
    text = body.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["code"]) in ("404", "410")
    except (ValueError, TypeError, KeyError, RecursionError):
        is_text = 0 < len(text) <= _LONGEST_WORDS and not text.startswith(("<", "{", "["))
        return is_text and (text.startswith(_ABSENT) or "X-GUploader-UploadID" in headers)


def resource_of(found: Any, kind: str, name: str | None = None) -> Mapping[str, Any]:
    """Return JSON that `is_resource`; raise ValueError for any other."""
    if not is_resource(found, kind, name):
        raise ValueError(f"it is no {kind or 'resource'} {name or ''}")
    return found  # type: ignore[no-any-return]  # which is a mapping


def is_resource(found: Any, kind: str, name: str | None = None) -> bool:
    """Return whether JSON is a resource of this kind ("" for any), with this name where one is given."""
    return (
        isinstance(found, Mapping)
        and str(found.get("kind")).startswith("storage#")
        and kind in ("", str(found["kind"]).partition("#")[2])
        and name in (None, found.get("name"))
    )


# Failures
def failure(request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """Return what an error response means: a reason to retry, or the exception to raise."""
    text, reasons = error_of(body)
    said = f"{status}: {text}" if text else str(status)
    if (failed := retryable(status, reasons, said, headers)) is not None:
        return failed
    if status == 404 and not is_absence(headers, body):
        return foreign(f"the answer {said} does not look like one of the service", is_absence=True)
    role = "Viewer" if request.method == "GET" else "User"
    advice = advice_of(text, reasons) or f"access denied; {_HINT_403}{role}"
    return refusal(request, status, said, _ERRORS, text, advice=advice)
