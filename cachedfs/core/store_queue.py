"""A background thread that stores fetched blocks and metadata records on disk.

Readers do not wait for it: they take their bytes from the download.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import BlockKey, CacheBounds
from cachedfs.core.download import Download
from cachedfs.errors import CacheError

__all__ = ["StoreQueue", "FetchedBlock"]

logger = logging.getLogger("cachedfs.core")

GATHER_S = 0.005  # everything added within this time is stored in one transaction
BATCH_BYTES = 8 << 20  # per transaction: amortizes its cost, and still lets drain() end in time


class FetchedBlock(NamedTuple):
    """One complete block that was received from the origin and is not on disk yet."""

    key: BlockKey
    pieces: list[memoryview]
    size: int  # of all pieces, in bytes
    download: Download
    bounds: CacheBounds


class StoreQueue:
    """One thread that stores blocks and metadata records, oldest first. The first addition starts it.

    `queued_bytes` is the number of bytes not stored yet. While it is too large, the engine reads no more response
    bytes.
    """

    def __init__(self, cache: BlockStore, stored: Callable[[Sequence[FetchedBlock], bool], None]) -> None:
        self._cache = cache
        self._stored = stored  # called for each batch with True if all its blocks were stored
        # Always entered directly: an interrupt inside `with self._changed` would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._blocks: list[FetchedBlock] = []
        self._records: list[MetadataRecord] = []
        self._callbacks: list[Callable[[], object]] = []
        self._idle = False  # the thread waits for a first item, not for more items of a batch
        self._busy = False
        self._closed = False
        self._draining = 0  # number of callers in drain()
        self._thread: threading.Thread | None = None
        self._has_warned = False  # the failure to start the thread was logged
        # Of each active prefetch plan: returns which of the fetched blocks to store, and those to evict first for them.
        # Changed on the event loop thread.
        self.plans: list[Callable[[Sequence[BlockKey]], tuple[Sequence[BlockKey], Iterator[BlockKey]]]] = []
        self.queued_bytes = 0  # Invariant: bytes in _blocks and in the batch that is being written

    def put(
        self,
        blocks: Sequence[FetchedBlock] = (),
        records: Sequence[MetadataRecord] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """Queue blocks and metadata records for storing.

        `then` is called in the writer thread once the records added so far are stored.
        """
        with self._lock:
            self._blocks += blocks
            self._records += records
            if then is not None:
                self._callbacks.append(then)
            self.queued_bytes += sum([block.size for block in blocks])
            is_running = self._thread is not None or self._start()
            # Waking the thread for each of many small blocks would cost as much as storing them.
            if self._idle or self.queued_bytes >= BATCH_BYTES:
                self._idle = False  # it wakes once
                self._changed.notify_all()
        if not is_running:
            self._remove_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and stored.

        Return False if that takes longer than `timeout_s` seconds.
        """
        with self._lock:
            self._draining += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: not (self._blocks or self._records or self._callbacks or self._busy), timeout_s
                )
            finally:
                self._draining -= 1

    def close(self) -> None:
        """End the thread once the queue is empty."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> bool:
        """Start the thread; return False if it cannot be started."""
        thread = threading.Thread(target=self._run, name="cachedfs-write", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or (Python 3.12) the main thread has ended
            if not self._has_warned:
                self._has_warned = True
                logger.warning("blocks are not cached while no thread can be started: %s", error)
            return False
        self._thread = thread
        return True

    def _remove_all(self) -> None:
        """Empty the queue because no thread can store it.

        Otherwise requests would wait for space forever. The next addition tries again to start the thread.
        """
        with self._lock:
            blocks, callbacks = self._blocks, self._callbacks
            self._blocks, self._records, self._callbacks = [], [], []
            self.queued_bytes -= sum(block.size for block in blocks)
        for function in callbacks:
            self._attempt(function)
        if blocks:
            self._attempt(lambda: self._stored(blocks, False))

    def _run(self) -> None:
        while self._store_next():
            pass

    def _store_next(self) -> bool:
        """Wait for items and store one batch; return False when the thread should end."""
        with self._lock:
            self._busy = False
            self._changed.notify_all()  # for `drain`
            while not (self._blocks or self._records or self._callbacks):
                if self._closed:
                    return False
                self._idle = True
                self._changed.wait()
            self._idle = False
            # Wait a moment: a caller that reads small objects one by one can send its next request undisturbed.
            if not (self._closed or self._draining or self.queued_bytes >= BATCH_BYTES):
                self._changed.wait(GATHER_S)
            blocks, records, callbacks = self._batch(), self._records, self._callbacks
            self._records, self._callbacks, self._busy = [], [], True
        with contextlib.suppress(OSError):  # a broken directory: storing says why
            self._cache.wait_for_deletion()
        # Metadata first: another process that sees the object then finds its blocks locked, and does not fetch them.
        if records:
            self._attempt(lambda: self._cache.metadata.keep_records(records))
        for function in callbacks:
            self._attempt(function)
        if blocks:
            keys: Sequence[BlockKey] = [block.key for block in blocks]
            bounds = blocks[0].bounds
            victims: Iterator[BlockKey] = iter(())
            for plan in tuple(self.plans):
                keys, more = plan(keys)
                victims = chain(victims, more)
            stored = set(keys)
            pairs = [(block.key, block.pieces) for block in blocks if block.key in stored]
            are_stored = self._attempt(lambda: self._cache.put(pairs, bounds, victims=victims))
            with self._lock:
                self.queued_bytes -= sum(block.size for block in blocks)
            self._attempt(lambda: self._stored(blocks, are_stored))
        return True

    def _batch(self) -> list[FetchedBlock]:
        """Take the oldest blocks that share cache bounds, up to one batch."""
        size = n = 0
        for block in self._blocks:
            size += block.size
            if n and (size > BATCH_BYTES or block.bounds != self._blocks[0].bounds):
                break
            n += 1
        batch, self._blocks = self._blocks[:n], self._blocks[n:]
        return batch

    def _attempt(self, act: Callable[[], object]) -> bool:
        """Call `act` and return whether it succeeded; log errors.

        This thread must go on, because requests wait for it.
        """
        try:
            act()
        except CacheError as error:
            logger.debug("not kept: %s", error)  # the cache warns once; a read never fails because of it
            return False
        except Exception:  # reads go on without storing
            logger.exception("blocks could not be stored")
            return False
        return True
