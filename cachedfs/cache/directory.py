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
_FOLDERS = ("blocks", "local-copies", "tmp")
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
        self.root = root = f"{root}/host-{os.uname().nodename}" if self.is_network else root
        self.blocks = f"{root}/blocks"
        self.index = f"{root}/index.db"
        self.locks = f"{root}/locks"
        self.access_records = f"{root}/access-records"
        self.change_counters = f"{root}/change-counters"
        self.bookkeeping = [*self.logs, self.access_records, self.change_counters]
        self.root_seen: object = None  # None: check again
        self.blocks_seen: object = None
        self.n_checks = 0  # how often the folders were checked, or are due to be
        self.had_index = False  # when it was opened, or used by this process
        # Until when a deletion that was noticed is waited for (monotonic); None without one.
        self._deletion_over_at: float | None = None

    @property
    def logs(self) -> list[str]:
        """The index and the files that SQLite keeps beside it, the write-ahead log first."""
        return [f"{self.index}{log}" for log in ("-wal", "", "-shm", "-journal")]

    def open(self, *, explicit: bool) -> str | None:
        """Create what is missing; return the reason why nothing can be stored, None if all is well.

        A subdirectory that another user could have prepared (a symlink, another owner, writable by others) raises
        ValueError when the user named `cache_dir` (`explicit`): its content cannot be trusted, and the user can choose
        another one.
        """
        try:
            os.makedirs(self._cache_dir, exist_ok=True)
            self.make()
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
            return all(_verify(folder) for folder in _chain(self.root))
        except (ValueError, OSError):
            return False

    def make(self) -> None:
        """Create the root and its folders where missing. Raises OSError, or ValueError if the root is unsafe to use."""
        for folder in self._all():
            disk.make_folder(folder)
            _verify(folder)
        self.had_index = disk.state(self.index) is not None

    def verify(self) -> None:
        """Raise ValueError if a folder is unsafe to use; create folders that are missing.

        What is no folder in place of one with blocks is moved to `tmp/`.
        """
        try:
            root, blocks, *_ = [_verify(folder) for folder in self._all()][-1 - len(_FOLDERS) :]
        except FileNotFoundError:
            os.makedirs(_chain(self.root)[0].rpartition("/")[0], exist_ok=True)
            self.make()
            root, blocks = _verify(self.root), _verify(self.blocks)
        for found in disk.scan(self.blocks):
            if not found.is_folder:
                os.rename(found.path, self.temp())
        changed_ns = max(root.st_ctime_ns, blocks.st_ctime_ns)
        recent_s = RECENT_S if changed_ns % 1_000_000_000 else COARSE_S
        # The times of network and FUSE filesystems may be cached or made up.
        is_sure = changed_ns / 1e9 < time.time() - recent_s and not self.is_network
        self.root_seen, self.blocks_seen = (STATE(root), STATE(blocks)) if is_sure else (None, None)
        self.n_checks += 1

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
        return not self.is_as_seen(with_blocks=False) and any(
            disk.state(path) is None for path in (*self._all(), self.index)
        )

    def _all(self) -> list[str]:
        """Return the root and its folders, parents first; folders of blocks are created when needed."""
        return [*_chain(self.root), *(f"{self.root}/{name}" for name in _FOLDERS)]

    def temp(self) -> str:
        """Return a new name for a temporary file."""
        return f"{self.root}/tmp/{os.urandom(8).hex()}"

    def local_copy(self, name: str) -> str:
        return f"{self.root}/local-copies/{name}"

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
        for name, path in _roots_in(cache_dir):
            if int(name[1]) == FORMAT:
                roots += [
                    path,
                    *sorted(each.path for each in disk.scan(path) if each.name.startswith("host-")),
                ]
    return roots


def old_roots(cache_dir: str) -> list[str]:
    """Return this user's roots of other formats in `cache_dir`, which nothing uses any more."""
    found = _roots_in(cache_dir)
    return [path for name, path in found if int(name[1]) < FORMAT and int(name[2]) == os.geteuid()]


def _roots_in(cache_dir: str) -> list[tuple[re.Match[str], str]]:
    """Return the folders in `cache_dir` with the names of roots, sorted."""
    with contextlib.suppress(OSError):
        found = sorted(disk.scan(_absolute(cache_dir)))
        return [
            (name, each.path) for each in found if each.is_folder and (name := _ROOT.fullmatch(each.name))
        ]
    return []


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def root_in(cache_dir: str) -> str:
    """Return the path of this user's subdirectory of `cache_dir`, which need not exist."""
    return f"{_absolute(cache_dir)}/cachedfs-{FORMAT}-{os.geteuid()}"


def _chain(root: str) -> list[str]:
    """Return the folders from the outermost to `root`: two on a network filesystem, else one."""
    above, _, name = root.rpartition("/")
    return [above, root] if name.startswith("host-") else [root]


def _verify(folder: str) -> os.stat_result:
    """Return the status of `folder`. Raises ValueError if it is unsafe to use, FileNotFoundError if it is missing."""
    status = disk.state(folder)
    if status is None:
        raise FileNotFoundError(f"{folder} is missing")
    if (reason := why_unsafe(folder, status, "give another cache_dir")) is not None:
        raise ValueError(reason)
    return status
