"""The persistent block store on local disk, shared by all processes of a machine.

`BlockStore` is the entry point of this package, with its `metadata`, `quota`, `counts` and `locks`. Everything in it is
synchronous and safe across threads, processes and forks. A cache problem never fails a read: a block that is absent,
damaged or unreadable is a miss. A block that cannot be stored raises `CacheError`, which only the fetch code handles.

Storing a block: add its row (a reservation, in the transaction that also makes space), write a temporary file,
rename it. Evicting: unlink the file, then delete the row. After a crash between two steps there is at worst a row without a
file, so the cache size is not undercounted. One exception: if the index is replaced while blocks are written, a crash
before `_count_again` has their files uncounted until a repair.

No mutex is needed: SQLite serializes the transactions, and block files are written outside of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from cachedfs.cache import disk, fsck
from cachedfs.cache.block_file import encode_trailer, place
from cachedfs.cache.block_reader import BlockReader
from cachedfs.cache.counters import SharedCounters
from cachedfs.cache.directory import old_roots, root_in
from cachedfs.cache.disk import Buffer
from cachedfs.cache.eviction import admission
from cachedfs.cache.eviction.plan_registry import FutureUseSource
from cachedfs.cache.eviction.policy import UNWRITTEN_S, EvictionPolicy, likely_allowance, wal_pages_of
from cachedfs.cache.index.block_rows import CachedPath, LocalCopyRow
from cachedfs.cache.index.database import TROUBLE, IndexRows
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.local_copies import LocalCopy, remove_dead_copies
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.cache.quota_store import QuotaStore
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.cache.writable_directory import WritableDirectory
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import BlockKey, CacheBounds, ObjectKey
from cachedfs.common.urls import stored_path
from cachedfs.errors import CacheError

__all__ = ["BlockStore"]

# Rows deleted per transaction: other processes can write in between, and finished work survives an exit.
_REMOVED_AT_ONCE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_FILES = 16  # removed to make space for the logs of the index
_HOSTS_S = 3600.0  # between two looks at the folders of other hosts
_EVICT_AGAIN_S = 60.0  # after an eviction for a full disk that did not help
_WRITE_WITHIN_S = UNWRITTEN_S / 2  # later, other processes may take the reservation for a leftover of a crash
_MEASURED_BLOCKS = 7  # the bookkeeping is measured again after 2^7 blocks: their rows are within the slack

_TOO_SLOW = f"writing blocks took more than {_WRITE_WITHIN_S:.0f} s: set cache_dir to a faster disk"


class _NewBlock(NamedTuple):
    """A block to be written, and the size of its file."""

    key: BlockKey
    pieces: Sequence[Buffer]
    size: int


class BlockStore(BlockReader):
    """The blocks in `cache_dirs`: the first directory is writable, the others are read-only layers.

    `metadata` holds metadata entries, listings and change feeds. `locks` are the fetch locks and other locks between
    processes. With `explicit` (the user named the directory) an unsafe directory raises ValueError instead of logging a
    warning. Unless they say otherwise, methods that write raise CacheError on failure.
    """

    def __init__(self, cache_dirs: Sequence[str], *, explicit: bool) -> None:
        warnings = WarnOnce()
        self.locks = ByteRangeLocks(warnings.slower)
        shared = SharedFiles(root_in(cache_dirs[0]), self.locks, warnings)
        own = WritableDirectory(
            cache_dirs, explicit=explicit, locks=self.locks, shared=shared, warnings=warnings
        )
        super().__init__(own, shared, warnings)
        self.metadata = MetadataStore(own, shared)
        self.quota = QuotaStore(own)
        self.counts = SharedCounters(shared, self.locks)
        self.space = EvictionPolicy(own.directory, self.locks, shared, self.close_removed)
        # The checks of the folders, the bounds and the process at the last `_prepare_to_store`.
        self._prepared: object = None
        self._file_numbers = itertools.count()
        self._evict_again_at = 0.0
        self._hosts_at = 0.0  # when to look for folders of old hosts

    def __repr__(self) -> str:
        return f"<BlockStore {self.root or self.cannot_store}>"

    @property
    def root(self) -> str | None:
        """The path of this user's cache directory; None when nothing can be stored."""
        return self._own.path

    @property
    def cannot_store(self) -> str | None:
        """The reason why nothing can be stored, or why the last `put` failed; None if all is well."""
        return self._own.cannot_store

    @functools.cached_property
    def old_caches(self) -> tuple[str, ...]:
        """The directories of this user that earlier releases made beside this one, and that nothing uses now."""
        return tuple(old_roots(self._own.cache_dirs[0]))

    # Storing blocks

    def wait_for_deletion(self) -> None:
        """Wait for the end of a deletion of the cache directory, at most about 10 s; for background threads.

        Raises OSError if that cannot be checked.
        """
        directory = self._own.directory
        if directory is not None and not directory.is_as_seen(with_blocks=False):
            directory.wait_for_deletion()

    def put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        *,
        plan: FutureUseSource | None = None,
    ) -> None:
        """Store blocks and evict others to stay within `bounds`; skip blocks that are cached already.

        `plan` is the prefetch plan that fetched the blocks. When space is needed, the blocks that the plan can spare go
        first, as long as nothing else is due for eviction. Raises CacheError unless all blocks are stored. A block is
        never visible in part.
        """
        new: dict[str, _NewBlock] = {}
        for key, data in blocks:
            pieces = [data] if isinstance(data, Buffer) else data
            trailer = encode_trailer(key.object, key.index, *pieces)
            size = sum(memoryview(piece).nbytes for piece in pieces) + len(trailer)
            new[key.name] = _NewBlock(key, [*pieces, trailer], size)
        waiting, tried = list(new.values()), set[str]()
        while waiting:
            try:
                waiting = self._put_some(waiting, bounds, plan, "stored" in tried)
            except (CacheError, *TROUBLE) as error:
                self._recover(error, tried, waiting, bounds)
        self._own.cannot_store = None
        if tried or self.rejected or self._own.directory.is_network:
            self._finish(new.values(), tried)

    def _put_some(
        self, waiting: list[_NewBlock], bounds: CacheBounds, plan: FutureUseSource | None, is_any_stored: bool
    ) -> list[_NewBlock]:
        """Reserve and write as many blocks as fit the cache at once; return the blocks still to be stored.

        If the cache is far over its limit, evict one step, write nothing, and return all blocks. `is_any_stored`: some
        blocks may have rows already. Otherwise such a row is an IntegrityError.
        """
        now_s = time.time()
        with self._own.writing("blocks cannot be stored", restores=True) as rows:
            totals, space = rows.totals, self.space
            prepared = (
                self._own.directory.n_checks,
                bounds,
                os.getpid(),
                totals.last_block >> _MEASURED_BLOCKS,
            )
            if self._prepared != prepared or not totals.is_counted:
                self._prepare_to_store(rows, bounds, now_s)
                self._prepared = prepared
            allowed, size = self.allowed or 0, sum(block.size for block in waiting)
            staging = max(2 * admission.STAGING, allowed // 50)  # twice its size, before it is looked at
            batch, rest, has_room = waiting, list[_NewBlock](), True
            is_full = totals.bytes + size > allowed or totals.staged + size > staging
            if is_full or is_any_stored or plan is not None:
                batch = self._ours_to_write(rows, waiting)
                batch, rest, has_room = self._make_room(rows, batch, plan)
            clock = (self._shared.accesses or space.accesses(rows, allowed)).now
            rows.add_blocks([block[::2] for block in batch], clock, now_s, space.writer)
            space.writing.update(block.key.name for block in batch)
        # After a crash here, rows without files count until they are evicted.
        if not has_room:
            raise self._failure("blocks cannot be stored", "other processes are writing blocks that fill it")
        self._write(batch, now_s)
        return rest

    def _write(self, batch: list[_NewBlock], now_s: float) -> None:
        """Write reserved blocks; after a failure, cancel the reservations of those not written."""
        root, writer, waiting, temp = self._own.directory.root, self.space.writer, list(batch), ""
        deadline = time.monotonic() + _WRITE_WITHIN_S
        try:
            while waiting:
                name = waiting[0].key.name
                temp = f"{root}/tmp/{writer:016x}-{next(self._file_numbers):016x}"
                disk.write_file(temp, waiting[0].pieces, waiting[0].size)
                # After a crash here there is a row without a file, and a temporary file that the next writer removes.
                if time.monotonic() > deadline:
                    raise CacheError(_TOO_SLOW)
                try:
                    os.rename(temp, f"{root}/blocks/{name[0]}/{name}")
                except (FileNotFoundError, IsADirectoryError):
                    self._own.directory.move_into_place(temp, self.space.path(name))
                self.space.writing.discard(waiting.pop(0).key.name)
        except BaseException:  # an interrupt too: unwritten blocks must not stay counted
            self._cancel(waiting, temp)
            raise
        # If the index was replaced meanwhile, blocks are uncounted after a crash here, until a repair.
        is_soon = 0 <= time.time() - now_s < _WRITE_WITHIN_S
        if not (is_soon and self._own.directory.is_as_seen(with_blocks=False)):
            self._count_again(batch, now_s)

    def _cancel(self, reserved: list[_NewBlock], temp: str) -> None:
        """Remove the rows of blocks that could not be written, and the temporary file of the first."""
        self.space.writing.difference_update(block.key.name for block in reserved)
        with contextlib.suppress(OSError):
            disk.unlink(temp)
        if self._own.directory.is_incomplete():  # it is being deleted: a new index would be in the way
            return
        with contextlib.suppress(OSError, sqlite3.Error), self._own.index.writing() as rows:
            for name, row in rows.find_blocks(block.key for block in reserved).items():
                if not os.path.exists(self.space.path(name)):
                    rows.remove_block(row)

    def _count_again(self, written: list[_NewBlock], now_s: float) -> None:
        """Add rows again for blocks whose rows were removed while they were written.

        This happens if the index was replaced meanwhile, or if this process was suspended for so long that others took it
        for dead. If there is no index now, the next one counts all files.
        """
        found: Collection[str] = ()
        self._own.index.look_again()
        with contextlib.suppress(sqlite3.Error), self._own.index.reading() as rows:
            found = rows.find_blocks(block.key for block in written)
        self._own.index.look_again()  # the next reader checks the file again
        if len(found) == len(written):
            return
        with self._writing("blocks cannot be counted") as rows:
            found = rows.find_blocks(block.key for block in written)
            uncounted = [
                (block.key, block.size)
                for block in written
                if block.key.name not in found and os.path.exists(self.space.path(block.key.name))
            ]
            rows.add_blocks(uncounted, self.space.accesses(rows, self.allowed).now, now_s, 0)

    # What is done now and then

    @contextlib.contextmanager
    def _writing(self, what: str, bounds: CacheBounds | None = None) -> Iterator[IndexRows]:
        """Run the block in a write transaction of an index that counts all files."""
        with self._own.writing(what, restores=True) as rows:
            if bounds is not None:
                self._prepare(rows, bounds, time.time())
            elif not rows.totals.is_counted:
                fsck.count_all(rows, self._own.directory, time.time())
            yield rows

    def _prepare(self, rows: IndexRows, bounds: CacheBounds, now_s: float) -> None:
        """Count the files if the index is new, remove temporary files of dead writers, and measure the bookkeeping."""
        wal_pages = wal_pages_of(bounds)
        if self.space.writer_pid != os.getpid():
            self.space.become_writer()
        if not rows.totals.is_counted:
            fsck.count_all(rows, self._own.directory, now_s)
        if wal_pages != self._own.index.wal_pages:
            self._own.index.wal_pages = wal_pages
            rows.limit_wal(wal_pages)
        self.space.measure(wal_pages, fsck.remove_leftovers(self._own.directory, self.locks, now_s))
        overhead, disk_space = self.space.overhead, disk.space(self._own.directory.root)
        self.allowed = admission.allowance(bounds, disk_space, rows.totals, overhead, self.space.growth)

    def _prepare_to_store(self, rows: IndexRows, bounds: CacheBounds, now_s: float) -> None:
        """Do what is done before blocks are stored about once a second: in between, the limit stays the same."""
        self._prepare(rows, bounds, now_s)
        before, n_blocks = self._shared.accesses, rows.totals.blocks
        accesses = self.space.accesses(rows, self.allowed)  # their number follows the limit
        accesses.fit(window=admission.window_of(n_blocks), aging=admission.aging_of(n_blocks))
        if accesses is not before:
            self._prepare(rows, bounds, now_s)

    def _finish(self, stored: Collection[_NewBlock], tried: Collection[str]) -> None:
        """Remember what was stored in place of rejected files, or after an eviction; remove caches of old hosts."""
        if "full" in tried:
            self._evict_again_at = 0.0
        for block in stored:
            self.rejected.pop(f"{self._own.path}/{place(block.key.object.digest, block.key.index)}", None)
        if self._own.directory.is_network and time.monotonic() >= self._hosts_at:
            self._hosts_at = time.monotonic() + _HOSTS_S
            with contextlib.suppress(OSError):
                if fsck.remove_old_hosts(self._own.directory.root, time.time()):
                    self._hosts_at = 0.0

    # Errors

    def _recover(
        self, error: Exception, tried: set[str], waiting: list[_NewBlock], bounds: CacheBounds
    ) -> None:
        """Prepare another attempt after an error, or raise it as a CacheError.

        The next transaction replaces a damaged index. On a full disk, blocks are evicted: free bytes tell nothing of
        inodes and quotas. If that does not help, the next attempt is a minute later: the cache must not drain in vain.
        """
        cause = error.__cause__ if isinstance(error, CacheError) else error
        with contextlib.suppress(OSError):
            if "damaged" not in tried and self._own.index.is_damaged():
                tried.add("damaged")
                return
        if isinstance(cause, sqlite3.IntegrityError) and "stored" not in tried:
            tried.add("stored")
        elif "full" not in tried and time.monotonic() >= self._evict_again_at and self._is_full(cause):
            self._evict_again_at = time.monotonic() + _EVICT_AGAIN_S
            tried.add("full")
            self._evict_for([b for b in waiting if not os.path.exists(self.space.path(b.key.name))], bounds)
        else:
            if not isinstance(error, CacheError):
                error = self._failure("blocks cannot be stored", error)
            self._own.cannot_store = error.message
            self._warnings.not_stored(error.message)
            raise error

    def _is_full(self, error: BaseException | None) -> bool:
        """Return whether an error says that the disk has no space or no inodes."""
        if isinstance(error, OSError):
            return error.errno in _FULL
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code != sqlite3.SQLITE_CANTOPEN:
            return code == sqlite3.SQLITE_FULL
        return disk.space(self._own.directory.root).inodes <= _FEW_FILES

    def _evict_for(self, waiting: list[_NewBlock], bounds: CacheBounds) -> None:
        """Evict as many bytes and files as these blocks need, with a folder for each."""
        try:
            with self._writing("blocks cannot be evicted", bounds) as rows:
                n_blocks, used = rows.totals.blocks, rows.totals.bytes
                size = max(sum(block.size for block in waiting), 2 * len(waiting) * used // max(n_blocks, 1))
                self.space.make(rows, size, allowed=used)
        except CacheError as error:
            if not isinstance(error.__cause__, sqlite3.Error):
                return  # storing fails again, and says why
            # The index needs space itself; rows without files are evicted like others.
            # Reading needs no space. If that fails too, nothing is removed: any file may be pinned.
            with contextlib.suppress(sqlite3.Error), self._own.index.reading() as rows:
                unpinned = (
                    found
                    for found in self._own.directory.files()
                    if not rows.has_pinned_object(found.name.partition("-")[0])
                )
                for found in itertools.islice(unpinned, _FEW_FILES):
                    disk.unlink(found.path)

    # Making room

    def _ours_to_write(self, rows: IndexRows, waiting: list[_NewBlock]) -> list[_NewBlock]:
        """Return the blocks that are neither cached nor being written by another process; remove old rows of these."""
        ours, found = [], rows.find_blocks(block.key for block in waiting)
        for block in waiting:
            row, path = found.get(block.key.name), self.space.path(block.key.name)
            if row is not None:
                is_there = os.path.exists(path)
                if (is_there and path not in self.rejected) or (
                    not is_there and self.space.is_being_written(row)
                ):
                    continue
                rows.remove_block(row)  # after a crash, or of a deleted or damaged file
            ours.append(block)
        return ours

    def _make_room(
        self, rows: IndexRows, wanted: list[_NewBlock], plan: FutureUseSource | None
    ) -> tuple[list[_NewBlock], list[_NewBlock], bool]:
        """Make space for the first blocks that fit together; return these, the rest, and whether there is space.

        Raises CacheError for a block that can never fit.
        """
        allowed, size = self.allowed or 0, sum(block.size for block in wanted)
        free = allowed - self._fixed(rows, size, allowed)
        self._check_fit(rows, wanted, allowed, free)
        sums = list(itertools.accumulate(block.size for block in wanted))
        n = sum(each <= free for each in sums)
        batch, rest = wanted[:n], wanted[n:]
        if not batch:
            return batch, rest, True
        if self._evict_one_step(rows, allowed):
            return [], wanted, True
        hashes = [block.key.hash64 for block in batch]
        fits = self.space.make(rows, sums[n - 1], allowed=allowed, plan=plan, hashes=hashes)
        return batch if fits else [], rest, fits

    def _check_fit(self, rows: IndexRows, wanted: list[_NewBlock], allowed: int, free: int) -> None:
        """Raise CacheError if a block, or all pinned blocks together, can never fit."""
        largest = max((block.size for block in wanted), default=0)
        if largest > allowed:
            raise CacheError(
                f"a block of {largest} bytes does not fit the cache, which may hold {allowed} bytes now: "
                "raise cache_size, lower keep_free, or free space on the disk"
            )
        pinned = 0
        if rows.totals.pins:
            objects = ((block.key.object, block.size) for block in wanted)
            pinned = sum(size for key, size in objects if rows.is_pinned(key.identity, key.path))
        if max(largest, pinned) > free:
            raise CacheError(
                f"{allowed - free} of the {allowed} bytes that the cache may hold now are pinned or in use: "
                "unpin paths, raise cache_size, or close local copies"
            )

    def _fixed(self, rows: IndexRows, size: int, allowed: int) -> int:
        """Return the bytes that cannot be evicted (pins and local copies).

        If `size` more bytes do not fit, first remove the local copies of dead processes.
        """
        if size > allowed - rows.totals.fixed:
            remove_dead_copies(rows, self._own.directory, self.locks)
        return rows.totals.fixed

    def _evict_one_step(self, rows: IndexRows, allowed: int) -> bool:
        """Evict about _REMOVED_AT_ONCE blocks if the cache is over its limit by more than that.

        This happens after `cache_size` was lowered. Return whether it did: the caller then commits and calls again.
        """
        used = rows.totals.bytes
        step = _REMOVED_AT_ONCE * used // max(rows.totals.blocks, 1)
        if used - allowed <= step:
            return False
        return self.space.make(rows, 0, allowed=used - step)

    # Everything else

    @property
    def evictions(self) -> int:
        """The number of blocks that this process has evicted, or removed on request."""
        return self.space.evictions

    def usage(self) -> tuple[int, int]:
        """Return the number of blocks, and the bytes of blocks and local copies; zeros if the index cannot be read."""
        totals = self._own.query(lambda rows: rows.load_totals(), Totals())
        return totals.blocks, totals.bytes

    def allowance(self, bounds: CacheBounds) -> int | None:
        """Return how many bytes blocks and local copies may use under `bounds` now; None if nothing can be stored.

        The first call records the automatic size.
        """
        if self._own.path is None:
            return None
        with self._writing("the cache limit cannot be determined", bounds):
            return self.allowed or 0

    def room(self, bounds: CacheBounds) -> int:
        """Return how many bytes are available to blocks that are neither pinned nor in use. Raises CacheError."""
        with self._writing("the cache limit cannot be determined", bounds) as rows:
            return max(0, (self.allowed or 0) - rows.totals.fixed)

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths with cached blocks, sorted: `path` itself and everything below it."""
        return self._own.query(lambda rows: rows.paths_below(identity, stored_path(path)), [])

    def held(self) -> list[CachedPath]:
        """Return what is cached of each path, for all origins, sorted by path. Scans the rows of all blocks."""
        return self._own.query(lambda rows: rows.cached_paths(), [])

    def evict(self, identity: str | None, path: str | None = None) -> int:
        """Remove the blocks of `path` and everything below it, of a whole origin, or of all origins (`identity` None).

        Pinned blocks are removed too. Returns the number of bytes freed.
        """
        freed, last, path = 0, 0, path and stored_path(path)
        while True:
            with self._writing("blocks cannot be removed") as rows:
                found = rows.blocks_of(identity, path, after=last, limit=_REMOVED_AT_ONCE)
                sizes = [block.size for block in found if self.space.remove(rows, block)]
            freed += sum(sizes)
            self.space.evictions += len(sizes)
            if len(found) < _REMOVED_AT_ONCE:
                return freed
            last = found[-1].id

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises.

        If the index cannot be used, only the file is removed. Without its file the block is a miss.
        """
        super().remove_damaged(key, index)
        if self._own.path is None:
            return
        path = self.space.path(key.name(index))
        try:
            with self._writing("a damaged block cannot be removed") as rows:
                was_there = disk.unlink(path)
                block = rows.block(key, index)
                if block is not None and not self.space.remove(rows, block) and was_there:
                    # Its living writer may have just written it, or be replacing it: keep the row, without a writer.
                    rows.release_block(block.id)
        except CacheError:
            with contextlib.suppress(OSError, ValueError):
                self._own.directory.verify()
                disk.unlink(path)

    def pin(self, identity: str, *paths: str) -> None:
        """Protect the blocks of `paths`, present and future, from eviction: all paths or, on failure, none."""
        with self._writing("the pin cannot be stored") as rows:
            for path in paths:
                rows.pin(identity, stored_path(path), True)

    def unpin(self, identity: str, *paths: str) -> None:
        """Remove the pins of `paths`."""
        with self._writing("the pin cannot be removed") as rows:
            for path in paths:
                rows.pin(identity, stored_path(path), False)

    def pins(self) -> list[tuple[str, str]]:
        """Return (identity, path) of every pin."""
        return self._own.query(lambda rows: rows.pins(), [])

    # Prefetch plans

    def take_plan_slot(self) -> int | None:
        """Register an active prefetch plan and return its number; None if it cannot be registered.

        The registration ends with `leave_plan_slot` or with the process.
        """
        return self.space.plan_registry.take()

    def leave_plan_slot(self, plan_slot: int) -> None:
        """End the registration of plan number `plan_slot`."""
        self.space.plan_registry.leave(plan_slot)

    def share(self, plan_slot: int | None, bounds: CacheBounds) -> int:
        """Return about how many bytes of the cache the plan with number `plan_slot` may use; `put` computes it exactly."""
        return self.space.share(self.allowed or likely_allowance(self.root, bounds) or 0, plan_slot)

    def clear_plan_slot(self, plan_slot: int) -> None:
        """Reset the bytes counted for plan number `plan_slot`, which may be those of an earlier plan.

        Raises CacheError where nothing can be stored.
        """
        with self._writing("the share of a plan cannot be stored") as rows:
            if rows.plan_bytes(plan_slot):
                rows.set_plan_bytes(plan_slot, 0)

    # The whole cache

    def check(self, *, repair: bool = False) -> fsck.CheckReport:
        """Compare every file with its row and its checksums; `repair` fixes what it can."""
        if self._own.path is None:
            return fsck.CheckReport()
        try:
            self._own.directory.verify()
            with self._writing("the cache cannot be checked"):
                pass  # a new index counts all files first
            return fsck.check(self._own.index, self._own.directory, self.space, self.locks, repair=repair)
        except TROUBLE as error:
            raise self._failure("the cache cannot be checked", error) from error

    def rebuild(self) -> None:
        """Delete the rows of all blocks that are not being written, and count the files again.

        A new index does that by itself.
        """
        with self._writing("the index cannot be rebuilt") as rows:
            fsck.rebuild(rows, self._own.directory, self.space, time.time())

    def close(self) -> None:
        """Close files and connections; they reopen when needed. Locks are held until the process ends."""
        self.close_open()
        self._own.index.close()

    # Local copies

    def lease(self, size: int, bounds: CacheBounds, suffix: str = "") -> LocalCopy:
        """Return a private file of `size` bytes, counted in the cache size until it is closed.

        Its name ends with `suffix`, such as ".csv.gz".
        """
        self._own.writable()
        name = f"{os.getpid():08x}{os.urandom(4).hex()}{suffix}"
        row, path = LocalCopyRow(name, size), self._own.directory.local_copy(name)
        self.locks.take(row.owner_lock)
        try:
            while not self._reserve(row, bounds):
                pass
            return LocalCopy(path, size, lambda: self._release(row))
        except BaseException as error:  # an interrupt too: its row would reserve space
            with contextlib.suppress(OSError):
                disk.unlink(path)
            self._release(row)
            if isinstance(error, OSError) and not isinstance(error, CacheError):
                raise self._failure(f"a file of {size} bytes cannot be stored", error) from error
            raise

    def _reserve(self, row: LocalCopyRow, bounds: CacheBounds) -> bool:
        """Add the row of a local copy; return False, to be called again, if the cache is far over its limit."""
        size = row.size
        with self._writing(f"a file of {size} bytes cannot be stored", bounds) as rows:
            allowed = self.allowed or 0
            if self._evict_one_step(rows, allowed):
                return False
            fits = size <= allowed - self._fixed(rows, size, allowed)
            fits = fits and self.space.make(rows, size, allowed=allowed, is_staged=False)
            if fits:
                rows.add_local_copy(row.name, size)
        # After a crash here there is a row without a file, removed when its lock is found free.
        if not fits:
            raise CacheError(
                f"{self._own.directory.root} has no room for a local copy of {size} bytes: "
                "raise cache_size, lower keep_free, or unpin paths"
            )
        return True

    def _release(self, row: LocalCopyRow) -> None:
        with contextlib.suppress(OSError, sqlite3.Error), self._own.index.writing() as rows:
            rows.remove_local_copy(row)
        self.locks.release(row.owner_lock)

    def _failure(self, what: str, why: Exception | str) -> CacheError:
        failure = CacheError(f"{what} in {self._own.directory.root}: {why}")
        failure.__cause__ = why if isinstance(why, Exception) else None
        return failure
