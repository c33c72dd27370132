"""Messages of Linux's FUSE protocol: what the kernel asks, and how it is answered.

Source: include/uapi/linux/fuse.h and Documentation/filesystems/fuse in Linux. The kernel accepts an older minor version,
so all numbers here are those of version 7.31 (Linux 5.4), which newer kernels keep to.
"""

from __future__ import annotations

import stat
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

MAX_WRITE = 128 << 10  # bytes of a write; each thread has a buffer for one
_MAX_READ = 1 << 20  # bytes; more than the kernel's default of 128 KiB takes fewer calls
_PAGE = 4096
_MAX_BACKGROUND = 512  # reads sent before the first is answered; 12, the default, would hold up all others
_VERSION = 7, 31
ROOT = 1  # number of the inode of the mounted folder


class Code(IntEnum):
    """The kinds of requests: `enum fuse_opcode`."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class KernelRequest(NamedTuple):
    """One request. `node`: the number of the inode it is about; `thread`: the thread that makes it, 0 if unknown."""

    code: int
    id: int
    node: int
    thread: int
    body: memoryview


class Attributes(NamedTuple):
    """The attributes of an inode, as `stat` shows them. `kept_s`: for how long the kernel may keep it."""

    number: int
    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    kept_s: float


class NameEntry(NamedTuple):
    """The inode that has a name. `kept_s`: for how long the kernel may keep that."""

    attributes: Attributes
    kept_s: float


class Opened(NamedTuple):
    """An open file or folder.

    `is_direct`: read it without the kernel's cache. `keeps_pages`: the pages that the kernel has of its inode are still right.
    """

    handle: int
    is_direct: bool = False
    keeps_pages: bool = False


class DirEntry(NamedTuple):
    """A name in a folder; without `entry`, the kernel looks it up when it needs it."""

    name: bytes
    mode: int
    entry: NameEntry | None = None


class Space(NamedTuple):
    """Size and free space in bytes, as `df` shows them."""

    total: int
    free: int


# Requests.

_IN = Struct("=IIQQIIIHH")
UINT64 = Struct("=Q")
FORGET_ONE = Struct("=QQ")
SETATTR = Struct("=IIQQQQQQIIIIIIII")
OPEN = Struct("=II")
CREATE = Struct("=IIII")
READ = Struct("=QQIIQII")  # also of WRITE
MKDIR = Struct("=II")
RENAME2 = Struct("=QII")
INIT = Struct("=IIII")

HAS_SIZE, HAS_MTIME, MTIME_IS_NOW = 1 << 3, 1 << 5, 1 << 8  # FATTR_* of SETATTR


def request_of(message: memoryview) -> KernelRequest:
    length, code, id, node, _, _, thread, extended, _ = _IN.unpack_from(message)
    return KernelRequest(code, id, node, thread, message[_IN.size : length - 8 * extended])


def names_of(body: memoryview) -> list[bytes]:
    """Return the names in the rest of a request, each of which ends in NUL."""
    return bytes(body).split(b"\0")[:-1]


# Answers.

_OUT = Struct("=IiQ")
_ATTRIBUTES = Struct("=QQQQQQIIIIIIIIII")
_ENTRY_AND_ATTRIBUTES = Struct("=QQQQII" + "QQQQQQIIIIIIIIII")
_VALID = Struct("=QII")
_OPENED = Struct("=QII")
_WRITTEN = Struct("=II")
_SPACE = Struct("=QQQQQIIII24x")
_INITIAL = Struct("=IIIIHHIIHHI28x")
_DIRENT = Struct("=QQII")

_DIRECT_IO, _KEEP_CACHE = 1 << 0, 1 << 1  # FOPEN_*
_ASYNC_READ, _ATOMIC_O_TRUNC, _BIG_WRITES = 1 << 0, 1 << 3, 1 << 5
_DO_READDIRPLUS, _PARALLEL_DIROPS, _MAX_PAGES = 1 << 13, 1 << 18, 1 << 22
_WANTED = _ASYNC_READ | _ATOMIC_O_TRUNC | _BIG_WRITES | _DO_READDIRPLUS | _PARALLEL_DIROPS | _MAX_PAGES


def answer(id: int, length: int, error: int = 0) -> bytes:
    """Return the header of an answer of `length` bytes; `error`: an errno."""
    return _OUT.pack(_OUT.size + length, -error, id)


def initial_reply(body: memoryview) -> bytes:
    """Return the answer to INIT; raise OSError for a kernel that is too old."""
    major, minor, readahead, flags = INIT.unpack_from(body)
    if (major, minor) < _VERSION:
        raise OSError(
            f"this kernel speaks FUSE {major}.{minor}; a mount needs {_VERSION[0]}.{_VERSION[1]}, Linux 5.4 or newer"
        )
    return _INITIAL.pack(
        *_VERSION, readahead, flags & _WANTED, _MAX_BACKGROUND, _MAX_BACKGROUND, MAX_WRITE, 1, _MAX_READ // _PAGE, 0, 0
    )  # fmt: skip


def _fields(about: Attributes) -> tuple[int, ...]:
    seconds, rest = divmod(about.mtime_ns, 1_000_000_000)
    seconds = max(0, seconds)
    return (
        about.number, about.size, -(-about.size // 512), seconds, seconds, seconds, rest, rest, rest, about.mode,
        1,  # `find` then does not take a folder's number of links for that of its folders
        about.uid, about.gid, 0, _PAGE, 0,
    )  # fmt: skip


def _parts(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e9)


def attributes_reply(about: Attributes) -> bytes:
    return _VALID.pack(*_parts(about.kept_s), 0) + _ATTRIBUTES.pack(*_fields(about))


def entry_reply(entry: NameEntry) -> bytes:
    about = entry.attributes
    (name_s, name_ns), (attr_s, attr_ns) = _parts(entry.kept_s), _parts(about.kept_s)
    return _ENTRY_AND_ATTRIBUTES.pack(about.number, 0, name_s, attr_s, name_ns, attr_ns, *_fields(about))


def opened_reply(opened: Opened) -> bytes:
    flags = _DIRECT_IO * opened.is_direct | _KEEP_CACHE * opened.keeps_pages
    return _OPENED.pack(opened.handle, flags, 0)


def written_reply(size: int) -> bytes:
    return _WRITTEN.pack(size, 0)


def space_reply(space: Space, longest_name: int) -> bytes:
    blocks, free = space.total // _PAGE, space.free // _PAGE
    return _SPACE.pack(blocks, free, free, 1 << 40, 1 << 40, _PAGE, longest_name, _PAGE, 0)


def dir_entry(entry: DirEntry, position: int) -> bytes:
    """Return a name in the answer to READDIR; `position` is where the next one begins."""
    name = entry.name
    # Unknown; 0 would hide the name.
    number = 0xFFFFFFFF if entry.entry is None else entry.entry.attributes.number
    head = _DIRENT.pack(number, position, len(name), stat.S_IFMT(entry.mode) >> 12)
    return head + name + bytes(-len(name) % 8)


def dir_entry_plus(entry: DirEntry, position: int) -> bytes:
    """Return a name in the answer to READDIRPLUS, with its attributes."""
    if entry.entry is None:  # the inode number 0 says so
        return bytes(_ENTRY_AND_ATTRIBUTES.size) + dir_entry(entry, position)
    return entry_reply(entry.entry) + dir_entry(entry, position)
