"""Read and write objects: from cached blocks in any thread, else by a lookup and requests for what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, BinaryIO

from cachedfs.common.blocks import clip, covering
from cachedfs.common.clock import clock
from cachedfs.common.event_log import waiting
from cachedfs.common.types import AnyVersion, ObjectInfo, Range
from cachedfs.common.urls import without_slash
from cachedfs.config import FIRST_AT_ONCE
from cachedfs.core.chunk_prefetch import ALL, ChunkPrefetch, first_want
from cachedfs.core.download import Download, DownloadStopped, joined
from cachedfs.core.downloads import Downloads
from cachedfs.core.lookups import Lookups
from cachedfs.core.object_history import ObjectHistories
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.version import Version
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectExists, ObjectNotFound
from cachedfs.origins.upload import Uploader, check_version

__all__ = ["TRIES", "Reader", "versions_read"]

logger = logging.getLogger("cachedfs.core")

TRIES = 3  # attempts of one read: cached metadata may be stale, and the next version may be replaced too
MANY_READERS = FIRST_AT_ONCE  # as many as requests in flight at first
HITS_INLINE = 4  # more cached blocks than this are copied in a thread, to keep the event loop free

_Versions = dict[str, set[str | None]]
_versions_read: ContextVar[_Versions | None] = ContextVar("cachedfs_versions_read", default=None)
Wanted = tuple[str, int | None, int | None]  # path, and start and stop as in a Python slice


@contextlib.contextmanager
def versions_read() -> Iterator[_Versions]:
    """Yield a dictionary of the versions that reads in this context return bytes of.

    It maps a path to fingerprints. It records the reads of this thread and of the coroutines it waits for. Use it
    instead of the metadata after the read, which may be of a newer version already.
    """
    versions: _Versions = {}
    token = _versions_read.set(versions)
    try:
        yield versions
    finally:
        _versions_read.reset(token)


class Reader:
    """Reads and writes the objects of one origin.

    `cached`, `cached_bytes` and `read_many` work in any thread, without the event loop. The coroutines run on the
    engine's event loop only (`engine.run`, `engine.await_on_loop`).
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.downloads = Downloads(objects)
        self.lookups = Lookups(objects, self.downloads)
        self.chunk_prefetch = ChunkPrefetch(objects, self.downloads, self.lookups)
        self.object_histories = ObjectHistories(objects, self.downloads)
        self._awaited = self.chunk_prefetch.awaited
        self._block_size, self._verifies = objects.config.block_size, objects.config.verify_always
        self._reads_ahead, self._whole_request = objects.config.read_ahead > 0, objects.config.whole_request

    # Cached reads: any thread, no event loop, no request.

    def cached(self, path: str, start: int | None, stop: int | None, *, nowait: bool = False) -> bytes | None:
        """Return the bytes `[start:stop]` of an object if all are cached.

        None if the origin must be asked. With `nowait`, raise BlockingIOError instead of waiting for the disk. Raises
        ObjectNotFound for a known absence.
        """
        if path in self._awaited and not self._is_answered(path, start, stop):
            return None
        entry = self.objects.fresh(path)
        version = None if entry is None else entry.version
        if version is None or version.block_size != self._block_size:
            version = self._version(path, entry)
            if version is None:
                return None
        start, stop, _ = slice(start, stop).indices(version.size)
        engine, index = self.objects.engine, start // self._block_size
        if engine.by_block or not start < stop <= (index + 1) * self._block_size:
            data = self.cached_bytes(version, start, max(start, stop), nowait=nowait)
        else:  # the usual case, without further calls
            skipped = index * self._block_size
            data = engine.cache.read(
                version, index, start - skipped, stop - skipped, nowait=nowait, verify=self._verifies
            )
            if data is None or len(data) != stop - start:
                return None
            engine.hits += 1
            engine.bytes_served += len(data)
        if data is not None and (version.digest in engine.histories or _versions_read.get() is not None):
            self._observe_hit(path, version, start, stop)
        return data

    def _version(self, path: str, entry: Entry | None) -> Version | None:
        """Return the version to read; None if the origin must be asked. Raises ObjectNotFound for an absence."""
        if entry is not None and entry.info is None and path == without_slash(path):
            raise self.objects.not_found(path, entry)
        return None if entry is None else self.objects.version(entry)

    def _is_answered(self, path: str, start: int | None, stop: int | None) -> bool:
        """Report the read of an object that was requested ahead; return False while its answer has not come."""
        self.chunk_prefetch.reached(path, start, stop)
        return self.objects.in_memory(path) is not None

    def _observe_hit(self, path: str, version: Version, start: int, stop: int) -> None:
        """Report a read to `versions_read`, and to the object's history if it is read ahead from there."""
        if (versions := _versions_read.get()) is not None:
            versions.setdefault(path, set()).add(version.fingerprint)
        if self.object_histories.is_observed(version, stop):
            engine, want = self.objects.engine, Range(start, max(start, stop))
            engine.call_soon(self.object_histories.observe_hit, version, want)

    def read_many(self, wanted: Sequence[Wanted]) -> list[bytes | OSError | None]:
        """Return the result of `cached` for each `(path, start, stop)`, or its error."""
        found: list[bytes | OSError | None] = []
        for path, start, stop in wanted:
            try:
                found.append(self.cached(path, start, stop))
            except OSError as error:
                found.append(error)
        return found

    def cached_bytes(self, version: Version, start: int, stop: int, *, nowait: bool = False) -> bytes | None:
        """Return the bytes `[start, stop)` of one version if all are cached or received, else None."""
        engine = self.objects.engine
        blocks = (
            range(start // version.block_size, -(-stop // version.block_size)) if start < stop else range(0)
        )
        if len(blocks) > 1 and not all(self._has(version, index, stop) for index in blocks):
            return None
        buffer = _zeros(stop - start)
        with buffer.getbuffer() as view:
            for index in blocks:
                if not self._copy(version, index, view, start, stop, nowait=nowait):
                    return None
        engine.hits += len(blocks)
        engine.bytes_served += stop - start
        return buffer.getvalue()

    def _has(self, version: Version, index: int, stop: int) -> bool:
        """Return whether block `index` is in memory, up to the object's byte `stop`, or on disk."""
        download = self.objects.engine.by_block.get((version.digest, index))
        if download is None or download.released:
            return self.objects.engine.cache.has(version, index)
        return download.filled >= min(stop, (index + 1) * version.block_size)

    def _copy(
        self, version: Version, index: int, view: memoryview, start: int, stop: int, *, nowait: bool = False
    ) -> bool:
        """Copy what block `index` has of the bytes `[start, stop)` into `view`; return False if it is not cached."""
        engine, block_start = self.objects.engine, index * version.block_size
        first, last = max(start, block_start), min(stop, block_start + version.block_size)
        place = view[first - start : last - start]
        download = engine.by_block.get((version.digest, index))
        if download is not None and download.filled >= last and download.take(first, place) == len(place):
            engine.cache.touch(version, index)
            return True
        # Release the view here: Python 3.13 raises if a traceback keeps it alive longer than its BytesIO.
        with place:
            n = engine.cache.read_into(
                version, index, first - block_start, place, nowait=nowait, verify=self._verifies
            )
            if 0 <= n < len(place):
                # Valid, but too short for its object: remove it, or every read would find it again.
                engine.cache.remove_wrong(version, index)
            return n == len(place)

    # Reads that may send requests.

    async def open(self, path: str) -> tuple[Entry, Download | None]:
        """Return the entry that a new open file reads, and the download of its first bytes.

        The download is None if no request was sent. Costs one request for an unknown object and returns at its response
        headers. Costs none for an object with fresh metadata. Raises ObjectNotFound and IsAFolder.
        """
        want = Range(0, self._whole_request)
        if self._reads_ahead:
            self.chunk_prefetch.observe(path, 0, self._block_size)
        with waiting(path):
            entry, download = await self.lookups.resolve(path, want, demand=self._block_size)
        if download is not None:
            download.keep_bytes(False)  # a file may be open for long
        if entry.info is None:
            raise await self._missing(entry)
        if entry.info.kind == "directory":
            raise self.objects.is_a_folder(path)
        return entry, download

    def opened(self, path: str) -> None:
        """Note that an open file will read an object whose metadata is cached. From any thread."""
        if path in self._awaited:
            self.chunk_prefetch.reached(path, 0, self._block_size)

    async def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of one version of an object.

        Blocks that are not cached are fetched. Look the object up again and retry, up to TRIES attempts, if the version
        was replaced meanwhile or failed its checksum.
        """
        engine = self.objects.engine
        # With as many readers, all that may be sent is wanted already.
        if self._reads_ahead and engine.n_reading < MANY_READERS:
            self.chunk_prefetch.observe(path, start, stop)
        engine.n_reading += 1
        try:
            with waiting(path, start, stop):
                return await self._read(path, start, stop)
        finally:
            engine.n_reading -= 1

    async def _read(self, path: str, start: int | None, stop: int | None) -> bytes:
        want = first_want(start, stop, self._block_size, self._whole_request)
        for tries_left in reversed(range(TRIES)):
            entry, download = await self.lookups.resolve(path, want, demand=ALL)
            if entry.info is None:
                raise self.objects.not_found(path, entry)
            try:
                # After a change, the bytes of any one version do.
                is_pinned = tries_left == TRIES - 1
                data = await self._collect(entry, start, stop, download, is_pinned=is_pinned)
            except (ObjectChanged, ChecksumMismatch):
                if not tries_left:
                    raise
                self.objects.expire(path)
                continue
            if (versions := _versions_read.get()) is not None:
                versions.setdefault(path, set()).add(entry.info.fingerprint)
            return data
        raise AssertionError("unreachable")

    async def collect(
        self, entry: Entry, start: int | None, stop: int | None, download: Download | None = None
    ) -> bytes:
        """Return the bytes `[start:stop]` of exactly the version of `entry`.

        They come from the cache, from downloads or from new requests. Raises ObjectChanged if a missing block is of a
        version that no longer exists.
        """
        if self._reads_ahead:
            self.chunk_prefetch.observe(entry.path, start, stop)
        with waiting(entry.path, start, stop):
            return await self._collect(entry, start, stop, download)

    async def _collect(
        self,
        entry: Entry,
        start: int | None,
        stop: int | None,
        download: Download | None,
        *,
        is_pinned: bool = True,
    ) -> bytes:
        info, version = entry.object, self.objects.version(entry)
        if info.kind == "directory":
            raise self.objects.is_a_folder(entry.path)
        if version is None:
            return await self._uncached(info, start, stop, download, is_pinned=is_pinned)
        want = clip(start, stop, version.size)
        if self._reads_ahead and 0 < want.size < version.size:
            self.object_histories.observe_range(version, want, is_first=download is not None)
        fetched: set[int] = set()
        if download is not None:
            if (data := await self._brought(version, want, download)) is not None:
                return data
            fetched = set(covering(Range(download.start, download.stop), self._block_size))
        blocks, n_at_once = covering(want, self._block_size), self._whole_request // self._block_size
        buffer = _zeros(want.size)
        view = buffer.getbuffer()
        try:
            if len(blocks) <= n_at_once:
                await self._gather(version, blocks, view, want, fetched)
            else:
                await self._gather_runs(version, blocks, view, want, fetched)
        finally:
            with contextlib.suppress(BufferError):  # of a canceled read, a thread may still copy
                view.release()
        self.objects.engine.bytes_served += want.size
        return buffer.getvalue()

    async def _brought(self, version: Version, want: Range, download: Download) -> bytes | None:
        """Return bytes that came with the lookup of their object; None if they did not, or not all of them."""
        if not (download.start <= want.start and want.stop <= download.stop):
            return None
        with contextlib.suppress(DownloadStopped):
            await download.wait_until(want.stop)
            if (data := joined(download.views(want.start, want.stop), want.size)) is not None:
                for index in covering(want, version.block_size):
                    self.objects.engine.cache.touch(version, index)
                self.objects.engine.bytes_served += want.size
                return data
        return None

    async def _gather_runs(
        self, version: Version, blocks: range, view: memoryview, want: Range, fetched: set[int]
    ) -> None:
        """Gather many blocks in runs of one request each, few at a time."""
        slots = asyncio.Semaphore(2 * self.objects.config.first_concurrency)
        n_at_once = self._whole_request // self._block_size

        async def gather(run: range) -> None:
            async with slots:
                await self._gather(version, run, view, want, fetched)

        await _all(gather(blocks[i : i + n_at_once]) for i in range(0, len(blocks), n_at_once))

    async def _gather(
        self, version: Version, run: Iterable[int], view: memoryview, want: Range, fetched: set[int]
    ) -> None:
        """Copy the blocks of `run` into `view`, cached or fetched; those in `fetched` do not count as hits."""
        engine, missing = self.objects.engine, sorted(run)
        is_looked_up = len(missing) == 1  # the caller has just looked for a single block
        while missing:
            if not is_looked_up:
                taken = await self._take_cached(version, missing, view, want)
                engine.hits += len(taken - fetched)
                missing = [index for index in missing if index not in taken]
            is_looked_up = False
            if not missing:
                return
            fetched |= set(missing)
            for index, download in (await self.downloads.get(version, missing)).items():
                start = max(want.start, index * version.block_size)
                stop = min(want.stop, (index + 1) * version.block_size)
                with contextlib.suppress(DownloadStopped):  # just stored, or to be fetched again
                    await download.wait_until(stop)
                    if download.take(start, view[start - want.start : stop - want.start]) == stop - start:
                        engine.cache.touch(version, index)
                        missing.remove(index)

    async def _take_cached(
        self, version: Version, indexes: list[int], view: memoryview, want: Range
    ) -> set[int]:
        """Copy the blocks that are in memory or on disk into `view`; return their indexes."""
        cached = [index for index in indexes if self._has(version, index, want.stop)]
        if not cached:
            return set()

        def copy() -> set[int]:
            return {index for index in cached if self._copy(version, index, view, want.start, want.stop)}

        return copy() if len(cached) <= HITS_INLINE else await asyncio.to_thread(copy)

    async def _uncached(
        self,
        info: ObjectInfo,
        start: int | None,
        stop: int | None,
        download: Download | None,
        *,
        is_pinned: bool,
    ) -> bytes:
        """Read an object without a fingerprint or a size, bypassing the cache.

        Unless `is_pinned`, the bytes may be of another version of the same size.
        """
        want = None if info.size is None else clip(start, stop, info.size)
        if want is not None:
            if download is not None and download.start <= want.start and want.stop <= download.stop:
                with contextlib.suppress(DownloadStopped):  # it was stopped before these bytes
                    await download.wait_until(want.stop)
                    if (data := joined(download.views(want.start, want.stop), want.size)) is not None:
                        return data
            if want.size == 0:
                return b""
        async with self.objects.origin(info.path).read(info.path, want, info if is_pinned else None) as reply:
            if want is not None and reply.info.size != info.size:
                raise ObjectChanged(
                    f"{self.objects.url(info.path)}: its size changed while it was read; read it again"
                )
            data = b"".join([piece async for piece in reply])
        self.objects.engine.bytes_fetched += len(data)
        return data if want is not None else data[start:stop]

    async def fetch(
        self, version: Version, want: Range, *, n_reads: int = 1, up_to: int = 0
    ) -> Download | None:
        """Request `want` and return the download once the first block's bytes are there.

        Return None if they are cached now. `n_reads` is the number of reads of the object since its last wait. `up_to`
        requests bytes beyond `want`: those are received only when a reader wants them.
        """
        blocks, engine, path = covering(want, version.block_size), self.objects.engine, version.info.path
        first = blocks[0]
        if self._reads_ahead:
            self.object_histories.observe_wait(version, blocks, n_reads=n_reads)
            if not first:
                self.chunk_prefetch.observe(path, 0, version.block_size)
        demand = None
        if up_to > want.stop and (version.digest, first) not in engine.by_block:
            demand = blocks.stop * version.block_size
            blocks = covering(Range(want.start, up_to), version.block_size)
        with waiting(path, want.start, want.stop):
            while not engine.cache.has(version, first):
                download = (await self.downloads.get(version, blocks, demand=demand)).get(first)
                if download is not None:
                    with contextlib.suppress(DownloadStopped):
                        await download.wait_until(min(want.stop, download.stop))
                        return download
        return None

    # Writes.

    async def write(
        self, paths: Iterable[str], method: str, *args: Any, tree: bool = False, **options: Any
    ) -> Any:
        """Call a method of the inner filesystem that changes `paths`.

        `tree` includes everything below `paths`.
        """
        paths = list(paths)
        origin = self.objects.origin(paths[0])
        with self._changing(paths, tree=tree):
            return await origin.call(method, *args, **options)

    async def upload(
        self,
        origin: Uploader,
        path: str,
        file: BinaryIO,
        *,
        replaces: ObjectInfo | AnyVersion | None,
        mtime_ns: int | None,
    ) -> ObjectInfo:
        """Make the bytes of `file` the object at `path`, by the upload of the origin itself: see `Uploader`."""
        with self._changing([path]):
            return await origin.upload(path, file, replaces=replaces, mtime_ns=mtime_ns)

    @contextlib.contextmanager
    def _changing(self, paths: list[str], *, tree: bool = False) -> Iterator[None]:
        """Let all processes of the machine see a change at once.

        The change counters change before and after it, so that metadata requested before or during the write is never
        valid.
        """
        shared = self.objects.store
        shared.changed(self.objects.identity, paths, tree=tree)
        try:
            yield
        finally:
            shared.changed(self.objects.identity, paths, tree=tree)

    async def check_version(self, path: str, expected: ObjectInfo | AnyVersion | None) -> None:
        """Raise ObjectExists or ObjectChanged unless the origin has this version (None: no object), by one lookup."""
        found = None
        if not isinstance(expected, AnyVersion):
            with contextlib.suppress(ObjectNotFound):
                found = await self.objects.origin(path).lookup(path)
        try:
            check_version(self.objects.url(path), expected, found)
        except (ObjectChanged, ObjectExists):
            self.objects.expire(path)  # it is of an older version
            raise

    async def look_up_written(self, path: str) -> ObjectInfo:
        """Return the metadata of an object that was just written, by one lookup, and store it."""
        asked_at, counter = clock.now(), self.objects.counter(path)
        info = await self.objects.origin(path).lookup(path)
        self.objects.learn(path, info, asked_at=asked_at, counter=counter)
        return info

    # Errors.

    async def _missing(self, entry: Entry) -> CachedFSError:
        """Return the error for opening an absent object: a second request tells whether it is a folder."""
        path = entry.path
        try:
            folder = await self.lookups.listings.is_folder(path)
        except CachedFSError as error:
            logger.debug("not listed: %s", error)  # keep the first answer: there is no such object
            folder = False
        return self.objects.is_a_folder(path) if folder else self.objects.not_found(path, entry)


def _zeros(size: int) -> io.BytesIO:
    """Return a buffer of `size` bytes, whose `getvalue` does not copy."""
    buffer = io.BytesIO()
    if size:
        buffer.seek(size - 1)
        buffer.write(b"\0")
    return buffer


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; if one fails, cancel the others and raise its error.

    The error is not in an exception group.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:  # also a cancellation: leave no task running unawaited
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
