"""Import: load a shared cache in a folder, at an origin, or in a zip file into the local cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from cachedfs.cache.block_file import file_size
from cachedfs.common.clock import clock
from cachedfs.common.executor import each_in_threads
from cachedfs.common.types import BlockKey, ObjectInfo, ObjectKey
from cachedfs.common.version import Version, version_of
from cachedfs.config import Config
from cachedfs.core.engine import Engine
from cachedfs.core.objects import Objects
from cachedfs.core.polling import OVERDUE_S
from cachedfs.errors import CacheError, ObjectChanged, ObjectNotFound, OriginUnavailable
from cachedfs.filesystem.transfer import folder_at, is_local, is_zip, learn, span_of
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile, MetadataImport, infos_in
from cachedfs.shared.piece import PlacedPiece, blocks_in, key_of
from cachedfs.shared.shared_store import BASE, FilePart, KeptFile, ReadableStore, StoredFile
from cachedfs.shared.zip_store import ZipReader

logger = logging.getLogger("cachedfs.shared")

LARGEST = 32 << 20  # bytes of a file that is read as a whole, and so is in memory
FEW = 4  # blocks that are read one by one, if they are less than half of their file
BATCH = 8 << 20  # bytes of blocks stored in one transaction
MAX_IN_BATCH = 512  # number of blocks stored in one transaction


class Imported(NamedTuple):
    """Result of `fs.import_cache`.

    blocks, bytes: imported blocks that are now in the cache, and their size. here: blocks that were cached before.
    facts: imported metadata entries of objects and folders. left: blocks that were not imported, because the cache has
    no space for them beside pinned blocks. bad: a message for each file of the export that is damaged and was skipped.
    """

    blocks: int
    bytes: int
    here: int
    facts: int
    left: int
    bad: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if everything in the export is now in the cache."""
        return not self.bad and not self.left


def import_from(objects: Objects, path: str, identity: str | None, callback: Any) -> Imported:
    """Import what was exported to a path of `objects`, into the cache that they use.

    `identity` is the only origin and account accepted; None accepts any. `callback` is one of fsspec, and counts the
    bytes that are read. Raises ObjectNotFound if there is no export, ValueError for one of another origin, and CacheError
    if blocks cannot be stored.
    """
    with _opened(objects, path) as store:
        url = objects.url(path)
        return _Import(store, url, objects.engine, objects.config, identity=identity, callback=callback).run()


@contextlib.contextmanager
def _opened(objects: Objects, path: str) -> Iterator[ReadableStore]:
    """Open a folder or a zip file, which comes to the temporary folder first if it is not here. Raises OSError."""
    if not is_zip(objects, path):
        yield folder_at(objects, path, is_read_only=True)
        return
    with tempfile.TemporaryDirectory(prefix="cachedfs-") as temporary:
        local = path
        if not is_local(objects):
            local = f"{temporary}/cache.zip"
            objects.engine.run(_download(objects, path, local))
        try:
            store = ZipReader(local)
        except FileNotFoundError as error:
            raise ObjectNotFound(f"{objects.url(path)}: no such file, so there is no export") from error
        except DamagedFile as error:
            raise OriginUnavailable(f"{objects.url(path)}: {error}; export again") from error
        with store:
            yield store


async def _download(objects: Objects, path: str, local: str) -> None:
    async with objects.origin(path).read(path, None, None) as reply:
        with open(local, "wb") as file:  # noqa: ASYNC230
            async for data in reply.body:
                file.write(data)


class _Wanted(NamedTuple):
    """A block to import, and where it is."""

    version: Version
    number: int
    placed: PlacedPiece


class _Import:
    """One import of a shared cache, named `where` in messages, into the cache of `engine`."""

    def __init__(
        self,
        store: ReadableStore,
        where: str,
        engine: Engine,
        config: Config,
        *,
        identity: str | None,
        callback: Any,
    ) -> None:
        self._store, self._where, self._engine, self._config = store, where, engine, config
        self._cache, self._accepted, self._callback = engine.cache, identity, callback
        self._known = KnownPieces(most=math.inf)
        self._with_metadata = list[tuple[float, str, FilePart]]()  # times, names, and ends of files
        self._stored = list[tuple[BlockKey, int]]()  # each with its bytes
        self._n_cached = 0
        self._bad = dict[str, str]()  # message by name of the file

    def run(self) -> Imported:
        """Import what is missing: first blocks, then metadata, as that of objects without blocks may be removed."""
        files = list(self._store.files())
        each_in_threads(self._look, files)
        versions = self._versions()
        wanted, n_left = self._chosen(files, versions)
        self._callback.set_size(sum(span_of(each.version, each.number).size for each in wanted))
        by_file = itertools.groupby(wanted, key=lambda each: each.placed.file)
        each_in_threads(self._fetch, [(name, list(some)) for name, some in by_file])
        n_records = sum(self._import_metadata(*each) for each in self._with_metadata)
        stored_sizes = [
            size for key, size in self._stored if self._cache.has(key.object, key.index, only_own=True)
        ]
        return Imported(
            blocks=len(stored_sizes),
            bytes=sum(stored_sizes),
            here=self._n_cached,
            facts=n_records,
            left=n_left + len(self._stored) - len(stored_sizes),
            bad=tuple(self._bad.values()),
        )

    @contextlib.contextmanager
    def _recording_errors(self, name: str, part: str = "") -> Iterator[None]:
        """Record an error of a file of the export, or of a part of it, and go on without it."""
        try:
            yield
        except (DamagedFile, FileNotFoundError, ObjectChanged) as error:
            text = f"{self._where}/{BASE}/{name}: {part}{error}"
            if self._bad.setdefault(name, text) is text:
                logger.warning(
                    "%s; skipped. Import again; if that does not help, remove it and export again", text
                )

    def _look(self, file: KeptFile) -> None:
        with self._recording_errors(file.name):
            if (end := learn(self._store, file, self._known)) is not None:
                self._with_metadata.append((end.index().made_at, file.name, end))

    def _versions(self) -> dict[str, Version]:
        """Return the latest version of each object, by its key. Files without metadata are forgotten."""
        latest, with_metadata, others = dict[tuple[str, str], ObjectInfo](), list[Any](), set[str]()
        for each in sorted(self._with_metadata, key=itemgetter(0, 1)):
            with self._recording_errors(each[1]):
                identity, _, _, rows = each[2].index()
                if self._accepted not in (None, identity):
                    others.add(identity)
                    continue
                n_before = len(with_metadata)
                for info in infos_in(rows):
                    with_metadata[n_before:] = [each]
                    latest[identity, info.path] = info
        self._with_metadata = with_metadata
        if not with_metadata and others:
            raise ValueError(
                f"{self._where} was exported from {others.pop()}, but this filesystem reads {self._accepted}: open it with "
                "the options, and as the account, that it was exported with"
            )
        if not with_metadata and not self._bad:
            raise ObjectNotFound(f"{self._where}: there is no complete export here: run export again")
        found = dict[str, Version]()
        for (identity, _), info in latest.items():
            if (version := version_of(identity, info, self._config.block_size)) is not None:
                found[key_of(identity, info)] = version
        return found

    # Blocks

    def _chosen(
        self, files: Iterable[KeptFile], versions: Mapping[str, Version]
    ) -> tuple[list[_Wanted], int]:
        """Return the missing blocks for which there is room, by file, and the number of the others."""
        space, seen = self._cache.room(self._config.bounds), set[tuple[str, int]]()
        missing = list[_Wanted]()
        for placed in (placed for file in files for placed in self._known.in_file(file.name)):
            if (version := versions.get(placed.piece.key)) is None:
                continue
            for index in blocks_in(placed.piece, version.size, version.block_size):
                if (version.digest, index) in seen:
                    continue
                seen.add((version.digest, index))
                if self._cache.has(version, index, only_own=True):
                    # Otherwise what is imported would evict it.
                    space -= file_size(version, span_of(version, index).size)
                    self._n_cached += 1
                else:
                    missing.append(_Wanted(version, index, placed))
        wanted = list[_Wanted]()
        for each in missing:
            size = file_size(each.version, span_of(each.version, each.number).size)
            if size <= space:
                space -= size
                wanted.append(each)
        return wanted, len(missing) - len(wanted)

    def _fetch(self, work: tuple[str, list[_Wanted]]) -> None:
        """Import the blocks of one file."""
        name, wanted = work
        with self._alone(name), self._recording_errors(name):
            missing = [
                each for each in wanted if not self._cache.has(each.version, each.number, only_own=True)
            ]
            self._n_cached += len(wanted) - len(missing)  # another import brought them
            if missing:
                file, n_bytes = self._store.open(name), sum(span_of(*each[:2]).size for each in missing)
                is_much = len(missing) > FEW or n_bytes > file.size // 2
                if is_much and file.size <= LARGEST:  # all of it, with its index, in one request
                    file = FilePart(file.part(0, file.size), 0, file.size, file.modified_at)
                self._store_blocks(name, file, missing)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Let two simultaneous imports fetch each file once; go on if the other one takes long, as it may be stopped."""
        lock = ObjectKey("", name, "who imports it?", 0).hash64(0)
        is_ours = self._engine.run(self._engine.take_lock(lock, within_s=OVERDUE_S))
        try:
            yield
        finally:
            if is_ours:
                self._cache.locks.release(lock)

    def _store_blocks(self, name: str, file: StoredFile, wanted: Iterable[_Wanted]) -> None:
        """Store those of the blocks whose bytes are right."""
        find = functools.cache(file.find)
        batch, n_bytes = list[tuple[BlockKey, bytes]](), 0
        for version, index, placed in wanted:
            span = span_of(version, index)
            with self._recording_errors(name, f"block {index} of {version.path}: "):
                batch.append((version.block(index), file.read(*find(placed), span.start, span.stop)))
            n_bytes += span.size
            if n_bytes >= BATCH or len(batch) == MAX_IN_BATCH:
                self._put(batch, n_bytes)
                batch, n_bytes = [], 0
        self._put(batch, n_bytes)

    def _put(self, batch: Sequence[tuple[BlockKey, bytes]], n_bytes: int) -> None:
        if batch:
            self._cache.put(batch, self._config.bounds, shared={key for key, _ in batch})
            self._stored += [(key, len(data)) for key, data in batch]
        self._callback.relative_update(n_bytes)

    # Metadata

    def _import_metadata(self, made_at: float, name: str, file: StoredFile) -> int:
        """Import the metadata in a file, and return of how many objects."""
        imported = None
        try:
            with self._recording_errors(name):
                index = file.index()
                imported = MetadataImport(
                    self._cache.metadata, index.identity, functools.partial(age_kept, made_at=made_at)
                )
                imported.take(index.rows)
        except CacheError as error:
            self._bad[name] = text = f"the metadata of the objects is not stored: {error}"
            logger.warning("%s", text)
        return imported.n_records if imported else 0


def age_kept(checked_at: float, *, made_at: float) -> float:
    """Return the local time of an imported answer, which keeps the age it had when it was exported.

    That age is `made_at - checked_at`. The answer never gets younger, even if the clock of the other machine is wrong.
    """
    now = clock.now()
    return min(checked_at, now, now - (made_at - checked_at))
