"""Nodes that read the same at the same time download it once."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from functools import partial

import fsspec
import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import Range
from cachedfs.shared import gatherer, leases, read_leases
from cachedfs.shared.leases import Leases, lease_of
from cachedfs.shared.shared_folder import ALONE, SharedFolder
from tests.shared.conftest import lease_on, leave, place_of, reading, version_of
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


@pytest.mark.parametrize(
    ("n", "size", "at_once", "where", "most"),
    [(16, 8 * MiB, 2, "folder", 1.05), (300, 20 * KiB, 8, "folder", 1.3), (16, 8 * MiB, 2, "bucket", 1.3)],
    ids=["large", "small", "bucket"],
)
def test_nodes_that_read_in_different_orders_download_once(cloud, tmp_path, n, size, at_once, where, most):
    data = {cloud.path(f"data/{i:04}"): cloud.put(f"data/{i:04}", noise(size, i)) for i in range(n)}
    shared = str(tmp_path / "shared") if where == "folder" else cloud.url("shared", "gs://")
    with contextlib.ExitStack() as stack:
        given = [
            json.dumps([str(tmp_path / f"{seed}"), shared, seed, at_once, list(data)]) for seed in range(N)
        ]
        pipes = {
            "text": True,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "env": cloud._environment(),
        }
        running = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", READ, each], **pipes))
            for each in given
        ]
        assert [process.stdout.readline() for process in running] == ["ready\n"] * N
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        fetched = [int(process.stdout.readline()) for process in running]
        for process in running:
            process.stdin.close()
    assert sum(fetched) <= most * n * size


@pytest.fixture
def folder(shared):
    made = place_of(shared)
    made.check()
    return made


@pytest.fixture
def ours(folder):
    return leases_of(folder, "ours")


@pytest.fixture
def theirs(folder):
    return leases_of(folder, "theirs")


NAME = lease_of("0a" * 16, 5)


def leases_of(folder, node):
    return Leases(folder, lambda: node)


def test_a_lease_expires_by_the_clock_of_the_folder_unless_it_is_renewed(folder, ours, theirs, clock):
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


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 1] * 3))), ids=str)
def test_of_nodes_that_begin_together_at_most_one_is_alone(folder, order):
    """Whatever the order of their steps."""
    goes_on, waits = ([threading.Semaphore(0) for _ in range(2)] for _ in range(2))
    found = {}

    def look_around(number):
        def step(act, *args):
            waits[number].release()
            goes_on[number].acquire()
            return act(*args)

        place = place_of(folder.url)
        for name in ("node_alone", "waited_at", "set_node_alone"):
            setattr(place, name, partial(step, getattr(place, name)))
        found[number] = leases_of(place, str(number)).is_alone()
        waits[number].release()

    threads = [threading.Thread(target=look_around, args=(number,), daemon=True) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert waits[number].acquire(timeout=60)
    for number in order:
        if number not in found:
            goes_on[number].release()
            assert waits[number].acquire(timeout=60)
    assert sum(found.values()) == 1


def test_a_node_is_alone_until_another_one_begins_and_again_half_a_minute_later(
    folder, ours, theirs, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    assert ours.is_alone()
    assert ours.is_alone()
    assert not theirs.is_alone()
    assert ours.is_awaited()  # it is to put there what it has fetched without leases
    for now[0] in range(101, 130):  # both go on
        assert not ours.is_alone()
        assert not theirs.is_alone()
    now[0] = 131
    assert ours.is_alone()
    os.utime(
        f"{folder.path}/leases/waiting", (0, 0)
    )  # else the next touch may be in the same tick of its clock
    assert not ours.is_alone()
    now[0] = 170
    assert ours.is_alone()
    assert not theirs.is_alone()
    assert not ours.is_alone()
    now[0] = 200  # the other one has ended
    assert ours.is_alone()
    assert ours.is_alone()
    ours.release_all()
    assert theirs.is_alone()


def test_a_node_that_is_alone_looks_for_others_while_it_reads(origin, node, folder, monkeypatch):
    monkeypatch.setattr(read_leases, "LOOK_S", 0.0)
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5000, i)) for i in range(2)}
    fs = node("a")
    fs.find("b")
    assert fs.cat_file("b/0") == data["b/0"]
    leases = fs._objects.engine.shared.reads.leases._leases
    assert leases.are_held  # the file that says that it is alone
    folder.wait_for_others()  # another node begins
    assert fs.cat_file("b/1") == data["b/1"]
    until(lambda: not leases.are_held)


def test_the_file_of_a_node_that_is_alone_is_renewed(folder, ours, monkeypatch):
    now, path = [100.0], f"{folder.path}/{ALONE}"
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    assert ours.is_alone()
    os.utime(path, (0, 0))
    assert ours.is_alone()
    assert os.stat(path).st_mtime == 0
    now[0] += 11
    assert ours.is_alone()
    assert os.stat(path).st_mtime > 0


def test_processes_with_one_local_cache_are_one_node(tmp_path, folder):
    first, second, other = (BlockStore(str(tmp_path / name), explicit=True) for name in ("a", "a", "b"))
    for each in (first, other):
        each.metadata.keep_records([MetadataRecord("x", "y", None, 1.0, 0)])
    assert first.name == second.name != other.name
    both = [Leases(folder, lambda each=each: each.name) for each in (first, second)]
    assert [each.is_alone() for each in both * 2] == [True] * 4


def test_all_processes_of_a_node_learn_of_another_one(folder):
    first, second = leases_of(folder, "ours"), leases_of(folder, "ours")
    assert first.is_alone()
    assert second.is_alone()
    folder.wait_for_others()
    assert not first.is_alone()
    assert not second.is_alone()


def test_threads_that_look_around_at_once_do_not_miss_another_node(folder, monkeypatch):
    place = place_of(folder.url)
    ours, found = leases_of(place, "ours"), []
    assert ours.is_alone()
    folder.wait_for_others()
    thread, remove = threading.Thread(target=lambda: found.append(ours.is_alone())), place.remove
    monkeypatch.setattr(place, "remove", lambda name: thread.start() or remove(name))
    assert not ours.is_alone()
    thread.join()
    assert found == [False]


def test_a_node_that_ends_leaves_the_file_of_another_one(folder, ours, theirs):
    path = f"{folder.path}/{ALONE}"
    assert ours.is_alone()
    assert not theirs.is_alone()
    os.utime(path, (0, time.time() - 40))  # as if it had been killed
    assert leases_of(folder, "third").is_alone()
    ours.release_all()
    assert os.path.exists(path)


def test_where_nothing_can_be_written_nobody_waits_and_nobody_is_alone(folder, ours, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert not ours.is_alone()
    assert not os.listdir(f"{folder.path}/tmp")
    monkeypatch.setattr(SharedFolder, "make_empty", refuse)
    assert ours.take([NAME])


def test_a_node_waits_for_the_one_that_fetches(origin, node, shared, tmp_path):
    """The lease is taken, and released when the bytes are there: the other node asks nothing."""
    data = origin.put("b/k", noise(50_000))
    assert node("a").cat_file("b/k") == data
    fs = node("b")
    origin.log.clear()
    (file,) = shared.rglob("gathered/*")
    hidden = file.rename(tmp_path / "hidden")
    fs.info("b/k")
    other, lease = leases_of(place_of(shared), "other"), lease_on(fs, "b/k")
    assert other.is_alone()
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
    ask = partial(origin.read, "b/big", pinned=version_of(fs, "b/big").info)

    async def act():
        async with reading(fs, "b/big", Range(0, MiB), ask):
            async with reading(fs, "b/big", Range(4 * MiB, 5 * MiB), ask):
                pass
            return list(fs._objects.engine.shared.reads.leases._renewed)

    assert len(fs._objects.engine.run(act())) == 1
    until(lambda: not list(shared.rglob("leases/*-*")))


def test_a_lease_of_a_read_that_fails_is_released(origin, node, shared, folder):
    folder.set_node_alone("another")
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
        cache._place.is_read_only = True
    elif why == "nothing is stored":
        monkeypatch.setattr(fs._objects.engine.cache._own, "cannot_store", "the disk is full")

    def never(self, name):
        raise AssertionError

    monkeypatch.setattr(Leases, "take", never)
    assert fs.cat_file("b/k") == data


def test_many_leases_are_taken_in_calls_that_a_slow_folder_answers_in_time(origin, node, folder, monkeypatch):
    """A call that takes longer than 2 s means that the folder does not answer."""
    folder.set_node_alone("another")
    sizes, take = [], Leases.take
    monkeypatch.setattr(read_leases, "AT_ONCE", 4)
    monkeypatch.setattr(Leases, "take", lambda self, names: sizes.append(len(names)) or take(self, names))
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5000, i)) for i in range(40)}
    fs = node("a")
    fs.find("b")
    assert fs.cat(list(data)) == data
    assert sum(sizes) == 40
    assert max(sizes) == 4
