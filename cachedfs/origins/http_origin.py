"""`HTTPOrigin`: objects of a web server.

Reads and lookups are our own requests: the answer that carries the bytes also states size and version. A HEAD is never
asked, because its size may be another. fsspec's HTTPFileSystem gives the options, lists links and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.origins.base import Reply, opened
from cachedfs.origins.fsspec_origin import FsspecOrigin
from cachedfs.origins.http_answers import failure
from cachedfs.origins.http_read import HTTPConnection, HTTPRead, VersionEvidence
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.origin_errors import mapped

MOST_REDIRECTS = 10  # as in aiohttp


class HTTPOrigin(FsspecOrigin):
    """Objects behind http:// and https:// URLs; the fingerprint is the ETag, or else the time of the last change."""

    _connection: AsyncOnce[HTTPConnection]

    def __init__(self, protocol: str, options: Mapping[str, Any], **given: Any) -> None:
        super().__init__(protocol, options, **given)
        self._evidence = VersionEvidence(self.url, self._warn)

    async def _make(self) -> Any:
        inner = await super()._make()
        from fsspec.implementations.http import get_client

        options = inner.client_kwargs
        if inner.get_client is get_client and options.get("connector") is not None:
            inner.client_kwargs = {"connector_owner": False, **options}  # a session would close the user's
        return inner

    async def _connect(self) -> HTTPConnection:
        inner = await self.filesystem()
        session, credentials = await _new_session(inner)
        limit = getattr(getattr(session, "connector", None), "limit", 0)
        options = {name: value for name, value in inner.kwargs.items() if name not in ("headers", "params")}
        cookies = dict(credentials.get("cookies") or ()) | dict(options.get("cookies") or ())
        client = self._client(
            session,
            failure,
            options={"max_redirects": MOST_REDIRECTS, **credentials, **options, "cookies": cookies or None},
            own_timeout=getattr(session, "timeout", None) if "timeout" in inner.client_kwargs else None,
            can_wait_for_pool=0 < limit < self._slots.max_requests,
        )
        return HTTPConnection(inner, session, client, self.url, self._evidence)

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object that `path` is now, by a read of its first byte; there are no folders."""
        with mapped(self.url(path), "looking it up", is_read=True):
            return await (await self._connection.get()).head_by_get(path)

    def lists_all(self, folder: str) -> bool:
        """Return False: a page need not link to everything."""
        return False

    def read(
        self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> AbstractAsyncContextManager[Reply]:
        """Request bytes: one request, whose headers also have version and size."""
        connect = self._connection.get
        return opened(HTTPRead(self.url(path), path, want, pinned, policy=self._policy, connect=connect))


async def _new_session(inner: Any) -> tuple[Any, dict[str, Any]]:
    """Return a session with the filesystem's settings, and its credentials, which go with each request.

    aiohttp sends the credentials of a request to no other host after a redirect, but those of a session to any.
    """
    import aiohttp
    from fsspec.implementations.http import get_client

    from cachedfs.origins.http import new_connector

    if inner.get_client is get_client:
        options = dict(inner.client_kwargs)
        credentials = {name: options.pop(name) for name in ("auth", "cookies") if name in options}
        if options.get("connector") is None:
            options["connector"] = new_connector()
        return aiohttp.ClientSession(**options), credentials
    session = await inner.set_session()
    # The filesystem creates itself another one for listings and writes, which our slots do not limit.
    inner._session = None
    return session, {}
