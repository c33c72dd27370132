"""`GCSMediaRead`: one read of a version from Google Cloud Storage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import IsAFolder, ObjectNotFound
from cachedfs.origins.base import Origin, range_header
from cachedfs.origins.gcs import api
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.resumable_stream import ResumableRead, reaches
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.gcs.connection import GCSConnection
    from cachedfs.origins.inner_filesystem import AsyncOnce

__all__ = ["WHOLE", "GCSMediaRead"]

# Objects up to this size are held until their checksum is verified: 17 ms at 60 MB/s, and one block.
WHOLE = 1 << 20
_AS_STORED = {"Accept-Encoding": "gzip"}  # the service then sends every object as it is stored, in ranges too


@dataclasses.dataclass(eq=False, kw_only=True)
class GCSMediaRead(ResumableRead):
    """A read of one generation."""

    origin: Origin
    connected: AsyncOnce[GCSConnection]
    connect: Callable[[], Awaitable[GCSConnection]]  # where it is not connected yet

    async def _open(self) -> None:
        """Send one request; take the version, the range and the checksum from the headers of its response."""
        want, pinned, pin = self.want, self.pinned, self.pinned.fingerprint if self.pinned else None
        if isinstance(want, Range) and want.start == want.stop:  # HTTP cannot express an empty range
            self._take_nothing(await self._current())
            return
        to = self.connected.value or await self.connect()
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
        request = HTTPRequest(url, self.url, want=want, headers=headers, as_stored=True, is_pinned=is_pinned)
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
            self._begin(info, start, stop, most_held=WHOLE)

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


@functools.lru_cache(1024)  # the objects in a folder have the same start
def _quoted(text: str) -> str:
    return quote(text, safe="")
