"""Space of the cache: compute how much it may hold, and evict blocks to make space before a write.

Runs inside the transaction that reserves the new rows. Eviction unlinks the file first and deletes the row second, so a
crash in between has a row without a file: it counts toward the cache size until it is evicted.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from itertools import islice

from cachedfs.cache import disk
from cachedfs.cache.access_stats import AccessStats, BlockAccess, age
from cachedfs.cache.change_counters import TABLE_SIZE
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.block_rows import BlockRow, IndexRows
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.recovery import count_all, remove_leftovers
from cachedfs.common.types import BlockKey, CacheBounds

# Chosen by simulating random epochs, loops, scans and Zipf's law: see tests/cache/test_admission.py.
SLACK = 1.25  # reuse gaps vary between random epochs: a lower value would evict blocks shortly before their next use
MARGIN = 2  # accesses: a lower value would swap blocks that are used equally often
STAGING = 64 << 20  # bytes: the readahead window of one file

# Evicted per transaction: other processes can write in between, and finished work survives an exit.
REMOVED_AT_ONCE = 1000
_BATCH = 4096  # rows examined together: in a cache of up to this many blocks, eviction is exact LRU
_FEW = 64
UNWRITTEN_S = 60.0  # for this long, a row without a file may be a block that another process is writing
_SHARED_MEMORY = 32 << 10  # bytes of `index.db-shm` beside a log of at most 4,096 pages
_SLACK = 64 << 10  # bytes that one transaction may add to the index beyond its write-ahead log


def admits(new: BlockAccess, old: BlockAccess, *, idle: int, longest_gap: int) -> bool:
    """Return whether a block that moves out of staging replaces the least recently used one.

    It does in three cases: it is new (so that the second pass over a new dataset hits); the old block has been `idle`
    for much longer than `longest_gap`, so it is unlikely to be read again; or it is used clearly more often than the
    old one. Otherwise it is evicted. When data larger than the cache is read once per epoch, the cached part therefore
    stays cached, and the hit ratio equals that part, which is the optimum. LRU would evict every block just before its
    next use. A new block of an object larger than the cache replaces nothing: it may never be read again.
    """
    is_unlikely = longest_gap > 0 and idle > SLACK * longest_gap
    return not new.passes and (new.is_new or is_unlikely or new.uses > old.uses + MARGIN)


def staging_size(allowed: int) -> int:
    """Return how many of `allowed` bytes are reserved for new blocks, so that prefetched blocks survive until read."""
    return min(allowed // 2, max(STAGING, allowed // 100))


def allowance(
    bounds: CacheBounds, space: disk.DiskSpace, totals: Totals, overhead: int = 0, growth: int = 0
) -> int:
    """Return how many bytes of blocks and local copies the cache may hold now.

    Sets the automatic size at its first use. If the result is less than it holds, blocks must be evicted. `overhead`:
    bytes of the index and other bookkeeping files, which count toward the cache size. `growth`: the part of `overhead`
    that is not on the disk yet.
    """
    size, kept = (int(n * space.total) if isinstance(n, float) else n for n in bounds)
    if size is None:
        size = totals.automatic_size = totals.automatic_size or (space.free + totals.bytes) // 2
    within_disk = totals.bytes + space.free - growth - (kept or 0)
    return max(0, min(size - overhead, within_disk))


class CacheSpace:
    """Space management of one cache in one process. Every method runs inside a write transaction, so in one thread.

    `overhead` and `growth`: bytes of the bookkeeping files, and the part of them that is not on the disk yet, as of the last
    `prepare`. `writing` has the names of the blocks whose rows this process has reserved, without a file yet.
    """

    _rows: IndexRows  # of the transaction, set in `make`

    def __init__(
        self,
        directory: CacheDirectory,
        locks: ByteRangeLocks,
        accesses: AccessStats,
        close_open: Callable[[tuple[str, int]], object],
    ) -> None:
        self._directory = directory
        self._close_open = close_open
        self._locks = locks
        self._accesses = accesses
        self._limit = 0  # what blocks may have when `make` is done
        self._cursor = 0  # the row after which the next batch of candidates is read
        # The access clocks of rows when they were queued; least recently used first.
        self._queue: dict[int, int] = {}
        self._stuck: set[int] = set()  # rows whose files are being written; not evicted in this transaction
        self.writer = self.writer_pid = 0
        self.writing: set[str] = set()
        self.overhead = self.growth = 0
        self.evictions = 0

    def prepare(self, rows: IndexRows, bounds: CacheBounds, now_s: float, *, stores: bool = False) -> int:
        """Do what is done about once a second before writes; return how many bytes the blocks may have.

        Count the files if the index is new, remove what dead processes left, and measure the bookkeeping: the index with
        its logs, shared files, and files without a row. Only what `stores` blocks makes the access records larger.

        The write-ahead log always counts as twice its limit, the size at which it is restarted. Counting its real size
        would evict blocks whenever it grows, and on a full disk it could not grow, so nothing could be stored. Shared
        files count before their first use: a plan that began without them would fetch more than may stay.
        """
        if self.writer_pid != os.getpid():
            self.writer, self.writer_pid, self.writing = secrets.randbits(62), os.getpid(), set()
            self._locks.take(self.writer)
        if not rows.totals.is_counted:
            count_all(rows, self._directory, now_s)
        # The limit of the write-ahead log in pages of 4 KiB: 1 MiB, less in a small cache.
        wal_pages = min(256, max(32, bounds.size >> 18)) if isinstance(bounds.size, int) else 256
        directory = self._directory
        if wal_pages != directory.index.wal_pages:
            directory.index.wal_pages = wal_pages
            rows.limit_wal(wal_pages)
        space = disk.space(directory.root)
        if stores:
            self._accesses.open(allowance(bounds, space, rows.totals), clock=rows.last_clock())
            self._accesses.fit(rows.totals.blocks)
        uncounted = remove_leftovers(directory.root, self._locks, now_s)
        logs = [f"{directory.index_path}{log}" for log in ("-wal", "", "-shm", "-journal")]
        bookkeeping = [*logs, directory.access_records, directory.change_counters]
        wal, index, *others = map(disk.size_of, bookkeeping)
        least = _SHARED_MEMORY, 0, self._accesses.disk_size, TABLE_SIZE
        self.growth = max(0, 2 * 4096 * wal_pages - wal) + _SLACK
        self.overhead = uncounted + sum(map(max, others, least)) + wal + index + self.growth
        return allowance(bounds, space, rows.totals, self.overhead, self.growth)

    def make(
        self,
        rows: IndexRows,
        size: int,
        *,
        allowed: int,
        is_staged: bool = True,
        victims: Iterable[BlockKey] = (),
    ) -> bool | None:
        """Evict blocks until `size` more bytes fit into `allowed`; return False if not enough could be evicted.

        Return None after evicting about REMOVED_AT_ONCE blocks of a cache that is over its limit by more than that, as
        after `cache_size` was lowered: the caller commits and calls again. Evictions are not undone on False.
        `is_staged`: the bytes are new blocks, so older blocks must move out of staging. `victims`: blocks to evict
        before others.
        """
        used = rows.totals.bytes
        step = REMOVED_AT_ONCE * used // max(rows.totals.blocks, 1)
        if is_far := used - allowed > step:
            allowed, size = used - step, 0
        self._accesses.open(allowed, clock=rows.last_clock())
        self._rows, self._limit = rows, allowed - size
        self._stuck.clear()
        totals, staging, spare = rows.totals, staging_size(allowed), iter(victims)
        while self._need > 0 and (victim := next(spare, None)) is not None:
            self._evict(rows.block(victim.object, victim.index))
        self._shrink_staging(totals.staged + (size if is_staged else 0) - staging, allowed - staging)
        # If the limit shrinks for a while, as by a grown log, staging shrinks first, down to half: old blocks stay.
        while self._need > 0 and totals.bytes - totals.staged > allowed - staging // 2:
            if not self._evict(self._oldest()):
                break
        last = totals.last_admitted
        while self._need > 0 and (found := rows.blocks_after(last, _FEW)):  # in staging, oldest row first
            for block in found:
                if self._need > 0:
                    self._evict(block)
            last = found[-1].id
        while self._need > 0 and self._evict(self._oldest()):
            pass
        return None if is_far and self._need <= 0 else self._need <= 0

    @property
    def _need(self) -> int:
        """The bytes that still have to be freed."""
        return self._rows.totals.bytes - self._limit

    def remove(self, rows: IndexRows, block: BlockRow) -> bool:
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
        self._close_open(block.place)
        return True

    def path(self, name: str) -> str:
        """Return the path of the file of a block with this name."""
        return f"{self._directory.blocks}/{name[0]}/{name}"

    def is_being_written(self, block: BlockRow) -> bool:
        """Return whether a row without a file is a block being written, rather than one of a dead process."""
        if block.writer == self.writer and self.writer_pid == os.getpid():
            return block.name in self.writing
        return time.time() < block.stored_at + UNWRITTEN_S and self._locks.is_held(block.writer)

    def _evict(self, block: BlockRow | None) -> bool:
        """Evict a block unless it is pinned or being written; return False if there is none."""
        if block is None:
            return False
        if not block.is_pinned and self.remove(self._rows, block):
            self.evictions += 1
        else:
            self._stuck.add(block.id)
        return True

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
        totals, accesses = self._rows.totals, self._accesses
        access = accesses.of(new.hash64, new.clock)
        while totals.bytes - totals.staged + new.size > most:
            if (old := self._oldest()) is None:
                break
            last = accesses.of(old.hash64, old.clock)
            idle = age(last.clock, accesses.now)
            if not admits(access, last, idle=idle, longest_gap=accesses.longest_gap):
                break
            self._evict(old)
        else:
            return
        self._evict(new)

    def _oldest(self) -> BlockRow | None:
        """Return the least recently used block outside staging that may be evicted; None if there is none.

        This is the head of the queue, after removing blocks that were accessed, pinned or stored again since they were
        queued. An empty queue is refilled batch by batch, until the whole table was examined; in a small one, twice: a
        reader may use all that were queued.
        """
        n_seen, n_blocks = 0, self._rows.totals.blocks
        while True:
            while self._queue:
                row, clock = next(iter(self._queue.items()))
                block = self._rows.block_by_id(row)
                may_go = block is not None and not block.is_pinned and row not in self._stuck
                if (
                    block is not None
                    and may_go
                    and self._accesses.of(block.hash64, block.clock).clock == clock
                ):
                    return block
                del self._queue[row]
            n_found = self._refill()
            n_seen += n_found
            if n_found == 0 or n_seen > n_blocks + min(n_blocks, _BATCH):
                return None

    def _refill(self) -> int:
        """Queue the least recently used eighth of the next batch of rows; return how many rows were examined.

        Every omitted row is more recent than every queued one, but for blocks that are being written: evicting in this
        order is exact LRU.
        """
        found = self._rows.admitted_after(self._cursor, _BATCH)
        if not found and self._cursor:
            found = self._rows.admitted_after(0, _BATCH)
        self._cursor = found[-1].id if len(found) == _BATCH else 0
        now = self._accesses.now
        free = (block for block in found if block.id not in self._stuck)
        clocks = {block.id: self._accesses.of(block.hash64, block.clock).clock for block in free}
        ranked = sorted(clocks, key=lambda row: (-age(clocks[row], now), row))
        self._queue = {row: clocks[row] for row in islice(ranked, -(-len(ranked) // 8))}
        return len(found)
