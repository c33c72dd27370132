"""An origin in memory, whose answers a test can delay, break and change."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.core import engine
from cachedfs.errors import CachedFSError, ObjectChanged, ObjectNotFound
from cachedfs.filesystem import CachedFileSystem
from cachedfs.origins.base import Origin, Reply


class FakeOrigin(Origin):
    """Objects by path, each with a distinct version; `log` records every request."""

    identity = "fake|nowhere|anon"
    concurrency = 16
    piece_size = 64 << 10

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.log: list[tuple[str, str, object]] = []
        # Number of the request in `log` -> the error that it raises.
        self.fail_with: dict[int, CachedFSError] = {}
        self.break_after: dict[int, int] = {}  # number of the request -> bytes after which its body raises
        self.has_fingerprints = True
        self.has_sizes = True
        self.gate: asyncio.Event | None = None  # bodies wait for it; created on the loop
        self.spare_in_s = 0.0
        self.open_bodies = self.most_bodies = 0
        self.on_request = lambda: None
        self._versions = itertools.count(1)

    def put(self, path: str, data: bytes) -> bytes:
        self.objects[path] = (next(self._versions), data)
        return data

    def delete(self, path: str) -> None:
        del self.objects[path]

    def install(self, monkeypatch) -> None:
        """Replace the origin of every filesystem created from now on."""

        def open_origin(protocol, options, *, loop, on_request, concurrency=16, **_):
            self.on_request, self.concurrency = on_request, concurrency
            return self

        monkeypatch.setattr(engine, "open_origin", open_origin)

    def spare_s(self) -> float:
        return self.spare_in_s

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        self._ask("lookup", path, None)
        return self._info(path)

    @contextlib.asynccontextmanager
    async def read(self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None):
        number = self._ask("read", path, want)
        try:
            data, info = self.objects.get(path, (0, b""))[1], self._info(path)  # taken at one moment
        except ObjectNotFound:
            if pinned is not None:
                raise ObjectChanged(f"{path} is gone") from None
            raise
        version = info.size if info.fingerprint is None else info.fingerprint
        if pinned is not None and version != (
            pinned.size if pinned.fingerprint is None else pinned.fingerprint
        ):
            raise ObjectChanged(f"{path} was replaced")
        start, stop = 0, len(data)
        if isinstance(want, Range):
            start, stop = min(want.start, len(data)), min(want.stop, len(data))
        elif isinstance(want, Suffix):
            start = max(0, len(data) - want.size)
        self.open_bodies += 1
        self.most_bodies = max(self.most_bodies, self.open_bodies)
        try:
            yield Reply(info, start, stop, self._body(number, data[start:stop]))
        finally:
            self.open_bodies -= 1

    async def list(self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False):
        self._ask("list", folder, deep)
        children = [path for path in self.objects if path.startswith(folder + "/")]
        for info in [self._info(p) for p in children if deep or "/" not in p[len(folder) + 1 :]]:
            yield info

    async def call(self, method: str, *args: Any, **options: Any) -> None:
        self._ask(method, args[0], None)
        if method == "pipe_file":
            self.put(args[0], args[1])
        elif method == "cp_file":
            self._info(args[0])
            self.put(args[1], self.objects[args[0]][1])
        elif method in ("rm_file", "rm"):
            for path in args[0] if isinstance(args[0], list) else [args[0]]:
                self._info(path)
                self.delete(path)
        else:
            raise NotImplementedError(method)

    async def filesystem(self) -> None:
        """Return nothing: a fake origin is none of a filesystem."""

    def _ask(self, kind: str, path: str, what: object) -> int:
        self.on_request()
        self.log.append((kind, path, what))
        if error := self.fail_with.pop(len(self.log), None):
            raise error
        return len(self.log)

    def _info(self, path: str) -> ObjectInfo:
        if path not in self.objects:
            raise ObjectNotFound(f"{path}: 404")
        version, data = self.objects[path]
        return ObjectInfo(
            path,
            size=len(data) if self.has_sizes else None,
            fingerprint=str(version) if self.has_fingerprints else None,
        )

    async def _body(self, number: int, data: bytes) -> AsyncIterator[bytes]:
        limit = self.break_after.get(number)
        for start in range(0, len(data), self.piece_size):
            if self.gate is not None:
                await self.gate.wait()
            if limit is not None and start >= limit:
                raise CachedFSError("the connection broke")
            yield data[start : start + self.piece_size]
            await asyncio.sleep(0)


def gate(fs: CachedFileSystem, origin: FakeOrigin, *, is_open: bool) -> None:
    """Block bodies, or release them."""

    async def act() -> None:
        origin.gate = origin.gate or asyncio.Event()
        (origin.gate.set if is_open else origin.gate.clear)()

    fs._objects.engine.run(act())


class FakeClock:
    """A clock in seconds that stands still; tests set `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
