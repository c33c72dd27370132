"""The SQLite index of one cache: connections of this process, and transactions.

SQLite maps the file `-shm` of its write-ahead log into memory. Where writing to a mapped page may end the process
(`disk.maps_safely`), the index has a rollback journal instead: slower to write, and it locks readers out for that time.

Two hazards shape this module. We must never open or close a database file ourselves, because closing any descriptor
of it drops SQLite's locks. And a connection must not cross a fork: SQLite remembers file locks in process memory, so
even a *new* connection in the child would assume locks that only the parent holds. Therefore connections are closed
before a fork and opened again when needed. One that is in use during the fork is not touched by the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

from cachedfs.cache import disk
from cachedfs.cache.index import connection
from cachedfs.cache.index.block_rows import BlockRows
from cachedfs.cache.index.metadata_rows import MetadataRows
from cachedfs.cache.index.quota_rows import QuotaRows
from cachedfs.cache.index.schema import (
    LOAD_TOTALS,
    SAVE_TOTALS,
    STORED,
    VERSION,
    Totals,
)
from cachedfs.cache.locks import ByteRangeLocks

__all__ = ["TROUBLE", "CacheIndex", "IndexRows"]

log = logging.getLogger("cachedfs.cache")

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
_LOOK_S = 1.0  # interval between a reader's checks that its file is still the one at the path
_TRY_S = 0.05  # SQLite backs off when waiting for a lock; retrying after this avoids starvation
_PAUSE_S = 0.005  # between two attempts
_READER_WAIT_S = 0.05
_FORK_WAIT_S = 1.0
# Longer than any transaction: a writer that takes longer is in a destructor that waits for this thread.
_TURN_WAIT_S = 30.0
_IDLE_READERS = 4
_SHORTEN_N = 16  # transactions between two looks at the size of the log
_LOGS = "-wal", "-shm", "-journal"  # files that SQLite keeps beside the database
# A scan of all rows: for audits.
_SUMS = """SELECT (SELECT count(*) FROM blocks),
    (SELECT total(size) FROM blocks),
    (SELECT total(size) FROM blocks JOIN objects ON objects.id = blocks.object WHERE is_pinned),
    (SELECT total(size) FROM blocks WHERE id > ?),
    (SELECT count(*) FROM metadata) + (SELECT count(*) FROM children), (SELECT count(*) FROM pins)"""


class IndexRows(BlockRows, MetadataRows, QuotaRows):
    """A connection to the index file `inode`, with all statements. Methods that change rows need `writing`."""

    inode = 0
    looked_s = 0.0  # when the file was last seen at its path
    root_seen: object = None  # the state of the folder when the writing connection was found to be current

    def limit_wal(self, pages: int) -> None:
        """Limit the write-ahead log to about `pages` pages of 4 KiB."""
        self._run(f"PRAGMA wal_autocheckpoint={pages}")
        self._run(f"PRAGMA journal_size_limit={pages * 4096}")

    def sums(self) -> dict[str, int]:
        """Return the totals that can be computed from the rows."""
        found = self._run(_SUMS, (self.totals.last_admitted,)).fetchone()
        return dict(
            zip(("blocks", "bytes", "pinned", "staged", "entries", "pins"), map(int, found), strict=True)
        )


class CacheIndex:
    """The index file, with connections that are opened on demand and replaced with the file.

    `wal_pages` limits the write-ahead log, to about so many pages of 4 KiB.
    """

    def __init__(self, path: str, *, has_wal: bool, locks: ByteRangeLocks, temp: Callable[[], str]) -> None:
        self._path = path
        self._wal = f"{path}-wal"
        self._has_wal = has_wal
        self._locks = locks
        self._temp = temp
        self._pid = os.getpid()
        self._idle: list[IndexRows] = []  # connections for reading that no thread uses
        self._writer: IndexRows | None = None
        # A token for each caller that writes or is about to, with its thread; the first has the turn. Python notices an
        # interrupt after a call, so what is released by one call is never left held.
        self._writing: dict[object, int] = {}
        self._broken_inode = 0  # of the file found damaged: the next writer replaces it
        self.wal_pages = 256
        self._writes = itertools.count(1)
        _INDEXES.add(self)

    def __del__(self) -> None:
        # Python 3.13 warns of connections that are garbage collected, such as those opened again by late reads.
        if getattr(self, "_pid", 0) == os.getpid():
            self.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[IndexRows]:
        """Provide a connection that no other thread uses. Raises sqlite3.Error, also if there is no index yet."""
        token, rows = object(), None
        try:
            _IN_USE[token] = threading.get_ident()
            if _FORKING or self._pid != os.getpid():
                self._wait_for_fork(token)
            with contextlib.suppress(IndexError):
                rows = self._idle.pop()
            if rows is None or time.monotonic() >= rows.looked_s + _LOOK_S:
                stale, rows = rows, None
                rows = self._current(stale, _READER_WAIT_S)
            yield rows
        except sqlite3.Error as error:
            rows = self._closed_if_damaged(rows, error)
            raise
        finally:
            try:
                if rows is not None:
                    self._idle.append(rows)
                    self._close_idle(_IDLE_READERS)
            finally:
                _IN_USE.pop(token, None)

    @contextlib.contextmanager
    def writing(self, root_seen: object = None) -> Iterator[IndexRows]:
        """Provide the write connection in one transaction, rolled back on exceptions. Raises sqlite3.Error, OSError."""
        token, thread = object(), threading.get_ident()
        try:
            _IN_USE[token] = thread
            if _FORKING or self._pid != os.getpid():
                self._wait_for_fork(token)
            self._writing[token] = thread
            if len(self._writing) > 1:
                self._wait_for_turn(token)
            rows = (
                self._writer
            )  # while the state of its folder, `root_seen`, is the same, the index was not replaced
            is_sure = root_seen is not None and not self._broken_inode
            if rows is None or not is_sure or rows.root_seen != root_seen or rows.sqlite.in_transaction:
                rows = self._current_writer(root_seen)
            try:
                try:
                    rows.sqlite.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    connection.again(partial(rows.sqlite.execute, "BEGIN IMMEDIATE"), error)
                rows.totals = Totals(*rows.sqlite.execute(LOAD_TOTALS).fetchone())
                before = STORED(rows.totals)
                yield rows
                if (now := STORED(rows.totals)) != before:
                    rows.sqlite.execute(SAVE_TOTALS, now)
                try:
                    rows.sqlite.execute("COMMIT")
                except sqlite3.OperationalError as error:
                    connection.again(partial(rows.sqlite.execute, "COMMIT"), error)
                if next(self._writes) % _SHORTEN_N == 0:
                    self._shorten_log(rows)
            except BaseException as error:  # an interrupt too: an open transaction would lock out all writers
                self._undo(rows, error)
                raise
        finally:
            try:
                self._writing.pop(token, None)
            finally:
                _IN_USE.pop(token, None)

    def is_damaged(self) -> bool:
        """Return whether the file at the path was found damaged; the next writer replaces it."""
        return self._broken_inode != 0 and self._inode() == self._broken_inode

    def look_again(self) -> None:
        """Make the next reader check whether the file at the path is still the one it has open."""
        for rows in list(self._idle):
            rows.looked_s = 0.0

    def _shorten_log(self, rows: IndexRows) -> None:
        """Truncate an overgrown write-ahead log. Active readers may prevent it: a later writer tries again."""
        if not self._has_wal or disk.size_of(self._wal) <= 2 * self.wal_pages * 4096:
            return
        with contextlib.suppress(sqlite3.Error):
            rows.sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._close_idle(0)
        token = object()
        try:
            self._writing[token] = threading.get_ident()
            if len(self._writing) == 1 and self._writer is not None:
                self._writer.sqlite.close()
                self._writer = None
        finally:
            self._writing.pop(token, None)

    def _close_idle(self, n_kept: int) -> None:
        while len(self._idle) > n_kept:
            with contextlib.suppress(IndexError):  # another thread was first
                self._idle.pop(0).sqlite.close()

    def release_inherited(self) -> None:
        """Release inherited connections, in a forked child, without closing them: that would act on the parent's locks.

        Python closes unreferenced objects, also at exit. An extra reference prevents that.
        """
        for rows in (*self._idle, self._writer):
            if rows is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(rows.sqlite))
        self._idle.clear()
        self._writing.clear()
        self._writer, self._pid = None, os.getpid()

    def _wait_for_fork(self, token: object) -> None:
        """Wait until another thread has forked; release inherited connections after a fork without hooks."""
        me = threading.get_ident()
        while _FORKING.get("", me) != me:
            del _IN_USE[token]
            time.sleep(_PAUSE_S)
            _IN_USE[token] = me
        if self._pid != os.getpid():
            self.release_inherited()

    def _wait_for_turn(self, token: object) -> None:
        """Wait until no other thread writes. Raises OperationalError where that could take forever.

        The garbage collector runs destructors in any thread, between any two lines. A destructor that closes a file may
        use the index, and may wait for other threads. So no thread waits for itself, and others wait for some time only.
        """
        me, deadline = threading.get_ident(), time.monotonic() + _TURN_WAIT_S
        first, *_ = self._writing
        while first is not token:
            del self._writing[token]  # in a wait, other callers of this thread may take the turn
            if self._writing.get(first) == me or time.monotonic() > deadline:
                raise sqlite3.OperationalError("this process is in the middle of writing the index")
            time.sleep(_PAUSE_S / 5)
            self._writing[token] = me
            first, *_ = self._writing

    def _current(self, rows: IndexRows | None, wait_s: float) -> IndexRows:
        """Return a connection to the file that is at the path now."""
        inode = self._inode()
        if rows is not None and rows.inode != inode:
            rows.sqlite.close()
            rows = None
        if rows is None:
            rows = self._connected(inode, wait_s)
        rows.looked_s = time.monotonic()
        return rows

    def _current_writer(self, root_seen: object) -> IndexRows:
        """Return the write connection to the file that is at the path now; make the file if it is missing or damaged."""
        rows, self._writer = self._writer, None
        if rows is not None and rows.sqlite.in_transaction:  # since a second interrupt
            rows.sqlite.rollback()
        if self._inode() in (0, self._broken_inode):
            if rows is not None:
                rows.sqlite.close()
                rows = None
            self._replace()
        try:
            rows = self._current(rows, _TRY_S)
        except sqlite3.OperationalError as error:
            rows = connection.again(partial(self._current, None, _TRY_S), error)
        self.look_again()
        self._broken_inode = 0
        rows.root_seen, self._writer = root_seen, rows
        return rows

    def _inode(self) -> int:
        """Return the inode of the file at the path; 0 without one, or if it is not ours (SQLite follows symlinks)."""
        status = disk.state(self._path)
        return status.st_ino if status is not None and connection.is_ours(status) else 0

    def _connected(self, inode: int, wait_s: float) -> IndexRows:
        """Open the file at the path and check that it is an index of this version."""
        if inode in (0, self._broken_inode):
            raise sqlite3.OperationalError("there is no index")
        logs = (disk.state(self._path + suffix) for suffix in _LOGS)
        if not all(connection.is_ours(status) for status in logs if status is not None):
            raise sqlite3.DatabaseError("a log of it is not ours")
        rows = IndexRows(connection.connect(self._path, wait_s))
        rows.inode = inode
        try:
            self._prepare(rows)
        except sqlite3.Error as error:
            self._closed_if_damaged(rows, error)
            rows.sqlite.close()
            raise
        return rows

    def _prepare(self, rows: IndexRows) -> None:
        run = rows.sqlite.execute
        if self._has_wal:
            run("PRAGMA journal_mode=WAL")
        else:
            # An index with a write-ahead log, copied from another disk: with this lock, SQLite maps no file.
            run("PRAGMA locking_mode=EXCLUSIVE")
            run("PRAGMA journal_mode=PERSIST")
            run("PRAGMA locking_mode=NORMAL")
        run("PRAGMA synchronous=NORMAL")
        rows.limit_wal(self.wal_pages)
        if run("PRAGMA user_version").fetchone()[0] != VERSION:
            raise sqlite3.DatabaseError("it is not an index of this version")

    def _undo(self, rows: IndexRows, error: BaseException) -> None:
        """End a failed transaction, and close the connection if the file is damaged."""
        if rows.sqlite.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                rows.sqlite.rollback()
        if isinstance(error, sqlite3.Error):
            self._writer = self._closed_if_damaged(rows, error)

    def _closed_if_damaged(self, rows: IndexRows | None, error: sqlite3.Error) -> IndexRows | None:
        """Return the connection; close it, have the file replaced, and return None if the error says that it is damaged."""
        if rows is None or not connection.is_damage(error):
            return rows
        log.warning("the index %s is damaged (%s) and will be replaced", self._path, error)
        self._broken_inode = rows.inode
        rows.sqlite.close()
        return None

    def _replace(self) -> None:
        """Put a new index in place unless another process just did. The first writer then counts the files.

        Only one process does it at a time, under a lock. Between the removal of an old write-ahead log and the new
        index, no process may open the file: SQLite would replay the old log into the new index.
        """
        for _ in range(50):
            if self._locks.take(_REPLACING):
                break
            time.sleep(0.02)
        else:
            raise sqlite3.OperationalError("another process is replacing the index")
        try:
            if self._inode() in (0, self._broken_inode):
                self._put_new()
        finally:
            self._locks.release(_REPLACING)

    def _put_new(self) -> None:
        temp = self._temp()
        try:
            connection.make_new(temp)
            for suffix in ("", *_LOGS):  # kept in `tmp/` for an hour, for inspection
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._path + suffix, f"{temp}-old{suffix}")
            os.rename(temp, self._path)
        except BaseException:  # after an interrupt too there must be no partial index
            with contextlib.suppress(OSError):  # retries create further files, which would fill a full disk
                disk.unlink(temp)
            raise


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


def _after_fork_in_parent() -> None:
    _FORKING.clear()


def _after_fork_in_child() -> None:
    _FORKING.clear()
    _IN_USE.clear()
    for index in list(_INDEXES):
        index.release_inherited()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
