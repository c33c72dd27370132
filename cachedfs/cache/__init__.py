"""The cache: the local, persistent set of blocks that all processes of a machine share, and what is known of objects.

`BlockCache` is the one door of this room. Everything is sync, safe in threads, across processes and over forks. A read
never raises for the cache's sake: what is absent, damaged or out of reach is a miss. What cannot be stored is a
`CacheError`, which only the reader handles.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from cachedfs.cache import blocks, leftovers
from cachedfs.cache.audit import Report
from cachedfs.cache.blocks import FORMAT, BadBlock, Handle
from cachedfs.cache.budgets import Budgets, Record
from cachedfs.cache.claims import Claims
from cachedfs.cache.complaints import Complaints
from cachedfs.cache.directory import Directory, layer_roots, open_directory, readable_root
from cachedfs.cache.disk import Buffer, is_network
from cachedfs.cache.fact_rows import Sweep
from cachedfs.cache.facts import Fact, Feed, Listing, Told, Watch, hash_of
from cachedfs.cache.following import follow
from cachedfs.cache.handles import Handles
from cachedfs.cache.index import TROUBLE, Index, Rows
from cachedfs.cache.layers import Layers
from cachedfs.cache.leases import Lease
from cachedfs.cache.mapped import MappedFiles
from cachedfs.cache.shared import Marks
from cachedfs.cache.space import likely_allowance
from cachedfs.cache.store import Store
from cachedfs.errors import CacheError
from cachedfs.model import BlockKey, Bounds, Changes, ObjectInfo, ObjectKey

__all__ = [
    "FORMAT",
    "BadBlock",
    "BlockCache",
    "Fact",
    "Feed",
    "Handle",
    "Lease",
    "Listing",
    "Report",
    "Told",
    "Watch",
    "hash_of",
    "is_network",
]

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

_LOOK_S = 1.0  # how often we look whether the shared files at our paths are still those that we have mapped
_AGAIN_S = 60.0  # how long we do without what does not work before it is tried again: `marks` are 0.5 MB


class BlockCache:
    """The cache in `cache_dirs`: the first is written, the others are read-only layers.

    `root` is our own subdirectory of the first, None when nothing can be stored; `cannot_store` says why, also
    after the last put failed. `explicit`: the user named the directory, so that one that is not safely ours is a
    ValueError and not a warning.
    """

    def __init__(self, cache_dirs: Sequence[str], *, explicit: bool) -> None:
        self.cannot_store: str | None = None
        self._cache_dir = cache_dirs[0]
        self._handles = Handles()
        self._complaints = Complaints()
        self._layers = Layers(
            layer_roots(cache_dirs[1:]), self._handles, discard=self.discard, complaints=self._complaints
        )
        self._mapped = MappedFiles(self._complaints)
        self._look_at = 0.0
        self._again_at = time.monotonic() + _AGAIN_S
        self._sweep = Sweep()
        self._claims = Claims(None)
        self._budgets = Budgets(lambda: self._directory, lambda: self._claims)
        self._index: Index | None = None
        self._store: Store | None = None
        self._open_root(explicit=explicit)

    def __repr__(self) -> str:
        return f"<BlockCache {self.root or self.cannot_store}>"

    # Reading blocks: no SQLite, no lock

    def read(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        stop: int,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> bytes | None:
        """Return bytes `[start, stop)` of a block, clipped to its length; None is a miss: absent, or found bad.

        With `nowait` only the page cache is asked: BlockingIOError when it lacks the bytes, or cannot be asked.
        `verify` checks the touched pages even if this process did before.
        """
        handles = self._handles
        handle = handles.take(key, index) or self._layers.open(key, index, nowait)
        if handle is None:
            return None
        try:
            data = handle.read(start, stop, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: the handle is in our hands alone
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return None
        handles.give(key, index, handle)
        if touch:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return data

    def read_into(
        self,
        key: ObjectKey,
        index: int,
        start: int,
        buffer: memoryview,
        *,
        touch: bool = True,
        nowait: bool = False,
        verify: bool = False,
    ) -> int:
        """Fill `buffer` (bytes) from offset `start` of a block; return how many bytes it had, -1 for a miss.

        Otherwise like `read`. After a miss the buffer may hold anything.
        """
        handles = self._handles
        handle = handles.take(key, index) or self._layers.open(key, index, nowait)
        if handle is None:
            return -1
        try:
            size = handle.read_into(start, buffer, nowait=nowait, verify=verify)
        except BaseException as error:  # an interrupt too: see `read`
            if not self._layers.is_miss(key, index, handle, error):
                raise
            return -1
        handles.give(key, index, handle)
        if touch:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return size

    def borrow(self, key: ObjectKey, index: int, instead: tuple[int, Handle] | None = None) -> Handle | None:
        """Return a block to read from again and again, touched once; None is a miss. One reader has it until `give_back`.

        `instead`: another block of the object that is given back for it.
        """
        handles = self._handles
        if instead is not None:
            handles.give(key, *instead)
        handle = handles.take(key, index) or self._layers.open(key, index, nowait=False)
        if handle is not None:
            (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))
        return handle

    def give_back(
        self, key: ObjectKey, index: int, handle: Handle, error: BaseException | None = None
    ) -> None:
        """Take back what was borrowed; with the `error` that reading it raised, the block is dropped if it is bad."""
        if error is None:
            self._handles.give(key, index, handle)
        elif not self._layers.is_miss(key, index, handle, error):
            raise error

    def touch(self, key: ObjectKey, index: int) -> None:
        """Note the use of a block that was not read from here: its bytes came with a request."""
        (self._mapped.touches or self._mapped.open_touches()).touch(key.hash64(index))

    def missed(self, key: ObjectKey, index: int, bounds: Bounds, *, of: int | None = None) -> None:
        """Note that a block is not here and has to be fetched: whether it stays depends on its uses before.

        `of`: the size of its object. The first time that one larger than the cache passes through, it drives nothing out.
        """
        most = self.allowed or likely_allowance(self.root, bounds)
        touches = self._mapped.touches or self._mapped.open_touches(size=most)
        touches.missed(key.hash64(index), passes=None not in (of, most) and (of or 0) > (most or 0))

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return all of a block, its file opened anew and every byte of it read from the disk and checked; None: absent.

        Raises BadBlock for one that was found bad: it is a miss from now on. No touch: who looks it over does not use it.
        """
        return self._layers.read_anew(key, index)

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the block's file is there, without looking into it; not one that was found unusable."""
        return self._layers.has(key, index)

    # Writing blocks

    def put(self, given: Sequence[tuple[BlockKey, Buffer]], bounds: Bounds) -> None:
        """Store blocks, dropping others to stay within `bounds`; those that are there already are skipped.

        Raises CacheError when not all could be stored. No block is ever there in part.
        """
        try:
            self._writable().put(given, bounds, instead_of=self._layers.rejected)
        except CacheError as error:
            self.cannot_store = error.message
            self._complaints.not_stored(error.message)
            raise
        self.cannot_store = None
        self._layers.accept(blocks.place(key.object.digest, key.index) for key, _ in given)

    def evict(self, identity: str | None, path: str | None = None) -> int:
        """Drop the blocks of `path` and of all below it, of a whole origin, or (`identity` None) of all origins.

        Pinned or not. Returns the bytes that came free; raises CacheError.
        """
        return self._writable().evict(identity, path)

    def discard(self, key: ObjectKey, index: int) -> None:
        """Drop one block because it is bad. Never raises: without its file it is a miss."""
        self._handles.drop([(key.digest, index)])
        if self._store is not None:
            self._store.discard(key, index)

    def refuse(self, key: ObjectKey, index: int) -> None:
        """Drop a block that is whole and yet not what the origin has; in layers, which are not ours, pass over it."""
        self.discard(key, index)
        self._layers.refuse(key, index)

    def pin(self, identity: str, path: str) -> None:
        """Store the wish that blocks of `path` stay, those that are here and those to come. Raises CacheError."""
        self._writable().pin(identity, path, wanted=True)

    def unpin(self, identity: str, path: str) -> None:
        self._writable().pin(identity, path, wanted=False)

    def pins(self) -> list[tuple[str, str]]:
        """Return (identity, path) of every pin."""
        return self._asked(lambda rows: rows.pins(), [])

    def lease(self, size: int, bounds: Bounds) -> Lease:
        """Return a private file of `size` bytes, counted in the bound until it is closed. Raises CacheError."""
        return self._writable().lease(size, bounds)

    def paths_below(self, identity: str, path: str) -> list[str]:
        """Return the paths of which blocks are counted: `path` itself and all below it, by name."""
        return self._asked(lambda rows: rows.paths_below(identity, path), [])

    # What is known of objects

    def lookup(self, identity: str, path: str) -> Fact | None:
        """Return what was learnt last of `path`; the caller compares its mark with the path's mark of now."""
        self._look()
        return self._asked(lambda rows: rows.lookup(identity, path), None)

    def keep_facts(self, facts: Sequence[Fact]) -> None:
        """Store facts, each instead of an older one of its path. Raises CacheError."""
        if not facts:
            return
        with self._writing("facts cannot be kept") as rows:
            rows.keep_facts(facts)
            self._sweep = rows.forget_old(time.time(), added=len(facts), sweep=self._sweep)

    def listing(self, identity: str, folder: str) -> Listing | None:
        """Return the children that the last listing of `folder` gave, whatever was learnt of one of them since."""
        self._look()
        return self._asked(lambda rows: rows.listing(identity, folder), None)

    def listing_has(
        self, identity: str, folder: str, path: str
    ) -> tuple[float, int, bool, Told | None] | None:
        """Return checked_at and mark of the listing of `folder`, whether it had `path`, and `told`; None: never listed."""
        self._look()
        return self._asked(lambda rows: rows.listing_has(identity, folder, path), None)

    def listing_size(self, identity: str, folder: str, *, most: int) -> int | None:
        """Return how many children the listing of `folder` names, of whatever age, counted up to `most`; None without one."""
        return self._asked(lambda rows: rows.listing_size(identity, folder, most), None)

    def keep_listings(
        self,
        identity: str,
        listings: Mapping[str, Sequence[ObjectInfo]],
        *,
        checked_at: float,
        marks: Mapping[str, int],
        folder_marks: Mapping[str, int],
        watch: Watch | None = None,
    ) -> None:
        """Store complete listings: all direct children, by folder. Raises CacheError.

        `marks` has the children's own marks by path (a child without one is listed, but answers no lookup),
        `folder_marks` the listing marks of the folders; all read before the origin was asked. `watch`: of a single one.
        """
        with self._writing("listings cannot be kept") as rows:
            for folder, infos in listings.items():
                mark = folder_marks[folder]
                rows.keep_listing(
                    identity, folder, infos, checked_at=checked_at, mark=mark, marks=marks, watch=watch
                )
            added = sum(map(len, listings.values()))
            self._sweep = rows.forget_old(time.time(), added=added, sweep=self._sweep)

    # Feeds of changes: what an origin tells by itself

    def feed(self, identity: str, part: str) -> Feed | None:
        """Return where the feed of one part of an origin was left; None when there is none."""
        self._look()
        if self._mapped.open_marks().is_private:
            return None  # others, whom what it tells would not reach, share its rows
        return self._asked(lambda rows: rows.feed(identity, part), None)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Remember where a feed begins, unless it did before. Raises CacheError."""
        with self._writing("no feed can be kept") as rows:
            rows.begin_feed(identity, part, token, checked_at)

    def follow_feed(self, identity: str, feed: Feed, changes: Changes, *, checked_at: float) -> None:
        """Forget what `changes` since `feed` made old; all else that was watched counts as checked at `checked_at`.

        May be done twice, and by two processes at once. Raises CacheError, and then nothing counts as checked.
        """
        with self._writing("changes cannot be followed") as rows:
            follow(
                rows,
                identity,
                feed,
                changes,
                checked_at=checked_at,
                mark=partial(self.mark, identity),
                forget=partial(self.overtaken, identity),
            )

    def drop_feed(self, feed: Feed) -> None:
        """Forget a feed that cannot go on. Raises CacheError."""
        with self._writing("a feed cannot be dropped") as rows:
            rows.drop_feed(feed)

    # Change marks: shared memory, no SQLite

    def mark(self, identity: str, path: str) -> int:
        """Return the change mark of `path`: another number after something happened to it, in any process."""
        marks = self._mapped.open_marks()
        return marks.at(marks.slots_of(identity, path))

    def listing_mark(self, identity: str, folder: str) -> int:
        """Return the change mark of the listing of `folder`: another number after something happened below it."""
        marks = self._mapped.open_marks()
        return marks.at(marks.listing_slots_of(identity, folder))

    def epoch(self, identity: str) -> int:
        """Return a number that is another one after any change at this origin."""
        return self._mapped.open_marks().epoch(identity)

    def changed(self, identity: str, paths: Iterable[str], *, tree: bool = False) -> None:
        """Change the marks of `paths` and of everything above them; with `tree` of everything below them too."""
        paths = list(paths)
        self._change(lambda marks: marks.change(identity, paths, tree=tree))

    def overtaken(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the marks of `paths`, of the listings that name them, and of all below `folders`; of nothing above."""
        paths, folders = list(paths), list(folders)
        self._change(lambda marks: marks.change_alone(identity, paths, folders))

    def _change(self, change: Callable[[Marks], None]) -> None:
        before = self._mapped.open_marks()
        change(before)
        # Somebody may have deleted the file that we have mapped, and others may have a new one already.
        self._look_at = 0.0
        self._look()
        if self._mapped.open_marks() is not before:
            change(self._mapped.open_marks())

    def mark_slots(self, identity: str, path: str) -> tuple[int, ...]:
        """Return what `mark_at` wants; the same in every process, for ever. A folder's name with "/" is its listing."""
        return self._mapped.open_marks().slots_of(identity, path)

    def mark_at(self, slots: tuple[int, ...]) -> int:
        """Return the mark whose slots these are."""
        return (self._mapped.marks or self._mapped.open_marks()).at(slots)

    # Claims

    def take_claim(self, hash64: int) -> bool:
        """Take the right to fetch a block; False when another process, or another thread, has it."""
        is_ours = self._claims.take(hash64)
        self._complaints.slower(self._claims.trouble)
        return is_ours

    def drop_claim(self, hash64: int) -> None:
        self._claims.drop(hash64)
        self._complaints.slower(self._claims.trouble)

    # Request budgets: shared memory, no SQLite

    def budget(self, account: str) -> Record:
        """Return what the processes of the machine have sent of what a service lets one account send."""
        return self._budgets.record(account)

    # The whole

    @property
    def evictions(self) -> int:
        """How many blocks this process dropped to make room, or when told to."""
        return self._store.room.evictions if self._store else 0

    def usage(self) -> tuple[int, int]:
        """Return the number of blocks and the bytes of blocks and leases; zeros when nobody can tell."""
        return self._asked(lambda rows: (rows.number("blocks") or 0, rows.number("bytes") or 0), (0, 0))

    def allowance(self, bounds: Bounds) -> int | None:
        """Return how many bytes blocks and leases may have in all under `bounds` now; None when nobody can tell."""
        return None if self._store is None else self._store.allowance(bounds)

    @property
    def allowed(self) -> int | None:
        """What `allowance` was when this process put or asked last, without asking; None before that."""
        return None if self._store is None else self._store.allowed

    def check(self, *, repair: bool = False) -> Report:
        """Compare every file with its row and its checksums; with `repair` set right what can be. Raises CacheError."""
        return self._store.check(repair=repair) if self._store else Report()

    def rebuild(self) -> None:
        """Forget what is counted and count the files anew. A lost index does so by itself. Raises CacheError."""
        self._writable().rebuild()

    def close(self) -> None:
        """Close files and connections; they open again when needed. Claims are kept until the process ends."""
        self._handles.close_all()
        if self._index is not None:
            self._index.close()

    # Opening what is shared, late

    def _open_root(self, *, explicit: bool) -> None:
        """Open our own directory, to write if that can be, else to read."""
        directory, self.cannot_store = open_directory(self._cache_dir, explicit=explicit)
        self._directory = directory
        self.root = directory.root if directory else None
        self._layers.begin_with(self.root or readable_root(self._cache_dir), self.root)
        if directory is not None:
            self._open_store(directory)
            self._mapped.move_to(directory)
        elif self.cannot_store:
            self._complaints.not_stored(self.cannot_store)

    def _open_store(self, directory: Directory) -> None:
        if not directory.is_network:
            self._claims = Claims(directory.claims)
        with contextlib.suppress(OSError):
            leftovers.clear_away(directory, self._claims, time.time())
        self._index = Index(
            directory.index, is_network=directory.is_network, claims=self._claims, temp=directory.temp
        )
        self._store = Store(
            directory,
            index=self._index,
            handles=self._handles,
            claims=self._claims,
            touches=self._mapped.open_touches,
        )

    def _look(self) -> None:
        """Once a second: let go of mapped files that somebody deleted, so that all processes map the same ones.

        Once a minute: try again what did not work. Two threads that do so at once do it twice, which is no harm.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if now >= self._again_at:
            self._again_at = now + _AGAIN_S
            self._try_again()
        with contextlib.suppress(OSError):  # nobody can tell: what we have goes on
            self._claims.look_again()
            self._mapped.let_go_of_deleted()

    def _try_again(self) -> None:
        """Do what could not be done when it was wanted: the disk may have got well since."""
        if self._directory is None:
            self._open_root(explicit=False)
            if self._directory is None:
                return
        self._claims.try_again()
        self._mapped.try_again()

    # Trouble

    def _writable(self) -> Store:
        self._look()
        if self._store is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        return self._store

    def _asked(self, question: Callable[[Rows], T], otherwise: T) -> T:
        """Return what the index answers; `otherwise` without one, and where it fails: it is no oracle."""
        if self._index is None:
            return otherwise
        try:
            with self._index.reading() as rows:
                return question(rows)
        except TROUBLE as error:
            log.debug("the index of %s cannot be read: %s", self.root, error)
            return otherwise

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[Rows]:
        self._look()
        if self._index is None or self._directory is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        try:
            self._directory.make_again_if_gone()
            with self._index.writing() as rows:
                yield rows
        except TROUBLE as error:
            raise CacheError(f"{what} in {self.root}: {error}") from error
