"""A small pool of the block files that this process has open, used without a lock.

A thread removes a handle, reads, and puts it back, so a handle is never shared or closed under a reader. Single
dict operations are atomic. A forked child may use the inherited descriptors, because it reads at explicit offsets
(pread). If the child makes its own cache, `leave` closes them: otherwise evicted blocks would keep their disk space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from cachedfs.cache import block_file
from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.common.types import ObjectKey

__all__ = ["TOO_MANY_FILES", "BlockPool"]

_MOST_HANDLES = 256
_MOST_REMEMBERED = 16384  # blocks whose checked pages are remembered: 16 GiB of blocks in 4 MB of memory
_SWEEP_S = 1.0
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

_Key = tuple[str, int]
_T = TypeVar("_T")


class BlockPool:
    """Open blocks by (digest, index), least recently used first, and which pages of each block were checked."""

    def __init__(self) -> None:
        self._limit = max(4, min(_MOST_HANDLES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.idle: dict[_Key, OpenBlock] = {}  # Invariant: no thread uses a handle in here
        self._checked: dict[_Key, tuple[tuple[int, int], int]] = {}  # file stamp, bit mask of unchecked pages
        self._sweep_at = 0.0
        self.on_sweep: Callable[[], object] = bool
        self._given = 0  # read the clock at every 32nd call only: it costs as much as the rest

    def take(self, key: ObjectKey, index: int) -> OpenBlock | None:
        """Remove and return the open handle of a block; None when it is not open or is in use."""
        return self.idle.pop((key.digest, index), None)

    def open(
        self, path: str, key: ObjectKey, index: int, *, nowait: bool = False, owner: int | None = None
    ) -> OpenBlock:
        """Open the file at `path` and check that it is this block. Raises the errors of `block_file.open_block`."""
        try:
            handle = block_file.open_block(path, nowait=nowait, owner=owner)
        except OSError as error:
            if error.errno not in TOO_MANY_FILES:
                raise
            self.close_all()
            handle = block_file.open_block(path, nowait=nowait, owner=owner)
        if not _is_block(handle.trailer, key, index):
            handle.close()
            raise BadBlock("it is another block")
        stamp, unchecked = self._checked.get((key.digest, index), (None, 0))
        if stamp == handle.stamp:
            handle.unchecked = unchecked
        return handle

    def give(self, key: ObjectKey, index: int, handle: OpenBlock) -> None:
        """Put a handle back after use."""
        name = (key.digest, index)
        if self.idle.setdefault(name, handle) is not handle:  # another thread had opened the block too
            self.close(name, handle)
        self._given += 1
        if self._given & 31 == 0:
            self._sweep_if_due()
        if len(self.idle) > self._limit:
            self._close_oldest()

    def _sweep_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._sweep()
            self.on_sweep()

    def close(self, name: _Key, handle: OpenBlock) -> None:
        """Close a handle taken from the pool, and remember which pages of its block were checked."""
        self._checked[name] = (handle.stamp, handle.unchecked)
        if len(self._checked) > _MOST_REMEMBERED:
            _pop_first(self._checked)
        handle.close()

    def drop(self, names: Iterable[_Key]) -> None:
        """Close the handles of deleted blocks, and forget which of their pages were checked."""
        for name in names:
            self._checked.pop(name, None)
            handle = self.idle.pop(name, None)
            if handle is not None:
                handle.close()

    def close_all(self) -> None:
        for name in list(self.idle):
            handle = self.idle.pop(name, None)
            if handle is not None:
                self.close(name, handle)

    def close_inherited(self) -> None:
        """Close all handles, and every handle that is given back from now on."""
        self._limit, self.on_sweep = 0, bool
        self.close_all()

    def _close_oldest(self) -> None:
        found = _pop_first(self.idle)
        if found is not None:
            self.close(*found)

    def _sweep(self) -> None:
        """Close handles of deleted blocks to free their disk space: at most 256 fstat calls a second."""
        for name in list(self.idle):
            handle = self.idle.pop(name, None)
            if handle is None:
                continue
            if _is_deleted(handle) or self.idle.setdefault(name, handle) is not handle:
                self.close(name, handle)


def _is_deleted(handle: OpenBlock) -> bool:
    """Return whether the file has no link left; True also when fstat fails, so that the block is reopened."""
    try:
        return os.fstat(handle.fd).st_nlink == 0
    except OSError:
        return True


def _is_block(trailer: block_file.BlockTrailer, key: ObjectKey, index: int) -> bool:
    return (
        trailer.index == index
        and trailer.path == key.path
        and trailer.fingerprint == key.fingerprint
        and trailer.identity == key.identity
        and trailer.block_size == key.block_size
    )


def _pop_first(entries: dict[_Key, _T]) -> tuple[_Key, _T] | None:
    """Remove and return the oldest entry; None if another thread removed it first."""
    with contextlib.suppress(StopIteration, RuntimeError, KeyError):
        name = next(iter(entries))
        return name, entries.pop(name)
    return None
