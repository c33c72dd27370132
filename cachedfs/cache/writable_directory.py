"""This user's directory of the cache as this process has it open: roots, index and transactions.

What could not be opened is tried again once a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from cachedfs.cache import disk, recovery
from cachedfs.cache.directory import CacheDirectory, layer_roots
from cachedfs.cache.index.database import TROUBLE, CacheIndex, IndexRows
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.common.logging import WarnOnce
from cachedfs.errors import CacheError

__all__ = ["WritableDirectory"]

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

_LOOK_S = 1.0  # interval between checks that the shared files are still the ones at their paths
_AGAIN_S = 60.0  # delay before a retry: each one creates new change counters, 2 MB


class WritableDirectory:
    """This user's subdirectory of the first of `cache_dirs`: open for writing if possible, else for reading.

    `path` is its root; if nothing can be stored, it is None and `cannot_store` is the reason. `cannot_store` is also set
    after the last `put` failed. `roots` are where blocks are searched, with their required owner: layers may have any.
    """

    def __init__(
        self,
        cache_dirs: Sequence[str],
        *,
        explicit: bool,
        locks: ByteRangeLocks,
        shared: SharedFiles,
        warnings: WarnOnce,
    ) -> None:
        self.cache_dirs = cache_dirs
        self._layers = [(layer, None) for layer in layer_roots(cache_dirs[1:])]
        self._locks = locks
        self._shared = shared
        self._warnings = warnings
        self.look_at = 0.0
        self._again_at = time.monotonic() + _AGAIN_S
        self.path: str | None = None
        self.cannot_store: str | None = None
        self.directory = directory = CacheDirectory(cache_dirs[0])
        has_wal = disk.maps_safely(directory.root)
        self.index = CacheIndex(directory.index, has_wal=has_wal, locks=locks, temp=directory.temp)
        self._open(explicit=explicit)

    def writable(self) -> CacheDirectory:
        """Return the directory. Raises CacheError if nothing can be stored."""
        if time.monotonic() >= self.look_at:
            self.look()
        if self.path is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        return self.directory

    def query(self, question: Callable[[IndexRows], T], otherwise: T) -> T:
        """Return the result of a query on the index; `otherwise` if there is no index or it cannot be read."""
        if self.path is None:
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
        if self.path is None or time.monotonic() >= self.look_at:
            self.writable()
        directory = self.directory
        try:
            if not directory.is_as_seen():
                if not restores and directory.is_being_deleted():
                    raise CacheError(f"{what} in {self.path}: it is being deleted")
                directory.verify()
            with self.index.writing(directory.root_seen) as rows:
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
        self.look_at, again = now + _LOOK_S, now >= self._again_at
        if again:
            self._again_at = now + _AGAIN_S
            if self.path is None:
                self._open(explicit=False)
            if self.path is not None:
                self._locks.try_again()
        self.directory.n_checks += 1
        for check in (self._locks.look_again, partial(self._shared.look, again=again)):
            with contextlib.suppress(OSError):  # cannot check: keep the current files
                check()

    def look_now(self) -> None:
        """Run the checks of `look`, however recent the last ones are."""
        self.look_at = 0.0
        self.look()

    def _open(self, *, explicit: bool) -> None:
        """Open the directory, for writing if possible, else for reading."""
        directory = self.directory
        self.cannot_store = directory.open(explicit=explicit)
        self.path = None if self.cannot_store else directory.root
        is_readable = self.path is not None or directory.is_readable()
        self.roots = [*([(directory.root, os.geteuid())] if is_readable else []), *self._layers]
        if self.cannot_store is not None:
            self._warnings.not_stored(self.cannot_store)
            return
        if not directory.is_network:
            self._locks.use(directory.locks)
        with contextlib.suppress(OSError):
            recovery.remove_leftovers(directory, self._locks, time.time())
        self._shared.move_to(directory)
