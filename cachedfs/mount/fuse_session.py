"""A connection to FUSE, Linux's file systems in user space: mount a folder, and answer what the kernel asks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from cachedfs.mount import fuse_protocol as protocol
from cachedfs.mount.fuse_protocol import Attributes, Code, DirEntry, KernelRequest, NameEntry, Opened, Space
from cachedfs.mount.names import MAX_BYTES

__all__ = ["Operations", "FuseSession", "fusermount"]

logger = logging.getLogger("cachedfs.mount")

_MOST_THREADS = 512  # each may wait for the origin
_MOST_IDLE = 8
_BUFFER = protocol.MAX_WRITE + 4096  # the header of a request and its fields take less than a page
_CHECK_S = 0.1  # between two looks at whether the process of an interrupted request is dying
_SIGKILL_PENDING = 1 << 8  # also of a process that another fatal signal ends
_WITHDRAWN = {
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOENT,
}  # errors of reading the device that mean: read it again
# The requests that are answered even if all threads are busy.
_AT_ONCE = {Code.INTERRUPT, Code.FORGET, Code.BATCH_FORGET}
# The requests whose end a dying process need not await. A write that waits for the object still reaches the local copy.
_READING = {
    Code.WRITE,
    Code.LOOKUP, Code.GETATTR, Code.OPEN, Code.READ, Code.OPENDIR, Code.READDIR, Code.READDIRPLUS, Code.STATFS,
}  # fmt: skip


class Operations(Protocol):
    """The calls of the kernel that a mounted folder answers.

    Threads call it at once. A method raises OSError with the errno that the program gets. Inodes have numbers, that of
    the mounted folder is 1; `forget` says that the kernel drops some. `thread` is the one that makes the call, 0 if unknown.
    """

    def lookup(self, parent: int, name: str) -> NameEntry: ...
    def forget(self, number: int, n_lookups: int) -> None: ...
    def getattr(self, number: int) -> Attributes: ...
    def setattr(self, number: int, *, size: int | None, mtime_ns: int | None) -> Attributes: ...
    def open(self, number: int, flags: int, thread: int) -> Opened: ...
    def create(self, parent: int, name: str, flags: int, thread: int) -> tuple[NameEntry, Opened]: ...
    def read(self, handle: int, size: int, offset: int) -> bytes | memoryview: ...
    def write(self, handle: int, data: memoryview, offset: int) -> int: ...
    def flush(self, handle: int, thread: int) -> None: ...
    def fsync(self, handle: int) -> None: ...
    def release(self, handle: int) -> None: ...
    def opendir(self, number: int) -> int: ...
    def readdir(self, handle: int, start: int, *, is_plus: bool) -> Iterator[DirEntry]: ...
    def releasedir(self, handle: int) -> None: ...
    def mkdir(self, parent: int, name: str) -> NameEntry: ...
    def unlink(self, parent: int, name: str) -> None: ...
    def rmdir(self, parent: int, name: str) -> None: ...
    def rename(self, parent: int, name: str, new_parent: int, new_name: str, flags: int) -> None: ...
    def statfs(self) -> Space: ...


class _Answer(NamedTuple):
    """`undo` is called if the kernel no longer wants the answer."""

    parts: tuple[Any, ...] = ()
    undo: Callable[[], object] | None = None


def fusermount() -> str:
    """Return the program that mounts for users who are not root. Raises ImportError without it."""
    if (found := shutil.which("fusermount3") or shutil.which("fusermount")) is None:
        raise ImportError("mounting needs FUSE: apt-get install fuse3")
    return found


class FuseSession:
    """A mounted folder, served by threads: one more whenever all of them are busy."""

    def __init__(self, operations: Operations, folder: str, options: Iterable[str]) -> None:
        """Mount it. Raises OSError if the system refuses, and ImportError without FUSE."""
        self._operations, self._folder = operations, folder
        self._device, self._held = _mounted(folder, options)
        self._lock = threading.Lock()
        self._n_threads, self._n_idle, self._most_threads = 0, 0, _MOST_THREADS
        self._running: dict[int, KernelRequest] = {}
        self._waiting: deque[KernelRequest] = deque()
        self._ended: SimpleQueue[None] = SimpleQueue()  # whose `put` a signal handler may call at any moment
        self._calls = self._handlers()

    def serve(self, on_mounted: Callable[[], object]) -> None:
        """Answer the kernel until the folder is unmounted, or until `stop`."""
        self._on_mounted = on_mounted
        self._start_thread()
        self._ended.get()
        with suppress(OSError):
            if os.path.ismount(self._folder):
                command = [fusermount(), "-u", "-q", "-z", "--", self._folder]
                subprocess.run(command, capture_output=True, check=False)
        while any(request.code not in _READING for request in self._running.copy().values()):
            time.sleep(_CHECK_S)  # a file that was closed is on its way
        self._held.close()

    def stop(self) -> None:
        self._ended.put(None)

    # Threads.

    def _start_thread(self) -> bool:
        """Start another thread; return False if there are as many as there may be."""
        with self._lock:
            if self._n_threads >= self._most_threads:
                return False
            self._n_threads += 1
            self._n_idle += 1
        try:
            threading.Thread(target=self._answer_requests, name="cachedfs-mount", daemon=True).start()
        except RuntimeError as error:  # the system gives no more
            with self._lock:
                self._n_threads -= 1
                self._n_idle -= 1
                self._most_threads = self._n_threads
            logger.warning("no more than %s calls can wait at once: %s", self._most_threads, error)
            return False
        return True

    def _answer_requests(self) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        while True:
            try:
                length = os.readv(self._device, [buffer])
            except OSError as error:
                if error.errno in _WITHDRAWN:
                    continue
                if error.errno != errno.ENODEV:  # unmounted
                    logger.error("reading what the kernel asks: %s", error)
                length = 0
            if not length:
                self._ended.put(None)
                return
            request: KernelRequest | None = protocol.request_of(buffer[:length])
            while request is not None:
                request = self._answer_or_leave(request)
            with self._lock:
                if self._n_idle > _MOST_IDLE:
                    self._n_idle -= 1
                    self._n_threads -= 1
                    return

    def _answer_or_leave(self, request: KernelRequest) -> KernelRequest | None:
        """Answer a request; return another one that waits for a thread, or None to read the next.

        Where all other threads are busy, this one leaves the request to them and goes on reading, for interrupts.
        """
        with self._lock:
            self._n_idle -= 1
            is_reader = not self._n_idle
        is_reader = is_reader and not self._start_thread()
        with self._lock:
            if is_reader and not self._n_idle and request.code not in _AT_ONCE:
                self._waiting.append(request._replace(body=memoryview(bytes(request.body))))
                self._n_idle += 1
                return None
        self._answer(request)
        with self._lock:
            self._n_idle += 1
            return self._waiting.popleft() if self._waiting else None

    def _answer(self, request: KernelRequest) -> None:
        call, id = self._calls.get(request.code), request.id
        self._running[id] = request
        undo, parts, code = None, (), errno.ENOSYS
        try:
            if call is not None:
                answer = call(request)
                if answer is None:
                    return
                (parts, undo), code = answer, 0
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception:  # of any kind: the kernel waits for an answer
            logger.exception("request %s of the kernel", request.code)
            code = errno.EIO
        finally:
            self._running.pop(id, None)
        if not self._send(id, parts, code) and undo is not None:
            with suppress(OSError):  # it is in the log
                undo()

    def _send(self, id: int, parts: tuple[Any, ...] = (), code: int = 0) -> bool:
        """Send an answer; return False if the kernel has dropped the request."""
        try:
            os.writev(self._device, [protocol.answer(id, sum(map(len, parts)), code), *parts])
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                logger.error("answering the kernel: %s", error)
            return False
        return True

    def _interrupt(self, request: KernelRequest) -> None:
        """Answer a request in place of the thread that still works on it, if its process is dying.

        Otherwise the kernel is told to interrupt it again.
        """
        (id,) = protocol.UINT64.unpack_from(request.body)
        running = self._running.get(id)
        if running is not None and running.code not in _READING:
            return
        if running is not None and _is_dying(running.thread):
            self._send(id, code=errno.EINTR)
            return
        time.sleep(_CHECK_S)
        self._send(request.id, code=errno.EAGAIN)

    # Requests.

    def _handlers(self) -> dict[int, Callable[[KernelRequest], _Answer | None]]:
        refused = self._refuse
        return {
            Code.INIT: self._init, Code.DESTROY: lambda request: _Answer(), Code.INTERRUPT: self._interrupt,
            Code.LOOKUP: self._lookup, Code.FORGET: self._forget, Code.BATCH_FORGET: self._forget_many,
            Code.GETATTR: self._getattr, Code.SETATTR: self._setattr,
            Code.OPEN: self._open, Code.CREATE: self._create, Code.READ: self._read, Code.WRITE: self._write,
            Code.FLUSH: self._flush, Code.FSYNC: self._fsync, Code.RELEASE: self._release,
            Code.OPENDIR: self._opendir, Code.READDIR: self._readdir, Code.READDIRPLUS: self._readdir,
            Code.RELEASEDIR: self._releasedir, Code.MKDIR: self._mkdir, Code.UNLINK: self._unlink, Code.RMDIR: self._rmdir,
            Code.RENAME: self._rename, Code.RENAME2: self._rename, Code.STATFS: self._statfs,
            Code.SYMLINK: refused, Code.LINK: refused, Code.MKNOD: refused,
        }  # fmt: skip

    def _init(self, request: KernelRequest) -> _Answer:
        try:
            reply = protocol.initial_reply(request.body)
        except OSError as error:
            logger.error("%s: %s", self._folder, error)
            self._ended.put(None)
            raise
        self._on_mounted()
        return _Answer((reply,))

    def _refuse(self, request: KernelRequest) -> _Answer:
        raise OSError(errno.EPERM, "objects have no links, devices or pipes")

    def _told(self, entry: NameEntry, *more: bytes, undo: Callable[[], object] | None = None) -> _Answer:
        def take_back() -> None:
            self._operations.forget(entry.attributes.number, 1)
            if undo is not None:
                undo()

        return _Answer((protocol.entry_reply(entry), *more), take_back)

    def _lookup(self, request: KernelRequest) -> _Answer:
        return self._told(self._operations.lookup(request.node, _name(request.body)))

    def _forget(self, request: KernelRequest) -> None:
        self._operations.forget(request.node, *protocol.UINT64.unpack_from(request.body))

    def _forget_many(self, request: KernelRequest) -> None:
        n, _ = protocol.OPEN.unpack_from(request.body)
        one = protocol.FORGET_ONE
        for number, n_lookups in one.iter_unpack(request.body[8 : 8 + n * one.size]):
            self._operations.forget(number, n_lookups)

    def _getattr(self, request: KernelRequest) -> _Answer:
        return _Answer((protocol.attributes_reply(self._operations.getattr(request.node)),))

    def _setattr(self, request: KernelRequest) -> _Answer:
        valid, _, _, size, _, _, mtime, _, _, mtime_ns, *_ = protocol.SETATTR.unpack_from(request.body)
        when = None
        if valid & protocol.MTIME_IS_NOW:
            when = time.time_ns()
        elif valid & protocol.HAS_MTIME:
            when = mtime * 1_000_000_000 + mtime_ns
        about = self._operations.setattr(
            request.node,
            size=size if valid & protocol.HAS_SIZE else None,
            mtime_ns=when,
        )
        return _Answer((protocol.attributes_reply(about),))

    def _open(self, request: KernelRequest) -> _Answer:
        flags, _ = protocol.OPEN.unpack_from(request.body)
        opened = self._operations.open(request.node, flags, request.thread)
        return _Answer((protocol.opened_reply(opened),), lambda: self._operations.release(opened.handle))

    def _create(self, request: KernelRequest) -> _Answer:
        flags, *_ = protocol.CREATE.unpack_from(request.body)
        name = _name(request.body[protocol.CREATE.size :])
        entry, opened = self._operations.create(request.node, name, flags, request.thread)
        return self._told(
            entry, protocol.opened_reply(opened), undo=lambda: self._operations.release(opened.handle)
        )

    def _read(self, request: KernelRequest) -> _Answer:
        handle, offset, size, *_ = protocol.READ.unpack_from(request.body)
        return _Answer((self._operations.read(handle, size, offset),))

    def _write(self, request: KernelRequest) -> _Answer:
        handle, offset, size, *_ = protocol.READ.unpack_from(request.body)
        data = request.body[protocol.READ.size :][:size]
        return _Answer((protocol.written_reply(self._operations.write(handle, data, offset)),))

    def _flush(self, request: KernelRequest) -> _Answer:
        (handle,) = protocol.UINT64.unpack_from(request.body)
        self._operations.flush(handle, request.thread)
        return _Answer()

    def _fsync(self, request: KernelRequest) -> _Answer:
        self._operations.fsync(*protocol.UINT64.unpack_from(request.body))
        return _Answer()

    def _release(self, request: KernelRequest) -> _Answer:
        self._operations.release(*protocol.UINT64.unpack_from(request.body))
        return _Answer()

    def _opendir(self, request: KernelRequest) -> _Answer:
        handle = self._operations.opendir(request.node)
        opened = protocol.opened_reply(Opened(handle))
        return _Answer((opened,), lambda: self._operations.releasedir(handle))

    def _readdir(self, request: KernelRequest) -> _Answer:
        handle, start, size, *_ = protocol.READ.unpack_from(request.body)
        is_plus = request.code == Code.READDIRPLUS
        pack = protocol.dir_entry_plus if is_plus else protocol.dir_entry
        found: list[bytes] = []
        told: list[int] = []  # the kernel counts each inode that it is told

        def take_back() -> None:
            for number in told:
                self._operations.forget(number, 1)

        entries = self._operations.readdir(handle, start, is_plus=is_plus)
        for position, entry in enumerate(entries, start + 1):
            packed = pack(entry, position)
            size -= len(packed)
            if entry.entry is not None:
                told.append(entry.entry.attributes.number)
            if size < 0:
                if entry.entry is not None:
                    self._operations.forget(told.pop(), 1)
                break
            found.append(packed)

        return _Answer((b"".join(found),), take_back)

    def _releasedir(self, request: KernelRequest) -> _Answer:
        self._operations.releasedir(*protocol.UINT64.unpack_from(request.body))
        return _Answer()

    def _mkdir(self, request: KernelRequest) -> _Answer:
        name = _name(request.body[protocol.MKDIR.size :])
        return self._told(self._operations.mkdir(request.node, name))

    def _unlink(self, request: KernelRequest) -> _Answer:
        self._operations.unlink(request.node, _name(request.body))
        return _Answer()

    def _rmdir(self, request: KernelRequest) -> _Answer:
        self._operations.rmdir(request.node, _name(request.body))
        return _Answer()

    def _rename(self, request: KernelRequest) -> _Answer:
        if request.code == Code.RENAME2:
            new_parent, flags, _ = protocol.RENAME2.unpack_from(request.body)
            names = request.body[protocol.RENAME2.size :]
        else:
            (new_parent,), flags = protocol.UINT64.unpack_from(request.body), 0
            names = request.body[protocol.UINT64.size :]
        old, new = map(os.fsdecode, protocol.names_of(names))
        self._operations.rename(request.node, old, new_parent, new, flags)
        return _Answer()

    def _statfs(self, request: KernelRequest) -> _Answer:
        return _Answer((protocol.space_reply(self._operations.statfs(), MAX_BYTES),))


def _name(body: memoryview) -> str:
    return os.fsdecode(protocol.names_of(body)[0])


def _is_dying(thread: int) -> bool:
    """Return whether the process of a thread is about to end, or is gone.

    A thread of another container has the number 0.
    """
    if not thread:
        return False
    try:
        with open(f"/proc/{thread}/status") as file:
            pending = next((line for line in file if line.startswith("SigPnd:")), "SigPnd: 0")
    except OSError:
        return True
    return bool(int(pending.split()[1], 16) & _SIGKILL_PENDING)


def _mounted(folder: str, options: Iterable[str]) -> tuple[int, socket.socket]:
    """Mount a folder; return the device that the kernel asks at, and a socket whose end unmounts it."""
    held, given = socket.socketpair()
    with given:
        process = subprocess.Popen(
            [fusermount(), "-o", ",".join([*options, "auto_unmount"]), "--", folder],
            env={**os.environ, "_FUSE_COMMFD": str(given.fileno())},
            pass_fds=[given.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    _, devices, *_ = socket.recv_fds(held, 1, 1)
    if not devices:
        _, said = process.communicate()
        held.close()
        raise OSError(f"{folder}: the system refused the mount: {said.strip() or 'without a reason'}")
    threading.Thread(target=process.communicate, daemon=True).start()  # it ends after the mount
    return devices[0], held
