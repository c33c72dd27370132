"""The cache: the local, persistent set of blocks that all processes of a machine share, and what is known of objects.

`BlockCache` is the one door of this room. Everything is sync, safe in threads, across processes and over forks. A read
never raises for the cache's sake: what is absent, damaged or out of reach is a miss. What cannot be stored is a
`CacheError`, which only the reader handles.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from cachedfs.cache import blocks, disk, leftovers
from cachedfs.cache.audit import Report
from cachedfs.cache.blocks import FORMAT, BadBlock, Handle
from cachedfs.cache.claims import Claims
from cachedfs.cache.directory import Directory, layer_roots, open_directory, readable_root
from cachedfs.cache.disk import Buffer, is_network
from cachedfs.cache.facts import Fact, Feed, Listing, Told, Watch, hash_of
from cachedfs.cache.following import follow
from cachedfs.cache.handles import Handles
from cachedfs.cache.index import TROUBLE, Index, Rows, Sweep
from cachedfs.cache.leases import Lease
from cachedfs.cache.shared import Marks
from cachedfs.cache.store import Store
from cachedfs.cache.touches import Touches, touch_slots
from cachedfs.errors import CacheError
from cachedfs.model import BlockKey, Bounds, Changes, ObjectInfo, ObjectKey
from cachedfs.plan import admission

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
_NO_FILE = errno.ELOOP, errno.EISDIR, errno.ENXIO  # how a symlink, a folder or a socket refuses to be opened
_NOTHING, _SLOWER, _NOT_STORED = range(3)  # the worst that was said of the cache
_MOST_REJECTED = 4096  # bad blocks of read-only layers that are remembered, so that each is logged once


class BlockCache:
    """The cache in `cache_dirs`: the first is written, the others are read-only layers.

    `root` is our own subdirectory of the first, None when nothing can be stored; `cannot_store` says why, also
    after the last put failed. `explicit`: the user named the directory, so that one that is not safely ours is a
    ValueError and not a warning.
    """

    def __init__(self, cache_dirs: Sequence[str], *, explicit: bool) -> None:
        self.cannot_store: str | None = None
        self._cache_dir = cache_dirs[0]
        self._layers = layer_roots(cache_dirs[1:])
        self._handles = Handles()
        self._rejected: dict[str, None] = {}  # bad files of layers, oldest first
        self._mapped: dict[str, Any] = {}  # the two below, while they are current
        self._marks: Marks | None = None
        self._touches: Touches | None = None
        self._look_at = 0.0
        self._again_at = time.monotonic() + _AGAIN_S
        self._sweep = Sweep()
        self._said = _NOTHING
        self._claims = Claims(None)
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
        handle = self._handles.take(key, index) or self._open(key, index, nowait)
        if handle is None:
            return None
        try:
            data = handle.read(start, stop, nowait=nowait, verify=verify)
        except BaseException as error:
            if not self._is_miss(key, index, handle, error):
                raise
            return None
        self._handles.give(key, index, handle)
        if touch:
            (self._touches or self._open_touches()).touch(key.hash64(index))
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
        handle = self._handles.take(key, index) or self._open(key, index, nowait)
        if handle is None:
            return -1
        try:
            size = handle.read_into(start, buffer, nowait=nowait, verify=verify)
        except BaseException as error:
            if not self._is_miss(key, index, handle, error):
                raise
            return -1
        self._handles.give(key, index, handle)
        if touch:
            (self._touches or self._open_touches()).touch(key.hash64(index))
        return size

    def borrow(self, key: ObjectKey, index: int, instead: tuple[int, Handle] | None = None) -> Handle | None:
        """Return a block to read from again and again, touched once; None is a miss. One reader has it until `give_back`.

        `instead`: another block of the object that is given back for it.
        """
        handles = self._handles
        if instead is not None:
            handles.give(key, *instead)
        handle = handles.take(key, index) or self._open(key, index, nowait=False)
        if handle is not None:
            (self._touches or self._open_touches()).touch(key.hash64(index))
        return handle

    def give_back(
        self, key: ObjectKey, index: int, handle: Handle, error: BaseException | None = None
    ) -> None:
        """Take back what was borrowed; with the `error` that reading it raised, the block is dropped if it is bad."""
        if error is None:
            self._handles.give(key, index, handle)
        elif not self._is_miss(key, index, handle, error):
            raise error

    def touch(self, key: ObjectKey, index: int) -> None:
        """Note the use of a block that was not read from here: its bytes came with a request."""
        (self._touches or self._open_touches()).touch(key.hash64(index))

    def missed(self, key: ObjectKey, index: int, bounds: Bounds, *, of: int | None = None) -> None:
        """Note that a block is not here and has to be fetched: whether it stays depends on its uses before.

        `of`: the size of its object. The first time that one larger than the cache passes through, it drives nothing out.
        """
        most = self.allowed or self._likely_size(bounds)
        touches = self._touches or self._open_touches(size=most)
        touches.missed(key.hash64(index), passes=None not in (of, most) and (of or 0) > (most or 0))

    def read_anew(self, key: ObjectKey, index: int) -> bytes | None:
        """Return all of a block, its file opened anew and every byte of it read from the disk and checked; None: absent.

        Raises BadBlock for one that was found bad: it is a miss from now on. No touch: who looks it over does not use it.
        """
        self._handles.drop([(key.digest, index)])
        place = blocks.place(key.digest, index)
        for root, owner in self._roots:
            path = f"{root}/{place}"
            if path in self._rejected:
                continue
            try:
                return self._read_anew(path, key, index, owner)
            except FileNotFoundError:
                continue
            except (BadBlock, OSError) as error:
                self._reject(key, index, path, error)
                raise BadBlock(str(error)) from error
        return None

    def _read_anew(self, path: str, key: ObjectKey, index: int, owner: int | None) -> bytes:
        handle = self._handles.open(path, key, index, owner=owner)
        try:
            disk.forget_cached(handle.fd)
            return handle.read(0, handle.length, verify=True)
        finally:
            disk.close(handle.fd)

    def has(self, key: ObjectKey, index: int) -> bool:
        """Return whether the block's file is there, without looking into it; not one that was found unusable."""
        place = blocks.place(key.digest, index)
        for root, _ in self._roots:
            path = f"{root}/{place}"
            if disk.exists(path) and path not in self._rejected:
                return True
        return False

    # Writing blocks

    def put(self, given: Sequence[tuple[BlockKey, Buffer]], bounds: Bounds) -> None:
        """Store blocks, dropping others to stay within `bounds`; those that are there already are skipped.

        Raises CacheError when not all could be stored. No block is ever there in part.
        """
        try:
            self._put(self._writable(), given, bounds)
        except CacheError as error:
            self.cannot_store = error.message
            self._say_once(_NOT_STORED, f"blocks are not cached: {error.message}")
            raise
        self.cannot_store = None
        for key, _ in given if self._rejected else ():
            self._rejected.pop(f"{self.root}/{blocks.place(key.object.digest, key.index)}", None)

    def _put(self, store: Store, given: Sequence[tuple[BlockKey, Buffer]], bounds: Bounds) -> None:
        """Store blocks; once more when that found the index damaged, as the second writing makes it anew."""
        try:
            store.put(given, bounds, instead_of=self._rejected)
        except CacheError:
            if not self._is_index_damaged():
                raise
            store.put(given, bounds, instead_of=self._rejected)

    def evict(self, identity: str | None, path: str | None = None) -> int:
        """Drop the blocks of `path` and of all below it, of a whole origin, or (`identity` None) of all origins.

        Pinned or not. Returns the bytes that came free; raises CacheError.
        """
        return self._writable().evict(identity, path)

    def discard(self, key: ObjectKey, index: int) -> None:
        """Drop one block because it is bad. Never raises: without its file it is a miss."""
        self._handles.drop([(key.digest, index)])
        if self._store is None:
            return
        try:
            self._store.discard(key, index)
        except CacheError:  # the index is away: the file counts
            with contextlib.suppress(OSError, ValueError):
                if self._directory is not None:
                    self._directory.verify()
                    self._directory.unlink_block(blocks.place(key.digest, index))

    def refuse(self, key: ObjectKey, index: int) -> None:
        """Drop a block that is whole and yet not what the origin has; in layers, which are not ours, pass over it."""
        self.discard(key, index)
        for root, _ in self._roots:
            path = f"{root}/{blocks.place(key.digest, index)}"
            if disk.exists(path):
                self._pass_over(path)

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
        if self._open_marks().is_private:
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
        marks = self._open_marks()
        return marks.at(marks.slots_of(identity, path))

    def listing_mark(self, identity: str, folder: str) -> int:
        """Return the change mark of the listing of `folder`: another number after something happened below it."""
        marks = self._open_marks()
        return marks.at(marks.listing_slots_of(identity, folder))

    def epoch(self, identity: str) -> int:
        """Return a number that is another one after any change at this origin."""
        return self._open_marks().epoch(identity)

    def changed(self, identity: str, paths: Iterable[str], *, tree: bool = False) -> None:
        """Change the marks of `paths` and of everything above them; with `tree` of everything below them too."""
        paths = list(paths)
        self._change(lambda marks: marks.change(identity, paths, tree=tree))

    def overtaken(self, identity: str, paths: Iterable[str], folders: Iterable[str]) -> None:
        """Change the marks of `paths`, of the listings that name them, and of all below `folders`; of nothing above."""
        paths, folders = list(paths), list(folders)
        self._change(lambda marks: marks.change_alone(identity, paths, folders))

    def _change(self, change: Callable[[Marks], None]) -> None:
        before = self._open_marks()
        change(before)
        # Somebody may have deleted the file that we have mapped, and others may have a new one already.
        self._look_at = 0.0
        self._look()
        if self._open_marks() is not before:
            change(self._open_marks())

    def mark_slots(self, identity: str, path: str) -> tuple[int, ...]:
        """Return what `mark_at` wants; the same in every process, for ever. A folder's name with "/" is its listing."""
        return self._open_marks().slots_of(identity, path)

    def mark_at(self, slots: tuple[int, ...]) -> int:
        """Return the mark whose slots these are."""
        return (self._marks or self._open_marks()).at(slots)

    # Claims

    def take_claim(self, hash64: int) -> bool:
        """Take the right to fetch a block; False when another process, or another thread, has it."""
        is_ours = self._claims.take(hash64)
        self._say_trouble(self._claims.trouble)
        return is_ours

    def drop_claim(self, hash64: int) -> None:
        self._claims.drop(hash64)
        self._say_trouble(self._claims.trouble)

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
        own = self.root or readable_root(self._cache_dir)
        # With the user whose blocks are believed there: a layer may be anybody's.
        self._roots = [*([(own, disk.user_id())] if own else []), *((layer, None) for layer in self._layers)]
        if directory is not None:
            self._open_store(directory)
        elif self.cannot_store:
            self._say_once(_NOT_STORED, f"blocks are not cached: {self.cannot_store}")

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
            touches=self._open_touches,
        )

    def _open_marks(self) -> Marks:
        marks = self._marks
        if marks is None:
            path, temp = (self._directory.marks, self._directory.temp()) if self._directory else (None, "")
            # Of two threads that make them one wins; a third may drop them again.
            marks = self._marks = self._mapped.setdefault("marks", Marks(path, temp))
            self._say_trouble(marks.trouble)
        return marks

    def _open_touches(self, *, size: int | None = None, clock: int = 0) -> Touches:
        """Return the touch records, enough for a cache of `size`; `clock` to go on from when they are made anew."""
        found, slots = self._touches, touch_slots(size)
        if found is not None and (size is None or found.n_slots >= slots):
            return found
        if found is not None:
            self._mapped.pop("touches", None)
            clock = found.now
        path, temp = (self._directory.touches, self._directory.temp()) if self._directory else (None, "")
        made = Touches(path, temp, slots, at_least=1 if size is None else slots, clock=clock)
        touches: Touches = self._mapped.setdefault("touches", made)  # of two threads one wins
        self._touches = touches
        if touches.trouble:  # no warning: evictions go by what this process alone touched
            log.info("%s", touches.trouble)
        return touches

    def _likely_size(self, bounds: Bounds) -> int | None:
        """Return about what a cache that is empty may hold, without its index: records for that many blocks will do."""
        try:
            space = disk.space(self.root or "")
        except OSError:
            return None
        automatic = admission.automatic_size(free=space.free, used=0)
        return admission.allowance(
            bounds, total=space.total, free=space.free, used=0, overhead=0, automatic=automatic
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
            for name, mapped in list(self._mapped.items()):
                if not mapped.is_current():
                    self._drop_mapped(name)

    def _try_again(self) -> None:
        """Do what could not be done when it was wanted: the disk may have got well since."""
        if self._directory is None:
            self._open_root(explicit=False)
            if self._directory is None:
                return
            self._drop_mapped("marks")
            self._drop_mapped("touches")
        self._claims.try_again()
        for name, mapped in list(self._mapped.items()):
            # Marks only for better ones: new ones that are private too would make us forget all that we know.
            if mapped.trouble and not (
                name == "marks" and Marks(mapped.path, self._directory.temp()).trouble
            ):
                self._drop_mapped(name)

    def _drop_mapped(self, name: str) -> None:
        self._mapped.pop(name, None)
        if name == "marks":
            self._marks = None
        else:
            self._touches = None

    def _open(self, key: ObjectKey, index: int, nowait: bool) -> Handle | None:
        """Open the block in the first layer that has it; bad ones are removed from ours and skipped in others."""
        place = blocks.place(key.digest, index)
        for root, owner in self._roots:
            path = f"{root}/{place}"
            if path in self._rejected:
                continue
            try:
                return self._handles.open(path, key, index, nowait=nowait, owner=owner)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                raise
            except (BadBlock, OSError) as error:
                self._reject(key, index, path, error)
        return None

    def _is_miss(self, key: ObjectKey, index: int, handle: Handle, error: BaseException) -> bool:
        """Return whether a read that failed is a miss: that of a bad block, which is rejected; else the caller raises.

        Raised here, `error` would be in a cycle with this frame, and keep the reader's buffers until they are collected.
        """
        if isinstance(error, BlockingIOError):
            self._handles.give(key, index, handle)
            return False
        blocks.let_go(handle.fd)
        if isinstance(error, (BadBlock, OSError)):
            self._reject(key, index, handle.path, error)
            return True
        return False

    def _reject(self, key: ObjectKey, index: int, path: str, error: BadBlock | OSError) -> None:
        """Log a bad block once, and remove it if it is in our own layer and bad in itself (not just out of reach)."""
        if path in self._rejected:
            return
        trouble = f"a cached block of {key.path} is not used: {error} ({path})"
        is_bad = isinstance(error, BadBlock) or error.errno in _NO_FILE
        if is_bad:
            log.warning("%s", trouble)
        else:  # a disk that cannot be read says so for every block
            self._say_trouble(trouble)
        if is_bad and self.root is not None and path.startswith(self.root + "/"):
            self.discard(key, index)
            if not disk.exists(path):
                return
        self._pass_over(path)

    def _pass_over(self, path: str) -> None:
        """Do not look at a file again that can be neither used nor removed: it counts as absent, and can be fetched."""
        self._rejected[path] = None
        while len(self._rejected) > _MOST_REJECTED:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread was at it too
                self._rejected.pop(next(iter(self._rejected)), None)

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

    def _is_index_damaged(self) -> bool:
        try:
            return self._index is not None and self._index.database.is_damaged()
        except OSError:  # nobody can tell
            return False

    def _say_trouble(self, trouble: str | None) -> None:
        """Warn of what makes us slower and no more, unless that or worse was said before."""
        if trouble is not None:
            self._say_once(_SLOWER, trouble)

    def _say_once(self, how_bad: int, trouble: str) -> None:
        """Warn of the first trouble, and once more when it gets worse: a disk that fails fails at every call."""
        if self._said < how_bad:
            self._said = how_bad
            log.warning("%s", trouble)
