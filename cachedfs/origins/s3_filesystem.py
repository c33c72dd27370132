"""s3fs with names that end in a slash, and with reads of one ETag: fsspec's own `cat_file` has no condition."""

from __future__ import annotations

from typing import Any

from fsspec.utils import stringify_path

from cachedfs.common.types import Range
from cachedfs.errors import OriginUnavailable
from cachedfs.origins.base import range_header


def s3_filesystem(cls: Any) -> Any:
    """Return a subclass of s3fs's class `cls`."""

    class S3FileSystem(cls):  # type: ignore[misc]  # s3fs has no types
        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            """Return the name of an object with the slash that may end it, as gcsfs does."""
            name = super()._strip_protocol(path)
            if isinstance(path, list) or "/" not in name:
                return name
            return name + _slashes_after(stringify_path(path))

        def split_path(self, path: str) -> tuple[str, str, str | None]:
            slashes = _slashes_after(path)
            bucket, key, version = super().split_path(path.removesuffix(slashes))
            return bucket, key and key + slashes, version

        async def _read_version(
            self, path: str, start: int, end: int, *, etag: str, size: int
        ) -> bytes | None:
            """Return bytes of an object of `size` bytes if its ETag is `etag`; None if the answer has another one.

            S3 refuses the request then, which raises s3fs's OSError. A compatible service may ignore the condition.
            """
            import s3fs.core

            bucket, key, version = self.split_path(path)
            range_, failure = range_header(Range(start, end)), None
            options = {**self.req_kw, "Bucket": bucket, "Key": key, "Range": range_, "IfMatch": etag}
            if version:
                options["VersionId"] = version
            for _ in range(self.retries):  # s3fs itself repeats only the request, not the body
                answer = await self._call_s3("get_object", **options)
                try:
                    data: bytes = await answer["Body"].read()
                except s3fs.core.S3_RETRYABLE_ERRORS as error:
                    failure = error
                    continue
                finally:
                    answer["Body"].close()
                if answer.get("ETag", etag) != etag:
                    return None
                if len(data) == size:  # also where the service ignored the range
                    return data[start:end]
                if len(data) == end - start and "ETag" in answer:
                    return data
            raise OriginUnavailable(
                f"s3://{path}: no usable answer from the origin; check the network, or try again later "
                f"({range_}: {failure or 'the answer has another size, or no ETag'})"
            ) from failure

    return S3FileSystem


def _slashes_after(path: str) -> str:
    return path[len(path.rstrip("/")) :]
