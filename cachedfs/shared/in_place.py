"""Blocks of a shared folder on a local disk: they are read where they are, without a copy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from cachedfs.cache.block_file import PAGE, BlockTrailer, OpenBlock
from cachedfs.common.types import ObjectKey
from cachedfs.common.version import Version
from cachedfs.errors import BadBlock
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import PlacedPiece, shareable_key
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import OpenShared, SharedFolder

_AGAIN_S = 60.0  # delay before a file that could not be read is tried again


class _BlockOfPiece(OpenBlock):
    """A block in an open file with other blocks, which is closed with the last of them.

    Another user may change his file at any time: each read of it is checked.
    """

    __slots__ = ("_file",)

    def __init__(self, file: OpenShared, path: str, trailer: BlockTrailer, offset: int) -> None:
        super().__init__(file.fd, path, trailer, offset)
        self._file = file

    def close(self) -> None:
        pass

    def _check(self, page: int, data: memoryview) -> None:
        unchecked = self.unchecked
        super()._check(page, data)
        if not self._file.is_own:
            self.unchecked = unchecked


@functools.lru_cache(maxsize=1024)
def _key_of(version: Version, size: int, id: str | None) -> str | None:
    """Return the key of a version. Equal versions may have other sizes and ids, so `lru_cache` gets them too."""
    return shareable_key(version.identity, version.info)


class BlocksInPlace:
    """The known blocks of a shared cache, if it is in a folder on a local disk: see `BlocksBeside`.

    `reject` is called with the name of a file that cannot be used, and the error. `bytes_read` counts the opened blocks.
    """

    def __init__(
        self,
        place: SharedFolder | SharedBucket,
        known: KnownPieces,
        reject: Callable[[str, DamagedFile | OSError], None],
    ) -> None:
        self._place, self._known, self._reject = place, known, reject
        self._left_alone = dict[str, float]()  # files that could not be read, until when (monotonic)
        self.bytes_read = 0

    def has(self, key: ObjectKey, index: int) -> bool:
        return self._placed(key, index) is not None

    def open(self, key: ObjectKey, index: int) -> OpenBlock | None:
        if (placed := self._placed(key, index)) is None:
            return None
        try:
            file = self._place.open(placed.file)
            piece, offset = file.find(placed)
        except (DamagedFile, OSError) as error:
            self._exclude(placed.file, error)
            return None
        assert isinstance(file, OpenShared)
        start = index * key.block_size
        stop, skipped = min(start + key.block_size, piece.size), start - piece.start
        checksums = piece.checksums[skipped // PAGE : -(-(stop - piece.start) // PAGE)]
        trailer = BlockTrailer(stop - start, tuple(checksums), b"", is_shared=True)
        self.bytes_read += stop - start
        return _BlockOfPiece(file, f"{self._place.path}/{placed.file}", trailer, offset + skipped)

    def exclude(self, path: str, error: BadBlock | OSError) -> bool:
        folder, file = f"{self._place.path}/", path.removeprefix(f"{self._place.path}/")
        if not path.startswith(folder):
            return False
        self._exclude(file, DamagedFile(str(error)) if isinstance(error, BadBlock) else error)
        return True

    def remove_wrong(self, key: ObjectKey, index: int) -> None:
        placed = self._known_piece(key, index)
        if placed is not None:
            self._reject(placed.file, DamagedFile("its bytes are not those of the origin"))

    def close_deleted(self) -> None:
        self._place.close_deleted()

    def _exclude(self, file: str, error: DamagedFile | OSError) -> None:
        """Reject a damaged file. Leave one alone that cannot be read: what is in it is copied, or asked of the origin."""
        if isinstance(error, DamagedFile):
            self._reject(file, error)
            return
        self._left_alone[file] = time.monotonic() + _AGAIN_S

    def _placed(self, key: ObjectKey, index: int) -> PlacedPiece | None:
        """Return the piece that has all of a block, on pages of its own, if it may be read in place now."""
        placed = self._known_piece(key, index) if self._place.is_local and not self._place.is_off else None
        start = index * key.block_size
        if placed is None or (start - placed.piece.start) % PAGE:
            return None
        if self._left_alone and time.monotonic() < self._left_alone.get(placed.file, 0.0):
            return None
        assert isinstance(key, Version)
        return placed if min(start + key.block_size, key.size) <= placed.piece.stop else None

    def _known_piece(self, key: ObjectKey, index: int) -> PlacedPiece | None:
        name = _key_of(key, key.size, key.info.id) if isinstance(key, Version) else None
        return None if name is None else self._known.find(name, index * key.block_size)
