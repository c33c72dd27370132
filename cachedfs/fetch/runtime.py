"""What a process has once per cache directory: the loop thread, requests in flight, what is written behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fsspec.utils import tokenize

from cachedfs.cache.block_cache import BlockCache
from cachedfs.cache.eviction.future_uses import FutureUses, order_of
from cachedfs.common import event_log
from cachedfs.common.blocks import covering
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.single_flight import SingleFlight
from cachedfs.common.types import ObjectKey, Range, Stats
from cachedfs.config import Config
from cachedfs.errors import ChecksumMismatch, OriginUnavailable
from cachedfs.fetch.cache_writer import CacheWriter, FetchedBlock
from cachedfs.fetch.fetch_queue import FetchQueue
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.integrity import BlockChecksums, CorruptVersions
from cachedfs.fetch.metadata_cache import MetadataCache
from cachedfs.fetch.statistics import StatisticsPublisher
from cachedfs.origins.base import Origin
from cachedfs.origins.registry import open_origin

__all__ = ["Runtime"]

logger = logging.getLogger("cachedfs.fetch")

T = TypeVar("T")

BEHIND_BYTES = 64 << 20  # most bytes that wait for the disk before flights are no longer fed
LOOK_S = 0.05  # how long a request waits for that before it is looked whether somebody wants it by now
DRAIN_S = 5.0  # longest that a process waits for its last blocks at exit
WORKERS = 64  # threads for sync origins and for copying many cached blocks; made as they are needed
AHEAD_SHARE = 4  # a window is at most this part of the cache
POLL_S = 0.002, 0.05  # shortest and longest wait between two looks at whether another process has done
AWAY_S = 30.0  # how long an origin that could not be reached is taken as away


class Runtime(event_log.CounterSource):
    """One per process and cache directory, shared by all filesystem instances over it; made without requests.

    Its thread and loop start with the first miss: a process that only hits has neither.
    """

    def __init__(self, directories: Sequence[str], *, explicit: bool) -> None:
        self.pid = os.getpid()
        self.cache = BlockCache(directories, explicit=explicit)
        self.cache_writer = CacheWriter(self.cache, self._stored)
        # Invariant: a block's name is here from the moment its request is made until it is on the disk, given up, or
        # its request failed. Changed on the loop and, for what is stored, in the writer's thread.
        self.inflight_requests: dict[str, InflightRequest] = {}
        self.active_requests: set[InflightRequest] = (
            set()
        )  # requests that hold or wait for a permit; loop only
        self.future_uses: list[FutureUses] = []  # of the plans at work; changed on the loop
        self.fetch_queue = FetchQueue(self.spawn)
        self.lookups = SingleFlight(self.spawn)
        self.block_checksums = BlockChecksums()
        # Of those objects that are read ahead by ranges: from which byte on reads are to be told. Changed on the loop.
        self.followed: dict[str, int] = {}
        self.corrupt_versions = CorruptVersions()
        self.hits = self.misses = self.requests = self.bytes_fetched = self.bytes_served = 0
        self._statistics = StatisticsPublisher(self, self.cache.counts)
        self.cache.call_now_and_then(self._statistics.publish_now_and_then)
        self._origins: dict[str, Origin] = {}
        self._metadata_caches: dict[str, MetadataCache] = {}
        self._lookup_slots: dict[
            tuple[str, int], asyncio.Semaphore
        ] = {}  # by identity and how many there are
        self._unreachable: dict[str, float] = {}  # identity -> monotonic time until which it is taken as away
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Guards the start of the loop, and the two registries; entered itself, by a signal's handler that reads.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: DaemonThreadPool
        event_log.watch(self)

    # The loop and the ways into it.

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The runtime's own event loop, running in its own thread."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._loop = self._started_loop()
        return self._loop

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self._workers = DaemonThreadPool(WORKERS, "cachedfs-work")
        loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=_run, args=(loop,), name="cachedfs-io", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads, or (Python 3.12) the main thread has ended
            loop.close()
            raise OriginUnavailable(f"nothing can be fetched: {error}") from error
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result, from any other thread; an interrupt cancels it."""
        if self.is_loop_thread(threading.current_thread()):
            coroutine.close()
            raise RuntimeError(
                "a blocking call inside the I/O loop of cachedfs would wait for itself: use the async one"
            )
        try:
            loop = self.loop
        except BaseException:  # whatever it is: a coroutine that nobody runs would warn of it later
            coroutine.close()
            raise
        future = None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            return future.result()
        except concurrent.futures.CancelledError:
            raise OriginUnavailable(
                "cachedfs is shutting down with this process; the read was given up"
            ) from None
        except BaseException:  # an interrupt of the caller, above all: the work on the loop ends with it
            if future is not None:
                future.cancel()
            else:
                _end(coroutine, loop)
            raise

    async def hop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await `coroutine` from whatever loop the caller runs on."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def is_loop_thread(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is the one that the loop runs in: nothing may wait in it for what it does itself."""
        return thread is self._thread

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run `function` on the loop soon, from any thread; not at all once the runtime is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that the runtime owns until it ends. On the loop."""
        if self.pid == 0:
            coroutine.close()
            raise OriginUnavailable(
                "cachedfs is shutting down with this process; nothing is fetched any more"
            )
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Shared by the filesystem instances.

    def origin(self, protocol: str, options: Mapping[str, Any], *, concurrency: int) -> Origin:
        """Return the origin for these options: one per process, whatever the number of instances."""
        token = tokenize(protocol, dict(options), concurrency)
        with self._lock:
            if token in self._origins:
                return self._origins[token]
        loop = self.loop  # takes the lock itself
        origin = open_origin(
            protocol,
            options,
            loop=loop,
            on_request=self._count_request,
            concurrency=concurrency,
            book=self.cache.budget,
            alone=lambda identity: partial(self.alone, identity),
        )
        with self._lock:
            return self._origins.setdefault(token, origin)

    async def locked(self, hash64: int, *, within_s: float = math.inf) -> bool:
        """Take a claim as soon as nobody has it; False when that would take longer than `within_s` seconds."""
        pause, deadline = POLL_S[0], time.monotonic() + within_s
        while not self.cache.take_lock(hash64):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
        return True

    @contextlib.asynccontextmanager
    async def alone(self, identity: str, path: str) -> AsyncIterator[None]:
        """Have the right to change what `path` names, which one process and task of the machine has at a time.

        It ends with its process, whatever ends that.
        """
        fetch_lock = ObjectKey(identity, path, "who changes it?", 0).hash64(0)
        await self.locked(fetch_lock)
        try:
            yield
        finally:
            self.cache.release_lock(fetch_lock)

    def metadata_cache(self, identity: str) -> MetadataCache:
        """Return what this process knows of the objects of one origin."""
        with self._lock:
            return self._metadata_caches.setdefault(
                identity, MetadataCache(self.cache.metadata, identity, self.cache_writer.keep)
            )

    def lookup_slots(self, identity: str, most: int) -> asyncio.Semaphore:
        """Return what lets `most` lookups at an origin go on at a time. On the loop."""
        return self._lookup_slots.setdefault((identity, most), asyncio.Semaphore(most))

    def is_unreachable(self, identity: str) -> bool:
        """True while an origin that could not be reached a moment ago is not asked again."""
        return time.monotonic() < self._unreachable.get(identity, 0.0)

    def mark_unreachable(self, identity: str) -> None:
        self._unreachable[identity] = time.monotonic() + AWAY_S

    def stats(self) -> Stats:
        blocks, size = self.cache.usage()
        return Stats(
            hits=self.hits,
            misses=self.misses,
            requests=self.requests,
            bytes_fetched=self.bytes_fetched,
            bytes_served=self.bytes_served,
            blocks=blocks,
            bytes_cached=size,
            evictions=self.cache.evictions,
            cache_dir=self.cache.root or "",
            cannot_store=self.cache.cannot_store,
        )

    def sums(self) -> dict[str, Any]:
        """Return the sums of `stats` that need no look at the disk, and what was measured of the link."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "requests": self.requests,
            "bytes_fetched": self.bytes_fetched,
            "bytes_served": self.bytes_served,
            "evictions": self.cache.evictions,
            "bytes_per_s": self.fetch_queue.bytes_per_s,
        }

    def _count_request(self) -> None:
        self.requests += 1

    def window(self, config: Config) -> int:
        """Return how many bytes may be read ahead for one file: `read_ahead`, less where the cache is small.

        A block is used twice, when it is stored and when its reader comes; in between the same happens to all that is
        between the reader and the end of the window. More than a quarter of the cache, with other readers and requests
        under way, and what goes to make room is what was read ahead and not yet used.
        """
        if self.cache.cannot_store is not None:
            return config.read_ahead  # what is read ahead waits in memory
        allowed = self.cache.allowed
        if allowed is None:  # asking takes a transaction: the writer does, and for now it is a little
            self.cache_writer.after_facts(lambda: self.cache.allowance(config.bounds))
            allowed = AHEAD_SHARE * 2 * config.whole_request
        return min(config.read_ahead, max(allowed // AHEAD_SHARE, config.block_size))

    def fits(self, config: Config, size: int) -> bool:
        """Return whether an object of `size` bytes may be fetched for what may be read of it: it takes half at most."""
        if self.cache.cannot_store is not None:
            return False
        self.window(config)  # which has the allowance looked up
        return size <= (self.cache.allowed or 2 * config.whole_request) // 2

    # Write-behind, as seen from the loop.

    def block_received(self, block: FetchedBlock) -> None:
        """A block arrived in full: store it; until it is stored its flight serves it."""
        self.misses += 1
        block.inflight.n_received += 1
        if self.future_uses:
            block = block._replace(order=order_of(self.future_uses, block.key.object, block.key.index))
        self.cache_writer.add(block)

    async def room(self, inflight: InflightRequest) -> None:
        """Wait until the blocks that are not on the disk yet are few enough for another piece of this request."""
        while self.cache_writer.behind > _behind(inflight):
            self._room.clear()
            if self.cache_writer.behind > _behind(inflight):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):  # somebody may wait for it by now
                        await self._room.wait()

    def _stored(self, blocks: Sequence[FetchedBlock], are_kept: bool) -> None:
        try:
            for order in tuple(self.future_uses):
                tell = order.stored if are_kept else order.lost
                tell((block.key.object, block.key.index) for block in blocks)
            for block in blocks:
                block.inflight.stored(are_kept)
                if (
                    self.inflight_requests.get(block.key.name) is block.inflight
                ):  # not another's that came after it
                    self.give_up(block.key.name, block.key.hash64)
        finally:
            self.call_soon(self._made_room)
            self._statistics.publish_now_and_then()

    def _made_room(self) -> None:
        self._room.set()
        self.fetch_queue.pump()

    def give_up(self, name: str, hash64: int) -> None:
        """The block is on the disk, or nobody is fetching it any more: other processes may see for themselves."""
        self.inflight_requests.pop(name, None)
        self.cache.release_lock(hash64)

    def begin_corruption(self, key: ObjectKey) -> set[InflightRequest]:
        """Give, store and fetch nothing more of an object version that came whole and wrong; return its requests."""
        self.corrupt_versions.begin(key)
        inflight_requests = {
            inflight
            for inflight in (*self.inflight_requests.values(), *self.active_requests)
            if inflight.key == key
        }
        for inflight in inflight_requests:
            inflight.refused = True
        return inflight_requests

    def end_refusal(
        self, key: ObjectKey, inflight_requests: Iterable[InflightRequest], error: ChecksumMismatch
    ) -> None:
        """Tell all who read an object version, or wait for it: nothing of it is here now, and it may be asked for anew."""
        self.corrupt_versions.end(key, error)
        for inflight in inflight_requests:
            for index in covering(Range(inflight.start, inflight.stop), key.block_size):
                if self.inflight_requests.get(key.name(index)) is inflight:
                    self.give_up(key.name(index), key.hash64(index))
            inflight.finish(error)

    # The end.

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until everything that arrived is on the disk; False when it took too long."""
        return self.cache_writer.drain(timeout_s)

    def close(self) -> None:
        """Store what arrived, close sessions, end both threads. For the end of the process."""
        self.pid = 0  # whoever still holds this runtime gets a new one
        if self._loop is not None:
            # What is given up here has lost its reader with the process: asyncio need not report it.
            self._loop.set_exception_handler(lambda loop, context: None)
        self.drain()
        self.cache_writer.close()
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._end_loop(self._loop, self._thread)
        event_log.unwatch(self)
        self._statistics.close()
        self.cache.close()

    def _end_loop(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._wind_up(), loop).result(DRAIN_S)
        except Exception as error:  # whatever a session says at its end: the others still have to end
            logger.debug("requests did not end in time: %s", error)
        self._workers.shutdown(
            wait=False, cancel_futures=True
        )  # which tells the loop: it must still be there
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)

    async def _wind_up(self) -> None:
        """Cancel everything that runs here, readers of other threads included: they get an error, not silence."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for origin in self._origins.values():
            with contextlib.suppress(Exception):  # see above
                await origin.aclose()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Be the thread of a loop, and close it: whoever ends it waits for a second, and a machine may pause for longer."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
    """End what was perhaps given to the loop: an interrupt came before anybody could tell. Not here, as it may be at work."""

    def end() -> None:
        task = next((task for task in asyncio.all_tasks() if task.get_coro() is coroutine), None)
        if task is not None:
            task.cancel()
        else:
            coroutine.close()

    try:
        loop.call_soon_threadsafe(end)  # behind what gave it, if anything did
    except RuntimeError:  # the loop is closed, and was before
        coroutine.close()


def _behind(inflight: InflightRequest) -> int:
    """Return how many bytes may wait for the disk before a request is no longer fed.

    Half of them belongs to those who are waited for: on a disk slower than the link, all would be taken by what nobody waits for.
    """
    return BEHIND_BYTES // 2 if inflight.is_speculative and not inflight.is_wanted else BEHIND_BYTES
