"""Readahead across objects: fetch the next chunks of an array, or the next numbered objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from cachedfs.common.blocks import clip, covering
from cachedfs.common.types import Range, Suffix
from cachedfs.core.download import ALL, Download
from cachedfs.core.downloads import Downloads
from cachedfs.core.lookups import Lookups
from cachedfs.core.objects import Objects
from cachedfs.core.speculation import SpeculativeRequest
from cachedfs.core.version import Version
from cachedfs.readahead.chunk_grid import METADATA, ChunkGrid, NumberedNames, Place, grids_in, numbered
from cachedfs.readahead.chunk_sequence import ChunkHistory, Extents, ahead

__all__ = ["ChunkPrefetch", "first_want"]

MOST_SERIES = 256  # series of objects, and metadata documents, remembered
MOST_SENT = 16
MOST_AWAITED = 20_000  # names requested ahead and not read yet
# bytes; larger metadata documents are not parsed, because that would delay the event loop
MOST_METADATA = 2 << 20
MOST_ABOVE = 8  # levels searched for metadata, from the array's folder upward

_Document = tuple[str, Version]  # path and version of a metadata document


class _Series:
    """A series of objects (the chunks of a grid, or numbered names): how they are read, and their size."""

    def __init__(
        self, names: ChunkGrid | NumberedNames, root: str = "", document: _Document | None = None
    ) -> None:
        self.names = names
        self.root = root  # in front of each name
        self.document = document  # where the grid comes from
        self.extents: Extents = names.extents if isinstance(names, ChunkGrid) else (None,)
        self.history = ChunkHistory()
        # The first range that is read of each object: `[start:stop]`.
        self.start: int | None = None
        self.stop: int | None = None
        self.is_whole = False  # earlier objects were read completely, even if `[start:stop]` is less
        self.n_seen = self.n_bytes = 0  # objects read whose size is known, and the sum of their sizes
        self.sent: deque[Download] = deque(maxlen=MOST_SENT)  # the latest requests for known objects

    @property
    def asks_all(self) -> bool:
        """True when the first read of each object covers all of it."""
        return not self.start and self.stop is None

    def path(self, place: Place) -> str:
        return self.root + self.names.name(place)


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
        # Names requested ahead and not read yet; with their series while the request is queued, with None once it is
        # sent. Any thread looks names up, and removes those it reads.
        self.awaited: dict[str, _Series | None] = {}
        # reads of these names that are not processed yet
        self._reached: deque[tuple[str, int | None, int | None]] = deque()
        self._is_scheduled = False  # a call that processes them is scheduled on the event loop
        self._series: dict[str | NumberedNames, _Series] = {}
        self._no_arrays: set[str] = set()  # folders without an array, according to the cached metadata
        self._documents: dict[Version, dict[str, ChunkGrid]] = {}

    def reached(self, path: str, start: int | None, stop: int | None) -> None:
        """Record a read of a name that was requested ahead, even if it is already cached. From any thread."""
        self.awaited.pop(path, None)
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
        self.awaited.pop(path, None)
        if not self._is_on():
            return
        if path.endswith(METADATA):
            self._no_arrays.clear()
            return
        # A read inside an object says nothing about the next object.
        found = self._find(path) if start is None or start <= 0 else None
        if found is None:
            return
        series, place = found
        before = series.history
        series.history = before.after(place, series.extents)
        if series.history is before:
            return  # read a moment ago
        series.start, series.stop = start, stop
        self._look_back(series)
        if series.history.n_wasted > before.n_wasted:
            self._cancel(series)
        if not self._look_ahead(series):
            # the request for `path` is no longer speculative, so its slot is free
            self._objects.engine.speculation.pump()

    def _is_on(self) -> bool:
        """Return whether readahead is useful: its results are stored, and still fresh when they are read."""
        config, cannot_store = self._objects.config, self._objects.engine.cache.cannot_store
        is_kept = self._objects.lifetime_s > 0 and cannot_store is None
        return config.read_ahead > 0 and is_kept and not config.offline

    def _look_back(self, series: _Series) -> None:
        """Record the size of the previous object, and whether all of it is cached or being fetched."""
        engine, before = self._objects.engine, series.history.before
        series.is_whole = series.asks_all
        version = None if before is None else self._object(series.path(before))
        if version is None:
            return
        series.n_seen, series.n_bytes = series.n_seen + 1, series.n_bytes + version.size

        def is_coming(index: int) -> bool:
            # The request of an open file may cover more than its reader wants; `demand` is how far it reads.
            download = engine.by_block.get((version.digest, index))
            return download is not None and download.demand > index * version.block_size

        series.is_whole |= all(
            is_coming(index) or engine.cache.has(version, index) for index in range(version.n_blocks)
        )

    def _object(self, path: str) -> Version | None:
        """Return the known version of an object, without a request; None for anything else.

        One in memory may be replaced by now: then what is requested ahead is of no use.
        """
        entry = self._objects.entries.get(path) or self._objects.known(path)
        return None if entry is None else self._objects.version(entry)

    # Find the series of a name.

    def _find(self, path: str) -> tuple[_Series, Place] | None:
        """Return the series that `path` belongs to, and its index there."""
        for root in _roots(path):
            series = self._array(root)
            if series is not None and isinstance(series.names, ChunkGrid):
                place = series.names.place(path[len(root) :])
                if place is not None:
                    return series, place
        if (found := numbered(path)) is None:
            return None
        names, place = found
        # A zero-padded series goes from 0099 to 0100, which has no leading zero.
        padded = self._series.get(names._replace(width=len(str(place[0]))))
        series = padded or self._series.get(names) or self._keep(names, _Series(names))
        return series, place

    def _array(self, root: str) -> _Series | None:
        """Return the series of the array at `root`, a new one if its metadata has changed; None without one."""
        series = self._series.get(root)
        if series is not None and series.document is not None:
            path, version = series.document
            if self._object(path) == version:
                return series
            self._cancel(self._series.pop(root))
        if root in self._no_arrays:
            return None
        below, folder = "", root.removesuffix("/")
        for level in range(MOST_ABOVE):
            for kind in ("zarr.json", ".zmetadata" if level else ".zarray"):
                path = f"{folder}/{kind}"
                found = self._object(path)
                grid = self._grids(kind, found).get(below) if found is not None else None
                if found is not None and grid is not None:
                    return self._keep(root, _Series(grid, root, (path, found)))
            folder, _, last = folder.rpartition("/")
            below = f"{last}/{below}" if below else last
            if not folder:
                break
        if len(self._no_arrays) >= MOST_AWAITED:
            self._no_arrays.clear()
        self._no_arrays.add(root)
        return None

    def _keep(self, slot: str | NumberedNames, series: _Series) -> _Series:
        self._series[slot] = series
        if len(self._series) > MOST_SERIES:
            self._cancel(self._series.pop(next(iter(self._series))))
        return series

    def _grids(self, kind: str, version: Version) -> dict[str, ChunkGrid]:
        """Return the grids in a metadata document if it is cached. Sends no request."""
        if version not in self._documents:
            data = self._cached(version, 0, version.size) if version.size <= MOST_METADATA else None
            if data is None:
                return {}
            self._documents[version] = grids_in(kind, data)
            if len(self._documents) > MOST_SERIES:
                del self._documents[next(iter(self._documents))]
        return self._documents[version]

    # Request what comes next.

    def _look_ahead(self, series: _Series) -> int:
        """Request the objects that the history predicts; return how many objects were handled."""
        config = self._objects.config
        # Nothing is known before the first object is received.
        size = max(1, series.n_bytes // series.n_seen) if series.n_seen else config.whole_request
        most = max(1, self._objects.engine.window(config) // size)
        n = 0
        for place in ahead(series.history, extents=series.extents, most=most):
            path = series.path(place)
            if path not in self.awaited:
                entry = None if series.document else self._objects.fresh(path)
                if not series.document and (entry is None or self._objects.version(entry) is None):
                    break  # it is not known to exist
                self._ask(series, path, min(size, config.whole_request))
            n += 1
        if n:
            series.history = series.history.having_asked(n)
        return n

    def _ask(self, series: _Series, path: str, size: int) -> None:
        self.awaited[path] = series
        if len(self.awaited) > MOST_AWAITED:
            with contextlib.suppress(RuntimeError):  # another thread removed an entry meanwhile
                self.awaited.pop(next(iter(self.awaited)), None)

        def send() -> asyncio.Task[Iterable[Download]]:
            self.awaited[path] = None
            return self._objects.engine.spawn(self._request(series, path))

        origin = partial(self._objects.origin, path)
        # A reader that gets to the object before this request is sent fetches it by itself.
        request = SpeculativeRequest(series, size, send, origin, is_wanted=lambda: path not in self.awaited)
        self._objects.engine.speculation.submit(request)

    def _cancel(self, series: _Series) -> None:
        """Cancel the unsent requests of a series whose reader went elsewhere."""
        for owner in (series, series.sent):
            self._objects.engine.speculation.cancel(owner)
        for path in [path for path, queued in list(self.awaited.items()) if queued is series]:
            self.awaited.pop(path, None)

    async def _request(self, series: _Series, path: str) -> Iterable[Download]:
        """Request the range that was read first of the previous objects, or all that was read of them."""
        config = self._objects.config
        step = config.whole_request
        want = first_want(series.start, series.stop, config.block_size, step)
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


def first_want(start: int | None, stop: int | None, block_size: int, most: int) -> Range | Suffix:
    """Return the range to request of an object of unknown size to serve `[start:stop]`.

    It consists of whole blocks. It has at most `most` bytes, unless `start` is negative.
    """
    if start is not None and start < 0:
        # Enough to have the blocks of the last -start bytes complete, whatever the size of the object.
        return Suffix(-start + block_size - 1)
    first = (start or 0) - (start or 0) % block_size
    if stop is None or stop < 0:
        return Range(first, first + most)
    whole = -(-max(first + 1, stop) // block_size) * block_size
    return Range(first, min(whole, first + most))


def _roots(path: str) -> list[str]:
    """Return the folders, with trailing "/", that may hold the array of chunk `path`; the likeliest first."""
    parts = path.split("/")
    at = len(parts) - 1
    is_flat = parts[at].removeprefix("c.").replace(".", "").isdecimal()
    found = ["/".join(parts[:at]) + "/"] if is_flat else []
    while at > 0 and parts[at].isdecimal():
        at -= 1
        if parts[at] == "c":
            return ["/".join(parts[:at]) + "/", *found]
        if at < len(parts) - 1 and parts[at].isdecimal():
            found.append("/".join(parts[:at]) + "/")
    return found
