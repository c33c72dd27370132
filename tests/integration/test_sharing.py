"""Processes, threads and tasks of one machine share downloads: each block is fetched once."""

import concurrent.futures
import contextlib
import json
import subprocess
import sys
import time
import types

import fsspec
import pytest

from cachedfs.core.reader import Reader
from cachedfs.sim import Delay, Fault, GCSServer, Profile
from tests.support import Cloud, KiB, MiB, noise, until

# A realistic link, where little is in flight when a request is aborted. Over loopback alone, the buffers of the kernel
# would hold megabytes.
LINK = Profile(name="link", media=Delay(0.02), stream_rate=60 * MiB, total_rate=200 * MiB)
N = 8  # processes

# Runs in a new process, which forks the readers before it has used anything.
READERS = """
import asyncio, json, multiprocessing, os, random, sys, threading
import fsspec, gcsfs
import tests.long_timeouts
from cachedfs.core import engines
from tests.support import noise, until, until_quiet

size, block, options, ways = (json.loads(argument) for argument in sys.argv[1:])
data = noise(size)
path = "b/a"

def check(start, piece):
    assert piece == data[start:start + block], f"wrong bytes at {start}"

def by_cat_file(order, before_each):
    fs = fsspec.filesystem("cgs", **options)
    for start in order:
        before_each()
        check(start, fs.cat_file(path, start, start + block))

def by_handle(order, before_each):
    with fsspec.filesystem("cgs", **options).open(path) as file:
        for start in order:
            before_each()
            file.seek(start)
            check(start, file.read(block))

def by_threads(order, before_each):
    wrong = []
    def some(part):
        try:
            by_cat_file(order[part::4], before_each)
        except BaseException as error:
            wrong.append(error)
    threads = [threading.Thread(target=some, args=(part,)) for part in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong, wrong

def by_tasks(order, before_each):
    async def read():
        fs = fsspec.filesystem("cgs", asynchronous=True, **options)
        gate = asyncio.Semaphore(16)
        async def one(start):
            async with gate:
                check(start, await fs._cat_file(path, start, start + block))
        await asyncio.gather(*map(one, order))
    asyncio.run(read())

context = multiprocessing.get_context("fork")
barrier = context.Barrier(len(ways))

def work(me):
    order = list(range(0, size, block))
    way, _, rhythm = ways[me].partition(" ")
    if rhythm == "in step":
        before_each = barrier.wait
    else:
        random.Random(me).shuffle(order)
        before_each = lambda: None
    barrier.wait(120)
    globals()["by_" + way](order, before_each)
    until_quiet(*engines._engines.values())

def run(target, numbers):
    processes = [context.Process(target=target, args=(number,)) for number in numbers]
    [process.start() for process in processes]
    return processes
"""


@contextlib.contextmanager
def serving(size, cache_dir, profile=LINK):
    """Start a server with one object, `b/a`; yield it and a `Cloud` for processes."""
    with GCSServer(profile=profile) as server:
        server.make_bucket("b")
        server.put("b", "a", noise(size))
        yield server, Cloud(server, "b", cache_dir)


def read_by_all(there, size, block, ways, code="", timeout=600, **options):
    """Let one process per element of `ways` read the whole object that way and check its bytes."""
    end = "print([process.join() or process.exitcode for process in run(work, range(len(ways)))])\n"
    arguments = [json.dumps(value) for value in (size, block, {"block_size": block, **options}, ways)]
    printed = there.python(READERS + (code or end), *arguments, timeout=timeout)
    if not code:
        assert json.loads(printed) == [0] * len(ways)


def left_on_disk(cache_dir):
    """Return temporary files in the cache, and locked bytes."""
    (root,) = cache_dir.iterdir()
    # In another process: closing the file here would release the locks of this process.
    asked = subprocess.run(
        [sys.executable, "-c", ASK_FOR_LOCK, root / "locks"], capture_output=True, text=True, check=True
    )
    locked = asked.stdout.split()
    return [*(root / "tmp").iterdir(), *locked]


# Prints who holds a lock on any byte of a file. (Reading /proc/locks would stop all processes that lock meanwhile.)
ASK_FOR_LOCK = """
import fcntl, os, struct, sys
fd = os.open(sys.argv[1], os.O_RDWR)
asked = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
kind, _, start, length, pid = struct.unpack("hhqqi4x", asked)
if kind != fcntl.F_UNLCK:
    print(f"{start}+{length}:{pid}")
"""


def test_eight_processes_in_random_order_download_each_block_once(own_cache):
    size = 8 * MiB + 5
    with serving(size, own_cache) as (server, there):
        read_by_all(
            there, size, 64 * KiB, ["cat_file", "handle", "threads", "tasks"] * 2, request_size=256 * KiB
        )
        assert server.bytes_sent() <= size + N * 256 * KiB  # each may abort a request when it jumps
    assert left_on_disk(own_cache) == []


def test_eight_processes_in_step_download_an_object_twice_the_cache_size_once(own_cache):
    """Blocks that were read ahead are not evicted before their readers need them."""
    size, bound = 16 * MiB + 5, 8 * MiB
    with serving(size, own_cache) as (server, there):
        ways = ["cat_file in step", "handle in step"] * (N // 2)
        read_by_all(there, size, 256 * KiB, ways, request_size=512 * KiB, cache_size=bound)
        assert server.bytes_sent() <= size + N * 512 * KiB
    assert left_on_disk(own_cache) == []


KILL = """
def on_refused_lock(notify):
    '''Call `notify` when another process holds a fetch lock that this one wants.'''
    from cachedfs.cache.locks import ByteRangeLocks
    take = ByteRangeLocks.take
    def taking(locks, number, n=1):
        taken = take(locks, number, n)
        if not taken:
            notify()
        return taken
    ByteRangeLocks.take = taking

begun, waiting = context.Event(), [context.Event() for _ in ways]

def fetch(_):
    on_refused_lock(lambda: None)
    fs = fsspec.filesystem("cgs", **options)
    threading.Thread(target=fs.cat_file, args=(path,), daemon=True).start()
    until(lambda: fs._objects.engine.requests and fs._objects.engine.bytes_fetched >= int(os.environ["BEGUN"]))
    begun.set()
    threading.Event().wait()

def wait(me):
    on_refused_lock(waiting[me].set)
    fs = fsspec.filesystem("cgs", **options)
    assert fs.cat_file(path) == data
    until_quiet(*engines._engines.values())

(downloads,) = run(fetch, [0])
assert begun.wait(120)
readers = run(wait, range(len(ways)))
assert all(event.wait(120) for event in waiting)
assert all(process.is_alive() for process in readers)
downloads.kill()
assert [process.join(120) or process.exitcode for process in readers] == [0] * len(ways)
"""


@pytest.mark.parametrize("begun", [0, 512 * KiB], ids=["asks what it is", "reads"])
def test_when_the_fetching_process_is_killed_the_others_continue(own_cache, monkeypatch, begun):
    """Its fetch locks are released, and the waiting processes fetch once what it had not stored."""
    size = 4 * MiB + 5
    monkeypatch.setenv("BEGUN", str(begun))
    with serving(size, own_cache) as (server, there):
        server.fail(Fault(kind="media", stall_s=100, stall_after=MiB if begun else None))
        read_by_all(there, size, 64 * KiB, ["waits"] * (N - 1), code=KILL)
        lost = max(request.bytes_sent for request in server.requests[:1])
        assert lost <= MiB
        assert server.bytes_sent() - lost <= 1.02 * size
    assert left_on_disk(own_cache) == []


SLOW = """
import fsspec, sys, time
from cachedfs.common.types import BlockKey, CacheBounds
fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=1 << 20)
path, engine, data = sys.argv[1], fs._objects.engine, open(sys.argv[2], "rb").read()
key = fs._objects.version(fs._objects.known(path))
size = key.block_size
blocks = range(len(data) // size)
sys.stdin.readline()
print(engine.cache.locks.take(key.number, len(blocks)) == len(blocks), flush=True)
for index in blocks:
    sys.stdin.readline()
    block = memoryview(data)[index * size : (index + 1) * size]
    engine.cache.put([(BlockKey(key, index), block)], CacheBounds(size=1 << 30))
    engine.cache.locks.release(key.number + index)
    print("stored", flush=True)
"""


def test_a_slow_fetch_of_another_process_is_waited_for_while_it_makes_progress(cloud, monkeypatch, tmp_path):
    """All four blocks together take longer than the wait for one of them."""
    later_s, taken, take = [0.0], list[int](), Reader._take_cached

    async def recording(self, *given):
        found = await take(self, *given)
        taken.extend(found)
        return found

    monkeypatch.setattr(Reader, "_take_cached", recording)
    monkeypatch.setattr("cachedfs.core.engine.OVERDUE_S", 1000)
    shifted = types.SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0])
    monkeypatch.setattr("cachedfs.core.polling.time", shifted)
    path, data = cloud.path("slow"), cloud.put("slow", noise(4 * MiB))
    (tmp_path / "data").write_bytes(data)
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=MiB)
    fs.info(path)
    fs._objects.engine.drain(120)
    with cloud.talking(SLOW, path, str(tmp_path / "data")) as ask:
        assert ask("lock") == "True"
        cloud.asked()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            reading = thread.submit(fs.cat_file, path)
            for n in range(4):
                later_s[0] += 600
                assert ask("go on") == "stored"
                until(lambda n=n: len(taken) > n)
            assert reading.result(600) == data
        assert cloud.asked() == []


STOPPED = """
import sys
import fsspec
from cachedfs.cache.index.metadata_records import hash_of
fs = fsspec.filesystem("cachedfs", target_protocol="gs")
sys.stdin.readline()
hashes = []
for path in sys.argv[1:]:
    hashes.append(hash_of(f"lookups at {fs._objects.identity}", path))
    if known := fs._objects.known(path):
        hashes += [fs._objects.version(known).number + index for index in range(2)]
print(len(hashes), all([fs._objects.engine.cache.locks.take(hash64) for hash64 in hashes]), flush=True)
sys.stdin.read()
"""


def test_blocks_locked_by_a_stopped_process_are_fetched_after_a_while(cloud, monkeypatch):
    """It is alive, as after Ctrl-Z, and so are its fetch locks."""
    for module in ("core.engine", "core.lookups"):
        monkeypatch.setattr(f"cachedfs.{module}.OVERDUE_S", 0.0)
    data = {cloud.path(key): cloud.put(key, noise(2 * MiB, n)) for n, key in enumerate("abc")}
    read, prefetched, unknown = data
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    fs.info(read)
    fs.info(prefetched)
    fs._objects.engine.drain(120)
    with cloud.talking(STOPPED, *data) as ask:
        assert ask("lock") == "7 True"
        cloud.asked()
        assert fs.cat_file(read) == data[read]
        assert fs.prefetch(prefetched).wait(120).errors == 0
        assert fs.cat_file(prefetched) == data[prefetched]
        assert fs.cat_file(unknown) == data[unknown]
        assert cloud.server.bytes_sent() == 6 * MiB
