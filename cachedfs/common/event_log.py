"""Event log for `cachedfs report`: one JSON-lines file per process. Off by default.

Requests and waits are logged one by one, when they end. Reads and hits are not: `Engine` counts them, and a thread
writes the changed counters together with the buffered events four times a second. A killed process loses at most the
last quarter of a second.
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
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from cachedfs.common.logging import public_url

logger = logging.getLogger("cachedfs.events")

FORMAT = 1
VARIABLE = "CACHEDFS_EVENTS"
COUNTS = ("hits", "misses", "requests", "bytes_fetched", "bytes_served", "evictions")  # that are logged
MAX_BYTES = 64 << 20  # maximum size of one file: about 300,000 requests
EVERY_S = 0.25  # seconds between writes
MAX_BUFFERED = 512  # buffered events at which the log is written at once
MIN_WAIT_S = 1e-3  # shortest wait that is logged: shorter ones are just turns of the event loop

# Created once, because json.dumps would create an encoder for every line.
_encoded = json.JSONEncoder(separators=(",", ":")).encode


class EventLog:
    """The log file of one process, created with its first events, of at most `most` bytes.

    Methods work in any thread and never raise: if the file cannot be written, logging ends with a warning.
    """

    def __init__(self, folder: str, *, most: int = MAX_BYTES) -> None:
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._max_bytes, self._size = most, 0
        self._file: int | None = None
        self._is_over = False
        self._buffer: deque[dict[str, Any]] = deque()
        # Reentrant, because a destructor that the garbage collector runs meanwhile may log.
        self._lock = threading.RLock()
        # Event times are based on the monotonic clock, so that they stay in order when the wall clock is set.
        self._started_at, self._monotonic_start = time.time(), time.monotonic()
        # By source: when its counters were last read, and their values then.
        self._last_samples: MutableMapping[Any, tuple[float, Mapping[str, Any]]]
        self._last_samples = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def note(self, kind: str, began: float, **fields: Any) -> None:
        """Buffer one event, to be written soon; `began` is its start time on the monotonic clock."""
        if self._is_over:
            return
        at = round(self._started_at + began - self._monotonic_start, 6)
        self._buffer.append({"kind": kind, "at": at, **fields})
        if len(self._buffer) >= MAX_BUFFERED:
            self.write()
        elif self._thread is None:
            self.start()

    def write(self) -> None:
        """Write the buffered events."""
        with self._lock:
            # One by one, because other threads append at the same time.
            events = [self._buffer.popleft() for _ in range(len(self._buffer))]
            if events and not self._is_over:
                self._add([_encoded(event).encode() + b"\n" for event in events])

    def sample(self, source: Any) -> None:
        """Log what `source` counted since the last sample; its `sums()` is called in any thread and does no I/O.

        At the first sample counting starts, and its `cache_dir` is logged.
        """
        with self._lock:  # otherwise a count could be logged twice
            sums, now = source.sums(), time.monotonic()
            sampled_at, last = self._last_samples.get(source, (now, None))
            self._last_samples[source] = now, sums
            if last is None:
                self.note("cache", now, directory=source.cache_dir)
            elif last != sums:
                added = {name: sums[name] - last[name] for name in COUNTS}
                over_s = round(now - sampled_at, 6)
                self.note("counts", now, over_s=over_s, counts=added, bytes_per_s=sums["bytes_per_s"])

    def sample_all(self) -> None:
        """Log the counters of all watched sources that changed."""
        for source in (each() for each in _watched):
            if source is not None:
                self.sample(source)

    def after_fork(self) -> EventLog:
        """Return a log for the child of a fork, with its own file, thread and locks."""
        if self._file is not None:
            os.close(self._file)
        return EventLog(self.folder, most=self._max_bytes)

    def start(self) -> None:
        """Start the thread that writes the log, unless it runs already."""
        with self._lock:
            if self._thread is None and not self._is_over:
                thread = threading.Thread(target=self._run, name="cachedfs-events", daemon=True)
                # Without a thread the log is still written when many events are buffered, and at exit.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Write the buffered events and end the log."""
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
            n_fit = sum(size <= self._max_bytes for size in sizes) - 1
            if n_fit < len(lines):
                lines, self._is_over = [*lines[:n_fit], b'{"kind":"full"}\n'], True
            data = b"".join(lines)
            self._size += len(data)
            while data:  # a disk that is almost full may take only a part
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._is_over = True
            logger.warning("events are not written to %s: %s", self.folder, error.strerror or error)

    def _open(self) -> int:
        os.makedirs(self.folder, exist_ok=True)
        # With the time in microseconds, because process ids are reused.
        name = f"events-{os.getpid()}-{int(self._started_at * 1e6):x}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        file = os.open(os.path.join(self.folder, name), flags, 0o600)
        head = {"kind": "process", "at": self._started_at, "format": FORMAT, "pid": os.getpid()}
        self._size = os.write(file, _encoded(head).encode() + b"\n")
        return file


# Replaced, never changed, because the writing thread iterates over it.
_watched: tuple[weakref.ref[Any], ...] = ()
active: EventLog | None = None
"""The event log of this process; None if logging is off."""


def log_events(folder: str | os.PathLike[str] | None) -> None:
    """Start writing this process's event log to a new file in `folder`; None stops it.

    The folder is created if needed. `cachedfs report FOLDER` turns the log into a page of charts. Processes started
    from here on write a file each, as with `CACHEDFS_EVENTS=FOLDER` in their environment. A file is at most 64 MiB. It
    contains URLs without their query, byte ranges, times, sizes and the cache directory, but no data and no credentials.

    Example: `cachedfs.log_events("events")`.
    """
    global active
    old, active = active, None
    if old is not None:
        old.sample_all()
        old.close()
    if folder is None:
        os.environ.pop(VARIABLE, None)
        return
    log = EventLog(os.fspath(folder))
    os.environ[VARIABLE] = log.folder
    active = log
    if _watched:
        log.sample_all()
        log.start()


def watch(source: Any) -> None:
    """Log the counters of `source` from now on, whenever logging is on."""
    global _watched
    _watched = (*(each for each in _watched if each() is not None), weakref.ref(source))
    if active is not None:
        active.sample(source)
        active.start()


def unwatch(source: Any) -> None:
    """Log the counters of `source` a last time."""
    global _watched
    _watched = tuple(each for each in _watched if each() not in (None, source))
    if active is not None:
        active.sample(source)
        active.write()  # the process may be about to end


_NOT_LOGGED = contextlib.nullcontext()


def waiting(
    path: str, start: int | None = None, stop: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Log that a caller waits for bytes or metadata of an object while the `with` block runs.

    `start` and `stop` are the byte range. Waits below `MIN_WAIT_S` are not logged.
    """
    return _NOT_LOGGED if (log := active) is None else _logged_wait(log, path, start, stop)


@contextlib.contextmanager
def _logged_wait(log: EventLog, path: str, start: int | None, stop: int | None) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        if (took_s := time.monotonic() - began) >= MIN_WAIT_S:
            log.note("wait", began, path=public_url(path), start=start, stop=stop, took_s=round(took_s, 6))


def _after_fork() -> None:
    # File, thread and engines belong to the parent.
    global active, _watched
    _watched = ()
    if active is not None:
        active = active.after_fork()


def _at_end() -> None:
    if active is not None:
        active.write()


atexit.register(_at_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if sys.platform != "win32" and (_folder := os.environ.get(VARIABLE)):
    active = EventLog(_folder)
