"""Read objects: from cached blocks in any thread, else by a lookup and requests for what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from cachedfs.common.blocks import clip, covering, first_range
from cachedfs.common.buffer import zeros
from cachedfs.common.event_log import waiting
from cachedfs.common.types import Range
from cachedfs.common.urls import without_slash
from cachedfs.common.version import Version
from cachedfs.config import FIRST_AT_ONCE
from cachedfs.core.download import ALL, Download, DownloadStopped
from cachedfs.core.downloads import Downloads
from cachedfs.core.lookups import Lookups
from cachedfs.core.name_listings import one_call
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.path_errors import is_a_folder
from cachedfs.core.readahead import Readahead
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged

logger = logging.getLogger("cachedfs.core")

TRIES = 3  # attempts of one read: cached metadata may be stale, and the next version may be replaced too
UNKNOWN_IN_A_ROW = (
    16  # objects that the store did not know: then the lookup itself asks it, in the loop's thread
)
MANY_READERS = FIRST_AT_ONCE  # as many as requests in flight at first
NO_BYTES = Range(0, 0)
HITS_INLINE = 4  # more cached blocks than this are copied in a thread, to keep the event loop free

T = TypeVar("T")
_Versions = dict[str, set[str | None]]
_version_log: ContextVar[_Versions | None] = ContextVar("cachedfs_versions_read", default=None)
Wanted = tuple[str, int | None, int | None]  # path, and start and stop as in a Python slice


@contextlib.contextmanager
def versions_read() -> Iterator[_Versions]:
    """Yield a dictionary of the versions that reads in this context return bytes of.

    It maps a path to fingerprints. It records the reads of this thread and of the coroutines it waits for. Use it
    instead of the metadata after the read, which may be of a newer version already.
    """
    versions: _Versions = {}
    token = _version_log.set(versions)
    try:
        yield versions
    finally:
        _version_log.reset(token)


class Reader:
    """Reads the objects of one origin.

    `cached` and `cached_bytes` work in any thread, without the event loop. The coroutines run on the engine's event loop
    only (`engine.run`, `engine.await_on_loop`).
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.downloads = Downloads(objects)
        self.lookups = Lookups(objects, self.downloads)
        self.readahead = Readahead(objects, self.downloads, self.lookups, self.cached_bytes)
        self._awaited = self.readahead.awaited
        self._block_size, self._verifies = objects.config.block_size, objects.config.verify_always
        self._reads_ahead, self._whole_request = objects.config.read_ahead > 0, objects.config.whole_request
        self._n_unknown = 0  # latest reads, in a row, of objects that neither memory nor the store knew

    # Cached reads: any thread, no event loop, no request.

    def cached(
        self, path: str, start: int | None, stop: int | None, *, nowait: bool = False, of: Entry | None = None
    ) -> bytes | None:
        """Return the bytes `[start:stop]` of an object if all are cached; with `of`, those of its version.

        None if the origin must be asked. `nowait`: raise BlockingIOError, never wait for the disk. Raises ObjectNotFound.
        """
        if path in self._awaited:
            self.readahead.reached(path, start, stop)
            if path not in self.objects.entries:  # its answer has not come
                return None
        elif self._n_unknown >= UNKNOWN_IN_A_ROW and path not in self.objects.entries:
            return None
        entry = of or self.objects.fresh(path)
        self._n_unknown = self._n_unknown + 1 if entry is None else 0
        version = None if entry is None else entry.version
        if version is None or version.block_size != self._block_size:
            version = None if entry is None else self._version(entry)
            if version is None:
                return None
        start, stop, _ = slice(start, stop).indices(version.size)
        engine, index, n_blocks = self.objects.engine, start // self._block_size, 1
        if engine.by_block or not start < stop <= (index + 1) * self._block_size:
            stop = max(start, stop)
            data = self.cached_bytes(version, start, stop, nowait=nowait)
            n_blocks = -(-stop // self._block_size) - index if stop > start else 0
        else:  # the usual case, without further calls
            skipped = index * self._block_size
            data = engine.cache.read(
                version, index, start - skipped, stop - skipped, nowait=nowait, verify=self._verifies
            )
        if data is None or len(data) != stop - start:
            return None
        engine.hits += n_blocks
        engine.bytes_served += len(data)
        history = engine.histories.get(version.digest)
        is_watched = history is not None and (history.n_to_observe >= 0 or history.requested)
        if is_watched or _version_log.get() is not None:
            self._observe_hit(path, version, start, stop)
        return data

    def _version(self, entry: Entry) -> Version | None:
        """Return the version to read; None if the origin must be asked. Raises ObjectNotFound for an absence."""
        if entry.info is None and entry.path == without_slash(entry.path):
            raise self.objects.not_found(entry)
        return self.objects.version(entry)

    def _observe_hit(self, path: str, version: Version, start: int, stop: int) -> None:
        """Report a read to `versions_read`, and to the object's history if it is read ahead from there."""
        if (versions := _version_log.get()) is not None:
            versions.setdefault(path, set()).add(version.fingerprint)
        history = self.objects.engine.histories.get(version.digest) if self._reads_ahead else None
        blocks = covering(Range(start, stop), self._block_size)
        if history is not None and blocks and (history.take(blocks) or history.n_to_observe >= 0):
            self.objects.engine.call_soon(self.readahead.observe, version, start, stop)

    def cached_bytes(self, version: Version, start: int, stop: int, *, nowait: bool = False) -> bytes | None:
        """Return the bytes `[start, stop)` of one version if all are cached or received, else None."""
        blocks = covering(Range(start, stop), version.block_size)
        if len(blocks) > 1 and not all(self._has(version, index, stop) for index in blocks):
            return None
        buffer, sources = zeros(stop - start), set[Download]()
        with buffer.getbuffer() as view:
            for index in blocks:
                if not self._copy(version, index, view, start, stop, sources, nowait=nowait):
                    return None
        return None if any(download.mismatch for download in sources) else buffer.getvalue()

    def _has(self, version: Version, index: int, stop: int) -> bool:
        """Return whether block `index` is in memory, up to the object's byte `stop`, or on disk."""
        download = self.objects.engine.by_block.get((version.digest, index))
        if download is None or download.released:
            return self.objects.engine.cache.has(version, index)
        return download.filled >= min(stop, (index + 1) * version.block_size)

    def _copy(
        self,
        version: Version,
        index: int,
        view: memoryview,
        start: int,
        stop: int,
        sources: set[Download],
        *,
        nowait: bool = False,
    ) -> bool:
        """Copy what block `index` has of the bytes `[start, stop)` into `view`; return False if it is not cached.

        A download that they come from is added to `sources`.
        """
        engine, block_start = self.objects.engine, index * version.block_size
        first, last = max(start, block_start), min(stop, block_start + version.block_size)
        place = view[first - start : last - start]
        download = engine.by_block.get((version.digest, index))
        if download is not None and download.filled >= last and download.take(first, place) == len(place):
            sources.add(download)
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

    async def open(
        self, path: str, start: int | None = None, stop: int | None = None, *, demand: int | None = None
    ) -> tuple[Entry, Download | None]:
        """Return the entry that a reader of `[start:stop]` reads, and the download of its first bytes.

        The download is None if no request was sent. Costs one request for an unknown object and returns at its response
        headers. Costs none for an object with fresh metadata. An open file `demand`s one block, and more as it goes on.
        Raises ObjectNotFound and IsAFolder.
        """
        want = first_range(start, stop, self._block_size, self._whole_request)
        if self._reads_ahead:
            self.readahead.observe_object(path, start or 0, self._block_size if stop is None else stop)
        with waiting(path):
            entry, download = await self.lookups.resolve(path, want, demand=demand or self._block_size)
        if entry.info is None:
            raise await self._missing(entry)
        if entry.info.kind == "directory":
            raise is_a_folder(self.objects.url(path))
        if download is not None and (version := self.objects.version(entry)) is not None:
            blocks = covering(Range(download.start, download.stop), self._block_size)
            self.readahead.history(version).requested.update(blocks)
        return entry, download

    def opened(self, path: str) -> None:
        """Note that an open file will read an object whose metadata is cached. From any thread."""
        if path in self._awaited:
            self.readahead.reached(path, 0, self._block_size)

    async def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of one version of an object.

        Blocks that are not cached are fetched. Look the object up again and retry, up to TRIES attempts, if the version
        was replaced meanwhile or failed its checksum.
        """
        engine = self.objects.engine
        # With as many readers, all that may be sent is wanted already.
        if self._reads_ahead and engine.n_reading < MANY_READERS:
            self.readahead.observe_object(path, start, stop)
        engine.n_reading += 1
        try:
            with waiting(path, start, stop):
                for tries_left in reversed(range(TRIES)):
                    entry = self.objects.fresh(path) if path in self.objects.entries else None
                    download = None
                    if entry is None or entry.info is None or entry.info.kind != "file":
                        want = first_range(start, stop, self._block_size, self._whole_request)
                        entry, download = await self.lookups.resolve(path, want, demand=ALL)
                    if download is None:
                        self._n_unknown = 0  # the store may know the next ones too
                    try:
                        # After a change, the bytes of any one version do.
                        is_pinned = tries_left == TRIES - 1
                        return await self._read_version(entry, start, stop, download, is_pinned=is_pinned)
                    except (ObjectChanged, ChecksumMismatch):
                        if not tries_left:
                            raise
                        self.objects.expire(path)
        finally:
            engine.n_reading -= 1
        raise AssertionError("unreachable")

    def read_many(
        self, wanted: Sequence[Wanted], batch_size: int | None = None
    ) -> list[bytes | BaseException | None]:
        """Return the result of `cached` or else of `read` for each `(path, start, stop)`, or its error.

        `batch_size` are fetched at a time. It blocks: not for the event loop thread.
        """
        found: list[bytes | BaseException | None] = []
        latest: dict[str, Entry] = {}  # whoever reads many ranges of an object asks once whether it changed
        for path, start, stop in wanted:
            try:
                data = self.cached(path, start, stop, of=latest.get(path))
                found.append(data)
            except OSError as error:
                found.append(error)
            else:
                if data is not None and (entry := self.objects.entries.get(path)) is not None:
                    latest[path] = entry

        async def fetch(number: int) -> None:
            try:
                found[number] = await self.read(*wanted[number])
            except Exception as error:  # of any kind: the caller gets it in place of the bytes
                found[number] = error

        if missing := [number for number, data in enumerate(found) if data is None]:
            # Each read works before it sends its request: with too many at once, the first would wait for all.
            n_at_once = batch_size or self.objects.config.concurrency
            most = n_at_once if n_at_once > 0 else len(missing)
            with one_call():
                self.objects.engine.run(_for_each(missing, fetch, most))
        return found

    async def read_version(
        self,
        entry: Entry,
        start: int | None,
        stop: int | None,
        download: Download | None = None,
        *,
        ahead: Range = NO_BYTES,
    ) -> bytes:
        """Return the bytes `[start:stop]` of exactly the version of `entry`.

        They come from the cache, from downloads or from new requests. The bytes `ahead`, which the caller reads next,
        are requested too. Raises ObjectChanged if a missing block is of a version that no longer exists.
        """
        if self._reads_ahead:
            self.readahead.observe_object(entry.path, start, stop)
        if ahead.size and (version := self.objects.version(entry)) is not None:
            self.downloads.launch(version, covering(ahead, self._block_size))
        with waiting(entry.path, start, stop):
            return await self._read_version(entry, start, stop, download)

    async def _read_version(
        self,
        entry: Entry,
        start: int | None,
        stop: int | None,
        download: Download | None,
        *,
        is_pinned: bool = True,
    ) -> bytes:
        version, engine = entry.version, self.objects.engine
        if version is None or version.block_size != self._block_size:
            version = self.objects.version(entry)
        if version is None:
            return await self._uncached(entry, start, stop, download, is_pinned=is_pinned)
        want = clip(start, stop, version.size)
        blocks, size = covering(want, self._block_size), want.stop - want.start
        if self._reads_ahead and 0 < size < version.size:
            is_first = download is not None and download.covers(want.start)
            self.readahead.observe(version, want.start, want.stop, missed=blocks, is_first=is_first)
        if download is None and len(blocks) == 1:  # the usual case: `cached` has just looked for it
            download = self.downloads.launch(version, blocks).get(blocks[0])
        data = None
        if download is not None:
            with contextlib.suppress(DownloadStopped):
                data = await download.read(want.start, want.stop)
                for index in blocks:
                    engine.cache.touch(version, index)
        if data is None:
            data = await self._read_runs(version, want, blocks, download)
        engine.bytes_served += size
        if (versions := _version_log.get()) is not None:
            versions.setdefault(entry.path, set()).add(version.fingerprint)
        return data

    async def _read_runs(
        self, version: Version, want: Range, blocks: range, download: Download | None
    ) -> bytes:
        """Return bytes of several blocks, cached or fetched; those that `download` brings do not count as hits."""
        n = self._whole_request // self._block_size  # blocks of one request
        requested = Range(0, 0) if download is None else Range(download.start, download.stop)
        fetched = set(covering(requested, self._block_size))
        buffer, sources = zeros(want.size), set[Download]()
        view = buffer.getbuffer()
        try:
            runs = [blocks[i : i + n] for i in range(0, len(blocks), n)]
            read_run = partial(self._read_run, version, view, want, fetched, sources)
            await _for_each(runs, read_run, 2 * self.objects.config.first_concurrency)
        finally:
            with contextlib.suppress(BufferError):  # of a canceled read, a thread may still copy
                view.release()
        for source in sources:
            if source.mismatch is not None:  # its other blocks may be those of a later body
                raise source.mismatch
        return buffer.getvalue()

    async def _read_run(
        self,
        version: Version,
        view: memoryview,
        want: Range,
        fetched: set[int],
        sources: set[Download],
        run: Iterable[int],
    ) -> None:
        """Copy the blocks of `run` into `view`, cached or fetched; add the downloads that they come from to `sources`."""
        engine, missing = self.objects.engine, sorted(run)
        while missing:
            taken = await self._take_cached(version, missing, view, want, sources)
            engine.hits += len(taken - fetched)
            missing = [index for index in missing if index not in taken]
            fetched |= set(missing)
            for index, download in (await self.downloads.get(version, missing)).items() if missing else ():
                start = max(want.start, index * version.block_size)
                stop = min(want.stop, (index + 1) * version.block_size)
                with contextlib.suppress(DownloadStopped):  # just stored, or to be fetched again
                    await download.wait_until(stop)
                    sources.add(download)
                    if download.take(start, view[start - want.start : stop - want.start]) == stop - start:
                        engine.cache.touch(version, index)
                        missing.remove(index)

    async def _take_cached(
        self, version: Version, indexes: list[int], view: memoryview, want: Range, sources: set[Download]
    ) -> set[int]:
        """Copy the blocks that are in memory or on disk into `view`; return their indexes."""
        cached = [index for index in indexes if self._has(version, index, want.stop)]

        def copy() -> set[int]:
            start, stop = want.start, want.stop
            return {index for index in cached if self._copy(version, index, view, start, stop, sources)}

        return copy() if len(cached) <= HITS_INLINE else await asyncio.to_thread(copy)

    async def _uncached(
        self,
        entry: Entry,
        start: int | None,
        stop: int | None,
        download: Download | None,
        *,
        is_pinned: bool,
    ) -> bytes:
        """Read an object without a fingerprint or a size, bypassing the cache.

        Unless `is_pinned`, the bytes may be of another version of the same size. Raises ObjectNotFound and IsAFolder.
        """
        info = entry.info
        if info is None:
            raise self.objects.not_found(entry)
        if info.kind == "directory":
            raise is_a_folder(self.objects.url(entry.path))
        want = None if info.size is None else clip(start, stop, info.size)
        if want is not None and download is not None:
            with contextlib.suppress(DownloadStopped):
                return await download.read(want.start, want.stop)
        if want is not None and want.size == 0:
            return b""
        async with self.objects.origin(info.path).read(info.path, want, info if is_pinned else None) as reply:
            if want is not None and reply.info.size != info.size:
                raise ObjectChanged(
                    f"{self.objects.url(info.path)}: its size changed while it was read; read it again"
                )
            data = b"".join([piece async for piece in reply.body])
        self.objects.engine.bytes_fetched += len(data)
        return data if want is not None else data[start:stop]

    async def _missing(self, entry: Entry) -> CachedFSError:
        """Return the error for opening an absent object: a second request tells whether it is a folder."""
        objects, path, info = self.objects, without_slash(entry.path), None
        if not (objects.config.offline or objects.origin(path).by_parent):  # else it was looked up, not read
            try:
                info = (await self.lookups.ask(path)).info
            except CachedFSError as error:
                logger.debug("not looked up: %s", error)  # keep the first answer: there is no such object
        is_folder = info is not None and info.kind == "directory"
        return is_a_folder(objects.url(entry.path)) if is_folder else objects.not_found(entry)


async def _for_each(items: Sequence[T], act: Callable[[T], Awaitable[None]], most: int) -> None:
    """Await `act` for all items, in up to `most` tasks; an error cancels the others, and is raised as it is."""
    todo = iter(items)

    async def work() -> None:
        for item in todo:
            await act(item)

    if min(most, len(items)) == 1:
        await work()
        return
    tasks = [asyncio.ensure_future(work()) for _ in range(min(most, len(items)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:  # also a cancellation: leave no task running unawaited
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
