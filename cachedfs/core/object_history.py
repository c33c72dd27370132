"""Readahead within one object, and when to fetch the rest of it.

A read that misses waits for one request. The rest of the object takes full-size requests, at the speed of the whole
link. It is worth fetching when going on as before would take more requests and more time. How long a reader goes on is
unknown; the assumption is GOES_ON times as long as so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain

from cachedfs.common.blocks import covering, merge
from cachedfs.config import Config
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import LinkEstimate
from cachedfs.core.version import Version
from cachedfs.readahead.sequential import ReadHistory, SequentialRun, ahead

__all__ = ["GOES_ON", "LEAST", "ObjectHistories", "ObjectHistory", "as_declared", "is_rest_worth_it"]


GOES_ON = 2
LEAST = 6  # reads that waited; reading a table's footer and a few of its columns takes fewer
MOST = 1000  # objects remembered
MOST_KEPT = 64
# An object counts as cached after this many reads of cached blocks that were not requested ahead.
CACHED_AFTER = 64
FEW = 64  # objects with more blocks are checked block by block only if an estimate favors fetching the rest
# Momentary figures of the link would make the decision depend on chance.
TYPICAL_LINK = LinkEstimate()

_is_declared = ContextVar("cachedfs_is_declared", default=False)


def is_rest_worth_it(
    n_misses: int,
    n_missing: int,
    *,
    block_size: int,
    blocks_per_request: int,
    link: LinkEstimate = TYPICAL_LINK,
) -> bool:
    """Return whether to fetch the `n_missing` blocks of an object after `n_misses` reads had to wait.

    If they fit into one request, the second read that waits is enough, and its request takes them along.
    """
    if n_misses < 2 or not n_missing:
        return False
    n_requests = -(-n_missing // blocks_per_request)
    if n_requests == 1:
        return True
    n_more = GOES_ON * n_misses
    going_on_s = n_more * (link.wait_s + block_size / link.best_per_s)
    rest_s = link.wait_s + n_missing * block_size / link.total_per_s
    return n_misses >= LEAST and n_more >= n_requests and going_on_s >= rest_s


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
        self.n_reads = 0  # reads of further blocks since the last miss
        self.rest: deque[range] | None = None  # unsent requests, once the rest is worth fetching
        self.n_earned = 0  # blocks of the rest that may be requested now
        self.of_rest: deque[Download] = deque(maxlen=MOST_KEPT)  # the latest requests sent for the rest
        # By run: the requests that it has not passed. If nothing can be stored, their bytes are only in memory.
        self._requests: dict[int, deque[Download]] = {}

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
        for requests in list(self._requests.values()):
            for download in list(requests):
                if download.covers(position):
                    return download
        return None

    def after(self, start: int, stop: int, left: int | None) -> list[deque[Download]]:
        """Record a read (see `ReadHistory.after`); return the requests that are not wanted any more."""
        reads, n_wasted, dropped = self.reads.after(start, stop, left=left), 0, []
        # A read is reported twice if its block is stored, and released, before the reader takes the bytes.
        self.n_reads += reads.n_touched > self.reads.n_touched
        for run in reads.dropped:
            requests = self._requests.pop(run.number, deque())
            arriving = {index for download in requests for index in download.blocks_until_stop}
            n_wasted += len(arriving.intersection(chain(*run.unread(reads.block_size))))
            dropped.append(requests)
        self.reads = reads._replace(dropped=(), n_wasted=reads.n_wasted + n_wasted)
        return dropped

    def requests_of(self, run: SequentialRun) -> deque[Download]:
        """Return the requests ahead of a run, without those it has passed. They may be in any order."""
        requests = self._requests.setdefault(run.number, deque())
        is_backwards = run.repeats > 0 and run.start < run.origin
        for _ in range(len(requests)):
            download = requests.popleft()
            if download.start < run.stop if is_backwards else download.stop > run.start:
                requests.append(download)
        return requests

    def stop(self) -> list[deque[Download]]:
        """Return all requests, which are not wanted any more."""
        requests, self._requests = list(self._requests.values()), {}
        self.reads = ReadHistory(self.reads.block_size)
        return requests


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
        for requests in history.after(start, stop, left):
            self._downloads.cancel_speculative(requests)
        window = objects.engine.window(objects.config)
        history.reads, wanted = ahead(
            history.reads,
            n_blocks=version.n_blocks,
            blocks_per_request=_per_request(objects.config, window),
            most=window // version.block_size,
        )
        if wanted:
            history.requested.update(self._missing(version, chain(*wanted)))
            keep = history.requests_of(history.reads.runs[0])
            self._downloads.launch_speculative(version, wanted, keep)

    def close_file(self, version: Version, file: int) -> None:
        """Cancel what was requested ahead once the last open file of an object is closed."""
        history = self._objects.engine.histories.get(version.digest)
        if history is not None and file in history.files:
            history.files.remove(file)
            for requests in () if history.files else history.stop():
                self._downloads.cancel_speculative(requests)

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
        if history.rest is not None:
            history.n_earned += max(1, history.n_reads) * per_request
        elif missing := self._rest(version, history.n_misses, per_request):
            if len(missing) <= per_request:
                self._downloads.launch(version, [index for index in missing if index >= free[0]])
            others = [index for index in missing if index not in blocks]
            size, request_size = version.n_blocks * version.block_size, per_request * version.block_size
            parts = merge(others, version.block_size, size=size, request_size=request_size)
            history.rest = deque(covering(part, version.block_size) for part in parts)
            history.n_earned = window // version.block_size
        history.n_reads = 0
        requests = []
        while history.rest and history.n_earned > 0:
            requests.append(history.rest.popleft())
            history.n_earned -= len(requests[-1])
        self._downloads.launch_speculative(version, requests, history.of_rest)

    def _rest(self, version: Version, n_misses: int, per_request: int) -> list[int]:
        """Return the missing blocks of an object if they are worth fetching, else an empty list."""
        objects, size, n_blocks = self._objects, version.block_size, version.n_blocks
        if (
            n_misses < 2
            or not objects.config.read_ahead
            or not objects.engine.fits(objects.config, n_blocks * size)
        ):
            return []
        is_worth_it = partial(is_rest_worth_it, n_misses, block_size=size, blocks_per_request=per_request)
        if n_blocks > FEW and not is_worth_it(n_blocks - n_misses):
            return []
        missing = self._missing(version, range(n_blocks))
        return missing if is_worth_it(len(missing)) else []

    def _missing(self, version: Version, blocks: Iterable[int]) -> list[int]:
        download, has = self._objects.engine.by_block, self._objects.engine.cache.has
        return [
            index for index in blocks if (version.digest, index) not in download and not has(version, index)
        ]

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
