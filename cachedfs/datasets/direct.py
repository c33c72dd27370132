"""Samples of Zarr arrays straight from the bytes of their chunks: shard indexes once, a batch in one round trip."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem

from cachedfs.datasets.arrays import ABSENT, Layout
from cachedfs.datasets.base import Item
from cachedfs.datasets.clock import reading
from cachedfs.datasets.parts import Part, parts_of
from cachedfs.datasets.pool import Kept, Pool, in_threads
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem

__all__ = ["Direct"]

AT_ONCE = 128 << 20  # decoded bytes of the chunks that are fetched before the first of them is decoded
INLINE = 1 << 20  # decoded bytes of chunks that are not worth other threads
INDEXES = 64 << 20  # of shard indexes: those of four million chunks
TRIES = 3  # versions of a shard that one read begins with
NOTHING = 0xFFFF_FFFF_FFFF_FFFF  # offset and length of a chunk that a shard does not have

Array = npt.NDArray[Any]
_NO_ARRAY: Array = np.empty(0)
Naming = Callable[[int, str], AbstractContextManager[None]]


class _Shard(NamedTuple):
    chunks: npt.NDArray[np.uint64] | None  # None: there is no such object
    fingerprint: str | None  # of the version that the index is of; None where the filesystem does not tell


class _State:
    """What one process knows."""

    def __init__(self, pool_size: int) -> None:
        self.pid = os.getpid()
        self.shards: Kept[_Shard] = Kept(INDEXES)
        self.pool = Pool(pool_size)


class Direct:
    """Reads samples of several arrays of one filesystem. In any thread; it pickles and forks without what it knows.

    `naming(sample, what)` is the context in which an error leaves.
    """

    def __init__(
        self, fs: AbstractFileSystem, layouts: Mapping[str, Layout], *, pool_size: int, naming: Naming
    ) -> None:
        self._fs, self._layouts, self._naming = fs, layouts, naming
        self._pool_size = pool_size
        self._state = _State(pool_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = _State(self._pool_size)

    def read(self, samples: Array, outs: Mapping[str, Array]) -> None:
        """Copy these samples of each array into the rows of its `out`; each chunk is fetched and decoded once.

        Raises what filesystem and codecs raise, ObjectChanged for a shard that is replaced again and again, and ValueError
        for one that is not what its index says.
        """
        self.put(
            part for name, layout in self._layouts.items() for part in parts_of(layout, samples, outs[name])
        )

    def put(self, parts: Iterable[Part]) -> None:
        """Copy parts of chunks into place, as `read` does."""
        pool = self._here().pool
        mine: list[Part] = []
        others: list[Part] = []
        try:
            for part in parts:
                mine.append(part)
                n = part.layout.n_rows(part.number)
                if part.n_rows < n:  # else nobody needs it again
                    part.pool = pool
                    future = pool.take(part.key, part.n_rows, n, part)
                    if future is not part.future:
                        others.append(mine.pop())
                        part.future = future
            self._fill(mine)
        except BaseException:  # an interrupt, too: other threads wait for these chunks, and would for ever
            for part in mine:
                if part.future is not None:
                    pool.fail(part.key, part.future)
            raise
        again = []
        for part in others:
            assert part.future is not None
            try:
                with reading():  # another thread's fetching and decoding, which it counts as well
                    chunk = part.future.result()
                part.put(chunk)
            except CancelledError:
                # Another thread has the error, and this one may have another: it reads for itself.
                part.pool = part.future = None
                again.append(part)
        self._fill(again)

    # What is read, see `reads.Reads`.

    def touched(self, samples: Sequence[int]) -> Sequence[Iterable[int]]:
        return [(sample,) for sample in samples]

    def indexes(self, rows: Iterable[int], told: set[str]) -> Iterator[Item]:
        indexed = [(layout, layout.index) for layout in self._layouts.values() if layout.index is not None]
        for row in rows if indexed else ():
            for layout, index in indexed:
                for beside in layout.beside:
                    path = layout.object_path(row // layout.chunk[0], beside)
                    if path not in told and self._here().shards.get(path) is None:
                        yield path, *index.bounds  # type: ignore[misc]  # one of the bounds may be None
                    told.add(path)

    def chunks(self, row: int) -> Iterator[Item]:
        for layout in self._layouts.values():
            parts = list(parts_of(layout, np.array([row]), _NO_ARRAY))
            try:
                shards = self._shards(parts)
            except Exception:  # of any kind: who reads the sample is told
                continue
            for part in parts:
                match _where(part, shards):
                    case path, int(start), int(stop):
                        yield path, start, stop
                    case path, _, _:
                        yield path

    # Fetching.

    def _here(self) -> _State:
        if self._state.pid != os.getpid():
            # A fork: its parent's locks may have been held, and futures be nobody's.
            self._state = _State(self._pool_size)
        return self._state

    def _fill(self, parts: list[Part]) -> None:
        most = 0
        group: list[Part] = []
        for part in parts:
            group.append(part)
            most += part.layout.decoder.size
            if most >= AT_ONCE:
                self._fetch(group)
                most, group = 0, []
        if group:
            self._fetch(group)

    def _fetch(self, parts: list[Part]) -> None:
        """Fetch and decode chunks; again those in shards that were replaced since their index was read."""
        for tries_left in reversed(range(TRIES)):
            shards = self._shards(parts)
            wheres = [_where(part, shards) for part in parts]
            found = [(part, where) for part, where in zip(parts, wheres, strict=True) if where is not None]
            for part, where in zip(parts, wheres, strict=True):
                if where is None:
                    self._finish((part, None))
            datas: list[Any] = []
            if found:
                paths, starts, stops = zip(*(where for _, where in found), strict=True)
                with reading():
                    datas = self._fs.cat_ranges(list(paths), list(starts), list(stops), on_error="return")
            changed = self._changed(shards)
            parts = [part for part, _ in found if part.path in changed]
            self._decode(
                [
                    (part, self._checked(part, where, data))
                    for (part, where), data in zip(found, datas, strict=True)
                    if part.path not in changed
                ]
            )
            if not parts:
                return
            if not tries_left:
                with self._naming(parts[0].sample, self._url(parts[0])):
                    raise ObjectChanged(
                        f"{self._fs.unstrip_protocol(parts[0].path)} is replaced faster than it is read"
                    )

    def _shards(self, parts: list[Part]) -> dict[str, _Shard]:
        """Return the shards that these chunks are in, by path; their indexes are read where they are not known.

        Raises what the filesystem raises, and ObjectChanged for a shard that is replaced again and again.
        """
        kept = self._here().shards
        found: dict[str, _Shard] = {}
        missing: dict[str, Part] = {}
        for part in parts:
            if part.layout.index is None or part.path in found or part.path in missing:
                continue
            shard = kept.get(part.path)
            if shard is None:
                missing[part.path] = part
            else:
                found[part.path] = shard
        before = {path: self._known_fingerprint(path) for path in missing}
        for _ in range(2 * TRIES):
            if not missing:
                return found
            bounds = [part.layout.index.bounds for part in missing.values() if part.layout.index is not None]
            starts, stops = zip(*bounds, strict=True)
            with reading():
                datas = self._fs.cat_ranges(list(missing), list(starts), list(stops), on_error="return")
            for (path, part), data in zip([*missing.items()], datas, strict=True):
                with self._naming(part.sample, self._url(part)):
                    shard = self._shard(part, data)
                if shard.chunks is None or shard.fingerprint == before[path]:
                    found[path] = shard
                    kept.put(path, shard, 0 if shard.chunks is None else shard.chunks.nbytes)
                    del missing[path]
                else:
                    # Nobody knows which version's index it is: it is read once more, from the cache or, where nothing
                    # can be stored, from the origin.
                    before[path] = shard.fingerprint
        part = next(iter(missing.values()))
        with self._naming(part.sample, self._url(part)):
            raise ObjectChanged(f"{self._fs.unstrip_protocol(part.path)} is replaced faster than it is read")

    def _shard(self, part: Part, data: Any) -> _Shard:
        assert part.layout.index is not None
        if isinstance(data, ABSENT):
            return _Shard(None, None)
        if isinstance(data, BaseException):
            raise data
        return _Shard(part.layout.index.decode(data), self._fingerprint(part.path))

    def _fingerprint(self, path: str) -> str | None:
        # Others would ask their origin each time.
        return self._fs.ukey(path) if isinstance(self._fs, CachedFileSystem) else None

    def _known_fingerprint(self, path: str) -> str | None:
        """Return the fingerprint where it is known; nobody is asked."""
        known = self._fs._source.fresh(path) if isinstance(self._fs, CachedFileSystem) else None
        return None if known is None or known.info is None else known.info.fingerprint

    def _changed(self, shards: dict[str, _Shard]) -> set[str]:
        """Return which shards were replaced since their index was read, and forget these."""
        changed = set()
        for path, shard in shards.items():
            if shard.fingerprint is None:
                continue
            # It is gone: what could be read of it was right, and the rest is an error.
            with contextlib.suppress(*ABSENT):
                if self._fingerprint(path) != shard.fingerprint:
                    self._here().shards.drop(path)
                    changed.add(path)
        return changed

    def _checked(self, part: Part, where: tuple[str, int | None, int | None], data: Any) -> Any:
        """Return the stored bytes of a chunk; None for one that is not there, and may be."""
        _, start, stop = where
        error = data if isinstance(data, BaseException) else None
        if start is None and isinstance(error, ABSENT):
            return None
        if error is None and start is not None and stop is not None and len(data) != stop - start:
            error = ValueError(
                f"{self._fs.unstrip_protocol(part.path)} is cut off: its index has a chunk at bytes {start} to {stop}"
            )
        if error is not None:
            with self._naming(part.sample, self._url(part)):
                raise error
        return data

    # Decoding.

    def _decode(self, found: list[tuple[Part, Any]]) -> None:
        size = sum(part.layout.decoder.size for part, _ in found)
        if len(found) == 1 or size <= INLINE:
            for one in found:
                self._finish(one)
        else:
            in_threads(self._finish, found)

    def _finish(self, one: tuple[Part, Any]) -> None:
        part, data = one
        try:
            layout, chunk = part.layout, None
            if data is not None and part.pool is None and part.is_all:
                layout.decoder.into(data, part.out[part.rows])
                return
            if data is not None:
                chunk = layout.decoder.array(data)
            part.put(chunk)
        except Exception:  # of any kind: codecs raise what they like
            with self._naming(part.sample, self._url(part)):
                raise
        if part.pool is not None:
            part.pool.fill(part.key, chunk, 0 if chunk is None else chunk.nbytes)

    def _url(self, part: Part) -> str:
        place = part.number, *part.beside.place
        return f"chunk {place} of {self._fs.unstrip_protocol(part.layout.path)}, in {part.path}"


def _where(part: Part, shards: dict[str, _Shard]) -> tuple[str, int | None, int | None] | None:
    """Return path and range of the stored bytes of a chunk; None when its shard does not have it."""
    if part.layout.index is None:
        return part.path, None, None
    index = shards[part.path].chunks
    if index is None:
        return None
    start, n = index[(part.number % part.layout.per_shard[0], *part.beside.inner)].tolist()
    return None if start == n == NOTHING else (part.path, start, start + n)
