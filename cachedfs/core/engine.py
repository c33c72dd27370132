"""The state of a process per cache directory: event loop, downloads, cache writer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from fsspec.utils import tokenize

from cachedfs.cache.block_store import BlockStore
from cachedfs.common import event_log
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.single_flight import SingleFlight
from cachedfs.common.types import ObjectKey, Stats
from cachedfs.config import Config
from cachedfs.core.download import Download
from cachedfs.core.loop_bridge import LoopBridge
from cachedfs.core.path_locks import PathLocks
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.core.speculation import SpeculativeQueue
from cachedfs.core.statistics import StatisticsPublisher
from cachedfs.core.store_queue import FetchedBlock, StoreQueue
from cachedfs.errors import CacheError, OriginUnavailable
from cachedfs.origins.base import Origin
from cachedfs.origins.drive.quota import QuotaMeter
from cachedfs.origins.registry import open_origin

__all__ = ["Engine"]

logger = logging.getLogger("cachedfs.core")

T = TypeVar("T")

LOOK_S = 1.0  # a waiting thread looks for an interrupt
CHECK_S = 0.05  # while that limit is exceeded: seconds between checks whether a caller waits by now
DRAIN_S = 5.0  # longest wait for the last blocks to be stored at exit
WORKERS = 64  # threads for sync origins and for copying many cached blocks; started on demand
MOST_IN_MEMORY = 64 << 20  # bytes of a readahead window of which nothing can be stored
WINDOW_SHARE = 4  # a readahead window is at most 1 / WINDOW_SHARE of the cache
QUOTA_S = 3.0  # from the first request that is counted against a quota until the counts are stored
UNREACHABLE_S = 30.0  # how long an origin counts as unreachable after a failed connection


class EngineUser(Protocol):
    """Whoever keeps an engine, and gets another one once it is closed."""

    def engine_closed(self) -> None: ...


class Engine(event_log.CounterSource):
    """One per process and cache directory, shared by all filesystem instances that use it.

    Creating one sends no request. Its event loop and thread start with the first miss, so a process that only has
    hits has neither.
    """

    max_queued = 64 << 20  # limit of bytes not stored yet; above it, no response bytes are read

    def __init__(self, directories: Sequence[str], *, explicit: bool) -> None:
        self.pid = os.getpid()
        self.cache = BlockStore(directories, explicit=explicit)
        self.store_queue = StoreQueue(self.cache, self._stored)
        # By digest and index. Invariant: holds a block from the creation of its request until the block is on disk,
        # or its request failed. Changed on the event loop thread and, for stored blocks, in the writer thread.
        self.by_block: dict[tuple[str, int], Download] = {}
        # Requests that hold a request slot or wait for one. Event loop thread only.
        self.active_requests: set[Download] = set()
        self.speculation = SpeculativeQueue()
        self.lookups = SingleFlight(self.spawn)
        self.path_locks = PathLocks(self.cache)
        self.n_reading = (
            0  # reads that wait for requests, without those of open files; event loop thread only
        )
        self.hits = self.misses = self.requests = self.bytes_fetched = self.bytes_served = 0
        self._statistics = StatisticsPublisher(self, self.cache.counts)
        self.cache.call_now_and_then(self._statistics.publish_now_and_then)
        self._origins: dict[str, Origin] = {}
        self._entries: dict[str, OrderedDict[str, Any]] = {}
        # By digest of a version: see `ObjectHistories`. The latest is last.
        self.histories: OrderedDict[str, Any] = OrderedDict()
        self.users: WeakSet[EngineUser] = WeakSet()
        self._quota_meters: dict[str, QuotaMeter] = {}
        self._lookup_slots: dict[tuple[str, int], asyncio.Semaphore] = {}  # by identity and size
        self._unreachable: dict[str, float] = {}  # identity -> monotonic time until which it is unreachable
        self._space_freed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bridges: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBridge] = WeakKeyDictionary()
        self._loop_lock = threading.Lock()  # guards the start of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: DaemonThreadPool
        event_log.watch(self)

    # The event loop and calls into it.

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's own event loop, running in its own thread."""
        if self._loop is None:
            with self._loop_lock:
                if self._loop is None:
                    self._loop = self._start_loop()
        return self._loop

    def _start_loop(self) -> asyncio.AbstractEventLoop:
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
        """Run `coroutine` on the event loop from another thread and return its result.

        An interrupt cancels it.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "a blocking call on the event loop thread of cachedfs would deadlock: call the async method"
            )
        try:
            loop = self._loop or self.loop
        except BaseException:  # a coroutine that is never run would cause a warning
            coroutine.close()
            raise
        future = None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            while True:  # CPython does not notice a Ctrl-C that comes just before a thread begins to wait
                try:
                    return future.result(LOOK_S)
                except TimeoutError:
                    if future.done():
                        return future.result()  # which may be a TimeoutError of its own
        except concurrent.futures.CancelledError:
            raise OriginUnavailable("the process is exiting: the read was canceled") from None
        except BaseException:  # usually KeyboardInterrupt: cancel the work on the loop
            if future is not None:
                future.cancel()
            else:
                _end(coroutine, loop)
            raise

    async def await_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's event loop, and await it from the caller's event loop."""
        caller = asyncio.get_running_loop()
        if caller is self._loop:
            return await coroutine
        if (bridge := self._bridges.get(caller)) is None:
            bridge = self._bridges[caller] = LoopBridge(caller, self.loop)
        return await bridge.run(coroutine)

    def is_loop_thread(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is the event loop thread.

        A blocking call would wait for itself there.
        """
        return thread is self._thread

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule `function` on the event loop from any thread; do nothing once the engine is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that the engine owns until it ends. Event loop thread only."""
        if self.pid == 0:
            coroutine.close()
            raise OriginUnavailable("the process is exiting: cachedfs fetches nothing any more")
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Shared by the filesystem instances.

    def origin(self, protocol: str, options: Mapping[str, Any], *, identity: str, concurrency: int) -> Origin:
        """Return the origin for these options; all filesystem instances of the process share it."""
        token = tokenize(protocol, dict(options), identity, concurrency)
        if token in self._origins:
            return self._origins[token]
        origin = open_origin(
            protocol,
            options,
            identity=identity,
            loop=self.loop,
            on_request=self._count_request,
            concurrency=concurrency,
            alone=lambda path: self.path_locks.held(identity, path, f"{protocol}://{path}"),
            quota_meter=partial(self.quota_meter, identity),
        )
        return self._origins.setdefault(token, origin)

    async def locked(self, hash64: int, *, within_s: float) -> bool:
        """Take a fetch lock, waiting until it is free; return False after `within_s` seconds."""
        return await poll(lambda: self.cache.locks.take(hash64) == 1, within_s=within_s)

    async def wait_for_other_process(self, key: ObjectKey, indexes: Iterable[int]) -> bool:
        """Wait while another process fetches all of these blocks.

        Return True once one of them is on disk, in flight in this process, or free to be fetched. Return False after
        OVERDUE_S seconds: the other process may be stopped, so fetch them here as `overdue`.
        """
        blocks = [(index, key.number + index) for index in indexes]

        def is_over() -> bool:
            for index, fetch_lock in blocks:
                download = self.by_block.get((key.digest, index))
                if self.cache.has(key, index) or (download and download.covers(index * key.block_size)):
                    return True
                # A request that does not cover it any more is about to be unregistered.
                if download is None and self.cache.locks.take(fetch_lock):
                    self.cache.locks.release(fetch_lock)
                    return True
            return False

        return await poll(is_over, within_s=OVERDUE_S)

    def entries(self, identity: str) -> OrderedDict[str, Any]:
        """Return the entries of the origin with this identity, by path: see `Objects`."""
        # A plain dict would search from its start for the oldest entry, past all the removed ones.
        return self._entries.setdefault(identity, OrderedDict())

    def quota_meter(self, identity: str) -> QuotaMeter:
        """Return what counts the quota of the Drive account with this identity, for all processes."""
        if (meter := self._quota_meters.get(identity)) is None:
            store = self.cache.quota
            load, add = partial(store.of_account, identity), partial(store.add, identity)
            meter = QuotaMeter(identity, load=load, add=add, soon=self._store_quota_soon)
            meter = self._quota_meters.setdefault(identity, meter)
        return meter

    def _store_quota_soon(self, store: Callable[[], None]) -> None:
        """Called on the event loop thread, where requests are counted."""
        self.loop.call_later(QUOTA_S, partial(self.store_queue.put, then=store))

    def lookup_slots(self, identity: str, most: int) -> asyncio.Semaphore:
        """Return the semaphore that allows `most` lookups at an origin at a time. Event loop thread only."""
        return self._lookup_slots.setdefault((identity, most), asyncio.Semaphore(most))

    def is_unreachable(self, identity: str) -> bool:
        """Return whether an origin counts as unreachable.

        It does for UNREACHABLE_S seconds after it could not be reached.
        """
        return time.monotonic() < self._unreachable.get(identity, 0.0)

    def mark_unreachable(self, identity: str) -> None:
        self._unreachable[identity] = time.monotonic() + UNREACHABLE_S

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
            old_caches=self.cache.old_caches,
        )

    def sums(self) -> dict[str, Any]:
        """Return the counters of `stats` that need no disk access, and the measured speed of the link."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "requests": self.requests,
            "bytes_fetched": self.bytes_fetched,
            "bytes_served": self.bytes_served,
            "evictions": self.cache.evictions,
            "bytes_per_s": self.speculation.bytes_per_s,
        }

    def _count_request(self) -> None:
        self.requests += 1

    def window(self, config: Config) -> int:
        """Return the size in bytes of the readahead window of one file.

        It is `read_ahead`, or less if the cache is small. A block is used twice: when it is stored and when its reader
        reads it. In between, the rest of the window goes through the cache. If a window took more than a quarter of the
        cache, eviction would remove blocks that were read ahead and not read yet, as other readers and requests need
        space too.
        """
        if self.cache.cannot_store is not None:  # blocks stay in memory until they are read
            return min(config.read_ahead, MOST_IN_MEMORY)
        allowed = self.cache.allowed
        if allowed is None:  # finding out takes a transaction: leave it to the writer, use a small window now
            self.store_queue.put(then=lambda: self.cache.allowance(config.bounds))
            allowed = WINDOW_SHARE * 2 * config.whole_request
        return min(config.read_ahead, max(allowed // WINDOW_SHARE, config.block_size))

    def fits(self, config: Config, size: int) -> bool:
        """Return whether an object of `size` bytes may be fetched as a whole.

        It must fit in half of the cache.
        """
        if self.cache.cannot_store is not None:
            return False
        self.window(config)  # called to look up `cache.allowed`
        return size <= (self.cache.allowed or 2 * config.whole_request) // 2

    # Storing blocks.

    def received(self, blocks: Sequence[FetchedBlock]) -> None:
        """Queue complete blocks for storing; their downloads serve them until then."""
        self.misses += len(blocks)
        for block in blocks:
            block.download.n_received += 1
        self.store_queue.put(blocks)

    async def wait_for_space(self, download: Download) -> None:
        """Wait until few enough bytes are waiting to be stored to read more of this request's body."""
        while self._is_behind(download):
            self._space_freed.clear()
            if self._is_behind(download):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):  # a caller may wait by now: see _is_behind
                        await self._space_freed.wait()

    def _is_behind(self, download: Download) -> bool:
        """Return whether too many bytes wait to be stored to receive more of this download.

        Speculative requests get half. With a disk slower than the link, they would otherwise delay the reads that
        callers wait for.
        """
        is_ahead = download.is_speculative and not download.is_wanted
        return self.store_queue.queued_bytes > (self.max_queued // 2 if is_ahead else self.max_queued)

    def _stored(self, blocks: Sequence[FetchedBlock], are_stored: bool) -> None:
        try:
            for block in blocks:
                block.download.stored(are_stored)
                # The name may belong to a newer request by now.
                if self.by_block.get((block.key.object.digest, block.key.index)) is block.download:
                    self.release_block(block.key.object, block.key.index)
        finally:
            self.call_soon(self._after_storing)
            self._statistics.publish_now_and_then()

    def _after_storing(self) -> None:
        self._space_freed.set()
        self.speculation.pump()

    def release_block(self, key: ObjectKey, index: int) -> None:
        """Release a block that is on disk or no longer fetched: its download, and its fetch lock."""
        self.by_block.pop((key.digest, index), None)
        self.cache.locks.release(key.number + index)

    # Shutdown.

    def disconnect(self) -> None:
        """Let those who use this engine get a new one."""
        self.pid = 0
        for user in list(self.users):
            user.engine_closed()

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until all received blocks are on disk.

        Return False if that takes longer than `timeout_s` seconds.
        """
        return self.store_queue.drain(timeout_s)

    def close(self) -> None:
        """Store received blocks, close the origins' sessions and end both threads.

        Called when the process exits.
        """
        self.disconnect()
        if self._loop is not None:
            # Canceled tasks have no reader left: keep asyncio from reporting them.
            self._loop.set_exception_handler(lambda loop, context: None)
        self.drain()
        self.store_queue.close()
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._end_loop(self._loop, self._thread)
        event_log.unwatch(self)
        self._statistics.close()
        for meter in self._quota_meters.values():
            with contextlib.suppress(CacheError):
                meter.store()
        self.cache.close()

    def _end_loop(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result(DRAIN_S)
        except Exception as error:  # the remaining steps must run whatever fails here
            logger.debug("requests did not end in time: %s", error)
        # Before the loop stops: canceled futures notify it.
        self._workers.shutdown(wait=False, cancel_futures=True)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)

    async def _shut_down(self) -> None:
        """Cancel all tasks and close the origins.

        Reads from other threads then get an error instead of hanging.
        """
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for origin in self._origins.values():
            with contextlib.suppress(Exception):  # the other origins must still be closed
                await origin.aclose()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop in this thread, then close it.

    `_end_loop` waits only one second for its end, so it cannot close it.
    """
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a coroutine if an interrupt left it unknown whether the loop has it.

    Done on the loop, because the coroutine may be running.
    """

    def end() -> None:
        task = next((task for task in asyncio.all_tasks() if task.get_coro() is coroutine), None)
        if task is not None:
            task.cancel()
        else:
            coroutine.close()

    try:
        loop.call_soon_threadsafe(end)  # runs after the call that submitted the coroutine, if any
    except RuntimeError:  # the loop is closed: it never got the coroutine
        coroutine.close()
