"""Our own root as this process has it open: the directory, the claims, the index and the store, and when to try again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from cachedfs.cache import fsck
from cachedfs.cache.block_pool import BlockPool
from cachedfs.cache.directory import CacheDirectory, open_directory, readable_root
from cachedfs.cache.index.transaction import TROUBLE, CacheIndex, IndexRows
from cachedfs.cache.layers import CacheLayers
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.cache.mapped_files import MappedFiles
from cachedfs.cache.writer import BlockWriter
from cachedfs.common.logging import WarnOnce
from cachedfs.errors import CacheError

__all__ = ["WritableDirectory"]

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

_LOOK_S = 1.0  # how often we look whether the shared files at our paths are still those that we have mapped
_AGAIN_S = 60.0  # how long we do without what does not work before it is tried again: `marks` are 0.5 MB


class WritableDirectory:
    """Our own subdirectory of `cache_dir`: to write if that can be, else to read.

    `path`: None when nothing can be stored, and then there is no `directory`, no `index` and no `store`; `cannot_store`
    says why, also after the last put failed. `explicit`: see BlockCache.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        explicit: bool,
        handles: BlockPool,
        layers: CacheLayers,
        mapped: MappedFiles,
        complaints: WarnOnce,
    ) -> None:
        self._cache_dir = cache_dir
        self._handles = handles
        self._layers = layers
        self._mapped = mapped
        self._complaints = complaints
        self._look_at = 0.0
        self._again_at = time.monotonic() + _AGAIN_S
        self.locks = ByteRangeLocks(None)
        self.index: CacheIndex | None = None
        self.store: BlockWriter | None = None
        self._open(explicit=explicit)

    def writable(self) -> BlockWriter:
        self.look()
        if self.store is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        return self.store

    def asked(self, question: Callable[[IndexRows], T], otherwise: T) -> T:
        """Return what the index answers; `otherwise` without one, and where it fails: it is no oracle."""
        if self.index is None:
            return otherwise
        try:
            with self.index.reading() as rows:
                return question(rows)
        except TROUBLE as error:
            log.debug("the index of %s cannot be read: %s", self.path, error)
            return otherwise

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[IndexRows]:
        """Lend the rows in one transaction. Raises CacheError, which begins with `what`."""
        self.look()
        if self.index is None or self.directory is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        try:
            self.directory.make_again_if_gone()
            with self.index.writing() as rows:
                yield rows
        except TROUBLE as error:
            raise CacheError(f"{what} in {self.path}: {error}") from error

    def look(self) -> None:
        """Once a second: let go of mapped files that somebody deleted, so that all processes map the same ones.

        Once a minute: try again what did not work. Two threads that do so at once do it twice, which is no harm.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if now >= self._again_at:
            self._again_at = now + _AGAIN_S
            self._try_again()
        with contextlib.suppress(OSError):  # nobody can tell: what we have goes on
            self.locks.look_again()
            self._mapped.let_go_of_deleted()

    def look_now(self) -> None:
        """Look, however short ago that was."""
        self._look_at = 0.0
        self.look()

    def _try_again(self) -> None:
        """Do what could not be done when it was wanted: the disk may have got well since."""
        if self.directory is None:
            self._open(explicit=False)
            if self.directory is None:
                return
        self.locks.try_again()
        self._mapped.try_again()

    def _open(self, *, explicit: bool) -> None:
        """Open our own directory, to write if that can be, else to read."""
        directory, self.cannot_store = open_directory(self._cache_dir, explicit=explicit)
        self.directory = directory
        self.path = directory.root if directory else None
        self._layers.begin_with(self.path or readable_root(self._cache_dir), self.path)
        if directory is not None:
            self._open_store(directory)
            self._mapped.move_to(directory)
        elif self.cannot_store:
            self._complaints.not_stored(self.cannot_store)

    def _open_store(self, directory: CacheDirectory) -> None:
        if not directory.is_network:
            self.locks = ByteRangeLocks(directory.locks)
        with contextlib.suppress(OSError):
            fsck.clear_away(directory, self.locks, time.time())
        self.index = CacheIndex(
            directory.index, is_network=directory.is_network, locks=self.locks, temp=directory.temp
        )
        self.store = BlockWriter(
            directory,
            index=self.index,
            handles=self._handles,
            locks=self.locks,
            touches=self._mapped.open_touches,
        )
