"""What happens in a process, an event a line, in a file of its own: for `cachedfs report`. Off until somebody asks for it.

Requests and waits are noted when they are over. What is read and hit is not noted one by one: `Engine` counts it anyway. Four
times a second a thread writes what was noted, and the sums where they changed, a line of JSON each: who reads does nothing for it
but note what he waited for, and who reads the file of a process that was killed has all but its last quarter of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from cachedfs.common.logging import public_url

__all__ = [
    "FORMAT",
    "VARIABLE",
    "CounterSource",
    "EventLog",
    "current",
    "log_events",
    "unwatch",
    "waiting",
    "watch",
]

logger = logging.getLogger("cachedfs.events")

FORMAT = 1
VARIABLE = "CACHEDFS_EVENTS"
MOST_BYTES = 64 << 20  # of one file: some 300,000 requests
EVERY_S = 0.25  # between two times that it is written
MOST_NOTED = 512  # events that wait for it, where they come so fast
LEAST_S = 1e-3  # a wait that is worth an event: shorter ones are turns of the loop

# Made once: json.dumps would make one for every line.
_encoded = json.JSONEncoder(separators=(",", ":")).encode


class CounterSource:
    """Whoever counts what it does."""

    def sums(self) -> Mapping[str, Any]:
        """Return the sums since it began: JSON values. In any thread, without I/O."""
        raise NotImplementedError


class EventLog:
    """The file of one process, made with its first events, at most `most` bytes long. In any thread; never an error."""

    def __init__(self, folder: str, *, most: int = MOST_BYTES) -> None:
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._most, self._size = most, 0
        self._file: int | None = None
        self._is_over = False
        self._noted: deque[dict[str, Any]] = deque()
        # Locks that a signal's handler finds taken by what it interrupted are taken once more, or it would wait for ever.
        self._lock, self._sampling = threading.RLock(), threading.RLock()
        # Times within a process are a monotonic clock's, so that none runs backwards when the wall clock is set.
        self._began, self._zero = time.time(), time.monotonic()
        # By who counts: its number here, when its sums were looked at last, and those that were written last.
        self._told: weakref.WeakKeyDictionary[CounterSource, tuple[int, float, Mapping[str, Any]]]
        self._told = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def note(self, kind: str, began: float, **fields: Any) -> None:
        """Add one event, to be written soon; `began` is a time of the monotonic clock."""
        if self._is_over:
            return
        self._noted.append({"kind": kind, "at": round(self._began + began - self._zero, 6), **fields})
        if len(self._noted) >= MOST_NOTED:
            self.write()
        elif self._thread is None:
            self.start()

    def write(self) -> None:
        """Write what was noted so far."""
        with self._lock:
            # One by one, as others add to it meanwhile.
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            if noted and not self._is_over:
                self._add([_encoded(event).encode() + b"\n" for event in noted])

    def sample(self, source: CounterSource) -> None:
        """Add the sums of `source`, unless they are those that were written last; the first say where counting begins."""
        with self._sampling:  # or older sums could come last
            sums, now = source.sums(), time.monotonic()
            number, looked, last = self._told.get(source) or (next(self._numbers), now, None)
            self._told[source] = number, now, sums
            if last != sums:
                self.note("sums", now, of=number, over_s=round(now - looked, 6), **sums)

    def sample_all(self) -> None:
        """Add the sums of all who count, where they changed."""
        for source in (each() for each in _watched):
            if source is not None:
                self.sample(source)

    def after_fork(self) -> EventLog:
        """Return the log of a child: its file and thread are its own, and no lock of the parent's is waited for."""
        if self._file is not None:
            os.close(self._file)
        return EventLog(self.folder, most=self._most)

    def start(self) -> None:
        """Write from now on, in a thread of its own."""
        with self._lock:
            if self._thread is not None or self._is_over:
                return
            thread = threading.Thread(target=self._run, name="cachedfs-events", daemon=True)
            # Too many threads: it is written at the end, and when there is much.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Write what was noted, and nothing more."""
        self.write()
        with self._lock:
            self._is_over = True
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    def _run(self) -> None:
        while not self._is_over:
            time.sleep(EVERY_S)
            self.sample_all()
            self.write()

    def _add(self, lines: list[bytes]) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            sizes = itertools.accumulate(map(len, lines), initial=self._size)
            n_fit = sum(size <= self._most for size in sizes) - 1
            if n_fit < len(lines):
                lines, self._is_over = [*lines[:n_fit], b'{"kind":"full"}\n'], True
            data = b"".join(lines)
            self._size += len(data)
            while data:  # a full disk takes a part of it first
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._is_over = True
            logger.warning("events are not written to %s: %s", self.folder, error.strerror or error)

    def _open(self) -> int:
        os.makedirs(self.folder, exist_ok=True)
        name = f"events-{os.getpid()}-{int(self._began * 1e6):x}.jsonl"  # a number may come back, not within a microsecond
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        file = os.open(os.path.join(self.folder, name), flags, 0o600)
        head = {"kind": "process", "at": self._began, "format": FORMAT, "pid": os.getpid()}
        self._size = os.write(file, _encoded(head).encode() + b"\n")
        return file


# Replaced as a whole, as it is looked through in a thread of its own.
_watched: tuple[weakref.ref[CounterSource], ...] = ()
_log: EventLog | None = None


def current() -> EventLog | None:
    """Return where events go now; None: nowhere."""
    return _log


def log_events(folder: str | os.PathLike[str] | None) -> None:
    """Write what happens in this process into a file of its own in `folder`, which is made; None: not any more.

    `cachedfs report FOLDER` draws it. Processes that are started from here on write too, each its own file, as the environment
    variable `CACHEDFS_EVENTS=FOLDER` has it for all. A file takes 64 MiB at most. In it are addresses, ranges, times and
    sizes; no bytes of objects, no credentials, no query of any address.
    """
    global _log
    old, _log = _log, None
    if old is not None:
        old.sample_all()
        old.close()
    if folder is None:
        os.environ.pop(VARIABLE, None)
        return
    log = EventLog(os.fspath(folder))
    os.environ[VARIABLE] = log.folder
    _log = log
    if _watched:
        log.sample_all()
        log.start()


def watch(source: CounterSource) -> None:
    """Have the sums of `source` written, whenever events are."""
    global _watched
    _watched = (*(each for each in _watched if each() is not None), weakref.ref(source))
    if _log is not None:
        _log.sample(source)
        _log.start()


def unwatch(source: CounterSource) -> None:
    """Write the sums of `source` a last time."""
    global _watched
    _watched = tuple(each for each in _watched if each() not in (None, source))
    if _log is not None:
        _log.sample(source)
        _log.write()  # the process may be about to end


@contextlib.contextmanager
def waiting(path: str, start: int | None = None, stop: int | None = None) -> Iterator[None]:
    """Somebody waits for bytes of an object, or for what it is, as long as the block runs."""
    log, began = _log, time.monotonic()
    try:
        yield
    finally:
        if log is not None and (took_s := time.monotonic() - began) >= LEAST_S:
            log.note("wait", began, path=public_url(path), start=start, stop=stop, took_s=round(took_s, 6))


def _after_fork() -> None:
    # The parent's file and thread are the parent's; its runtimes count nothing here.
    global _log, _watched
    _watched = ()
    if _log is not None:
        _log = _log.after_fork()


def _begin() -> None:
    global _log
    if folder := os.environ.get(VARIABLE):
        _log = EventLog(folder)


def _at_end() -> None:
    if _log is not None:
        _log.write()


atexit.register(_at_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if sys.platform != "win32":
    _begin()
