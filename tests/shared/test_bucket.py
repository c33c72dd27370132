"""A shared cache in a bucket: what the store is asked, its clock, and that it is not in the way."""

import asyncio
import contextlib
import math
import threading
import time
import types
from collections import Counter
from functools import partial

import fsspec
import pytest

from cachedfs.common.types import Range
from cachedfs.errors import ChecksumMismatch
from cachedfs.origins.base import Reply
from cachedfs.origins.gcs.origin import GCSOrigin
from cachedfs.shared import (
    gatherer,
    leases,
    origin_store,
    read_leases,
    shared_bucket,
    shared_index,
    shared_reads,
)
from cachedfs.shared.leases import Leases, lease_of
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.sim import Fault
from tests.cli.helpers import run
from tests.fakes import gate
from tests.shared.conftest import (
    asked,
    lease_on,
    leave,
    quiet,
    read_all,
    reading,
    version_of,
    wait_for_whole_files,
)
from tests.support import MiB, noise, until

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # raised by gcsfs in aiohttp


@pytest.fixture
def bucket(cloud):
    """The URL of a shared cache in a bucket; the origin of the data is `origin`."""
    return cloud.url("shared", "gs://")


def test_what_one_node_has_read_the_next_one_reads_from_the_bucket(
    put_there, origin, node, cloud, bucket, monkeypatch
):
    data = put_there(shared_cache=bucket)
    cloud.asked()
    fs = node("b", shared_cache=bucket)
    wait_for_whole_files(monkeypatch)
    read_all(fs, data)
    assert fs.info("b/d/1/1")["size"] == 50_001
    assert len(fs.ls("b/d/0")) == 7
    assert asked(origin) == []
    assert fs.stats().bytes_fetched == 0
    assert fs.stats().bytes_shared >= sum(map(len, data.values()))
    assert fs.stats().requests == 0
    leave()
    assert len(cloud.asked()) < len(data)  # the small objects came with their file


def test_a_part_of_a_large_object_costs_a_lease_and_one_upload(origin, node, cloud, bucket, monkeypatch):
    monkeypatch.setattr(shared_index, "RECENT_S", math.inf)
    monkeypatch.setattr(shared_index, "RENEW_S", math.inf)
    monkeypatch.setattr(read_leases, "RENEW_S", 3600.0)
    monkeypatch.setattr(gatherer, "SETTLE_S", math.inf)  # the first block waits for the others of its part
    origin.put("b/k", noise(24 * MiB))
    fs = node("a", shared_cache=bucket)
    fs.cat_file("b/k", start=0, end=1)
    cloud.asked()
    fs.cat_file("b/k")
    leave()
    assert Counter(cloud.asked()) == {"upload": 3 + 3 + 1, "delete": 3}  # and a file of metadata


@pytest.mark.parametrize(("size", "n_leases"), [(4 * MiB - 1, 0), (4 * MiB, 1), (9 * MiB, 2)])
def test_only_objects_of_4_mib_and_more_have_leases(origin, node, bucket, monkeypatch, size, n_leases):
    taken, take = [], Leases.take
    monkeypatch.setattr(Leases, "take", lambda self, names: taken.extend(names) or take(self, names))
    data, fs = origin.put("b/k", noise(size)), node("a", shared_cache=bucket)
    fs._objects.engine.shared.reads.leases._met_at = math.inf  # it takes a lease before it asks the origin
    fs.ls("b")
    assert fs.cat_file("b/k") == data
    assert len(taken) == n_leases


def test_a_listing_counts_once_what_it_says_is_known(origin, node, bucket, monkeypatch):
    data = {f"b/{i}": origin.put(f"b/{i}", noise(4 * MiB, i)) for i in range(2)}
    read_all(node("a", shared_cache=bucket), data)
    leave()
    fs, ahead_s = node("b", shared_cache=bucket, read_ahead=0), [0.0]
    begun, read = threading.Event(), threading.Event()
    fs._objects.engine.shared.reads.leases._met_at = math.inf  # it takes a lease before it asks the origin
    monkeypatch.setattr(shared_index, "RECENT_S", 60.0)
    now = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(shared_index, "time", now)
    with monkeypatch.context() as earlier:  # than what the other node put there
        earlier.setattr(SharedBucket, "listed", lambda self, subfolder: [])
        fs.ls("b")
        assert fs.cat_file("b/0") == data["b/0"]
    ahead_s[0] = 100.0
    listed, take = SharedBucket.listed, Leases.take

    def slowly(self, subfolder):
        if not subfolder:
            begun.set()
            assert read.wait(60)
        return listed(self, subfolder)

    def take_then(self, names):
        assert begun.wait(60)
        return take(self, names)

    monkeypatch.setattr(SharedBucket, "listed", slowly)
    monkeypatch.setattr(Leases, "take", take_then)
    asked(origin)
    assert fs.cat_file("b/1") == data["b/1"]
    read.set()
    assert asked(origin) == []


def place_at(url):
    return contextlib.closing(SharedBucket(url, is_read_only=False))


@pytest.fixture
def hidden(monkeypatch):
    """Let the bucket look empty while this event is not set."""
    shows, listed = threading.Event(), SharedBucket.listed
    monkeypatch.setattr(SharedBucket, "listed", lambda *args: listed(*args) if shows.is_set() else [])
    shows.set()
    return shows


def in_thread(act):
    got = []
    thread = threading.Thread(target=lambda: got.append(act()), daemon=True)
    thread.start()
    return thread, got


def test_a_request_ends_when_another_node_turns_out_to_have_the_lease(
    origin, node, bucket, monkeypatch, hidden
):
    """A node that met no other one asks the origin while it takes the lease, and from then on after that."""
    data = {f"b/{i}": origin.put(f"b/{i}", noise(8 * MiB, i)) for i in range(2)}
    read_all(node("a", shared_cache=bucket), data)
    leave()
    hidden.clear()
    monkeypatch.setattr(shared_index, "RENEW_S", math.inf)  # it looks where it waits only
    fs = node("b", shared_cache=bucket, read_ahead=0)
    fs.ls("b")
    names = [lease_on(fs, path) for path in data]
    reads = fs._objects.engine.shared.reads.leases
    with place_at(bucket) as place:
        assert Leases(place, lambda: "other").take(names) == set(names)
    asked(origin)
    gate(fs, origin, is_open=False)
    thread, got = in_thread(lambda: fs.cat_file("b/0"))
    until(lambda: names[0] in reads._elsewhere)
    gate(fs, origin, is_open=True)
    until(lambda: not origin.open_bodies)
    hidden.set()
    thread.join(60)
    assert got == [data["b/0"]]
    assert asked(origin) == [("read", "b/0")]
    assert fs.stats().bytes_shared == 8 * MiB - origin.piece_size
    hidden.clear()
    thread, got = in_thread(lambda: fs.cat_file("b/1"))
    until(lambda: names[1] in reads._elsewhere)
    hidden.set()
    thread.join(60)
    assert got == [data["b/1"]]
    assert asked(origin) == []
    assert reads._elsewhere == set()
    met_at = reads._met_at
    assert reads._take_and_look([NAME], "runs/0a") == {NAME}
    assert reads._met_at == met_at  # a lease that nobody else has


def test_a_read_does_not_wait_for_a_lease_that_does_not_come(origin, node, bucket, monkeypatch):
    data, fs = origin.put("b/k", noise(8 * MiB)), node("a", shared_cache=bucket, read_ahead=0)
    is_read, take = threading.Event(), Leases.take
    monkeypatch.setattr(Leases, "take", lambda self, names: is_read.wait(60) and take(self, names))
    monkeypatch.setattr(shared_reads, "LEASE_S", 0.01)
    fs.ls("b")
    assert fs.cat_file("b/k") == data
    is_read.set()


def test_a_lease_that_comes_after_its_read_was_stopped_is_released(origin, node, bucket, monkeypatch):
    origin.put("b/k", noise(8 * MiB))
    fs, take = node("a", shared_cache=bucket), Leases.take
    begun, stopped, taken = (threading.Event() for _ in range(3))
    fs.ls("b")
    ask = partial(origin.read, "b/k", pinned=version_of(fs, "b/k").info)

    def take_late(self, names):
        begun.set()
        assert stopped.wait(60)
        found = take(self, names)
        taken.set()
        return found

    async def stop():
        async with reading(fs, "b/k", Range(0, MiB), ask):
            assert await asyncio.to_thread(begun.wait, 60)

    monkeypatch.setattr(Leases, "take", take_late)
    fs._objects.engine.run(stop())
    stopped.set()
    assert taken.wait(60)
    with place_at(bucket) as place:
        until(lambda: not place.listed("leases"))


def test_an_error_at_the_end_of_a_body_is_raised_also_if_another_node_has_the_lease(origin, node, bucket):
    """It may say that the checksum of all bytes is another one."""
    data, fs = origin.put("b/k", noise(8 * MiB)), node("a", shared_cache=bucket)
    fs.ls("b")
    name, engine = lease_on(fs, "b/k"), fs._objects.engine

    async def body():
        await asyncio.to_thread(until, lambda: name in engine.shared.reads.leases._elsewhere)
        yield data
        raise ChecksumMismatch("wrong")

    @contextlib.asynccontextmanager
    async def ask(want):
        yield Reply(version_of(fs, "b/k").info, 0, 8 * MiB, body())

    async def read():
        async with reading(fs, "b/k", Range(0, 8 * MiB), ask) as reply:
            return [each async for each in reply.body]

    with place_at(bucket) as place:
        assert Leases(place, lambda: "other").take([name])
        with pytest.raises(ChecksumMismatch):
            engine.run(read())


READ_AND_END = """
import sys, fsspec
fs = fsspec.filesystem("cachedfs", target_protocol="gs", shared_cache=sys.argv[2], cache_dir=sys.argv[3])
print(len(fs.cat_file(sys.argv[1])), "bytes,", fs.stats().requests, "requests")
"""


def test_a_process_that_ends_at_once_has_put_there_what_it_read(cloud, bucket, tmp_path):
    path = cloud.path("d/k")
    cloud.put("d/k", noise(50_000))
    assert cloud.python(READ_AND_END, path, bucket, tmp_path / "a") == "50000 bytes, 1 requests\n"
    assert cloud.python(READ_AND_END, path, bucket, tmp_path / "b") == "50000 bytes, 0 requests\n"


def test_a_bucket_of_s3_is_a_shared_cache_too(put_there, origin, node, s3):
    url = s3.url("shared", "s3://")
    data = put_there(n=3, shared_cache=url)
    read_all(node("b", shared_cache=url), data)
    assert asked(origin) == []
    with place_at(url) as ours, place_at(url) as theirs:
        assert Leases(ours, str).take([NAME])
        assert not Leases(theirs, str).take([NAME])


@pytest.mark.parametrize("skew_s", [-600, 600])
def test_ages_are_counted_by_the_clock_of_the_store(origin, node, bucket, clock, monkeypatch, skew_s):
    time_of, server_time = origin_store.time_of, GCSOrigin.server_time
    for module in (origin_store, shared_bucket):
        monkeypatch.setattr(module, "time_of", lambda info: time_of(info) + skew_s)
    monkeypatch.setattr(GCSOrigin, "server_time", lambda self: server_time(self) + skew_s)
    origin.put("b/k", noise(50_000))
    node("a", shared_cache=bucket).cat_file("b/k")
    leave()
    asked(origin)
    node("b", shared_cache=bucket, max_age=300).cat_file("b/k")
    assert asked(origin) == []
    clock(300)
    fs = node("c", shared_cache=bucket, max_age=300)
    fs.cat_file("b/k")
    assert asked(origin) == [("lookup", "b/k")]


def test_prefetch_in_a_shell_fails_if_the_bucket_takes_nothing(own_cache, cloud, bucket, monkeypatch):
    cloud.put("data/0", noise(9 * MiB))
    cloud.server.fail(Fault(kind="upload", stall_s=60.0, times=None))
    monkeypatch.setattr(SharedBucket, "answers_s", 0.05)
    said = run("prefetch", "-o", f"shared_cache={bucket}", cloud.url("data", "gs://"), status=1).stderr
    assert "not all is in the shared cache, which takes nothing now; `cachedfs export` adds the rest" in said
    cloud.server.heal()


@pytest.mark.parametrize("stalls", ["always", "during a read"])
def test_a_store_that_does_not_answer_is_left_alone(
    put_there, origin, node, cloud, bucket, caplog, monkeypatch, stalls
):
    data = put_there(n=4, shared_cache=bucket)
    monkeypatch.setattr(SharedBucket, "answers_s", 0.2)
    fs = node("b", shared_cache=bucket)
    if stalls == "during a read":
        assert fs.cat_file("b/d/0/0") == data["b/d/0/0"]
    cloud.server.fail(Fault(kind=None if stalls == "always" else "media", stall_s=60.0, times=None))
    read_all(fs, data)
    assert asked(origin)
    cloud.asked()
    for path, content in data.items():
        fs.evict(path)
        assert fs.cat_file(path) == content
    assert cloud.asked() == []
    [message] = quiet(caplog)
    assert "did not answer" in message
    assert "did not answer" in fs.stats().shared_cache
    cloud.server.heal()


def test_a_bucket_that_can_only_be_read_is_read(put_there, origin, node, cloud, bucket, caplog):
    data = put_there(n=4, shared_cache=bucket)
    cloud.server.fail(Fault(kind="upload", status=403, times=None))
    fs = node("b", shared_cache=bucket)
    read_all(fs, data)
    assert asked(origin) == []  # each answer of the store tells its time
    origin.put("c/new", noise(9 * MiB))
    fs.cat_file("c/new")
    leave()
    assert quiet(caplog) == []


@pytest.mark.parametrize("harm", [lambda data: data[:-100], lambda data: b"x" + data[1:]])
def test_an_object_that_is_not_what_it_should_be_is_a_miss(put_there, node, bucket, harm):
    data = put_there(n=4, shared_cache=bucket)
    with place_at(bucket) as place:
        for name in place.listed(""):
            file = place.open(name)
            place._put(name, harm(file.part(0, file.size)))
    read_all(node("b", shared_cache=bucket), data)


NAME = lease_of("0a" * 16, 5)


def test_a_lease_is_created_by_one_node_only_and_expires(bucket, monkeypatch):
    with place_at(bucket) as one, place_at(bucket) as other:
        ours, theirs = Leases(one, str), Leases(other, str)
        assert ours.take([NAME])
        assert not theirs.take([NAME])
        monkeypatch.setattr(leases, "EXPIRES_S", 0.0)
        assert theirs.take([NAME])
        theirs.release(NAME)
        monkeypatch.undo()
        assert ours.take([NAME])


@pytest.mark.parametrize("where", ["cloud", "s3"])
def test_a_misspelled_bucket_is_named_once(filled, node, request, caplog, where):
    data = filled(n=4)
    protocol = request.getfixturevalue(where).protocol
    read_all(node("a", shared_cache=f"{protocol}://no-such-bucket/shared"), data)
    leave()
    [message] = quiet(caplog)
    assert "no-such-bucket" in message


def test_a_url_that_no_package_knows_is_named_with_its_option(own_cache):
    with pytest.raises(
        ValueError, match="shared_cache='foo://x': no installed package knows the protocol foo://"
    ):
        fsspec.filesystem("cachedfs", target_protocol="gs", shared_cache="foo://x")


@pytest.fixture
def may_take(monkeypatch):
    """No lease is taken before this event is set."""
    event, take = threading.Event(), Leases.take
    monkeypatch.setattr(Leases, "take", lambda self, names: event.wait() and take(self, names))
    yield event
    event.set()


def test_before_its_lease_a_read_gets_a_megabyte(origin, node, bucket, monkeypatch, may_take):
    data, fs = origin.put("b/k", noise(8 * MiB)), node("a", shared_cache=bucket, read_ahead=0)
    fs.ls("b")
    monkeypatch.setattr(shared_reads, "LEASE_S", 3600.0)
    thread, got = in_thread(lambda: fs.cat_file("b/k"))
    until(lambda: fs.stats().bytes_fetched >= MiB)

    async def turn():
        for _ in range(1000):  # without a limit, a piece comes in each few turns of the loop
            await asyncio.sleep(0)

    fs._objects.engine.run(turn())
    assert fs.stats().bytes_fetched == MiB
    may_take.set()
    thread.join(60)
    assert got == [data]
    assert asked(origin) == [("list", "b"), ("read", "b/k")]
