"""`GCSConnection`: our own requests to Google Cloud Storage, for metadata, listings and media."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from cachedfs.common.types import ObjectInfo
from cachedfs.origins.fsspec_origin import jsonable
from cachedfs.origins.gcs import api
from cachedfs.origins.http_request import HTTPRequest

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient


class GCSConnection:
    """Requests over one session, with the settings of one gcsfs filesystem."""

    def __init__(self, inner: Any, session: Any, client: HTTPClient, uploads: HTTPClient) -> None:
        """Create it over a session of the filesystem `inner`; `uploads` sends the uploads, `client` all else."""
        self._inner, self.session, self.client, self.uploads = inner, session, client, uploads
        self.location = str(inner._location)  # the start of all addresses, `https://host`
        self.media_address = f"{self.location}/download/storage/v1/b/"
        self.media_params = urlencode(inner._get_params({"alt": "media"}))
        self.is_version_aware = bool(inner.version_aware)

    def split(self, path: str) -> tuple[str, str, str | None]:
        """Return bucket, key and generation.

        The generation is None unless the filesystem is version-aware and the path names one.
        """
        bucket, key, generation = self._inner.split_path(path)
        return bucket, key, generation

    def address(self, bucket: str) -> str:
        """Return the address of a bucket."""
        return f"{self.location}/storage/v1/b/{quote(bucket, safe='')}"

    async def metadata(self, path: str, bucket: str, key: str, generation: str | None) -> ObjectInfo:
        params = {"fields": api.FIELDS, "generation": generation}
        address = f"{self.address(bucket)}/o/{quote(key, safe='')}"

        def parse(found: dict[str, Any]) -> ObjectInfo:
            return api.object_info(api.resource_of(found, "object", key), path)

        return await self.client.json(self.request(address, path, "looking it up", params=params), parse)

    async def bucket(self, bucket: str) -> ObjectInfo:
        def parse(found: dict[str, Any]) -> ObjectInfo:
            return api.bucket_info(jsonable(api.resource_of(found, "bucket", bucket)))

        request = self.request(self.address(bucket), bucket, "looking it up", params={})
        return await self.client.json(request, parse)

    async def pages(
        self,
        path: str,
        bucket: str,
        prefix: str,
        *,
        deep: bool,
        limit: int = api.PAGE,
        start: str | None = None,
        stop: str | None = None,
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """Yield the objects and folders in each page of a listing, requesting the page when it is needed.

        With a small `limit` also the folder itself, where it is an object. Only keys from `start` on, and below `stop`.
        """
        seen, below = set[str](), prefix if limit == api.PAGE else ""
        params = {"prefix": prefix or None, "maxResults": str(limit), "fields": api.LIST_FIELDS}
        params |= {"delimiter": None if deep else "/", "startOffset": start, "endOffset": stop}

        def parse(found: dict[str, Any]) -> tuple[list[ObjectInfo], str | None]:
            page = api.resource_of(found, "objects")
            return list(api.children(page, bucket, below)), api.next_token(page, seen)

        while True:
            request = self.request(f"{self.address(bucket)}/o", path, "listing it", params=params)
            infos, token = await self.client.json(request, parse)
            yield infos
            if token is None:  # without a token the first page would come again
                return
            seen.add(token)
            params = {**params, "pageToken": token}

    def request(
        self,
        address: str,
        path: str,
        doing: str,
        *,
        params: Mapping[str, str | None] | None = None,
        **more: Any,
    ) -> HTTPRequest:
        """Return a request about `path`, before it is sent.

        Parameters that are None are left out. Without `params`, the address has all that it needs.
        """
        # gcsfs adds the project that pays.
        full = {} if params is None else self._inner._get_params(params)
        present = {name: value for name, value in full.items() if value is not None}
        return HTTPRequest(url=address, params=present, subject=f"gs://{path}", doing=doing, **more)
