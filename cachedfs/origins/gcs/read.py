"""`GCSMediaRead`: one read of a version from Google Cloud Storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import NoReturn

from cachedfs.common.checksums import HASHERS, stated_of
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import IsAFolder, ObjectChanged, ObjectNotFound
from cachedfs.origins.gcs import api
from cachedfs.origins.gcs.connection import GCSConnection
from cachedfs.origins.resumable_stream import RangeNotSatisfiable, ResumableRead, reaches
from cachedfs.origins.retry import RetryableError, RetryReason

__all__ = ["WHOLE", "GCSMediaRead"]

# Objects up to this size are held until their checksum is verified: 17 ms at 60 MB/s, and one block.
WHOLE = 1 << 20


@dataclasses.dataclass(eq=False, kw_only=True)
class GCSMediaRead(ResumableRead):
    """A read of one generation."""

    connection: GCSConnection
    lookup: Callable[[str], Awaitable[ObjectInfo]]

    async def _open(self) -> None:
        """Send one request, and take the version and the range from the headers of its response."""
        want, pinned = self.want, self.pinned
        pin = None if pinned is None else pinned.fingerprint
        if isinstance(want, Range) and want.start == want.stop:  # HTTP cannot express an empty range
            self._take_nothing(await self._current())
            return
        client, request = self.connection.client, self.connection.media(self.path, want, pin)
        self._response = response = await client.send(request)
        if response.status == 416:
            await self._open_nothing()
            return
        info, start, stop, self._offset, self._body_stop = api.head_of(self.path, response, want)
        if pin is None and info.fingerprint is None:
            await self._open_unversioned()
            return
        if pin and pinned and (info.fingerprint, info.size) != (pin, pinned.size):
            self._check_version(info, pinned)
        if not self._is_open:
            self._choose(info, start, stop)

    def _choose(self, info: ObjectInfo, start: int, stop: int) -> None:
        """Set the version, the range and the checksum to verify."""
        pinned = self.pinned
        if not info.size and self.path.endswith("/"):  # as `api.children` has it
            raise self._is_folder()
        stated = stated_of(info.details) if stop - start == info.size else None
        if pinned is not None and pinned.fingerprint is not None:
            # The service kept to the pinned generation, even if the headers do not show it.
            details = {**info.details, **pinned.details}
            stated = stated or (stated_of(details) if stop - start == info.size else None)
            info = ObjectInfo(self.path, "file", info.size, pinned.fingerprint, details=details)
        self.info, self.start, self._at, self.stop = info, start, start, stop
        self._hasher, self._holds, self.is_checked_at_end = None, False, False
        if stated is not None:
            self._checksum, self._expected = stated.name, stated.value
            self._hasher, self._holds = HASHERS[stated.name](), stop - start <= WHOLE
            self.is_checked_at_end = not self._holds

    async def _open_nothing(self) -> None:
        """After a 416, read nothing if the object ends before the range."""
        self._close()  # a lookup needs the slot
        pinned = self.pinned
        info = pinned if pinned and pinned.fingerprint and pinned.size is not None else await self._current()
        if reaches(self.want, info.size or 0):  # the object grew meanwhile
            raise RangeNotSatisfiable(RetryReason("no byte of the object is in the range"))
        self._take_nothing(info)

    async def _open_unversioned(self) -> None:
        """Look up the generation, then read that one: a proxy removed it from the headers."""
        self._close()
        self.pinned = await self._current()
        await self._open()

    async def _explain(self, failed: RetryableError) -> None:
        """Look the object up if the 404 may be from another server: the JSON API decides whether it is missing."""
        if failed.trouble.is_absence:
            await self._current()

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        try:
            info = await self.lookup(self.path)
        except ObjectNotFound as error:
            if self.pinned is None:
                raise
            raise ObjectChanged(f"{self.url}: the object was removed; open it again") from error
        if self.pinned and info.fingerprint != self.pinned.fingerprint:
            self._raise_changed(f"it is generation {info.fingerprint} now, not {self.pinned.fingerprint}")
        if info.kind == "directory":
            raise self._is_folder()
        return info

    def _check_version(self, info: ObjectInfo, pinned: ObjectInfo) -> None:
        """Raise an error if the headers are of another version than the pinned one; some do not state the generation."""
        if info.fingerprint not in (None, pinned.fingerprint):
            self._raise_changed(f"generation {info.fingerprint} was received instead of {pinned.fingerprint}")
        if info.size != pinned.size is not None:
            text = f"the answer is of an object of {info.size} bytes, not {pinned.size}"
            raise RetryableError(RetryReason(text))

    def _raise_changed(self, how: str) -> NoReturn:
        raise ObjectChanged(f"{self.url}: the object was replaced while it was read ({how}); open it again")

    def _is_folder(self) -> IsAFolder:
        return IsAFolder(f"{self.url}: this is a folder; list it, or read an object in it")
