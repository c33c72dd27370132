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
from collections.abc import Callable, Iterable
from contextlib import suppress

from cachedfs.mount import fuse_protocol as protocol
from cachedfs.mount.fuse_calls import UNANSWERED, KernelAnswer, call
from cachedfs.mount.fuse_protocol import Code, KernelRequest
from cachedfs.mount.operations import MountOperations

logger = logging.getLogger("cachedfs.mount")

_MOST_THREADS = 512  # each may wait for the origin
_MOST_IDLE = 8
_BUFFER = protocol.MAX_WRITE + 4096  # the header of a request and its fields take less than a page
_CHECK_S = 0.1  # between two looks at whether the process of an interrupted request is dying
_SIGKILL_PENDING = 1 << 8  # also of a process that another fatal signal ends
_READ_AGAIN = {errno.EINTR, errno.EAGAIN, errno.ENOENT}  # errors of reading the device
# The requests that are answered even if all threads are busy.
_AT_ONCE = {Code.INTERRUPT, *UNANSWERED}
# The requests whose end a dying process need not await. A write that waits for the object still reaches the local copy.
_READING = {
    Code.WRITE,
    Code.LOOKUP, Code.GETATTR, Code.OPEN, Code.READ, Code.OPENDIR, Code.READDIR, Code.READDIRPLUS, Code.STATFS,
}  # fmt: skip


def fusermount() -> str:
    """Return the program that mounts for users who are not root. Raises ImportError without it."""
    if (found := shutil.which("fusermount3") or shutil.which("fusermount")) is None:
        raise ImportError("mounting needs FUSE: apt-get install fuse3")
    return found


class FuseSession:
    """A mounted folder, served by threads: one more whenever all of them are busy."""

    def __init__(self, operations: MountOperations, folder: str, options: Iterable[str]) -> None:
        """Mount it. Raises OSError if the system refuses, and ImportError without FUSE."""
        self._operations, self._folder = operations, folder
        self._device, self._held = _mounted(folder, options)
        self._lock = threading.Lock()
        self._n_threads, self._n_idle, self._most_threads = 0, 0, _MOST_THREADS
        self._running: dict[int, KernelRequest] = {}
        self._waiting: deque[KernelRequest] = deque()
        self._ended, self._end = (
            socket.socketpair()
        )  # not a lock: its wait may miss a signal that comes as it begins
        self._end.setblocking(False)

    def serve(self, on_mounted: Callable[[], object]) -> None:
        """Answer the kernel until the folder is unmounted, or until `stop`."""
        self._on_mounted = on_mounted
        self._start_thread()
        self._ended.recv(1)
        with suppress(OSError):
            if os.path.ismount(self._folder):
                command = [fusermount(), "-u", "-q", "-z", "--", self._folder]
                subprocess.run(command, capture_output=True, check=False)
        while any(request.code not in _READING for request in self._running.copy().values()):
            time.sleep(_CHECK_S)  # a file that was closed is on its way
        self._held.close()

    def stop(self) -> None:
        with suppress(OSError):  # full: it was told already
            self._end.send(b"\0")

    def close(self) -> None:
        """Close what `stop` and signals write to."""
        self._ended.close()
        self._end.close()

    def fileno(self) -> int:
        """Return the descriptor that ends the session when a byte is written to it, as a signal does."""
        return self._end.fileno()

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
                if error.errno in _READ_AGAIN:
                    continue
                if error.errno != errno.ENODEV:  # unmounted
                    logger.error("reading what the kernel asks: %s", error)
                length = 0
            if not length:
                self.stop()
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
        id, answer, code = request.id, KernelAnswer(), 0
        self._running[id] = request
        try:
            if request.code == Code.INTERRUPT:
                self._interrupt(request)
                return
            answer = self._result_of(request)
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception:  # of any kind: the kernel waits for an answer
            logger.exception("request %s of the kernel", request.code)
            code = errno.EIO
        finally:
            self._running.pop(id, None)
        if request.code in UNANSWERED:
            return
        if not self._send(id, answer.content, code) and answer.undo is not None:
            with suppress(OSError):  # it is in the log
                answer.undo()

    def _result_of(self, request: KernelRequest) -> KernelAnswer:
        match request.code:
            case Code.INIT:
                return self._init(request)
            case Code.DESTROY:
                return KernelAnswer()
            case _:
                return call(self._operations, request)

    def _send(self, id: int, content: bytes | memoryview = b"", code: int = 0) -> bool:
        """Send an answer; return False if the kernel has dropped the request."""
        try:
            os.writev(self._device, [protocol.answer(id, len(content), code), content])
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

    def _init(self, request: KernelRequest) -> KernelAnswer:
        try:
            reply = protocol.initial_reply(request.body)
        except OSError as error:
            logger.error("%s: %s", self._folder, error)
            self.stop()
            raise
        self._on_mounted()
        return KernelAnswer(reply)


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
