"""The write side of the cache: store blocks, remove blocks, make local copies.

Storing a block: add its row (a reservation, in the transaction that also makes space), write a temporary file,
rename it. Evicting: unlink the file, then delete the row. After a crash between two steps there is at worst a row without a
file, so the cache size is not undercounted. One exception: if the index is replaced while blocks are written, a crash
before `_count_again` has their files uncounted until a repair.

No mutex is needed: SQLite serializes the transactions, and block files are written outside of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn

from cachedfs.cache import disk, fsck
from cachedfs.cache.block_file import encode_trailer
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.disk import Buffer
from cachedfs.cache.eviction import admission
from cachedfs.cache.eviction.policy import UNWRITTEN_S, EvictionPolicy, wal_pages_of
from cachedfs.cache.index.block_rows import BlockRow, LocalCopyRow
from cachedfs.cache.index.database import TROUBLE, CacheIndex, IndexRows
from cachedfs.cache.local_copies import LocalCopy, remove_dead_copies
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.common.types import BlockKey, CacheBounds, ObjectKey
from cachedfs.errors import CacheError

__all__ = ["BlockWriter"]

# Rows deleted per transaction: other processes can write in between, and finished work survives an exit.
_REMOVED_AT_ONCE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_FILES = 16  # removed to make space for the logs of the index
_HOSTS_S = 3600.0  # between two looks at the folders of other hosts
_EVICT_AGAIN_S = 60.0  # after an eviction for a full disk that did not help
_WRITE_WITHIN_S = UNWRITTEN_S / 2  # later, other processes may take the reservation for a leftover of a crash

_TOO_SLOW = f"writing blocks took more than {_WRITE_WITHIN_S:.0f} s: set cache_dir to a faster disk"


class _NewBlock(NamedTuple):
    """A block to be written, and the size of its file."""

    key: BlockKey
    pieces: Sequence[Buffer]
    size: int


class BlockWriter:
    """Writes to one cache for one process. Every method except `remove_damaged` raises CacheError on failure."""

    def __init__(
        self,
        begin: Callable[..., AbstractContextManager[IndexRows]],
        directory: CacheDirectory,
        index: CacheIndex,
        handles: BlockPool,
        locks: ByteRangeLocks,
        shared: SharedFiles,
    ) -> None:
        self._begin = begin  # see `WritableDirectory.writing`
        self._directory = directory
        self._index = index
        self._handles = handles
        self._locks = locks
        self._shared = shared
        self.room = EvictionPolicy(directory, handles, locks, shared)
        self.allowed: int | None = None  # the last computed allowance
        # The checks of the folders, the bounds and the process at the last `_prepare_to_store`.
        self._prepared: object = None
        self._file_numbers = itertools.count()
        self._evict_again_at = 0.0
        self._hosts_at = 0.0  # when to look for folders of old hosts

    def put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        *,
        unusable: Container[str] = (),
        victims: Iterable[tuple[ObjectKey, int]] = (),
    ) -> None:
        """Store the blocks that are not cached yet; each is then there in full, or not at all.

        `unusable` holds paths of existing but unusable files. `victims` go first if space is needed.
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
                waiting = self._put_some(waiting, bounds, unusable, victims)
            except (CacheError, *TROUBLE) as error:
                self._recover(error, tried, waiting, bounds)
        if tried or self._directory.is_network:
            self._finish()

    def _put_some(
        self,
        waiting: list[_NewBlock],
        bounds: CacheBounds,
        unusable: Container[str],
        victims: Iterable[tuple[ObjectKey, int]],
    ) -> list[_NewBlock]:
        """Reserve and write as many blocks as fit the cache at once; return the blocks still to be stored.

        If the cache is far over its limit, evict one step, write nothing, and return all blocks.
        """
        now_s = time.time()
        with self._begin("blocks cannot be stored", restores=True) as rows:
            prepared = self._directory.n_checks, bounds, os.getpid()
            if self._prepared != prepared or not rows.totals.is_counted:
                self._prepare_to_store(rows, bounds, now_s)
            if found := rows.find_blocks(block.key for block in waiting):
                waiting = self._ours_to_write(rows, waiting, found, unusable)
            size, totals, room = sum(block.size for block in waiting), rows.totals, self.room
            space = disk.space(self._directory.root)
            overhead = room.overhead + disk.size_of(self._directory.index)
            allowed = self.allowed = admission.allowance(bounds, space, totals, overhead, room.growth)
            staging = max(2 * admission.STAGING, allowed // 50)  # twice its size, before it is looked at
            batch, rest, has_room = waiting, list[_NewBlock](), True
            if totals.bytes + size > allowed or totals.staged + size > staging:
                batch, rest, has_room = self._make_room(rows, waiting, victims)
            clock = (self._shared.accesses or room.accesses(rows, allowed)).now
            rows.add_blocks([block[::2] for block in batch], clock, now_s, room.writer)
            room.writing.update(block.key.name for block in batch)
        # After a crash here, rows without files count until they are evicted.
        if not has_room:
            self._raise("blocks cannot be stored", "other processes are writing blocks that fill it")
        self._write(batch, now_s)
        return rest

    def _write(self, batch: list[_NewBlock], now_s: float) -> None:
        """Write reserved blocks; after a failure, cancel the reservations of those not written."""
        root, writer, waiting, temp = self._directory.root, self.room.writer, list(batch), ""
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
                    self._directory.move_into_place(temp, self.room.path(name))
                self.room.writing.discard(waiting.pop(0).key.name)
        except BaseException:  # an interrupt too: unwritten blocks must not stay counted
            self._cancel(waiting, temp)
            raise
        # If the index was replaced meanwhile, blocks are uncounted after a crash here, until a repair.
        is_soon = 0 <= time.time() - now_s < _WRITE_WITHIN_S
        if not (is_soon and self._directory.is_as_seen(with_blocks=False)):
            self._count_again(batch, now_s)

    def _cancel(self, reserved: list[_NewBlock], temp: str) -> None:
        """Remove the rows of blocks that could not be written, and the temporary file of the first."""
        self.room.writing.difference_update(block.key.name for block in reserved)
        with contextlib.suppress(OSError):
            disk.unlink(temp)
        if self._directory.is_incomplete():  # it is being deleted: a new index would be in the way
            return
        with contextlib.suppress(OSError, sqlite3.Error), self._index.writing() as rows:
            for name, row in rows.find_blocks(block.key for block in reserved).items():
                if not os.path.exists(self.room.path(name)):
                    rows.remove_block(row)

    def _count_again(self, written: list[_NewBlock], now_s: float) -> None:
        """Add rows again for blocks whose rows were removed while they were written.

        This happens if the index was replaced meanwhile, or if this process was suspended for so long that others took it
        for dead. If there is no index now, the next one counts all files.
        """
        found: Collection[str] = ()
        self._index.look_again()
        with contextlib.suppress(sqlite3.Error), self._index.reading() as rows:
            found = rows.find_blocks(block.key for block in written)
        self._index.look_again()  # the next reader checks the file again
        if len(found) == len(written):
            return
        with self._writing("blocks cannot be counted") as rows:
            found = rows.find_blocks(block.key for block in written)
            uncounted = [
                (block.key, block.size)
                for block in written
                if block.key.name not in found and os.path.exists(self.room.path(block.key.name))
            ]
            rows.add_blocks(uncounted, self.room.accesses(rows, self.allowed).now, now_s, 0)

    # What is done now and then

    @contextlib.contextmanager
    def _writing(self, what: str, bounds: CacheBounds | None = None) -> Iterator[IndexRows]:
        """Run the block in a write transaction of an index that counts all files."""
        with self._begin(what, restores=True) as rows:
            if bounds is not None:
                self._prepare(rows, bounds, time.time())
            elif not rows.totals.is_counted:
                fsck.count_all(rows, self._directory, time.time())
            yield rows

    def _prepare(self, rows: IndexRows, bounds: CacheBounds, now_s: float) -> None:
        """Count the files if the index is new, remove temporary files of dead writers, and measure the bookkeeping."""
        wal_pages = wal_pages_of(bounds)
        if self.room.writer_pid != os.getpid():
            self.room.become_writer()
        if not rows.totals.is_counted:
            fsck.count_all(rows, self._directory, now_s)
        if wal_pages != self._index.wal_pages:
            self._index.wal_pages = wal_pages
            rows.limit_wal(wal_pages)
        self.room.measure(wal_pages, fsck.remove_leftovers(self._directory, self._locks, now_s))
        self._allow(rows, bounds)

    def _prepare_to_store(self, rows: IndexRows, bounds: CacheBounds, now_s: float) -> None:
        """Do what is done about once a second before blocks are stored."""
        self._prepare(rows, bounds, now_s)
        before, n_blocks = self._shared.accesses, rows.totals.blocks
        accesses = self.room.accesses(rows, self.allowed)  # their number follows the limit
        accesses.fit(window=admission.window_of(n_blocks), aging=admission.aging_of(n_blocks))
        if accesses is not before:
            self._prepare(rows, bounds, now_s)
        self._prepared = self._directory.n_checks, bounds, os.getpid()

    def _allow(self, rows: IndexRows, bounds: CacheBounds) -> int:
        """Return how many bytes blocks and local copies may use."""
        space, room = disk.space(self._directory.root), self.room
        overhead = room.overhead + disk.size_of(self._directory.index)
        self.allowed = admission.allowance(bounds, space, rows.totals, overhead, room.growth)
        return self.allowed

    def _finish(self) -> None:
        """Remember that evicting for a full disk helped, and remove caches of old hosts."""
        self._evict_again_at = 0.0
        if self._directory.is_network and time.monotonic() >= self._hosts_at:
            self._hosts_at = time.monotonic() + _HOSTS_S
            with contextlib.suppress(OSError):
                if fsck.remove_old_hosts(self._directory, time.time()):
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
            if "damaged" not in tried and self._index.is_damaged():
                tried.add("damaged")
                return
        if "full" not in tried and time.monotonic() >= self._evict_again_at and self._is_full(cause):
            self._evict_again_at = time.monotonic() + _EVICT_AGAIN_S
            tried.add("full")
            self._evict_for([b for b in waiting if not os.path.exists(self.room.path(b.key.name))], bounds)
        elif isinstance(error, CacheError):
            raise error
        else:
            self._raise("blocks cannot be stored", error)

    def _is_full(self, error: BaseException | None) -> bool:
        """Return whether an error says that the disk has no space or no inodes."""
        if isinstance(error, OSError):
            return error.errno in _FULL
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code != sqlite3.SQLITE_CANTOPEN:
            return code == sqlite3.SQLITE_FULL
        return disk.space(self._directory.root).inodes <= _FEW_FILES

    def _evict_for(self, waiting: list[_NewBlock], bounds: CacheBounds) -> None:
        """Evict as many bytes and files as these blocks need, with a folder for each."""
        try:
            with self._writing("blocks cannot be evicted", bounds) as rows:
                n_blocks, used = rows.totals.blocks, rows.totals.bytes
                size = max(sum(block.size for block in waiting), 2 * len(waiting) * used // max(n_blocks, 1))
                self.room.make(rows, size, allowed=used)
        except CacheError as error:
            if not isinstance(error.__cause__, sqlite3.Error):
                raise
            # The index needs space itself; rows without files are evicted like others.
            # Reading needs no space. If that fails too, nothing is removed: any file may be pinned.
            with contextlib.suppress(sqlite3.Error), self._index.reading() as rows:
                unpinned = (
                    found
                    for found in self._directory.files()
                    if not rows.has_pinned_object(found.name.partition("-")[0])
                )
                for found in itertools.islice(unpinned, _FEW_FILES):
                    disk.unlink(found.path)

    # Making room

    def _ours_to_write(
        self,
        rows: IndexRows,
        waiting: list[_NewBlock],
        found: dict[str, BlockRow],
        unusable: Container[str],
    ) -> list[_NewBlock]:
        """Return the blocks that are neither cached nor being written by another process; remove old rows of these."""
        ours = []
        for block in waiting:
            row, path = found.get(block.key.name), self.room.path(block.key.name)
            if row is not None:
                is_there = os.path.exists(path)
                if (is_there and path not in unusable) or (not is_there and self.room.is_being_written(row)):
                    continue
                rows.remove_block(row)  # after a crash, or of a deleted or damaged file
            ours.append(block)
        return ours

    def _make_room(
        self,
        rows: IndexRows,
        wanted: list[_NewBlock],
        victims: Iterable[tuple[ObjectKey, int]],
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
        fits = self.room.make(rows, sums[n - 1], allowed=allowed, victims=victims)
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
            remove_dead_copies(rows, self._directory, self._locks)
        return rows.totals.fixed

    def _evict_one_step(self, rows: IndexRows, allowed: int) -> bool:
        """Evict about _REMOVED_AT_ONCE blocks if the cache is over its limit by more than that.

        This happens after `cache_size` was lowered. Return whether it did: the caller then commits and calls again.
        """
        used = rows.totals.bytes
        step = _REMOVED_AT_ONCE * used // max(rows.totals.blocks, 1)
        if used - allowed <= step:
            return False
        return self.room.make(rows, 0, allowed=used - step)

    # Everything else

    def allowance(self, bounds: CacheBounds) -> int:
        """Return how many bytes blocks and local copies may use; the first call records the automatic size."""
        with self._writing("the cache limit cannot be determined", bounds):
            return self.allowed or 0

    def evict(self, identity: str | None, path: str | None) -> int:
        """Remove the blocks of a path and of all below it, of an origin, or all blocks; return the bytes freed."""
        freed = last = 0
        while True:
            with self._writing("blocks cannot be removed") as rows:
                found = rows.blocks_of(identity, path, after=last, limit=_REMOVED_AT_ONCE)
                sizes = [block.size for block in found if self.room.remove(rows, block)]
            freed += sum(sizes)
            self.room.evictions += len(sizes)
            if len(found) < _REMOVED_AT_ONCE:
                return freed
            last = found[-1].id

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises.

        If the index cannot be used, only the file is removed. Without its file the block is a miss.
        """
        path = self.room.path(key.name(index))
        try:
            with self._writing("a damaged block cannot be removed") as rows:
                was_there = disk.unlink(path)
                block = rows.block(key, index)
                if block is not None and not self.room.remove(rows, block) and was_there:
                    # Its living writer may have just written it, or be replacing it: keep the row, without a writer.
                    rows.release_block(block.id)
        except CacheError:
            with contextlib.suppress(OSError, ValueError):
                self._directory.verify()
                disk.unlink(path)

    def pin(self, identity: str, paths: Sequence[str], *, wanted: bool) -> None:
        with self._writing("the pin cannot be stored") as rows:
            for path in paths:
                rows.pin(identity, path, wanted)

    def check(self, *, repair: bool) -> fsck.CheckReport:
        try:
            self._directory.verify()
            with self._writing("the cache cannot be checked"):
                pass  # a new index counts all files first
            return fsck.check(self._index, self._directory, self.room, self._locks, repair=repair)
        except TROUBLE as error:
            self._raise("the cache cannot be checked", error)

    def rebuild(self) -> None:
        """Delete the rows of all blocks that are not being written, and count the files again."""
        with self._writing("the index cannot be rebuilt") as rows:
            fsck.rebuild(rows, self._directory, self.room, time.time())

    def local_copy(self, size: int, bounds: CacheBounds, suffix: str) -> LocalCopy:
        """Reserve space for `size` bytes and return the private file that uses it; its name ends with `suffix`."""
        name = f"{os.getpid():08x}{os.urandom(4).hex()}{suffix}"
        row, path = LocalCopyRow(name, size), self._directory.local_copy(name)
        self._locks.take(row.owner_lock)
        try:
            while not self._reserve(row, bounds):
                pass
            return LocalCopy(path, size, lambda: self._release(row))
        except BaseException as error:  # an interrupt too: its row would reserve space
            with contextlib.suppress(OSError):
                disk.unlink(path)
            self._release(row)
            if isinstance(error, OSError) and not isinstance(error, CacheError):
                self._raise(f"a file of {size} bytes cannot be stored", error)
            raise

    def _reserve(self, row: LocalCopyRow, bounds: CacheBounds) -> bool:
        """Add the row of a local copy; return False, to be called again, if the cache is far over its limit."""
        size = row.size
        with self._writing(f"a file of {size} bytes cannot be stored", bounds) as rows:
            allowed = self.allowed or 0
            if self._evict_one_step(rows, allowed):
                return False
            fits = size <= allowed - self._fixed(rows, size, allowed)
            fits = fits and self.room.make(rows, size, allowed=allowed, is_staged=False)
            if fits:
                rows.add_local_copy(row.name, size)
        # After a crash here there is a row without a file, removed when its lock is found free.
        if not fits:
            raise CacheError(
                f"{self._directory.root} has no room for a local copy of {size} bytes: "
                "raise cache_size, lower keep_free, or unpin paths"
            )
        return True

    def _release(self, row: LocalCopyRow) -> None:
        with contextlib.suppress(OSError, sqlite3.Error), self._index.writing() as rows:
            rows.remove_local_copy(row)
        self._locks.release(row.owner_lock)

    def _raise(self, what: str, why: Exception | str) -> NoReturn:
        message = f"{what} in {self._directory.root}: {why}"
        raise CacheError(message) from (why if isinstance(why, Exception) else None)
