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
from cachedfs.common.types import Range
from cachedfs.config import Config
from cachedfs.core.download import Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import Link
from cachedfs.core.version import Version
from cachedfs.readahead.sequential import ReadHistory, SequentialRun, ahead

__all__ = [
    "GOES_ON",
    "LEAST",
    "ObjectHistories",
    "RangeReadahead",
    "as_declared",
    "is_rest_worth_it",
]


GOES_ON = 2
LEAST = 6  # reads that waited; reading a table's footer and a few of its columns takes fewer
MOST = 1000  # objects remembered
MOST_KEPT = 64
FEW = 64  # objects with more blocks are checked block by block only if an estimate favors fetching the rest
# Momentary figures of the link would make the decision depend on chance.
TYPICAL_LINK = Link()

_is_declared = ContextVar("cachedfs_is_declared", default=False)


def is_rest_worth_it(
    n_misses: int,
    n_missing: int,
    *,
    block_size: int,
    blocks_per_request: int,
    link: Link = TYPICAL_LINK,
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


class RangeReadahead:
    """Readahead in one open file, or in one object that is read by ranges. In the thread of the reader."""

    def __init__(self, block_size: int) -> None:
        self.history = ReadHistory(block_size)
        # By run: the requests that it has not passed. If nothing can be stored, their bytes are only in memory.
        # The event loop thread appends; the reader takes from the left.
        self._requests: dict[int, deque[Download]] = {}

    def __iter__(self) -> Iterator[Download]:
        """Yield all requests, from a copy of each run's queue."""
        for requests in self._requests.values():
            yield from [*requests]

    def observe(self, downloads: Downloads, start: int, stop: int, *, left: int | None = None) -> None:
        """Record a read (see `ReadHistory.after`), and stop requests that are no longer wanted."""
        history, n_wasted = self.history.after(start, stop, left=left), 0
        for run in history.dropped:
            requests = self._requests.pop(run.number, deque())
            arriving = {index for download in [*requests] for index in download.blocks_until_stop}
            n_wasted += len(arriving.intersection(chain(*run.unread(history.block_size))))
            downloads.objects.engine.call_soon(downloads.cancel_speculative, requests)
        self.history = history._replace(dropped=(), n_wasted=history.n_wasted + n_wasted)

    def predict(self, objects: Objects, version: Version) -> list[range]:
        """Return the blocks to `request` now, a range for each request."""
        window = objects.engine.window(objects.config)
        self.history, wanted = ahead(
            self.history,
            n_blocks=version.n_blocks,
            blocks_per_request=_per_request(objects.config, window),
            most=window // version.block_size,
        )
        return wanted

    def request(self, downloads: Downloads, version: Version, wanted: list[range]) -> None:
        if wanted:
            keep = self.requests_of(self.history.runs[0])
            downloads.objects.engine.call_soon(downloads.launch_speculative, version, wanted, keep)

    def requests_of(self, run: SequentialRun) -> deque[Download]:
        """Return the requests ahead of a run, without those it has passed. They may be in any order."""
        requests = self._requests.setdefault(run.number, deque())
        is_backwards = run.repeats > 0 and run.start < run.origin
        for _ in range(len(requests)):
            download = requests.popleft()
            if download.start < run.stop if is_backwards else download.stop > run.start:
                requests.append(download)
        return requests

    def close(self, downloads: Downloads) -> None:
        """Stop all requests."""
        while self._requests:
            _, requests = self._requests.popitem()
            downloads.objects.engine.call_soon(downloads.cancel_speculative, requests)


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
    """The reads of one object version by ranges, and of all its readers that had to wait."""

    def __init__(self, block_size: int) -> None:
        self.readahead = RangeReadahead(block_size)  # of range reads; an open file has its own
        self.observed_from: int | None = None  # cached reads from this byte on are observed; None: none are
        self.n_misses = 0
        self.rest: deque[range] | None = None  # unsent requests, once the rest is worth fetching
        self.n_earned = 0  # blocks of the rest that may be requested now
        # The latest requests sent for the rest.
        self.of_rest: deque[Download] = deque(maxlen=MOST_KEPT)

    def read_ahead(self, downloads: Downloads, version: Version) -> None:
        self.readahead.request(downloads, version, self.readahead.predict(downloads.objects, version))
        reads = self.readahead.history
        is_ahead = reads.runs[0].n_unread(version.block_size) > 0
        self.observed_from = (reads.last + 1) * version.block_size if is_ahead else None


class ObjectHistories:
    """Observe the reads of one objects's objects, and request what comes next.

    Event loop thread only, except `is_observed`. All filesystems that use an engine share the histories.
    """

    def __init__(self, objects: Objects, downloads: Downloads) -> None:
        self._objects = objects
        self._downloads = downloads

    def is_observed(self, version: Version, stop: int) -> bool:
        """Return whether `observe_hit` should be called for a read of cached bytes up to `stop`. From any thread."""
        history = self._objects.engine.histories.get(version.digest)
        return history is not None and history.observed_from is not None and stop > history.observed_from

    def observe_range(self, version: Version, want: Range, *, is_first: bool) -> None:
        """Record a range read (such as `cat_file`) of the bytes `want`, some of which are not cached.

        `is_first`: the object was unknown, and the request that looks it up also brings these bytes.
        """
        if _is_declared.get():
            return
        history = self._history(version)
        history.n_misses += is_first
        history.readahead.observe(self._downloads, want.start, want.stop)
        self.observe_wait(version, covering(want, version.block_size))
        history.read_ahead(self._downloads, version)

    def observe_hit(self, version: Version, want: Range) -> None:
        """Record a range read of the cached bytes `want` of an object that is read ahead."""
        history = self._history(version)
        history.readahead.observe(self._downloads, want.start, want.stop)
        history.read_ahead(self._downloads, version)

    def observe_wait(self, version: Version, blocks: range, *, n_reads: int = 1) -> None:
        """Record that a reader waits for `blocks`, and request more of the object if that pays off.

        `n_reads` is the number of reads of the object since the last wait. If the rest fits into one request,
        what follows `blocks` is requested together with them.
        """
        free = self._missing(version, blocks)
        if _is_declared.get() or not free or version.n_blocks < 2:
            return
        history, window = self._history(version), self._objects.engine.window(self._objects.config)
        per_request = _per_request(self._objects.config, window)
        history.n_misses += 1
        if history.rest is not None:
            history.n_earned += max(1, n_reads) * per_request
        elif missing := self._rest(version, history.n_misses, per_request):
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

    def _history(self, version: Version) -> ObjectHistory:
        histories = self._objects.engine.histories
        history = histories.pop(version.digest, None) or ObjectHistory(version.block_size)
        histories[version.digest] = history
        if len(histories) > MOST:
            del histories[next(iter(histories))]
        return history


def _per_request(config: Config, window: int) -> int:
    """Return the blocks per request: half a window at most, so that one is received while another is read."""
    return max(1, min(config.request_size, window // 2) // config.block_size)
