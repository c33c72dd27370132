"""Read samples of Zarr arrays from their chunks: each shard index once, and a batch in one round trip."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem

from cachedfs.core.reader import versions_read
from cachedfs.datasets.chunks import BoundedLRU, ChunkCache, ChunkSlice, in_threads, parts_of
from cachedfs.datasets.samples import Item, reading
from cachedfs.datasets.zarr_layout import ABSENT, ArrayLayout
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem

__all__ = ["ChunkReader", "items_of", "own_rows"]

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
    version: str | None  # of the object that the index is from; None if the filesystem does not say


class _State:
    """The caches of one process: shard indexes and decoded chunks."""

    def __init__(self, pool_size: int) -> None:
        self.pid = os.getpid()
        self.shards: BoundedLRU[_Shard] = BoundedLRU(INDEXES)
        self.pool = ChunkCache(pool_size)


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
        self.put(part for name, out in outs.items() for part in parts_of(self._layouts[name], samples, out))

    def put(self, parts: Iterable[ChunkSlice]) -> None:
        """Copy slices of chunks into place, as `read` does."""
        pool = self._state.pool
        own: list[ChunkSlice] = []
        others: list[ChunkSlice] = []
        try:
            for part in parts:
                own.append(part)
                if part.is_wanted_again and (version := self._version(part.path)) is not None:
                    part.pool, part.version = pool, version
                    future = pool.take(part)
                    if future is not part.future:
                        others.append(own.pop())
                        part.future = future
            self._fill(own)
        except BaseException:  # interrupts, too: other threads would wait for these chunks forever
            for part in own:
                pool.fail(part)
            raise
        retried = []
        for part in others:
            assert part.future is not None
            try:
                with reading():  # includes the other thread's fetching and decoding
                    chunk = part.future.result()
                part.put(chunk)
            except CancelledError:
                # The other thread raises its own error. This thread reads the chunk itself, and may get another error.
                part.pool = part.future = None
                retried.append(part)
        self._fill(retried)

    # What a prefetch plan takes.

    def indexes(self, rows: Iterable[int], yielded: set[str]) -> Iterator[Item]:
        """Yield the shard indexes of these rows that are neither in memory nor in `yielded`; add them to `yielded`."""
        indexed = [(layout, layout.index) for layout in self._layouts.values() if layout.index is not None]
        for row in rows if indexed else ():
            for layout, index in indexed:
                for beside in layout.beside:
                    path = layout.object_path(row // layout.chunk[0], beside)
                    if path not in yielded and self._cached_index(path) is None:
                        yield path, *index.bounds  # type: ignore[misc]  # one of the bounds may be None
                    yielded.add(path)

    def chunks(self, row: int) -> Iterator[Item]:
        """Yield the chunks of a row: objects, or byte ranges of shards. This may read a shard index."""
        for layout in self._layouts.values():
            parts = list(parts_of(layout, np.array([row]), _NO_ARRAY))
            try:
                shards = self._shards(parts)
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
                    self._finish((part, None, {shards[part.path].version}))
            if not found:
                return
            datas, versions = self._read(
                [part.path for part in found], [part.start for part in found], [part.stop for part in found]
            )
            changed = {path for path, shard in shards.items() if versions.get(path, set()) - {shard.version}}
            whole = [
                (part, data, versions.get(part.path))
                for part, data in zip(found, datas, strict=True)
                if part.path not in changed
            ]
            if len(whole) == 1 or len(whole) * self._largest <= INLINE:
                for one in whole:
                    self._finish(one)
            else:
                in_threads(self._finish, whole)
            parts = [part for part in found if part.path in changed]
            if not parts:
                return
        self._raise_changed(parts[0])

    def _shards(self, parts: list[ChunkSlice]) -> dict[str, _Shard]:
        """Return the shards of these chunks by path; read the indexes that are not in memory.

        Raises the errors of the filesystem, and ObjectChanged for a shard that is replaced repeatedly during the read.
        """
        found: dict[str, _Shard] = {}
        missing: dict[str, ChunkSlice] = {}
        for path, part in {part.path: part for part in parts if part.layout.index is not None}.items():
            if (shard := self._cached_index(path)) is None:
                missing[path] = part
            else:
                found[path] = shard
        for _ in range(TRIES):
            if not missing:
                break
            bounds = [part.layout.index.bounds for part in missing.values() if part.layout.index is not None]
            datas, versions = self._read([*missing], *zip(*bounds, strict=True))
            for (path, part), data in zip([*missing.items()], datas, strict=True):
                seen = versions.get(path, set())
                if len(seen) > 1:
                    continue  # replaced during the read: read it again
                with self._naming(part.sample, self._url(part)):
                    if isinstance(data, ABSENT) and self._state.shards.get(path) is None:
                        shard = _Shard(None, None)
                    elif isinstance(data, BaseException):  # it is also an error if a shard has disappeared
                        raise data
                    else:
                        assert part.layout.index is not None
                        shard = _Shard(part.layout.index.decode(data), _only(seen))
                found[path] = shard
                del missing[path]
                if shard.chunks is not None and shard.version is not None:
                    self._state.shards.put(path, shard, shard.chunks.nbytes)
        for part in missing.values():
            self._raise_changed(part)
        return found

    def _cached_index(self, path: str) -> _Shard | None:
        """Return a shard whose index is in memory, unless a read would now return another version of the shard."""
        shard = self._state.shards.get(path)
        return shard if shard is not None and shard.version == self._version(path) else None

    def _raise_changed(self, part: ChunkSlice) -> None:
        with self._naming(part.sample, self._url(part)):
            raise ObjectChanged(f"{self._fs.unstrip_protocol(part.path)} is replaced faster than it is read")

    # Versions.

    def _version(self, path: str) -> Hashable:
        """Return the version that a read of an object would return now, without a request.

        If the metadata entry is expired, this is the object's change counter, which differs after each change made on
        this machine. None means that nothing of the object can be kept: it is absent, `max_age` is 0, or its filesystem
        does not say versions without a request.
        """
        fs = self._fs
        if not isinstance(fs, CachedFileSystem):
            return self._ukey(path)
        known = fs._objects.fresh(path)
        if known is not None:
            return None if known.info is None else known.info.fingerprint
        return fs._objects.counter(path) if fs._objects.lifetime_s > 0 else None

    def _ukey(self, path: str) -> str | None:
        """Return the version of an object in a local filesystem without cachedfs; None for a remote one."""
        if not self._fs.async_impl:  # an async filesystem is remote, where each version is a request
            with contextlib.suppress(OSError):  # the read itself raises the error
                return str(self._fs.ukey(path))
        return None

    def _read(
        self, paths: Sequence[str], starts: Sequence[Any], stops: Sequence[Any]
    ) -> tuple[list[Any], dict[str, set[str | None]]]:
        """Return the bytes or the error of each range, and by path the versions that the bytes are from."""
        with reading(), versions_read() as versions:
            before = (
                {} if isinstance(self._fs, CachedFileSystem) else {path: self._ukey(path) for path in paths}
            )
            datas = self._fs.cat_ranges([*paths], [*starts], [*stops], on_error="return")
            for path, version in before.items():
                versions[path] = {version, self._ukey(path)}
        return datas, versions

    def _finish(self, one: tuple[ChunkSlice, Any, set[str | None] | None]) -> None:
        """Decode the stored bytes of a chunk, or raise their error; None for a chunk that its shard does not have."""
        part, data, versions = one
        chunk = None
        try:
            if isinstance(data, BaseException):
                if part.start is not None or not isinstance(data, ABSENT):
                    raise data
                data = None
            elif data is not None:
                if part.start is not None and len(data) != part.stop - part.start:
                    raise ValueError(
                        f"{self._fs.unstrip_protocol(part.path)} is truncated: its index has a chunk at bytes {part.start} to {part.stop}"
                    )
                if part.pool is None and (place := part.place) is not None:
                    part.layout.decoder.into(data, place)
                    return
                chunk = part.layout.decoder.array(data)
            part.put(chunk)
        except Exception:  # any type: codecs raise their own errors
            with self._naming(part.sample, self._url(part)):
                raise
        if part.pool is not None:
            version = _only(versions)
            kept_as = None if version is None else (*part.key[:-1], version)
            part.pool.fill(part.key, chunk, 0 if chunk is None else chunk.nbytes, kept_as)

    def _url(self, part: ChunkSlice) -> str:
        place = part.number, *part.beside.place
        return f"chunk {place} of {self._fs.unstrip_protocol(part.layout.path)}, in {part.path}"


def _only(versions: set[str | None] | None) -> str | None:
    """Return the version if there is exactly one, else None."""
    return next(iter(versions)) if versions is not None and len(versions) == 1 else None


def _locate(part: ChunkSlice, shards: dict[str, _Shard]) -> bool:
    """Set the byte range of a chunk in its shard; return False if the shard does not contain it."""
    if part.layout.index is None:
        return True
    index = shards[part.path].chunks
    if index is None:
        return False
    start, n = index[(part.number % part.layout.per_shard[0], *part.beside.inner)].tolist()
    part.start, part.stop = start, start + n
    return not start == n == NOTHING


def own_rows(samples: Sequence[int]) -> list[tuple[int]]:
    """Return the rows that each of these samples needs of an array with one row per sample."""
    return [(sample,) for sample in samples]


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
        for sample in zip(*current, strict=True):
            for (_, reader), needed in zip(arrays, sample, strict=True):
                for row in needed:
                    yield from reader.chunks(row)
        if not group:
            return
        current = following
