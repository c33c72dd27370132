"""Small files that all processes of the machine have mapped; here what they share, and change marks.

They are arrays of 64-bit slots indexed by hash, written without a lock. That is sound because no slot is ever
read, changed and written back where it matters: a change mark is replaced by a random number, so a lost update
still is an update; a lost touch costs at most a hit.

A file is made complete under a temporary name and linked into place. Its room is allocated first: a mapped page
without room on a full disk would kill the process. Where that fails, memory of this process stands in, which is
right for one process (and those forked from it), and `trouble` says why.
"""

from __future__ import annotations

import contextlib
import mmap
import stat
import struct
import time
import zlib
from collections.abc import Iterable

from cachedfs.cache import disk
from cachedfs.cache.block_file import let_go

__all__ = ["CLOCK_AT", "MASK32", "MASK63", "ChangeCounters", "SharedSlots"]

_HEADER = struct.Struct("<8sQ")  # magic, number of slots
_HEADER_SIZE = 4096
CLOCK_AT = 4  # of the touch clock, as a 32-bit word of the header
_START_AT = 5  # of the number that all marks of a file start with
# Half are of names, half of trees and origins: what shares a slot with something that changed is asked for again, one name
# in 65 after a thousand changes; sharing one with a tree, all that is known below it would be.
_MARK_SLOTS = 1 << 18
_FEWEST_SLOTS = 4  # a bucket of touch records
MASK32 = (1 << 32) - 1
MASK63 = (1 << 63) - 1  # marks are kept in SQLite, whose integers are signed


class SharedSlots:
    """One mapped file of 64-bit slots; `slots` is the view of them, `words` the header as 32-bit words.

    `trouble`: why the file at `path` cannot be shared; None when it is, or when there should be none.
    """

    magic = b""

    def __init__(
        self, path: str | None, temp: str, n_slots: int, *, at_least: int = 1, start: int = 0, clock: int = 0
    ) -> None:
        """Map the file at `path`, making it by way of `temp` if need be; `path` None: memory of this process.

        `n_slots`: of a new file, which also replaces one that has less than `at_least`; `start` and `clock`: of its header.
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
            except (OSError, ValueError) as error:  # ValueError: cut off since we looked at its size
                self.inode, self.is_private = 0, True
                self.trouble = f"{path} cannot be shared with other processes: {error}"
        if found is None:
            found = disk.map_private(_HEADER_SIZE + 8 * n_slots)
            found[: len(header)] = header
        self._use(found)

    def is_current(self) -> bool:
        """Return whether other processes would find this very file; always so for private memory."""
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
        """Return the mapping of a sound file, None when there is none; what is no such file is removed."""
        status = disk.state(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_uid != disk.user_id():
            disk.unlink(path)
            return None
        try:
            fd = disk.open_mappable(path)
        except FileNotFoundError:  # gone since: it is made anew
            return None
        try:
            status = disk.state_of_open(fd)
            header = disk.read(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
            magic, n_slots = _HEADER.unpack(header)
            is_sound = magic == self.magic and self.may_have(n_slots) and n_slots >= at_least
            if not is_sound or status.st_size != _HEADER_SIZE + 8 * n_slots:
                disk.unlink(path)
                return None
            self.inode, self.is_private = status.st_ino, False
            return disk.map_file(fd, status.st_size)
        finally:
            let_go(fd)  # the mapping stays

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        """Return whether a sound file may have so many slots: a mask does for a remainder, and buckets are whole."""
        return n_slots >= _FEWEST_SLOTS and n_slots & (n_slots - 1) == 0

    def _make(self, path: str, temp: str, header: bytes) -> mmap.mmap | None:
        """Put the file into place, whole, and map it, or the one that another process put there first."""
        _, n_slots = _HEADER.unpack_from(header)
        fd = disk.create(temp)
        try:
            try:
                disk.allocate(fd, _HEADER_SIZE + 8 * n_slots)
                disk.write_all(fd, [header], 0)
            finally:
                disk.close(fd)
            _publish(temp, path)
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temp)
        return self._open(path, 1)


def _header(magic: bytes, n_slots: int, start: int, clock: int) -> bytes:
    """Return the header of a new file. Its slots are zeros, which new room is."""
    header = bytearray(_HEADER_SIZE)
    _HEADER.pack_into(header, 0, magic, n_slots)
    struct.pack_into("=II", header, 4 * CLOCK_AT, clock, start)
    return bytes(header)


def _publish(temp: str, path: str) -> None:
    try:
        disk.link(temp, path)  # fails when another process was first: then its file is the one
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        disk.rename(temp, path)


_HALF = _MARK_SLOTS // 2
_SECONDS = 32  # bits of a slot above its random ones: when it was changed last, 0 in a new file


class ChangeCounters(SharedSlots):
    """Change marks: numbers that differ after something happened to a path, seen by all processes at once.

    A slot has the second of its last change above 32 random bits, and zeros before that. All marks of a file start with
    one random number, so that facts from before it are not believed.
    """

    magic = b"cfsmarks"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _MARK_SLOTS, start=disk.nonce() & MASK32)
        self._start = self.words[_START_AT]

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _MARK_SLOTS

    def slots_of(self, identity: str, path: str) -> tuple[int, ...]:
        """Return the slots whose change changes the mark of `path`: its own, and those of the trees it is in."""
        base = _crc(identity)
        slots = [_slot(path, base)]
        above = path
        while above:
            above = above.rpartition("/")[0]
            slots.append(_tree_slot(above, base))
        return tuple(slots)

    def listing_slots_of(self, identity: str, folder: str) -> tuple[int, ...]:
        return self.slots_of(identity, folder + "/")

    def at(self, slots: tuple[int, ...]) -> int:
        """Return the mark that the slots make now: 63 bits."""
        words, mark = self.slots, self._start
        for slot in slots:
            mark = 3 * mark ^ words[slot]  # 3: so that equal numbers in two slots do not cancel out
        return mark & MASK63

    def changed_at(self, slots: tuple[int, ...]) -> int:
        """Return the second at the start of which the last change of one of the slots had not yet been; 0: of none."""
        words = self.slots
        return max(words[slot] >> _SECONDS for slot in slots)

    def epoch(self, identity: str) -> int:
        """Return a number that differs after any change at this origin."""
        return (self.slots[_epoch_slot(_crc(identity))] ^ self._start) & MASK63

    def change(self, identity: str, paths: Iterable[str], *, tree: bool) -> None:
        """Change the marks of `paths`, of the folders above them and of those folders' listings.

        The epoch first: who sees an old epoch saw nothing of this change, in particular no half of it. Every
        slot gets a number that it never had, without being read: of two writers at once, either number will do.
        """
        base, fresh = _crc(identity), _fresh()
        self.slots[_epoch_slot(base)] = fresh
        paths = list(paths)
        for path in paths if tree else ():
            self.slots[_tree_slot(path, base)] = fresh
        for name in _names_touched(paths):
            self.slots[_slot(name, base)] = fresh

    def change_alone(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the marks of `paths`, of the listings that name them, and of all below `folders`, and no others.

        For what an origin tells: a file that changed says nothing of the folders above it there.
        """
        base, fresh = _crc(identity), _fresh()
        self.slots[_epoch_slot(base)] = fresh
        for path in paths:
            self.slots[_slot(path, base)] = fresh
            self.slots[_slot(path.rpartition("/")[0] + "/", base)] = fresh
        for folder in folders:
            self.slots[_tree_slot(folder, base)] = fresh


def _fresh() -> int:
    """Return the number of a slot that changes now."""
    return (int(time.time()) & MASK32) << _SECONDS | disk.nonce() & MASK32


def _names_touched(paths: Iterable[str]) -> set[str]:
    """Return the paths, all folders above them, and (with a "/" behind) the listings of these and of the paths."""
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


def _crc(identity: str) -> int:
    return zlib.crc32(identity.encode("utf-8", "surrogatepass") + b"\0")


def _slot(name: str, base: int) -> int:
    return _hash(name, base) % _HALF


def _tree_slot(folder: str, base: int) -> int:
    return _HALF + _hash(folder, base) % _HALF


def _epoch_slot(base: int) -> int:
    return _HALF + _hash("\0epoch", base) % _HALF


def _hash(name: str, base: int) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass"), base)
