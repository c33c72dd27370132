"""The folder of an export: what is in it, and the bytes of that."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from cachedfs.carrying import manifest
from cachedfs.carrying.frames import BadBundle
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import ObjectChanged, ObjectNotFound
from cachedfs.fetch.source import Source
from cachedfs.origins.base import Reply

__all__ = ["Folder"]


class Folder:
    """A folder at an origin that holds an export, or is to hold one."""

    def __init__(self, source: Source, path: str) -> None:
        self._source, self.path = source, path

    def url(self, name: str = "") -> str:
        return self._source.url(f"{self.path}/{name}" if name else self.path)

    async def infos(self) -> dict[str, ObjectInfo]:
        """Return the objects in it, by name: reads are then of these versions, and ask nobody where they are."""
        found = self._source.origin(self.path).list(self.path)
        with contextlib.suppress(ObjectNotFound):  # then it has no manifest either
            return {info.path.rpartition("/")[2]: info async for info in found if info.kind == "file"}
        return {}

    async def manifest(self, info: ObjectInfo) -> manifest.Manifest:
        """Return the manifest. Raises BadBundle for what is none."""
        size = info.size or 0
        if size > manifest.MOST:
            raise BadBundle(f"it is no manifest: it has {size} bytes")
        return manifest.Manifest.decode(await self.bytes_of(info, Range(0, size)))

    @contextlib.asynccontextmanager
    async def reading(self, info: ObjectInfo, span: Range) -> AsyncIterator[Reply]:
        """Give the bytes `[start, stop)` of one version of an object, as they come."""
        async with self._source.origin(info.path).read(info.path, span, info) as reply:
            if (reply.start, reply.stop) != (span.start, span.stop):
                raise ObjectChanged(
                    f"{self._source.url(info.path)}: other bytes came than were asked for; try again"
                )
            yield reply

    async def bytes_of(self, info: ObjectInfo, span: Range) -> bytes:
        """Return bytes `[start, stop)` of one version of an object."""
        async with self.reading(info, span) as reply:
            return b"".join([piece async for piece in reply])
