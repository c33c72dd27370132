"""In-memory metadata cache of one origin, in front of the store that all processes share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedSnapshot,
    ListedName,
    MetadataRecord,
    folder_of,
    hash_of,
    new_version_at,
)
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.common.clock import clock
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.common.urls import stored_path
from cachedfs.origins.registry import is_whole, names_a_version, with_known_details

__all__ = ["MetadataCache", "Entry", "folder_of", "key_of"]

MOST = 50_000  # entries in memory, at most 3 kB each with all GCS metadata; a query for another takes 15 us


@dataclasses.dataclass(slots=True)
class Entry:
    """Metadata of one path as of `checked_at`.

    `info` describes an object or folder; None means that there is neither. Valid while the change counter at `slots`
    equals `mark`. `by_listing` means that a complete listing of the folder lacks the path, instead of one 404. Times
    are in seconds since the epoch.
    """

    path: str
    info: ObjectInfo | None
    checked_at: float
    mark: int
    slots: tuple[int, ...]
    by_listing: bool = False
    origin_error: str = ""  # the origin's error text, if it reported the absence to this process
    _key: ObjectKey | None = None

    @property
    def object(self) -> ObjectInfo:
        """The object or folder at the path. Must not be used for an absence."""
        assert self.info is not None
        return self.info

    def key(self, identity: str, block_size: int) -> ObjectKey | None:
        """Return the key of this version's blocks; None in the cases of `key_of`."""
        key = self._key
        if key is not None and key.block_size == block_size:
            return key
        self._key = key_of(self.info, identity, block_size)
        return self._key


def key_of(info: ObjectInfo | None, identity: str, block_size: int) -> ObjectKey | None:
    """Return the key of a version's blocks, or None if it cannot be cached.

    None for an absence, a folder, or an object of unknown fingerprint or size.
    """
    if info is None or info.fingerprint is None or info.kind != "file" or info.size is None:
        return None
    return ObjectKey(identity, stored_path(info.path), info.fingerprint, block_size)


class MetadataCache:
    """Metadata entries of one origin, in memory and in the shared metadata store.

    Reads look in memory first; new entries are stored in both. Invalidation works across processes. An entry carries
    the change counter that was read before the origin was asked, and is valid only while the counter has that value.
    Safe from any thread; a race costs one extra query.
    """

    def __init__(self, shared: MetadataStore, identity: str, write: Callable[[MetadataRecord], None]) -> None:
        self._shared = shared
        self._identity = identity
        self._write = write
        # A plain dict would search from its start for the oldest entry, past all the deleted ones.
        self._memory: OrderedDict[str, Entry] = OrderedDict()

    @property
    def sees_other_processes(self) -> bool:
        """True if changes by other processes of the machine are noticed."""
        return self._shared.sees_other_processes

    def get(self, path: str) -> Entry | None:
        """Return the valid entry of `path`, of any age; None if there is none."""
        entry = self._memory.get(path)
        if entry is not None and self._shared.mark_at(entry.slots) == entry.mark:
            return entry
        entry = self._from_cache(path)
        if entry is None:
            self._memory.pop(path, None)
        else:
            self._remember(entry)
        return entry

    def in_memory(self, path: str) -> Entry | None:
        """Return the valid entry of `path`, of any age, from this process's memory only."""
        entry = self._memory.get(path)
        return entry if entry is not None and self._shared.mark_at(entry.slots) == entry.mark else None

    def renewed(self, path: str) -> Entry | None:
        """Return the newest entry of `path`, or None.

        It may come from a listing or from another process.
        """
        entry, found = self._memory.get(path), self._from_cache(path)
        if found is None or (entry is not None and entry.checked_at >= found.checked_at):
            return self.get(path)
        self._remember(found)
        return found

    def mark(self, path: str) -> int:
        """Return the change counter of `path`. Read it before asking the origin, and pass it to `store`."""
        return self._shared.mark_at(self._shared.mark_slots(self._identity, path))

    def store(
        self,
        path: str,
        info: ObjectInfo | None,
        *,
        checked_at: float,
        mark: int,
        watch: FeedSnapshot | None = None,
        origin_error: str = "",
        is_read: bool = False,
        before_publish: Callable[[Entry], object] = lambda entry: None,
    ) -> Entry:
        """Store an answer of the origin: `info`, or None for an absence. Return its entry.

        `checked_at` and `mark` are the time and the change counter from before the request. `watch` is the change feed
        that reports changes of the path. `is_read` says that the answer came with a read, which has fewer details than
        a lookup. `origin_error` is the origin's error text for an absence. `before_publish` is called with the entry
        before other processes can see it.
        """
        old = self._memory.get(path)
        info = self._with_all_details(path, info) if is_read else info
        entry = Entry(
            path,
            info,
            checked_at,
            mark,
            self._shared.mark_slots(self._identity, path),
            origin_error=origin_error,
        )
        self._remember(entry)
        before_publish(entry)
        known = None if old is None else old.info
        new_at = new_version_at(info, known, clock.now(), is_first=old is None)
        self._write(MetadataRecord(self._identity, path, info, checked_at, mark, watch, new_at=new_at))
        return entry

    def drop_older(self, paths: Iterable[str], checked_at: float) -> None:
        """Drop entries of `paths` older than `checked_at` from memory.

        The metadata store has newer ones.
        """
        for path in paths:
            old = self._memory.get(path)
            if old is not None and old.checked_at < checked_at:
                self._memory.pop(path, None)

    def expire(self, path: str) -> None:
        """Invalidate the metadata of `path` and its folder's listing.

        This holds for all processes of the machine.
        """
        self._memory.pop(path, None)
        self._shared.changed(self._identity, [path])

    def expire_version(self, info: ObjectInfo) -> None:
        """Invalidate the metadata of an object if it is still that of a version which the origin no longer has."""
        known = self.get(info.path)
        if known is not None and known.info is not None and known.info.fingerprint == info.fingerprint:
            self.expire(info.path)

    def _with_all_details(self, path: str, info: ObjectInfo | None) -> ObjectInfo | None:
        """Return `info` with the details of an earlier lookup added, since a read gives fewer."""
        old = self._memory.get(path)
        if info is None or old is None or old.info is None or is_whole(self._identity, info):
            return info
        return with_known_details(info, old.info)

    def _from_cache(self, path: str) -> Entry | None:
        """Return the newest valid entry from the metadata store.

        It is an absence if a valid, complete listing of the folder lacks the path.
        """
        slots = self._shared.mark_slots(self._identity, path)
        mark = self._shared.mark_at(slots)
        record, listed = self._shared.find(self._identity, path)
        entry = None
        if record is not None and record.mark == mark:
            at = self.confirmed_until(folder_of(path), record.checked_at, record.told)
            entry = Entry(path, record.info, at, mark, slots)
        absent_at = self._absent_at(path, listed)
        if absent_at is None or (entry is not None and entry.checked_at >= absent_at):
            return entry
        return Entry(path, None, absent_at, mark, slots, by_listing=True)

    def unlisted_at(self, path: str) -> float | None:
        """Return the time of the valid, complete listing of the folder of `path` that lacks it; None without one."""
        return self._absent_at(path, self._shared.find(self._identity, path)[1])

    def _absent_at(self, path: str, listed: ListedName | None) -> float | None:
        folder = folder_of(path)
        if listed is None or not folder or listed.is_present or names_a_version(self._identity, path):
            return None
        if listed.mark != self._shared.listing_mark(self._identity, folder):
            return None
        return self.confirmed_until(folder, listed.checked_at, listed.told)

    def newest_version_at(self, folder: str) -> float:
        """Return the time by which the newest known version of an object in `folder`, or in a folder above it, existed."""
        return self._shared.newest_version(self._identity, folder)

    def confirmed_until(self, folder: str, checked_at: float, confirmation: FeedConfirmation | None) -> float:
        """Return the time up to which an answer from `checked_at` about a path in `folder` is confirmed.

        That is the time of the last change feed poll that reported no change of the path (`confirmation`), but only if
        `folder` still was the same folder (by id) then or later. Otherwise it is `checked_at`.
        """
        if confirmation is None or confirmation.at <= checked_at:
            return checked_at
        if not folder:
            return confirmation.at
        entry = self._memory.get(folder)
        if (
            entry is None
            or entry.checked_at < confirmation.at
            or self._shared.mark_at(entry.slots) != entry.mark
        ):
            entry = self._from_cache(folder)
            if entry is None or entry.checked_at < confirmation.at:
                return checked_at
            self._remember(entry)
        has_id = entry.info is not None and entry.info.id is not None
        return (
            confirmation.at
            if has_id and hash_of(self._identity, entry.object.id or "") == confirmation.folder
            else checked_at
        )

    def _remember(self, entry: Entry) -> None:
        self._memory[entry.path] = entry
        while len(self._memory) > MOST:
            with contextlib.suppress(KeyError):  # another thread removes entries too
                self._memory.popitem(last=False)
