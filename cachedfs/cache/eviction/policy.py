"""Eviction: compute how much the cache may hold, and remove blocks to make space before a write.

Runs inside the transaction that reserves the new rows. Eviction unlinks the file first and deletes the row second, so a
crash in between leaves a row without a file: it counts toward the cache size until it is evicted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.change_counters import TABLE_SIZE
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.eviction import admission
from cachedfs.cache.eviction.access_stats import AccessStats
from cachedfs.cache.eviction.admission import AccessHistory, EvictionCandidate
from cachedfs.cache.eviction.plan_registry import FutureUseSource, PlanRegistry
from cachedfs.cache.index.block_rows import BlockRow, BlockRows, LeaseRow
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import CacheBounds

__all__ = [
    "UNWRITTEN_S",
    "EvictionPolicy",
    "dead_leases",
    "likely_allowance",
    "remove_dead_leases",
    "wal_pages_of",
]

_BATCH = 4096  # rows examined together: in a cache of up to this many blocks, eviction is exact LRU
_FEW = 64
UNWRITTEN_S = 60.0  # for this long, a row without a file may be a block that another process is writing
_FORSAKEN_S = 86400.0  # without cross-process locks, a leased file may be removed only after this age
_SLACK = 64 << 10  # bytes that one transaction may add to the index beyond its write-ahead log


class EvictionPolicy:
    """Space management of one cache in one process. Every method runs inside a write transaction, so in one thread."""

    def __init__(self, directory: CacheDirectory, handles: BlockPool, locks: ByteRangeLocks) -> None:
        self._directory = directory
        self._handles = handles
        self._locks = locks
        self.plan_registry = PlanRegistry(locks)
        self._cursor = 0  # the row after which the next batch of candidates is read
        # By row, least recently used first; with the block's access clock when it was queued.
        self._queue: dict[int, tuple[EvictionCandidate, int]] = {}
        self._stuck: set[int] = set()  # rows whose files are being written; not evicted in this call
        self._writer = self._writer_pid = 0
        self.writing: set[str] = set()  # Invariant: places of reserved rows without a file yet
        self.set_aside = 0  # bytes of temporary files without a row, as of the start of this transaction
        self.evictions = 0
        self.fileless = 0  # removed rows whose file was gone already, so no disk space was freed

    def allowance(self, rows: BlockRows, bounds: CacheBounds) -> int:
        """Return the bytes that blocks and leases may take in total; store the automatic cache size at first use."""
        space = disk.space(self._directory.root)
        used = rows.number("bytes") or 0
        automatic = 0
        if bounds.size is None:
            automatic = rows.number("auto_size") or 0
            if not automatic:
                automatic = admission.automatic_size(free=space.free, used=used)
                rows.record("auto_size", automatic)
        present, growth = self._overhead(wal_pages_of(bounds) * 4096)
        return admission.allowance(
            bounds,
            total=space.total,
            free=space.free,
            used=used,
            overhead=present + growth,
            growth=growth,
            automatic=automatic,
        )

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
        `plan`: the plan that the new blocks, with these `hashes`, belong to; blocks that it gives up are evicted first.
        """
        self._stuck.clear()
        n_blocks = rows.number("blocks") or 0
        touches.fit(window=admission.window_of(n_blocks), aging=admission.aging_of(n_blocks))
        need = (rows.number("bytes") or 0) + size - allowed
        if need > 0:
            need -= remove_dead_leases(rows, self._directory, self._locks)
        if plan is not None:
            is_new = all(touches.is_new(each) for each in hashes)
            need -= self._make_by_plan(rows, plan, need, allowed, is_new, touches, now_s)
        staging = admission.staging_size(allowed)
        over = (rows.number("staged") or 0) + (size if is_staged else 0) - staging
        need -= self._settle(rows, over, need, allowed - staging, touches, now_s)
        # If the limit shrinks for a while, as by a grown log, staging shrinks first, down to half: old blocks stay.
        settled = (rows.number("bytes") or 0) - (rows.number("staged") or 0)
        need -= self._evict_old(rows, min(need, settled - (allowed - staging // 2)), touches, now_s)
        need -= self._evict_new(rows, need, now_s)
        need -= self._evict_old(rows, need, touches, now_s)
        return need <= 0

    def remove(self, rows: BlockRows, block: BlockRow, now_s: float) -> int:
        """Unlink a block and delete its row; return the freed bytes. A block that is being written stays (0 bytes)."""
        # Checked before unlinking, because the file may appear between the two lines.
        underway = self.is_being_written(block, now_s)
        gone = self._directory.unlink_block(block_file.place(block.digest, block.number))
        self._queue.pop(block.id, None)
        if underway and not gone:
            return 0  # otherwise its file would appear without a row
        self.fileless += not gone
        # A crash here leaves a row without a file, which counts until it is evicted.
        rows.remove_block(block.id)
        self._handles.drop([(block.digest, block.number)])
        return block.size

    def path(self, place: str) -> str:
        """Return the absolute path of a block file, given its path below the cache directory."""
        return f"{self._directory.root}/{place}"

    def writer(self) -> int:
        """Return the number that identifies this process in rows it reserves, and lock it until the process exits."""
        if self._writer_pid != os.getpid():
            self._writer, self._writer_pid, self.writing = secrets.randbits(62), os.getpid(), set()
            self._locks.take(self._writer)
        return self._writer

    def is_being_written(self, block: BlockRow, now_s: float) -> bool:
        """Return whether a row without a file is a block being written, rather than left by a dead process."""
        if block.writer == self.writer():
            return block_file.place(block.digest, block.number) in self.writing
        return now_s < block.since + UNWRITTEN_S and self._locks.is_held(block.writer)

    def _overhead(self, wal_limit: int) -> tuple[int, int]:
        """Return the bytes of index, shared files and untracked temporary files, and by how many bytes they may grow.

        The write-ahead log always counts as twice its limit, the size at which it is restarted. Counting its real size
        would evict blocks whenever it grows, and on a full disk it could not grow, so nothing could be stored. Change
        counters count before their first use: a plan that began without them would fetch more than may stay.
        """
        index, wal, *others = (disk.size_of(path) for path in self._directory.bookkeeping)
        counters = max(0, TABLE_SIZE - disk.size_of(self._directory.marks))
        return index + wal + sum(others) + counters + self.set_aside, max(0, 2 * wal_limit - wal) + _SLACK

    def _evict(self, rows: BlockRows, block: BlockRow, now_s: float) -> int:
        size = self.remove(rows, block, now_s)
        self.evictions += size > 0
        if not size:
            self._stuck.add(block.id)
        return size

    def clear_plan_slot(self, rows: BlockRows, plan_slot: int) -> None:
        """Reset the cached bytes counted for a plan slot, when a new plan takes it."""
        if rows.number(_taken_by(plan_slot)):
            rows.record(_taken_by(plan_slot), 0)

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
        exceeds its share. If that is not enough, or above its share, it gives up its blocks with the furthest next use.
        """
        others = self.plan_registry.others(plan.plan_slot)
        plan.share = share = allowed // (1 + len(others))
        freed = 0
        if plan.taken <= share:
            is_owed = any((rows.number(_taken_by(plan_slot)) or 0) > share for plan_slot in others)
            freed = self._take_over(rows, need, is_new, is_owed, touches, now_s)
        freed += self._take_back(rows, plan, need - freed, now_s)
        if plan.plan_slot is not None:
            rows.record(_taken_by(plan.plan_slot), plan.taken)
        return freed

    def _take_over(
        self, rows: BlockRows, need: int, is_new: bool, is_owed: bool, touches: AccessStats, now_s: float
    ) -> int:
        """Evict blocks that left staging, least recently used first, while new ones may replace them; return bytes."""
        freed, new = 0, AccessHistory(0, 0, is_new)
        while freed < need and (old := self._oldest(rows, touches)) is not None:
            gap = touches.longest_gap
            if not (is_owed or admission.admits(new, _claimant(old, touches), longest_gap=gap)):
                break
            freed += self._evict(rows, old, now_s)
        return freed

    def _take_back(self, rows: BlockRows, plan: FutureUseSource, need: int, now_s: float) -> int:
        """Evict blocks that a plan gives up, not one more than needed; return the freed bytes."""
        freed, given_up = 0, plan.given_up()
        while freed < need and (given := next(given_up, None)) is not None:
            block = rows.block(*given)
            if block is not None and not block.pinned:
                freed += self._evict(rows, block, now_s)
        return freed

    def _evict_old(self, rows: BlockRows, need: int, touches: AccessStats, now_s: float) -> int:
        """Evict blocks that left staging, least recently used first, to free `need` bytes; return the freed bytes."""
        freed = 0
        while freed < need and (block := self._oldest(rows, touches)) is not None:
            freed += self._evict(rows, block, now_s)
        return freed

    def _evict_new(self, rows: BlockRows, need: int, now_s: float) -> int:
        """Evict blocks in staging, oldest row first, to free `need` bytes; return the freed bytes."""
        freed, last = 0, rows.number("settled") or 0
        while freed < need and (found := rows.blocks_after(last, _FEW)):
            for block in found:
                if freed < need and not block.pinned:
                    freed += self._evict(rows, block, now_s)
            last = found[-1].id
        return freed

    def _settle(
        self, rows: BlockRows, over: int, need: int, most: int, touches: AccessStats, now_s: float
    ) -> int:
        """Move blocks out of staging, oldest row first, until it shrinks by `over` bytes; return the freed bytes.

        A block is kept if nothing needs to be freed, or if the blocks outside staging, with it, take at most `most`
        bytes. Otherwise either it or blocks that it replaces are evicted.
        """
        freed, last = 0, rows.number("settled") or 0
        settled = (rows.number("bytes") or 0) - (rows.number("staged") or 0)
        while over > 0 and (found := rows.blocks_after(last, _FEW)):
            for block in found:
                if over <= 0:
                    break
                gone = 0
                if need > freed and not block.pinned and settled + block.size > most:
                    rows.settle(last)  # so that the blocks before it are candidates for replacement
                    gone = self._exchange(rows, block, settled + block.size - most, touches, now_s)
                freed += gone
                settled += block.size - gone
                over, last = over - block.size, block.id
            rows.settle(last)
        return freed

    def _exchange(self, rows: BlockRows, new: BlockRow, need: int, touches: AccessStats, now_s: float) -> int:
        """Free `need` bytes for a block that leaves staging, or evict the block itself; return the freed bytes."""
        freed, claimant = 0, _claimant(new, touches)
        while freed < need:
            old = self._oldest(rows, touches)
            if old is None or not admission.admits(
                claimant, _claimant(old, touches), longest_gap=touches.longest_gap
            ):
                return freed + self._evict(rows, new, now_s)
            freed += self._evict(rows, old, now_s)
        return freed

    def _oldest(self, rows: BlockRows, touches: AccessStats) -> BlockRow | None:
        """Return the least recently used block outside staging that may be evicted; None if there is none.

        This is the head of the queue, after dropping blocks that were accessed, pinned or stored again since they were
        queued. An empty queue is refilled batch by batch, until the whole table was examined.
        """
        n_seen, enough = 0, (rows.number("blocks") or 0) + _BATCH
        while True:
            while self._queue:
                row, (_, clock) = next(iter(self._queue.items()))
                block = rows.block_by_id(row)
                may_go = block is not None and not block.pinned and row not in self._stuck
                if block is not None and may_go and _clock(block, touches) == clock:
                    return block
                del self._queue[row]
            n_found = self._refill(rows, touches)
            n_seen += n_found
            if n_found == 0 or n_seen > enough:
                return None

    def _refill(self, rows: BlockRows, touches: AccessStats) -> int:
        """Queue the least recently used blocks of the next batch of rows; return how many rows were examined."""
        found = rows.settled_after(self._cursor, _BATCH)
        if not found and self._cursor:
            found = rows.settled_after(0, _BATCH)
        self._cursor = found[-1].id if len(found) == _BATCH else 0
        clocks = {block.id: _clock(block, touches) for block in found}
        candidates = (
            EvictionCandidate(block.id, touches.age(clocks[block.id]), block.size) for block in found
        )
        self._queue = {each.row: (each, clocks[each.row]) for each in admission.oldest(candidates)}
        return len(found)


def _taken_by(plan_slot: int) -> str:
    """Return the key in the index table `meta` of the bytes that this plan slot's plan had at its last put."""
    return f"taken by {plan_slot}"


def wal_pages_of(bounds: CacheBounds) -> int:
    """Return the limit of the write-ahead log in pages of 4 KiB: 1 MiB, less in a small cache."""
    if isinstance(bounds.size, int):
        return min(256, max(32, bounds.size >> 18))
    return 256


def remove_dead_leases(rows: BlockRows, directory: CacheDirectory, locks: ByteRangeLocks) -> int:
    """Remove the leased files of dead processes; return the freed bytes."""
    freed = 0
    for lease in dead_leases(rows, directory, locks):
        with contextlib.suppress(OSError):
            disk.unlink(directory.lease(lease.name))
        rows.remove_lease(lease.name)
        freed += lease.size
    return freed


def dead_leases(rows: BlockRows, directory: CacheDirectory, locks: ByteRangeLocks) -> list[LeaseRow]:
    """Return the leases whose process is dead.

    A lease is dead if its lock is free. Without cross-process locks, there must be no process with its id, and the file
    must be a day old: processes in other containers have ids that cannot be checked here.
    """
    if locks.works_across_processes:
        return [lease for lease in rows.leases() if not locks.is_held(lease.owner_lock)]
    latest = time.time() - _FORSAKEN_S
    return [lease for lease in rows.leases() if not _may_be_in_use(lease, directory, latest)]


def _may_be_in_use(lease: LeaseRow, directory: CacheDirectory, latest: float) -> bool:
    try:
        status = disk.state(directory.lease(lease.name))
    except OSError:
        return True
    if status is not None and status.st_mtime > latest:
        return True
    return 0 < lease.pid < 1 << 31 and disk.is_alive(lease.pid)


def _clock(block: BlockRow, touches: AccessStats) -> int:
    """Return the access clock of a block's last access, or of when it was stored if that was later."""
    use = touches.use_of(block.hash64)
    if use is None or touches.age(block.clock) < touches.age(use.clock):
        return block.clock
    return use.clock


def _claimant(block: BlockRow, touches: AccessStats) -> AccessHistory:
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
    automatic = admission.automatic_size(free=space.free, used=0)
    return admission.allowance(
        bounds, total=space.total, free=space.free, used=0, overhead=0, growth=0, automatic=automatic
    )
