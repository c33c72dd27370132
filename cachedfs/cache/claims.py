"""Claims: the right of one process to do something, which dies with the process.

A claim is a POSIX write lock on one byte of one file. The kernel drops all locks of a process on a file as soon
as the process closes *any* descriptor of that file, so the file is opened once per process and never closed, and
nothing else in this room opens it. A child inherits the descriptor but not the locks: they belong to processes.
"""

from __future__ import annotations

import itertools
import threading

from cachedfs.cache import disk

__all__ = ["Claims"]

_BYTES = (1 << 62) - 1  # the largest offset that every kernel locks


class _Held:
    """What one process holds of one file. The kernel does not tell threads apart, nor two caches of a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bytes: set[int] = set()  # Invariant: bytes that this process has locked


_NUMBERS = itertools.count()  # an id() is used again, with what the one before it held
_DESCRIPTORS: dict[str, int] = {}  # by path; never closed: see above
_HELD: dict[tuple[str, int], _Held] = {}  # by path and process: a forked child starts with nothing


class Claims:
    """The claims of this process on one cache. Without a file (`path` None) they hold among its threads alone.

    `trouble`: why they do not reach other processes, though there should be a file.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._own = f"memory of cache {next(_NUMBERS)}" if path is None else path
        self.works_across_processes = path is not None
        self.trouble: str | None = None

    def take(self, hash64: int) -> bool:
        """Take the claim; False when somebody has it: another process, or another thread of this one."""
        byte, held = hash64 & _BYTES, self._held()
        with held.lock:
            if byte in held.bytes or not self._lock_byte(byte):
                return False
            held.bytes.add(byte)
            return True

    def drop(self, hash64: int) -> None:
        """Give the claim up; nothing happens when this process does not hold it."""
        byte, held = hash64 & _BYTES, self._held()
        with held.lock:
            if byte in held.bytes:
                held.bytes.discard(byte)
                self._unlock_byte(byte)

    def is_held(self, hash64: int) -> bool:
        """Return whether somebody, we ourselves included, has the claim; True as well where nobody can tell."""
        byte, held = hash64 & _BYTES, self._held()
        with held.lock:
            if byte in held.bytes or not self.works_across_processes or not self._lock_byte(byte):
                return True
            self._unlock_byte(byte)
            return False

    def try_again(self) -> None:
        """Ask the file system again for locks, if it had none."""
        if self.trouble is not None:
            self.works_across_processes, self.trouble = True, None

    def look_again(self) -> None:
        """Use the file that is at the path now, if ours was deleted. The old one stays open: see above."""
        fd = _DESCRIPTORS.get(self._own)
        if fd is None or self._path is None:
            return
        status = disk.state(self._path)
        if status is None or status.st_ino != disk.state_of_open(fd).st_ino:
            _DESCRIPTORS.pop(self._own, None)
            self._lock_again()

    def _lock_again(self) -> None:
        """Lock in the new file what we hold; what another process was faster to take there, both have."""
        held = self._held()
        with held.lock:
            for byte in held.bytes:
                self._lock_byte(byte)

    def _held(self) -> _Held:
        return _HELD.setdefault((self._own, disk.process_id()), _Held())

    def _lock_byte(self, byte: int) -> bool:
        """Lock the byte; True as well where the file system has no locks: a block is then fetched twice at worst."""
        if not self.works_across_processes or self._path is None:
            return True
        try:
            fd = _DESCRIPTORS.get(self._own)
            if fd is None:
                fd = _DESCRIPTORS.setdefault(self._own, disk.open_lockable(self._path))
            return disk.lock_byte(fd, byte)
        except OSError as error:
            self.works_across_processes = False
            self.trouble = f"claims on {self._path} do not work here ({error}): blocks may be fetched twice"
            return True

    def _unlock_byte(self, byte: int) -> None:
        fd = _DESCRIPTORS.get(self._own)
        if fd is not None:
            try:
                disk.unlock_byte(fd, byte)
            except OSError as error:  # others then wait for this process's end; no read may fail for it
                self.trouble = f"a claim on {self._path} could not be given up: {error}"
