"""System calls of the cache package that take more than one line: flags, retries, errors that mean "missing".

Other modules of the package call `disk.allocate(...)` and `os.rename(...)`, and never import a function by its name, so
that tests can replace each call in the whole package. Only SQLite makes its own system calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cachedfs.common.buffer import zeros

Buffer = bytes | bytearray | memoryview

# O_NONBLOCK: opening a FIFO in place of a block must not hang.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UPDATE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = _UPDATE | os.O_CREAT | os.O_EXCL
TOO_MANY_FILES = errno.EMFILE, errno.ENFILE
_MOST_BUFFERS = 1024  # of one pwritev: IOV_MAX of Linux and macOS
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_NO_NOWAIT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # errors of filesystems without RWF_NOWAIT
_NETWORK_TYPES = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "panfs", "smb3", "smbfs", "virtiofs",
}  # fmt: skip
_TYPES_WITHOUT_COPIES = {"ext2", "ext3", "ext4", "ramfs", "tmpfs"}  # they write a page where it is
_LOCAL_TYPES = _TYPES_WITHOUT_COPIES | {"bcachefs", "btrfs", "f2fs", "jfs", "overlay", "xfs", "zfs"}


class DiskSpace(NamedTuple):
    """Bytes of a filesystem: its size, and what this user may still use. `inodes`: how many files it may still make."""

    total: int
    free: int
    inodes: float = math.inf


class FolderEntry(NamedTuple):
    """One entry of a folder; `inode`, `size` and `modified_s` are those of a symlink itself, not its target."""

    name: str
    path: str
    is_folder: bool
    inode: int
    size: int
    modified_s: float


def open_to_update(path: str) -> int:
    """Open a file of records for random access, without the readahead of the system around each record."""
    fd = os.open(path, _UPDATE)
    _advise(fd, "POSIX_FADV_RANDOM")
    return fd


def _advise(fd: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a filesystem without support for the advice
            os.posix_fadvise(fd, 0, 0, getattr(os, advice))


def open_lockable(path: str) -> int:
    return _ours_alone(os.open(path, _UPDATE | os.O_CREAT, 0o600))


def create(path: str) -> int:
    return _ours_alone(os.open(path, _CREATE, 0o600))


def _ours_alone(fd: int) -> int:
    """Set the mode to 0600, whatever the umask removed."""
    try:
        os.fchmod(fd, 0o600)
    except BaseException:  # no other code would close the descriptor
        os.close(fd)
        raise
    return fd


def expire_pages(fd: int) -> None:
    """Remove the file's clean pages from the page cache, so that the next reads come from disk, where supported."""
    _advise(fd, "POSIX_FADV_DONTNEED")


def read_cached_into(fd: int, buffer: bytearray | memoryview, offset: int) -> int:
    """Fill `buffer` from the page cache only. Raises BlockingIOError if the bytes are not all there."""
    n = -1
    if _NOWAIT is not None:
        try:
            n = os.preadv(fd, [buffer], offset, _NOWAIT)
        except OSError as error:
            if error.errno not in _NO_NOWAIT:
                raise
    if n != len(buffer):
        raise BlockingIOError(errno.EAGAIN, "not all of it can be read from the page cache")
    return n


def read_cached(fd: int, size: int, offset: int) -> bytes:
    """Return bytes from the page cache only. Raises BlockingIOError if they are not all there."""
    filled = zeros(size)
    with filled.getbuffer() as buffer:
        read_cached_into(fd, buffer, offset)
    return filled.getvalue()


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all `buffers` from `offset` on, or raise."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        done = os.pwritev(fd, views[:_MOST_BUFFERS], offset)
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


def write_file(path: str, buffers: Sequence[Buffer], size: int) -> None:
    """Create a file with the `size` bytes of all `buffers` and mode 0600; after an error, a part of it may be there."""
    fd = os.open(path, _CREATE, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask removed
        if len(buffers) > _MOST_BUFFERS or os.pwritev(fd, buffers, 0) != size:
            write_all(fd, buffers, 0)
    finally:
        os.close(fd)


def allocate(fd: int, size: int) -> None:
    """Allocate disk space for `size` bytes, so that writing these bytes cannot hit a full disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    have = os.fstat(fd).st_size  # macOS: written bytes have disk space
    if have < size:
        write_all(fd, [bytes(size - have)], have)


def memory_file(header: bytes, size: int) -> int:
    """Return the descriptor of a file in memory, or without a name, shared with forked children. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cachedfs", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, header, 0)
    except BaseException:  # an interrupt too: no other code would close the descriptor
        os.close(fd)
        raise
    return fd


def truncate(fd: int) -> None:
    os.ftruncate(fd, 0)


def unlink(path: str) -> bool:
    """Remove a file; False if it does not exist."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def empty(path: str) -> None:
    """Remove the bytes of a file, so that whoever has it open finds none. Never raises."""
    with contextlib.suppress(OSError):  # a symlink, a folder, or a disk that is read-only now
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_nlink == 1:  # another name may be that of somebody's copy
                truncate(fd)
        finally:
            os.close(fd)


def make_folder(path: str) -> None:
    """Create a folder with mode 0700, whatever the umask; do nothing if the name exists already."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    if os.lstat(path).st_mode & 0o700 != 0o700:
        os.chmod(path, 0o700)


def scan(folder: str) -> Iterator[FolderEntry]:
    """Yield the entries of `folder`, in no order; skip vanished entries. A missing folder is empty."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            yield FolderEntry(
                entry.name, entry.path, is_folder, status.st_ino, status.st_size, status.st_mtime
            )


def state(path: str) -> os.stat_result | None:
    """Return the status of `path` itself, without following a symlink; None if it does not exist."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(path: str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def space(path: str) -> DiskSpace:
    found = os.statvfs(path)
    inodes = found.f_favail if found.f_files else math.inf  # btrfs and others make them as needed
    return DiskSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, inodes)


def is_network(path: str) -> bool:
    """Return whether `path` (it need not exist) is on a network or FUSE filesystem. Linux only; else False."""
    return _filesystem_type(path) in _NETWORK_TYPES


def is_local(path: str) -> bool:
    """Return whether `path` (it need not exist) is known to be on a disk of this machine, which always answers."""
    return _filesystem_type(path) in _LOCAL_TYPES


def maps_safely(path: str) -> bool:
    """Return whether a mapped file below `path`, with its space allocated, can be written when the disk is full.

    Elsewhere (btrfs, an overlay that may be on it, reflinked files of XFS, FUSE) the kernel may end a process that
    writes to a mapped page. True on other systems than Linux.
    """
    return not sys.platform.startswith("linux") or _filesystem_type(path) in _TYPES_WITHOUT_COPIES


def _filesystem_type(path: str) -> str | None:
    """Return the type of the filesystem of `path`; None if it is unknown, as on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return None
    return _type_of_mount(os.path.realpath(path), lines)


def _type_of_mount(path: str, lines: Sequence[str]) -> str:
    """Return the filesystem type of the innermost mount above `path`; "fuse" for every FUSE type except fuseblk."""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape")
        if len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, after.split(" ")[0]
    return "fuse" if kind.startswith("fuse.") else kind


def lock_holder(fd: int, offset: int) -> int | None:
    """Return the id of the other process that locked one byte of a file; None if there is none, or it is unknown."""
    on_mac = sys.platform == "darwin"  # the same fields of `struct flock`, in another order
    layout = struct.Struct("qqihh" if on_mac else "hhqqi4x")
    place = (offset, 1)
    asked = (*place, 0, fcntl.F_WRLCK, os.SEEK_SET) if on_mac else (fcntl.F_WRLCK, os.SEEK_SET, *place, 0)
    try:
        found = layout.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, layout.pack(*asked)))
    except OSError:
        return None
    kind, pid = (found[3], found[2]) if on_mac else (found[0], found[4])
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def is_alive(pid: int) -> bool:
    """Return whether a process with this id exists, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
