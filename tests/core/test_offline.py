"""Absences without asking the origin: offline, and while it is unreachable."""

import dataclasses
import datetime
import math
import sqlite3
import time

import pytest

from cachedfs.cache.index.database import CacheIndex
from cachedfs.common.clock import clock as metadata_clock
from cachedfs.errors import OriginUnavailable, OriginUnreachable
from cachedfs.filesystem import CachedFileSystem
from cachedfs.origins.base import has_stale_answer
from tests.fakes import FakeOrigin


class Cloud:
    """An origin in memory and a filesystem over it; metadata expires between two calls."""

    def __init__(self, origin, clock):
        self.origin, self.clock = origin, clock
        self.fs = CachedFileSystem(target_protocol="gs")

    def put(self, *paths):
        self.clock(1)
        for path in paths:
            self.origin.put(path, b"data")

    def find(self, folder):
        self.clock(61)
        return self.fs.find(folder)

    def list(self, folder):
        self.clock(61)
        return self.fs.ls(folder, detail=False)

    def read(self, *paths):
        """Read each path after all metadata has expired."""
        for path in paths:
            self.clock(61)
            self.fs.exists(path)

    def state_old_times(self):
        """Let the origin state that all objects were modified long ago."""
        info_of, long_ago = self.origin._info, datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        self.origin._info = lambda path: dataclasses.replace(info_of(path), details={"mtime": long_ago})

    def do(self, steps):
        for method, *paths in steps:
            getattr(self, method)(*paths)

    def close(self, way, monkeypatch):
        """Return a filesystem over the same cache, for which the origin cannot be asked."""
        self.clock(1000)
        self.fs._objects.engine.drain(120)

        def refuse(self, kind, path, what):
            raise OriginUnreachable(f"{path}: {kind}")

        monkeypatch.setattr(FakeOrigin, "_ask", refuse)
        return CachedFileSystem(target_protocol="gs", offline=True) if way == "offline" else self.fs


@pytest.fixture
def far(origin, clock):
    far = Cloud(origin, clock)
    far.put("b/d/meta", "b/d/sub/x")
    return far


# What is done in turn before the origin cannot be asked.
ABSENT = {
    "a listing": [("find", "b/d")],
    "a listing and the same version again": [("find", "b/d"), ("read", "b/d/meta")],
    "a listing and a 404": [("find", "b/d"), ("read", "b/d/sub/missing")],
    "a listing after a new version": [
        ("find", "b/d"),
        ("put", "b/d/meta"),
        ("read", "b/d/meta"),
        ("find", "b/d"),
    ],
    "a listing and new objects below and elsewhere": [
        ("find", "b/d"),
        ("put", "b/d/sub/deep/y", "b/e/meta"),
        ("read", "b/d/sub/deep/y", "b/e/meta"),
    ],
    "a listing and an older object that was not read before": [
        ("state_old_times",),
        ("list", "b/d/sub"),
        ("read", "b/d/meta"),
    ],
}
UNKNOWN = {
    "nothing": [],
    "a 404": [("read", "b/d/sub/missing")],
    "a listing and a new version beside": [("find", "b/d"), ("put", "b/d/sub/x"), ("read", "b/d/sub/x")],
    "a listing and a new object beside": [("find", "b/d"), ("put", "b/d/sub/y"), ("read", "b/d/sub/y")],
    "a listing and a new version above": [("find", "b/d"), ("put", "b/d/meta"), ("read", "b/d/meta")],
    "a listing and a new version in a listing above": [("find", "b/d"), ("put", "b/d/meta"), ("list", "b/d")],
    "a listing and an object that was not read before": [("list", "b/d/sub"), ("read", "b/d/meta")],
}


@pytest.mark.parametrize("way", ["offline", "outage"])
@pytest.mark.parametrize("known", ABSENT)
def test_a_listing_proves_an_absence_while_nothing_beside_or_above_is_newer(far, way, known, monkeypatch):
    far.do(ABSENT[known])
    assert far.close(way, monkeypatch).exists("b/d/sub/missing") is False


@pytest.mark.parametrize("way", ["offline", "outage"])
@pytest.mark.parametrize("known", UNKNOWN)
def test_an_absence_that_is_not_proven_is_an_error(far, way, known, monkeypatch):
    far.do(UNKNOWN[known])
    closed = far.close(way, monkeypatch)
    for read in (closed.exists, closed.cat_file, closed.open):
        with pytest.raises(OriginUnavailable):
            read("b/d/sub/missing")


@pytest.mark.parametrize("newer", [lambda far: far.read("b/d/meta"), lambda far: far.list("b/d")])
def test_a_new_version_counts_also_if_the_disk_is_full(far, newer, monkeypatch):
    far.find("b/d")
    far.fs._objects.engine.drain(120)

    def full(*args):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CacheIndex, "writing", full)
        far.put("b/d/meta")
        newer(far)
        far.fs._objects.engine.drain(120)
    with pytest.raises(OriginUnreachable):
        far.close("outage", monkeypatch).exists("b/d/sub/missing")


@pytest.mark.parametrize("way", ["offline", "outage"])
def test_a_listing_from_a_time_to_come_proves_no_absence(far, way, monkeypatch):
    far.find("b/d")
    closed = far.close(way, monkeypatch)
    far.clock(-2000)
    monkeypatch.setattr(metadata_clock, "offset", -math.inf)  # as after a restart of the machine
    with pytest.raises(OriginUnavailable):
        closed.exists("b/d/sub/missing")


@pytest.mark.parametrize("way", ["offline", "outage"])
def test_a_404_stands_for_a_metadata_file_of_a_known_zarr_node(far, way, monkeypatch):
    far.put("b/2.zarr/.zgroup", "b/new.zarr/.zgroup")
    far.read("b/2.zarr/zarr.json")
    far.fs.cat_file("b/2.zarr/.zgroup")
    far.read("b/no.zarr/zarr.json", "b/new.zarr/zarr.json", "b/new.zarr/.zgroup")
    closed = far.close(way, monkeypatch)
    assert not closed.exists("b/2.zarr/zarr.json")
    # No node; a node that may be newer than the 404.
    for path in ("b/no.zarr/zarr.json", "b/new.zarr/zarr.json"):
        with pytest.raises(OriginUnavailable):
            closed.exists(path)


def test_requests_wait_less_long_where_a_stale_answer_can_be_served(far, monkeypatch):
    ask, seen = FakeOrigin._ask, []

    def note(self, kind, path, what):
        seen.append((kind, path, has_stale_answer.get()))
        return ask(self, kind, path, what)

    monkeypatch.setattr(FakeOrigin, "_ask", note)
    strict = CachedFileSystem(target_protocol="gs", stale_if_error=False)
    for stale in (False, True):
        far.find("b/d")
        assert seen.pop() == ("list", "b/d", stale)
    for fs, stale in ((far.fs, True), (strict, False)):
        for name in ("meta", "missing"):
            far.clock(61)
            fs.exists(f"b/d/{name}")
            assert seen.pop()[1:] == (f"b/d/{name}", stale)
    assert not seen


def test_an_unreachable_origin_is_asked_again_after_half_a_minute(far, monkeypatch):
    far.find("b/d")
    now = time.monotonic()
    with monkeypatch.context() as outage:
        far.close("outage", outage)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        assert far.fs.exists("b/d/meta")
    far.origin.log.clear()
    for later_s, n_requests in ((29, 0), (31, 1)):
        far.clock(61)
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: now + later_s)
        assert far.fs.exists("b/d/meta")
        assert len(far.origin.log) == n_requests
