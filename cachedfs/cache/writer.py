"""The write side of the cache: store blocks, drop blocks, make local copies.

Storing a block: add its row (a reservation, in the transaction that also makes space), write a temporary file,
rename it. Evicting: unlink the file, then delete the row. A crash between two steps leaves at worst a row without a
file, so the cache size is not undercounted. One exception: if the index is replaced while blocks are written, a crash
before `_count_lost` leaves their files uncounted until a repair.

No mutex is needed: SQLite serializes the transactions, and block files are written outside of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from cachedfs.cache import block_file, disk, fsck
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.disk import Buffer
from cachedfs.cache.eviction.access_stats import AccessStats
from cachedfs.cache.eviction.plan_registry import FutureUseSource
from cachedfs.cache.eviction.policy import UNWRITTEN_S, EvictionPolicy, remove_dead_leases, wal_pages_of
from cachedfs.cache.index.transaction import TROUBLE, CacheIndex, IndexRows
from cachedfs.cache.local_copies import LocalCopy
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.types import BlockKey, CacheBounds, ObjectKey
from cachedfs.errors import CacheError

__all__ = ["BlockWriter"]

# Rows deleted per transaction: other processes can write in between, and finished work survives an exit.
_DROPPED_AT_ONCE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_FILES = 16  # removed to make space for the logs of the index
_HOSTS_S = 3600.0  # between two looks at the folders of other hosts
_EVICT_AGAIN_S = 60.0  # after an eviction for a full disk that did not help
_WRITE_WITHIN_S = UNWRITTEN_S / 2  # later, other processes may take the reservation for a leftover of a crash


class _NewBlock:
    """A block to be written; `replaces` is set if the file in its place is unusable."""

    __slots__ = ("index", "object", "pieces", "place", "replaces", "size", "trailer")

    def __init__(
        self, key: BlockKey, data: Buffer | Sequence[Buffer], unusable: Callable[[str], bool]
    ) -> None:
        self.object = key.object
        self.index = key.index
        self.place = block_file.place(key.object.digest, key.index)
        self.replaces = unusable(self.place)
        self.pieces = [data] if isinstance(data, Buffer) else data
        self.trailer = block_file.encode_trailer(key.object, key.index, *self.pieces)
        self.size = sum(memoryview(piece).nbytes for piece in self.pieces) + len(self.trailer)


class BlockWriter:
    """Writes to one cache for one process. Every method except `discard` raises CacheError on failure."""

    def __init__(
        self,
        directory: CacheDirectory,
        *,
        index: CacheIndex,
        handles: BlockPool,
        locks: ByteRangeLocks,
        touches: Callable[..., AccessStats],
    ) -> None:
        self._directory = directory
        self._index = index
        self._handles = handles
        self._locks = locks
        self._touches = touches
        self.room = EvictionPolicy(directory, handles, locks)
        self.allowed: int | None = None  # the last computed allowance
        self._evict_again_at = 0.0
        self._hosts_at = 0.0  # when to look for folders of old hosts

    def put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        *,
        unusable: Container[str] = (),
        plan: FutureUseSource | None = None,
    ) -> None:
        """Store the blocks that are not cached yet; each is then there in full, or not at all.

        `unusable` holds paths of existing but unusable files. `plan` is the prefetch plan that the blocks belong to.
        If the index turns out to be damaged, `put` tries once more, because the second transaction replaces it.
        """
        try:
            self._put(blocks, bounds, unusable, plan)
        except CacheError:
            if not self._is_index_damaged():
                raise
            self._put(blocks, bounds, unusable, plan)
        if self._directory.is_network and time.monotonic() >= self._hosts_at:
            self._hosts_at = time.monotonic() + _HOSTS_S
            with contextlib.suppress(OSError):
                if fsck.remove_old_hosts(self._directory, time.time()):
                    self._hosts_at = 0.0

    def _put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        unusable: Container[str],
        plan: FutureUseSource | None,
    ) -> None:
        with self._as_cache_error("blocks cannot be stored"):
            self._index.database.limit_wal(wal_pages_of(bounds))
            unique = {key.name: (key, data) for key, data in blocks}
            waiting = [
                _NewBlock(key, data, lambda place: self.room.path(place) in unusable)
                for key, data in unique.values()
                if not self._is_cached(key, unusable)
            ]
            has_evicted = False
            while waiting:
                try:
                    waiting = self._put_some(waiting, bounds, plan)
                except (OSError, sqlite3.Error) as error:
                    # Free bytes tell nothing of inodes and quotas.
                    if has_evicted or time.monotonic() < self._evict_again_at or not self._is_full(error):
                        raise
                    waiting = [block for block in waiting if block.replaces or not self._exists(block)]
                    has_evicted = True
                    self._evict_for(waiting)
            if has_evicted:
                self._evict_again_at = 0.0  # it helped

    def _evict_for(self, waiting: list[_NewBlock]) -> None:
        """Evict as many bytes and files as these blocks need, with a folder for each, on a disk that is full.

        If that does not help, the next attempt is a minute later: the cache must not drain in vain.
        """
        self._evict_again_at = time.monotonic() + _EVICT_AGAIN_S
        now_s = time.time()
        try:
            with self._writing(now_s) as rows:
                n_blocks, used = rows.number("blocks") or 0, rows.number("bytes") or 0
                size = max(sum(block.size for block in waiting), 2 * len(waiting) * used // max(n_blocks, 1))
                touches = self._touches(clock=rows.last_clock())
                self.room.make(rows, size, allowed=used, touches=touches, now_s=now_s)
        except sqlite3.Error:  # the index needs space itself; rows without files are evicted like others
            # Reading needs no space. If that fails too, nothing is removed: any file may be pinned.
            with contextlib.suppress(sqlite3.Error), self._index.reading() as rows:
                unpinned = (
                    found
                    for found in self._directory.files()
                    if not rows.has_pinned_object(found.name.partition("-")[0])
                )
                for found in itertools.islice(unpinned, _FEW_FILES):
                    disk.unlink(found.path)

    def _is_full(self, error: OSError | sqlite3.Error) -> bool:
        """Return whether an error says that the disk has no space left, or no inodes."""
        if isinstance(error, OSError):
            return error.errno in _FULL
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        has_inodes = disk.space(self._directory.root).inodes > _FEW_FILES
        return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_CANTOPEN and not has_inodes)

    def evict(self, identity: str | None, path: str | None) -> int:
        """Evict the blocks of a path and of all below it, of an origin, or all blocks; return the bytes freed."""
        freed = last = 0
        now_s = time.time()
        with self._as_cache_error("blocks cannot be dropped"):
            while True:
                with self._writing(now_s) as rows:
                    found = rows.blocks_of(identity, path, after=last, limit=_DROPPED_AT_ONCE)
                    sizes = [self.room.remove(rows, block, now_s) for block in found]
                freed += sum(sizes)
                self.room.evictions += sum(size > 0 for size in sizes)
                if len(found) < _DROPPED_AT_ONCE:
                    return freed
                last = found[-1].id

    def allowance(self, bounds: CacheBounds) -> int:
        """Return how many bytes blocks and local copies may use; the first call records the automatic size."""
        with self._as_cache_error("the cache limit cannot be determined"), self._writing(time.time()) as rows:
            self.allowed = self.room.allowance(rows, bounds)
        return self.allowed

    def discard(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises.

        If the index cannot be used, only the file is removed. Without its file the block is a miss.
        """
        try:
            self._discard(key, index)
        except CacheError:
            with contextlib.suppress(OSError, ValueError):
                self._directory.verify()
                self._directory.unlink_block(block_file.place(key.digest, index))

    def _discard(self, key: ObjectKey, index: int) -> None:
        """Remove one block; keep its row if another process may be writing a replacement."""
        now_s = time.time()
        with self._as_cache_error("a damaged block cannot be removed"), self._writing(now_s) as rows:
            was_there = self._directory.unlink_block(block_file.place(key.digest, index))
            block = rows.block(key, index)
            if block is not None and not self.room.remove(rows, block, now_s) and was_there:
                # Its living writer may have just written it, or be replacing it: keep the row, without a writer.
                rows.release_block(block.id)

    def pin(self, identity: str, paths: Sequence[str], *, wanted: bool) -> None:
        with self._as_cache_error("the pin cannot be stored"), self._writing(time.time()) as rows:
            for path in paths:
                rows.pin(identity, path, wanted)

    def lease(self, size: int, bounds: CacheBounds, suffix: str) -> LocalCopy:
        """Reserve space for `size` bytes and return the private file that uses it; its name ends with `suffix`."""
        name = f"{os.getpid():08x}{os.urandom(4).hex()}{suffix}"
        owner_lock = int(name[:16], 16)
        with self._as_cache_error(f"a file of {size} bytes cannot be kept"):
            self._index.database.limit_wal(wal_pages_of(bounds))
            self._locks.take(owner_lock)
            try:
                self._reserve_lease(name, size, bounds)
                return LocalCopy(self._directory.lease(name), size, lambda: self._give_back(name))
            except BaseException:  # an interrupt too: its row would reserve space until this process ends
                with contextlib.suppress(OSError):
                    disk.unlink(self._directory.lease(name))
                self._give_back(name)
                raise

    def clear_plan_slot(self, plan_slot: int) -> None:
        with self._as_cache_error("the share of a plan cannot be noted"), self._writing(time.time()) as rows:
            self.room.clear_plan_slot(rows, plan_slot)

    def check(self, *, repair: bool) -> fsck.CheckReport:
        with self._as_cache_error("the cache cannot be checked"):
            return fsck.check(
                self._index, self._directory, self.room, self._locks, repair=repair, now_s=time.time()
            )

    def rebuild(self) -> None:
        """Delete all block rows and count the files again."""
        now_s = time.time()
        with self._as_cache_error("the index cannot be rebuilt"), self._writing(now_s) as rows:
            rows.forget_blocks()
            fsck.count_all(rows, self._directory, now_s)

    def _is_index_damaged(self) -> bool:
        try:
            return self._index.database.is_damaged()
        except OSError:  # cannot check
            return False

    @contextlib.contextmanager
    def _as_cache_error(self, what: str) -> Iterator[None]:
        """Raise each error of disk or index as a CacheError that says `what` failed; first recreate deleted folders."""
        try:
            self._directory.make_again_if_gone()
            yield
        except CacheError:
            raise
        except TROUBLE as error:
            raise CacheError(f"{what} in {self._directory.root}: {error}") from error

    @contextlib.contextmanager
    def _writing(self, now_s: float) -> Iterator[IndexRows]:
        """Run a write transaction. First count the files if the index is new, and remove abandoned temporary files."""
        with self._index.writing() as rows:
            fsck.count_if_fresh(rows, self._directory, now_s)
            self.room.set_aside = fsck.clear_away(self._directory, self._locks, now_s)
            yield rows
        self._directory.had_index = True

    def _is_cached(self, key: BlockKey, unusable: Container[str]) -> bool:
        path = self.room.path(block_file.place(key.object.digest, key.index))
        return os.path.exists(path) and path not in unusable

    # Storing blocks

    def _put_some(
        self, waiting: list[_NewBlock], bounds: CacheBounds, plan: FutureUseSource | None
    ) -> list[_NewBlock]:
        """Reserve and write as many blocks as fit the cache at once; return the blocks still to be stored.

        If the cache is far over its limit, evict one step, write nothing, and return all blocks.
        """
        now_s, deadline = time.time(), time.monotonic() + _WRITE_WITHIN_S
        reserved: list[_NewBlock] = []
        last = 0
        try:
            with self._writing(now_s) as rows:
                batch, rest = self._choose(rows, waiting, bounds, now_s)
                if self._evict_one_step(rows, self.allowed or 0, now_s):
                    return waiting
                size = sum(block.size for block in batch)
                hashes = [block.object.hash64(block.index) for block in batch]
                if self._make_room(rows, size, bounds, now_s, plan=plan, hashes=hashes):
                    reserved, last = batch, rows.last_block()
                    self._reserve(rows, reserved, now_s)
            if batch and not reserved:
                raise CacheError(
                    f"Cannot store blocks in {self._directory.root}: other processes are writing blocks that fill it"
                )
            # A crash here leaves rows without files, counted until they are evicted.
            self._write_all(reserved, deadline)
            # A crash here leaves blocks without rows uncounted until a repair.
            self._count_lost(reserved, last, now_s)
        finally:
            self.room.writing.difference_update(block.place for block in reserved)
        return rest

    def _choose(
        self, rows: IndexRows, waiting: list[_NewBlock], bounds: CacheBounds, now_s: float
    ) -> tuple[list[_NewBlock], list[_NewBlock]]:
        """Return the first blocks that fit together, and the rest, without blocks that another process is writing.

        Raises CacheError for a block that can never fit.
        """
        wanted = [block for block in waiting if self._is_ours_to_write(rows, block, now_s)]
        self.allowed = allowed = self.room.allowance(rows, bounds)
        fixed = self._fixed(rows, sum(block.size for block in wanted), allowed)
        _check_fit(rows, wanted, allowed, fixed)
        total = 0
        for n, block in enumerate(wanted):
            total += block.size
            if total > allowed - fixed:
                return wanted[:n], wanted[n:]
        return wanted, []

    def _fixed(self, rows: IndexRows, size: int, allowed: int) -> int:
        """Return the bytes that cannot be evicted (pins and local copies).

        If `size` more bytes do not fit, first remove the local copies of dead processes.
        """
        fixed = rows.number("fixed") or 0
        if size > allowed - fixed:
            remove_dead_leases(rows, self._directory, self._locks)
            fixed = rows.number("fixed") or 0
        return fixed

    def _is_ours_to_write(self, rows: IndexRows, block: _NewBlock, now_s: float) -> bool:
        row = rows.block(block.object, block.index)
        if row is None:
            return True
        if self._exists(block):
            if not block.replaces:
                return False
        elif self.room.is_being_written(row, now_s):
            return False
        rows.remove_block(row.id)  # left by a crash, or by a deleted or damaged file
        return True

    def _exists(self, block: _NewBlock) -> bool:
        return os.path.exists(self.room.path(block.place))

    def _make_room(
        self, rows: IndexRows, size: int, bounds: CacheBounds, now_s: float, **options: Any
    ) -> bool:
        """Make space and return whether `size` bytes fit; repeat if rows were removed that freed no disk space.

        `options` are passed to EvictionPolicy.make.
        """
        while True:
            before = self.room.fileless
            allowed = self.room.allowance(rows, bounds)
            touches = self._touches(size=allowed, clock=rows.last_clock())
            fits = self.room.make(rows, size, allowed=allowed, touches=touches, now_s=now_s, **options)
            if not fits or self.room.fileless == before:
                return fits

    def _evict_one_step(self, rows: IndexRows, allowed: int, now_s: float) -> bool:
        """Evict about _DROPPED_AT_ONCE blocks if the cache is over its limit by more than that.

        This happens after `cache_size` was lowered. Return whether it did: the caller then commits and calls again.
        """
        n_blocks, used = rows.number("blocks") or 0, rows.number("bytes") or 0
        step = _DROPPED_AT_ONCE * used // max(n_blocks, 1)
        if used - allowed <= step:
            return False
        touches = self._touches(size=allowed, clock=rows.last_clock())
        return self.room.make(rows, 0, allowed=used - step, touches=touches, now_s=now_s)

    def _reserve(self, rows: IndexRows, batch: list[_NewBlock], now_s: float) -> None:
        """Add rows for the blocks before they are written."""
        touches, writer = self._touches(), self.room.writer()
        for block in batch:
            rows.add_block(
                block.object, block.index, size=block.size, clock=touches.now, since=now_s, writer=writer
            )
            self.room.writing.add(block.place)

    def _count_lost(self, written: list[_NewBlock], last: int, now_s: float) -> None:
        """Add rows again for blocks that lost theirs while they were written; `last` is the row before these.

        This happens if the index was replaced or rebuilt meanwhile, or if this process was suspended for so long that
        others took it for dead. If there is no index now, the next one counts all files.
        """
        database, lost = self._index.database, []
        database.look_again()
        with contextlib.suppress(sqlite3.Error), self._index.reading() as rows:
            if rows.n_reserved(last, self.room.writer()) != len(written):
                lost = [block for block in written if self._is_lost(rows, block)]
        database.look_again()  # the next reader checks the file again
        if not lost:
            return
        with self._writing(now_s) as rows:
            for block in lost:
                if self._is_lost(rows, block):
                    clock = self._touches().now
                    rows.add_block(
                        block.object, block.index, size=block.size, clock=clock, since=now_s, writer=0
                    )

    def _is_lost(self, rows: IndexRows, block: _NewBlock) -> bool:
        return rows.block(block.object, block.index) is None and self._exists(block)

    def _write_all(self, batch: list[_NewBlock], deadline: float) -> None:
        """Write reserved blocks; after a failure, cancel the reservations of those not written."""
        done = 0
        try:
            for block in batch:
                self._write(block, deadline)
                self.room.writing.discard(block.place)
                done += 1
        except BaseException:  # an interrupt too: unwritten blocks must not stay counted
            with contextlib.suppress(OSError, sqlite3.Error):
                self._cancel(batch[done:])
            raise

    def _write(self, block: _NewBlock, deadline: float) -> None:
        temp = fsck.name_for_block(self._directory, self.room.writer())
        fd = disk.create(temp)
        try:
            try:
                disk.write_all(fd, [*block.pieces, block.trailer], 0)
            finally:
                os.close(fd)
            # A crash here leaves a row without a file, and a temporary file that the next writer removes.
            if time.monotonic() > deadline:
                raise CacheError(
                    f"writing blocks took more than {_WRITE_WITHIN_S:.0f} s: set cache_dir to a faster disk"
                )
            self._directory.move_into_place(temp, self.room.path(block.place))
        except BaseException:  # an interrupt too must not leave a partial file
            with contextlib.suppress(OSError):
                disk.unlink(temp)
            raise

    def _cancel(self, reserved: list[_NewBlock]) -> None:
        if self._directory.is_incomplete():  # it is being deleted: a new index would be in the way
            return
        with self._index.writing() as rows:
            for block in reserved:
                row = rows.block(block.object, block.index)
                if row is not None and not self._exists(block):
                    rows.remove_block(row.id)

    # Local copies

    def _reserve_lease(self, name: str, size: int, bounds: CacheBounds) -> None:
        while True:
            now_s = time.time()
            with self._writing(now_s) as rows:
                allowed = self.room.allowance(rows, bounds)
                if self._evict_one_step(rows, allowed, now_s):
                    continue
                fits = size <= allowed - self._fixed(rows, size, allowed) and self._make_room(
                    rows, size, bounds, now_s, is_staged=False
                )
                if fits:
                    rows.add_lease(name, size)
            break
        # A crash here leaves a row without a file, removed when its lock is found free.
        if not fits:
            raise CacheError(
                f"{self._directory.root} has no room for a local copy of {size} bytes: "
                "raise cache_size, lower keep_free, or unpin paths"
            )

    def _give_back(self, name: str) -> None:
        with contextlib.suppress(OSError, sqlite3.Error), self._index.writing() as rows:
            rows.remove_lease(name)
        self._locks.drop(int(name[:16], 16))


def _check_fit(rows: IndexRows, wanted: list[_NewBlock], allowed: int, fixed: int) -> None:
    """Raise CacheError if a block, or all pinned blocks together, can never fit."""
    largest = max((block.size for block in wanted), default=0)
    if largest > allowed:
        raise CacheError(
            f"a block of {largest} bytes does not fit the cache, which may hold {allowed} bytes now: "
            "raise cache_size, lower keep_free, or free space on the disk"
        )
    pinned = 0
    if rows.has_pins():
        pinned = sum(b.size for b in wanted if rows.is_pinned(b.object.identity, b.object.path))
    if max(largest, pinned) > allowed - fixed:
        raise CacheError(
            f"{fixed} of the {allowed} bytes that the cache may hold now are pinned or in use: "
            "unpin paths, raise cache_size, or close local copies"
        )
