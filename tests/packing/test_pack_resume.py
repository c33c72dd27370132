"""Killed packs resume, also on a cluster: no sample is lost or duplicated."""

import contextlib
import itertools
import json
import os
import signal
import threading
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import fsspec
import pytest

pytest.importorskip("pyarrow")

import zarr

from cachedfs.datasets import pack
from cachedfs.packing import runner
from cachedfs.packing.executors import TaskPool
from cachedfs.packing.pack_types import WORK_FOLDER
from cachedfs.packing.runner import PROGRESS, PackProgress, PackRun
from cachedfs.packing.sources import sample_source
from cachedfs.packing.store import ZarrTarget
from tests.fork_server import ForkServer
from tests.packing import packs
from tests.support import KiB, forget, noise, until

# Dask leaves sockets open when it chooses a port.
pytestmark = pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")

SMALL = {"chunk_bytes": "4KiB", "shard_bytes": "16KiB"}


@pytest.fixture(scope="module")
def fork_server():
    """Forks processes that have imported all of packing."""
    fork_server = ForkServer("tests.packing.packs", "tests.packing.packing_kills", "gcsfs", "zarr")
    yield fork_server
    fork_server.close()


@pytest.fixture
def killed(fork_server, cloud):
    """Return a function that packs in a process that dies at its n-th write."""
    options = {
        "gs": {"token": "anon", "endpoint_url": cloud.server.endpoint_url},
        "cachedfs": {"cache_dir": str(cloud.cache_dir), "keep_free": 0},
    }

    def run(source, target, number, when="after"):
        given = (source, target, number, when, options if "://" in source else {})
        ended = fork_server.run("tests.packing.packing_kills:pack_and_die", *given)
        assert ended.signal == signal.SIGKILL, ended
        forget()

    return run


@pytest.fixture
def lines(cloud, monkeypatch):
    """Some 100 KB of JSON lines in 10 files, which are read one by one: 5 shards of text."""
    monkeypatch.setattr(sample_source, "PER_PART", 1)
    samples = [{"text": f"{i} " + noise(60, seed=i).hex(), "label": i} for i in range(600)]
    for i in range(10):
        cloud.put(f"src/{i}.jsonl", packs.lines_of(samples[60 * i : 60 * i + 60]))
    return samples


def names(cloud):
    """Return the keys in the bucket, as stored by the service."""
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    fs.invalidate_cache()
    return [path.removeprefix(f"{cloud.bucket}/") for path in fs.find(cloud.bucket)]


def content(cloud, name):
    return fsspec.filesystem("cachedfs", target_protocol="gs").cat_file(cloud.path(name))


def noted(cloud):
    """Return the names of the shards that are noted as verified."""
    if f"out.zarr/{PROGRESS}" not in names(cloud):
        return set()
    return {*PackProgress.from_bytes(content(cloud, f"out.zarr/{PROGRESS}")).verified}


def right(url, samples, **options):
    group = zarr.open_group(url, mode="r", **options)
    assert group["label"][:].tolist() == [each["label"] for each in samples]
    assert packs.stored(url, "text", text=True, **options) == [each["text"] for each in samples]


# 1: the plan; then the progress after each of 10 files, and 4 shards in between; then the last ones, and metadata.
@pytest.mark.parametrize(("number", "when"), [(1, "after"), (5, "after"), (11, "before"), (21, "after")])
def test_a_pack_killed_at_any_write_can_be_resumed(cloud, killed, lines, number, when):
    target = cloud.url("out.zarr")
    killed(cloud.url("src"), target, number, when)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(target, mode="r")
    done_before = noted(cloud)
    assert len(done_before) >= (3 if number == 21 else 0)
    cloud.server.reset()
    done = pack(cloud.url("src"), target, **SMALL)
    # What the progress names is neither read back nor written again.
    asked = {(request.kind, request.key.removeprefix("out.zarr/")) for request in cloud.server.requests}
    assert not {(kind, name) for kind in ("upload", "media") for name in done_before} & asked
    assert done.samples == 600
    assert done.resumed == len(done_before)
    right(target, lines)
    assert not [name for name in names(cloud) if WORK_FOLDER in name]


def test_a_pack_killed_while_removing_the_old_store_can_be_resumed(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_bytes(b"1")
    source, target = tmp_path / "x.jsonl", str(tmp_path / "out.zarr")
    samples = packs.records(50)
    source.write_bytes(packs.lines_of(samples))
    remove, n = ZarrTarget.remove, itertools.count(1)
    for last in itertools.count(1):
        pack(str(tmp_path / "old"), target, overwrite=True)

        def killed(self, name="", last=last, n=n):
            if next(n) == last:
                raise KeyboardInterrupt
            remove(self, name)

        n = itertools.count(1)
        with monkeypatch.context() as patched:
            patched.setattr(ZarrTarget, "remove", killed)
            try:
                pack(str(source), target, overwrite=True, **SMALL)
            except KeyboardInterrupt:
                with contextlib.suppress(FileNotFoundError):  # a store that opens is complete
                    right(target, samples)
            else:
                break
        pack(str(source), target, overwrite=True, **SMALL)
        right(target, samples)
    assert last > 3


def test_an_interrupted_pack_does_not_write_into_a_later_one(monkeypatch, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]) * 5000)
    target, memory = f"memory://{tmp_path}/late.zarr", fsspec.filesystem("memory")
    pipe, begun, go_on = type(memory).pipe_file, threading.Event(), threading.Event()

    def slow(self, path, value, **options):
        if "/data/c." in path and not go_on.is_set():
            begun.set()
            assert go_on.wait(120)
        pipe(self, path, value, **options)

    def interrupted(run, most=0, most_bytes=0):
        if run._writing:
            assert begun.wait(120)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "pipe_file", slow)
        patched.setattr(PackRun, "_wait", interrupted)
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(pack, str(tmp_path), target, codec="none")
            with pytest.raises(TimeoutError):
                first.result(timeout=0.5)  # it waits for its upload in progress
            go_on.set()
            with pytest.raises(KeyboardInterrupt):
                first.result(timeout=600)
    for i in range(4):
        (tmp_path / f"{i}.bin").write_bytes(bytes([100 + i]) * 5000)
    pack(str(tmp_path), target, codec="none", overwrite=True)
    assert [sample[0] for sample in packs.stored(target, "data")] == [100, 101, 102, 103]


def test_a_pack_killed_between_the_metadata_and_the_end_is_complete(cloud, killed, lines):
    target = cloud.url("out.zarr")
    whole = pack(cloud.url("src"), cloud.url("whole.zarr"), **SMALL)
    n = sum(1 for name in names(cloud) if name.startswith("whole.zarr/"))
    # The plan, the progress after each file, and the final objects.
    killed(cloud.url("src"), target, 1 + 10 + n)
    right(target, lines)  # complete, and the other objects do not matter
    again = pack(cloud.url("src"), target, **SMALL)
    assert (again.shapes, again.samples) == (whole.shapes, whole.samples)
    assert not [name for name in names(cloud) if WORK_FOLDER in name]
    right(target, lines)


def test_a_partial_shard_on_a_local_disk_is_written_again(killed, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_source, "PER_PART", 1)
    (tmp_path / "src").mkdir()
    files = {f"{i:02}": noise(2000, seed=i) for i in range(40)}
    for name, data in files.items():
        (tmp_path / "src" / name).write_bytes(data)
    target = tmp_path / "out.zarr"
    killed(str(tmp_path / "src"), str(target), 19, "within")  # the second shard, in the 17th file
    assert len(list(target.glob("data/c.*"))) == 1
    done = pack(str(tmp_path / "src"), str(target), **SMALL)
    assert done.resumed == 1  # what was not noted is written again
    assert [each.tobytes() for each in packs.stored(str(target), "data")] == list(files.values())
    assert not (target / WORK_FOLDER).exists()


def test_a_damaged_shard_of_an_earlier_run_is_written_again(cloud, killed, lines):
    target = cloud.url("out.zarr")
    killed(cloud.url("src"), target, 14)
    name = "out.zarr/text/c.1"
    data = bytearray(content(cloud, name))
    data[100] ^= 1
    cloud.put(name, bytes(data))
    pack(cloud.url("src"), target, **SMALL)
    right(target, lines)


def test_a_missing_shard_of_a_small_array_is_written_again(tmp_path, monkeypatch):
    samples = [{"text": f"{i:0100}", "label": i} for i in range(33_000)]  # a shard of labels has 32,768
    source, target = tmp_path / "x.jsonl", tmp_path / "out.zarr"
    source.write_bytes(packs.lines_of(samples))
    with monkeypatch.context() as broken:
        broken.setattr(runner, "SAVED_S", 0.0)
        broken.setattr(ZarrTarget, "finish", None)
        with pytest.raises(TypeError, match="not callable"):
            pack(str(source), str(target), shard_bytes="256KiB")
    (target / "label" / "c.0").unlink()
    pack(str(source), str(target), shard_bytes="256KiB")
    right(str(target), samples)


def test_another_option_does_not_resume(cloud, killed, lines):
    killed(cloud.url("src"), cloud.url("out.zarr"), 9)
    with pytest.raises(FileExistsError, match="with other options, is here; overwrite=True"):
        pack(cloud.url("src"), cloud.url("out.zarr"), chunk_bytes="4KiB", shard_bytes="32KiB")


def test_an_executor_makes_the_same_store_and_names_a_bad_sample(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(packs.lines_of(packs.records(2000)))
    (tmp_path / "bad.jsonl").write_bytes(b'{"a": "%s"}\n' % (b"x" * 1000) * 1000 + b"{oops}\n")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        pack(str(tmp_path / "x.jsonl"), str(tmp_path / "there.zarr"), client=processes, **SMALL)
        with pytest.raises(ValueError, match=r"is not (a )?JSON .*oops"):
            pack(str(tmp_path / "bad.jsonl"), str(tmp_path / "bad.zarr"), client=processes)
    pack(str(tmp_path / "x.jsonl"), str(tmp_path / "here.zarr"), **SMALL)
    found = [path.relative_to(tmp_path / "here.zarr") for path in (tmp_path / "here.zarr").rglob("c.*")]
    assert len(found) > 8
    for name in found:
        assert (tmp_path / "here.zarr" / name).read_bytes() == (tmp_path / "there.zarr" / name).read_bytes()


def test_a_failed_pack_on_an_executor_writes_nothing_afterwards(tmp_path, monkeypatch):
    """One worker fails to write the second shard while another still writes the first."""
    put, close = ZarrTarget.put, TaskPool.close
    begun, closing, late = threading.Event(), threading.Event(), threading.Event()

    def late_or_broken(self, name, data):
        if name == "data/c.1":
            assert begun.wait(120)
            raise OSError("the disk is full")
        put(self, name, data)
        if name == "data/c.0":
            begun.set()
            assert closing.wait(120)
            until(lambda: self.is_interrupted)
            with pytest.raises(CancelledError, match="this pack was interrupted"):
                put(self, "data/c.2", b"")
            late.set()

    def closed(self):
        closing.set()
        close(self)
        assert late.is_set()

    monkeypatch.setattr(ZarrTarget, "put", late_or_broken)
    monkeypatch.setattr(TaskPool, "close", closed)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(noise(32 * KiB))
    with ThreadPoolExecutor(2) as workers, pytest.raises(OSError, match="the disk is full"):
        pack(str(tmp_path / "src"), str(tmp_path / "out.zarr"), client=workers, codec="none", **SMALL)


def test_a_cluster_that_loses_a_worker_finishes(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    (tmp_path / "src").mkdir()
    files = {f"{i:03}": noise(5000, seed=i) for i in range(200)}
    for name, data in files.items():
        (tmp_path / "src" / name).write_bytes(data)
    once, submit, seen_jobs = tmp_path / "once", TaskPool.submit, []

    def with_one_copy_of_the_job(self, *given):
        """Kill the only worker that keeps the job: every two seconds Dask drops copies that are not requested."""
        job = self._task
        if job.key not in seen_jobs:
            seen_jobs.append(job.key)
            job.result()
            client.amm.run_once()
            until(lambda: len(client.who_has(job)[job.key]) == 1)
            client.run(_die_once, str(once), workers=list(client.who_has(job)[job.key]))
        return submit(self, *given)

    monkeypatch.setattr(TaskPool, "submit", with_one_copy_of_the_job)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        client.wait_for_workers(2, timeout=600)
        pack(str(tmp_path / "src"), str(tmp_path / "out.zarr"), client=client, **SMALL)
    assert once.exists()
    found = packs.stored(str(tmp_path / "out.zarr"), "data")
    assert [each.tobytes() for each in found] == list(files.values())


def _die_once(flag):
    """Kill this worker in the middle of its third shard."""
    from cachedfs.packing import store

    put, left = store.ZarrTarget.put, [3]

    def deadly(self, name, data):
        left[0] -= 1
        if not left[0] and not os.path.exists(flag):
            with open(flag, "w") as file:
                json.dump(name, file)
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, data)

    store.ZarrTarget.put = deadly
