"""Loops, threads and the end of a process: nobody hangs, and nothing is left. Each in a process of its own, that may hang."""

import importlib.util
import json
import sys
import textwrap

import fsspec
import pytest

from cachedfs.sim import Delay, Fault, GCSServer, Profile
from tests.support import Cloud, KiB, MiB, noise

SLOW = Profile(name="slow", media=Delay(0.05), stream_rate=8 * MiB, total_rate=8 * MiB)

# What the processes below have in common. `slow` is an object whose body does not come.
COMMON = """
import asyncio, functools, gc, json, os, signal, sys, threading, time, weakref
import fsspec
from cachedfs import engine, engines
from cachedfs.origins import gcs, retry
import tests.long_timeouts
from tests.support import KiB, MiB, noise, until

gcs.Policy = functools.partial(retry.Policy, stall_s=3600.0)  # what does not come is not given up by itself
bucket = os.environ["BUCKET"]

def left():
    '''What this process holds that it should give up by itself: requests, questions, tasks, claims.'''
    own = fs._source.engine
    assert own.drain(120)
    claims = own.cache._own.claims._held().bytes.keys() - {own.cache._own.store.room.writer() & (1 << 62) - 1}
    return [*own.flights, *own.airborne, *own.questions._asked, *own._tasks, *claims]

def descriptors():
    '''Open files and sockets, but for the blocks that are kept open on purpose.'''
    gc.collect()
    own = list(engines._engines.values())
    return len(os.listdir("/proc/self/fd")) - sum(len(each.cache._handles._idle) for each in own)

def once(begun, then):
    '''Do `then` in another thread once `begun` is true.'''
    threading.Thread(target=lambda: (until(begun), then()), daemon=True).start()

def reading():
    '''True while a request is under way.'''
    return any(each.requests and each.airborne for each in list(engines._engines.values()))

fs = fsspec.filesystem("cgs")
"""


def python(cloud, code, *arguments, timeout=600):
    return cloud.python(COMMON + textwrap.dedent(code), *arguments, timeout=timeout)


@pytest.fixture
def stalled(cloud):
    """A cloud whose object `slow` stalls, for longer than any test waits, after as many bytes as are asked for."""
    cloud.put("a", noise(3 * MiB))
    cloud.put("slow", noise(3 * MiB))

    def after(n_bytes=None):
        cloud.server.fail(Fault(kind="media", key="slow", stall_s=3600, stall_after=n_bytes, times=None))
        return cloud

    return after


# Event loops of others.


def test_a_loop_closed_in_the_middle_of_a_read_harms_no_other(stalled):
    """Nobody cancels what ran on it: the read ends by itself, and what it fetched is there."""
    cloud = stalled()
    cloud.server.heal()
    cloud.server.fail(Fault(kind="media", key="slow", stall_s=10))
    printed = python(
        cloud,
        """
        there = fsspec.filesystem("cgs", asynchronous=True)
        loops = [asyncio.new_event_loop() for _ in range(3)]
        for loop in loops:
            loop.set_exception_handler(lambda loop, context: None)  # the task that is lost with its loop is ours
            task = loop.create_task(there._cat_file(f"{bucket}/slow"))
            loop.run_until_complete(asyncio.sleep(0))
            until(reading)
            loop.close()
        del task, loops, loop
        gc.collect()
        assert asyncio.run(there._cat_file(f"{bucket}/slow")) == noise(3 * MiB)
        assert fs.cat_file(f"{bucket}/slow") == noise(3 * MiB)
        until(lambda: not left())
        print(fs.stats().requests)
        """,
    )
    assert printed == "1\n"


def test_a_read_that_its_loop_cancels_leaves_nothing(stalled):
    """Also with a second one that goes on waiting for the same bytes, and gets them."""
    cloud = stalled()
    python(
        cloud,
        """
        async def impatient():
            there = fsspec.filesystem("cgs", asynchronous=True)
            assert await there._cat_file(f"{bucket}/a") == noise(3 * MiB)
            for _ in range(20):
                try:
                    await asyncio.wait_for(there._cat_file(f"{bucket}/slow"), 0.02)
                except TimeoutError:
                    continue
                raise AssertionError("it does not come")
        asyncio.run(impatient())
        own = fs._source.engine
        until(lambda: not own.questions._asked)
        until(lambda: not left())
        assert fs.cat_file(f"{bucket}/a") == noise(3 * MiB)
        """,
    )


# Ctrl-C.

SYNC_TARGET = """
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

begun = threading.Event()

class Stuck(MemoryFileSystem):
    protocol, cachable = "stuck", False
    def cat_file(self, path, start=None, end=None, **kwargs):
        begun.set()
        time.sleep(300)

register_implementation("stuck", Stuck)
Stuck().pipe_file("/d/slow", noise(3 * MiB))
there = fsspec.filesystem("cachedfs", target_protocol="stuck")
reading, read = begun.is_set, lambda: there.cat_file("/d/slow")
"""

READS = {
    "cat_file": 'read = lambda: fs.cat_file(f"{bucket}/slow")',
    "handle": 'read = lambda: fs.open(f"{bucket}/slow").read()',
    "async": 'read = lambda: asyncio.run(fsspec.filesystem("cgs", asynchronous=True)._cat_file(f"{bucket}/slow"))',
    "sync target": SYNC_TARGET,
}


@pytest.mark.parametrize(
    ("read", "received"),
    [("cat_file", None), ("cat_file", MiB + 5), ("handle", MiB + 5), ("async", None), ("sync target", None)],
)
def test_an_interrupt_ends_a_read_and_the_process(stalled, read, received):
    """KeyboardInterrupt, and the end in time, whatever does not answer; what has arrived is kept whole or not at all."""
    cloud = stalled(received)
    code = f"{READS[read]}\nread_by = {read!r}\n" + textwrap.dedent(
        f"""
        enough = {received or 0} >> 20 << 20
        once(lambda: reading() and all(e.bytes_fetched >= enough for e in list(engines._engines.values())),
             lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            read()
        except KeyboardInterrupt:
            print("interrupted")
        if not {received or 0} and read_by != "sync target":
            until(lambda: not left())  # what nobody waits for is not asked any more
        """
    )
    assert cloud.python(COMMON + code, timeout=290) == "interrupted\n"
    assert_sound(cloud)


@pytest.mark.parametrize("moment", ["before", "behind", "when it is under way"])
def test_an_interrupt_while_a_read_is_given_to_the_loop_ends_it(stalled, moment):
    """Before the caller knows what it could cancel: it is on the loop already, or is not."""
    printed = python(
        stalled(),
        """
        given, moment = asyncio.run_coroutine_threadsafe, sys.argv[1]

        def interrupted(coroutine, loop):
            if moment != "before":
                given(coroutine, loop)
                if moment != "behind":
                    until(reading)
            raise KeyboardInterrupt

        for _ in range(20):
            asyncio.run_coroutine_threadsafe = interrupted
            try:
                fs.cat_file(f"{bucket}/slow")
            except KeyboardInterrupt:
                print("interrupted")
            asyncio.run_coroutine_threadsafe = given
            fs.cat_file(f"{bucket}/a", 0, 1)  # behind it on the loop
            until(lambda: not left())
        """,
        moment,
    )
    assert printed == 20 * "interrupted\n"


def assert_sound(cloud, *, most_temporary=0):
    """The process that ended left nothing behind, and what it was reading is read here."""
    cloud.server.heal()
    assert len(list(cloud.cache_dir.glob("*/tmp/*"))) <= most_temporary
    fs = fsspec.filesystem("cgs", **cloud.options)
    if fs.exists(cloud.path("slow")):
        assert fs.cat_file(cloud.path("slow")) == noise(3 * MiB)
    assert not fs._source.engine.cache.check(repair=True).corrupt
    assert fs._source.engine.cache.check().ok


# The end of a process.


@pytest.mark.parametrize("used", ["used before", "used first"])
def test_a_thread_goes_on_reading_after_the_main_thread_has_ended(cloud, used):
    """A program ends with the last of its own threads: until then it reads, lists and stores as ever."""
    if used == "used first" and sys.version_info[:2] == (3, 12):
        used = "used before"  # Python 3.12 starts no thread any more by then
    for i in range(3):
        cloud.put(f"d/{i}", noise(8 * MiB, i))
    printed = python(
        cloud,
        """
        # A name, which somebody has to look up.
        url = os.environ["FSSPEC_GS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
        fs = fsspec.filesystem("cgs", gs={"token": "anon", "endpoint_url": url})
        if sys.argv[1] == "used before":
            assert fs.cat_file(f"{bucket}/d/0") == noise(8 * MiB)

        def late():
            threading.main_thread().join()
            assert len(fs.ls(f"{bucket}/d")) == 3
            for i in range(3):
                assert fs.cat_file(f"{bucket}/d/{i}") == noise(8 * MiB, i)
                with fs.open(f"{bucket}/d/{i}") as file:
                    assert file.read() == noise(8 * MiB, i)
            assert len(fs.cat([f"{bucket}/d/{i}" for i in range(3)])) == 3
            print(fs.stats().cannot_store)

        threading.Thread(target=late).start()
        """,
        used,
    )
    assert printed == "None\n"
    cloud.asked()
    python(cloud, 'assert fs.cat_file(f"{bucket}/d/2") == noise(8 * MiB, 2)')


ENDS = {
    "a daemon thread reads": """
        once(reading, stop.set)
        threading.Thread(target=quiet, args=(lambda: fs.cat_file(f"{bucket}/slow"),), daemon=True).start()
        """,
    "something is read ahead": """
        file = fs.open(f"{bucket}/long")
        while len(fs._source.engine.airborne) < 2:
            assert file.read(256 * KiB)
        stop.set()
        """,
    "an open file was never closed": """
        file = fs.open(f"{bucket}/slow")
        stop.set()
        """,
    "the disk is slow": """
        from cachedfs.cache import disk
        write_all = disk.write_all
        def late(fd, buffers, offset):
            time.sleep(2 * (len(buffers) > 1))  # of a block: its bytes and its trailer
            write_all(fd, buffers, offset)
        disk.write_all = late
        assert len(fs.cat_file(f"{bucket}/long")) == 24 * MiB
        stop.set()
        """,
    "the loop is stuck": """
        fs.cat_file(f"{bucket}/a")
        threading.Thread(target=quiet, args=(lambda: fs.cat_file(f"{bucket}/slow"),), daemon=True).start()
        until(reading)
        fs._source.engine.call_soon(time.sleep, 300)
        stop.set()
        """,
    "a task on a loop of its own reads": """
        async def forget():
            there = fsspec.filesystem("cgs", asynchronous=True)
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            task = asyncio.ensure_future(there._cat_file(f"{bucket}/slow"))
            while not reading():
                await asyncio.sleep(0.001)
        asyncio.run(forget())
        stop.set()
        """,
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_with_work_in_flight(own_cache, how):
    """It stores what arrived, for five seconds at most, and is gone; the next one finds a sound cache and right bytes."""
    with GCSServer(profile=SLOW) as server:
        server.make_bucket("b")
        for name, size in (("a", 1), ("slow", 3), ("long", 24)):
            server.put("b", name, noise(size * MiB))
        server.fail(Fault(kind="media", key="slow", stall_s=3600, stall_after=100 * KiB, times=None))
        cloud = Cloud(server, "b", own_cache)
        begin = """
        stop = threading.Event()
        engine.DRAIN_S = 2.0  # each of the two waits for what does not end

        def quiet(read):
            try:
                read()
            except OSError as error:
                assert "shutting down" in str(error), error
        """
        end = """
        assert stop.wait(290)
        """
        python(cloud, "".join(textwrap.dedent(part) for part in (begin, ENDS[how], end)), timeout=290)
        if how == "the disk is slow":
            assert len(list(own_cache.glob("*/blocks/*/*"))) < 24, "it waits for all that it read"
        assert_sound(cloud, most_temporary=how == "the disk is slow")  # the block that it was writing


# What is left.


def test_nothing_grows_however_much_is_read(cloud):
    """Round after round of reads, listings, errors and evictions: as many threads, descriptors and tasks as before."""
    for i in range(12):
        cloud.put(f"d/{i}", noise(MiB + i, i))
    printed = python(
        cloud,
        """
        # So few connections that the first rounds make them all, whichever pauses there are.
        fs, there = (fsspec.filesystem("cgs", asynchronous=each, concurrency=2) for each in (False, True))
        names = [f"{bucket}/d/{i}" for i in range(12)]

        async def read_all():
            for piece in await asyncio.gather(*(there._cat_file(name) for name in names)):
                assert len(piece) >= MiB

        def one_round():
            fs.evict(f"{bucket}/d")
            fs.invalidate_cache()
            threads = [threading.Thread(target=fs.cat_file, args=(names[i % 12],)) for i in range(50)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            asyncio.run(read_all())
            for i, name in enumerate(names):
                with fs.open(name) as file:
                    assert file.read(100) == noise(MiB + i, i)[:100]
                    file.seek(MiB - 10)
                    assert len(file.read()) == 10 + i
                fs.open(name).read(10)  # never closed
                try:
                    fs.cat_file(name + "-missing")
                except FileNotFoundError:
                    pass
            assert len(fs.find(bucket)) == 12
            until(lambda: not left())

        def measured():
            one_round()
            return descriptors(), threading.active_count(), len(asyncio.all_tasks(fs._source.engine.loop))

        for _ in range(3):
            one_round()
        before = measured()
        for _ in range(8):
            after = measured()
        print(json.dumps([before, after]))
        """,
    )
    before, after = json.loads(printed)
    # Of threads there may be fewer, and as many as are allowed at once: never one more a round.
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4
    assert after[2] == 0


def test_a_closed_engine_leaves_no_thread_and_no_descriptor(cloud):
    """But for the file of claims, which no process may close, and the two that it keeps mapped."""
    for i in range(4):
        cloud.put(f"d/{i}", noise(2 * MiB, i))
    python(
        cloud,
        """
        import gcsfs, aiohttp
        before = descriptors()
        for i in range(4):
            fs.cat_file(f"{bucket}/d/{i}")
        fs.ls(f"{bucket}/d")
        with fs.open(f"{bucket}/d/0") as file:
            file.read(10)
        engines._close_all()
        until(lambda: threading.active_count() == 1)
        until(lambda: descriptors() <= before + 3)
        """,
    )


def test_filesystems_and_handles_that_nobody_holds_are_gone(cloud):
    """Collected, with what they had open: also in the middle of a read ahead, and whichever thread collects them."""
    cloud.put("a", noise(12 * MiB))
    python(
        cloud,
        """
        def use(i):
            own = fsspec.filesystem("cgs", skip_instance_cache=True)
            file = own.open(f"{bucket}/a")
            file.seek(i * 64 * KiB)
            assert len(file.read(70 * KiB)) == 70 * KiB
            return weakref.ref(own), weakref.ref(file), weakref.ref(file.raw)

        use(0)
        until(lambda: not left())
        before = descriptors()
        for cold in (True, False):
            if cold:
                fs.evict(f"{bucket}/a")
            seen = [ref for i in range(40) for ref in use(i)]
            fs._source.engine.call_soon(gc.collect)
            until(lambda: gc.collect() is not None and not any(ref() for ref in seen))
            until(lambda: not left())
            assert descriptors() <= before + 16, (before, descriptors())  # connections, of which 16 are kept
        """,
    )


@pytest.mark.parametrize("warm", [True, False])
def test_a_file_may_be_closed_while_others_read_it(cloud, warm):
    """Who reads gets right bytes, or ValueError as from any closed file; what the file had open is closed."""
    cloud.put("a", noise(6 * MiB))
    python(
        cloud,
        """
        import contextlib, random
        data, wrong = noise(6 * MiB), []
        warm = sys.argv[1] == "True"
        fs.cat_file(f"{bucket}/a")

        def read(file, seed):
            chance = random.Random(seed)
            while True:
                try:
                    piece = file.read(chance.randrange(1, 200 * KiB))
                    if piece not in data:
                        wrong.append(len(piece))
                    file.seek(chance.randrange(len(data)))
                except ValueError:
                    return

        def in_hand():
            '''Blocks that are open and not in the pool: every one is somebody's, or lost.'''
            links = []
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(f"/proc/self/fd/{name}"))
            return sum("/blocks/" in link for link in links) - len(fs._source.engine.cache._handles._idle)

        def one_round():
            if not warm:
                fs.evict(f"{bucket}/a")
            file = fs.open(f"{bucket}/a")
            threads = [threading.Thread(target=read, args=(file, seed)) for seed in range(6)]
            [thread.start() for thread in threads]
            file.read(10)
            time.sleep(0.01)
            file.close()
            [thread.join(300) for thread in threads]
            assert not any(thread.is_alive() for thread in threads), "a reader hangs"
            until(lambda: not left())
            assert in_hand() == 0

        one_round()
        before = descriptors()
        for _ in range(6):
            one_round()
        assert not wrong, wrong[:3]
        assert descriptors() <= before + 16
        """,
        str(warm),
    )


# Workers that load data.


class Samples:
    """What a DataLoader maps over: the chunks of an array that was opened before its workers were made."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return self.array.shape[0]

    def __getitem__(self, index):
        return int(index), int(self.array[index].sum())


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.stress)])
def test_a_data_loader_of_four_workers_reads_an_array_that_was_opened_before(cloud, method):
    """Every sample right, in both epochs; every chunk downloaded once by all four; and all of them end."""
    python(
        cloud,
        """
        import multiprocessing, warnings
        multiprocessing.set_forkserver_preload(["torch", "zarr", "tests.integration.test_loops", "tests.long_timeouts"])  # once, not in each worker
        import numpy as np, torch.utils.data, zarr
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than there are cores
        from tests.integration.test_loops import Samples
        url, n = f"cgs://{bucket}/a.zarr", 32
        array = zarr.create_array(url, shape=(n, 1000), chunks=(1, 1000), dtype="i4")
        array[:] = np.arange(n * 1000).reshape(n, 1000)
        engines._close_all()
        array = zarr.open_array(url, mode="r")
        expected = {i: int(np.arange(i * 1000, (i + 1) * 1000).sum()) for i in range(n)}
        assert Samples(array)[3] == (3, expected[3])  # with a loop, threads and connections of its own
        loader = torch.utils.data.DataLoader(
            Samples(array), batch_size=4, num_workers=4, shuffle=True, multiprocessing_context=sys.argv[1],
            timeout=300, persistent_workers=True)
        for epoch in range(2):
            found = {}
            for numbers, sums in loader:
                found |= dict(zip(numbers.tolist(), sums.tolist()))
            assert found == expected
        workers = loader._iterator._workers
        del loader
        gc.collect()
        for worker in workers:
            worker.join(300)
            assert worker.exitcode == 0, worker.exitcode
        """,
        method,
        timeout=600,
    )
    chunks = [
        request.key for request in cloud.server.requests if request.kind == "media" and "/c/" in request.key
    ]
    assert len(chunks) == len(set(chunks)) == 32
