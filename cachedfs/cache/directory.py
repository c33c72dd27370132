"""This user's subdirectory of a cache directory: safety checks and the paths of the files in it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence

from cachedfs.cache import disk
from cachedfs.cache.block_file import FORMAT
from cachedfs.common.user_folders import is_writable, why_unsafe

__all__ = ["CacheDirectory", "layer_roots", "open_directory", "readable_root", "root_in"]


DELETION_S = 10.0  # longest wait for the end of a deletion
PAUSE_S = 0.05  # between two checks whether it has ended
QUIET_S = 0.5  # from the end of the root until folders above it are gone, too
_FOLDERS = ("blocks", "leases", "tmp")
_LEASE = re.compile(r"[0-9a-f]{16}(\.\w{1,16}){0,2}", re.ASCII)
_LAYER = re.compile(rf"cachedfs-{FORMAT}-\d+")


class CacheDirectory:
    """The root folder on disk: `blocks/`, `leases/` (local copies), `tmp/`, the index and the shared files."""

    def __init__(self, root: str, *, is_network: bool) -> None:
        self.root = root
        self.is_network = is_network
        self.index = f"{root}/index.db"
        self.locks = f"{root}/claims"
        self.touches = f"{root}/touches"
        self.marks = f"{root}/marks"
        self.budgets = f"{root}/budgets"
        logs = [f"{self.index}-{log}" for log in ("wal", "shm", "journal")]
        self.bookkeeping = [self.index, *logs, self.touches, self.marks, self.budgets]
        self.had_index = False  # when it was opened, or used by this process
        # Until when a deletion that was noticed is waited for (monotonic); None without one.
        self._deletion_over_at: float | None = None

    def make(self) -> None:
        """Create the root and its folders where missing. Raises OSError, or ValueError if the root is unsafe to use."""
        for folder in self._all():
            disk.make_folder(folder)
            _verify(folder)
        self.had_index = disk.state(self.index) is not None

    def make_again_if_gone(self) -> None:
        """Recreate folders that were deleted while in use, and check the others. Raises the same errors as `make`."""
        try:
            self.verify()
        except FileNotFoundError:
            os.makedirs(_chain(self.root)[0].rpartition("/")[0], exist_ok=True)
            self.make()

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
        return any(disk.state(path) is None for path in (*self._all(), self.index))

    def verify(self) -> None:
        """Raise ValueError if a folder is unsafe to use, FileNotFoundError if one is missing."""
        for folder in self._all():
            _verify(folder)

    def _all(self) -> list[str]:
        """Return the root and its folders, parents first; folders of blocks are created when needed."""
        return [*_chain(self.root), *(f"{self.root}/{name}" for name in _FOLDERS)]

    def temp(self) -> str:
        """Return a new name for a temporary file."""
        return f"{self.root}/tmp/{os.urandom(8).hex()}"

    def lease(self, name: str) -> str:
        return f"{self.root}/leases/{name}"

    def move_into_place(self, temp: str, path: str) -> None:
        """Rename `temp` to the block at `path`, creating its folder for the first block there.

        Anything unexpected moves to `tmp/`: a symlink in place of the folder (it leads elsewhere), or a folder in place
        of the block.
        """
        folder = path.rpartition("/")[0]
        status = disk.state(folder)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            os.rename(folder, self.temp())
            status = None
        if status is None:
            disk.make_folder(folder)
        try:
            os.rename(temp, path)
        except IsADirectoryError:
            os.rename(path, self.temp())
            os.rename(temp, path)

    def unlink_block(self, place: str) -> bool:
        """Remove the file of a block; False if there is none. Never follows a symlink in place of the folder."""
        path = f"{self.root}/{place}"
        folder = disk.state(path.rpartition("/")[0])
        return folder is not None and stat.S_ISDIR(folder.st_mode) and disk.unlink(path)

    def files(self) -> Iterator[disk.FolderEntry]:
        """Yield the entries of the block folders."""
        for folder in disk.scan(f"{self.root}/blocks"):
            if folder.is_folder:
                yield from disk.scan(folder.path)

    def leases(self) -> Iterator[disk.FolderEntry]:
        """Yield the files of local copies, recognized by their names."""
        return (found for found in disk.scan(f"{self.root}/leases") if _LEASE.fullmatch(found.name))


def open_directory(cache_dir: str, *, explicit: bool) -> tuple[CacheDirectory | None, str | None]:
    """Return this user's directory in `cache_dir`, or None and the reason why nothing can be stored there.

    A subdirectory that another user could have prepared (a symlink, another owner, writable by others) raises
    ValueError when the user named `cache_dir` (`explicit`): its content cannot be trusted, and the user can choose
    another one.
    """
    path = _absolute(cache_dir)
    is_network = disk.is_network(path)
    root = _root_in(path, is_network=is_network)
    directory = CacheDirectory(root, is_network=is_network)
    try:
        os.makedirs(path, exist_ok=True)
        directory.make()
        if not is_writable(root):
            raise PermissionError(f"{root} is read-only")
    except ValueError as error:
        if explicit:
            raise
        return None, str(error)
    except OSError as error:
        return None, f"{path} cannot be written ({error.strerror or error}); give another cache_dir"
    return directory, None


def readable_root(cache_dir: str) -> str | None:
    """Return the root in `cache_dir` if this user owns it and no other user can write it, else None.

    It is used for reading when `cache_dir` is not writable.
    """
    path = _absolute(cache_dir)
    root = _root_in(path, is_network=disk.is_network(path))
    try:
        for folder in _chain(root):
            _verify(folder)
    except (ValueError, OSError):
        return None
    return root


def layer_roots(cache_dirs: Sequence[str]) -> list[str]:
    """Return the roots, of any owner, in the read-only `cache_dirs`; a missing directory has none."""
    roots = []
    for cache_dir in cache_dirs:
        with contextlib.suppress(OSError):
            for found in sorted(disk.scan(_absolute(cache_dir))):
                if found.is_folder and _LAYER.fullmatch(found.name):
                    roots.append(found.path)
                    roots += sorted(
                        host.path for host in disk.scan(found.path) if host.name.startswith("host-")
                    )
    return roots


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def root_in(cache_dir: str) -> str:
    """Return the path of this user's subdirectory of `cache_dir`, which need not exist."""
    return f"{_absolute(cache_dir)}/cachedfs-{FORMAT}-{os.geteuid()}"


def _root_in(path: str, *, is_network: bool) -> str:
    """Return this user's root in a cache directory.

    On a network filesystem it is a folder per host, because locks and shared files work within one host only.
    """
    root = root_in(path)
    return f"{root}/host-{os.uname().nodename}" if is_network else root


def _chain(root: str) -> list[str]:
    """Return the folders from the outermost to `root`: two on a network filesystem, else one."""
    above, _, name = root.rpartition("/")
    return [above, root] if name.startswith("host-") else [root]


def _verify(folder: str) -> None:
    """Raise ValueError if `folder` is unsafe to use, FileNotFoundError if it is missing."""
    status = disk.state(folder)
    if status is None:
        raise FileNotFoundError(f"{folder} vanished")
    if (reason := why_unsafe(folder, status, "give another cache_dir")) is not None:
        raise ValueError(reason)
