"""Helpers of export and import: open the folder of an export, and work in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from cachedfs.common.blocks import block_range
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.types import Range
from cachedfs.core.objects import Objects
from cachedfs.core.version import Version
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.origin_store import OriginStore
from cachedfs.shared.piece import Piece, PlacedPiece, range_in_name
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_store import FilePart, KeptFile, ReadableStore, SharedStore

T = TypeVar("T")
R = TypeVar("R")
THREADS = 8  # files read or written at a time; each takes some MiB of memory


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


def each_in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `work` with each item in threads, and return the results; the first error ends it."""
    pool = DaemonThreadPool(THREADS, "cachedfs-transfer")
    try:
        return [future.result() for future in [pool.submit(work, item) for item in items]]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
