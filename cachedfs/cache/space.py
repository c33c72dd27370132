"""Making room: how much the cache may hold, and unlinking what has to go before a write.

Inside the transaction that reserves new rows. Evict: unlink, then the row: a crash between them leaves a
row without a file, which is counted although it is gone, until its turn to be evicted comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cachedfs.cache import blocks, disk
from cachedfs.cache.claims import Claims
from cachedfs.cache.directory import Directory
from cachedfs.cache.handles import Handles
from cachedfs.cache.index import BlockRow, Rows
from cachedfs.cache.touches import Touches
from cachedfs.model import Bounds
from cachedfs.plan import admission
from cachedfs.plan.admission import Candidate

__all__ = ["UNWRITTEN_S", "Room", "remove_dead_leases", "wal_pages_of"]

_BATCH = 4096  # rows looked at together: up to so many blocks, eviction is exactly LRU
UNWRITTEN_S = 60.0  # for so long a row without a file may be a block that another process is writing
_SLACK = 64 << 10  # what one transaction may add to the index beyond its write-ahead log


class Room:
    """Room in one cache for one process. Every method runs inside a writing transaction, so in one thread."""

    def __init__(self, directory: Directory, handles: Handles, claims: Claims) -> None:
        self._directory = directory
        self._handles = handles
        self._claims = claims
        self._cursor = 0  # the row after which the next batch of candidates is read
        # By row, longest untouched first; with the touch clock of when it was queued.
        self._queue: dict[int, tuple[Candidate, int]] = {}
        self._writer = self._writer_pid = 0
        self.writing: set[str] = set()  # Invariant: places of our reservations whose file is not there yet
        self.evictions = 0

    def allowance(self, rows: Rows, bounds: Bounds) -> int:
        """Return how many bytes blocks and leases may have in all, recording the automatic bound at first use."""
        space = disk.space(self._directory.root)
        used = rows.number("bytes") or 0
        automatic = 0
        if bounds.size is None:
            automatic = rows.number("auto_size") or 0
            if not automatic:
                automatic = admission.automatic_size(free=space.free, used=used)
                rows.record("auto_size", automatic)
        overhead = self._overhead(wal_pages_of(bounds) * 4096)
        return admission.allowance(
            bounds, total=space.total, free=space.free, used=used, overhead=overhead, automatic=automatic
        )

    def make(self, rows: Rows, need: int, touches: Touches, now_s: float) -> bool:
        """Free at least `need` bytes; False when what may go does not suffice (what went is gone all the same)."""
        if need > 0:
            need -= remove_dead_leases(rows, self._directory, self._claims)
        fruitless = 0  # rows looked at since something was freed: the whole table without success is the end
        while need > 0:
            if not self._queue:
                n_seen = self._refill(rows, touches)
                fruitless += n_seen
                if n_seen == 0 or fruitless > (rows.number("blocks") or 0) + _BATCH:
                    return False
            freed = self._evict_some(rows, need, touches, now_s)
            need -= freed
            fruitless = 0 if freed else fruitless
        return True

    def remove(self, rows: Rows, block: BlockRow, now_s: float) -> int:
        """Unlink a block and delete its row; return the bytes that came free."""
        underway = self.is_being_written(block, now_s)  # asked first: it may arrive between the two lines
        gone = disk.unlink(self.path(blocks.place(block.digest, block.number)))
        if underway and not gone:
            return 0  # its file would come without a row
        # dies here: a row without a file, over-counted until it is evicted
        rows.remove_block(block.id)
        self._handles.drop([(block.digest, block.number)])
        self._queue.pop(block.id, None)
        return block.size

    def path(self, place: str) -> str:
        return f"{self._directory.root}/{place}"

    def writer(self) -> int:
        """Return the number under which this process reserves blocks; it holds the claim on it until it ends."""
        if self._writer_pid != disk.process_id():
            self._writer, self._writer_pid, self.writing = disk.nonce() >> 2, disk.process_id(), set()
            self._claims.take(self._writer)
        return self._writer

    def is_being_written(self, block: BlockRow, now_s: float) -> bool:
        """Return whether a row without a file is a block on its way to the disk, and no remnant of a dead process."""
        if block.writer == self.writer():
            return blocks.place(block.digest, block.number) in self.writing
        return now_s < block.since + UNWRITTEN_S and self._claims.is_held(block.writer)

    def _overhead(self, wal_limit: int) -> int:
        """Return the bytes of the index and the mapped files; the write-ahead log counts as full, so that it may grow."""
        index, wal, *others = (disk.size_of(path) for path in self._directory.bookkeeping)
        return index + max(wal, wal_limit) + sum(others) + _SLACK

    def _evict_some(self, rows: Rows, need: int, touches: Touches, now_s: float) -> int:
        freed = 0
        for candidate in admission.victims(self._untouched(rows, touches), need):
            block = rows.block_by_id(candidate.row)
            self._queue.pop(candidate.row, None)
            if block is None:
                continue
            size = self.remove(rows, block, now_s)
            self.evictions += size > 0
            freed += size
        return freed

    def _untouched(self, rows: Rows, touches: Touches) -> Iterator[Candidate]:
        """Yield the queued blocks that were not touched, put anew or evicted by others since they were queued."""
        for candidate, clock in list(self._queue.values()):
            block = rows.block_by_id(candidate.row)
            if block is None or _clock(block, touches) != clock:
                del self._queue[candidate.row]
            else:
                yield candidate

    def _refill(self, rows: Rows, touches: Touches) -> int:
        """Queue the oldest of the next batch of unpinned rows; return how many rows were looked at."""
        found = rows.blocks_after(self._cursor, _BATCH)
        if not found and self._cursor:
            found = rows.blocks_after(0, _BATCH)
        self._cursor = found[-1].id if len(found) == _BATCH else 0
        clocks = {block.id: _clock(block, touches) for block in found}
        candidates = (Candidate(block.id, touches.age(clocks[block.id]), block.size) for block in found)
        self._queue = {each.row: (each, clocks[each.row]) for each in admission.oldest(candidates)}
        return len(found)


def wal_pages_of(bounds: Bounds) -> int:
    """Return how many pages the write-ahead log may have: 1 MiB, less in a cache so small that it would matter."""
    if isinstance(bounds.size, int):
        return min(256, max(32, bounds.size >> 18))
    return 256


def remove_dead_leases(rows: Rows, directory: Directory, claims: Claims) -> int:
    """Remove the leased files whose process is gone: nobody holds their claim. Return the bytes that came free."""
    freed = 0
    if not claims.works_across_processes:
        return 0  # nobody can tell; `check` removes them
    for lease in rows.leases():
        if claims.take(lease.claim):
            with contextlib.suppress(OSError):
                disk.unlink(f"{directory.root}/leases/{lease.name}")
            rows.remove_lease(lease.name)
            claims.drop(lease.claim)
            freed += lease.size
    return freed


def _clock(block: BlockRow, touches: Touches) -> int:
    """Return the touch clock of a block: of its last touch, or of its put when no record is left."""
    clock = touches.clock_of(block.hash64)
    return block.clock if clock is None else clock
