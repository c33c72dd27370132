"""A shared cache at an origin: in a bucket, in a folder of Google Drive, or on any other fsspec filesystem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from cachedfs.cache.disk import Buffer
from cachedfs.common.types import ObjectInfo, Range, modified_of
from cachedfs.errors import ObjectNotFound
from cachedfs.origins.base import Origin
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import is_gathered, range_in_name
from cachedfs.shared.shared_store import BASE, KeptFile, StoredFile

__all__ = ["OriginStore"]

T = TypeVar("T")
_FLAT = ("gcs", "gs", "s3", "s3a")  # protocols of origins where a folder is only a part of names


class RunOnLoop(Protocol):
    """Runs a coroutine on the event loop of the origin, and returns its result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class _OpenObject(StoredFile):
    """A file of a shared cache, in the version that was listed."""

    probe = 256 << 10  # another request would take longer

    def __init__(self, store: OriginStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self.size, self.modified_at = info.size or 0, _time_of(info)

    def part(self, start: int, stop: int) -> bytes:
        return self._store.read(self._info, Range(start, stop)) if start < stop else b""


class OriginStore:
    """The shared cache in the folder `path` of an origin. A file that was not listed does not exist."""

    def __init__(self, origin: Origin, path: str, *, run: RunOnLoop) -> None:
        self._origin, self._run, self.path = origin, run, f"{path}/{BASE}"
        self._infos: dict[str, ObjectInfo] = {}
        self._made: set[str] = set()

    def files(self) -> Iterator[KeptFile]:
        for info in self._run(self._list()):
            name = info.path.removeprefix(f"{self.path}/")
            last = name.rpartition("/")[2]
            if info.kind == "file" and (is_gathered(last) or range_in_name(last) is not None):
                self._infos[name] = info
                at = _time_of(info)
                yield KeptFile(name, info.size or 0, at, at)

    async def _list(self) -> list[ObjectInfo]:
        with contextlib.suppress(ObjectNotFound):
            return [info async for info in self._origin.list(self.path, deep=True)]
        return []

    def open(self, name: str) -> StoredFile:
        if (info := self._infos.get(name)) is None:
            raise ObjectNotFound(f"{self.path}/{name} does not exist")
        return _OpenObject(self, info)

    def read(self, info: ObjectInfo, span: Range) -> bytes:
        return self._run(self._read(info, span))

    async def _read(self, info: ObjectInfo, span: Range) -> bytes:
        async with self._origin.read(info.path, span, info) as reply:
            if (reply.start, reply.stop) != (span.start, span.stop):
                raise DamagedFile("it is shorter than it says")
            return b"".join([data async for data in reply])

    def write(
        self, name: str, data: Sequence[Buffer], index: Callable[[], bytes], *, replaces: bool = False
    ) -> None:
        if name not in self._infos or replaces:
            body, path = b"".join([*data, index()]), f"{self.path}/{name}"
            self._run(self._write(path, body))
            self._infos[name] = ObjectInfo(path, "file", len(body))

    async def _write(self, path: str, body: bytes) -> None:
        folder = path.rpartition("/")[0]
        if folder not in self._made and self._origin.identity.partition("|")[0] not in _FLAT:
            await self._origin.call("makedirs", folder, exist_ok=True)
        self._made.add(folder)
        await self._origin.call("pipe_file", path, body)

    def remove(self, name: str) -> None:
        self._infos.pop(name, None)
        with contextlib.suppress(ObjectNotFound):
            self._run(self._origin.call("rm_file", f"{self.path}/{name}"))


def _time_of(info: ObjectInfo) -> float:
    at = modified_of(info.details)
    return 0.0 if at is None else at.timestamp()
