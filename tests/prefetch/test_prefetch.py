"""Prefetch plans: order, requests, window, cancellation, errors, progress."""

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import pickle
import signal
import threading
import weakref

import fsspec
import pytest
from fsspec.callbacks import Callback

from cachedfs.cache import disk
from cachedfs.cache.block_store import BlockStore
from cachedfs.core.downloads import Downloads
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    CacheError,
    ObjectNotFound,
    OriginUnavailable,
    OriginUnreachable,
)
from cachedfs.prefetch import plan as prefetch_plan
from cachedfs.prefetch import requests
from cachedfs.prefetch.belady import Belady
from cachedfs.sim import Fault
from tests.fakes import gate
from tests.support import KiB, MiB, forget, noise, until


@pytest.fixture
def process_options(cloud):
    """Options of a process that has not the configuration of this one."""
    return {"cachedfs": {"cache_dir": str(cloud.cache_dir), "keep_free": 0}, **cloud.options}


def fake_fs(**options):
    return fsspec.filesystem("cachedfs", target_protocol="gs", **options)


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(prefetch_plan, "POLL_S", (0.001, 0.005))


def small_files(cloud, n, folder="d", size=2000):
    """Put n objects; return their paths."""
    for i in range(n):
        cloud.put(f"{folder}/{i:03}", noise(size, i))
    return [cloud.path(f"{folder}/{i:03}") for i in range(n)]


def reads(origin):
    """Return the reads of a fake origin: path and first block."""
    return [(path, want.start // MiB) for kind, path, want in origin.log if kind == "read"]


def is_idle(fs):
    """Return whether no request is in flight or queued and no plan runs."""
    engine = fs._objects.engine
    names = {coroutine.__qualname__ for coroutine in list(engine._tasks)}
    parts = ("PrefetchPlan.", "PlanRequests.", "Fetcher.", "ObjectStream.", "Downloads.")
    is_working = any(name.startswith(parts) for name in names)
    return not (engine.by_block or engine.active_requests or any(engine.speculation.queued) or is_working)


# Cost in requests.
def test_ranges_of_a_cached_block_are_looked_for_in_the_cache_once(fs, cloud, monkeypatch):
    (path,) = small_files(cloud, 1)
    fs.cat_file(path)
    fs._objects.engine.drain(120)
    looks, has = [], BlockStore.has
    monkeypatch.setattr(BlockStore, "has", lambda *args, **options: looks.append(1) or has(*args, **options))
    plan = fs.prefetch([(path, i, i + 1) for i in range(200)])
    plan.wait()
    assert (plan.progress.items, plan.progress.requests, len(looks)) == (200, 0, 1)


def test_unknown_small_objects_cost_one_request_each_and_then_none(cloud, fs):
    paths = small_files(cloud, 20)
    done = fs.prefetch(paths).wait(120)
    assert cloud.asked() == ["media"] * 20
    assert (done.state, done.items, done.requests, done.bytes_fetched) == ("done", 20, 20, 40_000)
    for i, path in enumerate(paths):
        with fs.open(path) as file:
            assert file.read() == noise(2000, i)
    assert cloud.asked() == []


def test_a_folder_costs_one_listing_and_its_objects_and_then_nothing(cloud, fs):
    small_files(cloud, 20, "d/a")
    small_files(cloud, 5, "d/b/c")
    cloud.put("e", b"not below it")
    assert fs.prefetch(cloud.url("d") + "/").wait(120).items == 25
    assert cloud.asked() == ["list"] + ["media"] * 25
    forget()
    new = fsspec.filesystem("cachedfs", target_protocol="gs", **cloud.options)
    again = new.prefetch(cloud.url("d", "gs://")).wait(120)
    assert (again.items, again.bytes_fetched, again.bytes_here, again.bytes_total) == (25, 0, 50_000, 50_000)
    assert cloud.asked() == []


def prefetch_below(url, options):
    """Prefetch in a process of its own; return how many objects and bytes are cached afterwards."""
    fs, path = fsspec.url_to_fs(url, cachedfs=options["cachedfs"], gs=options["gs"])
    done = fs.prefetch(path + "/").wait(120)
    fs._objects.engine.drain(120)
    return done.items, done.bytes_fetched + done.bytes_here


def test_an_object_that_is_being_read_costs_a_folder_prefetch_no_request(origin):
    fs = fake_fs()
    for i in range(5):
        origin.put(f"b/d/{i}", noise(2 * MiB, i))
    may_answer, read_of = asyncio.Event(), origin.read

    @contextlib.asynccontextmanager
    async def late(path, want, pinned):
        async with read_of(path, want, pinned) as reply:
            if pinned is None:
                await may_answer.wait()
            yield reply

    origin.read = late
    thread = threading.Thread(target=fs.cat_file, args=("b/d/0",))
    thread.start()
    until(lambda: reads(origin))
    plan = fs.prefetch("b/d/")
    until(lambda: plan.progress.items == 4)
    fs._objects.engine.call_soon(may_answer.set)
    assert plan.wait(120).items == 5
    thread.join()
    assert len(reads(origin)) == 5


@pytest.mark.parametrize("is_tight", [False, True])
def test_a_plan_stands_back_while_readers_use_the_whole_link_unless_it_has_to_evict(
    origin, monkeypatch, is_tight
):
    monkeypatch.setattr(prefetch_plan, "MANY_READERS", 2)
    monkeypatch.setattr(Belady, "is_tight", is_tight)
    turns, pause = [], prefetch_plan.PrefetchPlan._pause

    async def counted(plan, pause_s):
        turns.append(pause_s)
        await pause(plan, pause_s)

    monkeypatch.setattr(prefetch_plan.PrefetchPlan, "_pause", counted)
    fs = fake_fs()
    for name in "abc":
        origin.put(f"b/{name}", noise(1000))
    gate(fs, origin, is_open=False)
    threads = [threading.Thread(target=fs.cat_file, args=(f"b/{name}",)) for name in "ab"]
    for thread in threads:
        thread.start()
    until(lambda: len(reads(origin)) == 2)
    plan = fs.prefetch("b/c")
    until(lambda: len(reads(origin)) == 3 if is_tight else len(turns) > 3)
    assert len(reads(origin)) == 2 + is_tight
    gate(fs, origin, is_open=True)
    assert plan.wait(120).items == 1
    for thread in threads:
        thread.join()
    assert len(reads(origin)) == 3


@pytest.mark.parametrize("n", [2, pytest.param(8, marks=pytest.mark.stress)])
def test_processes_that_prefetch_one_folder_download_it_once(cloud, fork_server, process_options, n):
    small_files(cloud, 12, size=100 * KiB)
    big = cloud.put("d/big", noise(9 * MiB))
    call = "tests.prefetch.test_prefetch:prefetch_below", cloud.url("d"), process_options
    crowd = [fork_server.start(*call) for _ in range(n)]
    total = 12 * 100 * KiB + len(big)
    assert [fork_server.wait(pid).result for pid in crowd] == [(13, total)] * n
    assert cloud.server.bytes_sent() <= 1.02 * total


# Items and their order.
def test_objects_are_requested_in_exactly_the_given_order(origin):
    fs = fake_fs(concurrency=1, request_size="2MiB")
    for name, n in (("x", 5), ("a", 1), ("m", 3), ("empty", 0), ("b", 2)):
        origin.put(f"b/{name}", noise(n * MiB, n))
    items = ["b/x", "b/a", ("b/m", 2 * MiB, None), "b/empty", "b/a", ("b/m", 0, 10), "b/b"]
    assert fs.prefetch(items).wait(120).items == 7
    expected = [("x", 0), ("x", 2), ("x", 4), ("a", 0), ("m", 2), ("empty", 0), ("m", 0), ("b", 0)]
    assert reads(origin) == [(f"b/{name}", start) for name, start in expected]


@pytest.mark.parametrize("is_known", [False, True])
def test_with_several_slots_the_order_differs_by_at_most_the_slots(origin, is_known):
    fs = fake_fs(concurrency=4)
    paths = [f"b/{name}" for name in "hgfedcbaqponmlkjizyxwvutsr"]
    for path in paths:
        origin.put(path, noise(1000))
        if is_known:
            fs.info(path)
    fs.prefetch(paths).wait(120)
    for sent, (path, _) in enumerate(reads(origin)):
        assert abs(paths.index(path) - sent) <= 4
    assert len(reads(origin)) == len(paths)


def test_folders_and_patterns_expand_to_each_object_once(cloud):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", concurrency=1, **cloud.options)
    for name in ("d/b/2", "d/b/1", "d/a", "d/c/x/y/z", "e/1", "e[1]"):
        cloud.put(name, b"1")
    items = ["d/", "e[1]", "**", "d/b/*"]
    done = fs.prefetch([cloud.url() + "/" + item for item in items]).wait(120)
    asked = [request.key for request in cloud.server.requests if request.kind == "media"]
    assert asked == ["d/a", "d/b/1", "d/b/2", "d/c/x/y/z", "e[1]", "e/1"]
    assert done.items == 4 + 1 + 6 + 2


def test_ranges_are_python_slices(cloud, fs):
    data = cloud.put("a", noise(5 * MiB + 7))
    cases = {
        (10, 20): [0], (MiB, 3 * MiB): [1, 2], (-1, None): [5], (6 * MiB, 9 * MiB): [], (3, 3): [],
        (4 * MiB, 99 * MiB): [4, 5], (None, -5 * MiB): [0], (-99 * MiB, 5): [0],
    }  # fmt: skip
    fs.info(cloud.path("a"))
    for (start, stop), blocks in cases.items():
        fs.evict(cloud.path("a"))
        cloud.asked()
        done = fs.prefetch((cloud.path("a"), start, stop)).wait(120)
        extent = fs.cached_extent(cloud.path("a"))
        assert sum(b - a for a, b in extent) == done.bytes_fetched
        assert [i for i in range(6) if any(a <= i * MiB < b for a, b in extent)] == blocks
        assert len(cloud.asked()) == bool(blocks)
        assert fs.cat_file(cloud.path("a"), start, stop) == data[start:stop]


def test_an_iterator_is_consumed_as_needed_and_may_block(cloud, fs):
    paths, taken, may_go_on = small_files(cloud, 8), [], threading.Event()

    def items():
        for path in paths[:4]:
            taken.append(path)
            yield path
        assert may_go_on.wait(120)
        yield paths[4], 0, 10
        yield from paths[5:]

    plan = fs.prefetch(items())
    until(lambda: plan.progress.items == 4)
    assert (plan.progress.state, plan.progress.items_total) == ("running", None)
    may_go_on.set()
    done = plan.wait(120)
    assert (done.items, done.items_total, done.bytes_total) == (8, 8, 16_000)


def test_an_endless_iterator_stops_at_the_window_and_is_closed_with_its_plan(cloud, fs):
    paths, n_taken, closed = small_files(cloud, 10), 0, threading.Event()

    def items():
        nonlocal n_taken
        try:
            for path in itertools.cycle(paths):
                n_taken += 1
                yield path
        finally:
            closed.set()

    plan = fs.prefetch(items(), window="8KB")
    until(lambda: plan.progress.state == "held")
    assert plan.progress.bytes_fetched <= 8000
    plan.cancel()
    assert closed.wait(120)
    assert n_taken < 10_000
    until(lambda: is_idle(fs))


def test_an_iterator_that_raises_ends_the_plan_with_its_error(cloud, fs):
    paths = small_files(cloud, 3)

    def items():
        yield from paths
        raise KeyError("no more of this")

    plan = fs.prefetch(items())
    with pytest.raises(KeyError, match="no more of this"):
        plan.wait(120)
    assert plan.progress.state == "failed"
    until(lambda: is_idle(fs))


def test_invalid_items_and_windows_raise(cloud, fs):
    for items in (5, b"b/k", None):
        with pytest.raises(TypeError, match="cannot prefetch"):
            fs.prefetch(items)
    for item in (("b/k",), ("b/k", 1.5, 2)):
        with pytest.raises(TypeError, match="cannot prefetch"):
            fs.prefetch([item]).wait(120)
    with pytest.raises(ValueError, match="expected"):
        fs.prefetch("b/k", window="10%")
    assert cloud.asked() == []


@pytest.mark.parametrize(("kind", "item"), [(list, 5), (iter, "nowhere://b/k")])
def test_an_invalid_item_ends_the_plan_only_when_it_is_reached(origin, item, kind):
    """The plan looks ahead to know what is used when; that does not take the items."""
    fs = fake_fs(concurrency=1)
    names = [f"b/{i:02}" for i in range(40)]
    for name in names:
        origin.put(name, b"1")
        fs.info(name)  # else the look ahead ends at the first item
    with pytest.raises((TypeError, ValueError), match=r"cannot prefetch 5|nowhere"):
        fs.prefetch(kind([*names, item, "b/x"])).wait(120)
    asked = [path for path, _ in reads(origin)]
    assert asked == names[: len(asked)]
    assert len(asked) > 30  # few items before it were made and not yet sent


# The window.
def read(fs, path, seed=None):
    """Read an object whole, through an open file."""
    with fs.open(path) as file:
        data = file.read()
    assert seed is None or data == noise(len(data), seed)


@pytest.mark.parametrize("is_known", [False, True])
def test_unread_bytes_never_exceed_the_window(cloud, is_known):
    # Readahead would request numbered files, too.
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", read_ahead=0)
    paths = small_files(cloud, 30, size=100_000)
    if is_known:
        fs.find(cloud.path("d"))
    window = 1_000_000 if is_known else 2_000_000  # an unknown object may bring a whole block
    plan = fs.prefetch(paths, window=window)
    sent = cloud.server.bytes_sent()
    for i, path in enumerate(paths):
        until(lambda i=i: plan.progress.bytes_fetched >= 100_000 * min(30, i + 10))
        assert cloud.server.bytes_sent() - sent <= window + i * 100_000
        read(fs, path, i)
    assert plan.wait(120).bytes_fetched == 3_000_000
    assert cloud.asked().count("media") == 30


def n_bytes(url, options):
    with fsspec.open(url, cachedfs=options["cachedfs"], gs=options["gs"]) as file:
        return len(file.read())


def test_a_read_of_another_process_moves_the_window(cloud, fork_server, fs, process_options):
    paths = small_files(cloud, 6, size=MiB)
    fs.find(cloud.path("d"))
    plan = fs.prefetch(paths, window="4MiB")
    for i in range(2):
        until(lambda i=i: plan.progress.bytes_fetched == (4 + i) * MiB)
        url = f"cachedfs::gs://{paths[i]}"
        assert fork_server.run("tests.prefetch.test_prefetch:n_bytes", url, process_options).result == MiB
    assert plan.wait(120).bytes_fetched == 6 * MiB
    assert cloud.asked().count("media") == 6


def test_a_reader_that_skips_or_reorders_does_not_stop_the_plan(cloud, fs, monkeypatch):
    paths = small_files(cloud, 40, size=100_000)
    fs.find(cloud.path("d"))
    plan = fs.prefetch(paths, window="800KB")
    order = [0, 5, 3, 1, 9, 11, 10, 17, 24, 20, 31, 33, 39]
    for i in order:
        until(lambda: plan.progress.state in ("held", "done"))
        read(fs, paths[i], i)
    assert plan.wait(120).items == 40


@pytest.mark.parametrize("is_list", [True, False])
def test_the_plan_follows_a_reader_far_beyond_the_window(cloud, fs, monkeypatch, is_list):
    paths = small_files(cloud, 100)
    fs.find(cloud.path("d"))
    plan = fs.prefetch(paths if is_list else iter(paths), window="10KB")
    until(lambda: plan.progress.state == "held")
    for i in range(60, 100):
        read_and_react(fs, paths[i], i, plan)
    assert plan.wait(120).items == 100
    assert plan.progress.bytes_fetched < 60 * 2000


def read_and_react(fs, path, seed, plan):
    """Read an object, and wait until the plan has reacted."""
    read(fs, path, seed)
    runner, engine, looks = plan._plan, fs._objects.engine, []
    look = runner._uses.look
    runner._uses.look = lambda: looks.append(None) or look()

    async def has_reacted():
        """Return whether the plan has seen the read and sent what follows; runs on the loop, between two of its steps."""
        is_waiting = plan.progress.state == "held" and not runner._changed.is_set()
        return runner.ended.done() or (looks and is_waiting)

    until(lambda: engine.run(has_reacted()))
    runner._uses.look = look
    engine.drain(120)


def test_without_a_window_the_plan_stops_before_it_evicts_unread_blocks(cloud, own_cache):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", cache_size="16MiB", **cloud.options)
    paths = small_files(cloud, 30, size=MiB)
    plan = fs.prefetch(paths)
    until(lambda: plan.progress.state == "held")
    fs._objects.engine.drain(120)
    n = plan.progress.items
    assert 8 <= n <= 16
    assert [bool(fs.cached_extent(path)) for path in paths] == [True] * n + [False] * (30 - n)
    sent = cloud.server.bytes_sent()
    for i, path in enumerate(paths):
        read_and_react(fs, path, i, plan)
    assert plan.wait(120).items == 30
    assert sent == n * MiB
    assert cloud.server.bytes_sent() == 30 * MiB


# The end of a plan: no request, no fetch lock and no thread is left.
def slow_plan(origin, fs, n=6, size=4):
    """Start a plan of large objects whose bodies are blocked; return it once all slots are taken."""
    for i in range(n):
        origin.put(f"b/{i}", noise(size * MiB, i))
    gate(fs, origin, is_open=False)
    plan = fs.prefetch([f"b/{i}" for i in range(n)])
    until(lambda: origin.open_bodies == 2)
    return plan


def check_given_up(origin, fs):
    """Unblock the bodies; check that only requests in flight are received and no more are sent."""
    n = len(reads(origin))
    gate(fs, origin, is_open=True)
    until(lambda: is_idle(fs) and not origin.open_bodies)
    engine = fs._objects.engine
    assert len(reads(origin)) == n == 2
    assert engine.bytes_fetched <= 2 * (MiB + origin.piece_size)
    key = fs._objects.version(fs._objects.known("b/0"))
    for i in range(4):
        assert engine.cache.locks.take(key.number + i)
        engine.cache.locks.release(key.number + i)
    assert fs.cat_file("b/0") == noise(4 * MiB, 0)


@pytest.mark.parametrize("how", ["cancel", "drop", "with"])
def test_a_cancelled_plan_sends_nothing_more_and_holds_no_lock(origin, default_patience, how):
    fs = fake_fs(concurrency=2)
    if how == "with":
        with slow_plan(origin, fs) as plan:
            pass
        assert plan.wait(0).state == "cancelled"
    elif how == "cancel":
        plan = slow_plan(origin, fs)
        plan.cancel()
        plan.cancel()
    else:
        slow_plan(origin, fs)
        gc.collect()
    check_given_up(origin, fs)


def test_a_read_of_a_block_that_a_cancelled_plan_was_fetching_succeeds(origin):
    fs = fake_fs(concurrency=2)
    plan, data = slow_plan(origin, fs), []
    thread = threading.Thread(target=lambda: data.append(fs.cat_file("b/1")))
    thread.start()
    until(lambda: any(len(download._waiters) > 1 for download in list(fs._objects.engine.active_requests)))
    plan.cancel()
    gate(fs, origin, is_open=True)
    thread.join(120)
    assert data == [noise(4 * MiB, 1)]


def test_the_end_of_the_process_ends_a_plan_and_its_waiters(cloud, fs):
    cloud.server.fail(Fault(kind="media", stall_s=3600, times=None))
    plan = fs.prefetch(small_files(cloud, 40))
    until(lambda: plan.progress.state == "running")
    caught = []

    def wait():
        try:
            plan.wait()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    forget()
    thread.join(120)
    assert isinstance(caught[0], OriginUnavailable)
    with pytest.raises(OriginUnavailable, match="process is exiting"):
        plan.wait()


def test_a_process_can_exit_while_a_plan_runs(cloud):
    small_files(cloud, 20)
    cloud.server.fail(Fault(kind="media", stall_s=3600, nth=10, times=None))
    code = """
    import itertools, sys, time, fsspec
    fs, path = fsspec.url_to_fs(sys.argv[1])
    plan = fs.prefetch(path + "/")
    endless = fs.prefetch(map(time.sleep, itertools.repeat(1000)))
    while plan.progress.items < 5: time.sleep(0.01)
    print("bye")
    """
    assert cloud.python(code, cloud.url("d"), timeout=300) == "bye\n"


def test_a_forked_child_leaves_the_plan_to_its_parent(cloud, fs, monkeypatch):
    plan = fs.prefetch(small_files(cloud, 20), window="5KB")
    until(lambda: plan.progress.state == "held")
    child = os.fork()
    if not child:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="before a fork"):
                plan.wait(1)
            assert plan.progress.items
            signal.alarm(120)  # waiting for the parent's thread would take an hour
            monkeypatch.setattr("cachedfs.prefetch.handle.END_S", 3600)
            plan.cancel()
            del plan
            gc.collect()
            own = fs.prefetch([cloud.path("d/000"), cloud.path("d/019")])
            assert own.wait(120).items == 2
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert plan.progress.state == "held"
    for i in range(20):
        read(fs, cloud.path(f"d/{i:03}"), i)
    plan.wait(120)


def prefetch_and_die(url, options):
    """Prefetch a folder in a process that kills itself in the middle."""
    fs, path = fsspec.url_to_fs(url, cachedfs=options["cachedfs"] | {"concurrency": 2}, gs=options["gs"])
    plan = fs.prefetch(path + "/")
    until(lambda: plan.progress.items >= 20)
    fs._objects.engine.drain(120)
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_kill_only_missing_blocks_are_fetched(cloud, fs, fork_server, process_options):
    small_files(cloud, 40, size=50_000)
    killed = fork_server.run("tests.prefetch.test_prefetch:prefetch_and_die", cloud.url("d"), process_options)
    assert killed.signal == signal.SIGKILL
    sent = cloud.server.bytes_sent()
    done = fs.prefetch(cloud.path("d/")).wait(120)
    assert done.bytes_here >= 20 * 50_000
    assert done.bytes_fetched + done.bytes_here == 40 * 50_000
    assert cloud.server.bytes_sent() - sent == done.bytes_fetched
    assert [fs.cat_file(cloud.path(f"d/{i:03}")) for i in range(40)] == [noise(50_000, i) for i in range(40)]


def test_a_running_plan_cannot_be_pickled(cloud, fs):
    with pytest.raises(TypeError, match="pass the paths"):
        pickle.dumps(fs.prefetch([]))


# Errors.
def test_failed_objects_are_reported_and_the_others_are_fetched(cloud, fs):
    paths = small_files(cloud, 10)
    cloud.server.fail(Fault(kind="media", key="d/004", status=403, times=None))
    items = [paths[0], cloud.path("nothing"), *paths[1:], cloud.path("d/nowhere/")]
    plan = fs.prefetch(items)
    with pytest.raises(CachedFSError, match="3 of 12 objects could not be prefetched") as caught:
        plan.wait(120)
    assert {type(error) for error in plan.errors} == {ObjectNotFound, AccessDenied}
    names = ("nothing", "d/004", "d/nowhere")
    assert {path.rstrip("/") for path, _ in plan.failed} == {cloud.path(name) for name in names}
    assert all(cloud.url(name, "gs://") in str(caught.value) for name in names)
    assert (plan.progress.state, plan.progress.errors, plan.progress.items) == ("done", 3, 12)
    cloud.server.heal()
    cloud.asked()
    for i in {*range(10)} - {4}:
        read(fs, paths[i], i)
    assert cloud.asked() == []


def test_an_object_replaced_after_the_listing_is_fetched_in_its_new_version(cloud, fs):
    paths = small_files(cloud, 5)
    fs.find(cloud.path("d"))
    cloud.put("d/003", noise(3000, 99))
    assert fs.prefetch(paths).wait(120).errors == 0
    cloud.asked()
    assert fs.cat_file(paths[3]) == noise(3000, 99)
    assert cloud.asked() == []


@pytest.mark.parametrize("name", ["b/d/", "b/d"])
def test_an_unexpected_error_of_a_listing_ends_the_plan(origin, monkeypatch, name):
    async def broken(folder, parent=None, *, deep=False):
        raise ValueError("no such listing")
        yield

    origin.put("b/d/x", b"1")
    monkeypatch.setattr(origin, "list", broken)
    with pytest.raises(ValueError, match="no such listing"):
        fake_fs().prefetch([name]).wait(120)


def test_folders_keep_their_order_whichever_is_listed_first(origin, monkeypatch):
    fs, list_of, is_second_there = fake_fs(concurrency=1), origin.list, asyncio.Event()

    async def listed(folder, parent=None, *, deep=False):
        if folder == "b/d1":
            await is_second_there.wait()
        async for info in list_of(folder, parent, deep=deep):
            yield info
        if folder == "b/d2":
            is_second_there.set()

    monkeypatch.setattr(origin, "list", listed)
    names = [f"b/d{folder}/{i}" for folder in "12" for i in range(3)]
    for name in names:
        origin.put(name, noise(10))
    assert fs.prefetch(["b/d1", "b/d2"]).wait(120).items == 6
    assert [path for path, _ in reads(origin) if path in names] == names


@pytest.mark.parametrize("items", [[f"b/d/{i}" for i in range(4)], ["b/d"], ["b/d/*"]])
def test_a_plan_waits_for_an_unreachable_origin_and_then_ends(origin, monkeypatch, caplog, items):
    monkeypatch.setattr(requests, "PAUSE_S", (0.01, 0.01))
    names = [*(f"b/d/{i}" for i in range(4)), "b/x"]
    for name in names:
        origin.put(name, b"1")
    origin.fail_with = {n: OriginUnreachable("refused") for n in (1, 2, 4)}
    progress = fake_fs(concurrency=1).prefetch([*items, "b/x"]).wait(120)
    assert (progress.items, progress.items_total, progress.errors) == (5, 5, 0)
    assert {path for path, _ in reads(origin)} - {"b/d"} == {*names}
    assert "continues when it answers" in caplog.text
    monkeypatch.setattr(requests, "AWAY_S", 0.0)
    forget()
    origin.fail_with = {n: OriginUnreachable("refused") for n in range(len(origin.log), 1000)}
    plan = fake_fs(max_age=0, stale_if_error=False).prefetch([*items, "b/x"])
    with pytest.raises(OriginUnreachable, match="refused"):
        plan.wait(120)
    assert plan.progress.state == "failed"
    assert len(origin.log) < 100


def test_each_failure_is_reported_and_many_end_the_plan(origin):
    fs = fake_fs()
    origin.put("b/x", b"1")
    origin.fail_with = {1: AccessDenied("b/d0: forbidden")}
    plan = fs.prefetch(["b/d0/", "b/x"])
    with pytest.raises(AccessDenied, match="forbidden"):
        plan.wait(120)
    assert (plan.progress.state, plan.progress.items, plan.progress.errors) == ("done", 2, 1)
    for ending in ("", "/"):  # objects, and folders
        origin.log.clear()
        origin.fail_with = {n: OriginUnavailable(f"busy, {n}") for n in range(1000)}
        plan = fs.prefetch([f"b/e{i}{ending}" for i in range(500)])
        with pytest.raises(OriginUnavailable, match="busy"):
            plan.wait(120)
        assert plan.progress.errors == 16
        assert len(origin.log) <= 50


def test_offline_nothing_is_requested_and_missing_objects_are_reported(cloud, fs):
    paths = small_files(cloud, 6)
    fs.prefetch(paths[:4]).wait(120)
    forget()
    cloud.asked()
    there = fsspec.filesystem("cachedfs", target_protocol="gs", offline=True, **cloud.options)
    assert there.prefetch(paths[:4]).wait(120).bytes_here == 8000
    with pytest.raises(OriginUnavailable, match=r"2 of 6 .*offline=True"):
        there.prefetch(paths).wait(120)
    assert cloud.asked() == []


def test_a_plan_stops_soon_when_nothing_can_be_stored(cloud, fs, monkeypatch, caplog):
    paths = small_files(cloud, 200, size=100 * KiB)
    fs.cat_file(paths[0])
    fs._objects.engine.drain(120)
    cloud.asked()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_file", full)
    with pytest.raises(CacheError, match=r"because blocks cannot be stored.*No space left"):
        fs.prefetch(paths).wait(120)
    assert len(cloud.asked()) < 100
    monkeypatch.undo()


def test_a_block_that_was_not_stored_is_an_error_even_if_the_next_one_was(origin, monkeypatch):
    fs, put, n_puts = fake_fs(), BlockStore.put, itertools.count()

    def full_once(cache, given, bounds, *more, **options):
        if next(n_puts) == 1:
            raise CacheError("the disk is full")
        return put(cache, given, bounds, *more, **options)

    monkeypatch.setattr(BlockStore, "put", full_once)
    data = origin.put("b/big", noise(32 * MiB))
    origin.put("b/small", noise(MiB))
    with pytest.raises(CacheError, match=r"b/big.*could not be stored.*prefetch it again"):
        fs.prefetch(["b/big", "b/small"]).wait(120)
    again = fs.prefetch(["b/big", "b/small"]).wait(120)
    assert (again.errors, again.bytes_here) == (0, 33 * MiB - again.bytes_fetched)
    assert again.bytes_fetched > 0
    n = len(origin.log)
    assert fs.cat_file("b/big") == data
    assert len(origin.log) == n


def test_a_plan_without_a_writable_directory_fetches_nothing_and_is_freed_with_its_handle(origin, tmp_path):
    (tmp_path / "file").write_text("in the way")
    fs = fake_fs(cache_dir=str(tmp_path / "file"))

    def failed():
        handle = fs.prefetch(["b/x"])
        with pytest.raises(CacheError, match="cannot be stored"):
            handle.wait(120)
        return weakref.ref(handle), weakref.ref(handle._plan)

    left = [failed() for _ in range(3)]
    assert origin.log == []
    until(lambda: gc.collect() >= 0 and {ref() for pair in left for ref in pair} == {None})


def test_an_object_without_a_fingerprint_is_an_error_and_not_fetched(origin):
    origin.has_fingerprints = False
    origin.put("b/k", noise(4 * MiB))
    with pytest.raises(CachedFSError, match="does not distinguish versions"):
        fake_fs().prefetch("b/k").wait(120)


# Progress.
def test_progress_and_an_fsspec_callback_report_bytes(cloud, fs):
    class Seen(Callback):
        values, sizes = (), ()

        def call(self, *args, **kwargs):
            self.values, self.sizes = (*self.values, self.value), (*self.sizes, self.size)

    seen = Seen()
    plan = fs.prefetch(small_files(cloud, 20, size=100_000), callback=seen)
    done = plan.wait(120)
    assert (seen.values[-1], seen.sizes[-1]) == (2_000_000, 2_000_000)
    assert list(seen.values) == sorted(seen.values)
    assert done.rate == pytest.approx(2_000_000 / done.seconds)
    assert (done.items, done.items_total, done.is_over) == (20, 20, True)
    assert "done" in repr(plan)


def test_a_wait_that_times_out_raises_and_the_plan_continues(cloud, fs):
    paths = small_files(cloud, 4)
    plan = fs.prefetch(paths, window="3KB")
    with pytest.raises(TimeoutError, match="still prefetching"):
        plan.wait(0)
    for path in paths:
        read(fs, path)
    assert plan.wait(120).state == "done"


def test_async_callers_wait_on_their_own_loop(cloud, fs):
    paths = small_files(cloud, 5)

    async def main():
        plan = await fs._prefetch(paths)
        with pytest.raises(TimeoutError):
            await (await fs._prefetch(itertools.cycle(paths), window="3KB"))._wait(0)
        return await plan._wait(120)

    assert asyncio.run(main()).items == 5


def test_errors_are_bounded_and_counted(cloud, fs):
    plan = fs.prefetch([cloud.path(f"nothing/{i}/x") for i in range(150)])
    with pytest.raises(ObjectNotFound, match="150 of 150"):
        plan.wait(120)
    assert (len(plan.errors), plan.progress.errors) == (100, 150)


def test_an_unexpected_error_of_a_request_ends_the_plan(origin, monkeypatch):
    def refused(self, *args, **options):
        raise PermissionError(13, "no locks")

    origin.put("b/x", noise(10))
    fs = fake_fs()
    fs.info("b/x")
    monkeypatch.setattr(Downloads, "launch", refused)
    with pytest.raises(PermissionError, match="no locks"):
        fs.prefetch(["b/x"]).wait(120)
