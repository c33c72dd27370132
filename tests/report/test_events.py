"""The event log: its content, one file per process, and what is left after a kill or a fork."""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import types
import warnings

import fsspec
import pytest

from cachedfs import log_events
from cachedfs.cache.locks import ByteRangeLocks
from cachedfs.common import event_log
from cachedfs.filesystem import CachedGCSFileSystem
from cachedfs.origins.retry import RetryPolicy
from cachedfs.report.event_reader import read
from cachedfs.report.summary import summary_of
from cachedfs.sim import Fault
from tests.support import ROOT, MiB, forget, noise, until


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that receives events until the test is over."""
    monkeypatch.setenv(event_log.VARIABLE, "")  # restored afterwards
    log_events(tmp_path / "events")
    yield tmp_path / "events"
    log_events(None)


def lines(folder, *kinds):
    """Return the events of these kinds in all files."""
    event_log.active.write()
    paths = sorted(folder.glob("*.jsonl"))
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [event for event in events if event["kind"] in kinds]


def test_no_events_are_written_unless_enabled(cloud, tmp_path):
    assert event_log.active is None
    cloud.put("key", b"data")
    CachedGCSFileSystem().cat_file(cloud.path("key"))
    assert "cachedfs-events" not in {thread.name for thread in threading.enumerate()}


def test_the_sums_of_events_are_those_of_stats_and_of_the_server(cloud, folder):
    for number in range(5):
        cloud.put(f"d/{number}", noise(3 * MiB + number))
    fs = CachedGCSFileSystem(request_size=MiB)
    for _ in range(2):
        for number in range(5):
            fs.cat_file(cloud.path(f"d/{number}"))
        fs._objects.engine.drain(120)  # else a block may come from its request, which waits for a turn
    before = lines(folder, "request", "wait")
    with fs.open(cloud.path("d/0")) as file:
        file.read()
    fs.cat_file(cloud.path("d/1"))
    assert lines(folder, "request", "wait") == before, "hits are not events"
    asked = len(cloud.server.requests)
    engine = fs._objects.engine
    forget()
    stats = engine.sums()
    summary = summary_of(read(folder))
    assert summary.counts == {name: stats[name] for name in summary.counts}
    assert summary.n_requests == summary.counts["requests"] == asked
    assert summary.bytes_answered == summary.counts["bytes_fetched"] == sum(3 * MiB + n for n in range(5))
    assert summary.counts["misses"] == 3 + 4 * 4
    assert summary.counts["hits"] == 3 + 4 * 4 + 3 + 4
    assert summary.n_failed == 0
    assert {wait.path for wait in read(folder).waits} == {cloud.path(f"d/{number}") for number in range(5)}


def test_refusals_for_a_rate_or_a_quota_are_recorded(drive, folder, monkeypatch):
    monkeypatch.setattr(
        "cachedfs.origins.drive.connection.RetryPolicy", functools.partial(RetryPolicy, base_s=0.0)
    )
    for reason in ("userRateLimitExceeded", "rateLimitExceeded", "dailyLimitExceeded", "forbidden"):
        drive.put(f"f/{reason}", b"data")
        drive.server.fail(Fault(kind="media", status=403, reason=reason))
        with contextlib.suppress(OSError):
            fsspec.filesystem("cdrive").cat_file(drive.path(f"f/{reason}"))
    refused = [(event["status"], event["refused"]) for event in lines(folder, "request")]
    assert [each for each in refused if each[0] == 403] == [(403, True)] * 3 + [(403, False)]
    assert "the origin refused 3 of " in summary_of(read(folder)).sentence


def test_a_wait_for_a_fetch_of_another_process_is_recorded(origin, folder, monkeypatch):
    origin.put("b/k", noise(3 * MiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    fs.info("b/k")
    take, shift = ByteRangeLocks.take, []
    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + sum(shift), time=time.time, sleep=time.sleep
    )
    monkeypatch.setattr(event_log, "time", clock)

    def taken_after_a_wait(*given):
        if not shift:
            shift.append(1000)
            return False
        return take(*given)

    monkeypatch.setattr(ByteRangeLocks, "take", taken_after_a_wait)
    with fs.open("b/k") as file:
        file.read(10)
    waits = [(event["path"], event["start"]) for event in lines(folder, "wait") if event["took_s"] > 500]
    assert ("b/k", 0) in waits


@contextlib.contextmanager
def forked(target):
    """Yield a child process that runs a function."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()
    yield child
    child.join()


def test_every_process_has_its_own_file(cloud, folder):
    cloud.put("key", noise(MiB))
    fs = CachedGCSFileSystem()
    fs.cat_file(cloud.path("key"), 0, 10)
    fs._objects.engine.drain(120)
    with forked(lambda: fs.cat_file(cloud.path("key"), 0, 10)):
        pass
    heads = lines(folder, "process")
    assert len({head["pid"] for head in heads}) == len(heads) == 2
    assert summary_of(read(folder)).counts["hits"] == 1  # of the child


def test_events_of_a_killed_process_are_read(cloud, folder):
    cloud.put("key", noise(MiB))

    def read_and_wait():
        CachedGCSFileSystem().cat_file(cloud.path("key"))
        threading.Event().wait()

    with forked(read_and_wait) as child:
        until(lambda: [*folder.glob("*.jsonl")] and read(folder).requests)
        child.kill()
    assert (len(read(folder).requests), read(folder).n_cut) == (1, 0)


def test_no_event_is_lost_between_threads_and_the_writer(tmp_path):
    log = event_log.EventLog(str(tmp_path))
    interval = sys.getswitchinterval()

    def note(name):
        for number in range(5000):
            log.note("wait", 0.0, path=f"{name}/{number}", took_s=1.0)

    threads = [threading.Thread(target=note, args=(name,)) for name in "abcd"]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            log.write()
    finally:
        sys.setswitchinterval(interval)
    log.close()
    waits = [wait.path for wait in read(tmp_path).waits]
    assert sorted(waits) == sorted(f"{name}/{number}" for name in "abcd" for number in range(5000))
    assert all(
        [each for each in waits if each[0] == name] == [f"{name}/{number}" for number in range(5000)]
        for name in "abcd"
    )


def test_a_program_writes_its_events_at_exit(tmp_path):
    code = "from cachedfs.common import event_log\nevent_log.MIN_WAIT_S = 0\nwith event_log.waiting('b/k'):\n    pass"
    environ = {**os.environ, event_log.VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, check=True)
    assert [wait.path for wait in read(tmp_path).waits] == ["b/k"]


@pytest.mark.parametrize("n_together", [1, 7, 1000])
def test_a_file_is_bounded(tmp_path, n_together):
    log = event_log.EventLog(str(tmp_path), most=2000)
    for number in range(100):
        log.note("wait", 0.0, path=f"bucket/{number}", took_s=1.0)
        if number % n_together == 0:
            log.write()
    log.close()
    (path,) = tmp_path.glob("*.jsonl")
    assert path.stat().st_size <= 2000 + 20
    records = read(tmp_path)
    assert records.n_full == 1
    assert 0 < len(records.waits) < 100


def test_an_unusable_file_is_one_warning(cloud, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(event_log.VARIABLE, "")
    (tmp_path / "file").touch()
    log_events(tmp_path / "file")
    cloud.put("key", b"data")
    try:
        assert CachedGCSFileSystem().cat_file(cloud.path("key")) == b"data"
        forget()
    finally:
        log_events(None)
    assert [record.name for record in caplog.records] == ["cachedfs.events"]
    assert caplog.records[0].levelno == logging.WARNING


def test_events_enabled_later_count_from_there(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv(event_log.VARIABLE, "")
    cloud.put("key", noise(MiB))
    fs = CachedGCSFileSystem()
    fs.cat_file(cloud.path("key"))
    fs._objects.engine.drain(120)
    log_events(tmp_path / "events")
    assert os.environ[event_log.VARIABLE] == str(tmp_path / "events")
    fs.cat_file(cloud.path("key"))
    log_events(None)
    assert event_log.VARIABLE not in os.environ
    counts = summary_of(read(tmp_path / "events")).counts
    assert (counts["hits"], counts["requests"], counts["bytes_served"]) == (1, 0, MiB)
