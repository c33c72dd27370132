"""The files that programs have open in a mounted folder."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem
from cachedfs.filesystem.file import CachedFile
from cachedfs.mount.folder_listings import ExportedSize
from cachedfs.mount.fuse_protocol import Opened
from cachedfs.mount.inodes import Inode, InodeTable
from cachedfs.mount.local_file import LocalFile, State
from cachedfs.mount.reported_errors import reported
from cachedfs.mount.written_files import WrittenFiles

_DOCUMENT_S = 10.0
_FIRST_HANDLE = 1 << 32  # so that no handle has the number of an inode


class _Handle(NamedTuple):
    """An open file. bytes: those of an object without a known size, such as a Google document."""

    inode: Inode
    file: CachedFile | LocalFile | bytes
    is_writing: bool = False
    opener: int = 0  # process id, 0 if unknown
    is_new: bool = False  # opened with O_EXCL: other machines wait for it


class OpenFiles:
    """The open files of a mount, by handle. Thread-safe.

    A file that is open for reading is one version of an object, in an inode of its own. Of a file that is open for writing,
    `WrittenFiles` has the local copy.
    """

    def __init__(self, fs: CachedFileSystem, inodes: InodeTable, written: WrittenFiles) -> None:
        self._fs, self._inodes, self._written, self._lock = fs, inodes, written, inodes.lock
        self._handles: dict[int, _Handle] = {}
        self._numbers = count(_FIRST_HANDLE)
        self._documents: dict[str, tuple[bytes, float]] = {}  # with the time when each expires

    def next_number(self) -> int:
        """Return a number for a handle, also of a folder."""
        return next(self._numbers)

    def _subject(self, number: int, *_: object) -> str:
        """Return what a call is about, for messages: the path of its handle or inode."""
        handle = self._handles.get(number)
        with suppress(KeyError):
            return self._inodes[number].path if handle is None else handle.inode.path
        return "?"

    @reported
    def open(self, number: int, flags: int, thread: int) -> Opened:
        inode = self._inodes[number]
        if flags & os.O_ACCMODE != os.O_RDONLY:
            local = self._written.open(inode, is_empty=bool(flags & os.O_TRUNC))
            return self._opened(_Handle(inode, local, True, _process_of(thread)))
        with self._lock:
            is_current = self._inodes.current(inode.path) is inode
            if inode.local is not None and (is_current or inode.local.is_being_written):
                return self._opened(_Handle(inode, inode.local.join(is_writing=False)))
            if not is_current:
                raise self._inodes.stale(inode.path, inode, "it was replaced since it was looked up")
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
            raise self._inodes.stale(path, inode, str(error)) from error
        return self._opened(_Handle(inode, file), keeps_pages=fingerprint is not None)

    def create(self, path: str, flags: int, thread: int) -> tuple[Inode, Opened]:
        inode, local = self._written.create(path, flags)
        is_new = bool(flags & os.O_EXCL)
        return inode, self._opened(_Handle(inode, local, True, _process_of(thread), is_new))

    def _opened(self, handle: _Handle, *, is_direct: bool = False, keeps_pages: bool = True) -> Opened:
        """Return an open file. The kernel's pages are right where all changes of the bytes are made through them."""
        number = self.next_number()
        self._handles[number] = handle
        return Opened(number, is_direct, keeps_pages)

    @reported
    def read(self, handle: int, size: int, offset: int) -> bytes:
        file = self._handles[handle].file
        if isinstance(file, LocalFile):
            return file.read(size, offset)
        if isinstance(file, bytes):
            return file[offset : offset + size]
        file.seek(offset)  # for this thread: others may read the file meanwhile
        return file.read(size)

    @reported
    def write(self, handle: int, data: memoryview | bytes, offset: int) -> int:
        inode, file, is_writing, *_ = self._handles[handle]
        if not isinstance(file, LocalFile) or not is_writing:
            raise OSError(errno.EBADF, "the file is not open for writing")
        with self._written.abandoned_on_error(inode):
            return file.write(data, offset)

    @reported
    def flush(self, handle: int, thread: int) -> None:
        """Send what was written; called by each `close`, which returns the error.

        A shell closes a descriptor before it writes to another of the same file, and a child process closes those that it
        inherits: neither means that the file is complete. What is left is sent by `release`, after the last `close`.
        """
        _, file, is_writing, opener, is_new = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            is_written = file.state in (State.WRITTEN, State.FAILED, State.BROKEN)
            if (is_written or is_new) and opener == _process_of(thread):
                self._written.send(file)

    @reported
    def fsync(self, handle: int) -> None:
        _, file, is_writing, *_ = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            self._written.send(file)

    @reported
    def release(self, handle: int) -> None:
        inode, file, is_writing, *_ = self._handles.pop(handle)
        if isinstance(file, LocalFile):
            self._written.leave(inode, file, is_writing=is_writing)
            return
        if not isinstance(file, bytes):
            file.close()
        self._end_reading(inode)

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


def _process_of(thread: int) -> int:
    """Return the process of a thread: Linux names the thread that makes a call."""
    with suppress(OSError), open(f"/proc/{thread}/status") as file:
        return int(next(line for line in file if line.startswith("Tgid:")).split()[1])
    return thread
