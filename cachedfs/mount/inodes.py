"""The inodes that the kernel knows: one for each folder, and one for each version of a file.

The bytes and the size of an inode never change under a reader, so the kernel may keep both. A file that was replaced gets
another inode. Only a file that is written here changes its inode, as on a local disk.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable, Iterator
from itertools import count
from threading import RLock

from cachedfs.mount.folder_listings import FOLDER
from cachedfs.mount.fuse_protocol import ROOT
from cachedfs.mount.local_file import LocalFile
from cachedfs.mount.names import moved

_MOST_RETIRED = 10_000


class Inode:
    """A folder, or one version of a file.

    `size`: in bytes, None for a folder. `version`: differs between versions of a file. `local`: what is written to the file
    now. `n_reading`: how many open files read the version.
    """

    __slots__ = ("local", "mtime_ns", "n_lookups", "n_reading", "number", "path", "size", "version")

    def __init__(self, number: int, path: str, size: int | None, mtime_ns: int, version: Hashable) -> None:
        self.number, self.path, self.size, self.mtime_ns, self.version = number, path, size, mtime_ns, version
        self.local: LocalFile | None = None
        self.n_lookups = self.n_reading = 0


class StaleInode(OSError):
    """The error at which Linux looks a path up and opens it again, unseen by the program."""


class InodeTable:
    """All inodes by number, and the current one of each path. Threads may use it at once."""

    def __init__(self, root: str) -> None:
        """Create it with the inode of the folder `root`."""
        self.lock = RLock()  # while it is held, no inode changes
        self._numbers = count(ROOT)
        self._inodes: dict[int, Inode] = {}
        self._current: dict[str, Inode] = {}
        self._retired: set[str] = set()
        self.lookup(root, *FOLDER)

    def __getitem__(self, number: int) -> Inode:
        return self._inodes[number]

    def current(self, path: str) -> Inode | None:
        return self._current.get(path)

    def lookup(self, path: str, size: int | None, mtime_ns: int, version: Hashable) -> Inode:
        """Return the inode of this version of a path, and count one lookup.

        It becomes the current one, unless the file is being written here.
        """
        with self.lock:
            inode = self._current.get(path)
            is_written = inode is not None and inode.local is not None and inode.local.is_being_written
            if inode is None or (
                not is_written and (inode.version, inode.size is None) != (version, size is None)
            ):
                inode = self._make(path, size, mtime_ns, version)
            inode.n_lookups += 1
            return inode

    def create(self, path: str, mtime_ns: int) -> Inode:
        """Return the inode of a new file, and count one lookup. It becomes the current one of its path."""
        with self.lock:
            inode = self._make(path, 0, mtime_ns, object())
            inode.n_lookups = 1
            return inode

    def replace(self, inode: Inode) -> Inode:
        """Return another inode of the same version, which becomes the current one."""
        with self.lock:
            return self._make(inode.path, inode.size, inode.mtime_ns, inode.version)

    def _make(self, path: str, size: int | None, mtime_ns: int, version: Hashable) -> Inode:
        inode = Inode(next(self._numbers), path, size, mtime_ns, version)
        self._inodes[inode.number] = self._current[path] = inode
        self._retired.discard(path)
        return inode

    def count_lookup(self, inode: Inode) -> Inode:
        """Count one more lookup that returned this inode to the kernel."""
        with self.lock:
            inode.n_lookups += 1
            self._inodes[inode.number] = inode
            return inode

    def retire(self, path: str, inode: Inode | None) -> None:
        """Have the next lookup of a path make a new inode. Only files that are open keep this one."""
        with self.lock:
            if self._current.get(path) is inode:
                self._current.pop(path, None)
                if len(self._retired) >= _MOST_RETIRED:
                    self._retired.clear()  # names that nobody looked up again
                self._retired.add(path)

    def stale(self, path: str, inode: Inode | None, why: str) -> StaleInode:
        """Return the error for an inode that is no longer the one of its path; the next lookup gives another."""
        self.retire(path, inode)
        return StaleInode(errno.ESTALE, why)

    def remove(self, path: str) -> None:
        """Let a path have no inode. Only files that are open keep the one it had."""
        with self.lock:
            self._current.pop(path, None)

    def is_retired(self, path: str) -> bool:
        """Return whether the inode of a path was retired, and no other has taken its place."""
        return path in self._retired

    def forget(self, number: int, n_lookups: int) -> None:
        """Drop an inode once the kernel has forgotten each lookup that returned it."""
        with self.lock:
            inode = self._inodes[number]
            inode.n_lookups -= n_lookups
            self.drop_unused(inode)

    def drop_unused(self, inode: Inode) -> None:
        """Drop an inode that is not open, if the kernel has forgotten it."""
        with self.lock:
            if inode.n_lookups <= 0 and not inode.n_reading and inode.local is None:
                self._inodes.pop(inode.number, None)
                if self._current.get(inode.path) is inode:
                    del self._current[inode.path]

    def move(self, source: str, target: str) -> None:
        """Give the inodes at and below `source` their paths at and below `target`; what was there is retired."""
        with self.lock:
            self._current.pop(target, None)
            self._retired.discard(target)
            for inode in [*self._below(source)]:
                is_current = self._current.get(inode.path) is inode
                if is_current:
                    del self._current[inode.path]
                inode.path = moved(inode.path, source, target)
                if inode.local is not None:
                    inode.local.path = inode.path
                if is_current:
                    self._current[inode.path] = inode

    def _below(self, folder: str) -> Iterator[Inode]:
        return (inode for inode in self._inodes.values() if moved(inode.path, folder, "") != inode.path)
