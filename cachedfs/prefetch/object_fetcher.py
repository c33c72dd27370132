"""Fetch the objects of a prefetch plan: look each up, request its missing blocks, and wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.eviction.future_uses import FutureUses, position_of
from cachedfs.common.blocks import beginning
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.objects import Entry
from cachedfs.core.reader import TRIES, Reader
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ChecksumMismatch,
    ObjectChanged,
    OriginUnavailable,
    OriginUnreachable,
    QuotaExceeded,
)
from cachedfs.prefetch import failure_limit
from cachedfs.prefetch.failure_limit import FailureLimit
from cachedfs.prefetch.object_stream import Spawn
from cachedfs.prefetch.progress import PrefetchObject, ProgressCounts
from cachedfs.prefetch.turns import Turns

__all__ = ["ObjectFetcher", "cannot_store"]

logger = logging.getLogger("cachedfs.prefetch")

BLOCKS_AT_ONCE = 128  # cached blocks that are taken before the event loop runs other tasks


class ObjectFetcher:
    """Fetches the objects of a plan, each in a task of its own. Event loop thread only.

    A task looks its object up, waits until the next blocks may be ahead of the reader, sends a request for them when a
    slot is free, and waits for the blocks. `enter` is called with the path of an object that is a folder, `changed`
    when the plan has to look again. `error` is the error that ends the plan.
    """

    def __init__(
        self,
        reader: Reader,
        tally: ProgressCounts,
        *,
        spawn: Spawn,
        enter: Callable[[str], object],
        changed: Callable[[], object],
    ) -> None:
        self._reader, self._objects, self._engine = reader, reader.objects, reader.objects.engine
        self._tally, self._spawn, self._enter, self._changed = tally, spawn, enter, changed
        self.failures = FailureLimit()
        self.turns = Turns(self._objects, self.failures, changed=changed, failed=self._end_with)
        self.uses: FutureUses | None = None  # None until the plan begins, and offline
        self.error: Exception | None = None
        self.open: set[PrefetchObject] = set()
        self._n_lookups = self._n_elsewhere = 0  # lookups in flight; waits for another process
        # The plan's requests until their blocks are stored, oldest first, each with its object.
        self.active: dict[Download, PrefetchObject] = {}

    def begin(self, uses: FutureUses) -> None:
        self.uses = self.turns.uses = uses

    @property
    def is_waiting(self) -> bool:
        """True when nothing is being fetched, as the reader has to read first."""
        is_active = self._n_lookups or self._n_elsewhere or self.turns.is_ready or self.active
        return self.turns.is_held and not is_active

    @property
    def n_coming(self) -> int:
        """Bytes received by active requests. From any thread."""
        return sum(download.filled - download.start for download in list(self.active))

    def stop(self) -> None:
        """End the requests that no reader waits for at their next block."""
        for download in self.active:
            if not download.done and download.version is not None:
                download.cancel()

    def close(self) -> None:
        self._tally.fetched += self.n_coming
        self.active, self.open = {}, set()

    def fetch(self, obj: PrefetchObject) -> bool:
        """Begin to fetch an object; return False if it is cached, and done."""
        entry = self._objects.fresh(obj.path)
        if self._start(obj, entry) and not self._skip_cached(obj):
            self._tally.n_done += 1
            return False
        self.open.add(obj)
        self._spawn(self._fetch(obj, entry))
        return True

    async def _fetch(self, obj: PrefetchObject, entry: Entry | None) -> None:
        """Have the blocks of an object cached, or count it as failed."""
        n_tries = 0
        try:
            while True:
                try:
                    await self._fetch_version(obj, entry)
                    return
                except OriginUnreachable as error:
                    await self.wait_for_origin(error)
                except (ObjectChanged, ChecksumMismatch):
                    n_tries += 1
                    if n_tries == TRIES:
                        raise
                    self._objects.expire(obj.path)
                    self._give_up(obj)
                entry = self._objects.fresh(obj.path)
        except CachedFSError as error:
            self._give_up(obj)
            if not obj.is_failed:
                obj.is_failed = True
                self.count_failure(obj.path, error, size=obj.listed_size)
        except Exception as error:  # such as a missing package: it is the same for all objects
            self._end_with(error)
        finally:
            self.open.discard(obj)

    async def _fetch_version(self, obj: PrefetchObject, entry: Entry | None) -> None:
        """Have the blocks of an object's current version cached."""
        sent: dict[int, Download] = {}
        if not self._start(obj, entry):
            sent = await self._look_up(obj, entry)
        if obj.version is None:
            return  # it is a folder
        try:
            async with asyncio.TaskGroup() as group:
                for run in _runs(obj.coming):
                    group.create_task(self._bring(obj, run, dict(sent)))
                while self._skip_cached(obj):
                    run = self._next_run(obj)
                    n = await self.turns.admit([obj.use(index) for index in run])
                    if self._is_passed(obj, run[0]):
                        continue
                    obj.coming, obj.left = [*obj.coming, *run[:n]], obj.left[n:]
                    sent = {} if self._is_coming(obj, run[0]) else await self._request(obj, run[:n])
                    group.create_task(self._bring(obj, run[:n], sent))
                    await asyncio.sleep(0)  # run other tasks
        except ExceptionGroup as errors:
            raise _first_of(errors) from None
        self._tally.n_done += 1

    # Look an object up.

    def _start(self, obj: PrefetchObject, entry: Entry | None) -> bool:
        """Set the version and blocks of an object; return False if it cannot be cached, or nothing is known of it."""
        version = None if entry is None else self._objects.version(entry)
        if version is None:
            return False
        if obj.version != version:
            self._give_up(obj)
            obj.begin(version)
            if self.uses is not None:
                self.uses.add(obj.use(index) for index in obj.wanted)
        if obj.listed_size != obj.wanted_size:
            self._tally.sized(obj)
        return True

    async def _look_up(self, obj: PrefetchObject, entry: Entry | None) -> dict[int, Download]:
        """Look an object up, and begin it unless it is a folder; return the request of each block that comes with it."""
        is_offline, download = self._objects.config.offline, None
        if entry is None:
            if is_offline:
                raise self._objects.offline(obj.path)
            entry, download = await self._read_first(obj)
        if entry.info is None and (obj.bounds is not None or entry.by_listing or is_offline):
            raise self._objects.not_found(obj.path, entry)
        if entry.info is None or entry.info.kind == "directory":
            if obj.bounds is not None:
                raise self._objects.is_a_folder(obj.path)
            self._enter(obj.path)
            return {}
        if download is not None and download.is_speculative:
            if download.version is None:
                download.stop_soon(download.start)
            elif download not in self.active:
                self._note_sent([download], obj)
        if not self._start(obj, entry):
            raise self._objects.uncached(obj.path, entry.info)
        if download is None:
            return {}
        brought = [i for i in obj.left if download.start <= obj.bytes_of(i).start < download.stop]
        obj.coming, obj.left = brought, obj.left[len(brought) :]
        for index in brought:
            assert self.uses is not None
            self.uses.ask(obj.use(index), is_awaited=True)
        return dict.fromkeys(brought, download)

    async def _read_first(self, obj: PrefetchObject) -> tuple[Entry, Download | None]:
        """Return the metadata of an object, and the request that brings its first bytes, if any."""
        assert self.uses is not None
        config, uses = self._objects.config, self.uses
        most = min(config.whole_request, uses.limit // config.first_concurrency)
        want = beginning(*(obj.bounds or (None, None)), block_size=config.block_size, most=int(most))
        found: list[tuple[Entry, Download | None]] = []

        async def read() -> list[Download]:
            first = want.start + config.block_size  # limits what is read if this task is cancelled
            found.append(await self._reader.lookups.resolve(obj.path, want, demand=first))
            return [download for _, download in found if download is not None]

        position = position_of(obj.number, 0)
        await self.turns.admit_unknown(position, want.size)
        self._n_lookups += 1
        try:
            await (await self.turns.send(obj.path, position, want.size, lambda: self._spawn(read())))
        finally:
            self._n_lookups -= 1
            uses.reserve(-want.size)
            self._changed()
        return found[0]

    # The blocks of an object.

    def _skip_cached(self, obj: PrefetchObject) -> bool:
        """Take the next blocks that need no request; return whether the object has further blocks."""
        for index in obj.left[:BLOCKS_AT_ONCE]:
            use, uses = obj.use(index), self.uses
            is_cached = not self._download(obj, index) and self._engine.cache.has(*use.block)
            if not self._is_passed(obj, index) and not (is_cached and self.turns.fits(use)):
                return True
            if is_cached and uses is not None:
                uses.found(use)
            self._tally.arrived += use.size
            obj.left = obj.left[1:]
        return bool(obj.left)

    def _is_passed(self, obj: PrefetchObject, index: int) -> bool:
        """Return whether the reader was faster than the plan, and need not have a block fetched for it.

        If all blocks fit, a block that was read and evicted is fetched again, so that all are cached in the end.
        """
        if self.uses is None or not self.uses.is_over(obj.use(index).position):
            return False
        return self._is_coming(obj, index) or self.uses.is_tight or self.uses.has_window

    def _download(self, obj: PrefetchObject, index: int) -> Download | None:
        """Return the request that brings a block; None if there is none."""
        download = self._engine.by_block.get((obj.begun.digest, index))
        return download if download is not None and download.covers(obj.bytes_of(index).start) else None

    def _is_coming(self, obj: PrefetchObject, index: int) -> bool:
        """Return whether a block is cached, or a request brings it."""
        return bool(self._download(obj, index)) or self._engine.cache.has(obj.begun, index)

    def _next_run(self, obj: PrefetchObject) -> list[int]:
        """Return the next blocks that one request brings: an active one, or one to be sent."""
        most = max(1, self._objects.config.whole_request // obj.begun.block_size)
        first, *others = obj.left[:most]
        run, download = [first], self._download(obj, first)
        for index in others:
            if self._download(obj, index) is not download or self._engine.cache.has(obj.begun, index):
                break
            run.append(index)
        return run

    async def _request(
        self, obj: PrefetchObject, run: list[int], *, is_overdue: bool = False
    ) -> dict[int, Download]:
        """Request blocks when there is a slot; return their requests, as `Downloads.launch` does."""
        if self._objects.config.offline:
            raise self._objects.offline(obj.path)
        slot = self._objects.caller_key, obj.path
        while (lookup := self._engine.lookups.answer_of(slot)) is not None:
            await asyncio.wait([lookup])  # another caller's lookup: it may bring the first bytes

        requests: dict[int, Download] = {}

        def launch() -> list[Download]:
            before = set(self._engine.active_requests)
            overdue = run if is_overdue else ()
            requests.update(self._reader.downloads.launch(obj.begun, run, overdue=overdue))
            sent = [download for download in dict.fromkeys(requests.values()) if download not in before]
            self._note_sent(sent, obj)
            return sent

        size = obj.bytes_of(run[-1]).stop - obj.bytes_of(run[0]).start
        await self.turns.send(obj.path, obj.use(run[0]).position, size, launch)
        return requests

    def _note_sent(self, sent: list[Download], obj: PrefetchObject) -> None:
        self._tally.n_requests += len(sent)
        self.active.update(dict.fromkeys(sent, obj))

    async def _bring(self, obj: PrefetchObject, run: list[int], sent: dict[int, Download]) -> None:
        """Wait until blocks have arrived; send requests for those that nothing brings.

        `sent` has the requests sent for them. Raises their errors.
        """
        while run and not obj.is_failed:
            n, download = 0, sent.pop(run[0], None) or self._download(obj, run[0])
            if download is not None:
                with contextlib.suppress(DownloadStopped):
                    await download.wait_until(min(obj.bytes_of(run[-1]).stop, download.stop))
                n = sum(obj.bytes_of(index).stop <= download.filled for index in run)
            elif self._engine.cache.has(obj.begun, run[0]):
                n = 1
            else:
                sent = await self._request(obj, run)
                if run[0] not in sent and not self._is_coming(obj, run[0]):
                    self._n_elsewhere += 1
                    try:
                        is_over = await self._engine.wait_for_other_process(obj.begun, run[:1])
                    finally:
                        self._n_elsewhere -= 1
                    if not is_over:
                        sent = await self._request(obj, run, is_overdue=True)
            self._arrived(obj, run[:n])
            run = run[n:]

    def _arrived(self, obj: PrefetchObject, run: list[int]) -> None:
        for index in run:
            obj.coming.remove(index)
            use = obj.use(index)
            self._tally.arrived += use.size
            if self.uses is not None and self._engine.cache.has(*use.block):
                self.uses.stored([use.block])
        if run:
            self.failures.came()
        self._changed()

    def forget_stored(self) -> None:
        """Forget requests whose blocks are stored, or failed to be. Raises CacheError when nothing can be stored."""
        for download, obj in list(self.active.items()):
            if not download.is_finished:
                continue
            del self.active[download]
            self._tally.fetched += download.filled - download.start
            if download.is_storable:
                continue
            if self._engine.cache.cannot_store is not None:
                raise cannot_store(self._engine.cache)
            if not obj.is_failed:
                obj.is_failed = True
                error = CacheError(
                    f"{self._objects.url(obj.path)}: some of it came and could not be stored, as the cache could store "
                    "nothing for a while; prefetch it again"
                )
                self._tally.spoilt(obj.path, error)
        if self.uses is not None:
            self.uses.forget_lost()

    # Failures.

    def _give_up(self, obj: PrefetchObject) -> None:
        """Forget the version and the blocks of an object."""
        if obj.version is not None and self.uses is not None:
            self.uses.remove(position_of(obj.number, 0), position_of(obj.number + 1, 0))
            # Blocks still in flight are reported when they arrive.
            asked = [(obj.version, index) for index in range(obj.wanted.start, obj.left.start)]
            self.uses.lost(block for block in asked if not self._engine.cache.has(*block))
        obj.entry = obj.version = None

    def count_failure(self, path: str, error: CachedFSError, *, size: int | None = None) -> None:
        """Count a failure; end the plan after too many consecutive ones that are not specific to one object."""
        self._tally.failed(path, error, size)
        is_general = isinstance(error, OriginUnavailable | QuotaExceeded)
        is_general = (
            is_general and not isinstance(error, ChecksumMismatch) and not self._objects.config.offline
        )
        if is_general and self.failures.failed():
            self._end_with(error)

    async def wait_for_origin(self, error: OriginUnreachable) -> None:
        """Pause until the origin may be tried again; end the plan when it was unreachable for too long."""
        now, most_s = time.monotonic(), failure_limit.AWAY_S
        if not self.failures.is_unreachable:
            logger.warning("%s; the prefetch continues when it answers, or ends after %d s", error, most_s)
        if self.failures.away(now):
            self._end_with(error)
        self._changed()
        await self.failures.pause(now)

    def _end_with(self, error: Exception) -> None:
        self.error = error
        self._changed()


def _runs(indexes: Iterable[int]) -> list[list[int]]:
    """Return the indexes in ascending order, in lists of adjacent ones."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _first_of(errors: ExceptionGroup) -> Exception:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


def cannot_store(cache: BlockStore) -> CacheError:
    """Return the error that ends a plan when nothing can be stored."""
    why = cache.cannot_store or "the cache may hold nothing now: raise cache_size, or free space"
    return CacheError(f"the prefetch stopped, because blocks cannot be stored: {why}")
