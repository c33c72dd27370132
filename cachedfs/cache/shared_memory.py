"""Small files that all processes of the machine map: the common part, and the change counters.

They are arrays of 64-bit slots indexed by hash and written without a lock. This is safe because no important slot is
read, modified and written back. A change counter is replaced by a random number, so a lost update is still an
update. A lost access record costs a cache hit at most.

A file is completed under a temporary name and then linked into place. Its space is allocated first, because writing
to a mapped page on a full disk kills the process. If that fails, private memory is used, which works within one
process and its forked children, and `trouble` gives the reason.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterable
from functools import lru_cache

from cachedfs.cache import disk
from cachedfs.cache.block_file import let_go

__all__ = ["CLOCK_AT", "MASK32", "MASK63", "ChangeCounters", "SharedSlots"]

_HEADER = struct.Struct("<8sQ")  # magic, number of slots
_HEADER_SIZE = 4096
CLOCK_AT = 4  # index of the access clock, in 32-bit words of the header
_START_AT = 5  # index of the number that all change counters of a file start from
# Names use one half of the slots, trees and origins the other. A name that shares a slot with a changed name
# is revalidated (1 in 65 names after 1,000 changes). In a single table, a whole tree could be.
_MARK_SLOTS = 1 << 18
_FEWEST_SLOTS = 4  # one bucket of access records
MASK32 = (1 << 32) - 1
MASK63 = (1 << 63) - 1  # change counters are stored in SQLite, whose integers are signed


class SharedSlots:
    """One mapped file of 64-bit slots; `slots` views the slots, `words` the header as 32-bit words.

    `trouble` is the reason why the file at `path` cannot be shared; None if it is shared, or if none is wanted.
    """

    magic = b""

    def __init__(
        self, path: str | None, temp: str, n_slots: int, *, at_least: int = 1, start: int = 0, clock: int = 0
    ) -> None:
        """Map the file at `path`, created by way of `temp` if needed; `path` None means private memory.

        A new file has `n_slots` slots and replaces one with fewer than `at_least`. Its header gets `start` and `clock`.
        """
        self.path = path
        self.inode = 0
        self.is_private = True
        self.trouble: str | None = None
        header = _header(self.magic, n_slots, start, clock)
        found: mmap.mmap | None = None
        if path is not None:
            try:
                found = self._open(path, at_least) or self._make(path, temp, header)
            except (OSError, ValueError) as error:  # ValueError: truncated after its size was read
                self.inode, self.is_private = 0, True
                self.trouble = f"{path} cannot be shared with other processes: {error}"
        if found is None:
            found = mmap.mmap(-1, _HEADER_SIZE + 8 * n_slots)
            found[: len(header)] = header
        self._use(found)

    def is_current(self) -> bool:
        """Return whether other processes would map this same file; always True for private memory."""
        if self.is_private or self.path is None:
            return True
        status = disk.state(self.path)
        return status is not None and status.st_ino == self.inode and status.st_size == self._size

    def _use(self, found: mmap.mmap) -> None:
        self.n_slots = _HEADER.unpack_from(found)[1]
        self._size = len(found)
        view = memoryview(found)
        self.words = view[:_HEADER_SIZE].cast("I")
        self.slots = view[_HEADER_SIZE:].cast("Q")

    def _open(self, path: str, at_least: int) -> mmap.mmap | None:
        """Map a valid file at `path` and return the mapping, None if there is none; remove an invalid file."""
        status = disk.state(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            disk.unlink(path)
            return None
        try:
            fd = disk.open_mappable(path)
        except FileNotFoundError:  # deleted meanwhile: create it
            return None
        try:
            status = os.fstat(fd)
            header = os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
            magic, n_slots = _HEADER.unpack(header)
            is_sound = magic == self.magic and self.may_have(n_slots) and n_slots >= at_least
            if not is_sound or status.st_size != _HEADER_SIZE + 8 * n_slots:
                disk.unlink(path)
                return None
            self.inode, self.is_private = status.st_ino, False
            return disk.map_file(fd, status.st_size)
        finally:
            let_go(fd)  # the mapping stays valid

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        """Return whether a valid file may have this many slots: a power of two (indexes are masked), whole buckets."""
        return n_slots >= _FEWEST_SLOTS and n_slots & (n_slots - 1) == 0

    def _make(self, path: str, temp: str, header: bytes) -> mmap.mmap | None:
        """Create the complete file and map it, or map the one that another process created first."""
        _, n_slots = _HEADER.unpack_from(header)
        fd = disk.create(temp)
        try:
            try:
                disk.allocate(fd, _HEADER_SIZE + 8 * n_slots)
                disk.write_all(fd, [header], 0)
            finally:
                os.close(fd)
            _publish(temp, path)
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temp)
        return self._open(path, 1)


def _header(magic: bytes, n_slots: int, start: int, clock: int) -> bytes:
    """Return the header of a new file. Its slots are zeros, as in newly allocated space."""
    header = bytearray(_HEADER_SIZE)
    _HEADER.pack_into(header, 0, magic, n_slots)
    struct.pack_into("=II", header, 4 * CLOCK_AT, clock, start)
    return bytes(header)


def _publish(temp: str, path: str) -> None:
    try:
        os.link(temp, path)  # fails if another process was first: its file is used
    except FileExistsError:
        return
    except OSError:  # a filesystem without hard links
        os.rename(temp, path)


_HALF = _MARK_SLOTS // 2
_SECONDS = 32  # bit position in a slot of the second of its last change, which is 0 in a new file


class ChangeCounters(SharedSlots):
    """Change counters: numbers that differ after a change of a path, visible to all processes at once.

    A slot holds the second of its last change above 32 random bits, or zeros. All counters of a file start from one
    random number, so that metadata stored with an earlier file is invalid.
    """

    magic = b"cfsmarks"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _MARK_SLOTS, start=secrets.randbits(32))
        self._start = self.words[_START_AT]

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _MARK_SLOTS

    def slots_of(self, identity: str, path: str) -> tuple[int, ...]:
        """Return the slots that make up the counter of `path`: its own, and those of the trees that contain it."""
        return _slots_of(identity, path)

    def listing_slots_of(self, identity: str, folder: str) -> tuple[int, ...]:
        return self.slots_of(identity, folder + "/")

    def at(self, slots: tuple[int, ...]) -> int:
        """Return the current counter made of `slots`: 63 bits."""
        words, mark = self.slots, self._start
        for slot in slots:
            mark = 3 * mark ^ words[slot]  # times 3: equal numbers in two slots must not cancel out
        return mark & MASK63

    def changed_at(self, slots: tuple[int, ...]) -> int:
        """Return the Unix second of the last change of any of the slots, rounded down; 0 without one."""
        words = self.slots
        return max(words[slot] >> _SECONDS for slot in slots)

    def epoch(self, identity: str) -> int:
        """Return a number that differs after any change at this origin."""
        return (self.slots[_epoch_slot(_crc(identity))] ^ self._start) & MASK63

    def change(self, identity: str, paths: Iterable[str], *, tree: bool) -> None:
        """Change the counters of `paths`, of the folders above them and of the listings of those folders.

        The epoch changes first: a process that reads the old epoch has seen no part of this change. Every slot gets a
        number that it never had, without being read: if two processes write at once, either number is right.
        """
        base, fresh = _crc(identity), _fresh()
        self.slots[_epoch_slot(base)] = fresh
        paths = list(paths)
        for path in paths if tree else ():
            self.slots[_tree_slot(path, base)] = fresh
        for name in _names_touched(paths):
            self.slots[_slot(name, base)] = fresh

    def change_alone(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the counters of `paths`, of the listings that contain them, and of everything below `folders`.

        For changes that the origin reports: there, a changed file does not change the folders above it.
        """
        base, fresh = _crc(identity), _fresh()
        self.slots[_epoch_slot(base)] = fresh
        for path in paths:
            self.slots[_slot(path, base)] = fresh
            self.slots[_slot(path.rpartition("/")[0] + "/", base)] = fresh
        for folder in folders:
            self.slots[_tree_slot(folder, base)] = fresh


def _fresh() -> int:
    """Return a new value for a slot that changes now."""
    return (int(time.time()) & MASK32) << _SECONDS | secrets.randbits(32)


def _names_touched(paths: Iterable[str]) -> set[str]:
    """Return the paths, all folders above them, and the listings (name plus "/") of all of these."""
    names: set[str] = set()
    for path in paths:
        names.add(path)
        names.add(path + "/")
        above = path
        while above:
            above = above.rpartition("/")[0]
            if above in names and above + "/" in names:
                break
            names.add(above)
            names.add(above + "/")
    return names


@lru_cache(100)
def _crc(identity: str) -> int:
    return zlib.crc32(identity.encode("utf-8", "surrogatepass") + b"\0")


def _slot(name: str, base: int) -> int:
    return _hash(name, base) % _HALF


def _tree_slot(folder: str, base: int) -> int:
    return _HALF + _hash(folder, base) % _HALF


@lru_cache(1000)  # a read needs the slots of its path several times
def _slots_of(identity: str, path: str) -> tuple[int, ...]:
    folder = path.rpartition("/")[0]
    return (_slot(path, _crc(identity)), *(_tree_slots(identity, folder) if path else ()))


@lru_cache(1000)  # many paths of one folder follow one another
def _tree_slots(identity: str, folder: str) -> tuple[int, ...]:
    """Return the slots of the trees that contain a path in `folder`, from the folder up to the root."""
    base, slots = _crc(identity), [_tree_slot(folder, _crc(identity))]
    while folder:
        folder = folder.rpartition("/")[0]
        slots.append(_tree_slot(folder, base))
    return tuple(slots)


def _epoch_slot(base: int) -> int:
    return _HALF + _hash("\0epoch", base) % _HALF


def _hash(name: str, base: int) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass"), base)
