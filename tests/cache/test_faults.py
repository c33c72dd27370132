"""Disk errors: reads stay right or miss, and the cache recovers when the disk does."""

import contextlib
import errno
import logging
import os
import random
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from cachedfs.cache import disk, locks
from cachedfs.cache.index import database
from cachedfs.errors import CacheError
from tests.cache.audit import audit, recount
from tests.cache.days import FACT, KEY, day
from tests.cache.faults import real_call, replace_call
from tests.cache.helpers import BLOCK, content, key_of, put, whole

E = errno
FULL = (E.ENOSPC, E.EDQUOT)
REFUSED = (E.EACCES, E.EROFS)


class Case(NamedTuple):
    """How a call may fail: by an error, or by an answer that is not true."""

    errors: tuple[int, ...] = ()
    answer: object = None


def reads(*errors):
    return Case((E.EIO, *errors))


CASES = {
    "allocate": Case((*FULL, E.EIO)),
    "create": Case((*FULL, E.EIO, *REFUSED, E.EMFILE, E.ENOENT)),
    "fcntl.lockf": Case((E.ENOLCK, E.EIO)),
    "is_network": Case(answer=True),
    "make_folder": Case((*FULL, E.EIO, *REFUSED)),
    "maps_safely": Case(answer=False),
    "memory_file": reads(E.ENOMEM, E.EMFILE),
    "open_lockable": Case((*FULL, E.EIO, *REFUSED, E.EMFILE, E.ELOOP)),
    "open_to_update": reads(*REFUSED, E.EMFILE, E.ELOOP),
    "os.access": Case(answer=False),
    "os.chmod": Case((E.EIO, *REFUSED)),
    "os.close": Case((E.EIO, *FULL)),
    "os.fstat": reads(E.ESTALE),
    "os.link": Case((*FULL, E.EIO, *REFUSED)),
    "os.lstat": reads(*REFUSED),
    "os.makedirs": Case((*FULL, E.EIO, *REFUSED)),
    "os.open": reads(*REFUSED, E.EMFILE, E.ENFILE),
    "os.path.exists": Case(answer=False),
    "os.pread": reads(),
    "os.preadv": reads(),
    "os.pwrite": Case((*FULL, E.EIO, *REFUSED)),
    "os.rename": Case((*FULL, E.EIO, *REFUSED)),
    "read_cached": reads(),
    "read_cached_into": reads(),
    "scan": reads(*REFUSED, E.EMFILE),
    "shutil.rmtree": Case((E.EIO, *REFUSED)),
    "size_of": Case(answer=0),
    "space": reads(*REFUSED),
    "state": reads(*REFUSED),
    "truncate": Case((*FULL, E.EIO, *REFUSED)),
    "unlink": Case((E.EIO, *REFUSED)),
    "write_all": Case((*FULL, E.EIO)),
    "write_file": Case((*FULL, E.EIO, *REFUSED, E.EMFILE, E.ENOENT)),
}


class Faults:
    """Stands in for one call of the cache: counts its calls, and fails in the `first` of them and `more` after it."""

    def __init__(self, name):
        self.name, self.real, self.calls, self.failed = name, real_call(name), 0, 0
        self.first = self.last = 0
        self.fault = None

    def arm(self, fault, first, *, for_ever):
        self.calls = 0
        self.fault, self.first, self.last = fault, first, 1 << 60 if for_ever else first

    def heal(self):
        self.first = self.last = 0

    def __call__(self, *args, **options):
        self.calls += 1
        if not self.first <= self.calls <= self.last:
            return self.real(*args, **options)
        self.failed += 1
        if callable(self.fault):
            return self.fault()
        number = self.fault
        if self.name == "write_all":  # half of it is on the disk
            fd, buffers, offset = args
            self.real(fd, [bytes(b"".join(buffers))[: BLOCK // 2]], offset)
        if self.name == "write_file":
            path, buffers, size = args
            self.real(path, [bytes(b"".join(buffers))[: size // 2]], size // 2)
        if self.name == "os.close":  # the descriptor is gone, whatever close says
            self.real(*args)
        raise OSError(number, os.strerror(number))


LAST = key_of("b/last")


@pytest.fixture
def faulty(monkeypatch):
    """Put a call of the cache into the hands of a test."""

    def one(name):
        faults = Faults(name)
        replace_call(monkeypatch, name, faults)
        return faults

    return one


def left_open(directory):
    """Return the files below `directory` that this process has open, but for those that it keeps or has mapped."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    kept = ("/locks", "/change-counters", "/access-records")
    return [
        path for path in found if path.startswith(f"{directory}/") and not path.split(" (")[0].endswith(kept)
    ]


def close_lock_files(directory):
    """Close the lock files below `directory`: a process keeps each open, and these tests make hundreds."""
    for path in [path for path in locks._DESCRIPTORS if path.startswith(str(directory))]:
        os.close(locks._DESCRIPTORS.pop(path))


@pytest.fixture(scope="module")
def calls_of_a_day(tmp_path_factory):
    """Count the calls of each kind in one day."""
    day(tmp_path_factory.mktemp("warm"))  # what a process opens once
    with pytest.MonkeyPatch.context() as patch:
        counts = {name: Faults(name) for name in CASES}
        for name, faults in counts.items():
            replace_call(patch, name, faults)
        day(tmp_path_factory.mktemp("clean"))
    return {name: faults.calls for name, faults in counts.items()}


def heals(cache):
    """The disk is sound again: the next put stores, what was stored is read, and an audit has nothing left to say."""
    cache._own._again_at = cache._own.look_at = 0.0  # so much later
    put(cache, LAST, 0)
    assert cache.cannot_store is None
    assert whole(cache, LAST, 0) == content(LAST, 0)
    recount(cache)
    assert audit(cache).ok
    counter = cache.metadata.counter("gs://test", "b/x")
    assert not cache.metadata.counters.is_private
    cache.metadata.keep_records([FACT._replace(counter=counter)])
    assert cache.metadata.lookup("gs://test", "b/x") == FACT._replace(counter=counter)
    cache.close()


@pytest.mark.parametrize("name", CASES)
def test_a_disk_that_fails_costs_no_read_and_the_cache_heals_with_it(
    faulty, calls_of_a_day, tmp_path, caplog, name
):
    """The first error of a call at all its calls, the last one at one of them."""
    faults, answers = faulty(name), CASES[name].errors or ((lambda: CASES[name].answer),)
    some = random.Random(name).randint(1, calls_of_a_day[name])
    for fault, first, for_ever in ((answers[0], 1, True), (answers[-1], some, False)):
        directory = tmp_path / f"{first} {for_ever}"
        caplog.clear()
        faults.arm(fault, first, for_ever=for_ever)
        cache = day(directory)
        faults.heal()
        heals(cache)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        # Of each of the two caches of a day: that it cannot store, and what makes it slower before that.
        assert sum("not cached" in warning for warning in warnings) <= 2, warnings
        assert sum("not cached" not in warning for warning in warnings) <= 2, warnings
        close_lock_files(tmp_path)
        assert left_open(directory) == []
    assert faults.failed


# One call at a time
def failing(number):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("name", "number"), [("os.open", errno.EMFILE), ("os.pread", errno.EIO)])
def test_a_block_that_could_not_be_read_is_tried_again_in_a_minute_or_stored_anew(
    open_cache, monkeypatch, name, number
):
    cache = open_cache()
    put(cache, KEY, 0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(2):  # it may fail again
        assert cache.has(KEY, 0)
        if name == "os.pread":
            whole(cache, KEY, 0)  # it is open already
        with monkeypatch.context() as patch:
            replace_call(patch, name, failing(number))
            assert whole(cache, KEY, 0) is None
        now += 59
        assert not cache.has(KEY, 0)  # asked for elsewhere, not again and again
        assert whole(cache, KEY, 0) is None
        now += 2
    assert (cache.has(KEY, 0), whole(cache, KEY, 0)) == (True, content(KEY, 0))
    cache.close()
    with monkeypatch.context() as patch:
        replace_call(patch, name, failing(number))
        assert whole(cache, KEY, 0) is None
    put(cache, KEY, 0)
    assert whole(cache, KEY, 0) == content(KEY, 0)
    assert audit(cache).ok


def test_blocks_that_cannot_be_opened_for_want_of_descriptors_are_counted_later_and_not_removed(
    cache, monkeypatch
):
    put(cache, KEY, 0, 1, 2)
    cache.close()
    Path(cache.root, "index.db").unlink()
    with monkeypatch.context() as patch:
        replace_call(patch, "os.open", failing(errno.EMFILE))
        with pytest.raises(CacheError, match="Too many open files"):
            put(cache, KEY, 3)
    put(cache, KEY, 3)
    assert cache.usage()[0] == 4
    assert [whole(cache, KEY, index) for index in range(4)] == [content(KEY, index) for index in range(4)]


def test_an_index_that_was_locked_when_it_was_opened_is_not_used_without_a_look_at_its_version(
    open_cache, monkeypatch, tmp_path
):
    monkeypatch.setattr(disk, "maps_safely", lambda path: False)  # its journal locks readers out
    cache = open_cache(tmp_path / "c")
    cache.metadata.keep_records([FACT])
    cache.close()
    other = sqlite3.connect(Path(cache.root, "index.db"), isolation_level=None)
    other.execute("PRAGMA user_version = 99")
    other.execute("BEGIN EXCLUSIVE")
    assert cache.metadata.lookup("gs://test", "b/x") is None
    other.close()
    assert cache.metadata.lookup("gs://test", "b/x") is None


@pytest.mark.parametrize(
    ("has_wal", "statements"),
    [
        (True, ["PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE"]),
        (False, ["BEGIN EXCLUSIVE"]),
        (False, ["BEGIN", "SELECT * FROM sqlite_schema"]),
    ],
    ids=["opened", "opened_without_wal", "read_without_wal"],
)
def test_a_write_waits_for_an_index_that_is_locked_for_a_moment(
    open_cache, monkeypatch, tmp_path, has_wal, statements
):
    monkeypatch.setattr(disk, "maps_safely", lambda path: has_wal)
    cache = open_cache(tmp_path / "c")
    put(cache, KEY, 0)
    cache.close()
    other = sqlite3.connect(Path(cache.root, "index.db"), isolation_level=None, check_same_thread=False)
    for statement in statements:
        other.execute(statement).fetchone()
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        other.close()

    monkeypatch.setattr(database, "_TRY_S", 0.001)
    replace_call(monkeypatch, "time.sleep", pause)
    put(cache, KEY, 1)
    assert len(pauses) == 1
    assert cache.usage()[0] == 2
