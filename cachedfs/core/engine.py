"""The state of a process per cache directory: event loop, downloads, cache writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from fsspec.utils import tokenize

from cachedfs.cache.block_store import BlockStore
from cachedfs.common import event_log
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.single_flight import SingleFlight
from cachedfs.common.types import Counted, ObjectKey, Stats
from cachedfs.config import Config, SharedOptions
from cachedfs.core.download import Download, FetchedBlock
from cachedfs.core.path_locks import PathLocks
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.core.speculation import SpeculativeQueue
from cachedfs.core.store_queue import StoreQueue
from cachedfs.errors import CacheError, OriginUnavailable
from cachedfs.origins.base import Origin
from cachedfs.origins.drive.quota import QuotaMeter
from cachedfs.origins.registry import open_origin
from cachedfs.shared import SharedCache

__all__ = ["Engine"]

logger = logging.getLogger("cachedfs.core")

T = TypeVar("T")

LOOK_S = 1.0  # a waiting thread looks for an interrupt
DRAIN_S = 5.0  # longest wait for requests to end at exit
WORKERS = 64  # threads for sync origins and for copying many cached blocks; started on demand
MOST_IN_MEMORY = 64 << 20  # bytes of a readahead window of which nothing can be stored
WINDOW_SHARE = 4  # a readahead window is at most 1 / WINDOW_SHARE of the cache
QUOTA_S = 3.0  # from the first request that is counted against a quota until the counts are stored
UNREACHABLE_S = 30.0  # how long an origin counts as unreachable after a failed connection
PUBLISH_S = 1.0  # between two additions to the statistics of all processes
DEADLOCK = "a blocking call on the event loop thread of cachedfs would deadlock: call the async method"
EXITING = "the process is exiting: the read was canceled"
COUNTED = Counted._fields[:-1]


class Engine:
    """One per process, cache directory and shared cache; all filesystem instances that use them share it.

    Creating one sends no request. Its event loop and thread start with the first miss, so a process that only has
    hits has neither.
    """

    max_queued = 64 << 20  # limit of bytes not stored yet; above it, no response bytes are read

    def __init__(self, directory: str, *, explicit: bool, shared: SharedOptions | None = None) -> None:
        self.pid = os.getpid()
        self.cache_dir = directory
        self.cache = BlockStore(directory, explicit=explicit)
        self.shared = shared and SharedCache(shared, self.cache)
        self.store_queue = StoreQueue(self.cache, self._stored)
        self.drain = self.store_queue.drain
        # By digest and index. Invariant: holds a block from the creation of its request until the block is on disk,
        # or its request failed. Changed on the event loop thread and, for stored blocks, in the writer thread.
        self.by_block: dict[tuple[str, int], Download] = {}
        # Requests that hold a request slot or wait for one. Event loop thread only.
        self.active_requests: set[Download] = set()
        # Of these: their bodies wait for a reader that wants more.
        self.paused_requests: set[Download] = set()
        self.speculation = SpeculativeQueue()
        self.lookups = SingleFlight()
        self.path_locks = PathLocks(self.cache)
        # Reads that wait for requests, without those of open files. Event loop thread only.
        self.n_reading = 0
        self.hits = self.requests = self.bytes_fetched = self.bytes_served = 0
        self._published: Mapping[str, Any] = {}  # the counters that are in the statistics of all processes
        self._publish_at = 0.0
        self._publishing = threading.RLock()
        self.cache.call_now_and_then(self.publish)
        self._origins: dict[str, Origin] = {}
        self._entries: dict[str, OrderedDict[str, Any]] = {}
        # By digest of a version: see `ObjectHistory`. The latest is last.
        self.histories: OrderedDict[str, Any] = OrderedDict()
        self.users: WeakSet[Any] = WeakSet()  # those whose `engine_closed` is called once this one is closed
        self._quota_meters: dict[str, QuotaMeter] = {}
        self.folder_names: dict[tuple[str, str], Any] = {}  # see `Lookups`; by caller key and folder
        self._lookup_slots: dict[tuple[str, int], asyncio.Semaphore] = {}  # by identity and size
        self._unreachable: dict[str, float] = {}  # identity -> monotonic time until which it is unreachable
        # Tasks that this engine owns until they end, by their coroutines. Event loop thread only.
        self._tasks: dict[Coroutine[Any, Any, Any], asyncio.Task[Any]] = {}
        # Of each coroutine that another thread or loop waits for: what is called with its task, or with None if the loop
        # has closed before it ended.
        self._callers: dict[Coroutine[Any, Any, Any], Callable[[asyncio.Task[Any] | None], object]] = {}
        self._loop_lock = threading.Lock()  # guards the start of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = (
            None  # of the event loop: a blocking call would wait for itself there
        )
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
        self.thread = threading.Thread(target=self._run, args=(loop,), name="cachedfs-io", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # too many threads, or (Python 3.12) the main thread has ended
            loop.close()
            raise OriginUnavailable(f"nothing can be fetched: {error}") from error
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the event loop from another thread and return its result; an interrupt cancels it."""
        ended: SimpleQueue[asyncio.Task[T] | None] = SimpleQueue()
        try:
            if threading.current_thread() is self.thread:
                raise RuntimeError(DEADLOCK)
            self._begin(coroutine, ended.put)
            while True:  # CPython does not notice a Ctrl-C that comes just before a thread begins to wait
                with contextlib.suppress(Empty):
                    task = ended.get(timeout=LOOK_S)
                    break
            if task is None:
                raise OriginUnavailable(EXITING)
        except BaseException:  # usually KeyboardInterrupt
            self._cancel_soon(coroutine)
            raise
        finally:
            self._callers.pop(coroutine, None)
        try:
            return task.result()
        except asyncio.CancelledError:
            raise OriginUnavailable(EXITING) from None
        finally:
            del task  # its error refers to this frame

    async def await_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's event loop, and await it from the caller's event loop.

        With `asyncio.run_coroutine_threadsafe` this would take twice as long.
        """
        caller = asyncio.get_running_loop()
        if caller is self._loop:
            return await coroutine
        ended: asyncio.Future[asyncio.Task[T] | None] = caller.create_future()

        def answer(task: asyncio.Task[T] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                caller.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(task))

        try:
            self._begin(coroutine, answer)
            task = await ended
            if task is None:
                raise OriginUnavailable(EXITING)
        except BaseException:  # usually CancelledError
            self._cancel_soon(coroutine)
            raise
        finally:
            self._callers.pop(coroutine, None)
        try:
            return task.result()
        except asyncio.CancelledError:
            raise OriginUnavailable(EXITING) from None

    def _begin(
        self, coroutine: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T] | None], object]
    ) -> None:
        """Start a task from another thread, and call `ended` with it at its end; with None if the loop ends before."""
        self._callers[coroutine] = ended
        try:
            (self._loop or self.loop).call_soon_threadsafe(self.spawn, coroutine, ended)
        except RuntimeError:  # the loop has just been closed
            ended(None)

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], object] | None = None
    ) -> asyncio.Task[T]:
        """Start a task that the engine owns until it ends, and call `ended` then. Event loop thread only."""
        task = self._tasks[coroutine] = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(partial(self._tasks.pop, coroutine))
        if ended is not None:
            task.add_done_callback(ended)
        return task

    def _cancel_soon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Cancel a coroutine that the loop may have or not: an interrupt leaves that unknown."""

        def cancel() -> None:
            if (task := self._tasks.get(coroutine)) is None:
                coroutine.close()
            else:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

        if not self.call_soon(cancel):  # runs after `spawn`, if that was scheduled
            with contextlib.suppress(RuntimeError):  # it began, and waits again as it is closed
                coroutine.close()

    def call_soon(self, function: Callable[..., object], *args: Any) -> bool:
        """Schedule `function` on the event loop from any thread; return False, and do nothing, without a loop."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
            return True
        except RuntimeError:  # the loop has just been closed
            return False

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

    async def wait_for_other_process(self, key: ObjectKey, index: int) -> bool:
        """Wait while another process fetches a block.

        Return True once it is on disk, in flight in this process, or free to be fetched. Return False after OVERDUE_S
        seconds: the other process may be stopped, so fetch it here as `overdue`.
        """
        fetch_lock = key.number + index

        def is_over() -> bool:
            download = self.by_block.get((key.digest, index))
            if self.cache.has(key, index) or (download and download.covers(index * key.block_size)):
                return True
            # A request that does not cover it any more is about to be unregistered.
            is_free = download is None and self.cache.locks.take(fetch_lock) == 1
            if is_free:
                self.cache.locks.release(fetch_lock)
            return is_free

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
        sums, (blocks, size) = self.sums(), self.cache.usage()
        return Stats(
            **{name: sums[name] for name in COUNTED},
            blocks=blocks,
            bytes_cached=size,
            cache_dir=self.cache.root or "",
            cannot_store=self.cache.cannot_store,
            old_caches=self.cache.old_caches,
            shared_cache=repr(self.shared) if self.shared else "",
        )

    def sums(self) -> dict[str, Any]:
        """Return the counters of `stats` that need no disk access, and the measured speed of the link."""
        bytes_shared = self.shared.bytes_read if self.shared else 0
        return {
            "hits": self.hits,
            "misses": self.store_queue.n_blocks,
            "requests": self.requests,
            "bytes_fetched": max(0, self.bytes_fetched - bytes_shared),
            "bytes_shared": bytes_shared,
            "bytes_served": self.bytes_served,
            "evictions": self.cache.evictions,
            "bytes_per_s": self.speculation.bytes_per_s,
        }

    def publish(self) -> None:
        """Add what was counted since the last time to the statistics of all processes, at most once a second."""
        if time.monotonic() < self._publish_at:
            return
        with self._publishing:
            self._publish_at = time.monotonic() + PUBLISH_S
            before, self._published = self._published, self.sums()
            # A counter may decrease if its owner was recreated.
            self.cache.counts.add([max(0, self._published[name] - before.get(name, 0)) for name in COUNTED])

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

    async def wait_for_space(self, download: Download) -> None:
        """Wait until few enough bytes are waiting to be stored to read more of this request's body.

        Speculative requests get half. With a disk slower than the link, they would otherwise delay the reads that
        callers wait for.
        """

        def has_space() -> bool:  # looks again: a caller may wait by now
            is_ahead = download.is_speculative and not download.is_wanted
            return self.store_queue.queued_bytes <= (self.max_queued // 2 if is_ahead else self.max_queued)

        await poll(has_space)

    def _stored(self, blocks: Sequence[FetchedBlock], are_stored: bool) -> None:
        for block in blocks:
            block.download.stored(are_stored)
            key, index = block.key.object, block.key.index
            if self.by_block.get((key.digest, index)) is block.download:  # not a newer request
                self.by_block.pop((key.digest, index), None)
                self.cache.locks.release(key.number + index)
        if self.shared is not None and are_stored:
            self.shared.note(
                (each.key.object, each.download.info, each.key.index) for each in blocks if each.download.info
            )
        if self.speculation.queued:
            self.call_soon(self.speculation.pump)

    def release_block(self, key: ObjectKey, index: int) -> None:
        """Release a block that is no longer fetched: its download, and its fetch lock."""
        self.by_block.pop((key.digest, index), None)
        self.cache.locks.release(key.number + index)

    # Shutdown.

    def disconnect(self) -> None:
        """Let those who use this engine get a new one."""
        self.pid = 0
        for user in list(self.users):
            user.engine_closed()

    def close(self) -> None:
        """Store received blocks, close the origins' sessions and end both threads.

        Called when the process exits.
        """
        self.disconnect()
        if self._loop is not None and self.thread is not None and self.thread.is_alive():
            self._end_loop(self._loop, self.thread)
        self.drain()
        self.store_queue.close()
        if self.shared is not None:
            self.shared.close()
        event_log.unwatch(self)
        self._publish_at = 0.0
        self.publish()
        self._publish_at = math.inf
        for meter in self._quota_meters.values():
            with contextlib.suppress(CacheError):
                meter.store()
        self.cache.close()

    def _end_loop(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        # Canceled tasks have no reader left: keep asyncio from reporting them.
        loop.set_exception_handler(lambda loop, context: None)
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

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the event loop in its thread, then close it, and answer those who still wait.

        `_end_loop` waits only one second for its end, so it cannot close it.
        """
        with self._loop_lock:  # after an interrupt of its start, it is not used
            is_used = self._loop is loop
        try:
            if is_used:
                loop.run_forever()
        finally:
            loop.close()
            for answer in list(self._callers.values()) if is_used else ():
                answer(None)
