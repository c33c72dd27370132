"""Claims: the right of one process to do something, which dies with the process.

A claim is a POSIX write lock on one byte of one file. The kernel drops all locks of a process on a file as soon
as the process closes *any* descriptor of that file, so the file is opened once per process and never closed, and
nothing else in this room opens it. A child inherits the descriptor but not the locks: they belong to processes.
"""

from __future__ import annotations

import logging
import threading

from cachedfs.cache import disk

__all__ = ["Claims"]

log = logging.getLogger("cachedfs.cache")

_BYTES = (1 << 62) - 1  # the largest offset that every kernel locks
_DESCRIPTORS: dict[str, int] = {}  # by path; never closed: see above


class Claims:
    """The claims of this process on one cache. Without a file (`path` None) they hold among its threads alone."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pid = disk.process_id()
        self._held: set[int] = set()  # Invariant: bytes whose lock this process, `_pid`, holds
        self.works_across_processes = path is not None

    def take(self, hash64: int) -> bool:
        """Take the claim; False when somebody has it: another process, or another thread of this one."""
        byte = hash64 & _BYTES
        self._after_fork()
        with self._lock:
            if byte in self._held or not self._lock_byte(byte):
                return False
            self._held.add(byte)
            return True

    def drop(self, hash64: int) -> None:
        """Give the claim up; nothing happens when this process does not hold it."""
        byte = hash64 & _BYTES
        self._after_fork()
        with self._lock:
            if byte not in self._held:
                return
            self._held.discard(byte)
            fd = _DESCRIPTORS.get(self._path or "")
            if fd is not None:
                disk.unlock_byte(fd, byte)

    def look_again(self) -> None:
        """Use the file that is at the path now, if ours was deleted. The old one stays open: see above."""
        fd = None if self._path is None else _DESCRIPTORS.get(self._path)
        if fd is None or self._path is None:
            return
        status = disk.state(self._path)
        if status is None or status.st_ino != disk.state_of_open(fd).st_ino:
            del _DESCRIPTORS[self._path]

    def _lock_byte(self, byte: int) -> bool:
        """Lock the byte; True as well where the file system has no locks: a block is then fetched twice at worst."""
        if not self.works_across_processes or self._path is None:
            return True
        try:
            fd = _DESCRIPTORS.get(self._path)
            if fd is None:
                fd = _DESCRIPTORS[self._path] = disk.open_lockable(self._path)
            return disk.lock_byte(fd, byte)
        except OSError as error:
            self.works_across_processes = False
            log.warning(
                "claims on %s do not work here (%s): processes may fetch the same block twice",
                self._path,
                error,
            )
            return True

    def _after_fork(self) -> None:
        """Start with no claims and a free lock in a forked child: both are the parent's."""
        if self._pid != disk.process_id():
            self._lock = threading.Lock()
            self._held = set()
            self._pid = disk.process_id()
