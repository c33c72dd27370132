"""A background thread that stores fetched blocks and metadata records on disk.

Readers do not wait for it: they take their bytes from the download.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_store import BlockStore
    from cachedfs.cache.index.metadata_records import MetadataRecord
    from cachedfs.common.types import BlockKey, CacheBounds
    from cachedfs.core.download import FetchedBlock

    _Pairs = Sequence[tuple[BlockKey, Sequence[memoryview]]]

logger = logging.getLogger("cachedfs.core")

# A caller that reads small objects one by one can send its next request undisturbed, and waking the thread for each of
# many small blocks would cost as much as storing them.
GATHER_S = 0.005
BATCH_BYTES = 8 << 20  # stored at once, about: amortizes a transaction, and lets drain() end in time
# A block counts as at least so many bytes: it takes as long to store, and the kernel looks through the locks of all blocks
# that wait for each lock that is taken.
LEAST_BYTES = 256 << 10
DRAIN_S = 5.0  # longest wait for the last blocks to be stored at exit


class _Item(NamedTuple):
    blocks: Sequence[FetchedBlock]
    bounds: CacheBounds | None  # of the cache, for blocks
    records: Sequence[MetadataRecord]
    then: Callable[[], object] | None


_BOUNDS, _KEY, _IS_SHARED = attrgetter("bounds"), attrgetter("key"), attrgetter("download.is_shared")


class StoreQueue:
    """One thread that stores blocks and metadata records, oldest first. The first addition starts it.

    `queued_bytes` is the number of bytes not stored yet. While it is too large, the engine reads no more response
    bytes.
    """

    def __init__(self, cache: BlockStore, stored: Callable[[Sequence[FetchedBlock], bool], None]) -> None:
        self._cache = cache
        self._stored = stored  # called with blocks, and with True if all of them were stored
        # Written in C: an interrupt leaves no lock held, as it may in `threading.Condition`. None ends the thread.
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.RLock()  # guards the start of the thread, and the counters
        self._thread: threading.Thread | None = None
        self._has_warned = False  # the failure to start the thread was logged
        # A function of each active prefetch plan: it returns which of the fetched blocks to store, and which cached ones
        # to evict first for them. Changed on the event loop thread.
        self.plans: list[Callable[[_Pairs], tuple[_Pairs, Iterator[BlockKey]]]] = []
        self.queued_bytes = 0
        self.n_blocks = 0  # blocks added so far

    def put(
        self,
        blocks: Sequence[FetchedBlock] = (),
        bounds: CacheBounds | None = None,
        records: Sequence[MetadataRecord] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """Queue blocks and metadata records for storing, in any thread; blocks, with `bounds`, on the event loop thread.

        `then` is called in the writer thread once all that was added so far is stored.
        """
        with self._lock:
            for block in blocks:
                block.download.n_received += 1
                self.queued_bytes += max(block.size, LEAST_BYTES)
            self.n_blocks += len(blocks)
            self._queue.put(_Item(blocks, bounds, records, then))
            if self._thread is None and not sys.is_finalizing():  # a thread would never begin then
                self._start()
            is_possible = self._thread is not None
        if not is_possible:
            self._remove_all()

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until all that was added so far is stored.

        Return False if that takes longer than `timeout_s` seconds.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        stored: SimpleQueue[None] = SimpleQueue()
        self.put(then=partial(stored.put, None))
        with contextlib.suppress(Empty):
            stored.get(timeout=timeout_s)
            return True
        return False

    def close(self) -> None:
        """End the thread once all that was added so far is stored; the next addition starts another."""
        self._has_warned = True  # the process is exiting
        self._queue.put(None)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="cachedfs-write", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # too many threads, or (Python 3.12) the main thread has ended
            if not self._has_warned:
                self._has_warned = True
                logger.warning("blocks are not cached while no thread can be started: %s", error)

    def _remove_all(self) -> None:
        """Empty the queue because no thread can store it.

        Otherwise requests would wait for space forever. The next addition tries again to start the thread.
        """
        items: list[_Item] = []
        with contextlib.suppress(Empty):
            while item := self._queue.get_nowait():
                items.append(item)
        self._store(items, is_possible=False)

    def _run(self) -> None:
        with self._lock:  # after an interrupt of its start, another thread is used
            is_open = is_used = self._thread is threading.current_thread()
        while is_open and (item := self._queue.get()) is not None:
            if (item.blocks or item.records) and self.queued_bytes < BATCH_BYTES:
                time.sleep(GATHER_S)
            items, size = [], 0
            while item is not None:
                items.append(item)
                size += sum([block.size for block in item.blocks])
                if size >= BATCH_BYTES or self._queue.empty():
                    break
                item = self._queue.get()
            self._store(items)
            is_open = item is not None
            del item, items  # their bytes would stay in memory until the next ones come
        if is_used:
            with self._lock:
                self._thread = None
            if not self._queue.empty():  # what was added after `close`
                self.put()

    def _store(self, items: Sequence[_Item], *, is_possible: bool = True) -> None:
        # Metadata no later than blocks: a process that sees an object finds its blocks locked, and does not fetch them.
        records = [record for item in items for record in item.records] if is_possible else []
        for bounds, group in groupby([item for item in items if item.blocks], _BOUNDS):
            blocks = [block for item in group for block in item.blocks]
            pairs = [(block.key, block.pieces) for block in blocks]
            shared = set(map(_KEY, filter(_IS_SHARED, blocks)))
            put = partial(self._put_by_plans if self.plans else self._cache.put, shared=shared)
            if are_stored := is_possible and self._attempt(put, pairs, bounds, records):
                records = []
            with self._lock:
                self.queued_bytes -= sum([max(block.size, LEAST_BYTES) for block in blocks])
            self._attempt(self._stored, blocks, are_stored)
        if records:
            self._attempt(partial(self._cache.metadata.keep_records, waits=True), records)
        for item in items:
            if item.then is not None:
                self._attempt(item.then)

    def _put_by_plans(
        self,
        pairs: _Pairs,
        bounds: CacheBounds,
        records: Sequence[MetadataRecord],
        *,
        shared: Collection[BlockKey],
    ) -> None:
        """Store what the prefetch plans do not leave out, evicting what they can spare first."""
        victims: Iterator[BlockKey] = iter(())
        for plan in tuple(self.plans):
            pairs, more = plan(pairs)
            victims = chain(victims, more)
        self._cache.put(pairs, bounds, records, victims, shared=shared)

    def _attempt(self, act: Callable[..., object], *args: object) -> bool:
        """Call `act` and return whether it succeeded; log errors.

        This thread must go on, because requests wait for it.
        """
        try:
            act(*args)
        except CacheError as error:
            logger.debug("not kept: %s", error)  # the cache warns once; a read never fails because of it
            return False
        except Exception:  # reads go on without storing
            logger.exception("blocks could not be stored")
            return False
        return True
