"""The index of a shared cache in memory: its files and the pieces in them, from listings of the place."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cachedfs.cache.index.metadata_records import AGELESS, MetadataRecord
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.common.clock import clock
from cachedfs.common.executor import DaemonThreadPool, each_in_threads
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import AccessDenied, CacheError, OriginUnavailable
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.metadata_rows import DamagedFile, MetadataImport
from cachedfs.shared.piece import (
    GATHERED,
    LARGE,
    Piece,
    PlacedPiece,
    folder_of_runs,
    is_everywhere,
    is_gathered,
    range_in_name,
)
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder

logger = logging.getLogger("cachedfs.shared")

RENEW_S = 5.0  # between two listings of a subfolder
LEARNS_S = 10.0  # longest wait of a first read for the listing of a place that answers, and has many files
RECENT_S = 0.2  # a listing of a bucket is used again for so long: another one takes a request
SLACK_S = 2.0  # times of files may be rounded, and a file takes a moment to be written
# The local cache removes metadata that is a day older, unless it has blocks of the object.
OLD_S = 6 * 86400.0
_IMPORTED = "cachedfs-shared"  # the origin of a record for each file whose metadata is in the local cache

T = TypeVar("T")


class _Look(NamedTuple):
    """A listing of a subfolder, and when there may be another one."""

    future: asyncio.Future[None]
    again_at: float
    is_first: bool


class SharedIndex:
    """The index of a shared cache in memory. The coroutines run on the engine's event loop; `pool` runs what blocks.

    Metadata in the files goes to `store`. Nothing here raises an error of the place.
    """

    def __init__(
        self, place: SharedFolder | SharedBucket, store: MetadataStore, pool: DaemonThreadPool
    ) -> None:
        self._place, self._store, self._pool = place, store, pool
        self.known = KnownPieces()
        self.written_at: dict[str, float] = {}  # of files with many pieces; changed in any thread
        self._looks: dict[str, _Look] = {}
        self._looking: dict[str, threading.Lock] = {}
        self._looked_at: dict[str, float] = {}  # when the last finished look at a subfolder began

    async def renew(self, *, waits: bool = False) -> bool:
        """Learn what others put there, if the last time is RENEW_S ago; return whether the caller should look again.

        Callers wait for the first listing, and with `waits` for each.
        """
        return await self._renew(self._subfolders("", 0)[0], waits=waits)

    async def find(self, key: str, info: ObjectInfo, position: int, *, waits: bool) -> PlacedPiece | None:
        """Return where the byte at `position` is; None if it is not there, or the place is left alone."""
        for subfolder in self._subfolders(key, info.size or 0):
            if not self._place.is_off and (placed := self.known.find(key, position)) is not None:
                return placed
            await self._renew(subfolder, waits=waits)
        return None if self._place.is_off else self.known.find(key, position)

    def _subfolders(self, key: str, size: int) -> Sequence[str]:
        """Return what to list for the pieces of an object."""
        if self._place.lists_all:
            return ("",)
        return (GATHERED, folder_of_runs(key)) if size >= LARGE else (GATHERED,)

    def reject(self, file: str, error: DamagedFile | OSError) -> None:
        """Use a file no more: it is damaged, or it was removed meanwhile. Leave a store alone that does not answer."""
        if isinstance(error, TimeoutError):
            self._place.did_not_answer()
            return
        if isinstance(error, OriginUnavailable | AccessDenied):
            self._place.leave_alone(str(error))
            return
        self.known.remove(file)
        self._place.close_file(file)
        if isinstance(error, DamagedFile) or error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            self.known.bad.add(file)
            logger.warning("%s/%s is not used: %s", self._place.path, file, error)
        elif error.errno == errno.EACCES:
            self._place.warn(
                "unreadable", f"the shared cache {self._place.url} cannot be read by this user: {error}"
            )

    async def _renew(self, subfolder: str, *, waits: bool) -> bool:
        if self._place.is_off:
            return False
        look, now = self._looks.get(subfolder), time.monotonic()
        if look is None or (look.future.done() and now >= look.again_at):
            future = asyncio.get_running_loop().run_in_executor(self._pool, self.look, subfolder)
            look = self._looks[subfolder] = _Look(future, now + RENEW_S, look is None)
        elif look.future.done():
            return False
        if not (waits or look.is_first):
            return False
        return await self._place.wait_for(look.future, LEARNS_S)

    def look(self, subfolder: str) -> None:
        """Learn what is in a subfolder now. In a thread; those that call it during a look share the next one."""
        asked_at = time.monotonic()
        with self._looking.setdefault(subfolder, threading.Lock()):
            if self._looked_at.get(subfolder, -1.0) <= asked_at:
                began_at = time.monotonic()
                self._look_alone(subfolder)
                self._looked_at[subfolder] = began_at

    def is_recent(self, subfolder: str) -> bool:
        """Return whether a listing of a bucket tells what is there, near enough."""
        looked_at = max(self._looked_at.get(each, -RECENT_S) for each in ("", subfolder))
        return self._place.times_itself and time.monotonic() - looked_at < RECENT_S

    def look_again(self, subfolder: str) -> None:
        """Learn what is in a subfolder now, unless the first look at it takes long. In a thread."""
        look = self._looks.get("" if self._place.lists_all else subfolder)
        if look is not None and (look.future.done() or self._place.times_itself):
            self.look(subfolder)

    def _look_alone(self, subfolder: str) -> None:
        known = self.known.files(subfolder)  # what is added from here on may not be listed
        try:
            with self._place.asking():
                self._place.check()
                files = {name: name.rpartition("/")[2] for name in self._place.listed(subfolder)}
            self._place.answered()
        except TimeoutError:
            self._place.did_not_answer()
            return
        except OSError as error:
            self._place.leave_alone(str(error))
            return
        for file in known - files.keys():
            self.known.remove(file)
        new = {file: name for file, name in files.items() if file not in known and file not in self.known.bad}
        for file, name in new.items():
            if (found := range_in_name(name)) is not None:
                self.known.add(file, [PlacedPiece(Piece(found[0], 0, *found[1:], ()), file, None)])
        if subfolder in (GATHERED, ""):
            self._learn_gathered(
                [file for file in new if file.startswith(f"{GATHERED}/") and is_gathered(new[file])]
            )

    def _learn_gathered(self, files: Sequence[str]) -> None:
        """Learn what is in new files; metadata in them goes to the local cache, with its age."""
        if files:
            with self._place.asking():
                now_there = self._place.now()
            each_in_threads(partial(self._learn_file, now_there), files)

    def _learn_file(self, now_there: float | None, name: str) -> None:
        try:
            with self._place.asking():
                file = self._place.open(name)
                end = file.end()
            index = end.index()
            if not is_everywhere(index.identity):
                raise DamagedFile("its origin is not the same on every machine")
            self.known.add(name, [PlacedPiece(piece, name, offset) for piece, offset in index.pieces])
            self.written_at[name] = file.modified_at
            made_at = _local_time(now_there, file.modified_at)
            self._import(name, index.identity, partial(_aged, made_at, index.made_at), index.rows)
        except (DamagedFile, OSError) as error:
            self.reject(name, error)

    def _import(
        self, name: str, identity: str, local_time: Callable[[float], float], rows: Iterator[Any]
    ) -> None:
        """Store the metadata of a file in the local cache, unless a process of this machine did."""
        with contextlib.suppress(CacheError):  # nothing can be stored: metadata is asked of the origin
            if self._store.lookup(_IMPORTED, f"{self._place.path}/{name}") is None:
                imported = MetadataImport(self._store, identity, local_time)
                imported.take(rows)
                self._mark_imported(name, min(imported.oldest, clock.now()))

    def _mark_imported(self, name: str, at: float) -> None:
        """Note that the metadata of a file is in the local cache, as long as the oldest of it is."""
        self._store.keep_records([MetadataRecord(_IMPORTED, f"{self._place.path}/{name}", None, at, 0)])

    def wrote(self, name: str, placed: Sequence[PlacedPiece]) -> None:
        """Know what this process has put there."""
        self.known.add(name, placed)
        if is_gathered(name.rpartition("/")[2]):
            with contextlib.suppress(CacheError):
                self._mark_imported(name, clock.now())

    async def in_time(self, read: Callable[[], T]) -> T | None:
        """Return what `read` returns in a thread; None if the place does not answer."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, read)
        return future.result() if await self._place.wait_for(future) else None


def _local_time(now_there: float | None, modified_at: float) -> float:
    """Return the time by our clock at which a file was written, not too late; AGELESS if nobody can tell."""
    if now_there is None or modified_at > now_there + SLACK_S:
        return AGELESS
    return clock.now() - max(0.0, now_there - modified_at) - SLACK_S


def _aged(written_at: float, made_at: float, checked_at: float) -> float:
    """Return the time of an answer by our clock; `made_at` and `checked_at` are by the clock that wrote the file."""
    at = min(written_at, written_at - (made_at - checked_at))
    return at if at > clock.now() - OLD_S else AGELESS
