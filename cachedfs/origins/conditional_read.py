"""Conditional reads through s3fs: bytes of one ETag of an object, or none.

fsspec's own `cat_file` has no such condition.
"""

from __future__ import annotations

from typing import Any

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import OriginUnavailable
from cachedfs.origins.base import range_header
from cachedfs.origins.inner_filesystem import invoke

__all__ = ["etag_to_match", "read_etag"]


def etag_to_match(inner: Any, info: ObjectInfo) -> str | None:
    """Return the ETag to read an object by, or None if it has none or the filesystem is not s3fs."""
    return info.details.get("ETag") or None if hasattr(inner, "call_s3") else None


async def read_etag(inner: Any, info: ObjectInfo, span: Range, etag: str) -> bytes | None:
    """Return bytes of the object if its ETag is `etag`; None if the answer is of another version.

    S3 refuses the request then, which raises s3fs's OSError. A compatible service may ignore the condition.
    """
    import s3fs.core

    bucket, key, version = inner.split_path(info.path)
    options = {**inner.req_kw, "Bucket": bucket, "Key": key, "Range": range_header(span), "IfMatch": etag}
    if version:
        options["VersionId"] = version
    failure: Exception | None = None
    for _ in range(inner.retries):  # s3fs itself repeats only the request, not the body
        answer = await invoke(inner, "call_s3", "get_object", **options)
        try:
            data: bytes = await answer["Body"].read()
        except s3fs.core.S3_RETRYABLE_ERRORS as error:
            failure = error
            continue
        finally:
            answer["Body"].close()
        if answer.get("ETag", etag) != etag:
            return None
        if len(data) == info.size:  # also where the service ignored the range
            return data if span.size == info.size else data[span.start : span.stop]
        if len(data) == span.size and "ETag" in answer:
            return data
    raise OriginUnavailable(
        f"s3://{info.path}: no usable answer from the origin; check the network, or try again later "
        f"({range_header(span)}: {failure or 'the answer has another size, or no ETag'})"
    ) from failure
