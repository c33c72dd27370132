"""A shared cache at an origin: in a bucket, in a folder of Google Drive, or on any other fsspec filesystem."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from io import BytesIO
from typing import Any, Protocol, TypeVar

from cachedfs.cache.disk import Buffer
from cachedfs.common.types import ANY_VERSION, ObjectInfo, Range, modified_of
from cachedfs.errors import NoSuchBucket, ObjectNotFound
from cachedfs.origins.base import Origin, Uploader
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import has_pieces
from cachedfs.shared.shared_store import BASE, KeptFile, StoredFile

T = TypeVar("T")
_NO_FOLDERS = ("s3", "s3a")  # protocols of origins where a folder is only a part of names


class RunOnLoop(Protocol):
    """Runs a coroutine on the event loop of the origin, and returns its result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class _OpenObject(StoredFile):
    """A file of a shared cache, in the version that was listed."""

    probe = 256 << 10  # another request would take longer

    def __init__(self, store: OriginStore, info: ObjectInfo) -> None:
        self._store, self._info = store, info
        self.size, self.modified_at = info.size or 0, time_of(info)

    def part(self, start: int, stop: int) -> bytes:
        return self._store.read(self._info, Range(start, stop)) if start < stop else b""


class OriginStore:
    """The shared cache in the folder `root` of an origin, which `origin` returns, in any thread.

    A file that was not listed does not exist. With `answers_s`, reading raises TimeoutError if no byte comes for so long.
    Where names are looked up by folder, as in Google Drive, which also creates few items a second, there are no subfolders:
    each "/" in a name is a ".".
    """

    def __init__(
        self, origin: Callable[[], Origin], root: str, *, run: RunOnLoop, answers_s: float | None = None
    ) -> None:
        self._origin, self._run, self._base = origin, run, f"{root}/{BASE}"
        self._answers_s = answers_s
        self._infos: dict[str, ObjectInfo] = {}
        self._made: set[str] = set()
        self._here: ObjectInfo | None = None  # the folder, where names are looked up by folder

    def files(self) -> Iterator[KeptFile]:
        for name in self.listed(""):
            last, at = name.rpartition("/")[2], time_of(self._infos[name])
            if has_pieces(last):
                yield KeptFile(name, self._infos[name].size or 0, at, at)

    def listed(self, subfolder: str) -> list[str]:
        """Return the names in a subfolder, or all of them for ""."""
        before = [] if subfolder else list(self._infos)
        is_flat = self._origin().by_parent
        folder = self._base if is_flat else f"{self._base}/{subfolder}".rstrip("/")
        infos = dict[str, ObjectInfo]()
        for info in self._run(self._list(folder, deep=not (subfolder or is_flat))):
            name = info.path.removeprefix(f"{self._base}/")
            name = name.replace(".", "/") if is_flat else name
            if info.kind == "file" and name.startswith(f"{subfolder}/" if subfolder else ""):
                infos[name] = info
        for name in before:
            if name not in infos:
                self._infos.pop(name, None)
        self._infos.update(infos)
        return list(infos)

    async def _list(self, folder: str, *, deep: bool) -> list[ObjectInfo]:
        origin, found = self._origin(), list[ObjectInfo]()
        if self._here is None:
            above = await self._timely(origin.lookup_path(folder))
            self._here = above[-1] if above and above[-1].path == folder else None
        infos = aiter(origin.list(folder, self._here, deep=deep))
        try:
            while True:
                found.append(await self._timely(anext(infos)))
        except NoSuchBucket:
            raise
        except (ObjectNotFound, StopAsyncIteration):
            self._here = self._here if found else None  # it may be another folder by now
            return found

    def path_of(self, name: str) -> str:
        """Return the path of a file at the origin."""
        return f"{self._base}/{name.replace('/', '.') if self._origin().by_parent else name}"

    async def _timely(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(self._answers_s):
            return await answer

    def open(self, name: str) -> StoredFile:
        info = self._infos.get(name)
        if info is not None and info.fingerprint is None:  # it was written here
            info = self._lookup(name)
        if info is None:
            raise ObjectNotFound(f"{self._base}/{name} does not exist")
        return _OpenObject(self, info)

    def _lookup(self, name: str) -> ObjectInfo | None:
        with contextlib.suppress(ObjectNotFound):
            found = self._run(self._timely(self._origin().lookup(self.path_of(name))))
            self._infos[name] = found
            return found
        return None

    def read(self, info: ObjectInfo, span: Range) -> bytes:
        return self._run(self._read(info, span))

    async def _read(self, info: ObjectInfo, span: Range) -> bytes:
        async with contextlib.AsyncExitStack() as stack:
            read = self._origin().read(info.path, span, info)
            reply = await self._timely(stack.enter_async_context(read))
            if (reply.start, reply.stop) != (span.start, span.stop):
                raise DamagedFile("it is shorter than it says")
            found, body = list[bytes](), aiter(reply.body)
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    found.append(await self._timely(anext(body)))
            return b"".join(found)

    def write(
        self, name: str, data: Sequence[Buffer], index: Callable[[], bytes], *, replaces: bool = False
    ) -> None:
        if name not in self._infos or replaces:
            self._put(name, b"".join([*data, index()]))

    def _put(self, name: str, body: bytes) -> None:
        self._infos[name] = self._run(self._write(self.path_of(name), body))

    async def _write(self, path: str, body: bytes, *, exclusive: bool = False) -> ObjectInfo:
        """Write an object, if `exclusive` only where there is none: else raise ObjectExists or FileExistsError."""
        origin, folder = self._origin(), path.rpartition("/")[0]
        if isinstance(origin, Uploader):  # it makes folders
            replaces = None if exclusive else ANY_VERSION
            return await origin.upload(path, BytesIO(body), replaces=replaces, mtime_ns=None)
        if folder not in self._made and origin.identity.partition("|")[0] not in _NO_FOLDERS:
            await origin.call("makedirs", folder, exist_ok=True)
        self._made.add(folder)
        await origin.call("pipe_file", path, body, mode="create" if exclusive else "overwrite")
        return ObjectInfo(path, "file", len(body))

    def remove(self, name: str) -> None:
        self._infos.pop(name, None)
        with contextlib.suppress(ObjectNotFound):
            self._run(self._timely(self._origin().call("rm_file", self.path_of(name))))


def time_of(info: ObjectInfo) -> float:
    """Return when an object was written, by the clock of the store; 0 if that is unknown."""
    at = modified_of(info.details)
    return 0.0 if at is None else at.timestamp()
