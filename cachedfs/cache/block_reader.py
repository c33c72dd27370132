"""The read side of the cache: find, open and read block files, in this user's root and in read-only layers behind it.

No SQLite and no lock. A thread removes an open block from a dict, reads, and puts it back, so it is never shared, or
closed under a reader. Single dict operations are atomic. A forked child may use the inherited descriptors, because it reads at
explicit offsets (pread). If the child makes its own cache, `close_inherited` closes them: otherwise evicted blocks would
keep their disk space.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from cachedfs.cache import block_file, disk
from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.cache.shared_files import SharedFiles
from cachedfs.cache.space import likely_allowance
from cachedfs.cache.writable_directory import WritableDirectory
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import GOLDEN, MASK64, CacheBounds, ObjectKey

__all__ = ["BlockReader"]

log = logging.getLogger("cachedfs.cache")

_MOST_OPEN = 256
_MOST_REMEMBERED = 16384  # blocks whose checked pages are remembered: 16 GiB of blocks in 4 MB of memory
_MOST_REJECTED = 4096  # damaged blocks to remember, so that each is logged once
_LOOK_S = 1.0
_AGAIN_S = 60.0  # delay before an unreadable block is tried again
_NO_FILE = errno.ELOOP, errno.EISDIR, errno.ENXIO  # errors of opening a symlink, a folder or a socket

_Key = tuple[str, int]


class BlockReader:
    """The blocks of a cache, and those that this process has open.

    `open_blocks` are idle, by (digest, index), least recently used first. `rejected` maps each file that can be neither
    used nor removed to the time (monotonic) of the next attempt; until then it counts as absent.
    """

    allowed: int | None = None  # how many bytes of blocks the cache may hold, as of the last write

    def __init__(self, own: WritableDirectory, shared: SharedFiles, warnings: WarnOnce) -> None:
        self._own = own
        self._shared = shared
        self._warnings = warnings
        self._limit = max(4, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.open_blocks: dict[_Key, OpenBlock] = {}
        self._checked: dict[_Key, tuple[tuple[int, int], int]] = {}  # file stamp, bit mask of unchecked pages
        self.rejected: dict[str, float] = {}  # oldest first
        self._on_look: Callable[[], object] = bool
        self._n_given = 0  # read the clock at every 32nd call only: it costs as much as the rest
        self._look_at = 0.0

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
        block = self.open_blocks.pop((key.digest, index), None) or self._open(key, index, nowait)
        if block is None:
            return None
        try:
            data = block.read(start, stop, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: no other code would close the block
            if not self._is_miss(key, index, block, error):
                raise
            return None
        self._give(key, index, block)
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
        block = self.open_blocks.pop((key.digest, index), None) or self._open(key, index, nowait)
        if block is None:
            return -1
        try:
            size = block.read_into(start, buffer, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: see `read`
            if not self._is_miss(key, index, block, error):
                raise
            return -1
        self._give(key, index, block)
        if touch:
            self.touch(key, index)
        return size

    def borrow(
        self, key: ObjectKey, index: int, instead: tuple[int, OpenBlock] | None = None
    ) -> OpenBlock | None:
        """Return an open block for repeated reads and record one access; None is a miss.

        The caller has the block to itself until it calls `release_block`. `instead` is another block (index, open block) of
        the same object to release first.
        """
        if instead is not None:
            self._give(key, *instead)
        block = self.open_blocks.pop((key.digest, index), None) or self._open(key, index, nowait=False)
        if block is not None:
            self.touch(key, index)
        return block

    def release_block(
        self, key: ObjectKey, index: int, block: OpenBlock, error: BaseException | None = None
    ) -> None:
        """Take back a borrowed block.

        `error` is the exception that reading the block raised. A damaged or unreadable block is removed; other
        errors are raised again.
        """
        if error is None:
            self._give(key, index, block)
        elif not self._is_miss(key, index, block, error):
            raise error

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return a whole block, with its file reopened and every byte read from disk and checked; None if it is absent.

        Raises BadBlock if the block is damaged; it is a miss from then on. Verification is not use, so no access is
        recorded.
        """
        self.close_removed((key.digest, index))
        failures: list[Exception] = []
        block = self._open(key, index, nowait=False, failures=failures)
        try:
            if block is not None and not failures:
                disk.forget_cached(block.fd)
                return block.read(0, block.length, verify=True)
        except (BadBlock, OSError) as error:
            assert block is not None
            failures.append(error)
            self._reject(key, index, block.path, error)
        finally:
            if block is not None:
                block.close()
        if failures:
            raise BadBlock(str(failures[0])) from failures[0]
        return None

    def packed(self, key: ObjectKey, index: int) -> bytes | None:
        """Return the bytes of a block's file (data and trailer), reread from disk and checked; None if it is absent.

        Raises BadBlock if the block is damaged.
        """
        data = self.read_anew(key, index)
        return None if data is None else data + block_file.encode_trailer(key, index, data)

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the file of a block exists and was not rejected before, without reading it."""
        for root, _ in self._own.roots:
            path = f"{root}/blocks/{key.digest[0]}/{key.digest}-{index:x}"
            if os.path.exists(path) and not (self.rejected and self._is_rejected(path)):
                return True
        return False

    # Access records

    def touch(self, key: ObjectKey, index: int) -> None:
        """Record the access to a block."""
        (self._shared.accesses or self._shared.open_accesses()).touch(key.number + index * GOLDEN & MASK64)

    def missed(self, key: ObjectKey, index: int, bounds: CacheBounds, *, of: int | None = None) -> None:
        """Record that a block is not cached and must be fetched; the admission policy uses this later.

        `of` is the object's size in bytes. The first pass over an object larger than the cache evicts no other block.
        """
        most, number = self.allowed, key.number + index * GOLDEN & MASK64
        if most is None or self._shared.accesses is None:
            # Use the final size at once: a larger file begins without the records of a smaller one.
            most = self.allowed or likely_allowance(self._own.path, bounds)
            self._shared.open_accesses(size=most)
        accesses = self._shared.accesses or self._shared.open_accesses()
        accesses.touch((number, most is not None and of is not None and of > most))

    def reads_since(self, clock: int, bounds: CacheBounds) -> tuple[int, Sequence[int]]:
        """Return the access clock, and the last blocks (by hash64) that any process read after `clock`, in order."""
        accesses = self._shared.accesses
        if accesses is None:
            allowed = self.allowed or likely_allowance(self._own.path, bounds)
            accesses = self._shared.open_accesses(size=allowed)
        return accesses.since(clock)

    def call_now_and_then(self, function: Callable[[], object]) -> None:
        """Call `function` about once a second while blocks are read, in the thread of the reader."""
        self._on_look = function

    # Open blocks

    def _open(
        self, key: ObjectKey, index: int, nowait: bool, failures: list[Exception] | None = None
    ) -> OpenBlock | None:
        """Open a block in the first root that has it; remove damaged files from our own root, skip them in others.

        Append the reasons to `failures`.
        """
        for root, owner in self._own.roots:
            path = f"{root}/blocks/{key.digest[0]}/{key.digest}-{index:x}"
            if self.rejected and self._is_rejected(path):
                continue
            try:
                return self._checked_block(os.open(path, disk.READ), path, key, index, nowait, owner)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                raise
            except (BadBlock, OSError) as error:
                if isinstance(error, OSError) and error.errno in disk.TOO_MANY_FILES and self.open_blocks:
                    self.close_open()
                    return self._open(key, index, nowait, failures)
                if failures is not None:
                    failures.append(error)
                self._reject(key, index, path, error)
        return None

    def _checked_block(
        self, fd: int, path: str, key: ObjectKey, index: int, nowait: bool, owner: int | None
    ) -> OpenBlock:
        """Return the block file that was opened as `fd`, if it is this block. Raises the errors of `open_block`."""
        block = block_file.open_block(fd, path, nowait=nowait, owner=owner)
        if block.trailer.place != (key.identity, key.path, key.fingerprint, key.block_size, index):
            block.close()
            raise BadBlock("it is another block")
        stamp, unchecked = self._checked.get((key.digest, index), (None, 0))
        if stamp == block.stamp:
            block.unchecked = unchecked
        return block

    def _give(self, key: ObjectKey, index: int, block: OpenBlock) -> None:
        """Put an open block back after use."""
        name = (key.digest, index)
        if self.open_blocks.setdefault(name, block) is not block:  # another thread had opened the block too
            self._close(name, block)
        self._n_given += 1
        if self._n_given & 31 == 0 and time.monotonic() >= self._look_at:
            self.close_deleted()
        if len(self.open_blocks) > self._limit and (oldest := _first(self.open_blocks)) is not None:
            self.close_open(oldest)

    def close_deleted(self) -> None:
        """Close deleted blocks to free their disk space: at most 256 fstat calls, about once a second."""
        self._look_at = time.monotonic() + _LOOK_S
        for name in list(self.open_blocks):
            block = self.open_blocks.pop(name, None)
            if block is None:
                continue
            try:
                is_deleted = os.fstat(block.fd).st_nlink == 0
            except OSError:  # open it again
                is_deleted = True
            if is_deleted or self.open_blocks.setdefault(name, block) is not block:
                self._close(name, block)
        self._on_look()

    def close_open(self, *names: _Key) -> None:
        """Close open blocks that no thread uses, all without `names`; remember which pages were checked."""
        for name in names or list(self.open_blocks):
            if (block := self.open_blocks.pop(name, None)) is not None:
                self._close(name, block)

    def _close(self, name: _Key, block: OpenBlock) -> None:
        self._checked[name] = (block.stamp, block.unchecked)
        if len(self._checked) > _MOST_REMEMBERED:
            self._checked.pop(_first(self._checked), None)
        block.close()

    def close_removed(self, name: _Key) -> None:
        """Close a removed block; its pages have to be checked again."""
        self._checked.pop(name, None)
        if (block := self.open_blocks.pop(name, None)) is not None:
            block.close()

    def close_inherited(self) -> None:
        """Close the open blocks and nothing else, in a forked child that makes a cache of its own.

        Every block that is released from now on is closed, too.
        """
        self._limit, self._on_look = 0, bool
        self.close_open()

    # Damaged blocks

    def _is_miss(self, key: ObjectKey, index: int, block: OpenBlock, error: BaseException) -> bool:
        """Handle a failed read: return True for a miss, after rejecting the block; else the caller raises `error`.

        Raising `error` here would make a reference cycle with this frame and keep the reader's buffers alive until the
        garbage collector runs.
        """
        if isinstance(error, BlockingIOError):
            self._give(key, index, block)
            return False
        block.close()
        if isinstance(error, (BadBlock, OSError)):
            self._reject(key, index, block.path, error)
            return True
        return False

    def _reject(self, key: ObjectKey, index: int, path: str, error: BadBlock | OSError) -> None:
        """Log a damaged or unreadable block once; remove it if it is damaged and in our own root."""
        if self._is_rejected(path):
            return
        message = f"a cached block of {key.path} is not used: {error} ({path})"
        is_bad = isinstance(error, BadBlock) or error.errno in _NO_FILE
        if is_bad:
            log.warning("%s", message)
        else:  # an unreadable disk would log this for every block
            self._warnings.slower(message)
        if is_bad and self._own.path is not None and path.startswith(f"{self._own.path}/"):
            self.remove_damaged(key, index)
            if not os.path.exists(path):
                return
        # Damage is permanent; lack of descriptors or an unreachable disk may be over in a minute.
        self._skip(path, math.inf if is_bad else time.monotonic() + _AGAIN_S)

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises: without its file the block is a miss."""
        self.close_removed((key.digest, index))

    def remove_wrong(self, key: ObjectKey, index: int) -> None:
        """Remove an undamaged block whose bytes differ from the origin's; in read-only layers, ignore it from now on."""
        self.remove_damaged(key, index)
        for root, _ in self._own.roots:
            path = f"{root}/{block_file.place(key.digest, index)}"
            if os.path.exists(path) and not self._is_rejected(path):
                self._skip(path, math.inf)

    def _is_rejected(self, path: str) -> bool:
        again_at = self.rejected.get(path)
        return again_at is not None and time.monotonic() < again_at

    def _skip(self, path: str, again_at: float) -> None:
        """Treat a file that can be neither used nor removed as absent until `again_at`, so that it can be fetched."""
        self.rejected[path] = again_at
        while len(self.rejected) > _MOST_REJECTED:
            self.rejected.pop(_first(self.rejected), None)


def _first(entries: dict[Any, Any]) -> Any:
    """Return the oldest key; None if there is none, or if another thread changes the dict."""
    with contextlib.suppress(StopIteration, RuntimeError):
        return next(iter(entries))
    return None
