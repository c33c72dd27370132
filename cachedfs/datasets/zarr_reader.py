"""Read samples of Zarr arrays from their chunks: each shard index once, and a batch in one round trip."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem

from cachedfs.core.reader import versions_read
from cachedfs.datasets.chunks import ChunkCache, ChunkSlice, in_threads, parts_of, rows_between, rows_of
from cachedfs.datasets.samples import Item, reading
from cachedfs.datasets.zarr_layout import ABSENT, ArrayLayout
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem

AT_ONCE = 128 << 20  # decoded bytes of chunks that are fetched together before decoding begins
INLINE = 1 << 20  # up to so many decoded bytes, other threads do not pay off
INDEXES = 64 << 20  # bytes of shard indexes kept: those of four million chunks
LOOKAHEAD = 256  # samples in a group; a group's shard indexes come before the previous group's chunks
TRIES = 3  # attempts of one read, each with another version of a shard
NOTHING = 0xFFFF_FFFF_FFFF_FFFF  # offset and length of a chunk that is not in its shard

Array = npt.NDArray[Any]
_NO_ARRAY: Array = np.empty(0)
Naming = Callable[[int, str], AbstractContextManager[None]]


class _Shard(NamedTuple):
    chunks: npt.NDArray[np.uint64] | None  # None: the object does not exist
    version: Hashable  # of the object that the index is from; None if the filesystem does not say


class _State:
    """The caches of one process: shard indexes and decoded chunks."""

    def __init__(self, pool_size: int) -> None:
        self.pid = os.getpid()
        self.pool = ChunkCache(pool_size)
        self.shards: dict[str, _Shard] = {}
        self._lock, self._size = threading.Lock(), 0

    def keep(self, path: str, shard: _Shard, size: int) -> None:
        """Keep the index of a shard, of `size` bytes; remove the oldest ones that are too many."""
        with self._lock:
            self._size += size - self._removed(path)
            self.shards[path] = shard
            while self._size > INDEXES:
                self._size -= self._removed(next(iter(self.shards)))

    def _removed(self, path: str) -> int:
        shard = self.shards.pop(path, None)
        return 0 if shard is None or shard.chunks is None else shard.chunks.nbytes


class ChunkReader:
    """Reader of samples of several arrays of one filesystem.

    It is thread-safe, and pickles and forks without its caches. `naming(sample, what)` returns the context manager in
    which errors are raised; it adds a note to them.
    """

    def __init__(
        self, fs: AbstractFileSystem, layouts: Mapping[str, ArrayLayout], *, pool_size: int, naming: Naming
    ) -> None:
        self._fs, self._layouts, self._naming = fs, layouts, naming
        self._pool_size = pool_size
        # Bytes of a chunk.
        self._largest = max((layout.decoder.size for layout in layouts.values()), default=0) or 1
        self._own = _State(pool_size)

    def __reduce__(self) -> Any:
        make = functools.partial(type(self), pool_size=self._pool_size, naming=self._naming)
        return make, (self._fs, self._layouts)

    @property
    def _state(self) -> _State:
        if self._own.pid != os.getpid():
            # A forked child: locks may have been held at the fork, and no thread completes the futures.
            self._own = _State(self._pool_size)
        return self._own

    def read(self, samples: Array, outs: Mapping[str, Array]) -> None:
        """Copy samples of each array in `outs` into the rows of its `out`.

        Each chunk is fetched and decoded once. Raises the errors of the filesystem and the codecs, ObjectChanged for a
        shard that is replaced repeatedly during the read, and ValueError for a shard that does not match its index.
        """
        layouts = self._layouts
        self.put(
            part
            for name, out in outs.items()
            for part in parts_of(layouts[name], out, rows_of(layouts[name].chunk[0], samples))
        )

    def put(self, parts: Iterable[ChunkSlice]) -> None:
        """Copy slices of chunks into place, as `read` does."""
        pool = self._state.pool
        own: list[ChunkSlice] = []
        others: list[tuple[ChunkSlice, Future[Any]]] = []
        versions: dict[str, Hashable] = {}  # of each object once: the samples of a batch share shards
        try:
            for part in parts:
                own.append(part)
                layout = part.layout
                is_whole = part.n_rows == layout.chunk[0] or part.n_rows == layout.n_rows(part.number)
                if is_whole:
                    continue
                if part.path not in versions:
                    versions[part.path] = self._version(part.path)
                if (version := versions[part.path]) is not None:
                    part.key = layout.path, part.number, part.beside.place, version
                    if (future := pool.take(part)) is not None:
                        others.append((own.pop(), future))
            self._fill(own)
        except BaseException:  # interrupts, too: other threads would wait for these chunks forever
            for part in own:
                pool.fail(part)
            raise
        failed = []
        for part, future in others:
            try:
                # The wait includes the other thread's fetching and decoding.
                with contextlib.nullcontext() if future.done() else reading():
                    chunk = future.result()
                part.put(chunk)
            except CancelledError:
                # The other thread raises its own error. This thread reads the chunk itself, and may get another error.
                failed.append(part)
        self._fill(failed)

    # What a prefetch plan takes.

    def indexes(self, rows: Iterable[int], yielded: set[str]) -> Iterator[Item]:
        """Yield the shard indexes of these rows that are neither in memory nor in `yielded`; add them to `yielded`."""
        indexed = [(layout, layout.index) for layout in self._layouts.values() if layout.index is not None]
        for row in rows if indexed else ():
            for layout, index in indexed:
                for beside in layout.beside:
                    path = layout.object_path(row // (layout.chunk[0] * layout.per_object[0]), beside)
                    if path not in yielded and self._cached_index(path) is None:
                        yield path, *index.bounds  # type: ignore[misc]  # one of the bounds may be None
                    yielded.add(path)

    def chunks(self, row: int, shards: dict[str, _Shard]) -> Iterator[Item]:
        """Yield the chunks of a row: objects, or byte ranges of shards. An index that is not in `shards` may be read."""
        for layout in self._layouts.values():
            parts = list(parts_of(layout, _NO_ARRAY, rows_between(layout.chunk[0], row, row + 1, 0)))
            try:
                shards |= self._shards([part for part in parts if part.path not in shards])
            except Exception:  # any error: reading the sample raises it
                continue
            for part in parts:
                if _locate(part, shards):
                    yield part.path if part.start is None else (part.path, part.start, part.stop)

    # Fetching.

    def _fill(self, parts: list[ChunkSlice]) -> None:
        n = max(1, AT_ONCE // self._largest)
        for start in range(0, len(parts), n):
            self._fetch(parts[start : start + n])

    def _fetch(self, parts: list[ChunkSlice]) -> None:
        """Fetch and decode chunks. Repeat this for shards that were replaced after their index was read."""
        for _ in range(TRIES):
            shards = self._shards(parts)
            found: list[ChunkSlice] = []
            for part in parts:
                if _locate(part, shards):
                    found.append(part)
                else:
                    self._finish(part, None, shards[part.path].version)
            if not found:
                return
            datas, versions = self._read(
                [part.path for part in found], [part.start for part in found], [part.stop for part in found]
            )
            changed = {
                path
                for path in versions.keys() & shards
                if versions[path] not in (None, shards[path].version)
            }
            whole = [
                (part, data, versions[part.path])
                for part, data in zip(found, datas, strict=True)
                if part.path not in changed
            ]
            if len(whole) == 1 or len(whole) * self._largest <= INLINE:
                for each in whole:
                    self._finish(*each)
            else:
                in_threads(self._finish, whole)
            parts = [part for part in found if part.path in changed]
            if not parts:
                return
        with self._naming(parts[0].sample, self._url(parts[0])):
            raise ObjectChanged(
                f"{self._fs.unstrip_protocol(parts[0].path)} is replaced faster than it is read"
            )

    def _shards(self, parts: list[ChunkSlice]) -> dict[str, _Shard]:
        """Return the shards of these chunks by path; read the indexes that are not in memory."""
        found: dict[str, _Shard] = {}
        missing: dict[str, ChunkSlice] = {}
        for path, part in {part.path: part for part in parts if part.layout.index is not None}.items():
            if (shard := self._cached_index(path)) is None:
                missing[path] = part
            else:
                found[path] = shard
        if missing:
            bounds = [part.layout.index.bounds for part in missing.values() if part.layout.index is not None]
            datas, versions = self._read([*missing], *zip(*bounds, strict=True))
            for (path, part), data in zip(missing.items(), datas, strict=True):
                with self._naming(part.sample, self._url(part)):
                    found[path] = self._shard(part, data, versions[path])
        return found

    def _shard(self, part: ChunkSlice, data: Any, version: Hashable) -> _Shard:
        """Return the shard of a chunk from the bytes of its index, or from the error of reading them."""
        state = self._state
        if isinstance(data, ABSENT) and part.path not in state.shards:
            return _Shard(None, None)
        if isinstance(data, BaseException):  # it is also an error if a shard has disappeared
            raise data
        assert part.layout.index is not None
        shard = _Shard(chunks := part.layout.index.decode(data), version)
        if isinstance(version, str):
            state.keep(part.path, shard, chunks.nbytes)
        return shard

    def _cached_index(self, path: str) -> _Shard | None:
        """Return a shard whose index is in memory, unless a read would now return another version of the shard."""
        shard = self._state.shards.get(path)
        return shard if shard is not None and shard.version == self._version(path) else None

    def _version(self, path: str) -> Hashable:
        """Return the version that a read of an object would return now, a text, without a request.

        If the metadata entry is expired, this is the object's change counter, which differs after each change made on
        this machine. None means that nothing of the object can be kept: it is absent, `max_age` is 0, or its filesystem
        does not say versions without a request.
        """
        fs = self._fs
        if not isinstance(fs, CachedFileSystem):
            if not fs.async_impl:  # an async filesystem is remote, where each version is a request
                with contextlib.suppress(OSError):  # the read itself raises the error
                    return str(fs.ukey(path))
            return None
        known = fs._objects.fresh(path)
        if known is not None:
            return None if known.info is None else known.info.fingerprint
        return fs._objects.counter(path) if fs._objects.lifetime_s > 0 else None

    def _read(
        self, paths: list[str], starts: Iterable[Any], stops: Iterable[Any]
    ) -> tuple[list[Any], dict[str, Hashable]]:
        """Return the bytes or the error of each range, and by path the version that the bytes are of.

        It is a text if all bytes of the object are of this version, and None if that is not known.
        """
        before = {path: self._version(path) for path in dict.fromkeys(paths)}
        # If a version is known before and after the read, all bytes are of it: none comes back after another one.
        is_known = all(isinstance(version, str) for version in before.values())
        tracked: AbstractContextManager[dict[str, set[str | None]]]
        tracked = contextlib.nullcontext({}) if is_known else versions_read()
        with reading(), tracked as seen:
            datas = self._fs.cat_ranges(paths, [*starts], [*stops], on_error="return")
        if is_known:
            return datas, {path: _only({version, self._version(path)}) for path, version in before.items()}
        return datas, {path: _only(seen.get(path, set())) for path in before}

    def _finish(self, part: ChunkSlice, data: Any, version: Hashable) -> None:
        """Decode the stored bytes of a chunk, or raise their error; None for a chunk that its shard does not have."""
        chunk = None
        try:
            if isinstance(data, BaseException):
                if part.start is not None or not isinstance(data, ABSENT):
                    raise data
            elif data is not None:
                if part.start is not None and len(data) != part.stop - part.start:
                    raise ValueError(
                        f"{self._fs.unstrip_protocol(part.path)} is truncated: its index has a chunk at bytes {part.start} to {part.stop}"
                    )
                chunk = part.layout.decoder.array(data)
            part.put(chunk)
        except Exception:  # any type: codecs raise their own errors
            with self._naming(part.sample, self._url(part)):
                raise
        if part.own is not None:
            kept_as = (*part.key[:-1], version) if isinstance(version, str) else None
            self._state.pool.fill(part, chunk, kept_as)

    def _url(self, part: ChunkSlice) -> str:
        place = part.number, *part.beside.place
        return f"chunk {place} of {self._fs.unstrip_protocol(part.layout.path)}, in {part.path}"


def _only(versions: set[Any]) -> Hashable:
    """Return the version if there is exactly one, None if there is none."""
    return next(iter(versions)) if len(versions) == 1 else frozenset(versions) or None


def _locate(part: ChunkSlice, shards: dict[str, _Shard]) -> bool:
    """Set the byte range of a chunk in its shard; return False if the shard does not contain it."""
    layout = part.layout
    if layout.index is None:
        return True
    index = shards[part.path].chunks
    if index is None:
        return False
    at = 2 * (part.number % layout.per_object[0] * layout.n_beside + part.beside.inner)
    start, n = index.item(at), index.item(at + 1)
    part.start, part.stop = start, start + n
    return not start == n == NOTHING


# The rows that samples need, one per chunk, as a function; and the reader of these rows.
Reads = tuple[Callable[[Sequence[int]], Sequence[Iterable[int]]], ChunkReader]


def items_of(arrays: Sequence[Reads], samples: Iterable[int]) -> Iterator[Item]:
    """Yield what samples read, sample by sample and array by array; takes `LOOKAHEAD` samples at a time."""
    yielded: set[str] = set()
    remaining = iter(samples)
    current: list[Sequence[Iterable[int]]] = []
    while True:
        group = list(islice(remaining, LOOKAHEAD))
        following = [touched(group) for touched, _ in arrays] if group else []
        for (_, reader), rows in zip(arrays, following, strict=False):
            yield from reader.indexes(chain.from_iterable(rows), yielded)
        shards: list[dict[str, _Shard]] = [{} for _ in arrays]  # whose versions are checked once a group
        for sample in zip(*current, strict=True):
            for (_, reader), needed, known in zip(arrays, sample, shards, strict=True):
                for row in needed:
                    yield from reader.chunks(row, known)
        if not group:
            return
        current = following
