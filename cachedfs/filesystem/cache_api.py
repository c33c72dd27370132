"""What a cached filesystem does that fsspec has no method for: its cache, and what is fetched ahead into it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.chained import ChainedFileSystem

from cachedfs.common.types import Exported, Imported, LinkStats, ObjectInfo, Stats, Verified
from cachedfs.common.urls import GCS_PROTOCOLS, ORIGINS, strip
from cachedfs.config import Config
from cachedfs.errors import CacheError
from cachedfs.fetch.source import Source
from cachedfs.read.reader import Reader
from cachedfs.read.verify import Verifier

if TYPE_CHECKING:
    from cachedfs.prefetch.handle import Prefetch

__all__ = ["WINDOW", "AnyPath", "CacheMethods"]

WINDOW = 64 << 20  # bytes of one object that are held in memory at once
AnyPath = str | os.PathLike[str]  # of an object or a folder, as `b/k`, `gs://b/k` or `cachedfs::gs://b/k`
Items = AnyPath | Iterable[AnyPath | tuple[str, int | None, int | None]]  # what a plan is made of
T = TypeVar("T")


class CacheMethods(ChainedFileSystem):
    """The methods of `CachedFileSystem` that no other filesystem has; it gives what they need."""

    config: Config
    target_protocol: str
    target_options: Mapping[str, Any]
    _source: Source
    _reader: Reader

    def _strip(self, path: Any) -> Any:
        raise NotImplementedError

    def _object(self, path: Any) -> ObjectInfo:
        raise NotImplementedError

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def prefetch(
        self, items: Items, window: int | str | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Prefetch:
        """Fetch what will be read, in the order in which it will be, while the program goes on; return what runs.

        `items`: a path or URL of an object, a folder or a pattern, with everything below it by name; `(path, start, stop)`;
        or any iterable of them, also one without end: it is taken from as the plan gets there, in a thread of its own
        where it is no list. What is here already is not fetched again, what another process fetches neither.

        `window`: bytes (`"64MiB"`) that may be ahead of what has been read, by any process of the machine; who reads
        further on has passed what is in between. None: as much as the cache keeps until it is read.

        It runs for as long as somebody holds what is returned: `wait()` for the end, `cancel()` it, or leave its `with`
        block. Objects that cannot be had are noted there, the others are fetched. No read returns anything else for it.
        `callback` (fsspec's) is told of bytes, on another thread. Raises ValueError for a window that is no size.
        """
        strip, glob = self._strip, functools.partial(self._glob, detail=True)
        from cachedfs.prefetch.handle import begin

        return begin(self._reader, items, window=window, strip=strip, glob=glob, callback=callback)

    async def _prefetch(
        self, items: Items, window: int | str | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Prefetch:
        return await asyncio.to_thread(self.prefetch, items, window, callback)

    def stats(self) -> Stats:
        """Return what this process hit, missed and fetched, and what the cache holds."""
        return self._source.runtime.stats()

    def link_stats(self) -> LinkStats:
        """Return what this process measured of the way to the origin, by what it fetched ahead."""
        return self._source.link_stats()

    def may_hold(self) -> int | None:
        """Return how many bytes the cache may hold now, by `cache_size` and `keep_free`; None where nothing can be stored."""
        try:
            return self._source.runtime.cache.allowance(self.config.bounds)
        except CacheError:  # `stats` says why
            return None

    def cached_extent(self, path: AnyPath) -> list[tuple[int, int]]:
        """Return the byte ranges `(start, stop)` of the object's present version that are in the cache, merged."""
        name: str = self._strip(path)
        self._source.runtime.drain()  # what was read a moment ago counts
        info = self._object(name)
        known = self._source.metadata.get(name)
        key = None if known is None else self._source.key(known)
        if key is None:
            return []
        return Verifier(self._source, self._reader).extent(key, info)

    def pin(self, path: AnyPath) -> None:
        """Keep the blocks of an object, those here and those to come, until `unpin`; in all processes, over restarts."""
        self._source.runtime.cache.pin(self._source.identity, self._strip(path))

    def unpin(self, path: AnyPath) -> None:
        """Let the blocks of an object be evicted again."""
        self._source.runtime.cache.unpin(self._source.identity, self._strip(path))

    def evict(self, path: Any = None) -> int:
        """Drop the cached blocks of an object, of all below a folder, or of everything of this origin; return the bytes freed.

        Nobody is asked what a folder holds: what is cached below its name goes.
        """
        self._source.runtime.drain()
        name = None if path is None else self._strip(path)
        return self._source.runtime.cache.evict(self._source.identity, name)

    def verify(self, path: AnyPath, callback: Any = DEFAULT_CALLBACK) -> list[Verified]:
        """Look over what is cached of an object, or of all objects below a folder; return the verdict on each, by name.

        Every block of the version that is known is read from the disk, all of it, and checked; where all of an object is
        here, it is compared with the checksum that the origin states. What is wrong is dropped: the next read fetches it.
        One block is in memory at a time; nothing is touched, so what is evicted next stays the same. `callback` is told
        the bytes as they are read. Works offline, with the checksums that are known.
        """
        self._source.runtime.drain()  # what was read a moment ago counts
        integrity = Verifier(self._source, self._reader)
        return [
            integrity.verify(name, callback.relative_update) for name in integrity.paths(self._strip(path))
        ]

    async def _verify(self, path: Any, **kwargs: Any) -> list[Verified]:
        return await asyncio.to_thread(self.verify, path, **kwargs)

    @contextlib.contextmanager
    def local_path(self, path: AnyPath) -> Iterator[str]:
        """Give the path of the whole object as a real read-only file, for code that takes nothing else; gone afterwards.

        `with fs.local_path(path) as name: ...`. It counts in the cache's bound while in use. Raises ObjectNotFound, IsAFolder,
        or CacheError when it cannot fit.
        """
        name: str = self._strip(path)
        info = self._object(name)
        if info.kind == "directory":
            raise self._source.is_a_folder(name)
        with self.open(name, "rb") as file:
            lease = self._source.runtime.cache.lease(file.size, self.config.bounds)
            try:
                offset = 0
                while data := file.read(WINDOW // 8):
                    lease.write_at(offset, data)
                    offset += len(data)
                lease.seal()
                yield lease.path
            finally:
                lease.close()

    def export_cache(
        self,
        path: Any,
        target: str,
        target_options: Mapping[str, Any] | None = None,
        callback: Any = DEFAULT_CALLBACK,
    ) -> Exported:
        """Write what is cached at and below `path`, and what is known of it, as a few large objects into the folder `target`.

        `path`: an object, a folder or a list of them. `target`: any URL, with `target_options` for its filesystem: None are
        this one's where it has the same protocol. Nothing is asked or fetched of `path`. Run again, it sends what is not there
        yet; what the folder held before is replaced when all of it is there. `callback` is told bytes. Raises CacheError where nothing is cached,
        and where the folder holds a `manifest.json` that is not of an export of this origin.
        """
        from cachedfs.snapshot import Export

        self._source.runtime.drain()  # what was read a moment ago counts
        there, folder = self._elsewhere(target, target_options)
        roots = [self._strip(each) for each in (path if isinstance(path, list | tuple) else [path])]
        if not roots:
            raise ValueError(f"nothing was named to export to {target}")
        export = Export(
            self._reader, there, folder, advance=callback.relative_update, expect=callback.set_size
        )
        return self._run(export.run(roots))

    async def _export_cache(self, *args: Any, **kwargs: Any) -> Exported:
        return await asyncio.to_thread(self.export_cache, *args, **kwargs)

    def import_cache(
        self, source: str, source_options: Mapping[str, Any] | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Imported:
        """Take what `export_cache` wrote into the folder `source` into the cache, in few requests; what is here is not fetched.

        Every block is checked, and what is wrong is not taken. What is known of objects is as old as it was: for `max_age`
        nobody is asked. Raises ValueError for the export of another origin or account, ObjectNotFound where there is none, CacheError where
        nothing can be stored.
        """
        from cachedfs.snapshot import Import

        self._source.runtime.drain()  # what was read a moment ago takes its room
        there, folder = self._elsewhere(source, source_options)
        taking = Import(
            self._source.runtime,
            self.config,
            there,
            folder,
            identity=self._source.identity,
            advance=callback.relative_update,
            expect=callback.set_size,
        )
        return self._run(taking.run())

    async def _import_cache(self, *args: Any, **kwargs: Any) -> Imported:
        return await asyncio.to_thread(self.import_cache, *args, **kwargs)

    def _elsewhere(self, url: str, options: Mapping[str, Any] | None) -> tuple[Reader, str]:
        """Return who reads and writes at a URL, in this process's runtime, and the path that it means."""
        text = url.rpartition("::")[2] if "://" in url else os.path.abspath(os.path.expanduser(url))
        protocol, has_protocol, rest = text.partition("://")
        if not has_protocol:
            protocol = "file"
        elif protocol in ORIGINS:  # read through the cache, an export would be cached once more
            protocol = ORIGINS[protocol]
            text = f"{protocol}://{rest}"
        if options is None:
            is_same = protocol == self.target_protocol or {protocol, self.target_protocol} <= set(
                GCS_PROTOCOLS
            )
            options = self.target_options if is_same else {}
        config = dataclasses.replace(self.config, offline=False)
        prefix = f"{protocol}://"
        source = Source(protocol, options, config, lambda path: path if "://" in path else f"{prefix}{path}")
        return Reader(source), strip(self.protocol, protocol, text)
