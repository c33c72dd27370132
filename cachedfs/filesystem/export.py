"""Export: write what is cached to a shared cache in a folder, at an origin, or in a zip file."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cachedfs.cache.index.metadata_records import encode_info, is_within
from cachedfs.common.executor import each_in_threads
from cachedfs.common.version import Version, version_of
from cachedfs.core import write_through
from cachedfs.core.objects import Objects
from cachedfs.errors import CacheError
from cachedfs.filesystem.transfer import folder_at, is_local, is_zip, learn, span_of
from cachedfs.shared.gatherer import BlockGroup, Gatherer
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile, infos_in, rows_about
from cachedfs.shared.piece import key_of
from cachedfs.shared.shared_store import FilePart, KeptFile, SharedStore
from cachedfs.shared.shared_writer import put_file
from cachedfs.shared.zip_store import ZipWriter

MOST_BLOCKS = 20_000  # that are divided into files together
MOST_ROWS = 20_000  # of metadata in a file, or one listing


class Exported(NamedTuple):
    """Result of `fs.export_cache`: what of this cache is in the export now.

    objects, blocks: how many were exported. bytes: their total size. sent: bytes written, in files that the export lacked.
    bundles: how many files have the blocks and their metadata.
    """

    objects: int
    blocks: int
    bytes: int
    sent: int
    bundles: int


def export_to(objects: Objects, path: str, source: Objects, roots: Sequence[str], callback: Any) -> Exported:
    """Write what `source` has cached at and below `roots` to a folder or zip file of `objects`.

    Raises CacheError if nothing is cached. After an error, an earlier export is intact, and another run continues.
    """
    blocks = list(_cached_blocks(source, roots))
    if not blocks:
        urls = ", ".join(source.url(root) for root in roots)
        raise CacheError(f"no block of {urls} is cached, so nothing was exported")
    with _opened(objects, path) as store:
        return _export(store, source, roots, blocks, callback)


@contextlib.contextmanager
def _opened(objects: Objects, path: str) -> Iterator[SharedStore]:
    """Open a folder, or a zip file that is written anew, and is there at the end. Raises OSError."""
    if not is_zip(objects, path):
        yield folder_at(objects, path, is_read_only=False)
    elif is_local(objects):
        with ZipWriter(path) as store:
            yield store
    else:
        with tempfile.TemporaryDirectory(prefix="cachedfs-") as temporary:
            with ZipWriter(f"{temporary}/cache.zip") as store:
                yield store
            put = write_through.call(objects, [path], "put_file", f"{temporary}/cache.zip", path)
            objects.engine.run(put)


def _export(
    store: SharedStore,
    objects: Objects,
    roots: Sequence[str],
    blocks: Sequence[tuple[Version, int]],
    callback: Any,
) -> Exported:
    """Write blocks, and last their metadata: without it, nothing of an object is imported."""
    cache, identity = objects.engine.cache, objects.identity
    known, old = _survey(store, identity)

    def file_with(block: tuple[Version, int]) -> str | None:
        span = span_of(*block)
        placed = known.find(key_of(identity, block[0].info), span.start)
        return placed.file if placed is not None and placed.piece.stop >= span.stop else None

    def put(groups: list[BlockGroup]) -> int:
        written = put_file(store, cache, identity, groups, (), bad=known.bad)
        if written is not None:  # else they are damaged, or not cached any more
            known.add(*written)
        callback.relative_update(sum(group.size for group in groups))
        return sum(each.piece.stop - each.piece.start for each in written[1]) if written else 0

    missing = [block for block in blocks if file_with(block) is None]
    callback.set_size(sum(span_of(*block).size for block in missing))
    sent = sum(each_in_threads(put, _divided(missing)))
    there = {block: file for block in blocks if (file := file_with(block)) is not None}
    paths = list(dict.fromkeys(version.path for version, _ in there))
    names, named = set(there.values()), set[str]()
    for rows in _divided_rows(_rows(objects, roots, paths)):
        if (written := put_file(store, cache, identity, (), rows, bad=known.bad)) is not None:
            names.add(written[0])
            named |= {row[1] for row in rows if row[0] != "listing"}
    for name, end in old.items():
        infos = [info for info in infos_in(end.index().rows) if info.path not in named]
        if name not in names and not any(known.has(key_of(identity, info)) for info in infos):
            with contextlib.suppress(PermissionError):  # of another user
                store.remove(name)
    size = sum(span_of(*block).size for block in there)
    return Exported(objects=len(paths), blocks=len(there), bytes=size, sent=sent, bundles=len(names))


def _cached_blocks(objects: Objects, roots: Sequence[str]) -> Iterator[tuple[Version, int]]:
    """Yield the cached blocks at and below `roots`, ordered by path."""
    cache, identity = objects.engine.cache, objects.identity
    for path in sorted({path for root in roots for path in cache.paths_below(identity, root)}):
        # The last known version counts even if it may be stale: blocks of an old version do no harm.
        record = cache.metadata.lookup(identity, path)
        version = record and version_of(identity, record.info, objects.config.block_size)
        if version is not None:
            yield from (
                (version, index)
                for index in range(version.n_blocks)
                if cache.has(version, index, only_own=True)
            )


def _survey(store: SharedStore, identity: str) -> tuple[KnownPieces, dict[str, FilePart]]:
    """Return what a shared cache has, and the ends of the files in it with nothing but metadata of this origin."""
    known, old = KnownPieces(most=math.inf), dict[str, FilePart]()

    def look(file: KeptFile) -> None:
        with contextlib.suppress(DamagedFile, FileNotFoundError):
            if (end := learn(store, file, known)) is not None:
                index = end.index()
                for _ in infos_in(index.rows):  # are they valid?
                    pass
                if not index.pieces and index.identity == identity:
                    old[file.name] = end

    each_in_threads(look, store.files())
    return known, old


def _divided(blocks: Iterable[tuple[Version, int]]) -> Iterator[list[BlockGroup]]:
    """Divide blocks into files, as those who fill a shared cache do."""
    blocks = iter(blocks)
    while some := list(itertools.islice(blocks, MOST_BLOCKS)):
        gatherer = Gatherer()
        for version, index in some:
            gatherer.note(version, version.info, key_of(version.identity, version.info), index, 0.0)
        yield from gatherer.take(0.0, everything=True)


def _rows(objects: Objects, roots: Sequence[str], paths: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the metadata of objects, of the folders above them, and of all below `roots`.

    Of expired metadata, only the versions are used.
    """
    store, identity = objects.engine.cache.metadata, objects.identity
    yield from rows_about(
        store, identity, paths, lambda folder: any(is_within(folder, root) for root in roots), roots=roots,
        hides_queries=False, confirmed_until=objects.confirmed_until,
    )  # fmt: skip
    for path in paths:
        record = store.lookup(identity, path)
        if record is not None and record.info is not None and record.counter != store.counter(identity, path):
            yield ["version", path, encode_info(record.info)]


def _divided_rows(rows: Iterable[list[Any]]) -> Iterator[list[list[Any]]]:
    """Divide rows into files, a listing with its children in one."""
    some = list[list[Any]]()
    for row in rows:
        if len(some) >= MOST_ROWS and row[0] != "child":
            yield some
            some = []
        some.append(row)
    if some:
        yield some
