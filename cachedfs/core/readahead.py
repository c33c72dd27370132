"""Readahead: observe reads, and request what the predictors in `cachedfs.readahead` expect next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain

from cachedfs.common.blocks import clip, covering, first_range
from cachedfs.common.types import Range
from cachedfs.common.version import Version
from cachedfs.core.download import ALL, Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.lookups import Lookups
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.readahead.grid_walk import GridHistory
from cachedfs.readahead.object_names import METADATA, ObjectNames, Place, array_folders, arrays_in, numbered
from cachedfs.readahead.runs import ReadHistory, earned, is_rest_worth_it, requests_for

MOST_OBJECTS = 1000  # object versions whose reads are remembered
# An object counts as cached after this many reads of cached blocks that were not requested ahead.
CACHED_AFTER = 64
MOST_SERIES = 256  # series of objects remembered
MOST_FOLDERS = 20_000  # folders of which it is known whether they are arrays
MOST_KEPT = 64  # requests
# bytes; larger metadata documents are not parsed, because that would delay the event loop
MOST_METADATA = 2 << 20
MOST_ABOVE = 8  # levels searched for metadata, from the array's folder upward

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


class ObjectHistory(ReadHistory):
    """The reads of one object version, by open files and by ranges, and the requests ahead of them.

    Changed on the event loop thread. Any thread may look, and call `take`.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # Blocks requested for a caller or ahead, without those of `rest`, and not read yet: reading them is no hit.
        self.requested: set[int] = set()
        self.n_to_observe = 0  # reads of cached blocks to be observed from now on
        self.files: set[int] = set()  # ids of the open files that are read ahead
        self.n_misses = 0
        self.rest: list[int] | None = None  # blocks to request, once the rest is worth fetching
        self.n_earned = 0  # blocks of the rest that may be requested now
        self.rest_sent: deque[Download] = deque(maxlen=MOST_KEPT)  # the latest requests sent for the rest

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
        sent = (download for run in self.runs for download in list(run.requests))
        return next((download for download in sent if download.covers(position)), None)

    def unread_requests(self) -> deque[Download]:
        """Return the requests ahead of the latest run, without those whose blocks were all read.

        If nothing can be stored, their bytes are only in memory.
        """
        requests = self.runs[0].requests
        for _ in range(len(requests)):
            download = requests.popleft()
            if not self.unread.keys().isdisjoint(
                covering(Range(download.start, download.stop), self.block_size)
            ):
                requests.append(download)
        return requests


class Series:
    """A series of objects (the chunks of an array, or numbered files): how they are read, and their size."""

    def __init__(self, names: ObjectNames) -> None:
        self.names = names
        self.reads = GridHistory(names.extents)
        # The first range that was read of the latest object: `[start:stop]`.
        self.start: int | None = None
        self.stop: int | None = None
        self.n_seen = self.n_bytes = 0  # objects whose size is known, and the sum of their sizes
        self.is_whole = False  # the object before was read completely, even if `[start:stop]` is less
        self.sent: deque[Download] = deque(maxlen=MOST_KEPT)  # the latest requests for known objects


class Readahead:
    """Observes the reads of one origin, and requests what comes next, in an object and in the next ones.

    Event loop thread only, except `reached`. All filesystems that use an engine share the histories of objects. The
    next object is requested only if the array's shape or a fresh metadata entry says that it exists. The request covers
    the range that was read first of its predecessors, so the next reader finds that range cached or in flight.
    """

    def __init__(
        self,
        objects: Objects,
        downloads: Downloads,
        lookups: Lookups,
        cached: Callable[[Version, int, int], bytes | None],
    ) -> None:
        self._objects, self._downloads, self._lookups = objects, downloads, lookups
        self._config = objects.config
        self._cached = cached  # returns bytes of a version if all are cached or received
        # Names requested ahead and not read yet. Any thread looks names up, and removes those it reads.
        self.awaited: set[str] = set()
        self._series: dict[ObjectNames, Series] = {}
        # By folder: the metadata document of its array, with its version.
        self._arrays: dict[str, tuple[str, Version, ObjectNames]] = {}
        self._no_arrays: set[str] = set()  # folders without an array, according to cached metadata

    # In an object.

    def observe(
        self,
        version: Version,
        start: int,
        stop: int,
        *,
        last_stop: int | None = None,
        file: int | None = None,
        missed: range = range(0),
        is_first: bool = False,
    ) -> None:
        """Record a read, by the open file with this id or by range, and request what will probably be read next.

        The reader may have to wait for the blocks `missed`. `is_first`: the object was unknown, and the request that
        looks it up also brings these bytes. `last_stop`: see `ReadHistory.observe`.
        """
        if _is_declared.get() or version.n_blocks < 2:
            return
        history, window = self.history(version), self._objects.engine.window(self._config)
        # Half a window at most, so that one request is received while another is read.
        per_request = max(1, min(self._config.request_size, window // 2) // version.block_size)
        most = window // version.block_size
        if file is not None:
            history.files.add(file)
        if missed:
            history.n_misses, history.n_to_observe = history.n_misses + is_first, CACHED_AFTER
            self._request_rest(version, history, missed, per_request, most)
        n_touched = history.n_touched
        for run in history.observe(start, stop, last_stop=last_stop):
            history.end(run, {index for download in run.requests for index in download.blocks_until_stop})
            self._downloads.cancel_speculative(run.requests)
        # A read is reported twice if its block is stored, and released, before the reader takes the bytes.
        if history.n_touched > n_touched and history.rest is not None:
            is_metered = self._objects.origin(version.info.path).is_metered
            history.n_earned += earned(
                history.n_touched, version.n_blocks, per_request=per_request, is_metered=is_metered
            )
        if wanted := history.ahead(version.n_blocks, per_request, most, partial(self._is_missing, version)):
            history.requested.update(chain(*wanted))
            self._downloads.launch_speculative(version, wanted, history.unread_requests())

    def _request_rest(
        self, version: Version, history: ObjectHistory, missed: range, per_request: int, most: int
    ) -> None:
        """Record a miss, and request more of the rest of the object if that pays off.

        If the rest fits into one request, what follows the first missing block is requested together with it.
        """
        n_blocks, engine = version.n_blocks, self._objects.engine
        first = next((index for index in missed if self._is_missing(version, index)), None)
        if first is None:
            return
        history.n_misses += 1
        is_worth_it = is_rest_worth_it(history.n_misses, n_blocks - history.n_misses, per_request=per_request)
        if history.rest is None and is_worth_it and engine.fits(self._config, n_blocks * version.block_size):
            missing = [index for index in range(n_blocks) if self._is_missing(version, index)]
            if len(missing) <= per_request:
                self._downloads.launch(version, [index for index in missing if index >= first])
            history.rest = [index for index in missing if index not in missed]
            history.n_earned = most
        if history.rest:
            blocks, history.rest = history.rest[: history.n_earned], history.rest[history.n_earned :]
            history.n_earned -= len(blocks)
            self._downloads.launch_speculative(version, requests_for(blocks, per_request), history.rest_sent)

    def _is_missing(self, version: Version, index: int) -> bool:
        engine = self._objects.engine
        return (version.digest, index) not in engine.by_block and not engine.cache.has(version, index)

    def close_file(self, version: Version, file: int) -> None:
        """Cancel what was requested ahead once the last open file of an object is closed."""
        history = self._objects.engine.histories.get(version.digest)
        if history is not None and file in history.files:
            history.files.remove(file)
            if not history.files:
                for run in history.end_all():
                    self._downloads.cancel_speculative(run.requests)

    def history(self, version: Version) -> ObjectHistory:
        """Return the history of an object, a new one if there is none."""
        histories = self._objects.engine.histories
        if (history := histories.get(version.digest)) is None:
            history = histories[version.digest] = ObjectHistory(version.block_size)
            if len(histories) > MOST_OBJECTS:
                histories.popitem(last=False)
        histories.move_to_end(version.digest)  # never out of it: other threads look
        return history

    # In the next objects.

    def reached(self, path: str, start: int | None, stop: int | None) -> None:
        """Record a read of a name that was requested ahead, even if it is already cached. From any thread."""
        self.awaited.discard(path)
        self._objects.engine.call_soon(self.observe_object, path, start, stop)

    def observe_object(self, path: str, start: int | None = None, stop: int | None = None) -> None:
        """Record a read of `[start:stop]` of `path`, and request what will probably be read next."""
        self.awaited.discard(path)
        engine = self._objects.engine
        if self._config.offline or self._objects.lifetime_s <= 0 or engine.cache.cannot_store is not None:
            return
        if path.endswith(METADATA):
            self._no_arrays.clear()
            return
        # A read inside an object says nothing about the next object.
        found = self._find(path) if start is None or start <= 0 else None
        if found is None or found[1] in found[0].reads.recent:
            return
        series, place = found
        series.reads.observe(place)
        series.start, series.stop = start, stop
        self._look_back(series)
        if not self._look_ahead(series):
            engine.speculation.pump()  # the request for `path` is no longer speculative, so its slot is free

    def _look_back(self, series: Series) -> None:
        """Record the size of the previous object, and whether all of it is cached or being fetched."""
        engine, before = self._objects.engine, series.reads.before
        version = None if before is None else self._object(series.names.path(before))
        series.is_whole = not series.start and series.stop is None
        if version is None:
            return
        series.n_seen, series.n_bytes = series.n_seen + 1, series.n_bytes + version.size

        def is_coming(index: int) -> bool:
            # The request of an open file may cover more than its reader wants; `demand` is how far it reads.
            download = engine.by_block.get((version.digest, index))
            return download is not None and download.demand > index * version.block_size

        blocks = range(version.n_blocks)
        series.is_whole |= all(is_coming(index) or engine.cache.has(version, index) for index in blocks)

    def _object(self, path: str) -> Version | None:
        """Return the known version of an object, without a request; None for anything else.

        One in memory may be replaced by now: then what is requested ahead is of no use.
        """
        entry = self._objects.entries.get(path) or self._objects.known(path)
        return None if entry is None else self._objects.version(entry)

    # Find the series of a name.

    def _find(self, path: str) -> tuple[Series, Place] | None:
        """Return the series that `path` belongs to, and its index there."""
        for folder in array_folders(path):
            names = self._array(folder)
            if names is not None and (place := names.chunk(path)) is not None:
                return self._series_of(names), place
        if (found := numbered(path)) is None:
            return None
        names, place = found
        # A zero-padded series goes from 0099 to 0100, which has no leading zero.
        padded = names._replace(width=len(str(place[0])))
        return self._series_of(padded if padded in self._series else names), place

    def _series_of(self, names: ObjectNames) -> Series:
        if (series := self._series.get(names)) is None:
            series = self._series[names] = Series(names)
            if len(self._series) > MOST_SERIES:
                oldest = self._series.pop(next(iter(self._series)))
                self.awaited.difference_update(map(oldest.names.path, oldest.reads.unread))
        return series

    def _array(self, folder: str) -> ObjectNames | None:
        """Return the chunk names of the array in `folder`, according to cached metadata; None without one."""
        known = self._arrays.get(folder)
        if known is not None and self._object(known[0]) == known[1]:
            return known[2]
        if folder in self._no_arrays:
            return None
        above = folder
        for level in range(MOST_ABOVE):
            for name in ("zarr.json", ".zmetadata" if level else ".zarray"):
                if (found := self._parsed(above + name).get(folder)) is not None:
                    return found
            above = above[: above.rfind("/", 0, -1) + 1]
            if not above:
                break
        if len(self._arrays) + len(self._no_arrays) >= MOST_FOLDERS:
            self._arrays.clear()
            self._no_arrays.clear()
        self._no_arrays.add(folder)
        return None

    def _parsed(self, path: str) -> dict[str, ObjectNames]:
        """Return the arrays in a metadata document if it is cached, and remember them. Sends no request."""
        version = self._object(path)
        if version is None or version.size > MOST_METADATA:
            return {}
        data = self._cached(version, 0, version.size)
        arrays = {} if data is None else arrays_in(path, data)
        self._arrays.update({folder: (path, version, names) for folder, names in arrays.items()})
        return arrays

    # Request what comes next.

    def _look_ahead(self, series: Series) -> int:
        """Request the objects that the history predicts; return their number."""
        config, engine = self._config, self._objects.engine
        # Nothing is known before the first object is received.
        size = max(1, series.n_bytes // series.n_seen) if series.n_seen else config.whole_request
        exists = series.names.extents[0] is not None
        n = 0
        for place in series.reads.ahead(max(1, engine.window(config) // size)):
            path = series.names.path(place)
            entry = None if exists else self._objects.fresh(path)
            if not exists and (entry is None or self._objects.version(entry) is None):
                break  # it is not known to exist
            self._submit(series, path, place, min(size, config.whole_request))
            n += 1
        return n

    def _submit(self, series: Series, path: str, place: Place, size: int) -> None:
        series.reads.unread.add(place)
        self.awaited.add(path)

        def send() -> asyncio.Task[Iterable[Download]]:
            return self._objects.engine.spawn(self._request(series, path))

        origin = partial(self._objects.origin, path)
        # A reader that gets to the object before this request is sent fetches it by itself.
        request = SpeculativeRequest(series, size, send, origin, is_wanted=lambda: path not in self.awaited)
        self._objects.engine.speculation.submit(request)

    async def _request(self, series: Series, path: str) -> Iterable[Download]:
        """Request the range that was read first of the previous objects, or all that was read of them."""
        config = self._config
        step = config.whole_request
        want = first_range(series.start, series.stop, config.block_size, step)
        entry, download = await self._lookups.resolve(path, want, demand=ALL)
        version = self._objects.version(entry)
        if version is None:
            return () if download is None else (download,)
        per_request = step // version.block_size
        sent: Iterable[Download] = (download,) if download is not None else ()
        if download is None:
            blocks = covering(clip(series.start, series.stop, version.size), version.block_size)
            sent = self._downloads.launch_missing(version, blocks[:per_request], series.sent)
        if series.is_whole:
            n_blocks = -(-min(version.size, self._objects.engine.window(config)) // version.block_size)
            missing = [index for index in range(n_blocks) if self._is_missing(version, index)]
            self._downloads.launch_speculative(version, requests_for(missing, per_request), series.sent)
        return sent
