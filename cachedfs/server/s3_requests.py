"""Parse a request: the operation of the S3 API, the bucket and the key. Pure functions."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from cachedfs.server.s3_errors import S3Error

Query = tuple[tuple[str, str], ...]

READ_ONLY = "This endpoint is read-only; write to the origin itself"
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MOST_PARAMETERS = 100
# Parameters that name another operation; all others are ignored, as S3 does.
_OF_OBJECTS = {
    "acl", "attributes", "legal-hold", "partNumber", "retention", "tagging", "torrent", "uploadId", "versionId",
}  # fmt: skip
_OF_BUCKETS = {
    "accelerate", "acl", "analytics", "cors", "encryption", "intelligent-tiering", "inventory", "lifecycle", "logging",
    "metrics", "notification", "object-lock", "ownershipControls", "policy", "policyStatus", "publicAccessBlock",
    "replication", "requestPayment", "tagging", "uploads", "versioning", "versions", "website",
}  # fmt: skip


class S3Request(NamedTuple):
    """An operation of the S3 API, under its name there, on a bucket and a key; empty where it has none."""

    operation: str
    bucket: str = ""
    key: str = ""


def query_of(text: str) -> Query:
    """Return the parameters of a query, decoded. Raises S3Error."""
    try:
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)) if text else ()
    except ValueError as error:
        raise S3Error("InvalidRequest", f"The query has over {_MOST_PARAMETERS} parameters") from error


@functools.lru_cache(256)
def host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


@functools.lru_cache(4096)
def operation_of(method: str, path: str, query: Query, host: str, domains: tuple[str, ...]) -> S3Request:
    """Return what a request with the raw `path` asks for, in path style or, below one of `domains`, by virtual host.

    Raises S3Error for a path that is no name of an object, for a write, and for any other operation.
    """
    if not path.startswith("/"):
        raise S3Error("InvalidURI", "The path must begin with a slash")
    name = host_name(host)
    below = next((name.removesuffix(f".{each}") for each in domains if name.endswith(f".{each}")), "")
    first, _, rest = path[1:].partition("/")
    bucket, key = (below, _decoded(path[1:])) if below else (_decoded(first), _decoded(rest))
    if method not in ("GET", "HEAD"):
        raise S3Error("MethodNotAllowed", READ_ONLY, headers={"Allow": "GET, HEAD"})
    operation = _on_object(query) if key else _on_bucket(query) if bucket else "ListBuckets"
    if method == "HEAD":
        operation = {"GetObject": "HeadObject", "ListBuckets": "ListBuckets"}.get(operation, "HeadBucket")
    return S3Request(operation, bucket, key)


def _decoded(text: str) -> str:
    """Return a part of the path as it is stored. Raises S3Error for one that no origin must see."""
    if "%" in text or not text.isascii():
        try:
            if _BAD_ESCAPE.search(text):
                raise ValueError
            text = unquote_to_bytes(text).decode()
        except ValueError:
            raise S3Error("InvalidURI", "The path is not UTF-8 in percent-encoding") from None
    if "\0" in text or (("/." in f"/{text}") and not {".", ".."}.isdisjoint(text.split("/"))):
        raise S3Error("InvalidURI", "A part of the path is '.' or '..', or has a NUL character")
    return text


def _on_object(query: Query) -> str:
    for name, value in query:
        if name.startswith("response-") or (name in _OF_OBJECTS and (name, value) != ("versionId", "null")):
            raise S3Error("NotImplemented", f"GET of an object with ?{name} is not implemented")
    return "GetObject"


def _on_bucket(query: Query) -> str:
    names = dict(query)
    if other := next((name for name in names if name in _OF_BUCKETS), None):
        raise S3Error("NotImplemented", f"GET of a bucket with ?{other} is not implemented")
    if "location" in names:
        return "GetBucketLocation"
    return "ListObjectsV2" if names.get("list-type") == "2" else "ListObjects"
