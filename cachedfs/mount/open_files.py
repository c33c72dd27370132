"""The files that programs have open in a mounted folder, and what is sent of them when."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from threading import Timer
from typing import Any, NamedTuple

from cachedfs.common.clock import clock
from cachedfs.common.types import ANY_VERSION, ObjectInfo
from cachedfs.errors import ObjectChanged, ObjectExists
from cachedfs.filesystem import CachedFileSystem
from cachedfs.filesystem.file import CachedFile
from cachedfs.mount.folder_listings import ExportedSize, version_of
from cachedfs.mount.fuse_protocol import Opened
from cachedfs.mount.inodes import Inode, InodeTable
from cachedfs.mount.local_file import LocalFile, State, now_ns
from cachedfs.mount.names import moved

logger = logging.getLogger("cachedfs.mount")
_DOCUMENT_S = 10.0
_RESERVED_S = 5.0  # for which an inode waits for its writer
_FIRST_HANDLE = 1 << 32  # so that no handle has the number of an inode


class StaleInode(OSError):
    """The error at which Linux looks a path up and opens it again, unseen by the program."""


class _Handle(NamedTuple):
    """An open file. bytes: those of an object without a known size, such as a Google document."""

    inode: Inode
    file: CachedFile | LocalFile | bytes
    is_writing: bool = False
    opener: int = 0  # process id, 0 if unknown
    is_new: bool = False  # opened with O_EXCL: other machines wait for it


class OpenFiles:
    """The open files of a mount, by handle. Thread-safe; the lock of the inodes is not held while a file is sent.

    A file that is open for reading is one version of an object, in an inode of its own. A file that is open for writing is
    local until it is closed or synced, and is then sent as a whole. Its local copy is in the folder `temporary`.
    `process_of` returns the process of a thread. An absence is known for `kept_s`.
    """

    def __init__(
        self,
        fs: CachedFileSystem,
        inodes: InodeTable,
        *,
        temporary: str | None,
        kept_s: float,
        process_of: Callable[[int], int],
    ) -> None:
        self._fs, self._inodes, self._lock = fs, inodes, inodes.lock
        self._temporary, self._kept_s, self._process_of = temporary, kept_s, process_of
        self._handles: dict[int, _Handle] = {}
        self._numbers = count(_FIRST_HANDLE)
        self._reserved: dict[int, list[Timer]] = {}  # by number of an inode that waits for writers
        self._documents: dict[str, tuple[bytes, float]] = {}  # with the time when each expires

    def next_number(self) -> int:
        """Return a number for a handle, also of a folder."""
        return next(self._numbers)

    def path_of(self, handle: int) -> str | None:
        """Return the path of an open file; None if no file has this handle."""
        found = self._handles.get(handle)
        return None if found is None else found.inode.path

    def open(self, inode: Inode, flags: int, thread: int) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            local = self._opened_local(inode, is_empty=bool(flags & os.O_TRUNC))
            return self._opened(_Handle(inode, local, True, self._process_of(thread)))
        with self._lock:
            is_current = self._inodes.current(inode.path) is inode
            if inode.local is not None and (is_current or inode.local.is_being_written):
                return self._opened(_Handle(inode, inode.local.join(is_writing=False)))
            if not is_current:
                raise self._stale(inode.path, inode, "it was replaced since it was looked up")
            inode.n_reading += 1
        try:
            return self._open_version(inode)
        except BaseException:  # an interrupt, too
            self._end_reading(inode)
            raise

    def _end_reading(self, inode: Inode) -> None:
        with self._lock:
            inode.n_reading -= 1
            self._inodes.drop_unused(inode)

    def _stale(self, path: str, inode: Inode | None, why: str) -> StaleInode:
        """Return the error for an inode that is no longer the one of its path; the next lookup gives another."""
        self._inodes.retire(path, inode)
        return StaleInode(errno.ESTALE, why)

    def _open_version(self, inode: Inode) -> Opened:
        path = inode.path
        if isinstance(inode.version, ExportedSize):
            # Another export may have another size.
            return self._opened(_Handle(inode, self.document(path)), is_direct=True)
        fingerprint = inode.version if isinstance(inode.version, str) else None
        try:
            file = self._fs._open_version(path, fingerprint)
            try:
                file.peek(1)  # of an object that was replaced, nothing has been read yet
                if file.size != inode.size:  # nothing else tells versions apart
                    raise ObjectChanged(f"{path}: its size was {inode.size}, and is {file.size}")
            except BaseException:  # an interrupt, too
                file.close()
                raise
        except ObjectChanged as error:
            self._fs._objects.expire(path)
            raise self._stale(path, inode, str(error)) from error
        return self._opened(_Handle(inode, file), keeps_pages=fingerprint is not None)

    def create(self, path: str, flags: int, thread: int) -> tuple[Inode, Opened]:
        is_new = bool(flags & os.O_EXCL)
        base: Any = ANY_VERSION
        if is_new or not flags & os.O_TRUNC:
            base = None if is_new and self._was_absent(path) else self.now(path)
            if base is not None and is_new:
                raise OSError(errno.EEXIST, "another machine has made it")
            if base is not None:
                raise self._stale(path, None, "another machine has made it")
        with self._lock:
            inode = self._inodes.current(path)
            is_joined = inode is not None and inode.local is not None
            if inode is not None and inode.local is not None:
                if is_new:
                    raise OSError(errno.EEXIST, "another program has made it")
                local = inode.local.join(is_writing=True)
                self._inodes.told(inode)
            else:
                local = self._made_local(path, base, now_ns())
                inode = self._inodes.made(path, local)
        if is_joined and flags & os.O_TRUNC:
            local.empty()
        opened = self._opened(_Handle(inode, local, True, self._process_of(thread), is_new))
        return inode, opened

    def _was_absent(self, path: str) -> bool:
        """Return whether the origin has just said that there is no such object; the upload compares again."""
        entry = self._fs._objects.known(path)
        return entry is not None and entry.info is None and clock.now() - entry.asked_at < self._kept_s

    def now(self, path: str) -> ObjectInfo | None:
        """Ask the origin which version of an object there is now; return None for none."""
        self._fs.invalidate_cache(path)
        try:
            return self._fs._object(path)
        except FileNotFoundError:
            return None

    def _opened_local(self, inode: Inode, *, is_empty: bool) -> LocalFile:
        """Return the local copy of a file, for one more handle that may write to it."""
        path, base = inode.path, self._base(inode, is_empty=is_empty)
        with self._lock:
            local = inode.local
            if local is not None:
                local.join(is_writing=True)
            elif self._inodes.current(path) is not inode:
                raise self._stale(path, inode, "it was replaced since it was looked up")
            elif not inode.n_reading and (is_empty or base is not ANY_VERSION):
                inode.local = self._made_local(path, base, now_ns() if is_empty else inode.mtime_ns)
                return inode.local
        if local is None:  # it has readers, or was closed meanwhile
            self._reserve(inode)
            raise StaleInode(errno.ESTALE, "its readers keep their version")
        self._end_reservation(inode)
        if is_empty:
            local.empty()
        return local

    def _made_local(self, path: str, base: Any, mtime_ns: int) -> LocalFile:
        return LocalFile(self._fs, path, self._temporary, base, mtime_ns)

    def _base(self, inode: Inode, *, is_empty: bool) -> Any:
        """Return what the local copy of a file replaces when it is sent; asks the origin unless the file is emptied."""
        if isinstance(inode.version, ExportedSize):
            raise OSError(errno.ENOTSUP, "it is no file that can be written, as Google documents are not")
        with self._lock:
            if is_empty or (inode.local is not None and inode.local.is_being_written):
                return ANY_VERSION
        base = self.now(inode.path)
        if base is None or version_of(base) != inode.version:
            raise self._stale(inode.path, inode, "another machine has changed it")
        return base

    def _reserve(self, inode: Inode) -> None:
        """Have another inode than this one, which has readers, wait for the writer: the kernel looks it up next."""
        base = self._base(inode, is_empty=False)
        with self._lock:
            now = self._inodes.current(inode.path)
            if now is inode and inode.local is None:
                now = self._inodes.replaced(inode, self._made_local(inode.path, base, inode.mtime_ns))
            elif now is not None and now.local is not None:  # of another writer
                now.local.join(is_writing=True)
            else:
                return
            timer = Timer(_RESERVED_S, self._end_reservation, [now])
            timer.daemon = True
            self._reserved.setdefault(now.number, []).append(timer)
            timer.start()

    def _end_reservation(self, inode: Inode) -> None:
        with self._lock:
            timers = self._reserved.get(inode.number)
            if not timers:
                return
            timers.pop(0).cancel()
            if not timers:
                del self._reserved[inode.number]
            local = inode.local
        if local is not None:
            self._leave(inode, local)

    @contextmanager
    def _abandoned_on_error(self, inode: Inode) -> Iterator[None]:
        """After a failed change, only those that have the file open see its bytes, which are those of no version."""
        try:
            yield
        except BaseException:  # an interrupt, too
            self._inodes.retire(inode.path, inode)
            raise

    def _opened(self, handle: _Handle, *, is_direct: bool = False, keeps_pages: bool = True) -> Opened:
        """Return an open file. The kernel's pages are right where all changes of the bytes are made through them."""
        number = self.next_number()
        self._handles[number] = handle
        return Opened(number, is_direct, keeps_pages)

    def read(self, handle: int, size: int, offset: int) -> bytes:
        file = self._handles[handle].file
        if isinstance(file, LocalFile):
            return file.read(size, offset)
        if isinstance(file, bytes):
            return file[offset : offset + size]
        file.seek(offset)
        return file.read(size)

    def write(self, handle: int, data: memoryview | bytes, offset: int) -> int:
        inode, file, is_writing, *_ = self._handles[handle]
        if not isinstance(file, LocalFile) or not is_writing:
            raise OSError(errno.EBADF, "the file is not open for writing")
        with self._abandoned_on_error(inode):
            return file.write(data, offset)

    def flush(self, handle: int, thread: int) -> None:
        """Send what was written; called by each `close`, which returns the error.

        A shell closes a descriptor before it writes to another of the same file, and a child process closes those that it
        inherits: neither means that the file is complete. What is left is sent by `release`, after the last `close`.
        """
        _, file, is_writing, opener, is_new = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            is_written = file.state in (State.WRITTEN, State.FAILED, State.BROKEN)
            if (is_written or is_new) and opener == self._process_of(thread):
                self.send(file)

    def fsync(self, handle: int) -> None:
        _, file, is_writing, *_ = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            self.send(file)

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

    def release(self, handle: int) -> None:
        inode, file, is_writing, *_ = self._handles.pop(handle)
        if isinstance(file, LocalFile):
            self._leave(inode, file, is_writing=is_writing)
            return
        if not isinstance(file, bytes):
            file.close()
        self._end_reading(inode)

    def _leave(self, inode: Inode, local: LocalFile, *, is_writing: bool = True) -> None:
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
                if local.state is not State.SENT:
                    self._inodes.retire(inode.path, inode)  # its pages are those of no version
        if is_last:
            local.close()
        self._inodes.drop_unused(inode)

    def written(self) -> list[LocalFile]:
        """Return the local copies of the files that are open for writing, and were neither removed nor abandoned."""
        inodes = {handle.inode for handle in list(self._handles.values())}
        with self._lock:
            return [
                inode.local
                for inode in inodes
                if inode.local is not None and self._inodes.current(inode.path) is inode
            ]

    @contextmanager
    def removed(self, path: str) -> Iterator[bool]:
        """Never send the file at `path` once the block has removed it; yield whether it has a local copy."""
        with self._lock:
            inode = self._inodes.current(path)
            local = None if inode is None else inode.local
        if local is None:
            yield False
        else:
            with local.lock:
                local.load()
                yield True
                local.is_removed = True
        self._inodes.remove(path)

    @contextmanager
    def renamed(self, source: str, target: str) -> Iterator[None]:
        """Send the files at and below `source` before they are renamed by the block, and let them follow.

        A file open at `target` is never sent from then on.
        """
        moving = [local for local in self.written() if moved(local.path, source, target) != local.path]
        with self._lock:
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
            if replaced is not None:
                replaced.is_removed = True
            self._inodes.move(source, target)
        for local in self.written():
            if moved(local.path, target, "") == local.path:
                continue
            try:
                local.rebase()
            except OSError as error:  # it keeps its old base, and is not sent over another version
                logger.warning("looking up %s after it was renamed: %s", local.path, error)

    def report_unsent(self) -> None:
        """Keep the files that are still open and were not sent, and log where."""
        for local in self.written():
            if local.state is not State.SENT:
                local.report_unsent()

    def truncate(self, inode: Inode, size: int) -> None:
        local = self._opened_local(inode, is_empty=not size and inode.local is None)
        try:
            with self._abandoned_on_error(inode):
                local.truncate(size)
            if local.n_writing == 1:  # no file is open that would send it
                self.send(local)
        finally:
            self._leave(inode, local)

    def document(self, path: str) -> bytes:
        """Return an object without a known size, such as a Google document. It is kept a while: `open` follows `stat`."""
        now = time.monotonic()
        with self._lock:
            self._documents = {path: kept for path, kept in self._documents.items() if kept[1] > now}
            if path in self._documents:
                return self._documents[path][0]
        data: bytes = self._fs.cat_file(path)
        with self._lock:
            self._documents[path] = data, now + _DOCUMENT_S
        return data
