"""The kernel's calls on a mounted folder, as calls of the filesystem and of local copies of written files.

Each method raises OSError with an errno, which is what the program sees. What the errno cannot say goes to the log.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from threading import RLock, Thread, Timer
from typing import Any, NamedTuple

from cachedfs.common.clock import clock
from cachedfs.common.types import ANY_VERSION, ObjectInfo
from cachedfs.common.urls import GCS_PROTOCOLS, LOCAL_PROTOCOLS, folder_of
from cachedfs.errors import NotDownloadable, ObjectChanged, ObjectExists, OriginUnavailable, OriginUnreachable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.filesystem.file import CachedFile
from cachedfs.mount.folder_listings import (
    ExportedSize,
    Files,
    FolderListings,
    Known,
    known_of,
    mtime_ns_of,
    version_of,
)
from cachedfs.mount.fuse_protocol import ROOT, Attributes, DirEntry, NameEntry, Opened, Space
from cachedfs.mount.inodes import Inode, InodeTable
from cachedfs.mount.local_files import LocalFile, LocalFiles, State, now_ns
from cachedfs.mount.names import MAX_BYTES, file_name, moved, object_name, without_id
from cachedfs.mount.temporary_files import temporary_file

logger = logging.getLogger("cachedfs.mount")

_EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EPERM,
    errno.EILSEQ,  # a name that is not UTF-8
    errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip
_KEPT_S = 1.0  # for which the kernel keeps names; less if `max_age` is
_KEPT_S_A_NAME = 1e-4  # more in a listed folder: `find` reads all names before it asks for the first
_LONG_S = 3600.0  # for which it keeps the attributes of a version, which never change
_UNLIMITED = Space(1 << 52, 1 << 52)
_DOCUMENT_S = 10.0
_RESERVED_S = 5.0  # for which an inode waits for its writer
_SPACE_S = 0.5  # for which `df` waits for the account's quota
_KEEPS_ID = 64 << 20  # bytes of a file that is written into the Drive file that it replaces
_FIRST_HANDLE = 1 << 32  # so that no handle has the number of an inode
_NO_REPLACE, _EXCHANGE, _WHITEOUT = 1, 2, 4  # flags of renameat2


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn every exception into OSError with an errno, and log those that programs do not expect."""

    @functools.wraps(method)
    def call(self: MountOperations, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Exception as error:  # of any kind: the kernel takes nothing but an errno
            code = _errno_of(error, is_offline=self._fs.config.offline)
            if code not in _EXPECTED and not isinstance(error, _Stale):
                logger.error(
                    "%s of %s: %s", method.__name__, self._subject(*args), error or type(error).__name__
                )
            raise OSError(code, os.strerror(code)) from error

    return call


def _errno_of(error: Exception, *, is_offline: bool) -> int:
    if isinstance(error, UnicodeError):
        return errno.EILSEQ
    if isinstance(error, OriginUnavailable) and not (is_offline or isinstance(error, OriginUnreachable)):
        return errno.EIO  # the network is there: the service is busy or broken
    return getattr(error, "errno", None) or errno.EIO


class _Stale(OSError):
    """The error at which Linux looks a path up and opens it again, unseen by the program."""


class _Handle(NamedTuple):
    """An open file. bytes: those of an object without a known size, such as a Google document."""

    inode: Inode
    file: CachedFile | LocalFile | bytes
    is_writing: bool = False
    opener: int = 0  # process id, 0 if unknown
    is_new: bool = False  # opened with O_EXCL: other machines wait for it


class _Listed(NamedTuple):
    """An open folder: its path, its listing if the filesystem has one, and the names in it."""

    path: str
    files: Files | None
    names: list[tuple[str, Known | None]]


class MountOperations:
    """The calls that the kernel makes for a mounted folder of a filesystem. Thread-safe.

    A method raises OSError with the errno that the program gets. Inodes have numbers; that of the mounted folder is 1.
    `forget` says that the kernel drops some. `thread` is the one that makes the call, 0 if unknown.

    A file that is open for reading is one version of an object, in an inode of its own. A file that is open for writing is
    local until it is closed or synced, and is then sent as a whole. `process_of` returns the process of a thread.
    """

    def __init__(
        self,
        fs: CachedFileSystem,
        root: str,
        *,
        is_writable: bool,
        uid: int | None = None,
        gid: int | None = None,
        temporary: str | None = None,
        process_of: Callable[[int], int] = int,
    ) -> None:
        """Create them for the folder `root`; all files belong to `uid` and `gid`, by default those of this process.

        Local copies of written files are in the folder `temporary`, by default that of temporary files.
        """
        self._fs, self._root, self._process_of = fs, root.rstrip("/"), process_of
        self._has_ids = fs.target_protocol == "drive"  # where several items may have one name
        self._keeps_folders = self._has_ids or fs.target_protocol in LOCAL_PROTOCOLS  # also empty ones
        self._write_bit = 0o200 if is_writable else 0
        self._uid, self._gid = os.getuid() if uid is None else uid, os.getgid() if gid is None else gid
        self._began_ns = time.time_ns()
        self._kept_s = min(_KEPT_S, fs.config.lifetime_s)
        self._lock = RLock()
        self._numbers = count(_FIRST_HANDLE)
        self._handles: dict[int, _Handle] = {}
        self._listed: dict[int, _Listed] = {}  # open folders
        self._reserved: dict[int, list[Timer]] = {}  # by number of an inode that waits for writers
        self._inodes = InodeTable(self._root, self._began_ns, self._lock)
        self._temporary = temporary
        self._local_files = LocalFiles(fs, temporary, self._lock)
        self._documents: dict[str, tuple[bytes, float]] = {}  # with the time when each expires
        self._listings = FolderListings(fs, self._began_ns)
        # Folders shown though the origin may have none: object stores have only folders with objects.
        self._folders: set[str] = set()
        self._space = _UNLIMITED
        self._asking_space: Thread | None = None

    # Metadata.

    @_reported
    def lookup(self, parent: int, name: str) -> NameEntry:
        path = self._path(parent, name)
        with self._lock:
            inode = self._inodes.current(path)
            if inode is not None and inode.local is not None and inode.local.is_being_written:
                return self._entry(self._inodes.told(inode))
        return self._entry(self._inodes.looked_up(path, *self._known(path, name)))

    def _known(self, path: str, name: str) -> Known:
        if path in self._folders:
            return Known(None, self._began_ns, None)
        files = None if self._inodes.is_retired(path) else self._listings.current(folder_of(path))
        listed, inode = files and files.get(name), self._inodes.current(path)
        if listed and (inode is None or inode.version == listed.version):
            return listed  # but the version that a file was last opened with may be newer
        if self._inodes.is_retired(path):
            # The file is opened next, and may be replaced again before. Of a folder, see below.
            with suppress(OSError), self._fs.open(path) as file:
                file.peek(1)
        info = self._fs._object(path)
        if (known := known_of(info, self._began_ns)) is not None:
            return known
        size = 0
        try:
            size = len(self._document(path))
        except (NotDownloadable, FileNotFoundError) as error:  # a shortcut without its target
            logger.warning("%s", error)
        return Known(size, mtime_ns_of(info.details, self._began_ns), ExportedSize(info.fingerprint, size))

    def _document(self, path: str) -> bytes:
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

    def forget(self, number: int, n_lookups: int) -> None:
        self._inodes.forget(number, n_lookups)

    @_reported
    def getattr(self, number: int) -> Attributes:
        return self._attributes(self._inodes[number])

    def _attributes(self, inode: Inode) -> Attributes:
        number, local, size = inode.number, inode.local, inode.size
        if size is None:
            mode = stat.S_IFDIR | 0o555 | self._write_bit
            return Attributes(number, mode, 0, inode.mtime_ns, self._uid, self._gid, self._kept_s)
        mode = stat.S_IFREG | 0o444 | self._write_bit
        if local is not None:
            return Attributes(number, mode, local.size, local.mtime_ns, self._uid, self._gid, self._kept_s)
        return Attributes(number, mode, size, inode.mtime_ns, self._uid, self._gid, _LONG_S)

    def _entry(self, inode: Inode) -> NameEntry:
        return NameEntry(self._attributes(inode), self._kept_s)

    @_reported
    def setattr(self, number: int, *, size: int | None, mtime_ns: int | None) -> Attributes:
        """Set the size or the time. Objects have no mode and no owner; an error would stop `cp -p`, `tar` and `rsync`."""
        inode = self._inodes[number]
        if size is not None:
            local = self._opened_local(inode, is_empty=not size and inode.local is None)
            try:
                with self._abandoned_on_error(inode, local):
                    local.truncate(size)
                if local.n_writing == 1:  # no file is open that would send it
                    self._send(local)
            finally:
                self._leave(inode, local)
        if mtime_ns is not None and inode.local is not None and inode.local.state is not State.SENT:
            inode.local.mtime_ns = mtime_ns // 1_000_000 * 1_000_000
        return self._attributes(inode)

    @_reported
    def opendir(self, number: int) -> int:
        path = self._inodes[number].path
        files = self._in_folder(path)
        handle = next(self._numbers)
        self._listed[handle] = _Listed(
            path, self._listings.current(path), [(".", None), ("..", None), *files.items()]
        )
        return handle

    def _in_folder(self, folder: str) -> Files:
        """Return what is in a folder, by file name."""
        try:
            files = self._listings.of(folder)
        except FileNotFoundError:
            if folder not in self._folders and folder != self._root:
                raise
            files = {}
        with self._lock:
            here = {path: Known(None, self._began_ns, None) for path in self._folders}
        more: dict[str, Known | None] = {**dict.fromkeys(self._local_files.paths()), **here}
        below = {path.rpartition("/")[2]: known for path, known in more.items() if folder_of(path) == folder}
        return {**{file_name(name): known for name, known in below.items()}, **files} if below else files

    def readdir(self, handle: int, start: int, *, is_plus: bool) -> Iterator[DirEntry]:
        """Yield the names of an open folder from number `start` on; with `is_plus`, with their inodes."""
        folder, files, names = self._listed[handle]
        # What was listed before a change may be another size, or gone: then the kernel looks each name up.
        is_plus = is_plus and files is not None and self._listings.current(folder) is files
        kept_s = min(_KEPT_S + _KEPT_S_A_NAME * len(names), self._fs.config.lifetime_s)
        for position in range(start, len(names)):
            name, known = names[position]
            is_folder = name in (".", "..") or (known is not None and known.size is None)
            mode, entry = stat.S_IFDIR if is_folder else stat.S_IFREG, None
            if is_plus and known is not None:
                path = self._child(folder, object_name(name))
                inode = self._inodes.current(path)
                if inode is None or inode.version == known.version:
                    entry = NameEntry(self._attributes(self._inodes.looked_up(path, *known)), kept_s)
            yield DirEntry(os.fsencode(name), mode, entry)

    def releasedir(self, handle: int) -> None:
        del self._listed[handle]

    @_reported
    def statfs(self) -> Space:
        with self._lock:
            if self._asking_space is None or not self._asking_space.is_alive():
                self._asking_space = Thread(target=self._ask_space, name="cachedfs-space", daemon=True)
                self._asking_space.start()
            asking = self._asking_space
        asking.join(_SPACE_S)
        return self._space

    def _ask_space(self) -> None:
        if (space := self._fs._free_space(self._root)) is not None:
            self._space = Space(*space)

    # Files.

    @_reported
    def open(self, number: int, flags: int, thread: int) -> Opened:
        inode = self._inodes[number]
        if flags & os.O_ACCMODE != os.O_RDONLY:
            local = self._opened_local(inode, is_empty=bool(flags & os.O_TRUNC))
            return self._opened(_Handle(inode, local, True, self._process_of(thread)))
        with self._lock:
            is_current = self._inodes.current(inode.path) is inode
            if inode.local is not None and (is_current or inode.local.is_being_written):
                return self._opened(_Handle(inode, self._local_files.join(inode.local, is_writing=False)))
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

    def _stale(self, path: str, inode: Inode | None, why: str) -> _Stale:
        """Return the error for an inode that is no longer the one of its path; the next lookup gives another."""
        self._inodes.retire(path, inode)
        return _Stale(errno.ESTALE, why)

    def _open_version(self, inode: Inode) -> Opened:
        path = inode.path
        if isinstance(inode.version, ExportedSize):
            # Another export may have another size.
            return self._opened(_Handle(inode, self._document(path)), is_direct=True)
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

    @_reported
    def create(self, parent: int, name: str, flags: int, thread: int) -> tuple[NameEntry, Opened]:
        path, is_new = self._path(parent, name), bool(flags & os.O_EXCL)
        base: Any = ANY_VERSION
        if is_new or not flags & os.O_TRUNC:
            base = None if is_new and self._was_absent(path) else self._now(path)
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
                local = self._local_files.join(inode.local, is_writing=True)
                self._inodes.told(inode)
            else:
                local = self._local_files.open(path, base, now_ns())
                inode = self._inodes.made(path, local)
        if is_joined and flags & os.O_TRUNC:
            local.empty()
        opened = self._opened(_Handle(inode, local, True, self._process_of(thread), is_new))
        return self._entry(inode), opened

    def _was_absent(self, path: str) -> bool:
        """Return whether the origin has just said that there is no such object; the upload compares again."""
        entry = self._fs._objects.known(path)
        return entry is not None and entry.info is None and clock.now() - entry.asked_at < self._kept_s

    def _now(self, path: str) -> ObjectInfo | None:
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
                self._local_files.join(local, is_writing=True)
            elif self._inodes.current(path) is not inode:
                raise self._stale(path, inode, "it was replaced since it was looked up")
            elif not inode.n_reading and (is_empty or base is not ANY_VERSION):
                inode.local = self._local_files.open(path, base, now_ns() if is_empty else inode.mtime_ns)
                return inode.local
        if local is None:  # it has readers, or was closed meanwhile
            self._reserve(inode)
            raise _Stale(errno.ESTALE, "its readers keep their version")
        self._end_reservation(inode)
        if is_empty:
            local.empty()
        return local

    def _base(self, inode: Inode, *, is_empty: bool) -> Any:
        """Return what the local copy of a file replaces when it is sent; asks the origin unless the file is emptied."""
        if isinstance(inode.version, ExportedSize):
            raise OSError(errno.ENOTSUP, "it is no file that can be written, as Google documents are not")
        with self._lock:
            if is_empty or (inode.local is not None and inode.local.is_being_written):
                return ANY_VERSION
        base = self._now(inode.path)
        if base is None or version_of(base, self._began_ns) != inode.version:
            raise self._stale(inode.path, inode, "another machine has changed it")
        return base

    def _reserve(self, inode: Inode) -> None:
        """Have another inode than this one, which has readers, wait for the writer: the kernel looks it up next."""
        base = self._base(inode, is_empty=False)
        with self._lock:
            now = self._inodes.current(inode.path)
            if now is inode and inode.local is None:
                now = self._inodes.replaced(inode, self._local_files.open(inode.path, base, inode.mtime_ns))
            elif now is not None and now.local is not None:  # of another writer
                self._local_files.join(now.local, is_writing=True)
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
    def _abandoned_on_error(self, inode: Inode, local: LocalFile) -> Iterator[None]:
        """After a failed change, only those that have the file open see its bytes, which are those of no version."""
        try:
            yield
        except BaseException:  # an interrupt, too
            with self._lock:
                self._local_files.drop(local)
                self._inodes.retire(inode.path, inode)
            raise

    def _opened(self, handle: _Handle, *, is_direct: bool = False, keeps_pages: bool = True) -> Opened:
        """Return an open file. The kernel's pages are right where all changes of the bytes are made through them."""
        number = next(self._numbers)
        self._handles[number] = handle
        return Opened(number, is_direct, keeps_pages)

    @_reported
    def read(self, handle: int, size: int, offset: int) -> bytes:
        file = self._handles[handle].file
        if isinstance(file, LocalFile):
            return file.read(size, offset)
        if isinstance(file, bytes):
            return file[offset : offset + size]
        file.seek(offset)
        return file.read(size)

    @_reported
    def write(self, handle: int, data: memoryview | bytes, offset: int) -> int:
        inode, file, is_writing, *_ = self._handles[handle]
        if not isinstance(file, LocalFile) or not is_writing:
            raise OSError(errno.EBADF, "the file is not open for writing")
        with self._abandoned_on_error(inode, file):
            return file.write(data, offset)

    @_reported
    def flush(self, handle: int, thread: int) -> None:
        """Send what was written; called by each `close`, which returns the error.

        A shell closes a descriptor before it writes to another of the same file, and a child process closes those that it
        inherits: neither means that the file is complete. What is left is sent by `release`, after the last `close`.
        """
        _, file, is_writing, opener, is_new = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            is_written = file.state in (State.WRITTEN, State.FAILED, State.BROKEN)
            if (is_written or is_new) and opener == self._process_of(thread):
                self._send(file)

    @_reported
    def fsync(self, handle: int) -> None:
        _, file, is_writing, *_ = self._handles[handle]
        if isinstance(file, LocalFile) and is_writing:
            self._send(file)

    def _send(self, local: LocalFile) -> None:
        try:
            info = local.send()
        except (ObjectChanged, ObjectExists):  # it will never be sent: other programs see what is there
            with self._lock:
                self._local_files.drop(local)
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
                inode.version = version_of(info, self._began_ns)
        if local.path.startswith("id:"):
            self._fs.invalidate_cache()  # another item may have the name now

    @_reported
    def release(self, handle: int) -> None:
        inode, file, is_writing, *_ = self._handles.pop(handle)
        if isinstance(file, LocalFile):
            self._leave(inode, file, is_writing=is_writing)
            return
        if not isinstance(file, bytes):
            file.close()
        self._end_reading(inode)

    def _leave(self, inode: Inode, local: LocalFile, *, is_writing: bool = True) -> None:
        def closed() -> None:
            inode.local = None
            if local.state is not State.SENT and self._inodes.current(inode.path) is inode:
                self._inodes.retire(inode.path, inode)  # its pages are those of no version

        self._local_files.leave(local, is_writing=is_writing, send=self._send, closed=closed)
        self._inodes.drop_unused(inode)

    def end(self) -> None:
        """Keep the files that were still open and not sent, and log where."""
        self._local_files.report_unsent()

    # Names.

    @_reported
    def mkdir(self, parent: int, name: str) -> NameEntry:
        path = self._path(parent, name)
        self._fs.mkdir(path)
        self._keep_folder(path)
        return self.lookup(parent, name)  # type: ignore[no-any-return]  # of a decorated method

    def _keep_folder(self, path: str) -> None:
        """Show a folder and those above it from now on, though the origin may have none that are empty."""
        while path != self._root and not self._keeps_folders:
            with self._lock:
                self._folders.add(path)
            path = folder_of(path)

    @_reported
    def rmdir(self, parent: int, name: str) -> None:
        path = self._path(parent, name)
        self._rmdir(path)
        self._inodes.remove(path)
        self._changed(parent, name)
        self._keep_folder(self._inodes[parent].path)

    def _rmdir(self, path: str) -> None:
        """Remove an empty folder: nothing in it, also of what the mount cannot show."""
        self._fs.invalidate_cache(path)
        if self._in_folder(path):
            raise OSError(errno.ENOTEMPTY, path)
        if self._fs.exists(path):
            if not self._has_ids and (hidden := self._fs.find(path)):
                logger.error("rmdir of %s: not empty: the mount cannot show %s", path, hidden[0])
                raise OSError(errno.ENOTEMPTY, path)
            self._fs.rmdir(path)
            if self._fs.target_protocol in GCS_PROTOCOLS:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{path}/")  # the placeholder of a folder
            elif not self._has_ids and self._fs.exists(path):
                self._fs.rm(path, recursive=True)
        with self._lock:
            self._folders.discard(path)

    @_reported
    def unlink(self, parent: int, name: str) -> None:
        path = self._path(parent, name)
        with self._local_files.removed(path) as is_local:
            if not is_local or self._fs.exists(path):
                self._fs.rm_file(path)
        self._inodes.remove(path)
        self._changed(parent, name)
        self._keep_folder(self._inodes[parent].path)

    @_reported
    def rename(self, parent: int, name: str, new_parent: int, new_name: str, flags: int) -> None:
        source, target = self._path(parent, name), self._path(new_parent, new_name)
        if flags & (_EXCHANGE | _WHITEOUT):
            raise OSError(errno.EINVAL, "two objects cannot be exchanged in one step")
        if flags & _NO_REPLACE and (target in self._folders or self._now(target) is not None):
            raise OSError(errno.EEXIST, target)
        with self._local_files.renamed(source, target, self._send):
            is_local = source in self._folders
            is_folder = is_local or self._fs.isdir(source)
            if is_folder and (target in self._folders or self._fs.exists(target)):
                self._rmdir(target)  # fsspec would move the folder into it
            if not is_local or self._fs.exists(source):
                if is_folder or not self._has_ids or not self._written_into(source, target):
                    self._fs.mv(source, target, recursive=is_folder)
                self._changed(parent, name)
            with self._lock:
                self._inodes.move(source, target)
                self._folders = {moved(folder, source, target) for folder in self._folders}
        self._keep_folder(self._inodes[parent].path)

    def _written_into(self, source: str, target: str) -> bool:
        """Write a Drive file into the one that it would replace, which keeps its id, its sharing and its revisions.

        Return False, and do nothing, for a large file, or if there is none to replace. Programs save a file this way.
        """
        info, replaced = self._fs._object(source), self._now(target)
        if replaced is None or replaced.size is None or info.size is None or info.size > _KEEPS_ID:
            return False
        with temporary_file(self._temporary) as file:
            file.write(self._fs.cat_file(source))
            self._fs._send(target, file, replaces=replaced, mtime_ns=mtime_ns_of(info.details, now_ns()))
        self._fs.rm_file(source)
        return True

    def _subject(self, number: int = ROOT, *args: Any) -> str:
        """Return what a call is about, for messages: the path of its handle or inode, and the name that may follow."""
        handle = self._handles.get(number)
        if handle is not None:
            return handle.inode.path
        with suppress(KeyError):
            folder = self._inodes[number].path
            return f"{folder}/{args[0]}" if args and isinstance(args[0], str) else folder
        return "?"

    def _path(self, parent: int, name: str) -> str:
        """Return the object's path for a file name in a folder."""
        if len(os.fsencode(name)) > MAX_BYTES:
            raise OSError(errno.ENAMETOOLONG, name)
        name.encode()  # raises UnicodeError
        return self._child(self._inodes[parent].path, object_name(name))

    def _child(self, folder: str, name: str) -> str:
        """Return the path of the object with this name in a folder: that of its id, if the name has the id."""
        path = _join(folder, name)
        parts = without_id(name) if self._has_ids else None
        if parts is None:
            return path
        with suppress(FileNotFoundError):
            # The item that counts as well: it was another one a moment ago.
            info: Mapping[str, Any] = self._fs.info(_join(folder, parts[0]))
            if parts[1] in (info.get("id"), info.get("shortcut"), *info.get("same_name", ())):
                return f"id:{parts[1]}"
        return path

    def _changed(self, parent: int, name: str) -> None:
        """Forget which items have the name of one that was changed by its id."""
        if self._has_ids and (parts := without_id(object_name(name))) is not None:
            self._fs.invalidate_cache(_join(self._inodes[parent].path, parts[0]))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
