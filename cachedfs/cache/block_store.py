"""The persistent block store on local disk, shared by all processes of a machine.

`BlockStore` is the entry point of this package, with its `metadata`, `quota`, `counts` and `locks`. Everything in it is
synchronous and safe across threads, processes and forks. A cache problem never fails a read: a block that is absent,
damaged or unreadable is a miss. A block that cannot be stored raises `CacheError`, which only the fetch code handles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_writer import BlockWriter
from cachedfs.cache.counters import SharedCounters
from cachedfs.cache.directory import old_roots
from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.local_copies import LocalCopy
from cachedfs.cache.quota_store import QuotaStore
from cachedfs.cache.space import REMOVED_AT_ONCE
from cachedfs.common.clock import boot_number
from cachedfs.common.types import CacheBounds, ObjectKey
from cachedfs.common.urls import stored_path
from cachedfs.errors import BadBlock, CacheError


class BlockStore(BlockWriter):
    """The blocks in `cache_dir`.

    `metadata` holds metadata entries, listings and change feeds. `locks` are the fetch locks and other locks between
    processes. With `explicit` (the user named the directory) an unsafe directory raises ValueError instead of logging a
    warning. Unless they say otherwise, methods that write raise CacheError on failure.
    """

    def __init__(self, cache_dir: str, *, explicit: bool) -> None:
        super().__init__(cache_dir, explicit=explicit)
        self.quota = QuotaStore(self._own)
        self.counts = SharedCounters(self.metadata.counters, self.locks)

    def __repr__(self) -> str:
        return f"<BlockStore {self.root or self.cannot_store}>"

    @property
    def root(self) -> str | None:
        """The path of this user's cache directory; None when nothing can be stored."""
        return self._own.path

    @functools.cached_property
    def name(self) -> str:
        """32 hex digits that name this cache among those of all machines.

        Where nothing can be stored, each process has a name of its own.
        """
        status = None if self.root is None else disk.state(self.root)
        if status is None:
            return os.urandom(16).hex()
        place = f"{os.uname().nodename}|{boot_number()}|{status.st_dev}|{status.st_ino}"
        return hashlib.blake2b(place.encode(), digest_size=16).hexdigest()

    @property
    def cannot_store(self) -> str | None:
        """The reason why nothing can be stored, or why the last `put` failed; None if all is well."""
        return self._own.cannot_store

    @functools.cached_property
    def old_caches(self) -> tuple[str, ...]:
        """The directories of this user that earlier releases made beside this one, and that nothing uses now."""
        return tuple(old_roots(self._own.cache_dir))

    @property
    def evictions(self) -> int:
        """The number of blocks that this process has evicted, or removed on request."""
        return self.space.evictions

    def usage(self) -> tuple[int, int]:
        """Return the number of blocks, and their bytes; zeros if the index cannot be read."""
        totals = self._own.query(lambda rows: rows.load_totals(), Totals())
        return totals.blocks, totals.bytes

    def allowance(self, bounds: CacheBounds) -> int | None:
        """Return how many bytes blocks may use under `bounds` now; None if nothing can be stored.

        The first call records the automatic size.
        """
        if self._own.path is None:
            return None
        with self._writing("the cache limit cannot be determined", bounds):
            return self.allowed or 0

    def room(self, bounds: CacheBounds) -> int:
        """Return how many bytes are available to blocks that are not pinned. Raises CacheError."""
        with self._writing("the cache limit cannot be determined", bounds) as rows:
            return max(0, (self.allowed or 0) - rows.totals.pinned)

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths with cached blocks, sorted: `path` itself and everything below it."""
        return self._own.query(lambda rows: rows.paths_below(identity, stored_path(path)), [])

    def held(self) -> list[CachedPath]:
        """Return what is cached of each path, for all origins, sorted by path. Scans the rows of all blocks."""
        return self._own.query(lambda rows: rows.cached_paths(), [])

    def evict(self, identity: str | None, path: str | None = None, *, from_shared: bool = False) -> int:
        """Remove the blocks of `path` and everything below it, of a whole origin, or of all origins (`identity` None).

        With `from_shared`, only those that came from a shared cache or an import. Pinned blocks are removed too. Returns
        the number of bytes freed.
        """
        freed = 0
        names: list[str] | None = None  # not row ids: these are others if the index is replaced meanwhile
        while names is None or names:
            with self._writing("blocks cannot be removed") as rows:
                if names is None:
                    names = rows.names_of(identity, path and stored_path(path))
                batch, names = names[:REMOVED_AT_ONCE], names[REMOVED_AT_ONCE:]
                wanted = [name for name in batch if not from_shared or self._is_shared(name)]
                found = rows.find_blocks(wanted).values()
                sizes = [block.size for block in found if self.space.remove(rows, block)]
            freed += sum(sizes)
            self.space.evictions += len(sizes)
        return freed

    def _is_shared(self, name: str) -> bool:
        path = self.space.path(name)
        with contextlib.suppress(OSError, BadBlock):
            return block_file.open_block(os.open(path, disk.READ), path).trailer.is_shared
        return False

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block, also for the threads and processes that have it open. Never raises.

        If the index cannot be used, only the file is removed. Without its file the block is a miss.
        """
        super().remove_damaged(key, index)
        if self._own.path is None:
            return
        path = self.space.path(key.name(index))
        try:
            with self._writing("a damaged block cannot be removed") as rows:
                disk.empty(path)
                was_there = disk.unlink(path)
                block = rows.block(key, index)
                if block is not None and not self.space.remove(rows, block) and was_there:
                    # Its living writer may have just written it, or be replacing it: keep the row, without a writer.
                    rows.release_block(block.id)
        except CacheError:
            with contextlib.suppress(OSError, ValueError):
                self._own.verify()
                disk.empty(path)
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

    def close(self) -> None:
        """Close files and connections; they reopen when needed. Locks are held until the process ends."""
        self.close_open()
        self._own.index.close()

    # Local copies

    def lease(self, size: int, bounds: CacheBounds, suffix: str = "") -> LocalCopy:
        """Return a private file of `size` bytes, counted in the cache size until it is closed.

        Its name ends with `suffix`, such as ".csv.gz".
        """
        copy = LocalCopy(f"{self._own.root}/local-copies", size, suffix, self.locks)
        what = f"a file of {size} bytes cannot be stored"
        try:
            fits: bool | None = None
            while fits is None:  # the cache was far over its limit
                with self._writing(what, bounds) as rows:
                    allowed = self.allowed or 0
                    fits = size <= allowed - rows.totals.pinned
                    fits = fits and self.space.make(rows, size, allowed=allowed, is_staged=False)
                    if fits:
                        copy.reserve()
                        rows.totals.copies += 1
            if not fits:
                raise CacheError(
                    f"{self._own.root} has no room for a local copy of {size} bytes: "
                    "raise cache_size, lower keep_free, or unpin paths"
                )
            copy.allocate()
        except BaseException as error:  # an interrupt too: the caller has no object to close yet
            copy.close()
            if isinstance(error, OSError) and not isinstance(error, CacheError):
                raise self._failure(what, error) from error
            raise
        return copy
