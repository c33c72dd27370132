"""Ten things that other caches got wrong when they were probed. Each names what was seen then; here cachedfs alone is tried."""

import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import warnings

import fsspec
import pytest
import zarr

from cachedfs.cache import Fact
from cachedfs.model import ObjectInfo
from cachedfs.sim import Fault
from tests.support import KiB, MiB, forget, noise, until

DATA = noise(5 * MiB + 3)


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs")


def read(url):
    with fsspec.open(url) as file:
        return file.read()


def forked(target):
    """Run `target` in a forked child; return how that ended, None when it hangs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()
    child.join(600)
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        return None
    return child.exitcode


def test_a_fetch_that_failed_is_fetched_again_here_and_in_a_new_process(cloud, fs):
    """fsspec's blockcache notes blocks as here before it fetches them: after a failure it reads zeros, for ever."""
    cloud.put("a", DATA)
    fs.info(cloud.path("a"))
    with fsspec.open(cloud.url("a")) as file:
        cloud.server.fail(Fault(kind="media", status=403, times=None))
        file.seek(4 * MiB)
        with pytest.raises(PermissionError):
            file.read(1000)
        cloud.server.heal()
        file.seek(4 * MiB)
        assert file.read(1000) == DATA[4 * MiB :][:1000]
    assert read(cloud.url("a")) == DATA
    forget()
    assert read(cloud.url("a")) == DATA


def test_two_threads_that_want_one_block_both_get_it(cloud):
    """In fsspec's blockcache the second of two threads finds the block noted as here, and reads zeros."""
    cloud.put("a", DATA)
    with fsspec.open(cloud.url("a")) as one, fsspec.open(cloud.url("a")) as other:
        cloud.server.fail(Fault(kind="media", stall_s=0.3, times=None))
        found = {}

        def read_with(file):
            file.seek(3 * MiB)
            found[file] = file.read(1000)

        threads = [threading.Thread(target=read_with, args=(file,)) for file in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(found.values()) == 2 * [DATA[3 * MiB :][:1000]]


def _read_and_die(url, options):
    with fsspec.open(url, **options) as file:
        file.read(100 * KiB)
        threading.Thread(target=file.read, daemon=True).start()
        signal.pause()


def test_a_process_killed_while_it_fills_the_cache_leaves_whole_objects_to_others(cloud):
    """fsspec's simplecache writes to the final name: others read half a file, during the fill and after it."""
    cloud.put("a", DATA)
    cloud.server.fail(Fault(kind="media", stall_after=2 * MiB + 5, stall_s=3600))
    options = {"cachedfs": fsspec.config.conf["cachedfs"], **cloud.options}
    child = multiprocessing.get_context("spawn").Process(target=_read_and_die, args=(cloud.url("a"), options))
    child.start()
    until(lambda: cloud.server.bytes_sent() > 2 * MiB)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert read(cloud.url("a")) == DATA
    forget()
    assert read(cloud.url("a")) == DATA


def test_an_object_that_is_overwritten_between_two_reads_is_never_mixed(cloud):
    """fsspec's blockcache mixes blocks of both, with check_files=True too; simplecache never sees the new object."""
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0)
    cloud.put("a", DATA)
    assert fs.cat_file(cloud.path("a"), MiB, 3 * MiB) == DATA[MiB : 3 * MiB]
    for seed, size in enumerate((len(DATA), 7 * MiB, 2 * MiB), start=1):
        new = cloud.put("a", noise(size, seed))
        assert fs.cat_file(cloud.path("a")) == new
        with fs.open(cloud.path("a")) as file:
            assert file.read() == new


def test_the_bound_holds_over_reopenings(cloud, own_cache):
    """zarr's CacheStore keeps its sum in memory: 100 kB grew to 320 kB in three openings. fsspec's have no bound."""
    bound = 6 * MiB
    for opening in range(3):
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", cache_size=bound)
        for number in range(6):
            name = f"{opening}-{number}"
            data = cloud.put(name, noise(MiB, 10 * opening + number))
            assert fs.cat_file(cloud.path(name)) == data
        forget()
        used = sum(path.stat().st_size for path in pathlib.Path(own_cache).rglob("*") if path.is_file())
        assert 3 * MiB < used <= bound


def test_readers_at_one_moment_make_one_fetch(cloud):
    """fsspec's caches have no single flight: N readers of one unknown object are N downloads."""
    cloud.put("a", noise(MiB))
    cloud.server.fail(Fault(kind="media", stall_s=0.3, times=None))
    found = []
    threads = [threading.Thread(target=lambda: found.append(read(cloud.url("a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 8 * [noise(MiB)]
    assert cloud.asked() == ["media"]


def test_a_sharded_array_read_again_in_a_new_process_asks_nothing(cloud):
    """Through fsspec's blockcache and filecache zarr 3 fetches every chunk every time; CacheStore keeps no ranges."""
    array = zarr.create_array(
        cloud.url("a.zarr"), shape=(400,), chunks=(10,), shards=(100,), dtype="i4", fill_value=0
    )
    array[:] = range(1, 401)
    code = """
        import os, zarr
        print(zarr.open_array(f"cachedfs::gs://{os.environ['BUCKET']}/a.zarr", mode="r")[25:375].sum())
    """
    expected = f"{sum(range(26, 376))}\n"
    assert cloud.python(code) == expected
    assert "media" in cloud.asked()
    assert cloud.python(code) == expected
    assert cloud.asked() == []


@pytest.mark.usefixtures("haste")
def test_what_was_opened_before_a_fork_is_read_after_it(cloud):
    """An array over gcsfs raises in the child, one over obstore hangs; handles of fsspec's caches raise or hang."""
    cloud.put("a", DATA)
    array = zarr.create_array(cloud.url("a.zarr"), shape=(4,), chunks=(2,), dtype="i4")
    array[:] = [1, 2, 3, 4]
    with fsspec.open(cloud.url("a")) as file:
        assert file.read(10) == DATA[:10]

        def child():
            assert file.read(4 * MiB) == DATA[10:][: 4 * MiB]
            assert array[:].tolist() == [1, 2, 3, 4]

        assert forked(child) == 0


def test_opening_a_file_takes_no_longer_with_fifty_thousand_known(cloud, fs):
    """fsspec's caches keep one JSON for all: 1.07 s an open with 50,000 files. 50 ms here are 100 times what it takes."""
    cloud.put("a", b"data")
    cache, identity = fs._source.engine.cache, fs._source.identity
    names = [cloud.path(f"many/{n:05}") for n in range(50_000)]
    cache.known.keep_facts(
        [
            Fact(
                identity,
                name,
                ObjectInfo(name, size=5, fingerprint="1"),
                time.time(),
                cache.known.mark(identity, name),
            )
            for name in names
        ]
    )
    assert fs.cat_file(cloud.path("a")) == b"data"
    forget()
    cloud.asked()
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    took = []
    for _ in range(5):
        began = time.perf_counter()
        with fs.open(cloud.path("a")) as file:
            assert file.read() == b"data"
        took.append(time.perf_counter() - began)
    assert fs.info(names[-1])["size"] == 5, "the fifty thousand are known"
    assert cloud.asked() == []
    assert min(took) < 0.05


def test_the_filesystem_is_used_synchronously_after_zarr(cloud, fs):
    """After zarr has awaited the instance that gcsfs shares, a plain `info` of it fails: "attached to a different loop"."""
    array = zarr.create_array(cloud.url("a.zarr"), shape=(4,), chunks=(2,), dtype="i4")
    array[:] = [1, 2, 3, 4]
    assert array[:].tolist() == [1, 2, 3, 4]
    assert sorted(fs.find(cloud.path("a.zarr"))) == [
        cloud.path(f"a.zarr/{name}") for name in ("c/0", "c/1", "zarr.json")
    ]
    assert json.loads(fs.cat_file(cloud.path("a.zarr/zarr.json")))["shape"] == [4]
    assert array[:].tolist() == [1, 2, 3, 4]
