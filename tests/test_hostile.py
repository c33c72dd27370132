"""The whole stack where the disk fails, names are strange, and somebody looks for secrets."""

import contextlib
import errno
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import unicodedata

import fsspec
import pytest

from cachedfs.cache import disk
from tests.cache.test_faults import CASES, FALLIBLE, Faults
from tests.fakes import FakeOrigin
from tests.support import MiB, forget, noise


@pytest.fixture
def origin(own_cache, monkeypatch):
    fake = FakeOrigin()
    fake.install(monkeypatch)
    return fake


def new_process(**options):
    """Return the filesystem as another process would make it."""
    forget()
    return fsspec.filesystem("cachedfs", target_protocol="gs", **options)


def read_in_all_ways(fs, path, data):
    assert fs.cat_file(path) == data
    assert fs.cat_file(path, 1000, 2000) == data[1000:2000]
    with fs.open(path) as file:
        assert file.read(100) == data[:100]
        file.seek(-100, os.SEEK_END)
        assert file.read() == data[-100:]
    assert fs.info(path)["size"] == len(data)


def is_stored_again(origin, fs):
    """Return whether a new object costs nothing at its second read."""
    data = origin.put("b/later", noise(3000))
    fs._source.engine.cache._again_at = fs._source.engine.cache._look_at = 0.0  # so much later
    assert fs.cat_file("b/later") == data
    assert fs._source.engine.drain()
    n_requests = len(origin.log)
    assert fs.cat_file("b/later") == data
    return len(origin.log) == n_requests and fs.stats().cannot_store is None


@pytest.mark.parametrize("name", FALLIBLE)
def test_reads_succeed_on_a_disk_that_fails_and_blocks_are_kept_when_it_heals(
    origin, monkeypatch, caplog, name
):
    here, new = origin.put("b/here", noise(2 * MiB + 5)), origin.put("b/new", noise(MiB + 7, 1))
    read_in_all_ways(new_process(), "b/here", here)
    case, faults = CASES[name], Faults(name)
    monkeypatch.setattr(disk, name, faults)
    for fault in case.errors[:2] or ((lambda: case.answer),):
        caplog.clear()
        forget()
        faults.arm(fault, 1, for_ever=True)
        fs = new_process()
        read_in_all_ways(fs, "b/here", here)
        read_in_all_ways(fs, "b/new", new)
        faults.heal()
        assert is_stored_again(origin, fs)
        assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


def test_reads_succeed_where_every_call_to_the_disk_fails(origin, monkeypatch, caplog):
    here, new = origin.put("b/here", noise(2 * MiB + 5)), origin.put("b/new", noise(MiB + 7, 1))
    read_in_all_ways(new_process(), "b/here", here)
    fs = new_process()
    fs.cat_file("b/here")
    with monkeypatch.context() as patch:
        for name in FALLIBLE:
            faults = Faults(name)
            faults.arm(
                errno.EIO if CASES[name].errors else (lambda name=name: CASES[name].answer), 1, for_ever=True
            )
            patch.setattr(disk, name, faults)
        read_in_all_ways(fs, "b/here", here)
        read_in_all_ways(fs, "b/new", new)
        with contextlib.suppress(OSError):
            fs.evict()
        fs = new_process()
        read_in_all_ways(fs, "b/here", here)
        read_in_all_ways(fs, "b/new", new)
    assert is_stored_again(origin, fs)
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


# The cache directory is full, vanishes, is locked


def test_reads_succeed_on_a_file_system_that_is_full_and_blocks_are_kept_once_there_is_room(
    origin, tmp_path, caplog
):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.strip()}")
    try:
        _fill(origin, folder, caplog)
    finally:
        forget()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(origin, folder, caplog):
    data = origin.put("b/big", noise(32 * MiB))
    fs = new_process(cache_dir=str(folder), cache_size="1GB", keep_free=0)
    for _ in range(2):
        assert fs.cat_file("b/big") == data
        assert fs._source.engine.drain()
    assert 2 < fs.stats().blocks < 8  # as many as there is room for, beside the bookkeeping
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    fs = new_process(cache_dir=str(folder), cache_size="1GB", keep_free=0)
    other = origin.put("b/other", noise(3 * MiB, 1))
    assert fs.cat_file("b/other") == other
    with fs.open("b/big") as file:
        assert file.read() == data
    warnings = [record.getMessage() for record in caplog.records if "not cached" in record.getMessage()]
    assert len(warnings) <= 1
    ballast.unlink()
    assert is_stored_again(origin, fs)


def test_a_cache_directory_that_vanishes_costs_its_blocks_and_no_read(origin, own_cache):
    data = origin.put("b/k", noise(2 * MiB))
    fs = new_process()
    for _ in range(3):
        assert fs.cat_file("b/k") == data
        fs._source.engine.drain()
        shutil.rmtree(own_cache)
    assert is_stored_again(origin, fs)


def test_a_lock_held_by_another_process_for_seconds_costs_no_read(origin, own_cache, caplog):
    here, new = origin.put("b/here", noise(2 * MiB)), origin.put("b/new", noise(3000, 1))
    read_in_all_ways(new_process(), "b/here", here)
    fs = new_process()
    (index,) = own_cache.glob("*/index.db")
    other = sqlite3.connect(index, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        n_requests = len(origin.log)
        read_in_all_ways(fs, "b/here", here)
        assert len(origin.log) == n_requests  # who only reads waits for nobody
        assert fs.cat_file("b/new") == new
        assert fs._source.engine.drain(30.0)
        assert "locked" in fs.stats().cannot_store
        assert len([record for record in caplog.records if "not cached" in record.getMessage()]) == 1
    finally:
        other.close()
    assert is_stored_again(origin, fs)


# Names made to break things

NFC, NFD = unicodedata.normalize("NFC", "b/é"), unicodedata.normalize("NFD", "b/é")
NAMES = [
    "b/..", "b/../../../etc/passwd", "b//x", "b/.", "b/\0", "b/x\0y", "b/x", "b/x\ny", "b/\r\n", "b/\ud800", "b/\udcff", NFC, NFD,
    "b/" + "é" * 511, "b/" + "\U0001f600" * 255, "b/%2e%2e", "b/'; DROP TABLE blocks; --", "b/-rf", "b/\u202e", "b/x ",
]  # fmt: skip


def test_objects_of_any_name_are_kept_apart_and_cost_nothing_the_second_time(origin, tmp_path):
    contents = {name: origin.put(name, noise(500, seed)) for seed, name in enumerate(NAMES)}
    fs = new_process()
    for name, data in contents.items():
        assert fs.cat_file(name) == data
    fs._source.engine.drain()
    fs = new_process()
    n_requests = len(origin.log)
    for name, data in contents.items():
        with fs.open(name) as file:
            assert file.read() == data
        assert pickle.loads(pickle.dumps(fs)).cat_file(name) == data
    assert len(origin.log) == n_requests
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}
