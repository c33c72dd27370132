"""Import: fetch the missing blocks of an export, check each of them, then store the metadata."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple

from cachedfs.cache.block_file import BadBlock, file_size, unpack
from cachedfs.common.clock import clock
from cachedfs.common.types import BlockKey, ObjectInfo, ObjectKey, Range
from cachedfs.core.polling import OVERDUE_S
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError, CacheError, ObjectChanged, ObjectNotFound, OriginUnavailable
from cachedfs.origins.base import Reply
from cachedfs.shared.metadata_rows import DamagedFile, MetadataImport, decoded_rows
from cachedfs.snapshot import manifest
from cachedfs.snapshot.archive import Bundle, BundleEntry, entries_of, runs
from cachedfs.snapshot.exported_metadata import age_kept, name_of
from cachedfs.snapshot.manifest import ExportFolder, Manifest, gathered

__all__ = ["Import", "Imported"]

logger = logging.getLogger("cachedfs.snapshot")

AT_ONCE = 8  # requests; more were no faster, and each takes a few MiB of memory
BUNDLES_AT_ONCE = 4
BATCH = 8 << 20  # bytes of blocks stored in one transaction
MAX_IN_BATCH = 512  # number of blocks stored in one transaction
MAX_INDEX_BYTES = 256 << 20  # bytes of indexes in memory; others are read twice
MAX_IN_MEMORY = 16 << 20  # bytes of a metadata file that needs no temporary file


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


class Import:
    """Import the export in a folder of `there` into the cache that `there` uses.

    `identity` is the only origin and account accepted; None accepts any. `callback` is one of fsspec, and counts the
    bytes of the export that are processed.
    """

    def __init__(self, there: Reader, folder: str, *, identity: str | None, callback: Any) -> None:
        self._engine, self._config = there.objects.engine, there.objects.config
        self._cache = self._engine.cache
        self._folder = ExportFolder(there.objects, folder)
        self._accepted = identity
        self._identity = ""  # of the export
        self._callback = callback
        self._requests = asyncio.Semaphore(AT_ONCE)
        self._bundles = asyncio.Semaphore(BUNDLES_AT_ONCE)
        self._indexes: dict[str, bytes] = {}  # of bundles that are still to be imported
        self._space = self._index_bytes = 0
        self._stored: list[tuple[BlockKey, int]] = []  # each with its bytes
        self._n_cached = self._n_left = 0
        self._bad: dict[str, str] = {}  # message by name of the object

    async def run(self) -> Imported:
        """Import what is missing. Runs on the engine's event loop.

        Raises ObjectNotFound if there is no export, OriginUnavailable if its manifest is damaged, ValueError if it has
        another origin or block size, and CacheError if blocks cannot be stored.
        """
        infos = await self._folder.infos()
        manifest_ = await self._manifest(infos.get(manifest.NAME))
        self._identity = manifest_.identity
        self._space = await asyncio.to_thread(self._cache.room, self._config.bounds)
        self._callback.set_size(sum(bundle.size for bundle in manifest_.bundles))
        await gathered(self._reserve(bundle, infos.get(bundle.name)) for bundle in manifest_.bundles)
        complete = [bundle for bundle in manifest_.bundles if bundle.name not in self._bad]
        await gathered(self._import_bundle(bundle, infos[bundle.name]) for bundle in complete)
        n_records = await self._import_metadata(manifest_, infos.get(manifest_.metadata))
        stored_sizes = await asyncio.to_thread(
            lambda: [size for key, size in self._stored if self._cache.has(key.object, key.index)]
        )
        return Imported(
            blocks=len(stored_sizes),
            bytes=sum(stored_sizes),
            here=self._n_cached,
            facts=n_records,
            left=self._n_left + len(self._stored) - len(stored_sizes),
            bad=tuple(self._bad.values()),
        )

    async def _manifest(self, info: ObjectInfo | None) -> Manifest:
        """Return the manifest. Raises ValueError if no read would find the blocks of the export."""
        url, folder = self._folder.url(manifest.NAME), self._folder.url()
        if info is None:
            raise ObjectNotFound(f"{url}: no such object, so there is no complete export: run export again")
        try:
            manifest_ = await self._folder.manifest(info)
        except DamagedFile as error:
            raise OriginUnavailable(f"{url}: {error}; remove the folder, and run export again") from error
        if self._accepted not in (None, manifest_.identity):
            raise ValueError(
                f"{folder} was exported from {manifest_.identity}, but this filesystem reads {self._accepted}: open it with the options, "
                "and as the account, that it was exported with"
            )
        if manifest_.block_size != self._config.block_size:
            raise ValueError(
                f"{folder} has blocks of {manifest_.block_size} bytes: give block_size={manifest_.block_size} to read them"
            )
        return manifest_

    @contextlib.contextmanager
    def _recording_errors(self, name: str, part: str = "") -> Iterator[None]:
        """Record an error of a file of the export, or of a part of it, and go on without it."""
        try:
            yield
        except (BadBlock, DamagedFile, ObjectChanged, ObjectNotFound) as error:
            text = f"{self._folder.url(name)}: {part}{error}"
            if self._bad.setdefault(name, text) is text:
                logger.warning(
                    "%s; skipped. Import again; if that does not help, remove it and export again", text
                )

    # Import blocks.

    async def _reserve(self, bundle: Bundle, info: ObjectInfo | None) -> None:
        """Reserve room for the cached blocks of a bundle: otherwise fetched blocks evict them."""
        async with self._bundles:
            with self._recording_errors(bundle.name):
                if info is None or info.size != bundle.size:
                    size = "is not there" if info is None else f"has {info.size} bytes, not {bundle.size}"
                    raise DamagedFile(f"it {size}")
                self._space -= sum(
                    entry.size for entry, is_cached in await self._entries_of(bundle, info) if is_cached
                )

    async def _entries_of(self, bundle: Bundle, info: ObjectInfo) -> list[tuple[BundleEntry, bool]]:
        """Return the entries of a bundle, and for each whether it is cached. Raises DamagedFile.

        The index is kept for the second call, but encoded: all entries at once would take too much memory.
        """
        index = self._indexes.pop(bundle.name, b"")
        if not index:
            async with self._requests:
                index = await self._folder.bytes_of(info, Range(bundle.index_at, bundle.size))
            self._index_bytes += len(index)
            if self._index_bytes <= MAX_INDEX_BYTES:
                self._indexes[bundle.name] = index

        def look() -> list[tuple[BundleEntry, bool]]:
            entries = entries_of(bundle, index, self._identity, self._config.block_size)
            return [(entry, self._cache.has(entry.key, entry.number)) for entry in entries]

        return await asyncio.to_thread(look)

    async def _import_bundle(self, bundle: Bundle, info: ObjectInfo) -> None:
        """Import the missing blocks of one bundle, as long as there is room. Invalid blocks are left out."""
        async with self._bundles, self._import_lock(bundle.name):
            with self._recording_errors(bundle.name):
                ranges = list(runs(self._select(await self._entries_of(bundle, info))))
                self._callback.relative_update(bundle.size - sum(span.size for span, _ in ranges))
                await gathered(self._run(bundle.name, info, span, inside) for span, inside in ranges)

    @contextlib.asynccontextmanager
    async def _import_lock(self, name: str) -> AsyncIterator[None]:
        """Let two simultaneous imports fetch each bundle once; go on if the other one takes long, as it may be stopped."""
        lock = ObjectKey(self._identity, name, "who imports it?", 0).hash64(0)
        is_ours = await self._engine.locked(lock, within_s=OVERDUE_S)
        try:
            yield
        finally:
            if is_ours:
                self._cache.locks.release(lock)

    def _select(self, found: Iterable[tuple[BundleEntry, bool]]) -> Iterator[tuple[BundleEntry, bool]]:
        """Yield for each entry whether to fetch it: if it is missing, and there is room for it."""
        for entry, is_cached in found:
            is_wanted = not is_cached and entry.size <= self._space
            self._space -= is_wanted * entry.size
            self._n_cached += is_cached
            self._n_left += not is_cached and not is_wanted
            yield entry, is_wanted

    async def _run(
        self, name: str, info: ObjectInfo, span: Range, inside: Iterable[tuple[int, BundleEntry]]
    ) -> None:
        """Fetch a range of a bundle and store its blocks."""
        async with self._requests:
            with self._recording_errors(name):
                async with self._folder.reading(info, span) as reply:
                    await self._store_all(name, span.start, deque(inside), reply)

    async def _store_all(
        self, name: str, at: int, inside: deque[tuple[int, BundleEntry]], reply: Reply
    ) -> None:
        """Store blocks as they arrive. `at` is the offset of the first byte of the reply."""
        batch: list[tuple[BlockKey, memoryview]] = []
        buffer, n_bytes = bytearray(), 0
        async for piece in reply.body:
            buffer += piece
            self._callback.relative_update(len(piece))
            while inside and at + len(buffer) >= inside[0][0] + inside[0][1].size:
                offset, entry = inside.popleft()
                encoded = bytes(buffer[offset - at : offset - at + entry.size])
                del buffer[: offset - at + entry.size]
                at = offset + entry.size
                with self._recording_errors(name, f"block {entry.number} of {entry.key.path}: "):
                    key, data = unpack(encoded)
                    if (key.object, key.index) != (entry.key, entry.number):
                        raise BadBlock("it is another one than the index says")
                    batch.append((key, data))
                    n_bytes += entry.size
                if n_bytes >= BATCH or len(batch) == MAX_IN_BATCH:
                    await self._store(batch)
                    batch, n_bytes = [], 0
        await self._store(batch)

    async def _store(self, batch: list[tuple[BlockKey, memoryview]]) -> None:
        if batch:
            await asyncio.to_thread(self._cache.put, batch, self._config.bounds)
            self._stored += [(key, file_size(key.object, len(data))) for key, data in batch]

    # Import metadata.

    async def _import_metadata(self, manifest_: Manifest, info: ObjectInfo | None) -> int:
        """Import the metadata, and return of how many objects.

        It follows the blocks, because metadata of objects without blocks may be dropped. It is used only after all of
        its bytes were checked, so it goes to a temporary file first.
        """
        metadata = MetadataImport(
            self._cache.metadata,
            manifest_.identity,
            lambda checked_at: age_kept(checked_at, made_at=manifest_.made_at, now=clock.now()),
        )
        digest = hashlib.blake2b(digest_size=16)
        try:
            with (
                self._recording_errors(manifest_.metadata),
                tempfile.SpooledTemporaryFile(MAX_IN_MEMORY) as file,
            ):
                if info is None or info.size != manifest_.metadata_size:
                    raise DamagedFile("it is missing or incomplete")
                async with self._folder.reading(info, Range(0, manifest_.metadata_size)) as reply:
                    async for piece in reply.body:
                        digest.update(piece)
                        file.write(piece)
                if name_of(digest) != manifest_.metadata:
                    raise DamagedFile("it is damaged")
                file.seek(0)
                await asyncio.to_thread(metadata.take, decoded_rows(file))
        except OSError as error:
            if isinstance(error, CachedFSError) and not isinstance(error, CacheError):
                raise  # of the origin
            self._bad[manifest_.metadata] = text = f"the metadata of the objects is not stored: {error}"
            logger.warning("%s", text)
        return metadata.n_records
