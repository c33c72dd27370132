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
from weakref import WeakKeyDictionary

from cachedfs.common.blocks import covering
from cachedfs.common.types import ObjectKey, Range
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
    "AccessPatterns",
    "OutstandingReadahead",
    "as_declared",
    "is_rest_worth_it",
    "patterns_of",
]


GOES_ON = 2
LEAST = 6  # reads that waited; reading a table's footer and a few of its columns takes fewer

MOST = 1000  # objects remembered
FEW = 64  # objects with more blocks are checked block by block only if an estimate favors fetching the rest
_patterns: WeakKeyDictionary[Runtime, dict[str, AccessPattern]] = WeakKeyDictionary()
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


class OutstandingReadahead:
    """The readahead requests of each run of a history.

    The event loop thread appends; the reader takes from the left. Requests are kept until their run has
    passed them: if nothing can be stored, their bytes are only in memory.
    """

    def __init__(self) -> None:
        self._by_run: dict[int, deque[InflightRequest]] = {}

    def __iter__(self) -> Iterator[InflightRequest]:
        """Yield all requests, from a copy of each run's queue."""
        for inflight_requests in self._by_run.values():
            yield from [*inflight_requests]

    def of(self, run: SequentialRun) -> deque[InflightRequest]:
        """Return the requests ahead of a run, without those it has passed. They may be in any order."""
        inflight_requests = self._by_run.setdefault(run.number, deque())
        is_backwards = run.repeats > 0 and run.start < run.origin
        for _ in range(len(inflight_requests)):
            inflight = inflight_requests.popleft()
            if inflight.start < run.stop if is_backwards else inflight.stop > run.start:
                inflight_requests.append(inflight)
        return inflight_requests

    def over(self, history: ReadHistory) -> tuple[ReadHistory, list[deque[InflightRequest]]]:
        """Remove the requests of runs that are over.

        Returns the updated history (see `ReadHistory.given_up`), and the removed requests, which the caller
        has to stop.
        """
        unwanted = []
        for number in self._by_run.keys() - {run.number for run in history.runs}:
            inflight_requests = self._by_run.pop(number)
            history = history.given_up(
                number, [inflight.blocks_until_stop for inflight in [*inflight_requests]]
            )
            unwanted.append(inflight_requests)
        return history, unwanted

    def clear(self) -> list[deque[InflightRequest]]:
        """Remove and return all requests, which are no longer wanted."""
        inflight_requests, self._by_run = [*self._by_run.values()], {}
        return inflight_requests


def patterns_of(runtime: Runtime) -> dict[str, AccessPattern]:
    """Return the access patterns by digest of the object key, the latest last. Event loop thread only."""
    return _patterns.setdefault(runtime, {})


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


class AccessPattern:
    """The access pattern of one object version."""

    def __init__(self, block_size: int) -> None:
        self.history = ReadHistory(block_size)  # of range reads; an open file has its own history
        self.sent = OutstandingReadahead()
        self.n_misses = 0
        self.rest: deque[range] | None = None  # unsent requests, once the rest is worth fetching
        self.n_earned = 0  # blocks of the rest that may be requested now
        self.of_rest: deque[InflightRequest] = deque()  # requests sent for the rest


class AccessPatterns:
    """Observe the reads of one source's objects, and request what comes next. Event loop thread only.

    The patterns belong to the runtime: all filesystems that use it share them.
    """

    def __init__(self, source: Source, fetcher: Fetcher) -> None:
        self._source = source
        self._fetcher = fetcher

    def observe_range(self, entry: MetadataEntry, key: ObjectKey, want: Range, *, is_first: bool) -> None:
        """Record a range read (such as `cat_file`) of the bytes `want`, some of which are not cached.

        `is_first`: the object was unknown, and the request that looks it up also brings these bytes.
        """
        if _is_declared.get():
            return
        self._pattern(key).n_misses += is_first
        wanted = self._wanted(entry, key, want)
        self.observe_wait(entry, key, covering(want, key.block_size))
        self._follow(entry, key, wanted)

    def observe_hit(self, entry: MetadataEntry, key: ObjectKey, want: Range) -> None:
        """Record a range read of the cached bytes `want` of an object that is read ahead."""
        self._follow(entry, key, self._wanted(entry, key, want))

    def _wanted(self, entry: MetadataEntry, key: ObjectKey, want: Range) -> list[range]:
        """Return the blocks to request ahead after a read of `want`, one range per request."""
        pattern = self._pattern(key)
        window = self._source.runtime.window(self._source.config) // key.block_size
        history, unwanted = pattern.sent.over(pattern.history.after(want.start, want.stop))
        for inflight_requests in unwanted:
            self._fetcher.forget_speculative(inflight_requests)
        pattern.history, wanted = ahead(
            history,
            n_blocks=self._n_blocks(entry, key),
            blocks_per_request=self._per_request(key, window),
            most=window,
        )
        return wanted

    def _follow(self, entry: MetadataEntry, key: ObjectKey, wanted: list[range]) -> None:
        """Request blocks ahead, and have further cached reads of this object observed."""
        pattern, followed = self._pattern(key), self._source.runtime.observed_from
        run = pattern.history.runs[0]
        if wanted:
            self._launch_speculative(entry, key, wanted, pattern.sent.of(run))
        if run.unread(key.block_size):
            followed[key.digest] = (pattern.history.last + 1) * key.block_size
        else:
            followed.pop(key.digest, None)

    def observe_wait(self, entry: MetadataEntry, key: ObjectKey, blocks: range, *, n_reads: int = 1) -> None:
        """Record that a reader waits for `blocks`, and request more of the object if that pays off.

        `n_reads` is the number of reads of the object since the last wait. If the rest fits into one request,
        what follows `blocks` is requested together with them.
        """
        if _is_declared.get():
            return
        free = self._missing(key, blocks)
        if not free or self._n_blocks(entry, key) < 2:
            return
        pattern, most = self._pattern(key), self._source.runtime.window(self._source.config) // key.block_size
        pattern.n_misses += 1
        if pattern.rest is None:
            missing = self._rest(entry, key, pattern)
            per_request = self._per_request(key, most)
            if missing is None:
                return
            if len(missing) <= per_request:
                following = [index for index in missing if index >= free[0]]
                self._fetcher.launch(entry, key, following)
            others = [index for index in missing if index not in blocks]
            pattern.rest, pattern.n_earned = deque(_requests(others, per_request)), most
        else:
            pattern.n_earned += max(1, n_reads) * self._per_request(key, most)
        requests = []
        while pattern.rest and pattern.n_earned > 0:
            requests.append(pattern.rest.popleft())
            pattern.n_earned -= len(requests[-1])
        _drop_done(pattern.of_rest)
        self._launch_speculative(entry, key, requests, pattern.of_rest)

    def _rest(self, entry: MetadataEntry, key: ObjectKey, pattern: AccessPattern) -> list[int] | None:
        """Return the missing blocks of an object if they are worth fetching, else None."""
        n_blocks, config, size = self._n_blocks(entry, key), self._source.config, key.block_size
        per_request = self._per_request(key, self._source.runtime.window(config) // size)

        def is_worth_it(n_missing: int) -> bool:
            return is_rest_worth_it(
                pattern.n_misses,
                n_missing,
                block_size=size,
                blocks_per_request=per_request,
                link=LinkEstimate(),
            )

        if (
            pattern.n_misses < 2
            or not config.read_ahead
            or not self._source.runtime.fits(config, n_blocks * size)
        ):
            return None
        if n_blocks > FEW and not is_worth_it(n_blocks - pattern.n_misses):
            return None
        missing = self._missing(key, range(n_blocks))
        return missing if is_worth_it(len(missing)) else None

    def _missing(self, key: ObjectKey, blocks: Iterable[int]) -> list[int]:
        runtime = self._source.runtime
        return [
            i
            for i in blocks
            if key.name(i) not in runtime.inflight_requests and not runtime.cache.has(key, i)
        ]

    def _launch_speculative(
        self, entry: MetadataEntry, key: ObjectKey, wanted: Iterable[range], keep: deque[InflightRequest]
    ) -> None:
        self._fetcher.launch_speculative(entry, key, wanted, keep)

    def _pattern(self, key: ObjectKey) -> AccessPattern:
        patterns = patterns_of(self._source.runtime)
        pattern = patterns.pop(key.digest, None) or AccessPattern(key.block_size)
        patterns[key.digest] = pattern
        while len(patterns) > MOST:
            oldest = next(iter(patterns))
            del patterns[oldest]
            self._source.runtime.observed_from.pop(oldest, None)
        return pattern

    def _per_request(self, key: ObjectKey, window: int) -> int:
        return max(1, min(self._source.config.request_size // key.block_size, window // 2))

    def _n_blocks(self, entry: MetadataEntry, key: ObjectKey) -> int:
        size = entry.object.size
        assert size is not None  # an object with a key has a size
        return -(-size // key.block_size)


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
