"""Metadata of the paths of one origin: entries in memory and in the store, and how long they are fresh."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from fsspec.utils import tokenize

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedSnapshot,
    ListedName,
    MetadataRecord,
    hash_of,
    new_version_at,
)
from cachedfs.common.clock import clock
from cachedfs.common.optional_imports import importing
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of, without_slash
from cachedfs.common.version import Version, version_of
from cachedfs.config import Config
from cachedfs.core.path_errors import is_a_folder, no_such_object, not_cached
from cachedfs.errors import CachedFSError
from cachedfs.origins.base import Origin
from cachedfs.origins.registry import (
    check_options,
    identity_lasts_s,
    identity_of,
    is_whole,
    names_a_version,
    with_known_details,
)

if TYPE_CHECKING:
    from cachedfs.cache.metadata_store import MetadataStore
    from cachedfs.core.engine import Engine
    from cachedfs.core.statistics import LinkStats

ABSENCE_S = 10.0
"""Maximum age in seconds of an absence known from a 404: objects appear more often than they change (gcsfuse: 5 s)."""
MOST = 50_000  # entries in memory at the start of a second, at most 3 kB each with all GCS metadata; a query for another takes 15 us


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """The metadata of one path as of `asked_at`, in seconds since the epoch.

    `info` describes an object or folder; None means that there is neither. Valid while the change counter at `slots`
    equals `counter`. `by_listing`: a complete listing of the folder lacks the path, instead of one 404. `origin_error`:
    the origin's text, if it reported the absence to this process.
    """

    path: str
    info: ObjectInfo | None
    asked_at: float
    counter: int
    slots: tuple[int, ...]
    by_listing: bool = False
    origin_error: str = ""
    version: Version | None = None  # made by `Objects.version`

    @property
    def object(self) -> ObjectInfo:
        """The object or folder at the path. Must not be used for an absence."""
        assert self.info is not None
        return self.info


def is_fresh(asked_at: float, now: float, *, lifetime_s: float, absence: bool = False) -> bool:
    """Return whether an answer from `asked_at` is fresh at `now`, both in seconds since the epoch.

    With a lifetime of 0 no answer is fresh, with an infinite one every answer is. An answer from the future (the clock
    was set back) is not fresh. `absence` limits the lifetime to ABSENCE_S.
    """
    if math.isinf(lifetime_s):
        return True
    return 0 <= now - asked_at < (min(lifetime_s, ABSENCE_S) if absence else lifetime_s)


class Objects:
    """The objects of one origin under one configuration, as this process knows them. Safe from any thread.

    Filesystems of one origin share the entries; each compares their age with its own `max_age`. An entry carries the
    change counter that was read before the origin was asked, and is valid only while the counter has that value, so a
    change by any process of the machine counts at once. Cheap to create: the engine is made at first use, and again
    after a fork.
    """

    engine: Engine
    """The engine of this process: made at the first use, and again after a fork or once it was closed."""
    store: MetadataStore
    """The metadata on disk, of this engine."""
    identity: str
    """Text that identifies the data, part of every block key. The first use may ask Drive whose credentials these are.

    It changes if nobody had signed in, and somebody does."""

    def __init__(
        self, protocol: str, options: Mapping[str, Any], config: Config, url: Callable[[str], str]
    ) -> None:
        self.protocol, self.options, self.config = protocol, options, config
        self.url = url  # returns the full URL of a path, for messages
        check_options(protocol, options)
        self._identify_at = -math.inf  # when to ask again whose data this is
        self._identifying: asyncio.Future[str] | None = None
        self._look_at = -math.inf  # when to look again: identity and shared files may be others
        self._lifetime_s = config.lifetime_s
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # of this process; some are not valid any more
        self._origin: Origin | None = None
        self.has_warned_of_stale = False

    # The engine, the identity and the origin.

    def __getattr__(self, name: str) -> Any:
        if name == "identity":
            return self._identify()
        if name not in ("engine", "store"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with importing():  # lazily: many programs create filesystems that they do not read
            from cachedfs.core.engines import engine_for
        engine = engine_for(self.config)
        self.entries = engine.entries(self.identity)
        engine.users.add(self)
        # The engine last: a thread that sees it must also see its entries.
        self.store, self.engine = engine.cache.metadata, engine
        if not engine.is_open:  # it is being closed
            self.engine_closed()
        return engine if name == "engine" else engine.cache.metadata

    def engine_closed(self) -> None:
        """Stop using the engine, which is closed, or is that of a parent process."""
        self.__dict__.pop("engine", None)
        self.__dict__.pop("store", None)
        self._look_at, self._origin, self.entries = -math.inf, None, OrderedDict()

    def _identify(self) -> str:
        known = self.__dict__.get("identity")
        found = identity_of(self.protocol, self.options, may_ask=not self.config.offline)
        self._identify_at = time.monotonic() + identity_lasts_s(found)
        if found != known:
            self.identity, self._origin = found, None
            if known is not None:
                self.entries = self.engine.entries(found)
        return found

    async def find_identity(self) -> None:
        """Find the identity in a thread, if it is not known: `identity` may block on a request."""
        if time.monotonic() < self._identify_at:
            return
        finding = self._identifying
        if finding is None or finding.done() or finding.get_loop() is not asyncio.get_running_loop():
            finding = self._identifying = asyncio.ensure_future(asyncio.to_thread(self._identify))
        await asyncio.shield(finding)

    @functools.cached_property
    def caller_key(self) -> str:
        """Key of the callers that may share a lookup: they have the same credentials and options."""
        return str(tokenize(self.protocol, dict(self.options), self.config))

    def origin(self, path: str) -> Origin:
        """Return the origin; raises OriginUnavailable, naming `path`, if `offline` is set."""
        if self.config.offline:
            raise not_cached(self.url(path))
        identity, origin = self.identity, self._origin  # the identity first: a new one has another origin
        if origin is None:
            origin = self._origin = self.engine.origin(
                self.protocol, self.options, identity=identity, concurrency=self.config.concurrency
            )
        return origin

    def link_stats(self) -> LinkStats:
        """Return the measurements of the link to the origin, without a request and without opening it."""
        if self._origin is None:
            with importing():
                from cachedfs.core.statistics import LinkStats
                from cachedfs.origins.request_slots import SPECULATIVE_FACTOR
            return LinkStats(n_at_once=SPECULATIVE_FACTOR * self.config.first_concurrency)
        return self.engine.speculation.link_stats(self._origin)

    # Entries.

    def fresh(self, path: str) -> Entry | None:
        """Return the entry of `path` if it may be used without asking the origin, else None."""
        # The usual case, without further calls: an object or folder in memory that did not change.
        counters, entry = self.store.counters, self.entries.get(path)
        if (
            entry is not None
            and entry.info is not None
            and time.monotonic() < self._look_at
            and counters.at(entry.slots) == entry.counter
            and 0 <= clock.now() - entry.asked_at < self._lifetime_s
        ):
            return entry
        entry = self.known(path)
        return entry if entry is not None and self.is_fresh(entry) else None

    def _look(self) -> None:
        """Once a second, check the files of all processes and the identity, and remove old entries."""
        if time.monotonic() >= self._identify_at:
            self._identify()
        look_at = self.store.look()
        is_final = math.isinf(self.config.lifetime_s)
        # If changes by other processes cannot be noticed, nothing is fresh.
        self._lifetime_s = self.config.lifetime_s if is_final or self.store.sees_other_processes else 0.0
        self._look_at = min(look_at, self._identify_at)
        for _ in range(len(self.entries) - MOST):
            with contextlib.suppress(KeyError):  # another thread removes entries too
                self.entries.popitem(last=False)

    def known(self, path: str, *, newest: bool = False) -> Entry | None:
        """Return the valid entry of `path`, of any age: a fresh one in memory, else the newest one, or None.

        With `newest`, the store is asked in any case: another process may know more.
        """
        if time.monotonic() >= self._look_at:
            self._look()
        store, entry = self.store, self.entries.get(path)  # the store first: it has entries of this process
        if entry is not None and store.counter_at(entry.slots) != entry.counter:
            entry = None
        if entry is not None and not newest and self.is_fresh(entry):
            return entry
        found = self._in_store(path)
        if found is not None and (entry is None or found.asked_at > entry.asked_at):
            self.entries[path] = found
            return found
        if entry is None:
            self.entries.pop(path, None)
        return entry

    async def has_renewed(self) -> bool:
        """Return whether metadata may have come from the shared cache, which is looked at now and then."""
        shared = self.engine.shared
        return shared is not None and await shared.renew(waits=self.config.offline)

    def existing(self, path: str, *, whole: bool = False) -> Entry | None:
        """Return the fresh entry of `path`, or None; with `whole`, only one that has all details of a lookup.

        Raises ObjectNotFound if the path is known to be absent, without or with the slash that it ends in.
        """
        entry = self.fresh(path)
        if entry is None or (entry.info is None and path != without_slash(path)):
            return None
        if entry.info is None:
            raise self.not_found(entry)
        return None if whole and not is_whole(self.identity, entry.info) else entry

    def not_found(self, entry: Entry) -> CachedFSError:
        """Return the error for an absent path; for a known folder with a slash at its end, IsAFolder."""
        url, folder = self.url(entry.path), without_slash(entry.path)
        known = None if folder == entry.path else self.fresh(folder)
        if known is not None and known.info is not None and known.info.kind == "directory":
            return is_a_folder(url)
        return no_such_object(url, self.protocol, entry.origin_error)

    def version(self, entry: Entry) -> Version | None:
        """Return the version that an entry is about; None for an absence, a folder, and what cannot be cached."""
        version = entry.version  # a filesystem with another block size may replace it at any moment
        if version is None or version.block_size != self.config.block_size:
            version = entry.version = version_of(self.identity, entry.info, self.config.block_size)
        return version

    @property
    def lifetime_s(self) -> float:
        """Seconds until metadata expires: as configured, or 0 if changes by other processes cannot be noticed."""
        if time.monotonic() >= self._look_at:
            self._look()
        return self._lifetime_s

    def is_fresh(self, entry: Entry) -> bool:
        """Return whether `entry` can be used without asking the origin.

        With `offline`, the lookup decides whether an absence still counts.
        """
        if entry.info is None and self.config.offline and not math.isinf(self.config.max_age):
            return False
        is_404 = entry.info is None and not entry.by_listing
        return is_fresh(entry.asked_at, clock.now(), lifetime_s=self.lifetime_s, absence=is_404)

    # Answers of the origin.

    def counter(self, path: str) -> int:
        """Return the change counter of `path`. Read it before asking the origin, and pass it to `learn`."""
        return self.store.counter_at(self.store.slots_of(self.identity, path))

    def learn(
        self,
        path: str,
        info: ObjectInfo | None,
        *,
        asked_at: float,
        counter: int,
        watch: FeedSnapshot | None = None,
        then: Callable[[], object] | None = None,
    ) -> Entry:
        """Keep an answer of the origin, `info` or None for an absence; return its entry. Call `then` once it is stored.

        `asked_at` and `counter` are from before the request. `watch` reports changes of the path.
        """
        identity, old = self.identity, self.entries.get(path)
        slots, known = self.store.slots_of(identity, path), old.info if old is not None else None
        if info is not None and known is not None and not is_whole(identity, info):
            info = with_known_details(info, known)
        entry = Entry(path, info, asked_at, counter, slots)
        new_at = new_version_at(info, known, clock.now(), is_first=old is None)
        record = MetadataRecord(identity, path, info, asked_at, counter, watch, new_at=new_at)
        if old is None or old.asked_at <= asked_at or self.store.counter_at(old.slots) != old.counter:
            self.entries[path] = entry  # no answer to a later request came before it
        self.engine.store_queue.put(records=[record], then=then)
        return entry

    def keep_listed(
        self, infos: Iterable[ObjectInfo], counters: Mapping[str, int], *, asked_at: float
    ) -> None:
        """Keep what a listing says in memory: who lists a folder reads its files next. The store has it already."""
        for info in islice(infos, MOST):
            old, counter = self.entries.get(path := info.path), counters.get(path)
            if counter is not None and (old is None or old.asked_at < asked_at):
                slots = self.store.slots_of(self.identity, path)
                self.entries[path] = Entry(path, info, asked_at, counter, slots)

    def expire(self, path: str) -> None:
        """Expire the metadata of `path` and its folder's listing, for all processes of the machine."""
        store = self.store  # first: it makes `entries` those of this process
        self.entries.pop(path, None)
        store.changed(self.identity, [path])

    # The store.

    def _in_store(self, path: str) -> Entry | None:
        """Return the newest valid entry in the store.

        It is an absence if a valid, complete listing of the folder lacks the path.
        """
        record, listed = self.store.find(self.identity, path)
        if record is None and listed is None:
            return None
        slots, entry = self.store.slots_of(self.identity, path), None
        counter = self.store.counter_at(slots)
        if record is not None and record.counter == counter:
            at = self.confirmed_until(folder_of(path), record.checked_at, record.confirmation)
            entry = Entry(path, record.info, at, counter, slots)
        absent_at = self.unlisted_at(path, listed) if listed is not None else None
        if absent_at is None or (entry is not None and entry.asked_at >= absent_at):
            return entry
        return Entry(path, None, absent_at, counter, slots, by_listing=True)

    def unlisted_at(self, path: str, listed: ListedName | None = None) -> float | None:
        """Return the time of the valid, complete listing of the folder of `path` that lacks it; None without one."""
        folder, listed = folder_of(path), listed or self.store.find(self.identity, path)[1]
        if listed is None or listed.is_present or not folder or names_a_version(self.identity, path):
            return None
        if listed.counter != self.store.listing_counter(self.identity, folder):
            return None
        return self.confirmed_until(folder, listed.checked_at, listed.confirmation)

    def confirmed_until(self, folder: str, asked_at: float, confirmation: FeedConfirmation | None) -> float:
        """Return the time up to which an answer from `asked_at` about a path in `folder` is confirmed.

        That is the time of the last change feed poll that reported no change of the path (`confirmation`), but only if
        `folder` still was the same folder (by id) then or later. Otherwise it is `asked_at`.
        """
        if confirmation is None or confirmation.at <= asked_at:
            return asked_at
        if not folder:
            return confirmation.at
        here = self.entries.get(folder)
        here = self.known(folder, newest=here is None or here.asked_at < confirmation.at)
        id = None if here is None or here.asked_at < confirmation.at or here.info is None else here.info.id
        is_same = id is not None and hash_of(self.identity, id) == confirmation.folder
        return confirmation.at if is_same else asked_at

    def not_after_folder(self, path: str, now: float) -> float:
        """Return the time that an answer of `now` about `path` counts from, not later than that of its folder.

        The folder's entry was used to look the path up, if the origin looks names up by folder.
        """
        entry = self.known(folder_of(path)) if folder_of(path) and self.origin(path).by_parent else None
        return now if entry is None else min(now, entry.asked_at)
