"""`GCSConnection`: our own requests to Google Cloud Storage, for metadata, listings and media."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cachedfs.common.types import Range, Suffix
from cachedfs.origins.base import describe
from cachedfs.origins.gcs import api

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient, HTTPRequest

__all__ = ["GCSConnection"]


class GCSConnection:
    """Requests over one session, with the settings of one gcsfs filesystem."""

    def __init__(self, inner: Any, session: Any, client: HTTPClient) -> None:
        self._inner, self.session, self.client = inner, session, client

    def split(self, path: str) -> tuple[str, str, str | None]:
        """Return bucket, key and generation.

        The generation is None unless the filesystem is version-aware and the path names one.
        """
        bucket, key, generation = self._inner.split_path(path)
        return bucket, key, generation

    async def metadata(self, path: str, bucket: str, key: str, generation: str | None) -> Any:
        params = {"fields": api.FIELDS, "generation": generation}
        address = api.metadata_url(self._inner._location, bucket, key)
        return await self.client.json(
            self._ask(address, params, path, "looking it up"),
            partial(api.is_resource, kind="object", name=key),
        )

    async def bucket(self, bucket: str) -> Any:
        address = api.bucket_url(self._inner._location, bucket)
        is_bucket = partial(api.is_resource, kind="bucket", name=bucket)
        return await self.client.json(self._ask(address, {}, bucket, "looking it up"), is_bucket)

    async def pages(
        self, path: str, bucket: str, prefix: str, *, deep: bool, **limit: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pages of a listing, requesting each one when it is needed."""
        address, token = api.list_url(self._inner._location, bucket), None
        while True:
            params = api.list_params(prefix, deep=deep, token=token, **limit)
            ask = self._ask(address, params, path, "listing it")
            page = await self.client.json(ask, partial(api.is_resource, kind="objects"))
            yield page
            if not (token := page.get("nextPageToken")):  # without a token the first page would come again
                return

    def media(self, path: str, want: Range | Suffix | None, pin: str | None) -> HTTPRequest:
        """Return the request for bytes of generation `pin`, or of the current one if it is None."""
        bucket, key, generation = self.split(path)
        return self._ask(
            api.media_url(self._inner._location, bucket, key),
            {"alt": "media", "ifGenerationMatch": pin, "generation": generation},
            path,
            describe(want),
            headers=api.read_headers(want),
            as_stored=True,
            is_pinned=pin is not None,
        )

    def _ask(
        self, address: str, params: Mapping[str, str | None], path: str, doing: str, **more: Any
    ) -> HTTPRequest:
        from cachedfs.origins.http import HTTPRequest

        full = self._inner._get_params(params)  # adds the project that pays
        present = {name: value for name, value in full.items() if value is not None}
        return HTTPRequest(url=address, params=present, subject=api.url_of(path), doing=doing, **more)
