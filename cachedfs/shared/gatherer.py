"""Group fetched blocks into files of the shared cache, and choose when to write them. Without I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.shared.piece import LARGE

# Bytes of a file, about: parallel file systems, buckets and Google Drive suffer from many small ones.
FILE = 8 << 20
SETTLE_S = 2.0  # after this time without a further block, an incomplete group is written as it is
HURRY_S = 0.2  # the same if another node waits, and no request brings more of it
LONGEST_S = 60.0  # the longest wait for more small objects
MOST_GROUPS = 100_000  # waiting; what comes then is not shared
MOST_IN_FILE = 10_000  # groups of one file
IN_MEMORY = 32 << 20  # bytes of waiting blocks; what is beyond is read from the local cache
SMALL = 256 << 10  # bytes of a block that is kept in memory: a larger one is read as fast as it is copied


@dataclasses.dataclass
class BlockGroup:
    """The blocks of FILE aligned bytes of one version, by index: their bytes if they are in memory, else None.

    The last one came at `noted_at`.
    """

    version: ObjectKey
    info: ObjectInfo
    key: str
    number: int
    blocks: dict[int, Sequence[memoryview] | None] = dataclasses.field(default_factory=dict)
    noted_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the blocks, all but the last of the object counted as whole ones."""
        return min(len(self.blocks) * self.version.block_size, self.info.size or 0)

    @property
    def start(self) -> int:
        """The offset of the first block in the object, in bytes."""
        return min(self.blocks) * self.version.block_size

    @property
    def is_complete(self) -> bool:
        n, size = blocks_per_file(self.version), self.version.block_size
        n_blocks = -(-(self.info.size or 0) // size)
        return len(self.blocks) == min(n, n_blocks - self.number * n)


def blocks_per_file(version: ObjectKey) -> int:
    return max(1, FILE // version.block_size)


def runs_of(indexes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive numbers in a sorted sequence."""
    run: list[int] = []
    for index in indexes:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


class Gatherer:
    """The blocks that wait to be written. Use it with a lock; times are of any steady clock.

    A large part of an object gets a file of its own as soon as it is complete. Small objects wait until they fill a file,
    or until nothing more came for as long as this process has been reading, within SETTLE_S and LONGEST_S.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], BlockGroup] = {}
        self._began_at = self._last_at = 0.0  # of the first block ever, and of the last one
        self._n_bytes = 0  # in memory

    def __bool__(self) -> bool:
        return bool(self._groups)

    def note(
        self,
        version: ObjectKey,
        info: ObjectInfo,
        key: str,
        index: int,
        now: float,
        data: Sequence[memoryview] | None = None,
    ) -> None:
        """Add a block that was fetched and is in the local cache, perhaps with its bytes."""
        self._began_at, self._last_at = self._began_at or now, now
        number = index // blocks_per_file(version)
        group = self._groups.get((version.digest, number))
        if group is None:
            if len(self._groups) >= MOST_GROUPS:
                return
            group = self._groups[version.digest, number] = BlockGroup(version, info, key, number)
        group.noted_at = now
        if group.blocks.get(index) is None:
            size = sum([len(piece) for piece in data or ()])
            has_room = size <= SMALL and self._n_bytes + size <= IN_MEMORY
            group.blocks[index] = data if has_room else None
            self._n_bytes += size if has_room else 0

    def take(
        self,
        now: float,
        *,
        everything: bool = False,
        hurries: bool = False,
        is_coming: Callable[[BlockGroup], bool] = lambda group: False,
    ) -> list[list[BlockGroup]]:
        """Remove and return the groups to write now, by file; each file is of one origin.

        These are all groups if `everything` is set, else those that are complete or have settled. If another node waits
        (`hurries`), a group settles sooner, unless more of it `is_coming`.
        """
        is_quiet = hurries or now - self._last_at >= min(
            max(SETTLE_S, self._last_at - self._began_at), LONGEST_S
        )
        files, small = list[list[BlockGroup]](), dict[str, list[BlockGroup]]()
        for group in self._groups.values():
            settle_s = HURRY_S if hurries and not is_coming(group) else SETTLE_S
            if everything or group.is_complete or now - group.noted_at >= settle_s:
                if group.size >= LARGE:
                    files.append([group])
                else:
                    small.setdefault(group.version.identity, []).append(group)
        for groups in small.values():
            *full, rest = _cut(groups)
            files += [*full, rest] if rest and (everything or is_quiet) else full
        for file in files:
            for group in file:
                del self._groups[group.version.digest, group.number]
                self._n_bytes -= sum(len(piece) for data in group.blocks.values() for piece in data or ())
        return files


def _cut(groups: Sequence[BlockGroup]) -> Iterator[list[BlockGroup]]:
    """Split groups into files; the last one has less than FILE bytes, perhaps none."""
    file: list[BlockGroup] = []
    size = 0
    for group in groups:
        file.append(group)
        size += group.size
        if size >= FILE or len(file) >= MOST_IN_FILE:
            yield file
            file, size = [], 0
    yield file
