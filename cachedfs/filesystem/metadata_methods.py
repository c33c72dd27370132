"""The methods of a cached filesystem about the metadata of one object. What is cached needs no other thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cachedfs.common.types import ObjectInfo
from cachedfs.core.objects import Objects
from cachedfs.errors import ABSENT
from cachedfs.filesystem.cache_api import AnyPath
from cachedfs.origins.base_filesystem import BaseFileSystem

if TYPE_CHECKING:
    from cachedfs.core.reader import Reader

T = TypeVar("T")


class MetadataMethods(BaseFileSystem):
    """Mixin with the methods of `CachedFileSystem` that return metadata.

    It also has those that run a coroutine on the event loop of the engine: `_run` and `_hop`.
    """

    _objects: Objects
    _reader: Reader

    def info(self, path: AnyPath, **kwargs: Any) -> dict[str, Any]:
        """Return the metadata of an object or folder.

        No request is sent while it is younger than `max_age`. The result is a dictionary: `name`; `size` in bytes, 0
        for a folder, None where the origin does not state it; `type`, "file" or "directory"; and the origin's own
        details, as JSON values and datetimes. For a GCS object known only from a read, one request gets the details
        that the read's headers lacked.
        """
        return self._described(path).as_info()

    async def _info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_object(path)
        entry = self._objects.existing(path, whole=True)
        if entry is not None:
            return entry.object.as_info()
        return (await self._hop(self._reader.lookups.describe(path))).as_info()

    def size(self, path: AnyPath) -> int | None:
        """Return the size in bytes: 0 for a folder, None where the origin does not state it."""
        size: int | None = self._object(path).as_info()["size"]
        return size

    async def _size(self, path: Any) -> int | None:
        size: int | None = (await self._object_at(path)).as_info()["size"]
        return size

    def exists(self, path: AnyPath, **kwargs: Any) -> bool:
        """Return whether an object or folder exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip(path)) is not None

    def isfile(self, path: AnyPath) -> bool:
        """Return whether an object exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip_object(path)) == "file"

    def isdir(self, path: AnyPath) -> bool:
        """Return whether a folder exists; raise an error if the origin cannot tell."""
        return self._kind(self._strip(path)) == "directory"

    def _kind(self, path: str) -> str | None:
        try:
            return self._object(path).kind
        except ABSENT:
            return None

    def _exists_in_cache(self, path: str) -> bool:
        entry = self._objects.fresh(path)
        return entry is not None and entry.info is not None

    async def _kind_of(self, path: str) -> str | None:
        try:
            return (await self._object_at(path)).kind
        except ABSENT:
            return None

    def ukey(self, path: AnyPath) -> str | None:
        """Return the fingerprint of an object: a text that changes whenever its bytes may have changed.

        None where the origin gives no way to tell versions apart.
        """
        return self._object(path).fingerprint

    def checksum(self, path: AnyPath) -> str | None:
        """Return the fingerprint, as `ukey` does."""
        return self.ukey(path)

    def created(self, path: AnyPath) -> Any:
        """Return when the object was created, by the origin's clock: a datetime with a time zone."""
        return self._time(path, "created", ("ctime", "created"))

    def modified(self, path: AnyPath) -> Any:
        """Return when the object was last written, by the origin's clock: a datetime with a time zone."""
        return self._time(path, "modified", ("mtime", "modified"))

    def _time(self, path: Any, method: str, names: tuple[str, ...]) -> Any:
        details = self._described(path).details
        for name in names:
            if hasattr(details.get(name), "isoformat"):
                return details[name]
        path = self._strip_object(path)
        return self._run(self._objects.origin(path).call(method, path))

    def _object(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path)
        return entry.object if entry is not None else self._run(self._reader.lookups.info(path))

    async def _object_at(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path)
        return entry.object if entry is not None else await self._hop(self._reader.lookups.info(path))

    def _described(self, path: Any) -> ObjectInfo:
        path = self._strip_object(path)
        entry = self._objects.existing(path, whole=True)
        return entry.object if entry is not None else self._run(self._reader.lookups.describe(path))

    def sign(self, path: Any, expiration: int = 100, **kwargs: Any) -> Any:
        """Return a signed URL that opens the object for `expiration` seconds without an account.

        Raises NotImplementedError at Google Drive, AccessDenied for credentials that cannot sign.
        """
        path = self._strip_object(path)
        return self._run(self._objects.origin(path).call("sign", path, expiration=expiration, **kwargs))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._objects.engine.run(coroutine)

    async def _hop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._objects.engine.await_on_loop(coroutine)
