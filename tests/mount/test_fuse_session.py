"""Answers to the kernel's requests, with a socket in place of its device."""

import errno
import os
import signal
import socket
import stat
import struct
import subprocess
import threading

import pytest

from cachedfs.mount import fuse_session
from cachedfs.mount.fuse_protocol import Attributes, Code, DirEntry, NameEntry, Opened, Space
from cachedfs.mount.fuse_session import FuseSession
from tests.support import until

HEADER = struct.Struct("=IIQQIIII")
ABOUT = Attributes(7, stat.S_IFREG | 0o644, 5, 1_600_000_000_000_000_001, 1, 2, 1.5)


class Folder:
    """A folder with a file "a" and calls that wait."""

    def __init__(self):
        self.forgotten, self.released = [], []
        self.may_go_on = threading.Event()
        self.files = self

    def lookup(self, parent, name):
        if name == "slow":
            assert self.may_go_on.wait(60)
        elif name != "a":
            raise FileNotFoundError(errno.ENOENT, name)
        return NameEntry(ABOUT, 1.0)

    def forget(self, number, n_lookups):
        self.forgotten.append((number, n_lookups))

    def open(self, number, flags, thread):
        return Opened(1 << 32, keeps_pages=True)

    def read(self, handle, size, offset):
        return b"hello"[offset : offset + size]

    def write(self, handle, data, offset):
        raise OSError(errno.ENOSPC, "full")

    def readdir(self, handle, start, *, is_plus):
        for number in range(start, 4):
            entry = NameEntry(ABOUT._replace(number=number + 2), 1.0)
            yield DirEntry(b"n%d" % number, stat.S_IFREG, entry)

    def statfs(self):
        return Space(1 << 20, 1 << 12)


@pytest.fixture
def folder():
    return Folder()


@pytest.fixture
def kernel(folder, monkeypatch):
    """A function that sends a request and returns errno and content of its answer."""
    device, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held, other = socket.socketpair()
    monkeypatch.setattr(fuse_session, "_mounted", lambda *args: (device.fileno(), held))
    session = FuseSession(folder, "/nowhere", [])
    mounted = threading.Event()
    serving = threading.Thread(target=session.serve, args=(mounted.set,))
    serving.start()
    ids = iter(range(1, 100))

    def send(code, body=b"", *, node=1, thread=0):
        ours.send(HEADER.pack(HEADER.size + len(body), code, id := next(ids), node, 0, 0, thread, 0) + body)
        return id

    def receive():
        answer = ours.recv(1 << 21)
        length, error, id = struct.unpack_from("=IiQ", answer)
        assert length == len(answer)
        return id, -error, answer[16:]

    def ask(code, body=b"", **options):
        id = send(code, body, **options)
        answered, error, content = receive()
        assert answered == id
        return error, content

    ask.send, ask.receive, ask.session = send, receive, session
    assert ask(Code.INIT, struct.pack("=IIII", 7, 38, 1 << 17, 0xFFFFFFFF))[0] == 0
    assert mounted.is_set()
    yield ask
    session.stop()
    serving.join()
    ours.close()  # ends the threads that wait for a request
    until(lambda: not any(thread.name == "cachedfs-mount" for thread in threading.enumerate()))
    session.close()
    device.close()
    other.close()


def test_a_name_is_answered_with_its_inode_and_for_how_long_both_are_kept(kernel):
    error, content = kernel(Code.LOOKUP, b"a\0")
    number, _, name_s, attr_s, name_ns, attr_ns = struct.unpack_from("=QQQQII", content)
    assert (error, len(content)) == (0, 128)
    assert (number, name_s, name_ns, attr_s, attr_ns) == (7, 1, 0, 1, 500_000_000)
    _, size, _, _, mtime, _, _, ns, _, mode, _, uid, gid, *_ = struct.unpack_from("=QQQQQQ10I", content, 40)
    assert (size, mtime, ns, mode, uid, gid) == (5, 1_600_000_000, 1, stat.S_IFREG | 0o644, 1, 2)


def test_errors_are_those_of_the_calls_and_unknown_requests_are_refused(kernel):
    assert kernel(Code.LOOKUP, b"b\0") == (errno.ENOENT, b"")
    assert kernel(Code.WRITE, bytes(40) + b"data") == (errno.ENOSPC, b"")
    assert kernel(Code.LINK, bytes(8) + b"new\0") == (errno.EPERM, b"")
    assert kernel(9999) == (errno.ENOSYS, b"")


def test_the_arguments_of_a_call_arrive(kernel, folder):
    error, content = kernel(Code.OPEN, struct.pack("=II", os.O_RDONLY, 0), node=7)
    assert (error, struct.unpack("=QII", content)) == (0, (1 << 32, 2, 0))
    assert kernel(Code.READ, struct.pack("=QQIIQII", 1 << 32, 1, 3, 0, 0, 0, 0)) == (0, b"ell")
    renamed = []
    folder.rename = lambda *args: renamed.append(args)
    assert kernel(Code.RENAME2, struct.pack("=QII", 9, 2, 0) + b"a\0b\0", node=3)[0] == 0
    assert kernel(Code.RENAME, struct.pack("=Q", 9) + b"a\0b\0", node=3)[0] == 0
    assert renamed == [(3, "a", 9, "b", 2), (3, "a", 9, "b", 0)]


def test_a_folder_is_listed_in_pieces_and_only_told_inodes_count(kernel, folder):
    size = 128 + 24 + 8
    body = struct.pack("=QQIIQII", 1, 1, 2 * size + 10, 0, 0, 0, 0)
    error, content = kernel(Code.READDIRPLUS, body)
    assert (error, len(content)) == (0, 2 * size)
    assert struct.unpack_from("=QQII", content, 128) == (3, 2, 2, stat.S_IFREG >> 12)
    assert content[152:154] == b"n1"
    assert folder.forgotten == [(5, 1)]  # the third did not fit, and is told again


def test_forgotten_inodes_are_counted(kernel, folder):
    kernel.send(Code.FORGET, struct.pack("=Q", 2), node=7)
    kernel.send(Code.BATCH_FORGET, struct.pack("=IIQQQQ", 2, 0, 7, 1, 8, 3))
    until(lambda: sorted(folder.forgotten) == [(7, 1), (7, 2), (8, 3)])
    assert kernel(Code.STATFS)[0] == 0  # the next answer: those two have none


def test_a_call_that_waits_delays_no_other(kernel, folder):
    waiting = [kernel.send(Code.LOOKUP, b"slow\0") for _ in range(20)]
    error, content = kernel(Code.STATFS)
    assert error == 0
    assert struct.unpack_from("=QQQQQIII", content) == (256, 1, 1, 1 << 40, 1 << 40, 4096, 255, 4096)
    folder.may_go_on.set()
    assert sorted(kernel.receive()[0] for _ in waiting) == waiting


def test_with_all_threads_busy_interrupts_are_answered_and_calls_wait_their_turn(kernel, folder, monkeypatch):
    monkeypatch.setattr(kernel.session, "_most_threads", 3)
    waiting = [kernel.send(Code.LOOKUP, b"slow\0") for _ in range(5)]
    kernel.send(Code.FORGET, struct.pack("=Q", 2), node=7)
    until(lambda: folder.forgotten == [(7, 2)])
    interrupting = kernel.send(Code.INTERRUPT, struct.pack("=Q", 99))  # of a request that is not here yet
    assert kernel.receive() == (interrupting, errno.EAGAIN, b"")
    folder.may_go_on.set()
    assert sorted(kernel.receive()[0] for _ in waiting) == waiting


def test_a_thread_that_cannot_start_leaves_no_call_unanswered(kernel, folder, monkeypatch, caplog):
    def start(thread):
        raise RuntimeError("can't start new thread")

    until(lambda: kernel.session._n_idle == 2)  # the thread that answered INIT, and the one started beside it
    waiting = [kernel.send(Code.LOOKUP, b"slow\0")]
    until(lambda: waiting[0] in kernel.session._running and kernel.session._n_idle == 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        waiting += [kernel.send(Code.STATFS), kernel.send(Code.STATFS)]
        until(lambda: len(kernel.session._waiting) == 2)
    folder.may_go_on.set()
    assert sorted(kernel.receive()[0] for _ in waiting) == waiting
    assert caplog.text.count("no more than 2 calls can wait at once") == 1


def test_a_dying_process_does_not_wait_for_its_call(kernel, folder):
    process = subprocess.Popen(["sleep", "600"])
    id = kernel.send(Code.LOOKUP, b"slow\0", thread=process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: id in kernel.session._running)
    kernel.send(Code.INTERRUPT, struct.pack("=Q", id))
    assert kernel.receive() == (id, errno.EINTR, b"")
    folder.may_go_on.set()


def test_a_kernel_that_is_too_old_is_refused(kernel, caplog):
    assert kernel(Code.INIT, struct.pack("=IIII", 7, 26, 0, 0))[0] == errno.EIO
    assert "this kernel speaks FUSE 7.26" in caplog.text
