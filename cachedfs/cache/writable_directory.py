"""This user's directory of the cache as this process has it open: paths, locks, index and writer.

What could not be opened is tried again once a minute.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from cachedfs.cache import disk, fsck
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.directory import CacheDirectory, open_directory, readable_root
from cachedfs.cache.index.database import TROUBLE, CacheIndex, IndexRows
from cachedfs.cache.layers import CacheLayers
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.cache.writer import BlockWriter
from cachedfs.common.logging import WarnOnce
from cachedfs.errors import CacheError

__all__ = ["WritableDirectory"]

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

_LOOK_S = 1.0  # interval between checks that the shared files are still the ones at their paths
_AGAIN_S = 60.0  # delay before a retry: each one creates new change counters, 2 MB


class WritableDirectory:
    """This user's subdirectory of `cache_dir`: open for writing if possible, else for reading.

    If nothing can be stored, `path`, `directory`, `index` and `store` are None and `cannot_store` is the reason.
    `cannot_store` is also set after the last `put` failed. For `explicit` see BlockCache.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        explicit: bool,
        handles: BlockPool,
        layers: CacheLayers,
        locks: ByteRangeLocks,
        shared: SharedFiles,
        warnings: WarnOnce,
    ) -> None:
        self.cache_dir = cache_dir
        self._handles = handles
        self._layers = layers
        self._shared = shared
        self._warnings = warnings
        self.look_at = 0.0
        self._again_at = time.monotonic() + _AGAIN_S
        self.locks = locks
        self.index: CacheIndex | None = None
        self.store: BlockWriter | None = None
        self._open(explicit=explicit)

    def writable(self) -> BlockWriter:
        self.look()
        if self.store is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        return self.store

    def query(self, question: Callable[[IndexRows], T], otherwise: T) -> T:
        """Return the result of a query on the index; `otherwise` if there is no index or it cannot be read."""
        if self.index is None:
            return otherwise
        try:
            with self.index.reading() as rows:
                return question(rows)
        except TROUBLE as error:
            log.debug("the index of %s cannot be read: %s", self.path, error)
            return otherwise

    @contextlib.contextmanager
    def writing(self, what: str, *, restores: bool = False) -> Iterator[IndexRows]:
        """Run the block in one index transaction. Raises CacheError whose message begins with `what`.

        With `restores`, a directory that was deleted is made again at once. Otherwise that is an error for some
        seconds, as the deletion may go on; `CacheDirectory.wait_for_deletion` waits for its end.
        """
        if time.monotonic() >= self.look_at:
            self.look()
        directory, index = self.directory, self.index
        if directory is None or index is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        try:
            if not directory.is_as_seen():
                if not restores and directory.is_being_deleted():
                    raise CacheError(f"{what} in {self.path}: it is being deleted")
                directory.verify()
            with index.writing(directory.root_seen) as rows:
                yield rows
            directory.had_index = True
        except CacheError:
            raise
        except TROUBLE as error:
            raise CacheError(f"{what} in {self.path}: {error}") from error

    def look(self) -> None:
        """Once a second, release shared files that were deleted, so that all processes use the same ones.

        Once a minute, try again what failed before. Two threads may do this at the same time without harm.
        """
        now = time.monotonic()
        if now < self.look_at:
            return
        self.look_at = now + _LOOK_S
        if now >= self._again_at:
            self._again_at = now + _AGAIN_S
            self._try_again()
        if self.directory is not None:
            self.directory.n_checks += 1
        for check in (self.locks.look_again, self._shared.release_deleted):
            with contextlib.suppress(OSError):  # cannot check: keep the current files
                check()

    def look_now(self) -> None:
        """Run the checks of `look`, however recent the last ones are."""
        self.look_at = 0.0
        self.look()

    def _try_again(self) -> None:
        """Try again what could not be opened before."""
        if self.directory is None:
            self._open(explicit=False)
            if self.directory is None:
                return
        self.locks.try_again()
        self._shared.try_again()

    def _open(self, *, explicit: bool) -> None:
        """Open the directory, for writing if possible, else for reading."""
        directory, self.cannot_store = open_directory(self.cache_dir, explicit=explicit)
        self.directory = directory
        self.path = directory.root if directory else None
        self._layers.begin_with(self.path or readable_root(self.cache_dir), self.path)
        if directory is not None:
            self._open_store(directory)
            self._shared.move_to(directory)
        elif self.cannot_store:
            self._warnings.not_stored(self.cannot_store)

    def _open_store(self, directory: CacheDirectory) -> None:
        if not directory.is_network:
            self.locks.use(directory.locks)
        with contextlib.suppress(OSError):
            fsck.remove_leftovers(directory, self.locks, time.time())
        self.index = CacheIndex(
            directory.index,
            has_wal=disk.maps_safely(directory.root),
            locks=self.locks,
            temp=directory.temp,
        )
        self.store = BlockWriter(self.writing, directory, self.index, self._handles, self.locks, self._shared)
