"""Fetch the objects of a prefetch plan: look each up, request its missing blocks, and wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import Range
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.objects import Entry
from cachedfs.core.reader import TRIES, Reader
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.core.version import Version
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ChecksumMismatch,
    ObjectChanged,
    OriginUnavailable,
    OriginUnreachable,
    QuotaExceeded,
)
from cachedfs.prefetch import failure_limit
from cachedfs.prefetch.belady import Belady
from cachedfs.prefetch.failure_limit import FailureLimit
from cachedfs.prefetch.progress import PrefetchObject, ProgressCounts

__all__ = ["ObjectFetcher", "cannot_store"]

logger = logging.getLogger("cachedfs.prefetch")

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
Sent = Iterable[Download] | asyncio.Task[Iterable[Download]]


class ObjectFetcher:
    """Fetches the objects of a plan by speculative requests. Event loop thread only.

    `spawn` starts tasks that end with the plan. `changed` is called when the plan has to look again. `error` is the error
    that ends the plan.
    """

    uses: Belady  # set when the plan begins
    ask: Callable[
        [PrefetchObject], object
    ]  # called with an object whose version became known: asks for its blocks
    enter: Callable[[str], object]  # called with the path of an object that is a folder

    def __init__(
        self, reader: Reader, counts: ProgressCounts, spawn: Spawn, changed: Callable[[], object]
    ) -> None:
        self._reader, self._objects, self._engine = reader, reader.objects, reader.objects.engine
        self.counts, self.spawn, self._changed = counts, spawn, changed
        self.failures = FailureLimit()
        self.error: Exception | None = None
        self.unknown: dict[
            str, list[PrefetchObject]
        ] = {}  # objects to come whose version is not known, by path
        self.open: set[PrefetchObject] = set()  # objects with tasks
        self.queued: list[float] = []  # positions of requests in the speculative queue
        # The plan's requests until their blocks are stored, oldest first, each with its object.
        self.active: dict[Download, PrefetchObject] = {}

    @property
    def is_idle(self) -> bool:
        """True when nothing is being fetched."""
        return not (self.open or self.active)

    @property
    def n_coming(self) -> int:
        """Bytes received by active requests. From any thread."""
        return sum(download.filled - download.start for download in list(self.active))

    def cancel(self) -> None:
        """End the requests that no reader waits for at their next block."""
        for download in self.active:
            if not download.done and download.version is not None:
                download.cancel()

    def close(self) -> None:
        self.counts.fetched += self.n_coming
        self.active, self.open = {}, set()

    # One object.

    def begin(self, obj: PrefetchObject, version: Version | None) -> None:
        """Set the current version of an object, and its blocks to fetch. None: it is not known."""
        if obj.version != version:
            self.uses.remove(map(obj.use, obj.wanted))
            obj.version, obj.wanted, obj.left = None, range(0), range(0)
            if version is not None:
                obj.begin(version)
                self.add(obj)
        if version is not None and obj.listed_size != obj.wanted_size:
            self.counts.sized(obj)

    def add(self, obj: PrefetchObject) -> None:
        """Add the uses of an object, after those of earlier objects that waited for its version; or let it wait."""
        waiting = self.unknown.pop(obj.path, [])
        if obj.version is None:
            self.unknown[obj.path] = [*waiting, obj]
            return
        for each in dict.fromkeys([*waiting, obj]):
            if each.version is None:
                each.begin(obj.version)
            self.uses.add(map(each.use, each.wanted))

    def end(self, obj: PrefetchObject) -> None:
        """Count an object as finished once nothing of it is left."""
        if not (obj.is_over or obj.left or obj.n_tasks) and obj.version is not None:
            obj.is_over = True
            self.counts.n_done += 1

    def look_up(self, obj: PrefetchObject, want: Range) -> None:
        """Look up an object by reading `want` of it, and fetch it."""
        self.uses.ahead += want.size
        self._start(obj, lambda: self._look_up(obj, want), want.size)

    def fetch(self, obj: PrefetchObject, run: range) -> None:
        """Have adjacent blocks of an object cached."""
        version = obj.begun
        self._start(obj, lambda: self._bring(obj, version, run))

    def _start(self, obj: PrefetchObject, work: Callable[[], Awaitable[object]], reserved: int = 0) -> None:
        obj.n_tasks += 1
        self.open.add(obj)
        self.spawn(self._attempt(obj, obj.version, work, reserved))

    async def _attempt(
        self,
        obj: PrefetchObject,
        version: Version | None,
        work: Callable[[], Awaitable[object]],
        reserved: int,
    ) -> None:
        """Do the work for a version of an object, again while its origin is unreachable, or count a failure."""
        error: CachedFSError | None = None
        while True:
            try:
                await work()
            except OriginUnreachable as unreachable:
                await self.wait_for_origin(unreachable)
                continue
            except CachedFSError as failure:
                error = failure
            except Exception as failure:  # such as a missing package: it is the same for all objects
                self._end_with(failure)
            break
        self.uses.ahead -= reserved
        obj.n_tasks -= 1
        if error is not None and not obj.is_over and obj.version == version:
            self._failed(obj, error)
        self.end(obj)
        if not obj.n_tasks:
            self.open.discard(obj)

    def _failed(self, obj: PrefetchObject, error: CachedFSError) -> None:
        """Look an object up again if it was replaced, or count it as failed."""
        self.begin(obj, None)
        obj.n_tries += 1
        if isinstance(error, ObjectChanged | ChecksumMismatch) and obj.n_tries < TRIES:
            self._objects.expire(obj.path)
            self.ask(obj)
            return
        obj.is_over = obj.is_failed = True
        self.count_failure(obj.path, error, size=obj.listed_size)

    # Look an object up.

    async def _look_up(self, obj: PrefetchObject, want: Range) -> None:
        entry = self._objects.fresh(obj.path)
        if entry is not None:
            self._found(obj, entry)
        elif self._objects.config.offline:
            raise self._objects.offline(obj.path)
        else:
            send = partial(self._read_first, obj, want)
            await (await self._queue(obj, obj.position, want.size, lambda: self.spawn(send())))

    async def _read_first(self, obj: PrefetchObject, want: Range) -> list[Download]:
        """Read the beginning of an object; return the request, if any, once its other blocks were asked for."""
        demand = want.start + self._objects.config.block_size  # limits what is read if this task is cancelled
        entry, download = await self._reader.lookups.resolve(obj.path, want, demand=demand)
        found = [] if download is None else [download]
        self._count_sent(obj, found)
        try:
            self._found(obj, entry)
        finally:
            if download is not None and download.is_speculative and download.version is None:
                download.stop_soon(download.start)
        return found

    def _found(self, obj: PrefetchObject, entry: Entry) -> None:
        """Ask for the blocks of an object, or for the objects below it if it is a folder."""
        objects = self._objects
        if entry.info is None and (obj.bounds is not None or entry.by_listing or objects.config.offline):
            raise objects.not_found(obj.path, entry)
        if entry.info is None or entry.info.kind == "directory":
            if obj.bounds is not None:
                raise objects.is_a_folder(obj.path)
            obj.is_over = True
            self.enter(obj.path)
        elif (version := objects.version(entry)) is not None:
            self.begin(obj, version)
            self.ask(obj)
        else:
            raise objects.uncached(obj.path, entry.info)

    # Have blocks cached.

    def download(self, version: Version, index: int) -> Download | None:
        """Return the request that brings a block; None if there is none."""
        download = self._engine.by_block.get((version.digest, index))
        is_covered = download is not None and download.covers(index * version.block_size)
        return download if is_covered else None

    def is_coming(self, version: Version, index: int) -> bool:
        """Return whether a block is cached, or a request brings it. From any thread."""
        return bool(self.download(version, index)) or self._engine.cache.has(version, index)

    async def _bring(self, obj: PrefetchObject, version: Version, run: range) -> None:
        """Wait until blocks have arrived; send requests for those that nothing brings."""
        while run and obj.version == version:
            n, download = 0, self.download(version, run[0])
            if download is not None:
                with contextlib.suppress(DownloadStopped):
                    await download.wait_until(min(obj.bytes_of(run[-1]).stop, download.stop))
                n = sum(obj.bytes_of(index).stop <= download.filled for index in run)
            elif self._engine.cache.has(version, run[0]):
                n = 1
            else:
                await self._request(obj, version, run)
            if n and obj.version == version:
                self._arrived(obj, run[:n])
            run = run[n:]

    async def _request(self, obj: PrefetchObject, version: Version, run: range) -> None:
        """Request blocks in their turn; wait for the first one if another process fetches it."""
        if self._objects.config.offline:
            raise self._objects.offline(obj.path)
        slot = self._objects.caller_key, obj.path
        while (lookup := self._engine.lookups.task_of(slot)) is not None:
            await asyncio.wait([lookup])  # another caller's lookup: it may bring the first bytes
        downloads, use = self._reader.downloads, obj.use(run[0])

        def send() -> list[Download]:
            before = set(self._engine.active_requests)
            found = dict.fromkeys(downloads.launch(version, run).values())
            return self._count_sent(obj, [download for download in found if download not in before])

        await self._queue(obj, use.position, obj.bytes_of(run[-1]).stop - obj.bytes_of(run[0]).start, send)
        if not self.is_coming(version, run[0]):
            self._count_sent(obj, (await downloads.get(version, run[:1])).values())

    def _count_sent(self, obj: PrefetchObject, sent: Iterable[Download]) -> list[Download]:
        """Count the requests that are the plan's; return them."""
        ours = [each for each in sent if each.is_speculative and each.version and each not in self.active]
        self.counts.n_requests += len(ours)
        self.active.update(dict.fromkeys(ours, obj))
        return ours

    async def _queue(self, obj: PrefetchObject, position: float, size: int, send: Callable[[], Sent]) -> Any:
        """Wait until a request of `size` bytes may be sent; return what `send` returns, which sends it."""
        origin = self._objects.origin(obj.path)
        while True:
            if self.failures.pause_s(now := time.monotonic()):
                await self.failures.pause(now)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.queued.append(position)
            start = partial(self._send, future, position, send)
            request = SpeculativeRequest(
                self, size, start, lambda: origin, is_declared=True, position=position
            )
            self._engine.speculation.submit(request)
            if (sent := await future) is not None:
                return sent

    def _send(self, future: asyncio.Future[Any], position: float, send: Callable[[], Sent]) -> Sent:
        """Send a request, unless the origin has become unreachable since it was queued."""
        self.queued.remove(position)
        self._changed()
        sent: Sent = ()
        try:
            if is_sent := not (future.done() or self.failures.pause_s(time.monotonic())):
                sent = send()
        except CachedFSError as error:  # the process is shutting down
            future.set_exception(error)
        else:
            if not future.done():
                future.set_result(sent if is_sent else None)
        return sent

    def _arrived(self, obj: PrefetchObject, run: range) -> None:
        for index in run:
            use = obj.use(index)
            self.counts.arrived += use.size
            self.uses.arrived(use)
        self.failures.came()
        self._changed()

    def check_stored(self) -> None:
        """Remove requests whose blocks are stored, or failed to be. Raises CacheError when nothing can be stored."""
        for download, obj in [each for each in self.active.items() if each[0].is_finished]:
            del self.active[download]
            self.counts.fetched += download.filled - download.start
            if download.is_storable or obj.is_failed:
                continue
            if self._engine.cache.cannot_store is not None:
                raise cannot_store(self._engine.cache)
            obj.is_failed = True
            error = CacheError(
                f"{self._objects.url(obj.path)}: some of it came and could not be stored, as the cache could store "
                "nothing for a while; prefetch it again"
            )
            self.counts.failed_late(obj.path, error)

    # Failures.

    def count_failure(self, path: str, error: CachedFSError, *, size: int | None = None) -> None:
        """Count a failure; end the plan after too many consecutive ones that are not specific to one object."""
        self.counts.failed(path, error, size)
        is_general = isinstance(error, OriginUnavailable | QuotaExceeded)
        is_general = (
            is_general and not isinstance(error, ChecksumMismatch) and not self._objects.config.offline
        )
        if is_general and self.failures.failed():
            self._end_with(error)

    async def wait_for_origin(self, error: OriginUnreachable) -> None:
        """Pause until the origin may be tried again; end the plan when it was unreachable for too long."""
        now, most_s = time.monotonic(), failure_limit.AWAY_S
        if not self.failures.is_unreachable:
            logger.warning("%s; the prefetch continues when it answers, or ends after %d s", error, most_s)
        if self.failures.away(now):
            self._end_with(error)
        self._changed()
        await self.failures.pause(now)

    def _end_with(self, error: Exception) -> None:
        self.error = error
        self._changed()


def cannot_store(cache: BlockStore) -> CacheError:
    """Return the error that ends a plan when nothing can be stored."""
    why = cache.cannot_store or "the cache may hold nothing now: raise cache_size, or free space"
    return CacheError(f"the prefetch stopped, because blocks cannot be stored: {why}")
