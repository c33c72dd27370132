"""Every system call of this room, and nothing else: the seam where tests inject faults and kills.

The other modules call `disk.rename(...)`, never a name imported from here, so that replacing one attribute
of this module replaces the call for the whole room. Only SQLite makes its own system calls. No function
here decides anything: errors pass through as the OSError they are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Buffer",
    "FolderEntry",
    "DiskSpace",
    "Status",
    "absolute",
    "allocate",
    "close",
    "create",
    "exists",
    "file_limit",
    "host_name",
    "is_alive",
    "is_network",
    "on_fork",
    "link",
    "lock_byte",
    "make_folder",
    "make_folders",
    "make_read_only",
    "map_file",
    "map_private",
    "nonce",
    "open_lockable",
    "open_mappable",
    "open_to_read",
    "pause",
    "process_id",
    "read",
    "read_cached",
    "read_cached_into",
    "read_into",
    "remove_tree",
    "rename",
    "scan",
    "size_of",
    "space",
    "state",
    "state_of_open",
    "unlink",
    "unlock_byte",
    "user_id",
    "writable",
    "write_all",
]

Buffer = bytes | bytearray | memoryview
Status = os.stat_result

# O_NONBLOCK: a fifo in place of a block must not hang us.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UPDATE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = _UPDATE | os.O_CREAT | os.O_EXCL
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_NO_NOWAIT = {
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOSYS,
}  # how file systems say that they do not know the flag
_NETWORK_TYPES = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "panfs", "smb3", "smbfs", "virtiofs",
}  # fmt: skip


class DiskSpace(NamedTuple):
    """Bytes of one file system: all of them, and those that we may still use."""

    total: int
    free: int


class FolderEntry(NamedTuple):
    """One entry of a folder; `inode`, `size` and `modified_s` are the entry's own, symlinks not followed."""

    name: str
    path: str
    is_folder: bool
    inode: int
    size: int
    modified_s: float


# Bytes of files


def open_to_read(path: str) -> int:
    return os.open(path, _READ)


def open_mappable(path: str) -> int:
    return os.open(path, _UPDATE)


def open_lockable(path: str) -> int:
    return _ours_alone(os.open(path, _UPDATE | os.O_CREAT, 0o600))


def create(path: str) -> int:
    return _ours_alone(os.open(path, _CREATE, 0o600))


def _ours_alone(fd: int) -> int:
    """Give a file the rights that it is made with, whatever the umask took of them."""
    try:
        os.fchmod(fd, 0o600)
    except BaseException:  # nobody else knows of the descriptor, whatever it was that failed
        os.close(fd)
        raise
    return fd


def close(fd: int) -> None:
    os.close(fd)


def read(fd: int, size: int, offset: int) -> bytes:
    return os.pread(fd, size, offset)


def read_into(fd: int, buffer: bytearray | memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def forget_cached(fd: int) -> None:
    """Let the next reads come from the disk itself, where the system can be told so and nothing is still to be written."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a file system that knows no such advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_cached_into(fd: int, buffer: bytearray | memoryview, offset: int) -> int:
    """Like `read_into`, from the page cache alone: BlockingIOError when the disk would have to be asked."""
    if _NOWAIT is None:
        raise BlockingIOError(errno.EAGAIN, "this system cannot read from the page cache alone")
    try:
        return os.preadv(fd, [buffer], offset, _NOWAIT)
    except OSError as error:
        if error.errno in _NO_NOWAIT:
            raise BlockingIOError(
                errno.EAGAIN, "this file system cannot read from the page cache alone"
            ) from error
        raise


def read_cached(fd: int, size: int, offset: int) -> bytes:
    """Like `read`, from the page cache alone; see `read_cached_into`."""
    # A BytesIO gives its bytes away as they are: a copy of a block would be as much again of memory that is new.
    filled = io.BytesIO(bytes(size))
    with filled.getbuffer() as buffer:
        n = read_cached_into(fd, buffer, offset)
    data = filled.getvalue()
    return data if n == size else data[:n]


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all of `buffers` from `offset` on, or raise."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        done = os.pwritev(fd, views, offset)
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


def allocate(fd: int, size: int) -> None:
    """Give the file real room for `size` bytes, so that writing to a mapping of it cannot hit a full disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    have = os.fstat(fd).st_size  # macOS: bytes that were written have their room
    if have < size:
        write_all(fd, [bytes(size - have)], have)


def map_file(fd: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED)
    # Records lie anywhere: what a system reads ahead around one, megabytes on some, takes milliseconds and is no use.
    with contextlib.suppress(OSError):  # a system that takes no advice
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def map_private(size: int) -> mmap.mmap:
    """Return zeroed memory without a file; processes forked from this one share it."""
    return mmap.mmap(-1, size)


# Names


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def link(source: str, target: str) -> None:
    os.link(source, target)


def unlink(path: str) -> bool:
    """Remove a file; False when there was none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def make_folder(path: str) -> bool:
    """Make one folder that only we may enter, whatever the umask; False when something of that name is there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    if os.lstat(path).st_mode & 0o700 != 0o700:
        os.chmod(path, 0o700)
    return True


def make_folders(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def remove_tree(path: str) -> None:
    """Remove a folder with all that is in it, symlinks not followed."""
    shutil.rmtree(path)


def make_read_only(path: str) -> None:
    os.chmod(path, 0o400)


def absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def scan(folder: str) -> Iterator[FolderEntry]:
    """Yield what is in `folder`, in no order; what vanishes meanwhile is left out, a missing folder is empty."""
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


# What is there


def exists(path: str) -> bool:
    return os.path.exists(path)


def writable(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def state(path: str) -> Status | None:
    """Return the state of `path` itself, symlinks not followed; None when there is nothing."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def state_of_open(fd: int) -> Status:
    return os.fstat(fd)


def size_of(path: str) -> int:
    """Return the size of a file, 0 when there is none."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def space(path: str) -> DiskSpace:
    found = os.statvfs(path)
    return DiskSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def is_network(path: str) -> bool:
    """Return whether `path` (it need not exist yet) is on a network or FUSE file system. Linux only; else False."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return False
    return _type_of_mount(os.path.realpath(path), lines) in _NETWORK_TYPES


def _type_of_mount(path: str, lines: Sequence[str]) -> str:
    """Return the file system type of the innermost mount above `path`: "fuse" for every FUSE but block devices."""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape")
        if len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, after.split(" ")[0]
    return "fuse" if kind.startswith("fuse.") else kind


# Locks of the kernel


def lock_byte(fd: int, offset: int) -> bool:
    """Take the write lock on one byte of the file; False when another process holds it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(fd: int, offset: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)


# The process


def process_id() -> int:
    return os.getpid()


def is_alive(pid: int) -> bool:
    """Return whether there is a process of this number, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def user_id() -> int:
    """Return the user who owns what this process makes."""
    return os.geteuid()


def host_name() -> str:
    return os.uname().nodename


def nonce() -> int:
    """Return 64 random bits."""
    return int.from_bytes(os.urandom(8), "little")


def file_limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def pause(seconds: float) -> None:
    time.sleep(seconds)


def on_fork(
    before: Callable[[], None], after_in_parent: Callable[[], None], after_in_child: Callable[[], None]
) -> None:
    """Have the three called around every fork of this process."""
    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
