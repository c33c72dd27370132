"""Fast path: serve reads that are fully cached, in the calling thread, without the event loop."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from cachedfs.common.blocks import clip, covering
from cachedfs.common.types import ObjectKey, Range
from cachedfs.core.chunk_prefetch import ChunkPrefetch
from cachedfs.core.download import DownloadStopped
from cachedfs.core.metadata_cache import Entry
from cachedfs.core.object_history import ObjectHistories
from cachedfs.core.source import Source
from cachedfs.errors import ObjectNotFound

__all__ = ["CachedReads", "ReadBuffer", "note_version", "versions_read"]

_Versions = dict[str, set[str | None]]
_versions_read: ContextVar[_Versions | None] = ContextVar("cachedfs_versions_read", default=None)


class ReadBuffer:
    """Buffer for the bytes of one read, filled block by block in any order."""

    def __init__(self, want: Range) -> None:
        self._want = want
        # BytesIO.getvalue() does not copy. Seeking and writing one byte allocates it in one step.
        self._bytes = io.BytesIO()
        if want.size:
            self._bytes.seek(want.size - 1)
            self._bytes.write(b"\0")

    def part(self, index: int, block_size: int) -> Range:
        """Return the byte range of the object that is both in block `index` and wanted."""
        return Range(
            max(self._want.start, index * block_size), min(self._want.stop, (index + 1) * block_size)
        )

    def place(self, index: int, block_size: int) -> tuple[memoryview, int]:
        """Return the buffer for the wanted bytes of block `index`, and their offset in the block."""
        part = self.part(index, block_size)
        start = part.start - self._want.start
        return self._bytes.getbuffer()[start : start + part.size], part.start - index * block_size

    def fill(self, part: Range, pieces: Iterable[memoryview]) -> None:
        start = part.start - self._want.start
        with self._bytes.getbuffer() as view:
            for piece in pieces:
                view[start : start + len(piece)] = piece
                start += len(piece)

    def finish(self) -> bytes:
        return self._bytes.getvalue()


@contextlib.contextmanager
def versions_read() -> Iterator[_Versions]:
    """Yield a dictionary of the versions that reads in this context return bytes of.

    It maps a path to fingerprints. It records the reads of this thread and of the coroutines it waits for. Use it
    instead of the metadata after the read, which may be of a newer version already.
    """
    versions: _Versions = {}
    token = _versions_read.set(versions)
    try:
        yield versions
    finally:
        _versions_read.reset(token)


def note_version(entry: Entry) -> None:
    """Record for `versions_read` that bytes of this version are returned."""
    versions = _versions_read.get()
    if versions is not None and entry.info is not None:
        versions.setdefault(entry.path, set()).add(entry.info.fingerprint)


class _Version(NamedTuple):
    """An object version that can be cached: it has a key and a size."""

    entry: Entry
    key: ObjectKey
    size: int


class CachedReads:
    """Reads of cached objects of one source, without requests; safe from any thread."""

    def __init__(self, source: Source, chunks: ChunkPrefetch, histories: ObjectHistories) -> None:
        self._source, self._chunk_prefetch, self._object_histories = source, chunks, histories
        self._awaited = chunks.awaited

    def read(self, path: str, start: int | None, stop: int | None, *, nowait: bool = False) -> bytes | None:
        """Return the bytes `[start:stop]` of an object if all are cached.

        None if the origin must be asked. With `nowait`, raise BlockingIOError instead of waiting for the disk. Raises
        ObjectNotFound for a known absence.
        """
        if path in self._awaited:
            self._chunk_prefetch.reached(path, start, stop)
            if self._source.metadata.in_memory(path) is None:
                return None  # prefetched by this process, and not answered yet
        version = self._version(path)
        if version is None:
            return None
        want = clip(start, stop, version.size)
        data = self.of_version(version.key, want, nowait=nowait)
        if data is not None:
            note_version(version.entry)
            self._observe_hit(version, want)
        return data

    def read_many(self, wanted: Sequence[tuple[str, int | None, int | None]]) -> list[bytes | OSError | None]:
        """Return the result of `read` for each `(path, start, stop)`, or its error.

        Each object is looked up once.
        """
        found: list[bytes | OSError | None] = [None] * len(wanted)
        by_path: dict[str, list[int]] = {}
        for i, (path, _, _) in enumerate(wanted):
            by_path.setdefault(path, []).append(i)
        for path, numbers in by_path.items():
            datas = self._read_ranges(path, [wanted[i][1:] for i in numbers])
            for i, data in zip(numbers, datas, strict=True):
                found[i] = data
        return found

    def _read_ranges(
        self, path: str, ranges: Sequence[tuple[int | None, int | None]]
    ) -> list[bytes | OSError | None]:
        if len(ranges) < 2 or path in self._awaited:
            return [self._read_or_error(path, *bounds) for bounds in ranges]
        try:
            version = self._version(path)
        except ObjectNotFound as error:
            return [error] * len(ranges)
        if version is None:
            return [None] * len(ranges)
        found: list[bytes | OSError | None] = []
        furthest = Range(0, 0)
        for start, stop in ranges:
            want = clip(start, stop, version.size)
            try:
                data = self.of_version(version.key, want)
            except OSError as error:
                found.append(error)
                continue
            found.append(data)
            if data is not None and want.stop > furthest.stop:
                furthest = want
        if any(data is not None and not isinstance(data, OSError) for data in found):
            note_version(version.entry)
        self._observe_hit(version, furthest)
        return found

    def _read_or_error(self, path: str, start: int | None, stop: int | None) -> bytes | OSError | None:
        try:
            return self.read(path, start, stop)
        except OSError as error:
            return error

    def opened(self, path: str) -> None:
        """Note that an open file will read an object whose metadata is cached."""
        if path in self._awaited:
            self._chunk_prefetch.reached(path, 0, self._source.config.block_size)

    def _version(self, path: str) -> _Version | None:
        entry = self._source.existing(path)
        key = None if entry is None else self._source.key(entry)
        if entry is None or key is None:
            return None
        size = entry.object.size
        assert size is not None  # key_of gives no key without a size
        return _Version(entry, key, size)

    def _observe_hit(self, version: _Version, want: Range) -> None:
        """Report a read to the object's history if it is read ahead from there."""
        if self._object_histories.is_observed(version.key, want):
            self._source.engine.call_soon(
                self._object_histories.observe_hit, version.entry, version.key, want
            )

    def of_version(self, key: ObjectKey, want: Range, *, nowait: bool = False) -> bytes | None:
        """Return the bytes of `want` of one version if all are cached, else None; see `read`."""
        engine, size = self._source.engine, key.block_size
        first = want.start // size
        if want.stop <= (first + 1) * size:
            if want.start == want.stop:
                return b""
            data: bytes | None = b""
            if engine.by_block:
                data = b"".join(self._received(key, first, want))
            data = data or engine.cache.read(
                key,
                first,
                want.start - first * size,
                want.stop - first * size,
                nowait=nowait,
                verify=self._source.config.verify_always,
            )
            if data is None or len(data) != want.stop - want.start:
                return None
            engine.hits += 1
            engine.bytes_served += len(data)
            return data
        blocks = covering(want, size)
        if not all(self.has(key, index, min(want.stop, (index + 1) * size)) for index in blocks):
            return None
        out = ReadBuffer(want)
        if not all(self.copy(key, index, out, nowait=nowait) for index in blocks):
            return None
        engine.hits += len(blocks)
        engine.bytes_served += want.size
        return out.finish()

    def has(self, key: ObjectKey, index: int, stop: int) -> bool:
        """Return whether block `index` is in memory, up to the object's byte `stop`, or on disk."""
        download = self._source.engine.by_block.get(key.name(index))
        if download is None or download.released:
            return self._source.engine.cache.has(key, index)
        return download.filled >= stop

    def _received(self, key: ObjectKey, index: int, want: Range) -> list[memoryview]:
        """Return the bytes of `want`, all in block `index`, if an in-flight request has received them; else nothing."""
        engine = self._source.engine
        download = engine.by_block.get(key.name(index)) if engine.by_block else None
        if download is not None and download.filled >= want.stop:
            with contextlib.suppress(DownloadStopped):  # just stored on disk, and dropped from memory
                views = download.views(want)
                engine.cache.touch(key, index)
                return views
        return []

    def copy(self, key: ObjectKey, index: int, out: ReadBuffer, *, nowait: bool = False) -> bool:
        """Copy the wanted bytes of one cached block into `out`, from memory or from disk; return False for a miss."""
        part = out.part(index, key.block_size)
        if views := self._received(key, index, part):
            out.fill(part, views)
            return True
        place, offset = out.place(index, key.block_size)
        # Release the view here: Python 3.13 raises if a traceback keeps it alive longer than its BytesIO.
        with place:
            n = self._source.engine.cache.read_into(
                key, index, offset, place, nowait=nowait, verify=self._source.config.verify_always
            )
            if 0 <= n < len(place):
                # Valid, but too short for its object: drop it, or every read would find it again.
                self._source.engine.cache.refuse(key, index)
            return n == len(place)
