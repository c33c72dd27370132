"""Send the requests for missing blocks, and pass their bytes to readers and to the store queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from cachedfs.common.blocks import covering
from cachedfs.common.clock import clock
from cachedfs.common.single_flight import Lookup
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.common.version import Version, version_of
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.objects import Entry, Objects
from cachedfs.core.path_errors import not_cached
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.errors import (
    CachedFSError,
    ChecksumMismatch,
    ObjectChanged,
    ObjectNotFound,
    OriginUnreachable,
)
from cachedfs.origins.base import Reply
from cachedfs.shared import SharedReply

_Answer = Callable[[Reply], object]
_Want = Range | Suffix
PATIENCE_S = 0.2  # how long a paused response body waits for its reader to go on


class Downloads:
    """The only code that opens bodies to be cached: each missing block is fetched once. Event loop thread only."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._per_request = max(1, objects.config.request_size // objects.config.block_size)  # blocks
        self._bounds = objects.config.bounds

    async def get(
        self, version: Version, indexes: Sequence[int], *, demand: int | None = None
    ) -> dict[int, Download]:
        """Return the downloads of blocks, and send requests for those that are missing; see `launch`.

        Wait while another process fetches the first block, but not for ever. So if the first block is missing from the
        result, it is on disk.
        """
        first, found, engine = indexes[0], self.launch(version, indexes, demand=demand), self.objects.engine
        while first not in found and not engine.cache.has(version, first):
            is_over = await engine.wait_for_other_process(version, first)
            missing = [index for index in indexes if index not in found]
            found |= self.launch(version, missing, demand=demand, overdue=not is_over)
        return found

    def launch(
        self, version: Version, indexes: Iterable[int], *, demand: int | None = None, overdue: bool = False
    ) -> dict[int, Download]:
        """Fetch the blocks that no request fetches yet; return the download of each block.

        Adjacent blocks share a request. With `demand`, reading pauses at that byte until a reader wants more. A block is
        missing from the result if another process fetches it, or if it has just been stored. `overdue` blocks are fetched
        in any case: the other process may be stopped (SIGSTOP, Ctrl-Z). Raises OriginUnavailable for an uncached block if
        `offline` is set and there is no shared cache.
        """
        engine, by_block = self.objects.engine, self.objects.engine.by_block
        found: dict[int, Download] = {}
        missing: list[int] = []
        for index in indexes:
            download = by_block.get((version.digest, index))
            if download is not None:
                if download.covers(index * version.block_size):
                    found[index] = download
            elif not self.objects.config.offline or engine.shared is not None:
                missing.append(index)
            elif not engine.cache.has(version, index):
                raise not_cached(self.objects.url(version.info.path))
        for run in self._locked(version, missing, overdue) if missing else ():
            found.update(dict.fromkeys(run, self._request(version, run, demand)))
        return found

    def _request(self, version: Version, run: range, demand: int | None) -> Download:
        """Send a request for adjacent blocks. Their fetch locks are held until they are stored, or it failed."""
        engine = self.objects.engine
        start, stop = run.start * version.block_size, min(run.stop * version.block_size, version.size)
        most = stop if demand is None else min(demand, stop)
        download = Download(demand=most, version=version, bytes_=Range(start, stop))
        self._register(download, version, run)
        engine.active_requests.add(download)
        engine.spawn(self._run(download, version.info.path, Range(start, stop)))
        return download

    def _locked(self, version: Version, missing: Sequence[int], overdue: bool) -> Iterator[range]:
        """Take the fetch locks of blocks; yield each run of blocks to request."""
        cache, most, at = self.objects.engine.cache, self._per_request, 0
        while at < len(missing):
            start, end = missing[at], at + 1
            while end < min(len(missing), at + most) and missing[end] == missing[end - 1] + 1:
                end += 1
            n = cache.locks.take(version.number + start, end - at)
            # Without the lock of an overdue block: at worst, each process that waits fetches it once.
            stop = start + (n or overdue)
            for index in range(start, stop):
                if cache.has(version, index):  # stored before the lock was taken
                    if n:
                        cache.locks.release(version.number + index)
                    if start < index:
                        yield range(start, index)
                    start = index + 1
            if start < stop:
                yield range(start, stop)
            at += n or 1  # another process has the block without a lock

    def launch_uncached(self, info: ObjectInfo, position: int) -> Download:
        """Request the bytes from `position` on of an object that cannot be cached, as it has no fingerprint.

        Only the open file that launched it reads from this download.
        """
        assert info.size is not None
        bytes_ = Range(position, min(info.size, position + self.objects.config.whole_request))
        download = Download(demand=bytes_.stop)
        download.begin(info, None, bytes_)
        self.objects.engine.active_requests.add(download)
        self.objects.engine.spawn(self._run(download, info.path, bytes_))
        return download

    async def fetch_unknown(
        self,
        path: str,
        want: _Want,
        lookup: Lookup,
        *,
        demand: int,
        then: Callable[[], object] | None,
    ) -> None:
        """Request `want` of an object whose metadata is unknown; answer `lookup` at the headers, which have it.

        The answer is the entry and the download, which is None for an object that does not exist. The request brings at
        least the bytes below `demand`. `then` is called once the entry is stored. Raises the error of a request without
        such headers.
        """
        objects, download = self.objects, Download(demand=demand)
        learn = partial(objects.learn, path, asked_at=clock.now(), counter=lookup.counter, then=then)
        await self._run(download, path, want, partial(self._answer, lookup, download, learn))
        if download.info is None and isinstance(download.error, ObjectNotFound):
            lookup.answer((learn(None), None))
        elif not lookup.is_answered:
            if isinstance(download.error, OriginUnreachable):
                objects.engine.mark_unreachable(objects.identity)
            raise download.error or DownloadStopped

    def _answer(
        self, lookup: Lookup, download: Download, learn: Callable[[ObjectInfo], Entry], reply: Reply
    ) -> None:
        """Answer a lookup with the metadata in the headers of a read, and with its download of complete blocks."""
        objects, engine, size = self.objects, self.objects.engine, self.objects.config.block_size
        version = version_of(objects.identity, reply.info, size)
        download.begin(reply.info, version, Range(reply.start, reply.stop))
        if version is not None:
            first = -(-reply.start // size)
            stop = reply.stop // size if reply.stop < version.size else -(-version.size // size)
            # Before others see the entry: they would fetch the same blocks. Those that another process locked come twice.
            engine.cache.locks.take(version.number + first, stop - first)
            whole = [index for index in range(first, stop) if (version.digest, index) not in engine.by_block]
            self._register(download, version, whole)
        entry = learn(reply.info)
        entry.version = version
        lookup.answer((entry, download))

    def launch_speculative(self, version: Version, wanted: Iterable[range], keep: deque[Download]) -> None:
        """Queue a speculative request for each range of blocks in `wanted`, in this order.

        `keep` is their owner: a download is appended to it when its request is sent. `cancel_speculative(keep)` ends
        them.
        """
        origin = partial(self.objects.origin, version.info.path)
        for blocks in wanted:
            send = partial(self.launch_missing, version, blocks, keep)
            self.objects.engine.speculation.submit(
                SpeculativeRequest(keep, len(blocks) * version.block_size, send, origin)
            )

    def cancel_speculative(self, keep: deque[Download]) -> None:
        """Cancel the queued requests of `keep`, and end the sent ones: see `Download.cancel`."""
        self.objects.engine.speculation.cancel(keep)
        while keep:
            download = keep.popleft()
            if not download.done and download.version is not None:
                download.cancel()

    def launch_missing(self, version: Version, blocks: range, keep: deque[Download]) -> list[Download]:
        """Fetch the blocks that are not cached yet; return their downloads, and append them to `keep`."""
        has, kept = self.objects.engine.cache.has, [each for each in keep if each.version == version]
        # Received blocks that could not be stored exist only in these downloads.
        missing = [
            index for index in blocks if not (has(version, index) or any(each.holds(index) for each in kept))
        ]
        sent = dict.fromkeys(self.launch(version, missing).values())
        # Downloads that another reader stopped end by themselves; `keep` may already hold some of the others.
        keep.extend(download for download in sent if not download.stopped and download not in kept)
        return list(sent)

    def _stop_paused(self, path: str) -> None:
        """End all paused downloads if as many are active as callers may wait for at the origin of `path`.

        A paused download keeps its slot, and a new request would have to wait for it.
        """
        engine = self.objects.engine
        n_active = sum(not download.is_speculative for download in engine.active_requests)
        if n_active >= self.objects.origin(path).concurrency:
            for download in engine.paused_requests:
                if not download.is_speculative:
                    download.stop_soon(download.filled)

    async def _run(self, download: Download, path: str, want: _Want, answer: _Answer | None = None) -> None:
        """Run one request to its end, and wake its waiters with the result or the error."""
        engine, error = self.objects.engine, None
        engine.active_requests.add(download)
        download.task = asyncio.current_task()
        try:
            if engine.paused_requests and not (download.is_speculative or self.objects.config.offline):
                self._stop_paused(path)
            if not download.stopped or download.demand > download.start:  # it may be stopped before it starts
                await self._receive(download, path, want, answer)
        except Exception as failure:  # of any origin: its readers raise it
            error = self._failed(download, path, failure)
        finally:
            if download.unstored:  # a body that ends early cannot be verified: its blocks are stored
                engine.store_queue.put(download.unstored, self._bounds)
                download.unstored = []
            engine.active_requests.discard(download)
            if download.version is not None and download.filled < download.stop:
                self._release_unreceived(download, download.version)
            download.finish(error)
            if download.is_speculative or engine.speculation.queued:
                engine.speculation.pump()

    async def _receive(self, download: Download, path: str, want: _Want, answer: _Answer | None) -> None:
        """Read `want` as far as readers want it; `answer` takes the headers of an unknown object."""
        engine, sent_at = self.objects.engine, time.monotonic()
        is_shared = engine.shared is not None and download.version is not None
        read = partial(self._read_shared, download) if is_shared else self.objects.origin(path).read
        async with read(path, want, download.info) as reply:
            began, download.is_shared = time.monotonic(), isinstance(reply, SharedReply)
            if answer is not None:
                answer(reply)
            elif (reply.start, reply.stop) != want:
                raise self._other_bytes(path, reply, download)
            async for data in reply.body:
                download.feed(data)
                engine.bytes_fetched += len(data)
                # With is_checked_at_end, blocks are kept back until the checksum of the whole body is verified.
                if download.unstored and not reply.is_checked_at_end:
                    engine.store_queue.put(download.unstored, self._bounds)
                    download.unstored = []
                is_enough = download.demand <= download.filled < download.stop
                if is_enough and not await self._wait_for_demand(download):
                    break
                if engine.store_queue.queued_bytes > engine.max_queued // 2:
                    await engine.wait_for_space(download)
        if download.is_speculative and answer is None and download.filled == download.stop:
            self._record_timing(download, path, sent_at, began)

    def _record_timing(self, download: Download, path: str, sent_at: float, began: float) -> None:
        """Record how fast the origin answered a speculative request: others may have been paused, or waited for a slot."""
        if not download.is_shared:
            size, took_s = download.stop - download.start, time.monotonic() - began
            origin = self.objects.origin(path)
            self.objects.engine.speculation.record_timing(
                origin, wait_s=began - sent_at, size=size, took_s=took_s
            )

    def _read_shared(
        self, download: Download, path: str, want: _Want | None, info: ObjectInfo | None
    ) -> AbstractAsyncContextManager[Reply]:
        """Read what is in the shared cache of one version, and the rest from the origin."""
        objects, shared, version = self.objects, self.objects.engine.shared, download.version
        assert shared is not None
        assert isinstance(want, Range)
        assert version is not None
        return shared.read(
            version,
            version.info,
            want,
            lambda rest: objects.origin(path).read(path, rest, info),
            is_complete=lambda: download.filled == download.stop,
            waits=objects.config.offline,
            bounds=self._bounds,
        )

    def _other_bytes(self, path: str, reply: Reply, download: Download) -> ObjectChanged:
        """Return the error for bytes that were not requested: readers would request the missing ones for ever."""
        return ObjectChanged(
            f"{self.objects.url(path)}: bytes {reply.start} to {reply.stop} were announced instead of "
            f"{download.start} to {download.stop}: the object was probably replaced while it was read; open it again"
        )

    def _failed(self, download: Download, path: str, failure: Exception) -> Exception:
        """Return the error of a failed request for its waiters."""
        if isinstance(failure, ChecksumMismatch):  # nothing of it is stored
            download.error = failure  # first: a reader that finds no bytes then looks for it
            download.release()
            for block in download.unstored:
                self.objects.engine.release_block(block.key.object, block.key.index)
            download.unstored = []
        if isinstance(failure, ObjectChanged | ChecksumMismatch) and download.info is not None:
            known = self.objects.known(download.info.path)
            if known and known.info and known.info.fingerprint == download.info.fingerprint:
                self.objects.expire(known.path)  # whoever opens it next looks it up
        if isinstance(failure, CachedFSError) or not isinstance(failure, OSError):
            return failure  # also a missing package, or a wrong option
        # With the URL, which the origin did not add.
        error = CachedFSError(f"{self.objects.url(path)}: {failure}")
        error.__cause__ = failure
        return error

    def _release_unreceived(self, download: Download, version: Version) -> None:
        """Release the fetch locks of the blocks that were not received."""
        engine, size = self.objects.engine, version.block_size
        for index in covering(Range(download.start, download.stop), size):
            stop = min((index + 1) * size, version.size)
            is_complete = download.start <= index * size and stop <= download.filled
            if not is_complete and engine.by_block.get((version.digest, index)) is download:
                engine.release_block(version, index)

    def _register(self, download: Download, version: Version, indexes: Sequence[int]) -> None:
        """Record that blocks are missing, before a reader may use them, and which request brings them."""
        cache, by_block = self.objects.engine.cache, self.objects.engine.by_block
        passes, download.blocks = (
            version.size > (cache.allowed or cache.likely_allowed(self._bounds)),
            indexes,
        )
        for index in indexes:
            cache.touch(version, index, passes)
            by_block[version.digest, index] = download

    async def _wait_for_demand(self, download: Download) -> bool:
        """Pause the body until a reader wants more; return False if it should end here."""
        paused = self.objects.engine.paused_requests
        paused.add(download)
        try:
            return await download.wait_for_demand(PATIENCE_S)
        finally:
            paused.discard(download)
