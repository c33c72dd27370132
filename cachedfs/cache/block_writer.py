"""The write side of the cache: store blocks, and make space for them.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from cachedfs.cache import disk, recovery
from cachedfs.cache.access_stats import AccessStats
from cachedfs.cache.block_file import encode_trailer
from cachedfs.cache.block_reader import BlockReader
from cachedfs.cache.change_counters import ChangeCounters
from cachedfs.cache.directory import CacheDirectory, root_in
from cachedfs.cache.disk import Buffer
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.index.database import TROUBLE
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.cache.space import STAGING, UNWRITTEN_S, CacheSpace, staging_size
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import BlockKey, CacheBounds
from cachedfs.errors import CacheError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HOSTS_S = 3600.0  # between two looks at the folders of other hosts
_EVICT_AGAIN_S = 60.0  # after an eviction for a full disk that did not help
_WRITE_WITHIN_S = UNWRITTEN_S / 2  # later, other processes may take the reservation for a leftover of a crash
_MEASURED = 7  # the bookkeeping is measured again after 2^7 blocks: their rows are within the slack

_NOT_STORED = "blocks cannot be stored"
_TOO_SLOW = f"writing blocks took more than {_WRITE_WITHIN_S:.0f} s: set cache_dir to a faster disk"


class _NewBlock(NamedTuple):
    """A block to be written, and the size of its file."""

    key: BlockKey
    pieces: Sequence[Buffer]
    size: int
    name: str


class BlockWriter(BlockReader):
    """Writes to one cache for one process. Unless they say otherwise, methods raise CacheError on failure."""

    def __init__(self, cache_dir: str, *, explicit: bool) -> None:
        warnings = WarnOnce()
        self.locks = ByteRangeLocks(warnings.slower)
        accesses = AccessStats(self.locks, lambda: self._own.look())
        counters = ChangeCounters(root_in(cache_dir), warnings)

        def on_open(directory: CacheDirectory) -> None:
            accesses.move_to(directory)
            counters.move_to(directory)

        own = CacheDirectory(
            cache_dir, explicit=explicit, locks=self.locks, warnings=warnings, on_open=on_open
        )
        super().__init__(own, accesses, warnings)
        own.on_look += [
            lambda again: self.locks.look(again),
            accesses.look,
            counters.look,
            lambda again: self.close_deleted(),
        ]
        self.metadata = MetadataStore(own, counters)
        self.space = CacheSpace(own, self.locks, accesses, self.close_open)
        self._prepared: object = None  # what `CacheSpace.prepare` depends on, at its last call
        self._file_numbers = itertools.count()
        self._evict_again_at = 0.0
        self._hosts_at = 0.0  # when to look for folders of old hosts: there may be more

    def put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        records: Sequence[MetadataRecord] = (),
        victims: Iterable[BlockKey] = (),
        *,
        shared: Collection[BlockKey] = (),
    ) -> None:
        """Store blocks and evict others to stay within `bounds`; skip blocks that are cached already.

        While somebody deletes the cache, it waits: no file may appear in folders that were just emptied.

        When space is needed, `victims` go first, in their order and only as many as are needed. Raises CacheError unless
        all blocks are stored. A block is never visible in part. `records` are metadata entries for the same transaction;
        the blocks `shared` came from a shared cache.
        """
        new: dict[str, _NewBlock] = {}
        for key, data in blocks:
            pieces = [data] if isinstance(data, Buffer) else data
            name = f"{key.object.digest}-{key.index:x}"  # as `key.name`, without two calls
            trailer = encode_trailer(key.object, key.index, *pieces, is_shared=bool(shared) and key in shared)
            size = sum([memoryview(piece).nbytes for piece in pieces]) + len(trailer)
            new[name] = _NewBlock(key, [*pieces, trailer], size, name)
        waiting, tried, apart = list(new.values()), set[str](), records[:0]
        while waiting or records:
            try:
                batch, rest, now_s = self._reserve(waiting, records, bounds, victims, tried)
                if batch:
                    self._write(batch, now_s)
                waiting, records = rest, ()
            except (CacheError, *TROUBLE) as error:
                if records:  # perhaps it is these that cannot be stored
                    records, apart = (), records
                else:
                    self._recover(error, tried, waiting, bounds)
        self._own.cannot_store, self._evict_again_at = None, 0.0
        if apart or self.unusable or self._own.is_network:
            self._end(new, apart)

    def _reserve(
        self,
        waiting: list[_NewBlock],
        records: Sequence[MetadataRecord],
        bounds: CacheBounds,
        victims: Iterable[BlockKey],
        tried: set[str],
    ) -> tuple[list[_NewBlock], list[_NewBlock], float]:
        """Reserve as many blocks as fit at once, and store `records`; return these blocks, the others, and the time.

        The others are all, after one step of a large eviction. `tried` is what `_recover` has tried: before that, a row that a
        block has already is an IntegrityError.
        """
        now_s, space, batch = time.time(), self.space, waiting
        rest: list[_NewBlock] | None = []
        with contextlib.ExitStack() as undo, self._own.writing(_NOT_STORED, waits=True) as rows:
            totals = rows.totals
            state = self._own.n_looks, bounds, os.getpid(), totals.last_block >> _MEASURED, totals.copies
            if self._prepared != state or not totals.is_counted:
                self.allowed, self._prepared = space.prepare(rows, bounds, now_s, stores=True), state
            allowed, size = self.allowed or 0, sum([block.size for block in waiting])
            staging = max(2 * STAGING, allowed // 50)  # twice its size, before it is looked at
            if totals.bytes + size > allowed or totals.staged + size > staging or "stored" in tried:
                batch, rest = self._make_room(rows, self._ours_to_write(rows, waiting), victims)
            rows.add_blocks([block[::2] for block in batch], self.accesses.now, now_s, space.writer)
            names = [block.name for block in batch]
            undo.push(lambda error, *_: space.writing.difference_update(names if error else ()))  # no commit
            space.writing.update(names)
            if records:
                self.metadata.add_records(rows, records)
        # After a crash here, rows without files count until they are evicted.
        if rest is None:
            raise self._failure(_NOT_STORED, "other processes are writing blocks that fill it")
        return batch, rest, now_s

    def _write(self, batch: list[_NewBlock], now_s: float) -> None:
        """Write reserved blocks; after a failure, cancel the reservations of those not written."""
        root, writer, waiting, temp = self._own.root, self.space.writer, list(batch), ""
        deadline = time.monotonic() + _WRITE_WITHIN_S
        try:
            while waiting:
                name = waiting[0].name
                temp = f"{root}/tmp/{writer:016x}-{next(self._file_numbers):016x}"
                disk.write_file(temp, waiting[0].pieces, waiting[0].size)
                # After a crash here there is a row without a file, and a temporary file that the next writer removes.
                if time.monotonic() > deadline:
                    raise CacheError(_TOO_SLOW)
                try:
                    os.rename(temp, f"{root}/blocks/{name[0]}/{name}")
                except (FileNotFoundError, IsADirectoryError):
                    self._own.move_into_place(temp, self.space.path(name))
                self.space.writing.discard(waiting.pop(0).name)
        except BaseException:  # an interrupt too: unwritten blocks must not stay counted
            self._cancel(waiting, temp)
            raise
        # If the index was replaced meanwhile, blocks are uncounted after a crash here, until a repair.
        is_soon = 0 <= time.time() - now_s < _WRITE_WITHIN_S
        if not (is_soon and self._own.is_as_seen(with_blocks=False)):
            self._count_again(batch, now_s)

    def _cancel(self, reserved: list[_NewBlock], temp: str) -> None:
        """Remove the rows of blocks that could not be written, and the temporary file of the first."""
        self.space.writing.difference_update(block.name for block in reserved)
        with contextlib.suppress(OSError):
            disk.unlink(temp)
        with contextlib.suppress(OSError, sqlite3.Error):
            if self._own.is_incomplete():  # it is being deleted: a new index would be in the way
                return
            with self._own.index.writing() as rows:
                for name, row in rows.find_blocks(block.name for block in reserved).items():
                    if not os.path.exists(self.space.path(name)):
                        rows.remove_block(row)

    def _count_again(self, written: list[_NewBlock], now_s: float) -> None:
        """Add rows again for blocks whose rows were removed while they were written.

        This happens if the index was replaced meanwhile, or if this process was suspended for so long that others took it
        for dead. If there is no index now, the next one counts all files.
        """
        self._own.index.look_again()
        found: Collection[str] = self._own.query(
            lambda rows: rows.find_blocks(block.name for block in written), {}
        )
        self._own.index.look_again()  # the next reader checks the file again
        if len(found) == len(written):
            return
        with self._writing("blocks cannot be counted") as rows:
            found = rows.find_blocks(block.name for block in written)
            uncounted = [
                (block.key, block.size)
                for block in written
                if block.name not in found and os.path.exists(self.space.path(block.name))
            ]
            rows.add_blocks(uncounted, self.accesses.now, now_s, 0)

    # What is done now and then

    def _end(self, stored: Iterable[str], apart: Sequence[MetadataRecord]) -> None:
        """After blocks were stored, store metadata apart from them, and remove what other hosts left once an hour.

        The blocks with the names `stored` are usable again.
        """
        with contextlib.suppress(CacheError):
            self.metadata.keep_records(apart)
        for name in stored:
            self.unusable.pop(self.space.path(name), None)
        if self._own.is_network and time.monotonic() >= self._hosts_at:
            self._hosts_at = time.monotonic() + _HOSTS_S
            with contextlib.suppress(OSError):
                if recovery.remove_old_hosts(self._own.root, time.time()):
                    self._hosts_at = 0.0

    @contextlib.contextmanager
    def _writing(self, what: str, bounds: CacheBounds | None = None) -> Iterator[IndexRows]:
        """Run the block in a write transaction of an index that counts all files."""
        with self._own.writing(what, restores=True) as rows:
            if bounds is not None:
                self.allowed, self._prepared = self.space.prepare(rows, bounds, time.time()), None
            elif not rows.totals.is_counted:
                recovery.count_all(rows, self._own, time.time())
            yield rows

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
        elif "full" not in tried and time.monotonic() >= self._evict_again_at and _is_full(cause):
            self._evict_again_at = time.monotonic() + _EVICT_AGAIN_S
            tried.add("full")
            self._evict_for([b for b in waiting if not os.path.exists(self.space.path(b.name))], bounds)
        else:
            if not isinstance(error, CacheError):
                error = self._failure(_NOT_STORED, error)
            self._own.cannot_store = error.message
            self._warnings.not_stored(error.message)
            raise error

    def _evict_for(self, waiting: list[_NewBlock], bounds: CacheBounds) -> None:
        """Evict as many bytes and files as these blocks need, with a folder for each."""
        with contextlib.suppress(CacheError), self._writing("blocks cannot be evicted", bounds) as rows:
            n_blocks, used = rows.totals.blocks, rows.totals.bytes
            size = max(sum(block.size for block in waiting), 2 * len(waiting) * used // max(n_blocks, 1))
            self.space.make(rows, size, allowed=used)

    # Making room

    def _ours_to_write(self, rows: IndexRows, waiting: list[_NewBlock]) -> list[_NewBlock]:
        """Return the blocks that are neither cached nor being written by another process; remove old rows of these."""
        ours, found = [], rows.find_blocks(block.name for block in waiting)
        for block in waiting:
            row, path = found.get(block.name), self.space.path(block.name)
            if row is not None:
                is_there = os.path.exists(path)
                if (is_there and path not in self.unusable) or (
                    not is_there and self.space.is_being_written(row)
                ):
                    continue
                rows.remove_block(row)  # after a crash, or of a deleted or damaged file
            ours.append(block)
        return ours

    def _make_room(
        self, rows: IndexRows, wanted: list[_NewBlock], victims: Iterable[BlockKey]
    ) -> tuple[list[_NewBlock], list[_NewBlock] | None]:
        """Make space for the first blocks that fit together; return these and the rest.

        The rest is None if there is no space. Raises CacheError for a block, or pinned blocks, that can never fit.
        """
        allowed, totals = self.allowed or 0, rows.totals
        free, largest = allowed - totals.pinned, max((block.size for block in wanted), default=0)
        if largest > allowed:
            raise CacheError(
                f"a block of {largest} bytes does not fit the cache, which may hold {allowed} bytes now: "
                "raise cache_size, lower keep_free, or free space on the disk"
            )
        pinned = sum(block.size for block in wanted if totals.pins and rows.is_pinned(block.key.object))
        if max(largest, pinned) > free:
            raise CacheError(
                f"{allowed - free} of the {allowed} bytes that the cache may hold now are pinned: "
                "unpin paths, raise cache_size, or close local copies"
            )
        # At most what staging holds at once: more would evict old blocks for want of others.
        most = min(free, max(staging_size(allowed), wanted[0].size if wanted else 0))
        sums = list(itertools.accumulate(block.size for block in wanted))
        n = sum(each <= most for each in sums)
        fits = not n or self.space.make(rows, sums[n - 1], allowed=allowed, victims=victims)
        return (wanted[:n], wanted[n:]) if fits else ([], wanted if fits is None else None)

    def _failure(self, what: str, why: Exception | str) -> CacheError:
        failure = CacheError(f"{what} in {self._own.root}: {why}")
        failure.__cause__ = why if isinstance(why, Exception) else None
        return failure


def _is_full(error: BaseException | None) -> bool:
    """Return whether an error says that the disk has no space or no inodes."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
