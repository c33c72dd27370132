"""Send the requests of a prefetch plan in its order; pause while the origin is unreachable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import Range
from cachedfs.common.version import Version
from cachedfs.core.download import Download
from cachedfs.core.objects import Entry
from cachedfs.core.path_errors import not_cached
from cachedfs.core.reader import Reader
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.errors import (
    CachedFSError,
    CacheError,
    ChecksumMismatch,
    OriginUnavailable,
    OriginUnreachable,
    QuotaExceeded,
)
from cachedfs.prefetch.progress import ProgressCounts

logger = logging.getLogger("cachedfs.prefetch")

AWAY_S = 60.0  # how long an origin may be unreachable before the plan ends
PAUSE_S = 1.0, 15.0  # shortest and longest wait before an unreachable origin is tried again
MOST_IN_A_ROW = 16  # consecutive failures, not specific to one object, that end the plan

T = TypeVar("T")
Sent = Iterable[Download] | asyncio.Task[Iterable[Download]]
Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class PlanRequests:
    """Sends the requests of a plan, and counts its failures in a row. Event loop thread only.

    `spawn` starts tasks that end with the plan. `changed` is called when the plan has to look again. `error` is the error that ends the plan.
    """

    def __init__(
        self, reader: Reader, counts: ProgressCounts, spawn: Spawn, changed: Callable[[], object]
    ) -> None:
        self._reader, self._objects, self._engine = reader, reader.objects, reader.objects.engine
        self.counts, self._spawn, self._changed = counts, spawn, changed
        config = reader.objects.config
        self._per_request = max(1, config.whole_request // config.block_size)  # blocks
        self.error: Exception | None = None
        self.queued: set[float] = set()  # positions of requests to be sent
        # The plan's requests until their blocks are stored, oldest first, each with its path.
        self.active: dict[Download, str] = {}
        self._unstored: set[str] = set()  # paths of which a block could not be stored
        self._n_in_a_row, self._again_at = 0, 0.0
        self._away_since: float | None = None

    @property
    def n_coming(self) -> int:
        """Bytes received by active requests. From any thread."""
        return sum(download.filled - download.start for download in list(self.active))

    def cancel(self) -> None:
        """Cancel what is queued, and end the requests that no reader waits for at their next block."""
        self._engine.speculation.cancel(self)
        for download in self.active:
            if not download.done and download.version is not None:
                download.cancel()
        self.counts.fetched += self.n_coming
        self.active = {}

    # Look objects up, and have blocks cached.

    async def look_up(
        self, path: str, want: Range, position: float, found: Callable[[Entry], object]
    ) -> None:
        """Look an object up, by reading `want` of it. `found` is called before a later request is sent."""
        if (entry := self._objects.fresh(path)) is not None:
            self.queued.discard(position)
            found(entry)
        elif self._objects.config.offline:
            raise not_cached(self._objects.url(path))
        else:
            send = partial(self._read_first, path, want, found)
            await (await self._queue(path, position, want.size, lambda: self._spawn(send())))

    async def _read_first(self, path: str, want: Range, found: Callable[[Entry], object]) -> list[Download]:
        demand = want.start + self._objects.config.block_size  # limits what is read if this task is cancelled
        entry, download = await self._reader.lookups.resolve(path, want, demand=demand)
        sent = [] if download is None else [download]
        self._count_sent(path, sent)
        try:
            found(entry)
        finally:
            if download is not None and download.is_speculative and download.version is None:
                download.stop_soon(download.start)
        return sent

    def download(self, version: Version, index: int) -> Download | None:
        """Return the request that brings a block; None if there is none."""
        download = self._engine.by_block.get((version.digest, index))
        is_covered = download is not None and download.covers(index * version.block_size)
        return download if is_covered else None

    def is_coming(self, version: Version, index: int) -> bool:
        """Return whether a block is cached, or a request brings it. From any thread."""
        return bool(self.download(version, index)) or self._engine.cache.has(version, index)

    def next_run(self, version: Version, left: range) -> range:
        """Return the first of these blocks that one request brings: an active one, or one to be sent."""
        run, download = left[: self._per_request], self.download(version, left[0])
        for n, index in enumerate(run[1:], start=1):
            if self.download(version, index) is not download or self._engine.cache.has(version, index):
                return run[:n]
        return run

    async def request(self, version: Version, run: range, position: float) -> None:
        """Request blocks in their turn; wait for the first one if another process fetches it."""
        path, downloads = version.info.path, self._reader.downloads
        if self._objects.config.offline:
            raise not_cached(self._objects.url(path))
        while await self._engine.lookups.wait((self._objects.caller_key, path)):
            self.queued.discard(position)  # another caller's lookup: it may bring the first bytes

        def send() -> list[Download]:
            before = set(self._engine.active_requests)
            found = dict.fromkeys(downloads.launch(version, run).values())
            return self._count_sent(path, [download for download in found if download not in before])

        await self._queue(path, position, len(run) * version.block_size, send)
        if not self.is_coming(version, run[0]):
            self._count_sent(path, (await downloads.get(version, run[:1])).values())

    def _count_sent(self, path: str, sent: Iterable[Download]) -> list[Download]:
        """Count the requests that are the plan's; return them."""
        ours = [each for each in sent if each.is_speculative and each.version and each not in self.active]
        self.counts.n_requests += len(ours)
        self.active.update(dict.fromkeys(ours, path))
        return ours

    async def _queue(self, path: str, position: float, size: int, send: Callable[[], Sent]) -> Any:
        """Wait until a request of `size` bytes may be sent; return what `send` returns, which sends it."""
        origin = self._objects.origin(path)
        if pause_s := self.pause_s():
            await asyncio.sleep(pause_s)
        sent: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()

        def start() -> Sent:
            self.queued.discard(position)
            self._changed()
            if sent.done():
                return ()
            try:
                sent.set_result(send())
            except Exception as error:  # of any kind: the plan ends with it
                sent.set_exception(error)
                return ()
            return sent.result()

        self.queued.add(position)
        self._engine.speculation.submit(
            SpeculativeRequest(self, size, start, lambda: origin, is_declared=True, position=position)
        )
        return await sent

    def check_stored(self) -> None:
        """Remove requests whose blocks are stored, or failed to be. Raises CacheError when nothing can be stored."""
        for download, path in [each for each in self.active.items() if each[0].is_finished]:
            del self.active[download]
            self.counts.fetched += download.filled - download.start
            if download.is_storable or path in self._unstored:
                continue
            if self._engine.cache.cannot_store is not None:
                raise cannot_store(self._engine.cache)
            self._unstored.add(path)
            error = CacheError(
                f"{self._objects.url(path)}: some of it came and could not be stored, as the cache could store "
                "nothing for a while; prefetch it again"
            )
            self.counts.failed(path, error)

    # Failures.

    def pause_s(self) -> float:
        """Return for how many seconds no request may be sent."""
        return max(0.0, self._again_at - time.monotonic())

    @property
    def is_unreachable(self) -> bool:
        """True when the origin was unreachable at the last request."""
        return self._away_since is not None

    def succeeded(self) -> None:
        """Record that blocks arrived."""
        self._n_in_a_row, self._away_since, self._again_at = 0, None, 0.0

    def failed(self, path: str, error: CachedFSError) -> None:
        """Count a failure; end the plan after too many consecutive ones that are not specific to one object."""
        self.counts.failed(path, error)
        is_general = isinstance(error, OriginUnavailable | QuotaExceeded) and not self._objects.config.offline
        self._n_in_a_row += is_general and not isinstance(error, ChecksumMismatch)
        if self._n_in_a_row >= MOST_IN_A_ROW:
            self.end_with(error)

    async def until_reachable(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work`, again while its origin is unreachable."""
        while True:
            try:
                return await work()
            except OriginUnreachable as error:
                self.unreachable(error)
                await asyncio.sleep(self.pause_s())

    def unreachable(self, error: OriginUnreachable) -> None:
        """Send nothing for a while. After AWAY_S of that, the plan ends."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            logger.warning("%s; the prefetch continues when it answers, or ends after %d s", error, AWAY_S)
        if (away_s := now - self._away_since) > AWAY_S:
            self.end_with(error)
        self._again_at = max(self._again_at, now + pause_after(away_s))
        self._changed()

    def end_with(self, error: Exception) -> None:
        self.error = error
        self._changed()


def pause_after(away_s: float) -> float:
    """Return how long to wait before an origin is tried again that has been unreachable for `away_s` seconds."""
    return min(max(PAUSE_S[0], away_s), PAUSE_S[1])


def cannot_store(cache: BlockStore) -> CacheError:
    """Return the error that ends a plan when nothing can be stored."""
    why = cache.cannot_store or "the cache may hold nothing now: raise cache_size, or free space"
    return CacheError(f"the prefetch stopped, because blocks cannot be stored: {why}")
