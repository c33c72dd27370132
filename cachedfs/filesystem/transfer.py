"""Helpers of export and import: open the folder of an export, and learn what is in it."""

from __future__ import annotations

import os

from cachedfs.common.blocks import block_range
from cachedfs.common.types import Range
from cachedfs.common.version import Version
from cachedfs.core.objects import Objects
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.origin_store import OriginStore
from cachedfs.shared.piece import Piece, PlacedPiece, range_in_name
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_store import FilePart, KeptFile, ReadableStore, SharedStore


def is_local(objects: Objects) -> bool:
    return objects.protocol in ("file", "local")


def is_zip(objects: Objects, path: str) -> bool:
    """Return whether a path means a zip file."""
    return path.endswith(".zip") and not (is_local(objects) and os.path.isdir(path))


def folder_at(objects: Objects, path: str, *, is_read_only: bool) -> SharedStore:
    """Return the shared cache in a folder. Raises OSError."""
    if not is_local(objects):
        return OriginStore(lambda: objects.origin(path), path, run=objects.engine.run)
    folder = SharedFolder(path, trust="anyone", is_read_only=is_read_only)
    if not is_read_only:
        os.makedirs(path, exist_ok=True)
        folder.check()
    return folder


def learn(store: ReadableStore, file: KeptFile, known: KnownPieces) -> FilePart | None:
    """Add the pieces of a file to the known ones, and return its end with the index; None if its name says enough."""
    if (found := range_in_name(file.name.rpartition("/")[2])) is not None:
        if file.size <= found[2] - found[1]:
            raise DamagedFile("it is shorter than its name says")
        known.add(file.name, [PlacedPiece(Piece(found[0], 0, *found[1:], ()), file.name, None)])
        return None
    end = store.open(file.name).end()
    known.add(file.name, [PlacedPiece(piece, file.name, offset) for piece, offset in end.index().pieces])
    return end


def span_of(version: Version, index: int) -> Range:
    return block_range(index, version.block_size, version.size)
