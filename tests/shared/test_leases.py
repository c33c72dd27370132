"""Nodes that read the same at the same time download it once."""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from functools import partial

import fsspec
import pytest

from cachedfs.common.types import CacheBounds, Range
from cachedfs.shared import gatherer, read_leases
from cachedfs.shared.leases import Leases, lease_of
from cachedfs.shared.shared_folder import SharedFolder
from tests.shared.conftest import leave
from tests.support import KiB, MiB, noise, until

N = 4  # nodes
READ = """
import json, os, random, sys
import tests.long_timeouts
import fsspec

cache_dir, shared, seed, at_once, paths = json.loads(sys.argv[1])
fs = fsspec.filesystem("cgs", cache_dir=cache_dir, shared_cache=shared, max_age=3600, read_ahead=0)
fs.find(paths[0].rpartition("/")[0])
random.Random(seed).shuffle(paths)
print("ready", flush=True)
sys.stdin.readline()
for at in range(0, len(paths), at_once):
    fs.cat(paths[at : at + at_once])
print(fs.stats().bytes_fetched, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def nodes(cloud, tmp_path, shared, paths, at_once):
    """Run nodes that read all paths, each in an order of its own; yield them when all are ready."""
    running = []
    with contextlib.ExitStack() as stack:
        for seed in range(N):
            given = json.dumps([str(tmp_path / f"node-{seed}"), shared, seed, at_once, paths])
            command = [sys.executable, "-c", READ, given]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=cloud._environment(), text=True, stdin=pipe, stdout=pipe)
            running.append(stack.enter_context(process))
        for process in running:
            assert process.stdout.readline() == "ready\n"
        yield running


def fetched_by(cloud, tmp_path, shared, data, at_once):
    """Return the bytes that all nodes together fetch."""
    with nodes(cloud, tmp_path, shared, list(data), at_once) as running:
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        fetched = [int(process.stdout.readline()) for process in running]
        for process in running:
            process.stdin.close()
    return sum(fetched)


@pytest.mark.parametrize(
    ("n", "size", "at_once", "where", "most"),
    [(16, 8 * MiB, 2, "folder", 1.05), (300, 20 * KiB, 8, "folder", 1.3), (8, 8 * MiB, 2, "bucket", 1.3)],
    ids=["large", "small", "bucket"],
)
def test_nodes_that_read_in_different_orders_download_once(cloud, tmp_path, n, size, at_once, where, most):
    data = {cloud.path(f"data/{i:04}"): cloud.put(f"data/{i:04}", noise(size, i)) for i in range(n)}
    shared = str(tmp_path / "shared") if where == "folder" else cloud.url("shared", "gs://")
    assert fetched_by(cloud, tmp_path, shared, data, at_once) <= most * n * size


@pytest.fixture
def folder(shared):
    made = SharedFolder(str(shared), trust="group", is_read_only=False)
    made.check()
    return made


NAME = lease_of("0a" * 16, 5)


def test_one_node_has_a_lease_until_it_is_released(folder):
    ours, theirs = Leases(folder), Leases(folder)
    assert ours.take([NAME])
    assert ours.take([NAME])  # for another read of this process
    assert not theirs.take([NAME])
    theirs.release(NAME)  # not theirs
    assert not theirs.take([NAME])
    ours.release(NAME)
    assert theirs.take([NAME])


def test_a_lease_expires_by_the_clock_of_the_folder_unless_it_is_renewed(folder, clock):
    ours, theirs = Leases(folder), Leases(folder)
    assert ours.take([NAME])
    clock(600)  # of this machine
    assert not theirs.take([NAME])
    path = f"{folder.path}/{NAME}"
    os.utime(path, (0, os.stat(path).st_mtime - 29))
    assert not theirs.take([NAME])
    ours.renew([NAME])
    os.utime(path, (0, os.stat(path).st_mtime - 29))
    assert not theirs.take([NAME])
    os.utime(path, (0, os.stat(path).st_mtime - 2))
    assert theirs.take([NAME])


def test_who_waits_is_noticed_by_who_fetches(folder):
    ours, theirs = Leases(folder), Leases(folder)
    assert not ours.is_awaited()
    ours.take([NAME])
    assert not ours.is_awaited()
    theirs.take([NAME])
    assert ours.is_awaited()
    assert not ours.is_awaited()


def test_parts_of_an_object_have_leases_of_their_own():
    names = {lease_of(key, at * MiB) for key in ("0a" * 16, "0b" * 16) for at in (0, 7, 8, 15, 16)}
    assert len(names) == 6


def test_where_nothing_can_be_written_nobody_waits(folder, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SharedFolder, "make_empty", refuse)
    assert Leases(folder).take([NAME])


def test_a_node_waits_for_the_one_that_fetches(origin, node, shared, tmp_path):
    """The lease is taken, and released when the bytes are there: the other node asks nothing."""
    data = origin.put("b/k", noise(50_000))
    fs = node("a")
    assert fs.cat_file("b/k") == data
    fs = node("b")
    origin.log.clear()
    (file,) = shared.rglob("gathered/*")
    hidden = tmp_path / "hidden"
    file.rename(hidden)
    version = fs._objects.version(fs._objects.known("b/k")) if fs.exists("b/k") else None
    other = Leases(SharedFolder(str(shared), trust="group", is_read_only=False))
    from cachedfs.shared.piece import key_of

    lease = lease_of(key_of(version.identity, version.info), 0)
    assert other.take([lease])
    got = []
    thread = threading.Thread(target=lambda: got.append(fs.cat_file("b/k")))
    thread.start()
    until(other.is_awaited)
    hidden.rename(file)
    thread.join(60)
    assert got == [data]
    assert "read" not in [kind for kind, *_ in origin.log]
    other.release(lease)


def test_a_node_that_wants_other_bytes_of_a_part_does_not_wait_until_it_settles(
    origin, node, shared, tmp_path, monkeypatch
):
    monkeypatch.setattr(gatherer, "SETTLE_S", math.inf)
    monkeypatch.setattr(gatherer, "LONGEST_S", math.inf)
    data = origin.put("b/big", noise(8 * MiB))
    options = {"target_protocol": "gs", "cache_dir": str(tmp_path / "b"), "shared_cache": str(shared)}
    both = [node("a", read_ahead=0), fsspec.filesystem("cachedfs", read_ahead=0, **options)]
    for at, fs in enumerate(both):
        fs.find("b")
        assert fs.cat_file("b/big", at * MiB, (at + 1) * MiB) == data[at * MiB : (at + 1) * MiB]
    assert both[1].cat_file("b/big", 0, 2 * MiB) == data[: 2 * MiB]
    reads = [what for kind, _, what in origin.log if kind == "read"]
    assert reads == [Range(0, MiB), Range(MiB, 2 * MiB)]


def test_a_lease_is_held_until_the_last_read_of_its_part_ends(origin, node, shared):
    origin.put("b/big", noise(8 * MiB))
    fs = node("a")
    fs.info("b/big")
    version = fs._objects.version(fs._objects.known("b/big"))
    engine = fs._objects.engine

    def read(start):
        ask = partial(origin.read, "b/big", pinned=version.info)
        options = {"is_complete": lambda: False, "waits": False, "bounds": CacheBounds()}
        return engine.shared.read(version, version.info, Range(start, start + MiB), ask, **options)

    async def act():
        async with read(0):
            async with read(4 * MiB):
                pass
            return list(engine.shared._read_leases._renewed)  # leases that are renewed

    assert len(engine.run(act())) == 1
    until(lambda: not list(shared.rglob("leases/*-*")))


def test_a_lease_of_a_read_that_fails_is_released(origin, node, shared):
    origin.put("b/k", noise(50_000))
    fs = node("a")
    fs.info("b/k")
    origin.delete("b/k")
    with pytest.raises(FileNotFoundError):
        fs.cat_file("b/k")
    until(lambda: not list(shared.rglob("leases/*-*")))


def test_a_lease_of_a_read_that_ends_early_is_released(origin, node, shared):
    origin.put("b/k", noise(20 * MiB))
    origin.piece_size = 64 * KiB
    fs = node("a", read_ahead=0)
    fs.info("b/k")
    with fs.open("b/k") as file:
        file.read(10)
        assert list(shared.rglob("leases/*-*"))
        file.seek(15 * MiB)
        file.read(10)
    until(lambda: not fs._objects.engine.active_requests)
    leave()
    assert not list(shared.rglob("leases/*-*"))


@pytest.mark.parametrize("why", ["too large", "full", "read-only", "nothing is stored"])
def test_there_is_no_lease_on_what_will_not_be_put_there(origin, node, shared, tmp_path, monkeypatch, why):
    """Others would wait for it in vain."""
    data = origin.put("b/k", noise(5 * MiB))
    node("other").find("b")
    fs = node("a", **({"shared_cache_size": "40MiB"} if why == "too large" else {}))
    fs.info("b/k")
    cache = fs._objects.engine.shared
    if why == "full":
        cache._writer._full_until = math.inf
    elif why == "read-only":
        cache._folder.is_read_only = True
    elif why == "nothing is stored":
        monkeypatch.setattr(fs._objects.engine.cache._own, "cannot_store", "the disk is full")

    def never(self, name):
        raise AssertionError

    monkeypatch.setattr(Leases, "take", never)
    assert fs.cat_file("b/k") == data


def test_many_leases_are_taken_in_calls_that_a_slow_folder_answers_in_time(origin, node, monkeypatch):
    """A call that takes longer than 2 s means that the folder does not answer."""
    sizes, take = [], Leases.take
    monkeypatch.setattr(read_leases, "AT_ONCE", 4)
    monkeypatch.setattr(Leases, "take", lambda self, names: sizes.append(len(names)) or take(self, names))
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5000, i)) for i in range(40)}
    fs = node("a")
    fs.find("b")
    assert fs.cat(list(data)) == data
    assert sum(sizes) == 40
    assert max(sizes) == 4


def test_no_lease_is_left(origin, node, shared):
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5 * MiB if i % 2 else 5000, i)) for i in range(6)}
    fs = node("a")
    fs.find("b")
    assert fs.cat(list(data)) == data
    leave()
    assert not list(shared.rglob("leases/*-*"))
