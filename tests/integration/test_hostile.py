"""Failing disks, full file systems, lost indexes, strange object names, secrets and accounts, through the whole stack."""

import contextlib
import errno
import logging
import os
import pickle
import threading
import traceback

import fsspec
import pytest
from google.oauth2.credentials import Credentials

from cachedfs.core import engine
from cachedfs.sim import Fault
from tests.cache.faults import replace_call
from tests.cache.test_faults import CASES, Faults
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
    fs._objects.engine.cache._own._again_at = fs._objects.engine.cache._own.look_at = (
        0.0  # as if the pause were over
    )
    fs._objects._look()
    assert fs.cat_file("b/later") == data
    assert fs._objects.engine.drain(120)
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
    monkeypatch.setattr(engine.Engine, "max_queued", MiB)
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
        assert fs._objects.engine.store_queue.queued_bytes == 0
    assert is_stored_again(origin, fs)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "blocks are not cached while no thread can be started: can't start new thread"
    ]


# Secrets and accounts

SECRET = "ya29.SECRET"
FAULTS = [Fault(status=401), Fault(status=403), Fault(close_after=1000)]


@pytest.fixture(params=["gs", "drive", "s3"])
def machine(request, monkeypatch):
    """A simulated service and a secret for it, given by the configuration and not as an argument."""
    found = request.getfixturevalue({"gs": "cloud"}.get(request.param, request.param))
    token = f"{SECRET}-{request.param}"
    given = {
        "gs": {"token": Credentials(token)},  # gcsfs would ask Google about a bare token
        "drive": {"token": token},
        "s3": {"key": token, "secret": token, "token": token},
    }[request.param]
    monkeypatch.setitem(fsspec.config.conf, request.param, {**found.options[request.param], **given})
    if request.param != "s3":  # where any key is accepted
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
    objects = fs._objects
    said += [
        repr(each)
        for each in (objects, objects.engine, objects.engine.cache, objects.origin(key), fs.origin_fs)
    ]
    said += [objects.identity, str(vars(objects.engine))]
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
    caplog.set_level(logging.INFO, "botocore")  # it logs the headers that it sends
    urls = {"gs": "cgs://", "drive": "cdrive://", "s3": "cachedfs::s3://"}
    fs = fsspec.url_to_fs(urls[machine.protocol])[0]
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
    fs._objects.engine.drain(120)
    forget()
    files = [path for path in own_cache.rglob("*") if path.is_file()]
    said += [f"{path.name}: {path.read_bytes().decode('latin-1')}" for path in files]
    assert len(files) > 3
    assert [text[:300] for text in said if "SECRET" in text] == []
