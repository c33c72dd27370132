"""The files of a shared folder that a process knows, with the pieces in them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from cachedfs.shared.piece import PlacedPiece

_MOST = 1_000_000  # pieces, each some hundred bytes of memory; what is beyond is asked of the origin


class KnownPieces:
    """The pieces of object versions, by their keys. Safe from any thread."""

    def __init__(self, most: float = _MOST) -> None:
        self._by_key: dict[str, tuple[PlacedPiece, ...]] = {}
        self._by_file: dict[str, list[str]] = {}  # the keys of what is in a file
        self.bad: set[str] = set()  # files that are not what they should be
        self._lock = threading.Lock()  # of changes
        self._n, self._most = 0, most

    def add(self, file: str, pieces: Iterable[PlacedPiece]) -> None:
        """Add the pieces of a file, unless it is known."""
        with self._lock:
            if file in self._by_file:
                return
            keys = self._by_file[file] = []
            for placed in pieces if self._n < self._most else ():
                key = placed.piece.key
                self._by_key[key] = (*self._by_key.get(key, ()), placed)
                keys.append(key)
            self._n += len(keys)

    def remove(self, file: str) -> None:
        """Remove the pieces of a file that is gone, or cannot be used."""
        with self._lock:
            keys = self._by_file.pop(file, [])
            for key in set(keys):
                self._by_key[key] = tuple(each for each in self._by_key[key] if each.file != file)
                if not self._by_key[key]:
                    del self._by_key[key]
            self._n -= len(keys)

    def find(self, key: str, position: int) -> PlacedPiece | None:
        """Return the piece of an object version that has the byte at `position`, and the most bytes after it."""
        found = [each for each in self._by_key.get(key, ()) if each.piece.start <= position < each.piece.stop]
        return max(found, key=lambda each: each.piece.stop, default=None)

    def has(self, key: str) -> bool:
        """Return whether a piece of an object version is known."""
        return key in self._by_key

    def in_file(self, file: str) -> Iterator[PlacedPiece]:
        """Yield the known pieces of a file, in its order."""
        for key in dict.fromkeys(self._by_file.get(file, ())):
            yield from (each for each in self._by_key.get(key, ()) if each.file == file)

    def files(self, folder: str) -> set[str]:
        """Return the known files in a subfolder, or all of them for ""."""
        return {file for file in list(self._by_file) if file.startswith(f"{folder}/" if folder else "")}
