"""The files that are open for writing in a mounted folder, and what is sent of them when."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from typing import Any

from cachedfs.common.clock import clock
from cachedfs.common.types import ANY_VERSION, ObjectInfo
from cachedfs.errors import ObjectChanged, ObjectExists
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.folder_listings import ExportedSize, mtime_ns_of, version_of
from cachedfs.mount.inodes import Inode, InodeTable, StaleInode
from cachedfs.mount.local_file import LocalFile, State, now_ns
from cachedfs.mount.names import moved
from cachedfs.mount.temporary_files import temporary_file

logger = logging.getLogger("cachedfs.mount")
_RESERVED_S = 5.0  # for which a new inode waits for its writer
_KEEPS_ID = 64 << 20  # bytes of a file that is written into the Drive file that it replaces


class WrittenFiles:
    """The inodes of files that are open for writing. Thread-safe.

    Such a file is a local copy in the folder `temporary`, sent as a whole when it is closed or synced. The lock of the
    inodes is not held meanwhile. An absence that the origin stated counts for `kept_s`.
    """

    def __init__(
        self, fs: CachedFileSystem, inodes: InodeTable, *, temporary: str | None, kept_s: float
    ) -> None:
        self._fs, self._inodes, self._lock = fs, inodes, inodes.lock
        self._temporary, self._kept_s = temporary, kept_s
        self._open: set[Inode] = set()  # with a local copy
        self._reserved: dict[int, list[Timer]] = {}  # by number of an inode that waits for writers

    def open(self, inode: Inode, *, is_empty: bool) -> LocalFile:
        """Return the local copy of a file, for one more handle that may write to it."""
        path, base = inode.path, self._base(inode, is_empty=is_empty)
        with self._lock:
            local = inode.local
            if local is not None:
                local.join(is_writing=True)
            elif self._inodes.current(path) is not inode:
                raise self._inodes.stale(path, inode, "it was replaced since it was looked up")
            elif not inode.n_reading and (is_empty or base is not ANY_VERSION):
                return self._begin(inode, base, now_ns() if is_empty else inode.mtime_ns)
        if local is None:  # it has readers, or was closed meanwhile
            self._reserve(inode)
            raise StaleInode(errno.ESTALE, "its readers keep their version")
        self.end_reservation(inode)
        if is_empty:
            local.empty()
        return local

    def create(self, path: str, flags: int) -> tuple[Inode, LocalFile]:
        is_new = bool(flags & os.O_EXCL)
        base: Any = ANY_VERSION
        if is_new or not flags & os.O_TRUNC:
            base = None if is_new and self._was_absent(path) else self.latest(path)
            if base is not None and is_new:
                raise OSError(errno.EEXIST, "another machine has made it")
            if base is not None:
                raise self._inodes.stale(path, None, "another machine has made it")
        with self._lock:
            inode = self._inodes.current(path)
            is_joined = inode is not None and inode.local is not None
            if inode is not None and inode.local is not None:
                if is_new:
                    raise OSError(errno.EEXIST, "another program has made it")
                local = inode.local.join(is_writing=True)
                self._inodes.count_lookup(inode)
            else:
                inode = self._inodes.create(path, now_ns())
                local = self._begin(inode, base, inode.mtime_ns)
        if is_joined and flags & os.O_TRUNC:
            local.empty()
        return inode, local

    def _was_absent(self, path: str) -> bool:
        """Return whether the origin has just said that there is no such object; the upload compares again."""
        entry = self._fs._objects.known(path)
        return entry is not None and entry.info is None and clock.now() - entry.asked_at < self._kept_s

    def latest(self, path: str) -> ObjectInfo | None:
        """Ask the origin which version of an object there is now; return None for none."""
        self._fs.invalidate_cache(path)
        try:
            return self._fs._object(path)
        except FileNotFoundError:
            return None

    def _begin(self, inode: Inode, base: Any, mtime_ns: int) -> LocalFile:
        """Give an inode a local copy, for a handle that may write to it."""
        local = inode.local = LocalFile(self._fs, inode.path, self._temporary, base, mtime_ns)
        self._open.add(inode)
        return local

    def _base(self, inode: Inode, *, is_empty: bool) -> Any:
        """Return what the local copy of a file replaces when it is sent; asks the origin unless the file is emptied."""
        if isinstance(inode.version, ExportedSize):
            raise OSError(errno.ENOTSUP, "it is no file that can be written, as Google documents are not")
        with self._lock:
            if is_empty or (inode.local is not None and inode.local.is_being_written):
                return ANY_VERSION
        base = self.latest(inode.path)
        if base is None or version_of(base) != inode.version:
            raise self._inodes.stale(inode.path, inode, "another machine has changed it")
        return base

    def _reserve(self, inode: Inode) -> None:
        """Make an inode beside this one, which has readers, for the writer: the kernel looks it up next."""
        base = self._base(inode, is_empty=False)
        with self._lock:
            now = self._inodes.current(inode.path)
            if now is inode and inode.local is None:
                now = self._inodes.replace(inode)
                self._begin(now, base, inode.mtime_ns)
            elif now is not None and now.local is not None:  # of another writer
                now.local.join(is_writing=True)
            else:
                return
            timer = Timer(_RESERVED_S, self.end_reservation, [now])
            timer.daemon = True
            self._reserved.setdefault(now.number, []).append(timer)
            timer.start()

    def end_reservation(self, inode: Inode) -> None:
        with self._lock:
            timers = self._reserved.get(inode.number)
            if not timers:
                return
            timers.pop(0).cancel()
            if not timers:
                del self._reserved[inode.number]
            local = inode.local
        if local is not None:
            self.leave(inode, local)

    @contextmanager
    def abandoned_on_error(self, inode: Inode) -> Iterator[None]:
        """After a failed change, only those that have the file open see its bytes, which are those of no version."""
        try:
            yield
        except BaseException:  # an interrupt, too
            self._inodes.retire(inode.path, inode)
            raise

    def send(self, local: LocalFile) -> None:
        try:
            info = local.send()
        except (ObjectChanged, ObjectExists):  # it will never be sent: other programs see what is there
            with self._lock:
                inode = self._inodes.current(local.path)
                if inode is not None and inode.local is local:
                    self._inodes.remove(local.path)
            raise
        if info is None:
            return
        with self._lock:
            inode = self._inodes.current(local.path)
            if inode is not None and inode.local is local:
                inode.size, inode.mtime_ns = local.size, local.mtime_ns
                inode.version = version_of(info)
        if local.path.startswith("id:"):
            self._fs.invalidate_cache()  # another item may have the name now

    def leave(self, inode: Inode, local: LocalFile, *, is_writing: bool = True) -> None:
        """End a handle. The last that may write sends what no `close` has sent, with errors in the log."""
        if is_writing and local.n_writing == 1 and local.state in (State.EMPTIED, State.WRITTEN):
            try:
                self.send(local)
            except Exception as error:  # of any kind: no program waits for this
                logger.error("sending %s: %s", local.path, error)
        with self._lock:
            local.n_writing -= is_writing
            local.n_open -= 1
            is_last = not local.n_open
            if is_last:
                inode.local = None
                self._open.discard(inode)
                if local.state is not State.SENT:
                    self._inodes.retire(inode.path, inode)  # its pages are those of no version
        if is_last:
            local.close()
        self._inodes.drop_unused(inode)

    def truncate(self, inode: Inode, size: int) -> None:
        local = self.open(inode, is_empty=not size and inode.local is None)
        try:
            with self.abandoned_on_error(inode):
                local.truncate(size)
            if local.n_writing == 1:  # no file is open that would send it
                self.send(local)
        finally:
            self.leave(inode, local)

    def local_copies(self) -> list[LocalFile]:
        """Return those of the files that were neither removed nor abandoned."""
        with self._lock:
            inodes = [inode for inode in self._open if self._inodes.current(inode.path) is inode]
            return [inode.local for inode in inodes if inode.local is not None]

    @contextmanager
    def removing(self, path: str) -> Iterator[bool]:
        """Remove the file at `path` in the block, and never send it then; yield whether it has a local copy."""
        inode = self._inodes.current(path)
        if inode is None or (local := inode.local) is None:
            yield False
            self._inodes.remove(path)
        else:
            with local.lock:
                local.load()
                yield True
                with self._lock:  # whoever makes the file again does not get this inode
                    local.is_removed = True
                    self._inodes.remove(path)

    @contextmanager
    def renaming(self, source: str, target: str) -> Iterator[None]:
        """Rename `source` in the block. Before, send the files at and below it; after, give them their new paths.

        A file open at `target` is never sent from then on.
        """
        moving = [local for local in self.local_copies() if moved(local.path, source, target) != local.path]
        inode = self._inodes.current(target)
        replaced = None if inode is None else inode.local
        for local in moving:
            self.send(local)
        with ExitStack() as stack:
            for local in sorted([*moving, *([replaced] if replaced else [])], key=id):
                stack.enter_context(local.lock)
            if replaced is not None:
                replaced.load()
            yield
            with self._lock:
                if replaced is not None:
                    replaced.is_removed = True
                self._inodes.move(source, target)
        for local in self.local_copies():
            if moved(local.path, target, "") == local.path:
                continue
            try:
                local.rebase()
            except OSError as error:  # it keeps its old base, and is not sent over another version
                logger.warning("looking up %s after it was renamed: %s", local.path, error)

    def written_into(self, source: str, target: str) -> bool:
        """Write a Drive file into the one that it would replace, which keeps its id, its sharing and its revisions.

        Return False, and do nothing, for a large file, or if there is none to replace. Programs save a file this way.
        """
        info, replaced = self._fs._object(source), self.latest(target)
        if replaced is None or replaced.size is None or info.size is None or info.size > _KEEPS_ID:
            return False
        with temporary_file(self._temporary) as file:
            file.write(self._fs.cat_file(source))
            self._fs._send(target, file, replaces=replaced, mtime_ns=mtime_ns_of(info.details, now_ns()))
        self._fs.rm_file(source)
        return True

    def report_unsent(self) -> None:
        """Keep the files that are still open and were not sent, and log where."""
        for local in self.local_copies():
            if local.state is not State.SENT:
                local.report_unsent()
