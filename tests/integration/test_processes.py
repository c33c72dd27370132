"""Processes and threads: fork, spawn, forkserver, workers that end, several processes on one machine."""

import multiprocessing
import os
import signal
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
import zarr

from cachedfs.sim import Fault
from tests.support import KiB, MiB, forget, noise, until

SIZE = 3 * MiB + 5


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options)


@pytest.fixture
def forking():
    """Python 3.12 and later warn when a process with threads forks; users do it anyway."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield multiprocessing.get_context("fork")


def run(context, target, *arguments, n=1):
    """Run n processes in parallel; all must succeed, within ten minutes."""
    processes = [context.Process(target=target, args=arguments, daemon=True) for _ in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * n


# Functions of the children, at module level so that spawn finds them.
def check_handle(file, expected_size, seed):
    file.seek(0)
    assert file.read() == noise(expected_size, seed)


def check_array(array, expected):
    assert array[:].tolist() == expected


def check_everything(fs, path, other):
    assert fs.cat_file(path) == noise(SIZE)
    with fs.open(other) as file:
        assert file.read() == noise(SIZE, 1)
    assert fs.info(path)["size"] == SIZE
    assert len(fs.ls(fs._parent(path))) == 2
    fs.pipe_file(f"{fs._parent(path)}-{os.getpid()}", b"1")
    assert fs.cat_file(f"{fs._parent(path)}-{os.getpid()}") == b"1"


def fetch(fs, path):
    fs.cat_file(path)  # and end while the blocks are being stored


# Fork.


@pytest.mark.usefixtures("default_patience")
@pytest.mark.parametrize("before", ["nothing", "a part", "everything"])
def test_a_file_opened_before_a_fork_is_read_in_children(cloud, fs, forking, before):
    cloud.put("a", noise(10 * MiB))
    with fs.open(cloud.path("a")) as file:
        if before == "a part":
            file.read(100 * KiB)
        elif before == "everything":
            file.read()
        run(forking, check_handle, file, 10 * MiB, 0, n=2)
        check_handle(file, 10 * MiB, 0)


def test_an_array_opened_before_a_fork_is_read_in_children(cloud, forking):
    array = zarr.create_array(cloud.url("a.zarr"), shape=(100,), chunks=(10,), dtype="i4")
    array[:] = np.arange(100)
    forget()
    opened = zarr.open_array(cloud.url("a.zarr"), mode="r")
    run(forking, check_array, opened, list(range(100)), n=2)
    assert opened[:].tolist() == list(range(100))


def check_blocks_open(fs, path, file, data, cache_dir):
    """The child holds the block that its file reads, and none after an eviction, so evicted space is free again."""
    assert len(blocks_open(cache_dir)) == 1
    assert file.read(32 * KiB) == data[32 * KiB : 64 * KiB]
    assert file.read(64 * KiB) == data[64 * KiB : 128 * KiB]
    assert fs.cat_file(path, 0, 10) == data[:10]
    assert len(blocks_open(cache_dir)) <= 3
    file.close()
    fs.evict()
    assert blocks_open(cache_dir) == []


def blocks_open(cache_dir):
    """The open blocks of this cache; files dropped by libraries in earlier tests may not be collected yet."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [
        target
        for target in map(os.readlink, filter(os.path.islink, links))
        if target.startswith(f"{cache_dir}/") and "/blocks/" in target
    ]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
def test_a_forked_child_holds_no_blocks_of_its_parent(cloud, forking):
    data = cloud.put("a", noise(40 * 64 * KiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=64 * KiB, **cloud.options)
    for _ in range(2):
        assert fs.cat_file(cloud.path("a")) == data
        assert fs._objects.engine.drain(120)
    with fs.open(cloud.path("a")) as file:
        assert file.read(32 * KiB) == data[: 32 * KiB]
        assert len(blocks_open(cloud.cache_dir)) == 40
        run(forking, check_blocks_open, fs, cloud.path("a"), file, data, cloud.cache_dir)
        assert file.read() == data[32 * KiB :]


# Spawn and forkserver.
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.stress)])
def test_pickled_filesystems_files_and_arrays_work_in_new_processes(cloud, method):
    fs, _ = fsspec.url_to_fs(cloud.url(), **options(cloud))
    cloud.put("d/a", noise(SIZE))
    cloud.put("d/b", noise(SIZE, 1))
    array = zarr.create_array(
        cloud.url("a.zarr"), shape=(10,), chunks=(5,), dtype="i4", storage_options=options(cloud)
    )
    array[:] = np.arange(10)
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        pool.submit(check_everything, fs, cloud.path("d/a"), cloud.path("d/b")).result(120)
        with fs.open(cloud.path("d/b")) as file:
            pool.submit(check_handle, file, SIZE, 1).result(120)
        pool.submit(check_array, array, list(range(10))).result(120)


def options(cloud):
    """Return the options for a process without the configuration of this one."""
    return {"cachedfs": {"cache_dir": str(cloud.cache_dir), "keep_free": 0}, **cloud.options}


# Workers that end.
def test_blocks_fetched_by_a_worker_are_on_disk_when_it_has_ended(cloud, forking):
    cloud.put("a", noise(10 * MiB))
    fs, path = fsspec.url_to_fs(cloud.url("a"), **options(cloud))
    run(forking, fetch, fs, path)
    cloud.asked()
    assert fs.cat_file(path) == noise(10 * MiB)
    assert cloud.asked() == []


def test_blocks_fetched_by_a_script_are_on_disk_when_it_has_ended(cloud, fs):
    cloud.put("a", noise(10 * MiB))
    cloud.python("""
        import fsspec, os
        fsspec.filesystem("cgs").cat_file(f"{os.environ['BUCKET']}/a")
    """)
    cloud.asked()
    assert fs.cat_file(cloud.path("a")) == noise(10 * MiB)
    assert cloud.asked() == []


def test_a_worker_killed_during_a_fetch_blocks_no_other(cloud, fs, forking):
    cloud.put("a", noise(SIZE))
    cloud.server.fail(Fault(kind="media", stall_after=2 * MiB, stall_s=3600))
    worker = forking.Process(target=fetch, args=(fs, cloud.path("a")))
    worker.start()
    until(lambda: cloud.server.bytes_sent() >= 2 * MiB)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert fs.cat_file(cloud.path("a")) == noise(SIZE)
    forget()
    assert fs.cat_file(cloud.path("a")) == noise(SIZE)


# Threads.
def test_many_threads_read_the_right_bytes_once(cloud, fs):
    objects = {cloud.path(f"{i}"): cloud.put(f"{i}", noise(MiB + i, i)) for i in range(10)}
    paths, barrier = list(objects), threading.Barrier(50)

    def is_right(i):
        path = paths[i % 10]
        barrier.wait()
        if i % 2:
            with fs.open(path) as file:
                return file.read() == objects[path]
        return fs.cat_file(path) == objects[path]

    with ThreadPoolExecutor(50) as threads:
        assert all(threads.map(is_right, range(50)))
    assert cloud.server.bytes_sent() <= 1.02 * sum(map(len, objects.values()))
