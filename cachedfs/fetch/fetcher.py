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

    Everything runs on the engine's loop.
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
        engine, info = self.source.engine, known.info
        if engine.refusals.is_removing(key):
            return {}
        assert info is not None
        assert info.size is not None
        flights: dict[int, InflightRequest] = {}
        free = []
        for index in indexes:
            flight = engine.flights.get(key.name(index))
            if flight is not None and flight.covers(index * key.block_size):
                flights[index] = flight
            elif self.source.config.offline and not engine.cache.has(key, index):
                raise self.source.offline(known.path)
            elif flight is None:
                free.append(index)
        mine = [index for index in free if self._claimed(key, index, is_overdue=index in overdue)]
        for bytes_ in merge(
            mine, key.block_size, size=info.size, request_size=self.source.config.request_size
        ):
            flight = self._launch_one(known, key, info, bytes_, demand=demand)
            flights.update(dict.fromkeys(covering(bytes_, key.block_size), flight))
        return flights

    def _claimed(self, key: ObjectKey, index: int, *, is_overdue: bool) -> bool:
        """Take the claim of a block; False when another process fetches it, or it is here already.

        What is overdue is fetched without it: at worst it comes twice.
        """
        cache = self.source.engine.cache
        if not cache.take_claim(key.hash64(index)) and not is_overdue:
            return False
        if cache.has(key, index):  # stored between the look and the claim
            cache.drop_claim(key.hash64(index))
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
        flight = InflightRequest(demand=bytes_.stop if demand is None else min(demand, bytes_.stop))
        flight.begin(info, key, bytes_)
        if key is not None:
            for index in covering(bytes_, key.block_size):
                self.source.engine.flights[key.name(index)] = flight
        self._make_room_in_the_air()
        self.source.engine.airborne.add(flight)
        self.source.engine.spawn(self.fly(flight, partial(self._pinned, flight, known.path, info, bytes_)))
        return flight

    def launch_ahead(
        self,
        known: MetadataEntry,
        key: ObjectKey,
        wanted: Iterable[range],
        keep: deque[InflightRequest],
        refusal: ChecksumMismatch | None = None,
    ) -> None:
        """Send for blocks that a reader will probably want next, as soon as may be; add the requests to `keep`.

        `refusal`: the last that the reader knows of; after another it will read no further.
        """
        origin = partial(self.source.origin, known.path)
        for blocks in wanted:
            send = partial(self._send_ahead, known, key, blocks, keep, refusal)
            self.source.engine.ahead.submit(
                SpeculativeRequest(keep, len(blocks) * key.block_size, send, origin)
            )

    def forget_ahead(self, keep: deque[InflightRequest]) -> None:
        """The reader of `keep` went elsewhere: send no more for it, and end what is on its way at the next block.

        What brought nothing yet ends at once: a service that is busy is not to be asked again and again for nobody.
        """
        self.source.engine.ahead.withdraw(keep)
        while keep:
            flight = keep.popleft()
            if flight.done or flight.key is None:
                continue
            if flight.is_ahead and not flight.is_wanted:
                flight.give_up()
            else:  # of somebody who reads here himself, and may be about to wait for it
                flight.stop_at_block()

    def _send_ahead(
        self,
        known: MetadataEntry,
        key: ObjectKey,
        blocks: range,
        keep: deque[InflightRequest],
        refusal: ChecksumMismatch | None,
    ) -> list[InflightRequest]:
        """Send for those of the blocks that are not here yet; return the requests that bring them."""
        engine = self.source.engine
        if engine.refusals.last(key) is not refusal:
            return []
        kept = [*keep]  # its reader, in another thread, takes from it meanwhile
        missing = [
            index
            for index in blocks
            # What came and could not be stored is nowhere else.
            if not (engine.cache.has(key, index) or any(flight.holds(index) for flight in kept))
        ]
        flights = dict.fromkeys(self.launch(known, key, missing).values())
        # What others stopped ends by itself; what is kept already may also bring these blocks.
        keep.extend(flight for flight in flights if not flight.stopped and flight not in kept)
        return list(flights)

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
        flights = [flight for flight in self.source.engine.airborne if not flight.is_ahead]
        if len(flights) >= self.source.config.concurrency:
            for flight in flights:
                if flight.paused:
                    flight.stop_soon(flight.filled)

    async def fly(self, flight: InflightRequest, request: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one request to its end and tell those who wait how it ended.

        `request` makes the coroutine: one that was made and never begun would be a warning at the end of the process.
        """
        self.source.engine.airborne.add(flight)
        flight.task = asyncio.current_task()
        error: Exception | None = None
        try:
            await request()
        except CachedFSError as failure:
            error = failure
        except OSError as failure:  # of a kind that no origin names: still an answer, with the URL on top
            error = CachedFSError(f"{self.source.url(flight.info.path if flight.info else '')}: {failure}")
            error.__cause__ = failure
        except Exception as failure:  # a missing package, an option that the target refuses: theirs who wait
            error = failure
        finally:
            self.source.engine.airborne.discard(flight)
            self._give_up_the_rest(flight)
            if not flight.refused:  # else those who wait are told when all of its object is gone
                flight.finish(error)
            self.source.engine.ahead.pump()

    def _give_up_the_rest(self, flight: InflightRequest) -> None:
        """Let go of the blocks that did not arrive."""
        if flight.key is None or flight.info is None or not flight.info.size:
            return
        size = flight.key.block_size
        for index in covering(Range(flight.start, flight.stop), size):
            bytes_ = block_range(index, size, flight.info.size)
            whole = flight.start <= bytes_.start and bytes_.stop <= flight.filled
            if not whole and self.source.engine.flights.get(flight.key.name(index)) is flight:
                self.source.engine.give_up(flight.key.name(index), flight.key.hash64(index))

    async def _pinned(self, flight: InflightRequest, path: str, info: ObjectInfo, bytes_: Range) -> None:
        if flight.stopped and flight.demand <= flight.start:
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
            await self._pump(flight, reply)
        # Who is waited for may be paused, or wait for a slot.
        if flight.is_ahead and flight.filled == flight.stop:
            took_s, size = time.monotonic() - came_at, bytes_.size
            self.source.engine.ahead.saw(origin, wait_s=came_at - sent_at, size=size, took_s=took_s)

    async def unknown(
        self, flight: InflightRequest, path: str, want: Range | Suffix, learnt: list[MetadataEntry]
    ) -> None:
        now, mark = time.time(), self.source.facts.mark(path)
        self._make_room_in_the_air()
        try:
            async with self.source.origin(path).read(path, want, None) as reply:

                def announce(known: MetadataEntry) -> None:
                    # With the claims: who learns of the object must not find its blocks free, and fetch them too.
                    learnt.append(known)
                    key = self.source.key(known)
                    flight.begin(reply.info, key, Range(reply.start, reply.stop))
                    if key is not None:
                        self._register(flight, key)

                self.source.facts.learn(
                    path, reply.info, checked_at=now, mark=mark, is_read=True, first=announce
                )
                await self._pump(flight, reply)
        except ObjectNotFound:
            if not learnt:
                learnt.append(self.source.facts.learn(path, None, checked_at=now, mark=mark))
            raise

    def _register(self, flight: InflightRequest, key: ObjectKey) -> None:
        """Announce the whole blocks that a request for an unknown object turned out to bring."""
        engine = self.source.engine
        for index in covering(Range(flight.start, flight.stop), key.block_size):
            if index * key.block_size >= flight.start and key.name(index) not in engine.flights:
                engine.cache.take_claim(key.hash64(index))  # taken elsewhere: then it comes twice, once
                engine.flights[key.name(index)] = flight

    async def _pump(self, flight: InflightRequest, reply: Reply) -> None:
        """Take the body as fast as somebody wants it, and pass on every block that is whole."""
        engine, key, info = self.source.engine, flight.key, flight.info
        assert info is not None
        size = key.block_size if key is not None else self.source.config.block_size
        index = begun = -(-flight.start // size)
        passing = None
        if key is not None and stated_crc32c(info.details) is not None:
            passing = StreamingChecksum(engine.arrivals, key, info, flight.start)
        async for data in reply:
            if flight.refused:
                return
            # Before it is fed: who waits for the last bytes of an object that is wrong must not get them.
            if passing is not None and key is not None and (wrong := passing.add(data)):
                error = ChecksumMismatch(
                    f"{self.source.url(info.path)}: all of the object came, and {wrong}; nothing of it is kept, "
                    "so that reading it again fetches it again"
                )
                await self._refuse(key, info, error)
                raise error
            while key is not None and begun * size < flight.filled + len(data):
                # Before anybody can use it. Not for all blocks at once: what new pages of a mapped file take, the first
                # byte would wait for.
                if engine.flights.get(key.name(begun)) is flight:
                    engine.cache.missed(key, begun, self.source.config.bounds, of=info.size)
                begun += 1
            flight.feed(data)
            engine.bytes_fetched += len(data)
            while key is not None and (bytes_ := _whole(index, size, info.size, flight.filled)) is not None:
                if engine.flights.get(key.name(index)) is flight:
                    engine.landed(
                        FetchedBlock(
                            BlockKey(key, index), flight.piece(bytes_), flight, self.source.config.bounds
                        )
                    )
                index += 1
            if not await flight.may_go_on(PATIENCE_S):
                return
            await engine.room(flight)

    async def _refuse(self, key: ObjectKey, info: ObjectInfo, error: ChecksumMismatch) -> None:
        """Drop all of an object version, wherever it is, and only then tell those who read it: they may ask anew."""
        engine = self.source.engine
        flights = engine.begin_refusal(key)
        try:
            await asyncio.to_thread(self._remove, key, info)
        finally:
            engine.end_refusal(key, flights, error)

    def _remove(self, key: ObjectKey, info: ObjectInfo) -> None:
        """Remove the blocks of an object that are on the disk, and those that were being written meanwhile."""
        indexes, cache = covering(Range(0, info.size or 0), key.block_size), self.source.engine.cache
        for index in indexes:
            cache.refuse(key, index)
        self.source.engine.writer.finish_batch(BATCH_S)
        for index in indexes:
            cache.refuse(key, index)


def _whole(index: int, block_size: int, size: int | None, filled: int) -> Range | None:
    """Return the bytes of block `index` when all of them are below `filled`."""
    if size is None or index * block_size >= size:
        return None
    bytes_ = block_range(index, block_size, size)
    return bytes_ if bytes_.stop <= filled else None
