"""This user's subdirectory of a cache directory: safety checks, and the paths of the files in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter

from cachedfs.cache import disk
from cachedfs.common.user_folders import is_writable, why_unsafe

__all__ = ["FORMAT", "CacheDirectory", "layer_roots", "old_roots", "root_in"]


FORMAT = 4  # part of the directory name: other formats never see these files
DELETION_S = 10.0  # longest wait for the end of a deletion
PAUSE_S = 0.05  # between two checks whether it has ended
QUIET_S = 0.5  # from the end of the root until folders above it are gone, too
RECENT_S = 0.1  # a folder that changed so short a time ago may change again without another time of change,
COARSE_S = 2.0  # or this time, on a file system that stores whole seconds
STATE = attrgetter("st_dev", "st_ino", "st_ctime_ns")
_ROOT = re.compile(r"cachedfs-(\d+)-(\d+)")


class CacheDirectory:
    """This user's root in a cache directory: `blocks/`, `local-copies/`, `tmp/`, the index and the shared files.

    On a network filesystem it is a folder per host, because locks and shared files work within one host only.

    `root_seen` and `blocks_seen` are the states of two folders when all folders were checked. As long as these states
    are the same, no folder in them was replaced, and neither was the index.
    """

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = _absolute(cache_dir)
        self.is_network = disk.is_network(self._cache_dir)
        root = root_in(self._cache_dir)
        self._chain = [root, f"{root}/host-{os.uname().nodename}"] if self.is_network else [root]
        self.root = root = self._chain[-1]
        self.blocks = f"{root}/blocks"
        self._folders = [*self._chain, self.blocks, f"{root}/local-copies", f"{root}/tmp"]
        self.index = f"{root}/index.db"
        self.locks = f"{root}/locks"
        self.access_records = f"{root}/access-records"
        self.change_counters = f"{root}/change-counters"
        # The write-ahead log first.
        logs = [f"{self.index}{log}" for log in ("-wal", "", "-shm", "-journal")]
        self.bookkeeping = [*logs, self.access_records, self.change_counters]
        self.root_seen: object = None  # None: check again
        self.blocks_seen: object = None
        self.had_index = False  # when the folders were made, or used by this process
        # Until when a deletion that was noticed is waited for (monotonic); None without one.
        self._deletion_over_at: float | None = None

    def open(self, *, explicit: bool) -> str | None:
        """Create what is missing; return the reason why nothing can be stored, None if all is well.

        A subdirectory that another user could have prepared (a symlink, another owner, writable by others) raises
        ValueError when the user named `cache_dir` (`explicit`): its content cannot be trusted, and the user can choose
        another one.
        """
        try:
            self.verify()
            self.had_index = disk.state(self.index) is not None
            if not is_writable(self.root):
                raise PermissionError(f"{self.root} is read-only")
        except ValueError as error:
            if explicit:
                raise
            return str(error)
        except OSError as error:
            return f"{self._cache_dir} cannot be written ({error.strerror or error}); give another cache_dir"
        return None

    def is_readable(self) -> bool:
        """Return whether this user owns the root and no other user can write it."""
        try:
            return not any(why_unsafe(folder, os.lstat(folder), "") for folder in self._chain)
        except OSError:
            return False

    def verify(self) -> None:
        """Create folders that are missing. Raises OSError, or ValueError if a folder is unsafe to use.

        What is no folder in place of one with blocks is moved to `tmp/`.
        """
        found = []
        for folder in self._folders:
            try:
                found.append(os.lstat(folder))
            except FileNotFoundError:
                os.makedirs(self._cache_dir, exist_ok=True)
                disk.make_folder(folder)
                found.append(os.lstat(folder))
                self.had_index = False
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

    def wait_for_deletion(self) -> None:
        """Wait for the end of a deletion of the cache: no file may appear in folders that were just emptied.

        A deletion is noticed when a folder or the index is missing, and ends when the root is. The wait takes at most
        `DELETION_S` seconds, once for each deletion, as only a part may have been deleted.
        """
        if self.had_index and self.is_incomplete():
            self.had_index = False
            deadline = time.monotonic() + DELETION_S
            while disk.state(self.root) is not None and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            time.sleep(QUIET_S)

    def is_being_deleted(self) -> bool:
        """Return whether a deletion of the cache was noticed up to `DELETION_S` seconds ago, and not waited for."""
        if not (self.had_index and self.is_incomplete()):
            self._deletion_over_at = None
            return False
        if self._deletion_over_at is None:
            self._deletion_over_at = time.monotonic() + DELETION_S
        return time.monotonic() < self._deletion_over_at

    def is_incomplete(self) -> bool:
        """Return whether a folder or the index is missing."""
        return any(disk.state(path) is None for path in (*self._folders, self.index))

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


def layer_roots(cache_dirs: Sequence[str]) -> list[str]:
    """Return the roots, of any owner, in the read-only `cache_dirs`; a missing directory has none."""
    roots = []
    for cache_dir in cache_dirs:
        for path in [path for path, version, _ in _roots_in(cache_dir) if version == FORMAT]:
            hosts = (each.path for each in disk.scan(path) if each.name.startswith("host-"))
            roots += [path, *sorted(hosts)]
    return roots


def old_roots(cache_dir: str) -> list[str]:
    """Return this user's roots of other formats in `cache_dir`, which nothing uses any more."""
    found = _roots_in(cache_dir)
    return [path for path, version, user in found if version < FORMAT and user == os.geteuid()]


def _roots_in(cache_dir: str) -> list[tuple[str, int, int]]:
    """Return path, format and user of the folders in `cache_dir` with the names of roots, sorted."""
    with contextlib.suppress(OSError):
        found = [
            (each.path, _ROOT.fullmatch(each.name))
            for each in disk.scan(_absolute(cache_dir))
            if each.is_folder
        ]
        return sorted((path, int(name[1]), int(name[2])) for path, name in found if name)
    return []


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def root_in(cache_dir: str) -> str:
    """Return the path of this user's subdirectory of `cache_dir`, which need not exist."""
    return f"{_absolute(cache_dir)}/cachedfs-{FORMAT}-{os.geteuid()}"
