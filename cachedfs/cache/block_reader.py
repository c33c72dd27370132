"""Find, open and read block files.

No SQLite and no lock. Threads share an open block: all read at explicit offsets (pread), and nobody closes it while another
one reads, because its file is closed with the last reference to it. Single dict operations are atomic. A forked child may use
the inherited descriptors. If it makes its own cache, `close_inherited` closes them: otherwise evicted blocks would keep
their disk space.
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
from typing import Protocol

from cachedfs.cache import block_file, disk
from cachedfs.cache.access_stats import AccessStats
from cachedfs.cache.block_file import OpenBlock
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.index.schema import Totals
from cachedfs.cache.space import allowance
from cachedfs.common.logging import WarnOnce
from cachedfs.common.types import CacheBounds, ObjectKey
from cachedfs.errors import BadBlock

log = logging.getLogger("cachedfs.cache")

_MOST_OPEN = 256
_MOST_UNUSABLE = 4096  # damaged blocks to remember, so that each is logged once
_AGAIN_S = 60.0  # delay before an unreadable block is tried again
_NO_FILE = errno.ELOOP, errno.EISDIR, errno.ENXIO  # errors of opening a symlink, a folder or a socket

_Key = tuple[str, int]


class BlocksBeside(Protocol):
    """Blocks on a local disk that are no files of the cache. From any thread; nothing here raises."""

    def has(self, key: ObjectKey, index: int) -> bool: ...

    def open(self, key: ObjectKey, index: int) -> OpenBlock | None:
        """Return a block; one that cannot be opened is not there any more."""
        ...

    def exclude(self, path: str, error: BadBlock | OSError) -> bool:
        """Use a damaged or unreadable file no more, or for a while; return False if it is none of these files."""
        ...

    def remove_wrong(self, key: ObjectKey, index: int) -> None:
        """Use the file with a block no more, as its bytes differ from the origin's."""

    def close_deleted(self) -> None:
        """Close files that were removed, to free their disk space."""


class BlockReader:
    """The blocks of a cache, and those that this process has open.

    What the cache lacks is read from the blocks `beside` it. `open_blocks` are by (digest, index), in the order in which
    they were opened. `unusable` maps each file that can be neither used nor removed to the time (monotonic) of the next
    attempt; until then it counts as absent.
    """

    beside: BlocksBeside | None = None
    allowed: int | None = None  # how many bytes of blocks the cache may hold, as of the last write

    def __init__(self, own: CacheDirectory, accesses: AccessStats, warnings: WarnOnce) -> None:
        self._own = own
        self.accesses, self.touch = accesses, accesses.touch
        self._warnings = warnings
        self._limit = max(4, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.open_blocks: dict[_Key, OpenBlock] = {}
        self.unusable: dict[str, float] = {}

    def read(
        self, key: ObjectKey, index: int, start: int, stop: int, *, nowait: bool = False, verify: bool = False
    ) -> bytes | None:
        """Return bytes `[start, stop)` of a block, clipped to its length; None if it is absent or damaged (a miss).

        With `nowait`, read from the page cache only; raise BlockingIOError if it lacks the bytes or cannot be queried.
        `verify` checks the checksums of the pages read even if they were checked before. The access is recorded.
        """
        block = self.open_blocks.get((key.digest, index)) or self.open(key, index, nowait=nowait)
        if block is None:
            return None
        try:
            data = block.read(start, stop, nowait=nowait, verify=verify)
        except (BadBlock, OSError) as error:
            if not self.exclude(key, index, block.path, error):
                raise
            return None
        self.touch(key, index)
        return data

    def read_into(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        buffer: memoryview,
        *,
        nowait: bool = False,
        verify: bool = False,
    ) -> int:
        """Fill `buffer` from offset `start` of a block; return the number of bytes read, -1 for a miss.

        The options are those of `read`. After a miss the content of the buffer is undefined.
        """
        block = self.open_blocks.get((key.digest, index)) or self.open(key, index, nowait=nowait)
        if block is None:
            return -1
        try:
            size = block.read_into(start, buffer, nowait=nowait, verify=verify)
        except (BadBlock, OSError) as error:
            if not self.exclude(key, index, block.path, error):
                raise
            return -1
        self.touch(key, index)
        return size

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return a whole block, with its file reopened and every byte read from disk and checked; None if it is absent.

        Raises BadBlock if the block is damaged; it is a miss from then on. Verification is not use, so no access is
        recorded.
        """
        self.close_open((key.digest, index))
        block = None
        try:
            block = self.open(key, index, raises=True)
            if block is None:
                return None
            disk.expire_pages(block.fd)
            return block.read(0, block.length, verify=True)
        except (BadBlock, OSError) as error:
            if block is not None:
                self.exclude(key, index, block.path, error)
            raise BadBlock(str(error)) from error

    def has(self, key: ObjectKey, index: int, *, only_own: bool = False) -> bool:
        """Return whether the file of a block exists and is not unusable, without reading it.

        Unless `only_own`, it may be beside the cache.
        """
        path = f"{self._own.readable}/blocks/{key.digest[0]}/{key.digest}-{index:x}"
        if os.path.exists(path) and not (self.unusable and self._is_unusable(path)):
            return True
        return self.beside is not None and not only_own and self.beside.has(key, index)

    # Access records

    def likely_allowed(self, bounds: CacheBounds) -> float:
        """Return how many bytes of blocks the cache may hold: as of the last write, or an estimate before the first one."""
        if not self.allowed:
            with contextlib.suppress(OSError):
                likely = allowance(bounds, disk.space(self._own.path or ""), Totals())  # as if it were empty
                # Use the final size at once: a larger file begins without the records of a smaller one.
                self.accesses.open(likely)
                return likely
        return self.allowed or math.inf

    def reads_since(self, clock: int, bounds: CacheBounds) -> tuple[int, Sequence[int]]:
        """Return the access clock, and the last blocks (by hash64) that any process read after `clock`, in order."""
        self.likely_allowed(bounds)
        return self.accesses.since(clock)

    def call_now_and_then(self, function: Callable[[], object]) -> None:
        """Call `function` about once a second while the cache is used, in the thread of who uses it."""
        self._own.on_look.append(lambda again: function())

    # Open blocks

    def open(
        self, key: ObjectKey, index: int, *, nowait: bool = False, raises: bool = False
    ) -> OpenBlock | None:
        """Return a block, which all threads share; None is a miss, unless it `raises`."""
        if block := self.open_blocks.get((key.digest, index)):
            return block
        path = f"{self._own.readable}/blocks/{key.digest[0]}/{key.digest}-{index:x}"
        if self.unusable and self._is_unusable(path):
            return self._open_beside(key, index, nowait) if self.beside is not None else None
        try:
            fd = os.open(path, disk.READ)
            encoded = key.encoded + block_file.PLACE.pack(index, key.block_size)
            block = block_file.open_block(fd, path, encoded, nowait=nowait, owner=os.geteuid())
            return self._keep((key.digest, index), block, index * key.block_size)
        except FileNotFoundError:
            return self._open_beside(key, index, nowait) if self.beside is not None else None
        except (BadBlock, OSError) as error:
            if isinstance(error, OSError) and error.errno in disk.TOO_MANY_FILES and self.open_blocks:
                self.close_open()
                return self.open(key, index, nowait=nowait, raises=raises)
            if not self.exclude(key, index, path, error) or raises:
                raise
            return None

    def _open_beside(self, key: ObjectKey, index: int, nowait: bool) -> OpenBlock | None:
        if self.beside is None or not self.beside.has(key, index):
            return None
        if nowait:
            raise BlockingIOError
        block = self.beside.open(key, index)
        return block and self._keep((key.digest, index), block, index * key.block_size)

    def _keep(self, name: _Key, block: OpenBlock, start: int) -> OpenBlock:
        """Keep a block open, or return the one that another thread has opened meanwhile."""
        block.start = start
        block = self.open_blocks.setdefault(name, block)
        if len(self.open_blocks) > self._limit:
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread changes the dict
                self.close_open(next(iter(self.open_blocks)))
        return block

    def close_deleted(self) -> None:
        """Close deleted blocks to free their disk space: at most 256 fstat calls, about once a second."""
        for name, block in list(self.open_blocks.items()):
            try:
                is_deleted = os.fstat(block.fd).st_nlink == 0
            except OSError:  # open it again
                is_deleted = True
            if is_deleted:
                self.close_open(name)
        if self.beside is not None:
            self.beside.close_deleted()

    def close_open(self, *names: _Key) -> None:
        """Close open blocks, all without `names`, as soon as nobody reads them."""
        for name in names or list(self.open_blocks):
            self.open_blocks.pop(name, None)

    def close_inherited(self) -> None:
        """Close the open blocks, in a forked child that makes a cache of its own, and keep none open from now on."""
        self._limit, self._own.on_look = 0, []
        self.close_open()

    # Damaged blocks

    def exclude(self, key: ObjectKey, index: int, path: str, error: BadBlock | OSError) -> bool:
        """Log a damaged or unreadable block once, and remove it if it is damaged and the cache can be written.

        Return False if `error` only says that a read would have to wait. To raise it here would make a reference cycle with
        this frame and keep the reader's buffers alive until the garbage collector runs.
        """
        if isinstance(error, BlockingIOError):
            return False
        self.close_open((key.digest, index))
        if self._is_unusable(path) or (self.beside is not None and self.beside.exclude(path, error)):
            return True
        message = f"a cached block of {key.path} is not used: {error} ({path})"
        is_bad = isinstance(error, BadBlock) or error.errno in _NO_FILE
        if is_bad:
            log.warning("%s", message)
        else:  # an unreadable disk would log this for every block
            self._warnings.slower(message)
        if is_bad and self._own.path is not None and path.startswith(f"{self._own.path}/"):
            self.remove_damaged(key, index)
            if not os.path.exists(path):
                return True
        if len(self.unusable) >= _MOST_UNUSABLE:
            self.unusable.clear()
        # Damage is permanent; lack of descriptors or an unreachable disk may be over in a minute.
        self.unusable[path] = math.inf if is_bad else time.monotonic() + _AGAIN_S
        return True

    def remove_damaged(self, key: ObjectKey, index: int) -> None:
        """Remove a damaged block. Never raises: without its file the block is a miss."""
        self.close_open((key.digest, index))

    def remove_wrong(self, key: ObjectKey, index: int) -> None:
        """Remove an undamaged block whose bytes differ from the origin's; ignore it if it cannot be removed."""
        if self.beside is not None:
            self.beside.remove_wrong(key, index)
        self.remove_damaged(key, index)
        path = f"{self._own.readable}/{block_file.block_path(key.digest, index)}"
        if os.path.exists(path):
            self.unusable[path] = math.inf

    def _is_unusable(self, path: str) -> bool:
        again_at = self.unusable.get(path)
        return again_at is not None and time.monotonic() < again_at
