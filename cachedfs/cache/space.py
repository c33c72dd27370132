"""Eviction: compute how much the cache may hold, and remove blocks to make space before a write.

Runs inside the transaction that reserves the new rows. Eviction unlinks the file first and deletes the row second, so a
crash in between has a row without a file: it counts toward the cache size until it is evicted.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable

from cachedfs.cache import admission, disk
from cachedfs.cache.access_stats import AccessStats
from cachedfs.cache.admission import AccessHistory
from cachedfs.cache.change_counters import TABLE_SIZE
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.block_rows import BlockRow, BlockRows
from cachedfs.cache.index.database import CacheIndex, IndexRows
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.recovery import count_all, remove_leftovers
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.common.types import BlockKey, CacheBounds

__all__ = ["UNWRITTEN_S", "CacheSpace", "likely_allowance"]

_BATCH = 4096  # rows examined together: in a cache of up to this many blocks, eviction is exact LRU
_FEW = 64
UNWRITTEN_S = 60.0  # for this long, a row without a file may be a block that another process is writing
_SHARED_MEMORY = 32 << 10  # bytes of `index.db-shm` beside a log of at most 4,096 pages
_SLACK = 64 << 10  # bytes that one transaction may add to the index beyond its write-ahead log


class CacheSpace:
    """Space management of one cache in one process. Every method runs inside a write transaction, so in one thread.

    `overhead` and `growth`: bytes of the bookkeeping files, and the part of them that is not on the disk yet, as of the last
    `prepare`.
    """

    _rows: BlockRows  # of the transaction, set in `make`
    _accesses: AccessStats

    def __init__(
        self,
        directory: CacheDirectory,
        index: CacheIndex,
        locks: ByteRangeLocks,
        shared: SharedFiles,
        close_removed: Callable[[tuple[str, int]], object],
    ) -> None:
        self._directory = directory
        self._index = index
        self._close_removed = close_removed
        self._locks = locks
        self._shared = shared
        self._limit = 0  # what blocks may have when `make` is done
        self._cursor = 0  # the row after which the next batch of candidates is read
        # The access clocks of rows when they were queued; least recently used first.
        self._queue: dict[int, int] = {}
        self._stuck: set[int] = set()  # rows whose files are being written; not evicted in this transaction
        self.writer = self.writer_pid = 0
        self.writing: set[str] = set()  # Invariant: names of the blocks of reserved rows without a file yet
        self.overhead = self.growth = 0
        self.evictions = 0

    def prepare(self, rows: IndexRows, bounds: CacheBounds, now_s: float) -> int:
        """Do what is done about once a second before writes; return how many bytes the blocks may have.

        Count the files if the index is new, remove what dead processes left, and measure the bookkeeping.
        """
        if self.writer_pid != os.getpid():
            self.writer, self.writer_pid, self.writing = secrets.randbits(62), os.getpid(), set()
            self._locks.take(self.writer)
        if not rows.totals.is_counted:
            count_all(rows, self._directory, now_s)
        wal_pages = wal_pages_of(bounds)
        if wal_pages != self._index.wal_pages:
            self._index.wal_pages = wal_pages
            rows.limit_wal(wal_pages)
        uncounted = remove_leftovers(self._directory, self._locks, now_s)
        before, allowed = self._shared.accesses, self._measure(rows, bounds, uncounted)
        accesses, n_blocks = (
            self.accesses(rows, allowed),
            rows.totals.blocks,
        )  # their number follows the limit
        accesses.fit(window=admission.window_of(n_blocks), aging=admission.aging_of(n_blocks))
        return allowed if accesses is before else self._measure(rows, bounds, uncounted)

    def _measure(self, rows: IndexRows, bounds: CacheBounds, uncounted: int) -> int:
        """Measure the index with its logs, shared files, and `uncounted` bytes of files without a row.

        The write-ahead log always counts as twice its limit, the size at which it is restarted. Counting its real size
        would evict blocks whenever it grows, and on a full disk it could not grow, so nothing could be stored. Shared
        files count before their first use: a plan that began without them would fetch more than may stay.
        """
        accesses = self._shared.accesses
        wal, index, *others = map(disk.size_of, self._directory.bookkeeping)
        least = _SHARED_MEMORY, 0, accesses.size if accesses else 0, TABLE_SIZE
        self.growth = max(0, 2 * 4096 * self._index.wal_pages - wal) + _SLACK
        self.overhead = uncounted + sum(map(max, others, least)) + wal + index + self.growth
        free = disk.space(self._directory.root)
        return admission.allowance(bounds, free, rows.totals, self.overhead, self.growth)

    def accesses(self, rows: BlockRows, allowed: int | None) -> AccessStats:
        """Return the access records, enough for `allowed` bytes of blocks."""
        return self._shared.open_accesses(size=allowed, clock=rows.last_clock())

    def make(
        self,
        rows: BlockRows,
        size: int,
        *,
        allowed: int,
        is_staged: bool = True,
        victims: Iterable[BlockKey] = (),
    ) -> bool:
        """Evict blocks until `size` more bytes fit into `allowed`; return False if not enough could be evicted.

        Evictions are not undone on False. `is_staged`: the bytes are new blocks, so older blocks must move out of staging.
        `victims`: blocks to evict before others.
        """
        self._rows, self._accesses, self._limit = rows, self.accesses(rows, allowed), allowed - size
        self._stuck.clear()
        totals, staging = rows.totals, admission.staging_size(allowed)
        spare = iter(victims)
        while self._need > 0 and (victim := next(spare, None)) is not None:
            if (block := rows.block(victim.object, victim.index)) is not None and not block.is_pinned:
                self._evict(block)
        self._shrink_staging(totals.staged + (size if is_staged else 0) - staging, allowed - staging)
        # If the limit shrinks for a while, as by a grown log, staging shrinks first, down to half: old blocks stay.
        self._evict_old(allowed - staging // 2)
        self._evict_new()
        self._evict_old(0)
        return self._need <= 0

    @property
    def _need(self) -> int:
        """The bytes that still have to be freed."""
        return self._rows.totals.bytes - self._limit

    @property
    def _admitted(self) -> int:
        """The bytes outside staging."""
        return self._rows.totals.bytes - self._rows.totals.staged

    def remove(self, rows: BlockRows, block: BlockRow) -> bool:
        """Unlink a block and delete its row; a block that is being written stays, and the result is False."""
        # Checked before unlinking, because the file may appear between the two lines.
        is_underway = self.is_being_written(block)
        was_there = disk.unlink(self.path(block.name))
        self._queue.pop(block.id, None)
        if is_underway and not was_there:
            return False  # otherwise its file would appear without a row
        if not was_there:
            self._limit -= block.size  # no disk space was freed
        # After a crash here there is a row without a file, which counts until it is evicted.
        rows.remove_block(block)
        self._close_removed((block.digest, block.number))
        return True

    def path(self, name: str) -> str:
        """Return the path of the file of a block with this name."""
        return f"{self._directory.blocks}/{name[0]}/{name}"

    def is_being_written(self, block: BlockRow) -> bool:
        """Return whether a row without a file is a block being written, rather than one of a dead process."""
        if block.writer == self.writer and self.writer_pid == os.getpid():
            return block.name in self.writing
        return time.time() < block.stored_at + UNWRITTEN_S and self._locks.is_held(block.writer)

    def _evict(self, block: BlockRow) -> None:
        if self.remove(self._rows, block):
            self.evictions += 1
        else:
            self._stuck.add(block.id)

    def _evict_old(self, most: int) -> None:
        """Evict blocks outside staging, least recently used first, while these have more than `most` bytes."""
        while self._need > 0 and self._admitted > most and (block := self._oldest()):
            self._evict(block)

    def _evict_new(self) -> None:
        """Evict blocks in staging, oldest row first."""
        last = self._rows.totals.last_admitted
        while self._need > 0 and (found := self._rows.blocks_after(last, _FEW)):
            for block in found:
                if self._need > 0 and not block.is_pinned:
                    self._evict(block)
            last = found[-1].id

    def _shrink_staging(self, over: int, most: int) -> None:
        """Move blocks out of staging, oldest row first, until it shrinks by `over` bytes.

        A block is admitted if nothing needs to be freed, or if the blocks outside staging, with it, have at most `most`
        bytes. Otherwise either it or blocks that it replaces are evicted.
        """
        totals = self._rows.totals
        while over > 0 and (found := self._rows.blocks_after(totals.last_admitted, _FEW)):
            for block in found:
                if over <= 0:
                    break
                staged = totals.staged
                if self._need > 0 and not block.is_pinned:
                    self._exchange(block, most)
                if totals.staged == staged:  # it was not evicted itself
                    totals.staged -= block.size
                over -= block.size
                totals.last_admitted = block.id

    def _exchange(self, new: BlockRow, most: int) -> None:
        """Free space for a block that moves out of staging, or evict the block itself."""
        history = self._history(new)
        while self._admitted + new.size > most:
            old = self._oldest()
            if old is None or not self._admits(history, old):
                return self._evict(new)
            self._evict(old)
        return None

    def _admits(self, new: AccessHistory, old: BlockRow) -> bool:
        return admission.admits(new, self._history(old), longest_gap=self._accesses.longest_gap)

    def _oldest(self) -> BlockRow | None:
        """Return the least recently used block outside staging that may be evicted; None if there is none.

        This is the head of the queue, after removing blocks that were accessed, pinned or stored again since they were
        queued. An empty queue is refilled batch by batch, until the whole table was examined.
        """
        n_seen, enough = 0, self._rows.totals.blocks + _BATCH
        while True:
            while self._queue:
                row, clock = next(iter(self._queue.items()))
                block = self._rows.block_by_id(row)
                may_go = block is not None and not block.is_pinned and row not in self._stuck
                if block is not None and may_go and self._clock(block) == clock:
                    return block
                del self._queue[row]
            n_found = self._refill()
            n_seen += n_found
            if n_found == 0 or n_seen > enough:
                return None

    def _refill(self) -> int:
        """Queue the least recently used blocks of the next batch of rows; return how many rows were examined."""
        found = self._rows.admitted_after(self._cursor, _BATCH)
        if not found and self._cursor:
            found = self._rows.admitted_after(0, _BATCH)
        self._cursor = found[-1].id if len(found) == _BATCH else 0
        clocks = {block.id: self._clock(block) for block in found}
        ages = {row: self._accesses.age(clock) for row, clock in clocks.items()}
        self._queue = {row: clocks[row] for row in admission.oldest(ages)}
        return len(found)

    def _clock(self, block: BlockRow) -> int:
        """Return the access clock of a block's last access, or of when it was stored if that was later."""
        use, age = self._accesses.use_of(block.hash64), self._accesses.age
        return block.clock if use is None or age(block.clock) < age(use.clock) else use.clock

    def _history(self, block: BlockRow) -> AccessHistory:
        use, idle = self._accesses.use_of(block.hash64), self._accesses.age(self._clock(block))
        # Without a record the block counts as new, so it is admitted as if there were no rule.
        return AccessHistory(idle, *(use[1:] if use else (0, True)))


def wal_pages_of(bounds: CacheBounds) -> int:
    """Return the limit of the write-ahead log in pages of 4 KiB: 1 MiB, less in a small cache."""
    if isinstance(bounds.size, int):
        return min(256, max(32, bounds.size >> 18))
    return 256


def likely_allowance(root: str | None, bounds: CacheBounds) -> int | None:
    """Estimate how many bytes an empty cache may hold, without its index; None on a disk error.

    This is good enough to choose the number of access records.
    """
    try:
        space = disk.space(root or "")
    except OSError:
        return None
    return admission.allowance(bounds, space, Totals(), 0, 0)
