"""`GCSOrigin`: Google Cloud Storage.

gcsfs signs in and writes; reads, listings and uploads under a condition are our own requests. Our own request returns
bytes, version and size in one answer, can be resumed, and is counted.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise, starmap
from typing import Any, BinaryIO
from urllib.parse import quote

from cachedfs.common.event_loop import side_by_side
from cachedfs.common.types import AnyVersion, ObjectInfo, Range
from cachedfs.errors import AccessDenied, IsAFolder, NoSuchBucket, ObjectNotFound
from cachedfs.origins.base import range_header
from cachedfs.origins.fsspec_origin import FsspecOrigin, jsonable
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.auth import make_gcsfs, tokens_of
from cachedfs.origins.gcs.connection import GCSConnection
from cachedfs.origins.gcs.object_upload import ObjectUpload
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.resumable_stream import ResumableRead, reaches
from cachedfs.origins.retry import RetryableError
from cachedfs.origins.tokens import finding_credentials
from cachedfs.origins.upload import UploadContent

# Objects up to this size are held until their checksum is verified: 17 ms at 60 MB/s, and one block.
HELD_WHOLE = 1 << 20
_AS_STORED = {"Accept-Encoding": "gzip"}  # the service then sends every object as it is stored, in ranges too


@functools.lru_cache(1024)  # the objects in a folder have the same start
def _quoted(text: str) -> str:
    return quote(text, safe="")


class GCSMediaRead(ResumableRead):
    """A read of one generation."""

    origin: GCSOrigin

    async def _open(self) -> None:
        """Send one request; take the version, the range and the checksum from the headers of its response."""
        want, pinned, pin = self.want, self.pinned, self.pinned.fingerprint if self.pinned else None
        if "/" not in self.path or api.UNUSUAL.search(self.path):
            self._set_object_path()
        if isinstance(want, Range) and want.start == want.stop:  # HTTP cannot express an empty range
            self._take_nothing(await self._current())
            return
        to = self.origin._connection.value or await self.origin.connection()
        (bucket, key), generation = self.path.split("/", 1), None
        if to.is_version_aware:
            bucket, key, generation = to.split(self.path)
        folder, slash, name = key.rpartition("/")
        key = f"{_quoted(folder + slash)}{quote(name, safe='')}"
        url = f"{to.media_address}{_quoted(bucket)}/o/{key}?{to.media_params}"
        url = url if generation is None else f"{url}&generation={quote(generation)}"
        url = url if pin is None else f"{url}&ifGenerationMatch={quote(pin)}"
        span = f"bytes={want.start}-{want.stop - 1}" if isinstance(want, Range) else range_header(want)
        headers = {**_AS_STORED, "Range": span} if span else _AS_STORED
        is_pinned = pin is not None
        request = HTTPRequest(
            url, f"gs://{self.path}", want=want, headers=headers, as_stored=True, is_pinned=is_pinned
        )
        self._response = response = await to.client.send(request)
        if response.status == 416:
            await self._open_nothing()
            return
        head = api.head_of(self.path, response, want, pinned.details if pin and pinned else {})
        info, start, stop, self._offset, self._body_stop = head
        if pin is None and info.fingerprint is None:
            await self._open_unversioned()
            return
        if pin and pinned and (info.fingerprint, info.size) != (pin, pinned.size):
            info = self._of_pinned(info, pinned)
        if not info.size and self.path.endswith("/"):  # as `api.children` has it
            raise self._is_folder()
        if not self._is_open:
            self.info, self.start, self._at, self.stop = info, start, start, stop
            if stop - start == info.size:
                self._expect_checksum(HELD_WHOLE)

    def _set_object_path(self) -> None:
        self.path = api.object_path(self.path)
        if "/" not in self.path:
            raise IsAFolder(f"gs://{self.path}: this is a bucket; list it, or read an object in it")

    async def _open_nothing(self) -> None:
        """After a 416, read nothing if the object ends before the range."""
        self._response.close()  # a lookup needs the slot
        pinned = self.pinned
        info = pinned if pinned and pinned.fingerprint and pinned.size is not None else await self._current()
        if reaches(self.want, info.size or 0):  # the object grew meanwhile
            raise RetryableError("no byte of the object is in the range")
        self._take_nothing(info)

    async def _open_unversioned(self) -> None:
        """Look up the generation, then read that one: a proxy removed it from the headers."""
        self._response.close()
        self.pinned = await self._current()
        await self._open()

    async def _explain(self, failed: RetryableError) -> None:
        """Look the object up if the 404 may be from another server: the JSON API decides whether it is missing."""
        if failed.is_absence:
            await self._current()

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        try:
            info = await self.origin.lookup(self.path)
        except ObjectNotFound as error:
            if self.pinned is None:
                raise
            raise self._changed("it is gone") from error
        if self.pinned and info.fingerprint != self.pinned.fingerprint:
            raise self._changed(f"it is generation {info.fingerprint} now, not {self.pinned.fingerprint}")
        if info.kind == "directory":
            raise self._is_folder()
        return info

    def _of_pinned(self, info: ObjectInfo, pinned: ObjectInfo) -> ObjectInfo:
        """Return the headers' metadata as that of the pinned version, which some do not name; raise for another one."""
        if info.fingerprint not in (None, pinned.fingerprint):
            raise self._changed(f"generation {info.fingerprint} was received instead of {pinned.fingerprint}")
        if info.size != pinned.size is not None:
            raise RetryableError(f"the answer is of an object of {info.size} bytes, not {pinned.size}")
        return replace(info, fingerprint=pinned.fingerprint)

    def _is_folder(self) -> IsAFolder:
        return IsAFolder(f"{self.url}: this is a folder; list it, or read an object in it")


class GCSOrigin(FsspecOrigin):
    """Objects of Google Cloud Storage; the fingerprint is the generation."""

    _making = "looking for credentials"
    _reads = GCSMediaRead
    _connection: AsyncOnce[GCSConnection]

    def __init__(self, options: Mapping[str, Any], **given: Any) -> None:
        super().__init__("gs", options, **given)
        self._upload_slots = RequestSlots(self._slots.most)  # long uploads must not delay reads

    def url(self, path: str) -> str:
        """Return the URL that errors show for `path`."""
        return f"gs://{api.object_path(path)}"

    # Created at first use
    async def _make(self) -> Any:
        return await asyncio.to_thread(make_gcsfs, self._options, self._loop)

    async def _connect(self) -> GCSConnection:
        inner = await self._inner.get()
        session = await _new_session(inner)
        can_wait = 0 < getattr(session.connector, "limit", 0) < 2 * self._slots.max_requests
        auth = tokens_of(inner.credentials, self.policy) if inner.credentials.credentials else None

        own_timeout = inner.requests_timeout
        if own_timeout is None and "timeout" in inner.session_kwargs:
            own_timeout = getattr(session, "timeout", None)
        timeouts = {"own_timeout": own_timeout, "can_wait_for_pool": can_wait}
        client = self._client(session, api.failure, auth=auth, **timeouts)
        uploads = self._client(session, api.failure, auth=auth, slots=self._upload_slots, **timeouts)
        return GCSConnection(inner, session, client, uploads)

    async def connection(self) -> GCSConnection:
        """Return the connection, created at the first call."""
        async with finding_credentials("gs://", self.policy):
            with mapped("gs://", "looking for credentials"):
                return await self._connection.get()

    def server_time(self) -> float | None:
        connection = self._connection.value
        return None if connection is None else connection.client.server_time()

    # Requests
    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object or folder that `path` is.

        Takes one request for an object, two for a folder or for an absence; one for a path that ends in a slash.
        """
        path = api.object_path(path)
        with mapped(f"gs://{path}", "looking it up"):
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
            raise ObjectNotFound(f"gs://{path}: no object or folder has this name")
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

    def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`: one request per thousand, and nothing for a missing folder.

        Raises NoSuchBucket.
        """
        return self._list(api.plain_path(folder), None, None, deep=deep)

    async def list_again(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False, cuts: Sequence[str] = ()
    ) -> AsyncIterator[ObjectInfo]:
        async def part(start: str | None, stop: str | None) -> list[ObjectInfo]:
            return [info async for info in self._list(api.plain_path(folder), start, stop, deep=deep)]

        keys = [None, *(cut.partition("/")[2] for cut in cuts if folder), None]  # buckets come in one request
        for infos in await side_by_side(starmap(part, pairwise(keys))):
            for info in infos:
                yield info

    async def _list(
        self, folder: str, start: str | None, stop: str | None, *, deep: bool
    ) -> AsyncIterator[ObjectInfo]:
        """List the keys from `start` on, and below `stop`."""
        connection = await self.connection()
        if not folder:
            for info in await self._buckets():
                yield info
            return
        bucket, key, _ = connection.split(folder)
        prefix = f"{key}/" if key else ""
        try:
            with mapped(f"gs://{folder}", "listing it"):
                pages = connection.pages(folder, bucket, prefix, deep=deep, start=start, stop=stop)
                async with aclosing(pages):
                    async for infos in pages:
                        for info in infos:
                            yield info
        except ObjectNotFound as error:
            raise NoSuchBucket(error.message) from None

    async def _buckets(self) -> tuple[ObjectInfo, ...]:
        with mapped("gs://", "listing the buckets", is_read=True):
            found = await self.call("ls", "", detail=True)
        return tuple(api.bucket_info(jsonable({**info, "name": info["name"].rstrip("/")})) for info in found)

    async def upload(
        self, path: str, file: BinaryIO, *, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        """Make the bytes of `file` the object: one request up to 8 MiB, else one more than there are pieces of 8 MiB.

        The service compares the generation. As in `lookup`, the path may end in a slash.
        """
        path = api.object_path(path)
        with mapped(f"gs://{path}", "writing it"):
            content, connection = UploadContent(file), await self.connection()
            return await ObjectUpload(connection, path, content, replaces, mtime_ns).run()


async def _new_session(inner: Any) -> Any:
    """Return a session with gcsfs's settings, over a connector of ours where the user gives none."""
    import aiohttp

    from cachedfs.origins.http import new_connector

    if "connector" not in inner.session_kwargs and not getattr(inner, "_use_client_cert", False):
        return aiohttp.ClientSession(connector=new_connector(), **inner.session_kwargs)
    session = await inner._set_session()
    # gcsfs creates itself another session when it needs one. With a shared session, a burst of writes, which our slots
    # do not limit, would take all connections, and waiting for one would look like a broken network.
    inner._session = None
    return session
