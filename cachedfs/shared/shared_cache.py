"""The shared cache of one engine: its index in memory, and reads from it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import AGELESS, MetadataRecord
from cachedfs.common.clock import clock
from cachedfs.common.executor import DaemonThreadPool, each_in_threads
from cachedfs.common.types import CacheBounds, ObjectInfo, ObjectKey, Range
from cachedfs.config import SharedOptions
from cachedfs.errors import AccessDenied, CacheError, ObjectChanged, OriginUnavailable
from cachedfs.origins.base import Reply
from cachedfs.shared.gatherer import FILE
from cachedfs.shared.in_place import BlocksInPlace
from cachedfs.shared.known_pieces import KnownPieces
from cachedfs.shared.leases import EXPIRES_S, Leases, lease_of
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
    shareable_key,
)
from cachedfs.shared.read_leases import ReadLeases
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_store import FilePart, StoredFile
from cachedfs.shared.shared_writer import SharedWriter
from cachedfs.shared.whole_files import WholeFiles

logger = logging.getLogger("cachedfs.shared")

RENEW_S = 5.0  # between two listings of a subfolder
RECENT_S = 0.2  # so long, a listing of a bucket tells what is there: another one takes a request
THREADS = 32  # reads at a time
TRIES = 3  # of one read, at files that cannot be used
SLACK_S = 2.0  # times of files may be rounded, and a file takes a moment to be written
# The local cache removes metadata that is a day older, unless it has blocks of the object.
OLD_S = 6 * 86400.0
_IMPORTED = "cachedfs-shared"  # the origin of a record for each file whose metadata is in the local cache

T = TypeVar("T")
Ask = Callable[[Range], AbstractAsyncContextManager[Reply]]
GetWhole = Callable[[str], asyncio.Future[FilePart | None] | None]


class _Look(NamedTuple):
    """A listing of a subfolder, and when there may be another one."""

    future: asyncio.Future[None]
    again_at: float
    is_first: bool


class SharedReply(Reply):
    """A read that begins with bytes of the shared cache, and may go on with those of the origin."""


class SharedCache:
    """A shared cache behind the local one. The coroutines run on the engine's event loop.

    Nothing here raises an error of the folder: what cannot be read is asked of the origin, what cannot be written is not
    shared.
    """

    def __init__(self, options: SharedOptions, cache: BlockStore) -> None:
        self._store = cache.metadata
        self._folder = place_at(options)
        self._pool = DaemonThreadPool(THREADS, "cachedfs-shared")
        self._known = KnownPieces()
        self._in_place = cache.beside = BlocksInPlace(self._folder, self._known, self._reject)
        self._whole_files = WholeFiles(self._folder, cache, self._pool)
        self._looks: dict[str, _Look] = {}
        self._looking: dict[str, threading.Lock] = {}
        self._looked_at: dict[str, float] = {}  # when the last finished look at a subfolder began
        self._awaited: set[str] = set()  # leases that another node had at the last try
        self._progress_at = 0.0
        self.bytes_given = self._bytes_apart = 0  # to reads; of these, not from whole files
        self._leases = Leases(self._folder, lambda: cache.name)
        self._read_leases = ReadLeases(self._leases, self._take, self._pool)
        self._writer = SharedWriter(
            self._folder, cache, self._known, self._wrote, self._leases, most=options.size
        )
        self.note, self.flush, self.finish = self._writer.note, self._writer.flush, self._writer.finish

    def __repr__(self) -> str:
        return self._folder.folder + (f" ({self._folder.trouble})" if self._folder.trouble else "")

    @property
    def bytes_read(self) -> int:
        """The bytes of objects that were read from it, wanted or not."""
        return self._bytes_apart + sum(self._whole_files.sizes) + self._in_place.bytes_read

    def close(self) -> None:
        """Write what waits if the folder answers, and end the threads."""
        self._writer.close()
        if self._leases.are_held and not self._folder.is_off:
            wait([self._pool.submit(self._leases.release_all)], self._folder.answers_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.close()

    # Read.

    async def renew(self, *, waits: bool = False) -> bool:
        """Learn what others put there, if the last time is RENEW_S ago; return whether the caller should look again.

        Only the first caller waits for it, and with `waits` each.
        """
        return await self._renew(self._subfolders("", 0)[0], waits=waits)

    async def has(self, identity: str, info: ObjectInfo, position: int) -> bool:
        """Return whether the byte at `position` of an object version is there."""
        key = shareable_key(identity, info)
        return key is not None and await self._at(key, info, position, waits=False) is not None

    @contextlib.asynccontextmanager
    async def read(
        self,
        version: ObjectKey,
        info: ObjectInfo,
        want: Range,
        ask: Ask,
        *,
        is_complete: Callable[[], bool],
        waits: bool,
        bounds: CacheBounds,
    ) -> AsyncIterator[Reply]:
        """Read bytes of one version as `Origin.read` does: those that are there, then from `ask`, which asks the origin.

        `is_complete` returns at the end whether all of them were read. Other objects in the same file may come to the
        local cache, within `bounds`. The body is empty if the first block is read in place: it needs no request.
        """
        key = shareable_key(version.identity, info)
        if key is None or await self._at(key, info, want.start, waits=waits) is None:
            has_lease = key is not None and not waits and self._folder.has_leases(info.size or 0)
            lease = await self._lease(key, info, want.start) if key and has_lease else None
            if key is None or self._folder.is_off or self._known.at(key, want.start) is None:
                try:
                    async with ask(want) as reply:
                        yield reply
                finally:
                    if lease is not None:
                        self._read_leases.end(lease, is_complete=is_complete())
                return
            if lease is not None:
                self._read_leases.end(lease, is_complete=False)
        if self._in_place.has(version, want.start // version.block_size):
            yield SharedReply(info, want.start, want.stop, _no_bytes())
            return
        counts = self._folder.counts_requests
        get_whole = partial(self._whole_files.get, version=version, bounds=bounds, with_next=counts)
        async with contextlib.aclosing(self._body(key, info, want, ask, waits, get_whole)) as body:
            yield SharedReply(info, want.start, want.stop, body)

    async def _lease(self, key: str, info: ObjectInfo, position: int) -> str | None:
        """Return the lease with which this node is to fetch what nobody else does.

        Wait while another node fetches it, until it is there or the lease expires; None then, or without a lease.
        """
        name, (pause_s, longest_s) = lease_of(key, position), self._folder.pauses_s
        until = time.monotonic() + EXPIRES_S
        subfolder = folder_of_runs(key) if (info.size or 0) >= LARGE else GATHERED
        if subfolder == GATHERED and self._read_leases.is_alone():
            return None
        may_be_gathered = False
        while self._folder.is_ready and self._writer.accepts(info) and time.monotonic() < until:
            is_ours = await self._read_leases.take(name, subfolder)
            if may_be_gathered:
                await self._in_time(partial(self._look, GATHERED))
            if is_ours:
                self._read_leases.begin(name)
            if is_ours or self._known.at(key, position) is not None:
                return name if is_ours else None
            # What the other node put there may be less than LARGE.
            may_be_gathered = subfolder != GATHERED and not self._folder.lists_all
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return None

    async def _take(self, names: Sequence[str], subfolder: str) -> set[str]:
        return await self._in_time(partial(self._take_and_look, names, subfolder)) or set()

    def _take_and_look(self, names: Sequence[str], subfolder: str) -> set[str]:
        """Take leases, unless nobody would wait for them, and see what came there before they were free. In a thread."""
        if subfolder == GATHERED and self._leases.is_alone():
            return set(names)
        taken = self._leases.take(names)
        looked_at = max(self._looked_at.get(each, -RECENT_S) for each in ("", subfolder))
        is_recent = self._folder.times_itself and time.monotonic() - looked_at < RECENT_S
        if is_recent and taken.issuperset(names) and self._awaited.isdisjoint(names):
            return taken
        self._awaited = self._awaited.difference(taken).union(set(names) - taken)
        look = self._looks.get("" if self._folder.lists_all else subfolder)
        if look is not None and (look.future.done() or self._folder.times_itself):  # else that takes long
            self._look(subfolder)
        return taken

    async def _body(
        self, key: str, info: ObjectInfo, want: Range, ask: Ask, waits: bool, get_whole: GetWhole
    ) -> AsyncGenerator[bytes, None]:
        at, opened, n_left = want.start, dict[str, tuple[StoredFile, Piece, int]](), TRIES
        n_readers = self._whole_files.n_readers
        while at < want.stop and n_left:
            if (placed := await self._at(key, info, at, waits=waits)) is None:
                break
            n_readers[placed.file] += 1
            try:
                data = await self._whole_bytes(placed, at, want.stop, get_whole)
                if data is None:
                    data = await self._in_time(partial(self._bytes_of, placed, opened, at, want.stop))
                    self._bytes_apart += len(data or b"")
            finally:
                n_readers -= Counter((placed.file,))  # keeps no zeros
            n_left -= not data
            if data:
                self.bytes_given += len(data)
                at += len(data)
                yield data
        if at == want.stop:
            return
        async with ask(Range(at, want.stop)) as reply:
            if (reply.start, reply.stop) != (at, want.stop):
                raise ObjectChanged(f"{info.path}: the origin sent other bytes than requested; open it again")
            async for data in reply.body:
                yield data

    async def _at(self, key: str, info: ObjectInfo, position: int, *, waits: bool) -> PlacedPiece | None:
        """Return where the byte at `position` is; None if it is not there, or the folder is left alone."""
        for subfolder in self._subfolders(key, info.size or 0):
            if not self._folder.is_off and (placed := self._known.at(key, position)) is not None:
                return placed
            await self._renew(subfolder, waits=waits)
        return None if self._folder.is_off else self._known.at(key, position)

    def _subfolders(self, key: str, size: int) -> Sequence[str]:
        """Return what to list for the pieces of an object."""
        if self._folder.lists_all:
            return ("",)
        return (GATHERED, folder_of_runs(key)) if size >= LARGE else (GATHERED,)

    async def _whole_bytes(
        self, placed: PlacedPiece, at: int, stop: int, get_whole: GetWhole
    ) -> bytes | None:
        """Return some bytes from `at` on of a small object, from its whole file; None if it is not read as a whole."""
        if not is_gathered(placed.file.rpartition("/")[2]) or (found := get_whole(placed.file)) is None:
            return None
        try:
            limit_s = None if self._folder.times_itself else self._folder.answers_s
            while not (await asyncio.wait([found], timeout=limit_s))[0]:  # what was read is stored, too
                if self._whole_files.is_late(placed.file, limit_s):
                    self._folder.did_not_answer()
                if self._folder.is_off:  # also if all threads wait for it
                    return None
            if (file := found.result()) is None:
                return None
            piece, offset = file.find(placed)
            return file.read(piece, offset, at, min(stop, piece.stop))
        except (DamagedFile, OSError) as error:
            self._reject(placed.file, error)
            return None

    def _bytes_of(
        self, placed: PlacedPiece, opened: dict[str, tuple[StoredFile, Piece, int]], at: int, stop: int
    ) -> bytes | None:
        """Return some bytes from `at` on; None if they cannot be used. In a thread."""
        try:
            if placed.file not in opened:
                opened.clear()
                found = self._folder.open(placed.file)
                if self._folder.times_itself and found.size <= 2 * min(stop - at, FILE):
                    found = found.whole()  # with its index, in one request
                opened[placed.file] = found, *found.find(placed)
            file, piece, offset = opened[placed.file]
            return file.read(piece, offset, at, min(stop, piece.stop, at + self._folder.chunk))
        except (DamagedFile, OSError) as error:
            self._reject(placed.file, error)
            if isinstance(error, FileNotFoundError):  # it was replaced by one with more in it
                self._look(placed.file.rpartition("/")[0])
            return None

    def _reject(self, file: str, error: DamagedFile | OSError) -> None:
        """Use a file no more: it is damaged, or it was removed meanwhile. Leave a store alone that does not answer."""
        if isinstance(error, TimeoutError):
            self._folder.did_not_answer()
            return
        if isinstance(error, OriginUnavailable | AccessDenied):
            self._folder.leave_alone(str(error))
            return
        self._known.remove(file)
        self._folder.close_file(file)
        if isinstance(error, DamagedFile) or error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            self._known.bad.add(file)
            logger.warning("%s/%s is not used: %s", self._folder.path, file, error)
        elif error.errno == errno.EACCES:
            self._folder.warn(
                "unreadable", f"the shared cache {self._folder.folder} cannot be read by this user: {error}"
            )

    # What is there.

    async def _renew(self, subfolder: str, *, waits: bool) -> bool:
        if self._folder.is_off:
            return False
        look, now = self._looks.get(subfolder), time.monotonic()
        if look is None or (look.future.done() and now >= look.again_at):
            self._progress_at = now
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._look, subfolder)
            look = self._looks[subfolder] = _Look(future, now + RENEW_S, look is None)
        elif look.future.done():
            return False
        if not (waits or look.is_first):
            return False
        limit_s = self._folder.answers_s
        done, _ = await asyncio.wait([look.future], timeout=limit_s)
        if not done and not self._folder.times_itself and time.monotonic() - self._progress_at >= limit_s:
            self._folder.did_not_answer()
        return bool(done)

    def _look(self, subfolder: str) -> None:
        """Learn what is in a subfolder now. In a thread; of several that look at once, the last one looks for all."""
        asked_at = time.monotonic()
        with self._looking.setdefault(subfolder, threading.Lock()):
            if self._looked_at.get(subfolder, -1.0) <= asked_at:
                began_at = time.monotonic()
                self._look_alone(subfolder)
                self._looked_at[subfolder] = began_at

    def _look_alone(self, subfolder: str) -> None:
        known = self._known.files(subfolder)  # what is added from here on may not be listed
        try:
            self._folder.check()
            files = {name: name.rpartition("/")[2] for name in self._folder.listed(subfolder)}
            self._folder.answered()
        except TimeoutError:
            self._folder.did_not_answer()
            return
        except OSError as error:
            self._folder.leave_alone(str(error))
            return
        for file in known - files.keys():
            self._known.remove(file)
        new = {
            file: name for file, name in files.items() if file not in known and file not in self._known.bad
        }
        for file, name in new.items():
            if (found := range_in_name(name)) is not None:
                self._known.add(file, [PlacedPiece(Piece(found[0], 0, *found[1:], ()), file, None)])
        if subfolder in (GATHERED, ""):
            self._learn_gathered(
                [file for file in new if file.startswith(f"{GATHERED}/") and is_gathered(new[file])]
            )

    def _learn_gathered(self, files: Sequence[str]) -> None:
        """Learn what is in new files; metadata in them goes to the local cache, with its age."""
        if files:
            each_in_threads(partial(self._learn_file, self._folder.now()), files)

    def _learn_file(self, now_there: float | None, name: str) -> None:
        try:
            file = self._folder.open(name)
            index = file.index()
            if not is_everywhere(index.identity):
                raise DamagedFile("its origin is not the same on every machine")
            self._known.add(name, [PlacedPiece(piece, name, offset) for piece, offset in index.pieces])
            self._whole_files.written_at[name] = file.modified_at
            made_at = _local_time(now_there, file.modified_at)
            self._import(name, index.identity, partial(_aged, made_at, index.made_at), index.rows)
        except (DamagedFile, OSError) as error:
            self._reject(name, error)
        self._progress_at = time.monotonic()

    def _import(
        self, name: str, identity: str, local_time: Callable[[float], float], rows: Iterator[Any]
    ) -> None:
        """Store the metadata of a file in the local cache, unless a process of this machine did."""
        with contextlib.suppress(CacheError):  # nothing can be stored: metadata is asked of the origin
            if self._store.lookup(_IMPORTED, f"{self._folder.path}/{name}") is None:
                imported = MetadataImport(self._store, identity, local_time)
                imported.take(rows)
                self._mark_imported(name, min(imported.oldest, clock.now()))

    def _mark_imported(self, name: str, at: float) -> None:
        """Note that the metadata of a file is in the local cache, as long as the oldest of it is."""
        self._store.keep_records([MetadataRecord(_IMPORTED, f"{self._folder.path}/{name}", None, at, 0)])

    def _wrote(self, name: str, placed: Sequence[PlacedPiece]) -> None:
        """Know what this process has put there."""
        self._known.add(name, placed)
        if is_gathered(name.rpartition("/")[2]):
            with contextlib.suppress(CacheError):
                self._mark_imported(name, clock.now())

    async def _in_time(self, read: Callable[[], T]) -> T | None:
        """Return what `read` returns in a thread; None, and leave the folder alone, if that takes too long."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, read)
        limit_s = None if self._folder.times_itself else self._folder.answers_s
        if not (await asyncio.wait([future], timeout=limit_s))[0]:
            self._folder.did_not_answer()
            return None
        return future.result()


async def _no_bytes() -> AsyncIterator[bytes]:
    for data in tuple[bytes, ...]():
        yield data


def _local_time(now_there: float | None, modified_at: float) -> float:
    """Return the time by our clock at which a file was written, not too late; AGELESS if nobody can tell."""
    if now_there is None or modified_at > now_there + SLACK_S:
        return AGELESS
    return clock.now() - max(0.0, now_there - modified_at) - SLACK_S


def _aged(written_at: float, made_at: float, checked_at: float) -> float:
    """Return the time of an answer by our clock; `made_at` and `checked_at` are by the clock that wrote the file."""
    at = min(written_at, written_at - (made_at - checked_at))
    return at if at > clock.now() - OLD_S else AGELESS


def place_at(options: SharedOptions) -> SharedFolder | SharedBucket:
    """Return the shared cache that the options name, without using it."""
    if "://" in options.folder:
        kind = SharedDrive if options.folder.startswith("drive://") else SharedBucket
        return kind(options.folder, is_read_only=options.is_read_only)
    return SharedFolder(options.folder, trust=options.trust, is_read_only=options.is_read_only)
