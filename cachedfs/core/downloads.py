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
from cachedfs.core.download import Download
from cachedfs.core.metadata_cache import Entry
from cachedfs.core.source import Source
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.core.store_queue import FetchedBlock
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectNotFound
from cachedfs.origins.base import Reply
from cachedfs.origins.request_slots import is_speculative

__all__ = ["Downloads"]

PATIENCE_S = 0.2  # how long a paused response body waits for its reader to go on


class Downloads:
    """Sends requests and reads their bodies into in-flight requests.

    Complete blocks go to the cache writer. Use it on the event loop thread only.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    async def get(
        self, entry: Entry, key: ObjectKey, indexes: Sequence[int], *, demand: int | None = None
    ) -> dict[int, Download]:
        """Return the in-flight requests of blocks, and send those that are missing; see `launch`.

        Wait while another process fetches the first block, but not for ever. So if the first block is missing from the
        result, it is on disk.
        """
        first, by_block = indexes[0], self.launch(entry, key, indexes, demand=demand)
        while first not in by_block and not self.source.engine.cache.has(key, first):
            is_over = await self.source.engine.wait_for_other_process(key, [first])
            missing = [index for index in indexes if index not in by_block]
            by_block |= self.launch(entry, key, missing, demand=demand, overdue=() if is_over else missing)
        return by_block

    def launch(
        self,
        entry: Entry,
        key: ObjectKey,
        indexes: Iterable[int],
        *,
        demand: int | None = None,
        overdue: Container[int] = (),
    ) -> dict[int, Download]:
        """Fetch the blocks that no request fetches yet; return the in-flight request of each block.

        Adjacent blocks share a request. With `demand`, reading pauses at that byte until a reader wants more; without
        it, the whole body is read. `overdue` blocks are fetched even if another process holds their fetch lock, because
        that process may be stopped (SIGSTOP, Ctrl-Z). Raises OriginUnavailable for an uncached block if `offline` is
        set.

        A block is missing from the result if another process fetches it, or if it has just been stored. Each fetch lock
        is held until the block is stored or given up.
        """
        engine, info = self.source.engine, entry.info
        assert info is not None
        assert info.size is not None
        by_block: dict[int, Download] = {}
        not_requested = []
        for index in indexes:
            download = engine.by_block.get(key.name(index))
            if download is not None and download.covers(index * key.block_size):
                by_block[index] = download
            elif self.source.config.offline and not engine.cache.has(key, index):
                raise self.source.offline(entry.path)
            elif download is None:
                not_requested.append(index)
        to_fetch = [
            index for index in not_requested if self._take_fetch_lock(key, index, is_overdue=index in overdue)
        ]
        for bytes_ in merge(
            to_fetch, key.block_size, size=info.size, request_size=self.source.config.request_size
        ):
            download = self._launch_one(entry, key, info, bytes_, demand=demand)
            by_block.update(dict.fromkeys(covering(bytes_, key.block_size), download))
        return by_block

    def _take_fetch_lock(self, key: ObjectKey, index: int, *, is_overdue: bool) -> bool:
        """Return whether this process should fetch the block, and take its fetch lock if it is free.

        False if another process fetches it, or if it is cached. An overdue block is fetched without the lock, at worst
        once by each process that waits for it.
        """
        cache = self.source.engine.cache
        if not cache.take_lock(key.hash64(index)) and not is_overdue:
            return False
        if cache.has(key, index):  # stored before the lock was taken
            cache.release_lock(key.hash64(index))
            return False
        return True

    def _launch_one(
        self,
        entry: Entry,
        key: ObjectKey | None,
        info: ObjectInfo,
        bytes_: Range,
        *,
        demand: int | None = None,
    ) -> Download:
        download = Download(demand=bytes_.stop if demand is None else min(demand, bytes_.stop))
        download.begin(info, key, bytes_)
        if key is not None:
            for index in covering(bytes_, key.block_size):
                self.source.engine.by_block[key.name(index)] = download
        self._stop_paused_requests(entry.path)
        self.source.engine.active_requests.add(download)
        self.source.engine.spawn(
            self.run_request(download, partial(self._read_version, download, entry.path, info, bytes_))
        )
        return download

    def launch_speculative(
        self,
        entry: Entry,
        key: ObjectKey,
        wanted: Iterable[range],
        keep: deque[Download],
    ) -> None:
        """Queue a speculative request for each range of blocks in `wanted`, in this order.

        `keep` is their owner: a request is appended to it when it is sent. `forget_speculative(keep)` ends them.
        """
        origin = partial(self.source.origin, entry.path)
        for blocks in wanted:
            send = partial(self._send_speculative, entry, key, blocks, keep)
            self.source.engine.speculation.submit(
                SpeculativeRequest(keep, len(blocks) * key.block_size, send, origin)
            )

    def forget_speculative(self, keep: deque[Download]) -> None:
        """Drop the queued requests of `keep`, and end the sent ones after their current block.

        Cancel those that have received no byte and that no caller has waited for, so that they are not retried either.
        """
        self.source.engine.speculation.withdraw(keep)
        while keep:
            download = keep.popleft()
            if download.done or download.key is None:
                continue
            if download.is_speculative and not download.is_wanted:
                download.give_up()
            else:
                # A caller waits for it or may soon: do not cancel it. If it needs more bytes, want() continues it.
                download.stop_at_block()

    def _send_speculative(
        self,
        entry: Entry,
        key: ObjectKey,
        blocks: range,
        keep: deque[Download],
    ) -> list[Download]:
        """Fetch the blocks that are not cached yet; return their in-flight requests."""
        engine = self.source.engine
        kept = [*keep]  # a copy: the reader's thread removes items meanwhile
        missing = [
            index
            for index in blocks
            # Received blocks that could not be stored exist only in these requests.
            if not (engine.cache.has(key, index) or any(download.holds(index) for download in kept))
        ]
        by_block = dict.fromkeys(self.launch(entry, key, missing).values())
        # Requests that another reader stopped end by themselves; `keep` may already hold some of the others.
        keep.extend(download for download in by_block if not download.stopped and download not in kept)
        return list(by_block)

    def launch_uncached(self, entry: Entry, position: int) -> Download:
        """Request the bytes from `position` on of an object that cannot be cached, as it has no fingerprint.

        The request is not in `engine.by_block`, so only the open file that launched it reads from it.
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
        by_block = [
            download for download in self.source.engine.active_requests if not download.is_speculative
        ]
        if len(by_block) >= self.source.origin(path).concurrency:
            for download in by_block:
                if download.paused:
                    download.stop_soon(download.filled)

    async def run_request(self, download: Download, request: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one request to its end and wake its waiters with the result or the error.

        `request` creates the coroutine. A coroutine that is created and never started would cause a warning at exit.
        """
        self.source.engine.active_requests.add(download)
        download.task = asyncio.current_task()
        error: Exception | None = None
        try:
            await request()
        except CachedFSError as failure:
            error = failure
            if download.info is not None and isinstance(failure, ObjectChanged | ChecksumMismatch):
                self.source.metadata.expire_version(download.info)  # whoever opens it next looks it up
        except OSError as failure:  # not translated by the origin: wrap it to add the URL
            error = CachedFSError(
                f"{self.source.url(download.info.path if download.info else '')}: {failure}"
            )
            error.__cause__ = failure
        except Exception as failure:  # e.g. a missing package or a rejected option: the waiters raise it
            error = failure
        finally:
            self.source.engine.active_requests.discard(download)
            self._release_unreceived(download)
            download.finish(error)
            self.source.engine.speculation.pump()

    def _release_unreceived(self, download: Download) -> None:
        """Release the fetch locks of the blocks that were not received."""
        if download.key is None or download.info is None or not download.info.size:
            return
        size = download.key.block_size
        for index in covering(Range(download.start, download.stop), size):
            bytes_ = block_range(index, size, download.info.size)
            is_complete = download.start <= bytes_.start and bytes_.stop <= download.filled
            if not is_complete and self.source.engine.by_block.get(download.key.name(index)) is download:
                self.source.engine.give_up(download.key.name(index), download.key.hash64(index))

    async def _read_version(self, download: Download, path: str, info: ObjectInfo, bytes_: Range) -> None:
        """Read `bytes_` of the object version `info`; raise ObjectChanged if the origin announces other bytes."""
        if download.stopped and download.demand <= download.start:
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
            await self._read_body(download, reply)
        # Only speculative requests are timed: others may have been paused, or have waited for a slot.
        if download.is_speculative and download.filled == download.stop:
            took_s, size = time.monotonic() - started_at, bytes_.size
            self.source.engine.speculation.record_timing(
                origin, wait_s=started_at - sent_at, size=size, took_s=took_s
            )

    async def fetch_unknown(
        self, download: Download, path: str, want: Range | Suffix, learned: list[Entry]
    ) -> None:
        """Read `want` of an object whose metadata is unknown, and store the metadata from the response headers.

        Appends the new entry to `learned`, or an entry for its absence before it raises ObjectNotFound.
        """
        now, mark = clock.now(), self.source.metadata.mark(path)
        self._stop_paused_requests(path)
        try:
            async with self.source.origin(path).read(path, want, None) as reply:

                def announce(entry: Entry) -> None:
                    # Take the fetch locks before others can see the entry: they would fetch the same blocks.
                    learned.append(entry)
                    key = self.source.key(entry)
                    download.begin(reply.info, key, Range(reply.start, reply.stop))
                    if key is not None:
                        self._register(download, key)

                self.source.metadata.store(
                    path, reply.info, checked_at=now, mark=mark, is_read=True, before_publish=announce
                )
                await self._read_body(download, reply)
        except ObjectNotFound:
            if not learned:
                learned.append(self.source.metadata.store(path, None, checked_at=now, mark=mark))
            raise

    def _register(self, download: Download, key: ObjectKey) -> None:
        """Register the complete blocks that a request for an unknown object turned out to cover."""
        engine = self.source.engine
        for index in covering(Range(download.start, download.stop), key.block_size):
            if index * key.block_size >= download.start and key.name(index) not in engine.by_block:
                # If another process holds the lock, this block is fetched twice.
                engine.cache.take_lock(key.hash64(index))
                engine.by_block[key.name(index)] = download

    async def _read_body(self, download: Download, reply: Reply) -> None:
        """Read the body as far as readers want it, and pass each complete block to the cache writer."""
        engine, key, info = self.source.engine, download.key, download.info
        assert info is not None
        size = key.block_size if key is not None else self.source.config.block_size
        index = counted = -(-download.start // size)
        unstored: list[FetchedBlock] = []  # complete blocks not yet passed to the cache writer
        try:
            async for data in reply:
                while key is not None and counted * size < download.filled + len(data):
                    # Record the miss before feed() lets a reader use the block. One block at a time: each record may
                    # have to be read from disk, and many at once would delay the first byte.
                    if engine.by_block.get(key.name(counted)) is download:
                        engine.cache.missed(key, counted, self.source.config.bounds, of=info.size)
                    counted += 1
                download.feed(data)
                engine.bytes_fetched += len(data)
                while (
                    key is not None
                    and (bytes_ := _complete_block(index, size, info.size, download.filled)) is not None
                ):
                    if engine.by_block.get(key.name(index)) is download:
                        pieces, bounds = download.views(bytes_), self.source.config.bounds
                        block = FetchedBlock(BlockKey(key, index), pieces, bytes_.size, download, bounds)
                        unstored.append(block)
                    index += 1
                # With is_checked_at_end, blocks are kept back until the checksum of the whole body is verified.
                # A body that ends early cannot be verified: its blocks are stored.
                if not reply.is_checked_at_end:
                    self._store(unstored)
                if not await download.wait_for_demand(PATIENCE_S):
                    break
                await engine.wait_for_space(download)
        except ChecksumMismatch as error:
            download.error = error  # first: a reader that finds no bytes then looks for it
            download.release()
            for block in unstored:
                engine.give_up(block.key.name, block.key.hash64)
            unstored.clear()
            raise
        finally:
            self._store(unstored)

    def _store(self, blocks: list[FetchedBlock]) -> None:
        """Pass blocks to the cache writer, and clear the list."""
        for block in blocks:
            self.source.engine.block_received(block)
        blocks.clear()


def _complete_block(index: int, block_size: int, size: int | None, filled: int) -> Range | None:
    """Return the byte range of block `index` if it ends at or below `filled`, else None."""
    if size is None or index * block_size >= size:
        return None
    bytes_ = block_range(index, block_size, size)
    return bytes_ if bytes_.stop <= filled else None
