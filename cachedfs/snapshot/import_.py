"""Import: fetch the missing blocks of an export, check each of them, then store the metadata."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from cachedfs.cache.block_file import BadBlock
from cachedfs.common.types import BlockKey, Imported, ObjectInfo, ObjectKey, Range
from cachedfs.config import Config
from cachedfs.errors import CacheError, ObjectChanged, ObjectNotFound, OriginUnavailable
from cachedfs.fetch.runtime import Runtime
from cachedfs.metadata.change_feed import WAIT_S, claim_of
from cachedfs.origins.base import Reply
from cachedfs.read.reader import Reader
from cachedfs.snapshot import manifest
from cachedfs.snapshot.archive import MOST_INDEX, BadBundle, BundleEntry, FrameReader, entries_of, runs
from cachedfs.snapshot.exported_metadata import MetadataImport
from cachedfs.snapshot.manifest import Bundle, ExportFolder, Manifest

__all__ = ["Import"]

T = TypeVar("T")

logger = logging.getLogger("cachedfs.snapshot")

AT_ONCE = 8  # requests; more were no faster, and each takes a few MiB of memory
BUNDLES_AT_ONCE = 4
BATCH = 8 << 20  # bytes of blocks stored in one transaction
MOST_IN_BATCH = 512  # number of blocks stored in one transaction


@dataclasses.dataclass
class _Opened:
    """A bundle whose index was read.

    The index stays encoded: the entries of all bundles at once would take too much memory.
    """

    bundle: Bundle
    info: ObjectInfo
    identity: str
    index: bytes
    here: bytes = b""  # one byte per block: whether it is cached
    size_here: int = 0  # bytes of the cached blocks


class Import:
    """Import the export in a folder of `there` into the cache of `runtime`.

    `identity` is the only origin and account accepted; None accepts any. `advance` is called with the bytes
    of the export that are processed, `expect` with their total.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        there: Reader,
        folder: str,
        *,
        identity: str | None,
        advance: Callable[[int], object],
        expect: Callable[[int], object],
    ) -> None:
        self._runtime, self._cache = runtime, runtime.cache
        self._block_size, self._bounds = config.block_size, config.bounds
        self._folder = ExportFolder(there.source, folder)
        self._identity = identity
        self._advance, self._expect = advance, expect
        self._requests = asyncio.Semaphore(AT_ONCE)
        self._bundles = asyncio.Semaphore(BUNDLES_AT_ONCE)
        self._room = 0
        self._stored: list[tuple[BlockKey, int]] = []  # each with its bytes
        self._here = self._left = 0
        self._bad: dict[str, str] = {}  # message by name of the object

    async def run(self) -> Imported:
        """Import what is missing. Runs on the runtime's event loop.

        Raises ObjectNotFound if there is no export, OriginUnavailable if its manifest is damaged, ValueError
        if it has another origin or block size, and CacheError if blocks cannot be stored.
        """
        infos = await self._folder.infos()
        made = await self._manifest(infos)
        self._check(made)
        self._room = await asyncio.to_thread(self._cache.room, self._bounds)
        self._expect(sum(bundle.size for bundle in made.bundles))
        try:
            opened = await self._all(
                self._open(bundle, infos.get(bundle.name), made.identity) for bundle in made.bundles
            )
            # Reserve room for cached blocks first: otherwise fetched blocks evict them.
            self._room -= sum(each.size_here for each in opened if each is not None)
            await self._all(self._take(each) for each in opened if each is not None)
        except* Exception as failures:  # report one failure
            raise _first(failures) from None
        n_facts = await self._adopt(made, infos.get(made.facts))
        kept = await asyncio.to_thread(
            lambda: [size for key, size in self._stored if self._cache.has(key.object, key.index)]
        )
        return Imported(
            blocks=len(kept),
            bytes=sum(kept),
            here=self._here,
            facts=n_facts,
            left=self._left + len(self._stored) - len(kept),
            bad=tuple(self._bad.values()),
        )

    # Check the manifest.

    async def _manifest(self, infos: dict[str, ObjectInfo]) -> Manifest:
        info, url = infos.get(manifest.NAME), self._folder.url(manifest.NAME)
        if info is None:
            raise ObjectNotFound(
                f"{url}: no such object, so that no export is there, or none that is whole: run export again"
            )
        try:
            return await self._folder.manifest(info)
        except BadBundle as error:
            raise OriginUnavailable(f"{url}: {error}; remove it, and run export again") from error

    def _check(self, made: Manifest) -> None:
        """Raise ValueError for blocks that no read would find."""
        url = self._folder.url()
        if self._identity not in (None, made.identity):
            raise ValueError(
                f"{url} was exported from {made.identity}, and this reads {self._identity}: open it with the options, and as "
                "the account, that it was exported with"
            )
        if made.block_size != self._block_size:
            raise ValueError(
                f"{url} has blocks of {made.block_size} bytes: give block_size={made.block_size} to read them"
            )

    # Import blocks.

    async def _all(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
        return [task.result() for task in tasks]

    async def _open(self, bundle: Bundle, info: ObjectInfo | None, identity: str) -> _Opened | None:
        """Read the index of a bundle. Record an error and return None if it contradicts the manifest."""
        try:
            if info is None or info.size != bundle.size:
                size = "is not there" if info is None else f"has {info.size} bytes, not {bundle.size}"
                raise BadBundle(f"it {size}")
            if bundle.size - bundle.index_at > MOST_INDEX:
                raise BadBundle("its index has an impossible length")
            async with self._requests:
                index = await self._folder.bytes_of(info, Range(bundle.index_at, bundle.size))
            opened = _Opened(bundle, info, identity, index)
            await asyncio.to_thread(self._look, opened)
            return opened
        except (BadBundle, ObjectChanged, ObjectNotFound) as error:
            self._note(bundle.name, error)
            return None

    def _look(self, opened: _Opened) -> list[BundleEntry]:
        """Find out which blocks of a bundle are cached, and return all its entries. Raises BadBundle."""
        index_at, block_size = opened.bundle.index_at, self._block_size
        entries = entries_of(opened.index, index_at=index_at, identity=opened.identity, block_size=block_size)
        if len(entries) != opened.bundle.blocks:
            raise BadBundle(f"it has {len(entries)} blocks, not {opened.bundle.blocks}")
        opened.here = bytes(self._cache.has(entry.key, entry.number) for entry in entries)
        opened.size_here = sum(
            entry.size for entry, is_here in zip(entries, opened.here, strict=True) if is_here
        )
        return entries

    def _note(self, name: str, error: Exception) -> None:
        text = f"{self._folder.url(name)}: {error}"
        if self._bad.setdefault(name, text) is text:
            logger.warning(
                "%s; what is wrong of it is not taken: import again, and where that helps not, remove it and export again",
                text,
            )

    async def _take(self, opened: _Opened) -> None:
        """Import the missing blocks of one bundle. Invalid blocks are recorded and left out."""
        bundle = opened.bundle
        fetch_lock = ObjectKey(opened.identity, bundle.name, "who imports it?", 0).hash64(0)
        async with self._bundles:
            await self._runtime.locked(fetch_lock)  # two simultaneous imports fetch each bundle once
            try:
                before = opened.here
                entries = await asyncio.to_thread(self._look, opened)
                wanted = self._wanted(entries, before, opened.here)
                asked = list(runs(entries, wanted))
                self._advance(bundle.size - sum(span.size for span, _ in asked))
                await self._all(self._run(bundle, opened.info, span, inside) for span, inside in asked)
            finally:
                self._cache.release_lock(fetch_lock)

    def _wanted(self, entries: Sequence[BundleEntry], before: bytes, now: bytes) -> list[bool]:
        """Return which blocks to fetch: the missing ones, as long as there is room for them.

        The room is what the cached blocks of the export leave. `before`: the blocks that were cached when the
        room was counted. `now`: the blocks that are cached now.
        """
        wanted = []
        for entry, was_here, is_here in zip(entries, before, now, strict=True):
            fits = bool(was_here) or entry.size <= self._room
            if not was_here and (is_here or fits):
                self._room -= entry.size
            self._here += is_here
            self._left += not is_here and not fits
            wanted.append(fits and not is_here)
        return wanted

    async def _run(
        self, bundle: Bundle, info: ObjectInfo, span: Range, inside: Sequence[tuple[int, BundleEntry]]
    ) -> None:
        """Fetch a range and store its blocks; record an error if the bundle changed or is gone."""
        async with self._requests:
            try:
                async with self._folder.reading(info, span) as reply:
                    await self._store_all(bundle, span, inside, reply)
            except (ObjectChanged, ObjectNotFound) as error:
                self._note(bundle.name, error)

    async def _store_all(
        self, bundle: Bundle, span: Range, inside: Sequence[tuple[int, BundleEntry]], pieces: Reply
    ) -> None:
        """Store blocks as they arrive."""
        batch: list[tuple[BlockKey, memoryview]] = []
        sizes: list[int] = []
        waiting, at = bytearray(), span.start
        coming = iter(inside)
        offset, entry = next(coming)
        is_over = False
        async for piece in pieces:
            waiting += piece
            self._advance(len(piece))
            while not is_over and at + len(waiting) >= offset + entry.size:
                begin = offset - at
                packed = bytes(waiting[begin : begin + entry.size])
                del waiting[: begin + entry.size]
                at = offset + entry.size
                if (block := self._unpacked(bundle, entry, packed)) is not None:
                    batch.append(block)
                    sizes.append(entry.size)
                if sum(sizes) >= BATCH or len(batch) == MOST_IN_BATCH:
                    await self._store(batch, sizes)
                    batch, sizes = [], []
                offset, entry = next(coming, (0, entry))
                is_over = offset == 0
        if batch:
            await self._store(batch, sizes)

    def _unpacked(
        self, bundle: Bundle, entry: BundleEntry, packed: bytes
    ) -> tuple[BlockKey, memoryview] | None:
        """Return a block if all its bytes are right and it is the one in the index; else record an error."""
        try:
            key, data = self._cache.unpacked(packed)
            if (key.object, key.index) != (entry.key, entry.number):
                raise BadBlock("it is another one than the index says")
        except BadBlock as error:
            self._note(bundle.name, BadBundle(f"block {entry.number} of {entry.key.path}: {error}"))
            return None
        return key, data

    async def _store(self, batch: list[tuple[BlockKey, memoryview]], sizes: list[int]) -> None:
        await asyncio.to_thread(self._cache.put, batch, self._bounds)
        self._stored += [(key, size) for (key, _), size in zip(batch, sizes, strict=True)]

    # Import metadata.

    async def _adopt(self, made: Manifest, info: ObjectInfo | None) -> int:
        """Import the metadata, and return of how many objects.

        It follows the blocks, because metadata of objects without blocks may be dropped.
        """
        adoption = MetadataImport(self._cache.metadata, made.identity, made.made_at)
        async with contextlib.AsyncExitStack() as locks:
            try:
                if info is None or info.size != made.facts_size:
                    raise BadBundle("it is not there, or not whole")
                unframer = FrameReader()
                async with self._folder.reading(info, Range(0, made.facts_size)) as reply:
                    async for piece in reply:
                        for rows in unframer.feed(piece):
                            await self._adopt_rows(adoption, rows, locks)
                if not unframer.is_over:
                    raise BadBundle("it is cut off")
                await asyncio.to_thread(adoption.end)
            except (BadBundle, ObjectChanged, ObjectNotFound) as error:
                self._note(made.facts, error)
            except CacheError as error:
                self._bad[made.facts] = text = f"what is known of the objects is not kept: {error}"
                logger.warning("%s", text)
        return adoption.n_facts

    async def _adopt_rows(
        self, adoption: MetadataImport, rows: list[Any], locks: contextlib.AsyncExitStack
    ) -> None:
        others = []
        for row in rows:
            feed = adoption.feed_in(row)
            if feed is None:
                others.append(row)
            else:
                await self._lead(adoption, *feed, locks)
        await asyncio.to_thread(adoption.take, others)

    async def _lead(
        self,
        adoption: MetadataImport,
        part: str,
        token: str,
        checked_at: float,
        locks: contextlib.AsyncExitStack,
    ) -> None:
        """Set a change feed back to the export's token, if that is the older one.

        The feed's lock is kept until all metadata is imported. So no process polls the feed before everything
        it watches is stored.
        """
        identity = adoption.identity
        fetch_lock = claim_of(identity, part)
        if not adoption.takes_feed(part):
            return
        adoption.feeds[part] = None
        if await self._runtime.locked(fetch_lock, within_s=WAIT_S):
            locks.callback(self._cache.release_lock, fetch_lock)
            lead = self._cache.metadata.lead_feed
            adoption.feeds[part] = await asyncio.to_thread(lead, identity, part, token, checked_at)


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    failure: BaseException = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
