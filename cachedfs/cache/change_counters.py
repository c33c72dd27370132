"""Change counters: numbers that differ after a change of a path, visible to all processes at once."""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from cachedfs.cache.shared_slots import HEADER_SIZE, MASK32, SharedSlots
from cachedfs.common.clock import clock

__all__ = ["STATISTICS_AT", "TABLE_SIZE", "ChangeCounters", "ChangeTable", "slots_of"]

# Names use one half of the slots, trees and origins the other. A name that shares a slot with a changed name
# is revalidated (1 in 65 names after 1,000 changes). In a single table, a whole tree could be.
_N_SLOTS = 1 << 18
_HALF = _N_SLOTS // 2
TABLE_SIZE = HEADER_SIZE + 8 * _N_SLOTS  # bytes of each table
_SECONDS = 32  # bit position in a slot of the second of its last change, which is 0 in a new file
_MASK63 = (1 << 63) - 1  # change counters are stored in SQLite, whose integers are signed
_MOST_KNOWN = 50_000  # counters in memory
_SLOT = struct.Struct("<Q")
_GENERATION_AT = 16  # offset of the number that is written after every change
_START_AT = 24  # offset of the number that all change counters of a file start from
STATISTICS_AT = 64  # offset of the statistics of all processes: see `counters`


class ChangeTable(SharedSlots):
    """One file of change counters.

    A slot holds the second of its last change above 32 random bits, or zeros. All counters of a file start from one
    random number, so that metadata stored with an earlier file is invalid. The generation differs after every change.
    """

    magic = b"cfsmark2"

    def __init__(self, path: str | None, temp: str) -> None:
        super().__init__(path, temp, _N_SLOTS, header=_SLOT.pack(0) + _SLOT.pack(secrets.randbits(32)))

    @classmethod
    def may_have(cls, n_slots: int) -> bool:
        return n_slots == _N_SLOTS

    def generation(self) -> bytes:
        return self.read(8, _GENERATION_AT)

    def slot(self, number: int) -> int:
        return self.number_at(HEADER_SIZE + 8 * number)

    def change(self, slots: Iterable[int], value: int) -> None:
        """Write `value` to the slots in order, and then a new generation. Raises OSError."""
        number = _SLOT.pack(value)
        self.write((HEADER_SIZE + 8 * slot, number) for slot in slots)
        # Last: a process that reads the new generation reads the new slots too.
        self.write([(_GENERATION_AT, secrets.token_bytes(8))])

    def number_at(self, offset: int) -> int:
        number: int = _SLOT.unpack(self.read(8, offset))[0]
        return number


_Known = tuple[bytes, dict[tuple[int, ...], int], list[dict[int, int]]]


class ChangeCounters:
    """The change counters in one table, or in several: then a change in any of them changes the counter.

    `paths` are those of the tables that are files. `is_private`: there are none, so other processes see no change.
    Reading raises OSError if a table cannot be read.
    """

    def __init__(self, *tables: ChangeTable) -> None:
        self.tables = tables
        self._main, self._further = tables[0], tables[1:]
        # A generation, and since it was current, the counters and what was read of each table, by offset. Replaced as a
        # whole: a thread that is late adds what it read to the old one.
        self._known: _Known = b"", {}, [{} for _ in tables]
        self.paths = [table.path for table in tables if table.path is not None and not table.is_private]
        self.is_private = not self.paths

    def at(self, slots: tuple[int, ...]) -> int:
        """Return the current counter made of `slots`: 63 bits."""
        main = self._main
        generation = os.pread(main.fd, 8, _GENERATION_AT) if main.fd >= 0 else b""
        if len(generation) != 8:
            generation = main.generation()  # memory, or a truncated file
        for table in self._further:
            generation += table.generation()
        known = self._known
        if known[0] != generation or len(known[1]) > _MOST_KNOWN:
            known = self._known = generation, {}, [{} for _ in self.tables]
        found = known[1].get(slots)
        if found is None:
            found = known[1][slots] = self._read(slots, known[2])
        return found

    def _read(self, slots: tuple[int, ...], numbers: Sequence[dict[int, int]]) -> int:
        """Return the counter made of `slots`; `numbers` has what was read of each table, by offset."""
        counter, offsets = 0, [_START_AT, *(HEADER_SIZE + 8 * slot for slot in slots)]
        for table, known in zip(self.tables, numbers, strict=True):
            for offset in offsets:
                if (number := known.get(offset)) is None:
                    number = known[offset] = table.number_at(offset)
                counter = 3 * counter ^ number  # times 3: equal numbers in two slots must not cancel out
        return counter & _MASK63

    def changed_at(self, slots: tuple[int, ...]) -> int:
        """Return the second of the last change of any of the slots by `clock`, rounded down; 0 without one."""
        return max(table.slot(slot) >> _SECONDS for table in self.tables for slot in slots)

    def epoch(self, identity: str) -> int:
        """Return a number that differs after any change at this origin."""
        return self._read((_epoch_slot(_crc(identity)),), [{} for _ in self.tables])

    def change(self, identity: str, paths: Iterable[str], *, tree: bool) -> Sequence[ChangeTable]:
        """Change the counters of `paths`, of the folders above them and of the listings of those folders.

        Return the tables that could not be written.

        The epoch changes first: a process that reads the old epoch has seen no part of this change. Every slot gets a
        number that it never had, without being read: if two processes write at once, either number is right.
        """
        base, paths = _crc(identity), list(paths)
        slots = [_epoch_slot(base)]
        if tree:
            slots += [_tree_slot(path, base) for path in paths]
        return self._change(slots + [_slot(name, base) for name in _names_touched(paths)])

    def change_alone(
        self, identity: str, paths: Iterable[str], folders: Iterable[str]
    ) -> Sequence[ChangeTable]:
        """Change the counters of `paths`, of the listings that contain them, and of everything below `folders`.

        For changes that the origin reports: there, a changed file does not change the folders above it. Return the
        tables that could not be written.
        """
        base = _crc(identity)
        slots = [_epoch_slot(base)]
        for path in paths:
            slots += [_slot(path, base), _slot(path.rpartition("/")[0] + "/", base)]
        return self._change(slots + [_tree_slot(folder, base) for folder in folders])

    def _change(self, slots: Sequence[int]) -> Sequence[ChangeTable]:
        # The clock of metadata: the times of metadata are compared with this one.
        value = (int(clock.now()) & MASK32) << _SECONDS | secrets.randbits(32)
        failed = []
        for table in self.tables:
            try:
                table.change(slots, value)
            except OSError:
                failed.append(table)
        return failed


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
def slots_of(identity: str, path: str) -> tuple[int, ...]:
    """Return the slots that make up the counter of `path`: its own, and those of the trees that contain it.

    They are the same in every process and forever. A folder's name with a "/" at its end means its listing.
    """
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
