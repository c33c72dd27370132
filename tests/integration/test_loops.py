"""Event loops, Ctrl-C, the end of a process, and what reads leave behind: threads, descriptors, requests."""

import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import textwrap
import weakref

import fsspec
import pytest

from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.cache.audit import audit
from tests.fakes import gate
from tests.support import KiB, MiB, noise, until, until_quiet

# Code shared by the child processes.
COMMON = """
import asyncio, contextlib, functools, gc, json, os, signal, sys, threading, time
import fsspec
from cachedfs.core import engine, engines, store_queue
from cachedfs.origins import retry
from cachedfs.origins.gcs import origin
import tests.long_timeouts
from tests.support import KiB, MiB, noise, until, until_quiet

origin.RetryPolicy = functools.partial(retry.RetryPolicy, stall_s=3600.0)  # nothing times out by itself
bucket = os.environ["BUCKET"]

def active_requests():
    return len(fs._objects.engine.active_requests)

fs = fsspec.filesystem("cgs")
"""


def python(cloud, code, *arguments):
    return cloud.python(COMMON + textwrap.dedent(code), *arguments)


def assert_clean(cloud, *keys, most_temporary=0):
    """The process left no temporary files or bad blocks, and what it was reading can be read here."""
    cloud.server.heal()
    assert len(list(cloud.cache_dir.glob("*/tmp/*"))) <= most_temporary
    fs = fsspec.filesystem("cgs")
    for key in keys:
        assert fs.cat_file(cloud.path(key)) == noise(3 * MiB)
    assert audit(fs._objects.engine.cache)._replace(missing=(), leftovers=()).ok


def stall(cloud, *keys, after=None):
    """Put objects whose bodies stop after `after` bytes, for longer than any test waits."""
    for key in keys:
        cloud.put(key, noise(3 * MiB))
        cloud.server.fail(Fault(kind="media", key=key, stall_s=3600, stall_after=after, times=None))


# Event loops of callers.
def test_a_loop_closed_during_a_read_does_not_affect_others(origin):
    """Its tasks are never cancelled: the read ends by itself, and its blocks are cached."""
    fs, there = (
        fsspec.filesystem("cachedfs", target_protocol="gs", asynchronous=each) for each in (False, True)
    )
    origin.put("b/k", noise(3 * MiB))
    gate(fs, origin, is_open=False)
    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # the task lost with its loop is expected
        task = loop.create_task(there._cat_file("b/k"))
        loop.run_until_complete(asyncio.sleep(0))
        until(lambda: origin.open_bodies)
        loop.close()
    del task, loop
    gc.collect()
    gate(fs, origin, is_open=True)
    assert asyncio.run(there._cat_file("b/k")) == noise(3 * MiB)
    assert fs.cat_file("b/k") == noise(3 * MiB)
    until_quiet(fs._objects.engine)
    assert len(origin.log) == 1


def test_a_cancelled_read_leaves_nothing_running(cloud, monkeypatch):
    monkeypatch.setattr(
        "cachedfs.origins.fsspec_origin.RetryPolicy", functools.partial(RetryPolicy, stall_s=3600.0)
    )
    fs, there = (fsspec.filesystem("cgs", asynchronous=each) for each in (False, True))
    stall(cloud, "slow")

    async def impatient():
        for n in range(1, 4):
            task = asyncio.ensure_future(there._cat_file(cloud.path("slow")))
            await asyncio.to_thread(until, lambda n=n: len(cloud.server.requests) == n)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(until_quiet, fs._objects.engine)

    asyncio.run(impatient())
    cloud.server.heal()
    assert fs.cat_file(cloud.path("slow")) == noise(3 * MiB)


# Ctrl-C.
def test_an_interrupt_ends_a_read_and_the_process(cloud):
    """KeyboardInterrupt is raised even if nothing answers; received blocks are stored whole or not at all."""
    stall(cloud, "slow")
    stall(cloud, "half", after=MiB + 5)
    printed = python(
        cloud,
        """
        from fsspec.implementations.memory import MemoryFileSystem
        from fsspec.registry import register_implementation

        class Stuck(MemoryFileSystem):
            protocol, cachable = "stuck", False
            def cat_file(self, path, start=None, end=None, **kwargs):
                stuck.set()
                threading.Event().wait()

        # Python drops an interrupt that arrives in a callback of a weak reference, and says so: it is sent again.
        sys.unraisablehook = lambda it: it.exc_type is KeyboardInterrupt or sys.__unraisablehook__(it)

        def interrupted(read, begun):
            is_over = threading.Event()

            def kill():
                until(begun)
                os.kill(os.getpid(), signal.SIGINT)
                while not is_over.wait(10):
                    os.kill(os.getpid(), signal.SIGINT)

            killer = threading.Thread(target=kill)
            killer.start()
            try:
                read()
            except KeyboardInterrupt:
                print("interrupted")
            is_over.set()
            killer.join()

        stuck = threading.Event()
        register_implementation("stuck", Stuck)
        Stuck().pipe_file("/d/slow", noise(3 * MiB))
        there = fsspec.filesystem("cgs", asynchronous=True)
        target = fsspec.filesystem("cachedfs", target_protocol="stuck")
        interrupted(lambda: fs.cat_file(f"{bucket}/slow"), active_requests)
        until_quiet(fs._objects.engine)  # a cancelled read sends no more requests
        interrupted(lambda: asyncio.run(there._cat_file(f"{bucket}/slow")), active_requests)
        until_quiet(fs._objects.engine)
        interrupted(lambda: fs.open(f"{bucket}/half").read(), lambda: fs._objects.engine.bytes_fetched >= MiB)
        interrupted(lambda: target.cat_file("/d/slow"), stuck.is_set)
        """,
    )
    assert printed == 4 * "interrupted\n"
    assert_clean(cloud, "slow", "half")


# The end of a process.


# Python 3.12 starts no thread after the main thread has ended.
@pytest.mark.parametrize("used", ["used before", "used first"][: 1 + (sys.version_info[:2] != (3, 12))])
def test_a_thread_can_read_after_the_main_thread_has_ended(cloud, used):
    """A program ends with the last of its own threads; until then reads, listings and caching work."""
    data = [cloud.put(f"d/{i}", noise(MiB, i)) for i in range(3)]
    printed = python(
        cloud,
        """
        # A host name that has to be resolved.
        url = os.environ["FSSPEC_GS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
        fs = fsspec.filesystem("cgs", gs={"token": "anon", "endpoint_url": url})
        if sys.argv[1] == "used before":
            assert fs.cat_file(f"{bucket}/d/0") == noise(MiB)

        def late():
            threading.main_thread().join()
            assert len(fs.ls(f"{bucket}/d")) == 3
            for i in range(3):
                with fs.open(f"{bucket}/d/{i}") as file:
                    assert file.read() == noise(MiB, i)
            assert len(fs.cat([f"{bucket}/d/{i}" for i in range(3)])) == 3
            print(fs.stats().cannot_store)

        threading.Thread(target=late).start()
        """,
        used,
    )
    assert printed == "None\n"
    url = cloud.server.endpoint_url.replace("127.0.0.1", "localhost")
    fs = fsspec.filesystem("cgs", gs={"token": "anon", "endpoint_url": url})
    cloud.asked()
    assert [fs.cat_file(cloud.path(f"d/{i}")) for i in range(3)] == data
    assert cloud.asked() == []


ENDS = {
    "with requests": """
        threading.Thread(target=quiet, args=("slow",), daemon=True).start()
        never_closed = fs.open(f"{bucket}/handle")
        until(lambda: active_requests() == 2)

        async def forget():
            there = fsspec.filesystem("cgs", asynchronous=True)
            task = asyncio.ensure_future(there._cat_file(f"{bucket}/task"))
            await asyncio.to_thread(until, lambda: active_requests() == 3)

        asyncio.run(forget())
        file = fs.open(f"{bucket}/long")
        for _ in range(8):
            file.read(MiB)
        until(lambda: any(f.start >= 8 * MiB for f in list(fs._objects.engine.active_requests)))  # is read ahead
        """,
    "while the disk stores nothing": """
        from cachedfs.cache import disk
        stuck = threading.Event()
        def never(path, buffers, size):
            stuck.set()
            threading.Event().wait()
        disk.write_file = never
        store_queue.StoreQueue.drain.__defaults__ = (0.2,)
        assert len(fs.cat_file(f"{bucket}/long")) == 24 * MiB
        assert stuck.wait(120)
        """,
    "while the loop is stuck": """
        fs.cat_file(f"{bucket}/a")
        threading.Thread(target=quiet, args=("slow",), daemon=True).start()
        until(active_requests)
        fs._objects.engine.call_soon(threading.Event().wait)
        """,
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_exits_with_requests_in_flight(cloud, how):
    """It stores received blocks and waits for nothing else; the next process finds a valid cache."""
    cloud.put("a", b"a")
    cloud.put("long", noise(24 * MiB))
    stall(cloud, "slow", "handle", "task", after=100 * KiB)
    if how == "with requests":
        cloud.server.fail(Fault(kind="media", key="long", nth=2, stall_s=3600, stall_after=0, times=None))
    begin = """
        engine.END_S = 0.2  # the wait for requests that do not end

        def quiet(key):
            try:
                fs.cat_file(f"{bucket}/{key}")
            except OSError as error:
                assert "process is exiting" in str(error), error
        """
    python(cloud, textwrap.dedent(begin) + textwrap.dedent(ENDS[how]))
    # Except for the block that was being written.
    assert_clean(cloud, "slow", most_temporary=how == "while the disk stores nothing")


# Leaks.
def test_threads_descriptors_and_tasks_do_not_accumulate(cloud):
    """Reads, listings, errors and evictions add no thread, descriptor or task per round; closing frees all."""
    for i in range(6):
        cloud.put(f"d/{i}", noise(300 * KiB + i, i))
    printed = python(
        cloud,
        """
        def descriptors():
            '''Open files and sockets, but for blocks and connections that are kept open on purpose.'''
            gc.collect()
            own = list(engines._engines.values())
            fds = len(os.listdir("/proc/self/fd")) - sum(len(each.cache.open_blocks) for each in own)
            return fds - index_descriptors()

        def index_descriptors():
            links = []
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(f"/proc/self/fd/{fd}"))
            return sum("/index.db" in link for link in links)

        import aiohttp, gcsfs
        at_first = descriptors()
        # So few connections that the first rounds make them all, whichever pauses there are.
        fs, there = (fsspec.filesystem("cgs", asynchronous=each, concurrency=2) for each in (False, True))
        names, data = [f"{bucket}/d/{i}" for i in range(6)], [noise(300 * KiB + i, i) for i in range(6)]

        async def read_all():
            return await asyncio.gather(*(there._cat_file(name) for name in names))

        def one_round():
            fs.evict(f"{bucket}/d")
            fs.invalidate_cache()
            threads = [threading.Thread(target=fs.cat_file, args=(names[i % 6],)) for i in range(24)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert asyncio.run(read_all()) == data
            for name, each in zip(names, data):
                with fs.open(name) as file:
                    assert file.read(100) == each[:100]
                fs.open(name).read(10)  # never closed
                try:
                    fs.cat_file(name + "-missing")
                except FileNotFoundError:
                    pass
            assert len(fs.find(bucket)) == 6
            until_quiet(fs._objects.engine)
            # SQLite keeps the descriptors of closed connections while others are open: as many as threads at once.
            assert index_descriptors() <= 2 * (24 + 3) + 1
            return descriptors(), threading.active_count(), len(asyncio.all_tasks(fs._objects.engine.loop))

        rounds = [one_round() for _ in range(5)]
        print(json.dumps([rounds[2], rounds[-1]]))
        engines._close_all()
        until(lambda: threading.active_count() == 1)
        until(lambda: descriptors() <= at_first + 3)  # the file of fetch locks, and the two mapped ones
        """,
    )
    before, after = json.loads(printed)
    # The numbers may vary up to the allowed concurrency, but do not grow with each round.
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4
    assert after[2] == 0


def leaked_blocks(fs):
    """Return how many blocks are open and not in the pool."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    cache = fs._objects.engine.cache
    return sum(link.startswith(f"{cache.root}/blocks/") for link in links) - len(cache.open_blocks)


def test_unreferenced_filesystems_and_files_are_collected(cloud):
    """Their blocks are closed, even during readahead, and in whichever thread they are collected."""
    cloud.put("a", noise(5 * MiB))
    fs = fsspec.filesystem("cgs")

    def use(i):
        own = fsspec.filesystem("cgs", skip_instance_cache=True)
        file = own.open(cloud.path("a"))
        file.seek(i * 64 * KiB)
        assert len(file.read(70 * KiB)) == 70 * KiB
        return weakref.ref(own), weakref.ref(file), weakref.ref(file.raw)

    for _ in range(2):  # from the origin, then from the disk
        seen = [ref for i in range(4) for ref in use(i)]
        fs._objects.engine.call_soon(gc.collect)
        until(lambda seen=seen: gc.collect() is not None and not any(ref() for ref in seen))
        until_quiet(fs._objects.engine)
        assert leaked_blocks(fs) == 0
