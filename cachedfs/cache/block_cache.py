"""The persistent block cache on local disk, shared by all processes of a machine.

`BlockCache` is the only entry point of this package. Everything in it is synchronous and safe across threads,
processes and forks. A cache problem never fails a read: a block that is absent, damaged or unreadable is a miss.
A block that cannot be stored raises `CacheError`, which only the fetch code handles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from cachedfs.cache import block_file
from cachedfs.cache.block_file import OpenBlock
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.counters import SharedCounters
from cachedfs.cache.directory import layer_roots, old_roots, root_in
from cachedfs.cache.disk import Buffer
from cachedfs.cache.eviction.policy import likely_allowance
from cachedfs.cache.fsck import CheckReport
from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.layers import CacheLayers
from cachedfs.cache.local_copies import LocalCopy
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.cache.quota_store import QuotaStore
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.cache.writable_directory import WritableDirectory
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import GOLDEN, MASK64, BlockKey, CacheBounds, ObjectKey
from cachedfs.common.urls import stored_path
from cachedfs.errors import CacheError

__all__ = ["BlockCache"]


class BlockCache:
    """The block cache in `cache_dirs`: the first directory is writable, the others are read-only layers.

    `root` is the subdirectory of the first one that belongs to this user; None when nothing can be stored.
    `cannot_store` is the reason, also after the last `put` failed. `metadata` holds metadata entries, listings and
    change feeds. With `explicit` (the user named the directory) an unsafe directory raises ValueError instead of
    logging a warning.
    """

    def __init__(self, cache_dirs: Sequence[str], *, explicit: bool) -> None:
        self._handles = BlockPool()
        self._warnings = WarnOnce()
        self._layers = CacheLayers(
            layer_roots(cache_dirs[1:]),
            self._handles,
            remove_damaged=self.remove_damaged,
            warnings=self._warnings,
        )
        self._shared = SharedFiles(root_in(cache_dirs[0]), self._warnings)
        self._own = WritableDirectory(
            cache_dirs[0],
            explicit=explicit,
            handles=self._handles,
            layers=self._layers,
            shared=self._shared,
            warnings=self._warnings,
        )
        self.metadata = MetadataStore(self._own, self._shared)
        self.quota = QuotaStore(self._own)
        self.counts = SharedCounters(lambda: self._own.directory, lambda: self._own.locks)

    def __repr__(self) -> str:
        return f"<BlockCache {self.root or self.cannot_store}>"

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
        return tuple(old_roots(self._own.cache_dir))

    # Reading blocks: no SQLite, no lock

    def read(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        stop: int,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> bytes | None:
        """Return bytes `[start, stop)` of a block, clipped to its length; None if it is absent or damaged (a miss).

        With `nowait`, read from the page cache only; raise BlockingIOError if it lacks the bytes or cannot be queried.
        `verify` checks the checksums of the pages read even if this process checked them before. `touch` records the
        access.
        """
        handles = self._handles
        handle = handles.idle.pop((key.digest, index), None) or self._layers.open(key, index, nowait)
        if handle is None:
            return None
        try:
            data = handle.read(start, stop, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: no other code would close the handle
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return None
        handles.give(key, index, handle)
        if touch:
            number = key.number + index * GOLDEN & MASK64  # `key.hash64`, without a call
            (self._shared.accesses or self._shared.open_accesses()).touch(number)
        return data

    def read_into(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        buffer: memoryview,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> int:
        """Fill `buffer` from offset `start` of a block; return the number of bytes read, -1 for a miss.

        The options are those of `read`. After a miss the content of the buffer is undefined.
        """
        handles = self._handles
        handle = handles.take(key, index) or self._layers.open(key, index, nowait)
        if handle is None:
            return -1
        try:
            size = handle.read_into(start, buffer, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: see `read`
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return -1
        handles.give(key, index, handle)
        if touch:
            (self._shared.accesses or self._shared.open_accesses()).touch(key.hash64(index))
        return size

    def borrow(
        self, key: ObjectKey, index: int, instead: tuple[int, OpenBlock] | None = None
    ) -> OpenBlock | None:
        """Return an open block for repeated reads and record one access; None is a miss.

        The caller has the block to itself until it calls `release_block`. `instead` is another block (index, open block) of
        the same object to release first.
        """
        handles = self._handles
        if instead is not None:
            handles.give(key, *instead)
        handle = handles.take(key, index) or self._layers.open(key, index, nowait=False)
        if handle is not None:
            (self._shared.accesses or self._shared.open_accesses()).touch(key.hash64(index))
        return handle

    def release_block(
        self, key: ObjectKey, index: int, handle: OpenBlock, error: BaseException | None = None
    ) -> None:
        """Return a borrowed block to the pool.

        `error` is the exception that reading the block raised. A damaged or unreadable block is removed; other
        errors are raised again.
        """
        if error is None:
            self._handles.give(key, index, handle)
        elif not self._layers.is_miss(key, index, handle, error):
            raise error

    def touch(self, key: ObjectKey, index: int) -> None:
        """Record the access to a block whose bytes came from a request and not from the cache."""
        (self._shared.accesses or self._shared.open_accesses()).touch(key.hash64(index))

    def reads_since(self, clock: int) -> tuple[int, Sequence[int]]:
        """Return the access clock, and the last blocks (by hash64) that any process read after `clock`, in order."""
        return (self._shared.accesses or self._shared.open_accesses()).since(clock)

    def clock(self, bounds: CacheBounds) -> int:
        """Return the access clock: how many block accesses all processes have recorded, modulo 2^32."""
        accesses = self._shared.accesses
        if accesses is None:
            # Use the final size at once: a larger file begins without the records of a smaller one.
            accesses = self._shared.open_accesses(size=self.allowed or likely_allowance(self.root, bounds))
        return accesses.now

    def call_now_and_then(self, function: Callable[[], object]) -> None:
        """Call `function` about once a second while blocks are read, in the thread of the reader."""
        self._handles.on_sweep = function

    def missed(self, key: ObjectKey, index: int, bounds: CacheBounds, *, of: int | None = None) -> None:
        """Record that a block is not cached and must be fetched; the admission policy uses this later.

        `of` is the object's size in bytes. The first pass over an object larger than the cache evicts no other block.
        """
        most = self.allowed or likely_allowance(self.root, bounds)
        accesses = self._shared.accesses or self._shared.open_accesses(size=most)
        accesses.missed(key.hash64(index), passes=None not in (of, most) and (of or 0) > (most or 0))

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return a whole block, with its file reopened and every byte read from disk and checked; None if it is absent.

        Raises BadBlock if the block is damaged; it is a miss from then on. Verification is not use, so no access is
        recorded.
        """
        return self._layers.read_anew(key, index)

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the file of a block exists and was not rejected before, without reading it."""
        return self._layers.has(key, index)

    # Writing blocks

    def wait_for_deletion(self) -> None:
        """Wait for the end of a deletion of the cache directory, at most about 10 s; for background threads.

        Raises OSError if that cannot be checked.
        """
        if self._own.directory is not None:
            self._own.directory.wait_for_deletion()

    def put(
        self,
        blocks: Sequence[tuple[BlockKey, Buffer | Sequence[Buffer]]],
        bounds: CacheBounds,
        *,
        victims: Iterable[tuple[ObjectKey, int]] = (),
    ) -> None:
        """Store blocks and evict others to stay within `bounds`; skip blocks that are cached already.

        When space is needed, `victims` go first, in their order and only as many as are needed. Raises CacheError unless all blocks are stored. A block is
        never visible in part.
        """
        try:
            store = self._own.store or self._own.writable()
            store.put(blocks, bounds, unusable=self._layers.rejected, victims=victims)
        except CacheError as error:
            self._own.cannot_store = error.message
            self._warnings.not_stored(error.message)
            raise
        self._own.cannot_store = None
        if self._layers.rejected:
            self._layers.accept(block_file.place(key.object.digest, key.index) for key, _ in blocks)

    def evict(self, identity: str | None, path: str | None = None) -> int:
        """Remove the blocks of `path` and everything below it, of a whole origin, or of all origins (`identity` None).

        Pinned blocks are removed too. Returns the number of bytes freed. Raises CacheError.
        """
        return self._own.writable().evict(identity, path and stored_path(path))

    def packed(self, key: ObjectKey, index: int) -> bytes | None:
        """Return the bytes of a block's file (data and trailer), reread from disk and checked; None if it is absent.

        Raises BadBlock if the block is damaged.
        """
        data = self.read_anew(key, index)
        return None if data is None else data + block_file.encode_trailer(key, index, data)

    def room(self, bounds: CacheBounds) -> int:
        """Return how many bytes are available to blocks that are neither pinned nor in use. Raises CacheError."""
        allowed = self._own.writable().allowance(bounds)
        return max(0, allowed - self._own.query(lambda rows: rows.load_totals().fixed, 0))

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises: without its file the block is a miss."""
        self._handles.drop([(key.digest, index)])
        if self._own.store is not None:
            self._own.store.remove_damaged(key, index)

    def remove_wrong(self, key: ObjectKey, index: int) -> None:
        """Remove an undamaged block whose bytes differ from the origin's; in read-only layers, ignore it from now on."""
        self.remove_damaged(key, index)
        self._layers.ignore(key, index)

    def pin(self, identity: str, *paths: str) -> None:
        """Protect the blocks of `paths`, present and future, from eviction: all paths or, on failure, none.

        Raises CacheError.
        """
        self._own.writable().pin(identity, tuple(map(stored_path, paths)), wanted=True)

    def unpin(self, identity: str, *paths: str) -> None:
        """Remove the pins of `paths`. Raises CacheError."""
        self._own.writable().pin(identity, tuple(map(stored_path, paths)), wanted=False)

    def pins(self) -> list[tuple[str, str]]:
        """Return (identity, path) of every pin."""
        return self._own.query(lambda rows: rows.pins(), [])

    def lease(self, size: int, bounds: CacheBounds, suffix: str = "") -> LocalCopy:
        """Return a private file of `size` bytes, counted in the cache size until it is closed. Raises CacheError.

        Its name ends with `suffix`, such as ".csv.gz".
        """
        return self._own.writable().local_copy(size, bounds, suffix)

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths with cached blocks, sorted: `path` itself and everything below it."""
        return self._own.query(lambda rows: rows.paths_below(identity, stored_path(path)), [])

    def held(self) -> list[CachedPath]:
        """Return what is cached of each path, for all origins, sorted by path. Scans the rows of all blocks."""
        return self._own.query(lambda rows: rows.cached_paths(), [])

    # Fetch locks

    def take_lock(self, hash64: int) -> bool:
        """Take the fetch lock of a block; False when another process or another thread holds it."""
        is_ours = self._own.locks.take(hash64)
        if self._own.locks.trouble:
            self._warnings.slower(self._own.locks.trouble)
        return is_ours

    def release_lock(self, hash64: int) -> None:
        """Release the fetch lock of a block."""
        self._own.locks.release(hash64)
        if self._own.locks.trouble:
            self._warnings.slower(self._own.locks.trouble)

    def lock_holder(self, hash64: int) -> int | None:
        """Return the id of the process that holds a fetch lock; None if it is free, or held where we cannot see."""
        return self._own.locks.holder(hash64)

    # The whole cache

    @property
    def evictions(self) -> int:
        """The number of blocks that this process has evicted, or removed on request."""
        return self._own.store.room.evictions if self._own.store else 0

    def usage(self) -> tuple[int, int]:
        """Return the number of blocks, and the bytes of blocks and local copies; zeros if the index cannot be read."""
        totals = self._own.query(lambda rows: rows.load_totals(), Totals())
        return totals.blocks, totals.bytes

    def allowance(self, bounds: CacheBounds) -> int | None:
        """Return how many bytes blocks and local copies may use under `bounds` now; None if nothing can be stored."""
        return None if self._own.store is None else self._own.store.allowance(bounds)

    @property
    def allowed(self) -> int | None:
        """The last `allowance` that this process computed, without computing it again; None before the first."""
        return None if self._own.store is None else self._own.store.allowed

    def check(self, *, repair: bool = False) -> CheckReport:
        """Compare every file with its row and its checksums; `repair` fixes what it can. Raises CacheError."""
        return self._own.store.check(repair=repair) if self._own.store else CheckReport()

    def rebuild(self) -> None:
        """Remove the rows of all blocks and count the files again. Raises CacheError.

        A new index does that by itself.
        """
        self._own.writable().rebuild()

    def close_inherited(self) -> None:
        """Close the open blocks and nothing else, in a forked child that makes a cache of its own."""
        self._handles.close_inherited()

    def close(self) -> None:
        """Close files and connections; they reopen when needed. Locks are held until the process ends."""
        self._handles.close_all()
        if self._own.index is not None:
            self._own.index.close()
