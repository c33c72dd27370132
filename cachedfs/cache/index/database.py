"""The SQLite index of one cache: connections of this process, and transactions.

SQLite maps the file `-shm` of its write-ahead log into memory. Where writing to a mapped page may end the process
(`disk.maps_safely`), the index has a rollback journal instead: slower to write, and it locks readers out for that time.

Two hazards shape this module. We must never open or close a database file ourselves, because closing any descriptor
of it drops SQLite's locks. And a connection must not cross a fork: SQLite remembers file locks in process memory, so
even a *new* connection in the child would assume locks that only the parent holds. Therefore connections are closed
before a fork and opened again when needed. One that is in use during the fork is not touched by the child.

A thread has a connection to itself while it uses one, and threads wait for each other as processes do, for some time. No
mutex is held: the garbage collector runs destructors in any thread, between any two lines, and one that closes a file may
use the index, and may wait for other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sqlite3
import stat
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import TypeVar

from cachedfs.cache import disk
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.cache.index.schema import LOAD_TOTALS, SAVE_TOTALS, SCHEMA, STORED, VERSION, Totals
from cachedfs.cache.locks import ByteRangeLocks

log = logging.getLogger("cachedfs.cache")

T = TypeVar("T")

TROUBLE = (
    sqlite3.Error,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
)
"""Errors of the index. All but the first two come from damaged rows: SQLite columns hold values of any type."""

_REPLACING = 0x0DB5_ADBA_C0DE_0001  # the lock number for replacing the index
_TRY_S = 0.05  # SQLite backs off when waiting for a lock; retrying after this avoids starvation
_PAUSE_S = 0.005  # between two attempts
_WRITER_WAIT_S = 2.0
_FORK_WAIT_S = 1.0
_MOST_IDLE = 4
_LOGS = "-wal", "-shm", "-journal"  # files that SQLite keeps beside the database
_STATEMENTS = 128


class CacheIndex:
    """The index file, with connections that are opened on demand and replaced with the file.

    `wal_pages` limits the write-ahead log, to about so many pages of 4 KiB.
    """

    def __init__(self, path: str, *, has_wal: bool, locks: ByteRangeLocks, temp: Callable[[], str]) -> None:
        self._path = path
        self._has_wal = has_wal
        self._locks = locks
        self._temp = temp
        self._pid = os.getpid()
        self._idle: list[IndexRows] = []  # connections that no thread uses, the last one used at the end
        self._broken_inode = 0  # of the file found damaged: the next writer replaces it
        self.wal_pages = 256
        _INDEXES.add(self)

    def __del__(self) -> None:
        # Python 3.13 warns of connections that are garbage collected, such as those opened again by late reads.
        if getattr(self, "_pid", 0) == os.getpid():
            self.close()

    @contextlib.contextmanager
    def reading(self, root_seen: object = None, *, writes: bool = False) -> Iterator[IndexRows]:
        """Provide a connection that no other thread uses. Raises sqlite3.Error, also if there is no index yet."""
        token, rows = object(), None
        try:
            _IN_USE[token] = threading.get_ident()
            if _FORKING or self._pid != os.getpid():
                self._wait_for_fork(token)
            with contextlib.suppress(IndexError):
                rows = self._idle.pop()
            if rows is None or rows.seen is None or (writes and rows.seen != root_seen):
                rows = self._current(rows, writes, root_seen)
            if writes:
                try:
                    rows.run("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    insist(partial(rows.run, "BEGIN IMMEDIATE"))
                rows.totals = Totals(*rows.run(LOAD_TOTALS).fetchone())
                before = STORED(rows.totals)
            yield rows
            if writes:
                if (now := STORED(rows.totals)) != before:
                    rows.run(SAVE_TOTALS, now)
                commit = partial(rows.run, "COMMIT")
                commit() if self._has_wal else insist(commit)  # readers hold up the rollback journal alone
        except BaseException as error:  # an interrupt too: an open transaction would lock out all writers
            self._undo(rows, error)
            raise
        finally:
            try:
                if rows is not None and rows.inode and not rows.sqlite.in_transaction:
                    self._idle.append(rows)
                elif rows is not None:
                    rows.sqlite.close()
            finally:  # an interrupt in between would leave it: each fork waits for a connection in use
                _IN_USE.pop(token, None)

    writing = partialmethod(reading, writes=True)
    """Provide a connection in a write transaction, rolled back on exceptions. Raises sqlite3.Error, OSError.

    Make the index if it is missing or damaged. `root_seen` is the state of its folder: while it is the same, the index
    was not replaced.
    """

    def is_damaged(self) -> bool:
        """Return whether the file at the path was found damaged; the next writer replaces it."""
        return self._broken_inode != 0 and self._inode() == self._broken_inode

    def look_again(self) -> None:
        """Have each connection check at its next use whether its file is still the one at the path."""
        for rows in list(self._idle):
            rows.seen = None

    def look(self) -> None:
        """Do what is done once a second: look again, close surplus connections, and truncate an overgrown log.

        Active readers may prevent the last.
        """
        self.look_again()
        if len(self._idle) > _MOST_IDLE:
            self._close_idle(_MOST_IDLE)
        if self._has_wal and disk.size_of(f"{self._path}-wal") > 2 * self.wal_pages * 4096:
            with contextlib.suppress(sqlite3.Error), self.reading() as rows:
                rows.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._close_idle(0)

    def _close_idle(self, n_kept: int) -> None:
        while len(self._idle) > n_kept:
            with contextlib.suppress(IndexError):  # another thread was first
                self._idle.pop(0).sqlite.close()

    def release_inherited(self) -> None:
        """Release inherited connections, in a forked child, without closing them: that would act on the parent's locks.

        Python closes unreferenced objects, also at exit. An extra reference prevents that.
        """
        for rows in self._idle:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(rows.sqlite))
        self._idle.clear()
        self._pid = os.getpid()

    def _wait_for_fork(self, token: object) -> None:
        """Wait until another thread has forked; release inherited connections after a fork without hooks."""
        me = threading.get_ident()
        while _FORKING.get("", me) != me:
            del _IN_USE[token]
            time.sleep(_PAUSE_S)
            _IN_USE[token] = me
        if self._pid != os.getpid():
            self.release_inherited()

    def _current(self, rows: IndexRows | None, writes: bool, root_seen: object) -> IndexRows:
        """Return a connection to the file that is at the path now; `writes` makes it if it is missing or damaged."""
        inode = self._inode()
        if rows is not None and (rows.inode != inode or inode == self._broken_inode):
            rows.sqlite.close()
            rows.inode, rows = 0, None
        if writes:
            if inode in (0, self._broken_inode):
                self._replace()
                inode = self._inode()
            self.look_again()
        if rows is None:
            connected = partial(self._connected, inode)
            rows = insist(connected) if writes else connected()
        rows.seen = root_seen or True
        return rows

    def _inode(self) -> int:
        """Return the inode of the file at the path; 0 without one, or if it is not ours (SQLite follows symlinks)."""
        status = disk.state(self._path)
        return status.st_ino if status is not None and _is_ours(status) else 0

    def _connected(self, inode: int) -> IndexRows:
        """Open the file at the path and check that it is an index of this version."""
        if inode in (0, self._broken_inode):
            raise sqlite3.OperationalError("there is no index")
        logs = (disk.state(self._path + suffix) for suffix in _LOGS)
        if not all(_is_ours(status) for status in logs if status is not None):
            raise sqlite3.DatabaseError("a log of it is not ours")
        rows = IndexRows(connect(self._path))
        rows.inode = inode
        try:
            if self._has_wal:
                rows.run("PRAGMA journal_mode=WAL")
            else:
                # An index with a write-ahead log, copied from another disk: with this lock, SQLite maps no file.
                rows.run("PRAGMA locking_mode=EXCLUSIVE")
                rows.run("PRAGMA journal_mode=PERSIST")
                rows.run("PRAGMA locking_mode=NORMAL")
            rows.run("PRAGMA synchronous=NORMAL")
            rows.limit_wal(self.wal_pages)
            if rows.run("PRAGMA user_version").fetchone()[0] != VERSION:
                raise sqlite3.DatabaseError("it is not an index of this version")
        except sqlite3.Error as error:
            self._undo(rows, error)
            rows.sqlite.close()
            raise
        return rows

    def _undo(self, rows: IndexRows | None, error: BaseException) -> None:
        """Roll a failed transaction back. If the error says that the file is damaged, the next writer replaces it."""
        if rows is None or not rows.inode:
            return
        if rows.sqlite.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                rows.sqlite.rollback()
        if isinstance(error, sqlite3.Error) and _is_damage(error):
            log.warning("the index %s is damaged (%s) and will be replaced", self._path, error)
            self._broken_inode, rows.inode = rows.inode, 0
            self.look_again()

    def _replace(self) -> None:
        """Put a new index in place unless another process just did. The first writer then counts the files.

        Only one process does it at a time, under a lock. Between the removal of an old write-ahead log and the new
        index, no process may open the file: SQLite would replay the old log into the new index.
        """
        deadline = time.monotonic() + _WRITER_WAIT_S
        while not self._locks.take(_REPLACING):
            if time.monotonic() > deadline:
                raise sqlite3.OperationalError("another process or thread is replacing the index")
            time.sleep(_PAUSE_S)
        temp = self._temp()
        try:
            if self._inode() in (0, self._broken_inode):
                _make_new(temp)
                for suffix in ("", *_LOGS):  # kept in `tmp/` for an hour, for inspection
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(self._path + suffix, f"{temp}-old{suffix}")
                os.rename(temp, self._path)
                self._broken_inode = 0
        except BaseException:  # after an interrupt too there must be no partial index
            with contextlib.suppress(OSError):  # retries create further files, which would fill a full disk
                disk.unlink(temp)
            raise
        finally:
            self._locks.release(_REPLACING)


def _make_new(path: str) -> None:
    os.close(disk.create(path))  # SQLite would create it readable by others
    new = connect(path)
    try:
        new.executescript(f"PRAGMA synchronous=OFF; BEGIN; {SCHEMA}; PRAGMA user_version={VERSION}; COMMIT")
    finally:
        new.close()


def connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{urllib.parse.quote(path)}?mode=rw",
        uri=True,
        timeout=_TRY_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )


def insist(act: Callable[[], T]) -> T:
    """Call `act`, again and again while other processes and threads hold locks, up to a limit."""
    deadline = time.monotonic() + _WRITER_WAIT_S
    while True:
        try:
            return act()
        except sqlite3.OperationalError as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)  # SQLite does not wait at all where two waiters could deadlock


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _is_damage(error: sqlite3.Error) -> bool:
    """Return whether the file itself is damaged, rather than busy, full or unreachable."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if isinstance(error, sqlite3.OperationalError) and "no such" in str(error):
        return True
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # truncated while open
        return True
    is_plain = type(error) is sqlite3.DatabaseError
    return is_plain and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


_INDEXES: weakref.WeakSet[CacheIndex] = weakref.WeakSet()
_IN_USE: dict[object, int] = {}  # a token for each connection in use, with its thread
_FORKING: dict[str, int] = {}  # the thread that forks


def _before_fork() -> None:
    """Close all connections of this process, once no other thread uses one."""
    me, deadline = threading.get_ident(), time.monotonic() + _FORK_WAIT_S
    while _FORKING.setdefault("", me) != me:  # one fork at a time
        time.sleep(_PAUSE_S)
    while any(thread != me for thread in list(_IN_USE.values())) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S / 5)
    for index in list(_INDEXES):
        index.close()


def _after_fork_in_child() -> None:
    _FORKING.clear()
    _IN_USE.clear()
    for index in list(_INDEXES):
        index.release_inherited()


os.register_at_fork(before=_before_fork, after_in_parent=_FORKING.clear, after_in_child=_after_fork_in_child)
