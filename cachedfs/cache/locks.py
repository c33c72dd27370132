"""Claims: the right of one process to do something, which dies with the process.

A claim is a POSIX write lock on one byte of one file. The kernel drops all locks of a process on a file as soon
as the process closes *any* descriptor of that file, so the file is opened once per process and never closed, and
nothing else in this room opens it. A child inherits the descriptor but not the locks: they belong to processes.
"""

from __future__ import annotations

import itertools
import threading

from cachedfs.cache import disk

__all__ = ["ByteRangeLocks"]

_BYTES = (1 << 62) - 1  # the largest offset that every kernel locks
_OPEN_WAIT_S = 1.0


class _Held:
    """What one process holds of one file. The kernel does not tell threads apart, nor two caches of a process.

    No lock: a signal's handler that reads, or a file that is collected, would wait for the thread that it interrupted. Single
    operations on a dict are atomic, and who added a byte is the one who has it.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, object] = {}  # Invariant: all bytes that this process has locked, and who did
        # Whose are being given up, and by whom: by the taking, as the byte may be taken again before this is over.
        self.leaving: dict[object, object] = {}
        # Of who opens the file. Not waited for without end: a signal's handler may have interrupted him.
        self.opening = threading.RLock()


_NUMBERS = itertools.count()  # an id() is used again, with what the one before it held
_DESCRIPTORS: dict[str, int] = {}  # by path; never closed: see above
_HELD: dict[tuple[str, int], _Held] = {}  # by path and process: a forked child starts with nothing


class ByteRangeLocks:
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
        byte, held, us = hash64 & _BYTES, self._held(), object()
        if held.bytes.setdefault(byte, us) is not us:
            return False
        try:
            if self._lock_byte(byte):
                return True
        except BaseException:  # an interrupt: nobody knows that it is ours
            self.drop(hash64)
            raise
        held.bytes.pop(byte, None)
        return False

    def drop(self, hash64: int) -> None:
        """Give the claim up; nothing happens when this process does not hold it."""
        byte, held, us = hash64 & _BYTES, self._held(), object()
        owner = held.bytes.get(byte)
        if owner is None or held.leaving.setdefault(owner, us) is not us:
            return
        try:
            if held.bytes.get(byte) is owner:
                self._unlock_byte(byte)
                held.bytes.pop(byte, None)  # behind it: who takes it before would lose the lock again
        finally:
            held.leaving.pop(owner, None)

    def is_held(self, hash64: int) -> bool:
        """Return whether somebody, we ourselves included, has the claim; True as well where nobody can tell."""
        if not self.works_across_processes or not self.take(hash64):
            return True
        self.drop(hash64)
        return not self.works_across_processes

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
        for byte in list(held.bytes):
            self._lock_byte(byte)
            if byte not in held.bytes:  # given up meanwhile, perhaps before it was locked
                self._unlock_byte(byte)

    def _held(self) -> _Held:
        return _HELD.setdefault((self._own, disk.process_id()), _Held())

    def _lock_byte(self, byte: int) -> bool:
        """Lock the byte; True as well where the file system has no locks: a block is then fetched twice at worst."""
        if not self.works_across_processes or self._path is None:
            return True
        try:
            fd = _DESCRIPTORS.get(self._own)
            if fd is None:
                fd = self._opened(self._path)
            return disk.lock_byte(fd, byte)
        except OSError as error:
            self.works_across_processes = False
            self.trouble = f"claims on {self._path} do not work here ({error}): blocks may be fetched twice"
            return True

    def _opened(self, path: str) -> int:
        """Return the descriptor, opened once for all threads: a second one could not be closed again, see above."""
        opening = self._held().opening
        is_ours = opening.acquire(timeout=_OPEN_WAIT_S)
        try:
            fd = _DESCRIPTORS.get(self._own)
            return _DESCRIPTORS.setdefault(self._own, disk.open_lockable(path)) if fd is None else fd
        finally:
            if is_ours:
                opening.release()

    def _unlock_byte(self, byte: int) -> None:
        fd = _DESCRIPTORS.get(self._own)
        if fd is not None:
            try:
                disk.unlock_byte(fd, byte)
            except OSError as error:  # others then wait for this process's end; no read may fail for it
                self.trouble = f"a claim on {self._path} could not be given up: {error}"
