"""Taking an export in: what is missing of its blocks, each checked, and then what is known of their objects."""

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

AT_ONCE = 8  # requests; more of them were no faster, and each holds a few MiB
BUNDLES_AT_ONCE = 4
BATCH = 8 << 20  # bytes of blocks that are stored in one transaction,
MOST_IN_BATCH = 512  # and how many


@dataclasses.dataclass
class _Opened:
    """A bundle whose index was read. That stays as bytes: the entries of all bundles at once would take much memory."""

    bundle: Bundle
    info: ObjectInfo
    identity: str
    index: bytes
    here: bytes = b""  # for each block whether it is in the cache,
    size_here: int = 0  # and the bytes of those that are


class Import:
    """The export in a folder of `there`, into the cache of `runtime`; of the origin and account `identity` only, or (None) of any.

    `advance` is told the bytes of the export that are dealt with, `expect` how many there are in all.
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
        self._stored: list[tuple[BlockKey, int]] = []  # with the bytes of each
        self._here = self._left = 0
        self._bad: dict[str, str] = {}  # by name of the object

    async def run(self) -> Imported:
        """Take in what is missing. On the loop of the runtime.

        Raises ObjectNotFound where there is no export, OriginUnavailable for one that is damaged as a whole, ValueError for one of another
        origin, CacheError where blocks cannot be stored.
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
            # What is here takes its room first: else what is fetched drives it out.
            self._room -= sum(each.size_here for each in opened if each is not None)
            await self._all(self._take(each) for each in opened if each is not None)
        except* Exception as failures:  # one failure, whatever the others
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

    # What there is

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

    # Blocks

    async def _all(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
        return [task.result() for task in tasks]

    async def _open(self, bundle: Bundle, info: ObjectInfo | None, identity: str) -> _Opened | None:
        """Read the index of a bundle; None, and noted, where that is not what the manifest says."""
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
        """Find out which blocks of a bundle are here, and return all. Raises BadBundle."""
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
        """Take in what is missing of one bundle; what is wrong in it is noted, and the rest of it taken."""
        bundle = opened.bundle
        fetch_lock = ObjectKey(opened.identity, bundle.name, "who imports it?", 0).hash64(0)
        async with self._bundles:
            await self._runtime.locked(fetch_lock)  # so that two imports at once fetch each bundle once
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
        """Return which blocks to fetch: those that are not here, as long as there is room beside those of the export that are.

        `before`, `now`: which were here when the room was counted, and are.
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
        """Fetch a range and store the blocks in it; one that is not to be had is noted."""
        async with self._requests:
            try:
                async with self._folder.reading(info, span) as reply:
                    await self._store_all(bundle, span, inside, reply)
            except (ObjectChanged, ObjectNotFound) as error:
                self._note(bundle.name, error)

    async def _store_all(
        self, bundle: Bundle, span: Range, inside: Sequence[tuple[int, BundleEntry]], pieces: Reply
    ) -> None:
        """Store blocks as they come."""
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
        """Return a block that is what the index says, every byte of it right; None, noted, for another."""
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

    # Facts

    async def _adopt(self, made: Manifest, info: ObjectInfo | None) -> int:
        """Take in what is known, after the blocks: what has none may be forgotten. Return of how many objects."""
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
        """Have a feed of changes begin where the export left it; nobody polls it until all that it watches is here."""
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
