"""The kernel's calls on a mounted folder, as calls of the filesystem and of local copies of written files.

Each method raises OSError with an errno, which is what the program sees. What the errno cannot say goes to the log.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from cachedfs.common.clock import clock
from cachedfs.common.urls import GCS_PROTOCOLS, LOCAL_PROTOCOLS, folder_of
from cachedfs.errors import NotDownloadable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.folder_listings import (
    FOLDER,
    ExportedSize,
    Files,
    FolderListings,
    Metadata,
    metadata_of,
    mtime_ns_of,
)
from cachedfs.mount.fuse_protocol import ROOT, Attributes, DirEntry, NameEntry, Opened, Space
from cachedfs.mount.inodes import Inode, InodeTable
from cachedfs.mount.local_file import State
from cachedfs.mount.names import MAX_BYTES, file_name, moved, object_name, without_id
from cachedfs.mount.open_files import OpenFiles
from cachedfs.mount.reported_errors import reported
from cachedfs.mount.written_files import WrittenFiles

logger = logging.getLogger("cachedfs.mount")

_KEPT_S = 1.0  # for which the kernel keeps names; less if `max_age` is
_KEPT_S_A_NAME = 1e-4  # more in a listed folder: `find` reads all names before it asks for the first
_LONG_S = 3600.0  # for which it keeps the attributes of a version, which never change
_UNLIMITED = Space(1 << 52, 1 << 52)
_SPACE_S = 0.5  # for which `df` waits for the account's quota
_SPACE_KEPT_S = 60.0  # for which a quota is used
_NO_REPLACE, _EXCHANGE, _WHITEOUT = 1, 2, 4  # flags of renameat2


class _OpenFolder(NamedTuple):
    """An open folder: its path, its listing if the filesystem has one, and the names in it."""

    path: str
    files: Files | None
    names: list[tuple[str, Metadata | None]]


class MountOperations:
    """The calls that the kernel makes for a mounted folder of a filesystem. Thread-safe.

    A method raises OSError with the errno that the program gets. Inodes have numbers; that of the mounted folder is 1.
    `forget` says that the kernel drops some. `thread` is the one that makes the call, 0 if unknown.
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
    ) -> None:
        """Create them for the folder `root`; all files belong to `uid` and `gid`, by default those of this process.

        Local copies of written files are in the folder `temporary`, by default that of temporary files.
        """
        self._fs, self._root = fs, root.rstrip("/")
        self._has_ids = fs.target_protocol == "drive"  # where several items may have one name
        self._keeps_folders = self._has_ids or fs.target_protocol in LOCAL_PROTOCOLS  # also empty ones
        self._write_bit = 0o200 if is_writable else 0
        self._uid, self._gid = os.getuid() if uid is None else uid, os.getgid() if gid is None else gid
        self._kept_s = min(_KEPT_S, fs.config.lifetime_s)
        self._open_folders: dict[int, _OpenFolder] = {}  # by handle
        self._inodes = InodeTable(self._root)
        self._lock = self._inodes.lock
        self.written = WrittenFiles(fs, self._inodes, temporary=temporary, kept_s=self._kept_s)
        self.files = OpenFiles(fs, self._inodes, self.written)
        self._listings = FolderListings(fs)
        # Folders shown though the origin may have none: object stores have only folders with objects.
        self._kept_folders: set[str] = set()
        self._space = _UNLIMITED
        self._asking_space: Thread | None = None
        self._asked_space_at = -math.inf

    # Metadata.

    @reported
    def lookup(self, parent: int, name: str) -> NameEntry:
        path = self._path(parent, name)
        with self._lock:
            inode = self._inodes.current(path)
            if inode is not None and inode.local is not None and inode.local.is_being_written:
                return self._entry(self._inodes.count_lookup(inode))
        return self._entry(self._inodes.lookup(path, *self._metadata(path, name)))

    def _metadata(self, path: str, name: str) -> Metadata:
        if path in self._kept_folders:
            return FOLDER
        files = None if self._inodes.is_retired(path) else self._listings.current(folder_of(path))
        listed, inode = files and files.get(name), self._inodes.current(path)
        if listed and (inode is None or inode.version == listed.version):
            return listed  # unless the file was opened since, as another version
        if self._inodes.is_retired(path):
            # The file is opened next, and may be replaced again before. A folder raises an error, and is looked up below.
            with suppress(OSError), self._fs.open(path) as file:
                file.peek(1)
        info = self._fs._object(path)
        if (known := metadata_of(info)) is not None:
            return known
        size = 0
        try:
            size = len(self.files.document(path))
        except (NotDownloadable, FileNotFoundError) as error:  # a shortcut without its target
            logger.warning("%s", error)
        return Metadata(size, mtime_ns_of(info.details), ExportedSize(info.fingerprint, size))

    def forget(self, number: int, n_lookups: int) -> None:
        self._inodes.forget(number, n_lookups)

    @reported
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

    @reported
    def setattr(self, number: int, *, size: int | None, mtime_ns: int | None) -> Attributes:
        """Set the size or the time. Objects have no mode and no owner; an error would stop `cp -p`, `tar` and `rsync`."""
        inode = self._inodes[number]
        if size is not None:
            self.written.truncate(inode, size)
        if mtime_ns is not None and inode.local is not None and inode.local.state is not State.SENT:
            inode.local.mtime_ns = mtime_ns // 1_000_000 * 1_000_000
        return self._attributes(inode)

    @reported
    def opendir(self, number: int) -> int:
        path = self._inodes[number].path
        files = self._in_folder(path)
        handle = self.files.next_number()
        self._open_folders[handle] = _OpenFolder(
            path, self._listings.current(path), [(".", None), ("..", None), *files.items()]
        )
        return handle

    def _in_folder(self, folder: str) -> Files:
        """Return what is in a folder, by file name."""
        try:
            files = self._listings.of(folder)
        except FileNotFoundError:
            if folder not in self._kept_folders and folder != self._root:
                raise
            files = {}
        more: dict[str, Metadata | None] = dict.fromkeys(local.path for local in self.written.local_copies())
        with self._lock:
            more.update(dict.fromkeys(self._kept_folders, FOLDER))
        below = {path.rpartition("/")[2]: known for path, known in more.items() if folder_of(path) == folder}
        return {**{file_name(name): known for name, known in below.items()}, **files} if below else files

    def readdir(self, handle: int, start: int, *, is_plus: bool) -> Iterator[DirEntry]:
        """Yield the names of an open folder from number `start` on; with `is_plus`, with their inodes."""
        folder, files, names = self._open_folders[handle]
        # After a change, a listed size may be wrong, or the file gone: then the kernel looks each name up.
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
                    entry = NameEntry(self._attributes(self._inodes.lookup(path, *known)), kept_s)
            yield DirEntry(os.fsencode(name), mode, entry)

    def releasedir(self, handle: int) -> None:
        del self._open_folders[handle]

    @reported
    def statfs(self) -> Space:
        with self._lock:
            is_asking = self._asking_space is not None and self._asking_space.is_alive()
            if not is_asking and not 0 <= clock.now() - self._asked_space_at < _SPACE_KEPT_S:
                self._asked_space_at = clock.now()
                self._asking_space = Thread(target=self._ask_space, name="cachedfs-space", daemon=True)
                self._asking_space.start()
            asking = self._asking_space
        if asking is not None:
            asking.join(_SPACE_S)
        return self._space

    def _ask_space(self) -> None:
        with suppress(Exception):  # whatever is wrong, a read or a write will say it
            origin = self._fs._objects.origin(self._root)
            quota = self._fs._run(origin.storage_quota(self._root.partition("/")[0]))
            self._space = _UNLIMITED if quota is None else Space(*quota)

    # Files; see also `OpenFiles`.

    @reported
    def create(self, parent: int, name: str, flags: int, thread: int) -> tuple[NameEntry, Opened]:
        inode, opened = self.files.create(self._path(parent, name), flags, thread)
        return self._entry(inode), opened

    # Names.

    @reported
    def mkdir(self, parent: int, name: str) -> NameEntry:
        path = self._path(parent, name)
        self._fs.mkdir(path)
        self._keep_folder(path)
        return self.lookup(parent, name)  # type: ignore[no-any-return]  # of a decorated method

    def _keep_folder(self, path: str) -> None:
        """Show a folder and those above it from now on, though the origin may have none that are empty."""
        while path != self._root and not self._keeps_folders:
            with self._lock:
                self._kept_folders.add(path)
            path = folder_of(path)

    @reported
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
            self._kept_folders.discard(path)

    @reported
    def unlink(self, parent: int, name: str) -> None:
        path = self._path(parent, name)
        with self.written.removing(path) as is_local:
            if not is_local or self._fs.exists(path):
                self._fs.rm_file(path)
        self._changed(parent, name)
        self._keep_folder(self._inodes[parent].path)

    @reported
    def rename(self, parent: int, name: str, new_parent: int, new_name: str, flags: int) -> None:
        source, target = self._path(parent, name), self._path(new_parent, new_name)
        if flags & (_EXCHANGE | _WHITEOUT):
            raise OSError(errno.EINVAL, "two objects cannot be exchanged in one step")
        if flags & _NO_REPLACE and (target in self._kept_folders or self.written.latest(target) is not None):
            raise OSError(errno.EEXIST, target)
        with self.written.renaming(source, target):
            is_local = source in self._kept_folders
            is_folder = is_local or self._fs.isdir(source)
            if is_folder and (target in self._kept_folders or self._fs.exists(target)):
                self._rmdir(target)  # fsspec would move the folder into it
            if not is_local or self._fs.exists(source):
                if is_folder or not self._has_ids or not self.written.written_into(source, target):
                    self._fs.mv(source, target, recursive=is_folder)
                self._changed(parent, name)
            with self._lock:
                self._kept_folders = {moved(folder, source, target) for folder in self._kept_folders}
        self._keep_folder(self._inodes[parent].path)

    def _subject(self, number: int = ROOT, *args: Any) -> str:
        """Return what a call is about, for messages: the path of its inode, and the name that may follow."""
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
