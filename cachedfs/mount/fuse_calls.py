"""The kernel's requests as calls of `MountOperations`, and what these return as answers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from cachedfs.mount import fuse_protocol as protocol
from cachedfs.mount.fuse_protocol import Code, KernelRequest, NameEntry, Opened
from cachedfs.mount.names import MAX_BYTES
from cachedfs.mount.operations import MountOperations

UNANSWERED = {Code.FORGET, Code.BATCH_FORGET}


class KernelAnswer(NamedTuple):
    """The content of an answer; `undo` is called if the kernel no longer wants it."""

    content: bytes | memoryview = b""
    undo: Callable[[], object] | None = None


def call(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    """Do what the kernel asks for. Raises OSError with the errno that the program gets."""
    if request.code not in _CALLS:
        raise OSError(errno.ENOSYS, "a mount has no such call")
    found = _CALLS[request.code](mount, request)
    return found if isinstance(found, KernelAnswer) else KernelAnswer(found or b"")


def _inode_answer(
    mount: MountOperations, entry: NameEntry, more: bytes = b"", undo: Callable[[], object] = lambda: None
) -> KernelAnswer:
    """Return an answer with an inode. The kernel counts these, so `undo` is for one that it does not take."""

    def not_taken() -> None:
        mount.forget(entry.attributes.number, 1)
        undo()

    return KernelAnswer(protocol.entry_reply(entry) + more, not_taken)


def _forget_many(mount: MountOperations, request: KernelRequest) -> None:
    n, _ = protocol.OPEN.unpack_from(request.body)
    one = protocol.FORGET_ONE
    for number, n_lookups in one.iter_unpack(request.body[8 : 8 + n * one.size]):
        mount.forget(number, n_lookups)


def _setattr(mount: MountOperations, request: KernelRequest) -> bytes:
    valid, _, _, size, _, _, mtime, _, _, mtime_ns, *_ = protocol.SETATTR.unpack_from(request.body)
    when = None
    if valid & protocol.MTIME_IS_NOW:
        when = time.time_ns()
    elif valid & protocol.HAS_MTIME:
        when = mtime * 1_000_000_000 + mtime_ns
    new_size = size if valid & protocol.HAS_SIZE else None
    return protocol.attributes_reply(mount.setattr(request.node, size=new_size, mtime_ns=when))


def _open(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    flags, _ = protocol.OPEN.unpack_from(request.body)
    opened = mount.files.open(request.node, flags, request.thread)
    return KernelAnswer(protocol.opened_reply(opened), lambda: mount.files.release(opened.handle))


def _create(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    flags, *_ = protocol.CREATE.unpack_from(request.body)
    name = _name(request.body[protocol.CREATE.size :])
    entry, opened = mount.create(request.node, name, flags, request.thread)
    return _inode_answer(
        mount, entry, protocol.opened_reply(opened), lambda: mount.files.release(opened.handle)
    )


def _read(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    handle, offset, size, *_ = protocol.READ.unpack_from(request.body)
    return KernelAnswer(mount.files.read(handle, size, offset))


def _write(mount: MountOperations, request: KernelRequest) -> bytes:
    handle, offset, size, *_ = protocol.READ.unpack_from(request.body)
    data = request.body[protocol.READ.size :][:size]
    return protocol.written_reply(mount.files.write(handle, data, offset))


def _opendir(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    handle = mount.opendir(request.node)
    return KernelAnswer(protocol.opened_reply(Opened(handle)), lambda: mount.releasedir(handle))


def _readdir(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    handle, start, size, *_ = protocol.READ.unpack_from(request.body)
    is_plus = request.code == Code.READDIRPLUS
    pack = protocol.dir_entry_plus if is_plus else protocol.dir_entry
    found: list[bytes] = []
    numbers: list[int] = []  # of the inodes in the answer, which the kernel counts

    def take_back() -> None:
        for number in numbers:
            mount.forget(number, 1)

    for position, entry in enumerate(mount.readdir(handle, start, is_plus=is_plus), start + 1):
        packed = pack(entry, position)
        size -= len(packed)
        if entry.entry is not None:
            numbers.append(entry.entry.attributes.number)
        if size < 0:
            if entry.entry is not None:
                mount.forget(numbers.pop(), 1)
            break
        found.append(packed)
    return KernelAnswer(b"".join(found), take_back)


def _mkdir(mount: MountOperations, request: KernelRequest) -> KernelAnswer:
    return _inode_answer(mount, mount.mkdir(request.node, _name(request.body[protocol.MKDIR.size :])))


def _rename(mount: MountOperations, request: KernelRequest) -> None:
    if request.code == Code.RENAME2:
        new_parent, flags, _ = protocol.RENAME2.unpack_from(request.body)
        names = request.body[protocol.RENAME2.size :]
    else:
        (new_parent,), flags = protocol.UINT64.unpack_from(request.body), 0
        names = request.body[protocol.UINT64.size :]
    old, new = map(os.fsdecode, protocol.names_of(names))
    mount.rename(request.node, old, new_parent, new, flags)


def _refuse(mount: MountOperations, request: KernelRequest) -> None:
    raise OSError(errno.EPERM, "objects have no links, devices or pipes")


def _name(body: memoryview) -> str:
    return os.fsdecode(protocol.names_of(body)[0])


def _number(request: KernelRequest) -> int:
    """Return the number with which a request begins: a handle, or a count."""
    return int(protocol.UINT64.unpack_from(request.body)[0])


_Call = Callable[[MountOperations, KernelRequest], KernelAnswer | bytes | None]
_CALLS: dict[int, _Call] = {
    Code.LOOKUP: lambda mount, asked: _inode_answer(mount, mount.lookup(asked.node, _name(asked.body))),
    Code.FORGET: lambda mount, asked: mount.forget(asked.node, _number(asked)),
    Code.BATCH_FORGET: _forget_many,
    Code.GETATTR: lambda mount, asked: protocol.attributes_reply(mount.getattr(asked.node)),
    Code.SETATTR: _setattr,
    Code.OPEN: _open,
    Code.CREATE: _create,
    Code.READ: _read,
    Code.WRITE: _write,
    Code.FLUSH: lambda mount, asked: mount.files.flush(_number(asked), asked.thread),
    Code.FSYNC: lambda mount, asked: mount.files.fsync(_number(asked)),
    Code.RELEASE: lambda mount, asked: mount.files.release(_number(asked)),
    Code.OPENDIR: _opendir,
    Code.READDIR: _readdir,
    Code.READDIRPLUS: _readdir,
    Code.RELEASEDIR: lambda mount, asked: mount.releasedir(_number(asked)),
    Code.MKDIR: _mkdir,
    Code.UNLINK: lambda mount, asked: mount.unlink(asked.node, _name(asked.body)),
    Code.RMDIR: lambda mount, asked: mount.rmdir(asked.node, _name(asked.body)),
    Code.RENAME: _rename,
    Code.RENAME2: _rename,
    Code.STATFS: lambda mount, asked: protocol.space_reply(mount.statfs(), MAX_BYTES),
    Code.SYMLINK: _refuse,
    Code.LINK: _refuse,
    Code.MKNOD: _refuse,
}
