"""Objects that change between any two steps of a read, and writes that other readers see at once."""

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr

from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.core import engines
from cachedfs.core.download import Download
from cachedfs.core.engine import Engine
from cachedfs.core.objects import Objects
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import read_methods
from cachedfs.origins.retry import RetryAttempts, RetryPolicy
from cachedfs.sim import DriveServer, GCSServer
from tests.fakes import FakeOrigin
from tests.libraries.data import consolidating
from tests.support import KiB, files_below, noise, until

BLOCK = 64 * KiB
SMALL = {"block_size": BLOCK, "request_size": 2 * BLOCK}  # so that a small read takes many requests
OLD = noise(4 * BLOCK - 100, seed=1)


class Steps:
    """Counts the steps of reads: requests, answers, pieces of bodies, stored metadata. Runs an action before the n-th."""

    def __init__(self, monkeypatch):
        self.done = 0
        self._plan = {}
        before = (
            (Engine, "_count_request"),
            (Download, "feed"),
            (Objects, "learn"),
            (MetadataStore, "keep_listings"),
        )
        for owner, name in before:
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))
        monkeypatch.setattr(FakeOrigin, "_info", self._after(FakeOrigin._info))

    def plan(self, actions):
        """From now on, run `actions[n]` before step n; return the actions of the last plan that were not run."""
        left = [self._plan[n] for n in sorted(self._plan)]
        self.done, self._plan = 0, dict(actions)
        return left

    def _before(self, original):
        def step(*args, **kwargs):
            self._step()
            return original(*args, **kwargs)

        return step

    def _after(self, original):
        def step(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            finally:
                self._step()

        return step

    def _step(self):
        plan, n = self._plan, self.done + 1
        self.done = n
        if act := plan.get(n):
            act()
            del plan[n]

    def settle(self):
        """Wait for the action of a step that was reached, perhaps in the background."""
        until(lambda: all(n > self.done for n in self._plan))


@dataclasses.dataclass
class Fake:
    """The interface of `support.Machine`, for an origin in memory."""

    origin: FakeOrigin
    protocol = "gs"

    def path(self, key):
        return f"b/{key}"

    def put(self, key, data):
        return self.origin.put(self.path(key), data)

    def delete(self, key):
        self.origin.delete(self.path(key))


@pytest.fixture
def fake(own_cache, monkeypatch):
    origin = FakeOrigin()
    origin.piece_size = BLOCK + 1000
    origin.install(monkeypatch)
    monkeypatch.setattr(read_methods, "WINDOW", 2 * BLOCK)  # so that a copy takes several windows
    return Fake(origin)


@pytest.fixture
def steps(monkeypatch):
    return Steps(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """An empty folder for what a test copies."""
    (tmp_path / "got").mkdir()
    return tmp_path / "got"


def cached(place, **options):
    return fsspec.filesystem("cachedfs", target_protocol=place.protocol, **SMALL, **options)


# What an object is changed to; None: it is deleted.
CHANGES = {
    "replaced": noise(len(OLD), seed=3),
    "grown": noise(7 * BLOCK + 5, seed=4),
    "shrunk": noise(BLOCK + 7, seed=5),
    "deleted": None,
}


def change(place, key, how):
    if how == "deleted":
        place.delete(key)
    else:
        place.put(key, CHANGES[how])


def _get(fs, path, folder):
    target = folder / "got"
    target.unlink(missing_ok=True)
    try:
        fs.get_file(path, target)
    except FileNotFoundError:
        assert not list(folder.iterdir()), "half a file was left"
        raise
    return target.read_bytes()


def _in_pieces(fs, path, folder):
    with fs.open(path) as file:
        return b"".join(iter(lambda: file.read(50_000), b""))


PART = slice(BLOCK - 10, 3 * BLOCK + 10)
# What is read of an object, and how.
ONE_CALL = {
    "whole": (slice(None), lambda fs, path, folder: fs.cat_file(path)),
    "range": (PART, lambda fs, path, folder: fs.cat_file(path, PART.start, PART.stop)),
    "suffix": (slice(-BLOCK - 200, None), lambda fs, path, folder: fs.cat_file(path, -BLOCK - 200)),
    "get": (slice(None), _get),
}
READS = ONE_CALL | {"handle": (slice(None), _in_pieces)}


@pytest.mark.parametrize(
    ("at", "read", "is_old"),
    [
        *(("fake", read, True) for read in READS),
        ("fake", "whole", False),
        ("fake", "handle", False),
        ("s3", "handle", False),
    ],
)
def test_a_read_of_a_changing_object_returns_one_version(request, steps, clock, folder, at, read, is_old):
    """One object changes before step 1 of its read, another one before step 2, and so on."""
    place = request.getfixturevalue(at)
    fs, (part, act) = cached(place), READS[read]
    for how, new in CHANGES.items():
        for n in itertools.count(1):
            key, path, found = f"{how} {n}", place.path(f"{how} {n}"), None
            place.put(key, OLD)
            if is_old:
                fs.cat_file(path, 0, BLOCK)
                fs._objects.engine.drain(120)
                clock(61)
            steps.plan({n: lambda key=key, how=how: change(place, key, how)})
            try:
                found = act(fs, path, folder)
            except ObjectChanged:
                assert read == "handle"
            except FileNotFoundError:
                assert new is None
            else:
                assert found in [version[part] for version in (OLD, new) if version is not None]
            steps.settle()
            if steps.done < n:
                assert found == OLD[part]
                break
            clock(61)
            for _ in range(2):  # the second time without a request
                asked = fs.stats().requests
                with contextlib.nullcontext() if new is not None else pytest.raises(FileNotFoundError):
                    assert fs.cat_file(path) == new
            assert fs.stats().requests == asked
        assert n > 2


@pytest.mark.parametrize("read", ONE_CALL)
def test_a_read_of_an_object_replaced_twice_is_no_error(fake, steps, folder, read):
    fs, (part, act) = cached(fake), ONE_CALL[read]
    for n in range(1, 12):
        path = fake.path(str(n))
        fake.put(str(n), OLD)
        fs.info(path)
        change(fake, str(n), "grown")
        steps.plan({n: lambda n=n: change(fake, str(n), "replaced")})
        assert act(fs, path, folder) in [each[part] for each in (OLD, CHANGES["grown"], CHANGES["replaced"])]


def test_get_into_an_open_file_restarts_at_its_start_position(fake, steps):
    fs = cached(fake)
    for n in range(1, 10):
        fake.put(str(n), OLD)
        fs.info(fake.path(str(n)))
        target = io.BytesIO(b"before")
        target.seek(6)
        steps.plan({n: lambda n=n: change(fake, str(n), "shrunk")})
        fs.get_file(fake.path(str(n)), target)
        assert target.getvalue() in (b"before" + OLD, b"before" + CHANGES["shrunk"])


# Own writes.
def _ls(fs, path):
    return [info["size"] for info in fs.ls(fs._parent(path)) if info["name"] == path]


def _find(fs, path):
    return [info["size"] for name, info in fs.find(fs._parent(path), detail=True).items() if name == path]


ASKS = {
    "cat_file": lambda fs, path: [len(fs.cat_file(path))],
    "info": lambda fs, path: [fs.info(path)["size"]],
    "open": lambda fs, path: [len(fs.open(path).read())],
    "ls": _ls,
    "find": _find,
}


@pytest.mark.parametrize(("ask", "existed"), [*((ask, True) for ask in ASKS), ("cat_file", False)])
def test_a_write_that_overtakes_a_lookup_is_seen_after_it(fake, steps, ask, existed):
    fs = cached(fake)
    cache, identity = fs._objects.engine.cache, fs._objects.identity
    most = 7
    for order in itertools.combinations_with_replacement(range(1, most + 1), 3):
        folder = "-".join(map(str, order))
        path = fake.path(f"{folder}/a")
        fake.put(f"{folder}/b", b"")
        if existed:
            fake.put(f"{folder}/a", b"old")
        counter = functools.partial(cache.metadata.changed, identity, [path])
        write = [
            counter,
            functools.partial(fake.put, f"{folder}/a", b"newer"),
            counter,
        ]  # as Reader.write does
        plan = {}
        for n, act in zip(order, write, strict=True):
            plan.setdefault(n, []).append(act)
        steps.plan({n: lambda acts=acts: [act() for act in acts] for n, acts in plan.items()})
        with contextlib.suppress(FileNotFoundError):
            assert ASKS[ask](fs, path) in ([], [3], [5])
        assert steps.done < most, "some steps were never tried"
        for acts in steps.plan({}):
            acts()
        assert ASKS[ask](fs, path) == [5], order


WRITES = {  # with the sizes of what is then there, and the number of copies
    "pipe_file": (lambda fs, at, local: fs.pipe_file(at("a"), b"1"), [{"a": 1}, 0]),
    "pipe": (lambda fs, at, local: fs.pipe({at("a"): b"22", at("b"): b"2"}), [{"a": 2, "b": 1}, 0]),
    "open": (lambda fs, at, local: _write_file(fs, at("a"), b"333"), [{"a": 3, "b": 1}, 0]),
    "put_file": (lambda fs, at, local: fs.put_file(local, at("a")), [{"a": 4, "b": 1}, 0]),
    "cp_file": (lambda fs, at, local: fs.cp_file(at("a"), at("c")), [{"a": 4, "b": 1, "c": 4}, 0]),
    "mv": (lambda fs, at, local: fs.mv(at("c"), at("d")), [{"a": 4, "b": 1, "d": 4}, 0]),
    "touch": (lambda fs, at, local: fs.touch(at("d")), [{"a": 4, "b": 1, "d": 0}, 0]),
    "rm_file": (lambda fs, at, local: fs.rm_file(at("d")), [{"a": 4, "b": 1}, 0]),
    "transaction": (lambda fs, at, local: _in_transaction(fs, at("b"), b"7777777"), [{"a": 4, "b": 7}, 0]),
    "copy of a tree": (
        lambda fs, at, local: fs.cp(at(""), at("").rstrip("/") + "-copy", recursive=True),
        [{"a": 4, "b": 7}, 2],
    ),
    "rm": (lambda fs, at, local: fs.rm(at("").rstrip("/"), recursive=True), [{}, 2]),
}


def _write_file(fs, path, data):
    with fs.open(path, "wb") as file:
        file.write(data)


def _in_transaction(fs, path, data):
    with fs.transaction:
        _write_file(fs, path, data)


LOOK = """
    import fsspec, json, sys
    fs = fsspec.filesystem(sys.argv[1], **json.loads(sys.argv[2]))
    for line in sys.stdin:
        top = line.strip()
        found = {}
        for name in "abcd":
            path = f"{top}/x/{name}"
            try:
                found[name] = len(fs.cat_file(path))
                assert fs.info(path)["size"] == found[name] == len(fs.open(path).read())
            except FileNotFoundError:
                pass
        listed = {info["name"][-1]: info["size"] for info in fs.ls(f"{top}/x")} if fs.isdir(f"{top}/x") else {}
        assert listed == found, (listed, found)
        copied = [name for name in fs.find(top) if "/x-copy/" in name]
        print(json.dumps([found, len(copied)]), flush=True)
"""


@pytest.mark.parametrize(
    ("machine", "writes", "looks"), [("cloud", "cachedfs", "cgs"), ("drive", "cdrive", "cachedfs")]
)
def test_every_write_is_seen_at_once_by_another_process(request, tmp_path, machine, writes, looks):
    machine = request.getfixturevalue(machine)
    options = {
        name: {"target_protocol": machine.protocol} if name == "cachedfs" else {} for name in (writes, looks)
    }
    fs = fsspec.filesystem(writes, **options[writes])
    local = tmp_path / "local"
    local.write_bytes(b"4444")
    top = machine.path("top")

    def now():
        found = {name[-1]: len(fs.cat_file(name)) for name in fs.find(f"{top}/x")}
        return [found, sum("/x-copy/" in name for name in fs.find(top))]

    with machine.talking(LOOK, looks, json.dumps(options[looks])) as look:
        assert json.loads(look(top)) == [{}, 0]
        for name, (write, expected) in WRITES.items():
            write(fs, lambda key: f"{top}/x/{key}", local)
            assert json.loads(look(top)) == now() == expected, name


# Zarr returns fill values for missing chunks.
@pytest.mark.parametrize(("at", "is_sharded"), [("fake", False), ("cloud", True)])
def test_zarr_returns_no_fill_values_for_chunks_that_are_replaced(
    request, steps, clock, tmp_path, at, is_sharded
):
    place = request.getfixturevalue(at)
    for value in (1, 2):
        zarr.create_array(
            tmp_path / str(value),
            shape=(6,),
            chunks=(1,) if is_sharded else (2,),
            shards=(2,) if is_sharded else None,
            dtype="i4",
            fill_value=0,
            compressors=None,
        )[:] = value

    def put(n, value):
        for name, content in files_below(tmp_path / str(value)).items():
            place.put(f"{n}/{name}", content)

    for state in (lambda: None, lambda: clock(61)):
        for n in itertools.count(1):
            name = f"{id(state)}-{n}"
            put(name, 1)
            array = zarr.open_array(f"cachedfs::{place.protocol}://{place.path(name)}", mode="r")
            array[0]
            state()
            steps.plan({n: lambda name=name: put(name, 2)})
            found = array[:]
            assert set(found.tolist()) <= {1, 2}, n
            steps.settle()
            if steps.done < n:
                break
            clock(61)
            assert array[:].tolist() == [2] * 6
        assert n > 5


# An unreachable origin.
def test_many_files_are_read_while_the_origin_is_unreachable(own_cache, clock, caplog, monkeypatch):
    waited, next_wait_s = collections.Counter(), RetryAttempts.next_wait_s

    def without_waiting(tries, trouble):
        if wait_s := next_wait_s(tries, trouble):
            waited[tries] += wait_s
            clock_s = tries._policy.clock
            tries._policy = dataclasses.replace(tries._policy, clock=lambda: clock_s() + wait_s)
        return wait_s and 0.0

    monkeypatch.setattr(RetryAttempts, "next_wait_s", without_waiting)
    objects = {f"far/{i:03}": noise(100, i) for i in range(300)}
    with GCSServer(profile="off") as server:
        server.make_bucket("far")
        for path, data in objects.items():
            server.put("far", path[4:], data)
        fs = fsspec.filesystem(
            "cachedfs", target_protocol="gs", gs={"token": "anon", "endpoint_url": server.endpoint_url}
        )
        assert fs.cat(list(objects)) == objects
        fs._objects.engine.drain(120)
    clock(61)
    before = fs.stats().requests
    with caplog.at_level(logging.WARNING, "cachedfs"):
        assert fs.cat(list(objects)) == objects
    # All requests in flight fail after six tries of at most 5 s; the others are not sent.
    assert 0 < max(waited.values()) < 5
    assert 0 < fs.stats().requests - before <= 32 * 6
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("cloud_name", "zarr_format", "is_consolidated"),
    [("gs", 3, True), ("gs", 2, False), ("gs", 3, False), ("drive", 3, False)],
)
@consolidating
def test_a_cached_zarr_store_opens_while_the_origin_is_unreachable(
    cloud_name, zarr_format, is_consolidated, tmp_path, clock, monkeypatch
):
    at_once = functools.partial(RetryPolicy, connect_s=0.0)
    monkeypatch.setattr("cachedfs.origins.fsspec_origin.RetryPolicy", at_once)
    monkeypatch.setattr("cachedfs.origins.drive.connection.RetryPolicy", at_once)
    data, local = xr.Dataset({"t": (("x",), np.arange(20.0))}).chunk(x=5), tmp_path / "s"
    data.to_zarr(local, zarr_format=zarr_format, consolidated=is_consolidated)
    url = {"gs": "cachedfs::gs://far/s", "drive": "cachedfs::drive://My Drive/s"}[cloud_name]
    with {"gs": GCSServer, "drive": DriveServer}[cloud_name](profile="off") as server:
        bucket = ("far",) if cloud_name == "gs" else ()
        for name, content in files_below(local).items():
            server.put(*bucket, f"s/{name}", content)
        origin = {"token": "anon", "endpoint_url": server.endpoint_url}

        def read(**more):
            storage = {cloud_name: origin, "cachedfs": more}
            group = zarr.open_group(url, mode="r", use_consolidated=is_consolidated, storage_options=storage)
            opened = xr.open_zarr(url, consolidated=is_consolidated, storage_options=storage)
            return group["t"][:].tolist(), opened["t"].values.tolist()

        expected = (data["t"].values.tolist(),) * 2
        assert read() == expected
        engines._close_all()
    clock(61)
    assert read() == expected
    assert read(offline=True) == expected
