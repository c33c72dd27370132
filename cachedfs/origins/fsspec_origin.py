"""`FsspecOrigin`: any fsspec filesystem as an origin.

Async ones run on our event loop, sync ones in threads. fsspec has no conditional read. So the origin looks the object
up before and after it reads, and passes bytes on only when both lookups agree. S3 needs no second lookup: it is asked
for the bytes of one ETag.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cachedfs.common.logging import public_url
from cachedfs.common.optional_imports import importing
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.common.urls import SLASH_NAMES, stored_path, without_slash
from cachedfs.errors import CachedFSError, IsAFolder, ObjectChanged, public_text
from cachedfs.origins.base import Origin, Read, clipped, range_header, subject_of
from cachedfs.origins.evidence import evidence_of, fingerprint, is_same_evidence
from cachedfs.origins.inner_filesystem import AsyncOnce, close_session, invoke, make_filesystem
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.request_slots import OpenRequest, RequestSlots, is_speculative
from cachedfs.origins.retry import RetryPolicy

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient
    from cachedfs.origins.tokens import TokenSource

_PIECE = 32 << 20  # most bytes of one inner read, kept in memory; the reader's requests are 8 MiB


def jsonable(value: Any) -> Any:
    """Return `value` as JSON values and datetimes; anything else becomes its text. URLs lose their secrets."""
    if isinstance(value, str):
        return value if stored_path(value) == value else public_url(value)
    if value is None or isinstance(value, (bool, int, float, datetime)):
        return value
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return str(value)


def plain_path(inner: Any, path: str) -> str:
    """Return the canonical form of `path`: no protocol, no slash at the end."""
    return without_slash(inner._strip_protocol(path))


def _is_same(now: ObjectInfo, then: ObjectInfo) -> bool:
    """Return whether two lookups show the same version, as far as the origin tells."""
    if now.size is not None or then.fingerprint is not None:
        is_same = is_same_evidence(now.fingerprint, then.fingerprint)
        return is_same and (now.kind, now.size) == (then.kind, then.size)
    # The size is known only from a read. So compare the evidence in the details, with 0 for the size.
    evidence = (evidence_of({**info.details, "size": 0}) for info in (now, then))
    return now.kind == then.kind and next(evidence) == next(evidence)


class _Read(Read):
    """A read of one version; each piece is held back until its version is confirmed."""

    origin: FsspecOrigin

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield b"" when the first piece is confirmed, then the bytes."""
        self.path = self.origin.object_path(await self.origin.filesystem(), self.path)
        try:
            piece = await self._begin()
        except ObjectChanged:
            if self.pinned is not None:
                raise
            piece = await self._begin()  # no bytes were returned yet, so read the newer version
        yield b""
        at = self.start
        while piece:
            yield piece
            at += len(piece)
            piece = await self._piece(at) if at < self.stop else b""

    async def _begin(self) -> bytes:
        """Choose the version and the range, and return the first piece."""
        self.info = info = self.pinned or await self.origin.lookup(self.path)
        if info.kind == "directory":
            raise IsAFolder(f"{self.url}: this is a folder; list it, or read an object in it")
        whole = None
        if info.size is None:
            whole = await self._bytes(None)
            await self._confirm()
            self.info = info = ObjectInfo(self.path, size=len(whole), details=info.details)
        assert info.size is not None
        span = clipped(self.want, info.size)
        self.start, self.stop = span.start, span.stop
        if whole is not None:
            return whole[span.start : span.stop]
        if span.size:
            return await self._piece(span.start)
        if self.pinned is not None:
            await self._confirm()
        return b""

    async def _piece(self, start: int) -> bytes:
        """Return the next bytes, which are of this version: their ETag or another lookup says so."""
        span = Range(start, min(start + _PIECE, self.stop))
        has_condition = hasattr(await self.origin.filesystem(), "_read_version")
        etag = self.info.details.get("ETag") or None if has_condition else None
        data = await self._bytes(span, etag)
        if len(data) == self.info.size:  # also where the server ignored the range
            data = data[span.start : span.stop]
        if len(data) != span.size:
            raise self._changed(f"{len(data)} bytes came instead of {span.size}")
        if etag is None:
            await self._confirm()
        return data

    async def _bytes(self, span: Range | None, etag: str | None = None) -> bytes:
        options: dict[str, Any] = {"start": span and span.start, "end": span and span.stop}
        if etag is not None:
            options |= {"etag": etag, "size": self.info.size}
        try:
            with mapped(self.url, self.doing, is_read=True):
                data = await self.origin.ask("read_version" if etag else "cat_file", self.path, **options)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise self._changed("it is gone") from error
        except CachedFSError:
            await self._confirm()  # the version may be gone, which explains the error
            raise
        if data is None:
            raise self._changed("the answer has another ETag")
        return data if isinstance(data, bytes) else bytes(data)

    async def _confirm(self) -> None:
        """Raise ObjectChanged unless the object is still the version being read."""
        try:
            now = await self.origin.lookup(self.path)
        except FileNotFoundError as error:
            raise self._changed("it is gone") from error
        if not _is_same(now, self.info):
            raise self._changed(f"it was {self.info.fingerprint}, and is {now.fingerprint}")


class FsspecOrigin(Origin):
    """An origin over any fsspec filesystem."""

    _making = "making the filesystem"
    _reads: type[Read] = _Read

    def __init__(
        self,
        protocol: str,
        options: Mapping[str, Any],
        *,
        identity: str,
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[], None],
        concurrency: int = 16,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.identity, self.on_request, self._slots = identity, on_request, RequestSlots(concurrency)
        self.policy = policy or RetryPolicy()
        self._protocol, self._options, self._loop = protocol, dict(options), loop
        self._inner, self._connection = AsyncOnce(self._make), AsyncOnce(self._connect)
        self._has_warned = False

    async def _make(self) -> Any:
        return await asyncio.to_thread(make_filesystem, self._protocol, self._options, self._loop)

    async def filesystem(self) -> Any:
        """Return the inner filesystem; its constructor may block, so it runs in a thread."""
        with mapped(f"{self._protocol}://", self._making):
            return await self._inner.get()

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object or folder that `path` is now, with one `info`."""
        path, now_s = self.object_path(await self.filesystem(), path), time.time()
        with mapped(self.url(path), "looking it up", is_read=True):
            info = self._described(path, await self.ask("info", path), now_s)
        if info.kind == "file" and info.fingerprint is None:
            self._warn(path)
        return info

    async def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder` with one `ls`, or everything below it with one `find`."""
        inner = await self.filesystem()
        folder, now_s = plain_path(inner, folder), time.time()
        with mapped(self.url(folder), "listing it", is_read=True):
            if deep:
                # Keep the names: for a file, fsspec's own `find` returns an empty info.
                found = list((await self.ask("find", folder, detail=True, withdirs=True)).items())
            else:
                found = [(info["name"], info) for info in await self.ask("ls", folder, detail=True)]
            named = [(self.object_path(inner, name), info) for name, info in found]
            # fsspec lists an object as its own only child.
            infos = [self._described(path, info, now_s) for path, info in named if path != folder]
        for child in infos:
            if child.path != folder:  # an empty object that makes this folder
                yield child

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the inner filesystem; takes no slot, because one call may be many requests."""
        inner = await self.filesystem()
        path = subject_of(method, args)
        self.on_request()
        request = OpenRequest(method, self.url(path), is_speculative=is_speculative())
        with mapped(self.url(path), f"calling {method}"), request:
            return await invoke(inner, method, *args, **options)

    async def _connect(self) -> Any:
        """Open the connection of an origin that sends requests of its own; `aclose` closes its `session`."""
        raise NotImplementedError

    def _client(
        self,
        session: Any,
        judge: Callable[..., Exception],
        *,
        auth: TokenSource | None = None,  # without, the session and the options prove the account
        slots: RequestSlots | None = None,
        options: Mapping[str, Any] = {},
        **timeouts: Any,
    ) -> HTTPClient:
        """Return a client for such requests over a session."""
        with importing():
            from cachedfs.origins.http import HTTPClient, timeouts_of

        return HTTPClient(
            session,
            auth,
            judge,
            slots=slots or self._slots,
            on_request=lambda: self.on_request(),  # it may be replaced later
            policy=self.policy,
            timeouts=timeouts_of(self.policy, **timeouts),
            options=options,
        )

    async def aclose(self) -> None:
        """Close our session and those of the inner filesystem; the next call creates new ones."""
        if (connection := self._connection.take()) is not None:
            await connection.session.close()
        if (inner := self._inner.take()) is not None:
            await close_session(inner)

    def url(self, path: str) -> str:
        """Return the URL that errors show for `path`, without secrets."""
        return public_text(path if "://" in path else f"{self._protocol}://{path}")

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Call a method of the inner filesystem as one request, in one slot."""
        inner, start, stop = await self._inner.get(), options.get("start"), options.get("end")
        range_ = "" if start is None or stop is None else range_header(Range(start, stop)) or ""
        async with self._slots.slot(method, self.url(path), range_) as request:
            self.on_request()
            answer = await invoke(inner, method, path, **options)
            request.size = len(answer) if isinstance(answer, bytes) else 0
        return answer

    def object_path(self, inner: Any, path: str) -> str:
        """Return the canonical form of an object's path, with the slash that may end its name in S3."""
        return str(inner._strip_protocol(path)) if self._protocol in SLASH_NAMES else plain_path(inner, path)

    def _described(self, path: str, info: Mapping[str, Any], now_s: float) -> ObjectInfo:
        details = jsonable({k: v for k, v in info.items() if k not in ("name", "size", "type")})
        # An empty object with such a name makes a folder.
        is_marker = not info.get("size") and without_slash(path) != path
        if info.get("type") == "directory" or is_marker:
            return ObjectInfo(without_slash(path), "directory", details=details)
        version = fingerprint(info, now_s)
        size = info.get("size")
        if size is not None and size < 0:
            raise ValueError(f"a size of {size}")
        return ObjectInfo(path, "file", size, version, details=details)

    def _warn(self, path: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self.url(path)}: {self._protocol}:// does not say when an object has changed (no generation, etag, "
            "hash or time with a size), so nothing of it can be cached safely and every read goes to the origin. "
            "Copy the data to an origin that does, or use the filesystem without cachedfs.",
            stacklevel=3,
        )
