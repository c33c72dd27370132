"""The calls of the kernel on a mounted folder, as calls of the filesystem.

Names and signatures are those that `mfusepy.FUSE` expects with `raw_fi=True`. Each method raises OSError with an errno,
which is what the program sees. What the errno cannot say goes to the log.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

from cachedfs.errors import NotDownloadable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.filesystem.file import CachedFile
from cachedfs.mount.folder_listings import FolderListings, mtime_ns_of
from cachedfs.mount.local_files import LocalFile, LocalFiles, State, moved
from cachedfs.mount.names import MAX_BYTES, file_name, object_name, without_id

__all__ = ["MountOperations"]

logger = logging.getLogger("cachedfs.mount")
_EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EROFS,
    errno.EILSEQ,  # a name that is not UTF-8
}  # fmt: skip
_BLOCK = 4096  # of statfs; sizes in it are not limits
_MANY = 1 << 16  # versions remembered
_DOCUMENT_S = 10.0


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn every exception into OSError with an errno, and log those that programs do not expect."""

    @functools.wraps(method)
    def call(self: MountOperations, path: str | None, *args: Any) -> Any:
        try:
            return method(self, path, *args)
        except Exception as error:  # of any kind: the kernel takes nothing but an errno
            code = getattr(error, "errno", None) or (
                errno.EILSEQ if isinstance(error, UnicodeError) else errno.EIO
            )
            if code not in _EXPECTED:
                logger.error("%s of %s: %s", method.__name__, path, error or type(error).__name__)
            raise OSError(code, os.strerror(code)) from error

    return call


class _Handle(NamedTuple):
    """An open file. bytes: those of an object without a known size, such as a Google document."""

    file: CachedFile | LocalFile | bytes
    is_writing: bool = False
    opener: int = 0  # process id


class MountOperations:
    """A folder of a filesystem as a mounted file system. Threads may call it at once.

    Files are read as `fs.open` reads them. Files open for writing are local until they are closed or synced, and are
    then sent as a whole. `caller` returns the process that makes the current call.
    """

    use_ns = True  # times are integers, in nanoseconds

    def __init__(
        self,
        fs: CachedFileSystem,
        root: str,
        *,
        is_writable: bool,
        uid: int | None = None,
        gid: int | None = None,
        caller: Callable[[], int] = os.getpid,
        on_mounted: Callable[[], object] = lambda: None,
    ) -> None:
        """Create them for the folder `root`; all files belong to `uid` and `gid`, by default those of this process."""
        self._fs, self._root, self._is_writable, self._caller = fs, root.rstrip("/"), is_writable, caller
        self._has_ids = fs.target_protocol == "drive"  # where several items may have one name
        self._on_mounted = on_mounted
        self._owner = {
            "st_uid": os.getuid() if uid is None else uid,
            "st_gid": os.getgid() if gid is None else gid,
        }
        self._began_ns = time.time_ns()
        self._lock = RLock()
        self._numbers = count(1)
        self._handles: dict[int, _Handle] = {}
        self._local_files = LocalFiles(fs)
        self._documents: dict[str, tuple[bytes, float]] = {}  # with the time when each expires
        self._listings = FolderListings(fs, self._began_ns)
        self._folders: set[str] = set()  # made here, and empty: object stores have no empty folders
        # Fingerprint of the version whose pages the kernel may hold, and how many handles are open, by path.
        self._versions: dict[str, tuple[str | None, int]] = {}

    def init(self, path: str) -> None:
        self._on_mounted()

    # Metadata.

    @_reported
    def getattr(self, path: str | None, fi: Any = None) -> dict[str, Any]:
        if path is None:  # the file was deleted while it was open
            file = self._handles[fi.fh].file
            if isinstance(file, LocalFile):
                about = file.stat()
                return self._attributes(about.st_size, about.st_mtime_ns)
            return self._attributes(len(file) if isinstance(file, bytes) else file.size, self._began_ns)
        name = self._object(path)
        if (local := self._local_files.stat(name)) is not None:
            return self._attributes(local.st_size, local.st_mtime_ns)
        if path == "/" or name in self._folders:
            return self._attributes(None, self._began_ns)
        if (known := self._from_listing(path, name)) is not None:
            return self._attributes(*known)
        info = self._fs.info(name)
        mtime_ns = mtime_ns_of(info, self._began_ns)
        if info["type"] == "directory":
            return self._attributes(None, mtime_ns)
        size = info["size"]
        if size is None:
            try:
                size = len(self._document(name))
            except (NotDownloadable, FileNotFoundError) as error:  # a shortcut without its target
                logger.warning("%s", error)
                size = 0
        return self._attributes(size, mtime_ns)

    def _document(self, name: str) -> bytes:
        """Return an object without a known size, such as a Google document. It is kept a while: `open` follows `stat`."""
        now = time.monotonic()
        with self._lock:
            self._documents = {path: kept for path, kept in self._documents.items() if kept[1] > now}
            if name in self._documents:
                return self._documents[name][0]
        data = self._fs.cat_file(name)
        with self._lock:
            self._documents[name] = data, now + _DOCUMENT_S
        return data

    def _attributes(self, size: int | None, mtime_ns: int) -> dict[str, Any]:
        """Return the attributes of a file with `size` bytes, or of a folder if that is None."""
        kind = stat.S_IFDIR | 0o555 if size is None else stat.S_IFREG | 0o444
        return {
            **self._owner,
            "st_mode": kind | 0o200 if self._is_writable else kind,
            "st_nlink": 1,  # `find` then does not take a folder's number of links for that of its folders
            "st_size": size or 0,
            "st_blocks": -(-(size or 0) // 512),
            "st_mtime": mtime_ns,
            "st_ctime": mtime_ns,
            "st_atime": mtime_ns,
        }

    @_reported
    def readdir(self, path: str, fh: Any) -> Iterator[tuple[str, dict[str, int], int]]:
        folder = self._object(path)
        try:
            files = self._listings.of(folder)
        except FileNotFoundError:
            if folder not in self._folders and folder != self._root:
                raise
            files = {}
        modes: dict[str, int] = {".": stat.S_IFDIR, "..": stat.S_IFDIR}
        for name, known in files.items():
            modes[name] = stat.S_IFDIR if known is not None and known[0] is None else stat.S_IFREG
        for other, mode in self._local_names():
            above, _, name = other.rpartition("/")
            if above == folder:
                modes.setdefault(file_name(name), mode)
        return ((name, {"st_mode": mode}, 0) for name, mode in modes.items())

    def _from_listing(self, path: str, name: str) -> tuple[int | None, int] | None:
        """Return size and mtime_ns of a file that was listed, and not opened: the opened version may be newer."""
        files = None if name in self._versions else self._listings.current(name.rpartition("/")[0])
        return None if files is None else files.get(path.rpartition("/")[2])

    def _local_names(self) -> list[tuple[str, int]]:
        """Return the paths that the origin may not have yet, with the types of their files."""
        with self._lock:
            folders = [(path, stat.S_IFDIR) for path in self._folders]
        return [*((path, stat.S_IFREG) for path in self._local_files.paths()), *folders]

    def statfs(self, path: str) -> dict[str, int]:
        return {
            "f_bsize": _BLOCK,
            "f_frsize": _BLOCK,
            "f_blocks": 1 << 40,
            "f_bfree": 1 << 40,
            "f_bavail": 1 << 40,
            "f_namemax": MAX_BYTES,
        }

    # Files.

    @_reported
    def open(self, path: str, fi: Any) -> int:
        name = self._object(path)
        if (listed := self._from_listing(path, name)) is not None:
            self._must_have_size(name, listed[0])
        if fi.flags & os.O_ACCMODE != os.O_RDONLY or name in self._local_files:
            return self._open_local(name, fi, is_new=bool(fi.flags & os.O_TRUNC))
        if self._fs.size(name) is None:
            fi.direct_io = 1  # another export may have another size
            self._add(fi, _Handle(self._document(name)))
            return 0
        file = self._fs.open(name)
        with self._lock:
            self._add(fi, _Handle(file))
            self._keep_pages(fi, name, file._object().fingerprint)
        return 0

    def _must_have_size(self, name: str, size: int | None) -> None:
        """Raise ESTALE if a file has another size than the kernel knows: another process has asked for it since.

        Linux then asks for the attributes and opens the file again, unseen by the program.
        """
        with suppress(FileNotFoundError):
            if self._fs.size(name) == size:
                return
        self._versions.setdefault(name, (None, 0))  # so that `getattr` does not take the listing's word
        raise OSError(errno.ESTALE, "it changed since its folder was listed; Linux opens it again by itself")

    def _keep_pages(self, fi: Any, name: str, version: str | None) -> None:
        """Have the kernel keep the pages of this version, or forget those of another.

        While a file of another version is open, this one is read without the kernel's cache, which has one set of pages.
        """
        known, n_open = self._versions.pop(name, (None, 0))
        if n_open and known != version:
            fi.direct_io = 1
        else:
            fi.keep_cache = version is not None and known == version
            known = version
        self._versions[name] = (known, n_open + 1)
        if len(self._versions) > _MANY:
            self._versions = {path: kept for path, kept in self._versions.items() if kept[1]}

    @_reported
    def create(self, path: str, mode: int, fi: Any) -> int:
        return self._open_local(self._object(path), fi, is_new=True)

    def _open_local(self, name: str, fi: Any, *, is_new: bool) -> int:
        local = self._local_file(name, is_new=is_new)
        with self._lock:
            is_writing = fi.flags & os.O_ACCMODE != os.O_RDONLY
            self._add(fi, _Handle(local, is_writing, self._caller() if is_writing else 0))
            # The kernel has one set of pages for all handles of a path.
            _, n_reading = self._versions.get(name, (None, 0))
            fi.direct_io = n_reading > 0
        return 0

    def _local_file(self, name: str, *, is_new: bool) -> LocalFile:
        with suppress(FileNotFoundError):
            if name not in self._local_files and self._fs.size(name) is None and self._fs.isfile(name):
                raise OSError(errno.ENOTSUP, "it is no file that can be written, as Google documents are not")
        return self._local_files.open(name, is_new=is_new)

    def _add(self, fi: Any, handle: _Handle) -> None:
        fi.fh = next(self._numbers)
        self._handles[fi.fh] = handle

    @_reported
    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        file = self._handles[fi.fh].file
        if isinstance(file, LocalFile):
            return file.read(size, offset)
        if isinstance(file, bytes):
            return file[offset : offset + size]
        file.seek(offset)
        return file.read(size)

    @_reported
    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        return self._writable(fi).write(data, offset)

    @_reported
    def truncate(self, path: str, size: int) -> int:
        local = self._local_file(self._object(path), is_new=not size)
        try:
            local.truncate(size)
            if local.n_open == 1:  # no file is open that would send it
                local.send()
                self._changed(path)
        finally:
            self._local_files.leave(local)
        return 0

    @_reported
    def flush(self, path: str | None, fi: Any) -> int:
        """Send what was written; called by each `close`, which returns the error.

        A shell closes a descriptor before it writes to another of the same file, and a child process closes those that it
        inherits: neither means that the file is complete. What is left is sent by `release`, after the last `close`.
        """
        handle = self._handles[fi.fh]
        is_written = isinstance(handle.file, LocalFile) and handle.file.state in (State.WRITTEN, State.FAILED)
        if is_written and handle.opener == self._caller():
            self._send(path, handle)
        return 0

    @_reported
    def fsync(self, path: str | None, datasync: int, fi: Any) -> int:
        self._send(path, self._handles[fi.fh])
        return 0

    def _send(self, path: str | None, handle: _Handle) -> None:
        if isinstance(handle.file, LocalFile) and handle.is_writing:
            handle.file.send()
            self._changed(path)

    @_reported
    def release(self, path: str, fi: Any) -> int:
        file, *_ = self._handles.pop(fi.fh)
        if isinstance(file, LocalFile):
            self._local_files.leave(file)
        elif not isinstance(file, bytes):
            file.close()
            with self._lock:
                known, n_open = self._versions.get(file.path, (None, 0))
                if n_open:
                    self._versions[file.path] = known, n_open - 1
        return 0

    def _writable(self, fi: Any) -> LocalFile:
        file, is_writing, _ = self._handles[fi.fh]
        if not isinstance(file, LocalFile) or not is_writing:
            raise OSError(errno.EBADF, "the file is not open for writing")
        return file

    def end(self) -> None:
        """Log which files were still open, and not sent."""
        self._local_files.report_unsent()

    # Names.

    @_reported
    def mkdir(self, path: str, mode: int) -> int:
        name = self._object(path)
        self._fs.mkdir(name)
        self._keep_folder(name)
        return 0

    def _keep_folder(self, name: str) -> None:
        """Keep an empty folder in this mount if the origin has none: object stores have only folders with objects."""
        if name != self._root and not self._fs.exists(name):
            with self._lock:
                self._folders.add(name)

    @_reported
    def rmdir(self, path: str) -> int:
        name = self._object(path)
        self._fs.invalidate_cache(name)
        if len(list(self.readdir(path, None))) > len((".", "..")):
            raise OSError(errno.ENOTEMPTY, path)
        with self._lock:
            self._folders.discard(name)
        if self._fs.exists(name):
            self._fs.rmdir(name)
            # An object store's placeholder for a folder; at Drive it would be another folder of this name.
            if not self._has_ids and self._fs.exists(name):
                # An object that no file can show, such as one named as the folder and a slash, has bytes.
                if self._fs.find(name):
                    raise OSError(errno.ENOTEMPTY, path)
                self._fs.rm(name, recursive=True)
        self._changed(path)
        return 0

    @_reported
    def unlink(self, path: str) -> int:
        name = self._object(path)
        if not self._local_files.remove(name) or self._fs.exists(name):
            self._fs.rm_file(name)
        self._changed(path)
        self._keep_folder(self._object(_folder_of(path)))
        return 0

    @_reported
    def rename(self, old: str, new: str) -> int:
        source, target = self._object(old), self._object(new)
        with self._local_files.renamed(source, target):
            with self._lock:
                is_local = source in self._folders
            is_folder = is_local or self._fs.isdir(source)
            if is_folder and (target in self._folders or self._fs.exists(target)):
                self.rmdir(new)  # fsspec would move the folder into it
            if not is_local or self._fs.exists(source):
                self._fs.mv(source, target, recursive=is_folder)
                self._changed(old)
                self._keep_folder(self._object(_folder_of(old)))
            with self._lock:
                self._folders = {moved(folder, source, target) for folder in self._folders}
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Ignore it: objects have no mode. An error would stop `cp -p`, `tar` and `rsync`."""
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def _object(self, path: str) -> str:
        """Return the object's path for a path below the mount."""
        found = self._root
        for name in filter(None, path.split("/")):
            found = self._in_folder(found, object_name(name))
        return found

    def _in_folder(self, folder: str, name: str) -> str:
        """Return the path of the object with this name in a folder: that of its id, if the name has the id."""
        path = _join(folder, name)
        parts = without_id(name) if self._has_ids else None
        if parts is None:
            return path
        with suppress(FileNotFoundError):
            # The item that counts as well: it was another one a moment ago.
            info = self._fs.info(_join(folder, parts[0]))
            if parts[1] in (info.get("id"), info.get("shortcut"), *info.get("same_name", ())):
                return f"id:{parts[1]}"
        return path

    def _changed(self, path: str | None) -> None:
        """Forget which items have the name of one that was changed by its id."""
        folder, name = _folder_of(path or ""), object_name((path or "").rpartition("/")[2])
        if self._has_ids and (parts := without_id(name)) is not None:
            self._fs.invalidate_cache(_join(self._object(folder), parts[0]))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]
