"""What one process knows of the objects of one origin: the memory in front of the cache's facts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from cachedfs.cache.index.metadata_records import FeedConfirmation, FeedSnapshot, MetadataRecord, hash_of
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.origins.registry import is_whole, names_a_version, with_known_details

__all__ = ["MetadataCache", "MetadataEntry", "folder_of", "key_of"]

MOST = 50_000  # facts in memory, at most 3 kB each with all that GCS tells; the rest is a 15 us query away


@dataclasses.dataclass(slots=True)
class MetadataEntry:
    """What is known of one path: an object or folder (`info`), or its absence (None), as of `checked_at`.

    It holds while the change mark at `slots` still is `mark`. `by_listing`: the absence follows from a complete
    listing of the folder, not from one 404.
    """

    path: str
    info: ObjectInfo | None
    checked_at: float
    mark: int
    slots: tuple[int, ...]
    by_listing: bool = False
    why: str = ""  # in the origin's words, for an absence that it told this process
    _key: ObjectKey | None = None

    @property
    def object(self) -> ObjectInfo:
        """What exists at the path. REQUIRES: it is no absence."""
        assert self.info is not None
        return self.info

    def key(self, identity: str, block_size: int) -> ObjectKey | None:
        """Return the key of this version's blocks; None for a folder and where there is no fingerprint."""
        key = self._key
        if key is not None and key.block_size == block_size:
            return key
        self._key = key_of(self.info, identity, block_size)
        return self._key


def key_of(info: ObjectInfo | None, identity: str, block_size: int) -> ObjectKey | None:
    """Return the key of a version's blocks; None for an absence, a folder, and where there is no fingerprint."""
    if info is None or info.fingerprint is None or info.kind != "file" or info.size is None:
        return None
    return ObjectKey(identity, info.path, info.fingerprint, block_size)


def folder_of(path: str) -> str:
    """Return the folder that a path is in; "" for what is at the top."""
    return path.rpartition("/")[0]


class MetadataCache:
    """The facts of one origin: asked from memory, then from the cache; learnt into both.

    Valid in every process at once: a fact carries the change mark that was read before the origin was asked, and
    counts only while the mark is the same. Safe from any thread; a race costs a query.
    """

    def __init__(self, shared: MetadataStore, identity: str, keep: Callable[[MetadataRecord], None]) -> None:
        self._shared = shared
        self._identity = identity
        self._keep = keep
        self._memory: dict[str, MetadataEntry] = {}

    def get(self, path: str) -> MetadataEntry | None:
        """Return what is known of `path`, of any age; None when nothing valid is."""
        known = self._memory.get(path)
        if known is not None and self._shared.mark_at(known.slots) == known.mark:
            return known
        known = self._from_cache(path)
        if known is None:
            self._memory.pop(path, None)
        else:
            self._remember(known)
        return known

    def in_memory(self, path: str) -> MetadataEntry | None:
        """Return what this process remembers of `path`, of any age, without a look at what others learnt."""
        known = self._memory.get(path)
        return known if known is not None and self._shared.mark_at(known.slots) == known.mark else None

    def renewed(self, path: str) -> MetadataEntry | None:
        """Return what is known of `path` by the youngest answer: a listing, or another process, may have brought one."""
        known, found = self._memory.get(path), self._from_cache(path)
        listed = self._absence_by_listing(path)
        if listed is not None and (found is None or found.checked_at < listed.checked_at):
            found = listed
        if found is None or (known is not None and known.checked_at >= found.checked_at):
            return self.get(path)
        self._remember(found)
        return found

    def mark(self, path: str) -> int:
        """Return the change mark of `path`: to be read before the origin is asked, and given to `learn`."""
        return self._shared.mark_at(self._shared.mark_slots(self._identity, path))

    def learn(
        self,
        path: str,
        info: ObjectInfo | None,
        *,
        checked_at: float,
        mark: int,
        watch: FeedSnapshot | None = None,
        why: str = "",
        is_read: bool = False,
        first: Callable[[MetadataEntry], object] = lambda known: None,
    ) -> MetadataEntry:
        """Remember an answer of the origin that was asked for at `checked_at`, when the change mark was `mark`.

        `watch`: the feed that tells when it is old. `is_read`: the
        answer came with a read, and says less of the object than a lookup. `first` is called with it before other processes can see it.
        """
        info = self._with_all_details(path, info) if is_read else info
        known = MetadataEntry(
            path, info, checked_at, mark, self._shared.mark_slots(self._identity, path), why=why
        )
        self._remember(known)
        first(known)
        self._keep(MetadataRecord(self._identity, path, info, checked_at, mark, watch))
        return known

    def overtaken(self, paths: Iterable[str], checked_at: float) -> None:
        """Look again in the cache for what was remembered of `paths` before `checked_at`: a younger answer is there."""
        for path in paths:
            old = self._memory.get(path)
            if old is not None and old.checked_at < checked_at:
                self._memory.pop(path, None)

    def expire(self, path: str) -> None:
        """Forget what is known of `path` and of its folder's listing, in all processes of the machine."""
        self._memory.pop(path, None)
        self._shared.changed(self._identity, [path])

    def _with_all_details(self, path: str, info: ObjectInfo | None) -> ObjectInfo | None:
        """Keep the metadata that a lookup gave before, where a read has fewer."""
        old = self._memory.get(path)
        if info is None or old is None or old.info is None or is_whole(self._identity, info):
            return info
        return with_known_details(info, old.info)

    def _from_cache(self, path: str) -> MetadataEntry | None:
        slots = self._shared.mark_slots(self._identity, path)
        mark = self._shared.mark_at(slots)
        fact = self._shared.lookup(self._identity, path)
        if fact is not None and fact.mark == mark:
            at = self.held_until(folder_of(path), fact.checked_at, fact.told)
            return MetadataEntry(path, fact.info, at, mark, slots)
        return self._absence_by_listing(path)

    def held_until(self, folder: str, checked_at: float, told: FeedConfirmation | None) -> float:
        """Return as of when an answer about what is in `folder` holds that was asked for at `checked_at`.

        It is as old as its question, or as the last poll of a feed that told nothing of it: if `folder` was, then or
        later, still the one that it is about.
        """
        if told is None or told.at <= checked_at:
            return checked_at
        if not folder:
            return told.at
        known = self._memory.get(folder)
        if known is None or known.checked_at < told.at or self._shared.mark_at(known.slots) != known.mark:
            known = self._from_cache(folder)
            if known is None or known.checked_at < told.at:
                return checked_at
            self._remember(known)
        is_it = known.info is not None and known.info.id is not None
        return (
            told.at if is_it and hash_of(self._identity, known.object.id or "") == told.folder else checked_at
        )

    def _absence_by_listing(self, path: str) -> MetadataEntry | None:
        """Return that `path` is absent, where a complete listing of its folder lacks it."""
        if names_a_version(self._identity, path):
            return None
        slots = self._shared.mark_slots(self._identity, path)
        mark = self._shared.mark_at(slots)
        folder = path.rpartition("/")[0]
        listed = self._shared.listing_has(self._identity, folder, path) if folder else None
        if listed is None:
            return None
        checked_at, listing_mark, present, told = listed
        if present or listing_mark != self._shared.listing_mark(self._identity, folder):
            return None
        at = self.held_until(folder, checked_at, told)
        return MetadataEntry(path, None, at, mark, slots, by_listing=True)

    def _remember(self, known: MetadataEntry) -> None:
        self._memory[known.path] = known
        while len(self._memory) > MOST:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread was at it too
                self._memory.pop(next(iter(self._memory)), None)
