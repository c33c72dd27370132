"""Requests for missing blocks: send them, and pass the bytes to readers and to the cache writer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable
from functools import partial
from typing import Any

from cachedfs.common.blocks import block_range, covering, merge
from cachedfs.common.types import BlockKey, ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectNotFound
from cachedfs.fetch.cache_writer import FetchedBlock
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.origins.base import Reply
from cachedfs.origins.request_slots import is_speculative

__all__ = ["OVERDUE_S", "Fetcher"]

OVERDUE_S = 30.0  # longest wait for another process's fetch; only a stopped process takes longer
PATIENCE_S = 0.2  # how long a paused response body waits for its reader to go on


class Fetcher:
    """Sends requests and reads their bodies into in-flight requests.

    Complete blocks go to the cache writer. Use it on the event loop thread only.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def launch(
        self,
        entry: MetadataEntry,
        key: ObjectKey,
        indexes: Iterable[int],
        *,
        demand: int | None = None,
        overdue: Container[int] = (),
    ) -> dict[int, InflightRequest]:
        """Fetch the blocks that no request fetches yet; return the in-flight request of each block.

        Adjacent blocks share a request. Bodies are read up to the byte `demand` until a reader wants more, or to their
        end if it is None. `overdue` blocks are fetched without their fetch lock: a process stopped by SIGSTOP or
        Ctrl-Z keeps its locks.

        A block is missing from the result if another process fetches it, or if it has just been stored. Each fetch lock
        is held until the block is stored or given up.
        """
        runtime, info = self.source.runtime, entry.info
        assert info is not None
        assert info.size is not None
        inflight_requests: dict[int, InflightRequest] = {}
        free = []
        for index in indexes:
            inflight = runtime.inflight_requests.get(key.name(index))
            if inflight is not None and inflight.covers(index * key.block_size):
                inflight_requests[index] = inflight
            elif self.source.config.offline and not runtime.cache.has(key, index):
                raise self.source.offline(entry.path)
            elif inflight is None:
                free.append(index)
        locked = [index for index in free if self._take_fetch_lock(key, index, is_overdue=index in overdue)]
        for bytes_ in merge(
            locked, key.block_size, size=info.size, request_size=self.source.config.request_size
        ):
            inflight = self._launch_one(entry, key, info, bytes_, demand=demand)
            inflight_requests.update(dict.fromkeys(covering(bytes_, key.block_size), inflight))
        return inflight_requests

    def _take_fetch_lock(self, key: ObjectKey, index: int, *, is_overdue: bool) -> bool:
        """Take the fetch lock of a block.

        Return False if another process fetches the block or it is cached already. An overdue block is fetched without
        the lock. At worst it is fetched twice.
        """
        cache = self.source.runtime.cache
        if not cache.take_lock(key.hash64(index)) and not is_overdue:
            return False
        if cache.has(key, index):  # stored before the lock was taken
            cache.release_lock(key.hash64(index))
            return False
        return True

    def _launch_one(
        self,
        entry: MetadataEntry,
        key: ObjectKey | None,
        info: ObjectInfo,
        bytes_: Range,
        *,
        demand: int | None = None,
    ) -> InflightRequest:
        inflight = InflightRequest(demand=bytes_.stop if demand is None else min(demand, bytes_.stop))
        inflight.begin(info, key, bytes_)
        if key is not None:
            for index in covering(bytes_, key.block_size):
                self.source.runtime.inflight_requests[key.name(index)] = inflight
        self._stop_paused_requests(entry.path)
        self.source.runtime.active_requests.add(inflight)
        self.source.runtime.spawn(
            self.run_request(inflight, partial(self._pinned, inflight, entry.path, info, bytes_))
        )
        return inflight

    def launch_speculative(
        self,
        entry: MetadataEntry,
        key: ObjectKey,
        wanted: Iterable[range],
        keep: deque[InflightRequest],
    ) -> None:
        """Queue speculative requests for blocks that a reader will probably read next.

        The requests are added to `keep`.
        """
        origin = partial(self.source.origin, entry.path)
        for blocks in wanted:
            send = partial(self._send_speculative, entry, key, blocks, keep)
            self.source.runtime.fetch_queue.submit(
                SpeculativeRequest(keep, len(blocks) * key.block_size, send, origin)
            )

    def forget_speculative(self, keep: deque[InflightRequest]) -> None:
        """Drop the queued requests of `keep` and stop its sent ones at the end of their current block.

        A request without any bytes yet ends at once, so that a busy service is not retried for no reader.
        """
        self.source.runtime.fetch_queue.withdraw(keep)
        while keep:
            inflight = keep.popleft()
            if inflight.done or inflight.key is None:
                continue
            if inflight.is_speculative and not inflight.is_wanted:
                inflight.give_up()
            else:  # belongs to another reader, which may be about to wait for it
                inflight.stop_at_block()

    def _send_speculative(
        self,
        entry: MetadataEntry,
        key: ObjectKey,
        blocks: range,
        keep: deque[InflightRequest],
    ) -> list[InflightRequest]:
        """Fetch the blocks that are not cached yet; return their in-flight requests."""
        runtime = self.source.runtime
        kept = [*keep]  # a copy: the reader's thread removes items meanwhile
        missing = [
            index
            for index in blocks
            # Received blocks that could not be stored exist only in these requests.
            if not (runtime.cache.has(key, index) or any(inflight.holds(index) for inflight in kept))
        ]
        inflight_requests = dict.fromkeys(self.launch(entry, key, missing).values())
        # Requests that another reader stopped end by themselves; `keep` may already hold some of the others.
        keep.extend(
            inflight for inflight in inflight_requests if not inflight.stopped and inflight not in kept
        )
        return list(inflight_requests)

    def launch_uncached(self, entry: MetadataEntry, position: int) -> InflightRequest:
        """Send a request from `position` on for an object without a fingerprint.

        Only one open file uses it.
        """
        info = entry.info
        assert info is not None
        assert info.size is not None
        bytes_ = Range(position, min(info.size, position + self.source.config.whole_request))
        return self._launch_one(entry, None, info, bytes_)

    def _stop_paused_requests(self, path: str) -> None:
        """Stop paused requests if a new request would have to wait for their slots."""
        if is_speculative():
            return  # speculative requests have slots of their own
        inflight_requests = [
            inflight for inflight in self.source.runtime.active_requests if not inflight.is_speculative
        ]
        if len(inflight_requests) >= self.source.origin(path).concurrency:
            for inflight in inflight_requests:
                if inflight.paused:
                    inflight.stop_soon(inflight.filled)

    async def run_request(
        self, inflight: InflightRequest, request: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run one request to its end and wake its waiters with the result or the error.

        `request` creates the coroutine. A coroutine that is created and never started would cause a warning at exit.
        """
        self.source.runtime.active_requests.add(inflight)
        inflight.task = asyncio.current_task()
        error: Exception | None = None
        try:
            await request()
        except CachedFSError as failure:
            error = failure
        except OSError as failure:  # not translated by the origin: wrap it to add the URL
            error = CachedFSError(
                f"{self.source.url(inflight.info.path if inflight.info else '')}: {failure}"
            )
            error.__cause__ = failure
        except Exception as failure:  # e.g. a missing package or a rejected option: the waiters raise it
            error = failure
        finally:
            self.source.runtime.active_requests.discard(inflight)
            self._release_unreceived(inflight)
            inflight.finish(error)
            self.source.runtime.fetch_queue.pump()

    def _release_unreceived(self, inflight: InflightRequest) -> None:
        """Release the fetch locks of the blocks that were not received."""
        if inflight.key is None or inflight.info is None or not inflight.info.size:
            return
        size = inflight.key.block_size
        for index in covering(Range(inflight.start, inflight.stop), size):
            bytes_ = block_range(index, size, inflight.info.size)
            is_complete = inflight.start <= bytes_.start and bytes_.stop <= inflight.filled
            if (
                not is_complete
                and self.source.runtime.inflight_requests.get(inflight.key.name(index)) is inflight
            ):
                self.source.runtime.give_up(inflight.key.name(index), inflight.key.hash64(index))

    async def _pinned(self, inflight: InflightRequest, path: str, info: ObjectInfo, bytes_: Range) -> None:
        if inflight.stopped and inflight.demand <= inflight.start:
            return  # stopped before it started
        origin, sent_at = self.source.origin(path), time.monotonic()
        async with origin.read(path, bytes_, info) as reply:
            started_at = time.monotonic()
            if (reply.start, reply.stop) != (bytes_.start, bytes_.stop):
                # Accepting other bytes would make readers wait for the missing ones and request them for ever.
                raise ObjectChanged(
                    f"{self.source.url(path)}: bytes {reply.start} to {reply.stop} were received instead of {bytes_.start} to "
                    f"{bytes_.stop}: it was replaced while it was read; open it again"
                )
            await self._pump(inflight, reply)
        # Only speculative requests are timed: others may have been paused, or have waited for a slot.
        if inflight.is_speculative and inflight.filled == inflight.stop:
            took_s, size = time.monotonic() - started_at, bytes_.size
            self.source.runtime.fetch_queue.record_timing(
                origin, wait_s=started_at - sent_at, size=size, took_s=took_s
            )

    async def fetch_unknown(
        self, inflight: InflightRequest, path: str, want: Range | Suffix, learned: list[MetadataEntry]
    ) -> None:
        now, mark = time.time(), self.source.metadata.mark(path)
        self._stop_paused_requests(path)
        try:
            async with self.source.origin(path).read(path, want, None) as reply:

                def announce(entry: MetadataEntry) -> None:
                    # Take the fetch locks before others can see the entry: they would fetch the same blocks.
                    learned.append(entry)
                    key = self.source.key(entry)
                    inflight.begin(reply.info, key, Range(reply.start, reply.stop))
                    if key is not None:
                        self._register(inflight, key)

                self.source.metadata.store(
                    path, reply.info, checked_at=now, mark=mark, is_read=True, before_publish=announce
                )
                await self._pump(inflight, reply)
        except ObjectNotFound:
            if not learned:
                learned.append(self.source.metadata.store(path, None, checked_at=now, mark=mark))
            raise

    def _register(self, inflight: InflightRequest, key: ObjectKey) -> None:
        """Register the complete blocks that a request for an unknown object turned out to cover."""
        runtime = self.source.runtime
        for index in covering(Range(inflight.start, inflight.stop), key.block_size):
            if index * key.block_size >= inflight.start and key.name(index) not in runtime.inflight_requests:
                # If another process holds the lock, this block is fetched twice.
                runtime.cache.take_lock(key.hash64(index))
                runtime.inflight_requests[key.name(index)] = inflight

    async def _pump(self, inflight: InflightRequest, reply: Reply) -> None:
        """Read the body as far as readers want it, and pass each complete block to the cache writer."""
        runtime, key, info = self.source.runtime, inflight.key, inflight.info
        assert info is not None
        size = key.block_size if key is not None else self.source.config.block_size
        index = counted = -(-inflight.start // size)
        unchecked: list[FetchedBlock] = []  # not stored before the checksum of the whole body is checked
        try:
            async for data in reply:
                while key is not None and counted * size < inflight.filled + len(data):
                    # Before a reader can use the block. One block at a time: touching new pages of a mapped file takes
                    # time, and the first byte would wait for it.
                    if runtime.inflight_requests.get(key.name(counted)) is inflight:
                        runtime.cache.missed(key, counted, self.source.config.bounds, of=info.size)
                    counted += 1
                inflight.feed(data)
                runtime.bytes_fetched += len(data)
                while (
                    key is not None
                    and (bytes_ := _complete_block(index, size, info.size, inflight.filled)) is not None
                ):
                    if runtime.inflight_requests.get(key.name(index)) is inflight:
                        pieces, bounds = inflight.views(bytes_), self.source.config.bounds
                        block = FetchedBlock(BlockKey(key, index), pieces, bytes_.size, inflight, bounds)
                        unchecked.append(block)
                    index += 1
                if not reply.is_checked_at_end:
                    self._store(unchecked)
                if not await inflight.wait_for_demand(PATIENCE_S):
                    break
                await runtime.wait_for_space(inflight)
        except ChecksumMismatch as error:
            inflight.error = error  # first: a reader that finds no bytes then looks for it
            inflight.release()
            for block in unchecked:
                runtime.give_up(block.key.name, block.key.hash64)
            unchecked.clear()
            raise
        finally:
            self._store(unchecked)

    def _store(self, blocks: list[FetchedBlock]) -> None:
        """Pass blocks to the cache writer, and clear the list."""
        for block in blocks:
            self.source.runtime.block_received(block)
        blocks.clear()


def _complete_block(index: int, block_size: int, size: int | None, filled: int) -> Range | None:
    """Return the byte range of block `index` if it ends at or below `filled`, else None."""
    if size is None or index * block_size >= size:
        return None
    bytes_ = block_range(index, block_size, size)
    return bytes_ if bytes_.stop <= filled else None
