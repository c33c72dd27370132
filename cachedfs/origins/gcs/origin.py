"""`GCSOrigin`: Google Cloud Storage.

gcsfs signs in and writes; reads, listings and uploads under a condition are our own requests. Our own request returns
bytes, version and size in one answer, can be resumed, and is counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, BinaryIO

from cachedfs.common.optional_imports import importing
from cachedfs.common.types import ANY_VERSION, AnyVersion, Changes, ObjectInfo, Range, Suffix
from cachedfs.errors import AccessDenied, IsAFolder, NoSuchBucket, ObjectNotFound
from cachedfs.origins.base import Reply, subject_of
from cachedfs.origins.fsspec_origin import jsonable
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.auth import GCSAuth, make_gcsfs
from cachedfs.origins.gcs.connection import GCSConnection
from cachedfs.origins.gcs.read import GCSMediaRead
from cachedfs.origins.gcs.upload import ObjectUpload
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.inner_filesystem import AsyncOnce, close_session, invoke
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.request_slots import RequestSlots, logged_request
from cachedfs.origins.retry import Retries, RetryPolicy, RetryReason
from cachedfs.origins.tokens import finding_credentials
from cachedfs.origins.upload import UploadContent

__all__ = ["GCSOrigin"]


class GCSOrigin:
    """Objects of Google Cloud Storage; the fingerprint is the generation."""

    by_parent = False

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        identity: str,
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[], None],
        concurrency: int = 16,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.identity = identity
        self.on_request = on_request
        self._options, self._loop = dict(options), loop
        self._policy = policy or RetryPolicy()
        self._retries = Retries(self._policy, clock, rng or random.Random())
        self._slots = RequestSlots(concurrency)
        self._upload_slots = RequestSlots(concurrency)  # long uploads must not delay reads
        self._inner = AsyncOnce(self._make)
        self._connection = AsyncOnce(self._connect)

    @property
    def concurrency(self) -> int:
        """Most requests at a time, now, that callers wait for."""
        return self._slots.window

    # Created at first use
    async def _make(self) -> Any:
        return await asyncio.to_thread(make_gcsfs, self._options, self._loop)

    async def _connect(self) -> GCSConnection:
        with importing():
            from cachedfs.origins.http import HTTPClient, timeouts_of

        inner = await self._inner.get()
        session = await _new_session(inner)
        can_wait = 0 < getattr(session.connector, "limit", 0) < 2 * self._slots.max_requests
        auth = GCSAuth(inner.credentials, self._policy)

        own_timeout = inner.requests_timeout
        if own_timeout is None and "timeout" in inner.session_kwargs:
            own_timeout = session.timeout

        def client_of(slots: RequestSlots) -> HTTPClient:
            return HTTPClient(
                session,
                auth,
                _judge,
                slots=slots,
                on_request=lambda: self.on_request(),  # it may be replaced later
                retries=self._retries,
                timeouts=timeouts_of(self._policy, own_timeout=own_timeout, can_wait_for_pool=can_wait),
            )

        return GCSConnection(inner, session, client_of(self._slots), client_of(self._upload_slots))

    async def connection(self) -> GCSConnection:
        """Return the connection, created at the first call."""
        async with finding_credentials("gs://", self._policy):
            with mapped("gs://", "looking for credentials"):
                return await self._connection.get()

    async def filesystem(self) -> Any:
        """Return the inner `gcsfs.core.GCSFileSystem`."""
        with mapped("gs://", "looking for credentials"):
            return await self._inner.get()

    async def aclose(self) -> None:
        """Close our session and that of gcsfs."""
        connection, inner = self._connection.take(), self._inner.take()
        if connection is not None:
            await connection.session.close()
        if inner is not None:
            await close_session(inner)

    @property
    def requests_per_s(self) -> float | None:
        return None

    def lists_all(self, folder: str) -> bool:
        """Return True: a listing has all names."""
        return True

    def spare_s(self) -> float:
        """Return 0: the service accepts all that we can send."""
        return 0.0

    # Requests
    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object or folder that `path` is.

        Takes one request for an object, two for a folder or for an absence; one for a path that ends in a slash.
        """
        path = api.object_path(path)
        with mapped(api.url_of(path), "looking it up"):
            if not path:
                return api.folder_info("")
            connection = await self.connection()
            bucket, key, generation = connection.split(path)
            if not key:
                return await self._lookup_bucket(connection, bucket)
            if path.endswith("/"):
                return await self._lookup_slash(connection, path, bucket, key)
            try:
                return await connection.metadata(path, bucket, key, generation)
            except ObjectNotFound:
                first = None if generation else await self._first_below(connection, path, bucket, f"{key}/")
                if first is None:
                    raise
                return api.folder_info(path)

    async def _lookup_slash(self, connection: GCSConnection, path: str, bucket: str, key: str) -> ObjectInfo:
        """Return the object whose name ends in a slash, or the folder: of all names in it, this is the first one."""
        first = await self._first_below(connection, path, bucket, key)
        if first is None:
            raise ObjectNotFound(f"{api.url_of(path)}: no object or folder has this name")
        is_object = first.path == path and first.kind == "file"
        return first if is_object else api.folder_info(path.rstrip("/"))

    async def _lookup_bucket(self, connection: GCSConnection, bucket: str) -> ObjectInfo:
        try:
            return await connection.bucket(bucket)
        except AccessDenied:
            # Permission to read objects does not include reading the bucket's metadata.
            await self._first_below(connection, bucket, bucket, "")
            return api.folder_info(bucket)

    async def _first_below(
        self, connection: GCSConnection, path: str, bucket: str, prefix: str
    ) -> ObjectInfo | None:
        async with aclosing(connection.pages(path, bucket, prefix, deep=True, limit=1)) as pages:
            async for infos in pages:
                if infos:
                    return infos[0]
        return None

    @asynccontextmanager
    async def read(
        self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> AsyncIterator[Reply]:
        """Request bytes: one request, whose headers also have version and size."""
        if api.UNUSUAL.search(path):
            path = api.object_path(path)
        if "/" not in path:
            raise IsAFolder(f"gs://{path}: this is a bucket; list it, or read an object in it")
        connection = self._connection.value or await self.connection()
        reply = GCSMediaRead(
            f"gs://{path}", path, want, pinned, self._retries, connection=connection, lookup=self.lookup
        )
        async with aclosing(reply.run()) as reply.pieces:
            await anext(reply.pieces)
            yield reply

    async def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`: one request per thousand, and nothing for a missing folder.

        Raises NoSuchBucket.
        """
        folder = api.plain_path(folder)
        connection = await self.connection()
        if not folder:
            for info in await self._buckets():
                yield info
            return
        bucket, key, _ = connection.split(folder)
        prefix = f"{key}/" if key else ""
        async with aclosing(connection.pages(folder, bucket, prefix, deep=deep)) as pages:
            while True:
                try:
                    with mapped(api.url_of(folder), "listing it"):
                        infos = await anext(pages, None)
                except ObjectNotFound as error:
                    raise NoSuchBucket(error.message) from None
                if infos is None:
                    return
                for info in infos:
                    yield info

    async def _buckets(self) -> tuple[ObjectInfo, ...]:
        with mapped(api.url_of(""), "listing the buckets", is_read=True):
            found = await self.call("ls", "", detail=True)
        return tuple(api.bucket_info(jsonable({**info, "name": info["name"].rstrip("/")})) for info in found)

    async def changes(self, path: str, token: str | None) -> Changes | None:
        """Return None: there is no change feed."""
        return None

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of gcsfs; takes no slot, because one call may be many requests."""
        inner = await self.filesystem()
        path = subject_of(method, args)
        self.on_request()
        url = api.url_of(api.object_path(path))
        with mapped(url, f"calling {method}"), logged_request(method, url):
            return await invoke(inner, method, *args, **options)

    async def upload(
        self, path: str, file: BinaryIO, *, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        """Make the bytes of `file` the object: one request up to 8 MiB, else one more than there are pieces of 8 MiB.

        The service compares the generation. As in `lookup`, the path may end in a slash.
        """
        path = api.object_path(path)
        with mapped(api.url_of(path), "writing it"):
            upload = ObjectUpload(
                await self.connection(),
                path,
                UploadContent(file),
                replaces=None if replaces is ANY_VERSION else replaces,
                anything=replaces is ANY_VERSION,
                mtime_ns=mtime_ns,
            )
            return await upload.run()


async def _new_session(inner: Any) -> Any:
    """Return a session with gcsfs's settings, over a connector of ours where the user gives none."""
    import aiohttp

    from cachedfs.origins.http import new_connector

    if "connector" not in inner.session_kwargs and not getattr(inner, "_use_client_cert", False):
        return aiohttp.ClientSession(connector=new_connector(), **inner.session_kwargs)
    session = await inner._set_session()
    # gcsfs creates itself another session when it needs one. With a shared session, a burst of writes, which our slots
    # do not limit, would take all connections, and waiting for one would look like a lost network.
    inner._session = None
    return session


def _judge(
    request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes
) -> RetryReason | Exception:
    now = datetime.now(UTC)
    return api.failure(
        status,
        headers,
        body,
        url=request.subject,
        doing=request.purpose,
        pinned=request.is_pinned,
        now=now,
        is_write=request.method != "GET",
    )
