"""Eviction: compute how much the cache may hold, and remove blocks to make space before a write.

Runs inside the transaction that reserves the new rows. Eviction unlinks the file first and deletes the row second, so a
crash in between leaves a row without a file: it counts toward the cache size until it is evicted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from cachedfs.cache import disk
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.change_counters import TABLE_SIZE
from cachedfs.cache.counters import STATISTICS_SIZE
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.eviction import admission
from cachedfs.cache.eviction.access_stats import AccessStats
from cachedfs.cache.eviction.admission import AccessHistory, EvictionCandidate
from cachedfs.cache.eviction.plan_registry import FutureUseSource, PlanRegistry
from cachedfs.cache.index.block_rows import BlockRow, BlockRows
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.local_copies import remove_dead_copies
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import CacheBounds

__all__ = [
    "UNWRITTEN_S",
    "EvictionPolicy",
    "likely_allowance",
    "wal_pages_of",
]

_BATCH = 4096  # rows examined together: in a cache of up to this many blocks, eviction is exact LRU
_FEW = 64
UNWRITTEN_S = 60.0  # for this long, a row without a file may be a block that another process is writing
_SHARED_MEMORY = 32 << 10  # bytes of `index.db-shm` beside a log of at most 4,096 pages
_SLACK = 64 << 10  # bytes that one transaction may add to the index beyond its write-ahead log


class EvictionPolicy:
    """Space management of one cache in one process. Every method runs inside a write transaction, so in one thread.

    `overhead` and `growth`: bytes of the bookkeeping files but the index, and the part of them that is not on the disk
    yet, as of the last `measure`.
    """

    def __init__(self, directory: CacheDirectory, handles: BlockPool, locks: ByteRangeLocks) -> None:
        self._directory = directory
        self._handles = handles
        self._locks = locks
        self.plan_registry = PlanRegistry(locks)
        self._cursor = 0  # the row after which the next batch of candidates is read
        # By row, least recently used first; with the block's access clock when it was queued.
        self._queue: dict[int, tuple[EvictionCandidate, int]] = {}
        self._stuck: set[int] = set()  # rows whose files are being written; not evicted in this call
        self.writer = self.writer_pid = 0
        self.writing: set[str] = set()  # Invariant: names of the blocks of reserved rows without a file yet
        self.overhead = self.growth = 0
        self.evictions = 0
        self.fileless = 0  # removed rows whose file was missing, so no disk space was freed

    def become_writer(self) -> None:
        """Choose the number that identifies this process in rows it reserves, and lock it until the process exits."""
        self.writer, self.writer_pid, self.writing = secrets.randbits(62), os.getpid(), set()
        self._locks.take(self.writer)

    def measure(self, wal_pages: int, access_records: int, uncounted: int) -> None:
        """Measure the index's logs, shared files and temporary files without a row (`uncounted` bytes).

        The write-ahead log always counts as twice its limit, the size at which it is restarted. Counting its real size
        would evict blocks whenever it grows, and on a full disk it could not grow, so nothing could be stored. Shared
        files count before their first use: a plan that began without them would fetch more than may stay.
        """
        wal, _, *others = map(disk.size_of, self._directory.bookkeeping)
        least = _SHARED_MEMORY, 0, access_records, TABLE_SIZE, STATISTICS_SIZE
        present = uncounted + sum(map(max, others, least))
        self.growth = max(0, 2 * 4096 * wal_pages - wal) + _SLACK
        self.overhead = present + wal + self.growth

    def make(
        self,
        rows: BlockRows,
        size: int,
        *,
        allowed: int,
        touches: AccessStats,
        now_s: float,
        is_staged: bool = True,
        plan: FutureUseSource | None = None,
        hashes: Sequence[int] = (),
    ) -> bool:
        """Evict blocks until `size` more bytes fit into `allowed`; return False if not enough could be evicted.

        Evictions are not undone on False. `is_staged`: the bytes are new blocks, so older blocks must leave staging.
        `plan`: the plan that the new blocks, with these `hashes`, belong to; blocks that it can spare are evicted first.
        """
        self._stuck.clear()
        totals = rows.totals
        need = totals.bytes + size - allowed
        if need > 0:
            need -= remove_dead_copies(rows, self._directory, self._locks)
        staging = admission.staging_size(allowed)
        if plan is not None:
            # Blocks may replace others only outside staging, which is not kept small while there is room.
            over = min(totals.staged - staging, allowed - staging - (totals.bytes - totals.staged))
            self._shrink_staging(rows, over, 0, 0, touches, now_s)
            is_new = all(touches.is_new(each) for each in hashes)
            need -= self._make_by_plan(rows, plan, need, allowed, is_new, touches, now_s)
        over = totals.staged + (size if is_staged else 0) - staging
        need -= self._shrink_staging(rows, over, need, allowed - staging, touches, now_s)
        # If the limit shrinks for a while, as by a grown log, staging shrinks first, down to half: old blocks stay.
        admitted = totals.bytes - totals.staged
        need -= self._evict_old(rows, min(need, admitted - (allowed - staging // 2)), touches, now_s)
        need -= self._evict_new(rows, need, now_s)
        need -= self._evict_old(rows, need, touches, now_s)
        return need <= 0

    def remove(self, rows: BlockRows, block: BlockRow, now_s: float) -> int:
        """Unlink a block and delete its row; return the freed bytes. A block that is being written stays (0 bytes)."""
        # Checked before unlinking, because the file may appear between the two lines.
        is_underway = self.is_being_written(block, now_s)
        was_there = disk.unlink(self.path(block.name))
        self._queue.pop(block.id, None)
        if is_underway and not was_there:
            return 0  # otherwise its file would appear without a row
        self.fileless += not was_there
        # A crash here leaves a row without a file, which counts until it is evicted.
        rows.remove_block(block)
        self._handles.drop([(block.digest, block.number)])
        return block.size

    def path(self, name: str) -> str:
        """Return the path of the file of a block with this name."""
        return f"{self._directory.blocks}/{name[0]}/{name}"

    def is_being_written(self, block: BlockRow, now_s: float) -> bool:
        """Return whether a row without a file is a block being written, rather than left by a dead process."""
        if block.writer == self.writer and self.writer_pid == os.getpid():
            return block.name in self.writing
        return now_s < block.stored_at + UNWRITTEN_S and self._locks.is_held(block.writer)

    def _evict(self, rows: BlockRows, block: BlockRow, now_s: float) -> int:
        size = self.remove(rows, block, now_s)
        self.evictions += size > 0
        if not size:
            self._stuck.add(block.id)
        return size

    def share(self, allowed: int, plan_slot: int | None) -> int:
        """Return the share of `allowed` bytes of the plan with this plan slot: an equal part for each active plan."""
        return allowed // (1 + len(self.plan_registry.others(plan_slot)))

    def _make_by_plan(
        self,
        rows: BlockRows,
        plan: FutureUseSource,
        need: int,
        allowed: int,
        is_new: bool,
        touches: AccessStats,
        now_s: float,
    ) -> int:
        """Evict blocks to free `need` bytes for blocks of a plan; return the freed bytes.

        A plan within its share evicts other blocks first, as far as the admission rule allows, or any if another plan
        exceeds its share. If that is not enough, or above its share, blocks that it can spare are evicted, and not one
        more than needed.
        """
        freed, others = 0, self.plan_registry.others(plan.plan_slot)
        plan.share = share = allowed // (1 + len(others))
        if plan.taken <= share:
            exceeds = any(rows.plan_bytes(plan_slot) > share for plan_slot in others)
            new = AccessHistory(0, 0, is_new)
            while freed < need and (old := self._oldest(rows, touches)) is not None:
                if not (exceeds or self._admits(new, old, touches)):
                    break
                freed += self._evict(rows, old, now_s)
        spared = plan.given_up()
        while freed < need and (spare := next(spared, None)) is not None:
            block = rows.block(*spare)
            if block is not None and not block.is_pinned:
                freed += self._evict(rows, block, now_s)
        if plan.plan_slot is not None:
            rows.set_plan_bytes(plan.plan_slot, plan.taken)
        return freed

    def _evict_old(self, rows: BlockRows, need: int, touches: AccessStats, now_s: float) -> int:
        """Evict blocks that left staging, least recently used first, to free `need` bytes; return the freed bytes."""
        freed = 0
        while freed < need and (block := self._oldest(rows, touches)) is not None:
            freed += self._evict(rows, block, now_s)
        return freed

    def _evict_new(self, rows: BlockRows, need: int, now_s: float) -> int:
        """Evict blocks in staging, oldest row first, to free `need` bytes; return the freed bytes."""
        freed, last = 0, rows.totals.last_admitted
        while freed < need and (found := rows.blocks_after(last, _FEW)):
            for block in found:
                if freed < need and not block.is_pinned:
                    freed += self._evict(rows, block, now_s)
            last = found[-1].id
        return freed

    def _shrink_staging(
        self, rows: BlockRows, over: int, need: int, most: int, touches: AccessStats, now_s: float
    ) -> int:
        """Move blocks out of staging, oldest row first, until it shrinks by `over` bytes; return the freed bytes.

        A block is admitted if nothing needs to be freed, or if the blocks outside staging, with it, take at most `most`
        bytes. Otherwise either it or blocks that it replaces are evicted.
        """
        freed, totals = 0, rows.totals
        while over > 0 and (found := rows.blocks_after(totals.last_admitted, _FEW)):
            for block in found:
                if over <= 0:
                    break
                excess, staged = totals.bytes - totals.staged + block.size - most, totals.staged
                if need > freed and not block.is_pinned and excess > 0:
                    freed += self._exchange(rows, block, excess, touches, now_s)
                if totals.staged == staged:  # it was not evicted itself
                    totals.staged -= block.size
                over -= block.size
                totals.last_admitted = block.id
        return freed

    def _exchange(self, rows: BlockRows, new: BlockRow, need: int, touches: AccessStats, now_s: float) -> int:
        """Free `need` bytes for a block that leaves staging, or evict the block itself; return the freed bytes."""
        freed, history = 0, _history(new, touches)
        while freed < need:
            old = self._oldest(rows, touches)
            if old is None or not self._admits(history, old, touches):
                return freed + self._evict(rows, new, now_s)
            freed += self._evict(rows, old, now_s)
        return freed

    def _admits(self, new: AccessHistory, old: BlockRow, touches: AccessStats) -> bool:
        return admission.admits(new, _history(old, touches), longest_gap=touches.longest_gap)

    def _oldest(self, rows: BlockRows, touches: AccessStats) -> BlockRow | None:
        """Return the least recently used block outside staging that may be evicted; None if there is none.

        This is the head of the queue, after dropping blocks that were accessed, pinned or stored again since they were
        queued. An empty queue is refilled batch by batch, until the whole table was examined.
        """
        n_seen, enough = 0, rows.totals.blocks + _BATCH
        while True:
            while self._queue:
                row, (_, clock) = next(iter(self._queue.items()))
                block = rows.block_by_id(row)
                may_go = block is not None and not block.is_pinned and row not in self._stuck
                if block is not None and may_go and _clock(block, touches) == clock:
                    return block
                del self._queue[row]
            n_found = self._refill(rows, touches)
            n_seen += n_found
            if n_found == 0 or n_seen > enough:
                return None

    def _refill(self, rows: BlockRows, touches: AccessStats) -> int:
        """Queue the least recently used blocks of the next batch of rows; return how many rows were examined."""
        found = rows.admitted_after(self._cursor, _BATCH)
        if not found and self._cursor:
            found = rows.admitted_after(0, _BATCH)
        self._cursor = found[-1].id if len(found) == _BATCH else 0
        clocks = {block.id: _clock(block, touches) for block in found}
        candidates = (
            EvictionCandidate(block.id, touches.age(clocks[block.id]), block.size) for block in found
        )
        self._queue = {each.row: (each, clocks[each.row]) for each in admission.oldest(candidates)}
        return len(found)


def wal_pages_of(bounds: CacheBounds) -> int:
    """Return the limit of the write-ahead log in pages of 4 KiB: 1 MiB, less in a small cache."""
    if isinstance(bounds.size, int):
        return min(256, max(32, bounds.size >> 18))
    return 256


def _clock(block: BlockRow, touches: AccessStats) -> int:
    """Return the access clock of a block's last access, or of when it was stored if that was later."""
    use = touches.use_of(block.hash64)
    if use is None or touches.age(block.clock) < touches.age(use.clock):
        return block.clock
    return use.clock


def _history(block: BlockRow, touches: AccessStats) -> AccessHistory:
    use = touches.use_of(block.hash64)
    idle = touches.age(_clock(block, touches))
    # Without a record the block counts as new, so it is admitted as if there were no rule.
    return (
        AccessHistory(idle, 0, True) if use is None else AccessHistory(idle, use.uses, use.is_new, use.passes)
    )


def likely_allowance(root: str | None, bounds: CacheBounds) -> int | None:
    """Estimate how many bytes an empty cache may hold, without its index; None on a disk error.

    This is good enough to choose the number of access records.
    """
    try:
        space = disk.space(root or "")
    except OSError:
        return None
    return admission.allowance(bounds, space, Totals(), overhead=0, growth=0)
