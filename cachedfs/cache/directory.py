"""This user's subdirectory of a cache directory: safety checks, paths, the index and its transactions."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TypeVar

from cachedfs.cache import disk
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.index.database import TROUBLE, CacheIndex
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common.logging import WarnOnce
from cachedfs.common.user_folders import is_writable, why_unsafe
from cachedfs.errors import CacheError

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

FORMAT = 4  # part of the directory name: other formats never see these files
LOOK_S = 1.0  # interval between checks that the shared files are still the ones at their paths
AGAIN_S = 60.0  # delay before a retry: each one creates new change counters, 2 MB
DELETION_S = 10.0  # longest wait for the end of a deletion
PAUSE_S = 0.05  # between two checks whether it has ended
QUIET_S = 0.5  # from the end of the root until folders above it are gone, too
RECENT_S = 0.1  # a folder that changed so short a time ago may change again without another time of change,
COARSE_S = 2.0  # or this time, on a file system that stores whole seconds
STATE = attrgetter("st_dev", "st_ino", "st_ctime_ns")
_ROOT = re.compile(r"cachedfs-(\d+)-(\d+)")


class CacheDirectory:
    """This user's root in `cache_dir`: block files, local copies, the index and the shared files.

    It is open for writing if possible, else for reading; what could not be opened is tried again once a minute. On a
    network filesystem it is a folder per host, because locks and shared files work within one host only.

    `path` is the root; if nothing can be stored, it is None and `cannot_store` is the reason. `cannot_store` is also set
    after the last `put` failed. `readable` is where blocks are searched: the root, or None if it is not safe to read.
    `on_look` are called once a second, with True once a minute; `on_open` when the directory can be written.

    `root_seen` and `blocks_seen` are the states of two folders when all folders were checked. As long as these states
    are the same, no folder in them was replaced, and neither was the index.
    """

    def __init__(
        self,
        cache_dir: str,
        *,
        explicit: bool,
        locks: ByteRangeLocks,
        warnings: WarnOnce,
        on_open: Callable[[CacheDirectory], object],
    ) -> None:
        self.cache_dir = _absolute(cache_dir)
        self.is_network = disk.is_network(self.cache_dir)
        root = root_in(self.cache_dir)
        self._chain = [root, f"{root}/host-{os.uname().nodename}"] if self.is_network else [root]
        self.root = root = self._chain[-1]
        self.blocks = f"{root}/blocks"
        self._folders = [*self._chain, self.blocks, f"{root}/local-copies", f"{root}/tmp"]
        self.index_path = f"{root}/index.db"
        self.access_records = f"{root}/access-records"
        self.change_counters = f"{root}/change-counters"
        self._locks, self._warnings, self._on_open = locks, warnings, on_open
        self.on_look: list[Callable[[bool], object]] = [lambda again: self.index.look()]
        self.look_at = 0.0
        self.n_looks = 0
        self._again_at = time.monotonic() + AGAIN_S
        self.path: str | None = None
        self.cannot_store: str | None = None
        self.root_seen: object = None  # None: check again
        self.blocks_seen: object = None
        self._had_index = False  # when the folders were made, or used by this process
        # Until when a deletion that was noticed is waited for (monotonic); None without one.
        self._deletion_over_at: float | None = None
        has_wal = disk.maps_safely(root)
        self.index = CacheIndex(self.index_path, has_wal=has_wal, locks=locks, temp=self.temp)
        self._open(explicit=explicit)

    def _open(self, *, explicit: bool) -> None:
        """Open the directory, for writing if possible, else for reading.

        A subdirectory that another user could have prepared (a symlink, another owner, writable by others) raises
        ValueError when the user named `cache_dir` (`explicit`): its content cannot be trusted, and the user can choose
        another one.
        """
        cannot_store, is_readable = None, True  # another thread may set the attribute meanwhile
        try:
            self.verify()
            self._had_index = disk.state(self.index_path) is not None
            if not is_writable(self.root):
                raise PermissionError(f"{self.root} is read-only")
        except (ValueError, OSError) as error:
            if explicit and isinstance(error, ValueError):
                raise
            cannot_store, is_readable = str(error), False
            if isinstance(error, OSError):
                why = error.strerror or error
                cannot_store = f"{self.cache_dir} cannot be written ({why}); give another cache_dir"
            with contextlib.suppress(OSError):
                is_readable = not any(why_unsafe(folder, os.lstat(folder), "") for folder in self._chain)
        self.cannot_store, self.path = cannot_store, None if cannot_store else self.root
        self.readable = self.root if is_readable else None
        if cannot_store is not None:
            self._warnings.not_stored(cannot_store)
            return
        if not self.is_network:
            self._locks.use(f"{self.root}/locks")
        self._on_open(self)

    # Transactions

    def query(self, question: Callable[[IndexRows], T], otherwise: T) -> T:
        """Return the result of a query on the index; `otherwise` if there is no index or it cannot be read."""
        if time.monotonic() >= self.look_at:
            self.look()
        if self.path is None:
            return otherwise
        try:
            with self.index.reading() as rows:
                return question(rows)
        except TROUBLE as error:
            log.debug("the index of %s cannot be read: %s", self.path, error)
            return otherwise

    @contextlib.contextmanager
    def writing(self, what: str, *, restores: bool = False, waits: bool = False) -> Iterator[IndexRows]:
        """Run the block in one index transaction. Raises CacheError whose message begins with `what`.

        A directory that was deleted is made again: with `restores` at once, with `waits` after the end of the deletion.
        Otherwise that is an error for some seconds, as the deletion may go on.
        """
        if time.monotonic() >= self.look_at:
            self.look()
        if self.path is None:
            raise CacheError(self.cannot_store or "nothing can be stored")
        try:
            if not self.is_as_seen():
                if waits:
                    self._wait_for_deletion()
                elif not restores and self._is_being_deleted():
                    raise CacheError(f"{what} in {self.path}: it is being deleted")
                self.verify()
            with self.index.writing(self.root_seen) as rows:
                yield rows
            self._had_index = True
        except CacheError:
            raise
        except TROUBLE as error:
            raise CacheError(f"{what} in {self.path}: {error}") from error

    def look(self) -> None:
        """Once a second, check that the shared files are those that all processes use; call `on_look`.

        Once a minute, try again what failed before. Two threads may do this at the same time without harm.
        """
        now = time.monotonic()
        if now < self.look_at:
            return
        self.look_at, is_again = now + LOOK_S, now >= self._again_at
        self.n_looks += 1
        if is_again:
            self._again_at = now + AGAIN_S
            if self.path is None:
                self._open(explicit=False)
        for check in self.on_look:
            with contextlib.suppress(OSError):  # cannot check: keep the current files
                check(is_again)

    # Safety

    def verify(self) -> None:
        """Create folders that are missing. Raises OSError, or ValueError if a folder is unsafe to use.

        What is no folder in place of one with blocks is moved to `tmp/`.
        """
        found = []
        for folder in self._folders:
            try:
                found.append(os.lstat(folder))
            except FileNotFoundError:
                os.makedirs(self.cache_dir, exist_ok=True)
                disk.make_folder(folder)
                found.append(os.lstat(folder))
                self._had_index = False
            if (reason := why_unsafe(folder, found[-1], "give another cache_dir")) is not None:
                raise ValueError(reason)
        for entry in disk.scan(self.blocks):
            if not entry.is_folder:
                os.rename(entry.path, self.temp())
        root, blocks = found[-4:-2]
        changed_ns = max(root.st_ctime_ns, blocks.st_ctime_ns)
        recent_s = RECENT_S if changed_ns % 1_000_000_000 else COARSE_S
        # The times of network and FUSE filesystems may be cached or made up.
        is_sure = changed_ns / 1e9 < time.time() - recent_s and not self.is_network
        self.root_seen, self.blocks_seen = (STATE(root), STATE(blocks)) if is_sure else (None, None)

    def is_as_seen(self, *, with_blocks: bool = True) -> bool:
        """Return whether no file or folder in the root, and no folder with blocks, was replaced since the last check."""
        try:
            if STATE(os.lstat(self.root)) != self.root_seen:
                return False
            return not with_blocks or STATE(os.lstat(self.blocks)) == self.blocks_seen
        except OSError:
            return False

    def is_incomplete(self) -> bool:
        """Return whether a folder or the index is missing."""
        return any(disk.state(path) is None for path in (*self._folders, self.index_path))

    def _wait_for_deletion(self) -> None:
        """Wait for the end of a deletion of the cache: no file may appear in folders that were just emptied.

        A deletion is noticed when a folder or the index is missing, and ends when the root is. The wait takes at most
        `DELETION_S` seconds, once for each deletion, as only a part may have been deleted. Raises OSError.
        """
        if not self.is_as_seen(with_blocks=False) and self._had_index and self.is_incomplete():
            self._had_index = False
            deadline = time.monotonic() + DELETION_S
            while disk.state(self.root) is not None and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            time.sleep(QUIET_S)

    def _is_being_deleted(self) -> bool:
        """Return whether a deletion of the cache was noticed up to `DELETION_S` seconds ago, and not waited for."""
        if not (self._had_index and self.is_incomplete()):
            self._deletion_over_at = None
            return False
        if self._deletion_over_at is None:
            self._deletion_over_at = time.monotonic() + DELETION_S
        return time.monotonic() < self._deletion_over_at

    # Files

    def temp(self) -> str:
        """Return a new name for a temporary file."""
        return f"{self.root}/tmp/{os.urandom(8).hex()}"

    def move_into_place(self, temp: str, path: str) -> None:
        """Rename `temp` to the block at `path`; create its folder, or move a folder in place of the block to `tmp/`."""
        disk.make_folder(path.rpartition("/")[0])
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.rename(path, self.temp())
        os.rename(temp, path)

    def files(self) -> Iterator[disk.FolderEntry]:
        """Yield the entries of the block folders."""
        for folder in disk.scan(self.blocks):
            if folder.is_folder:
                yield from disk.scan(folder.path)


def old_roots(cache_dir: str) -> list[str]:
    """Return this user's roots of earlier formats in `cache_dir`, which nothing uses any more, sorted."""
    found = []
    with contextlib.suppress(OSError):
        for each in disk.scan(_absolute(cache_dir)):
            name = _ROOT.fullmatch(each.name)
            if name and each.is_folder and int(name[1]) < FORMAT and int(name[2]) == os.geteuid():
                found.append(each.path)
    return sorted(found)


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def root_in(cache_dir: str) -> str:
    """Return the path of this user's subdirectory of `cache_dir`, which need not exist."""
    return f"{_absolute(cache_dir)}/cachedfs-{FORMAT}-{os.geteuid()}"
