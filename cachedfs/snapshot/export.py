"""Export: write the bundles of cached blocks, then the metadata, then the manifest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

from cachedfs.cache.block_file import BadBlock
from cachedfs.common.blocks import block_range
from cachedfs.common.types import Exported, ObjectInfo
from cachedfs.errors import CachedFSError, CacheError
from cachedfs.fetch.metadata_cache import folder_of, key_of
from cachedfs.read.reader import Reader
from cachedfs.snapshot import manifest
from cachedfs.snapshot.archive import HEADER, BadBundle, BundleEntry, BundleLayout, cut, framed, layout_of
from cachedfs.snapshot.exported_metadata import told_of
from cachedfs.snapshot.manifest import ExportFolder

__all__ = ["Export"]

logger = logging.getLogger("cachedfs.snapshot")

AT_ONCE = 4  # bundles written and sent at a time; each takes a file in the temporary folder
TRIES = 3  # attempts for a bundle whose blocks are evicted while it is written


class _Gone(Exception):
    """A block of a bundle is no longer cached."""


class Export:
    """Export the cached blocks of some objects of one source to a folder of another source.

    `reader` reads the exported source, and `there` writes `folder`. `advance` is called with the bytes of
    blocks as they are sent, `expect` with their total.
    """

    def __init__(
        self,
        reader: Reader,
        there: Reader,
        folder: str,
        *,
        advance: Callable[[int], object],
        expect: Callable[[int], object],
    ) -> None:
        self._reader, self._source = reader, reader.source
        self._there, self._folder = there, ExportFolder(there.source, folder)
        self._advance, self._expect = advance, expect

    async def run(self, roots: Sequence[str]) -> Exported:
        """Export what is cached at and below `roots`. Runs on the runtime's event loop.

        Bundles that are in the folder already are not sent again. Raises CacheError if nothing is cached, or
        if the folder has a manifest that is not of an export of this origin; also raises the errors of the
        target. After an error, the previous export is intact, and another run continues.
        """
        made_at = time.time()
        await self._know_folders(roots)
        paths, entries = await asyncio.to_thread(self._entries, roots)
        if not entries:
            raise CacheError(
                "nothing is cached of "
                + ", ".join(self._source.url(root) for root in roots)
                + ", so nothing was sent"
            )
        facts = await asyncio.to_thread(lambda: b"".join(framed(told_of(self._source, roots, paths))))
        there = await self._names_there()
        await self._make_folder()
        gate = asyncio.Semaphore(AT_ONCE)
        bundles = list(cut(entries))
        self._expect(sum(entry.size for entry in entries))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._send(bundle, there, gate)) for bundle in bundles]
        except* Exception as failures:  # report one failure
            raise failures.exceptions[0] from None
        sent = [task.result() for task in tasks]
        layouts = [layout for layout, _ in sent if layout.entries]
        name = f"facts-{os.urandom(8).hex()}"
        await self._put(name, facts)
        made = manifest.Manifest(
            identity=self._source.identity,
            block_size=self._source.config.block_size,
            made_at=made_at,
            facts=name,
            facts_size=len(facts),
            bundles=tuple(
                manifest.Bundle(layout.name, layout.size, layout.index_at, len(layout.entries))
                for layout in layouts
            ),
        )
        # Until this is written, the previous export is intact.
        await self._put_whole(manifest.NAME, made.encode())
        await self._remove(set(there) - {name, *(layout.name for layout in layouts)})
        return Exported(
            objects=len({entry.key.path for layout in layouts for entry in layout.entries}),
            blocks=sum(len(layout.entries) for layout in layouts),
            bytes=sum(layout.data for layout in layouts),
            sent=sum(layout.size for layout, is_new in sent if is_new and layout.entries),
            bundles=len(layouts),
        )

    # Collect blocks.

    async def _know_folders(self, roots: Iterable[str]) -> None:
        """Look up the parent folders, so that change feeds cover what is in them.

        Writing an export next to them may have made their metadata invalid.
        """
        if self._source.config.offline or not self._source.origin("").by_parent:
            return
        for folder in sorted({folder for root in roots for folder in _above(root)}):
            with contextlib.suppress(CachedFSError):  # then the import has to revalidate its contents
                if self._source.last_known(folder) is None:
                    await self._reader.resolver.know(folder)

    def _entries(self, roots: Iterable[str]) -> tuple[list[str], list[BundleEntry]]:
        """Return the paths of objects with cached blocks, and these blocks, both ordered by path."""
        cache, config = self._source.runtime.cache, self._source.config
        entries: list[BundleEntry] = []
        paths: list[str] = []
        below = {path for root in roots for path in cache.paths_below(self._source.identity, root)}
        for path in sorted(below):
            # The last known version counts even if it may be stale: blocks of an old version do no harm.
            record = cache.metadata.lookup(self._source.identity, path)
            key = None if record is None else key_of(record.info, self._source.identity, config.block_size)
            if record is None or record.info is None or key is None:
                continue
            size = record.info.size or 0
            n_before = len(entries)
            for index in range(-(-size // config.block_size)):
                if cache.has(key, index):
                    data = block_range(index, config.block_size, size).size
                    entries.append(BundleEntry(key, index, cache.size_on_disk(key, data)))
            if len(entries) > n_before:
                paths.append(path)
        return paths, entries

    async def _names_there(self) -> dict[str, int | None]:
        """Return name and size of each file of an export in the folder, finished or not.

        Raises CacheError as `_check` does.
        """
        infos = await self._folder.infos()
        if (info := infos.get(manifest.NAME)) is not None:
            await self._check(info)
        return {name: info.size for name, info in infos.items() if manifest.is_ours(name)}

    async def _check(self, info: ObjectInfo) -> None:
        """Raise CacheError if the folder's manifest is not of an export of this origin."""
        url = self._folder.url(manifest.NAME)
        try:
            whose = (await self._folder.manifest(info)).identity
        except BadBundle as error:
            raise CacheError(
                f"{url}: {error}; nothing was sent: choose another folder, or remove it"
            ) from error
        if whose != self._source.identity:
            raise CacheError(
                f"{url} is of an export from {whose}, and this is from {self._source.identity}; nothing was sent: choose another "
                "folder, or remove it"
            )

    async def _make_folder(self) -> None:
        if self._there.source.protocol not in ("gs", "gcs"):  # in GCS, a folder is only a part of names
            path = self._folder.path
            await self._there.write([path], "makedirs", path, exist_ok=True)

    # Send.

    async def _send(
        self, entries: Sequence[BundleEntry], there: dict[str, int | None], gate: asyncio.Semaphore
    ) -> tuple[BundleLayout, bool]:
        """Send a bundle unless it is there; return its layout, and whether it was sent.

        Blocks that are no longer cached are left out.
        """
        async with gate:
            for _ in range(TRIES):
                layout = await asyncio.to_thread(layout_of, entries)
                if there.get(layout.name) == layout.size:
                    self._advance(layout.data)
                    return layout, False
                try:
                    if layout.entries:
                        await self._make_and_send(layout)
                    return layout, True
                except _Gone:
                    cache = self._source.runtime.cache
                    entries = [entry for entry in entries if cache.has(entry.key, entry.number)]
            raise CacheError(
                "blocks are evicted faster than they are sent: raise cache_size, or export less at once"
            )

    async def _make_and_send(self, layout: BundleLayout) -> None:
        """Write a bundle to a temporary file and send it.

        Sent while it is read, it could be a partial object after an interrupt.
        """
        with contextlib.ExitStack() as files:
            try:
                file = files.enter_context(tempfile.NamedTemporaryFile(prefix="cachedfs-"))
                await asyncio.to_thread(self._write, layout, file)
            except OSError as error:
                raise CacheError(
                    f"a bundle of {layout.size:,} bytes cannot be made in the temporary folder {tempfile.tempdir}: {error}; "
                    "set TMPDIR to a folder that has room"
                ) from error
            await self._put_file(layout.name, file.name)
        self._advance(layout.data)

    def _write(self, layout: BundleLayout, file: IO[bytes]) -> None:
        is_whole = True
        file.write(HEADER)
        for entry in layout.entries:
            packed = self._packed(entry)
            if packed is None:  # others may be damaged as well: find and drop them all
                is_whole = False
            elif is_whole:
                file.write(packed)
        if not is_whole:
            raise _Gone
        file.write(layout.tail)
        file.flush()

    def _packed(self, entry: BundleEntry) -> bytes | None:
        """Return a block in the format of its file; None if it is not cached. A damaged block is dropped."""
        cache = self._source.runtime.cache
        try:
            packed = cache.packed(entry.key, entry.number)
        except BadBlock:
            return None
        if packed is not None and len(packed) != entry.size:
            cache.refuse(entry.key, entry.number)
            return None
        return packed

    async def _put(self, name: str, data: bytes) -> None:
        path = f"{self._folder.path}/{name}"
        await self._there.write([path], "pipe_file", path, data)

    async def _put_whole(self, name: str, data: bytes) -> None:
        """Write a file like `_put`, but atomically also at a local target. Object stores always do so."""
        if self._there.source.protocol not in ("file", "local"):
            await self._put(name, data)
            return
        path, part = f"{self._folder.path}/{name}", f"{self._folder.path}/{name}.part"
        await self._put(f"{name}.part", data)
        await self._there.write([path, part], "mv", part, path)

    async def _put_file(self, name: str, local: str) -> None:
        path = f"{self._folder.path}/{name}"
        await self._there.write([path], "put_file", local, path)

    async def _remove(self, names: Iterable[str]) -> None:
        """Remove files that the previous manifest named, and those of unfinished exports."""
        for name in sorted(names):
            path = f"{self._folder.path}/{name}"
            try:
                await self._there.write([path], "rm_file", path)
            except CachedFSError as error:
                logger.info("an old bundle stays: %s", error)


def _above(path: str) -> Iterator[str]:
    while path := folder_of(path):
        yield path
