"""Read and write objects: resolve the path, take cached blocks, fetch the missing ones once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, BinaryIO

from cachedfs.common.blocks import clip, covering
from cachedfs.common.clock import clock
from cachedfs.common.event_log import waiting
from cachedfs.common.types import AnyVersion, ObjectInfo, ObjectKey, Range
from cachedfs.core.cached_reads import CachedReads, ReadBuffer, note_version
from cachedfs.core.chunk_prefetch import ALL, ChunkPrefetch, first_want
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.downloads import Downloads
from cachedfs.core.metadata_cache import Entry
from cachedfs.core.object_history import ObjectHistories
from cachedfs.core.resolver import MetadataResolver
from cachedfs.core.source import Source
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectExists, ObjectNotFound
from cachedfs.origins.upload import Uploader, check_version

__all__ = ["TRIES", "Reader"]

logger = logging.getLogger("cachedfs.core")

TRIES = 3  # attempts of one read: cached metadata may be stale, and the next version may be replaced too
HITS_INLINE = 4  # more cached blocks than this are copied in a thread, to keep the event loop free


class Reader:
    """Reads and writes the objects of one source.

    `cached_reads` serves cached objects in any thread, without the event loop. The coroutines run on the engine's
    event loop only (`engine.run`, `engine.await_on_loop`).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.downloads = Downloads(source)
        self.resolver = MetadataResolver(source, self.downloads)
        self.chunk_prefetch = ChunkPrefetch(source, self.downloads, self.resolver)
        self.object_histories = ObjectHistories(source, self.downloads)
        self.cached_reads = CachedReads(source, self.chunk_prefetch, self.object_histories)

    # Reads.

    async def open(self, path: str) -> tuple[Entry, Download | None]:
        """Return the version that a new open file reads, and the request for its first bytes.

        The request is None if none was sent. Costs one request for an unknown object and returns at its response
        headers. Costs none for an object with fresh metadata. Raises ObjectNotFound and IsAFolder.
        """
        want, block_size = Range(0, self.source.config.whole_request), self.source.config.block_size
        self.chunk_prefetch.observe(path, 0, block_size)
        with waiting(path):
            entry, download = await self.resolver.resolve(path, want, demand=block_size)
        if entry.info is None:
            raise await self._missing(entry)
        if entry.info.kind == "directory":
            raise self.source.is_a_folder(path)
        return entry, download

    async def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of one version of an object.

        Blocks that are not cached are fetched. Look the object up again and retry, up to TRIES attempts, if the version
        was replaced meanwhile or failed its checksum.
        """
        with waiting(path, start, stop):
            return await self._read(path, start, stop)

    async def _read(self, path: str, start: int | None, stop: int | None) -> bytes:
        config = self.source.config
        want = first_want(start, stop, config.block_size, config.whole_request)
        self.chunk_prefetch.observe(path, start, stop)
        for tries_left in reversed(range(TRIES)):
            entry, download = await self.resolver.resolve(path, want, demand=ALL)
            if entry.info is None:
                raise self.source.not_found(path, entry)
            try:
                # After a change, the bytes of any one version do.
                is_pinned = tries_left == TRIES - 1
                data = await self._collect(entry, start, stop, download, is_pinned=is_pinned)
                note_version(entry)
                return data
            except (ObjectChanged, ChecksumMismatch):
                if not tries_left:
                    raise
                self.source.metadata.expire(path)
        raise AssertionError("unreachable")

    async def collect(
        self,
        entry: Entry,
        start: int | None,
        stop: int | None,
        download: Download | None = None,
    ) -> bytes:
        """Return the bytes `[start:stop]` of exactly this version.

        They come from the cache, from in-flight requests or from new ones. Raises ObjectChanged if a missing block is
        of a version that no longer exists.
        """
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
        info = entry.info
        assert info is not None
        if info.kind == "directory":
            raise self.source.is_a_folder(entry.path)
        key = self.source.key(entry)
        if key is None or info.size is None:
            return await self._uncached(entry, info, start, stop, download, is_pinned=is_pinned)
        want = clip(start, stop, info.size)
        out = ReadBuffer(want)
        runs = _runs(
            covering(want, key.block_size), max(1, self.source.config.request_size // key.block_size)
        )
        fetched = (
            set() if download is None else set(covering(Range(download.start, download.stop), key.block_size))
        )
        if 0 < want.size < info.size:
            self.object_histories.observe_range(entry, key, want, is_first=download is not None)
        slots = asyncio.Semaphore(
            2 * self.source.config.first_concurrency
        )  # limits the buffers of one huge read

        async def gather(run: range) -> None:
            async with slots:
                await self._gather(entry, key, run, out, fetched)

        if len(runs) == 1:
            await gather(runs[0])
        else:
            await _all(gather(run) for run in runs)
        self.source.engine.bytes_served += want.size
        return out.finish()

    async def _gather(
        self, entry: Entry, key: ObjectKey, run: Iterable[int], out: ReadBuffer, fetched: set[int]
    ) -> None:
        """Copy the blocks of `run` into `out`, cached or fetched; those in `fetched` do not count as hits."""
        engine, missing = self.source.engine, set(run)
        while missing:
            taken = await self._take_cached(key, sorted(missing), out)
            engine.hits += len(taken - fetched)
            missing -= taken
            fetched |= missing
            if not missing:
                return
            for index, download in (await self.downloads.get(entry, key, sorted(missing))).items():
                want = out.part(index, key.block_size)
                with contextlib.suppress(DownloadStopped):  # just stored, or to be fetched again
                    await download.wait_until(want.stop)
                    out.fill(want, download.views(want))
                    engine.cache.touch(key, index)
                    missing.discard(index)

    async def _take_cached(self, key: ObjectKey, indexes: list[int], out: ReadBuffer) -> set[int]:
        """Copy the blocks that are in memory or on disk into `out`; return their indexes."""
        cached_reads = self.cached_reads
        cached = [i for i in indexes if cached_reads.has(key, i, out.part(i, key.block_size).stop)]

        def copy() -> set[int]:
            return {index for index in cached if cached_reads.copy(key, index, out)}

        return copy() if len(cached) <= HITS_INLINE else await asyncio.to_thread(copy)

    async def _uncached(
        self,
        entry: Entry,
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
        if info.size is not None:
            want = clip(start, stop, info.size)
            if download is not None and download.start <= want.start and want.stop <= download.stop:
                with contextlib.suppress(DownloadStopped):  # it was stopped before these bytes
                    await download.wait_until(want.stop)
                    return download.copy(want)
            if want.size == 0:
                return b""
        async with self.source.origin(entry.path).read(
            entry.path, want if info.size is not None else None, info if is_pinned else None
        ) as reply:
            if info.size is not None and reply.info.size != info.size:
                raise ObjectChanged(
                    f"{self.source.url(entry.path)}: its size changed while it was read; read it again"
                )
            data = b"".join([piece async for piece in reply])
        self.source.engine.bytes_fetched += len(data)
        return data if info.size is not None else data[start:stop]

    async def fetch(
        self,
        entry: Entry,
        key: ObjectKey,
        want: Range,
        *,
        n_reads: int = 1,
        up_to: int = 0,
    ) -> Download | None:
        """Request `want` and return the in-flight request once the first block's bytes are there.

        Return None if they are cached now.
        `n_reads` is the number of reads of the object since its last wait. `up_to` requests bytes beyond `want`: those
        are received only when a reader wants them.
        """
        blocks, engine = covering(want, key.block_size), self.source.engine
        self.object_histories.observe_wait(entry, key, blocks, n_reads=n_reads)
        first = blocks[0]
        if not first:
            self.chunk_prefetch.observe(entry.path, 0, key.block_size)
        demand = None
        if up_to > want.stop and key.name(first) not in engine.by_block:
            demand = blocks.stop * key.block_size
            blocks = covering(Range(want.start, up_to), key.block_size)
        with waiting(entry.path, want.start, want.stop):
            while not engine.cache.has(key, first):
                download = (await self.downloads.get(entry, key, blocks, demand=demand)).get(first)
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
        origin = self.source.origin(paths[0])
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
        shared = self.source.engine.cache.metadata
        shared.changed(self.source.identity, paths, tree=tree)
        try:
            yield
        finally:
            shared.changed(self.source.identity, paths, tree=tree)

    async def check_version(self, path: str, expected: ObjectInfo | AnyVersion | None) -> None:
        """Raise ObjectExists or ObjectChanged unless the origin has this version (None: no object), by one lookup."""
        found = None
        if not isinstance(expected, AnyVersion):
            with contextlib.suppress(ObjectNotFound):
                found = await self.source.origin(path).lookup(path)
        try:
            check_version(self.source.url(path), expected, found)
        except (ObjectChanged, ObjectExists):
            self.source.metadata.expire(path)  # it is of an older version
            raise

    async def look_up_written(self, path: str) -> ObjectInfo:
        """Return the metadata of an object that was just written, by one lookup, and store it."""
        checked_at, mark = clock.now(), self.source.metadata.mark(path)
        info = await self.source.origin(path).lookup(path)
        self.source.metadata.store(path, info, checked_at=checked_at, mark=mark)
        return info

    # Errors.

    async def _missing(self, entry: Entry) -> CachedFSError:
        """Return the error for opening an absent object: a second request tells whether it is a folder."""
        path = entry.path
        try:
            folder = await self.resolver.is_folder(path)
        except CachedFSError as error:
            logger.debug("not listed: %s", error)  # keep the first answer: there is no such object
            folder = False
        return self.source.is_a_folder(path) if folder else self.source.not_found(path, entry)


def _runs(indexes: range, length: int) -> list[range]:
    return [indexes[i : i + length] for i in range(0, len(indexes), length)]


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
