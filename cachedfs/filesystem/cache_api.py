"""Methods that cachedfs adds to fsspec: cache control, prefetch, export and import."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.chained import ChainedFileSystem

from cachedfs.common.blocks import clip, covering
from cachedfs.common.optional_imports import importing
from cachedfs.common.urls import GCS_PROTOCOLS, ORIGINS, without_slash
from cachedfs.config import Config
from cachedfs.core.objects import Objects
from cachedfs.core.path_errors import is_a_folder
from cachedfs.errors import ABSENT, CacheError
from cachedfs.origins.drive_links import is_drive_link
from cachedfs.origins.registry import strip

if TYPE_CHECKING:
    from cachedfs.core.reader import Reader
    from cachedfs.core.statistics import LinkStats, Stats
    from cachedfs.core.verify import Verified
    from cachedfs.filesystem.export import Exported
    from cachedfs.filesystem.import_ import Imported
    from cachedfs.origins.drive.quota import QuotaStats
    from cachedfs.prefetch.handle import Prefetch

WINDOW = 64 << 20  # most bytes of one object in memory at once
AnyPath = str | os.PathLike[str]  # of an object or a folder: `b/k`, `gs://b/k` or `cachedfs::gs://b/k`
Items = AnyPath | Iterable[AnyPath | tuple[str, int | None, int | None]]  # the `items` of `prefetch`


class CacheMethods(ChainedFileSystem):
    """Mixin with the methods of `CachedFileSystem` that no other filesystem has.

    `CachedFileSystem` provides the attributes declared here, and `_strip`, `_strip_object`, `_object` and `_run`.
    """

    config: Config
    target_protocol: str
    target_options: Mapping[str, Any]
    _objects: Objects
    _reader: Reader

    def prefetch(
        self, items: Items, window: int | str | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Prefetch:
        """Fetch objects into the cache in the background, in the order they will be read; return a handle.

            with fs.prefetch(paths, window="1GiB"):
                for path in paths:
                    train(fs.cat_file(path))

        `items` is a path or URL of an object, a folder or a glob pattern; a tuple `(path, start, stop)`; or any
        iterable of these, infinite ones included. A folder or pattern stands for all objects below it, in order of
        their names. Items are taken as the prefetch gets to them; an iterator runs in a thread of its own. Blocks that
        are cached, or that another process is fetching, are not fetched again.

        `window` is how many bytes (an int, or a text such as `"64MiB"`) the prefetch may be ahead of the reads of all
        processes of the machine. A read further on counts as having passed everything before it. None means as much as
        the cache can keep until it is read.

        The prefetch runs as long as the program keeps the returned handle: `wait()` for its end, `cancel()` it, or
        leave its `with` block. An object that cannot be fetched is listed in the handle's `errors`, and the prefetch
        goes on with the others. Reads return the same bytes with or without a prefetch. `callback` is an fsspec
        callback, called with byte counts from another thread. Raises ValueError for a `window` that is not a size.
        """
        strip, glob = self._strip, functools.partial(self._glob, detail=True)
        from cachedfs.prefetch.handle import begin

        return begin(self._reader, items, window=window, strip=strip, glob=glob, callback=callback)

    async def _prefetch(
        self, items: Items, window: int | str | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Prefetch:
        return await asyncio.to_thread(self.prefetch, items, window, callback)

    def _is_item_cached(self, item: AnyPath | tuple[str, int | None, int | None]) -> bool:
        """Return whether an object, or a byte range of one, is cached, so that reading it sends no request."""
        path, start, stop = item if isinstance(item, tuple) else (item, None, None)
        entry = self._objects.fresh(self._strip_object(path))
        version = None if entry is None else self._objects.version(entry)
        if version is None:
            return False
        blocks = covering(clip(start, stop, version.size), version.block_size)
        return all(self._objects.engine.cache.has(version, index) for index in blocks)

    def stats(self) -> Stats:
        """Return this process's counters (hits, misses, bytes fetched) and what the cache holds."""
        return self._objects.engine.stats()

    def link_stats(self) -> LinkStats:
        """Return this process's measurements of the link to the origin, taken from speculative requests."""
        return self._objects.link_stats()

    def quota_stats(self) -> QuotaStats | None:
        """Return what this Drive account used of Google's daily quota today; None for other origins.

        All processes that use this cache directory are counted, others at the latest after a few seconds.
        """
        if self.target_protocol != "drive":
            return None
        meter = self._objects.engine.quota_meter(self._objects.identity)
        meter.refresh()
        return meter.today()

    def may_hold(self) -> int | None:
        """Return how many bytes the cache may hold now, by `cache_size` and `keep_free`.

        None where nothing can be stored; `stats().cannot_store` then has the reason.
        """
        try:
            return self._objects.engine.cache.allowance(self.config.bounds)
        except CacheError:  # `stats` has the reason
            return None

    def cached_extent(self, path: AnyPath) -> list[tuple[int, int]]:
        """Return the cached byte ranges `(start, stop)` of the object's current version, merged."""
        self._objects.engine.drain()  # include blocks that are still being written
        entry = self._objects.known(self._object(path).path)
        version = None if entry is None else self._objects.version(entry)
        if version is None:
            return []
        with importing():
            from cachedfs.core.verify import extent
        return extent(self._objects.engine.cache, version)

    def pin(self, path: AnyPath) -> None:
        """Keep the blocks of an object, cached now or later, until `unpin`.

        This applies to all processes of the machine and survives restarts. Raises CacheError where nothing can be
        stored.
        """
        self._objects.engine.cache.pin(self._objects.identity, self._name_to_pin(path))

    def unpin(self, path: AnyPath) -> None:
        """Allow the blocks of an object to be evicted again."""
        self._objects.engine.cache.unpin(self._objects.identity, self._name_to_pin(path))

    def _name_to_pin(self, path: AnyPath) -> str:
        """Return the name of the object at `path`. Only a path that ends in a slash is looked up: it may have two."""
        name: str = self._strip_object(path)
        if name != without_slash(name):
            with contextlib.suppress(*ABSENT):  # an object may be pinned before it exists
                info = self._object(name)
                return name if info.kind == "directory" else info.path
        return name

    def evict(self, path: Any = None) -> int:
        """Evict the cached blocks of an object, a folder or this whole origin; return the bytes freed.

        Without `path`, this evicts all blocks of the origin. A folder is matched by name: the origin is not asked for
        its contents. Pinned blocks are evicted too.
        """
        self._objects.engine.drain()
        name = None if path is None else self._strip(path)
        return self._objects.engine.cache.evict(self._objects.identity, name)

    def verify(self, path: AnyPath, callback: Any = DEFAULT_CALLBACK) -> list[Verified]:
        """Check the cached blocks of an object, or of all objects below a folder.

        Returns the results by name. Every cached block of the known version is read from disk in full and checked.
        Where an object is completely cached, its checksum is compared with the one the origin states. Wrong blocks are
        removed, so the next read fetches them again.

        One block is in memory at a time. The check does not count as an access, so it does not change what is evicted
        next. `callback` receives the number of bytes read. With `offline`, the known checksums are used.
        """
        self._objects.engine.drain()  # include blocks that are still being written
        with importing():
            from cachedfs.core.verify import paths_to_verify, verify
        objects, lookups = self._objects, self._reader.lookups
        names = paths_to_verify(objects, lookups, self._strip(path))
        return [verify(objects, lookups, name, callback.relative_update) for name in names]

    @contextlib.contextmanager
    def local_path(self, path: AnyPath) -> Iterator[str]:
        """Copy the whole object into a temporary read-only local file, and yield its path.

        For code that accepts only local files: `with fs.local_path(path) as name: ...`. Its name has the suffix of the
        object (`.csv.gz`), since many libraries go by that. The file is deleted at the end; until then it counts toward the limit of the cache. Raises ObjectNotFound, IsAFolder, or CacheError if it does
        not fit.
        """
        name: str = self._strip_object(path)
        info = self._object(name)
        if info.kind == "directory":
            raise is_a_folder(self._objects.url(name))
        with self.open(name, "rb") as file:
            lease = self._objects.engine.cache.lease(file.size, self.config.bounds, _suffix_of(name))
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
        """Write the cached blocks and metadata at and below `path` to a shared cache: a folder, or one zip file.

        `path` is an object, a folder or a list of them. `target` is any URL or local path; one that ends with `.zip` is
        a zip file. `target_options` are the options of the target's filesystem; None means this filesystem's own options
        if the protocol is the same. No data is fetched from `path`.

        An export adds what a folder lacks, and writes a zip file anew. `callback` receives the number of bytes sent.
        Raises CacheError where nothing is cached.
        """
        with importing():
            from cachedfs.filesystem.export import export_to

        self._objects.engine.drain()  # include blocks that are still being written
        roots = [self._strip(each) for each in (path if isinstance(path, list | tuple) else [path])]
        if not roots:
            raise ValueError(f"export to {target}: no path was given")
        return export_to(*self._at(target, target_options), self._objects, roots, callback)

    def import_cache(
        self, source: str, source_options: Mapping[str, Any] | None = None, callback: Any = DEFAULT_CALLBACK
    ) -> Imported:
        """Load an export, or a shared cache, from a folder or a zip file into the cache, in few requests.

        Blocks that are cached already are not fetched. Every block is checked; the result's `bad` lists what was
        damaged and left out. Imported metadata keeps its age, so it is used without a request until it is older than
        `max_age`. Raises ValueError for an export of another origin or account, ObjectNotFound where there is no
        export, and CacheError where nothing can be stored.
        """
        with importing():
            from cachedfs.filesystem.import_ import import_from

        self._objects.engine.drain()  # blocks that are still being written take space too
        return import_from(*self._at(source, source_options), self._objects.identity, callback)

    def _at(self, url: str, options: Mapping[str, Any] | None) -> tuple[Objects, str]:
        """Return the objects at the origin of a URL, in this process's engine, and the path in it."""
        text = url.rpartition("::")[2] if "://" in url else os.path.abspath(os.path.expanduser(url))
        protocol, has_protocol, rest = text.partition("://")
        if is_drive_link(text):
            protocol = "drive"
        elif not has_protocol:
            protocol = "file"
        elif protocol in ORIGINS:  # go to the origin itself: an export needs no caching
            protocol = ORIGINS[protocol]
            text = f"{protocol}://{rest}"
        if options is None:
            is_same = protocol == self.target_protocol or {protocol, self.target_protocol} <= set(
                GCS_PROTOCOLS
            )
            options = self.target_options if is_same else {}
        config = self.config._replace(offline=False)
        prefix = f"{protocol}://"
        objects = Objects(
            protocol, options, config, lambda path: path if "://" in path else f"{prefix}{path}"
        )
        return objects, strip(self.protocol, protocol, text)


def _suffix_of(path: str) -> str:
    """Return the last two suffixes of a name at most, as in ".csv.gz"; "" where it has none, or unusual ones."""
    found = re.search(r"(?<=[^/])(\.\w{1,16}){1,2}$", path, re.ASCII)
    return found[0] if found else ""
