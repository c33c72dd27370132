"""SQLite connections of this process to the index: when they are opened, replaced and abandoned.

SQLite maps the file `-shm` of its write-ahead log into memory. Where writing to a mapped page may end the process
(`disk.maps_safely`), the index has a rollback journal instead: slower to write, and it locks readers out for that time.

Two hazards shape this module. We must never open or close a database file ourselves, because closing any descriptor
of it drops SQLite's locks. And a connection must not cross a fork: SQLite remembers file locks in process memory, so
even a *new* connection in the child would assume locks that only the parent holds. Therefore connections are closed
before a fork and reopened when needed. A connection in use during the fork is abandoned in the child.
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

from cachedfs.cache import disk
from cachedfs.cache.locks import ByteRangeLocks

__all__ = ["Database"]

log = logging.getLogger("cachedfs.cache")

_REPLACING = 0x0DB5_ADBA_C0DE_0001  # the lock number for replacing the index
_LOOK_S = 1.0  # interval between a reader's checks that its file is still the one at the path
_WRITER_WAIT_S = 2.0
_TRY_S = 0.05  # SQLite backs off when waiting for a lock; retrying after this avoids starvation
_PAUSE_S = 0.005  # between two attempts
_READER_WAIT_S = 0.05
_FORK_WAIT_S = 1.0
# Longer than any transaction: a writer that takes longer is in a destructor that waits for this thread.
_LENT_WAIT_S = 30.0
_STATEMENTS = 128
_LOGS = "-wal", "-shm", "-journal"  # files that SQLite keeps beside the database


class _Connection:
    """One SQLite connection and its lock. Invariant: `sqlite` was opened by process `pid`.

    `is_lent` is True while a thread uses the connection. If a thread gets the (reentrant) lock and finds `is_lent` set,
    it is in a destructor that the garbage collector runs in between: it must neither wait nor use the connection.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_lent = False
        self.sqlite: sqlite3.Connection | None = None
        self.pid = 0
        self.inode = 0
        self.looked_s = 0.0

    def close(self) -> None:
        if self.sqlite is not None and self.pid == os.getpid():
            self.sqlite.close()
        self.sqlite = None

    def abandon(self) -> None:
        """Forget an inherited connection without closing it: closing would act on the parent's locks.

        Python closes unreferenced objects, also at exit. An extra reference prevents that.
        """
        if self.sqlite is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.sqlite))
        self.lock = threading.RLock()
        self.is_lent = False
        self.sqlite = None


class Database:
    """The index file with one reading and one writing connection, opened on demand and replaced with the file."""

    def __init__(
        self,
        path: str,
        *,
        schema: str,
        version: int,
        has_wal: bool,
        locks: ByteRangeLocks,
        temp: Callable[[], str],
    ) -> None:
        self._path = path
        self._schema = schema
        self._version = version
        self._has_wal = has_wal
        self._locks = locks
        self._temp = temp
        self._reader = _Connection()
        self._writer = _Connection()
        # Extra readers, for threads that must not wait for the shared one.
        self._further: set[_Connection] = set()
        self._broken_inode = 0  # inode of the file found damaged: the next writer replaces it
        self.wal_pages = 256
        _DATABASES.add(self)
        weakref.finalize(self, _close_both, self._reader, self._writer).atexit = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Provide a read connection: the shared one, or an extra one if waiting for it could deadlock.

        Raises sqlite3.Error, also if there is no index yet.
        """
        with self._lent(self._reader, self._open_reader, _READER_WAIT_S) as connection:
            if connection is not None:
                yield connection
                return
        slot = _Connection()
        with _GATE:  # a fork in progress would neither close this slot nor wait for it
            self._further.add(slot)
        try:
            with self._lent(slot, self._open_reader, _READER_WAIT_S) as connection:
                yield _given(slot)
        finally:
            with slot.lock:  # a fork waits for this lock, so it never happens during the close
                slot.close()
            self._further.discard(slot)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Provide the write connection inside one immediate transaction: commit at the end, roll back on an exception.

        Raises sqlite3.Error, and OSError if the directory is gone.
        """
        with self._lent(self._writer, self._open_writer, _LENT_WAIT_S) as connection:
            if connection is None:
                raise sqlite3.OperationalError("this process is in the middle of writing the index")
            _undo(connection)  # roll back what a second interrupt left open
            try:
                _patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
                yield connection
                _patiently(lambda: connection.execute("COMMIT"))
            except BaseException:  # an interrupt too: an open transaction would lock out all writers
                _undo(connection)
                raise
            self._shorten_log(connection)

    def is_damaged(self) -> bool:
        """Return whether the file at the path was found damaged; the next writer replaces it."""
        return self._broken_inode != 0 and self._inode() == self._broken_inode

    def slots(self) -> list[_Connection]:
        """Return all slots that may hold a connection now."""
        return [self._reader, self._writer, *self._further]

    def close(self) -> None:
        for each in (self._reader, self._writer):
            with each.lock:
                # If lent, this is a destructor. The connection is checked again before its next use.
                if not each.is_lent:
                    each.close()

    @contextlib.contextmanager
    def _lent(
        self, slot: _Connection, opened: Callable[[_Connection], sqlite3.Connection], wait_s: float
    ) -> Iterator[sqlite3.Connection | None]:
        """Provide a slot's connection to one thread at a time; yield None where waiting could deadlock.

        The garbage collector runs destructors in any thread, between any two lines. A destructor that closes a file may
        use the index, and may wait for other threads. So no thread waits for itself, and others wait for `wait_s` only.
        """
        if slot.pid not in (0, os.getpid()):  # a fork that bypassed the hooks
            slot.abandon()
        lock = slot.lock
        # The main thread waits in `with` only, where Ctrl-C cannot strike between acquire and block. No destructor waits
        # for the main thread.
        is_timed = threading.get_ident() != threading.main_thread().ident
        while is_timed and not lock.acquire(timeout=wait_s):
            # A forking thread releases the lock soon; an extra connection would be open in the child.
            if not _FORKING:
                yield None
                return
        try:
            with lock:
                if slot.is_lent:
                    yield None
                    return
                try:
                    slot.is_lent = True
                    yield opened(slot)
                except sqlite3.Error as error:
                    if _is_damage(error):
                        log.warning("the index %s is damaged (%s) and will be made anew", self._path, error)
                        self._broken_inode = slot.inode
                        slot.close()
                    raise
                finally:
                    slot.is_lent = False
        finally:
            if is_timed:
                lock.release()

    def _open_reader(self, slot: _Connection) -> sqlite3.Connection:
        now = time.monotonic()
        if slot.sqlite is not None and now < slot.looked_s + _LOOK_S:
            return slot.sqlite
        slot.looked_s = now
        if self._inode() != slot.inode:
            slot.close()
        if slot.sqlite is None:
            self._connect(slot, _READER_WAIT_S)
        return _given(slot)

    def _open_writer(self, slot: _Connection) -> sqlite3.Connection:
        inode = self._inode()
        if inode == 0 or inode == self._broken_inode:
            slot.close()
            self._replace()
        elif inode != slot.inode:
            slot.close()
        if slot.sqlite is None:
            self.look_again()
            _patiently(lambda: self._connect(slot, _TRY_S))
        return _given(slot)

    def _inode(self) -> int:
        """Return the inode of the file at the path; 0 without one, or if it is not ours (SQLite follows symlinks)."""
        status = disk.state(self._path)
        return status.st_ino if status is not None and _is_ours(status) else 0

    def _connect(self, slot: _Connection, wait_s: float) -> None:
        """Open the file at the path and check that it is an index of this version."""
        slot.inode = self._inode()
        if slot.inode == 0 or slot.inode == self._broken_inode:
            raise sqlite3.OperationalError("there is no index")
        logs = (disk.state(self._path + suffix) for suffix in _LOGS)
        if not all(_is_ours(status) for status in logs if status is not None):
            raise sqlite3.DatabaseError("a log of it is not ours")
        slot.pid = os.getpid()
        slot.sqlite = _connect(self._path, wait_s)
        try:
            self._prepare(slot.sqlite)
        except BaseException:  # an interrupt too: never use a half-prepared connection
            slot.close()
            raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._has_wal:
            connection.execute("PRAGMA journal_mode=WAL")
        else:
            # An index with a write-ahead log, copied from another disk: with this lock, SQLite maps no file.
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=PERSIST")
            connection.execute("PRAGMA locking_mode=NORMAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={self.wal_pages}")
        connection.execute(f"PRAGMA journal_size_limit={self.wal_pages * 4096}")
        if connection.execute("PRAGMA user_version").fetchone()[0] != self._version:
            raise sqlite3.DatabaseError("it is not an index of this version")

    def look_again(self) -> None:
        """Make the next reader check whether the file at the path is still the one it has open."""
        self._reader.looked_s = 0.0

    def limit_wal(self, pages: int) -> None:
        """Limit the write-ahead log to about `pages` pages of 4 KiB, for connections opened from now on."""
        if pages != self.wal_pages:
            self.wal_pages = pages
            self.close()

    def _shorten_log(self, connection: sqlite3.Connection) -> None:
        """Truncate an overgrown write-ahead log; SQLite does it only when there are no readers."""
        if disk.size_of(f"{self._path}-wal") > 2 * self.wal_pages * 4096:
            # Active readers may block this: the next writer tries again.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

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
            raise sqlite3.OperationalError("another process is making the index anew")
        try:
            if self._inode() in (0, self._broken_inode):
                self._put_fresh()
        finally:
            self._locks.drop(_REPLACING)

    def _put_fresh(self) -> None:
        temp = self._temp()
        try:
            self._make_fresh(temp)
            for suffix in ("", *_LOGS):  # set aside in `tmp/` for an hour, for inspection
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._path + suffix, f"{temp}-old{suffix}")
            os.rename(temp, self._path)
        except BaseException:  # an interrupt too must not leave a partial index
            with contextlib.suppress(OSError):  # retries create further files, which would fill a full disk
                disk.unlink(temp)
            raise

    def _make_fresh(self, temp: str) -> None:
        os.close(disk.create(temp))  # SQLite would create it readable by others
        fresh = _connect(temp, _WRITER_WAIT_S)
        try:
            fresh.executescript(
                f"PRAGMA synchronous=OFF; BEGIN; {self._schema}; PRAGMA user_version={self._version}; COMMIT"
            )
        finally:
            fresh.close()


def _connect(path: str, wait_s: float) -> sqlite3.Connection:
    uri = f"file:{urllib.parse.quote(path)}?mode=rw"
    return sqlite3.connect(
        uri,
        uri=True,
        timeout=wait_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _patiently(do: Callable[[], object]) -> None:
    """Run `do`, which needs a database lock; wait for other processes and threads, up to a limit."""
    deadline = time.monotonic() + _WRITER_WAIT_S
    while True:
        try:
            do()
            return
        except sqlite3.OperationalError as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)  # SQLite does not wait at all where two waiters could deadlock


def _undo(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _given(slot: _Connection) -> sqlite3.Connection:
    if slot.sqlite is None:
        raise sqlite3.OperationalError("the index is not open")
    return slot.sqlite


def _is_damage(error: sqlite3.Error) -> bool:
    """Return whether the file itself is damaged, rather than busy, full or unreachable."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if isinstance(error, sqlite3.OperationalError) and "no such" in str(error):
        return True
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHORT_READ:  # truncated while open
        return True
    return type(error) is sqlite3.DatabaseError and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _close_both(*slots: _Connection) -> None:
    """Close connections reopened by late reads: Python 3.13 warns of connections that are garbage collected."""
    for each in slots:  # no locks needed: any lock holder would still reference the database
        each.close()


_DATABASES: weakref.WeakSet[Database] = weakref.WeakSet()
_GATE = threading.RLock()  # one fork at a time; reentrant, because a destructor may read meanwhile
_FORKING: list[_Connection] = []  # slots whose locks are held during a fork, by the holder of the gate


def _before_fork() -> None:
    _GATE.acquire()
    for database in list(_DATABASES):
        seen: set[_Connection] = set()
        # Repeat: another slot may be added meanwhile.
        while found := [slot for slot in database.slots() if slot not in seen]:
            seen.update(found)
            for slot in found:
                if slot.lock.acquire(timeout=_FORK_WAIT_S):
                    _FORKING.append(slot)
                    if not slot.is_lent:  # in use by this same thread, which forks in the middle of it
                        with contextlib.suppress(sqlite3.Error):
                            slot.close()


def _after_fork_in_parent() -> None:
    try:
        while _FORKING:
            _FORKING.pop().lock.release()
    finally:  # an interrupt too: the next fork would wait forever
        _GATE.release()


def _after_fork_in_child() -> None:
    global _GATE
    _GATE = threading.RLock()
    _FORKING.clear()
    for database in list(_DATABASES):
        for slot in database.slots():
            slot.abandon()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
