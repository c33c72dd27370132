"""Small files of 64-bit slots that all processes of the machine read and write.

They are arrays of slots indexed by hash, written without a lock. This is safe because no important slot is read,
modified and written back. A change counter is replaced by a random number, so a lost update is still an update. A lost
access record costs a cache hit at most.

They are not mapped into memory: the kernel ends a process (SIGBUS) that touches a mapped page for which the disk has
no space, or that it cannot read. A failed pread or pwrite is an error.

A file is completed under a temporary name and then linked into place. If it cannot be used, the slots are memory of
this process and its forked children, and `trouble` gives the reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Iterable
from operator import attrgetter

from cachedfs.cache import disk

_HEADER = struct.Struct("<8sQ")  # magic, number of slots
HEADER_SIZE = 4096
_place = attrgetter("st_dev", "st_ino")
_FEWEST_SLOTS = 4  # one bucket of access records
MASK32 = (1 << 32) - 1


class SharedSlots:
    """One file of 64-bit slots behind a header.

    `size` is that of the file in bytes. `is_private`: the slots are memory of this process. `trouble` is the reason why
    the file at `path` is not used; None if it is, or if none is wanted.
    """

    magic = b""

    def __init__(
        self, path: str | None, temp: str, n_slots: int, *, at_least: int = 1, header: bytes = b""
    ) -> None:
        """Open the file at `path`, created by way of `temp` if needed; `path` None means memory.

        A new file has `n_slots` slots and replaces one with fewer than `at_least`. Its header ends with `header`.
        """
        self.path, self.n_slots, self.fd = path, n_slots, -1
        self.trouble: str | None = None
        self._place: object = None  # device and inode of the file behind the descriptor
        header = _HEADER.pack(self.magic, n_slots) + header
        try:
            if path is not None and not self._open(path, at_least):
                self._make(path, temp, header)
        except OSError as error:
            self.trouble = f"{path} cannot be shared with other processes: {error}"
        self.is_private = self.fd < 0
        if self.is_private:
            self.n_slots = n_slots
            with contextlib.suppress(OSError):  # no descriptor is free: nothing can be read or written
                fd = disk.memory_file(header, HEADER_SIZE + 8 * n_slots)
                self._place = _place(os.fstat(fd))
                self.fd = fd
        self.size = HEADER_SIZE + 8 * self.n_slots

    def __del__(self) -> None:
        # Closed when no thread uses it any more. A program that closed all descriptors may have another file there.
        if getattr(self, "fd", -1) >= 0:
            with contextlib.suppress(OSError):
                if _place(os.fstat(self.fd)) == self._place:
                    os.close(self.fd)

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`. Raises OSError, also if the file was truncated."""
        data = os.pread(self.fd, size, offset)
        if len(data) != size:
            raise OSError(errno.EIO, "the file was truncated", self.path)
        return data

    def write(self, pieces: Iterable[tuple[int, bytes | bytearray]]) -> None:
        """Write all (offset, bytes), in order. Raises OSError; the pieces before the failed one are then written."""
        fd, pwrite = self.fd, os.pwrite
        if _place(os.fstat(fd)) != self._place:  # never write into a file that somebody else has opened since
            raise OSError(errno.EBADF, "its descriptor was closed by other code", self.path)
        for offset, data in pieces:
            if pwrite(fd, data, offset) != len(data):
                raise OSError(errno.ENOSPC, "it was written in part", self.path)

    def is_current(self) -> bool:
        """Return whether other processes would open this same file; always True for memory.

        Raises OSError if that cannot be checked.
        """
        if self.is_private or self.path is None:
            return True
        there = disk.state(self.path)
        is_there = there is not None and there.st_size == self.size and _place(there) == self._place
        return is_there and _place(os.fstat(self.fd)) == self._place

    def invalidate(self) -> None:
        """Make the file invalid for all processes, as far as possible: they notice at their next read."""
        if self.is_private or self.path is None:
            return
        try:
            if _place(os.fstat(self.fd)) == self._place:
                disk.truncate(self.fd)
        except OSError:
            with contextlib.suppress(OSError):  # read-only: others notice when they write, or in a second
                disk.unlink(self.path)

    def _open(self, path: str, at_least: int) -> bool:
        """Open a valid file at `path`; return False if there is none. Remove an invalid file."""
        status, fd = disk.state(path), -1
        if status is None:
            return False
        try:
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fd = disk.open_to_update(path)
                status = os.fstat(fd)
                magic, n_slots = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
                # A power of two, because indexes are masked.
                is_valid = n_slots >= max(at_least, _FEWEST_SLOTS) and n_slots & (n_slots - 1) == 0
                if is_valid and magic == self.magic and status.st_size == HEADER_SIZE + 8 * n_slots:
                    self.n_slots, self._place, self.fd = n_slots, _place(status), fd
                    return True
            now = disk.state(path)  # another process may have replaced it
            if now is not None and _place(now) == _place(status):
                disk.unlink(path)
        except FileNotFoundError:  # deleted meanwhile: create it
            pass
        finally:
            if fd != self.fd:
                os.close(fd)
        return False

    def _make(self, path: str, temp: str, header: bytes) -> None:
        """Create the complete file and open it, or open the one that another process created first."""
        fd = disk.create(temp)
        try:
            try:
                disk.allocate(fd, HEADER_SIZE + 8 * self.n_slots)
                disk.write_all(fd, [header], 0)
            finally:
                os.close(fd)
            try:
                os.link(temp, path)
            except FileExistsError:  # another process was first
                pass
            except OSError:  # a filesystem without hard links
                os.rename(temp, path)
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temp)
        if not self._open(path, 1):
            raise OSError(errno.ESTALE, "it vanished or was replaced while it was opened")
