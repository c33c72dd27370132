"""Export: write the bundles of cached blocks, then the metadata, then the manifest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from cachedfs.cache.block_file import BadBlock, file_size
from cachedfs.common.blocks import block_range
from cachedfs.common.clock import clock
from cachedfs.core import write_through
from cachedfs.core.reader import Reader
from cachedfs.core.version import version_of
from cachedfs.errors import CachedFSError, CacheError
from cachedfs.shared.metadata_rows import DamagedFile, encoded_rows
from cachedfs.snapshot import archive, manifest
from cachedfs.snapshot.archive import BundleEntry
from cachedfs.snapshot.exported_metadata import name_of, rows_of
from cachedfs.snapshot.manifest import ExportFolder, gathered

__all__ = ["Export", "Exported"]

logger = logging.getLogger("cachedfs.snapshot")

AT_ONCE = 4  # bundles written and sent at a time; each takes a file in the temporary folder


class Exported(NamedTuple):
    """Result of `fs.export_cache`: the contents of the export.

    objects, blocks: how many were exported. bytes: their total size. sent: bytes uploaded, in bundle files that were
    not at the target yet. bundles: how many bundle files the export has.
    """

    objects: int
    blocks: int
    bytes: int
    sent: int
    bundles: int


class Export:
    """Export the cached blocks of some objects that `reader` reads to a folder that `there` writes.

    `callback` is one of fsspec, and counts the bytes of the blocks that are sent.
    """

    def __init__(self, reader: Reader, there: Reader, folder: str, *, callback: Any) -> None:
        self._objects, self._cache = reader.objects, reader.objects.engine.cache
        self._there, self._folder = there, ExportFolder(there.objects, folder)
        self._callback = callback
        self._bundles = asyncio.Semaphore(AT_ONCE)

    async def run(self, roots: Sequence[str]) -> Exported:
        """Export what is cached at and below `roots`. Runs on the engine's event loop.

        Bundles that are in the folder already are not sent again. Raises CacheError if nothing is cached, or if the
        folder has a manifest that is not of an export of this origin; also raises the errors of the target. After an
        error, the previous export is intact, and another run continues.
        """
        made_at = clock.now()
        entries = await asyncio.to_thread(lambda: list(self._entries(roots)))
        if not entries:
            urls = ", ".join(self._objects.url(root) for root in roots)
            raise CacheError(f"no block of {urls} is cached, so nothing was exported")
        if max(entry.size for entry in entries) > archive.MOST:
            raise CacheError(
                f"blocks of more than {archive.MOST:,} bytes cannot be exported: lower block_size"
            )
        paths = list(dict.fromkeys(entry.key.path for entry in entries))
        rows = await asyncio.to_thread(lambda: encoded_rows(rows_of(self._objects, roots, paths)))
        metadata = name_of(hashlib.blake2b(rows, digest_size=16))
        there = await self._names_there()
        if self._there.objects.protocol not in ("gs", "gcs"):  # in GCS, a folder is only a part of names
            await write_through.call(
                self._there.objects, [self._folder.path], "makedirs", self._folder.path, exist_ok=True
            )
        self._callback.set_size(sum(entry.size for entry in entries))
        sent = await gathered(self._send(group, there) for group in archive.cut(entries))
        if there.get(metadata) != len(rows):
            await self._write("pipe_file", metadata, rows)
        made = manifest.Manifest(
            identity=self._objects.identity,
            block_size=self._objects.config.block_size,
            made_at=made_at,
            metadata=metadata,
            metadata_size=len(rows),
            bundles=tuple(archive.bundle_of(group) for group, _ in sent if group),
        )
        # Until this is written, the previous export is intact.
        await self._write_whole(manifest.NAME, made.encode())
        await self._remove(set(there) - {metadata, *(bundle.name for bundle in made.bundles)})
        exported = [entry for group, _ in sent for entry in group]
        return Exported(
            objects=len({entry.key.path for entry in exported}),
            blocks=len(exported),
            bytes=sum(entry.size for entry in exported),
            sent=sum(size for _, size in sent),
            bundles=len(made.bundles),
        )

    # Collect blocks.

    def _entries(self, roots: Iterable[str]) -> Iterator[BundleEntry]:
        """Yield the cached blocks at and below `roots`, ordered by path."""
        identity, block_size = self._objects.identity, self._objects.config.block_size
        for path in sorted({path for root in roots for path in self._cache.paths_below(identity, root)}):
            # The last known version counts even if it may be stale: blocks of an old version do no harm.
            record = self._cache.metadata.lookup(identity, path)
            key = None if record is None else version_of(identity, record.info, block_size)
            if key is None:
                continue
            size = key.size
            for index in range(key.n_blocks):
                if self._cache.has(key, index):
                    data = block_range(index, block_size, size).size
                    yield BundleEntry(key, index, file_size(key, data))

    async def _names_there(self) -> dict[str, int | None]:
        """Return name and size of each file of an export in the folder, finished or not.

        Raises CacheError if the folder's manifest is not of an export of this origin.
        """
        infos = await self._folder.infos()
        if (info := infos.get(manifest.NAME)) is not None:
            url, ours = self._folder.url(manifest.NAME), self._objects.identity
            advice = "nothing was sent: choose another folder, or remove it"
            try:
                whose = (await self._folder.manifest(info)).identity
            except DamagedFile as error:
                raise CacheError(f"{url}: {error}; {advice}") from error
            if whose != ours:
                raise CacheError(f"{url} is of an export from {whose}, and this is from {ours}; {advice}")
        return {name: info.size for name, info in infos.items() if manifest.is_ours(name)}

    # Send.

    async def _send(
        self, entries: list[BundleEntry], there: dict[str, int | None]
    ) -> tuple[list[BundleEntry], int]:
        """Send a bundle unless it is there; return the blocks in it, and the bytes sent.

        Blocks that are damaged or no longer cached are left out. The bundle is written to a temporary file first: sent
        while it is read, it could be a partial object after an interrupt.
        """
        async with self._bundles:
            bundle, written, sent = archive.bundle_of(entries), entries, 0
            if there.get(bundle.name) != bundle.size:
                with contextlib.ExitStack() as files:
                    try:
                        file = files.enter_context(tempfile.NamedTemporaryFile(prefix="cachedfs-"))
                        written = await asyncio.to_thread(self._write_bundle, file, entries)
                    except OSError as error:
                        raise CacheError(
                            f"a bundle of {bundle.size:,} bytes cannot be made in the temporary folder "
                            f"{tempfile.tempdir}: {error}; set TMPDIR to a folder with more space"
                        ) from error
                    bundle = archive.bundle_of(written)
                    if written and there.get(bundle.name) != bundle.size:
                        await self._write("put_file", bundle.name, file.name)
                        sent = bundle.size
            self._callback.relative_update(sum(entry.size for entry in entries))
            return written, sent

    def _write_bundle(self, file: IO[bytes], entries: Iterable[BundleEntry]) -> list[BundleEntry]:
        """Write a bundle of those blocks that can be read; return them."""
        written: list[BundleEntry] = []

        def blocks() -> Iterator[tuple[BundleEntry, bytes]]:
            for entry in entries:
                with contextlib.suppress(BadBlock):
                    packed = self._cache.packed(entry.key, entry.number)
                    if packed is not None and len(packed) == entry.size:
                        written.append(entry)
                        yield entry, packed

        archive.write(file, blocks())
        file.flush()
        return written

    async def _write(self, method: str, name: str, data: bytes | str) -> None:
        """Write bytes (`pipe_file`) or a local file (`put_file`) to a name in the folder."""
        path = f"{self._folder.path}/{name}"
        args = (data, path) if method == "put_file" else (path, data)
        await write_through.call(self._there.objects, [path], method, *args)

    async def _write_whole(self, name: str, data: bytes) -> None:
        """Write bytes atomically also at a local target. Object stores always do so."""
        if self._there.objects.protocol not in ("file", "local"):
            await self._write("pipe_file", name, data)
            return
        path, part = f"{self._folder.path}/{name}", f"{self._folder.path}/{name}.part"
        await self._write("pipe_file", f"{name}.part", data)
        await write_through.call(self._there.objects, [path, part], "mv", part, path)

    async def _remove(self, names: Iterable[str]) -> None:
        """Remove files that the previous manifest named, and those of unfinished exports."""
        for name in sorted(names):
            path = f"{self._folder.path}/{name}"
            try:
                await write_through.call(self._there.objects, [path], "rm_file", path)
            except CachedFSError as error:
                logger.info("an old bundle was not removed: %s", error)
