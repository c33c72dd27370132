"""Requests: which blocks one brings, who may make it, and what becomes of its body."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable
from functools import partial
from typing import Any

from cachedfs.common.blocks import block_range, covering, merge
from cachedfs.common.checksums import stated_crc32c
from cachedfs.common.types import BlockKey, ObjectInfo, ObjectKey, Range, Suffix
from cachedfs.errors import CachedFSError, ChecksumMismatch, ObjectChanged, ObjectNotFound
from cachedfs.fetch.cache_writer import FetchedBlock
from cachedfs.fetch.fetch_queue import SpeculativeRequest
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.integrity import StreamingChecksum
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.source import Source
from cachedfs.origins.base import Reply
from cachedfs.origins.request_slots import is_speculative

__all__ = ["OVERDUE_S", "Fetcher"]

BATCH_S = 30.0  # the longest that a put tries to write a batch
OVERDUE_S = 30.0  # how long one waits for what another process fetches; requests take less, but for one that was stopped
PATIENCE_S = 0.2  # how long a request waits, unread, for its handle to read on


class Fetcher:
    """Sends requests and takes their bodies: into flights for those who wait, behind them to the disk.

    Everything runs on the runtime's loop.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def launch(
        self,
        known: MetadataEntry,
        key: ObjectKey,
        indexes: Iterable[int],
        *,
        demand: int | None = None,
        overdue: Container[int] = (),
    ) -> dict[int, InflightRequest]:
        """Send the requests for those blocks that nobody fetches yet; return the flights that bring each block.

        `demand`: how far their bodies are read before somebody wants more; all of them where none is given. Blocks that
        are `overdue` were waited for too long: a process that was stopped (SIGSTOP, Ctrl-Z) keeps its claims.
        Adjacent blocks share a request. A block that is not in the answer is being fetched by another process, or
        has just been stored, or its object is being removed because it is wrong. Claims are held from here until the
        block is stored or given up. On the loop.
        """
        runtime, info = self.source.runtime, known.info
        if runtime.corrupt_versions.is_removing(key):
            return {}
        assert info is not None
        assert info.size is not None
        inflight_requests: dict[int, InflightRequest] = {}
        free = []
        for index in indexes:
            inflight = runtime.inflight_requests.get(key.name(index))
            if inflight is not None and inflight.covers(index * key.block_size):
                inflight_requests[index] = inflight
            elif self.source.config.offline and not runtime.cache.has(key, index):
                raise self.source.offline(known.path)
            elif inflight is None:
                free.append(index)
        mine = [index for index in free if self._claimed(key, index, is_overdue=index in overdue)]
        for bytes_ in merge(
            mine, key.block_size, size=info.size, request_size=self.source.config.request_size
        ):
            inflight = self._launch_one(known, key, info, bytes_, demand=demand)
            inflight_requests.update(dict.fromkeys(covering(bytes_, key.block_size), inflight))
        return inflight_requests

    def _claimed(self, key: ObjectKey, index: int, *, is_overdue: bool) -> bool:
        """Take the claim of a block; False when another process fetches it, or it is here already.

        What is overdue is fetched without it: at worst it comes twice.
        """
        cache = self.source.runtime.cache
        if not cache.take_lock(key.hash64(index)) and not is_overdue:
            return False
        if cache.has(key, index):  # stored between the look and the claim
            cache.release_lock(key.hash64(index))
            return False
        return True

    def _launch_one(
        self,
        known: MetadataEntry,
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
        self._make_room_in_the_air()
        self.source.runtime.active_requests.add(inflight)
        self.source.runtime.spawn(
            self.run_request(inflight, partial(self._pinned, inflight, known.path, info, bytes_))
        )
        return inflight

    def launch_speculative(
        self,
        known: MetadataEntry,
        key: ObjectKey,
        wanted: Iterable[range],
        keep: deque[InflightRequest],
        corruption: ChecksumMismatch | None = None,
    ) -> None:
        """Send for blocks that a reader will probably want next, as soon as may be; add the requests to `keep`.

        `refusal`: the last that the reader knows of; after another it will read no further.
        """
        origin = partial(self.source.origin, known.path)
        for blocks in wanted:
            send = partial(self._send_speculative, known, key, blocks, keep, corruption)
            self.source.runtime.fetch_queue.submit(
                SpeculativeRequest(keep, len(blocks) * key.block_size, send, origin)
            )

    def forget_speculative(self, keep: deque[InflightRequest]) -> None:
        """The reader of `keep` went elsewhere: send no more for it, and end what is on its way at the next block.

        What brought nothing yet ends at once: a service that is busy is not to be asked again and again for nobody.
        """
        self.source.runtime.fetch_queue.withdraw(keep)
        while keep:
            inflight = keep.popleft()
            if inflight.done or inflight.key is None:
                continue
            if inflight.is_speculative and not inflight.is_wanted:
                inflight.give_up()
            else:  # of somebody who reads here himself, and may be about to wait for it
                inflight.stop_at_block()

    def _send_speculative(
        self,
        known: MetadataEntry,
        key: ObjectKey,
        blocks: range,
        keep: deque[InflightRequest],
        corruption: ChecksumMismatch | None,
    ) -> list[InflightRequest]:
        """Send for those of the blocks that are not here yet; return the requests that bring them."""
        runtime = self.source.runtime
        if runtime.corrupt_versions.last(key) is not corruption:
            return []
        kept = [*keep]  # its reader, in another thread, takes from it meanwhile
        missing = [
            index
            for index in blocks
            # What came and could not be stored is nowhere else.
            if not (runtime.cache.has(key, index) or any(inflight.holds(index) for inflight in kept))
        ]
        inflight_requests = dict.fromkeys(self.launch(known, key, missing).values())
        # What others stopped ends by itself; what is kept already may also bring these blocks.
        keep.extend(
            inflight for inflight in inflight_requests if not inflight.stopped and inflight not in kept
        )
        return list(inflight_requests)

    def launch_uncached(self, known: MetadataEntry, position: int) -> InflightRequest:
        """Send a request from `position` on for an object that has no fingerprint: one handle's alone."""
        info = known.info
        assert info is not None
        assert info.size is not None
        bytes_ = Range(position, min(info.size, position + self.source.config.whole_request))
        return self._launch_one(known, None, info, bytes_)

    def _make_room_in_the_air(self) -> None:
        """Stop requests that wait for their handles to read on, when a new one would have to wait for them."""
        if is_speculative():
            return  # it has a slot of its own
        inflight_requests = [
            inflight for inflight in self.source.runtime.active_requests if not inflight.is_speculative
        ]
        if len(inflight_requests) >= self.source.config.concurrency:
            for inflight in inflight_requests:
                if inflight.paused:
                    inflight.stop_soon(inflight.filled)

    async def run_request(
        self, inflight: InflightRequest, request: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run one request to its end and tell those who wait how it ended.

        `request` makes the coroutine: one that was made and never begun would be a warning at the end of the process.
        """
        self.source.runtime.active_requests.add(inflight)
        inflight.task = asyncio.current_task()
        error: Exception | None = None
        try:
            await request()
        except CachedFSError as failure:
            error = failure
        except OSError as failure:  # of a kind that no origin names: still an answer, with the URL on top
            error = CachedFSError(
                f"{self.source.url(inflight.info.path if inflight.info else '')}: {failure}"
            )
            error.__cause__ = failure
        except Exception as failure:  # a missing package, an option that the target refuses: theirs who wait
            error = failure
        finally:
            self.source.runtime.active_requests.discard(inflight)
            self._give_up_the_rest(inflight)
            if not inflight.refused:  # else those who wait are told when all of its object is gone
                inflight.finish(error)
            self.source.runtime.fetch_queue.pump()

    def _give_up_the_rest(self, inflight: InflightRequest) -> None:
        """Let go of the blocks that did not arrive."""
        if inflight.key is None or inflight.info is None or not inflight.info.size:
            return
        size = inflight.key.block_size
        for index in covering(Range(inflight.start, inflight.stop), size):
            bytes_ = block_range(index, size, inflight.info.size)
            whole = inflight.start <= bytes_.start and bytes_.stop <= inflight.filled
            if not whole and self.source.runtime.inflight_requests.get(inflight.key.name(index)) is inflight:
                self.source.runtime.give_up(inflight.key.name(index), inflight.key.hash64(index))

    async def _pinned(self, inflight: InflightRequest, path: str, info: ObjectInfo, bytes_: Range) -> None:
        if inflight.stopped and inflight.demand <= inflight.start:
            return  # given up before it began
        origin, sent_at = self.source.origin(path), time.monotonic()
        async with origin.read(path, bytes_, info) as reply:
            came_at = time.monotonic()
            if (reply.start, reply.stop) != (bytes_.start, bytes_.stop):
                # Taken as they are, they would be waited for, and asked for, again and again.
                raise ObjectChanged(
                    f"{self.source.url(path)}: bytes {reply.start} to {reply.stop} came instead of {bytes_.start} to "
                    f"{bytes_.stop}: it was replaced while it was read; open it again"
                )
            await self._pump(inflight, reply)
        # Who is waited for may be paused, or wait for a slot.
        if inflight.is_speculative and inflight.filled == inflight.stop:
            took_s, size = time.monotonic() - came_at, bytes_.size
            self.source.runtime.fetch_queue.saw(origin, wait_s=came_at - sent_at, size=size, took_s=took_s)

    async def unknown(
        self, inflight: InflightRequest, path: str, want: Range | Suffix, learnt: list[MetadataEntry]
    ) -> None:
        now, mark = time.time(), self.source.metadata.mark(path)
        self._make_room_in_the_air()
        try:
            async with self.source.origin(path).read(path, want, None) as reply:

                def announce(known: MetadataEntry) -> None:
                    # With the claims: who learns of the object must not find its blocks free, and fetch them too.
                    learnt.append(known)
                    key = self.source.key(known)
                    inflight.begin(reply.info, key, Range(reply.start, reply.stop))
                    if key is not None:
                        self._register(inflight, key)

                self.source.metadata.learn(
                    path, reply.info, checked_at=now, mark=mark, is_read=True, first=announce
                )
                await self._pump(inflight, reply)
        except ObjectNotFound:
            if not learnt:
                learnt.append(self.source.metadata.learn(path, None, checked_at=now, mark=mark))
            raise

    def _register(self, inflight: InflightRequest, key: ObjectKey) -> None:
        """Announce the whole blocks that a request for an unknown object turned out to bring."""
        runtime = self.source.runtime
        for index in covering(Range(inflight.start, inflight.stop), key.block_size):
            if index * key.block_size >= inflight.start and key.name(index) not in runtime.inflight_requests:
                runtime.cache.take_lock(key.hash64(index))  # taken elsewhere: then it comes twice, once
                runtime.inflight_requests[key.name(index)] = inflight

    async def _pump(self, inflight: InflightRequest, reply: Reply) -> None:
        """Take the body as fast as somebody wants it, and pass on every block that is whole."""
        runtime, key, info = self.source.runtime, inflight.key, inflight.info
        assert info is not None
        size = key.block_size if key is not None else self.source.config.block_size
        index = begun = -(-inflight.start // size)
        passing = None
        if key is not None and stated_crc32c(info.details) is not None:
            passing = StreamingChecksum(runtime.block_checksums, key, info, inflight.start)
        async for data in reply:
            if inflight.refused:
                return
            # Before it is fed: who waits for the last bytes of an object that is wrong must not get them.
            if passing is not None and key is not None and (wrong := passing.add(data)):
                error = ChecksumMismatch(
                    f"{self.source.url(info.path)}: all of the object came, and {wrong}; nothing of it is kept, "
                    "so that reading it again fetches it again"
                )
                await self._refuse(key, info, error)
                raise error
            while key is not None and begun * size < inflight.filled + len(data):
                # Before anybody can use it. Not for all blocks at once: what new pages of a mapped file take, the first
                # byte would wait for.
                if runtime.inflight_requests.get(key.name(begun)) is inflight:
                    runtime.cache.missed(key, begun, self.source.config.bounds, of=info.size)
                begun += 1
            inflight.feed(data)
            runtime.bytes_fetched += len(data)
            while key is not None and (bytes_ := _whole(index, size, info.size, inflight.filled)) is not None:
                if runtime.inflight_requests.get(key.name(index)) is inflight:
                    runtime.block_received(
                        FetchedBlock(
                            BlockKey(key, index), inflight.piece(bytes_), inflight, self.source.config.bounds
                        )
                    )
                index += 1
            if not await inflight.may_go_on(PATIENCE_S):
                return
            await runtime.room(inflight)

    async def _refuse(self, key: ObjectKey, info: ObjectInfo, error: ChecksumMismatch) -> None:
        """Drop all of an object version, wherever it is, and only then tell those who read it: they may ask anew."""
        runtime = self.source.runtime
        inflight_requests = runtime.begin_corruption(key)
        try:
            await asyncio.to_thread(self._remove, key, info)
        finally:
            runtime.end_refusal(key, inflight_requests, error)

    def _remove(self, key: ObjectKey, info: ObjectInfo) -> None:
        """Remove the blocks of an object that are on the disk, and those that were being written meanwhile."""
        indexes, cache = covering(Range(0, info.size or 0), key.block_size), self.source.runtime.cache
        for index in indexes:
            cache.refuse(key, index)
        self.source.runtime.cache_writer.finish_batch(BATCH_S)
        for index in indexes:
            cache.refuse(key, index)


def _whole(index: int, block_size: int, size: int | None, filled: int) -> Range | None:
    """Return the bytes of block `index` when all of them are below `filled`."""
    if size is None or index * block_size >= size:
        return None
    bytes_ = block_range(index, block_size, size)
    return bytes_ if bytes_.stop <= filled else None
