"""Find and open block files in the root of this user and in the read-only layers behind it."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.cache.block_pool import BlockPool
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import ObjectKey

__all__ = ["CacheLayers"]

log = logging.getLogger("cachedfs.cache")

_NO_FILE = errno.ELOOP, errno.EISDIR, errno.ENXIO  # errors of opening a symlink, a folder or a socket
_AGAIN_S = 60.0  # delay before an unreadable block is tried again
_MOST_REJECTED = 4096  # damaged blocks to remember, so that each is logged once


class CacheLayers:
    """The root of this user, and behind it read-only `layers` of any owner.

    `rejected` maps each file that can be neither used nor removed to the time (monotonic) of the next attempt; until
    then it counts as absent. `remove_damaged` removes a damaged block of our own root.
    """

    def __init__(
        self,
        layers: Sequence[str],
        handles: BlockPool,
        *,
        remove_damaged: Callable[[ObjectKey, int], None],
        warnings: WarnOnce,
    ) -> None:
        self.rejected: dict[str, float] = {}  # oldest first
        self._layers = layers
        self._handles = handles
        self._remove_damaged = remove_damaged
        self._warnings = warnings
        self.begin_with(None, None)

    def begin_with(self, own: str | None, written: str | None) -> None:
        """Search `own`, the root of this user, first; `written` is the same root if it is writable, else None."""
        # With the required owner of the blocks; layers may have any owner.
        self._roots = [*([(own, os.geteuid())] if own else []), *((layer, None) for layer in self._layers)]
        self._written = written

    def open(self, key: ObjectKey, index: int, nowait: bool) -> OpenBlock | None:
        """Open a block in the first layer that has it; remove damaged files from our own root, skip them in others."""
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
        """Return a whole block, with its file reopened and every byte read from disk and checked; None if absent.

        Raises BadBlock if the block is damaged; it is a miss from then on.
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
        """Return whether the file of a block exists and was not rejected before, without reading it."""
        place = block_file.place(key.digest, index)
        for root, _ in self._roots:  # runs for every block of a range: avoid building a list
            path = f"{root}/{place}"
            if os.path.exists(path) and not self._is_rejected(path):
                return True
        return False

    def is_miss(self, key: ObjectKey, index: int, handle: OpenBlock, error: BaseException) -> bool:
        """Handle a failed read: return True for a miss, after rejecting the block; else the caller raises `error`.

        Raising `error` here would make a reference cycle with this frame and keep the reader's buffers alive until the
        garbage collector runs.
        """
        if isinstance(error, BlockingIOError):
            self._handles.give(key, index, handle)
            return False
        handle.close()
        if isinstance(error, (BadBlock, OSError)):
            self._reject(key, index, handle.path, error)
            return True
        return False

    def ignore(self, key: ObjectKey, index: int) -> None:
        """Ignore an undamaged block whose bytes differ from the origin's, in all layers."""
        for path, _ in self._files(key, index):
            if os.path.exists(path):
                self._pass_over(path, math.inf)

    def accept(self, places: Iterable[str]) -> None:
        """Accept again files of our own root that were just written."""
        for place in places if self.rejected else ():
            self.rejected.pop(f"{self._written}/{place}", None)

    def _files(self, key: ObjectKey, index: int) -> list[tuple[str, int | None]]:
        """Return the paths where the block may be, our own root first, each with its required owner (None: any)."""
        place, files = block_file.place(key.digest, index), []
        for root, owner in self._roots:  # no generator: abandoning one costs a tenth of a disk lookup
            path = f"{root}/{place}"
            if not self._is_rejected(path):
                files.append((path, owner))
        return files

    def _reject(self, key: ObjectKey, index: int, path: str, error: BadBlock | OSError) -> None:
        """Log a damaged or unreadable block once; remove it if it is damaged and in our own root."""
        if self._is_rejected(path):
            return
        trouble = f"a cached block of {key.path} is not used: {error} ({path})"
        is_bad = isinstance(error, BadBlock) or error.errno in _NO_FILE
        if is_bad:
            log.warning("%s", trouble)
        else:  # an unreadable disk would log this for every block
            self._warnings.slower(trouble)
        if is_bad and self._written is not None and path.startswith(self._written + "/"):
            self._remove_damaged(key, index)
            if not os.path.exists(path):
                return
        # Damage is permanent; lack of descriptors or an unreachable disk may be over in a minute.
        self._pass_over(path, math.inf if is_bad else time.monotonic() + _AGAIN_S)

    def _is_rejected(self, path: str) -> bool:
        again_at = self.rejected.get(path)
        return again_at is not None and time.monotonic() < again_at

    def _pass_over(self, path: str, again_at: float) -> None:
        """Treat a file that can be neither used nor removed as absent until `again_at`, so that it can be fetched."""
        self.rejected[path] = again_at
        while len(self.rejected) > _MOST_REJECTED:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread changed the dict
                self.rejected.pop(next(iter(self.rejected)), None)
