"""Processes and threads: fork, spawn, forkserver, workers that end, writers and readers of one machine."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
import zarr

from cachedfs.sim import Delay, Fault, GCSServer, Profile
from tests.support import ROOT, Cloud, KiB, MiB, forget, noise, until

SIZE = 3 * MiB + 5
SLOW = Profile(name="slow", media=Delay(0.05), stream_rate=20 * MiB, total_rate=20 * MiB)
NEAR = Profile(name="near", media=Delay(0.03), stream_rate=40 * MiB, total_rate=100 * MiB)


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options)


@pytest.fixture
def forking():
    """Python 3.12 and later warn when a process with threads forks: users do it all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield multiprocessing.get_context("fork")


def run(context, target, *arguments, n=1):
    """Run n processes at once; each ends well or the test fails. A child that hangs is killed."""
    processes = [context.Process(target=target, args=arguments) for _ in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            raise AssertionError("the child hangs")
    assert [process.exitcode for process in processes] == [0] * n


# What children run: at module level, so that spawn finds it.


def check_cat(fs, path, expected_size, seed):
    assert fs.cat_file(path) == noise(expected_size, seed)


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
    fs.cat_file(path)  # and end, with the blocks still on their way to the disk


# Fork.


@pytest.mark.parametrize("warm", [False, True])
def test_a_filesystem_used_before_a_fork_works_in_children(cloud, fs, forking, warm):
    for i, name in enumerate("ab"):
        cloud.put(f"d/{name}", noise(SIZE, i))
    if warm:
        assert fs.cat_file(cloud.path("d/a")) == noise(SIZE)
    else:
        fs.ls(cloud.path("d"))
    run(forking, check_everything, fs, cloud.path("d/a"), cloud.path("d/b"), n=2)
    assert fs.cat_file(cloud.path("d/b")) == noise(SIZE, 1)


@pytest.mark.usefixtures("haste")
@pytest.mark.parametrize("before", ["nothing", "a part", "everything"])
def test_a_handle_opened_before_a_fork_is_read_in_children(cloud, fs, forking, before):
    cloud.put("a", noise(20 * MiB))
    with fs.open(cloud.path("a")) as file:
        if before == "a part":
            file.read(100 * KiB)
        elif before == "everything":
            file.read()
        run(forking, check_handle, file, 20 * MiB, 0, n=2)
        check_handle(file, 20 * MiB, 0)


@pytest.mark.parametrize("touched", [False, True])
def test_an_array_opened_before_a_fork_is_read_in_children(cloud, forking, touched):
    array = zarr.create_array(cloud.url("a.zarr"), shape=(100,), chunks=(10,), dtype="i4")
    array[:] = np.arange(100)
    forget()
    opened = zarr.open_array(cloud.url("a.zarr"), mode="r")
    if touched:
        assert opened[:].tolist() == list(range(100))
    run(forking, check_array, opened, list(range(100)), n=2)
    assert opened[:].tolist() == list(range(100))


def check_blocks_open(fs, path, file, data, cache_dir):
    """The child holds the block that its handle reads, and after an eviction none: what others evict has its room back."""
    assert len(blocks_open(cache_dir)) == 1
    assert file.read(32 * KiB) == data[32 * KiB : 64 * KiB]
    assert file.read(64 * KiB) == data[64 * KiB : 128 * KiB]
    assert fs.cat_file(path, 0, 10) == data[:10]
    assert len(blocks_open(cache_dir)) <= 3
    file.close()
    fs.evict()
    assert blocks_open(cache_dir) == []


def blocks_open(cache_dir):
    """The blocks of this cache alone: what libraries dropped in earlier tests may still be waiting for its collection."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [
        target
        for target in map(os.readlink, filter(os.path.islink, links))
        if target.startswith(f"{cache_dir}/") and "/blocks/" in target
    ]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
def test_a_child_of_a_fork_holds_no_blocks_of_its_parent(cloud, forking):
    data = cloud.put("a", noise(40 * 64 * KiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=64 * KiB, **cloud.options)
    for _ in range(2):
        assert fs.cat_file(cloud.path("a")) == data
        assert fs._source.engine.drain(120)
    with fs.open(cloud.path("a")) as file:
        assert file.read(32 * KiB) == data[: 32 * KiB]
        assert len(blocks_open(cloud.cache_dir)) == 40
        run(forking, check_blocks_open, fs, cloud.path("a"), file, data, cloud.cache_dir)
        assert file.read() == data[32 * KiB :]


def test_a_child_of_a_child_reads(cloud, fs, forking):
    cloud.put("a", noise(SIZE))
    fs.cat_file(cloud.path("a"), 0, 10)

    def child():
        fs.cat_file(cloud.path("a"), MiB, MiB + 10)
        run(forking, check_cat, fs, cloud.path("a"), SIZE, 0)

    run(forking, child)


def test_a_fork_in_the_middle_of_reads_by_other_threads(cloud, fs, forking):
    for i in range(8):
        cloud.put(f"{i}", noise(SIZE, i))
    wrong, end = [], threading.Event()

    def keep_reading():
        i = 0
        while not end.is_set():
            fs.invalidate_cache()
            fs.evict(cloud.path(str(i % 8)))
            if fs.cat_file(cloud.path(str(i % 8))) != noise(SIZE, i % 8):
                wrong.append(i)
            i += 1

    threads = [threading.Thread(target=keep_reading) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(4):
            run(forking, check_cat, fs, cloud.path(str(i)), SIZE, i, n=2)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not wrong


# Spawn and forkserver.


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pickled_filesystems_handles_and_arrays_work_in_new_processes(cloud, method):
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
    """Return what a process without this one's configuration needs."""
    return {"cachedfs": {"cache_dir": str(cloud.cache_dir), "keep_free": 0}, **cloud.options}


# Workers that end.


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_a_worker_fetched_is_on_the_disk_when_it_has_ended(cloud, forking, method):
    cloud.put("a", noise(40 * MiB))
    fs, path = fsspec.url_to_fs(cloud.url("a"), **options(cloud))
    run(multiprocessing.get_context(method), fetch, fs, path)
    cloud.asked()
    assert fs.cat_file(path) == noise(40 * MiB)
    assert cloud.asked() == []


def test_what_a_script_fetched_is_on_the_disk_when_it_has_ended(cloud, fs):
    cloud.put("a", noise(40 * MiB))
    cloud.python("""
        import fsspec, os
        fsspec.filesystem("cgs").cat_file(f"{os.environ['BUCKET']}/a")
    """)
    cloud.asked()
    assert fs.cat_file(cloud.path("a")) == noise(40 * MiB)
    assert cloud.asked() == []


def test_a_worker_that_is_killed_while_it_fetches_leaves_nothing_that_stops_others(cloud, tmp_path):
    with GCSServer(profile=SLOW) as server:
        server.make_bucket("b")
        server.put("b", "a", noise(30 * MiB))
        gs = {"token": "anon", "endpoint_url": server.endpoint_url}
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs=gs)
        context = multiprocessing.get_context("spawn")
        worker = context.Process(
            target=fetch,
            args=(
                fsspec.filesystem("cachedfs", target_protocol="gs", gs=gs, **options(cloud)["cachedfs"]),
                "b/a",
            ),
        )
        worker.start()
        while not server.bytes_sent():
            time.sleep(0.01)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        assert fs.cat_file("b/a") == noise(30 * MiB)


# Several processes on one machine.


def test_a_write_by_another_process_is_seen_at_once(cloud, fs):
    path = cloud.path("d/a")
    code = """
        import fsspec, os, sys
        fs = fsspec.filesystem("cgs")
        for line in sys.stdin:
            command, _, rest = line.strip().partition(" ")
            if command == "pipe":
                fs.pipe_file(f"{os.environ['BUCKET']}/d/a", rest.encode())
            elif command == "write":
                with fs.open(f"{os.environ['BUCKET']}/d/a", "wb") as file:
                    file.write(rest.encode())
            elif command == "rm":
                fs.rm(f"{os.environ['BUCKET']}/d", recursive=True)
            elif command == "mv":
                fs.mv(f"{os.environ['BUCKET']}/d/a", f"{os.environ['BUCKET']}/d/b")
            print("done", flush=True)
    """
    with cloud.talking(code) as other:
        assert not fs.exists(path)
        for command, data in (("pipe", b"one"), ("write", b"two!"), ("pipe", b"three")):
            assert other(f"{command} {data.decode()}") == "done"
            assert fs.cat_file(path) == data
            assert fs.info(path)["size"] == len(data)
            with fs.open(path) as file:
                assert file.read() == data
            assert [info["size"] for info in fs.ls(cloud.path("d"))] == [len(data)]
            assert fs.find(cloud.path("d")) == [path]
        assert other("mv") == "done"
        assert not fs.exists(path)
        assert fs.find(cloud.path("d")) == [cloud.path("d/b")]
        assert fs.cat_file(cloud.path("d/b")) == b"three"
        assert other("rm") == "done"
        assert not fs.exists(cloud.path("d/b"))
        assert not fs.exists(cloud.path("d"))


def test_our_own_write_is_seen_by_another_process_at_once(cloud, fs):
    code = """
        import fsspec, os, sys
        fs = fsspec.filesystem("cgs")
        for line in sys.stdin:
            path = f"{os.environ['BUCKET']}/d/a"
            print(fs.cat_file(path).decode() if fs.exists(path) else "absent", len(fs.find(f"{os.environ['BUCKET']}/d")), flush=True)
    """
    with cloud.talking(code) as other:
        assert other("look") == "absent 0"
        fs.pipe_file(cloud.path("d/a"), b"one")
        assert other("look") == "one 1"
        with fs.open(cloud.path("d/a"), "wb") as file:
            file.write(b"two")
        assert other("look") == "two 1"
        fs.rm(cloud.path("d/a"))
        assert other("look") == "absent 0"


def test_four_processes_that_read_one_unknown_object_download_it_once(cloud):
    size = 24 * MiB
    with GCSServer(profile=NEAR) as server:
        server.make_bucket("b")
        server.put("b", "a", noise(size))
        code = """
            import fsspec, sys
            fs = fsspec.filesystem("cgs")
            for line in sys.stdin:
                with fs.open("b/a") as file:
                    first = file.read(100_000)
                    data = first + file.read()
                print(len(data), hash(data) == hash(fs.cat_file("b/a")), flush=True)
        """
        there = Cloud(server, "b", cloud.cache_dir)
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            readers = [stack.enter_context(there.talking(code)) for _ in range(4)]
            answers = list(pool.map(lambda ask: ask("read"), readers))
        assert answers == [f"{size} True"] * 4
        assert server.bytes_sent() <= 1.02 * size


# Threads.


def test_two_hundred_threads_read_the_right_bytes_once(cloud, fs):
    objects = {cloud.path(f"{i}"): cloud.put(f"{i}", noise(MiB + i, i)) for i in range(10)}
    paths, barrier, wrong = list(objects), threading.Barrier(200), []

    def read(i):
        path = paths[i % 10]
        barrier.wait()
        if i % 2:
            with fs.open(path) as file:
                data = file.read()
        else:
            data = fs.cat_file(path)
        if data != objects[path]:
            wrong.append(i)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cloud.server.bytes_sent() <= 1.02 * sum(map(len, objects.values()))


def test_one_handle_is_read_by_many_threads_without_mixing(cloud, fs):
    data = cloud.put("a", noise(6 * MiB))
    with fs.open(cloud.path("a")) as file, ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda _: file.read(64 * KiB), range(96)))
    assert sorted(pieces) == sorted(data[i : i + 64 * KiB] for i in range(0, 6 * MiB, 64 * KiB))


def test_a_loop_whose_thread_ends_late_is_closed_all_the_same(cloud, fs, monkeypatch):
    cloud.put("a", b"data")
    assert fs.cat_file(cloud.path("a")) == b"data"
    engine, go_on = fs._source.engine, threading.Event()
    loop, stop = engine.loop, engine.loop.stop
    monkeypatch.setattr(loop, "stop", lambda: (go_on.wait(120), stop()))
    forget()  # waits for the thread for a second
    assert not loop.is_closed()
    go_on.set()
    until(loop.is_closed)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_whose_thread_still_reads_ends(cloud, method, tmp_path):
    cloud.put("slow", b"data")
    cloud.server.fail(Fault(kind="media", key="slow", stall_s=3600))
    script = tmp_path / "main.py"
    script.write_text(
        """
import fsspec, multiprocessing, os, sys, threading, time

def read(fs):
    try:
        fs.cat_file(os.environ["BUCKET"] + "/slow")
    except OSError as error:
        assert "shutting down" in str(error), error

def work():
    fs = fsspec.filesystem("cgs")
    # Since Python 3.13 a worker joins its threads before anything else may run at its end, as programs always did.
    threading.Thread(target=read, args=(fs,), daemon=sys.version_info >= (3, 13)).start()
    time.sleep(0.5)

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start()
    worker.join(120)
    print(worker.exitcode)
    worker.kill()
"""
    )
    code = f"import runpy, sys; sys.argv = [{str(script)!r}, {method!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert cloud.python(code) == "0\n"


SIGNAL_WHILE_MADE = """
import signal, sys
import fsspec
from cachedfs import engines

fsspec.filesystem("memory").pipe_file("/a", b"1")
outer, inner = (fsspec.filesystem("cachedfs", target_protocol="memory", max_age=age) for age in (1, 2))
honest = engines.Engine

def interrupted(*args, **options):
    engines.Engine = honest
    made = honest(*args, **options)
    signal.raise_signal(signal.SIGTERM)
    return made

signal.signal(signal.SIGTERM, lambda *_: inner.cat_file("/a"))
engines.Engine = interrupted
assert outer.cat_file("/a") == b"1"
assert list(engines._engines.values()) == [outer._source.engine] == [inner._source.engine]
"""


def test_a_signal_handler_that_reads_while_the_engine_is_made_shares_it(own_cache):
    environ = {**os.environ, "FSSPEC_CACHEDFS_CACHE_DIR": str(own_cache)}
    subprocess.run([sys.executable, "-c", SIGNAL_WHILE_MADE], env=environ, cwd=ROOT, check=True, timeout=600)
