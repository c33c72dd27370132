"""Failing disks, full file systems, lost indexes, strange object names, secrets and accounts, through the whole stack."""

import contextlib
import errno
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import threading
import traceback
import unicodedata

import fsspec
import pytest
from google.oauth2.credentials import Credentials

from cachedfs.cache.index import database
from cachedfs.errors import CacheError
from cachedfs.fetch import runtime
from cachedfs.sim import Fault
from tests.cache.faults import replace_call
from tests.cache.test_faults import CASES, Faults
from tests.cache.test_store import cut_index, damage_index, delete_index, index_of_the_future, truncate_index
from tests.fakes import FakeOrigin
from tests.support import MiB, forget, noise


def new_process(**options):
    """Return the filesystem as another process would create it."""
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
    """Return whether the second read of a new object costs no request."""
    data = origin.put("b/later", noise(3000))
    fs._source.runtime.cache._own._again_at = fs._source.runtime.cache._own._look_at = (
        0.0  # as if the pause were over
    )
    assert fs.cat_file("b/later") == data
    assert fs._source.runtime.drain(120)
    n_requests = len(origin.log)
    assert fs.cat_file("b/later") == data
    return len(origin.log) == n_requests and fs.stats().cannot_store is None


def test_reads_succeed_when_every_system_call_of_the_cache_fails(origin, monkeypatch, caplog):
    here, new = origin.put("b/here", noise(2 * MiB + 5)), origin.put("b/new", noise(MiB + 7, 1))
    read_in_all_ways(new_process(), "b/here", here)
    fs = new_process()
    fs.cat_file("b/here")
    with monkeypatch.context() as patch:
        for name in CASES:
            faults = Faults(name)
            faults.arm(
                errno.EIO if CASES[name].errors else (lambda name=name: CASES[name].answer), 1, for_ever=True
            )
            replace_call(patch, name, faults)
        read_in_all_ways(fs, "b/here", here)
        read_in_all_ways(fs, "b/new", new)
        with contextlib.suppress(OSError):
            fs.evict()
        fs = new_process()
        read_in_all_ways(fs, "b/here", here)
        read_in_all_ways(fs, "b/new", new)
    assert is_stored_again(origin, fs)
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


def test_reads_succeed_without_a_writer_thread_and_blocks_are_stored_later(origin, monkeypatch, caplog):
    """The object is larger than the queue of the writer: no read waits for space in it."""
    data = origin.put("b/long", noise(5 * MiB + 5))
    monkeypatch.setattr(runtime, "MAX_QUEUED", MiB)
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "cachedfs-write":
            raise RuntimeError("can't start new thread")
        start(thread)

    fs = new_process()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            read_in_all_ways(fs, "b/long", data)
        assert fs._source.runtime.cache_writer.queued_bytes == 0
    assert is_stored_again(origin, fs)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "blocks are not cached while no thread can be started: can't start new thread"
    ]


# The cache directory is full, removed or locked


def test_reads_succeed_on_a_full_disk_and_blocks_are_stored_later(origin, tmp_path, caplog):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9728k", "none", str(folder)],
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


def not_cached(caplog):
    return [record.getMessage() for record in caplog.records if "not cached" in record.getMessage()]


def _fill(origin, folder, caplog):
    data = origin.put("b/big", noise(32 * MiB))
    fs = new_process(cache_dir=str(folder), cache_size="1GB", keep_free=0)
    for _ in range(2):
        assert fs.cat_file("b/big") == data
        assert fs._source.runtime.drain(120)
    assert fs.stats().blocks == 5  # as many as fit beside the files of the cache itself
    assert not not_cached(caplog)
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    fs = new_process(cache_dir=str(folder), cache_size="1GB", keep_free=0)
    other = origin.put("b/other", noise(3 * MiB, 1))
    assert fs.cat_file("b/other") == other
    with fs.open("b/big") as file:
        assert file.read() == data
    assert len(not_cached(caplog)) <= 1
    ballast.unlink()
    assert is_stored_again(origin, fs)


def test_a_removed_cache_directory_loses_blocks_and_fails_no_read(origin, own_cache):
    data = origin.put("b/k", noise(2 * MiB))
    fs = new_process()
    for _ in range(3):
        assert fs.cat_file("b/k") == data
        fs._source.runtime.drain(120)
        shutil.rmtree(own_cache)
    assert is_stored_again(origin, fs)


def test_a_lock_held_by_another_process_fails_no_read(origin, own_cache, caplog, monkeypatch):
    monkeypatch.setattr(database, "_WRITER_WAIT_S", 0.05)
    here, new = origin.put("b/here", noise(2 * MiB)), origin.put("b/new", noise(3000, 1))
    read_in_all_ways(new_process(), "b/here", here)
    fs = new_process()
    (index,) = own_cache.glob("*/index.db")
    other = sqlite3.connect(index, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        n_requests = len(origin.log)
        read_in_all_ways(fs, "b/here", here)
        assert len(origin.log) == n_requests  # reads do not need the lock
        assert fs.cat_file("b/new") == new
        assert fs._source.runtime.drain(120)
        assert "locked" in fs.stats().cannot_store
        assert len([record for record in caplog.records if "not cached" in record.getMessage()]) == 1
    finally:
        other.close()
    assert is_stored_again(origin, fs)


@pytest.mark.parametrize(
    ("damage", "is_open"),
    [
        (damage_index, False),
        (truncate_index, False),
        (cut_index, True),
        (delete_index, True),
        (index_of_the_future, False),
    ],
    ids=lambda value: getattr(value, "__name__", ("at_rest", "while_open")[value is True]),
)
def test_a_lost_index_fails_no_read_and_causes_one_warning(origin, own_cache, caplog, damage, is_open):
    here, new = origin.put("b/here", noise(2 * MiB)), origin.put("b/new", noise(3000, 1))
    fs = new_process()
    read_in_all_ways(fs, "b/here", here)
    fs._source.runtime.drain(120)
    if not is_open:
        forget()
    (index,) = own_cache.glob("*/index.db")
    damage(index)
    fs = fs if is_open else new_process()
    read_in_all_ways(fs, "b/here", here)
    read_in_all_ways(fs, "b/new", new)
    fs._source.runtime.drain(120)
    origin.put("b/here", here)  # a new version, so that a block is stored and the loss is noticed
    fs.invalidate_cache()
    read_in_all_ways(fs, "b/here", here)
    fs._source.runtime.drain(120)
    assert is_stored_again(origin, fs)
    with contextlib.suppress(CacheError):  # SQLite may notice only now, as this reads every page
        fs._source.runtime.cache.check()
    assert is_stored_again(origin, fs)
    assert fs._source.runtime.cache.check().ok
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == ("is damaged" in "".join(warnings)) <= 1


# Unusual object names

NFC, NFD = unicodedata.normalize("NFC", "b/é"), unicodedata.normalize("NFD", "b/é")
NAMES = [
    "b/..", "b/../../../etc/passwd", "b//x", "b/.", "b/\0", "b/x\0y", "b/x", "b/x\ny", "b/\r\n", "b/\ud800", "b/\udcff", NFC, NFD,
    "b/" + "é" * 511, "b/" + "\U0001f600" * 255, "b/%2e%2e", "b/'; DROP TABLE blocks; --", "b/-rf", "b/\u202e", "b/x ",
]  # fmt: skip


def test_objects_of_any_name_are_distinct_and_cached(origin, tmp_path):
    contents = {name: origin.put(name, noise(500, seed)) for seed, name in enumerate(NAMES)}
    fs = new_process()
    for name, data in contents.items():
        assert fs.cat_file(name) == data
    fs._source.runtime.drain(120)
    fs = new_process()
    n_requests = len(origin.log)
    for name, data in contents.items():
        with fs.open(name) as file:
            assert file.read() == data
        assert pickle.loads(pickle.dumps(fs)).cat_file(name) == data
    assert len(origin.log) == n_requests
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


# Secrets and accounts

SECRET = "ya29.SECRET"
FAULTS = [Fault(status=401), Fault(status=403), Fault(close_after=1000)]


@pytest.fixture(params=["gs", "drive"])
def machine(request, monkeypatch):
    """A simulated service that requires a secret token, given by the configuration and not as an argument."""
    found = request.getfixturevalue("cloud" if request.param == "gs" else "drive")
    token = f"{SECRET}-{request.param}"
    # gcsfs would ask Google about a bare token.
    given = Credentials(token) if request.param == "gs" else token
    monkeypatch.setitem(fsspec.config.conf, request.param, {**found.options[request.param], "token": given})
    found.server.require_token(token)
    yield found
    found.server.require_no_token()


def use_everything(machine, fs):
    """Read, list, write and fail in many ways; return the errors and the metadata of objects."""
    path, key, data = machine.path, machine.path("d/a"), noise(MiB + 500)
    machine.put("d/a", data)
    machine.put("d/b", b"b")
    said = [repr(fs), str(fs), repr(fs.config)]
    assert fs.cat_file(key) == data
    with fs.open(key) as file:
        assert file.read() == data
        said += [repr(file), str(file)]
    with fs.local_path(key) as local, open(local, "rb") as file:
        assert file.read() == data
    assert {*fs.find(path("d"))} == {key, path("d/b")}
    said += [str(fs.ls(path("d"), detail=True)), str(fs.info(key)), fs.ukey(key), str(fs.stats())]
    fs.pin(key)
    fs.pipe_file(path("d/c"), b"c")
    fs.rm(path("d/c"))
    source = fs._source
    said += [
        repr(each)
        for each in (source, source.runtime, source.runtime.cache, source.origin(key), fs.origin_fs)
    ]
    said += [source.identity, str(vars(source.runtime))]
    raised = []
    for act in (
        lambda: fs.cat_file(path("d/missing")),
        lambda: fs.cat_file(path("d")),
        lambda: fs.sign(key),
        lambda: fs.created(path("d/missing")),
        lambda: fs.rm(path("d/missing")),
    ):
        raised += what_it_raises(act)
    for fault in FAULTS:
        fs.invalidate_cache()
        fs.evict()
        machine.server.fail(fault)
        raised += what_it_raises(lambda: fs.cat_file(key))
        machine.server.heal()
    machine.server.require_token("another")
    raised += what_it_raises(lambda: fs.cat_file(path("d/new")))
    assert len(raised) >= 5
    return said, raised


def what_it_raises(act):
    try:
        act()
    except Exception as error:  # every error is searched for secrets
        return [error]
    return []


def test_no_secret_is_in_files_logs_errors_reprs_pickles_or_json(machine, own_cache, caplog):
    caplog.set_level(logging.DEBUG)
    fs = fsspec.filesystem("cgs" if machine.protocol == "gs" else "cdrive")
    said, raised = use_everything(machine, fs)
    said += [
        text for error in raised for text in (str(error), repr(error), *traceback.format_exception(error))
    ]
    said += [fs.to_json(), str(fs.to_dict()), pickle.dumps(fs).decode("latin-1")]
    said += [
        pickle.dumps(error).decode("latin-1")
        for error in raised
        if type(error).__module__.startswith("cachedfs")
    ]
    said += [f"{record.name}: {record.getMessage()}" for record in caplog.records]
    said += [path.read_bytes().decode("latin-1") for path in own_cache.rglob("*") if path.is_file()]
    fs._source.runtime.drain(120)
    forget()
    files = [path for path in own_cache.rglob("*") if path.is_file()]
    said += [f"{path.name}: {path.read_bytes().decode('latin-1')}" for path in files]
    assert len(files) > 3
    assert [text[:300] for text in said if "SECRET" in text] == []


def test_accounts_never_see_each_others_bytes(own_cache, monkeypatch):
    """One path and fingerprint with two contents, in one process and one cache directory."""
    origins = {}

    def open_origin(protocol, options, *, loop, on_request, concurrency=16, **_):
        fake = origins[options["token"]["client_email"]]
        fake.on_request = on_request
        return fake

    monkeypatch.setattr(runtime, "open_origin", open_origin)
    theirs = {}
    for name in ("one", "two"):
        origins[name] = FakeOrigin()
        theirs[name] = origins[name].put("My Drive/k", noise(3000, len(theirs)))
    made = {}
    for name in theirs:
        drive = {"token": {"type": "service_account", "client_email": name}}
        made[name] = fsspec.filesystem("cachedfs", target_protocol="drive", drive=drive)
    for _ in range(2):
        for name, fs in made.items():
            assert fs.cat_file("My Drive/k") == theirs[name]
            assert fs.info("My Drive/k")["size"] == 3000
            with fs.open("My Drive/k") as file:
                assert file.read() == theirs[name]
            assert fs.cached_extent("My Drive/k") == [(0, 3000)]
    made["one"].evict()
    assert made["one"].cached_extent("My Drive/k") == []
    assert made["two"].cached_extent("My Drive/k") == [(0, 3000)]
    assert [len(origin.log) for origin in origins.values()] == [1, 1]
