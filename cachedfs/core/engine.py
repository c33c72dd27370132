"""The state of a process per cache directory: event loop, downloads, cache writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from fsspec.utils import tokenize

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.counters import Counted
from cachedfs.common import event_log
from cachedfs.common.event_loop import EventLoopThread
from cachedfs.common.single_flight import SingleFlight
from cachedfs.common.types import ObjectKey
from cachedfs.config import Config, SharedOptions
from cachedfs.core.download import Download, FetchedBlock
from cachedfs.core.path_locks import PathLocks
from cachedfs.core.polling import OVERDUE_S, poll
from cachedfs.core.speculation import SpeculativeQueue
from cachedfs.core.statistics import Stats
from cachedfs.core.store_queue import StoreQueue
from cachedfs.errors import CacheError
from cachedfs.origins.base import Origin
from cachedfs.origins.drive.quota import QuotaMeter
from cachedfs.origins.registry import open_origin
from cachedfs.shared import SharedCache

logger = logging.getLogger("cachedfs.core")

T = TypeVar("T")

MOST_IN_MEMORY = 64 << 20  # bytes of a readahead window of which nothing can be stored
WINDOW_SHARE = 4  # a readahead window is at most 1 / WINDOW_SHARE of the cache
QUOTA_S = 3.0  # from the first request that is counted against a quota until the counts are stored
UNREACHABLE_S = 30.0  # how long an origin counts as unreachable after a failed connection
PUBLISH_S = 1.0  # between two additions to the statistics of all processes
WORKERS = 64  # threads for sync origins and for copying many cached blocks
END_S = 5.0  # longest wait for tasks to end at exit
COUNTED = Counted._fields[:-1]


class Engine(EventLoopThread):
    """One per process, cache directory and shared cache; all filesystem instances that use them share it.

    Creating one sends no request. Its event loop and thread start with the first miss, so a process that only has
    hits has neither.
    """

    max_queued = 64 << 20  # limit of bytes not stored yet; above it, no response bytes are read

    def __init__(self, directory: str, *, explicit: bool, shared: SharedOptions | None = None) -> None:
        super().__init__(n_workers=WORKERS)
        self.is_open = True  # not closed, and not of the parent process
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
        self.folder_names: dict[tuple[str, str], Any] = {}  # see `NameListings`; by caller key and folder
        self._lookup_slots: dict[tuple[str, int], asyncio.Semaphore] = {}  # by identity and size
        self._unreachable: dict[str, float] = {}  # identity -> monotonic time until which it is unreachable
        event_log.watch(self)

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
            path_lock=lambda path: self.path_locks.held(identity, path, f"{protocol}://{path}"),
            quota_meter=partial(self.quota_meter, identity),
        )
        return self._origins.setdefault(token, origin)

    async def take_lock(self, number: int, *, within_s: float) -> bool:
        """Take a machine-wide lock once it is free; return False after `within_s` seconds."""
        return await poll(lambda: self.cache.locks.take(number) == 1, within_s=within_s)

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
        reads = self.shared and self.shared.reads
        in_bodies, bytes_shared = (reads.body_bytes, reads.bytes_read) if reads else (0, 0)
        return {
            "hits": self.hits,
            "misses": self.store_queue.n_blocks,
            "requests": self.requests,
            "bytes_fetched": max(0, self.bytes_fetched - in_bodies),
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
        allowed = self._allowed(config)
        if allowed is None:
            allowed = WINDOW_SHARE * 2 * config.whole_request
        return min(config.read_ahead, max(allowed // WINDOW_SHARE, config.block_size))

    def _allowed(self, config: Config) -> int | None:
        """Return the maximum size of the cache; None at first, as finding out takes a transaction: in the writer thread."""
        if self.cache.allowed is None:
            self.store_queue.put(then=lambda: self.cache.allowance(config.bounds))
        return self.cache.allowed

    def fits(self, config: Config, size: int) -> bool:
        """Return whether an object of `size` bytes may be fetched as a whole: if it fits in half of the cache."""
        if self.cache.cannot_store is not None:
            return False
        return size <= (self._allowed(config) or 2 * config.whole_request) // 2

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
                (each.key, each.download.info, each.pieces) for each in blocks if each.download.info
            )
        if self.speculation.queued:
            self.call_soon(self.speculation.pump)

    def release_block(self, key: ObjectKey, index: int) -> None:
        """Release a block that is not fetched any more: its download, and its fetch lock. `_stored` does so by itself."""
        self.by_block.pop((key.digest, index), None)
        self.cache.locks.release(key.number + index)

    # Shutdown.

    def disconnect(self) -> None:
        """Let those who use this engine get a new one."""
        self.is_open = False
        for user in list(self.users):
            user.engine_closed()

    def close(self) -> None:
        """Store received blocks, close the origins' sessions and end both threads.

        Called when the process exits.
        """
        self.disconnect()
        self.end_loop(self._close_origins, within_s=END_S)
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

    async def _close_origins(self) -> None:
        for origin in self._origins.values():
            with contextlib.suppress(Exception):  # the other origins must still be closed
                await origin.aclose()
