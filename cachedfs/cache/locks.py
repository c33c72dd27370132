"""Locks between processes that the kernel releases when their process ends: byte-range locks on one file.

A lock is a POSIX write lock on one byte. The kernel releases all locks of a process on a file as soon as the process
closes *any* descriptor of it. So the file is opened once per process and never closed, and no other code opens it.
A forked child inherits the descriptor but not the locks, which belong to processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable

from cachedfs.cache import disk

_BYTES = (1 << 62) - 1  # mask: the largest offset that every kernel can lock
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB
_BUSY = errno.EAGAIN, errno.EACCES
_NUMBERS = itertools.count()  # not id(): a reused id would inherit the locks of a collected cache
_DESCRIPTORS: dict[str, int] = {}  # by path; never closed (see module docstring)
# By path and process id (a forked child starts with none): each locked byte, and a list that its releaser empties. The
# kernel does not distinguish threads and caches of a process. There is no mutex: the garbage collector may close a file
# in a thread that holds it. Single operations of dicts and lists are atomic.
_HELD: dict[tuple[str, int], dict[int, list[None]]] = {}


class ByteRangeLocks:
    """The locks of this process on one cache. Without a file (`path` None) they only exclude its own threads.

    `works_across_processes` is False without a file, and if the filesystem has no locks; then `warn` gets the reason.
    """

    def __init__(self, warn: Callable[[str], object] = bool) -> None:
        self.path: str | None = None
        self.works_across_processes = False
        self._warn = warn
        self._name = f"memory of cache {next(_NUMBERS)}"

    def use(self, path: str) -> None:
        """Lock the bytes of the file at `path` from now on."""
        self.path = self._name = path
        self.works_across_processes = True

    def take(self, number: int, n: int = 1) -> int:
        """Take up to `n` locks, of `number` and those that follow; return how many were free, counted from the first."""
        held = _HELD.get((self._name, os.getpid())) or self.held()
        first, taken, free = number & _BYTES, 0, 0
        wanted: dict[int, list[None]] = {byte: [None] for byte in range(first, min(first + n, _BYTES + 1))}
        try:
            for byte, mine in wanted.items():
                if held.setdefault(byte, mine) is not mine:
                    break
                taken += 1
            try:
                if taken and self.works_across_processes:
                    fcntl.lockf(_DESCRIPTORS.get(self._name) or self._open(), _TRY, taken, first)
                free = taken
            except OSError as error:
                free = self._take_each(first, taken, error)
            for byte in range(first + free, first + taken):
                held.pop(byte, None)
        except BaseException:  # an interrupt: the caller does not know what it holds
            for byte, mine in wanted.items():
                if held.get(byte) is mine:
                    self.release(byte)
            raise
        return free

    def release(self, number: int) -> None:
        """Release a lock; do nothing when this process does not hold it."""
        byte = number & _BYTES
        held = _HELD.get((self._name, os.getpid())) or self.held()
        try:
            held[byte].pop()
        except (KeyError, IndexError):  # not held, or another thread is releasing it
            return
        except BaseException:  # an interrupt just after it: the next one that takes it also unlocks it
            held.pop(byte, None)
            raise
        try:
            if (fd := _DESCRIPTORS.get(self._name)) is not None:
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)
        except OSError as error:  # other processes then wait until this one ends; no read may fail
            self._warn(f"a lock on {self.path} could not be released: {error}")
        finally:
            held.pop(byte, None)  # after unlocking: another thread would lose the lock here

    def held(self) -> dict[int, list[None]]:
        """Return the bytes that this process has locked."""
        return _HELD.setdefault((self._name, os.getpid()), {})

    def is_held(self, number: int) -> bool:
        """Return whether any process, including this one, holds the lock; True also if that cannot be found out."""
        if not self.works_across_processes or not self.take(number):
            return True
        self.release(number)
        return not self.works_across_processes

    def holder(self, number: int) -> int | None:
        """Return the id of the process that holds the lock.

        None if it is free, or if its holder cannot be seen from here, as in another container.
        """
        byte, fd = number & _BYTES, _DESCRIPTORS.get(self._name)
        if byte in self.held():
            return os.getpid()
        return None if fd is None else disk.lock_holder(fd, byte)

    def look(self, again: bool = False) -> None:
        """Switch to the file now at the path if ours was deleted, or if other code closed its descriptor.

        Otherwise the old one stays open (see module docstring). A byte that another process locked in the new file first
        is then held by both. `again`: try locking again if the filesystem had no locks before.
        """
        if again:
            self.works_across_processes = self.path is not None
        fd = _DESCRIPTORS.get(self._name)
        if fd is None or self.path is None:
            return
        status = disk.state(self.path)
        if status is None or status.st_ino != _inode(fd):
            new, held = disk.open_lockable(self.path), self.held()
            _DESCRIPTORS[self._name] = new
            for byte in list(held):
                with contextlib.suppress(OSError):
                    fcntl.lockf(new, _TRY, 1, byte)
                if byte not in held:  # released meanwhile, perhaps before it was locked here
                    fcntl.lockf(new, fcntl.LOCK_UN, 1, byte)

    def _open(self) -> int:
        """Return the descriptor of the file, which stays open: closing it would release our locks."""
        if (fd := _DESCRIPTORS.get(self._name)) is not None:
            return fd
        assert self.path is not None
        return _DESCRIPTORS.setdefault(self._name, disk.open_lockable(self.path))

    def _take_each(self, first: int, n: int, error: OSError) -> int:
        """Lock bytes one by one, after locking all of them failed; return how many could be, counted from the first.

        If the filesystem has no locks, that is all of them: at worst blocks are fetched twice.
        """
        if error.errno not in _BUSY:
            self.works_across_processes = False
            self._warn(f"locks on {self.path} do not work here ({error}): blocks may be fetched twice")
            return n
        for n_locked in range(n):
            try:
                fcntl.lockf(self._open(), _TRY, 1, first + n_locked)
            except OSError:
                return n_locked
        return n


def _inode(fd: int) -> int | None:
    """Return the inode of an open file; None if the descriptor was closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
