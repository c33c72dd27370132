"""Readahead within one object: observe the reads of it, and request what comes next, or the rest of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain

from cachedfs.common.blocks import covering, merge
from cachedfs.common.types import Range
from cachedfs.config import Config
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.objects import Objects
from cachedfs.core.version import Version
from cachedfs.readahead.runs import ReadHistory, is_rest_worth_it

__all__ = ["ObjectHistories", "ObjectHistory", "as_declared"]

MOST = 1000  # objects remembered
MOST_KEPT = 64
# An object counts as cached after this many reads of cached blocks that were not requested ahead.
CACHED_AFTER = 64
FEW = 64  # objects with more blocks are checked block by block only if an estimate favors fetching the rest

_is_declared = ContextVar("cachedfs_is_declared", default=False)


@contextmanager
def as_declared() -> Iterator[None]:
    """Disable inference for reads in this context: a prefetch plan already fetches them in order.

    Inferred requests go before declared ones. The rest of a large object, requested at once, would delay the
    next batch.
    """
    token = _is_declared.set(True)
    try:
        yield
    finally:
        _is_declared.reset(token)


class ObjectHistory:
    """The reads of one object version, by open files and by ranges, and the requests ahead of them.

    Changed on the event loop thread. Any thread may look, and call `take`.
    """

    def __init__(self, block_size: int) -> None:
        self.reads = ReadHistory(block_size)
        self.requested: set[int] = set()  # blocks requested and not read yet: reading them is no hit
        self.n_to_observe = 0  # reads of cached blocks to be observed from now on
        self.files: set[int] = set()  # ids of the open files that are read ahead
        self.n_misses = 0
        self.rest: deque[range] | None = None  # unsent requests, once the rest is worth fetching
        self.n_earned = 0  # blocks of the rest that may be requested now
        self.of_rest: deque[Download] = deque(maxlen=MOST_KEPT)  # the latest requests sent for the rest

    def take(self, blocks: range) -> bool:
        """Return whether some of these blocks were requested and not read yet. They are read now. From any thread."""
        if self.requested.isdisjoint(blocks):
            self.n_to_observe -= 1
            return False
        self.requested.difference_update(blocks)
        self.n_to_observe = CACHED_AFTER
        return True

    def download_at(self, position: int) -> Download | None:
        """Return a request that brings the byte at `position`. From any thread."""
        sent = (download for run in self.reads.runs for download in list(run.requests))
        return next((download for download in sent if download.covers(position)), None)


class ObjectHistories:
    """Observe the reads of objects, and request what comes next.

    Event loop thread only. All filesystems that use an engine share the histories.
    """

    def __init__(self, objects: Objects, downloads: Downloads) -> None:
        self._objects = objects
        self._downloads = downloads

    def observe(
        self, version: Version, start: int, stop: int, *, left: int | None = None, file: int | None = None
    ) -> None:
        """Record a read, by the open file with this id or by range, and request what will probably be read next."""
        if _is_declared.get() or version.n_blocks < 2:
            return
        history, objects = self.history(version), self._objects
        if file is not None:
            history.files.add(file)
        reads, n_touched = history.reads, history.reads.n_touched
        for run in reads.observe(start, stop, left=left):
            reads.end(run, {index for download in run.requests for index in download.blocks_until_stop})
            self._downloads.cancel_speculative(run.requests)
        window = objects.engine.window(objects.config)
        per_request = _per_request(objects.config, window)
        # A read is reported twice if its block is stored, and released, before the reader takes the bytes.
        if reads.n_touched > n_touched:
            history.n_earned += per_request
        wanted = reads.ahead(
            n_blocks=version.n_blocks,
            per_request=per_request,
            most=window // version.block_size,
            is_missing=partial(self._is_missing, version),
        )
        if wanted:
            history.requested.update(chain(*wanted))
            requests = reads.runs[0].requests
            for _ in range(
                len(requests)
            ):  # If nothing can be stored, the bytes are only there until they are read.
                download = requests.popleft()
                if not reads.unread.keys().isdisjoint(
                    covering(Range(download.start, download.stop), version.block_size)
                ):
                    requests.append(download)
            self._downloads.launch_speculative(version, wanted, requests)

    def close_file(self, version: Version, file: int) -> None:
        """Cancel what was requested ahead once the last open file of an object is closed."""
        history = self._objects.engine.histories.get(version.digest)
        if history is not None and file in history.files:
            history.files.remove(file)
            if not history.files:
                for run in history.reads.runs:
                    self._downloads.cancel_speculative(run.requests)
                history.reads = ReadHistory(version.block_size)

    def observe_miss(self, version: Version, blocks: range, *, is_first: bool = False) -> None:
        """Record that a reader may have to wait for `blocks`, and request more of the object if that pays off.

        If the rest fits into one request, what follows `blocks` is requested together with them. `is_first`: the object
        was unknown, and the request that looks it up also brings these bytes.
        """
        if _is_declared.get() or version.n_blocks < 2:
            return
        history, window = self.history(version), self._objects.engine.window(self._objects.config)
        history.n_misses, history.n_to_observe = history.n_misses + is_first, CACHED_AFTER
        free = self._missing(version, blocks)
        if not free:
            return
        per_request = _per_request(self._objects.config, window)
        history.n_misses += 1
        if history.rest is None and (missing := self._rest(version, history.n_misses, per_request)):
            if len(missing) <= per_request:
                self._downloads.launch(version, [index for index in missing if index >= free[0]])
            others = [index for index in missing if index not in blocks]
            size, request_size = version.n_blocks * version.block_size, per_request * version.block_size
            parts = merge(others, version.block_size, size=size, request_size=request_size)
            history.rest = deque(covering(part, version.block_size) for part in parts)
            history.n_earned = window // version.block_size
        requests = []
        while history.rest and history.n_earned > 0:
            requests.append(history.rest.popleft())
            history.n_earned -= len(requests[-1])
        self._downloads.launch_speculative(version, requests, history.of_rest)

    def _rest(self, version: Version, n_misses: int, per_request: int) -> list[int]:
        """Return the missing blocks of an object if they are worth fetching, else an empty list."""
        config, engine, n_blocks = self._objects.config, self._objects.engine, version.n_blocks
        is_worth_it = partial(is_rest_worth_it, n_misses, per_request=per_request)
        may_be = is_worth_it(n_blocks - n_misses if n_blocks > FEW else 1) and config.read_ahead > 0
        if not may_be or not engine.fits(config, n_blocks * version.block_size):
            return []
        missing = self._missing(version, range(n_blocks))
        return missing if is_worth_it(len(missing)) else []

    def _missing(self, version: Version, blocks: range) -> list[int]:
        return [index for index in blocks if self._is_missing(version, index)]

    def _is_missing(self, version: Version, index: int) -> bool:
        engine = self._objects.engine
        return (version.digest, index) not in engine.by_block and not engine.cache.has(version, index)

    def history(self, version: Version) -> ObjectHistory:
        """Return the history of an object, a new one if there is none."""
        histories = self._objects.engine.histories
        if (history := histories.get(version.digest)) is None:
            history = histories[version.digest] = ObjectHistory(version.block_size)
            if len(histories) > MOST:
                histories.popitem(last=False)
        histories.move_to_end(version.digest)  # never out of it: other threads look
        return history


def _per_request(config: Config, window: int) -> int:
    """Return the blocks per request: half a window at most, so that one is received while another is read."""
    return max(1, min(config.request_size, window // 2) // config.block_size)
