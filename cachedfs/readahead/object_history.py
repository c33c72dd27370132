"""Access patterns per object: readahead for range reads, and when to fetch the rest of an object.

Cost model: a read that misses waits for one request. The rest of the object takes full-size requests, at the
speed of the whole link. Fetching it pays off when going on as before would take more requests and more time.
How long a reader goes on is unknown; the assumption is GOES_ON times as long as so far.

In simulation (readers of every length, each length ten times as likely as one ten times as long; objects of
25, 192 and 1,000 blocks), reads take 0.77, 0.68 and 0.68 of the time, and 0.89, 0.96 and 0.81 of the
requests. With a factor of 1 they take more time (0.74 at 192 blocks); with a factor of 3, more requests
(1.03).

A reader that stops after the decision has cost one window. At first no more than one window is fetched and
unread; every further read adds one request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from weakref import WeakKeyDictionary

from cachedfs.common.blocks import covering
from cachedfs.common.types import ObjectKey, Range
from cachedfs.config import Config
from cachedfs.fetch.fetch_queue import LinkEstimate
from cachedfs.fetch.fetcher import Fetcher
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.fetch.runtime import Runtime
from cachedfs.fetch.source import Source
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
FEW = 64  # objects with more blocks are checked block by block only if an estimate favors fetching the rest
_by_runtime: WeakKeyDictionary[Runtime, dict[str, ObjectHistory]] = WeakKeyDictionary()
_is_declared = ContextVar("cachedfs_is_declared", default=False)


def is_rest_worth_it(
    n_misses: int, n_missing: int, *, block_size: int, blocks_per_request: int, link: LinkEstimate
) -> bool:
    """Return whether to fetch the `n_missing` blocks of an object after `n_misses` reads had to wait.

    Pass typical figures as `link`: momentary ones would make the decision depend on chance. If the missing
    blocks fit into one request, the second read that waits is enough, and its request takes them along.
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
        self._requests: dict[int, deque[InflightRequest]] = {}

    def __iter__(self) -> Iterator[InflightRequest]:
        """Yield all requests, from a copy of each run's queue."""
        for requests in self._requests.values():
            yield from [*requests]

    def observe(self, fetcher: Fetcher, start: int, stop: int, *, left: int | None = None) -> None:
        """Record a read (see `ReadHistory.after`), and stop requests that are no longer wanted."""
        history, n_wasted = self.history.after(start, stop, left=left), 0
        for run in history.dropped:
            requests = self._requests.pop(run.number, deque())
            arriving = {index for inflight in [*requests] for index in inflight.blocks_until_stop}
            n_wasted += sum(
                index in arriving for blocks in run.unread(history.block_size) for index in blocks
            )
            fetcher.source.runtime.call_soon(fetcher.forget_speculative, requests)
        self.history = history._replace(dropped=(), n_wasted=history.n_wasted + n_wasted)

    def request(self, fetcher: Fetcher, entry: MetadataEntry, key: ObjectKey) -> list[range]:
        """Request the blocks that the history predicts, and return them."""
        config, runtime, block_size = fetcher.source.config, fetcher.source.runtime, key.block_size
        window = runtime.window(config)
        self.history, wanted = ahead(
            self.history,
            n_blocks=_n_blocks(entry, key),
            blocks_per_request=_per_request(config, window),
            most=window // block_size,
        )
        if wanted:
            keep = self.requests_of(self.history.runs[0])
            runtime.call_soon(fetcher.launch_speculative, entry, key, wanted, keep)
        return wanted

    def requests_of(self, run: SequentialRun) -> deque[InflightRequest]:
        """Return the requests ahead of a run, without those it has passed. They may be in any order."""
        requests = self._requests.setdefault(run.number, deque())
        is_backwards = run.repeats > 0 and run.start < run.origin
        for _ in range(len(requests)):
            inflight = requests.popleft()
            if inflight.start < run.stop if is_backwards else inflight.stop > run.start:
                requests.append(inflight)
        return requests

    def close(self, fetcher: Fetcher) -> None:
        """Stop all requests."""
        while self._requests:
            _, requests = self._requests.popitem()
            fetcher.source.runtime.call_soon(fetcher.forget_speculative, requests)


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
        self.of_rest: deque[InflightRequest] = deque()  # requests sent for the rest


class ObjectHistories:
    """Observe the reads of one source's objects, and request what comes next.

    Event loop thread only, except `is_observed`. All filesystems that use a runtime share the histories.
    """

    def __init__(self, source: Source, fetcher: Fetcher) -> None:
        self._source = source
        self._fetcher = fetcher
        self._here: tuple[Runtime | None, dict[str, ObjectHistory]] = None, {}

    @property
    def by_digest(self) -> dict[str, ObjectHistory]:
        """The histories by digest of the object key, the latest last."""
        runtime = self._source.runtime
        if self._here[0] is not runtime:
            self._here = runtime, _by_runtime.setdefault(runtime, {})
        return self._here[1]

    def is_observed(self, key: ObjectKey, want: Range) -> bool:
        """Return whether `observe_hit` should be told of a read of cached bytes. From any thread."""
        history = self.by_digest.get(key.digest)
        return history is not None and history.observed_from is not None and want.stop > history.observed_from

    def observe_range(self, entry: MetadataEntry, key: ObjectKey, want: Range, *, is_first: bool) -> None:
        """Record a range read (such as `cat_file`) of the bytes `want`, some of which are not cached.

        `is_first`: the object was unknown, and the request that looks it up also brings these bytes.
        """
        if _is_declared.get():
            return
        history = self._history(key)
        history.n_misses += is_first
        history.readahead.observe(self._fetcher, want.start, want.stop)
        self.observe_wait(entry, key, covering(want, key.block_size))
        self._read_ahead(history, entry, key)

    def observe_hit(self, entry: MetadataEntry, key: ObjectKey, want: Range) -> None:
        """Record a range read of the cached bytes `want` of an object that is read ahead."""
        history = self._history(key)
        history.readahead.observe(self._fetcher, want.start, want.stop)
        self._read_ahead(history, entry, key)

    def _read_ahead(self, history: ObjectHistory, entry: MetadataEntry, key: ObjectKey) -> None:
        history.readahead.request(self._fetcher, entry, key)
        reads = history.readahead.history
        is_ahead = reads.runs[0].n_unread(key.block_size) > 0
        history.observed_from = (reads.last + 1) * key.block_size if is_ahead else None

    def observe_wait(self, entry: MetadataEntry, key: ObjectKey, blocks: range, *, n_reads: int = 1) -> None:
        """Record that a reader waits for `blocks`, and request more of the object if that pays off.

        `n_reads` is the number of reads of the object since the last wait. If the rest fits into one request,
        what follows `blocks` is requested together with them.
        """
        free = self._missing(key, blocks)
        if _is_declared.get() or not free or _n_blocks(entry, key) < 2:
            return
        history, window = self._history(key), self._source.runtime.window(self._source.config)
        per_request = _per_request(self._source.config, window)
        history.n_misses += 1
        if history.rest is not None:
            history.n_earned += max(1, n_reads) * per_request
        elif missing := self._rest(entry, key, history.n_misses, per_request):
            if len(missing) <= per_request:
                self._fetcher.launch(entry, key, [index for index in missing if index >= free[0]])
            others = [index for index in missing if index not in blocks]
            history.rest, history.n_earned = deque(_requests(others, per_request)), window // key.block_size
        requests = []
        while history.rest and history.n_earned > 0:
            requests.append(history.rest.popleft())
            history.n_earned -= len(requests[-1])
        _drop_done(history.of_rest)
        self._fetcher.launch_speculative(entry, key, requests, history.of_rest)

    def _rest(self, entry: MetadataEntry, key: ObjectKey, n_misses: int, per_request: int) -> list[int]:
        """Return the missing blocks of an object if they are worth fetching, else an empty list."""
        config, n_blocks = self._source.config, _n_blocks(entry, key)
        is_worth_it = partial(
            is_rest_worth_it,
            n_misses,
            block_size=key.block_size,
            blocks_per_request=per_request,
            link=LinkEstimate(),
        )
        if (
            n_misses < 2
            or not config.read_ahead
            or not self._source.runtime.fits(config, n_blocks * key.block_size)
        ):
            return []
        if n_blocks > FEW and not is_worth_it(n_blocks - n_misses):
            return []
        missing = self._missing(key, range(n_blocks))
        return missing if is_worth_it(len(missing)) else []

    def _missing(self, key: ObjectKey, blocks: Iterable[int]) -> list[int]:
        runtime = self._source.runtime
        return [
            i
            for i in blocks
            if key.name(i) not in runtime.inflight_requests and not runtime.cache.has(key, i)
        ]

    def _history(self, key: ObjectKey) -> ObjectHistory:
        histories = self.by_digest
        history = histories.pop(key.digest, None)
        if history is None:
            history = ObjectHistory(key.block_size)
        histories[key.digest] = history
        while len(histories) > MOST:
            del histories[next(iter(histories))]
        return history


def _n_blocks(entry: MetadataEntry, key: ObjectKey) -> int:
    assert entry.object.size is not None  # an object with a key has a size
    return -(-entry.object.size // key.block_size)


def _per_request(config: Config, window: int) -> int:
    """Return the blocks per request: half a window at most, so that one is received while another is read."""
    return max(1, min(config.request_size, window // 2) // config.block_size)


def _requests(indexes: list[int], length: int) -> Iterator[range]:
    """Yield runs of adjacent indexes, each up to `length` long. The indexes ascend."""
    start = stop = -1
    for index in indexes:
        if index != stop or stop - start == length:
            if start >= 0:
                yield range(start, stop)
            start = index
        stop = index + 1
    if start >= 0:
        yield range(start, stop)


def _drop_done(inflight_requests: deque[InflightRequest]) -> None:
    for _ in range(len(inflight_requests)):
        if not (inflight := inflight_requests.popleft()).released:
            inflight_requests.append(inflight)
