"""Connections to the SQLite index: open and make a file, wait for the locks of others, recognize damage."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
import urllib.parse
from collections.abc import Callable
from typing import TypeVar

from cachedfs.cache import disk
from cachedfs.cache.index.schema import SCHEMA, VERSION

__all__ = ["again", "connect", "is_damage", "is_ours", "make_new"]

T = TypeVar("T")

_WRITER_WAIT_S = 2.0
_PAUSE_S = 0.005  # between two attempts
_STATEMENTS = 128


def make_new(path: str) -> None:
    os.close(disk.create(path))  # SQLite would create it readable by others
    new = connect(path, _WRITER_WAIT_S)
    try:
        new.executescript(f"PRAGMA synchronous=OFF; BEGIN; {SCHEMA}; PRAGMA user_version={VERSION}; COMMIT")
    finally:
        new.close()


def connect(path: str, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{urllib.parse.quote(path)}?mode=rw",
        uri=True,
        timeout=wait_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )


def is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def again(act: Callable[[], T], error: sqlite3.OperationalError) -> T:
    """Do again what failed with `error`; wait for the locks of other processes and threads, up to a limit."""
    deadline = time.monotonic() + _WRITER_WAIT_S
    while True:
        is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
        if not is_busy or time.monotonic() > deadline:
            raise error
        time.sleep(_PAUSE_S)  # SQLite does not wait at all where two waiters could deadlock
        try:
            return act()
        except sqlite3.OperationalError as again:
            error = again


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the file itself is damaged, rather than busy, full or unreachable."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if isinstance(error, sqlite3.OperationalError) and "no such" in str(error):
        return True
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # truncated while open
        return True
    return type(error) is sqlite3.DatabaseError and code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )
