"""The roots that blocks are read from: which file of which root is a block, and which is of no use."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.cache.block_pool import BlockPool
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import ObjectKey

__all__ = ["CacheLayers"]

log = logging.getLogger("cachedfs.cache")

_NO_FILE = errno.ELOOP, errno.EISDIR, errno.ENXIO  # how a symlink, a folder or a socket refuses to be opened
_AGAIN_S = 60.0  # how long we do without a block that could not be read, before it is tried again
_MOST_REJECTED = 4096  # bad blocks of read-only layers that are remembered, so that each is logged once


class CacheLayers:
    """Our own root, and behind it the read-only `layers`, which may be anybody's.

    `rejected`: the files that can be neither used nor removed, and when to look again; until then each counts as absent.
    `discard` removes a block of ours that is bad.
    """

    def __init__(
        self,
        layers: Sequence[str],
        handles: BlockPool,
        *,
        discard: Callable[[ObjectKey, int], None],
        complaints: WarnOnce,
    ) -> None:
        self.rejected: dict[str, float] = {}  # oldest first
        self._layers = layers
        self._handles = handles
        self._discard = discard
        self._complaints = complaints
        self.begin_with(None, None)

    def begin_with(self, own: str | None, written: str | None) -> None:
        """Look first into `own`, the root of this user; `written` is the same when we can write there."""
        # With the user whose blocks are believed there: a layer may be anybody's.
        self._roots = [*([(own, disk.user_id())] if own else []), *((layer, None) for layer in self._layers)]
        self._written = written

    def open(self, key: ObjectKey, index: int, nowait: bool) -> OpenBlock | None:
        """Open the block in the first layer that has it; bad ones are removed from ours and skipped in others."""
        for path, owner in self._files(key, index):
            try:
                return self._handles.open(path, key, index, nowait=nowait, owner=owner)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                raise
            except (BadBlock, OSError) as error:
                self._reject(key, index, path, error)
        return None

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return all of a block, its file opened anew and every byte of it read from the disk and checked; None: absent.

        Raises BadBlock for one that was found bad: it is a miss from now on.
        """
        self._handles.drop([(key.digest, index)])
        for path, owner in self._files(key, index):
            try:
                return self._read_anew(path, key, index, owner)
            except FileNotFoundError:
                continue
            except (BadBlock, OSError) as error:
                self._reject(key, index, path, error)
                raise BadBlock(str(error)) from error
        return None

    def _read_anew(self, path: str, key: ObjectKey, index: int, owner: int | None) -> bytes:
        handle = self._handles.open(path, key, index, owner=owner)
        try:
            disk.forget_cached(handle.fd)
            return handle.read(0, handle.length, verify=True)
        finally:
            handle.close()

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the block's file is there, without looking into it; not one that was found unusable."""
        place = block_file.place(key.digest, index)
        for root, _ in self._roots:  # asked of every block of a range: not by way of a list
            path = f"{root}/{place}"
            if disk.exists(path) and not self._is_rejected(path):
                return True
        return False

    def is_miss(self, key: ObjectKey, index: int, handle: OpenBlock, error: BaseException) -> bool:
        """Return whether a read that failed is a miss: that of a bad block, which is rejected; else the caller raises.

        Raised here, `error` would be in a cycle with this frame, and keep the reader's buffers until they are collected.
        """
        if isinstance(error, BlockingIOError):
            self._handles.give(key, index, handle)
            return False
        handle.close()
        if isinstance(error, (BadBlock, OSError)):
            self._reject(key, index, handle.path, error)
            return True
        return False

    def refuse(self, key: ObjectKey, index: int) -> None:
        """Pass over a block that is whole and yet not what the origin has, wherever it is."""
        for path, _ in self._files(key, index):
            if disk.exists(path):
                self._pass_over(path, math.inf)

    def accept(self, places: Iterable[str]) -> None:
        """Look again at files of ours that were just written."""
        for place in places if self.rejected else ():
            self.rejected.pop(f"{self._written}/{place}", None)

    def _files(self, key: ObjectKey, index: int) -> list[tuple[str, int | None]]:
        """Return where the block may be, our own root first, and the user whose it has to be there; None: anybody's."""
        place, files = block_file.place(key.digest, index), []
        for root, owner in self._roots:  # no generator: breaking one off costs a tenth of a look at the disk
            path = f"{root}/{place}"
            if not self._is_rejected(path):
                files.append((path, owner))
        return files

    def _reject(self, key: ObjectKey, index: int, path: str, error: BadBlock | OSError) -> None:
        """Log a bad block once, and remove it if it is in our own layer and bad in itself (not just out of reach)."""
        if self._is_rejected(path):
            return
        trouble = f"a cached block of {key.path} is not used: {error} ({path})"
        is_bad = isinstance(error, BadBlock) or error.errno in _NO_FILE
        if is_bad:
            log.warning("%s", trouble)
        else:  # a disk that cannot be read says so for every block
            self._complaints.slower(trouble)
        if is_bad and self._written is not None and path.startswith(self._written + "/"):
            self._discard(key, index)
            if not disk.exists(path):
                return
        # Its bytes stay bad; a disk without descriptors, or away, may be well the next minute.
        self._pass_over(path, math.inf if is_bad else time.monotonic() + _AGAIN_S)

    def _is_rejected(self, path: str) -> bool:
        again_at = self.rejected.get(path)
        return again_at is not None and time.monotonic() < again_at

    def _pass_over(self, path: str, again_at: float) -> None:
        """Do not look at a file until then that can be neither used nor removed: it counts as absent, and can be fetched."""
        self.rejected[path] = again_at
        while len(self.rejected) > _MOST_REJECTED:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread was at it too
                self.rejected.pop(next(iter(self.rejected)), None)
