"""Requests for missing blocks: send them, and pass the bytes to readers and to the cache writer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from cachedfs.common.blocks import block_range, covering, merge
from cachedfs.common.clock import clock
from cachedfs.common.types import BlockKey, ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectNotFound
from cachedfs.fetch.cache_writer import FetchedBlock
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.origins.base import Reply
from cachedfs.origins.request_slots import is_speculative

__all__ = ["Fetcher"]

PATIENCE_S = 0.2  # how long a paused response body waits for its reader to go on


class Fetcher:
    """Sends requests and reads their bodies into in-flight requests.

    Complete blocks go to the cache writer. Use it on the event loop thread only.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    async def get(
        self, entry: MetadataEntry, key: ObjectKey, indexes: Sequence[int], *, demand: int | None = None
    ) -> dict[int, InflightRequest]:
        """Return the in-flight requests of blocks, and send those that are missing; see `launch`.

        Wait while another process fetches the first block, but not for ever. So if the first block is missing from the
        result, it is on disk.
        """
        first, inflight_requests = indexes[0], self.launch(entry, key, indexes, demand=demand)
        while first not in inflight_requests and not self.source.runtime.cache.has(key, first):
            is_over = await self.source.runtime.wait_for_other_process(key, [first])
            missing = [index for index in indexes if index not in inflight_requests]
            inflight_requests |= self.launch(
                entry, key, missing, demand=demand, overdue=() if is_over else missing
            )
        return inflight_requests

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

        Adjacent blocks share a request. With `demand`, reading pauses at that byte until a reader wants more; without
        it, the whole body is read. `overdue` blocks are fetched even if another process holds their fetch lock, because
        that process may be stopped (SIGSTOP, Ctrl-Z). Raises OriginUnavailable for an uncached block if `offline` is
        set.

        A block is missing from the result if another process fetches it, or if it has just been stored. Each fetch lock
        is held until the block is stored or given up.
        """
        runtime, info = self.source.runtime, entry.info
        assert info is not None
        assert info.size is not None
        inflight_requests: dict[int, InflightRequest] = {}
        not_requested = []
        for index in indexes:
            inflight = runtime.inflight_requests.get(key.name(index))
            if inflight is not None and inflight.covers(index * key.block_size):
                inflight_requests[index] = inflight
            elif self.source.config.offline and not runtime.cache.has(key, index):
                raise self.source.offline(entry.path)
            elif inflight is None:
                not_requested.append(index)
        to_fetch = [
            index for index in not_requested if self._take_fetch_lock(key, index, is_overdue=index in overdue)
        ]
        for bytes_ in merge(
            to_fetch, key.block_size, size=info.size, request_size=self.source.config.request_size
        ):
            inflight = self._launch_one(entry, key, info, bytes_, demand=demand)
            inflight_requests.update(dict.fromkeys(covering(bytes_, key.block_size), inflight))
        return inflight_requests

    def _take_fetch_lock(self, key: ObjectKey, index: int, *, is_overdue: bool) -> bool:
        """Return whether this process should fetch the block, and take its fetch lock if it is free.

        False if another process fetches it, or if it is cached. An overdue block is fetched without the lock, at worst
        once by each process that waits for it.
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
            self.run_request(inflight, partial(self._read_version, inflight, entry.path, info, bytes_))
        )
        return inflight

    def launch_speculative(
        self,
        entry: MetadataEntry,
        key: ObjectKey,
        wanted: Iterable[range],
        keep: deque[InflightRequest],
    ) -> None:
        """Queue a speculative request for each range of blocks in `wanted`, in this order.

        `keep` is their owner: a request is appended to it when it is sent. `forget_speculative(keep)` ends them.
        """
        origin = partial(self.source.origin, entry.path)
        for blocks in wanted:
            send = partial(self._send_speculative, entry, key, blocks, keep)
            self.source.runtime.fetch_queue.submit(
                SpeculativeRequest(keep, len(blocks) * key.block_size, send, origin)
            )

    def forget_speculative(self, keep: deque[InflightRequest]) -> None:
        """Drop the queued requests of `keep`, and end the sent ones after their current block.

        Cancel those that have received no byte and that no caller has waited for, so that they are not retried either.
        """
        self.source.runtime.fetch_queue.withdraw(keep)
        while keep:
            inflight = keep.popleft()
            if inflight.done or inflight.key is None:
                continue
            if inflight.is_speculative and not inflight.is_wanted:
                inflight.give_up()
            else:
                # A caller waits for it or may soon: do not cancel it. If it needs more bytes, want() continues it.
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
        """Request the bytes from `position` on of an object that cannot be cached, as it has no fingerprint.

        The request is not in `runtime.inflight_requests`, so only the open file that launched it reads from it.
        """
        info = entry.info
        assert info is not None
        assert info.size is not None
        bytes_ = Range(position, min(info.size, position + self.source.config.whole_request))
        return self._launch_one(entry, None, info, bytes_)

    def _stop_paused_requests(self, path: str) -> None:
        """End all paused requests if as many requests are active as callers may wait for at the origin of `path`.

        A paused request keeps its slot, and a new request would have to wait for it.
        """
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
            if inflight.info is not None and isinstance(failure, ObjectChanged | ChecksumMismatch):
                self.source.metadata.expire_version(inflight.info)  # whoever opens it next looks it up
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

    async def _read_version(
        self, inflight: InflightRequest, path: str, info: ObjectInfo, bytes_: Range
    ) -> None:
        """Read `bytes_` of the object version `info`; raise ObjectChanged if the origin announces other bytes."""
        if inflight.stopped and inflight.demand <= inflight.start:
            return  # stopped before it started
        origin, sent_at = self.source.origin(path), time.monotonic()
        async with origin.read(path, bytes_, info) as reply:
            started_at = time.monotonic()
            if (reply.start, reply.stop) != (bytes_.start, bytes_.stop):
                # Accepting other bytes would make readers wait for the missing ones and request them for ever.
                raise ObjectChanged(
                    f"{self.source.url(path)}: bytes {reply.start} to {reply.stop} were announced instead of "
                    f"{bytes_.start} to {bytes_.stop}: the object was probably replaced while it was read; "
                    "open it again"
                )
            await self._read_body(inflight, reply)
        # Only speculative requests are timed: others may have been paused, or have waited for a slot.
        if inflight.is_speculative and inflight.filled == inflight.stop:
            took_s, size = time.monotonic() - started_at, bytes_.size
            self.source.runtime.fetch_queue.record_timing(
                origin, wait_s=started_at - sent_at, size=size, took_s=took_s
            )

    async def fetch_unknown(
        self, inflight: InflightRequest, path: str, want: Range | Suffix, learned: list[MetadataEntry]
    ) -> None:
        """Read `want` of an object whose metadata is unknown, and store the metadata from the response headers.

        Appends the new entry to `learned`, or an entry for its absence before it raises ObjectNotFound.
        """
        now, mark = clock.now(), self.source.metadata.mark(path)
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
                await self._read_body(inflight, reply)
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

    async def _read_body(self, inflight: InflightRequest, reply: Reply) -> None:
        """Read the body as far as readers want it, and pass each complete block to the cache writer."""
        runtime, key, info = self.source.runtime, inflight.key, inflight.info
        assert info is not None
        size = key.block_size if key is not None else self.source.config.block_size
        index = counted = -(-inflight.start // size)
        unstored: list[FetchedBlock] = []  # complete blocks not yet passed to the cache writer
        try:
            async for data in reply:
                while key is not None and counted * size < inflight.filled + len(data):
                    # Record the miss before feed() lets a reader use the block. One block at a time: each record may
                    # have to be read from disk, and many at once would delay the first byte.
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
                        unstored.append(block)
                    index += 1
                # With is_checked_at_end, blocks are kept back until the checksum of the whole body is verified.
                # A body that ends early cannot be verified: its blocks are stored.
                if not reply.is_checked_at_end:
                    self._store(unstored)
                if not await inflight.wait_for_demand(PATIENCE_S):
                    break
                await runtime.wait_for_space(inflight)
        except ChecksumMismatch as error:
            inflight.error = error  # first: a reader that finds no bytes then looks for it
            inflight.release()
            for block in unstored:
                runtime.give_up(block.key.name, block.key.hash64)
            unstored.clear()
            raise
        finally:
            self._store(unstored)

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
