"""Readahead across objects: fetch the next chunks of an array, or the next numbered objects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from cachedfs.common.blocks import beginning, clip, covering
from cachedfs.common.types import Range, Suffix
from cachedfs.core.download import ALL, Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.lookups import Lookups
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.core.version import Version
from cachedfs.readahead.grid_walk import GridHistory
from cachedfs.readahead.object_names import METADATA, ObjectNames, Place, array_folders, arrays_in, numbered

__all__ = ["ChunkPrefetch"]

MOST_SERIES = 256  # series of objects remembered
MOST_FOLDERS = 20_000  # folders of which it is known whether they are arrays
MOST_SENT = 16
# bytes; larger metadata documents are not parsed, because that would delay the event loop
MOST_METADATA = 2 << 20
MOST_ABOVE = 8  # levels searched for metadata, from the array's folder upward


class _Series:
    """A series of objects (the chunks of an array, or numbered files): how they are read, and their size."""

    def __init__(self, names: ObjectNames) -> None:
        self.names = names
        self.reads = GridHistory(names.extents)
        # The first range that was read of the latest object: `[start:stop]`.
        self.start: int | None = None
        self.stop: int | None = None
        self.size: int | None = None  # of the latest object whose size is known
        self.is_whole = False  # the object before was read completely, even if `[start:stop]` is less
        self.queued: dict[str, Place] = {}  # requests that are not sent yet
        self.sent: deque[Download] = deque(maxlen=MOST_SENT)  # the latest requests for known objects

    @property
    def asks_all(self) -> bool:
        """True when the first read of each object covers all of it."""
        return not self.start and self.stop is None


class ChunkPrefetch:
    """Predict and fetch the next objects of each series. Event loop thread only, except `reached`.

    An object is requested only if the array's shape or a fresh metadata entry says that it exists. The
    request covers the range that was read first of its predecessors, so the next reader finds that range
    cached or in flight.
    """

    def __init__(
        self,
        objects: Objects,
        downloads: Downloads,
        lookups: Lookups,
        cached: Callable[[Version, int, int], bytes | None],
    ) -> None:
        self._objects, self._downloads, self._lookups = objects, downloads, lookups
        self._cached = cached  # returns bytes of a version if all are cached or received
        # Names requested ahead and not read yet. Any thread looks names up, and removes those it reads.
        self.awaited: set[str] = set()
        # reads of these names that are not processed yet
        self._reached: deque[tuple[str, int | None, int | None]] = deque()
        self._is_scheduled = False  # a call that processes them is scheduled on the event loop
        self._series: dict[ObjectNames, _Series] = {}
        # By folder: the metadata document of its array, with its version; None without an array.
        self._arrays: dict[str, tuple[str, Version, ObjectNames] | None] = {}

    def reached(self, path: str, start: int | None, stop: int | None) -> None:
        """Record a read of a name that was requested ahead, even if it is already cached. From any thread."""
        self.awaited.discard(path)
        self._reached.append((path, start, stop))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._objects.engine.call_soon(self._observe_reached)

    def _observe_reached(self) -> None:
        self._is_scheduled = False  # first, so that a read recorded from now on schedules another call
        while self._reached:
            self._observe(*self._reached.popleft())

    def observe(self, path: str, start: int | None = None, stop: int | None = None) -> None:
        """Record a read of `[start:stop]` of `path`, and request what will probably be read next."""
        self._observe_reached()
        self._observe(path, start, stop)

    def _observe(self, path: str, start: int | None, stop: int | None) -> None:
        self.awaited.discard(path)
        config, engine = self._objects.config, self._objects.engine
        is_kept = self._objects.lifetime_s > 0 and engine.cache.cannot_store is None
        if not (config.read_ahead > 0 and is_kept) or config.offline:
            return
        if path.endswith(METADATA):
            # Folders without an array may be known to have one soon.
            self._arrays = {folder: array for folder, array in self._arrays.items() if array is not None}
            return
        # A read inside an object says nothing about the next object.
        found = self._find(path) if start is None or start <= 0 else None
        if found is None or found[1] in found[0].reads.lately:
            return
        series, place = found
        series.queued.pop(path, None)
        series.start, series.stop = start, stop
        if series.reads.observe(place):
            self._cancel(series)
        self._look_back(series)
        if not self._look_ahead(series):
            engine.speculation.pump()  # the request for `path` is no longer speculative, so its slot is free

    def _look_back(self, series: _Series) -> None:
        """Record the size of the previous object, and whether all of it is cached or being fetched."""
        engine, before = self._objects.engine, series.reads.before
        version = None if before is None else self._object(series.names.path(before))
        series.is_whole = series.asks_all
        if version is None:
            return
        series.size = version.size

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

    def _find(self, path: str) -> tuple[_Series, Place] | None:
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

    def _series_of(self, names: ObjectNames) -> _Series:
        if (series := self._series.get(names)) is None:
            series = self._series[names] = _Series(names)
            if len(self._series) > MOST_SERIES:
                oldest = self._series.pop(next(iter(self._series)))
                self._cancel(oldest)
                self.awaited.difference_update(map(oldest.names.path, oldest.reads.unread))
        return series

    def _array(self, folder: str) -> ObjectNames | None:
        """Return the chunk names of the array in `folder`, according to cached metadata; None without one."""
        if folder in self._arrays:
            known = self._arrays[folder]
            if known is None:
                return None
            if self._object(known[0]) == known[1]:
                return known[2]
        if len(self._arrays) >= MOST_FOLDERS:
            self._arrays.clear()
        self._arrays[folder] = None
        above = folder
        for level in range(MOST_ABOVE):
            for name in ("zarr.json", ".zmetadata" if level else ".zarray"):
                found = self._parsed(above + name).get(folder)
                if found is not None:
                    return found
            above = above[: above.rfind("/", 0, -1) + 1]
            if not above:
                break
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

    def _look_ahead(self, series: _Series) -> int:
        """Request the objects that the history predicts; return their number."""
        config, engine = self._objects.config, self._objects.engine
        # Nothing is known before the first object is received.
        size = max(1, config.whole_request if series.size is None else series.size)
        exists = series.names.extents[0] is not None
        n = 0
        for place in series.reads.ahead(max(1, engine.window(config) // size)):
            path = series.names.path(place)
            entry = None if exists else self._objects.fresh(path)
            if not exists and (entry is None or self._objects.version(entry) is None):
                break  # it is not known to exist
            self._ask(series, path, place, min(size, config.whole_request))
            n += 1
        return n

    def _ask(self, series: _Series, path: str, place: Place, size: int) -> None:
        series.reads.unread.add(place)
        series.queued[path] = place
        self.awaited.add(path)

        def send() -> asyncio.Task[Iterable[Download]]:
            series.queued.pop(path, None)
            return self._objects.engine.spawn(self._request(series, path))

        origin = partial(self._objects.origin, path)
        # A reader that gets to the object before this request is sent fetches it by itself.
        request = SpeculativeRequest(series, size, send, origin, is_wanted=lambda: path not in self.awaited)
        self._objects.engine.speculation.submit(request)

    def _cancel(self, series: _Series) -> None:
        """Cancel the unsent requests of a series whose reader went elsewhere."""
        for owner in (series, series.sent):
            self._objects.engine.speculation.cancel(owner)
        for path, place in series.queued.items():
            self.awaited.discard(path)
            series.reads.unread.discard(place)
        series.queued.clear()

    async def _request(self, series: _Series, path: str) -> Iterable[Download]:
        """Request the range that was read first of the previous objects, or all that was read of them."""
        config = self._objects.config
        step = config.whole_request
        want: Range | Suffix = beginning(series.start, series.stop, block_size=config.block_size, most=step)
        if series.start is not None and series.start < 0:
            want = Suffix(config.block_size - 1 - series.start)
        entry, download = await self._lookups.resolve(path, want, demand=ALL)
        version = self._objects.version(entry)
        if version is None:
            return () if download is None else (download,)
        if series.is_whole:
            most = min(version.size, self._objects.engine.window(config))
            parts = [
                covering(Range(start, min(version.size, start + step)), version.block_size)
                for start in range(step if series.asks_all else 0, most, step)
            ]
            self._downloads.launch_speculative(version, parts, series.sent)
        if download is not None:
            return (download,)
        blocks = covering(clip(series.start, series.stop, version.size), version.block_size)
        return self._downloads.launch_missing(version, blocks[: step // version.block_size], series.sent)
