"""Locks between processes that the kernel releases when their process ends: byte-range locks on one file.

A lock is a POSIX write lock on one byte. The kernel releases all locks of a process on a file as soon as the process
closes *any* descriptor of it. So the file is opened once per process and never closed, and no other code opens it.
A forked child inherits the descriptor but not the locks, which belong to processes.
"""

from __future__ import annotations

import errno
import itertools
import os

from cachedfs.cache import disk

__all__ = ["ByteRangeLocks"]

_BYTES = (1 << 62) - 1  # mask: the largest offset that every kernel can lock


class _Held:
    """The locks that one process holds on one file, as the kernel does not distinguish its threads or caches.

    There is no mutex here: the garbage collector may close a file in a thread that holds it. Single dict operations are
    atomic, and the thread that inserts a byte holds it.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, object] = {}  # Invariant: each locked byte, and a token of its holder
        # Holder token -> releasing token. Keyed by holder, because the byte may be taken again before its
        # release is finished.
        self.releasing: dict[object, object] = {}


_NUMBERS = itertools.count()  # not id(): a reused id would inherit the locks of a collected cache
_DESCRIPTORS: dict[str, int] = {}  # by path; never closed (see module docstring)
_HELD: dict[tuple[str, int], _Held] = {}  # by path and process id: a forked child starts with none


class ByteRangeLocks:
    """The locks of this process on one cache. Without a file (`path` None) they only exclude its own threads.

    `trouble` is the reason why they do not exclude other processes although there is a file.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._own = f"memory of cache {next(_NUMBERS)}" if path is None else path
        self.works_across_processes = path is not None
        self.trouble: str | None = None

    def take(self, hash64: int) -> bool:
        """Take a lock; False when another process, or another thread of this one, holds it."""
        byte, us = hash64 & _BYTES, object()
        held = _HELD.get((self._own, os.getpid())) or self._held()
        if held.bytes.setdefault(byte, us) is not us:
            return False
        try:
            if self._lock_byte(byte):
                return True
        except BaseException:  # an interrupt: the caller does not know that it holds the lock
            self.release(hash64)
            raise
        held.bytes.pop(byte, None)
        return False

    def release(self, hash64: int) -> None:
        """Release a lock; do nothing when this process does not hold it."""
        byte, us = hash64 & _BYTES, object()
        held = _HELD.get((self._own, os.getpid())) or self._held()
        owner = held.bytes.get(byte)
        if owner is None or held.releasing.setdefault(owner, us) is not us:
            return
        try:
            if held.bytes.get(byte) is owner:
                self._unlock_byte(byte)
                # After unlocking: a thread that took the byte earlier would lose its lock here.
                held.bytes.pop(byte, None)
        finally:
            held.releasing.pop(owner, None)

    def is_held(self, hash64: int) -> bool:
        """Return whether any process, including this one, holds the lock; True also if that cannot be found out."""
        if not self.works_across_processes or not self.take(hash64):
            return True
        self.release(hash64)
        return not self.works_across_processes

    def holder(self, hash64: int) -> int | None:
        """Return the id of the process that holds the lock.

        None if it is free, or if its holder cannot be seen from here, as in another container.
        """
        byte, fd = hash64 & _BYTES, _DESCRIPTORS.get(self._own)
        if byte in self._held().bytes:
            return os.getpid()
        return None if fd is None else disk.lock_holder(fd, byte)

    def try_again(self) -> None:
        """Try locking again if the filesystem had no locks before."""
        if self.trouble is not None:
            self.works_across_processes, self.trouble = True, None

    def look_again(self) -> None:
        """Switch to the file now at the path if ours was deleted, or if other code closed its descriptor.

        Otherwise the old one stays open (see module docstring).
        """
        fd = _DESCRIPTORS.get(self._own)
        if fd is None or self._path is None:
            return
        status = disk.state(self._path)
        if status is None or status.st_ino != _inode(fd):
            _DESCRIPTORS.pop(self._own, None)
            self._lock_again()

    def _lock_again(self) -> None:
        """Take our locks in the new file; a byte that another process took there first is then held by both."""
        held = self._held()
        for byte in list(held.bytes):
            self._lock_byte(byte)
            if byte not in held.bytes:  # released meanwhile, perhaps before it was locked here
                self._unlock_byte(byte)

    def _held(self) -> _Held:
        return _HELD.setdefault((self._own, os.getpid()), _Held())

    def _lock_byte(self, byte: int) -> bool:
        """Lock the byte; True also if the filesystem has no locks: at worst a block is fetched twice."""
        if not self.works_across_processes or self._path is None:
            return True
        try:
            fd = _DESCRIPTORS.get(self._own)
            if fd is None:
                # A descriptor that another thread opened at the same time stays open: closing it would release our locks.
                fd = _DESCRIPTORS.setdefault(self._own, disk.open_lockable(self._path))
            return disk.lock_byte(fd, byte)
        except OSError as error:
            self.works_across_processes = False
            self.trouble = f"locks on {self._path} do not work here ({error}): blocks may be fetched twice"
            return True

    def _unlock_byte(self, byte: int) -> None:
        fd = _DESCRIPTORS.get(self._own)
        if fd is not None:
            try:
                disk.unlock_byte(fd, byte)
            except OSError as error:  # other processes then wait until this one ends; no read may fail
                self.trouble = f"a lock on {self._path} could not be released: {error}"


def _inode(fd: int) -> int | None:
    """Return the inode of an open file; None if the descriptor was closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
