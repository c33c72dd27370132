"""Conditional reads through s3fs: bytes of one ETag of an object, or none.

fsspec's own `cat_file` has no such condition.
"""

from __future__ import annotations

from typing import Any

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.origins.base import range_header
from cachedfs.origins.inner_filesystem import invoke

__all__ = ["etag_to_match", "read_etag"]


def etag_to_match(inner: Any, info: ObjectInfo) -> str | None:
    """Return the ETag to read an object by, or None if it has none or the filesystem is not s3fs."""
    return info.details.get("ETag") or None if hasattr(inner, "call_s3") else None


async def read_etag(inner: Any, path: str, span: Range, etag: str) -> bytes | None:
    """Return bytes of the object if its ETag is `etag`; None if the answer is of another version.

    S3 refuses the request then, which raises s3fs's OSError. A compatible service may ignore the condition.
    """
    import s3fs.core

    bucket, key, version = inner.split_path(path)
    options = {**inner.req_kw, "Bucket": bucket, "Key": key, "Range": range_header(span), "IfMatch": etag}
    if version:
        options["VersionId"] = version
    for n_left in reversed(range(inner.retries)):  # s3fs itself repeats only the request, not the body
        answer = await invoke(inner, "call_s3", "get_object", **options)
        body = answer["Body"]
        try:
            data: bytes = await body.read()
            break
        except s3fs.core.S3_RETRYABLE_ERRORS:
            if not n_left:
                raise
        finally:
            body.close()
    return data if answer.get("ETag") == etag else None
