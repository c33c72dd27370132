"""Change counters: numbers that differ after a change of a path, visible to all processes at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from cachedfs.cache import disk
from cachedfs.cache.directory import CacheDirectory
from cachedfs.cache.shared_slots import HEADER_SIZE, MASK32, SharedSlots
from cachedfs.common.clock import clock
from cachedfs.common.logging import WarnOnce

MEMORY_FOLDER = "/dev/shm"
"""Where the change counters are if the cache directory cannot hold them: a folder in memory (Linux)."""

# Names use one half of the slots, trees and origins the other. A name that shares a slot with a changed name
# is revalidated (1 in 65 names after 1,000 changes). In a single table, a whole tree could be.
_N_SLOTS = 1 << 18
_HALF = _N_SLOTS // 2
TABLE_SIZE = HEADER_SIZE + 8 * _N_SLOTS  # bytes of each table
_SECONDS = 32  # bit position in a slot of the second of its last change, which is 0 in a new file
_MASK63 = (1 << 63) - 1  # change counters are stored in SQLite, whose integers are signed
_MOST_KNOWN = 50_000  # counters in memory
_N_TRIES = 3  # a file that is replaced while it is read
_SLOT = struct.Struct("<Q")
_GENERATION_AT = 16  # offset of the number that is written after every change
_START = (24 - HEADER_SIZE) // 8  # the place of the number that all change counters of a file start from
STATISTICS_AT = 64  # offset of the statistics of all processes: see `counters`


class _Table(SharedSlots):
    """One file of change counters.

    A slot holds the second of its last change above 32 random bits, or zeros. All counters of a file start from one
    random number, so that metadata stored with an earlier file is invalid. The generation differs after every change.
    """

    magic = b"cfsmark2"

    def __init__(self, path: str | None, temp: str) -> None:
        numbers = secrets.token_bytes(8) + _SLOT.pack(secrets.randbits(32))
        super().__init__(path, temp, _N_SLOTS, at_least=_N_SLOTS, header=numbers)


class ChangeCounters:
    """The change counters of one cache. A folder's name with a "/" at its end means its listing.

    They are in the cache directory. As soon as a process cannot write them there, they are also in `MEMORY_FOLDER`, for
    all processes of the machine and until it restarts: containers that share the directory have memory of their own, so
    the directory comes first. With several tables, a change in any of them changes the counter.
    """

    def __init__(self, root: str, warnings: WarnOnce) -> None:
        name = hashlib.blake2b(root.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        self.in_memory = f"{MEMORY_FOLDER}/cachedfs-{os.geteuid()}-{name}"
        self._directory: CacheDirectory | None = None
        self._warnings = warnings
        self._tables: tuple[_Table, ...] = ()  # opened when first needed, and again after they were released
        # A generation, and the counters since it was current, by their slots. Replaced as a whole: a thread that is late
        # adds what it read to the old ones.
        self._known: tuple[bytes, dict[tuple[int, ...], int]] = b"", {}

    def move_to(self, directory: CacheDirectory | None) -> None:
        """Use the table in `directory` from now on; with None, that in memory alone."""
        self._directory, self._tables = directory, ()

    @property
    def tables(self) -> tuple[_Table, ...]:
        """The tables in use: the first one is in the directory if that can be written."""
        if not (tables := self._tables):
            tables = self._tables = self._opened()
            if tables[0].is_private:
                self._warnings.slower(
                    f"{tables[0].trouble}: changes by other processes cannot be noticed, so metadata is checked "
                    'at each use, as with max_age=0, except with max_age="immutable"'
                )
        return tables

    @property
    def is_private(self) -> bool:
        """True if no table is in a file, so that changes by other processes are not seen."""
        return self.tables[0].is_private

    @property
    def paths(self) -> set[str | None]:
        return _paths(self.tables)

    def at(self, slots: tuple[int, ...]) -> int:
        """Return the current counter made of `slots`, which `slots_of` returns: 63 bits."""
        for _ in range(_N_TRIES):
            tables = self._tables or self.tables
            try:
                generation = b""
                for table in tables:
                    generation += os.pread(table.fd, 8, _GENERATION_AT)
                known = self._known
                if known[0] != generation or len(known[1]) > _MOST_KNOWN:
                    known = self._known = generation, {}
                found = known[1].get(slots)
                if found is None:
                    found = _counter(tables, slots, known[1])
                return found
            except (OSError, struct.error):  # it cannot be read, or was truncated
                self._release(tables)
        return secrets.randbits(63)  # equals no other: what is stored with it is not used again

    def counter(self, identity: str, path: str) -> int:
        """Return the change counter of `path`: it differs after a change of the path by any process."""
        return self.at(slots_of(identity, path))

    def listing_counter(self, identity: str, folder: str) -> int:
        """Return the change counter of the listing of `folder`: it differs after any change below the folder."""
        return self.at(slots_of(identity, f"{folder}/"))

    def epoch(self, identity: str) -> int:
        """Return a number that differs after any change at this origin."""
        return self.at((_epoch_slot(identity),))

    def changed_at(self, identity: str, path: str) -> int:
        """Return the second of the last change of `path` by `clock`, rounded down; 0 without one.

        Paths may share a slot, so the result may be too late, but never too early.
        """
        tables, slots = self.tables, slots_of(identity, path)
        try:
            numbers = [table.read(8, HEADER_SIZE + 8 * slot) for table in tables for slot in slots]
        except OSError:
            self._release(tables)
            return int(clock.now())
        return max(int.from_bytes(number, "little") for number in numbers) >> _SECONDS

    def changed(self, identity: str, paths: Iterable[str], *, tree: bool = False) -> None:
        """Change the counters of `paths` and everything above them; with `tree`, also of everything below them.

        The epoch changes first: a process that reads the old epoch has seen no part of this change.
        """
        paths, names = list(paths), set[str]()
        for path in paths:
            names |= {path, f"{path}/"}
            while path:
                path = path.rpartition("/")[0]
                names |= {path, f"{path}/"}
        trees = [_HALF + _slot(identity, path) for path in paths if tree]
        self._change([_epoch_slot(identity), *trees, *(_slot(identity, name) for name in names)])

    def overtaken(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the counters of `paths`, of the listings that contain them, and of everything below `folders`.

        For changes that the origin reports: there, a changed file does not change the folders above it.
        """
        names = [name for path in paths for name in (path, path.rpartition("/")[0] + "/")]
        trees = [_HALF + _slot(identity, folder) for folder in folders]
        self._change([_epoch_slot(identity), *(_slot(identity, name) for name in names), *trees])

    def _change(self, slots: Sequence[int]) -> None:
        before = self.tables
        self._write(before, slots)
        # The file may have been deleted, and other processes may use a new one already.
        with contextlib.suppress(OSError):
            self.look()
        if (now := self.tables) is not before:
            self._write(now, slots)

    def _write(self, tables: Sequence[_Table], slots: Sequence[int]) -> None:
        """Give the slots a number that they never had, without reading: if two processes write, either one is right."""
        # The clock of metadata: the times of metadata are compared with this one.
        number = _SLOT.pack((int(clock.now()) & MASK32) << _SECONDS | secrets.randbits(32))
        pieces = [(HEADER_SIZE + 8 * slot, number) for slot in slots]
        # Last: a process that reads the new generation reads the new slots too.
        pieces.append((_GENERATION_AT, secrets.token_bytes(8)))
        failed = []
        for table in tables:
            try:
                table.write(pieces)
            except OSError:
                failed.append(table)
        if failed:
            # First make the table in memory: a process that finds the others invalid then finds this one.
            if self.in_memory not in _paths(tables):
                self._open_in_memory()
            for table in failed:
                table.invalidate()
            self._release(tables)

    def look(self, again: bool = False) -> None:
        """Release tables that were deleted or replaced, so that all processes use the same ones.

        Use one that others made in memory meanwhile; with `again`, also one that could not be opened before. Raises
        OSError if that cannot be checked.
        """
        tables = self._tables
        if not all(table.is_current() for table in tables):
            self._release(tables)
            return
        is_new_in_memory = self.in_memory not in _paths(tables) and disk.state(self.in_memory) is not None
        if tables and (again or is_new_in_memory):
            found = self._opened()
            # Only for tables that more processes see: new ones invalidate all metadata.
            if _paths(found) > _paths(tables):
                self._tables = found

    def _release(self, tables: Sequence[_Table]) -> None:
        """Release tables: the next use opens those that other processes use now."""
        if self._tables is tables:
            self._tables = ()

    def _opened(self) -> tuple[_Table, ...]:
        tables = []
        if self._directory is not None:
            tables.append(_Table(self._directory.change_counters, self._directory.temp()))
        if not tables or tables[0].is_private or disk.size_of(self.in_memory):
            tables.append(self._open_in_memory())
        return tuple(table for table in tables if not table.is_private) or (tables[0],)

    def _open_in_memory(self) -> _Table:
        return _Table(self.in_memory, f"{self.in_memory}.{os.urandom(8).hex()}")


def _paths(tables: Iterable[_Table]) -> set[str | None]:
    return {table.path for table in tables if not table.is_private}


def _counter(tables: Iterable[_Table], slots: tuple[int, ...], known: dict[tuple[int, ...], int]) -> int:
    """Return the counter made of `slots`, the last first; `known` has those of the folders that were read before.

    Raises OSError, or struct.error after the end of a file.
    """
    if (counter := known.get(slots)) is None:
        counter = _counter(tables, slots[1:], known) if slots else 0
        for table in tables:
            (number,) = _SLOT.unpack(os.pread(table.fd, 8, HEADER_SIZE + 8 * (slots[0] if slots else _START)))
            counter = 3 * counter ^ number  # times 3: equal numbers in two slots must not cancel out
        counter = known[slots] = counter & _MASK63
    return counter


@lru_cache(1000)  # a lookup asks for them several times
def slots_of(identity: str, path: str) -> tuple[int, ...]:
    """Return the slots that make up the counter of `path`: its own, and those of the trees that contain it.

    They are the same in every process and forever. A folder's name with a "/" at its end means its listing.
    """
    above = _trees_of(identity, path.rpartition("/")[0]) if path else ()
    return (_slot(identity, path), *above)


@lru_cache(1000)  # the objects in a folder have the same ones
def _trees_of(identity: str, folder: str) -> tuple[int, ...]:
    above = _trees_of(identity, folder.rpartition("/")[0]) if folder else ()
    return (_HALF + _slot(identity, folder), *above)


def _slot(identity: str, name: str) -> int:
    return zlib.crc32(f"{identity}\0{name}".encode("utf-8", "surrogatepass")) % _HALF


def _epoch_slot(identity: str) -> int:
    return _HALF + _slot(identity, "\0epoch")
