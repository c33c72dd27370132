"""Quotas of Google Drive: errors, cached data, bounded ranges, request pacing, reading ahead, daily use."""

import errno
import threading

import fsspec
import pytest

from cachedfs.core import engine
from cachedfs.errors import QuotaExceeded
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.sim import Fault
from tests.support import MiB, forget, noise, until, until_quiet

pytestmark = pytest.mark.usefixtures("default_rate_limits")


def test_a_used_up_download_quota_is_an_error_and_cached_data_is_still_read(drive):
    fs = fsspec.filesystem("cdrive")
    data = drive.put("big.bin", noise(4 * MiB))
    path = drive.path("big.bin")
    assert fs.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    until_quiet(fs._objects.engine)
    drive.server.fail(Fault(kind="media", status=403, times=None, reason="downloadQuotaExceeded"))
    drive.asked()
    with pytest.raises(QuotaExceeded, match=r"up to 24 hours.*Cached data can still be read.*copy") as caught:
        fs.cat_file(path, 2 * MiB, 4 * MiB)
    assert caught.value.errno == errno.EDQUOT
    until_quiet(fs._objects.engine)
    # The rest before the range is tried once.
    assert drive.asked().count("media") == 2
    assert fs.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    with fs.open(path) as file:
        file.seek(MiB + 5)
        assert file.read(100) == data[MiB + 5 : MiB + 105]
    until_quiet(fs._objects.engine)
    assert "media" not in drive.asked()
    with pytest.raises(QuotaExceeded):
        fs.cat_file(path, 2 * MiB, 4 * MiB)
    until_quiet(fs._objects.engine)
    assert drive.asked().count("media") == 1
    forget()
    again = fsspec.filesystem("cdrive")
    assert again.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    until(lambda: not again._objects.engine.active_requests)
    assert "media" not in drive.asked()


def test_the_rate_that_drive_allows_is_told(drive):
    fs = fsspec.filesystem("cdrive")
    drive.put("a", b"1")
    assert fs.link_stats().requests_per_s is None
    fs.cat_file(drive.path("a"))
    assert fs.link_stats().requests_per_s == pytest.approx(12_000 / 61)


def test_a_plan_lists_folders_only_while_that_delays_no_caller(drive, monkeypatch):
    for name in ("a", "b"):
        drive.put(f"{name}/x", b"x")
    spare, asked = [0.001], threading.Event()

    def spare_s(origin):
        asked.set()
        return spare[0]

    monkeypatch.setattr(DriveOrigin, "spare_s", spare_s)
    fs = fsspec.filesystem("cdrive")
    drive.asked()
    plan = fs.prefetch(drive.path(""))
    assert asked.wait(60)
    assert "list" not in drive.asked()
    assert fs.ls(drive.path("a"), detail=False) == [drive.path("a/x")]  # a caller does not wait
    spare[0] = 0.0
    plan.wait()


# Daily use

DAY = "2026-11-25"
SUM = """
    import fsspec
    from cachedfs.origins.drive import quota
    quota.day_of = lambda now: "2026-11-25"
    fs = fsspec.filesystem("cdrive", max_age="immutable")
    fs.cat_file("%s")
    print(fs.quota_stats().units)
"""


@pytest.fixture
def one_day(monkeypatch):
    """The same day at Google whenever the test runs."""
    monkeypatch.setattr("cachedfs.origins.drive.quota.day_of", lambda now: DAY)


def units_of(drive):
    """Return the units of the requests since the last call."""
    return sum({"media": 200, "list": 100}.get(kind, 5) for kind in drive.asked())


@pytest.mark.usefixtures("one_day")
def test_what_all_processes_use_is_added_up_and_hits_use_nothing(drive, monkeypatch):
    monkeypatch.setattr(engine, "QUOTA_S", 3600.0)  # a process stores it at its end
    for name in ("first", "second"):
        drive.put(name, noise(1000))
    fs = fsspec.filesystem("cdrive", max_age="immutable")
    fs.cat_file(drive.path("first"))
    mine = fs.quota_stats()
    assert mine.units == units_of(drive) > 200
    assert 1000 < mine.bytes < 10_000
    fs.cat_file(drive.path("first"))
    assert fs.quota_stats() == mine
    theirs = int(drive.python(SUM % drive.path("second")))
    assert theirs == units_of(drive) > 200
    assert fs.quota_stats().units == mine.units + theirs
    until_quiet(fs._objects.engine)
    forget()
    again = fsspec.filesystem("cdrive", max_age="immutable")
    again.cat_file(drive.path("second"))
    assert again.quota_stats().units == mine.units + theirs
    assert drive.asked() == []


def test_other_origins_have_no_daily_quota(cloud):
    assert fsspec.filesystem("cgs").quota_stats() is None
